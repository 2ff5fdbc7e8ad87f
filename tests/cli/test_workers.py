"""`workers` and the counts of `lanes list`."""

import asyncio
import itertools
from pathlib import Path

from flowfabric import App, Engine
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.creation import NewExecution
from tests.apps import ASK_AGAIN_S, PATIENCE_S, working
from tests.cli.command import run

TTL_MS = 60_000


async def register(engine: Engine, name: str, namespace: str | None = None) -> None:
    await engine.register_worker(
        ["default", "gpu"],
        worker_id="pool",
        worker_instance_id=name,
        liveness_ttl_ms=TTL_MS,
        kinds=["send"],
        capabilities=["cuda"],
        namespace=namespace,
    )


async def test_a_list_shows_what_workers_serve_and_have_in_hand(engine: Engine, url: str) -> None:
    assert run("workers", "list", url=url).lines == []
    await register(engine, "w-1")
    await register(engine, "w-2", "shop")
    await engine.create_execution(NewExecution(execution_kind="send"))
    await engine.claim(worker_id="pool", worker_instance_id="w-1")
    title, first, second = run("workers", "list", url=url).lines
    assert title.split() == (
        ["WORKER", "LANES", "TASKS", "CAPABILITIES", "NAMESPACE", "RUNNING", "SEEN"]
    )
    assert first.split()[:7] == ["w-1", "default,", "gpu", "send", "cuda", "all", "1"]
    assert second.split()[:7] == ["w-2", "default,", "gpu", "send", "cuda", "shop", "0"]
    listed = run("workers", "list", "--json", url=url).documents
    assert [(each["worker_instance_id"], each["held_leases"]) for each in listed] == [
        ("w-1", 1),
        ("w-2", 0),
    ]
    only = run("workers", "list", "--namespace", "bank", "--json", url=url).documents
    assert [each["worker_instance_id"] for each in only] == ["w-1"]


async def test_workers_that_stop_with_runs_in_hand_are_named(engine: Engine, url: str) -> None:
    none = run("workers", "list", url=url, FLOWFABRIC_APP="shop:app").err
    assert none == "No worker is there. Start one: flowfabric worker shop:app\n"
    assert run("workers", "list", url=url).err.endswith(": flowfabric worker module:app\n")

    await engine.create_execution(NewExecution(execution_kind="send"))
    await engine.claim(worker_id="pool", worker_instance_id="w-1")
    left = "Stopping or gone quiet, with runs in hand: w-1 (1)."
    told = run("workers", "list", url=url).err
    assert " ".join(told.split()) == (
        f"No worker takes up new runs. {left} Start one: flowfabric worker module:app"
    )
    await register(engine, "w-2")
    assert " ".join(run("workers", "list", url=url).err.split()) == left
    await register(engine, "w-1")
    assert run("workers", "list", url=url).err == ""


PROGRAM = """
from flowfabric import App

app = App("{url}")

@app.task(capabilities=["cuda", "gpu"])
def render() -> None: ...

@app.task
def send() -> None: ...
"""


