"""What a program hears of a signal that stopped its workers."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from flowfabric import App, Context
from tests.cli.command import environment, heed_interrupts

HEARD: list[str] = []


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that the program has a handler for."""
    each: signal.Signals = request.param

    def hear(arrived: int, frame: FrameType | None) -> None:
        HEARD.append(signal.Signals(arrived).name)

    HEARD.clear()
    before = signal.signal(each, hear)
    yield each
    signal.signal(each, before)


async def test_the_program_has_the_signal_once_its_handlers_have_finished(
    app: App, number: signal.Signals
) -> None:
    started, going_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def crawl(ctx: Context) -> None:
        started.set()
        await going_on.wait()
        HEARD.append("crawled")

    await app.submit(crawl)
    async with asyncio.timeout(20):
        working = asyncio.create_task(app.run_worker())
        await started.wait()
        os.kill(os.getpid(), number)
        going_on.set()
        await working
    assert ["crawled", number.name] == HEARD


async def test_of_two_workers_the_last_to_stop_gives_the_signal_back(
    app: App, number: signal.Signals
) -> None:
    crawled, sent, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @app.task
    async def crawl(ctx: Context) -> None:
        crawled.set()

    @app.task(lane="mail")
    async def send(ctx: Context) -> None:
        sent.set()

    async with asyncio.timeout(20):
        first = asyncio.create_task(app.run_worker(lanes=["default"], stop=stop))
        await app.submit(crawl)
        await crawled.wait()
        second = asyncio.create_task(app.run_worker(lanes=["mail"]))
        await app.submit(send)
        await sent.wait()
        stop.set()
        await first
        os.kill(os.getpid(), number)
        await second
    assert [number.name] == HEARD


async def test_a_worker_without_signals_leaves_them_to_the_program(
    app: App, number: signal.Signals
) -> None:
    begun, stop = asyncio.Event(), asyncio.Event()

    @app.task
    async def crawl(ctx: Context) -> None:
        begun.set()

    async with asyncio.timeout(20):
        working = asyncio.create_task(app.run_worker(stop=stop, signals=False))
        await app.submit(crawl)
        await begun.wait()
        os.kill(os.getpid(), number)
        assert [number.name] == HEARD
        assert not working.done()
        stop.set()
        await working


PROGRAM = """
import asyncio, sys

from flowfabric import App, Context

app = App("sqlite:///:memory:")


@app.task
async def crawl(ctx: Context) -> None:
    print("crawling", flush=True)
    await asyncio.sleep(0.2)
    print("crawled", flush=True)


@app.task(lane="nobody")
async def never(ctx: Context) -> None: ...


async def main() -> None:
    async with app:
        working = asyncio.create_task(app.run_worker(lanes=["default"]))
        await app.submit(crawl)
        await (await app.submit(never)).result()


asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_program_that_waits_for_results_ends_after_its_worker(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment({}),
        preexec_fn=heed_interrupts,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "crawling\n"
            process.send_signal(how)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert out == "crawled\n"
    assert process.returncode == -how
    assert ("KeyboardInterrupt" in err) is (how is signal.SIGINT)
