"""Following what the attempts of a run emit, and what happens to the executions of an app."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from flowfabric.core.events import read_cursor
from flowfabric.core.ids import ExecutionId
from flowfabric.core.streams import BLOCK_MS_MAX, Encoding, ModeName, Visibility
from flowfabric.core.tails import ExecutionFrames, StreamFrame, TakeOver, read_execution_cursor
from flowfabric.engine.engine import Engine
from flowfabric.engine.events import FROM_NOW, Subscription, Told
from flowfabric.engine.values import NO_CODEC
from flowfabric.errors import CodecFailed, InvalidInput
from flowfabric.logs import open_log
from flowfabric.outages import AFTER_ERROR_S, ASK_AGAIN, level_of
from flowfabric.task import Task

log = open_log(__name__)

PAGE: Final = 200
SUPERSEDED: Final = "superseded"


class Frame(Struct, frozen=True, kw_only=True):
    """Something a run emitted. Print its `text`, or decode its `json()`."""

    cursor: str
    """`run.stream(after=…)` continues after this frame, at any time and in any process."""
    kind: str
    """`text`, `json` or `bytes`, unless the handler gave it a label; `superseded` for a turn."""
    attempt: int
    at_ms: int
    data: bytes = b""
    encoding: Encoding = Encoding.UTF8
    step: str | None = None
    """The step in which it was emitted."""
    live: bool = False
    """Only for live viewers; it is deleted soon."""
    superseded: bool = False
    """Whether a later attempt has replaced it."""
    is_summary: bool = False
    """A change of the run's summary: `json()` is the patch."""
    take_over: TakeOver | None = None

    @property
    def text(self) -> str:
        """The frame as text; empty for turns and summaries, so it is safe to print every frame."""
        return "" if self.is_summary else self.data.decode(errors="replace")

    def json(self) -> object:
        """The frame's data decoded; for a typed value use `msgspec.json.decode` on `data`."""
        try:
            value: object = msgspec.json.decode(self.data)
        except msgspec.DecodeError as error:
            raise InvalidInput("frame", f"{self.cursor}, a {self.kind!r}: {error}") from None
        return value

    @property
    def is_turn(self) -> bool:
        """Whether a later attempt takes over here; `drops` tells which frames it replaces."""
        return self.take_over is not None

    def drops(self, frame: "Frame") -> bool:
        """Whether a frame that came before this turn no longer counts."""
        return self.take_over is not None and self.take_over.drops(frame.attempt, frame.step)


class Idle(Protocol):
    """Knows whether anything happens without a test driving it, and tells what a wait is for."""

    happens: bool

    async def is_idle(self) -> bool: ...
    def waiting(self, execution_id: ExecutionId) -> AbstractContextManager[None]: ...


