"""Hints from other processes that share the file.

SQLite cannot call us, so while somebody waits we look whether anybody else has
committed. Where the system tells of writes to the log beside the file, we look
after one; a write precedes its commit by as long as the disk takes, so we look
again, a little later each time. Elsewhere we look often after a change and ever
less often while nothing happens. What was changed cannot be seen, so every
listener is woken.
"""

import asyncio
from contextlib import suppress
from typing import Final

from flowfabric.errors import RetryExhausted, Transport
from flowfabric.store.hints import EVERY_TOPIC, HintBoard
from flowfabric.store.sqlite.file_changes import FileChanges
from flowfabric.store.sqlite.writer import Writer

LOOK_FIRST_S: Final = 0.001
LOOK_MAX_S: Final = 0.25
LOOK_GROWTH: Final = 1.5
SETTLED_S: Final = 0.01
"""Looking less often than this, we wait to be told of the next write."""
TOLD_MAX_S: Final = 1.0
"""How long to go without looking where writes are told of."""


async def watch(board: HintBoard, writer: Writer, path: str) -> None:
    """Wake all listeners whenever another connection commits. Runs until cancelled."""
    seen = await _version(writer, 0)
    pause_s, gap_s = LOOK_FIRST_S, 0.0
    with FileChanges(f"{path}-wal") as changes:
        while True:
            await board.somebody_waits.wait()
            version = await _version(writer, seen)
            if version != seen:
                seen = version
                pause_s, gap_s = LOOK_FIRST_S, 0.0
                board.publish([EVERY_TOPIC])
            if pause_s < SETTLED_S:
                await asyncio.sleep(pause_s)
            elif await changes.wait(pause_s):
                # Told again and again, it is of our own writes: a busy process looks seldom.
                await asyncio.sleep(gap_s)
                pause_s, gap_s = LOOK_FIRST_S, min(2 * gap_s + SETTLED_S, LOOK_MAX_S)
                continue
            else:
                gap_s = 0.0
            pause_max_s = TOLD_MAX_S if changes.told else LOOK_MAX_S
            pause_s = min(pause_s * LOOK_GROWTH, pause_max_s)


async def _version(writer: Writer, otherwise: int) -> int:
    # A file that cannot be read is reported by whatever is asked of it next.
    with suppress(Transport, RetryExhausted):
        return await writer.data_version()
    return otherwise
