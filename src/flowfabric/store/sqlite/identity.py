"""Whether a path still names the file that was opened.

A file that is deleted, or replaced by another, stays open where it was opened: writing to
it succeeds, and what was written is gone with the last process that has it open. So the
path is looked up again after every commit and before every read.
"""

import os
from typing import Final

from flowfabric.errors import Unavailable
from flowfabric.store.sqlite.connection import MEMORY

_NOBODY: Final = (0, 0)


class FileIdentity:
    """The file that a path named when this was made."""

    def __init__(self, path: str) -> None:
        # The process may change its directory.
        self._path = path if path == MEMORY else os.path.abspath(path)
        self._opened = _look_up(self._path)

    def check(self) -> None:
        """Raise unless the path still names that file."""
        if _look_up(self._path) == self._opened:
            return
        what = "replaced" if os.path.exists(self._path) else "deleted"
        raise Unavailable(
            "sqlite",
            f"{self._path} was {what} while it was in use, so nothing can be read from or stored"
            " in it any more; put the file back, or start this process again",
        )


def _look_up(path: str) -> tuple[int, int]:
    if path == MEMORY:
        return _NOBODY
    try:
        found = os.stat(path)
    except OSError:
        return _NOBODY
    return found.st_dev, found.st_ino
