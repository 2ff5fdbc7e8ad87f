"""`flowfabric worker` and `dev`: real programs in real processes."""

import asyncio
import json
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from shlex import quote

import click
import pytest

from flowfabric import App, connect
from flowfabric.cli import screen
from flowfabric.cli.options import parts_of
from flowfabric.cli.running import greet
from flowfabric.worker.worker import WorkerSettings
from tests.cli.command import COMMAND, Ran, environment, run
from tests.silence import Network

PROGRAM = """
from flowfabric import App, Context, Retry

app = App("sqlite:///shop.db")

@app.task
async def greet(ctx: Context, name: str) -> str:
    ctx.log.info("greeting %s", name)
    return f"hello {name}"

@app.task
async def fail(ctx: Context) -> None:
    raise ValueError("never")

@app.schedule(every="1s")
def tick() -> None: ...

@app.schedule("0 6 * * *", timezone="Europe/Rome", catch_up="none")
def morning_report(ctx: Context) -> None: ...

app.add_schedule("nightly", greet("moon"), cron="0 3 * * *")
"""
WAIT_S = 30


@pytest.fixture
def folder(tmp_path: Path, exercised_store: Callable[[str], None]) -> Path:
    exercised_store("sqlite file")
    (tmp_path / "shop.py").write_text(PROGRAM)
    return tmp_path


class Running:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def line(self, part: str) -> str:
        """The next line of its log with `part` in it."""
        assert self.process.stderr is not None
        async with asyncio.timeout(WAIT_S):
            while True:
                line = (await self.process.stderr.readline()).decode()
                assert line, self.lines
                self.lines.append(line)
                if part in line:
                    return line

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        async with asyncio.timeout(WAIT_S):
            await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode


@pytest.fixture
async def processes() -> AsyncIterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def start(processes: list[Process], folder: Path, *arguments: str) -> Running:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stderr=PIPE, cwd=folder, env=environment({}), start_new_session=True
    )
    processes.append(process)
    return Running(process)


async def test_a_worker_runs_tasks_and_schedules_and_stops_when_told(
    folder: Path, processes: list[Process]
) -> None:
    worker = await start(processes, folder, "worker", "shop:app")
    await worker.line("starts")

    done = await asyncio.to_thread(
        run, "submit", "greet", '{"name": "Ada"}', "--app", "shop:app", "--wait", "20s", cwd=folder
    )
    assert (done.status, done.out) == (0, "hello Ada\n")
    failed = await asyncio.to_thread(
        run, "submit", "fail", "--app", "shop:app", "--wait", "20s", cwd=folder
    )
    assert failed.status == 1
    assert "ValueError: never" in failed.err
    logged = json.loads(await worker.line(" failed: "))
    assert (logged["level"], logged["task"], logged["attempt_index"]) == ("warning", "fail", 0)
    assert "Traceback" in logged["traceback"]

    listed = await asyncio.to_thread(
        run, "schedules", "list", "--json", cwd=folder, FLOWFABRIC_APP="shop:app"
    )
    assert [
        (each["schedule_id"], each["expression"], each["timezone"], each["catch_up"])
        for each in listed.documents
    ] == [
        ("morning_report", "0 6 * * *", "Europe/Rome", "none"),
        ("nightly", "0 3 * * *", "UTC", "latest"),
        ("tick", "1000", "UTC", "latest"),
    ]
    ticked = await asyncio.to_thread(
        run, "schedules", "run", "tick", cwd=folder, FLOWFABRIC_APP="shop:app"
    )
    assert ticked.status == 0
    assert await worker.end(signal.SIGTERM) == 0


