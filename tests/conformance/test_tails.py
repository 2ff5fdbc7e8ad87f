"""Reading streams, page by page and as they grow, and how they end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from flowfabric import Engine
from flowfabric.core.conditions import Single
from flowfabric.core.events import ScannerFilter
from flowfabric.core.records import TimeoutBehavior
from flowfabric.core.states import FailureClass
from flowfabric.core.streams import BestEffortLive, NewFrame, Visibility
from flowfabric.core.tails import CloseReason, StreamFrames
from flowfabric.engine.streams import FrameAppend
from flowfabric.errors import InvalidInput, NotFound, ResourceExhausted
from flowfabric.testing import SettableClock
from tests.conformance.given import TTL_MS, UNKNOWN_ID, Given

T = TypeVar("T")

LONG_MS = 30_000
"""Nothing here waits so long; what does is noticed by the test's own timeout."""


def text(payload: str, step_key: str | None = None) -> NewFrame:
    return NewFrame(payload=payload.encode(), step_key=step_key)


def texts(page: StreamFrames) -> list[str]:
    return [frame.text for frame in page.frames]


# Pages


async def test_a_stream_is_read_from_one_place_to_another(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    start_ms = clock.now_ms()
    for number in range(6):
        await engine.append_frame(claimed.handle, text(str(number)))
        clock.advance(ms=number % 2)
    ids = [f.id for f in (await engine.read_stream(claimed.execution_id, 0)).frames]
    assert ids == [
        f"{start_ms + ms}-{seq}" for ms, seq in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
    ]

    async def between(from_cursor: str, to_cursor: str) -> list[str]:
        page = await engine.read_stream(
            claimed.execution_id, 0, from_cursor=from_cursor, to_cursor=to_cursor
        )
        return texts(page)

    assert await between("start", "end") == list("012345")
    assert await between(ids[1], ids[3]) == list("123")
    assert await between(str(start_ms + 1), str(start_ms + 1)) == list("23")
    assert await between("end", "end") == []
    assert await between(ids[3], ids[1]) == []


async def test_pages_follow_each_other_without_a_gap(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    live = BestEffortLive(ttl_ms=5_000)
    frames = tuple(
        NewFrame(payload=str(n).encode(), mode=live) if n % 3 else text(str(n)) for n in range(50)
    )
    await engine.append_frames([FrameAppend(handle=claimed.handle, frames=frames)])
    for visibility, expected in (
        (Visibility.ALL, [str(n) for n in range(50)]),
        (Visibility.EXCLUDE_BEST_EFFORT, [str(n) for n in range(0, 50, 3)]),
    ):
        seen: list[str] = []
        page = await engine.read_stream(
            claimed.execution_id, 0, count_limit=7, visibility=visibility
        )
        seen += texts(page)
        while page.has_more:
            page = await engine.tail_stream(
                claimed.execution_id,
                0,
                after=page.next_cursor,
                count_limit=7,
                visibility=visibility,
            )
            seen += texts(page)
        assert seen == expected


async def test_a_stream_nothing_was_written_to_is_empty_and_open(
    engine: Engine, given: Given
) -> None:
    running, waiting = (await given.running()).execution_id, await given.waiting()
    for execution_id in (running, waiting, UNKNOWN_ID):
        for page in (
            await engine.read_stream(execution_id, 0),
            await engine.tail_stream(execution_id, 0),
            await engine.tail_stream(execution_id, 0, block_ms=1),
        ):
            assert page == StreamFrames(frames=(), next_cursor="0-0")


@pytest.mark.parametrize("count_limit", [0, -1, 10_001, True, "5", None])
async def test_a_page_has_a_limit(engine: Engine, given: Given, count_limit: int) -> None:
    execution_id = await given.waiting()
    for read in (engine.read_stream, engine.tail_stream):
        with pytest.raises(InvalidInput, match="count_limit"):
            await read(execution_id, 0, count_limit=count_limit)


async def test_bad_input_is_refused(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    for cursor in ("", "-", "+", "x", "1-x", "１"):
        with pytest.raises(InvalidInput):
            await engine.read_stream(execution_id, 0, from_cursor=cursor)
        with pytest.raises(InvalidInput):
            await engine.read_stream(execution_id, 0, to_cursor=cursor)
        with pytest.raises(InvalidInput):
            await engine.tail_stream(execution_id, 0, after=cursor)
    for cursor in ("start", "end"):
        with pytest.raises(InvalidInput, match="requires concrete after cursor"):
            await engine.tail_stream(execution_id, 0, after=cursor)
    for block_ms in (-1, 30_001):
        with pytest.raises(InvalidInput, match="block_ms"):
            await engine.tail_stream(execution_id, 0, block_ms=block_ms)
    for attempt_index in (-1, 2**31):
        with pytest.raises(InvalidInput, match="attempt_index"):
            await engine.read_stream(execution_id, attempt_index)
    with pytest.raises(InvalidInput, match="visibility"):
        await engine.read_stream(execution_id, 0, visibility="all")
    with pytest.raises(InvalidInput, match="execution_id"):
        await engine.read_stream("no id", 0)


# Tails


async def test_a_tail_returns_what_there_is(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    for each in "ab":
        await engine.append_frame(claimed.handle, text(each))
    page = await engine.tail_stream(claimed.execution_id, 0, block_ms=LONG_MS)
    assert texts(page) == ["a", "b"]
    rest = await engine.tail_stream(claimed.execution_id, 0, after=page.frames[0].id)
    assert texts(rest) == ["b"]


async def parked(tail: "asyncio.Task[T]", engine: Engine) -> None:
    """Until the tail waits, or is about to look before it does."""
    while not tail.done() and engine.waiting_tails == 0:
        await asyncio.wait([tail], timeout=0.001)


async def test_a_parked_tail_gets_the_next_frame(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        tails = [
            group.create_task(
                engine.tail_stream(claimed.execution_id, 0, block_ms=LONG_MS), name=str(number)
            )
            for number in range(8)
        ]
        await parked(tails[-1], engine)
        await engine.append_frame(claimed.handle, text("a"))
    assert [texts(await tail) for tail in tails] == [["a"]] * 8
    assert engine.waiting_tails == 0


async def test_a_tail_of_durable_frames_waits_past_others(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        tail = group.create_task(
            engine.tail_stream(
                claimed.execution_id,
                0,
                block_ms=LONG_MS,
                visibility=Visibility.EXCLUDE_BEST_EFFORT,
            )
        )
        await parked(tail, engine)
        live = NewFrame(payload=b"a", mode=BestEffortLive(ttl_ms=5_000))
        await engine.append_frame(claimed.handle, live)
        await engine.append_frame(claimed.handle, text("b"))
    assert texts(await tail) == ["b"]


async def test_a_reader_of_some_finds_nothing_of_others(engine: Engine, given: Given) -> None:
    claimed = await given.running(namespace="shop", tags={"app.tenant": "acme"})
    await engine.append_frame(claimed.handle, NewFrame(payload=b"a"))
    ours = ScannerFilter(namespace="shop", tag=("app.tenant", "acme"))
    reading = (claimed.execution_id, 0)
    assert len((await engine.read_stream(*reading, only=ours)).frames) == 1
    assert len((await engine.tail_stream(*reading, only=ours)).frames) == 1
    assert len((await engine.tail_execution(claimed.execution_id, only=ours)).frames) == 1
    for theirs in (ScannerFilter(namespace="other"), ScannerFilter(tag=("app.tenant", "x"))):
        with pytest.raises(NotFound):
            await engine.read_stream(*reading, only=theirs)
        with pytest.raises(NotFound):
            await engine.tail_stream(*reading, only=theirs)
        with pytest.raises(NotFound):
            await engine.tail_execution(claimed.execution_id, only=theirs)


async def test_a_tail_gives_up_in_time(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    page = await engine.tail_stream(claimed.execution_id, 0, block_ms=20)
    assert page == StreamFrames(frames=(), next_cursor="0-0")


async def test_a_tail_that_is_parked_returns_when_its_engine_is_closed(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        tail = group.create_task(engine.tail_stream(claimed.execution_id, 0, block_ms=LONG_MS))
        await parked(tail, engine)
        await engine.following.close_tails()
    assert await tail == StreamFrames(frames=(), next_cursor="0-0")


async def test_so_many_tails_may_be_parked_and_no_more(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.tails.TAILS_MAX", 2)
    claimed = await given.running()
    reading = (claimed.execution_id, 0)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        tails = [
            group.create_task(engine.tail_stream(*reading, block_ms=LONG_MS)) for _ in range(2)
        ]
        while engine.waiting_tails < 2:
            await asyncio.wait(tails, timeout=0.001)
        with pytest.raises(ResourceExhausted, match="stream_tails"):
            await engine.tail_stream(*reading, block_ms=LONG_MS)
        # What does not wait is read all the same.
        assert texts(await engine.tail_stream(*reading)) == []
        await engine.append_frame(claimed.handle, text("a"))
    assert [texts(await tail) for tail in tails] == [["a"], ["a"]]


# Ends


End = Callable[[Engine, Given, SettableClock], Awaitable[str]]


async def by_success(engine: Engine, given: Given, clock: SettableClock) -> str:
    claimed = await given.running()
    await engine.append_frame(claimed.handle, text("a"))
    await engine.complete(claimed.handle)
    return claimed.execution_id


async def by_failure(engine: Engine, given: Given, clock: SettableClock) -> str:
    claimed = await given.running()
    await engine.append_frame(claimed.handle, text("a"))
    await engine.fail(claimed.handle, "broken", failure_class=FailureClass.PERMANENT)
    return claimed.execution_id


async def by_retry(engine: Engine, given: Given, clock: SettableClock) -> str:
    claimed = await given.running(policy={"retry_policy": {"max_retries": 3}})
    await engine.append_frame(claimed.handle, text("a"))
    await engine.fail(claimed.handle, "again")
    return claimed.execution_id


async def by_cancellation(engine: Engine, given: Given, clock: SettableClock) -> str:
    claimed = await given.running()
    await engine.append_frame(claimed.handle, text("a"))
    await engine.cancel_execution(claimed.execution_id, reason="no", source="operator_override")
    return claimed.execution_id


async def by_cancelling_a_pause(engine: Engine, given: Given, clock: SettableClock) -> str:
    claimed = await given.running()
    await engine.append_frame(claimed.handle, text("a"))
    await engine.suspend(claimed.handle, resume_condition=Single("gate"))
    await engine.cancel_execution(claimed.execution_id, reason="no")
    return claimed.execution_id


async def by_its_worker(engine: Engine, given: Given, clock: SettableClock) -> str:
    claimed = await given.running()
    await engine.append_frame(claimed.handle, text("a"))
    await engine.cancel(claimed.handle, "no")
    return claimed.execution_id


async def by_an_expired_lease(engine: Engine, given: Given, clock: SettableClock) -> str:
    claimed = await given.running()
    await engine.append_frame(claimed.handle, text("a"))
    clock.advance(ms=TTL_MS)
    await engine.mark_lease_expired_if_due(claimed.execution_id)
    return claimed.execution_id


async def by_reclaim(engine: Engine, given: Given, clock: SettableClock) -> str:
    execution_id = await by_an_expired_lease(engine, given, clock)
    await given.taken()
    return execution_id


async def by_hand_back(engine: Engine, given: Given, clock: SettableClock) -> str:
    claimed = await given.running()
    await engine.append_frame(claimed.handle, text("a"))
    await engine.hand_back(claimed.handle, reason="the worker stops")
    return claimed.execution_id


async def by_timeout(engine: Engine, given: Given, clock: SettableClock) -> str:
    claimed = await given.running(policy={"timeout_policy": {"attempt_timeout_ms": 1_000}})
    await engine.append_frame(claimed.handle, text("a"))
    clock.advance(ms=1_000)
    await engine.expire_due_attempts()
    return claimed.execution_id


async def by_deadline_in_a_pause(engine: Engine, given: Given, clock: SettableClock) -> str:
    claimed = await given.running(policy={"timeout_policy": {"execution_deadline_ms": 1_000}})
    await engine.append_frame(claimed.handle, text("a"))
    await engine.suspend(claimed.handle, resume_condition=Single("gate"))
    clock.advance(ms=1_000)
    await engine.expire_due_deadlines()
    return claimed.execution_id


async def by_a_pause(
    engine: Engine, given: Given, clock: SettableClock, behavior: TimeoutBehavior
) -> str:
    claimed = await given.running()
    await engine.append_frame(claimed.handle, text("a"))
    await engine.suspend(
        claimed.handle,
        resume_condition=Single("gate"),
        timeout_at_ms=clock.now_ms() + 1_000,
        timeout_behavior=behavior,
    )
    clock.advance(ms=1_000)
    await engine.expire_due_suspensions()
    return claimed.execution_id


async def by_a_pause_that_fails(engine: Engine, given: Given, clock: SettableClock) -> str:
    return await by_a_pause(engine, given, clock, TimeoutBehavior.FAIL)


async def by_a_pause_that_cancels(engine: Engine, given: Given, clock: SettableClock) -> str:
    return await by_a_pause(engine, given, clock, TimeoutBehavior.CANCEL)


async def by_a_pause_that_expires(engine: Engine, given: Given, clock: SettableClock) -> str:
    return await by_a_pause(engine, given, clock, TimeoutBehavior.EXPIRE)


ENDS: dict[End, CloseReason] = {
    by_success: CloseReason.ATTEMPT_SUCCESS,
    by_failure: CloseReason.ATTEMPT_FAILURE,
    by_retry: CloseReason.ATTEMPT_FAILURE,
    by_cancellation: CloseReason.ATTEMPT_CANCELLED,
    by_cancelling_a_pause: CloseReason.ATTEMPT_CANCELLED,
    by_its_worker: CloseReason.ATTEMPT_CANCELLED,
    by_an_expired_lease: CloseReason.LEASE_EXPIRED,
    by_reclaim: CloseReason.RECLAIMED,
    by_hand_back: CloseReason.RECLAIMED,
    by_timeout: CloseReason.EXPIRED,
    by_deadline_in_a_pause: CloseReason.EXPIRED,
    by_a_pause_that_fails: CloseReason.SUSPENSION_TIMEOUT,
    by_a_pause_that_cancels: CloseReason.SUSPENSION_TIMEOUT,
    by_a_pause_that_expires: CloseReason.SUSPENSION_TIMEOUT,
}


@pytest.mark.parametrize(("end", "reason"), ENDS.items(), ids=[end.__name__ for end in ENDS])
async def test_a_stream_is_closed_by_whatever_ends_its_attempt(
    engine: Engine, given: Given, clock: SettableClock, end: End, reason: CloseReason
) -> None:
    execution_id = await end(engine, given, clock)
    expected = (["a"], clock.now_ms(), reason)
    for page in (
        await engine.read_stream(execution_id, 0),
        await engine.tail_stream(execution_id, 0, block_ms=LONG_MS),
    ):
        assert (texts(page), page.closed_at_ms, page.closed_reason) == expected
        assert page.is_end
    last = page.next_cursor
    end_of_it = await engine.tail_stream(execution_id, 0, after=last, block_ms=LONG_MS)
    assert (end_of_it.frames, end_of_it.closed_reason) == ((), reason)


async def test_a_stream_stays_closed_as_it_was_whatever_comes_after(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.retrying()
    failed_at_ms = clock.now_ms()
    clock.advance(ms=1_000)
    await engine.cancel_execution(claimed.execution_id, reason="no")
    page = await engine.read_stream(claimed.execution_id, 0)
    assert (page.closed_at_ms, page.closed_reason) == (failed_at_ms, CloseReason.ATTEMPT_FAILURE)


@pytest.mark.parametrize("state", ["suspended", "parked", "waiting_children", "revoked"])
async def test_a_pause_closes_nothing(engine: Engine, given: Given, state: str) -> None:
    execution_id = await given.state(state)
    assert (await engine.read_stream(execution_id, 0)).closed_at_ms is None


@pytest.mark.parametrize("end", [by_success, by_retry, by_cancellation, by_an_expired_lease])
async def test_a_parked_tail_is_told_of_the_end(
    engine: Engine, given: Given, clock: SettableClock, end: End
) -> None:
    claimed = await given.running(policy={"retry_policy": {"max_retries": 3}})
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        tail = group.create_task(engine.tail_stream(claimed.execution_id, 0, block_ms=LONG_MS))
        await parked(tail, engine)
        if end is by_success:
            await engine.complete(claimed.handle)
        elif end is by_retry:
            await engine.fail(claimed.handle, "again")
        elif end is by_cancellation:
            await engine.cancel_execution(
                claimed.execution_id, reason="no", source="operator_override"
            )
        else:
            clock.advance(ms=TTL_MS)
            await engine.expire_due_leases()
    assert (await tail).closed_reason is ENDS[end]
