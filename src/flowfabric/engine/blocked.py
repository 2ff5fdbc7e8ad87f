"""Executions that the code of their task no longer fits; see `core.steps`."""

from collections.abc import Sequence

from flowfabric.core.checks import (
    check_int,
    check_list,
    check_optional_text,
    check_optional_time,
    check_text,
)
from flowfabric.core.executions import Timing
from flowfabric.core.handles import Handle
from flowfabric.core.ids import parse_execution_kind, parse_namespace
from flowfabric.core.limits import BATCH_MAX, SWEEP_BATCH, TEXT_BYTES_MAX
from flowfabric.core.records import Attempt, Execution, Step
from flowfabric.core.results import Changed, Delayed, Marked
from flowfabric.core.steps import accepted_key, decide_accept, decide_block, decide_release
from flowfabric.core.transitions import Decision, Subject
from flowfabric.engine.operators import Swept
from flowfabric.engine.unit import Ask, Operations, execution_key, fence_of, row_execution_id
from flowfabric.errors import FlowFabricError
from flowfabric.store.base import Transaction


class Blocked(Operations):
    async def block_on_code(
        self, handle: Handle | bytes, step_key: str | None, detail: str
    ) -> Delayed:
        """Release the worker because the code does not fit what is stored. Safe to repeat.

        `detail` says in words what does not fit; `step_key` names the step that must not
        run, if it is one, so that an operator can allow it.
        """
        opened = self.open_handle(handle)
        check_optional_text("step_key", step_key)
        check_text("detail", detail, bytes_max=TEXT_BYTES_MAX, empty=False)

        def decide(subject: Subject, timing: Timing) -> Decision[Delayed]:
            return decide_block(subject, fence_of(opened), step_key, detail, timing)

        return await self.decide(Ask(opened.execution_id, decide))

    async def release_blocked(
        self,
        kinds: Sequence[str],
        *,
        namespace: str | None = None,
        blocked_before_ms: int | None = None,
        limit: int = SWEEP_BATCH,
    ) -> Swept:
        """Let blocked executions of some kinds look at the code again at once.

        Without a `namespace`, those of every one. Those blocked after `blocked_before_ms` are
        left alone; without it, none are.
        """
        if namespace is not None:
            parse_namespace(namespace)
        check_int("limit", limit, 1, BATCH_MAX)
        check_optional_time("blocked_before_ms", blocked_before_ms)
        wanted = [parse_execution_kind(kind) for kind in check_list("kinds", kinds, 0, BATCH_MAX)]

        async def body(tx: Transaction) -> Swept:
            before_ms = await tx.now_ms() if blocked_before_ms is None else blocked_before_ms
            rows = await tx.select(
                "blocked_by_code",
                kinds=wanted,
                namespace=namespace,
                blocked_before_ms=before_ms,
                limit=limit,
            )
            asks = [Ask(row_execution_id(row), decide_release) for row in rows]
            outcomes = await self.decide_in(tx, asks, [0.0] * len(asks)) if asks else []
            acted = sum(isinstance(outcome, Marked) for outcome in outcomes)
            return Swept(acted=acted, full=len(rows) == limit)

        return await self.store.transact(body)

    async def accept_changes(self, execution_id: str) -> Changed:
        """Allow the step at which changed code stopped an execution; it runs at once.

        Stored steps that the code has not asked for by then no longer count. Safe to repeat.
        """
        asked = self.check_execution_id(execution_id)
        key = execution_key(asked)

        async def body(tx: Transaction) -> Changed | FlowFabricError:
            accepted = await self._accepted(tx, (await tx.lock(Execution, [key])).get(key))

            def decide(subject: Subject, timing: Timing) -> Decision[Changed]:
                return decide_accept(subject, accepted, timing)

            (outcome,) = await self.decide_in(tx, [Ask(asked, decide)], [0.0])
            return outcome

        outcome = await self.store.transact(body)
        if isinstance(outcome, FlowFabricError):
            raise outcome
        return outcome

    async def _accepted(self, tx: Transaction, execution: Execution | None) -> Step | None:
        """What an earlier acceptance of the same change has stored."""
        if execution is None:
            return None
        key = execution_key(execution.execution_id)
        attempt_key = (*key, execution.current_attempt_index)
        attempt = (await tx.get(Attempt, [attempt_key])).get(attempt_key)
        if attempt is None or attempt.blocked_on is None:
            return None
        step_key = (*key, accepted_key(attempt.blocked_on))
        return (await tx.get(Step, [step_key])).get(step_key)
