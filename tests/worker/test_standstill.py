"""An event loop that stands still is noticed, and the line that holds it up is named."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine

import pytest

from flowfabric.worker.leases import watch_loop

AFTER_S = 0.2
EVERY_S = 0.02


class Heard(logging.Handler):
    """Collects records, and lets go of who waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.one = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self.one.set()


@pytest.fixture
def heard() -> Heard:
    return Heard()


def fetch(block: Callable[[], object]) -> None:
    block()


async def handler(block: Callable[[], object]) -> None:
    fetch(block)


async def watched(heard: Heard, work: Coroutine[object, object, None]) -> None:
    """Do some work on this loop while another thread watches it."""
    logger = logging.getLogger("flowfabric.worker.leases")
    logger.addHandler(heard)
    loop, me, stop = asyncio.get_running_loop(), threading.get_ident(), threading.Event()

    async def watch() -> None:
        watching = asyncio.create_task(watch_loop(loop, me, after_s=AFTER_S, every_s=EVERY_S))
        await asyncio.to_thread(stop.wait)
        watching.cancel()

    thread = threading.Thread(target=asyncio.run, args=(watch(),))
    thread.start()
    try:
        await asyncio.create_task(work)
    finally:
        stop.set()
        await asyncio.to_thread(thread.join)
        logger.removeHandler(heard)


async def test_the_line_that_blocks_is_named_in_the_words_of_the_program(heard: Heard) -> None:
    await watched(heard, handler(lambda: heard.one.wait(timeout=20)))
    (said,) = heard.said
    assert "\n" not in said
    place = said.partition("It is here: ")[2]
    calls = [each.partition(",")[0] for each in place.split(" → ")]
    assert calls[:2] == ["handler", "fetch"]
    assert "asyncio" not in place
    assert f"{__file__}:" in place


async def test_a_standstill_that_begins_just_after_a_look_is_noticed_as_well(heard: Heard) -> None:
    # Half as long again as it takes to notice, however the looks fall.
    def block() -> None:
        heard.one.wait(timeout=1.5 * AFTER_S)

    for _ in range(5):
        heard.one.clear()
        heard.said.clear()
        await watched(heard, handler(block))
        assert len(heard.said) == 1


async def test_a_loop_that_goes_on_is_left_alone(heard: Heard) -> None:
    await watched(heard, asyncio.sleep(2 * AFTER_S))
    assert heard.said == []
