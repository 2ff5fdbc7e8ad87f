"""One execution with all that belongs to it."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import TRACEBACK_BYTES_MAX
from flowfabric.core.records import FailedStep, StepKind, failed_step
from flowfabric.core.states import FailureClass, PublicState
from flowfabric.core.steps import NewStep
from flowfabric.core.views import ChildView, StepView
from flowfabric.engine.steps import StepReport
from flowfabric.errors import InvalidInput
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, Given
from tests.conformance.observed import refused
from tests.conformance.pausing import paused

RETRIED = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 5_000}}}


async def test_an_execution_is_read_with_its_steps_attempts_and_children(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    parent = await given.running(tags={"app.tenant": "acme"})
    await engine.record_steps(
        [StepReport(handle=parent.handle, step=NewStep(step_key="charge", result=b"7"))]
    )
    children = []
    for kind in ("first", "second"):
        clock.advance("1s")
        own_id = "the second" if kind == "second" else None
        child = await given.waiting(
            execution_kind=kind, parent_execution_id=parent.execution_id, execution_id=own_id
        )
        children.append(
            ChildView(
                execution_id=child,
                own_id=own_id,
                execution_kind=kind,
                public_state=PublicState.WAITING,
                created_at_ms=clock.now_ms(),
            )
        )
    found = await engine.inspect_execution(parent.execution_id)
    assert found is not None
    assert [(step.name, step.result, step.error) for step in found.steps] == [
        ("charge", b"7", None)
    ]
    assert found.attempts == await engine.list_attempts(parent.execution_id)
    assert found.children == tuple(children)
    plain = await engine.describe_execution(parent.execution_id)
    assert plain is not None
    assert {name: getattr(found, name) for name in plain.__struct_fields__} == structs.asdict(plain)
    child_details = await engine.inspect_execution(children[0].execution_id)
    assert child_details is not None
    assert child_details.parent_execution_id == parent.execution_id
    assert (child_details.steps, child_details.attempts, child_details.children) == ((), (), ())


async def test_an_unknown_execution_has_no_details(engine: Engine) -> None:
    assert await engine.inspect_execution(UNKNOWN_ID) is None


async def test_a_failed_attempt_keeps_its_traceback(engine: Engine, given: Given) -> None:
    ended, retried = (
        await given.running(),
        await given.running(policy=RETRIED),
    )
    for each in (ended, retried):
        await engine.fail(each.handle, "broken", traceback="File main.py, line 7\x00")
        (attempt,) = await engine.list_attempts(each.execution_id)
        assert attempt.failure_traceback == "File main.py, line 7\\0"
    failed = await given.failed()
    (attempt,) = await engine.list_attempts(failed.execution_id)
    assert attempt.failure_traceback is None


async def test_of_a_long_traceback_the_end_is_kept(engine: Engine, given: Given) -> None:
    running = await given.running()
    text = "é" * TRACEBACK_BYTES_MAX + "the cause"
    await engine.fail(
        running.handle, "broken", failure_class=FailureClass.PERMANENT, traceback=text
    )
    (attempt,) = await engine.list_attempts(running.execution_id)
    kept = attempt.failure_traceback
    assert kept is not None
    assert kept.startswith("…é")
    assert kept.endswith("éthe cause")
    assert TRACEBACK_BYTES_MAX - 2 <= len(kept.encode()) <= TRACEBACK_BYTES_MAX


FAILED = FailedStep(
    step_key="charge#2", name="charge", line="=ada", error="ValueError: no", duration_ms=7
)


async def test_an_attempt_names_the_step_that_failed_and_steps_list_it_last(
    engine: Engine, given: Given
) -> None:
    ended, retried = await given.running(), await given.running(policy=RETRIED)
    for each, said in (
        (ended, "It failed at step 'charge': broken."),
        (retried, "It waits 5.0s more (retry backoff). Try 1 failed at step 'charge': broken."),
    ):
        done = NewStep(step_key="charge", result=b"7")
        await engine.record_steps([StepReport(handle=each.handle, step=done)])
        await engine.fail(each.handle, "broken", step=FAILED)
        found = await engine.inspect_execution(each.execution_id)
        assert found is not None
        (attempt,) = found.attempts
        assert failed_step(attempt) == FAILED
        assert [step.step_key for step in found.steps] == ["charge", "charge#2"]
        assert found.steps[-1] == StepView(
            step_key="charge#2",
            name="charge",
            branch="ada",
            kind=StepKind.CALL,
            result=None,
            error="ValueError: no",
            recorded_at_ms=attempt.ended_at_ms or 0,
            duration_ms=7,
            wake_at_ms=None,
            attempt_index=0,
        )
        assert (await engine.explain_execution(each.execution_id)).sentence == said
        assert [step.step_key for step in await engine.list_steps(each.execution_id)] == ["charge"]


async def test_the_next_attempt_stands_for_itself(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    failed = await given.running(policy=RETRIED)
    await engine.fail(failed.handle, "broken", step=FAILED)
    clock.advance("5s")
    await engine.promote_due_delays()
    again = await given.taken()
    found = await engine.inspect_execution(failed.execution_id)
    assert found is not None
    assert found.steps == ()
    assert [failed_step(each) for each in found.attempts] == [FAILED, None]
    stored = NewStep(step_key=FAILED.step_key, name=FAILED.name, failure=b'"no"')
    await engine.record_steps([StepReport(handle=again.handle, step=stored)])
    await engine.fail(again.handle, "broken", failure_class=FailureClass.PERMANENT, step=FAILED)
    found = await engine.inspect_execution(failed.execution_id)
    assert found is not None
    assert [each.error for each in found.steps] == ["no"], "what is stored is not listed twice"


@pytest.mark.parametrize(
    ("field", "value"),
    [("step_key", ""), ("name", "x" * 300), ("line", "x" * 2_000), ("duration_ms", -1)],
)
async def test_a_failed_step_beyond_limits_is_refused(
    engine: Engine, given: Given, field: str, value: object
) -> None:
    running = await given.running()
    step = structs.replace(FAILED, **{field: value})
    async with refused(engine, InvalidInput) as refusal:
        await engine.fail(running.handle, "x", step=step)
    assert refusal.value.field == field


async def test_a_wait_says_when_it_times_out(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    at_ms = clock.now_ms() + 7_200_000
    pause = await paused(given, timeout_at_ms=at_ms)
    said = await engine.explain_execution(pause.execution_id)
    assert said.sentence == "It is suspended until it gets a signal: 'gate'. It times out in 2h."
    assert said.detail["times_out_at_ms"] == at_ms
