"""A worker is known as long as it is there, and comes back when it was forgotten."""

import asyncio
import itertools

from flowfabric import App
from flowfabric.core.workers import WorkerEntry
from tests.apps import PATIENCE_S, working
from tests.severing import Cut, Network


async def until_registered(app: App) -> WorkerEntry:
    async with asyncio.timeout(PATIENCE_S):
        for _ in itertools.count():
            page = await app.engine.list_workers()
            if page.workers:
                return page.workers[0]
            await asyncio.sleep(0)
    raise AssertionError("the timeout ends the loop")


async def test_a_worker_registers_with_what_it_serves(app: App) -> None:
    @app.task(lane="mail", capabilities=["smtp"])
    async def send() -> None: ...

    lanes = {"mail": 2, "default": 1}
    async with app, working(app, lanes=lanes, capabilities=("smtp",)):
        entry = await until_registered(app)
    assert (entry.worker_instance_id, entry.namespace, entry.lanes) == (
        "w-1",
        "default",
        ("mail", "default"),
    )
    assert (entry.kinds, entry.capabilities, entry.liveness_ttl_ms) == (
        ("send",),
        ("smtp",),
        60_000,
    )


async def test_a_worker_that_was_taken_for_dead_registers_again(app: App) -> None:
    """Its work goes to others, or to itself, and is done once more."""
    begun = asyncio.Event()

    @app.task
    async def work() -> str:
        if not begun.is_set():
            begun.set()
            await asyncio.Event().wait()
        return "done"

    async with app:
        async with working(app, lease_ttl="1s"):
            first = await until_registered(app)
            run = await app.submit(work)
            await begun.wait()
            dead = await app.engine.mark_worker_dead("w-1", namespace="default")
            assert dead.revoked_leases == 1
            assert await run.result(timeout="20s") == "done"
            again = await until_registered(app)
        assert again.registered_at_ms > first.registered_at_ms
        told = await app.engine.list_worker_events()
    assert [each.event_kind for each in told] == [
        "marked_dead",
        "registered",
        "marked_dead",
        "registered",
    ]
    assert [each.reason for each in told] == ["stopped", "", "", ""]


async def test_a_worker_that_lost_an_answer_is_heard_of_before_it_claims_again(
    postgres_database: str,
) -> None:
    """Others may have seen a lease end, and taken it for dead."""
    async with Network(postgres_database).open() as network, App(postgres_database) as outside:
        away = App(network.url)

        @away.task
        async def work() -> str:
            return "done"

        outside.adopt(away)
        network.cut_commit("event", Cut.BEFORE_THE_SERVER_HEARS)
        run = await outside.submit(work)
        # With such a lease it says by itself every twenty minutes that it is there.
        async with working(away, lease_ttl="1h"):
            assert await run.result(timeout="20s") == "done"
            entry = await until_registered(outside)
            events = await outside.engine.list_worker_events()
        await away.close()
    assert network.was_cut.is_set()
    assert entry.last_heartbeat_ms > entry.registered_at_ms
    assert [each.event_kind for each in events] == ["registered"]
