"""Keeping executions back from every worker, and releasing them.

Operators and policies do it by id. A scheduler keeps back executions that no worker can run
(`engine.grants`); a worker that arrives releases those it can run.
"""

from collections.abc import Sequence
from functools import partial

from flowfabric.core import bounds
from flowfabric.core import grants as rules
from flowfabric.core.checks import check_optional_text, optional
from flowfabric.core.decisions import Decision, Subject, Timing
from flowfabric.core.ids import ExecutionId, parse_lane_id
from flowfabric.core.results import Blocked, Unblocked
from flowfabric.core.states import BlockingReason
from flowfabric.engine import shell
from flowfabric.engine.gated_claims import ClaimQuery
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

        Blocking it again replaces the reason. An execution that waits for something else is
        refused.
        """
        why = rules.check_gate_reason("reason", reason)
        detail = check_optional_text("reason_detail", reason_detail) or ""
        lane_meant = optional(parse_lane_id, lane_id)

        def decide(subject: Subject, timing: Timing) -> Decision[Blocked]:
            rules.check_lane_meant(subject.execution, lane_meant)
            return rules.decide_keep_back(subject, why, detail, timing)

        return await self.shell.decide_about(execution_id, decide)

    async def unblock_execution(
        self,
        execution_id: str,
        *,
        expected_blocking_reason: str | None = None,
        lane_id: str | None = None,
    ) -> Unblocked:
        """Release an execution that was kept back, if it is for the expected reason."""
        check = partial(rules.check_gate_reason, "expected_blocking_reason")
        expected = optional(check, expected_blocking_reason)
        lane_meant = optional(parse_lane_id, lane_id)

        def decide(subject: Subject, timing: Timing) -> Decision[Unblocked]:
            rules.check_lane_meant(subject.execution, lane_meant)
            return rules.decide_let_go(subject, expected, timing)

        return await self.shell.decide_about(execution_id, decide)


async def find_kept_back(reader: Reader, query: ClaimQuery, limit: int) -> Sequence[ExecutionId]:
    """Executions that are kept back for a worker like this one."""
    return await reader.select_as(ExecutionId, "kept_back_for", **query.parameters, limit=limit)


async def let_go_for(shell: Shell, query: ClaimQuery) -> bool:
    """Release executions kept back for a worker like this one; return whether there were any."""
    released_any = False
    for _ in range(ROUNDS_MAX):
        kept_back = await shell.store.read(
            lambda reader: find_kept_back(reader, query, bounds.SWEEP_BATCH)
        )
        answers = await shell.decide_many([Ask(each, let_go) for each in kept_back])
        released = any(isinstance(each, Unblocked) for each in answers)
        released_any = released_any or released
        if len(kept_back) < bounds.SWEEP_BATCH or not released:
            break
    return released_any


def let_go(subject: Subject, timing: Timing) -> Decision[Unblocked]:
    return rules.decide_let_go(subject, BlockingReason.WAITING_FOR_CAPABLE_WORKER, timing)