async def test_a_submission_by_program_is_checked_against_it_and_takes_its_settings(
    folder: Path,
) -> None:
    (folder / "shop.py").write_text(
        PROGRAM.replace("@app.task", "@app.task(lane='web', retry=Retry(max_retries=7))", 1)
    )
    await asyncio.to_thread(run, "migrate", "--app", "shop:app", cwd=folder)

    def submit(*arguments: str) -> Ran:
        return run("submit", *arguments, "--app", "shop:app", cwd=folder)

    for arguments, problem in (
        (("greet", '{"name": '), "PAYLOAD: is not JSON"),
        (("greet", '{"nam": "Ada"}'), "argument nam of greet: is unknown; it takes name"),
        (("greet", "{}"), "argument name of greet: is missing"),
        (("great", "{}"), "shop:app has no task 'great'; did you mean 'greet'?"),
    ):
        refused = await asyncio.to_thread(submit, *arguments)
        assert (refused.status, refused.out) == (2, ""), arguments
        assert problem in refused.err

    accepted = await asyncio.to_thread(submit, "greet", '{"name": "Ada"}')
    assert accepted.status == 0
    async with await connect(f"sqlite:///{folder}/shop.db") as engine:
        (found,) = (await engine.find_executions()).executions
        assert (found.execution_id[-36:], found.lane_id) == (accepted.out.strip(), "web")
    listed = await asyncio.to_thread(run, "ls", "--app", "shop:app", cwd=folder)
    assert listed.lines[1].endswith("no worker")


async def test_dev_starts_again_when_a_file_is_saved(
    folder: Path, processes: list[Process]
) -> None:
    (folder / "shop.py").write_text("syntax error")
    dev = await start(processes, folder, "dev", "shop:app")
    await dev.line("SyntaxError")
    await dev.line("waiting for a change")
    (folder / "shop.py").write_text("def connect():\n    return {}['url']\n\n\nconnect()\n")
    await dev.line('shop.py", line 5, in <module>')
    await dev.line('shop.py", line 2, in connect')
    await dev.line("KeyError: 'url'")
    await dev.line("waiting for a change")
    assert not [line for line in dev.lines if "flowfabric/cli" in line or "importlib" in line]

    (folder / "shop.py").write_text(PROGRAM)
    await dev.line("shop.py changed, starting again")
    await dev.line("starts")
    (folder / "shop.py").write_text(PROGRAM.replace("hello", "goodbye"))
    await dev.line("shop.py changed, starting again")
    await dev.line("starts")
    done = await asyncio.to_thread(
        run, "submit", "greet", '{"name": "Ada"}', "--app", "shop:app", "--wait", "20s", cwd=folder
    )
    assert done.out == "goodbye Ada\n"
    os.killpg(dev.process.pid, signal.SIGINT)
    await dev.line("has stopped")
    assert await dev.process.wait() == 0


SLOW = """
import asyncio

from flowfabric import App, Context

app = App("sqlite:///shop.db")


@app.task
async def crawl(ctx: Context) -> None:
    ctx.log.info("crawling")
    await asyncio.sleep(60)
"""


@pytest.mark.parametrize("own", [(), ("--id", "page-1")], ids=["uuid", "own id"])
async def test_a_worker_that_is_told_to_stop_says_what_it_waits_for(
    folder: Path, processes: list[Process], own: tuple[str, ...]
) -> None:
    (folder / "shop.py").write_text(SLOW)
    worker = await start(processes, folder, "worker", "shop:app")
    await worker.line("starts")
    submitted = await asyncio.to_thread(
        run, "submit", "crawl", *own, "--app", "shop:app", cwd=folder
    )
    await worker.line("crawling")
    worker.process.send_signal(signal.SIGINT)
    said = await worker.line("stopping")
    assert f"waiting up to 25 s for crawl {submitted.out.strip()}; press Ctrl-C again" in said
    assert await worker.end(signal.SIGINT) == 0


def test_an_error_in_the_program_shows_its_own_frames(folder: Path) -> None:
    (folder / "shop.py").write_text(
        "from flowfabric import App\n\napp = App()\n\n\n"
        "@app.task\ndef f(x: type(iter([]))) -> None: ...\n"
    )
    ran = run("worker", "shop:app", cwd=folder)
    assert ran.status == 1
    assert 'shop.py", line 6, in <module>' in ran.err
    assert "argument x of f: list_iterator cannot be stored" in ran.err
    assert "flowfabric/registry.py" not in ran.err


