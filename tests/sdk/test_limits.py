"""Limits in programs: declared by tasks, shared, keyed, and changed at run time."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

import pytest

from flowfabric import App, Context, Limit, testing
from flowfabric.core.limits import LimitSource, WhileSuspended
from flowfabric.engine.limits import GateUse
from flowfabric.errors import Conflict, InvalidInput, NotFound
from flowfabric.limits import LimitStatus, rate_of, rate_text, spec_of
from flowfabric.task import TaskSettings
from flowfabric.testing import LocalApp
from tests.apps import ASK_AGAIN_S, working


class Crowd:
    """Counts how many are in it at once, by name."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}

    async def stay(self, name: str = "") -> None:
        self.now[name] = self.now.get(name, 0) + 1
        self.most[name] = max(self.most.get(name, 0), self.now[name])
        for _ in range(20):
            await asyncio.sleep(0)
        self.now[name] -= 1


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100/m", (100, 60_000)),
        ("5/10s", (5, 10_000)),
        (" 1000 / h ", (1_000, 3_600_000)),
        ("1/1.5s", (1, 1_500)),
        ("2/1h30m", (2, 5_400_000)),
        ("3/ms", (3, 1)),
    ],
)
def test_a_rate_is_a_number_per_time(text: str, rate: tuple[int, int]) -> None:
    assert rate_of("rate", text) == rate


@pytest.mark.parametrize(
    "text", ["", "100", "/m", "100/", "-1/m", "0/m", "1/0s", "1/x", "1/32d", 5]
)
def test_what_is_no_rate_is_refused(text: object) -> None:
    with pytest.raises(InvalidInput, match="rate"):
        rate_of("rate", text)


@pytest.mark.parametrize("text", ["100/1m", "5/10s", "7/1h", "2/1h30m", "9/500ms", "1/1d"])
def test_a_rate_is_told_as_it_is_written(text: str) -> None:
    assert rate_text(spec_of(text, None)) == text


async def test_a_task_runs_no_more_at_once_than_it_says(waiting_app: App) -> None:
    crowd = Crowd()

    @waiting_app.task(concurrency=3)
    async def work(number: int) -> int:
        await crowd.stay()
        return number

    runs = await waiting_app.submit_many([work(number) for number in range(30)])
    async with working(waiting_app, concurrency=20):
        assert [await run.result(timeout="30s") for run in runs] == list(range(30))
    assert crowd.most == {"": 3}


async def test_each_value_of_the_key_has_room_of_its_own(waiting_app: App) -> None:
    crowd = Crowd()

    @waiting_app.task(concurrency=2, key="{tenant}")
    async def sync(tenant: str, number: int) -> None:
        await crowd.stay(tenant)

    calls = [sync(tenant, number) for number in range(8) for tenant in ("ann", "bob", "cy")]
    runs = await waiting_app.submit_many(calls)
    async with working(waiting_app, concurrency=20):
        for run in runs:
            await run.result(timeout="30s")
    assert crowd.most == {"ann": 2, "bob": 2, "cy": 2}
    assert await waiting_app.limits.use("sync") == tuple(
        GateUse(key=key, running=0, started=0, opens_at_ms=None) for key in ("ann", "bob", "cy")
    )


async def test_a_key_may_be_a_function_of_the_arguments(waiting_app: App) -> None:
    crowd = Crowd()

    @waiting_app.task(concurrency=1, key=lambda order, **_: order["customer"] % 2)
    async def ship(order: dict[str, int], *, express: bool = False) -> None:
        await crowd.stay(str(order["customer"] % 2))

    runs = [
        await waiting_app.submit(ship({"customer": number}, express=True)) for number in range(6)
    ]
    async with working(waiting_app, concurrency=20):
        for run in runs:
            await run.result(timeout="30s")
    assert crowd.most == {"0": 1, "1": 1}
    assert [each.key for each in await waiting_app.limits.use("ship")] == ["0", "1"]


