"""Noticing that the worker's event loop stands still, and which line holds it up."""

import asyncio
import sys
import threading
from typing import Final

from flowfabric.logs import open_log
from flowfabric.worker.tracebacks import place_of

log = open_log(__name__)

BLOCKED_AFTER_S: Final = 5.0
LOOK_S: Final = 0.5


async def watch_loop(
    loop: asyncio.AbstractEventLoop,
    thread_id: int,
    *,
    after_s: float = BLOCKED_AFTER_S,
    every_s: float = LOOK_S,
) -> None:
    """Log an error when a loop, which runs in the given thread, does nothing for `after_s`.

    Once for each standstill. Runs on another loop, in another thread.
    """
    while not loop.is_closed():
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        # Looks are counted, not time: the whole process may have stood still.
        looks = 0
        await asyncio.sleep(every_s)
        while not answered.is_set() and not loop.is_closed():
            looks += 1
            if looks == round(after_s / every_s):
                _tell(thread_id, after_s)
            await asyncio.sleep(every_s)


def _tell(thread_id: int, after_s: float) -> None:
    frame = sys._current_frames().get(thread_id)
    log.error(
        "a handler blocks the event loop for more than %s s; its leases are kept, but nothing else"
        " runs meanwhile. Make it a plain function, which runs in a thread. It is here: %s",
        after_s,
        "nowhere any more" if frame is None else place_of(frame),
    )
