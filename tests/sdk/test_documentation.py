"""The documentation: its programs run as they are written, and its links lead somewhere."""

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flowfabric import App, Run
from flowfabric.core.states import PublicState
from tests.apps import reached

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
async def started(program: Path) -> AsyncIterator[Process]:
    """A program of the documentation in a process, which is killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", program.name),
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
    program.write_text(snippets("steps.md")[0].replace('"10s"', '"6s"'))
    session = snippets("steps.md", "")[0].partition("Killed\n")
    first, second = (
        [line for line in part.splitlines() if not line.startswith("$")] for part in session[::2]
    )

    async with started(program) as process:
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
        *said, result = await lines_of(process)

    assert result == str(receipts)
    assert Counter(said) == Counter(
        [f"charging order {number}" for number in range(1, 8)]
        + [f"{verb} {receipt}" for verb in verbs for receipt in receipts]
    )
