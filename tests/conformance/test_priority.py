"""Changing the priority of what waits."""

from msgspec import structs

from flowfabric import Engine
from flowfabric.core.results import Changed
from flowfabric.errors import ExecutionNotEligible, NotFound
from flowfabric.testing import SettableClock
from tests.conformance.expected import operator_event
from tests.conformance.given import EVERY_STATE, SET_ASIDE, UNKNOWN_ID, WAITING, Given
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    unchanged,
)


async def test_a_changed_priority_is_stored_and_told(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting(
        priority=5, namespace="shop", tags={"cairn.instance_id": "i-1"}
    )
    before = await execution_of(engine, execution_id)
    start = (await engine.read_events()).cursor
    now_ms = clock.advance("1s")
    assert await engine.change_priority(execution_id, 70) == Changed(execution_id=execution_id)
    after = await execution_of(engine, execution_id)
    assert after == structs.replace(before, priority=70, last_mutation_at_ms=now_ms)
    assert await events_since(engine, start) == [
        operator_event(after, "priority_changed", '{"old_priority":5,"new_priority":70}', now_ms)
    ]


async def test_the_same_priority_may_be_asked_for_again(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    first = await engine.change_priority(execution_id, 70)
    after = await execution_of(engine, execution_id)
    assert await engine.change_priority(execution_id, 70) == first
    assert await execution_of(engine, execution_id) == after


async def test_a_raised_execution_overtakes_the_others(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    first = await given.waiting()
    clock.advance("1s")
    second = await given.waiting()
    clock.advance("1s")
    late = await given.waiting()
    await engine.change_priority(late, 1)
    await engine.change_priority(second, 0)
    taken = [(await given.taken()).execution_id for _ in range(3)]
    assert taken == [late, first, second]


async def test_a_new_priority_is_clamped(engine: Engine, given: Given) -> None:
    for priority, stored in ((10_000, 9_000), (-5, 0)):
        execution_id = await given.waiting(priority=50)
        await engine.change_priority(execution_id, priority)
        assert (await execution_of(engine, execution_id)).priority == stored


async def test_only_what_waits_for_a_worker_changes_its_priority(
    engine: Engine, given: Given
) -> None:
    for state in EVERY_STATE:
        execution_id = await given.state(state)
        if state in WAITING:
            await engine.change_priority(execution_id, 1)
            continue
        async with refused(engine, ExecutionNotEligible):
            await engine.change_priority(execution_id, 1)


async def test_on_request_anything_runnable_changes_its_priority(
    engine: Engine, given: Given
) -> None:
    for state in {*WAITING, *SET_ASIDE} - {"suspended"}:
        execution_id = await given.state(state)
        cursor = await cursor_of(engine)
        await engine.change_priority(execution_id, 8, any_runnable=True)
        assert (await execution_of(engine, execution_id)).priority == 8
        assert len(await events_since(engine, cursor)) == 1
    for state in ("running", "suspended", "revoked", "completed"):
        execution_id = await given.state(state)
        async with refused(engine, ExecutionNotEligible):
            await engine.change_priority(execution_id, 8, any_runnable=True)


async def test_bad_priorities_are_refused(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    bad: list[object] = ["high", None, 1.0, True]
    async with unchanged(engine):
        for priority in bad:
            await refuses(engine, "new_priority", "change_priority", execution_id, priority)
        await refuses(
            engine, "any_runnable", "change_priority", execution_id, 1, any_runnable="yes"
        )
    async with refused(engine, NotFound):
        await engine.change_priority(UNKNOWN_ID, 1)
