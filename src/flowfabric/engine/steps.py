"""Storing durable steps, waiting for other executions, and handing leases back."""

from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from flowfabric.core import checks
from flowfabric.core.bounds import BATCH_MAX, FAILURE_BYTES_MAX, NAME_BYTES_MAX, SWEEP_BATCH
from flowfabric.core.executions import decide_hand_back
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId, parse_execution_id, partition_of, uuid_of
from flowfabric.core.journal import LINE_BYTES_MAX, STEP_KEY_BYTES_MAX, STEP_NAME_BYTES_MAX
from flowfabric.core.parking import check_awaitable, decide_await, decide_wake, new_waiter
from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.core.records import Execution, Step, StepKind, Waiter
from flowfabric.core.results import HandedBack, Moved
from flowfabric.core.steps import NewStep, StepStored, decide_record, in_order
from flowfabric.core.transitions import Changes, Timing, change, combine
from flowfabric.engine import shell, topics
from flowfabric.engine.shell import Swept
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound
from flowfabric.store.base import Reader, Transaction
from flowfabric.store.mapping import answers_of

STEPS_MAX = 1_000_000_000
"""What no number of a step exceeds."""
AWAITED_MAX = 1_000
"""How many executions one execution may wait for at a time."""


class StepReport(Struct, frozen=True, kw_only=True, gc=False):
    """One finished step, for `record_steps`."""

    handle: Handle
    step: NewStep


class StoredRow(Struct, frozen=True, gc=False, array_like=True):
    position: int
    now_ms: int


class Steps(shell.Group):
    async def record_steps(
        self, reports: Sequence[StepReport]
    ) -> list[StepStored | FlowFabricError]:
        """Store finished steps, each under its handle's fence. Safe to repeat."""
        checks.check_list("reports", reports, 0, BATCH_MAX)
        packed = await self.shell.values.through_all(reports, self._packed_report)
        checked = [shell.value_or_error(self._check_report, report) for report in packed]
        given = {i: each for i, each in enumerate(checked) if isinstance(each, StepReport)}
        sure = await self._record_sure(list(given), list(given.values())) if given else {}
        answers: list[StepStored | FlowFabricError] = []
        for position, each in enumerate(checked):
            if isinstance(each, FlowFabricError):
                answers.append(each)
            elif position in sure:
                answers.append(sure[position])
            else:
                answers.append(await self._record_one(each))
        return answers

    def _packed_report(self, report: StepReport) -> StepReport:
        step = structs.replace(report.step, result=self.shell.values.pack(report.step.result))
        return structs.replace(report, step=step)

    def _check_report(self, report: StepReport) -> StepReport:
        if not isinstance(report, StepReport):
            raise InvalidInput("report", "must be a StepReport", report)
        handle = self.shell.open_handle(report.handle)
        step = check_step(report.step, self.shell.config.payload_bytes_max)
        if handle is report.handle and step is report.step:
            return report
        return StepReport(handle=handle, step=step)

    async def _record_sure(
        self, places: Sequence[int], reports: Sequence[StepReport]
    ) -> dict[int, StepStored]:
        steps = [report.step for report in reports]
        rows = await self.store.execute_alone(
            "record_steps",
            step_keys=[step.step_key for step in steps],
            after_keys=[step.after_key for step in steps],
            kinds=[step.kind.value for step in steps],
            lines=[step.line for step in steps],
            names=[step.name for step in steps],
            digests=[step.digest for step in steps],
            numbers=[step.number for step in steps],
            parallels=[step.parallel for step in steps],
            asked_afters=[step.asked_after for step in steps],
            positions=[step.position for step in steps],
            failures=[step.failure for step in steps],
            results=[step.result for step in steps],
            sleeps_ms=[step.sleep_ms for step in steps],
            durations_ms=[step.duration_ms for step in steps],
            **shell.lease_columns([report.handle for report in reports]),
        )
        return {
            places[row.position]: StepStored(at_ms=row.now_ms)
            for row in answers_of(StoredRow, rows)
        }

    async def _record_one(self, report: StepReport) -> StepStored | FlowFabricError:
        key = (*shell.execution_key(report.handle.execution_id), report.step.step_key)

        async def body(tx: Transaction) -> StepStored | FlowFabricError:
            stored = await tx.get_one(Step, key)
            ask = shell.held_ask(
                report.handle,
                lambda subject, fence, timing: decide_record(
                    subject, fence, report.step, stored, timing
                ),
            )
            (outcome,) = await self.shell.decide_in(tx, [ask])
            return outcome

        return await self.store.transact(body)

    async def list_steps(self, execution_id: str) -> tuple[Step, ...]:
        """Every finished step of an execution, in the order they were made in."""
        asked = self.shell.check_execution_id(execution_id)

        async def body(reader: Reader) -> tuple[Step, ...]:
            found = await reader.select_records(
                Step, "list_steps", partition_key=partition_of(asked), execution_id=uuid_of(asked)
            )
            return tuple(in_order(found))

        values = self.shell.values
        return tuple(
            await values.through_all(
                await self.store.read(body),
                lambda each: structs.replace(each, result=values.unpack(each.result)),
            )
        )

    # Waiting for others

    async def await_executions(
        self, handle: Handle | bytes, execution_ids: Sequence[str], *, until_ms: int | None = None
    ) -> Moved:
        """Release the worker until any of the executions has ended, or until a given time."""
        opened = self.shell.open_handle(handle)
        checks.check_list("execution_ids", execution_ids, 1, AWAITED_MAX)
        checks.check_optional_time("until_ms", until_ms)
        asked = {self.shell.check_execution_id(each) for each in execution_ids}
        if opened.execution_id in asked:
            raise InvalidInput("execution_ids", "an execution cannot wait for itself")

        async def body(tx: Transaction) -> Moved | FlowFabricError:
            everyone = sorted({*asked, opened.execution_id})
            found = await tx.lock(Execution, [shell.execution_key(each) for each in everyone])
            awaited = {e.execution_id: e for e in found.values() if e.execution_id in asked}
            if len(awaited) < len(asked):
                raise NotFound("execution", min(asked - awaited.keys()))
            check_awaitable(found.get(shell.execution_key(opened.execution_id)), awaited)
            ask = shell.held_ask(
                opened,
                lambda subject, fence, timing: decide_await(
                    subject, fence, awaited, until_ms, timing
                ),
            )
            (outcome,) = await self.shell.decide_in(tx, [ask])
            if not isinstance(outcome, FlowFabricError):
                waiters = [new_waiter(each, opened.execution_id) for each in sorted(awaited)]
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
        woken = combine(decide_wake(subject, timing).changes for subject in subjects.values())
        cleared = tuple(
            change(execution, timing.now_ms, awaited=False) for execution in done.values()
        )
        await tx.save(Changes(updates=(*woken.updates, *cleared), events=woken.events))
        topics.hint_about(tx, Changes(updates=woken.updates), timing.now_ms)
        return len(done)

    # Giving work back

    async def hand_back(self, handle: Handle | bytes, *, reason: str) -> HandedBack:
        """Return a lease before it ends; the execution is ready for another worker at once."""
        (outcome,) = await self.hand_back_many([handle], reason=reason)
        return shell.answered(outcome)

    async def hand_back_many(
        self, handles: Sequence[Handle | bytes], *, reason: str
    ) -> list[HandedBack | FlowFabricError]:
        """Return many leases at once; each gets its own answer or error."""
        checks.check_list("handles", handles, 0, BATCH_MAX)
        why = checks.check_reason(reason)
        opened = [shell.value_or_error(self.shell.open_handle, handle) for handle in handles]
        nothing: dict[int, HandedBack] = {}

        def ask(handle: Handle) -> shell.Ask[HandedBack]:
            return shell.held_ask(
                handle,
                lambda subject, fence, timing: decide_hand_back(subject, fence, why, timing),
            )

        return await self.shell.decide_rest(opened, nothing, ask)


