"""Appending to the streams of attempts, and reading them.

Appends of many attempts go together: their executions are locked against the end of an attempt,
their streams are locked, and what the core decides is written at once. The row of an execution is
never written.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from flowfabric.core import checks
from flowfabric.core.bounds import BATCH_MAX, SWEEP_BATCH
from flowfabric.core.decisions import Changes
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.core.journal import STEP_KEY_BYTES_MAX
from flowfabric.core.leases import Fence
from flowfabric.core.policies import parse_policy
from flowfabric.core.records import Execution
from flowfabric.core.streams import (
    APPEND_FRAMES_MAX,
    FRAME_BYTES_MAX,
    FRAMES_KEPT,
    FRAMES_KEPT_MAX,
    LIVE_TTL_MS_MAX,
    SEQ_MAX,
    Append,
    Appended,
    Appending,
    BestEffortLive,
    Coding,
    Durable,
    DurableSummary,
    Encoding,
    FrameKind,
    FrameRecord,
    Holder,
    NewFrame,
    Stream,
    StreamMode,
    StreamSummary,
    decide_append,
    decide_forget,
)
from flowfabric.engine import shell
from flowfabric.errors import FlowFabricError, InvalidInput, RetentionLimitExceeded
from flowfabric.store.base import Key, Transaction, UniqueViolation

FRAMES_PER_SWEEP = 20_000
"""Frames one sweep deletes in one transaction."""
TRIES_MAX = 3


class FrameAppend(Struct, frozen=True, kw_only=True):
    """Frames of one attempt, for `append_frames`: all of them are appended, or none."""

    handle: Handle
    frames: tuple[NewFrame, ...]
    retention_maxlen: int | None = None
    """How many of the newest frames to keep; if it is not given, as the execution's policy says."""


class HolderRow(Holder, frozen=True, kw_only=True):
    execution_id: ExecutionId
    now_ms: int


def stream_topic(execution_id: ExecutionId) -> str:
    return f"stream:{uuid_of(execution_id)}"


