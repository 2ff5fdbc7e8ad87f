"""Acting on everything a filter matches, in bounded batches.

Each batch is found by the same indexed list users see, then decided row by row
under lock, so what changed in between is refused and counted, not overwritten.
"""

from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from flowfabric.core.checks import check_int
from flowfabric.core.limits import SWEEP_BATCH
from flowfabric.core.records import Execution
from flowfabric.core.states import TERMINAL_STATES, PublicState
from flowfabric.engine.filters import ExecutionFilter, ListCursor, check_filter
from flowfabric.engine.flow_replays import FlowReplays
from flowfabric.engine.reads import select_matching
from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.store.base import Reader

BULK_MAX = 100_000


class BulkResult(Struct, frozen=True, kw_only=True):
    """How many executions were touched, and how many refused, by the reason's code."""

    touched: int
    refused: dict[str, int]
    more: bool
    """Whether the limit was reached before the filter was exhausted; call again."""


Act = Callable[[Sequence[str]], Awaitable[Sequence[object]]]


class Bulk(FlowReplays):
    async def cancel_matching(
        self, matching: ExecutionFilter, *, reason: str, limit: int = BULK_MAX
    ) -> BulkResult:
        """Cancel every unfinished execution that matches, newest first."""

        async def act(execution_ids: Sequence[str]) -> Sequence[object]:
            return await self.cancel_executions(execution_ids, reason=reason)

        unfinished = set(PublicState) - TERMINAL_STATES
        return await self._act_on_matching(matching, unfinished, act, limit)

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
            raise InvalidInput("matching.states", "must name the ended states to replay")

        async def act(execution_ids: Sequence[str]) -> Sequence[object]:
            return await self.replay_executions(
                execution_ids, reason=reason, requested_by=requested_by
            )

        return await self._act_on_matching(matching, set(TERMINAL_STATES), act, limit)

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
        cursor = ListCursor()
        while seen < limit:
            batch = await self._next_batch(narrowed, cursor, min(SWEEP_BATCH, limit - seen))
            if not batch:
                return BulkResult(touched=touched, refused=refused, more=False)
            seen += len(batch)
            cursor = ListCursor.after(batch[-1])
            for outcome in await act([execution.execution_id for execution in batch]):
                if isinstance(outcome, FlowFabricError):
                    refused[outcome.code] = refused.get(outcome.code, 0) + 1
                else:
                    touched += 1
        left = await self._next_batch(narrowed, cursor, 1)
        return BulkResult(touched=touched, refused=refused, more=bool(left))

    async def _next_batch(
        self, matching: ExecutionFilter, after: ListCursor, limit: int
    ) -> Sequence[Execution]:
        async def body(reader: Reader) -> Sequence[Execution]:
            return await select_matching(reader, matching, after, limit)

        return await self.store.read(body)
