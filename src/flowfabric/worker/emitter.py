"""What handlers say while they run, on its way to the store.

A frame is handed over in microseconds and stored behind the handler's back: frames gather
while an append is under way, and those of many handlers go together. They are stored before
anything else the attempt reports: before the result of the step that emitted them, before a
pause, and before the end. A handler that is far ahead of the store waits.

A refused frame raises once: at the next emit, at the end of the step, or at the end of the
attempt, which then fails. Other frames are stored regardless. Frames that were not stored while
the lease lasted are not refused, but missing: the attempt then reports no end.

A function that continues after a pause runs again from the top, and reaches what it has emitted
before. That is not emitted again: everything up to the call at which it paused is skipped, in
each of its branches. A new attempt starts over, in a stream of its own.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final

from msgspec import structs

from flowfabric.core.checks import check_optional_text, check_text
from flowfabric.core.handles import HandleKind
from flowfabric.core.policies import Duration, duration_ms
from flowfabric.core.streams import (
    APPEND_FRAMES_MAX,
    FRAME_BYTES_MAX,
    LIVE_TTL_MS_MAX,
    BestEffortLive,
    Durable,
    DurableSummary,
    Encoding,
    NewFrame,
    StreamMode,
    check_depth,
    read_patch,
)
from flowfabric.engine.engine import Engine
from flowfabric.engine.streams import FrameAppend
from flowfabric.errors import (
    ExecutionNotActive,
    FlowFabricError,
    InvalidInput,
    LeaseExpired,
    RetentionLimitExceeded,
    StaleOwnerCannotAppend,
    StreamClosed,
    Validation,
)
from flowfabric.json_values import encode_value
from flowfabric.logs import open_log
from flowfabric.outages import statements_within
from flowfabric.worker.asyncio_tasks import current_line, inside_step
from flowfabric.worker.branches import DurableCall
from flowfabric.worker.failures import why_lost
from flowfabric.worker.leases import HeldLease
from flowfabric.worker.reports import Reports

log = open_log(__name__)

BACKLOG_FRAMES_MAX: Final = 10_000
BACKLOG_BYTES_MAX: Final = 4 * 1024 * 1024
"""How much may wait to be stored before the handler has to wait, too."""
APPEND_BYTES_MAX: Final = 1024 * 1024
"""How much of one attempt goes to the store at once."""
TEXT_CHARS: Final = FRAME_BYTES_MAX // 4
"""Longer text is sent in several frames."""
OUR_KINDS: Final = ("summary", "superseded")
SEQ_BITS: Final = 32
"""How many bits of a frame's number count frames; the count starts again under each lease."""

DURABLE: Final = Durable()
NEVER_MS: Final = -1
NEW_MS: Final = 2**62

LOST_STREAM: Final = (LeaseExpired, StaleOwnerCannotAppend, StreamClosed)


def come_further(call: DurableCall) -> None:
    """Note that a call goes beyond what earlier runs have stored.

    What its line emits from here on is new. A sleep leaves no trace of its end: after one, it is
    new only if nothing has been emitted since it ended.
    """
    step, line = call.step, call.line
    since_ms = NEW_MS if step is None or step.wake_at_ms is None else step.wake_at_ms
    line.news_ms = max(line.news_ms, since_ms)
    # A branch with a name is part of the same task, which goes on after it.
    while line.parent is not None and line.parent.work is line.work:
        line = line.parent
        line.news_ms = max(line.news_ms, since_ms)


