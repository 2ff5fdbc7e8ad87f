"""Completing executions, in batches; and a flow's member with what that means for its dependents.

A completed member leaves its ending to the dispatch queue (see `flow_endings`). If this process
dispatches, and has only this member of the flow in hand, it tells the few dependents in the same
transaction, so that they start a commit sooner: by one statement, `complete_member`, where a
single execution waits, as in a chain. Flows that turn out to be otherwise are read first.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from flowfabric.core import flow_records, results
from flowfabric.core.decisions import combine
from flowfabric.core.handles import Handle
from flowfabric.core.ids import FlowId, partition_of, uuid_of
from flowfabric.core.states import PublicState
from flowfabric.engine import flow_queue, shell, topics
from flowfabric.engine.executions import Completion, HeldCompletion, completion_ask
from flowfabric.engine.flow_endings import FEW, FlowEndings
from flowfabric.errors import FlowFabricError
from flowfabric.store.base import UniqueViolation, Unlocked
from flowfabric.store.mapping import values_of


class EndedMember(Struct, frozen=True, kw_only=True):
    """The row that `complete_member` answers with."""

    awaited: bool


class Completions(FlowEndings):
    async def complete(
        self,
        handle: Handle | bytes,
        result: bytes | None = None,
        *,
        result_encoding: str | None = None,
    ) -> results.Completed:
        """Finish successfully. Safe to repeat."""
        completion = Completion(handle=handle, result=result, result_encoding=result_encoding)
        (outcome,) = await self.complete_many([completion])
        return shell.answered(outcome)

    async def complete_many(
        self, completions: Sequence[Completion]
    ) -> list[results.Completed | FlowFabricError]:
        """Finish many at once; each gets its own answer or error."""
        opened = await self.executions.open_completions(completions)
        lone = self.executions.lone_members
        if lone.in_hand:
            held = [each for each in opened if not isinstance(each, FlowFabricError)]
            flows = [lone.end(handle.lease_id) for handle, _ in held]
            if len(opened) == 1 and held and flows[0] is not None:
                completed = await self._complete_and_tell(held[0], flows[0])
                if completed is not None:
                    return [completed]
        return await self.executions.complete_opened(opened)

    async def _complete_and_tell(
        self, held: HeldCompletion, flow_id: FlowId
    ) -> results.Completed | None:
        """Complete a flow's member and tell its few dependents, in one transaction.

        This saves the dependents one commit. Only if this process dispatches anyway; None leaves
        the ending to its queue.
        """
        if not self.store.is_awaited(topics.DISPATCH_TOPIC):
            return None
        handle, completion = held
        completed = None
        if self.executions.lone_members.may_be_plain(flow_id):
            completed = await self._complete_plain(held)
            if completed is None:
                self.executions.lone_members.note_involved(flow_id)
        if completed is None:
            completed = await self.store.try_unlocked(
                lambda tx: self._end_and_tell(tx, handle, completion)
            )
        if completed is None:
            self.executions.lone_members.note_crowded(flow_id)
            return None
        for lane in self.executions.gated.lanes_released([handle]):
            self.store.hint(topics.ready_topic(lane))
        return completed

    async def _complete_plain(self, held: HeldCompletion) -> results.Completed | None:
        """The same in one round trip, if a single execution waits for it and all is plain."""
        handle, completion = held
        result = completion.result or None
        try:
            rows = await self.store.execute_alone(
                "complete_member",
                (topics.EVENT_TOPIC, topics.COMPLETION_TOPIC),
                **shell.columns_of(handle.execution_id),
                lease_id=handle.lease_id,
                result=result,
                result_encoding=completion.result_encoding,
                payload_bytes_max=self.shell.config.payload_bytes_max,
            )
        except UniqueViolation:
            return None
        if not rows:
            return None
        (row,) = values_of(EndedMember, rows)
        if row.awaited:
            self.store.hint(topics.DUE_TOPIC)
        return results.Completed(
            execution_id=handle.execution_id, public_state=PublicState.COMPLETED
        )

    async def _end_and_tell(
        self, tx: Unlocked, handle: Handle, completion: Completion
    ) -> results.Completed | None:
        rows = await tx.select_joined(
            flow_queue.MEMBER,
            "read_for_completion",
            partition_key=partition_of(handle.execution_id),
            execution_id=uuid_of(handle.execution_id),
            limit=FEW + 1,
        )
        read = flow_queue.member_in(rows) if len(rows) <= FEW + 1 else None
        if read is None:
            return None
        subject, found = read
        now_ms = await tx.now_ms()
        ask = completion_ask((handle, completion))
        ended = shell.decided(ask.decide, subject, self.shell.timing(now_ms))
        if isinstance(ended.outcome, FlowFabricError) or not ended.changes.inserts:
            return None
        (queued,) = ended.changes.inserts
        assert isinstance(queued, flow_records.CompletionDispatch)
        found.endings[queued.execution_id] = flow_queue.queued(
            queued, completion.result or None, completion.result_encoding
        )
        told = await self.changes_for_dependents(tx, found)
        if told is None:
            return None
        # Nothing is left for the dispatcher.
        changes = combine(
            [structs.replace(ended.changes, inserts=()), structs.replace(told, deletes=())]
        )
        topics.hint_about(tx, changes, now_ms)
        await tx.save(changes)
        return ended.outcome
