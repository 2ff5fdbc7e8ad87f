"""Following runs: as they speak, from any place, and past attempts that start over."""

import asyncio

import pytest

from flowfabric import App, Context, Frame, Retry, testing
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.run import Run
from tests.apps import traced_memory, working
from tests.conformance.given import NOBODY


class Cue:
    """Lets a handler say one thing after another, when it is told to."""

    def __init__(self) -> None:
        self._cues: asyncio.Queue[str | None] = asyncio.Queue()

    def say(self, *texts: str) -> None:
        for text in texts:
            self._cues.put_nowait(text)

    def end(self) -> None:
        self._cues.put_nowait(None)

    async def act(self, ctx: Context) -> None:
        while (text := await self._cues.get()) is not None:
            if text == "crash":
                raise ConnectionError(text)
            await ctx.emit(text)


def acting(app: App) -> Cue:
    cue = Cue()

    @app.task(name="act", retry=Retry(max_retries=3, delay="1ms", jitter=False))
    async def act(ctx: Context) -> None:
        await cue.act(ctx)

    return cue


async def start(app: App) -> Run[object]:
    return await app.submit(app.tasks["act"]())


async def test_a_run_is_followed_as_it_speaks(waiting_app: App) -> None:
    cue = acting(waiting_app)
    async with working(waiting_app), asyncio.timeout(20):
        run = await start(waiting_app)
        heard: list[str] = []
        cue.say("a")
        async for frame in run.stream():
            heard.append(frame.text)
            if frame.text == "c":
                cue.end()
            else:
                cue.say(chr(ord(frame.text) + 1))
        assert heard == ["a", "b", "c"]
        assert [frame.text async for frame in run.stream()] == heard


async def test_many_follow_one_run(waiting_app: App) -> None:
    cue = acting(waiting_app)

    async def listen(run: Run[object]) -> str:
        return "".join([frame.text async for frame in run.stream()])

    async with working(waiting_app), asyncio.timeout(20):
        run = await start(waiting_app)
        listeners = [asyncio.create_task(listen(run)) for _ in range(50)]
        for text in "hello":
            cue.say(text)
            await asyncio.sleep(0)
        cue.end()
        assert set(await asyncio.gather(*listeners)) == {"hello"}


