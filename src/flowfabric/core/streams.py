"""What attempts emit while they run: frames, one stream per attempt, and a summary.

The holder of a lease appends frames under its fence. Frame ids are handed out here, from the
stream's own last id, so that they only grow even if the clock is set back. Every frame has a
number: trimming moves the line below which numbers are gone (`kept_after`), and the rows below
it are deleted in batches.

Nobody closes a stream: it is closed by the end of its attempt; see `core.tails`. A stream nothing
was written to costs nothing.

A summary is one JSON document per attempt, changed by merge patches.
"""

import json
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import ClassVar, Final, NoReturn

from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core.ids import AttemptId, ExecutionId, partition_of
from flowfabric.core.leases import Fence
from flowfabric.core.records import Record
from flowfabric.core.situations import LOST_LEASE
from flowfabric.core.states import LifecyclePhase, OwnershipState

# JSON Merge Patch: a document changed by another one of the same shape ------
#
# A member replaces the one of its name, an object is merged into it, and null deletes it. So a
# patch cannot set a member to null; the text `__ff_null__` stands for that.

NULL: Final = "__ff_null__"
DEPTH_MAX: Final = 16
"""Objects and lists inside the patch's own object."""
DOCUMENT_BYTES_MAX: Final = 1024 * 1024


def merge_patch(target: object, patch: object) -> object:
    """The target with the patch applied; neither is changed."""
    if not isinstance(patch, Mapping):
        return _with_nulls(patch)
    merged = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


