"""What scenes play with: the database, worker processes, the journal and the screen."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowfabric.core.states import TERMINAL_STATES, PublicState
from flowfabric.core.views import ExecutionSnapshot
from flowfabric.demo.program import JOURNAL_VARIABLE, URL_VARIABLE, Note
from flowfabric.engine.engine import Engine
from flowfabric.terminal import Console

LOOK_EVERY_S: Final = 0.05
PATIENCE_S: Final = 30.0
"""How long the demonstration waits for anything before it admits that something is wrong."""


Snapshots = dict[str, ExecutionSnapshot]
Until = Callable[[list[Note], Snapshots], bool]
"""Whether a scene may continue, judging by the journal and the executions it watches."""


class Stage:
    def __init__(self, engine: Engine, url: str, journal: Path, console: Console) -> None:
        self.engine = engine
        self.console = console
        self._url = url
        self._journal = journal
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._started_at = time.monotonic()

    # Saying

    def title(self, text: str) -> None:
        self.console.print()
        self.console.rule(Text(text, style="bold"), align="left", style="dim")

    def say(self, text: str) -> None:
        """Explain, in the narrator's voice."""
        self.console.print(Text.from_markup(text), style="")

    def happened(self, mark: str, text: str, style: str = "") -> None:
        """Report a fact, with the time it happened."""
        seconds = time.monotonic() - self._started_at
        self.console.print(
            Text.assemble((f"{seconds:5.1f}s ", "dim"), (f"{mark} ", style), (text, style))
        )

    # Workers

    def start_worker(self) -> int:
        """Start a worker in a process of its own; return the process number."""
        variables = {URL_VARIABLE: self._url, JOURNAL_VARIABLE: str(self._journal)}
        process = subprocess.Popen(
            [sys.executable, "-m", "flowfabric.demo.program"],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C is for the narrator, who then stops the workers.
            start_new_session=True,
        )
        self._workers[process.pid] = process
        return process.pid

    def kill_worker(self, pid: int) -> None:
        process = self._workers.pop(pid)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop_workers(self) -> None:
        """Ask the others to finish what they run, and kill those that do not."""
        for process in self._workers.values():
            process.terminate()
        for process in self._workers.values():
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._workers.clear()

    # Watching

    def notes(self) -> list[Note]:
        if not self._journal.exists():
            return []
        lines = self._journal.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        return [msgspec.json.decode(line, type=Note) for line in whole]

    async def execution(self, execution_id: str) -> ExecutionSnapshot:
        found = await self.engine.describe_execution(execution_id)
        assert found is not None, "executions of the demonstration are kept"
        return found

    async def follow(self, until: Until, execution_ids: dict[str, str]) -> None:
        """Report each step as it starts and ends, with a live board, until it is time."""
        seen = len(self.notes())
        deadline = time.monotonic() + PATIENCE_S
        with Live(console=self.console, transient=True, auto_refresh=False) as board:
            while True:
                notes = self.notes()
                for each in notes[seen:]:
                    self._report(each)
                seen = len(notes)
                snapshots = {
                    name: await self.execution(each) for name, each in execution_ids.items()
                }
                if self.console.is_terminal:
                    board.update(_board(snapshots), refresh=True)
                if until(notes, snapshots):
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError("the demonstration did not go on as expected")
                await asyncio.sleep(LOOK_EVERY_S)

    def _report(self, each: Note) -> None:
        if each.done:
            self.happened("✓", f"{each.step} done in process {each.pid}, result stored", "green")
        else:
            self.happened("▸", f"{each.step} starts in process {each.pid}")


def started(step: str) -> Until:
    """Continues once a worker has begun a step."""

    def until(notes: list[Note], snapshots: Snapshots) -> bool:
        return any(each.step == step for each in notes)

    return until


def suspended(notes: list[Note], snapshots: Snapshots) -> bool:
    """Continues once everything watched waits for a signal."""
    return all(each.public_state is PublicState.SUSPENDED for each in snapshots.values())


def ended(notes: list[Note], snapshots: Snapshots) -> bool:
    """Continues once everything watched has ended."""
    return all(each.public_state in TERMINAL_STATES for each in snapshots.values())


def _board(snapshots: Snapshots) -> Table:
    board = Table.grid(padding=(0, 2))
    for name, each in snapshots.items():
        done = each.public_state in TERMINAL_STATES
        percent = 100 if done else each.progress_pct or 0
        board.add_row(
            Text(f"       {name}", style="dim"),
            ProgressBar(
                total=100,
                completed=percent,
                width=24,
                # Its own shade of green turns into the grey of an empty bar where colours are few.
                complete_style="cyan",
                finished_style="green",
            ),
            Text(each.public_state.replace("_", " "), style="green" if done else "cyan"),
        )
    return board
