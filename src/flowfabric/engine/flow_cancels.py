"""Cancelling flows and their members.

The flow is closed and its members are marked in one transaction: from then on nobody
can claim them. A small flow's members are cancelled in the same transaction, those of
a large one batch by batch, by whoever waits for it or by the dispatcher. A member
that cannot be cancelled holds up no other: it stays queued and is tried again.
"""

import asyncio
import time
from collections.abc import Sequence

from flowfabric.core.checks import check_int, check_reason
from flowfabric.core.executions import CancelRequest, Timing, decide_cancel
from flowfabric.core.flow_endings import (
    FLOW_CANCELLED,
    SHORT_JOIN,
    CancelWait,
    NoWait,
    all_but,
    cancelled_flow,
    check_cancellation_policy,
    check_grace,
    flow_cancel_event,
    postponed,
    reconciled,
    repeats_cancel,
    wait_ms,
)
from flowfabric.core.flow_joins import SIBLING_REASONS
from flowfabric.core.flow_records import CancellationPolicy, EdgeGroup, FlowRecord, PendingCancel
from flowfabric.core.ids import ExecutionId, FlowId, make_execution_id, uuid_of
from flowfabric.core.limits import BATCH_MAX, CANCEL_BATCH, MEMBERS_SHOWN_MAX
from flowfabric.core.records import Execution
from flowfabric.core.results import (
    CancelFlowResult,
    CancelHeaderResult,
    CancellationScheduled,
    Cancelled,
    FlowAlreadyEnded,
    FlowCancelled,
    SiblingCancelAction,
)
from flowfabric.core.states import LifecyclePhase, PublicState
from flowfabric.core.transitions import Changes, Decision, Subject
from flowfabric.engine.flows import TROUBLE, Flows
from flowfabric.engine.operators import Swept
from flowfabric.engine.unit import MEMBER_CANCEL_TOPIC, Ask
from flowfabric.errors import OperationTimeout
from flowfabric.store.base import Key, Reader, Row, Transaction

BUSY_PAUSE_S = 0.05
"""How long a waiting caller leaves members alone that somebody else is cancelling."""
DRAIN_ROUNDS_MAX = 100_000