async def test_a_key_function_gets_all_arguments_whichever_way_they_are_passed(
    waiting_app: App,
) -> None:
    seen: list[tuple[object, ...]] = []

    def key(tenant: str, since: int, *pages: int, deep: bool, **more: int) -> str:
        seen.append((tenant, since, pages, deep, more))
        return tenant

    @waiting_app.task(concurrency=2, key=key)
    async def sync(
        tenant: str, since: int = 7, *pages: int, deep: bool = True, **more: int
    ) -> None: ...

    @waiting_app.task(concurrency=2, key=lambda tenant, since: f"{tenant}-{since}")
    async def short(ctx: Context, tenant: str, since: int = 0) -> None: ...

    await waiting_app.submit(sync("ann"))
    await waiting_app.submit_many([sync(tenant="bob"), sync("cy", 1, 2, 3, deep=False, size=5)])
    flow = waiting_app.flow("whole")
    flow.add(sync, "dan", since=2)
    await flow.start()
    assert {called[0]: called for called in seen} == {
        "ann": ("ann", 7, (), True, {}),
        "bob": ("bob", 7, (), True, {}),
        "cy": ("cy", 1, (2, 3), False, {"size": 5}),
        "dan": ("dan", 2, (), True, {}),
    }
    runs = [await waiting_app.submit(short, "ann"), await waiting_app.submit(short("ann", since=1))]
    async with working(waiting_app):
        for run in runs:
            await run.result(timeout="30s")
    assert [each.key for each in await waiting_app.limits.use("short")] == ["ann-0", "ann-1"]


async def test_a_key_function_is_not_called_with_what_another_node_will_return() -> None:
    async with testing.engine() as app:

        @app.task
        async def named() -> str:
            return "ann"

        @app.task(concurrency=2, key=lambda tenant="guess": tenant)
        async def sync(tenant: str = "someone") -> None: ...

        flow = app.flow("whole")
        node = flow.add(named)
        with pytest.raises(InvalidInput, match="needs all arguments, which are not known when"):
            flow.add(sync, node)


async def test_tasks_share_a_limit_that_they_name(waiting_app: App) -> None:
    crowd, provider = Crowd(), Limit("provider", concurrency=2)

    @waiting_app.task(limits=[provider])
    async def ask(number: int) -> None:
        await crowd.stay()

    @waiting_app.task(limits=[provider], concurrency=1)
    async def embed(number: int) -> None:
        await crowd.stay()

    runs = await waiting_app.submit_many([task(n) for n in range(8) for task in (ask, embed)])
    async with working(waiting_app, concurrency=20):
        for run in runs:
            await run.result(timeout="30s")
    assert crowd.most == {"": 2}
    assert [each.name for each in await waiting_app.limits.list()] == ["embed", "provider"]


async def test_a_submission_may_name_limits_beside_those_of_its_task(waiting_app: App) -> None:
    crowd = Crowd()

    @waiting_app.task(concurrency=10)
    async def work(tenant: str) -> None:
        await crowd.stay(tenant)

    careful = Limit("careful", concurrency=1, key="{tenant}")
    runs = [
        await waiting_app.submit(work("ann"), limits=[careful], priority=number)
        for number in range(5)
    ]
    runs += await waiting_app.submit_many([work("ann") for _ in range(5)], limits=[careful])
    async with working(waiting_app, concurrency=20):
        for run in runs:
            await run.result(timeout="30s")
    assert crowd.most == {"ann": 1}


async def test_no_more_start_in_a_time_than_the_rate_says() -> None:
    started: list[int] = []
    async with testing.engine() as app:

        @app.task(rate_limit="3/m")
        async def work() -> None:
            started.append(app.clock.now_ms())

        for _ in range(8):
            await app.submit(work)
        assert await app.drain() == 3
        app.clock.advance("1m")
        assert await app.drain() == 3
        assert await app.drain(skip_time=True) == 2
    assert [round((each - started[0]) / 60_000) for each in started] == [0, 0, 0, 1, 1, 1, 2, 2]


async def test_a_rate_wakes_the_worker_when_its_window_opens(waiting_app: App) -> None:
    @waiting_app.task(rate_limit="2/200ms")
    async def work(number: int) -> int:
        return number

    runs = await waiting_app.submit_many([work(number) for number in range(6)])
    async with working(waiting_app, concurrency=20):
        # Looking now and then would take seconds each time.
        async with asyncio.timeout(4):
            assert [await run.result() for run in runs] == list(range(6))


async def test_what_sleeps_or_waits_holds_no_slot() -> None:
    async with testing.engine() as app:

        @app.task(concurrency=1)
        async def approve(ctx: Context, number: int) -> int:
            await ctx.wait_for_signal("approved")
            await ctx.sleep("1h")
            return number

        runs = [await app.submit(approve, number) for number in range(3)]
        await app.drain()
        assert [each.running for each in await app.limits.use("approve")] == [0]
        for run in runs:
            await app.signals.send(run.execution_id, "approved")
        await app.drain(skip_time=True)
        assert [await run.result() for run in runs] == [0, 1, 2]


