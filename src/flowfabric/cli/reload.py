"""Runs a command and starts it again when a source file changes."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

LOOK_EVERY_S: Final = 0.3
SETTLE_S: Final = 0.05
SETTLE_LOOKS_MAX: Final = 40
STOP_TIMEOUT_S: Final = 10.0
FILES_MAX: Final = 20_000
SUFFIXES: Final = (".py", ".toml", ".env")
SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})

Say = Callable[[str], None]


def sources(folder: Path) -> Iterator[Path]:
    """Source files below a folder; hidden folders and installed packages are left out."""
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
    """Run until it is interrupted; a command that ends by itself waits for a change."""
    # A shell that starts a command in the background has it ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Whoever ends this process alone means the command as well.
    signal.signal(signal.SIGTERM, _stop_reloading)
    seen = snapshot(folder)
    process = subprocess.Popen(command)
    told_of_end = False
    try:
        while True:
            time.sleep(LOOK_EVERY_S)
            if process.poll() is not None and not told_of_end:
                say(f"it ended with status {process.returncode}; waiting for a change")
                told_of_end = True
            path = changed(seen, snapshot(folder))
            if path is not None:
                seen = settled(folder)
                say(f"{_relative(path, folder)} changed, starting again")
                stop(process)
                process = subprocess.Popen(command)
                told_of_end = False
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
    """Ask it to end, and see to it that it does."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_out(process: subprocess.Popen[bytes]) -> int:
    """Let the command finish: the terminal has sent the signal to it as well.

    One that had only just been started may have missed it, so the wait has an end.
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