class Follower:
    """Reads page after page. It holds one page at a time, so a slow reader delays no other."""

    def __init__(
        self,
        here: Callable[[], Awaitable[tuple[Engine, Idle]]],
        execution_id: ExecutionId,
        *,
        after: str,
        superseded: bool,
        live: bool,
    ) -> None:
        self._here = here
        self._execution_id = execution_id
        self._after = "end" if after == "now" else after
        self._superseded = superseded
        self._visibility = Visibility.ALL if live else Visibility.EXCLUDE_BEST_EFFORT
        self._ended = False
        self._passed_on: set[tuple[int, str | None]] = set()
        """Attempts and steps of the frames passed on, to see whether a later attempt drops any."""
        try:
            started = read_execution_cursor(self._after)
        except InvalidInput:
            problem = "must be 'start', 'now' or the cursor of a frame"
            raise InvalidInput("after", problem, after) from None
        if started is not None and started.frame_id:
            # A reader that resumes after a frame may have seen anything before it.
            self._passed_on.add((started.attempt_index, None))

    async def now(self) -> list[Frame]:
        """Everything there is, without waiting."""
        frames: list[Frame] = []
        while True:
            page = await self._page(0)
            frames += self._frames(page)
            if page.is_end or not (page.frames or page.take_over):
                return frames

    async def next_page(self) -> list[Frame] | None:
        """What comes next, at least one frame; None when the run has ended."""
        _, idle = await self._here()
        with idle.waiting(self._execution_id):
            return await self._next_page()

    async def _next_page(self) -> list[Frame] | None:
        while not self._ended:
            _, idle = await self._here()
            try:
                page = await self._page(BLOCK_MS_MAX if idle.happens else 0)
            except ASK_AGAIN as error:
                log.log(level_of(error), "could not continue reading; trying again: %s", error)
                await asyncio.sleep(AFTER_ERROR_S)
                continue
            self._ended = page.is_end
            if frames := self._frames(page):
                return frames
            if page.take_over is None and not self._ended and await idle.is_idle():
                return None
        return None

    async def _page(self, block_ms: int) -> ExecutionFrames:
        engine, _ = await self._here()
        page = await engine.tail_execution(
            self._execution_id,
            after=self._after,
            block_ms=block_ms,
            count_limit=PAGE,
            visibility=self._visibility,
            superseded=self._superseded,
        )
        if any(frame.coded for frame in page.frames):
            raise without_codec("what the run has emitted")
        self._after = page.cursor
        return page

    def _frames(self, page: ExecutionFrames) -> list[Frame]:
        frames = [_frame(each) for each in page.frames]
        turn = page.take_over
        if turn is not None and any(turn.drops(*each) for each in self._passed_on):
            marker = Frame(
                cursor=page.cursor if not frames else f"{turn.attempt_index}:0-0",
                kind=SUPERSEDED,
                attempt=turn.attempt_index,
                at_ms=frames[0].at_ms if frames else 0,
                take_over=turn,
            )
            frames.insert(0, marker)
            self._passed_on.clear()
        self._passed_on.update(
            (frame.attempt, frame.step) for frame in frames if not frame.superseded
        )
        return frames


def _frame(frame: StreamFrame) -> Frame:
    return Frame(
        cursor=f"{frame.attempt_index}:{frame.id}",
        kind=frame.frame_type,
        attempt=frame.attempt_index,
        at_ms=frame.ts,
        data=frame.payload,
        encoding=frame.encoding,
        step=frame.step_key,
        live=frame.mode is ModeName.BEST_EFFORT,
        is_summary=frame.mode is ModeName.SUMMARY,
        superseded=frame.superseded,
    )


def without_codec(what: str) -> CodecFailed:
    return CodecFailed(NO_CODEC, decoding=True, what=what)


# What happens to the executions of an app

START: Final = "start"
NOW: Final = "now"


async def subscribe(
    engine: Engine,
    namespace: str,
    *,
    after: str = NOW,
    execution_id: str | None = None,
    task: Task[..., object] | str | None = None,
    category: str | None = None,
    tag: tuple[str, str] | None = None,
) -> Subscription[Told]:
    """What happens to the app's executions, as it happens; see `App.events`."""
    if execution_id is not None:
        execution_id = engine.named_execution_id(execution_id, namespace)
    return await engine.subscribe_events(
        after=position_of(after),
        namespace=namespace,
        execution_id=execution_id,
        kind=_kind(task),
        category=category,
        tag=tag,
    )


async def next_event(idle: Idle, subscription: Subscription[Told]) -> Told | None:
    """Wait for the next event; None if there is none in a test, where nothing happens by itself."""
    return await (anext(subscription) if idle.happens else subscription.next_if_any())


def position_of(after: str) -> str:
    """The position that `now`, `start` or a cursor stands for."""
    if after in (NOW, START):
        return FROM_NOW if after == NOW else "0"
    try:
        read_cursor(after)
    except InvalidInput:
        problem = f"must be {NOW!r}, {START!r}, or the cursor of an event"
        raise InvalidInput("after", problem, after) from None
    return after


def _kind(task: object) -> str | None:
    if task is None or isinstance(task, str):
        return task
    if isinstance(task, Task):
        return task.name
    raise InvalidInput("task", "must be a task, or the name of one", task)
