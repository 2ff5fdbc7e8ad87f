"""Executions that wait for one that is gone.

Nothing that somebody waits for is trimmed, so there are none; unless rows were deleted by
hand. Nobody would ever tell them of an end: they are woken, and find out for themselves.
"""

from collections.abc import Callable, Sequence

from flowfabric.core.executions import Timing
from flowfabric.core.ids import parse_execution_id
from flowfabric.core.records import Execution, Waiter
from flowfabric.core.steps import decide_wake
from flowfabric.core.transitions import Changes, combine
from flowfabric.engine.unit import execution_key, hint_about, load_subjects, row_execution_id
from flowfabric.store.base import Transaction


async def find_stranded(
    tx: Transaction, after: str, limit: int
) -> tuple[tuple[Waiter, ...], str | None]:
    """Waits for what is gone, of the next who wait, and the last of these; none at the end."""
    rows = await tx.select("audit_waiters", after=after, limit=limit)
    lost = tuple(
        Waiter(
            partition_key=int(str(row["partition_key"])),
            execution_id=row_execution_id(row),
            waiting=str(row["waiting"]),
        )
        for row in rows
        if row["execution_id"] is not None
    )
    full = bool(rows) and int(str(rows[-1]["place"])) == limit
    return lost, str(rows[-1]["waiting"]) if full else None


async def wake_stranded(
    tx: Transaction, waits: Sequence[Waiter], timing: Callable[[int], Timing]
) -> int:
    """Decide again under lock, for meanwhile all may be well; tell how many were woken."""
    subjects = await load_subjects(tx, {parse_execution_id(each.waiting) for each in waits})
    there = await tx.get(Execution, sorted({execution_key(each.execution_id) for each in waits}))
    lost = {
        (*execution_key(each.execution_id), each.waiting)
        for each in waits
        if execution_key(each.execution_id) not in there
    }
    gone = await tx.lock(Waiter, sorted(lost))
    waiting = {parse_execution_id(each.waiting) for each in gone.values()}
    at = timing(await tx.now_ms())
    woken = combine(
        decide_wake(subject, at).changes
        for execution_id, subject in subjects.items()
        if execution_id in waiting
    )
    await tx.save(combine([woken, Changes(deletes=tuple(gone.values()))]))
    hint_about(tx, woken, at.now_ms)
    return len(woken.updates)