async def test_a_program_that_runs_when_it_is_imported_is_told_so(
    folder: Path, processes: list[Process]
) -> None:
    os.mkfifo(folder / "gate")
    program = (folder / "shop.py").read_text()
    (folder / "shop.py").write_text(f"open('gate').read()\n{program}")
    worker = await start(processes, folder, "worker", "shop:app")
    line = await worker.line("importing shop takes long")
    assert f"{folder / 'shop.py'}:1" in line
    (folder / "gate").write_text("")
    await worker.line("starts")
    assert await worker.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_dev_takes_its_worker_along_when_it_is_ended_alone(
    folder: Path, processes: list[Process], how: signal.Signals
) -> None:
    dev = await start(processes, folder, "dev", "shop:app")
    await dev.line("starts")
    dev.process.send_signal(how)
    await dev.line("has stopped")
    assert await dev.process.wait() == 0


async def test_dev_that_is_interrupted_again_stops_handlers_at_once(
    folder: Path, processes: list[Process]
) -> None:
    (folder / "shop.py").write_text(SLOW)
    dev = await start(processes, folder, "dev", "shop:app")
    await dev.line("starts")
    await asyncio.to_thread(run, "submit", "crawl", "--app", "shop:app", cwd=folder)
    await dev.line("crawling")
    began_s = time.monotonic()
    os.killpg(dev.process.pid, signal.SIGINT)
    await dev.line("press Ctrl-C again to stop them now")
    os.killpg(dev.process.pid, signal.SIGINT)
    await dev.line("has stopped")
    assert time.monotonic() - began_s < 3
    assert await dev.process.wait() == 0


@pytest.mark.parametrize(
    ("command", "up"),
    [
        (("worker", "shop:app"), "starts"),
        (("serve", "--port", "0", "--url", "sqlite:///shop.db"), "Uvicorn running"),
    ],
    ids=["worker", "serve"],
)
async def test_a_terminal_that_goes_stops_it_in_order(
    folder: Path, processes: list[Process], command: tuple[str, ...], up: str
) -> None:
    run("migrate", "--url", "sqlite:///shop.db", cwd=folder)
    running = await start(processes, folder, *command)
    await running.line(up)
    assert await running.end(signal.SIGHUP) == 0


def test_what_cannot_be_run_is_refused(folder: Path) -> None:
    (folder / "other.py").write_text("app = 5\n")
    for reference in ("shop:missing", "missing:app", "shop", "other:app"):
        ran = run("worker", reference, cwd=folder)
        assert ran.status == 2, reference
        assert "Traceback" not in ran.err
    assert run("worker", "shop:app", "--lane", "a=b", cwd=folder).status == 2
    assert run("worker", "shop:app", "--lane", "a=0", cwd=folder).status == 2


@pytest.mark.parametrize(
    ("reference", "right"),
    [
        ("shop.py:app", "shop:app"),
        ("shop.py", "shop:app"),
        ("./src/shop.py:main", "src.shop:main"),
        ("../shop.py:app", "shop:app"),
    ],
)
def test_a_file_in_place_of_a_module_is_refused_with_the_module(reference: str, right: str) -> None:
    with pytest.raises(click.UsageError, match=rf"is a file; name its module, .*: {right}$"):
        parts_of(reference)


def test_an_unmigrated_database_says_which_command_to_run(
    folder: Path, empty_postgres_database: str
) -> None:
    program = PROGRAM.replace("sqlite:///shop.db", empty_postgres_database)
    (folder / "shop.py").write_text(program)
    ran = run("worker", "shop:app", cwd=folder)
    assert ran.status == 5
    assert f"run: flowfabric migrate --url {quote(empty_postgres_database)}" in ran.err


