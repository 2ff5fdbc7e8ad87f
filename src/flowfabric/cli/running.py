"""`worker` and `dev`: running a program's tasks."""

import asyncio
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Final

import click
import msgspec
from rich.console import Group
from rich.text import Text

from flowfabric.app import MEMORY_URL, App
from flowfabric.cli import options, screen
from flowfabric.cli.options import APP_VARIABLE, find_app, parts_of
from flowfabric.cli.workers import lacking
from flowfabric.connection import migrate
from flowfabric.core.checks import visible_json
from flowfabric.errors import InvalidInput
from flowfabric.logs import open_log
from flowfabric.outages import waited_out
from flowfabric.store.urls import redact
from flowfabric.terminal import Console, Indented, open_console
from flowfabric.worker.health import HealthPort
from flowfabric.worker.worker import WorkerSettings

# Several processes of one worker, for machines with several cores -----------
#
# They know nothing of each other: the database hands each of them its own work. The process
# that starts them passes on every signal that tells it to stop. It replaces one that is killed;
# one that exits on its own has said why, and the others would exit for the same reason. Each
# holds the reading end of a pipe, and stops when its parent is gone, however that ended.

log = open_log(__name__)

REPLACE_AFTER_S: Final = 1.0
PROCESSES_MAX: Final = 256
PORT_MAX: Final = 65_535


def run_several(commands: Sequence[Sequence[str]]) -> int:
    """Run each command in a process until told to stop; return their status."""
    return asyncio.run(_Several().run(commands))


class _Several:
    def __init__(self) -> None:
        self._running: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()

    async def run(self, commands: Sequence[Sequence[str]]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        statuses = await asyncio.gather(*(self._keep_one(each) for each in commands))
        return next((status for status in statuses if status != options.OK), options.OK)

    async def _keep_one(self, command: Sequence[str]) -> int:
        """Run a process, replacing it whenever it is killed; return the status of the last."""
        while True:
            # In its own group: a terminal sends Ctrl-C to a whole group, and it would count twice.
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, process_group=0
            )
            self._running.add(process)
            status = await process.wait()
            self._running.discard(process)
            if self._stopping.is_set():
                return options.OK if status == -signal.SIGTERM else abs(status)
            if status >= 0:
                self._stop()
                return status
            log.error("process %d was killed by signal %d; starting another", process.pid, -status)
            try:
                async with asyncio.timeout(REPLACE_AFTER_S):
                    await self._stopping.wait()
                return options.OK
            except TimeoutError:
                continue

    def _stop(self) -> None:
        self._stopping.set()
        for process in self._running:
            # Not `process.terminate()`: it would poll the process, and lose its status.
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)


def stop_with_starter() -> None:
    """Stop this process as soon as the one that started it is gone."""

    def wait() -> None:
        # Not `sys.stdin.read`: a thread must not be in it when the interpreter ends.
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="flowfabric-starter", daemon=True).start()


# Runs a command and starts it again when a source file changes --------------

LOOK_EVERY_S: Final = 0.3
SETTLE_S: Final = 0.05
SETTLE_LOOKS_MAX: Final = 40
STOP_TIMEOUT_S: Final = 10.0
FILES_MAX: Final = 20_000
SUFFIXES: Final = (".py", ".toml", ".env")
SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})

Say = Callable[[str], None]


def sources(folder: Path) -> Iterator[Path]:
    """Source files below a folder, except in hidden folders and installed packages."""
    for place, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in SKIPPED
            and not Path(place, name, "pyvenv.cfg").exists()
        ]
        for name in names:
            if name.endswith(SUFFIXES):
                yield Path(place, name)


def snapshot(folder: Path) -> dict[Path, int]:
    """When each source file was last written."""
    seen: dict[Path, int] = {}
    for path in sources(folder):
        if len(seen) == FILES_MAX:
            break
        try:
            seen[path] = path.stat().st_mtime_ns
        except FileNotFoundError:
            continue
    return seen


def changed(before: Mapping[Path, int], after: Mapping[Path, int]) -> Path | None:
    """One file that was written, added or removed."""
    different = sorted(set(before.items()) ^ set(after.items()))
    return different[0][0] if different else None


