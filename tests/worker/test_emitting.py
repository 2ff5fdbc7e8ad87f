"""What handlers say: stored in order, before what they report, and once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from flowfabric import App, Context, Retry, testing
from flowfabric.core.streams import DEPTH_MAX, FRAME_BYTES_MAX
from flowfabric.core.tails import CloseReason
from flowfabric.engine.steps import StepReport
from flowfabric.engine.streams import FrameAppend
from flowfabric.errors import (
    BackendErrorKind,
    ExecutionFailed,
    InvalidInput,
    RetentionLimitExceeded,
    Transport,
)
from flowfabric.run import Run
from flowfabric.worker.leases import HeldLease
from tests.apps import working

ONCE_MORE = Retry(max_retries=1, delay="1s", jitter=False)


async def tell(ctx: Context, text: str) -> None:
    await ctx.emit(text)


async def said(run: Run[object], *, superseded: bool = False) -> list[str]:
    """What it said; of a summary, the patch."""
    return [frame.data.decode() for frame in await run.frames(superseded=superseded)]


async def test_text_json_and_bytes_are_emitted_in_order(app: App) -> None:
    @app.task
    async def speak(ctx: Context) -> None:
        await ctx.emit("grüß dich")
        await ctx.emit({"n": [1, None]})
        await ctx.emit(b"\x00\xff", kind="picture", correlation_id="c-1")
        await ctx.emit("now", live="10s")

    async with working(app):
        run = await app.submit(speak)
        await run.result(timeout="20s")
    text, json, binary, live = await run.frames()
    assert (text.kind, text.text, text.attempt, text.live) == ("text", "grüß dich", 0, False)
    assert (json.kind, json.json()) == ("json", {"n": [1, None]})
    with pytest.raises(InvalidInput, match="a 'text': JSON is malformed"):
        text.json()
    assert (binary.kind, binary.data) == ("picture", b"\x00\xff")
    assert (live.text, live.live) == ("now", True)
    assert [frame.text for frame in await run.frames(live=False)][-1] != "now"


async def test_everything_is_stored_before_the_end_is(app: App) -> None:
    @app.task
    async def count(ctx: Context, to: int) -> int:
        for number in range(to):
            await ctx.emit(str(number))
        return to

    async with working(app):
        runs = [await app.submit(count, 2_500) for _ in range(3)]
        for run in runs:
            await run.result(timeout="20s")
            assert await said(run) == [str(number) for number in range(2_500)]


@pytest.mark.parametrize("ending", ["failure", "cancelled task"])
async def test_what_a_failing_handler_said_is_stored_too(app: App, ending: str) -> None:
    @app.task(retry=Retry(max_retries=0))
    async def fail(ctx: Context) -> None:
        await ctx.emit("on it")
        if ending == "failure":
            raise ValueError("no")
        raise asyncio.CancelledError

    async with working(app):
        run = await app.submit(fail)
        with pytest.raises(ExecutionFailed):
            await run.result(timeout="20s")
    assert await said(run) == ["on it"]


async def test_plain_functions_speak_too(app: App) -> None:
    @app.task
    def speak(ctx: Context) -> None:
        ctx.blocking.emit("from a thread")
        ctx.blocking.step("write", lambda: ctx.blocking.emit("from a step"))
        ctx.blocking.summary({"a": 1})

    async with working(app):
        run = await app.submit(speak)
        await run.result(timeout="20s")
    first, second, patch = await run.frames()
    assert (first.text, first.step) == ("from a thread", None)
    assert (second.text, second.step) == ("from a step", "write")
    assert (patch.kind, patch.is_summary, patch.json(), patch.text) == (
        "summary",
        True,
        {"a": 1},
        "",
    )
    assert await run.summary() == {"a": 1}


async def test_a_summary_is_merged(app: App) -> None:
    @app.task
    async def sum_up(ctx: Context) -> None:
        await ctx.summary({"pages": {"read": 1}, "state": "reading"})
        await ctx.summary({"pages": {"left": 2}, "state": None})

    async with working(app):
        run = await app.submit(sum_up)
        await run.result(timeout="20s")
    assert await run.summary() == {"pages": {"read": 1, "left": 2}}


async def test_a_long_text_is_sent_in_parts_and_too_much_else_is_refused(app: App) -> None:
    @app.task(retry=Retry(max_retries=0))
    async def speak(ctx: Context) -> list[str]:
        await ctx.emit("ü" * 100_000)
        refused = []
        for wrong in (b"x" * (FRAME_BYTES_MAX + 1), {"a": "x" * FRAME_BYTES_MAX}):
            try:
                await ctx.emit(wrong)
            except RetentionLimitExceeded as error:
                refused.append(type(error).__name__)
        for text, live, kind in (
            ("\ud800", None, ""),
            (float("nan"), None, ""),
            ("x", "2d", ""),
            ("x", None, "superseded"),
        ):
            try:
                await ctx.emit(text, live=live, kind=kind)
            except InvalidInput as error:
                refused.append(type(error).__name__)
        summary: Callable[..., Awaitable[None]] = ctx.summary
        try:
            await summary(["no", "object"])
        except InvalidInput as error:
            refused.append(type(error).__name__)
        return refused

    async with working(app):
        run = await app.submit(speak)
        refused = await run.result(timeout="20s")
    assert refused == ["RetentionLimitExceeded"] * 2 + ["InvalidInput"] * 5
    assert "".join(await said(run)) == "ü" * 100_000


def nested(levels: int) -> dict[str, object]:
    patch: dict[str, object] = {}
    for _ in range(levels - 1):
        patch = {"a": patch}
    return patch


async def answered(ctx: Context) -> None:
    """Wait for the store, which answers behind the handler's back."""
    while (sending := ctx._services.emitter._sending) is not None:
        await asyncio.wait([sending])