def _with_nulls(value: object) -> object:
    """Lists replace what was there; what stands for null is null from here on."""
    if isinstance(value, list):
        return [_with_nulls(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _with_nulls(each) for name, each in value.items()}
    return None if value == NULL else value


def apply_patch(document: bytes, patch: bytes) -> bytes:
    """A stored document after a patch."""
    asked = read_patch(patch)
    try:
        stored = _decode(document)
    except ValueError as error:
        raise errors.Corruption(f"a stored summary does not decode: {error}") from error
    check_depth("payload", asked)
    merged = _encode(merge_patch(stored, asked))
    if len(merged) > DOCUMENT_BYTES_MAX:
        raise errors.RetentionLimitExceeded(
            f"the summary would be {len(merged)} bytes, at most {DOCUMENT_BYTES_MAX} are kept"
        )
    return merged


def read_patch(patch: bytes) -> Mapping[str, object]:
    try:
        asked = _decode(patch)
    except RecursionError:
        raise _too_deep("payload") from None
    except ValueError as error:
        raise errors.InvalidInput("payload", f"patch payload is not valid JSON: {error}") from None
    if not isinstance(asked, dict):
        raise errors.InvalidInput("payload", "patch must be a JSON object", asked)
    return asked


def check_depth(
    field: str, value: Mapping[str, object] | list[object], left: int = DEPTH_MAX
) -> None:
    if left < 0:
        raise _too_deep(field)
    for child in value.values() if isinstance(value, Mapping) else value:
        if isinstance(child, Mapping | list):
            check_depth(field, child, left - 1)


def _too_deep(field: str) -> errors.InvalidInput:
    problem = f"patch_depth_exceeded: objects and lists may be nested {DEPTH_MAX} deep"
    return errors.InvalidInput(field, problem)


def _decode(data: bytes) -> object:
    decoded: object = json.loads(data.decode(), parse_constant=_refuse, parse_float=_finite)
    return decoded


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError(f"{number} is too large: it would be read as infinity")
    return value


def _encode(document: object) -> bytes:
    try:
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair: only its escaped form is UTF-8.
        return json.dumps(document, separators=(",", ":")).encode()


FRAME_BYTES_MAX: Final = 65_536
LIVE_TTL_MS_MAX: Final = 24 * 60 * 60 * 1_000
FRAMES_KEPT: Final = 10_000
"""Newest frames a stream keeps, unless its appends say otherwise."""
FRAMES_KEPT_MAX: Final = 1_000_000
SUMMARY_FRAMES_KEPT: Final = 64
"""A patch is history once it is merged: the document is what lasts."""
TRIM_BATCH: Final = 100
"""Trimmed frames are deleted once there are this many."""
APPEND_FRAMES_MAX: Final = 1_000
"""Frames one append may bring."""
READ_FRAMES_MAX: Final = 10_000
BLOCK_MS_MAX: Final = 30_000
SEQ_MAX: Final = 2**62

SEQ_BITS: Final = 20
SEQ_MASK: Final = (1 << SEQ_BITS) - 1
MS_MAX: Final = (1 << 43) - 1
"""The year 2248: a frame id is a signed number of 64 bits."""


# What is appended ---------------------------------------------------------------


class FrameKind(StrEnum):
    """The type of a frame that has no label of its own."""

    STDOUT = "stdout"
    STDERR = "stderr"
    EVENT = "event"
    BLOB = "blob"


class Encoding(StrEnum):
    """How a payload is shown as text. It is stored as it came."""

    UTF8 = "utf8"
    JSON = "json"
    BASE64 = "base64"


class ModeName(StrEnum):
    DURABLE = "durable"
    SUMMARY = "summary"
    BEST_EFFORT = "best_effort"


class Visibility(StrEnum):
    ALL = ""
    EXCLUDE_BEST_EFFORT = "exclude_best_effort"


class Durable(Struct, frozen=True, tag=True):
    """Kept with the execution, up to the stream's limit."""

    name: ClassVar[ModeName] = ModeName.DURABLE


class DurableSummary(Struct, frozen=True, tag=True):
    """The payload is a patch to the attempt's summary, and kept for a while as a frame."""

    name: ClassVar[ModeName] = ModeName.SUMMARY

    patch_kind: str = "json-merge-patch"


class BestEffortLive(Struct, frozen=True, tag=True):
    """For those who watch now. How many are kept follows from how fast they come."""

    name: ClassVar[ModeName] = ModeName.BEST_EFFORT

    ttl_ms: int
    maxlen_floor: int = 64
    maxlen_ceiling: int = 16_384
    ema_alpha: float = 0.2


StreamMode = Durable | DurableSummary | BestEffortLive


class NewFrame(Struct, frozen=True, kw_only=True):
    """A frame to be appended."""

    payload: bytes
    kind: FrameKind = FrameKind.EVENT
    frame_type: str = ""
    """A label of the caller's; the kind, if it is empty."""
    encoding: Encoding | None = None
    """Text if the payload is UTF-8, else base64, unless it is named."""
    seq: int | None = None
    """The caller's own number, which only grows: a frame sent again is recognised by it."""
    correlation_id: str | None = None
    step_key: str | None = None
    """The step that emitted it: the frame counts as long as that step does."""
    mode: StreamMode = Durable()


class Appended(Struct, frozen=True, kw_only=True):
    """What became of a frame."""

    stream_id: str | None
    """The id of the frame; none for a repeat of one that is not the last."""
    frame_count: int
    """How many frames have been appended to the stream so far."""
    summary_version: int | None = None
    repeated: bool = False
    """Its `seq` shows that it was appended before."""


# Rows -----------------------------------------------------------------------------


class Stream(Record, frozen=True, kw_only=True):
    """The stream of one attempt, from its first frame on."""

    table: ClassVar[str] = "stream"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "attempt_index")

    partition_key: int
    execution_id: ExecutionId
    attempt_index: int
    attempt_id: AttemptId
    created_at_ms: int
    frame_count: int = 0
    """Appended so far; the number of the last frame."""
    total_bytes: int = 0
    last_frame_id: int = 0
    last_frame_at_ms: int = 0
    kept_after: int = 0
    """Frames up to this number are trimmed."""
    deleted_through: int = 0
    """Frames up to this number have no row any more."""
    retention_maxlen: int = FRAMES_KEPT
    has_durable_frame: bool = False
    forgotten: bool = False
    """Its execution has been deleted; the frames follow by and by."""
    last_seq: int | None = None
    expires_at_ms: int | None = None
    """When a stream of best-effort frames alone is forgotten."""
    ema_rate_hz: float | None = None
    best_effort_at_ms: int | None = None
    maxlen_applied_last: int | None = None


