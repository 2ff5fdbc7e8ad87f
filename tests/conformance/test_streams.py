"""Appending to streams: who may, what is stored, how much of it is kept."""

import json

import pytest
from msgspec import structs

from flowfabric import Engine, FlowFabricError
from flowfabric.core.ids import ExecutionId, partition_of, uuid_of
from flowfabric.core.streams import (
    FRAME_BYTES_MAX,
    Appended,
    BestEffortLive,
    Durable,
    DurableSummary,
    Encoding,
    FrameKind,
    NewFrame,
    Stream,
    StreamMode,
)
from flowfabric.core.tails import StreamFrame
from flowfabric.engine.shell import execution_key
from flowfabric.engine.streams import FrameAppend
from flowfabric.errors import (
    InvalidHandle,
    InvalidInput,
    RetentionLimitExceeded,
    StaleOwnerCannotAppend,
    StreamClosed,
)
from flowfabric.reconcilers import run_due
from flowfabric.store.base import Reader
from flowfabric.testing import SettableClock
from tests.conformance.given import Given

LIVE = BestEffortLive(ttl_ms=5_000)
WEEK_MS = 7 * 24 * 60 * 60 * 1_000


def text(payload: str, mode: StreamMode | None = None) -> NewFrame:
    return NewFrame(payload=payload.encode(), frame_type="delta", mode=mode or Durable())


def patch(**members: object) -> NewFrame:
    return NewFrame(payload=json.dumps(members).encode(), mode=DurableSummary())


async def stream_of(
    engine: Engine, execution_id: ExecutionId, attempt_index: int = 0
) -> Stream | None:
    """The stored record, for tests that look at more of it than users see."""
    key = (*execution_key(execution_id), attempt_index)

    async def body(reader: Reader) -> Stream | None:
        return (await reader.get(Stream, [key])).get(key)

    return await engine.store.read(body)


async def rows_of(engine: Engine, execution_id: ExecutionId) -> int:
    """How many frames there are of a first attempt, whether or not anybody may see them."""

    async def body(reader: Reader) -> int:
        rows = await reader.select(
            "read_frames",
            partition_key=partition_of(execution_id),
            execution_id=uuid_of(execution_id),
            attempt_index=0,
            from_id=0,
            to_id=2**63 - 1,
            hidden_through=0,
            best_effort=True,
            limit=10_000,
        )
        return len(rows)

    return await engine.store.read(body)


async def frames_of(
    engine: Engine, execution_id: str, attempt_index: int = 0
) -> tuple[StreamFrame, ...]:
    return (await engine.read_stream(execution_id, attempt_index, count_limit=10_000)).frames


async def said(engine: Engine, execution_id: str, attempt_index: int = 0) -> list[str]:
    return [frame.text for frame in await frames_of(engine, execution_id, attempt_index)]