def filled(number: int) -> dict[str, object]:
    """One of the patches that together are more than a summary holds."""
    return {f"page {number}": "x" * 60_000}


async def test_a_patch_nested_too_deep_is_refused_at_once_and_nothing_else_is(app: App) -> None:
    @app.task(retry=Retry(max_retries=0))
    async def speak(ctx: Context) -> str:
        await ctx.emit("before")
        await ctx.summary(nested(DEPTH_MAX + 1))
        try:
            await ctx.summary(nested(DEPTH_MAX + 2))
        except InvalidInput as error:
            refused = error.field
        await ctx.emit("after")
        return refused

    async with working(app):
        run = await app.submit(speak)
        assert await run.result(timeout="20s") == "patch"
    before, patch, after = await said(run)
    assert (before, patch.count("a"), after) == ("before", DEPTH_MAX, "after")


async def test_what_is_refused_takes_nothing_else_with_it_and_is_told_once(app: App) -> None:
    @app.task(retry=Retry(max_retries=0))
    async def speak(ctx: Context) -> list[str]:
        for number in range(20):
            await ctx.summary(filled(number))
            await ctx.emit(f"{number}")
        told = []
        await answered(ctx)
        for word in ("told", "later", "last"):
            try:
                await ctx.emit(word)
            except RetentionLimitExceeded:
                told.append(word)
            await ctx.step(word, asyncio.sleep, 0)
        return told

    async with working(app):
        run = await app.submit(speak)
        assert await run.result(timeout="20s") == ["told"]
    words = [frame.text for frame in await run.frames() if frame.kind == "text"]
    assert words == [*(f"{number}" for number in range(20)), "later", "last"]
    assert list(await run.summary() or ()) == [f"page {number}" for number in range(17)]


@pytest.mark.parametrize("ending", ["return", "pause", "step"])
async def test_an_attempt_does_not_end_well_if_something_it_said_was_refused(
    app: App, ending: str
) -> None:
    async def fill(ctx: Context) -> None:
        for number in range(20):
            await ctx.summary(filled(number))
        await ctx.emit("full")

    @app.task(retry=Retry(max_retries=0))
    async def speak(ctx: Context) -> None:
        if ending == "step":
            await ctx.step("fill", fill, ctx)
        await fill(ctx)
        if ending == "pause":
            await ctx.sleep("1h")

    async with working(app):
        run = await app.submit(speak)
        with pytest.raises(ExecutionFailed, match="the summary would be"):
            await run.result(timeout="20s")
    assert (await said(run)).count("full") == 1
    assert not any(step.result for step in await run.steps())


class Sealed:
    """A codec whose key service may be away."""

    away = False

    def encode(self, data: bytes) -> bytes:
        if self.away:
            raise ConnectionError("the key service is away")
        return data[::-1]

    def decode(self, data: bytes) -> bytes:
        return data[::-1]


@pytest.mark.parametrize("ending", ["return", "another word"])
async def test_what_the_codec_could_not_encode_is_said_by_the_next_attempt(
    store_url: str, ending: str
) -> None:
    codec = Sealed()
    async with App(store_url, codec=codec) as app:

        @app.task(retry=Retry(max_retries=1, delay="1ms"))
        async def speak(ctx: Context) -> int:
            codec.away = ctx.attempt_index == 0
            await ctx.emit("first")
            await answered(ctx)
            codec.away = False
            if ending == "another word":
                await ctx.emit("second")
            return ctx.attempt_index

        async with working(app):
            run = await app.submit(speak)
            assert await run.result(timeout="20s") == 1
        assert await said(run, superseded=True) == ["first", "second"][: len(ending.split())]


