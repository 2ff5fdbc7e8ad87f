"""What a closed app refuses, and that it can be opened again."""

import pytest

from flowfabric import App
from flowfabric.errors import Unavailable


async def test_a_closed_app_submits_nothing_until_it_is_opened_again(store_url: str) -> None:
    app = App(store_url)

    @app.task
    async def echo(number: int) -> int:
        return number

    first = await app.submit(echo, 1)
    await app.close()
    closed = "app: it has been closed; `async with app:` opens it again"
    with pytest.raises(Unavailable, match=closed):
        await app.submit(echo, 2)
    with pytest.raises(Unavailable, match=closed):
        await app.submit_many([echo(2)])
    with pytest.raises(Unavailable, match=closed):
        await app.signals.pending()
    flow = app.flow("later")
    flow.add(echo, 2)
    with pytest.raises(Unavailable, match=closed):
        await flow.start()
    async with app:
        second = await app.submit(echo, 3)
        found = (await app.engine.find_executions()).executions
        assert {each.execution_id for each in found} == {first.execution_id, second.execution_id}