async def test_tasks_that_a_worker_lacks_capabilities_for_are_marked(
    engine: Engine, url: str, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(PROGRAM.format(url=url))
    for name, capabilities in (("w-1", ["cuda"]), ("w-2", ["cuda", "gpu"])):
        await engine.register_worker(
            ["default"],
            worker_id="pool",
            worker_instance_id=name,
            liveness_ttl_ms=TTL_MS,
            kinds=["render", "send"],
            capabilities=capabilities,
        )
    listed = run("workers", "list", "--app", "shop:app", cwd=tmp_path).lines
    assert "lacks gpu: render; send" in listed[1]
    assert "render, send" in listed[2]
    assert "render, send" in run("workers", "list", url=url).lines[1]
    narrow = run("workers", "list", "--app", "shop:app", cwd=tmp_path, COLUMNS="60").lines
    assert "lacks gpu" in narrow[1]
    documents = run("workers", "list", "--app", "shop:app", "--json", cwd=tmp_path).documents
    assert [each["lacks"] for each in documents] == [{"render": ["gpu"]}, {}]
    assert "lacks" not in run("workers", "list", "--json", url=url).documents[0]


async def test_a_dead_worker_gives_back_what_it_had(engine: Engine, url: str) -> None:
    await register(engine, "w-1", "shop")
    await engine.create_execution(NewExecution(execution_kind="send", namespace="shop"))
    claimed = await engine.claim(worker_id="pool", worker_instance_id="w-1")
    assert claimed is not None
    ran = run("workers", "dead", "w-1", "--reason", "host lost", url=url)
    assert (ran.status, ran.out) == (0, "w-1 is dead; 1 execution handed to others\n")
    again = run("workers", "dead", "w-1", url=url)
    assert again.status == 3
    _, dead, registered = run("workers", "events", url=url).lines
    assert dead.split()[-4:] == ["marked", "dead", "host", "lost"]
    assert registered.split()[-1] == "registered"
    kinds = [each["event_kind"] for each in run("workers", "events", "--json", url=url).documents]
    assert kinds == ["marked_dead", "registered"]


async def test_a_worker_that_stopped_in_order_is_not_called_dead(url: str) -> None:
    async with App(url) as app:

        @app.task
        def work() -> None: ...

        async with working(app):
            async with asyncio.timeout(PATIENCE_S):
                for _ in itertools.count():
                    if (await app.engine.list_workers(limit=1)).workers:
                        break
                    await asyncio.sleep(ASK_AGAIN_S)
    _, gone, came = run("workers", "events", url=url).lines
    assert gone.split()[-2:] == ["w-1", "stopped"]
    assert came.split()[-2:] == ["w-1", "registered"]


async def test_leases_may_be_left_to_a_worker(engine: Engine, url: str) -> None:
    await register(engine, "w-1")
    await engine.create_execution(NewExecution(execution_kind="send"))
    claimed = await engine.claim(worker_id="pool", worker_instance_id="w-1")
    assert claimed is not None
    ran = run("workers", "dead", "w-1", "--keep-leases", "--json", url=url)
    assert ran.document == {"worker_instance_id": "w-1", "revoked_leases": 0}
    await engine.complete(claimed.handle)


async def test_lanes_are_listed_with_what_is_in_them(engine: Engine, url: str) -> None:
    for _ in range(3):
        await engine.create_execution(NewExecution(execution_kind="send"))
    await engine.claim(worker_id="pool", worker_instance_id="w-1")
    title, line = run("lanes", "list", url=url).lines
    assert title.split() == [
        "LANE",
        "STATE",
        "SINCE",
        "READY",
        "RUNNING",
        "DELAYED",
        "SUSPENDED",
        "HELD",
    ]
    assert line.split()[-5:] == ["2", "1", "0", "0", "0"]
    (listed,) = run("lanes", "list", "--json", url=url).documents
    assert {name: listed[name] for name in ("lane_id", "state", "ready", "running", "held")} == {
        "lane_id": "default",
        "state": "active",
        "ready": 2,
        "running": 1,
        "held": 0,
    }


async def test_workers_beyond_the_first_page_count(engine: Engine, url: str) -> None:
    """Those that serve the task come last by name."""
    await engine.create_execution(NewExecution(execution_kind="send", namespace="shop"))
    for number in range(PAGE_MAX):
        await engine.register_worker(
            ["other"],
            worker_id="pool",
            worker_instance_id=f"v-{number:04}",
            liveness_ttl_ms=TTL_MS,
        )
    await register(engine, "w-1", "shop")
    assert "no worker" not in run("ls", url=url).out
    assert f"{PAGE_MAX + 1} running" in run("doctor", url=url).out
    assert len(run("workers", "list", "--json", url=url).documents) == PAGE_MAX + 1
    ran = run("workers", "dead", "w-1", url=url)
    assert (ran.status, ran.out) == (0, "w-1 is dead; 0 executions handed to others\n")
