"""Letting go of what was kept back because no worker could run it, once one can."""

from collections.abc import Sequence

from flowfabric.core import bounds
from flowfabric.core.executions import Timing
from flowfabric.core.ids import ExecutionId
from flowfabric.core.keeping_back import decide_let_go
from flowfabric.core.results import Unblocked
from flowfabric.core.states import BlockingReason
from flowfabric.core.transitions import Decision, Subject
from flowfabric.engine import unit
from flowfabric.engine.gates import ClaimQuery
from flowfabric.store.base import Reader

ROUNDS_MAX = 1_000
"""Batches that one call works off."""


async def find_parked(reader: Reader, query: ClaimQuery, limit: int) -> Sequence[ExecutionId]:
    """What was kept back until a worker like this one comes."""
    return await reader.select_as(
        ExecutionId, "parked_for", **query.parameters, kinds=query.kinds, limit=limit
    )


async def free_for(shell: unit.Shell, query: ClaimQuery) -> bool:
    """Let go of what was kept back until a worker like this one comes; tell whether any was."""
    freed = False
    for _ in range(ROUNDS_MAX):

        async def body(reader: Reader) -> Sequence[ExecutionId]:
            return await find_parked(reader, query, bounds.SWEEP_BATCH)

        parked = await shell.store.read(body)
        if not parked:
            break
        answers = await shell.decide_many([unit.Ask(each, let_go) for each in parked])
        some = any(isinstance(each, Unblocked) for each in answers)
        freed = freed or some
        if len(parked) < bounds.SWEEP_BATCH or not some:
            break
    return freed


def let_go(subject: Subject, timing: Timing) -> Decision[Unblocked]:
    return decide_let_go(subject, BlockingReason.WAITING_FOR_CAPABLE_WORKER, timing.now_ms)
