"""What the end of an execution does to its pauses and waitpoints."""

import pytest

from flowfabric import Engine
from flowfabric.core.bounds import RETENTION_FAILED_MS
from flowfabric.core.records import WaitpointState
from flowfabric.core.results import Claimed, Completed
from flowfabric.core.waitpoints import PendingWaitpoint
from flowfabric.engine.executions import Completion
from flowfabric.errors import InvalidToken, NotFound
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conditions import all_of_waitpoints
from tests.conformance.given import Given
from tests.conformance.observed import execution_of
from tests.conformance.pausing import create, new_id, paused, suspension_of, waitpoint_of


async def test_every_end_of_an_execution_closes_what_is_open(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    async def open_both() -> tuple[Claimed, PendingWaitpoint]:
        claimed = await given.running(execution_deadline_at_ms=clock.now_ms() + 60_000)
        return claimed, await create(engine, claimed)

    completed, one = await open_both()
    await engine.complete(completed.handle)
    failed, two = await open_both()
    await engine.fail(failed.handle, "broken")
    cancelled, three = await open_both()
    await engine.cancel_execution(cancelled.execution_id, reason="enough")
    given_up, four = await open_both()
    await engine.cancel(given_up.handle, "mine")
    late, five = await open_both()
    clock.advance(ms=60_000)
    await engine.expire_execution(late.execution_id, "execution_deadline")
    for claimed, pending, reason in (
        (completed, one, "completed"),
        (failed, two, "failed_terminal"),
        (cancelled, three, "cancelled"),
        (given_up, four, "cancelled"),
        (late, five, "expired:execution_deadline"),
    ):
        waitpoint = await waitpoint_of(engine, claimed.execution_id, pending.waitpoint_id)
        assert (waitpoint.state, waitpoint.close_reason) == (WaitpointState.CLOSED, reason)
        execution = await execution_of(engine, claimed.execution_id)
        assert execution.open_waitpoint_count == 0


async def test_a_batch_of_completions_closes_waitpoints_too(engine: Engine, given: Given) -> None:
    plain = await given.running()
    claimed = await given.running()
    pending = await create(engine, claimed)
    answers = await engine.complete_many(
        [Completion(handle=plain.handle), Completion(handle=claimed.handle)]
    )
    assert [type(answer) for answer in answers] == [Completed, Completed]
    waitpoint = await waitpoint_of(engine, claimed.execution_id, pending.waitpoint_id)
    assert waitpoint.state is WaitpointState.CLOSED


async def test_ending_a_suspended_execution_closes_pause_and_waitpoints(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    fields: dict[str, object] = {"execution_deadline_at_ms": clock.now_ms() + 1_000}
    cancelled = await paused(given, all_of_waitpoints(["a", "b"]))
    await engine.cancel_execution(cancelled.execution_id, reason="enough")
    late = await paused(given, fields=fields)
    clock.advance(ms=1_000)
    assert (await run_due(engine))["deadline"] == 1
    for taken, reason in ((cancelled, "cancelled"), (late, "expired:execution_deadline")):
        stored = await suspension_of(engine, taken.execution_id, taken.details.suspension_id)
        assert (stored.close_reason, stored.closed_at_ms is None) == (reason, False)
        for key in [taken.details.waitpoint_key] + [
            extra.waitpoint_key for extra in taken.details.additional_waitpoints
        ]:
            waitpoint = await waitpoint_of(engine, taken.execution_id, taken.waitpoint(key)[0])
            assert (waitpoint.state, waitpoint.close_reason) == (WaitpointState.CLOSED, reason)
        assert await engine.observe_signals(taken.handle) == ()
    execution = await execution_of(engine, cancelled.execution_id)
    assert (execution.current_suspension_id, execution.current_waitpoint_id) == (None, None)


async def test_all_of_it_is_deleted_with_the_execution(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await paused(given, idempotency_key="once")
    await taken.signal("noise")
    await taken.signal()
    await engine.complete((await given.taken()).handle)
    clock.advance(days=31)
    assert (await run_due(engine))["retention"] == 1
    assert await engine.describe_suspension(taken.execution_id, taken.details.suspension_id) is None
    assert await engine.observe_signals(taken.handle, include_unmatched=True) == ()
    with pytest.raises(KeyError):
        await waitpoint_of(engine, taken.execution_id, taken.waitpoint_id)


async def test_a_token_of_a_run_that_was_deleted_is_told_so(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    """Who presents what we have signed learns nothing from it; who presents anything else may."""
    taken = await paused(given)
    await engine.cancel_execution(taken.execution_id, reason="enough")
    clock.advance(ms=RETENTION_FAILED_MS)
    assert (await engine.trim_retention()).acted == 1
    with pytest.raises(NotFound):
        await taken.deliver()
    with pytest.raises(InvalidToken) as caught:
        await engine.deliver_signal(
            taken.execution_id,
            new_id(),
            waitpoint_token=taken.token,
            signal_name="approved",
        )
    assert type(caught.value) is InvalidToken
