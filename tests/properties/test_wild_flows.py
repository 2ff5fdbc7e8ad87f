"""Whatever happens to a flow, nothing in it is ever stuck. A short run of `many_flows`."""

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowfabric import Engine
from flowfabric.store.base import Store
from flowfabric.testing import SettableClock
from tests.properties.asyncio_runner import run
from tests.properties.crashes import Crashes, CrashingPostgres, CrashingSqlite
from tests.properties.wild_flows import CONFIG, WildFlow, play


def play_alone(seed: int, steps: int, make: Callable[[Crashes, SettableClock], Store]) -> None:
    async def go() -> None:
        crashes, clock = Crashes(), SettableClock()
        store = make(crashes, clock)
        engine = await Engine.open(store, CONFIG)
        try:
            await play(WildFlow(random.Random(seed), store, crashes, clock), engine, steps)
        finally:
            await engine.close()

    run(go())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), steps=st.integers(5, 60))
def test_nothing_in_a_flow_is_ever_stuck(seed: int, steps: int) -> None:
    play_alone(seed, steps, CrashingSqlite)


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32), steps=st.integers(20, 60))
def test_nothing_in_a_flow_is_ever_stuck_on_postgres(
    new_database: Callable[[str], str], seed: int, steps: int
) -> None:
    url = new_database("postgres")
    play_alone(seed, steps, lambda crashes, clock: CrashingPostgres(url, crashes, clock))


@pytest.mark.parametrize("number", range(3))
def test_the_same_seed_plays_the_same_flow(number: int) -> None:
    told = []
    for _ in range(2):

        async def go() -> list[str]:
            crashes, clock = Crashes(), SettableClock()
            store = CrashingSqlite(crashes, clock)
            engine = await Engine.open(store, CONFIG)
            flow = WildFlow(random.Random(number), store, crashes, clock)
            await play(flow, engine, 30)
            await engine.close()
            return flow.told

        told.append(run(go()))
    assert told[0] == told[1]
