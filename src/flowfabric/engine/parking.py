"""Putting attempts aside: until a time, until other executions have ended, until code fits them.

The short names take the handle that `claim` gave out; `delay_execution` and
`move_to_waiting_children` name the execution and the fence, or act for the worker with
`source="operator_override"`.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from flowfabric.core import changed_code, checks, parking, results
from flowfabric.core.bounds import BATCH_MAX, SWEEP_BATCH, TEXT_BYTES_MAX
from flowfabric.core.decisions import Changes, Timing, change, combine
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId, parse_execution_id, partition_of
from flowfabric.core.leases import Fence
from flowfabric.core.records import Execution, Waiter
from flowfabric.engine import shell, topics
from flowfabric.engine.shell import Swept
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound
from flowfabric.store.base import Transaction

AWAITED_MAX = 1_000
"""How many executions one execution may wait for at a time."""


class ParkingOperations(shell.Group):
    async def delay(
        self,
        handle: Handle | bytes,
        delay_until_ms: int,
        *,
        begun: bool = True,
        why: str | None = None,
    ) -> results.Delayed:
        """Release the worker until a time; the same attempt continues then.

        With `begun=False` for one that was not begun: deaths of its workers still count. `why` is
        shown to people who ask why it is not running.
        """
        opened = self.shell.open_handle(handle)
        checks.check_time("delay_until_ms", delay_until_ms)
        checks.check_bool("begun", begun)
        checks.check_optional_text("why", why, bytes_max=TEXT_BYTES_MAX)
        return await self.shell.decide_held(
            opened,
            lambda subject, fence, timing: parking.decide_delay(
                subject, fence, delay_until_ms, timing, begun=begun, why=why
            ),
        )

    async def wait_children(self, handle: Handle | bytes) -> results.Moved:
        """Release the worker until the executions this one depends on have ended.

        One that depends on none, as outside a flow, is ready again at once.
        """
        opened = self.shell.open_handle(handle)
        return await self.shell.decide_held(opened, parking.decide_wait_children)

    async def delay_execution(
        self,
        execution_id: str,
        *,
        delay_until_ms: int,
        fence: Fence | None = None,
        attempt_index: int | None = None,
        source: str = "worker",
    ) -> results.Delayed:
        """`delay` by id and fence, or by an operator without one."""
        checks.check_time("delay_until_ms", delay_until_ms)
        return await self.shell.decide_fenced(
            execution_id,
            lambda subject, given, timing: parking.decide_delay(
                subject, given, delay_until_ms, timing
            ),
            fence=fence,
            attempt_index=attempt_index,
            source=source,
        )

    async def move_to_waiting_children(
        self,
        execution_id: str,
        *,
        fence: Fence | None = None,
        attempt_index: int | None = None,
        source: str = "worker",
    ) -> results.Moved:
        """`wait_children` by id and fence, or by an operator without one."""
        return await self.shell.decide_fenced(
            execution_id,
            parking.decide_wait_children,
            fence=fence,
            attempt_index=attempt_index,
            source=source,
        )

    # Until others have ended

    async def await_executions(
        self, handle: Handle | bytes, execution_ids: Sequence[str], *, until_ms: int | None = None
    ) -> results.Moved:
        """Release the worker until any of the executions has ended, or until a given time."""
        opened = self.shell.open_handle(handle)
        checks.check_list("execution_ids", execution_ids, 1, AWAITED_MAX)
        checks.check_optional_time("until_ms", until_ms)
        awaited_ids = {self.shell.check_execution_id(each) for each in execution_ids}
        if opened.execution_id in awaited_ids:
            raise InvalidInput("execution_ids", "an execution cannot wait for itself")

        async def body(tx: Transaction) -> results.Moved | FlowFabricError:
            everyone = sorted({*awaited_ids, opened.execution_id})
            found = await tx.lock(Execution, [shell.execution_key(each) for each in everyone])
            awaited = {e.execution_id: e for e in found.values() if e.execution_id in awaited_ids}
            if len(awaited) < len(awaited_ids):
                raise NotFound("execution", min(awaited_ids - awaited.keys()))
            parking.check_awaitable(found.get(shell.execution_key(opened.execution_id)), awaited)
            ask = shell.held_ask(
                opened,
                lambda subject, fence, timing: parking.decide_await(
                    subject, fence, awaited, until_ms, timing
                ),
            )
            (outcome,) = await self.shell.decide_in(tx, [ask])
            if not isinstance(outcome, FlowFabricError):
                waiters = [
                    parking.new_waiter(each, opened.execution_id) for each in sorted(awaited)
                ]
                await tx.insert_new(waiters)
            return outcome

        return shell.answered(await self.store.transact(body))

    async def wake_awaiting(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Make executions ready that wait for one that has ended."""
        checks.check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            ended = await tx.select_as(ExecutionId, "ended_and_awaited", limit=limit)
            if not ended:
                return Swept(acted=0, full=False)
            acted = await self._wake(tx, ended)
            return Swept(acted=acted, full=len(ended) == limit, held=acted < len(ended))

        return await self.store.transact(body)

    async def _wake(self, tx: Transaction, ended: Sequence[ExecutionId]) -> int:
        """Return for how many of them every waiter was woken; a locked one delays no other."""
        waiters = await tx.select_records(Waiter, "list_waiters", **shell.id_columns(ended))
        waiting = sorted({parse_execution_id(waiter.waiting) for waiter in waiters})
        held = await shell.lock_free(tx, waiting)
        late = {each for each in waiters if parse_execution_id(each.waiting) in held}
        notified = {*ended}.difference(each.execution_id for each in late)
        # Locked once more, now as records: the rows are held already.
        done = await tx.lock(Execution, [shell.execution_key(each) for each in sorted(notified)])
        subjects = await shell.lock_subjects(tx, [each for each in waiting if each not in held])
        timing = self.shell.timing(await tx.now_ms())
        woken = combine(
            parking.decide_wake(subject, timing).changes for subject in subjects.values()
        )
        cleared = tuple(
            change(execution, timing.now_ms, awaited=False) for execution in done.values()
        )
        await tx.save(Changes(updates=(*woken.updates, *cleared), events=woken.events))
        topics.hint_about(tx, Changes(updates=woken.updates), timing.now_ms)
        return len(done)

    # Until the code of its task fits it; see `core.parking`

    async def block_on_code(
        self,
        handle: Handle | bytes,
        step_key: str | None,
        detail: str,
        *,
        advice: str = changed_code.DEPLOY,
    ) -> results.Delayed:
        """Release the worker because the code does not fit what is stored. Safe to repeat.

        `detail` says in words what does not fit, and `advice` what to do about it; `step_key`
        names the step that must not run, if it is one, so that an operator can allow it.
        """
        opened = self.shell.open_handle(handle)
        checks.check_optional_text("step_key", step_key)
        checks.check_text("detail", detail, bytes_max=TEXT_BYTES_MAX, empty=False)
        checks.check_text("advice", advice, empty=False)
        return await self.shell.decide_held(
            opened,
            lambda subject, fence, timing: changed_code.decide_block(
                subject, fence, step_key, detail, timing, advice=advice
            ),
        )


