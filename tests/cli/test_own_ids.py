"""Ids of somebody's own, wherever people read or type ids."""

import re
from collections.abc import Callable

import pytest

from flowfabric import App, Context, Engine, connect
from flowfabric.core.conditions import Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import uuid_of
from flowfabric.errors import NotFound
from tests.apps import working
from tests.cli.command import run


async def create(engine: Engine, own_id: str, namespace: str = "default") -> str:
    created = await engine.create_execution(
        NewExecution(execution_kind="work", execution_id=own_id, namespace=namespace)
    )
    return created.execution_id


async def test_an_own_id_is_enough_in_whatever_namespace(engine: Engine, url: str) -> None:
    ours = await create(engine, "order-1", "shop")
    assert run("show", "order-1", "--json", url=url).document["execution_id"] == ours
    assert run("why", "order-1", url=url).status == 0

    theirs = await create(engine, "order-1", "bank")
    ran = run("cancel", "order-1", url=url)
    assert ran.status == 2
    assert "bank, shop" in ran.err
    assert "--namespace" in ran.err
    assert run("cancel", "order-1", "--namespace", "bank", url=url).out == "1 cancelled\n"
    assert run("show", theirs, "--json", url=url).document["public_state"] == "cancelled"


async def test_show_calls_parents_and_children_as_people_do(url: str) -> None:
    app = App(url)

    @app.task
    async def ship() -> str:
        return "sent"

    @app.task
    async def order(ctx: Context) -> str:
        return await (await ctx.submit(ship, execution_id="parcel-7")).result()

    async with app, working(app):
        done = await app.submit(order, execution_id="order-7")
        await done.result("20s")
    shown = run("show", "order-7", url=url).out
    assert "result of parcel-7" in shown
    assert re.search(r"^submit ship .* parcel-7$", shown, re.MULTILINE)
    assert re.search(r"^parcel-7 +completed +ship ", shown, re.MULTILINE)
    assert re.search(
        rf"^parent +order-7  {re.escape(done.execution_id)}$",
        run("show", "parcel-7", url=url).out,
        re.MULTILINE,
    )
    assert '"own_id":"parcel-7"' in run("show", "order-7", "--json", url=url).out


@pytest.fixture(params=["sqlite-file", "postgres"])
def any_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    return new_database(str(request.param))


@pytest.mark.parametrize("own_id", ["7th", "nightly of the seventh of July, 2026"])
async def test_flows_are_found_by_ids_of_their_own(any_url: str, own_id: str) -> None:
    url = any_url
    ids = {}
    for namespace in ("shop", "bank"):
        app = App(url, namespace=namespace)

        @app.task
        async def work() -> None: ...

        async with app:
            for _ in range(2):
                flow = app.flow("nightly", flow_id=own_id)
                flow.add(work)
                ids[namespace] = (await flow.start()).flow_id
            assert await app.flow_run(own_id).state() == "open"
            with pytest.raises(NotFound):
                await app.flow_run("8th").state()
    assert ids["shop"] != ids["bank"]
    ran = run("flow", "cancel", own_id, url=url)
    assert ran.status == 2
    assert "bank, shop" in ran.err
    ran = run("flow", "cancel", own_id, "--namespace", "bank", "--json", url=url)
    assert (ran.document["flow_id"], ran.document["members"]) == (ids["bank"], 1)
    shown = run("flow", "show", own_id, "--namespace", "shop", "--json", url=url).document
    assert (shown["flow_id"], shown["state"]) == (ids["shop"], "open")


async def test_events_are_counted_and_confined_and_name_own_ids(any_url: str) -> None:
    url = any_url
    async with await connect(url) as engine:
        for number in range(4):
            for namespace in ("shop", "bank"):
                own_id = f"{namespace}-{number}"
                await engine.cancel_execution(await create(engine, own_id, namespace), reason="no")

    def named(*arguments: str) -> list[str]:
        lines = run("events", *arguments, "--category", "completion", url=url).lines
        return [line.split()[5] for line in lines]

    assert named("-n", "3") == ["bank-2", "shop-3", "bank-3"]
    assert len(named("-n", "20")) == 8
    assert named("-n", "3", "--namespace", "shop") == ["shop-1", "shop-2", "shop-3"]


async def test_answers_and_refusals_name_own_ids(engine: Engine, url: str) -> None:
    await create(engine, "order-1")
    for command in ("revoke", "accept"):
        ran = run(command, "order-1", url=url)
        assert ran.status == 4
        assert ran.err.splitlines()[1].split()[0] == "order-1"
    assert run("priority", "order-1", "7", url=url).out == "order-1 now has priority 7\n"
    ran = run("signal", "order-1", "approved", "--no-keep", url=url)
    assert (ran.status, ran.err.split()[:2]) == (4, ["Error:", "order-1"])
    assert "--no-keep" in ran.err
    ran = run("replay", "order-1", url=url)
    assert ran.err.splitlines()[1].split()[:2] == ["order-1", "order-1"]

    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    await engine.suspend(claimed.handle, resume_condition=Single("approved"))
    assert run("waitpoints", url=url).lines[1].split()[0] == "order-1"
    ran = run("priority", "order-1", "7", url=url)
    assert (ran.status, ran.err.split()[:2]) == (4, ["Error:", "order-1"])
    assert run("signal", "order-1", "approved", url=url).out.startswith("approved to order-1: ")


async def test_without_an_own_id_answers_name_the_uuid_as_lists_do(
    engine: Engine, url: str
) -> None:
    created = await engine.create_execution(NewExecution(execution_kind="work"))
    uuid = uuid_of(created.execution_id)
    assert run("signal", uuid, "approved", url=url).out.startswith(f"approved to {uuid}: ")
    assert run("priority", uuid, "7", url=url).out == f"{uuid} now has priority 7\n"
    await engine.cancel_execution(uuid, reason="no")
    ran = run("priority", uuid, "7", url=url)
    assert (ran.status, ran.err.split()[:2]) == (4, ["Error:", uuid])

    ran = run("submit", "work", "--id", "order-1", "--wait", "1ms", url=url)
    waiting, error = ran.err.splitlines()
    assert waiting == "waiting for order-1"
    assert error.startswith("Error: waiting for order-1 timed out after 1 ms: No running ")
