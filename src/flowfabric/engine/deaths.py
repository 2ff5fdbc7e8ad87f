"""Evidence for or against an execution killing its workers, once its leases have expired."""

from collections.abc import Iterable, Sequence

from flowfabric.core import ids, workers
from flowfabric.core.decisions import SignsOfLife
from flowfabric.core.leases import LEASE_EXPIRED
from flowfabric.core.records import Attempt, Execution
from flowfabric.core.workers import RegisteredWorker
from flowfabric.store.base import Key, Reader


async def signs_of_life(
    reader: Reader, executions: Iterable[Execution]
) -> dict[ids.ExecutionId, SignsOfLife]:
    """Only of executions whose leases have expired before; the others are omitted."""
    asked = [each for each in executions if each.worker_deaths]
    if not asked:
        return {}
    stepped = await _stepped_in_attempt(reader, asked)
    lost = await _lost_attempts(reader, asked)
    known = await _known_workers(reader, asked, lost)
    return {
        each.execution_id: SignsOfLife(
            stepped=each.execution_id in stepped,
            survivors=sum(
                _lives(known, each, attempt.worker_instance_id, attempt.started_at_ms, ended_ms)
                for attempt in lost.get(each.execution_id, ())
                if (ended_ms := attempt.ended_at_ms) is not None
            ),
            holder_lives=_lives(
                known,
                each,
                each.worker_instance_id,
                each.lease_acquired_at_ms,
                each.lease_expires_at_ms,
            ),
        )
        for each in asked
    }


async def _stepped_in_attempt(
    reader: Reader, executions: Sequence[Execution]
) -> set[ids.ExecutionId]:
    """The executions that have stored a step in their current attempt."""
    return set(
        await reader.select_as(
            ids.ExecutionId,
            "stepped_attempts",
            partition_keys=[each.partition_key for each in executions],
            execution_ids=[ids.uuid_of(each.execution_id) for each in executions],
            attempt_indexes=[each.current_attempt_index for each in executions],
        )
    )


async def _lost_attempts(
    reader: Reader, executions: Sequence[Execution]
) -> dict[ids.ExecutionId, list[Attempt]]:
    """As many of the latest attempts as workers have died, as far as their leases ran out."""
    keys = [
        (each.partition_key, each.execution_id, index)
        for each in executions
        for index in range(
            max(0, each.current_attempt_index - each.worker_deaths), each.current_attempt_index
        )
    ]
    found: dict[ids.ExecutionId, list[Attempt]] = {}
    for attempt in (await reader.get(Attempt, keys)).values():
        if attempt.failure_reason == LEASE_EXPIRED:
            found.setdefault(attempt.execution_id, []).append(attempt)
    return found


async def _known_workers(
    reader: Reader,
    executions: Sequence[Execution],
    lost: dict[ids.ExecutionId, list[Attempt]],
) -> dict[Key, RegisteredWorker]:
    keys = {
        key
        for each in executions
        for instance_id in (
            each.worker_instance_id,
            *(attempt.worker_instance_id for attempt in lost.get(each.execution_id, ())),
        )
        for key in _worker_keys(each, instance_id)
    }
    return await reader.get(RegisteredWorker, sorted(keys))


def _worker_keys(execution: Execution, instance_id: str | None) -> list[tuple[str, str]]:
    """A worker serves one namespace, or all of them."""
    if instance_id is None:
        return []
    return [(execution.namespace, instance_id), (workers.EVERYWHERE, instance_id)]


def _lives(
    known: dict[Key, RegisteredWorker],
    execution: Execution,
    instance_id: str | None,
    began_ms: int | None,
    ended_ms: int | None,
) -> bool:
    if began_ms is None or ended_ms is None:
        return False
    return any(
        key in known and workers.outlived(known[key], began_ms, ended_ms)
        for key in _worker_keys(execution, instance_id)
    )