class Emitter:
    """The frames of one attempt."""

    def __init__(self, engine: Engine, reports: Reports, lease: HeldLease) -> None:
        self._engine = engine
        self._reports = reports
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[NewFrame] = deque()
        self._bytes = 0
        self._seq = lease.handle.lease_epoch << SEQ_BITS
        self._sending: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._refused: Exception | None = None
        self._cut_short = False
        self._closed = False
        self._spoke_ms = None if lease.handle.kind is HandleKind.RESUMED else NEVER_MS

    @property
    def is_new(self) -> bool:
        """Whether everything emitted is new: this attempt emitted nothing before a pause."""
        return self._spoke_ms == NEVER_MS

    async def repeats(self) -> bool:
        """Whether what is emitted here was already emitted before a pause of this attempt."""
        if inside_step.get() is not None:
            return False
        if self._spoke_ms is None:
            self._spoke_ms = await self._reports.call_engine(self._lease, self._when_spoke)
        line = current_line.get()
        return line is not None and line.news_ms <= self._spoke_ms

    async def _when_spoke(self) -> int:
        handle = self._lease.handle
        spoke_ms = await self._engine.last_frame_at(handle.execution_id, handle.attempt_index)
        return NEVER_MS if spoke_ms is None else spoke_ms

    def add(self, frames: Iterable[NewFrame]) -> None:
        """Hand frames over; call it on the worker's loop. Raises what was refused before."""
        if self._closed or self._lease.reported:
            raise asyncio.CancelledError("the handler has ended")
        self._tell()
        for frame in frames:
            self._waiting.append(frame)
            self._bytes += len(frame.payload)
        if self._sending is None and self._waiting:
            self._sending = self._loop.create_task(self._store_waiting())

    @property
    def is_full(self) -> bool:
        return len(self._waiting) > BACKLOG_FRAMES_MAX or self._bytes > BACKLOG_BYTES_MAX

    async def room(self) -> None:
        """Wait while too much waits to be stored."""
        while self._sending is not None and self.is_full:
            self._room.clear()
            await self._room.wait()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to store or report."""
        return self._sending is None and self._refused is None

    @property
    def is_missing_frames(self) -> bool:
        """Whether something was accepted from the handler and will not be stored."""
        return self._cut_short or (self._closed and bool(self._waiting))

    async def close(self) -> None:
        """Store what is queued, and accept nothing more: a task left behind by the handler that
        never stops emitting would keep the attempt from ending."""
        self._closed = True
        await self.flush()

    async def flush(self) -> None:
        """Wait until everything is stored; raises what was refused."""
        while (sending := self._sending) is not None:
            if self._lease.lost is not None:
                sending.cancel()
            await asyncio.wait([sending])
            if self._sending is sending:
                # It was cancelled before it began.
                self._sending = None
        self._tell()

    def _tell(self) -> None:
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    async def _store_waiting(self) -> None:
        try:
            while self._waiting:
                await self._store(tuple(self._take()))
                self._room.set()
        except asyncio.CancelledError:
            self._cut_short = True
            raise
        except LOST_STREAM as error:
            self._cut_short = True
            self._lease.lose(await self._why_lost(error))
            self._give_up()
        except Exception as error:
            # Not the fault of a frame: the others that wait would fail as well.
            self._refuse(error)
            self._give_up()
        finally:
            self._sending = None
            self._room.set()

    async def _why_lost(self, error: FlowFabricError) -> str:
        """Find out how the execution ended, which a closed stream does not say, for the handler."""
        try:
            with statements_within(self._reports.patience_s):
                await self._engine.renew(self._lease.handle)
        except ExecutionNotActive as ended:
            return why_lost(ended)
        except FlowFabricError:
            pass
        return why_lost(error)

    async def _store(self, frames: tuple[NewFrame, ...]) -> None:
        """Store all frames in order, except those that are refused."""
        append = FrameAppend(handle=self._lease.handle, frames=frames)
        try:
            await self._reports.call_engine(self._lease, partial(self._reports.frames.add, append))
        except Validation as error:
            # An append is stored as a whole or not at all.
            if len(frames) == 1:
                self._refuse(error)
                return
            middle = len(frames) // 2
            await self._store(frames[:middle])
            await self._store(frames[middle:])

    def _refuse(self, error: Exception) -> None:
        log.warning("emitted, and not stored: %s", error, extra=self._lease.log_fields)
        self._refused = self._refused or error

    def _give_up(self) -> None:
        self._waiting.clear()
        self._bytes = 0

    def _take(self) -> Iterator[NewFrame]:
        """The next frames, numbered: a repeat is known by its number."""
        size = 0
        for _ in range(min(len(self._waiting), APPEND_FRAMES_MAX)):
            frame = self._waiting.popleft()
            size += len(frame.payload)
            self._bytes -= len(frame.payload)
            self._seq += 1
            yield structs.replace(frame, seq=self._seq)
            if size >= APPEND_BYTES_MAX:
                return


def frames_of(
    content: object, kind: str, live: Duration | None, correlation_id: str | None
) -> list[NewFrame]:
    """What was emitted as frames: one, or several if it is a long text."""
    if kind in OUR_KINDS:
        raise InvalidInput("kind", "is reserved: readers act on it; use another kind", kind)
    mode = DURABLE if live is None else BestEffortLive(ttl_ms=_live_ms(live))
    if isinstance(content, str):
        parts = [content] if len(content) <= TEXT_CHARS else _parts(content)
        return [
            _frame(_encoded(part), kind or "text", Encoding.UTF8, mode, correlation_id)
            for part in parts
        ]
    if isinstance(content, bytes | bytearray | memoryview):
        return [_frame(bytes(content), kind or "bytes", Encoding.BASE64, mode, correlation_id)]
    data = encode_value("what is emitted", content)
    return [_frame(data, kind or "json", Encoding.JSON, mode, correlation_id)]


def _live_ms(live: Duration) -> int:
    ttl_ms = duration_ms("live", live)
    if ttl_ms > LIVE_TTL_MS_MAX:
        raise InvalidInput("live", "must be at most a day", live)
    return ttl_ms


def patch_of(patch: object) -> NewFrame:
    if not isinstance(patch, Mapping):
        raise InvalidInput("patch", "must be a dict: the members to change, None to delete", patch)
    data = encode_value("the patch", patch)
    check_depth("patch", read_patch(data))
    return _frame(data, "summary", Encoding.JSON, DurableSummary(), None)


def _frame(
    payload: bytes, kind: str, encoding: Encoding, mode: StreamMode, correlation_id: str | None
) -> NewFrame:
    if len(payload) > FRAME_BYTES_MAX:
        raise RetentionLimitExceeded(
            f"{len(payload)} bytes, at most {FRAME_BYTES_MAX} can be emitted at once; keep it"
            " elsewhere and emit where"
        )
    step = inside_step.get()
    return NewFrame(
        payload=payload,
        frame_type=check_text("kind", kind),
        encoding=encoding,
        correlation_id=check_optional_text("correlation_id", correlation_id),
        step_key=None if step is None else step.key,
        mode=mode,
    )


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("what is emitted", f"must be valid Unicode: {error}") from None


def _parts(text: str) -> list[str]:
    return [text[start : start + TEXT_CHARS] for start in range(0, len(text), TEXT_CHARS)]
