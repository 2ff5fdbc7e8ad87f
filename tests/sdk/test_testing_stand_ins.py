"""While a test's app is open, whatever uses the app under test happens in the test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flowfabric import App, Context, testing
from flowfabric.errors import InvalidInput, Unavailable


class Shop:
    """A module of an application, which knows its own app and nothing of tests."""

    def __init__(self, path: Path, namespace: str = "default") -> None:
        self.path = path
        self.app = app = App(f"sqlite:///{path}", namespace=namespace)
        # As modules may hold them.
        self.signals = app.signals
        self.blocking = app.blocking

        @app.task
        async def ship(order: int) -> int:
            return order

        @app.task
        async def order(ctx: Context, number: int) -> int:
            run = await ctx.step("ship", lambda: self.submitted_by_a_step(number))
            await ctx.wait_for_signal("paid")
            return run

        self.ship = ship
        self.order = order

    async def submitted_by_a_step(self, number: int) -> int:
        await self.app.submit(self.ship, number)
        return number

    def is_untouched(self) -> bool:
        return not self.path.exists()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "real.db")


async def test_what_a_handler_submits_through_its_app_is_in_the_test(shop: Shop) -> None:
    async with testing.engine(app=shop.app) as app:
        run = await app.submit(shop.order, 7)
        await app.drain()
        assert await app.submitted(shop.ship) == [{"order": 7}]
        await shop.signals.send(run.execution_id, "paid")
        await app.drain()
        assert await run.result() == 7
    assert shop.is_untouched()


async def test_runs_flows_and_views_of_the_app_are_those_of_the_test(shop: Shop) -> None:
    async with testing.engine(app=shop.app) as app:
        run = await shop.app.submit(shop.ship, 1)
        await shop.app.submit_many([shop.ship(2), shop.ship(3)])
        flow = shop.app.flow("pair")
        node = flow.add(shop.ship, 4)
        started = await flow.start()
        assert shop.app.engine is app.engine
        assert await app.drain() == 4
        assert await shop.app.run(shop.ship, run.execution_id).result() == 1
        assert await shop.app.flow_run(started.flow_id).state() == "completed"
        assert await started.result(node) == 4
        assert (await shop.app.signals.pending()).entries == ()
    assert shop.is_untouched()


@pytest.mark.parametrize("in_thread", [True, False])
async def test_code_without_an_event_loop_is_in_the_test(shop: Shop, in_thread: bool) -> None:
    def view() -> str:
        run = shop.blocking.submit(shop.order, 5)
        shop.app.blocking.submit_many([shop.ship(6)])
        shop.blocking.signals.send(run.execution_id, "paid")
        return shop.blocking.run(shop.order, run.execution_id).execution_id

    async with testing.engine(app=shop.app) as app:
        execution_id = await asyncio.to_thread(view) if in_thread else view()
        await app.drain()
        assert await app.run(shop.order, execution_id).result() == 5
        assert await app.submitted(shop.ship) == [{"order": 6}, {"order": 5}]
    assert shop.is_untouched()


async def test_opening_and_closing_the_app_leaves_the_test_open(shop: Shop) -> None:
    async with testing.engine(app=shop.app) as app:
        async with shop.app:
            run = await shop.app.submit(shop.ship, 1)
        await app.drain()
        assert await run.result() == 1
    assert shop.is_untouched()


async def _leave_by_an_error(shop: Shop) -> None:
    with pytest.raises(ZeroDivisionError):
        async with testing.engine(app=shop.app):
            raise ZeroDivisionError


async def _leave_where_resources_do_not_close(shop: Shop) -> None:
    @asynccontextmanager
    async def stubborn() -> AsyncIterator[Path]:
        yield shop.path
        raise ZeroDivisionError

    shop.app.provide(Path, stubborn)
    app = testing.LocalApp(shop.app)
    await app.drain()
    with pytest.raises(ZeroDivisionError):
        await app.close()


async def _leave_two_in_the_order_they_came(shop: Shop) -> None:
    one, other = testing.LocalApp(shop.app), testing.LocalApp(shop.app)
    await one.open()
    await other.open()
    await shop.app.submit(shop.ship, 1)
    assert await one.submitted(shop.ship) == []
    await one.close()
    await shop.app.submit(shop.ship, 2)
    assert len(await other.submitted(shop.ship)) == 2
    await other.close()


@pytest.mark.parametrize(
    "leave",
    [_leave_by_an_error, _leave_where_resources_do_not_close, _leave_two_in_the_order_they_came],
)
async def test_afterwards_the_app_is_its_own_again(
    shop: Shop, leave: Callable[[Shop], Awaitable[None]]
) -> None:
    await leave(shop)
    assert shop.is_untouched()
    async with shop.app:
        run = await shop.app.submit(shop.ship, 1)
        assert await run.state() == "waiting"
    with shop.blocking:
        assert shop.blocking.run(shop.ship, run.execution_id).state() == "waiting"
    assert not shop.is_untouched()


def test_a_test_that_closes_nothing_ends_with_its_event_loop(shop: Shop) -> None:
    async def careless() -> None:
        await testing.LocalApp(shop.app).open()
        await shop.app.submit(shop.ship, 1)

    asyncio.run(careless())
    assert shop.is_untouched()
    with shop.blocking:
        assert shop.blocking.submit(shop.ship, 2).state() == "waiting"
    assert not shop.is_untouched()


async def test_a_run_of_the_test_does_not_outlive_it(shop: Shop) -> None:
    async with testing.engine(app=shop.app):
        run = await shop.app.submit(shop.ship, 1)
    with pytest.raises(Unavailable, match="closed"):
        await run.state()
    assert shop.is_untouched()


async def test_an_app_that_the_test_does_not_know_is_refused_before_it_opens(shop: Shop) -> None:
    def view() -> None:
        shop.blocking.submit(shop.ship, 2)

    async with testing.engine() as app:
        for use in (
            lambda: shop.app.submit(shop.ship, 1),
            shop.app.open,
            shop.signals.pending,
            lambda: asyncio.to_thread(view),
        ):
            with pytest.raises(Unavailable, match=r"testing\.engine\(app=shop\.app\)"):
                await use()
        async with testing.engine(app=shop.app):
            await shop.app.submit(shop.ship, 1)
        await app.submit(shop.ship, 3)
        await shop.app.submit(shop.ship, 4)
        assert await app.drain() == 2
    assert shop.is_untouched()
    async with shop.app:
        assert not shop.is_untouched()


async def test_apps_that_are_adopted_later_are_in_the_test_too(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "real.db", namespace="shop")
    whole = App(f"sqlite:///{tmp_path / 'whole.db'}")
    whole.adopt(shop.app)
    async with testing.engine(app=whole) as app:
        run = await shop.app.submit(shop.ship, 1)
        await app.drain()
        assert await run.result() == 1
    async with testing.engine() as app:
        run = await app.submit(shop.order, 2)
        await app.drain()
        assert await app.submitted(shop.ship) == [{"order": 2}]
        await shop.signals.send(run.execution_id, "paid")
        assert await app.drain() == 1
    assert shop.is_untouched()


def test_what_is_no_app_is_refused(shop: Shop) -> None:
    with pytest.raises(InvalidInput, match=r"app=shop\.app"):
        vars(testing)["LocalApp"](pytest)
