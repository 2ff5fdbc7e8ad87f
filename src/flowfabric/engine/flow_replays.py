"""Replaying executions, those of flows with care for what they wait for.

A replayed member takes its place in the flow again: it is no longer counted as ended,
and waits for its join unless that was satisfied. Failures of its upstreams are
forgotten; an upstream that has succeeded since counts at once.
"""

from collections.abc import Sequence

from msgspec import Struct

from flowfabric.core.checks import check_list, check_optional_text
from flowfabric.core.executions import Timing
from flowfabric.core.flow_endings import (
    Ending,
    MemberJoin,
    check_replayable,
    decide_member_replay,
    holds_back,
    reopen,
    uncount,
)
from flowfabric.core.flow_records import (
    CompletionDispatch,
    Edge,
    EdgeGroup,
    EdgeState,
    FlowRecord,
    PendingCancel,
)
from flowfabric.core.ids import ExecutionId, partition_of, uuid_of
from flowfabric.core.limits import BATCH_MAX, TEXT_BYTES_MAX
from flowfabric.core.records import Execution
from flowfabric.core.results import Replayed
from flowfabric.core.states import TerminalOutcome
from flowfabric.core.transitions import Changes, Subject, combine
from flowfabric.engine.flows import Flows, endings_of, forgotten, inputs_of
from flowfabric.engine.operators import Operators
from flowfabric.engine.unit import execution_key, hint_about, load_subjects
from flowfabric.errors import FlowFabricError, NotFound, RetryExhausted
from flowfabric.store.base import Key, Transaction

TRIES_MAX = 3

Answers = list[Replayed | FlowFabricError]


class FlowReplays(Flows, Operators):
    async def replay_execution(
        self, execution_id: str, *, reason: str | None = None, requested_by: str | None = None
    ) -> Replayed:
        """Run an ended execution again as a new attempt; its history stays."""
        (answer,) = await self.replay_executions(
            [execution_id], reason=reason, requested_by=requested_by
        )
        if isinstance(answer, FlowFabricError):
            raise answer
        return answer

    async def replay_executions(
        self,
        execution_ids: Sequence[str],
        *,
        reason: str | None = None,
        requested_by: str | None = None,
    ) -> Answers:
        """Replay many; each gets its own answer or error."""
        check_list("execution_ids", execution_ids, 0, BATCH_MAX)
        check_optional_text("reason", reason, bytes_max=TEXT_BYTES_MAX)
        check_optional_text("requested_by", requested_by)
        asked = [self.check_execution_id(each) for each in execution_ids]
        if not asked:
            return []
        for _ in range(TRIES_MAX):
            replaying = _Replaying(self, asked, reason, requested_by)
            answers = await self.store.transact(replaying.run)
            if answers is not None:
                return answers
        raise RetryExhausted("executions kept joining flows while they were replayed")