async def test_a_reader_waits_for_its_turn_where_too_many_follow(
    waiting_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.tails.TAILS_MAX", 1)
    cue = acting(waiting_app)

    async def listen(run: Run[object]) -> str:
        return "".join([frame.text async for frame in run.stream()])

    async with working(waiting_app), asyncio.timeout(20):
        run = await start(waiting_app)
        engine = waiting_app.engine
        listeners = [asyncio.create_task(listen(run)) for _ in range(2)]
        while engine.waiting_tails < 1:
            await asyncio.wait(listeners, timeout=0.001)
        cue.say("a")
        cue.end()
        assert await asyncio.gather(*listeners) == ["a", "a"]


async def test_a_reader_goes_on_after_the_last_frame_it_has_seen(waiting_app: App) -> None:
    cue = acting(waiting_app)
    async with working(waiting_app), asyncio.timeout(20):
        run = await start(waiting_app)
        cue.say(*"abcd")
        cue.end()
        await run.result()
    cursor = "start"
    seen = []
    for _ in range(4):
        async for frame in run.stream(after=cursor):
            seen.append(frame.text)
            cursor = frame.cursor
            break
    assert seen == ["a", "b", "c", "d"]
    assert [frame async for frame in run.stream(after=cursor)] == []


async def test_a_reader_may_begin_with_what_comes_next(waiting_app: App) -> None:
    cue = acting(waiting_app)
    async with working(waiting_app), asyncio.timeout(20):
        run = await start(waiting_app)
        cue.say("old")
        await anext(run.stream())
        stream = run.stream(after="now")
        following = asyncio.ensure_future(anext(stream))
        while not waiting_app.engine.waiting_tails:
            await asyncio.wait([following], timeout=0.001)
        cue.say("new")
        assert (await following).text == "new"
        cue.end()
        assert [frame async for frame in stream] == []


async def test_an_attempt_that_starts_over_tells_what_no_longer_counts(waiting_app: App) -> None:
    cue = acting(waiting_app)
    shown: list[Frame] = []
    turns = 0
    async with working(waiting_app), asyncio.timeout(20):
        run = await start(waiting_app)
        cue.say("a", "b", "crash")
        async for frame in run.stream():
            if frame.is_turn:
                turns += 1
                assert (frame.kind, frame.text) == ("superseded", "")
                shown = [each for each in shown if not frame.drops(each)]
                cue.say("A", "B")
                cue.end()
            else:
                shown.append(frame)
    assert turns == 1
    assert [(frame.text, frame.attempt) for frame in shown] == [("A", 1), ("B", 1)]
    assert [frame.text async for frame in run.stream()] == ["A", "B"]
    everything = [frame.text async for frame in run.stream(superseded=True)]
    assert everything == ["a", "b", "A", "B"]


async def test_whoever_goes_on_after_a_frame_is_told_that_it_no_longer_counts(
    waiting_app: App,
) -> None:
    cue = acting(waiting_app)
    async with working(waiting_app), asyncio.timeout(20):
        run = await start(waiting_app)
        cue.say("a")
        seen = await anext(run.stream())
        cue.say("crash", "A")
        cue.end()
        await run.result()
    turn, again = [frame async for frame in run.stream(after=seen.cursor)]
    assert (turn.drops(seen), again.text) == (True, "A")
    assert [frame.text async for frame in run.stream(after=turn.cursor)] == ["A"]


async def test_a_run_is_followed_without_an_event_loop(waiting_app: App) -> None:
    cue = acting(waiting_app)
    async with working(waiting_app), asyncio.timeout(20):
        run = await start(waiting_app)
        cue.say("a", "b")
        cue.end()

        def follow() -> tuple[list[str], list[str], object]:
            blocking = waiting_app.blocking.run(run.task, run.execution_id)
            heard = [frame.text for frame in blocking.stream()]
            return heard, [frame.text for frame in blocking.frames()], blocking.summary()

        assert await asyncio.to_thread(follow) == (["a", "b"], ["a", "b"], None)


FRAMES = 2_000
FRAME_CHARS = 2_000


async def test_readers_that_stop_reading_hold_a_page_each_and_delay_nobody(
    waiting_app: App,
) -> None:
    cue = acting(waiting_app)
    texts = [f"{number:04}".ljust(FRAME_CHARS) for number in range(FRAMES)]
    async with working(waiting_app), asyncio.timeout(60):
        run = await start(waiting_app)
        cue.say("first")
        slow = [run.stream() for _ in range(3)]
        for stream in slow:
            assert (await anext(stream)).text == "first"
        with traced_memory() as growth:
            cue.say(texts[0])
            for stream in slow:
                assert (await anext(stream)).text == texts[0]
            cue.say(*texts[1:])
            cue.end()
            await run.result()
            count = 0
            async for frame in run.stream():
                count += len(frame.text) == FRAME_CHARS
            assert count == FRAMES
            # The frames are four megabytes; the three have had nothing yet of most of them.
            assert growth() < FRAMES * FRAME_CHARS / 8
        for stream in slow:
            assert [frame.text async for frame in stream] == texts[1:]


async def test_in_tests_nothing_is_waited_for() -> None:
    async with testing.engine() as app:

        @app.task
        async def speak(ctx: Context) -> None:
            await ctx.emit("before")
            await ctx.sleep("1h")
            await ctx.emit("after")

        run = await app.submit(speak)
        assert [frame.text async for frame in run.stream()] == []
        await app.drain()
        stream = run.stream()
        assert [frame.text async for frame in stream] == ["before"]
        await app.drain(skip_time=True)
        assert [frame.text async for frame in run.stream()] == ["before", "after"]
        assert [frame.text for frame in await run.frames()] == ["before", "after"]
        assert [frame.text for frame in app.blocking.run(speak, run.execution_id).stream()] == [
            "before",
            "after",
        ]


async def test_what_does_not_exist_cannot_be_followed(waiting_app: App) -> None:
    acting(waiting_app)
    await waiting_app.open()
    run = waiting_app.run(waiting_app.tasks["act"], NOBODY)
    with pytest.raises(NotFound):
        await anext(run.stream())
    with pytest.raises(NotFound):
        await run.frames()
    with pytest.raises(NotFound):
        await run.summary()
    real = await start(waiting_app)
    for wrong in ("", "later", "1-1"):
        with pytest.raises(InvalidInput, match="must be 'start', 'now' or the cursor of a frame"):
            await anext(real.stream(after=wrong))
