"""The examples, run by worker processes of which one is killed while it all waits."""

import asyncio
import itertools
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from examples.agent import Decision, assist
from examples.approval import deploy
from flowfabric import App, Run
from flowfabric.core.states import PublicState
from tests.apps import reached
from tests.e2e.conftest import PATIENCE_S, python, steps_run
from tests.e2e.programs import Program


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Where the examples write down what they do."""
    return tmp_path / "journal"


def worker(example: str, url: str, journal: Path) -> AbstractAsyncContextManager[Program]:
    """The real command on an example."""
    return python(
        *("flowfabric.cli", "worker", f"examples.{example}:app"),
        FLOWFABRIC_URL=url,
        JOURNAL=str(journal),
    )


async def killed_while_waiting(
    example: str, app: App, journal: Path, run: Run[object], name: str
) -> None:
    """Let a worker bring the run to where it waits for `name`, and kill it there."""
    async with worker(example, app.url, journal) as process:
        await reached(run, PublicState.SUSPENDED)
        process.kill()
        await process.wait()
    assert [str(entry.name) for entry in (await app.signals.pending()).entries] == [name]


async def test_two_people_approve_a_deployment_whose_worker_was_killed(
    store_url: str, journal: Path
) -> None:
    async with App(store_url) as app:
        run = await app.submit(deploy, "v2")
        await killed_while_waiting("approval", app, journal, run, "approved")
        for source in ("ada", "ada", "bob"):
            assert await run.state() is PublicState.SUSPENDED
            await run.signal("approved", source=source)
        async with worker("approval", store_url, journal):
            assert await run.result(timeout="60s") == ["ada", "bob"]
    assert steps_run(journal) == {"build v2": 1, "ask the team about v2": 1, "roll out v2": 1}


async def test_a_deployment_nobody_approves_in_time_is_escalated(
    store_url: str, journal: Path
) -> None:
    async with App(store_url) as app:
        run = await app.submit(deploy, "v3", patience="1ms")
        async with worker("approval", store_url, journal) as process:
            async with asyncio.timeout(PATIENCE_S):
                for _ in itertools.count():
                    page = await app.signals.pending()
                    if [str(entry.name) for entry in page.entries] == ["approved by manager"]:
                        break
                    await asyncio.sleep(0)
            process.kill()
            await process.wait()
        await run.signal("approved by manager", source="eve")
        async with worker("approval", store_url, journal):
            assert await run.result(timeout="60s") == ["eve"]
    assert steps_run(journal) == {
        "build v3": 1,
        "ask the team about v3": 1,
        "call the manager about v3": 1,
        "roll out v3": 1,
    }


async def test_an_agent_asks_before_a_dangerous_tool_and_survives_its_worker(
    store_url: str, journal: Path
) -> None:
    async with App(store_url) as app:
        run = await app.submit(assist, "clean up")
        await killed_while_waiting("agent", app, journal, run, "decision")
        assert "delete_files" not in steps_run(journal)
        await run.signal("decision", Decision(allow=True), source="ada")
        async with worker("agent", store_url, journal):
            assert await run.result(timeout="60s") == "clean up: deleted /tmp/old"
    assert set(steps_run(journal).values()) == {1}, "every call is made once"


async def test_an_agent_does_without_the_tool_it_is_not_allowed(
    store_url: str, journal: Path
) -> None:
    async with App(store_url) as app:
        run = await app.submit(assist, "clean up")
        await killed_while_waiting("agent", app, journal, run, "decision")
        await run.signal("decision", Decision(allow=False, reason="needed"), source="bob")
        async with worker("agent", store_url, journal):
            assert await run.result(timeout="60s") == "clean up: not allowed by bob: needed"
    assert "delete_files" not in steps_run(journal)
