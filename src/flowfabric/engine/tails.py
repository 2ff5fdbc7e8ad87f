"""Reading streams, and waiting for what is appended to them.

A waiting tail holds no connection. It listens for hints about its stream; the ends of attempts,
and hints that were lost, are noticed for all waiting tails of a process together, by one
statement. Tails that stand at the same place of one stream share their reads: a stream with a
thousand tails is read as if it had one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

from msgspec import Struct, structs

from flowfabric.batching import SharedReads
from flowfabric.core import events, streams, tails
from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.checks import check_bool, check_int
from flowfabric.core.ids import ExecutionId
from flowfabric.core.leases import check_attempt_index
from flowfabric.core.records import view_of
from flowfabric.engine import shell, topics
from flowfabric.engine.shell import Shell
from flowfabric.engine.streams import stream_topic
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound, ResourceExhausted
from flowfabric.logs import open_log
from flowfabric.outages import AFTER_ERROR_S, level_of, statements_within
from flowfabric.store.base import HintListener, Key, Reader, Store

log = open_log(__name__)

T = TypeVar("T")

LOOK_AGAIN_S: Final = 5.0
LOOK_AGAIN_MAX_S: Final = 10.0
"""How often waiting tails look without a hint, all of them at once: for hints that are lost."""
LOOK_GAP_S: Final = 0.01
LOOK_TIMEOUT_S: Final = 5.0
TAILS_MAX: Final = 10_000
"""Tails that may wait in one process."""
ATTEMPTS_PER_PAGE: Final = 100
"""How many silent attempts one read of a whole execution may skip."""


class StreamKey(Struct, frozen=True):
    execution_id: ExecutionId
    attempt_index: int

    @property
    def row(self) -> Key:
        return (*shell.execution_key(self.execution_id), self.attempt_index)


class Slice(Struct, frozen=True, kw_only=True):
    """Which frames of which stream."""

    key: StreamKey
    from_id: int
    to_id: int = tails.END.at_most()
    count_limit: int
    visibility: streams.Visibility


class TailPlace(Struct, frozen=True, kw_only=True):
    """Where a reader of a whole execution stands, and what it wants to see."""

    execution_id: ExecutionId
    cursor: tails.ExecutionCursor
    count_limit: int
    visibility: streams.Visibility
    superseded: bool


class Standing(tails.StreamFacts, frozen=True, kw_only=True):
    """The facts of a stream at some time."""

    position: int
    """The place of its key in the request."""
    now_ms: int


class FinishedStep(Struct, frozen=True, kw_only=True):
    step_key: str
    attempt_index: int


class Tails(shell.Group):
    def __init__(self, shell: Shell) -> None:
        super().__init__(shell)
        self._slices = SharedReads(self._read_slice)
        self._places = SharedReads(self._read_on)
        self._watch = StreamWatch(shell.store)

    async def read_stream(
        self,
        execution_id: str,
        attempt_index: int,
        *,
        from_cursor: str = "start",
        to_cursor: str = "end",
        count_limit: int = 100,
        visibility: str = streams.Visibility.ALL,
        only: events.ScannerFilter = events.EVERYBODY,
    ) -> tails.StreamFrames:
        """Frames from one cursor to another, both included, oldest first.

        A stream nothing was written to is empty. For the next page, pass its
        `next_cursor` to `tail_stream`. Executions that `only` excludes are not found.
        """
        asked = Slice(
            key=self._check_key(execution_id, attempt_index),
            from_id=tails.read_position("from_cursor", from_cursor).at_least(),
            to_id=tails.read_position("to_cursor", to_cursor).at_most(),
            count_limit=tails.check_count(count_limit),
            visibility=tails.check_visibility(visibility),
        )
        await self._check_whose(asked.key.execution_id, only)
        return await self._read_slice(asked)

    async def tail_stream(
        self,
        execution_id: str,
        attempt_index: int,
        *,
        after: str = "0-0",
        block_ms: int = 0,
        count_limit: int = 50,
        visibility: str = streams.Visibility.ALL,
        only: events.ScannerFilter = events.EVERYBODY,
    ) -> tails.StreamFrames:
        """Frames after one; if there are none, wait up to `block_ms` for the next.

        Returns at once when the stream is closed. A page that is closed and has no more is
        the end of the stream.
        """
        asked = Slice(
            key=self._check_key(execution_id, attempt_index),
            from_id=tails.read_after(after) + 1,
            count_limit=tails.check_count(count_limit),
            visibility=tails.check_visibility(visibility),
        )
        check_int("block_ms", block_ms, 0, streams.BLOCK_MS_MAX)
        await self._check_whose(asked.key.execution_id, only)
        return await self.wait_for(
            asked.key.execution_id,
            asked.key.attempt_index,
            block_ms / 1_000,
            lambda: self._slices.share(asked) if block_ms else self._read_slice(asked),
            lambda page: bool(page.frames) or page.closed_at_ms is not None,
        )

    async def wait_for(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        block_s: float,
        read: Callable[[], Awaitable[T]],
        is_enough: Callable[[T], bool],
    ) -> T:
        """Read now and after every hint, until the result is enough or the time is up."""
        if block_s <= 0:
            return await read()
        until_s = time.monotonic() + block_s
        key = StreamKey(execution_id, attempt_index)
        # Listening before reading: no hint is lost in between.
        with (
            self.store.hints([stream_topic(execution_id)]) as hints,
            self._watch.waiting(key, hints),
        ):
            while True:
                found = await read()
                left_s = until_s - time.monotonic()
                if is_enough(found) or left_s <= 0 or self._watch.closed:
                    return found
                await hints.wait(left_s)

    async def tail_execution(
        self,
        execution_id: str,
        *,
        after: str = "start",
        block_ms: int = 0,
        count_limit: int = 50,
        visibility: str = streams.Visibility.ALL,
        superseded: bool = False,
        only: events.ScannerFilter = events.EVERYBODY,
    ) -> tails.ExecutionFrames:
        """Frames of all attempts, one after another, and where one took over from another.

        `after` is `start`, `end` for what comes from now on, or the cursor of a page. Frames
        that no longer count are left out unless `superseded` asks for them.
        """
        asked = self.shell.check_execution_id(execution_id)
        cursor = tails.read_execution_cursor(after)
        check_int("block_ms", block_ms, 0, streams.BLOCK_MS_MAX)
        check_bool("superseded", superseded)
        count = tails.check_count(count_limit)
        seen = tails.check_visibility(visibility)
        await self._check_whose(asked, only)
        if cursor is None:
            cursor = await self.store.read(lambda reader: last_cursor(reader, asked))
        start = TailPlace(
            execution_id=asked,
            cursor=cursor,
            count_limit=count,
            visibility=seen,
            superseded=superseded,
        )
        return await self.wait_for(
            asked,
            cursor.attempt_index,
            block_ms / 1_000,
            lambda: self._places.share(start) if block_ms else self._read_on(start),
            lambda page: bool(page.frames) or page.is_end or page.take_over is not None,
        )

    async def last_frame_at(self, execution_id: str, attempt_index: int) -> int | None:
        """When an attempt last appended to its stream; None if it never has."""
        key = self._check_key(execution_id, attempt_index).row
        stream = await self.get_one(streams.Stream, key)
        return None if stream is None else stream.last_frame_at_ms

    async def read_summary(
        self, execution_id: str, attempt_index: int
    ) -> tails.SummaryDocument | None:
        """The summary of an attempt; None if it has none."""
        key = self._check_key(execution_id, attempt_index).row

        async def body(reader: Reader) -> tails.SummaryDocument | None:
            stream = await reader.get_one(streams.Stream, key)
            if stream is None or stream.forgotten:
                return None
            found = await reader.get_one(streams.StreamSummary, key)
            return None if found is None else view_of(tails.SummaryDocument, found)

        summary = await self.store.read(body)
        if summary is None:
            return None
        values = self.shell.values
        document = await values.through(summary.document, values.unpack)
        return structs.replace(summary, document=document)

    @property
    def waiting_tails(self) -> int:
        """How many readers of this process wait for frames."""
        return self._watch.number

    async def close_tails(self) -> None:
        await self._watch.close()

    async def _read_slice(self, asked: Slice) -> tails.StreamFrames:
        page = await self.store.read(partial(read_slice, asked=asked))
        return structs.replace(page, frames=await self._shown(page.frames))

    async def _read_on(self, place: TailPlace) -> tails.ExecutionFrames:
        page = await self.store.read(partial(read_on, place=place))
        return structs.replace(page, frames=await self._shown(page.frames))

    async def _shown(self, frames: Sequence[tails.StreamFrame]) -> tuple[tails.StreamFrame, ...]:
        unpack = self.shell.values.unpack

        def plain(frame: tails.StreamFrame) -> tails.StreamFrame:
            if not frame.coded:
                return frame
            return structs.replace(frame, payload=unpack(frame.payload), coded=False)

        return tuple(await self.shell.values.through_all(frames, plain))

    async def _check_whose(self, execution_id: ExecutionId, only: object) -> None:
        """Raise `NotFound` for an execution that `only` excludes."""
        whose = events.check_scanner_filter(only)
        if whose == events.EVERYBODY:
            return
        columns = shell.id_columns([execution_id])
        if not await self.select_as(
            ExecutionId, "executions_like", execution_kind=None, **columns, **whose.parameters
        ):
            raise NotFound("execution", execution_id)

    def _check_key(self, execution_id: object, attempt_index: object) -> StreamKey:
        parsed = self.shell.check_execution_id(execution_id)
        if attempt_index is None:
            raise InvalidInput("attempt_index", "must be an integer", attempt_index)
        check_attempt_index(attempt_index)
        assert isinstance(attempt_index, int)
        return StreamKey(parsed, attempt_index)


# Reading ------------------------------------------------------------------------------


async def standing_of(reader: Reader, keys: Sequence[StreamKey]) -> dict[StreamKey, Standing]:
    """The state of streams, except those without an execution."""
    found = await reader.select_as(
        Standing,
        "stream_facts",
        **shell.id_columns([each.execution_id for each in keys]),
        attempt_indexes=[each.attempt_index for each in keys],
    )
    return {keys[each.position]: each for each in found}


async def read_slice(reader: Reader, asked: Slice) -> tails.StreamFrames:
    """Read the stream's state first: a stream that is closed then gets no more frames."""
    standing = (await standing_of(reader, [asked.key])).get(asked.key)
    if standing is None:
        return tails.StreamFrames(frames=(), next_cursor=streams.show_id(max(asked.from_id - 1, 0)))
    return await _frames(reader, asked, standing)