async def test_a_run_does_not_complete_without_what_it_has_said(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's time is over while the database, which is back too late, still counts on it."""
    leases: list[HeldLease] = []
    runs = 0

    @app.task
    async def speak(ctx: Context) -> int:
        nonlocal runs
        runs += 1
        leases.append(ctx._services.lease)
        await ctx.emit(f"run {runs}")
        await ctx.summary({"run": runs})
        return runs

    await app.open()
    append = app.engine.append_frames

    async def appending(appends: Sequence[FrameAppend]) -> object:
        if runs == 1:
            leases[0].valid_until_s = 0.0
            raise Transport("test", "away", kind=BackendErrorKind.TRANSPORT)
        return await append(appends)

    monkeypatch.setattr(app.engine, "append_frames", appending)
    async with working(app, lease_ttl="1h"):
        run = await app.submit(speak)
        assert await run.result(timeout="20s") == 2
    assert await said(run) == ["run 2", '{"run":2}']
    assert await run.summary() == {"run": 2}


async def test_a_lost_lease_says_nothing_more(app: App) -> None:
    lost, go_on = asyncio.Event(), asyncio.Event()

    @app.task(retry=Retry(max_retries=0))
    async def speak(ctx: Context) -> None:
        await ctx.emit("first" if ctx.attempt_index == 0 else "second")
        if ctx.attempt_index == 0:
            lost.set()
            try:
                await go_on.wait()
            finally:
                await asyncio.shield(asyncio.sleep(0))

    async with working(app):
        run = await app.submit(speak)
        await lost.wait()
        async for frame in run.stream():
            assert frame.text == "first"
            break
        await app.engine.revoke_lease(run.execution_id, reason="test")
        await run.result(timeout="20s")
    assert await said(run) == ["second"]
    assert await said(run, superseded=True) == ["first", "second"]
    page = await app.engine.read_stream(run.execution_id, 0)
    assert page.closed_reason is CloseReason.RECLAIMED


async def test_a_handler_that_speaks_learns_why_it_is_to_stop(app: App) -> None:
    begun, told = asyncio.Event(), asyncio.Queue[str | None]()

    @app.task
    async def speak(ctx: Context) -> None:
        try:
            while True:
                await ctx.emit("on and on")
                begun.set()
                await asyncio.sleep(0)
        finally:
            told.put_nowait(ctx.stop_reason)

    async with working(app), asyncio.timeout(20):
        run = await app.submit(speak)
        await begun.wait()
        await run.cancel("changed my mind")
        assert await told.get() == "cancelled: changed my mind"


async def test_a_task_that_is_left_behind_does_not_keep_its_run_from_ending(app: App) -> None:
    left: list[asyncio.Task[None]] = []

    @app.task
    async def leave(ctx: Context) -> str:
        begun = asyncio.Event()

        async def go_on() -> None:
            while True:
                await ctx.emit("and on")
                begun.set()
                await asyncio.sleep(0)

        left.append(asyncio.create_task(go_on()))
        await begun.wait()
        return "done"

    async with working(app), asyncio.timeout(20):
        run = await app.submit(leave)
        assert await run.result() == "done"
        with pytest.raises(asyncio.CancelledError, match="the handler has ended"):
            await left[0]


async def test_a_context_says_nothing_once_its_handler_has_ended(app: App) -> None:
    kept: list[Context] = []

    @app.task
    async def keep(ctx: Context) -> None:
        await ctx.emit("said")
        kept.append(ctx)

    async with working(app):
        run = await app.submit(keep)
        await run.result("20s")
        for say in (kept[0].emit("late"), kept[0].summary({"late": True})):
            with pytest.raises(asyncio.CancelledError, match="the handler has ended"):
                await say
    assert await said(run) == ["said"]


async def test_a_handler_that_is_far_ahead_waits(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.worker.emitter.BACKLOG_FRAMES_MAX", 10)
    backlogs: list[int] = []

    @app.task
    async def speak(ctx: Context) -> None:
        for number in range(1_000):
            await ctx.emit(str(number))
            backlogs.append(len(ctx._services.emitter._waiting))

    async with working(app):
        run = await app.submit(speak)
        await run.result(timeout="20s")
    assert max(backlogs) <= 11
    assert len(await said(run)) == 1_000


# After a pause, and in another attempt


async def test_what_was_said_before_a_pause_is_not_said_again() -> None:
    runs = 0
    async with testing.engine() as app:

        @app.task
        async def agent(ctx: Context) -> str:
            nonlocal runs
            runs += 1
            for token in ("thinking", f"of run {runs}"):
                await ctx.emit(token)
            await ctx.step("write", tell, ctx, "written")
            await ctx.summary({"runs": runs})
            await ctx.sleep("1h")
            await ctx.emit("slept")
            decision = await ctx.wait_for_signal("approved")
            await ctx.emit(decision.payload)
            return "done"

        run = await app.submit(agent)
        await app.drain()
        assert await said(run) == ["thinking", "of run 1", "written", '{"runs":1}']
        app.clock.advance("1h")
        await app.drain()
        await run.signal("approved", "yes")
        await app.drain()
        assert await run.result() == "done"
        assert runs == 3
        assert await said(run) == [
            "thinking", "of run 1", "written", '{"runs":1}', "slept", "yes",
        ]  # fmt: skip
        assert await run.summary() == {"runs": 1}


async def test_branches_go_on_speaking_where_they_paused() -> None:
    async with testing.engine() as app:

        @app.task
        async def child() -> str:
            return "child"

        @app.task
        async def agent(ctx: Context) -> None:
            async def branch(name: str, hours: int) -> None:
                await ctx.emit(f"{name} begins")
                await ctx.sleep(f"{hours}h")
                await ctx.emit(f"{name} ends")

            async def only_speaks() -> None:
                await ctx.emit("aside")

            await asyncio.gather(branch("a", 1), branch("b", 2), only_speaks())
            await ctx.emit("both")
            with ctx.branch("named"):
                waited = await (await ctx.submit(child)).result()
            await ctx.emit(waited)
            await asyncio.gather(only_speaks())

        run = await app.submit(agent)
        await app.drain(skip_time=True)
        await run.result()
        assert await said(run) == [
            "a begins", "b begins", "aside", "a ends", "b ends", "both", "child", "aside",
        ]  # fmt: skip


async def test_a_new_attempt_speaks_again_and_finished_steps_have_spoken() -> None:
    async with testing.engine() as app:

        @app.task(retry=ONCE_MORE)
        async def agent(ctx: Context) -> None:
            async def write(text: str) -> None:
                await ctx.emit(text)

            await ctx.emit(f"attempt {ctx.attempt_index}")
            await ctx.step("draft", write, "draft")
            if ctx.attempt_index == 0:
                await ctx.step("check", fails)
            await ctx.emit("done")

        async def fails() -> None:
            raise ValueError("no")

        run = await app.submit(agent)
        await app.drain()
        assert await said(run) == ["attempt 0", "draft"]
        await app.drain(skip_time=True)
        await run.result()
        assert await said(run) == ["draft", "attempt 1", "done"]
        everything = await run.frames(superseded=True)
        assert [(frame.text, frame.superseded) for frame in everything] == [
            ("attempt 0", True),
            ("draft", False),
            ("attempt 1", False),
            ("done", False),
        ]


async def test_what_a_step_said_before_its_attempt_failed_no_longer_counts() -> None:
    async with testing.engine() as app:

        @app.task(retry=ONCE_MORE)
        async def agent(ctx: Context) -> None:
            async def write() -> None:
                await ctx.emit("dear ")
                if ctx.attempt_index == 0:
                    raise ConnectionError("no")
                await ctx.emit("reader")

            await ctx.step("write", write)

        run = await app.submit(agent)
        await app.drain()
        follower = run.stream()
        begun = await anext(follower)
        await app.drain(skip_time=True)
        await run.result()
        assert await said(run) == ["dear ", "reader"]
        turn = await anext(follower)
        assert (begun.text, turn.drops(begun)) == ("dear ", True)


async def test_tries_of_a_step_within_one_attempt_all_count() -> None:
    tries = 0
    async with testing.engine() as app:

        @app.task
        async def agent(ctx: Context) -> None:
            async def write() -> None:
                nonlocal tries
                tries += 1
                await ctx.emit(f"try {tries}")
                if tries == 1:
                    raise ConnectionError("no")

            await ctx.step("write", write, retry=Retry(max_retries=1, delay="1ms"))

        run = await app.submit(agent)
        await app.drain()
        assert await said(run) == ["try 1", "try 2"]


async def test_what_a_step_said_is_stored_before_its_result(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    @app.task
    async def speak(ctx: Context) -> None:
        await ctx.step("write", tell, ctx, "draft")

    await app.open()
    append, record = app.engine.append_frames, app.engine.record_steps

    async def appending(appends: Sequence[FrameAppend]) -> object:
        answer = await append(appends)
        order.append("frames")
        return answer

    async def recording(reports: Sequence[StepReport]) -> object:
        order.append("step")
        return await record(reports)

    monkeypatch.setattr(app.engine, "append_frames", appending)
    monkeypatch.setattr(app.engine, "record_steps", recording)
    async with working(app):
        await (await app.submit(speak)).result(timeout="20s")
    assert order == ["frames", "step"]
