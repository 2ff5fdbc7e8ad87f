"""`tail` and `events`: follow what a run says, and what happens to runs."""

import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import click
from msgspec import structs
from rich.text import Text

from flowfabric.cli import options, screen
from flowfabric.core.budget_events import budget_of
from flowfabric.core.checks import visible, visible_lines
from flowfabric.core.diagnosis import Explanation
from flowfabric.core.events import EventCategory, StoredEvent
from flowfabric.core.ids import ExecutionId
from flowfabric.core.states import PublicState
from flowfabric.core.streams import Encoding
from flowfabric.engine.engine import Engine
from flowfabric.engine.events import Subscription, Told
from flowfabric.errors import HistoryChanged
from flowfabric.run import Obstacles
from flowfabric.streams import Follower, Frame, position_of

# `tail`: what a run says, as it says it -------------------------------------

BINARY: Final = "[{} bytes]"


class LiveDatabase:
    """A database in which others make things happen, unlike in a test."""

    happens = True

    def __init__(self, engine: Engine, printer: "Printer") -> None:
        self._obstacles = Obstacles(engine, printer.tell_obstacle)

    async def is_idle(self) -> bool:
        return False

    def waiting(self, execution_id: ExecutionId) -> AbstractContextManager[None]:
        return self._obstacles.waiting(execution_id)


@click.command("tail", short_help="See what an execution says, as it says it.")
@click.argument("execution_id", metavar="ID")
@click.option(
    "--after",
    default="start",
    metavar="CURSOR",
    help="Begin after this cursor, at `start` or `now`.  [default: start]",
)
@click.option("--all", "everything", is_flag=True, help="Also show what no longer counts.")
@click.option(
    "--follow/--no-follow", default=True, help="Go on until the execution ends.  [default: follow]"
)
@options.on_engine("any")
async def tail(
    engine: Engine,
    target: options.Target,
    execution_id: str,
    after: str,
    everything: bool,
    follow: bool,
) -> int:
    """Print what the execution ID emits: text as it is, all else a line each.

    Ends when the execution has ended, with status 1 if it did not complete.
    With --json: a frame per line, with its cursor.
    """
    found = await target.find(engine, execution_id)
    printer = Printer(target)
    live = LiveDatabase(engine, printer)

    async def here() -> tuple[Engine, LiveDatabase]:
        return engine, live

    follower = Follower(here, found, after=after, superseded=everything, live=True)
    if not follow:
        printer.print_all(await follower.now())
        printer.end()
        return options.OK
    while (page := await follower.next_page()) is not None:
        printer.print_all(page)
    printer.end()
    return await _tell_end(engine, found)


async def _tell_end(engine: Engine, execution_id: ExecutionId) -> int:
    """Print how it ended, unless it completed: then the output is only what was emitted."""
    ended = (await engine.find_outcomes([execution_id])).ended.get(execution_id)
    if ended is None or ended.public_state is PublicState.COMPLETED:
        return options.OK
    message = f"{execution_id} is {ended.public_state}: {ended.reason}"
    screen.err().print(Text(visible(message), style="red"))
    return options.FAILED


class Printer:
    """Writes frames to standard output; take-overs are reported on standard error."""

    def __init__(self, target: options.Target) -> None:
        self._target = target
        self._in_line = False

    def print_all(self, frames: list[Frame]) -> None:
        for frame in frames:
            self._print(frame)
        sys.stdout.flush()

    def end(self) -> None:
        """End the line, so that whatever comes next starts a new one."""
        if self._in_line:
            sys.stdout.write("\n")
        sys.stdout.flush()

    def tell_obstacle(self, called: str, why: Explanation) -> None:
        """On a line of its own, whatever was printed so far."""
        self._leave_line()
        self._target.tell_obstacle(called, why)

    def _leave_line(self) -> None:
        self.end()
        self._in_line = False

    def _print(self, frame: Frame) -> None:
        if self._target.json:
            screen.emit(_document(frame))
        elif frame.is_turn:
            self._leave_line()
            message = f"attempt {frame.attempt + 1} starts over: of what came before, only what"
            message += " finished steps said still counts"
            screen.err().print(Text(message, style="yellow"))
        elif frame.encoding is Encoding.UTF8:
            shown = "\n".join(visible_lines(frame.text))
            sys.stdout.write(shown)
            self._in_line = not shown.endswith("\n") if shown else self._in_line
        else:
            self._leave_line()
            binary = frame.encoding is Encoding.BASE64
            line = BINARY.format(len(frame.data)) if binary else frame.data.decode(errors="replace")
            sys.stdout.write(f"{visible(line)}\n")


