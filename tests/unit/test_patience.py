"""Who says how long a statement may take."""

import asyncio

import pytest

from flowfabric.outages import LEFT_MIN_S, everything_within, patience_s, statements_within


def test_who_says_nothing_leaves_it_to_the_store() -> None:
    assert (patience_s(), patience_s(30.0)) == (None, 30.0)


def test_the_shortest_of_what_was_said_counts() -> None:
    with statements_within(2.0):
        assert (patience_s(), patience_s(30.0), patience_s(1.0)) == (2.0, 2.0, 1.0)
        with everything_within(1_000.0):
            assert patience_s() == 2.0
        with everything_within(1.0):
            assert patience_s(30.0) == pytest.approx(1.0, abs=0.999)


def test_what_is_left_of_the_whole_becomes_less_and_never_nothing() -> None:
    with everything_within(1_000.0):
        first_s = patience_s()
        second_s = patience_s()
    assert first_s is not None
    assert second_s is not None
    assert second_s <= first_s <= 1_000.0
    with everything_within(-1.0):
        assert patience_s() == LEFT_MIN_S
    assert patience_s() is None


async def test_what_a_block_leaves_behind_is_not_held_to_it() -> None:
    over = asyncio.Event()

    async def later() -> float | None:
        await over.wait()
        return patience_s()

    with everything_within(-1.0):
        left_behind = asyncio.create_task(later())
        await asyncio.sleep(0)
    over.set()
    assert await left_behind is None