class FlowOperators(Flows):
    async def cancel_flow(
        self,
        flow_id: str,
        *,
        reason: str = "",
        cancellation_policy: str = CancellationPolicy.CANCEL_ALL,
        wait: CancelWait = NoWait(),  # noqa: B008
    ) -> CancelFlowResult:
        """Close a flow and cancel the members its policy names.

        A cancelled flow can be cancelled further: `cancel_all` after `cancel_pending` takes
        the rest along. Any other repeat answers with what was decided and cancelled before.
        With a `wait`, returns once those members have ended, or raises `OperationTimeout`.
        """
        budget_ms = wait_ms(wait)
        header = await self.cancel_flow_header(
            flow_id, reason=reason, cancellation_policy=cancellation_policy
        )
        asked = self.check_flow_id(flow_id)
        if isinstance(header, FlowAlreadyEnded):
            header = FlowCancelled(
                cancellation_policy=header.stored_cancellation_policy
                or check_cancellation_policy(cancellation_policy),
                member_execution_ids=header.member_execution_ids,
                member_count=header.member_count,
            )
        if budget_ms is None:
            left = await self._left_to_cancel(asked, 1)
            return _scheduled(header) if left else header
        return await self._drain(asked, header, budget_ms)

    async def cancel_flow_header(
        self,
        flow_id: str,
        *,
        reason: str = "",
        cancellation_policy: str = CancellationPolicy.CANCEL_ALL,
        grace_ms: int | None = None,
    ) -> CancelHeaderResult:
        """Close a flow and queue its members' cancellation, without waiting for it."""
        check_grace(grace_ms)
        policy = check_cancellation_policy(cancellation_policy)
        why = check_reason(reason)
        asked = self.check_flow_id(flow_id)

        async def body(tx: Transaction, at_once_max: int = CANCEL_BATCH) -> CancelHeaderResult:
            flow = await self.lock_flow(tx, asked)
            if repeats_cancel(flow, policy):
                return await self._already_ended(tx, flow)
            now_ms = await tx.now_ms()
            closed = cancelled_flow(flow, policy, why, now_ms)
            await self._give_up_short_joins(tx, closed)
            members = await self._cancel_members(tx, closed, at_once_max)
            event = flow_cancel_event(closed, len(members), now_ms)
            closed = self.settled_flow(closed, now_ms)
            await tx.save(Changes(updates=(closed,), events=(event,)))
            return FlowCancelled(
                cancellation_policy=policy,
                member_execution_ids=tuple(members[:MEMBERS_SHOWN_MAX]),
                member_count=len(members),
            )

        try:
            return await self.store.transact(body)
        except TROUBLE:
            # Perhaps with one member alone: the flow is closed, and each has its own turn.
            return await self.store.transact(lambda tx: body(tx, at_once_max=0))

    async def _already_ended(self, tx: Transaction, flow: FlowRecord) -> FlowAlreadyEnded:
        satisfied, impossible = SIBLING_REASONS
        rows = await tx.select(
            "cancelled_members",
            flow_id=flow.flow_id,
            cancelled_at_ms=flow.cancelled_at_ms,
            satisfied=satisfied,
            impossible=impossible,
            short_join=SHORT_JOIN,
            limit=MEMBERS_SHOWN_MAX,
        )
        return FlowAlreadyEnded(
            stored_cancellation_policy=flow.cancellation_policy,
            stored_cancel_reason=flow.cancel_reason,
            member_execution_ids=tuple(_member_ids(flow, rows)),
            member_count=int(str(rows[0]["member_count"])) if rows else 0,
        )

    async def _give_up_short_joins(self, tx: Transaction, flow: FlowRecord) -> None:
        """Queue members whose quorum lacks edges: nobody can add some to a closed flow."""
        if await tx.select(
            "enqueue_short_joins",
            flow_id=flow.flow_id,
            reason=SHORT_JOIN,
            now_ms=await tx.now_ms(),
        ):
            tx.hint(MEMBER_CANCEL_TOPIC)

    async def _cancel_members(
        self, tx: Transaction, flow: FlowRecord, at_once_max: int
    ) -> list[ExecutionId]:
        """Cancel the members the policy names, or mark them for it when they are many."""
        if flow.cancellation_policy is CancellationPolicy.FLOW_ONLY:
            return []
        only_waiting = flow.cancellation_policy is CancellationPolicy.CANCEL_PENDING
        rows = await tx.select(
            "cancellable_members",
            flow_id=flow.flow_id,
            only_waiting=only_waiting,
            limit=at_once_max + 1,
        )
        reason = flow.cancel_reason or FLOW_CANCELLED
        if len(rows) <= at_once_max:
            asks = [_cancel_ask(each, reason, only_waiting) for each in _member_ids(flow, rows)]
            outcomes = await self.decide_in(tx, asks, [0.0] * len(asks))
            return [
                each.execution_id
                for each in outcomes
                if isinstance(each, Cancelled) and each.public_state is PublicState.CANCELLED
            ]
        tx.hint(MEMBER_CANCEL_TOPIC)
        marked = await tx.select(
            "request_cancel",
            flow_id=flow.flow_id,
            only_waiting=only_waiting,
            reason=reason,
            now_ms=await tx.now_ms(),
        )
        return sorted(_member_ids(flow, marked))

    # Members

    async def cancel_pending_members(
        self, *, flow_id: str | None = None, limit: int = CANCEL_BATCH
    ) -> Swept:
        """Cancel members that a flow's cancellation or a join's policy has given up.

        When a batch fails, each of its members has a transaction of its own.
        """
        check_int("limit", limit, 1, BATCH_MAX)
        asked = None if flow_id is None else self.check_flow_id(flow_id)

        async def body(tx: Transaction) -> Swept:
            rows = await _due(tx, asked, limit)
            await self._cancel_queued(tx, rows)
            return Swept(acted=len(rows), full=len(rows) == limit)

        try:
            return await self.store.transact(body)
        except TROUBLE:
            return await self._cancel_one_by_one(asked, limit)

    async def _cancel_queued(self, tx: Transaction, rows: Sequence[PendingCancel]) -> None:
        """Members that have ended meanwhile, or are gone, need nothing more."""
        if rows:
            asks = [_cancel_ask(row.execution_id, row.reason, row.only_waiting) for row in rows]
            await self.decide_in(tx, asks, [0.0] * len(asks))
            await tx.save(Changes(deletes=tuple(rows)))

    async def _cancel_one_by_one(self, flow_id: FlowId | None, limit: int) -> Swept:
        async def queued(tx: Transaction) -> Sequence[PendingCancel]:
            return await _due(tx, flow_id, limit)

        rows = await self.store.transact(queued)
        failures = []
        for row in rows:
            try:
                await self._cancel_alone(row)
            except TROUBLE as error:
                failures.append(f"{row.execution_id} was not cancelled: {error}")
                await self._postpone(row)
        return Swept(
            acted=len(rows) - len(failures),
            full=len(rows) == limit,
            failures=tuple(failures),
        )

    async def _cancel_alone(self, row: PendingCancel) -> None:
        async def body(tx: Transaction) -> None:
            await self._cancel_queued(tx, await _still_queued(tx, row))

        await self.store.transact(body)

    async def _postpone(self, row: PendingCancel) -> None:
        async def body(tx: Transaction) -> None:
            found = await _still_queued(tx, row)
            now_ms = await tx.now_ms()
            await tx.save(Changes(updates=tuple(postponed(each, now_ms) for each in found)))

        await self.store.transact(body)

    async def ack_cancel_member(self, flow_id: str, execution_id: str) -> None:
        """Take a member that has ended off the queue of those to be cancelled.

        One that is not there is fine; one that has not ended stays, for nobody else would
        cancel it.
        """
        asked = self.check_flow_id(flow_id)
        member_id = self.check_execution_id(execution_id)

        async def body(tx: Transaction) -> None:
            key: Key = (self.flow_key(asked)[0], member_id)
            row = (await tx.lock(PendingCancel, [key])).get(key)
            if row is None or row.flow_id != asked:
                return
            member = (await tx.get(Execution, [key])).get(key)
            if member is None or member.lifecycle_phase is LifecyclePhase.TERMINAL:
                await tx.save(Changes(deletes=(row,)))

        await self.store.transact(body)

    async def reconcile_sibling_cancel_group(
        self, flow_id: str, downstream_execution_id: str
    ) -> SiblingCancelAction:
        """Take upstreams of a join off the queue of those to be cancelled, if they need not be.

        The dispatcher does so by itself; this is for whoever wants to be sure.
        """
        asked = self.check_flow_id(flow_id)
        downstream_id = self.check_member_id(
            asked, downstream_execution_id, "downstream_execution_id"
        )
        key: Key = (self.flow_key(asked)[0], downstream_id)

        async def body(tx: Transaction) -> SiblingCancelAction:
            await self.lock_flow(tx, asked)
            found = await tx.select_records(
                PendingCancel,
                "list_siblings",
                flow_id=asked,
                downstream_id=uuid_of(downstream_id),
                limit=BATCH_MAX,
            )
            keys: list[Key] = [(each.partition_key, each.execution_id) for each in found]
            rows = await tx.lock(PendingCancel, keys)
            siblings = (await tx.get(Execution, keys)).values()
            unended = [e for e in siblings if e.lifecycle_phase is not LifecyclePhase.TERMINAL]
            group = (await tx.get(EdgeGroup, [key])).get(key)
            action = reconciled(group, len(rows), len(unended))
            if action is not SiblingCancelAction.NO_OP:
                await tx.save(Changes(deletes=tuple(rows.values())))
            return action

        return await self.store.transact(body)

    # Waiting

    async def _drain(
        self, flow_id: FlowId, header: FlowCancelled, budget_ms: int
    ) -> CancelFlowResult:
        """Cancel what is queued until nothing is left, within the caller's time."""
        deadline_s = time.monotonic() + budget_ms / 1_000
        await self._try_again(flow_id)
        for _ in range(DRAIN_ROUNDS_MAX):
            swept = await self.cancel_pending_members(flow_id=flow_id)
            if swept.acted == 0:
                left = await self._left_to_cancel(flow_id, MEMBERS_SHOWN_MAX)
                if all(left.values()):
                    return all_but(header, tuple(sorted(left)))
            if time.monotonic() >= deadline_s:
                break
            if swept.acted == 0:
                await asyncio.sleep(BUSY_PAUSE_S)
        raise OperationTimeout("cancel_flow", budget_ms)

    async def _try_again(self, flow_id: FlowId) -> None:
        async def body(tx: Transaction) -> None:
            await tx.select("retry_cancels", flow_id=flow_id)

        await self.store.transact(body)

    async def _left_to_cancel(self, flow_id: FlowId, limit: int) -> dict[ExecutionId, int]:
        """Members still queued, and how often cancelling each has failed."""
        partition_key, _ = self.flow_key(flow_id)

        async def body(reader: Reader) -> Sequence[Row]:
            return await reader.select("list_cancels", flow_id=flow_id, limit=limit)

        return {
            make_execution_id(partition_key, str(row["execution_id"])): int(str(row["attempts"]))
            for row in await self.store.read(body)
        }


