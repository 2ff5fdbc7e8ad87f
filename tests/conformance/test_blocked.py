"""Executions that changed code stopped: set aside, looked at again, released, accepted."""

import pytest

from flowfabric import Engine
from flowfabric.core.changed_code import LOOK_AGAIN_MS, LOOK_AGAIN_MS_MAX
from flowfabric.core.diagnosis import Cause, Explanation
from flowfabric.core.ids import uuid_of
from flowfabric.core.records import Step, StepKind
from flowfabric.core.results import Changed, Claimed, Delayed, Marked
from flowfabric.core.states import AttemptState, BlockingReason, EligibilityState, PublicState
from flowfabric.engine.shell import Swept
from flowfabric.errors import ExecutionNotActive, ExecutionNotEligible, NotFound
from flowfabric.testing import SettableClock
from tests.conformance.expected import attempt_set_aside, lease_event, set_aside
from tests.conformance.given import EVERY_STATE, TAGGED, UNKNOWN_ID, Given
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    unchanged,
)

DETAIL = "the code asks for step 'notify' where 'charge' is stored"


async def block(engine: Engine, claimed: Claimed, step_key: str | None = "notify") -> Delayed:
    return await engine.block_on_code(claimed.handle, step_key, DETAIL)


async def test_changed_code_sets_the_attempt_aside_and_counts_nothing(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running(**TAGGED)
    execution_id = running.execution_id
    before = await execution_of(engine, execution_id)
    (attempt,) = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance("1s")
    assert await block(engine, running) == Delayed(
        execution_id=execution_id, public_state=PublicState.DELAYED
    )
    advice = (
        f"{DETAIL}; deploy code that fits, or accept the change:"
        f" flowfabric accept {uuid_of(execution_id)}"
    )
    assert await execution_of(engine, execution_id) == set_aside(
        before,
        EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
        BlockingReason.WAITING_FOR_CODE,
        AttemptState.ATTEMPT_INTERRUPTED,
        now_ms,
        blocking_detail=advice,
        delay_until_ms=now_ms + LOOK_AGAIN_MS,
    )
    assert await engine.list_attempts(execution_id) == (
        attempt_set_aside(attempt, "blocked_by_code", now_ms, blocked_on="notify", blocked_count=1),
    )
    assert await events_since(engine, cursor) == [
        lease_event(before, "revoked", now_ms, "blocked_by_code")
    ]
    assert await engine.explain_execution(execution_id) == Explanation(
        execution_id=execution_id,
        public_state=PublicState.DELAYED,
        cause=Cause.CODE_CHANGED,
        sentence=f"It is blocked: {advice}. A worker looks again in 1m.",
        needs_somebody=True,
        detail={
            "blocking_reason": "waiting_for_code",
            "blocking_detail": advice,
            "delay_until_ms": now_ms + LOOK_AGAIN_MS,
        },
    )


async def test_blocking_again_gives_the_same_answer_and_changes_nothing(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running()
    answer = await block(engine, running)
    clock.advance("10s")
    async with unchanged(engine):
        assert await block(engine, running) == answer


async def test_blocking_is_no_repeat_of_a_delay(engine: Engine, given: Given) -> None:
    parked, blocked = await given.parked(), await given.blocked()
    async with refused(engine, ExecutionNotActive):
        await block(engine, parked)
    async with refused(engine, ExecutionNotActive):
        await engine.delay(blocked.handle, 0)


async def test_a_blocked_execution_looks_again_less_and_less_often(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running()
    waits = []
    for _ in range(9):
        await block(engine, running)
        until_ms = (await execution_of(engine, running.execution_id)).delay_until_ms
        assert until_ms is not None
        waits.append(until_ms - clock.now_ms())
        clock.set_ms(until_ms)
        assert (await engine.promote_due_delays()).acted == 1
        running = await given.taken()
        assert (running.attempt_index, running.retry_count) == (0, 0)
    minutes = [wait // LOOK_AGAIN_MS for wait in waits]
    assert minutes == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert waits[-1] == LOOK_AGAIN_MS_MAX


async def test_an_execution_that_got_past_the_change_begins_anew_with_the_short_wait(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running()
    await block(engine, running)
    await engine.release_blocked(["work"])
    await engine.delay((await given.taken()).handle, 0)
    (attempt,) = await engine.list_attempts(running.execution_id)
    assert (attempt.blocked_on, attempt.blocked_count) == (None, 0)


async def test_a_worker_that_starts_releases_what_its_code_may_fit(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    mine = [(await given.blocked()).execution_id for _ in range(3)]
    others = (await given.blocked(execution_kind="other")).execution_id
    parked = (await given.parked()).execution_id
    assert await engine.release_blocked(["work", "more"], limit=2) == Swept(acted=2, full=True)
    assert await engine.release_blocked(["work", "more"], limit=2) == Swept(acted=1, full=False)
    assert await engine.release_blocked([]) == Swept(acted=0, full=False)
    taken = {(await given.taken()).execution_id for _ in mine}
    assert taken == set(mine)
    for execution_id in (others, parked):
        assert await engine.read_execution_state(execution_id) is PublicState.DELAYED


async def test_a_worker_releases_nothing_of_other_namespaces(engine: Engine, given: Given) -> None:
    mine = (await given.blocked()).execution_id
    others = (await given.blocked(namespace="another")).execution_id
    assert await engine.release_blocked(["work"], namespace="default") == Swept(acted=1, full=False)
    assert await engine.read_execution_state(mine) is PublicState.WAITING
    assert await engine.read_execution_state(others) is PublicState.DELAYED


async def test_what_was_blocked_since_is_not_released(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    early = (await given.blocked()).execution_id
    started_ms = clock.now_ms()
    clock.advance("1ms")
    late = (await given.blocked()).execution_id
    released = await engine.release_blocked(["work"], blocked_before_ms=started_ms)
    assert released == Swept(acted=1, full=False)
    assert (await given.taken()).execution_id == early
    assert await engine.read_execution_state(late) is PublicState.DELAYED


async def test_accepting_a_change_stores_it_and_makes_the_execution_ready(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running()
    execution_id = running.execution_id
    await block(engine, running)
    now_ms = clock.advance("5s")
    assert await engine.accept_changes(execution_id) == Changed(execution_id=execution_id)
    (accepted,) = await engine.list_steps(execution_id)
    assert isinstance(accepted, Step)
    assert (accepted.step_key, accepted.kind, accepted.recorded_at_ms) == (
        "accept notify",
        StepKind.ACCEPT,
        now_ms,
    )
    async with unchanged(engine):
        await engine.accept_changes(execution_id)
    resumed = await given.taken()
    assert (resumed.execution_id, resumed.attempt_index) == (execution_id, 0)


async def test_a_change_is_accepted_while_the_execution_waits_to_look_again(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    blocked = await given.blocked()
    clock.advance("1m")
    assert isinstance(await engine.promote_delayed(blocked.execution_id), Marked)
    await engine.accept_changes(blocked.execution_id)
    (accepted,) = await engine.list_steps(blocked.execution_id)
    assert accepted.step_key == "accept charge"


@pytest.mark.parametrize("state", [each for each in EVERY_STATE if each != "blocked"])
async def test_nothing_is_accepted_for_an_execution_that_is(
    engine: Engine, given: Given, state: str
) -> None:
    execution_id = await given.state(state)
    async with refused(engine, ExecutionNotEligible):
        await engine.accept_changes(execution_id)


async def test_what_is_stored_and_does_not_fit_cannot_be_accepted(
    engine: Engine, given: Given
) -> None:
    running = await given.running()
    await block(engine, running, step_key=None)
    detail = (await execution_of(engine, running.execution_id)).blocking_detail
    assert detail == f"{DETAIL}; deploy code that fits, or cancel it"
    async with refused(engine, ExecutionNotEligible) as refusal:
        await engine.accept_changes(running.execution_id)
    assert "changes nothing that is stored" in str(refusal.value)
    assert detail in str(refusal.value)


async def test_an_unknown_execution_has_nothing_to_accept(engine: Engine) -> None:
    async with refused(engine, NotFound):
        await engine.accept_changes(UNKNOWN_ID)