class _Replaying:
    """One call inside its transaction."""

    def __init__(
        self,
        engine: FlowReplays,
        asked: Sequence[ExecutionId],
        reason: str | None,
        requested_by: str | None,
    ) -> None:
        self.engine = engine
        self.asked = asked
        self.reason = reason
        self.requested_by = requested_by

    async def run(self, tx: Transaction) -> Answers | None:
        """None when an execution joined a flow meanwhile, which is locked first: try again."""
        keys = [execution_key(each) for each in self.asked]
        seen = await tx.get(Execution, keys)
        homes: dict[Key, Key] = {
            key: (execution.partition_key, execution.flow_id)
            for key, execution in seen.items()
            if execution.flow_id is not None
        }
        self.flows = await tx.lock(FlowRecord, sorted(set(homes.values())))
        self.cancels = await tx.lock(PendingCancel, sorted(homes))
        self.subjects = await load_subjects(tx, set(self.asked))
        for key, subject in ((execution_key(i), s) for i, s in self.subjects.items()):
            if (subject.execution.flow_id is not None) != (key in homes):
                return None
        alone = [each for each in self.asked if execution_key(each) not in homes]
        asks = [self.engine.replay_ask(each, self.reason, self.requested_by) for each in alone]
        decided: Answers = await self.engine.decide_in(tx, asks, [0.0] * len(asks))
        answers = iter(decided)
        return [
            await self._try(tx, each) if execution_key(each) in homes else next(answers)
            for each in self.asked
        ]

    async def _try(self, tx: Transaction, execution_id: ExecutionId) -> Replayed | FlowFabricError:
        subject = self.subjects.get(execution_id)
        if subject is None:
            return NotFound("execution", execution_id)
        timing = self.engine.timing(await tx.now_ms())
        try:
            return await self._replay_member(tx, subject, timing)
        except FlowFabricError as error:
            return error

    async def _replay_member(self, tx: Transaction, subject: Subject, timing: Timing) -> Replayed:
        execution = subject.execution
        key = execution_key(execution.execution_id)
        flow = self.flows.get((execution.partition_key, execution.flow_id or ""))
        if flow is None or forgotten(flow, timing.now_ms):
            raise NotFound("flow", execution.flow_id or "")
        check_replayable(flow)
        join = await self._join(tx, execution.execution_id)
        decision = decide_member_replay(
            subject, join.joined, self.reason, self.requested_by, timing
        )
        row_key = (*key[:1], flow.flow_id, execution.execution_id, execution.replay_count)
        untold = (await tx.lock(CompletionDispatch, [row_key])).get(row_key)
        after = self.engine.settled_flow(uncount(flow, execution, untold), timing.now_ms)
        gone = tuple(row for row in (untold, self.cancels.pop(key, None)) if row is not None)
        also = Changes(updates=(after,), deletes=gone)
        await tx.save(combine([decision.changes, also]))
        hint_about(tx, decision.changes, timing.now_ms)
        self.flows[(flow.partition_key, flow.flow_id)] = after
        # A repeat within one call finds the execution replayed.
        self.subjects |= await load_subjects(tx, [execution.execution_id])
        if join.joined is None or join.joined.reopened is None:
            return decision.answer
        await tx.select(
            "drop_siblings",
            flow_id=flow.flow_id,
            downstream_id=uuid_of(execution.execution_id),
        )
        return await self._count_successes(tx, join, decision.answer)

    async def _join(self, tx: Transaction, execution_id: ExecutionId) -> "_Join":
        """What the member waits for: its join opened again, or what a satisfied one passes."""
        key = execution_key(execution_id)
        group = (await tx.lock(EdgeGroup, [key])).get(key)
        if group is None or group.staged == 0:
            return _Join(joined=None)
        bytes_max = self.engine.config.payload_bytes_max
        if not holds_back(group):
            inputs = (await inputs_of(tx, [execution_id])).get(execution_id, {})
            return _Join(
                joined=MemberJoin(
                    group=group,
                    reopened=None,
                    inputs=tuple(inputs.values()),
                    inputs_bytes_max=bytes_max,
                )
            )
        edges = await _edges_into(tx, execution_id)
        endings = await endings_of(tx, group.partition_key, [edge.upstream_id for edge in edges])
        reopened = reopen(group, edges, endings)
        return _Join(
            joined=MemberJoin(group=group, reopened=reopened, inputs_bytes_max=bytes_max),
            succeeded={
                upstream: ending
                for upstream, ending in endings.items()
                if ending.outcome is TerminalOutcome.SUCCESS
            },
        )

    async def _count_successes(self, tx: Transaction, join: "_Join", answer: Replayed) -> Replayed:
        """Resolve what has succeeded since; what failed before waits for its own replay."""
        assert join.joined is not None
        assert join.joined.reopened is not None
        group = join.joined.reopened.group
        due = [
            edge
            for edge in join.joined.reopened.edges
            if edge.upstream_id in join.succeeded and edge.edge_state is EdgeState.APPLIED
        ]
        settled = await self.engine.settle_edges(
            tx, due, {group.downstream_id: group}, join.succeeded
        )
        for record in settled.children.updates:
            if isinstance(record, Execution):
                self.subjects |= await load_subjects(tx, [record.execution_id])
                return Replayed(public_state=record.public_state)
        return answer


class _Join(Struct, frozen=True, kw_only=True):
    joined: MemberJoin | None
    succeeded: dict[ExecutionId, Ending] = {}
    """Upstreams that count at once."""


async def _edges_into(tx: Transaction, execution_id: ExecutionId) -> Sequence[Edge]:
    return await tx.select_records(
        Edge,
        "edges_into",
        partition_key=partition_of(execution_id),
        downstream_id=uuid_of(execution_id),
    )
