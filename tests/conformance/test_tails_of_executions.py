"""Following whole executions, from attempt to attempt."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from flowfabric import Engine
from flowfabric.core.steps import NewStep
from flowfabric.engine.steps import StepReport
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, Given
from tests.conformance.test_tails import LONG_MS, parked, text


async def follow(engine: Engine, execution_id: str) -> list[str]:
    """Everything a reader is told from the start, in short."""
    told: list[str] = []
    after = "start"
    while True:
        page = await engine.tail_execution(execution_id, after=after, count_limit=2)
        if page.take_over is not None:
            told.append(f"<{page.take_over.attempt_index}>")
        told += [frame.text for frame in page.frames]
        if page.is_end:
            return [*told, "end"]
        if not page.frames and page.take_over is None:
            return told
        after = page.cursor


async def test_an_execution_is_followed_from_attempt_to_attempt(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    first = await given.running(policy={"retry_policy": {"max_retries": 3}})
    finished, unfinished = text("b", "write"), text("c", "check")
    for frame in (text("a"), finished, unfinished, text("d")):
        await engine.append_frame(first.handle, frame)
    step = StepReport(handle=first.handle, step=NewStep(step_key="write"))
    await engine.record_steps([step])
    assert await follow(engine, first.execution_id) == ["a", "b", "c", "d"]

    await engine.fail(first.handle, "again")
    assert await follow(engine, first.execution_id) == ["a", "b", "c", "d"]
    clock.advance("1d")
    await engine.promote_due_delays()
    second = await given.taken()
    assert await follow(engine, first.execution_id) == ["b", "<1>"]

    await engine.append_frame(second.handle, text("A"))
    await engine.complete(second.handle)
    assert await follow(engine, first.execution_id) == ["b", "<1>", "A", "end"]


async def test_a_reader_is_told_which_of_its_frames_no_longer_count(
    engine: Engine, given: Given
) -> None:
    first = await given.running()
    for frame in (text("a"), text("b", "write")):
        await engine.append_frame(first.handle, frame)
    await engine.record_steps([StepReport(handle=first.handle, step=NewStep(step_key="write"))])
    seen = await engine.tail_execution(first.execution_id)
    assert [frame.superseded for frame in seen.frames] == [False, False]
    await engine.hand_back(first.handle, reason="the worker stops")
    await given.taken()
    page = await engine.tail_execution(first.execution_id, after=seen.cursor)
    assert page.take_over is not None
    assert [page.take_over.supersedes(frame) for frame in seen.frames] == [True, False]
    everything = await engine.tail_execution(first.execution_id, superseded=True)
    assert [frame.superseded for frame in everything.frames] == [True, False]


async def test_a_reader_may_begin_with_what_comes_next(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    await engine.append_frame(claimed.handle, text("a"))
    now = await engine.tail_execution(claimed.execution_id, after="end")
    assert now.frames == ()
    await engine.append_frame(claimed.handle, text("b"))
    page = await engine.tail_execution(claimed.execution_id, after=now.cursor)
    assert [frame.text for frame in page.frames] == ["b"]


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled", "expired"])
async def test_an_execution_that_has_ended_is_at_its_end(
    engine: Engine, given: Given, state: str
) -> None:
    execution_id = await given.state(state)
    for after in ("start", "end"):
        page = await engine.tail_execution(execution_id, after=after, block_ms=LONG_MS)
        assert (page.frames, page.is_end) == ((), True)


async def test_a_parked_reader_is_told_of_every_turn(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting()

    async def next_page(after: str, act: Callable[[], Awaitable[object]]) -> str:
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            tail = group.create_task(
                engine.tail_execution(execution_id, after=after, block_ms=LONG_MS)
            )
            await parked(tail, engine)
            await act()
        page = await tail
        told = [frame.text for frame in page.frames]
        told += ["end"] * page.is_end + ["over"] * (page.take_over is not None)
        turns.append(told)
        return page.cursor

    turns: list[list[str]] = []
    first = await given.claimed(execution_id)
    cursor = await next_page("start", lambda: engine.append_frame(first.handle, text("a")))
    await engine.hand_back(first.handle, reason="the worker stops")
    cursor = await next_page(cursor, given.taken)
    cursor = await next_page(
        cursor,
        lambda: engine.cancel_execution(execution_id, reason="no", source="operator_override"),
    )
    assert turns == [["a"], ["over"], ["end"]]


async def test_what_does_not_exist_is_not_followed(engine: Engine, given: Given) -> None:
    for after in ("start", "end"):
        with pytest.raises(NotFound):
            await engine.tail_execution(UNKNOWN_ID, after=after)
    execution_id = await given.waiting()
    for wrong in ("", "0-0", "x"):
        with pytest.raises(InvalidInput):
            await engine.tail_execution(execution_id, after=wrong)