def check_step(step: object, result_bytes_max: int) -> NewStep:
    if not isinstance(step, NewStep):
        raise InvalidInput("step", "must be a NewStep", step)
    key = checks.check_text("step_key", step.step_key, bytes_max=STEP_KEY_BYTES_MAX, empty=False)
    checks.check_optional_text("after_key", step.after_key, bytes_max=STEP_KEY_BYTES_MAX)
    kind = checks.check_choice("kind", step.kind, StepKind)
    checks.check_text("line", step.line, bytes_max=LINE_BYTES_MAX)
    checks.check_text("name", step.name, bytes_max=STEP_NAME_BYTES_MAX)
    checks.check_text("digest", step.digest, bytes_max=NAME_BYTES_MAX)
    checks.check_int("number", step.number, 1, STEPS_MAX)
    if not isinstance(step.parallel, bool):
        raise InvalidInput("parallel", "must be a bool", step.parallel)
    if step.asked_after is not None:
        checks.check_int("asked_after", step.asked_after, -STEPS_MAX, STEPS_MAX)
    if step.position is not None:
        checks.check_int("position", step.position, 1, STEPS_MAX)
    checks.check_optional_bytes(f"the result of {key}", step.result, result_bytes_max)
    checks.check_optional_bytes(f"the failure of {key}", step.failure, FAILURE_BYTES_MAX)
    if step.sleep_ms is not None:
        checks.check_int("sleep_ms", step.sleep_ms, 0, DURATION_MAX_MS)
    if step.duration_ms is not None:
        checks.check_int("duration_ms", step.duration_ms, 0, DURATION_MAX_MS)
    if step.name and kind is step.kind:
        return step
    return structs.replace(step, kind=kind, name=step.name or key)


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
        decide_wake(subject, at).changes
        for execution_id, subject in subjects.items()
        if execution_id in waiting
    )
    await tx.save(combine([woken, Changes(deletes=tuple(gone.values()))]))
    topics.hint_about(tx, woken, at.now_ms)
    return len(woken.updates)
