"""The documentation: its programs run as they are written, and its links lead somewhere."""

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flowfabric import App, Run, testing
from flowfabric.core.states import PublicState
from flowfabric.testing import SettableClock
from tests.apps import blocked, reached, working

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(DOCS.glob("*.md"))]


def snippets(page: str, language: str = "python") -> list[str]:
    fenced = r"^```(\w*)\n(.*?)^```"
    found = re.findall(fenced, (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return [text for spoken, text in found if spoken == language]


# Links


def anchors(page: Path) -> set[str]:
    """The headings of a page, as a link names them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings_that_exist(page: Path) -> None:
    lost = []
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


def test_the_readme_lists_every_page() -> None:
    listed = re.findall(r"\]\(docs/([\w-]+\.md)\)", (ROOT / "README.md").read_text())
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


# Programs


def app_of(program: str) -> App:
    names: dict[str, object] = {}
    exec(program, names)
    app = names["app"]
    assert isinstance(app, App)
    return app


def order_of(app: App, number: int) -> Run[object]:
    return app.run(app.tasks["order"], f"order-{number}")


@asynccontextmanager
async def started(program: Path, *, live: bool = False) -> AsyncIterator[Process]:
    """A program of the documentation in a process, which is killed at the end if it still runs.

    What it says comes at its end, in whole lines, unless it is wanted `live`.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *(["-u"] if live else []), program.name),
        cwd=program.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=PIPE,
    )
    try:
        async with asyncio.timeout(60):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def lines_of(process: Process) -> list[str]:
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode().splitlines()


async def test_the_program_about_steps_survives_being_killed_as_its_page_says(
    tmp_path: Path,
) -> None:
    program = tmp_path / "order.py"
    program.write_text(snippets("steps.md")[0])
    session = snippets("steps.md", "")[0].partition("Killed\n")
    first, second = (
        [line for line in part.splitlines() if not line.startswith("$")] for part in session[::2]
    )

    async with started(program, live=True) as process:
        assert process.stdout is not None
        assert [(await process.stdout.readline()).decode().rstrip() for _ in first] == first
        url = f"sqlite:///{tmp_path / 'order.db'}"
        async with app_of(program.read_text().replace("sqlite:///order.db", url)) as app:
            await reached(order_of(app, 7), PublicState.DELAYED)
        process.kill()
    async with started(program) as process:
        assert await lines_of(process) == second


async def test_the_program_about_branches_does_everything_once(tmp_path: Path) -> None:
    program = tmp_path / "billing.py"
    program.write_text(snippets("steps.md")[1])
    receipts = [f"receipt for order {number}" for number in range(1, 8)]
    verbs = ("mailing", "archiving")

    async with started(program) as process:
        said = await lines_of(process)

    assert said[-1] == str(receipts)
    expected = [f"charging order {number}" for number in range(1, 8)]
    expected += [f"{verb} {receipt}" for verb in verbs for receipt in receipts]
    # Steps print from threads of their own, so that two lines may run together.
    together = "".join(said[:-1])
    assert Counter({each: together.count(each) for each in expected}) == Counter(expected)
    assert len(together) == sum(map(len, expected))


async def test_the_program_about_reminders_keeps_the_link_of_its_first_mail(
    tmp_path: Path,
) -> None:
    (source,) = (each for each in snippets("signals.md") if "send_reminder" in each)
    program = tmp_path / "approval.py"
    program.write_text(source)
    async with started(program) as process:
        said = await lines_of(process)
    assert said[:3] == ["please decide", "reminder 1", "reminder 2"]
    assert said[-1] == "On signals is published"


async def test_the_program_about_a_flow_by_the_clock_starts_it_once(tmp_path: Path) -> None:
    (source,) = (each for each in snippets("schedules.md") if "app.flow(" in each)
    namespace: dict[str, object] = {}
    exec(source.replace("sqlite:///nightly.db", f"sqlite:///{tmp_path}/nightly.db"), namespace)
    app = namespace["app"]
    assert isinstance(app, App)
    clock = SettableClock(int(datetime(2026, 3, 28, 12, tzinfo=UTC).timestamp() * 1_000))
    async with testing.engine(clock, app=app) as local:
        clock.advance("1d")
        await local.drain()
        run = local.flow_run("nightly-2026-03-29")
        assert (await run.summary()).members_completed == 3


# A deploy


class Deploys:
    """The program of docs/deploys.md, in each of its versions."""

    def __init__(self, url: str) -> None:
        before, after, patched = snippets("deploys.md")[:3]
        head = before.partition("@app.task")[0].replace("sqlite:///shop.db", url)
        notify = after.partition("@app.task")[0]
        self.versions = {
            "before": head + "@app.task" + before.partition("@app.task")[2],
            "after": head + after,
            "patched": head + notify + patched,
        }

    @asynccontextmanager
    async def deployed(self, version: str) -> AsyncIterator[App]:
        app = app_of(self.versions[version])
        async with app, working(app):
            yield app


def session_with(command: str) -> str:
    """What the page shows after a command."""
    (found,) = (each for each in snippets("deploys.md", "") if f"$ flowfabric {command}" in each)
    return found.partition(f"$ flowfabric {command}\n")[2].partition("$ ")[0]


async def steps_of(run: Run[object]) -> list[str]:
    return [step.name for step in await run.steps()]


async def test_the_deploy_in_the_documentation_goes_as_it_says(store_url: str) -> None:
    deploys = Deploys(store_url)
    async with deploys.deployed("before") as app:
        for number in (17, 18):
            call = app.tasks["order"](number)
            await reached(
                await app.submit(call, execution_id=f"order-{number}"), PublicState.SUSPENDED
            )

    async with deploys.deployed("after") as app:
        run = order_of(app, 17)
        for number in (17, 18):
            await order_of(app, number).signal("packed")
        sentence = (await blocked(run)).partition(" A worker looks again")[0]
        assert sentence in " ".join(session_with("why order-17").split())
        await blocked(order_of(app, 18))
        await run.accept_changes()
        assert await run.result(timeout="20s") == "parcel 17"
        shown = session_with("show order-17").partition("TOOK\n")[2].splitlines()
        assert await steps_of(run) == [re.split(r"  +", line)[0] for line in shown]

    async with deploys.deployed("patched") as app:
        run = order_of(app, 18)
        assert await run.result(timeout="20s") == "parcel 18"
        assert await steps_of(run) == ["reserve", "charge", "signal packed", "ship"]
