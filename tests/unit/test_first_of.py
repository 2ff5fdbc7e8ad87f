"""Waiting for whichever comes first."""

import asyncio

from flowfabric.outages import first_of


async def test_the_first_one_ends_the_wait_and_the_others_are_cancelled() -> None:
    over, never = asyncio.Event(), asyncio.Event()
    cancelled: list[str] = []

    async def wait_for_ever() -> None:
        try:
            await never.wait()
        except asyncio.CancelledError:
            cancelled.append("the other")
            raise

    waiting = asyncio.create_task(first_of(over.wait(), wait_for_ever()))
    await asyncio.sleep(0)
    assert not waiting.done()
    over.set()
    await waiting
    assert cancelled == ["the other"]


async def test_the_end_of_the_time_ends_the_wait() -> None:
    never = asyncio.Event()
    await first_of(never.wait(), timeout_s=0)
    assert not never.is_set()


async def test_one_that_raises_is_done_like_another() -> None:
    async def fail() -> None:
        raise ValueError

    await first_of(fail(), asyncio.Event().wait())
