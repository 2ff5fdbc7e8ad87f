"""Whether a path still names the file that was opened, and the files that SQLite keeps beside it.

A file that is deleted, or replaced by another, stays open where it was opened: writing to
it succeeds, and what was written is gone with the last process that has it open. The same
goes for the log of the latest commits, `-wal`, and for `-shm`, through which processes
share it: SQLite deletes neither while we have them open. So the paths are looked up again
before every read, and before and after every commit.
"""

import os
from typing import Final

from flowfabric.errors import DatabaseGone
from flowfabric.store.sqlite.connection import MEMORY

_NOBODY: Final = (0, 0)
_BESIDE: Final = ("", "-wal", "-shm")


class FileIdentity:
    """The files that a path named when this was made."""

    def __init__(self, path: str) -> None:
        # The process may change its directory.
        path = path if path == MEMORY else os.path.abspath(path)
        self._log = f"{path}-wal"
        paths = () if path == MEMORY else tuple(f"{path}{ending}" for ending in _BESIDE)
        opened = {each: _look_up(each) for each in paths}
        self._opened = {each: found for each, found in opened.items() if found != _NOBODY}

    def check(self) -> None:
        """Raise unless the paths still name those files."""
        for path, opened in self._opened.items():
            if _look_up(path) != opened:
                what = "replaced" if os.path.exists(path) else "deleted"
                raise DatabaseGone(
                    "sqlite",
                    f"{path} was {what} while it was in use, so nothing can be read from or"
                    " stored in it any more; put the file back, or start this process again",
                )

    def log_state(self) -> tuple[int, int]:
        """Something that changes when a commit writes to the file."""
        try:
            found = os.stat(self._log)
        except OSError:
            return _NOBODY
        return found.st_size, found.st_mtime_ns


def _look_up(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return _NOBODY
    return found.st_dev, found.st_ino