class Streams(shell.Group):
    async def append_frame(
        self,
        handle: Handle | bytes,
        frame: NewFrame,
        *,
        retention_maxlen: int | None = None,
    ) -> Appended:
        """Append one frame to the stream of the attempt whose lease the handle stands for.

        The stream keeps `retention_maxlen` frames from now on; 10,000 if that is 0. It begins
        with what the execution's policy says.
        """
        append = self._check_append(
            FrameAppend(
                handle=self.shell.verify_handle(handle),
                frames=(frame,),
                retention_maxlen=retention_maxlen,
            )
        )
        (outcome,) = await self._append([append])
        return shell.answered(outcome)[0]

    async def append_frames(
        self, appends: Sequence[FrameAppend]
    ) -> list[tuple[Appended, ...] | FlowFabricError]:
        """Append frames of many attempts at once; each attempt gets its own answers or error."""
        checks.check_list("appends", appends, 0, BATCH_MAX)
        checked = [shell.value_or_error(self._check_append, each) for each in appends]
        good = [each for each in checked if isinstance(each, Append)]
        outcomes = iter(await self._append(good) if good else ())
        return [each if isinstance(each, FlowFabricError) else next(outcomes) for each in checked]

    async def _append(
        self, appends: Sequence[Append]
    ) -> list[tuple[Appended, ...] | FlowFabricError]:
        values = self.shell.values
        packed = await values.through_all(appends, self._packed)
        # Summaries are merged inside the transaction.
        coding = Coding(values.pack, values.unpack)
        for tries_left in reversed(range(TRIES_MAX)):
            try:
                return await self.store.transact(lambda tx: _append_in(tx, packed, coding))
            except UniqueViolation:
                # Another transaction has appended the first frame: its stream can be locked now.
                if tries_left == 0:
                    raise
        raise AssertionError("the last try returns or raises")

    def _packed(self, append: Append) -> Append:
        stored = tuple(self.shell.values.seal(payload) for payload in append.stored)
        return structs.replace(append, stored=stored)

    async def trim_streams(self, *, limit: int = SWEEP_BATCH) -> shell.Swept:
        """Delete frames that have outlived their time, or their execution."""
        checks.check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> shell.Swept:
            now_ms = await tx.now_ms()
            due = await tx.select_records(Stream, "due_streams", now_ms=now_ms, limit=limit)
            left = FRAMES_PER_SWEEP
            kept: list[Stream] = []
            gone: list[Stream] = []
            for stream in due:
                if left > 0:
                    after, number = decide_forget(stream, left, now_ms)
                    left -= number
                    if after is None:
                        gone.append(structs.replace(stream, deleted_through=stream.frame_count))
                    else:
                        kept.append(after)
            await _delete_frames(tx, [*kept, *gone])
            keys = [(*shell.execution_key(each.execution_id), each.attempt_index) for each in gone]
            summaries = (await tx.lock(StreamSummary, keys)).values() if keys else ()
            await tx.save(Changes(updates=tuple(kept), deletes=(*gone, *summaries)))
            return shell.Swept(acted=len(kept) + len(gone), full=left <= 0 or len(due) == limit)

        return await self.store.transact(body)

    # Input

    def _check_append(self, append: FrameAppend) -> Append:
        if not isinstance(append, FrameAppend):
            raise InvalidInput("append", "must be a FrameAppend", append)
        handle = self.shell.verify_handle(append.handle)
        checks.check_list("frames", append.frames, 1, APPEND_FRAMES_MAX)
        if append.retention_maxlen is not None:
            checks.check_int("retention_maxlen", append.retention_maxlen, 0, FRAMES_KEPT_MAX)
        return Append(
            execution_id=handle.execution_id,
            fence=shell.fence_of(handle),
            frames=tuple(check_frame(each) for each in append.frames),
            stored=tuple(each.payload for each in append.frames),
            retention_maxlen=append.retention_maxlen,
        )


def check_frame(frame: object) -> NewFrame:
    """Check a frame. Its size is checked first: callers rely on the order."""
    if not isinstance(frame, NewFrame):
        raise InvalidInput("frame", "must be a NewFrame", frame)
    if not isinstance(frame.payload, bytes):
        raise InvalidInput("payload", "must be bytes", frame.payload)
    if len(frame.payload) > FRAME_BYTES_MAX:
        raise RetentionLimitExceeded(
            f"payload: {len(frame.payload)} bytes, a frame has at most {FRAME_BYTES_MAX}"
        )
    checks.check_text("frame_type", frame.frame_type)
    checks.check_optional_text("correlation_id", frame.correlation_id)
    checks.check_optional_text("step_key", frame.step_key, bytes_max=STEP_KEY_BYTES_MAX)
    if frame.seq is not None:
        checks.check_int("seq", frame.seq, 0, SEQ_MAX)
    return structs.replace(
        frame,
        kind=checks.check_choice("kind", frame.kind, FrameKind),
        encoding=_check_encoding(frame.encoding, frame.payload),
        mode=_check_mode(frame.mode),
    )


def _check_encoding(encoding: object, payload: bytes) -> Encoding | None:
    if encoding is None:
        return None
    named = checks.check_choice("encoding", encoding, Encoding)
    if named is not Encoding.BASE64:
        try:
            payload.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput("payload", f"is not UTF-8, as {named} must be: {error}") from None
    return named