def _document(frame: Frame) -> dict[str, object]:
    said: object = frame.text if frame.encoding is Encoding.UTF8 else frame.data
    document: dict[str, object] = {
        "cursor": frame.cursor,
        "attempt": frame.attempt,
        "at_ms": frame.at_ms,
        "kind": frame.kind,
        "content": said if frame.data else None,
        "step": frame.step,
        "superseded": frame.superseded,
    }
    if frame.take_over is not None:
        document["kept_steps"] = dict(sorted(frame.take_over.kept_steps.items()))
    return document


# `events`: the log of what happened -----------------------------------------

BATCH: Final = 100
ReadLog = Callable[[Subscription[Told]], Awaitable[list[Told]]]


@click.command("events")
@click.option(
    "--after", metavar="CURSOR", help="Begin after this cursor or event id, at `start` or `now`."
)
@options.limit_option
@click.option(
    "--category",
    type=click.Choice([each.value for each in EventCategory]),
    help="Only events of this category.",
)
@click.option("--id", "execution_id", metavar="ID", help="Only events of this execution.")
@click.option("--kind", help="Only events of this task, in any version or in one.")
@click.option("--tag", metavar="KEY=VALUE", help="Only events of executions with this tag.")
@click.option("--follow", "-f", is_flag=True, help="Keep printing events as they happen.")
@options.on_engine("any")
async def events(
    engine: Engine,
    target: options.Target,
    after: str | None,
    limit: int,
    category: str | None,
    execution_id: str | None,
    kind: str | None,
    tag: str | None,
    follow: bool,
) -> None:
    """Print the latest events, oldest first. With --json: one per line, with its `cursor`."""
    scope = target.scope()
    found = None if execution_id is None else await target.find(engine, execution_id)
    label = None if tag is None else options.pair(tag)
    # The latest events of an execution, a kind or a tag are found only by reading all events.
    looks = after is None and (found or kind or label) is not None
    start = position_of("start" if after is None else after)
    if after is None and not looks:
        start = str(await engine.before_latest_events(limit, namespace=scope, category=category))

    async def subscribe(after: str) -> Subscription[Told]:
        return await engine.subscribe_events(
            after=after,
            namespace=scope,
            category=category,
            execution_id=found,
            kind=kind,
            tag=label,
        )

    subscription = await subscribe(start)
    read: ReadLog = partial(_latest, limit=limit, looks=looks)
    while True:
        try:
            await _print(engine, target, await read(subscription))
        except HistoryChanged as error:
            if not follow:
                raise
            screen.err().print(Text(str(error), style="yellow"))
            subscription = await subscribe(error.resume_after)
        if not follow:
            return
        read = _next


async def _latest(subscription: Subscription[Told], limit: int, *, looks: bool) -> list[Told]:
    """The first events up to the limit; with `looks`, the last of all events."""
    latest: deque[Told] = deque(maxlen=limit)
    while looks or len(latest) < limit:
        event = await subscription.next_if_any()
        if event is None:
            break
        latest.append(event)
    return list(latest)


async def _next(subscription: Subscription[Told]) -> list[Told]:
    """Wait for the next event, and take what has arrived with it."""
    batch = [await anext(subscription)]
    while len(batch) < BATCH and (event := await subscription.next_if_any()) is not None:
        batch.append(event)
    return batch


async def _print(engine: Engine, target: options.Target, events: Sequence[Told]) -> None:
    if target.json:
        for each in events:
            screen.emit(structs.asdict(each.event) | {"cursor": each.cursor})
        return
    own_ids = await engine.own_ids([each.event.execution_id for each in events])
    for each in events:
        _print_line(each.event, own_ids.get(each.event.execution_id))


def _print_line(event: StoredEvent, own_id: str | None) -> None:
    worker = f"  {event.worker_instance_id}" if event.worker_instance_id else ""
    reason = f"  {screen.one_line(event.reason or event.details)}"
    line = Text.assemble(
        (f"{event.event_id:>8}  ", "dim"),
        (f"{screen.timestamp(event.occurred_at_ms)}  ", "dim"),
        (f"{event.category:<10} ", "cyan"),
        f"{event.event_type:<10} ",
        screen.one_line(budget_of(event)) or own_id or screen.short_id(event.execution_id),
        worker,
        (reason.rstrip(), "dim"),
    )
    screen.out().print(line, no_wrap=True, overflow="ellipsis")
