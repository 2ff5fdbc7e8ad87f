"""Frames that are appended while others append, too, or end the attempt."""

import asyncio

from flowfabric import Engine, FlowFabricError, connect
from flowfabric.core.results import Claimed
from flowfabric.core.streams import DurableSummary, NewFrame
from flowfabric.core.tails import CloseReason
from flowfabric.errors import StreamClosed
from tests.races.given import running
from tests.races.rival import DEADLOCKS, Rival

APPENDS = 8
ROUNDS = 20


async def appended(engine: Engine, claimed: Claimed, number: int) -> str | None:
    """The id of the frame; None if the stream was closed."""
    try:
        answer = await engine.append_frame(claimed.handle, NewFrame(payload=str(number).encode()))
    except StreamClosed:
        return None
    return answer.stream_id


async def test_first_frames_that_come_at_once_are_all_stored(engine: Engine, rival: Rival) -> None:
    for _ in range(ROUNDS):
        (claimed,) = await running(engine)
        ids = await asyncio.gather(*(appended(engine, claimed, n) for n in range(APPENDS)))
        frames = (await engine.read_stream(claimed.execution_id, 0)).frames
        assert {frame.id for frame in frames} == set(ids)
        assert len(frames) == APPENDS
        await engine.complete(claimed.handle)
    assert await rival.count(DEADLOCKS) == 0


async def test_no_patch_is_lost(engine: Engine) -> None:
    (claimed,) = await running(engine)
    await asyncio.gather(
        *(
            engine.append_frame(
                claimed.handle,
                NewFrame(payload=f'{{"n{n}": {n}}}'.encode(), mode=DurableSummary()),
            )
            for n in range(APPENDS)
        )
    )
    summary = await engine.read_summary(claimed.execution_id, 0)
    assert summary is not None
    assert summary.version == APPENDS


async def test_nothing_is_appended_to_a_stream_that_is_closed(engine: Engine, rival: Rival) -> None:
    for number in range(ROUNDS):
        (claimed,) = await running(engine)
        ended = asyncio.create_task(end(engine, claimed, cancel=number % 2 == 0))
        tail = asyncio.create_task(last_page(engine, claimed.execution_id))
        ids = await asyncio.gather(*(appended(engine, claimed, n) for n in range(APPENDS)))
        assert not isinstance(await ended, FlowFabricError)
        assert sorted(await tail) == sorted(each for each in ids if each is not None)
    assert await rival.count(DEADLOCKS) == 0


async def end(engine: Engine, claimed: Claimed, *, cancel: bool) -> object:
    if cancel:
        return await engine.cancel_execution(
            claimed.execution_id, reason="unwanted", source="operator_override"
        )
    return await engine.complete(claimed.handle)


async def last_page(engine: Engine, execution_id: str) -> list[str]:
    """The ids on the first page that says it is the end."""
    while True:
        page = await engine.read_stream(execution_id, 0)
        if page.closed_reason is not None:
            assert page.closed_reason in (
                CloseReason.ATTEMPT_SUCCESS,
                CloseReason.ATTEMPT_CANCELLED,
            )
            return [frame.id for frame in page.frames]


async def test_waiting_tails_hold_no_connection(postgres_database: str) -> None:
    async with await connect(postgres_database, pool_max=2) as engine:
        (claimed,) = await running(engine)
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            tails = [
                group.create_task(
                    engine.tail_stream(claimed.execution_id, 0, block_ms=30_000), name=str(number)
                )
                for number in range(8)
            ]
            while engine.waiting_tails < 8:
                await asyncio.wait(tails, timeout=0.001)
            async with asyncio.timeout(2):
                await engine.append_frame(claimed.handle, NewFrame(payload=b"a"))
        assert [len((await tail).frames) for tail in tails] == [1] * 8
