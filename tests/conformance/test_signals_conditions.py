"""Signals that count towards conditions over several of them."""

from flowfabric import Engine
from flowfabric.core.conditions import (
    AllConditions,
    ByName,
    Count,
    CountKind,
    Single,
)
from flowfabric.core.records import WaitpointState
from flowfabric.errors import WaitpointClosed
from tests.conditions import all_of_waitpoints
from tests.conformance.given import Given
from tests.conformance.observed import refused
from tests.conformance.pausing import (
    APPENDED,
    DUPLICATE,
    FAILED,
    SATISFIED,
    effect_of,
    paused,
    waitpoint_of,
)


async def test_all_of_two_names_on_one_waitpoint(given: Given) -> None:
    both = AllConditions((Single("gate", ByName("alpha")), Single("gate", ByName("beta"))))
    pause = await paused(given, both)
    assert await pause.signal("alpha") is APPENDED
    assert await pause.signal("alpha") is DUPLICATE
    assert await pause.signal("gamma") is FAILED
    assert await pause.signal("beta") is SATISFIED


async def test_all_of_three_waitpoints_each_with_its_own_token(given: Given) -> None:
    pause = await paused(given, all_of_waitpoints(["a", "b", "c"]))
    assert await pause.signal(key="c") is APPENDED
    assert await pause.signal(key="a") is APPENDED
    assert await pause.signal(key="b") is SATISFIED


async def test_resuming_closes_every_waitpoint_of_the_pause(engine: Engine, given: Given) -> None:
    anyone = Count(1, CountKind.DISTINCT_WAITPOINTS, ("a", "b", "c"))
    pause = await paused(given, anyone)
    assert await pause.signal(key="c") is SATISFIED
    for key in "abc":
        waitpoint_id, _ = pause.waitpoint(key)
        waitpoint = await waitpoint_of(engine, pause.execution_id, waitpoint_id)
        assert (waitpoint.state, waitpoint.close_reason) == (WaitpointState.CLOSED, "resumed")
        async with refused(engine, WaitpointClosed):
            await pause.deliver("late", key=key)


async def test_distinct_sources_are_counted_once_each(given: Given) -> None:
    two = Count(2, CountKind.DISTINCT_SOURCES, ("gate",))
    pause = await paused(given, two)
    assert await pause.signal(source="alice") is APPENDED
    assert await pause.signal(source="alice") is DUPLICATE
    assert await pause.signal(source="bob") is SATISFIED


async def test_a_source_is_its_type_and_its_name(given: Given) -> None:
    two = Count(2, CountKind.DISTINCT_SOURCES, ("gate",))
    pause = await paused(given, two)
    effects = [
        effect_of(
            await pause.deliver(
                "x",
                source_type=source_type,
                source_identity=identity,
            )
        )
        for source_type, identity in [("a:b", "c"), ("a", "b:c")]
    ]
    assert effects == [APPENDED, SATISFIED]


async def test_distinct_signals_are_counted_by_their_id(given: Given) -> None:
    pause = await paused(given, Count(2, CountKind.DISTINCT_SIGNALS, ("gate",)))
    assert await pause.signal() is APPENDED
    assert await pause.signal() is SATISFIED


async def test_a_count_looks_through_its_own_matcher(given: Given) -> None:
    approvals = Count(1, CountKind.DISTINCT_SOURCES, ("gate",), ByName("approve"))
    pause = await paused(given, approvals)
    assert await pause.signal("reject") is FAILED
    assert await pause.signal("approve") is SATISFIED


async def test_two_counts_do_not_satisfy_each_other(given: Given) -> None:
    both = AllConditions(
        (
            Count(1, CountKind.DISTINCT_SOURCES, ("a",), ByName("yes")),
            Count(1, CountKind.DISTINCT_SOURCES, ("b",), ByName("yes")),
        )
    )
    pause = await paused(given, both)
    assert await pause.signal("yes", key="a", source="alice") is APPENDED
    assert await pause.signal("yes", key="a", source="bob") is DUPLICATE
    assert await pause.signal("yes", key="b", source="alice") is SATISFIED


async def test_a_count_three_levels_down_is_met(given: Given) -> None:
    deep = AllConditions(
        (AllConditions((AllConditions((Count(2, CountKind.DISTINCT_SIGNALS, ("gate",)),)),)),)
    )
    pause = await paused(given, deep)
    assert await pause.signal() is APPENDED
    assert await pause.signal() is SATISFIED
