"""Cancelling and replaying: flows, their members, and everything a filter matches.

Cancelling closes the flow and marks its members in one transaction: from then on no worker
can claim them. A small flow's members are cancelled in the same transaction, those of
a large one batch by batch, by the caller that waits for it or by the dispatcher. A member
that cannot be cancelled delays no other: it stays queued and is tried again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import bounds, flow_endings, results
from flowfabric.core.checks import check_int, check_list, check_optional_text, check_reason
from flowfabric.core.decisions import Changes, Subject, Timing, combine
from flowfabric.core.executions import CancelRequest, decide_cancel, decide_cancel_waiting
from flowfabric.core.flow_joins import SIBLING_REASONS
from flowfabric.core.flow_records import (
    CancellationPolicy,
    CompletionDispatch,
    Edge,
    EdgeState,
    FlowRecord,
    JoinRecord,
    PendingCancel,
)
from flowfabric.core.ids import ExecutionId, FlowId, partition_of, uuid_of
from flowfabric.core.records import Execution
from flowfabric.core.states import TERMINAL_STATES, LifecyclePhase, PublicState
from flowfabric.engine import reads, shell, topics
from flowfabric.engine.flows import TROUBLE, FlowGroup, endings_of, forget, forgotten, inputs_of
from flowfabric.engine.reads import ExecutionFilter, check_filter, select_matching
from flowfabric.engine.shell import Swept
from flowfabric.store.base import Key, Transaction

BUSY_PAUSE_S = 0.05
"""How long a waiting caller leaves members alone that another process is cancelling."""
DRAIN_ROUNDS_MAX = 100_000
FLOWS_PER_TRIM = 50


class FlowOperators(FlowGroup):
    async def cancel_flow(
        self,
        flow_id: str,
        *,
        reason: str = "",
        cancellation_policy: str = CancellationPolicy.CANCEL_ALL,
        wait: flow_endings.CancelWait = flow_endings.NoWait(),  # noqa: B008
    ) -> results.CancelFlowResult:
        """Close a flow and cancel the members its policy names.

        A cancelled flow can be cancelled further: `cancel_all` after `cancel_pending` cancels the
        rest. Any other repeat answers with what was decided and cancelled before. With a `wait`,
        returns once those members have ended, or raises `OperationTimeout`.
        """
        budget_ms = flow_endings.wait_ms(wait)
        header = await self.cancel_flow_header(
            flow_id, reason=reason, cancellation_policy=cancellation_policy
        )
        flow_id = self.check_flow_id(flow_id)
        if isinstance(header, results.FlowAlreadyEnded):
            header = results.FlowCancelled(
                cancellation_policy=header.stored_cancellation_policy
                or flow_endings.check_cancellation_policy(cancellation_policy),
                member_execution_ids=header.member_execution_ids,
                member_count=header.member_count,
            )
        if budget_ms is None:
            left = await self._left_to_cancel(flow_id, 1)
            return results.CancellationScheduled(**structs.asdict(header)) if left else header
        return await self._drain(flow_id, header, budget_ms)

    async def cancel_flow_header(
        self,
        flow_id: str,
        *,
        reason: str = "",
        cancellation_policy: str = CancellationPolicy.CANCEL_ALL,
        grace_ms: int | None = None,
    ) -> results.CancelHeaderResult:
        """Close a flow and queue its members' cancellation, without waiting for it."""
        flow_endings.check_grace(grace_ms)
        policy = flow_endings.check_cancellation_policy(cancellation_policy)
        why = check_reason(reason)
        flow_id = self.check_flow_id(flow_id)

        async def body(
            tx: Transaction, at_once_max: int = bounds.CANCEL_BATCH
        ) -> results.CancelHeaderResult:
            flow = await self.lock_flow(tx, flow_id)
            if flow_endings.repeats_cancel(flow, policy):
                return await self._already_ended(tx, flow)
            now_ms = await tx.now_ms()
            closed = flow_endings.cancelled_flow(flow, policy, why, now_ms)
            await self._give_up_short_joins(tx, closed)
            members = await self._cancel_members(tx, closed, at_once_max)
            event = flow_endings.flow_cancel_event(closed, len(members), now_ms)
            closed = self.with_derived_state(closed, now_ms)
            await tx.save(Changes(updates=(closed,), events=(event,)))
            return results.FlowCancelled(
                cancellation_policy=policy,
                member_execution_ids=tuple(members[: bounds.MEMBERS_SHOWN_MAX]),
                member_count=len(members),
            )

        try:
            return await self.store.transact(body)
        except TROUBLE:
            # One bad member may have failed the batch. Close the flow now, and let each member be
            # cancelled in its own transaction.
            return await self.store.transact(lambda tx: body(tx, at_once_max=0))

    async def _already_ended(self, tx: Transaction, flow: FlowRecord) -> results.FlowAlreadyEnded:
        satisfied, impossible = SIBLING_REASONS
        members = await tx.select_as(
            CancelledMember,
            "cancelled_members",
            flow_id=flow.flow_id,
            cancelled_at_ms=flow.cancelled_at_ms,
            satisfied=satisfied,
            impossible=impossible,
            short_join=flow_endings.SHORT_JOIN,
            limit=bounds.MEMBERS_SHOWN_MAX,
        )
        return results.FlowAlreadyEnded(
            stored_cancellation_policy=flow.cancellation_policy,
            stored_cancel_reason=flow.cancel_reason,
            member_execution_ids=tuple(each.execution_id for each in members),
            member_count=members[0].member_count if members else 0,
        )

    async def _give_up_short_joins(self, tx: Transaction, flow: FlowRecord) -> None:
        """Queue members whose quorum lacks edges: none can be added to a closed flow."""
        if await tx.select(
            "enqueue_cancel_short_joins",
            flow_id=flow.flow_id,
            reason=flow_endings.SHORT_JOIN,
            now_ms=await tx.now_ms(),
        ):
            tx.hint(topics.MEMBER_CANCEL_TOPIC)

    async def _cancel_members(
        self, tx: Transaction, flow: FlowRecord, at_once_max: int
    ) -> list[ExecutionId]:
        """Cancel the members the policy names, or mark them for it when they are many."""
        if flow.cancellation_policy is CancellationPolicy.FLOW_ONLY:
            return []
        only_waiting = flow.cancellation_policy is CancellationPolicy.CANCEL_PENDING
        members = await tx.select_as(
            ExecutionId,
            "cancellable_members",
            flow_id=flow.flow_id,
            only_waiting=only_waiting,
            limit=at_once_max + 1,
        )
        reason = flow.cancel_reason or flow_endings.FLOW_CANCELLED
        if len(members) <= at_once_max:
            asks = [_cancel_ask(each, reason, only_waiting) for each in members]
            outcomes = await self.shell.decide_in(tx, asks)
            return [
                each.execution_id
                for each in outcomes
                if isinstance(each, results.Cancelled)
                and each.public_state is PublicState.CANCELLED
            ]
        tx.hint(topics.MEMBER_CANCEL_TOPIC)
        marked = await tx.select_as(
            ExecutionId,
            "request_cancel",
            flow_id=flow.flow_id,
            only_waiting=only_waiting,
            reason=reason,
            now_ms=await tx.now_ms(),
        )
        return sorted(marked)

    # Members

    async def cancel_pending_members(
        self, *, flow_id: str | None = None, limit: int = bounds.CANCEL_BATCH
    ) -> Swept:
        """Cancel members that a cancelled flow or a satisfied join no longer needs.

        When a batch fails, each of its members has a transaction of its own.
        """
        check_int("limit", limit, 1, bounds.BATCH_MAX)
        only_flow = None if flow_id is None else self.check_flow_id(flow_id)

        async def body(tx: Transaction) -> Swept:
            rows = await _due(tx, only_flow, limit)
            await self._cancel_queued(tx, rows)
            return Swept(acted=len(rows), full=len(rows) == limit)

        try:
            return await self.store.transact(body)
        except TROUBLE:
            return await self._cancel_one_by_one(only_flow, limit)

    async def _cancel_queued(self, tx: Transaction, rows: Sequence[PendingCancel]) -> None:
        """Skip members that have ended or been deleted meanwhile."""
        if rows:
            asks = [_cancel_ask(row.execution_id, row.reason, row.only_waiting) for row in rows]
            await self.shell.decide_in(tx, asks)
            await tx.save(Changes(deletes=tuple(rows)))

    async def _cancel_one_by_one(self, flow_id: FlowId | None, limit: int) -> Swept:
        rows = await self.store.transact(lambda tx: _due(tx, flow_id, limit))
        failures = []
        for row in rows:
            try:
                await self._cancel_alone(row)
            except TROUBLE as error:
                failures.append(f"{row.execution_id} was not cancelled: {error}")
                await self._postpone(row)
        return Swept(
            acted=len(rows) - len(failures), full=len(rows) == limit, failures=tuple(failures)
        )

    async def _cancel_alone(self, row: PendingCancel) -> None:
        async def body(tx: Transaction) -> None:
            await self._cancel_queued(tx, await _still_queued(tx, row))

        await self.store.transact(body)

    async def _postpone(self, row: PendingCancel) -> None:
        async def body(tx: Transaction) -> None:
            queued = await _still_queued(tx, row)
            now_ms = await tx.now_ms()
            await tx.save(
                Changes(updates=tuple(flow_endings.postponed(each, now_ms) for each in queued))
            )

        await self.store.transact(body)

    async def ack_cancel_member(self, flow_id: str, execution_id: str) -> None:
        """Take an ended member off the cancellation queue.

        A missing one is fine; one that has not ended stays, since nothing else would
        cancel it.
        """
        flow_id = self.check_flow_id(flow_id)
        member_id = self.shell.check_execution_id(execution_id)

        async def body(tx: Transaction) -> None:
            key: Key = (self.flow_key(flow_id)[0], member_id)
            row = await tx.lock_one(PendingCancel, key)
            if row is None or row.flow_id != flow_id:
                return
            member = await tx.get_one(Execution, key)
            if member is None or member.lifecycle_phase is LifecyclePhase.TERMINAL:
                await tx.save(Changes(deletes=(row,)))

        await self.store.transact(body)

    async def reconcile_sibling_cancel_group(
        self, flow_id: str, downstream_execution_id: str
    ) -> results.SiblingCancelAction:
        """Take upstreams of a join off the cancellation queue if they need not be cancelled.

        The dispatcher does the same; call this to be sure.
        """
        flow_id = self.check_flow_id(flow_id)
        downstream_id = self.check_member_id(
            flow_id, downstream_execution_id, "downstream_execution_id"
        )
        key: Key = (self.flow_key(flow_id)[0], downstream_id)

        async def body(tx: Transaction) -> results.SiblingCancelAction:
            await self.lock_flow(tx, flow_id)
            listed = await tx.select_records(
                PendingCancel,
                "list_siblings",
                flow_id=flow_id,
                downstream_id=uuid_of(downstream_id),
                limit=bounds.BATCH_MAX,
            )
            keys: list[Key] = [(each.partition_key, each.execution_id) for each in listed]
            rows = await tx.lock(PendingCancel, keys)
            siblings = (await tx.get(Execution, keys)).values()
            unended = [e for e in siblings if e.lifecycle_phase is not LifecyclePhase.TERMINAL]
            group = await tx.get_one(JoinRecord, key)
            action = flow_endings.reconciled(group, len(rows), len(unended))
            if action is not results.SiblingCancelAction.NO_OP:
                await tx.save(Changes(deletes=tuple(rows.values())))
            return action

        return await self.store.transact(body)

    # Waiting

    async def _drain(
        self, flow_id: FlowId, header: results.FlowCancelled, budget_ms: int
    ) -> results.CancelFlowResult:
        """Cancel what is queued until nothing is left, within the caller's time."""
        deadline_s = time.monotonic() + budget_ms / 1_000
        await self.store.transact(lambda tx: tx.select("retry_cancels", flow_id=flow_id))
        for _ in range(DRAIN_ROUNDS_MAX):
            swept = await self.cancel_pending_members(flow_id=flow_id)
            if swept.acted == 0:
                left = await self._left_to_cancel(flow_id, bounds.MEMBERS_SHOWN_MAX)
                if all(left.values()):
                    return flow_endings.all_but(header, tuple(sorted(left)))
            if time.monotonic() >= deadline_s:
                break
            if swept.acted == 0:
                await asyncio.sleep(BUSY_PAUSE_S)
        raise errors.OperationTimeout("cancel_flow", budget_ms)

    async def _left_to_cancel(self, flow_id: FlowId, limit: int) -> dict[ExecutionId, int]:
        """Members still queued, and how often cancelling each has failed."""
        return {
            row.execution_id: row.attempts
            for row in await self.select_as(
                QueuedCancel, "list_cancels", flow_id=flow_id, limit=limit
            )
        }

    # Retention

    async def trim_flows(self, *, limit: int = bounds.SWEEP_BATCH) -> Swept:
        """Delete ended flows past their keep time, with all that belongs to them."""
        check_int("limit", limit, 1, bounds.BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            now_ms = await tx.now_ms()
            flows = await tx.select_records(
                FlowRecord, "due_flows", before_ms=now_ms, limit=FLOWS_PER_TRIM
            )
            forgot = await forget(tx, flows, limit)
            more = len(flows) == FLOWS_PER_TRIM and forgot.complete
            return Swept(acted=forgot.acted, full=forgot.more or more)

        return await self.store.transact(body)


class QueuedCancel(Struct, frozen=True):
    execution_id: ExecutionId
    attempts: int


class CancelledMember(Struct, frozen=True):
    execution_id: ExecutionId
    member_count: int
    """How many there are in all."""


async def _due(tx: Transaction, flow_id: FlowId | None, limit: int) -> Sequence[PendingCancel]:
    return await tx.select_records(
        PendingCancel, "take_cancels", flow_id=flow_id, now_ms=await tx.now_ms(), limit=limit
    )


async def _still_queued(tx: Transaction, row: PendingCancel) -> list[PendingCancel]:
    return list((await tx.lock(PendingCancel, [(row.partition_key, row.execution_id)])).values())


def _cancel_ask(
    execution_id: ExecutionId, reason: str, only_waiting: bool
) -> shell.Ask[results.Cancelled]:
    if only_waiting:
        return shell.Ask(execution_id, lambda s, timing: decide_cancel_waiting(s, reason, timing))
    request = CancelRequest(reason=reason)
    return shell.Ask(execution_id, lambda s, timing: decide_cancel(s, request, timing))


TRIES_MAX = 3

Answers = list[results.Replayed | errors.FlowFabricError]

BULK_MAX = 100_000


class BulkResult(Struct, frozen=True, kw_only=True):
    """How many executions were touched, and how many refused, by the reason's code."""

    touched: int
    refused: dict[str, int]
    more: bool
    """Whether the limit was reached before the filter was exhausted; call again."""


Act = Callable[[Sequence[str]], Awaitable[Sequence[object]]]


class FlowReplays(FlowGroup):
    # Replaying executions, those of flows with care for what they wait for
    #
    # A replayed member takes its place in the flow again: it is no longer counted as ended,
    # and waits for its join unless that was satisfied. Failures of its upstreams are
    # forgotten; an upstream that has succeeded since counts at once.

    async def replay_execution(
        self, execution_id: str, *, reason: str | None = None, requested_by: str | None = None
    ) -> results.Replayed:
        """Run an ended execution again as a new attempt; its history stays."""
        (answer,) = await self.replay_executions(
            [execution_id], reason=reason, requested_by=requested_by
        )
        return shell.answered(answer)

    async def replay_executions(
        self,
        execution_ids: Sequence[str],
        *,
        reason: str | None = None,
        requested_by: str | None = None,
    ) -> Answers:
        """Replay many; each gets its own answer or error."""
        check_list("execution_ids", execution_ids, 0, bounds.BATCH_MAX)
        check_optional_text("reason", reason, bytes_max=bounds.TEXT_BYTES_MAX)
        check_optional_text("requested_by", requested_by)
        checked_ids = [self.shell.check_execution_id(each) for each in execution_ids]
        if not checked_ids:
            return []
        for _ in range(TRIES_MAX):
            replaying = _Replaying(self, checked_ids, reason, requested_by)
            answers = await self.store.transact(replaying.run)
            if answers is not None:
                return answers
        raise errors.RetryExhausted("executions kept joining flows while they were replayed")

    # Acting on everything a filter matches, in bounded batches --------------
    #
    # Each batch is found by the same indexed list users see, then decided row by row
    # under lock, so what changed in between is refused and counted, not overwritten.

    async def cancel_matching(
        self, matching: ExecutionFilter, *, reason: str, limit: int = BULK_MAX
    ) -> BulkResult:
        """Cancel every unfinished execution that matches, newest first."""

        unfinished = set(PublicState) - TERMINAL_STATES
        return await self._act_on_matching(
            matching,
            unfinished,
            lambda ids: self.executions.cancel_executions(ids, reason=reason),
            limit,
        )

    async def replay_matching(
        self,
        matching: ExecutionFilter,
        *,
        reason: str | None = None,
        requested_by: str | None = None,
        limit: int = BULK_MAX,
    ) -> BulkResult:
        """Replay every ended execution that matches, newest first. Name the states you mean."""
        if not check_filter(matching).states:
            raise errors.InvalidInput("matching.states", "must name the ended states to replay")

        return await self._act_on_matching(
            matching,
            set(TERMINAL_STATES),
            lambda ids: self.replay_executions(ids, reason=reason, requested_by=requested_by),
            limit,
        )

    async def _act_on_matching(
        self, matching: ExecutionFilter, possible: set[PublicState], act: Act, limit: int
    ) -> BulkResult:
        check_int("limit", limit, 1, BULK_MAX)
        checked = check_filter(matching)
        # Bad arguments are refused also when nothing matches.
        await act([])
        states = possible & set(checked.states) if checked.states else possible
        if not states:
            return BulkResult(touched=0, refused={}, more=False)
        narrowed = checked.with_states(tuple(sorted(states)))
        touched, refused, seen = 0, dict[str, int](), 0
        cursor = reads.NEWEST_FIRST
        while seen < limit:
            batch = await self._next_batch(narrowed, cursor, min(bounds.SWEEP_BATCH, limit - seen))
            if not batch:
                return BulkResult(touched=touched, refused=refused, more=False)
            seen += len(batch)
            cursor = reads.page_end(batch[-1])
            for outcome in await act([execution.execution_id for execution in batch]):
                if isinstance(outcome, errors.FlowFabricError):
                    refused[outcome.code] = refused.get(outcome.code, 0) + 1
                else:
                    touched += 1
        left = await self._next_batch(narrowed, cursor, 1)
        return BulkResult(touched=touched, refused=refused, more=bool(left))

    async def _next_batch(
        self, matching: ExecutionFilter, after: reads.PageCursor, limit: int
    ) -> Sequence[Execution]:
        return await self.store.read(lambda reader: select_matching(reader, matching, after, limit))


class _Replaying:
    """One call inside its transaction."""

    def __init__(
        self,
        engine: FlowReplays,
        execution_ids: Sequence[ExecutionId],
        reason: str | None,
        requested_by: str | None,
    ) -> None:
        self.engine = engine
        self.execution_ids = execution_ids
        self.reason = reason
        self.requested_by = requested_by

    async def run(self, tx: Transaction) -> Answers | None:
        """None when an execution joined a flow meanwhile, which is locked first: try again."""
        keys = [shell.execution_key(each) for each in self.execution_ids]
        seen = await tx.get(Execution, keys)
        homes: dict[Key, Key] = {
            key: (execution.partition_key, execution.flow_id)
            for key, execution in seen.items()
            if execution.flow_id is not None
        }
        self.flows = await tx.lock(FlowRecord, sorted(set(homes.values())))
        self.cancels = await tx.lock(PendingCancel, sorted(homes))
        self.subjects = await shell.lock_subjects(tx, set(self.execution_ids))
        for key, subject in ((shell.execution_key(i), s) for i, s in self.subjects.items()):
            if (subject.execution.flow_id is not None) != (key in homes):
                return None
        alone = [each for each in self.execution_ids if shell.execution_key(each) not in homes]
        asks = [
            self.engine.executions.replay_ask(each, self.reason, self.requested_by)
            for each in alone
        ]
        decided: Answers = await self.engine.shell.decide_in(tx, asks)
        answers = iter(decided)
        return [
            await self._try(tx, each) if shell.execution_key(each) in homes else next(answers)
            for each in self.execution_ids
        ]

    async def _try(
        self, tx: Transaction, execution_id: ExecutionId
    ) -> results.Replayed | errors.FlowFabricError:
        subject = self.subjects.get(execution_id)
        if subject is None:
            return errors.NotFound("execution", execution_id)
        timing = self.engine.shell.timing(await tx.now_ms())
        try:
            return await self._replay_member(tx, subject, timing)
        except errors.FlowFabricError as error:
            return error

    async def _replay_member(
        self, tx: Transaction, subject: Subject, timing: Timing
    ) -> results.Replayed:
        execution = subject.execution
        key = shell.execution_key(execution.execution_id)
        flow = self.flows.get((execution.partition_key, execution.flow_id or ""))
        if flow is None or forgotten(flow, timing.now_ms):
            raise errors.NotFound("flow", execution.flow_id or "")
        flow_endings.check_replayable(flow)
        join = await self._join(tx, execution.execution_id)
        decision = flow_endings.decide_member_replay(
            subject,
            join,
            self.reason,
            self.requested_by,
            timing,
            inputs_bytes_max=self.engine.shell.config.payload_bytes_max,
        )
        row_key = (*key[:1], flow.flow_id, execution.execution_id, execution.replay_count)
        untold = await tx.lock_one(CompletionDispatch, row_key)
        after = self.engine.with_derived_state(
            flow_endings.uncount(flow, execution, untold), timing.now_ms
        )
        gone = tuple(row for row in (untold, self.cancels.pop(key, None)) if row is not None)
        also = Changes(updates=(after,), deletes=gone)
        await tx.save(combine([decision.changes, also]))
        topics.hint_about(tx, decision.changes, timing.now_ms)
        self.flows[(flow.partition_key, flow.flow_id)] = after
        # A repeat within one call finds the execution replayed.
        self.subjects |= await shell.lock_subjects(tx, [execution.execution_id])
        if join is None or join.reopened is None:
            return decision.answer
        await tx.select(
            "drop_siblings", flow_id=flow.flow_id, downstream_id=uuid_of(execution.execution_id)
        )
        due = [
            edge
            for edge in join.reopened
            if edge.upstream_id in join.succeeded and edge.edge_state is EdgeState.APPLIED
        ]
        return await self._count_successes(tx, join, due) or decision.answer

    async def _join(
        self, tx: Transaction, execution_id: ExecutionId
    ) -> flow_endings.ReplayedJoin | None:
        """What the member waits for: its join opened again, or what a satisfied one passes."""
        group = await tx.lock_one(JoinRecord, shell.execution_key(execution_id))
        if group is None or group.staged == 0:
            return None
        if not flow_endings.holds_back(group):
            inputs = (await inputs_of(tx, [execution_id])).get(execution_id, {})
            return flow_endings.ReplayedJoin(group=group, inputs=tuple(inputs.values()))
        edges = await tx.select_records(
            Edge,
            "lock_edges_into",
            partition_key=partition_of(execution_id),
            downstream_id=uuid_of(execution_id),
        )
        endings = await endings_of(tx, group.partition_key, [edge.upstream_id for edge in edges])
        return flow_endings.reopen(group, edges, endings)

    async def _count_successes(
        self, tx: Transaction, join: flow_endings.ReplayedJoin, due: Sequence[Edge]
    ) -> results.Replayed | None:
        """Resolve what has succeeded since; None unless that changes the member again."""
        resolved = await self.engine.resolve_edges(
            tx, due, {join.group.downstream_id: join.group}, join.succeeded
        )
        for record in resolved.children.updates:
            if isinstance(record, Execution):
                self.subjects |= await shell.lock_subjects(tx, [record.execution_id])
                return results.Replayed(public_state=record.public_state)
        return None