def test_an_unmigrated_database_with_a_password_names_the_program(
    folder: Path, empty_postgres_database: str
) -> None:
    joint = "&" if "?" in empty_postgres_database else "?"
    url = f"{empty_postgres_database}{joint}password=secret"
    (folder / "shop.py").write_text(PROGRAM.replace("sqlite:///shop.db", url))
    ran = run("worker", "shop:app", cwd=folder)
    assert "run: flowfabric migrate --app shop:app (or set" in " ".join(ran.err.split()), ran.err


async def test_dev_sets_up_an_empty_database(
    folder: Path, processes: list[Process], empty_postgres_database: str
) -> None:
    program = PROGRAM.replace("sqlite:///shop.db", empty_postgres_database)
    (folder / "shop.py").write_text(program)
    dev = await start(processes, folder, "dev", "shop:app")
    await dev.line("starts")
    done = await asyncio.to_thread(
        run, "submit", "greet", '{"name": "Ada"}', "--app", "shop:app", "--wait", "20s", cwd=folder
    )
    assert done.out == "hello Ada\n"
    os.killpg(dev.process.pid, signal.SIGINT)
    await dev.line("has stopped")


async def test_dev_waits_for_a_database_that_is_away(
    folder: Path, processes: list[Process], empty_postgres_database: str
) -> None:
    async with Network(empty_postgres_database).open() as network:
        network.go_down()
        (folder / "shop.py").write_text(PROGRAM.replace("sqlite:///shop.db", network.url))
        dev = await start(processes, folder, "dev", "shop:app", "--json")
        away = json.loads(await dev.line("does not answer"))
        assert "trying again" not in away["message"]
        network.heal()
        await dev.line("starts")
        os.killpg(dev.process.pid, signal.SIGINT)
        await dev.line("has stopped")


CAPABLE = """
from flowfabric import App

app = App("sqlite:///shop.db")

@app.task(capabilities=["gpu", "cuda"], lane="web")
async def train() -> str:
    return "trained"

@app.task
async def rest() -> None: ...
"""


async def test_dev_has_what_the_tasks_require_and_serves_the_lanes_it_is_told(
    folder: Path, processes: list[Process]
) -> None:
    (folder / "shop.py").write_text(CAPABLE)
    dev = await start(processes, folder, "dev", "shop:app", "--lane", "web")
    await dev.line("starts")
    done = await asyncio.to_thread(
        run, "submit", "train", "--app", "shop:app", "--wait", "20s", cwd=folder
    )
    assert done.out == "trained\n"
    left = await asyncio.to_thread(
        run, "submit", "rest", "--app", "shop:app", "--wait", "1ms", cwd=folder
    )
    assert "No running worker has a task" in left.err
    os.killpg(dev.process.pid, signal.SIGINT)
    await dev.line("has stopped")


def test_a_worker_tells_which_tasks_it_lacks_something_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = App("sqlite:///never-opened.db")
    app.task(name="train", capabilities=["gpu", "cuda"])(lambda: None)
    app.task(name="rest")(lambda: None)
    screen.err.cache_clear()
    greet("shop:app", app, WorkerSettings(lanes=["default"], capabilities=["gpu"]))
    told = " ".join(capsys.readouterr().err.split())
    assert "tasks rest not run train (needs --capability cuda)" in told


def test_a_worker_tells_which_of_its_lanes_no_task_is_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = App("sqlite:///never-opened.db")
    app.task(name="rest")(lambda: None)
    screen.err.cache_clear()
    greet("shop:app", app, WorkerSettings(lanes={"default": 1, "defualt": 2}))
    told = " ".join(capsys.readouterr().err.split())
    assert "lanes default=1, defualt=2 no task is in defualt at once" in told


async def test_a_log_tells_which_tasks_are_not_run(folder: Path, processes: list[Process]) -> None:
    (folder / "shop.py").write_text(CAPABLE)
    worker = await start(processes, folder, "worker", "shop:app", "--capability", "gpu")
    told = json.loads(await worker.line("not run"))
    assert told["level"] == "warning"
    assert told["message"] == "not run: train (needs --capability cuda)"
    await worker.line("starts")
    assert await worker.end(signal.SIGTERM) == 0


