"""Hints from other processes that share the file.

SQLite cannot call us, so while a listener waits we look whether another process has
committed. Where the system tells of writes to the log beside the file, we look
after one; a write precedes its commit by as long as the disk takes, so we look
again, a little later each time. Elsewhere we look often after a change and ever
less often while nothing happens. What was changed cannot be seen, so every
listener is woken.
"""

import asyncio
import ctypes
import os
import struct
import sys
from contextlib import suppress
from typing import Final, Self

from flowfabric.errors import RetryExhausted, Transport
from flowfabric.store.hints import EVERY_TOPIC, HintBoard
from flowfabric.store.sqlite.writer import Writer

# Notifications of writes to a file, where the system sends them --------------
#
# Linux does (inotify). Elsewhere, when its watches are used up, or once the file was
# deleted, there are none and a listener waits for its whole timeout.

_MODIFIED: Final = 0x2
_IGNORED: Final = 0x8000
"""The watch has ended, with the file."""
_EVENT: Final = struct.Struct("iIII")
"""Which watch, what happened, a cookie, and the length of a name, which a file's event lacks."""
_OPEN_FLAGS: Final = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_READ_BYTES: Final = 4096


class FileChanges:
    """Waits for writes to a file by anybody. Use as a context, on a running event loop.

    Writes before a wait are kept for it by the system: a process that writes a lot itself is not
    interrupted by each of its writes.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._written = asyncio.Event()
        self._descriptor = -1

    def __enter__(self) -> Self:
        self._descriptor = _watch(self._path)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    @property
    def is_watching(self) -> bool:
        """Whether writes are noticed at all."""
        return self._descriptor >= 0

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a write since the last call; return whether there was one."""
        self._written.clear()
        self._listen()
        try:
            async with asyncio.timeout(timeout_s):
                await self._written.wait()
        except TimeoutError:
            return False
        finally:
            self._stop()
        return True

    def _listen(self) -> None:
        if self.is_watching:
            try:
                asyncio.get_running_loop().add_reader(self._descriptor, self._read)
            except (NotImplementedError, OSError):
                self._close()

    def _read(self) -> None:
        events = b""
        with suppress(BlockingIOError):
            events = os.read(self._descriptor, _READ_BYTES)
        self._written.set()
        self._stop()
        if any(mask & _IGNORED for _, mask, _, _ in _EVENT.iter_unpack(events)):
            self._close()

    def _stop(self) -> None:
        if self.is_watching:
            asyncio.get_running_loop().remove_reader(self._descriptor)

    def _close(self) -> None:
        if self.is_watching:
            os.close(self._descriptor)
            self._descriptor = -1


def _watch(path: str) -> int:
    """A descriptor that becomes readable when the file is written to, or -1."""
    if not sys.platform.startswith("linux"):
        return -1
    try:
        library = ctypes.CDLL(None)
        descriptor = int(library.inotify_init1(_OPEN_FLAGS))
        if descriptor < 0:
            return -1
        if int(library.inotify_add_watch(descriptor, os.fsencode(path), _MODIFIED)) < 0:
            os.close(descriptor)
            return -1
    except (OSError, AttributeError):
        return -1
    return descriptor


LOOK_FIRST_S: Final = 0.001
LOOK_MAX_S: Final = 0.25
LOOK_GROWTH: Final = 1.5
SETTLED_S: Final = 0.01
"""Past this interval, wait for a file notification."""
NOTIFIED_MAX_S: Final = 1.0
"""How long to go without looking where file notifications arrive."""


async def watch(board: HintBoard, writer: Writer, path: str, *, seen: int) -> None:
    """Wake all listeners whenever another connection commits after the version `seen`.

    Runs until cancelled.
    """
    pause_s, gap_s = LOOK_FIRST_S, 0.0
    with FileChanges(f"{path}-wal") as changes:
        while True:
            await board.has_waiting.wait()
            version = await _version(writer, seen)
            if version != seen:
                seen = version
                pause_s, gap_s = LOOK_FIRST_S, 0.0
                board.publish([EVERY_TOPIC])
            if pause_s < SETTLED_S:
                await asyncio.sleep(pause_s)
            elif await changes.wait(pause_s):
                # Repeated notifications are of our own writes: a busy process looks seldom.
                await asyncio.sleep(gap_s)
                pause_s, gap_s = LOOK_FIRST_S, min(2 * gap_s + SETTLED_S, LOOK_MAX_S)
                continue
            else:
                gap_s = 0.0
            pause_max_s = NOTIFIED_MAX_S if changes.is_watching else LOOK_MAX_S
            pause_s = min(pause_s * LOOK_GROWTH, pause_max_s)


async def _version(writer: Writer, otherwise: int) -> int:
    # A file that cannot be read is reported by whatever is asked of it next.
    with suppress(Transport, RetryExhausted):
        return await writer.data_version()
    return otherwise