def _check_mode(mode: object) -> StreamMode:
    match mode:
        case Durable():
            return mode
        case DurableSummary():
            checks.check_text("patch_kind", mode.patch_kind)
            return mode
        case BestEffortLive():
            checks.check_int("ttl_ms", mode.ttl_ms, 0, LIVE_TTL_MS_MAX)
            # `dynamic_maxlen` replaces values out of range.
            checks.check_int("maxlen_floor", mode.maxlen_floor, -FRAMES_KEPT_MAX, FRAMES_KEPT_MAX)
            checks.check_int(
                "maxlen_ceiling", mode.maxlen_ceiling, -FRAMES_KEPT_MAX, FRAMES_KEPT_MAX
            )
            _check_number("ema_alpha", mode.ema_alpha)
            return mode
        case _:
            problem = "must be Durable, DurableSummary or BestEffortLive"
            raise InvalidInput("mode", problem, mode)


def _check_number(field: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidInput(field, "must be a number", value)


# In a transaction -------------------------------------------------------------------


async def _append_in(
    tx: Transaction, appends: Sequence[Append], coding: Coding
) -> list[tuple[Appended, ...] | FlowFabricError]:
    """Decide the appends in order; each sees what earlier ones have written."""
    asked = sorted({append.execution_id for append in appends})
    rows = await tx.select_as(HolderRow, "hold_for_append", **shell.id_columns(asked))
    holders = {row.execution_id: row for row in rows}
    now_ms = rows[0].now_ms if rows else 0
    keys = sorted({_key(each.execution_id, each.fence) for each in appends})
    streams = await tx.lock(Stream, keys)
    sums_up = {
        _key(append.execution_id, append.fence)
        for append in appends
        for frame in append.frames
        if isinstance(frame.mode, DurableSummary)
    }
    summaries = await tx.lock(StreamSummary, sorted(sums_up)) if sums_up else {}
    kept = await _frames_kept(tx, [key for key in keys if key not in streams])
    frames: list[FrameRecord] = []
    trimmed: set[Key] = set()
    outcomes: list[tuple[Appended, ...] | FlowFabricError] = []
    for append in appends:
        key = _key(append.execution_id, append.fence)
        try:
            made: Appending = decide_append(
                holders.get(append.execution_id),
                append,
                streams.get(key),
                summaries.get(key),
                now_ms,
                coding,
                kept.get(key, FRAMES_KEPT),
            )
        except FlowFabricError as error:
            outcomes.append(error)
            continue
        outcomes.append(made.answers)
        if not made.frames and made.summary is None:
            continue
        streams[key] = made.stream
        frames += made.frames
        if made.summary is not None:
            summaries[key] = made.summary
        if made.trims:
            trimmed.add(key)
        tx.hint(stream_topic(append.execution_id))
    if frames:
        written = {(each.partition_key, each.execution_id, each.attempt_index) for each in frames}
        updates = (*(streams[key] for key in sorted(written)), *summaries.values())
        await tx.save(Changes(inserts=tuple(frames), updates=updates))
    await _delete_frames(tx, [streams[key] for key in sorted(trimmed)])
    return outcomes


async def _frames_kept(tx: Transaction, new: Sequence[Key]) -> dict[Key, int]:
    """How many frames each new stream keeps, by its execution's policy."""
    if not new:
        return {}
    executions = await tx.get(Execution, [key[:-1] for key in new])
    kept: dict[Key, int] = {}
    for key in new:
        execution = executions.get(key[:-1])
        policy = None if execution is None else parse_policy(execution.policy).stream_policy
        if policy is not None:
            kept[key] = min(policy.retention_maxlen, FRAMES_KEPT_MAX)
    return kept


async def _delete_frames(tx: Transaction, streams: Sequence[Stream]) -> None:
    """Delete each stream's rows up to its `deleted_through`."""
    if not streams:
        return
    await tx.select(
        "delete_frames",
        **shell.id_columns([each.execution_id for each in streams]),
        attempt_indexes=[each.attempt_index for each in streams],
        throughs=[each.deleted_through for each in streams],
    )


def _key(execution_id: ExecutionId, fence: Fence) -> Key:
    assert fence.attempt_index is not None, "a handle names its attempt"
    return (*shell.execution_key(execution_id), fence.attempt_index)
