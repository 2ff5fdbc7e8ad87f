"""`events`: the log of what happened."""

from typing import Final

import click
from rich.text import Text

from flowfabric.cli import documents, screen
from flowfabric.cli.target import Target, limit_option, options, with_engine
from flowfabric.core.events import EventCategory, StoredEvent
from flowfabric.core.limits import PAGE_MAX
from flowfabric.engine.engine import Engine
from flowfabric.engine.unit import COMPLETION_TOPIC, LOST_TOPIC
from flowfabric.errors import HistoryChanged

LOOK_AGAIN_S: Final = 0.5


@click.command("events")
@click.option("--after", metavar="ID", help="Begin after this event id, or cursor.")
@limit_option
@click.option("--category", type=click.Choice([each.value for each in EventCategory]))
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens from now on.")
@options
@with_engine
async def events(
    engine: Engine,
    target: Target,
    after: str | None,
    limit: int,
    category: str | None,
    follow: bool,
) -> None:
    """Print the latest events, oldest first. With --json: one per line.

    The latest are taken before --category is applied, so fewer may be printed.
    """
    cursor = after or str(max(0, await engine.last_event_id() - limit))
    left = limit
    with engine.store.hints([COMPLETION_TOPIC, LOST_TOPIC]) as hints:
        while left > 0 or follow:
            size = PAGE_MAX if follow else min(PAGE_MAX, left)
            try:
                page = await engine.read_events(after=cursor, limit=size, category=category)
            except HistoryChanged as error:
                if not follow:
                    raise
                screen.err().print(Text(str(error), style="yellow"))
                cursor = error.resume_after
                continue
            for event in page.events:
                _print(event, target)
            left -= len(page.events)
            if page.cursor == cursor:
                if not follow:
                    return
                await hints.wait(LOOK_AGAIN_S)
            cursor = page.cursor


def _print(event: StoredEvent, target: Target) -> None:
    if target.json:
        documents.emit(event)
        return
    worker = f"  {event.worker_instance_id}" if event.worker_instance_id else ""
    reason = f"  {screen.one_line(event.reason or event.details)}"
    line = Text.assemble(
        (f"{event.event_id:>8}  ", "dim"),
        (f"{screen.timestamp(event.occurred_at_ms)}  ", "dim"),
        (f"{event.category:<10} ", "cyan"),
        f"{event.event_type:<10} ",
        screen.short_id(event.execution_id),
        worker,
        (reason.rstrip(), "dim"),
    )
    screen.out().print(line, no_wrap=True, overflow="ellipsis")