class FrameRecord(Record, frozen=True, kw_only=True):
    """One frame of a stream."""

    table: ClassVar[str] = "frame"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "attempt_index", "frame_id")

    partition_key: int
    execution_id: ExecutionId
    attempt_index: int
    frame_id: int
    """Milliseconds and a sequence number in one; see `show_id`."""
    frame_number: int
    frame_type: str
    mode: ModeName
    encoding: Encoding
    source: str = "worker"
    correlation_id: str | None = None
    step_key: str | None = None
    summary_version: int | None = None
    ttl_ms: int | None = None
    coded: bool = False
    """Whether the payload has gone through a codec."""
    payload: bytes


class StreamSummary(Record, frozen=True, kw_only=True):
    """The document of one attempt, from its first patch on."""

    table: ClassVar[str] = "stream_summary"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "attempt_index")

    partition_key: int
    execution_id: ExecutionId
    attempt_index: int
    version: int
    patch_kind: str
    first_applied_ms: int
    last_updated_ms: int
    document: bytes


# Appending ------------------------------------------------------------------------


class Holder(Struct, frozen=True, kw_only=True):
    """The columns of an execution that an append checks."""

    lifecycle_phase: LifecyclePhase
    ownership_state: OwnershipState
    lease_id: str | None
    lease_epoch: int
    lease_expires_at_ms: int | None
    current_attempt_index: int


class Append(Struct, frozen=True, kw_only=True):
    """Frames of one attempt, by the fence of its lease."""

    execution_id: ExecutionId
    fence: Fence
    frames: tuple[NewFrame, ...]
    stored: tuple[bytes, ...]
    """The payloads as stored: encoded, if the app has a codec."""
    retention_maxlen: int | None = None
    """How many frames to keep from now on; unchanged if omitted."""


class Coding(Struct, frozen=True):
    """How documents are stored and read back."""

    pack: Callable[[bytes], bytes] = bytes
    unpack: Callable[[bytes], bytes] = bytes


PLAIN: Final = Coding()


class Appending(Struct, frozen=True, kw_only=True):
    """The outcome of appending: answers, and the rows to write."""

    answers: tuple[Appended, ...]
    stream: Stream
    frames: tuple[FrameRecord, ...]
    summary: StreamSummary | None
    trims: bool
    """Whether rows up to `stream.deleted_through` are to be deleted."""


def check_append(holder: Holder | None, append: Append, now_ms: int) -> None:
    """Raise unless the caller holds the live lease. An expired one is not recorded here."""
    called, fence = append.execution_id, append.fence
    if holder is None or holder.lifecycle_phase is not LifecyclePhase.ACTIVE:
        phase = "missing" if holder is None else holder.lifecycle_phase
        raise errors.StreamClosed(
            f"{called} is {phase}: only a running attempt appends to its stream"
        )
    if holder.ownership_state in LOST_LEASE:
        raise errors.StaleOwnerCannotAppend(f"the lease of {called} was lost: stop working on it")
    if holder.lease_expires_at_ms is None or holder.lease_expires_at_ms <= now_ms:
        raise errors.StaleOwnerCannotAppend(
            f"the lease of {called} has expired: stop working on it"
        )
    if fence.attempt_index not in (None, holder.current_attempt_index) or (
        (holder.lease_id, holder.lease_epoch) != (fence.lease_id, fence.lease_epoch)
    ):
        raise errors.StaleOwnerCannotAppend(
            f"{called}: lease epoch {fence.lease_epoch} of attempt {fence.attempt_index} is not"
            f" the current one (epoch {holder.lease_epoch} of {holder.current_attempt_index})"
        )


