"""Schedules in the tests of the people who declare them."""

from flowfabric import App, Context
from flowfabric.testing import SettableClock, engine


async def test_moving_the_clock_runs_what_is_scheduled() -> None:
    app = App()
    ran: list[str] = []

    @app.schedule(every="1h")
    async def hourly(ctx: Context) -> None:
        ran.append("hourly")

    @app.schedule("0 6 * * *", timezone="Europe/Rome", catch_up="all")
    def morning(ctx: Context) -> None:
        ran.append("morning")

    clock = SettableClock()
    async with engine(clock, app=app) as local:
        assert await local.drain(skip_time=True) == 0
        clock.advance("1h")
        await local.drain()
        assert ran == ["hourly"]
        clock.advance("3d")
        await local.drain()
    assert sorted(ran) == ["hourly", "hourly", "morning", "morning", "morning"]
