"""A run that kills every worker fails, and none of those that die with it."""

from flowfabric import App
from flowfabric.core.states import PublicState
from tests.e2e.conftest import PATIENCE_S, python
from tests.e2e.poison import kill_the_worker, look_around, look_twice, poisoned

NEIGHBOURS = 4
DEATHS = 3


async def test_a_run_that_kills_its_workers_fails_alone(store_url: str) -> None:
    app = App(store_url, migrate=True)
    app.adopt(poisoned)
    async with app:
        poison = await app.submit(kill_the_worker)
        calls = [look_around(number) for number in range(NEIGHBOURS)]
        calls += [look_twice(number) for number in range(NEIGHBOURS)]
        beside = await app.submit_many(calls)
        for _ in range(DEATHS):
            async with python("tests.e2e.poison", store_url) as dying:
                await dying.communicate()
        async with python("tests.e2e.poison", store_url):
            results = [await run.result(timeout=PATIENCE_S) for run in beside]
            deaths = "its worker died 3 times in a row"
            assert deaths in (await poison.why()).sentence
        assert results == 2 * list(range(NEIGHBOURS))
        assert await poison.state() is PublicState.FAILED
