"""Hints from other processes that share the file.

SQLite cannot call us, so while somebody waits we look whether anybody else has
committed: often after a change, ever less often while nothing happens. What was
changed cannot be seen, so every listener is woken.
"""

import asyncio
from contextlib import suppress
from typing import Final

from flowfabric.errors import RetryExhausted, Transport
from flowfabric.store.hints import EVERY_TOPIC, HintBoard
from flowfabric.store.sqlite.writer import Writer

LOOK_FIRST_S: Final = 0.02
LOOK_MAX_S: Final = 0.25
LOOK_GROWTH: Final = 1.5


async def watch(board: HintBoard, writer: Writer) -> None:
    """Wake all listeners whenever another connection commits. Runs until cancelled."""
    seen = await _version(writer, 0)
    pause_s = LOOK_FIRST_S
    while True:
        await board.somebody_waits.wait()
        version = await _version(writer, seen)
        if version != seen:
            seen = version
            pause_s = LOOK_FIRST_S
            board.publish([EVERY_TOPIC])
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * LOOK_GROWTH, LOOK_MAX_S)


async def _version(writer: Writer, otherwise: int) -> int:
    # A file that cannot be read is reported by whatever is asked of it next.
    with suppress(Transport, RetryExhausted):
        return await writer.data_version()
    return otherwise