def run_reloading(command: Sequence[str], folder: Path, say: Say) -> int:
    """Run until interrupted; once the command has ended, wait for a change to restart it."""
    # A shell makes the commands it starts in the background ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A signal sent only to this process is meant for the command as well.
    signal.signal(signal.SIGTERM, _stop_reloading)
    seen = snapshot(folder)
    process = subprocess.Popen(command)
    end_reported = False
    try:
        while True:
            time.sleep(LOOK_EVERY_S)
            if process.poll() is not None and not end_reported:
                say(f"it ended with status {process.returncode}; waiting for a change")
                end_reported = True
            path = changed(seen, snapshot(folder))
            if path is not None:
                seen = settled(folder)
                say(f"{_relative(path, folder)} changed, starting again")
                stop(process)
                process = subprocess.Popen(command)
                end_reported = False
    except KeyboardInterrupt:
        return _wait_out(process)
    finally:
        stop(process)


def _stop_reloading(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def settled(folder: Path) -> dict[Path, int]:
    """The files once nothing is being written: an editor empties a file before it fills it."""
    now = snapshot(folder)
    for _ in range(SETTLE_LOOKS_MAX):
        time.sleep(SETTLE_S)
        before, now = now, snapshot(folder)
        if before == now:
            break
    return now


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and kill it if it does not."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_out(process: subprocess.Popen[bytes]) -> int:
    """Let the command finish: the terminal has sent it the signal too.

    A command that had just been started may have missed it, so the wait is limited.
    """
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            return process.wait(left_s)
        except KeyboardInterrupt:
            continue
        except subprocess.TimeoutExpired:
            break
    stop(process)
    return process.returncode


def _relative(path: Path, folder: Path) -> Path:
    return path.relative_to(folder) if path.is_relative_to(folder) else path


# Logs: for people on a terminal, JSON lines otherwise; each with execution, attempt, worker

FIELDS: Final = ("execution_id", "attempt_index", "worker_instance_id", "task")
"""Attributes of a record that are logged with its message."""

_STYLES: Final = {
    logging.DEBUG: "dim",
    logging.INFO: "",
    logging.WARNING: "yellow",
    logging.ERROR: "bold red",
    logging.CRITICAL: "bold red",
}
_TRACEBACK: Final = logging.Formatter()


def configure(level: str, *, as_json: bool | None = None) -> None:
    """Send all logs to standard error, as JSON lines if asked for, or if it is not a terminal."""
    json_lines = not sys.stderr.isatty() if as_json is None else as_json
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if json_lines:
        handler.setFormatter(JsonLines())
    else:
        handler = Readable()
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # It logs every request; we log those that matter.
    logging.getLogger("httpx").setLevel(logging.WARNING)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        document: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        document |= fields_of(record)
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        try:
            return visible_json(msgspec.json.encode(document, enc_hook=str).decode())
        except UnicodeEncodeError:
            # Only the slower encoder can write half a surrogate pair.
            return json.dumps(document, default=str)


class Readable(logging.Handler):
    """One line per record, in colour; the traceback beneath it."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or open_console(stderr=True)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(readable(record), soft_wrap=True)
        except (OSError, ValueError):
            self.handleError(record)


def readable(record: logging.LogRecord) -> Group:
    style = _STYLES.get(record.levelno, "")
    line = Text.assemble(
        (time.strftime("%H:%M:%S", time.localtime(record.created)), "dim"),
        (f" {record.levelname.lower():<7} ", style),
    )
    fields = fields_of(record)
    if task := fields.get("task"):
        line.append(f"{task} ", style="cyan")
    line.append(record.getMessage())
    if "execution_id" in fields:
        line.append(f"  {str(fields['execution_id'])[-12:]}", style="dim")
        # People count from one, as `ls` does.
        if isinstance(index := fields.get("attempt_index"), int):
            line.append(f" try {index + 1}", style="dim")
    if not record.exc_info:
        return Group(line)
    return Group(line, Indented(_TRACEBACK.formatException(record.exc_info), style="dim"))


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}


LEVELS: Final = ("debug", "info", "warning", "error")
DEV_DRAIN_TIMEOUT: Final = "3s"
LEAVE_S: Final = 1.0
"""How long to wait for tasks still running after the worker has stopped."""

lane_option = click.option(
    "--lane",
    "lanes",
    multiple=True,
    metavar="NAME[=WEIGHT]",
    help="Serve this lane; repeatable.  [default: the lanes of the tasks]",
)
json_lines_option = click.option(
    "--json", "as_json", is_flag=True, help="Log JSON lines, even on a terminal."
)
concurrency_option = click.option(
    "--concurrency",
    default=100,
    show_default=True,
    metavar="NUMBER",
    type=click.IntRange(1, 100_000),
    help="Tasks that run at the same time.",
)
log_level_option = click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(LEVELS),
    help="The least severe messages to log.",
)


@click.command("worker", short_help="Run a program's tasks.")
@click.argument("reference", metavar="MODULE:APP", envvar=APP_VARIABLE)
@lane_option
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    help="A capability this worker offers; repeatable.",
)
@concurrency_option
@click.option(
    "--drain-timeout",
    default="25s",
    show_default=True,
    help="How long running tasks may continue once it is told to stop.",
)
@click.option(
    "--processes",
    default=1,
    show_default=True,
    metavar="NUMBER",
    type=click.IntRange(1, PROCESSES_MAX),
    help="Workers to start, each in its own process, for example one per core.",
)
@click.option(
    "--health-port",
    metavar="PORT",
    type=click.IntRange(1, PORT_MAX),
    help="Answer GET /livez and /readyz here. Further processes take the ports after it.",
)
@click.option("--one-of-several", is_flag=True, hidden=True, help="What each of them is run with.")
@log_level_option
@json_lines_option
def worker(
    reference: str,
    lanes: tuple[str, ...],
    capabilities: tuple[str, ...],
    concurrency: int,
    drain_timeout: str,
    processes: int,
    health_port: int | None,
    one_of_several: bool,
    log_level: str,
    as_json: bool,
) -> int:
    """Run the tasks of MODULE:APP until it is stopped.

    Ctrl-C or SIGTERM once: finishes what runs and hands the rest back. Twice: stops now.
    """
    app = find_app(reference)
    if processes > 1 and app.url == MEMORY_URL:
        raise InvalidInput("--processes", "a database in memory belongs to one process alone")
    if health_port is not None and health_port + processes - 1 > PORT_MAX:
        raise InvalidInput(
            "--health-port", f"{processes} processes need as many ports", health_port
        )
    configure(log_level, as_json=as_json or None)
    settings = WorkerSettings(
        lanes=weights(lanes) or None,
        capabilities=capabilities,
        concurrency=concurrency,
        drain_timeout=drain_timeout,
    )
    if screen.err().is_terminal and not as_json and not one_of_several:
        greet(reference, app, settings, processes)
    elif not one_of_several and (lacking := not_run(app, settings)):
        log.warning("not run: %s", ", ".join(lacking))
    if processes > 1 and not one_of_several:
        return run_several(_commands(processes, health_port))
    if one_of_several:
        stop_with_starter()
    exempt_imports_from_collection()
    asyncio.run(_work(app, settings, health_port))
    return options.OK


def exempt_imports_from_collection() -> None:
    """Keep the garbage collector from scanning imported objects, which stay anyway: each scan
    would stop every task for as long as it takes."""
    gc.collect()
    gc.freeze()


def _commands(processes: int, health_port: int | None) -> list[list[str]]:
    """The command line of each process. If an option is given twice, the last one counts."""
    command = _same_command("--one-of-several")
    if health_port is None:
        return [command] * processes
    return [[*command, f"--health-port={health_port + each}"] for each in range(processes)]


async def _work(app: App, settings: WorkerSettings, health_port: int | None = None) -> None:
    async with AsyncExitStack() as stack:
        if health_port is not None:
            await stack.enter_async_context(HealthPort(app.check_ready).listen(health_port))
        stack.push_async_callback(app.close)
        await app.run_worker(settings=settings)
    await _leave()


async def _leave() -> None:
    """End the process even if a handler hangs: its lease expires, and others take over."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        _, stuck = await asyncio.wait(left, timeout=LEAVE_S)
        if stuck:
            # Returning would wait for it: the event loop for coroutines, Python for threads.
            logging.shutdown()
            os._exit(options.FAILED)


@click.command("dev", short_help="Run a program's tasks, and start again when a file changes.")
@click.argument("reference", metavar="MODULE:APP", envvar=APP_VARIABLE)
@lane_option
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    help="A capability this worker offers; repeatable.  [default: all that the tasks require]",
)
@concurrency_option
@log_level_option
@json_lines_option
@click.option("--once", is_flag=True, hidden=True, help="What is started again and again.")
def dev(
    reference: str,
    lanes: tuple[str, ...],
    capabilities: tuple[str, ...],
    concurrency: int,
    log_level: str,
    as_json: bool,
    once: bool,
) -> int:
    """Run the tasks of MODULE:APP for development.

    Sets up the database, and starts again whenever a source file below the current
    directory is saved. An error in the program is shown and waits for the next save.
    """
    parts_of(reference)
    chosen = weights(lanes)
    if not once:
        return _dev_again_and_again()
    app = find_app(reference)
    configure(log_level, as_json=as_json or None)
    settings = WorkerSettings(
        lanes=chosen or None,
        capabilities=capabilities or _required(app),
        concurrency=concurrency,
        drain_timeout=DEV_DRAIN_TIMEOUT,
    )
    # Saving a file would not bring back a database that is away.
    asyncio.run(waited_out(lambda: migrate(app.url), None))
    if screen.err().is_terminal and not as_json:
        greet(reference, app, settings)
    asyncio.run(_work(app, settings))
    return options.OK


