"""Two apps on one database, each in a namespace of its own."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from flowfabric import App, Context
from flowfabric.core.states import PublicState
from flowfabric.errors import IdempotencyConflict, InvalidInput, NotFound
from flowfabric.signals import SignalToken
from tests.apps import reached, working


def app_of(url: str, namespace: str) -> App:
    """Apps that differ in nothing but their namespace and what their tasks answer."""
    app = App(url, namespace=namespace)

    @app.task
    async def greet(name: str) -> str:
        return f"{name} from {namespace}"

    @app.task
    async def ask(ctx: Context) -> str:
        child = await ctx.submit(greet, "child")
        greeting = await child.result()
        await ctx.wait_for_signal("go", timeout="1h")
        return greeting

    app.add_schedule("nightly", greet(namespace), cron="0 3 * * *")
    return app


@pytest.fixture
async def shop(store_url: str) -> AsyncIterator[App]:
    async with app_of(store_url, "shop") as app:
        yield app
        app.blocking.close()


@pytest.fixture
async def bank(store_url: str) -> AsyncIterator[App]:
    async with app_of(store_url, "bank") as app:
        yield app
        app.blocking.close()


async def test_each_app_runs_its_own_tasks_of_the_same_name(shop: App, bank: App) -> None:
    async with working(shop), working(bank, worker_instance_id="w-2"):
        runs = [
            await app.submit(app.tasks["greet"](f"n{each}"), idempotency_key=f"{each}")
            for each in range(5)
            for app in (shop, bank)
        ]
        answers = [await run.result(timeout="20s") for run in runs]
    assert answers == [f"n{each} from {name}" for each in range(5) for name in ("shop", "bank")]


async def test_an_app_leaves_alone_what_is_not_its_own(shop: App, bank: App) -> None:
    theirs = await bank.submit(bank.tasks["greet"]("ada"))
    async with working(shop):
        own = await shop.submit(shop.tasks["greet"]("bob"))
        assert await own.result(timeout="20s") == "bob from shop"
    assert await theirs.state() is PublicState.WAITING
    assert (await theirs.why()).cause == "no_worker"


async def test_a_child_is_in_the_namespace_of_its_parent(shop: App, bank: App) -> None:
    async with working(shop), working(bank, worker_instance_id="w-2"):
        run = await shop.submit(shop.tasks["ask"]())
        await reached(run, PublicState.SUSPENDED)
        await run.signal("go")
        assert await run.result(timeout="20s") == "child from shop"


async def test_an_app_submits_no_task_of_another_namespace(shop: App, bank: App) -> None:
    theirs = bank.tasks["greet"]
    named = "greet is a task of namespace 'bank', and this app is in 'shop'"
    with pytest.raises(InvalidInput, match=named):
        await shop.submit(theirs("ada"))
    with pytest.raises(InvalidInput, match=named):
        await shop.submit(theirs("ada"), priority=3)
    with pytest.raises(InvalidInput, match=named):
        await shop.submit_many([shop.tasks["greet"]("bob"), theirs("ada")])
    with pytest.raises(InvalidInput, match=named):
        shop.flow("both").add(theirs, "ada")


async def test_a_handler_submits_no_task_of_another_namespace(shop: App, bank: App) -> None:
    @bank.task
    async def transfer() -> None: ...

    @bank.task(name="greet", version=2)
    async def greet_politely() -> None: ...

    @shop.task
    async def pay(ctx: Context) -> list[str]:
        told: list[str] = []
        for task in (transfer, greet_politely):
            try:
                await ctx.submit(task)
            except InvalidInput as error:
                told.append(str(error))
        return told

    async with working(shop):
        told = await (await shop.submit(pay)).result(timeout="20s")
    assert told == [
        f"submit: {name} is a task of namespace 'bank', and a child is in that of its parent,"
        " 'shop'; submit it through its own app inside a step, or adopt that app"
        for name in ("transfer", "greet")
    ]
    page = await shop.engine.find_executions()
    assert [each.execution_kind for each in page.executions] == ["pay"]


async def test_a_handler_submits_tasks_of_an_app_that_its_own_has_adopted(shop: App) -> None:
    more = App(shop.url, namespace="more")

    @more.task
    async def pack() -> str:
        return "packed"

    @shop.task
    async def order(ctx: Context) -> str:
        return await (await ctx.submit(pack)).result()

    shop.adopt(more)
    async with working(shop):
        assert await (await shop.submit(order)).result(timeout="20s") == "packed"


async def test_a_schedule_of_the_same_name_is_another_in_each_namespace(
    shop: App, bank: App
) -> None:
    for app in (shop, bank):
        await app.store_schedules(app.engine)
    found = (await shop.engine.list_schedules()).schedules
    assert [(each.namespace, each.payload) for each in found] == [
        ("bank", b'{"name":"bank"}'),
        ("shop", b'{"name":"shop"}'),
    ]
    made = await shop.engine.trigger_schedule("nightly", namespace="shop")
    assert await shop.engine.get_execution_namespace(made.execution_id) == "shop"


async def test_a_run_of_another_namespace_is_not_found(shop: App, bank: App) -> None:
    run = await bank.submit(bank.tasks["greet"]("ada"))
    strange = shop.run(shop.tasks["greet"], run.execution_id)
    for asking in (strange.state, strange.result, strange.why, strange.cancel, strange.snapshot):
        with pytest.raises(NotFound):
            await asking()
    with pytest.raises(NotFound):
        await strange.signal("go")
    blocking = await asyncio.to_thread(
        shop.blocking.run, shop.tasks["greet"], str(run.execution_id)
    )
    with pytest.raises(NotFound):
        await asyncio.to_thread(blocking.result, 1)
    own = bank.run(bank.tasks["greet"], run.execution_id)
    assert await own.state() is PublicState.WAITING


async def test_submitting_under_the_id_of_another_namespace_is_refused(
    shop: App, bank: App
) -> None:
    theirs = await bank.submit(bank.tasks["greet"]("ada"))
    for asked in (str(theirs.execution_id), theirs.execution_id[-36:]):
        call = shop.tasks["greet"]("ada")
        with pytest.raises(IdempotencyConflict):
            await shop.submit(call, execution_id=asked)
        with pytest.raises(IdempotencyConflict):
            await shop.submit_many([call], execution_id=asked)
        with pytest.raises(IdempotencyConflict):
            await asyncio.to_thread(shop.blocking.submit, call, execution_id=asked)
        again = await bank.submit(bank.tasks["greet"]("ada"), execution_id=asked)
        assert await again.state() is PublicState.WAITING


async def test_signals_stay_in_their_namespace(shop: App, bank: App) -> None:
    async with working(bank):
        run = await bank.submit(bank.tasks["ask"]())
        await reached(run, PublicState.SUSPENDED)
        token = await bank.signals.token(run.execution_id, "go")
        with pytest.raises(NotFound):
            await shop.signals.token(run.execution_id, "go")
        with pytest.raises(NotFound):
            await shop.signals.send(run.execution_id, "go")
        with pytest.raises(NotFound):
            await shop.signals.deliver(SignalToken.parse(token.reveal()), "go")
        assert (await shop.signals.pending()).entries == ()
        assert [each.name for each in (await bank.signals.pending()).entries] == ["go"]
        await bank.signals.deliver(token, "go")
        assert await run.result(timeout="20s") == "child from bank"


async def test_a_flow_is_in_the_namespace_of_its_app(shop: App, bank: App) -> None:
    flow = bank.flow("nightly")
    node = flow.add(bank.tasks["greet"]("ada"))
    started = await flow.start()
    strange = shop.flow_run(started.flow_id)
    for asking in (strange.state, strange.cancel, strange.view):
        with pytest.raises(NotFound):
            await asking()
    again = shop.flow("nightly", flow_id=started.flow_id)
    again.add(shop.tasks["greet"]("ada"))
    with pytest.raises(IdempotencyConflict, match="is taken"):
        await again.start()
    async with working(bank):
        assert await started.result(node, timeout="20s") == "ada from bank"


async def test_an_idempotency_key_is_another_in_each_namespace(shop: App, bank: App) -> None:
    ids = {
        (await app.submit(app.tasks["greet"]("ada"), idempotency_key="k")).execution_id
        for app in (shop, bank, shop)
    }
    assert len(ids) == 2


async def test_adopted_schedules_move_to_the_adopting_namespace(store_url: str, bank: App) -> None:
    async with App(store_url, namespace="shop") as shop:
        shop.adopt(bank)
        await shop.store_schedules(shop.engine)
        found = (await shop.engine.list_schedules()).schedules
    assert [each.namespace for each in found] == ["shop"]