async def test_a_frame_is_read_as_it_was_appended(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    now_ms = clock.now_ms()
    frame = NewFrame(
        payload="grüß".encode(), frame_type="delta", correlation_id="c-1", step_key="write"
    )
    assert await engine.append_frame(claimed.handle, frame) == Appended(
        stream_id=f"{now_ms}-0", frame_count=1
    )
    binary = NewFrame(payload=b"\x00\xff", kind=FrameKind.BLOB)
    assert (await engine.append_frame(claimed.handle, binary)).stream_id == f"{now_ms}-1"
    first, second = await frames_of(engine, claimed.execution_id)
    assert first.fields == {
        "correlation_id": "c-1",
        "encoding": "utf8",
        "frame_type": "delta",
        "mode": "durable",
        "payload": "grüß",
        "source": "worker",
        "step_key": "write",
        "ts": str(now_ms),
    }
    assert (second.payload, second.encoding, second.frame_type) == (
        b"\x00\xff",
        Encoding.BASE64,
        "blob",
    )
    stream = await stream_of(engine, claimed.execution_id)
    assert stream is not None
    assert (stream.frame_count, stream.total_bytes, stream.attempt_id) == (
        2,
        len(frame.payload) + 2,
        claimed.attempt_id,
    )
    assert stream.has_durable_frame


async def test_appending_writes_nothing_else(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    before = await engine.describe_execution(claimed.execution_id)
    events = (await engine.read_events()).events
    await engine.append_frame(claimed.handle, text("a"))
    assert await engine.describe_execution(claimed.execution_id) == before
    assert (await engine.read_events()).events == events


async def test_many_attempts_append_together_each_with_its_own_answer(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    first, second, ended = await given.running(), await given.running(), await given.completed()
    now_ms = clock.now_ms()
    answers = await engine.append_frames(
        [
            FrameAppend(handle=first.handle, frames=(text("a"), text("b"))),
            FrameAppend(handle=ended.handle, frames=(text("late"),)),
            FrameAppend(handle=second.handle, frames=(text("c"),)),
            FrameAppend(handle=second.handle, frames=()),
            FrameAppend(handle=second.handle, frames=(text("d"), patch(a=1))),
            FrameAppend(handle=first.handle, frames=(text("e"), NewFrame(payload=b"x" * 70_000))),
        ]
    )
    assert answers[0] == (
        Appended(stream_id=f"{now_ms}-0", frame_count=1),
        Appended(stream_id=f"{now_ms}-1", frame_count=2),
    )
    assert isinstance(answers[1], StreamClosed)
    assert answers[2] == (Appended(stream_id=f"{now_ms}-0", frame_count=1),)
    assert isinstance(answers[3], InvalidInput)
    assert answers[4] == (
        Appended(stream_id=f"{now_ms}-1", frame_count=2),
        Appended(stream_id=f"{now_ms}-2", frame_count=3, summary_version=1),
    )
    assert isinstance(answers[5], RetentionLimitExceeded)
    assert await said(engine, first.execution_id) == ["a", "b"]
    assert await said(engine, second.execution_id) == ["c", "d", '{"a": 1}']
    assert await engine.append_frames([]) == []


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ("suspended", StreamClosed),
        ("parked", StreamClosed),
        ("retrying", StreamClosed),
        ("waiting_children", StreamClosed),
        ("completed", StreamClosed),
        ("failed", StreamClosed),
        ("expired_lease", StaleOwnerCannotAppend),
        ("revoked", StaleOwnerCannotAppend),
        ("overdue_lease", StaleOwnerCannotAppend),
    ],
)
async def test_whoever_does_not_hold_the_live_lease_appends_nothing(
    engine: Engine, given: Given, state: str, error: type[FlowFabricError]
) -> None:
    claimed = await getattr(given, state)()
    before = await engine.describe_execution(claimed.execution_id)
    with pytest.raises(error):
        await engine.append_frame(claimed.handle, patch(a=1))
    assert await stream_of(engine, claimed.execution_id) is None
    assert await engine.read_summary(claimed.execution_id, 0) is None
    # Not even an expired lease is noted.
    assert await engine.describe_execution(claimed.execution_id) == before


async def test_who_was_replaced_appends_nothing_to_either_stream(
    engine: Engine, given: Given
) -> None:
    lost = await given.expired_lease()
    again = await given.taken()
    assert (again.execution_id, again.attempt_index) == (lost.execution_id, 1)
    with pytest.raises(StaleOwnerCannotAppend):
        await engine.append_frame(lost.handle, text("late"))
    await engine.append_frame(again.handle, text("new"))
    assert await said(engine, again.execution_id, 0) == []
    assert await said(engine, again.execution_id, 1) == ["new"]


async def test_an_attempt_that_goes_on_after_a_pause_goes_on_in_its_stream(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    await engine.append_frame(claimed.handle, text("a"))
    await engine.delay(claimed.handle, clock.now_ms())
    await engine.promote_delayed(claimed.execution_id)
    again = await given.taken()
    assert again.attempt_index == 0
    await engine.append_frame(again.handle, text("b"))
    assert await said(engine, claimed.execution_id) == ["a", "b"]


async def test_the_checks_come_in_their_order(engine: Engine, given: Given) -> None:
    ended = await given.completed()
    running = await given.running()
    too_large = NewFrame(payload=b"x" * (FRAME_BYTES_MAX + 1), mode=DurableSummary("other"))
    with pytest.raises(RetentionLimitExceeded):
        await engine.append_frame(ended.handle, too_large)
    with pytest.raises(StreamClosed):
        await engine.append_frame(ended.handle, NewFrame(payload=b"{", mode=DurableSummary("x")))
    with pytest.raises(InvalidInput, match="unsupported patch_kind"):
        await engine.append_frame(running.handle, NewFrame(payload=b"{", mode=DurableSummary("x")))
    with pytest.raises(InvalidInput, match="not valid JSON"):
        await engine.append_frame(running.handle, NewFrame(payload=b"{", mode=DurableSummary()))
    with pytest.raises(InvalidInput, match="must be a JSON object"):
        await engine.append_frame(running.handle, NewFrame(payload=b"[]", mode=DurableSummary()))
    deep = b'{"a":' * 18 + b"1" + b"}" * 18
    with pytest.raises(InvalidInput, match="patch_depth_exceeded"):
        await engine.append_frame(running.handle, NewFrame(payload=deep, mode=DurableSummary()))
    assert await stream_of(engine, running.execution_id) is None


async def test_a_frame_has_so_many_bytes_and_no_more(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    for size in (1_024, FRAME_BYTES_MAX):
        await engine.append_frame(claimed.handle, NewFrame(payload=b"x" * size))
    with pytest.raises(RetentionLimitExceeded, match="65537 bytes"):
        await engine.append_frame(claimed.handle, NewFrame(payload=b"x" * (FRAME_BYTES_MAX + 1)))
    stream = await stream_of(engine, claimed.execution_id)
    assert stream is not None
    assert stream.frame_count == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"payload": "text"},
        {"frame_type": None},
        {"frame_type": "x" * 300},
        {"kind": "stdin"},
        {"encoding": "utf16"},
        {"payload": b"\xff", "encoding": Encoding.UTF8},
        {"seq": -1},
        {"seq": "1"},
        {"correlation_id": "a\x00b"},
        {"step_key": 5},
        {"mode": "durable"},
        {"mode": BestEffortLive(ttl_ms=-1)},
        {"mode": BestEffortLive(ttl_ms=2**40)},
        {"mode": structs.replace(LIVE, maxlen_floor="64")},
        {"mode": structs.replace(LIVE, ema_alpha="0.2")},
        {"mode": structs.replace(DurableSummary(), patch_kind=None)},
    ],
)
async def test_a_frame_that_cannot_be_meant_is_refused(
    engine: Engine, given: Given, wrong: dict[str, object]
) -> None:
    claimed = await given.running()
    with pytest.raises(InvalidInput):
        await engine.append_frame(claimed.handle, structs.replace(text("a"), **wrong))
    assert await stream_of(engine, claimed.execution_id) is None