def _dev_again_and_again() -> int:
    """Run the same command line with `--once`, again after every change."""
    command = _same_command("--once")
    console = screen.err()

    def say(what: str) -> None:
        console.print(Text.assemble(("dev ", "bold magenta"), what))

    say(f"watching {os.getcwd()}")
    return run_reloading(command, Path.cwd(), say)


def _same_command(flag: str) -> list[str]:
    """The command line of this process, with one more flag."""
    name, *rest = sys.argv[1:]
    return [sys.executable, "-m", "flowfabric.cli", name, flag, *rest]


def _required(app: App) -> tuple[str, ...]:
    """All capabilities that tasks of the program require."""
    needed = {each for task in app.tasks.values() for each in task.settings.capabilities}
    return tuple(sorted(needed))


def weights(lanes: tuple[str, ...]) -> Mapping[str, int]:
    """`--lane gpu=3` weighs thrice as much as `--lane default`."""
    found: dict[str, int] = {}
    for text in lanes:
        name, _, weight = text.partition("=")
        if weight and not (weight.isascii() and weight.isdigit()):
            raise click.BadParameter("must look like NAME or NAME=WEIGHT", param_hint="--lane")
        found[name] = int(weight or 1)
    return found


def greet(reference: str, app: App, settings: WorkerSettings, processes: int = 1) -> None:
    """Print what this worker does, in a few lines."""
    lanes = settings.lanes or app.lanes()
    shown = (
        [f"{name}={weight}" for name, weight in lanes.items()]
        if isinstance(lanes, Mapping)
        else list(lanes)
    )
    runs = (
        name for name, task in sorted(app.tasks.items()) if not lacking(task, settings.capabilities)
    )
    pairs = [
        ("app", reference),
        ("database", redact(app.url)),
        ("tasks", ", ".join(runs) or "none"),
        ("not run", ", ".join(not_run(app, settings))),
        ("schedules", ", ".join(each.schedule_id for each in app.schedules)),
        ("lanes", ", ".join(shown)),
        ("no task is in", ", ".join(each for each in lanes if each not in app.lanes())),
        ("capabilities", ", ".join(settings.capabilities)),
        ("at once", str(settings.concurrency)),
        ("processes", str(processes) if processes > 1 else ""),
    ]
    screen.err().print(Text("FlowFabric worker", style="bold"))
    screen.err().print(screen.facts(pairs))
    screen.err().print()


def not_run(app: App, settings: WorkerSettings) -> list[str]:
    """Tasks that this worker cannot run, with the capabilities it lacks."""
    return [
        f"{name} (needs {' '.join(f'--capability {each}' for each in lacks)})"
        for name, task in sorted(app.tasks.items())
        if (lacks := lacking(task, settings.capabilities))
    ]
