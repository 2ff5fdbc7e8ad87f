"""`worker` and `dev`: running a program's tasks."""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import click
from rich.text import Text

from flowfabric.app import MEMORY_URL, App
from flowfabric.cli import options, screen
from flowfabric.cli.logs import configure, json_lines_option, log_level_option
from flowfabric.cli.options import APP_VARIABLE, find_app, parts_of
from flowfabric.cli.processes import PASSED_ON, run_reloading, run_several, stop_with_starter
from flowfabric.cli.workers import lacking
from flowfabric.connection import migrate
from flowfabric.errors import InvalidInput
from flowfabric.logs import open_log
from flowfabric.outages import waited_out
from flowfabric.stop_signals import STOP_SIGNALS
from flowfabric.store.urls import redact
from flowfabric.worker.asyncio_tasks import UNENDING
from flowfabric.worker.health import HealthPort
from flowfabric.worker.worker import WorkerSettings

log = open_log(__name__)

PROCESSES_MAX: Final = 256
PORT_MAX: Final = 65_535
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
concurrency_option = click.option(
    "--concurrency",
    default=100,
    show_default=True,
    metavar="NUMBER",
    type=click.IntRange(1, 100_000),
    help="Tasks that run at the same time.",
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


async def _work(
    app: App,
    settings: WorkerSettings,
    health_port: int | None = None,
    signals: Sequence[signal.Signals] = STOP_SIGNALS,
) -> None:
    async with AsyncExitStack() as stack:
        if health_port is not None:
            await stack.enter_async_context(HealthPort(app.check_ready).listen(health_port))
        stack.push_async_callback(app.close)
        await app.work(settings, signals=signals)
    await _leave()


async def _leave() -> None:
    """End the process even if a handler hangs: its lease expires, and others take over."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    stuck = (await asyncio.wait(left, timeout=LEAVE_S))[1] if left else set()
    if stuck or UNENDING:
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
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
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
    # The others reach the process that watches the files too, which passes them on as this one.
    asyncio.run(_work(app, settings, signals=[signal.SIGTERM]))
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