async def test_what_sleeps_or_waits_keeps_its_slot_where_the_limit_says_so() -> None:
    async with testing.engine() as app:
        entered: list[int] = []

        @app.task(concurrency=1, while_suspended="keep")
        async def deploy(ctx: Context, number: int) -> int:
            entered.append(number)
            await ctx.wait_for_signal("approved")
            await ctx.sleep("1h")
            return number

        # Together: of one millisecond, those submitted one by one have no order.
        runs = await app.submit_many([deploy(number) for number in range(3)])
        for number, run in enumerate(runs):
            await app.drain()
            assert sorted(set(entered)) == list(range(number + 1))
            assert [each.running for each in await app.limits.use("deploy")] == [1]
            await app.signals.send(run.execution_id, "approved")
            await app.drain(skip_time=True)
            assert await run.result() == number
        changed = await app.limits.set("deploy", concurrency=2)
        assert changed.while_suspended is WhileSuspended.KEEP
        changed = await app.limits.set("deploy", concurrency=2, while_suspended="release")
        assert changed.while_suspended is WhileSuspended.RELEASE


# Changing limits at run time


async def running(app: App, limit: str, count: int) -> None:
    """Wait until so many hold a slot, by asking."""
    for _ in itertools.count():
        if [each.running for each in await app.limits.use(limit)] == [count]:
            return
        await asyncio.sleep(ASK_AGAIN_S)


async def test_what_is_set_at_run_time_wins_over_the_program(waiting_app: App) -> None:
    @waiting_app.task(rate_limit="100/m", concurrency=10)
    async def work() -> None: ...

    with pytest.raises(NotFound, match="work"):
        await waiting_app.limits.get("work")
    await waiting_app.submit(work)
    declared = LimitStatus(
        name="work",
        rate="100/1m",
        concurrency=10,
        source=LimitSource.CODE,
        while_suspended=WhileSuspended.RELEASE,
        declared_rate="100/1m",
        declared_concurrency=10,
    )
    assert await waiting_app.limits.get("work") == declared
    changed = await waiting_app.limits.set("work", concurrency=2)
    assert (changed.rate, changed.concurrency, changed.source) == (None, 2, LimitSource.STORED)
    assert (changed.declared_rate, changed.declared_concurrency) == ("100/1m", 10)
    async with working(waiting_app):
        assert await waiting_app.limits.list() == [changed]
    assert await waiting_app.limits.reset("work") == declared


async def test_a_limit_is_removed_unless_runs_are_under_it(waiting_app: App) -> None:
    @waiting_app.task(concurrency=10)
    async def work() -> None: ...

    await waiting_app.submit(work)
    for name in ("work", "wrok"):
        await waiting_app.limits.set(name, concurrency=2)
    await waiting_app.limits.remove("wrok")
    with pytest.raises(Conflict, match="runs, ended or not, that are not deleted yet"):
        await waiting_app.limits.remove("work")
    lifted = await waiting_app.limits.set("work")
    assert (lifted.rate, lifted.concurrency) == (None, None)
    assert [each.name for each in await waiting_app.limits.list()] == ["work"]


async def test_a_changed_limit_lets_waiting_work_go_at_once(waiting_app: App) -> None:
    gate = asyncio.Event()

    @waiting_app.task(concurrency=1)
    async def work() -> None:
        await gate.wait()

    await waiting_app.submit_many([work() for _ in range(3)])
    async with working(waiting_app):
        async with asyncio.timeout(4):
            await running(waiting_app, "work", 1)
            await waiting_app.limits.set("work", concurrency=3)
            await running(waiting_app, "work", 3)
        gate.set()


async def test_the_limits_of_a_program_count_once_its_worker_starts(waiting_app: App) -> None:
    @waiting_app.task(concurrency=4)
    async def work() -> None: ...

    async with working(waiting_app), asyncio.timeout(5):
        for _ in itertools.count():
            if await waiting_app.limits.list():
                break
            await asyncio.sleep(ASK_AGAIN_S)
    assert (await waiting_app.limits.get("work")).concurrency == 4


# Everything that makes runs