async def _frames(reader: Reader, asked: Slice, standing: Standing) -> tails.StreamFrames:
    found: Sequence[streams.FrameRecord] = ()
    if standing.last_frame_id is not None:
        found = await reader.select_records(
            streams.FrameRecord,
            "read_frames",
            **shell.columns_of(asked.key.execution_id),
            attempt_index=asked.key.attempt_index,
            from_id=asked.from_id,
            to_id=asked.to_id,
            hidden_through=standing.hidden_through(standing.now_ms),
            best_effort=asked.visibility is streams.Visibility.ALL,
            limit=asked.count_limit,
        )
    closed = tails.closing(standing, asked.key.attempt_index)
    last_id = found[-1].frame_id if found else max(asked.from_id - 1, 0)
    return tails.StreamFrames(
        frames=tuple(tails.shown(each) for each in found),
        next_cursor=streams.show_id(last_id),
        has_more=len(found) == asked.count_limit,
        closed_at_ms=None if closed is None else closed.at_ms,
        closed_reason=None if closed is None else closed.reason,
    )


async def last_cursor(reader: Reader, execution_id: ExecutionId) -> tails.ExecutionCursor:
    """The cursor after everything emitted so far."""
    first = StreamKey(execution_id, 0)
    standing = (await standing_of(reader, [first])).get(first)
    if standing is None:
        raise NotFound("execution", execution_id)
    latest = StreamKey(execution_id, max(standing.latest_attempt, 0))
    now = (await standing_of(reader, [latest])).get(latest, standing)
    return tails.ExecutionCursor(latest.attempt_index, now.last_frame_id or 0)


