"""Limits on the command line."""

import asyncio
from pathlib import Path

from flowfabric import App
from tests.cli.command import run


def test_limits_are_listed_changed_and_reset(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"

    async def submit() -> str:
        async with App(url, migrate=True) as app:

            @app.task(rate_limit="100/m", concurrency=1, key="{tenant}")
            async def sync(tenant: str) -> None: ...

            await app.submit(sync, "ann")
            first = await app.engine.claim(worker_id="w", worker_instance_id="w-1")
            assert first is not None
            await app.engine.register_worker(
                ["default"], worker_id="w", worker_instance_id="w-1", liveness_ttl_ms=60_000
            )
            return (await app.submit(sync, "ann")).execution_id

    waiting = asyncio.run(submit())
    listed = run("limits", "list", url=url, COLUMNS="120").lines
    assert listed[0].split() == ["LIMIT", "RATE", "AT", "ONCE", "SET", "BY", "DECLARED"]
    assert listed[1].split() == ["sync", "100/1m", "1", "program"]

    why = run("why", waiting, url=url)
    assert "It waits for its limit 'sync': 1 of 1 running for ann; 0 ahead." in why.out
    newest, held = run("ls", url=url, COLUMNS="160").lines[1:]
    assert newest.endswith("1 of 1 running for ann")
    assert held.endswith("on w-1")
    listed_one = run("ls", "--json", "--limit", "1", url=url).document
    assert listed_one["blocking_reason"] == "waiting_for_quota"
    assert listed_one["blocking_detail"] == "1 of 1 running for ann"
    shown = run("limits", "show", "sync", url=url, COLUMNS="120").lines
    assert shown[3].split() == ["ann", "1", "1"]

    changed = run("limits", "set", "sync", "--concurrency", "9", "--json", url=url).document
    assert changed == {
        "namespace": "default",
        "name": "sync",
        "rate": None,
        "concurrency": 9,
        "source": "stored",
        "while_suspended": "release",
        "declared_rate": "100/1m",
        "declared_concurrency": 1,
    }
    listed = run("limits", "list", url=url, COLUMNS="120").lines
    assert listed[1].split() == ["sync", "9", "people", "100/1m,", "1", "at", "once"]
    assert "next in line" in run("why", waiting, url=url).out
    reset = run("limits", "reset", "sync", "--json", url=url).document
    assert (reset["rate"], reset["concurrency"], reset["source"]) == ("100/1m", 1, "code")


def test_limits_that_are_not_there_and_mistakes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    assert run("migrate", url=url).status == 0
    assert run("limits", "list", url=url).err.strip() == "No limits."
    assert run("limits", "show", "sync", url=url).status == 3
    assert run("limits", "reset", "sync", url=url).status == 3
    typo = run("limits", "set", "snyc", "--concurrency", "9", url=url)
    assert typo.err.strip() == "No program has declared this limit yet: it limits nothing."
    run("limits", "set", "sync", "--concurrency", "9", "--while-suspended", "keep", url=url)
    assert "9, suspended too" in run("limits", "list", url=url, COLUMNS="120").out
    assert run("limits", "set", "sync", "--rate", "often", url=url).status == 2
    assert run("limits", "set", "sync", "--concurrency", "0", url=url).status == 2
    assert run("limits", "set", "sync", url=url).status == 0
    assert run("limits", "reset", "sync", url=url).status == 3


def test_a_limit_that_no_run_is_under_is_removed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"

    async def declare() -> None:
        async with App(url, migrate=True) as app:

            @app.task(concurrency=1)
            async def sync() -> None: ...

            await app.submit(sync)

    asyncio.run(declare())
    assert run("limits", "set", "snyc", "--concurrency", "9", url=url).status == 0
    assert run("limits", "remove", "snyc", url=url).out == "snyc is removed\n"
    assert run("limits", "remove", "snyc", url=url).status == 3
    refused = run("limits", "remove", "sync", url=url)
    assert refused.status == 4
    assert "limit 'sync' has runs, ended or not, that are not deleted yet" in refused.err
    assert [each["name"] for each in run("limits", "list", "--json", url=url).documents] == ["sync"]