def decide_append(
    holder: Holder | None,
    append: Append,
    stream: Stream | None,
    summary: StreamSummary | None,
    now_ms: int,
    coding: Coding = PLAIN,
    frames_kept: int = FRAMES_KEPT,
) -> Appending:
    """All frames, or none of them. A new stream keeps as many as the policy says."""
    check_append(holder, append, now_ms)
    assert holder is not None
    if stream is None:
        stream = Stream(
            partition_key=partition_of(append.execution_id),
            execution_id=append.execution_id,
            attempt_index=holder.current_attempt_index,
            attempt_id=append.fence.attempt_id,
            created_at_ms=now_ms,
            retention_maxlen=frames_kept,
        )
    stream = forget_expired(stream, now_ms)
    if append.retention_maxlen is not None:
        stream = structs.replace(stream, retention_maxlen=append.retention_maxlen)
    before = summary
    answers: list[Appended] = []
    frames: list[FrameRecord] = []
    for new, stored in zip(append.frames, append.stored, strict=True):
        if is_repeat(stream, new):
            answers.append(_repeated(stream, new))
            continue
        if isinstance(new.mode, DurableSummary):
            summary = patched(stream, summary, new, new.mode, now_ms, coding)
        stream = _advance(stream, new, now_ms)
        version = summary.version if summary and isinstance(new.mode, DurableSummary) else None
        frames.append(_frame(stream, new, stored, version))
        answers.append(
            Appended(
                stream_id=show_id(stream.last_frame_id),
                frame_count=stream.frame_count,
                summary_version=version,
            )
        )
    # Delete what is trimmed once it is worth a statement.
    trims = stream.kept_after - stream.deleted_through >= TRIM_BATCH
    if trims:
        stream = structs.replace(stream, deleted_through=stream.kept_after)
    return Appending(
        answers=tuple(answers),
        stream=stream,
        # Frames that do not outlive their own append are never written.
        frames=tuple(each for each in frames if each.frame_number > stream.deleted_through),
        summary=None if summary is before else summary,
        trims=trims,
    )


def is_repeat(stream: Stream, new: NewFrame) -> bool:
    return new.seq is not None and stream.last_seq is not None and new.seq <= stream.last_seq


def _repeated(stream: Stream, new: NewFrame) -> Appended:
    last = new.seq == stream.last_seq
    return Appended(
        stream_id=show_id(stream.last_frame_id) if last else None,
        frame_count=stream.frame_count,
        repeated=True,
    )


def _advance(stream: Stream, new: NewFrame, now_ms: int) -> Stream:
    """The stream with one more frame."""
    count = stream.frame_count + 1
    after = structs.replace(
        stream,
        frame_count=count,
        total_bytes=stream.total_bytes + len(new.payload),
        last_frame_id=next_id(stream.last_frame_id, now_ms),
        last_frame_at_ms=now_ms,
        last_seq=stream.last_seq if new.seq is None else new.seq,
    )
    match new.mode:
        case Durable():
            kept = stream.retention_maxlen or FRAMES_KEPT
            after = structs.replace(after, has_durable_frame=True, expires_at_ms=None)
        case DurableSummary():
            kept = SUMMARY_FRAMES_KEPT
            after = structs.replace(after, has_durable_frame=True, expires_at_ms=None)
        case BestEffortLive() as live:
            rate_hz, kept = dynamic_maxlen(
                live, stream.ema_rate_hz, stream.best_effort_at_ms, now_ms
            )
            lasts = live.ttl_ms > 0 and not stream.has_durable_frame
            after = structs.replace(
                after,
                ema_rate_hz=rate_hz,
                best_effort_at_ms=now_ms,
                maxlen_applied_last=kept,
                expires_at_ms=now_ms + 2 * live.ttl_ms if lasts else after.expires_at_ms,
            )
    return structs.replace(after, kept_after=max(stream.kept_after, count - kept))