async def local(keys: Sequence[str], app: LocalApp, limit: str) -> None:
    assert [each.key for each in await app.limits.use(limit)] == list(keys)


async def test_children_flows_schedules_and_scripts_are_under_the_limits() -> None:
    async with testing.engine() as app:

        @app.task(concurrency=1, key="{tenant}")
        async def sync(tenant: str, extra: int = 0) -> int:
            return extra

        @app.task
        async def parent(ctx: Context) -> int:
            return await (await ctx.submit(sync, "child")).result()

        app.add_schedule("hourly", sync("scheduled"), every="1h")
        await app.submit(parent)
        flow = app.flow("nightly")
        first = flow.add(sync, "flow")
        flow.add(sync, "flow-next", first)
        await flow.start()
        app.blocking.submit(sync, "script")
        await app.drain()
        app.clock.advance("1h")
        await app.drain()
        await local(["child", "flow", "flow-next", "scheduled", "script"], app, "sync")


async def test_a_key_that_is_not_known_when_submitting_is_refused() -> None:
    async with testing.engine() as app:

        @app.task
        async def find() -> str:
            return "ann"

        @app.task(concurrency=1, key="{tenant}")
        async def sync(tenant: str) -> None: ...

        flow = app.flow("nightly")
        with pytest.raises(InvalidInput, match="needs tenant, which is not known when"):
            flow.add(sync, flow.add(find))


# Mistakes


given: Callable[..., TaskSettings] = TaskSettings
"""Settings, also with values of a wrong type."""


async def test_mistakes_are_refused_where_they_are_written() -> None:
    app = App("sqlite:///:memory:")
    provider = Limit("provider", rate="5/s")

    @app.task(limits=[provider])
    async def known() -> None: ...

    async def work(tenant: str) -> None: ...

    async def asked_later(tenant: str) -> str:
        return tenant

    wrong: list[tuple[dict[str, object], str]] = [
        ({"rate_limit": "many"}, "100/m"),
        ({"concurrency": 0}, "concurrency"),
        ({"key": "{tenant}"}, "rate_limit"),
        ({"concurrency": 1, "key": "{customer}"}, "customer"),
        ({"concurrency": 1, "key": "{"}, "template"),
        ({"concurrency": 1, "key": 5}, "key"),
        ({"concurrency": 1, "key": ""}, "must name an argument"),
        ({"concurrency": 1, "key": "tenant"}, "must name an argument"),
        ({"concurrency": 1, "key": asked_later}, "must be a plain function"),
        ({"concurrency": 1, "key": lambda tenant, since: tenant}, "must take all arguments"),
        ({"concurrency": 1, "key": lambda: ""}, "must take all arguments of work by position"),
        ({"while_suspended": "keep"}, "concurrency"),
        ({"rate_limit": "5/s", "while_suspended": "keep"}, "concurrency"),
        ({"concurrency": 1, "while_suspended": "forget"}, "release"),
        ({"limits": [5]}, "limits"),
        ({"limits": "provider"}, "limits"),
        ({"limits": provider}, "limits"),
        ({"limits": [provider, provider]}, "twice"),
        ({"limits": [Limit("provider", rate="6/s")]}, "other values"),
    ]
    for options, named in wrong:
        with pytest.raises(InvalidInput, match=named):
            app.register_task("work", work, given(**options))
    with pytest.raises(InvalidInput, match="needs a rate"):
        Limit("nothing")
    with pytest.raises(InvalidInput, match="name"):
        Limit("", concurrency=1)


async def test_a_key_has_to_have_a_value() -> None:
    async with testing.engine() as app:

        @app.task(concurrency=1, key="{tenant}")
        async def sync(tenant: str | None) -> None: ...

        for tenant, problem in [
            ("", "must not be empty"),
            (None, "tenant is None"),
            ("k" * 300, "key"),
        ]:
            with pytest.raises(InvalidInput, match=problem):
                await app.submit(sync, tenant)

        def fail(tenant: str) -> str:
            raise ValueError(tenant)

        @app.task(concurrency=1, key=fail)
        async def other(tenant: str) -> None: ...

        with pytest.raises(InvalidInput, match="could not be computed"):
            await app.submit(other, "ann")

        @app.task(concurrency=1, key=lambda tenant: object())
        async def third(tenant: str) -> None: ...

        with pytest.raises(InvalidInput, match="must be text or a number"):
            await app.submit(third, "ann")
        assert await app.submitted(sync) == []
