"""Waiting for whichever of several things comes first."""

import asyncio
from collections.abc import Awaitable


async def first_of(*awaited: Awaitable[object], timeout_s: float | None = None) -> None:
    """Return when one of `awaited` is done or the time is over; the others are cancelled.

    What one of them returns or raises is dropped: the caller looks for itself.
    """
    waits = [asyncio.ensure_future(each) for each in awaited]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