async def read_on(reader: Reader, place: TailPlace) -> tails.ExecutionFrames:
    """The next page of an execution: of one attempt, the next that has anything to say."""
    cursor = place.cursor
    take_over: tails.TakeOver | None = None
    finished: Mapping[str, int] | None = None
    for _ in range(ATTEMPTS_PER_PAGE):
        key = StreamKey(place.execution_id, cursor.attempt_index)
        standing = (await standing_of(reader, [key])).get(key)
        if standing is None:
            raise NotFound("execution", place.execution_id)
        latest = standing.latest_attempt
        earlier = key.attempt_index < latest
        if finished is None and (earlier or take_over is not None):
            finished = await _finished_steps(reader, place.execution_id)
        asked = Slice(
            key=key,
            from_id=cursor.frame_id + 1,
            count_limit=place.count_limit,
            visibility=place.visibility,
        )
        page = await _frames(reader, asked, standing)
        now = tails.TakeOver(attempt_index=latest, kept_steps=finished or {})
        frames = tuple(
            structs.replace(each, superseded=now.supersedes(each)) for each in page.frames
        )
        wanted = tuple(each for each in frames if place.superseded or not each.superseded)
        cursor = structs.replace(cursor, frame_id=tails.read_after(page.next_cursor))
        over = standing.has_ended and not earlier and not page.has_more
        if wanted or over or not (earlier or page.has_more):
            return tails.ExecutionFrames(
                frames=wanted, cursor=str(cursor), take_over=take_over, is_end=over
            )
        if not page.has_more:
            cursor = tails.ExecutionCursor(key.attempt_index + 1)
            take_over = structs.replace(now, attempt_index=cursor.attempt_index)
    return tails.ExecutionFrames(frames=(), cursor=str(cursor), take_over=take_over)