# Executions that wait for one that is gone ----------------------------------
#
# What others wait for is never trimmed, so there are none, unless rows were deleted by
# hand. Nothing would ever tell them of an end: they are woken, and find out for themselves.


class WaiterRow(Struct, frozen=True):
    place: int
    waiting: str
    execution_id: ExecutionId | None
    """None where nothing is wrong, in the last row of a page."""


async def find_stranded(
    tx: Transaction, after: str, limit: int
) -> tuple[tuple[Waiter, ...], str | None]:
    """The next waits for missing executions, and the last waiter looked at; None at the end."""
    rows = await tx.select_as(WaiterRow, "audit_waiters", after=after, limit=limit)
    lost = tuple(
        Waiter(
            partition_key=partition_of(row.execution_id),
            execution_id=row.execution_id,
            waiting=row.waiting,
        )
        for row in rows
        if row.execution_id is not None
    )
    full = bool(rows) and rows[-1].place == limit
    return lost, rows[-1].waiting if full else None


async def wake_stranded(
    tx: Transaction, waits: Sequence[Waiter], timing: Callable[[int], Timing]
) -> int:
    """Decide again under lock: the problem may have resolved itself since. How many were woken."""
    subjects = await shell.lock_subjects(tx, {parse_execution_id(each.waiting) for each in waits})
    there = await tx.get(
        Execution, sorted({shell.execution_key(each.execution_id) for each in waits})
    )
    lost = {
        (*shell.execution_key(each.execution_id), each.waiting)
        for each in waits
        if shell.execution_key(each.execution_id) not in there
    }
    gone = await tx.lock(Waiter, sorted(lost))
    waiting = {parse_execution_id(each.waiting) for each in gone.values()}
    at = timing(await tx.now_ms())
    woken = combine(
        parking.decide_wake(subject, at).changes
        for execution_id, subject in subjects.items()
        if execution_id in waiting
    )
    await tx.save(combine([woken, Changes(deletes=tuple(gone.values()))]))
    topics.hint_about(tx, woken, at.now_ms)
    return len(woken.updates)
