"""Keeping executions back from every worker, and letting them go.

Operators and policies do it by id. A scheduler keeps back what no worker can run (`engine.grants`);
a worker that arrives releases what it can run.
"""

from collections.abc import Sequence

from flowfabric.core import bounds
from flowfabric.core import keeping_back as rules
from flowfabric.core.checks import check_optional_text, optional
from flowfabric.core.grants import check_lane_meant
from flowfabric.core.ids import ExecutionId, parse_lane_id
from flowfabric.core.results import Blocked, Unblocked
from flowfabric.core.states import BlockingReason
from flowfabric.core.transitions import Decision, Subject, Timing
from flowfabric.engine import shell
from flowfabric.engine.gates import ClaimQuery
from flowfabric.engine.shell import Ask, Shell
from flowfabric.store.base import Reader

ROUNDS_MAX = 1_000
"""Batches that one call works off."""


class KeepingBack(shell.Group):
    async def block_execution_for_admission(
        self,
        execution_id: str,
        *,
        reason: str,
        reason_detail: str | None = None,
        lane_id: str | None = None,
    ) -> Blocked:
        """Keep a waiting execution from every worker until it is unblocked.

        Blocking it again replaces the reason. What waits for something else is refused.
        """
        why = rules.check_gate_reason("reason", reason)
        detail = check_optional_text("reason_detail", reason_detail) or ""
        asked_lane = optional(parse_lane_id, lane_id)

        def decide(subject: Subject, timing: Timing) -> Decision[Blocked]:
            check_lane_meant(subject.execution, asked_lane)
            return rules.decide_keep_back(subject, why, detail, timing)

        return await self.shell.decide_about(execution_id, decide)

    async def unblock_execution(
        self,
        execution_id: str,
        *,
        expected_blocking_reason: str | None = None,
        lane_id: str | None = None,
    ) -> Unblocked:
        """Let an execution go that was kept back, if it is for the reason expected."""
        expected: BlockingReason | None = None
        if expected_blocking_reason is not None:
            field = "expected_blocking_reason"
            expected = rules.check_gate_reason(field, expected_blocking_reason)
        asked_lane = optional(parse_lane_id, lane_id)

        def decide(subject: Subject, timing: Timing) -> Decision[Unblocked]:
            check_lane_meant(subject.execution, asked_lane)
            return rules.decide_let_go(subject, expected, timing)

        return await self.shell.decide_about(execution_id, decide)


async def find_kept_back(reader: Reader, query: ClaimQuery, limit: int) -> Sequence[ExecutionId]:
    """Executions that are kept back for a worker like this one."""
    return await reader.select_as(
        ExecutionId, "kept_back_for", **query.parameters, kinds=query.kinds, limit=limit
    )


async def let_go_for(shell: Shell, query: ClaimQuery) -> bool:
    """Release what was kept back for a worker like this one; return whether anything was."""
    let_go_any = False
    for _ in range(ROUNDS_MAX):
        found = await shell.store.read(
            lambda reader: find_kept_back(reader, query, bounds.SWEEP_BATCH)
        )
        if not found:
            break
        answers = await shell.decide_many([Ask(each, let_go) for each in found])
        some = any(isinstance(each, Unblocked) for each in answers)
        let_go_any = let_go_any or some
        if len(found) < bounds.SWEEP_BATCH or not some:
            break
    return let_go_any


def let_go(subject: Subject, timing: Timing) -> Decision[Unblocked]:
    return rules.decide_let_go(subject, BlockingReason.WAITING_FOR_CAPABLE_WORKER, timing)