def _frame(
    stream: Stream, new: NewFrame, stored: bytes, summary_version: int | None
) -> FrameRecord:
    ttl_ms = new.mode.ttl_ms if isinstance(new.mode, BestEffortLive) else 0
    return FrameRecord(
        partition_key=stream.partition_key,
        execution_id=stream.execution_id,
        attempt_index=stream.attempt_index,
        frame_id=stream.last_frame_id,
        frame_number=stream.frame_count,
        frame_type=new.frame_type or new.kind.value,
        mode=new.mode.name,
        encoding=encoding_of(new.payload) if new.encoding is None else new.encoding,
        correlation_id=new.correlation_id or None,
        step_key=new.step_key or None,
        summary_version=summary_version,
        ttl_ms=ttl_ms or None,
        coded=stored != new.payload,
        payload=stored,
    )


def decide_forget(stream: Stream, frames_max: int, now_ms: int) -> tuple[Stream | None, int]:
    """A due stream without its oldest frames, or None once its execution is gone too; and how many
    frames to delete, at most `frames_max`.
    """
    if not has_expired(stream, now_ms):
        return stream, 0
    through = min(stream.frame_count, stream.deleted_through + frames_max)
    done = through == stream.frame_count
    after = structs.replace(
        stream,
        kept_after=stream.frame_count,
        deleted_through=through,
        expires_at_ms=None if done else stream.expires_at_ms,
    )
    return None if done and stream.forgotten else after, through - stream.deleted_through


def forget_expired(stream: Stream, now_ms: int) -> Stream:
    """The stream without its frames, if they have outlived their time."""
    if not has_expired(stream, now_ms):
        return stream
    return structs.replace(stream, kept_after=stream.frame_count, expires_at_ms=None)


def has_expired(stream: Stream, now_ms: int) -> bool:
    return stream.expires_at_ms is not None and stream.expires_at_ms <= now_ms


def dynamic_maxlen(
    mode: BestEffortLive, rate_hz: float | None, last_at_ms: int | None, now_ms: int
) -> tuple[float, int]:
    """The rate of best-effort frames, smoothed, and how many of them to keep at that rate."""
    floor = mode.maxlen_floor if mode.maxlen_floor > 0 else 64
    ceiling = mode.maxlen_ceiling if mode.maxlen_ceiling > 0 else 16_384
    alpha = mode.ema_alpha if 0 < mode.ema_alpha <= 1 else 0.2
    ttl_s = max(mode.ttl_ms, 1) / 1_000
    if rate_hz is None or last_at_ms is None:
        rate_hz = floor / (2 * ttl_s)
    else:
        now_hz = 1_000 / max(now_ms - last_at_ms, 1)
        rate_hz = alpha * now_hz + (1 - alpha) * rate_hz
    return rate_hz, min(max(math.ceil(rate_hz * ttl_s * 2), floor), max(ceiling, floor))


def patched(
    stream: Stream,
    summary: StreamSummary | None,
    new: NewFrame,
    mode: DurableSummary,
    now_ms: int,
    coding: Coding,
) -> StreamSummary:
    if mode.patch_kind not in ("", "json-merge-patch"):
        raise errors.InvalidInput("mode", "unsupported patch_kind", mode.patch_kind)
    before = b"{}" if summary is None else coding.unpack(summary.document)
    document = coding.pack(apply_patch(before, new.payload))
    if summary is not None:
        return structs.replace(
            summary, version=summary.version + 1, last_updated_ms=now_ms, document=document
        )
    return StreamSummary(
        partition_key=stream.partition_key,
        execution_id=stream.execution_id,
        attempt_index=stream.attempt_index,
        version=1,
        patch_kind="json-merge-patch",
        first_applied_ms=now_ms,
        last_updated_ms=now_ms,
        document=document,
    )


def encoding_of(payload: bytes) -> Encoding:
    try:
        payload.decode()
    except UnicodeDecodeError:
        return Encoding.BASE64
    return Encoding.UTF8


# Ids -------------------------------------------------------------------------------


def next_id(last_id: int, now_ms: int) -> int:
    """The id after `last_id`: of this millisecond, or of the last one's if that is later."""
    return max(now_ms << SEQ_BITS, last_id + 1)


def show_id(frame_id: int) -> str:
    return f"{frame_id >> SEQ_BITS}-{frame_id & SEQ_MASK}"