def test_dev_refuses_at_once_what_no_save_can_mend(folder: Path) -> None:
    for arguments in (("shop",), ("shop:app", "--lane", "a=b")):
        ran = run("dev", *arguments, cwd=folder)
        assert ran.status == 2
        assert "Usage: flowfabric dev [OPTIONS] MODULE:APP" in ran.err
        assert "watching" not in ran.err


STUBBORN = """
import asyncio, sys, time
from flowfabric import App

app = App("sqlite:///shop.db")

@app.task
async def wait_on() -> None:
    print("begun", file=sys.stderr, flush=True)
    while True:
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            pass

@app.task
def block() -> None:
    print("begun", file=sys.stderr, flush=True)
    time.sleep(3_600)
"""


@pytest.mark.parametrize("task", ["wait_on", "block"])
async def test_a_handler_that_never_ends_does_not_keep_the_process_that_is_told_to_stop(
    folder: Path, processes: list[Process], task: str
) -> None:
    (folder / "shop.py").write_text(STUBBORN)
    worker = await start(processes, folder, "worker", "shop:app", "--drain-timeout", "1s")
    await worker.line("starts")
    await asyncio.to_thread(run, "submit", task, "--app", "shop:app", cwd=folder)
    await worker.line("begun")

    assert await worker.end(signal.SIGTERM) == 1


SEVERAL = """
import os
import time
from pathlib import Path

from flowfabric import App

app = App("sqlite:///shop.db")


@app.task
def meet() -> int:
    # One process alone never gets here twice: it runs one task at a time.
    Path(f"{os.getpid()}.met").touch()
    while len(list(Path().glob("*.met"))) < 2:
        time.sleep(0.01)
    return os.getpid()
"""


async def start_several(processes: list[Process], folder: Path) -> tuple[Running, list[int]]:
    """A worker with two processes, and their ids."""
    (folder / "shop.py").write_text(SEVERAL)
    arguments = ("worker", "shop:app", "--processes", "2", "--concurrency", "1")
    worker = await start(processes, folder, *arguments)
    await worker.line("starts")
    meet = partial(run, "submit", "meet", "--app", "shop:app", "--wait", "20s", cwd=folder)
    met = await asyncio.gather(asyncio.to_thread(meet), asyncio.to_thread(meet))
    pids = [int(each.out) for each in met]
    assert len({*pids, worker.process.pid}) == 3
    return worker, pids


async def test_a_worker_in_several_processes_stops_as_one(
    folder: Path, processes: list[Process]
) -> None:
    worker, _ = await start_several(processes, folder)
    # Returns when nobody has its log open any more.
    assert await worker.end(signal.SIGTERM) == 0


async def test_a_process_that_is_killed_is_replaced(folder: Path, processes: list[Process]) -> None:
    worker, (victim, _) = await start_several(processes, folder)
    os.kill(victim, signal.SIGKILL)
    await worker.line(f"process {victim} was killed by signal 9; starting another")
    await worker.line("starts")
    assert await worker.end(signal.SIGINT) == 0


async def test_no_process_outlives_the_one_that_started_it(
    folder: Path, processes: list[Process]
) -> None:
    worker, _ = await start_several(processes, folder)
    assert await worker.end(signal.SIGKILL) == -signal.SIGKILL


def test_several_processes_end_with_the_status_of_one_that_cannot_run(
    folder: Path, empty_postgres_database: str
) -> None:
    program = PROGRAM.replace("sqlite:///shop.db", empty_postgres_database)
    (folder / "shop.py").write_text(program)
    assert run("worker", "shop:app", "--processes", "2", cwd=folder).status == 5
    (folder / "shop.py").write_text(PROGRAM.replace("sqlite:///shop.db", "sqlite:///:memory:"))
    refused = run("worker", "shop:app", "--processes", "2", cwd=folder)
    assert (refused.status, "belongs to one process alone" in refused.err) == (2, True)