async def _finished_steps(reader: Reader, execution_id: ExecutionId) -> dict[str, int]:
    found = await reader.select_as(FinishedStep, "finished_steps", **shell.columns_of(execution_id))
    return {each.step_key: each.attempt_index for each in found}


# Waiting ------------------------------------------------------------------------------


class StreamWatch:
    """Watches the streams of all waiting tails of a process at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[StreamKey, set[HintListener]] = {}
        self.number = 0
        self._seen: dict[StreamKey, object] = {}
        self._task: asyncio.Task[None] | None = None
        self.closed = False

    @contextmanager
    def waiting(self, key: StreamKey, hints: HintListener) -> Iterator[None]:
        """Wake `hints` when the stream or its execution changes."""
        if self.number >= TAILS_MAX:
            raise ResourceExhausted("stream_tails", TAILS_MAX)
        self.number += 1
        self._waiting.setdefault(key, set()).add(hints)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="flowfabric-tails")
        try:
            yield
        finally:
            self.number -= 1
            self._waiting[key].discard(hints)
            if not self._waiting[key]:
                del self._waiting[key]

    async def close(self) -> None:
        """Make waiting tails return what they have, as on a timeout."""
        self.closed = True
        for each in self._waiting.values():
            for hints in each:
                hints.wake()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        with self._store.hints(
            [topics.COMPLETION_TOPIC, topics.LOST_TOPIC, topics.ATTEMPT_TOPIC]
        ) as hints:
            while self._waiting:
                await hints.look_out(LOOK_AGAIN_S, LOOK_AGAIN_MAX_S)
                try:
                    with statements_within(LOOK_TIMEOUT_S):
                        if await self._look():
                            hints.found_work()
                except FlowFabricError as error:
                    log.log(level_of(error), "could not look after tails: %s", error)
                    await asyncio.sleep(AFTER_ERROR_S)
                await asyncio.sleep(LOOK_GAP_S * (1 + self.number / BATCH_MAX))

    async def _look(self) -> bool:
        asked, found_any = list(self._waiting), False
        # A tail that waits again has read since: it need not be woken for what was seen.
        self._seen = {key: self._seen[key] for key in asked if key in self._seen}
        for start in range(0, len(asked), BATCH_MAX):
            some = asked[start : start + BATCH_MAX]
            found = await self._store.read(partial(standing_of, keys=some))
            for key in some:
                found_any |= self._note(key, found.get(key))
        return found_any

    def _note(self, key: StreamKey, standing: Standing | None) -> bool:
        """Wake the readers concerned; return whether the stream has changed."""
        now = standing and (
            standing.last_frame_id,
            standing.latest_attempt,
            standing.has_ended,
            tails.closing(standing, key.attempt_index),
        )
        # What is seen for the first time may have happened after its tail has read.
        before = self._seen.get(key, self)
        if key not in self._waiting or before == now:
            return False
        self._seen[key] = now
        for hints in self._waiting[key]:
            hints.wake()
        return before is not self
