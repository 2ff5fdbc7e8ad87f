"""Runs the real command, with its output in files or on a terminal of a given size."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.forking import Forked, Forker, Request

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 60
COMMAND = (sys.executable, "-m", "flowfabric.cli")
IMPORTED = ("flowfabric.cli.main", "flowfabric.store.sqlite.store", "rich.markdown")

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]|\r")


class Ran(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def documents(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.lines]

    @property
    def document(self) -> dict[str, object]:
        (document,) = self.documents
        return document


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FLOWFABRIC_", "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR"))
    }
    source = str(ROOT / "src")
    path = os.pathsep.join(filter(None, (source, inherited.get("PYTHONPATH", ""))))
    return inherited | {"PYTHONPATH": path, "TERM": "xterm-256color", "TZ": "UTC"} | dict(extra)


def run(
    *arguments: str, url: str | None = None, stdin: str = "", cwd: Path = ROOT, **extra: str
) -> Ran:
    """Run a command to its end. `extra` are environment variables."""
    variables = extra if url is None else {"FLOWFABRIC_URL": url, **extra}
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(stdin.encode())
        given.seek(0)
        streams = given.fileno(), out.fileno(), err.fileno()
        process = _start((*COMMAND, *arguments), streams, cwd, variables)
        try:
            status = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        for each in (out, err):
            each.seek(0)
        return Ran(status, out.read().decode(), err.read().decode())


def _start(
    command: tuple[str, ...], streams: tuple[int, int, int], cwd: Path, extra: Mapping[str, str]
) -> Forked:
    _, _, module, *arguments = command
    return _forker().fork(Request(module, arguments, str(cwd), environment(extra)), streams)


@cache
def _forker() -> Forker:
    return Forker(*IMPORTED, environment=environment({}))


def run_on_terminal(
    command: tuple[str, ...],
    *,
    columns: int = 80,
    typed: str = "",
    interrupt_at: str = "",
    cwd: Path = ROOT,
    timeout_s: float = TIMEOUT_S,
    **extra: str,
) -> Ran:
    """Run a command on a pseudo-terminal; `out` is what was shown, without colours.

    It is interrupted once, when it shows `interrupt_at`.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = _start(command, (slave, slave, slave), cwd, extra)
    os.close(slave)
    if typed:
        os.write(master, typed.encode())
    try:
        shown = _read_all(master, process, time.monotonic() + timeout_s, interrupt_at)
        status = process.wait(timeout_s)
    finally:
        process.kill()
        os.close(master)
    return Ran(status, _CONTROL.sub("", shown), shown)


def heed_interrupts() -> None:
    """Whoever runs the tests in the background may have had interrupts ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _read_all(master: int, process: Forked, deadline: float, interrupt_at: str) -> str:
    chunks: list[bytes] = []
    while True:
        assert time.monotonic() < deadline, b"".join(chunks).decode(errors="replace")
        readable, _, _ = select.select([master], [], [], 0.1)
        if readable:
            try:
                chunk = os.read(master, 65_536)
            except OSError:
                break
            if not chunk:
                break
            chunks.append(chunk)
            if interrupt_at and interrupt_at.encode() in b"".join(chunks):
                process.send_signal(signal.SIGINT)
                interrupt_at = ""
        elif process.poll() is not None:
            break
    return b"".join(chunks).decode(errors="replace")
