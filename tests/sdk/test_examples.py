"""Every example runs, and says what it promises."""

import ast
import asyncio
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import click
import httpx
import pytest

import flowfabric
from flowfabric import App, errors
from flowfabric.cli.main import cli
from flowfabric.core.schedules import DUE_TAG, SCHEDULE_TAG

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if "```python" in page.read_text())

SAYS = {
    "hello.py": ["Hello, world!"],
    "retries.py": [
        "https://example.com answered at try 3",
        "failed for good: there is nothing to charge",
        "ran out of time: an attempt took longer than its timeout of 300ms",
    ],
    "cron.py": [
        "beat 1",
        "beat 2",
        "clean-up: 30 3 * * 0, UTC",
        "heartbeat: 1000, UTC",
        "morning_report: 0 6 * * *, Europe/Rome",
    ],
    "pipeline.py": ["the first worker ended with -9", "the order went out as parcel-7"],
    "sync_views.py": [
        "no order and no job: an order costs something",
        "receipt for order 1 sent",
    ],
}


def run(name: str, folder: Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SAYS)
def test_the_example_says_what_it_promises(name: str, tmp_path: Path) -> None:
    said = [line for line in run(name, tmp_path).splitlines() if not line.startswith("  [")]
    assert said == SAYS[name]


def test_the_killed_pipeline_takes_each_step_once(tmp_path: Path) -> None:
    steps = [line.partition("] ")[2] for line in run("pipeline.py", tmp_path).splitlines()]
    assert [step for step in steps if step] == [
        "pricing order 7",
        "charging 4200 cents",
        "killing myself with signal 9, in the middle of it",
        "shipping order 7 (receipt-7)",
    ]


def test_the_flow_goes_on_with_three_pages_of_four(tmp_path: Path) -> None:
    said = [line.rpartition("  0")[0] or line for line in run("flow.py", tmp_path).splitlines()]
    report = "today: the news page, the weather page, the sport page"
    assert said[7:] == [
        f"sending “{report}”",
        f"{len(report)} characters sent",
        "morning  completed  6 of 6 ended",
        "✓ news          completed",
        "✓ weather       completed",
        "✓ sport         completed",
        "⊘ stocks        cancelled",
        "└─ ✓ summarise  completed  ← 3 of news, weather, sport, stocks; cancels the rest",
        "   └─ ✓ send    completed",
    ]


async def starts(app: App) -> list[int]:
    """When each run was first handed to a worker, the earliest first; none was lost meanwhile."""
    first: dict[str, int] = {}
    async for told in app.events(after="start", category="lease"):
        if told.event.event_type == "acquired":
            first.setdefault(told.event.execution_id, told.event.occurred_at_ms)
        if len(first) == 1_000:
            break
    return sorted(first.values())


async def test_a_thousand_calls_keep_to_budget_rate_and_caps(
    store_url: str, tmp_path: Path
) -> None:
    said = await asyncio.to_thread(run, "llm.py", tmp_path, FLOWFABRIC_URL=store_url)
    assert said.splitlines() == [
        "period 1: stopped at 40,000 of 40,000 tokens",
        "period 2: stopped at 40,000 of 40,000 tokens",
        "period 3: 20,000 tokens, and all 1,000 calls are done",
        "at most 3 calls of a tenant at once",
    ]

    async with App(store_url) as app:
        times = await starts(app)
        spans = [later - begin for begin, later in zip(times, times[300:], strict=False)]
        assert min(spans) >= 1_000, "a second has more than 300 starts"
        for name in ("provider", "per-tenant"):
            assert not any(each.running for each in await app.limits.use(name))
        status = await app.budgets.status("tokens")
        assert (status.reset_count, status.reserved, status.closed) == (2, {}, False)


async def test_the_web_example_submits_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    web = importlib.import_module("web")

    transport = httpx.ASGITransport(app=web.web)
    async with (
        web.lifespan(web.web),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        greeted = await client.post("/greet", json={"name": "Ada"})
        assert (greeted.status_code, greeted.json()) == (200, {"result": "Hello, Ada!"})
        (done,) = (await web.app.engine.find_executions()).executions
        seen = await client.get(f"/runs/{done.execution_id}")
        assert seen.json()["state"] == "completed"
        for unknown in ("{fp:86}:00000000-0000-4000-8000-000000000000", "42", "{fp:1}:x"):
            assert (await client.get(f"/runs/{unknown}")).status_code == 404, unknown


def test_every_example_is_run_here_or_by_processes_that_are_killed() -> None:
    killed = {"agent.py", "approval.py", "live.py", "newsroom_django.py", "newsroom_fastapi.py"}
    here = {*SAYS, "flow.py", "llm.py", "web.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == here | killed


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_code_in_the_documentation_imports_what_there_is(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shop", ModuleType("shop"))  # The reader's own.
    pieces = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for piece in pieces:
        for node in ast.walk(ast.parse(piece)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), {})


@cache
def public_classes() -> dict[str, list[str]]:
    """The modules that define a class of a name."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src" / "flowfabric").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    return found


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_the_documentation_tells_where_its_classes_come_from(page: Path) -> None:
    """Those that are neither in `flowfabric` nor in `flowfabric.errors`, by their module."""
    text, modules = page.read_text(), public_classes()
    named = set(re.findall(r"`([A-Z][a-z]\w*)[`(]", text)) & modules.keys()
    close = {each for each in named if hasattr(flowfabric, each) or hasattr(errors, each)}
    lost = {each for each in named - close if not any(m in text for m in modules[each])}
    assert lost == set()


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.name)
def test_the_documentation_names_modules_that_hold_what_it_says(page: Path) -> None:
    """Written as: `Name`, `other(…)` and `Third` (from `flowfabric.module`)."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = " ".join(prose.split())
    listed = re.findall(r"((?:`[^`]+`(?:, | and | or | records )?)+) ?\(from `([\w.]+)`\)", text)
    assert len(listed) == text.count("(from `")
    for names, module in listed:
        for each in re.findall(r"`([^`]+)`", names):
            said = re.findall(r"\b[A-Z]\w+", each) or re.findall(r"^\w+", each)
            assert [n for n in said if hasattr(importlib.import_module(module), n)] == said, module
    for module in set(re.findall(r"`(flowfabric(?:\.\w+)+)`", text)) - {SCHEDULE_TAG, DUE_TAG}:
        importlib.import_module(module)


async def test_the_first_program_of_the_readme_runs_as_it_is_written(tmp_path: Path) -> None:
    opening = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "shop.py").write_text(opening.replace('"10s"', '"1s"'))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "flowfabric.cli", "dev", "shop:app"),
        cwd=tmp_path,
        env=environment,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "shop.py"),
            cwd=tmp_path,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            said, _ = await program.communicate()
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        await worker.wait()
    assert (program.returncode, said) == (0, b"Hello, Ada!\n")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_commands_an_example_names_have_the_options_it_uses(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    lines = [line.strip() for line in docstring.splitlines()]
    for _, name, *words in (shlex.split(line) for line in lines if line.startswith("flowfabric ")):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        known = {option for each in command.params for option in each.opts}
        assert {word for word in words if word.startswith("--")} <= known, (name, words)
