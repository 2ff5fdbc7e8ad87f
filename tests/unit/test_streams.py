"""Frames, their numbers and ids, and how many of them a stream keeps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flowfabric.core.ids import AttemptId, ExecutionId, LeaseId
from flowfabric.core.leases import Fence
from flowfabric.core.states import LifecyclePhase, OwnershipState
from flowfabric.core.streams import (
    FRAMES_KEPT,
    SUMMARY_FRAMES_KEPT,
    TRIM_BATCH,
    Append,
    Appended,
    Appending,
    BestEffortLive,
    Durable,
    DurableSummary,
    Encoding,
    FrameKind,
    FrameRecord,
    Holder,
    ModeName,
    NewFrame,
    Stream,
    StreamMode,
    StreamSummary,
    decide_append,
    decide_forget,
    dynamic_maxlen,
    encoding_of,
    next_id,
    show_id,
)
from flowfabric.errors import FlowFabricError, InvalidInput, StaleOwnerCannotAppend, StreamClosed

NOW_MS = 1_700_000_000_000
EXECUTION = ExecutionId("{fp:7}:01890000-0000-7000-8000-000000000001")
FENCE = Fence(
    lease_id=LeaseId("lease"),
    lease_epoch=3,
    attempt_id=AttemptId("attempt"),
    attempt_index=2,
    by_handle=True,
)
HOLDER = Holder(
    lifecycle_phase=LifecyclePhase.ACTIVE,
    ownership_state=OwnershipState.LEASED,
    lease_id="lease",
    lease_epoch=3,
    lease_expires_at_ms=NOW_MS + 1,
    current_attempt_index=2,
)
LIVE = BestEffortLive(ttl_ms=5_000)


def append(*frames: NewFrame, **fields: object) -> Append:
    made = frames or (NewFrame(payload=b"x"),)
    stored = tuple(frame.payload for frame in made)
    given = Append(execution_id=EXECUTION, fence=FENCE, frames=made, stored=stored)
    return structs.replace(given, **fields)


def decided(
    *frames: NewFrame,
    stream: Stream | None = None,
    summary: StreamSummary | None = None,
    now_ms: int = NOW_MS,
    **fields: object,
) -> Appending:
    holder = structs.replace(HOLDER, lease_expires_at_ms=now_ms + 1)
    return decide_append(holder, append(*frames, **fields), stream, summary, now_ms)


def of_mode(mode: StreamMode, payload: bytes = b"{}") -> NewFrame:
    return NewFrame(payload=payload, mode=mode)


def grown(count: int, **fields: object) -> Stream:
    """A stream that has been given so many durable frames."""
    stream = decided().stream
    stream = structs.replace(stream, frame_count=count, deleted_through=0, kept_after=0)
    return structs.replace(stream, **fields)


# The fence


@pytest.mark.parametrize(
    ("holder", "error"),
    [
        pytest.param(None, StreamClosed, id="no execution"),
        pytest.param(
            structs.replace(
                HOLDER,
                lifecycle_phase=LifecyclePhase.SUSPENDED,
                ownership_state=OwnershipState.LEASE_REVOKED,
            ),
            StreamClosed,
            id="not active, which comes first",
        ),
        pytest.param(
            structs.replace(HOLDER, ownership_state=OwnershipState.LEASE_REVOKED),
            StaleOwnerCannotAppend,
            id="revoked",
        ),
        pytest.param(
            structs.replace(HOLDER, ownership_state=OwnershipState.LEASE_EXPIRED_RECLAIMABLE),
            StaleOwnerCannotAppend,
            id="noted as expired",
        ),
        pytest.param(
            structs.replace(HOLDER, lease_expires_at_ms=NOW_MS),
            StaleOwnerCannotAppend,
            id="expired now",
        ),
        pytest.param(
            structs.replace(HOLDER, lease_expires_at_ms=None), StaleOwnerCannotAppend, id="no lease"
        ),
        pytest.param(
            structs.replace(HOLDER, current_attempt_index=3),
            StaleOwnerCannotAppend,
            id="another attempt",
        ),
        pytest.param(
            structs.replace(HOLDER, lease_id="other"), StaleOwnerCannotAppend, id="another lease"
        ),
        pytest.param(
            structs.replace(HOLDER, lease_epoch=4), StaleOwnerCannotAppend, id="another epoch"
        ),
    ],
)
def test_only_the_holder_of_the_live_lease_appends(
    holder: Holder | None, error: type[FlowFabricError]
) -> None:
    bad_patch = of_mode(DurableSummary(), b"no JSON")
    with pytest.raises(error):
        decide_append(holder, append(bad_patch), None, None, NOW_MS)


# Frames


def test_the_first_frame_makes_the_stream() -> None:
    made = decided(NewFrame(payload=b"hello", correlation_id="c", step_key="write", seq=8))
    first_id = NOW_MS << 20
    assert made == Appending(
        answers=(Appended(stream_id=f"{NOW_MS}-0", frame_count=1),),
        stream=Stream(
            partition_key=7,
            execution_id=EXECUTION,
            attempt_index=2,
            attempt_id=AttemptId("attempt"),
            created_at_ms=NOW_MS,
            frame_count=1,
            total_bytes=5,
            last_frame_id=first_id,
            last_frame_at_ms=NOW_MS,
            has_durable_frame=True,
            last_seq=8,
        ),
        frames=(
            FrameRecord(
                partition_key=7,
                execution_id=EXECUTION,
                attempt_index=2,
                frame_id=first_id,
                frame_number=1,
                frame_type="event",
                mode=ModeName.DURABLE,
                encoding=Encoding.UTF8,
                correlation_id="c",
                step_key="write",
                payload=b"hello",
            ),
        ),
        summary=None,
        trims=False,
    )


@pytest.mark.parametrize("kind", FrameKind)
def test_a_frame_is_of_the_type_it_says_or_else_of_its_kind(kind: FrameKind) -> None:
    made = decided(
        NewFrame(payload=b"", kind=kind), NewFrame(payload=b"", kind=kind, frame_type="delta")
    )
    assert [frame.frame_type for frame in made.frames] == [kind.value, "delta"]


def test_the_encoding_of_a_payload_is_found_out() -> None:
    assert (encoding_of("ü".encode()), encoding_of(b"\xff")) == (Encoding.UTF8, Encoding.BASE64)
    made = decided(NewFrame(payload=b"{}", encoding=Encoding.JSON), NewFrame(payload=b"\xff"))
    assert [frame.encoding for frame in made.frames] == [Encoding.JSON, Encoding.BASE64]


def test_a_frame_sent_again_is_recognised_by_its_number() -> None:
    first = decided(*(NewFrame(payload=b"x", seq=seq) for seq in (1, 2)))
    again = decided(*(NewFrame(payload=b"x", seq=seq) for seq in (1, 2, 3)), stream=first.stream)
    assert again.answers == (
        Appended(stream_id=None, frame_count=2, repeated=True),
        Appended(stream_id=f"{NOW_MS}-1", frame_count=2, repeated=True),
        Appended(stream_id=f"{NOW_MS}-2", frame_count=3),
    )
    assert [frame.frame_number for frame in again.frames] == [3]


@given(st.lists(st.integers(0, 2**41), min_size=1, max_size=30))
def test_ids_only_grow_however_the_clock_is_set(times_ms: list[int]) -> None:
    ids = [0]
    for now_ms in times_ms:
        ids.append(next_id(ids[-1], now_ms))
    assert ids == sorted(set(ids))


def test_ids_of_one_millisecond_are_counted() -> None:
    first = next_id(0, NOW_MS)
    second = next_id(first, NOW_MS)
    assert (show_id(first), show_id(second)) == (f"{NOW_MS}-0", f"{NOW_MS}-1")
    assert show_id(next_id(second, NOW_MS - 50)) == f"{NOW_MS}-2"
    assert show_id(next_id(second, NOW_MS + 1)) == f"{NOW_MS + 1}-0"


# How many are kept


@pytest.mark.parametrize(
    ("mode", "maxlen", "kept"),
    [
        (Durable(), 50, 50),
        (Durable(), 0, FRAMES_KEPT),
        (DurableSummary(), 50, SUMMARY_FRAMES_KEPT),
        (LIVE, 50, 64),
    ],
)
def test_each_mode_keeps_so_many_of_the_newest_frames(
    mode: StreamMode, maxlen: int, kept: int
) -> None:
    made = decided(of_mode(mode), stream=grown(99_999), retention_maxlen=maxlen)
    assert made.stream.kept_after == 100_000 - kept
    assert (made.trims, made.stream.deleted_through) == (True, 100_000 - kept)


def test_what_was_trimmed_does_not_come_back_when_more_are_kept() -> None:
    less = decided(stream=grown(1_000), retention_maxlen=10)
    more = decided(stream=less.stream, retention_maxlen=500)
    assert more.stream.kept_after == less.stream.kept_after


def test_rows_are_deleted_when_there_are_enough_of_them() -> None:
    some = decided(stream=grown(50 + TRIM_BATCH - 2), retention_maxlen=50)
    assert (some.trims, some.stream.kept_after) == (False, TRIM_BATCH - 1)
    more = decided(stream=some.stream, retention_maxlen=50)
    assert (more.trims, more.stream.deleted_through) == (True, TRIM_BATCH)


def test_frames_that_their_own_append_trims_are_not_written() -> None:
    made = decided(*[NewFrame(payload=b"x")] * 500, retention_maxlen=10)
    assert [frame.frame_number for frame in made.frames] == list(range(491, 501))
    assert (made.stream.frame_count, made.stream.total_bytes) == (500, 500)


# Best effort


def test_the_first_best_effort_frame_keeps_the_floor() -> None:
    rate_hz, kept = dynamic_maxlen(LIVE, None, None, NOW_MS)
    assert (rate_hz, kept) == (64 / 10, 64)


@pytest.mark.parametrize("apart_ms", [0, 1, 7, 1_000, -5])
def test_the_rate_is_smoothed_and_twice_its_time_is_kept(apart_ms: int) -> None:
    rate_hz, kept = dynamic_maxlen(LIVE, 100.0, NOW_MS, NOW_MS + apart_ms)
    assert rate_hz == pytest.approx(0.2 * 1_000 / max(apart_ms, 1) + 0.8 * 100.0)
    assert kept == math.ceil(rate_hz * 10)


def test_a_burst_climbs_past_the_floor_a_pause_lowers_it_again() -> None:
    made = decided(*[of_mode(LIVE)] * 256)
    assert made.stream.ema_rate_hz is not None
    assert made.stream.maxlen_applied_last is not None
    assert made.stream.ema_rate_hz > 1
    assert made.stream.maxlen_applied_last > 64
    later = decided(of_mode(LIVE), stream=made.stream, now_ms=NOW_MS + 4_000)
    assert later.stream.ema_rate_hz is not None
    assert later.stream.ema_rate_hz < made.stream.ema_rate_hz


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        (structs.replace(LIVE, maxlen_ceiling=256), 256),
        (structs.replace(LIVE, maxlen_floor=0), 10_000),
        (structs.replace(LIVE, maxlen_ceiling=0), 10_000),
        (structs.replace(LIVE, maxlen_ceiling=-1), 10_000),
        (structs.replace(LIVE, maxlen_floor=300, maxlen_ceiling=200), 300),
        (structs.replace(LIVE, ema_alpha=0.0), 10_000),
        (structs.replace(LIVE, ema_alpha=2.0), 10_000),
        (structs.replace(LIVE, ttl_ms=0), 64),
    ],
)
def test_what_makes_no_sense_is_replaced_by_what_does(mode: BestEffortLive, kept: int) -> None:
    assert dynamic_maxlen(mode, 1_000.0, NOW_MS - 1, NOW_MS)[1] == kept


def test_best_effort_frames_alone_are_forgotten_after_twice_their_time() -> None:
    made = decided(of_mode(LIVE))
    assert made.frames[0].ttl_ms == 5_000
    assert made.stream.expires_at_ms == NOW_MS + 10_000
    again = decided(of_mode(LIVE), stream=made.stream, now_ms=NOW_MS + 9_999)
    assert (again.stream.kept_after, again.stream.expires_at_ms) == (0, NOW_MS + 19_999)
    late = decided(of_mode(LIVE), stream=made.stream, now_ms=NOW_MS + 10_000)
    assert (late.stream.kept_after, late.stream.frame_count) == (1, 2)


@pytest.mark.parametrize("mode", [Durable(), DurableSummary()])
def test_the_first_durable_frame_keeps_the_stream_for_good(mode: StreamMode) -> None:
    made = decided(of_mode(LIVE), of_mode(mode), of_mode(LIVE))
    assert (made.stream.has_durable_frame, made.stream.expires_at_ms) == (True, None)


def test_a_best_effort_frame_without_a_time_does_not_end() -> None:
    made = decided(of_mode(structs.replace(LIVE, ttl_ms=0)))
    assert (made.frames[0].ttl_ms, made.stream.expires_at_ms) == (None, None)


def test_a_due_stream_loses_its_frames_in_portions_and_goes_with_its_execution() -> None:
    due = grown(250, expires_at_ms=NOW_MS, forgotten=True)
    first, number = decide_forget(due, 200, NOW_MS)
    assert first is not None
    assert (number, first.kept_after, first.deleted_through) == (200, 250, 200)
    assert first.expires_at_ms == NOW_MS
    assert decide_forget(first, 200, NOW_MS) == (None, 50)
    kept, number = decide_forget(structs.replace(due, forgotten=False), 1_000, NOW_MS)
    assert kept is not None
    assert (number, kept.deleted_through, kept.expires_at_ms) == (250, 250, None)
    assert decide_forget(due, 200, NOW_MS - 1) == (due, 0)


# Summaries


def test_patches_are_merged_and_counted_beside_other_frames() -> None:
    made = decided(
        of_mode(DurableSummary(), b'{"a": {"b": 1}, "c": 2}'),
        NewFrame(payload=b"x"),
        of_mode(DurableSummary(""), b'{"a": {"d": 3}, "c": null}'),
    )
    assert [answer.summary_version for answer in made.answers] == [1, None, 2]
    assert [frame.summary_version for frame in made.frames] == [1, None, 2]
    assert made.summary == StreamSummary(
        partition_key=7,
        execution_id=EXECUTION,
        attempt_index=2,
        version=2,
        patch_kind="json-merge-patch",
        first_applied_ms=NOW_MS,
        last_updated_ms=NOW_MS,
        document=b'{"a":{"b":1,"d":3}}',
    )
    later = decided(
        of_mode(DurableSummary(), b'{"e":1}'),
        stream=made.stream,
        summary=made.summary,
        now_ms=NOW_MS + 5,
    )
    assert later.summary is not None
    assert (later.summary.version, later.summary.first_applied_ms) == (3, NOW_MS)
    assert later.summary.last_updated_ms == NOW_MS + 5


def test_an_unknown_kind_of_patch_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidInput, match="unsupported patch_kind"):
        decided(of_mode(DurableSummary("json-patch"), b"no JSON"))
