"""One execution with all that belongs to it."""

from msgspec import structs

from flowfabric import Engine
from flowfabric.core.details import ChildView
from flowfabric.core.limits import TRACEBACK_BYTES_MAX
from flowfabric.core.states import FailureClass, PublicState
from flowfabric.core.steps import NewStep
from flowfabric.engine.steps import StepReport
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, Given


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
        child = await given.waiting(execution_kind=kind, parent_execution_id=parent.execution_id)
        children.append(
            ChildView(
                execution_id=child,
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
        await given.running(
            policy={
                "retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 5_000}}
            }
        ),
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
