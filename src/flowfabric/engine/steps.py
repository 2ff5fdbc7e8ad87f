"""Storing durable steps, and reading them."""

from collections.abc import Sequence

from msgspec import Struct, structs

from flowfabric.core import checks
from flowfabric.core.bounds import BATCH_MAX, FAILURE_BYTES_MAX, NAME_BYTES_MAX
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId
from flowfabric.core.journal import LINE_BYTES_MAX, STEP_KEY_BYTES_MAX, STEP_NAME_BYTES_MAX
from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.core.records import Execution, Step, StepKind
from flowfabric.core.steps import NewStep, StepStored, decide_record, in_order, recoded
from flowfabric.engine import shell
from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.store.base import Reader, Transaction
from flowfabric.store.mapping import answers_of

STEPS_MAX = 1_000_000_000
"""What no number of a step exceeds."""


class StepReport(Struct, frozen=True, kw_only=True, gc=False):
    """One finished step, for `record_steps`."""

    handle: Handle
    step: NewStep


class StoredRow(Struct, frozen=True, gc=False, array_like=True):
    position: int
    at_ms: int


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

        async def record_rest(
            rest: Sequence[StepReport],
        ) -> list[StepStored | FlowFabricError]:
            return [await self._record_one(each) for each in rest]

        return await shell.answers_in_order(checked, sure, record_rest)

    def _packed_report(self, report: StepReport) -> StepReport:
        return structs.replace(report, step=recoded(report.step, self.shell.values.pack))

    def _check_report(self, report: StepReport) -> StepReport:
        if not isinstance(report, StepReport):
            raise InvalidInput("report", "must be a StepReport", report)
        handle = self.shell.open_handle(report.handle)
        bytes_max = self.shell.config.payload_bytes_max
        # A codec may make more of what its worker has limited already.
        failure_max = FAILURE_BYTES_MAX * (2 if self.shell.values.coded else 1)
        step = check_step(report.step, bytes_max, failure_max)
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
            places[row.position]: StepStored(at_ms=row.at_ms) for row in answers_of(StoredRow, rows)
        }

    async def _record_one(self, report: StepReport) -> StepStored | FlowFabricError:
        execution = shell.execution_key(report.handle.execution_id)

        async def body(tx: Transaction) -> StepStored | FlowFabricError:
            # Locked first: the same report may still be on its way, whose answer was lost.
            await tx.lock(Execution, [execution])
            stored = await tx.get_one(Step, (*execution, report.step.step_key))
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
        full_id = self.shell.check_execution_id(execution_id)
        values = self.shell.values
        return tuple(
            await values.through_all(
                await self.store.read(lambda reader: steps_of(reader, full_id)),
                lambda each: recoded(each, values.unpack),
            )
        )


async def steps_of(reader: Reader, execution_id: ExecutionId) -> tuple[Step, ...]:
    found = await reader.select_records(Step, "list_steps", **shell.columns_of(execution_id))
    return tuple(in_order(found))


def check_step(step: object, result_bytes_max: int, failure_bytes_max: int) -> NewStep:
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
    checks.check_optional_bytes(f"the failure of {key}", step.failure, failure_bytes_max)
    if step.sleep_ms is not None:
        checks.check_int("sleep_ms", step.sleep_ms, 0, DURATION_MAX_MS)
    if step.duration_ms is not None:
        checks.check_int("duration_ms", step.duration_ms, 0, DURATION_MAX_MS)
    if step.name and kind is step.kind:
        return step
    return structs.replace(step, kind=kind, name=step.name or key)
