"""The processes that `worker --processes` and `dev` start, and start again."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from flowfabric.cli import options
from flowfabric.logs import open_log
from flowfabric.stop_signals import heeded

# Several processes of one worker, for machines with several cores -----------
#
# The processes are independent: the database hands each of them its own work. The process
# that starts them passes on every signal that tells it to stop. It replaces one that is killed;
# one that exits on its own has said why, and the others would exit for the same reason. Each
# holds the reading end of a pipe, and stops when its parent is gone, however that ended.

log = open_log(__name__)

REPLACE_AFTER_S: Final = 1.0


def run_several(commands: Sequence[Sequence[str]]) -> int:
    """Run each command in a process until told to stop; return their status."""
    return asyncio.run(_Several().run(commands))


class _Several:
    def __init__(self) -> None:
        self._running: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()

    async def run(self, commands: Sequence[Sequence[str]]) -> int:
        loop = asyncio.get_running_loop()
        for number in heeded():
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
PASSED_ON: Final = (signal.SIGINT, signal.SIGHUP)
"""What a terminal sends to the command as well, which leaves it to this process."""
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
    for number in heeded():
        # A shell makes the commands it starts in the background ignore interrupts.
        signal.signal(number, signal.default_int_handler)
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
    """Tell the command to finish, and again whenever told again; in the end kill it."""
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    process.terminate()
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            status = process.wait(left_s)
            return options.OK if status == -signal.SIGTERM else status
        except KeyboardInterrupt:
            process.terminate()
        except subprocess.TimeoutExpired:
            break
    stop(process)
    return process.returncode


def _relative(path: Path, folder: Path) -> Path:
    return path.relative_to(folder) if path.is_relative_to(folder) else path