async def _due(tx: Transaction, flow_id: FlowId | None, limit: int) -> Sequence[PendingCancel]:
    return await tx.select_records(
        PendingCancel, "take_cancels", flow_id=flow_id, now_ms=await tx.now_ms(), limit=limit
    )


async def _still_queued(tx: Transaction, row: PendingCancel) -> list[PendingCancel]:
    return list((await tx.lock(PendingCancel, [(row.partition_key, row.execution_id)])).values())


def _cancel_ask(execution_id: ExecutionId, reason: str, only_waiting: bool) -> Ask[Cancelled]:
    def decide(subject: Subject, timing: Timing) -> Decision[Cancelled]:
        execution = subject.execution
        held = execution.lifecycle_phase in (LifecyclePhase.ACTIVE, LifecyclePhase.SUSPENDED)
        if only_waiting and held:
            return Decision(
                answer=Cancelled(execution_id=execution_id, public_state=execution.public_state)
            )
        return decide_cancel(subject, CancelRequest(reason=reason), timing)

    return Ask(execution_id, decide)


def _member_ids(flow: FlowRecord, rows: Sequence[Row]) -> list[ExecutionId]:
    return [make_execution_id(flow.partition_key, str(row["execution_id"])) for row in rows]


def _scheduled(header: FlowCancelled) -> CancellationScheduled:
    return CancellationScheduled(
        cancellation_policy=header.cancellation_policy,
        member_execution_ids=header.member_execution_ids,
        member_count=header.member_count,
    )
