"""Modules that run in processes of their own, and what goes in and out of them.

They are forked from a process that has imported the package, since importing it takes longer
than most of them last; see `tests.forking`.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.forking import Forked, Forker, Request

ROOT = Path(__file__).parent.parent.parent
IMPORTED = (
    "flowfabric.cli.main",
    "flowfabric.reconcilers",
    "flowfabric.server.serve",
    "flowfabric.store.postgres.store",
    "flowfabric.store.sqlite.store",
)
STDOUT, STDERR = 1, 2
NOWHERE = os.open(os.devnull, os.O_RDWR)
NOTHING_ELSE: Mapping[str, str] = {}


class Program:
    """A module in a process of its own, used as an `asyncio.subprocess.Process` is."""

    def __init__(
        self,
        forked: Forked,
        stdin: asyncio.StreamWriter,
        stdout: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.stdin = stdin
        self.stdout, self._other_end = stdout
        self._forked = forked
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(forked.fileno(), self._note_end)

    def _note_end(self) -> None:
        self._loop.remove_reader(self._forked.fileno())
        status = self._forked.poll()
        assert status is not None
        self._ended.set_result(status)

    @property
    def returncode(self) -> int | None:
        """Its exit status once it has ended, or the signal that ended it as a negative number."""
        return self._ended.result() if self._ended.done() else None

    def send_signal(self, number: int) -> None:
        # It may have ended without our having heard of it.
        if not self._ended.done():
            with suppress(ProcessLookupError):
                self._forked.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def communicate(self) -> None:
        """Tell it that nothing more comes in, and wait for its end."""
        self.stdin.close()
        await self.stdout.read()
        await self.wait()
        self._other_end.close()
        for each in (self.stdin, self._other_end):
            with suppress(ConnectionError):
                await each.wait_closed()


async def start(
    module: str, *arguments: str, variables: Mapping[str, str] = NOTHING_ELSE, stderr: int = STDERR
) -> Program:
    (stdin, its_stdin), (stdout, its_stdout) = socket.socketpair(), socket.socketpair()
    with its_stdin, its_stdout:
        streams = its_stdin.fileno(), its_stdout.fileno(), stderr
        forked = fork(module, arguments, streams, variables)
    _, into = await asyncio.open_connection(sock=stdin)
    return Program(forked, into, await asyncio.open_connection(sock=stdout))


def fork(
    module: str,
    arguments: Sequence[str],
    streams: tuple[int, int, int],
    variables: Mapping[str, str] = NOTHING_ELSE,
) -> Forked:
    request = Request(module, arguments, str(ROOT), environment(variables))
    return _forker().fork(request, streams)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **variables}


@cache
def _forker() -> Forker:
    return Forker(*IMPORTED, environment=environment({}))
