"""`events`: the log of what happened."""

from collections.abc import Sequence
from typing import Final

import click
from rich.text import Text

from flowfabric.cli import documents, screen
from flowfabric.cli.target import Target, limit_option, namespace_option, options, with_engine
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
@namespace_option
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
    """Print the latest events, oldest first. With --json: one per line."""
    scope = target.scope()
    cursor = after or str(
        await engine.before_latest_events(limit, namespace=scope, category=category)
    )
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
            shown = [each for each in page.events if scope in (None, each.namespace)]
            await _print(engine, target, shown)
            left -= len(shown)
            if page.cursor == cursor:
                if not follow:
                    return
                await hints.wait(LOOK_AGAIN_S)
            cursor = page.cursor


async def _print(engine: Engine, target: Target, events: Sequence[StoredEvent]) -> None:
    if target.json:
        for event in events:
            documents.emit(event)
        return
    own_ids = await engine.own_ids([each.execution_id for each in events])
    for event in events:
        _print_line(event, own_ids.get(event.execution_id))


def _print_line(event: StoredEvent, own_id: str | None) -> None:
    worker = f"  {event.worker_instance_id}" if event.worker_instance_id else ""
    reason = f"  {screen.one_line(event.reason or event.details)}"
    line = Text.assemble(
        (f"{event.event_id:>8}  ", "dim"),
        (f"{screen.timestamp(event.occurred_at_ms)}  ", "dim"),
        (f"{event.category:<10} ", "cyan"),
        f"{event.event_type:<10} ",
        own_id or screen.short_id(event.execution_id),
        worker,
        (reason.rstrip(), "dim"),
    )
    screen.out().print(line, no_wrap=True, overflow="ellipsis")