async def test_what_is_no_handle_is_refused(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    for wrong in (b"", structs.replace(claimed.handle, lease_epoch=9)):
        with pytest.raises(InvalidHandle):
            await engine.append_frame(wrong, text("a"))
    (answer,) = await engine.append_frames(
        [FrameAppend(handle=claimed.handle, frames=(text("a"),), retention_maxlen=-1)]
    )
    assert isinstance(answer, InvalidInput)


# Repeats and ids


async def test_a_numbered_frame_sent_again_is_not_stored_again(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    numbered = [structs.replace(text(str(seq)), seq=seq) for seq in (1, 2, 3)]
    first = await engine.append_frame(claimed.handle, numbered[0])
    again = await engine.append_frame(claimed.handle, numbered[0])
    assert again == structs.replace(first, repeated=True)
    (answers,) = await engine.append_frames(
        [FrameAppend(handle=claimed.handle, frames=tuple(numbered))]
    )
    assert isinstance(answers, tuple)
    assert [answer.repeated for answer in answers] == [True, False, False]
    assert await said(engine, claimed.execution_id) == ["1", "2", "3"]


async def test_ids_grow_even_if_the_clock_is_set_back(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    await engine.append_frame(claimed.handle, text("a"))
    now_ms = clock.now_ms()
    clock.set_ms(now_ms - 10_000)
    await engine.append_frame(claimed.handle, text("b"))
    frames = await frames_of(engine, claimed.execution_id)
    assert [frame.id for frame in frames] == [f"{now_ms}-0", f"{now_ms}-1"]


# How much is kept


async def test_a_stream_keeps_the_newest_frames(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    for number in range(200):
        await engine.append_frame(claimed.handle, text(str(number)), retention_maxlen=50)
    assert await said(engine, claimed.execution_id) == [str(n) for n in range(150, 200)]
    stream = await stream_of(engine, claimed.execution_id)
    assert stream is not None
    assert (stream.frame_count, stream.deleted_through) == (200, 100)


async def test_a_policy_says_how_many_frames_a_stream_keeps(engine: Engine, given: Given) -> None:
    claimed = await given.running(policy={"stream_policy": {"retention_maxlen": 5}})
    for number in range(10):
        await engine.append_frame(claimed.handle, text(str(number)))
    assert await said(engine, claimed.execution_id) == ["5", "6", "7", "8", "9"]
    for number in range(10, 20):
        await engine.append_frame(claimed.handle, text(str(number)), retention_maxlen=8)
    await engine.append_frame(claimed.handle, text("20"))
    assert await said(engine, claimed.execution_id) == [str(n) for n in range(13, 21)]


async def test_a_large_append_is_trimmed_as_many_small_ones_would_be(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    frames = tuple(text(str(number)) for number in range(1_000))
    counts: list[int] = []
    for _ in range(2):
        (answers,) = await engine.append_frames(
            [FrameAppend(handle=claimed.handle, frames=frames, retention_maxlen=150)]
        )
        assert isinstance(answers, tuple)
        counts.append(answers[-1].frame_count)
    assert counts == [1_000, 2_000]
    assert await said(engine, claimed.execution_id) == [str(n) for n in range(850, 1_000)]


async def test_streams_are_trimmed_apart(engine: Engine, given: Given) -> None:
    first, second = await given.running(), await given.running()
    frames = tuple(text(str(number)) for number in range(150))
    for claimed, kept in ((first, 50), (second, 10_000)):
        await engine.append_frames(
            [FrameAppend(handle=claimed.handle, frames=frames, retention_maxlen=kept)]
        )
    assert len(await frames_of(engine, first.execution_id)) == 50
    assert len(await frames_of(engine, second.execution_id)) == 150


async def test_a_summary_outlives_its_patches(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    for number in range(300):
        await engine.append_frame(claimed.handle, patch(**{f"n{number}": number}))
    assert len(await frames_of(engine, claimed.execution_id)) == 64
    summary = await engine.read_summary(claimed.execution_id, 0)
    assert summary is not None
    assert summary.version == 300
    assert len(json.loads(summary.document)) == 300


async def test_best_effort_frames_are_kept_by_how_fast_they_come(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    for number in range(100):
        clock.advance(ms=200)
        await engine.renew(claimed.handle)
        await engine.append_frame(claimed.handle, text(str(number), LIVE))
    assert len(await frames_of(engine, claimed.execution_id)) == 64
    stream = await stream_of(engine, claimed.execution_id)
    assert stream is not None
    assert stream.ema_rate_hz == pytest.approx(5, abs=0.5)


async def test_best_effort_frames_alone_are_gone_after_twice_their_time(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    await engine.append_frame(claimed.handle, text("a", LIVE))
    clock.advance(ms=9_999)
    assert await said(engine, claimed.execution_id) == ["a"]
    assert "stream_retention" not in await run_due(engine)
    clock.advance(ms=1)
    assert await said(engine, claimed.execution_id) == []
    assert (await run_due(engine))["stream_retention"] == 1
    await engine.append_frame(claimed.handle, text("b", LIVE))
    assert await said(engine, claimed.execution_id) == ["b"]


async def test_the_first_durable_frame_keeps_a_stream_for_good(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    for frame in (text("a", LIVE), text("b"), text("c", LIVE)):
        await engine.append_frame(claimed.handle, frame)
    clock.advance(ms=20_000)
    await run_due(engine)
    assert await said(engine, claimed.execution_id) == ["a", "b", "c"]


async def test_frames_are_deleted_with_their_execution_in_portions(
    engine: Engine, given: Given, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed, other = await given.running(), await given.running()
    frames = tuple(text(str(number)) for number in range(25))
    for each in (claimed, other):
        await engine.append_frames([FrameAppend(handle=each.handle, frames=frames)])
    await engine.append_frame(claimed.handle, patch(a=1))
    await engine.complete(claimed.handle)
    clock.advance(ms=WEEK_MS)
    assert (await engine.trim_retention()).acted == 1
    assert await rows_of(engine, claimed.execution_id) == 26
    assert await frames_of(engine, claimed.execution_id) == ()
    assert await engine.read_summary(claimed.execution_id, 0) is None
    monkeypatch.setattr("flowfabric.engine.streams.FRAMES_PER_SWEEP", 10)
    assert (await run_due(engine))["stream_retention"] == 3
    assert await stream_of(engine, claimed.execution_id) is None
    assert len(await frames_of(engine, other.execution_id)) == 25
    assert await rows_of(engine, claimed.execution_id) == 0
