"""`worker` and `dev`: running a program's tasks."""

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import click
from rich.text import Text

from flowfabric.app import MEMORY_URL, App
from flowfabric.cli import logs, options, screen
from flowfabric.cli.options import APP_VARIABLE, find_app, parts_of
from flowfabric.cli.reload import run_reloading
from flowfabric.cli.several import PROCESSES_MAX, run_several, stop_with_starter
from flowfabric.connection import migrate
from flowfabric.errors import InvalidInput
from flowfabric.outages import waited_out
from flowfabric.store.urls import redact
from flowfabric.worker.worker import WorkerSettings

LEVELS: Final = ("debug", "info", "warning", "error")
DEV_DRAIN_TIMEOUT: Final = "3s"
LEAVE_S: Final = 1.0
"""How long what is still running after the worker has stopped is waited for."""

lane_option = click.option(
    "--lane",
    "lanes",
    multiple=True,
    metavar="NAME[=WEIGHT]",
    help="Serve this lane; may be given several times. Otherwise: those of the tasks.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Log JSON lines also on a terminal."
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
    help="Log no less than this.",
)


@click.command("worker", short_help="Run a program's tasks.")
@click.argument("reference", metavar="MODULE:APP", envvar=APP_VARIABLE)
@lane_option
@click.option("--capability", "capabilities", multiple=True, help="Something this worker has.")
@concurrency_option
@click.option(
    "--drain-timeout",
    default="25s",
    show_default=True,
    help="How long running tasks may go on when it is told to stop.",
)
@click.option(
    "--processes",
    default=1,
    show_default=True,
    metavar="NUMBER",
    type=click.IntRange(1, PROCESSES_MAX),
    help="Workers to start, each in a process of its own: one for each core, say.",
)
@click.option("--one-of-several", is_flag=True, hidden=True, help="What each of them is run with.")
@log_level_option
@json_option
def worker(
    reference: str,
    lanes: tuple[str, ...],
    capabilities: tuple[str, ...],
    concurrency: int,
    drain_timeout: str,
    processes: int,
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
    logs.configure(log_level, as_json=as_json or None)
    settings = WorkerSettings(
        lanes=weights(lanes) or None,
        capabilities=capabilities,
        concurrency=concurrency,
        drain_timeout=drain_timeout,
    )
    if screen.err().is_terminal and not as_json and not one_of_several:
        greet(reference, app, settings, processes)
    if processes > 1 and not one_of_several:
        return run_several(_same_command("--one-of-several"), processes)
    if one_of_several:
        stop_with_starter()
    # What has been imported stays. Looking through all of it for garbage, again and again,
    # would stop every task for as long as that takes.
    gc.collect()
    gc.freeze()
    asyncio.run(_work(app, settings))
    return options.OK


async def _work(app: App, settings: WorkerSettings) -> None:
    try:
        await app.run_worker(settings=settings)
    finally:
        await app.close()
    await _leave()


async def _leave() -> None:
    """End the process even if a handler never ends: its lease expires, and others take over."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        _, stuck = await asyncio.wait(left, timeout=LEAVE_S)
        if stuck:
            # Returning would wait for it: the event loop for a coroutine, Python for a thread.
            logging.shutdown()
            os._exit(options.FAILED)


@click.command("dev", short_help="Run a program's tasks, and start again when a file changes.")
@click.argument("reference", metavar="MODULE:APP", envvar=APP_VARIABLE)
@lane_option
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    help="Something this worker has. Otherwise: all that the tasks require.",
)
@concurrency_option
@log_level_option
@json_option
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
    logs.configure(log_level, as_json=as_json or None)
    settings = WorkerSettings(
        lanes=chosen or None,
        capabilities=capabilities or _required(app),
        concurrency=concurrency,
        drain_timeout=DEV_DRAIN_TIMEOUT,
    )
    # No save of a file brings back a database that is away.
    asyncio.run(waited_out(lambda: migrate(app.url), None))
    if screen.err().is_terminal and not as_json:
        greet(reference, app, settings)
    asyncio.run(_work(app, settings))
    return options.OK


def _dev_again_and_again() -> int:
    """Run the same command line, each time once."""
    command = _same_command("--once")
    console = screen.err()

    def say(what: str) -> None:
        console.print(Text.assemble(("dev ", "bold magenta"), what))

    say(f"watching {os.getcwd()}")
    return run_reloading(command, Path.cwd(), say)


def _same_command(flag: str) -> list[str]:
    """The command line of this process, with another flag."""
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
    """What this worker does, in a few lines."""
    lanes = settings.lanes or app.lanes()
    shown = (
        [f"{name}={weight}" for name, weight in lanes.items()]
        if isinstance(lanes, Mapping)
        else list(lanes)
    )
    missing = {
        name: set(task.settings.capabilities) - set(settings.capabilities)
        for name, task in sorted(app.tasks.items())
    }
    pairs = [
        ("app", reference),
        ("database", redact(app.url)),
        ("tasks", ", ".join(name for name, lacks in missing.items() if not lacks) or "none"),
        ("not run", ", ".join(_lacking(name, lacks) for name, lacks in missing.items() if lacks)),
        ("schedules", ", ".join(each.schedule_id for each in app.schedules)),
        ("lanes", ", ".join(shown)),
        ("capabilities", ", ".join(settings.capabilities)),
        ("at once", str(settings.concurrency)),
        ("processes", str(processes) if processes > 1 else ""),
    ]
    screen.err().print(Text("FlowFabric worker", style="bold"))
    screen.err().print(screen.facts(pairs))
    screen.err().print()


def _lacking(name: str, capabilities: Collection[str]) -> str:
    asked = " ".join(f"--capability {each}" for each in sorted(capabilities))
    return f"{name} (needs {asked})"
