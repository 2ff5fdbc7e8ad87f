"""`events`: the log of what happened."""

from collections import deque
from collections.abc import Sequence
from typing import Final

import click
from rich.text import Text

from flowfabric.cli import screen
from flowfabric.cli.options import (
    Target,
    limit_option,
    namespace_option,
    target_options,
    with_engine,
)
from flowfabric.core.events import EventCategory, StoredEvent
from flowfabric.engine.engine import Engine
from flowfabric.engine.subscriptions import Subscription, Told
from flowfabric.errors import HistoryChanged

BATCH: Final = 100


@click.command("events")
@click.option("--after", metavar="ID", help="Begin after this event id, or cursor.")
@limit_option
@click.option("--category", type=click.Choice([each.value for each in EventCategory]))
@click.option("--id", "execution_id", metavar="ID", help="Of this execution.")
@click.option("--kind", help="Of executions of this task, in any version or in one.")
@click.option("--tag", metavar="KEY=VALUE", help="Of executions with this tag.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens from now on.")
@namespace_option
@target_options
@with_engine
async def events(
    engine: Engine,
    target: Target,
    after: str | None,
    limit: int,
    category: str | None,
    execution_id: str | None,
    kind: str | None,
    tag: str | None,
    follow: bool,
) -> None:
    """Print the latest events, oldest first. With --json: one per line."""
    scope = target.scope()
    found = None if execution_id is None else await target.find(engine, execution_id)
    label = None if tag is None else _tag(tag)
    # Only a look at every event tells which are the latest of an execution, a kind or a tag.
    looks = after is None and (found or kind or label) is not None
    start = after or "0"
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
    await _print(engine, target, await _latest(subscription, limit, looks=looks))
    while follow:
        try:
            await _print(engine, target, await _next(subscription))
        except HistoryChanged as error:
            screen.err().print(Text(str(error), style="yellow"))
            subscription = await subscribe(error.resume_after)


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter("must look like key=value", param_hint="--tag")
    return key, value


async def _latest(
    subscription: Subscription[Told], limit: int, *, looks: bool
) -> list[StoredEvent]:
    """The first so many events there are; if that takes a look at all of them, the last."""
    latest: deque[StoredEvent] = deque(maxlen=limit)
    while looks or len(latest) < limit:
        told = await subscription.next_if_any()
        if told is None:
            break
        latest.append(told.event)
    return list(latest)


async def _next(subscription: Subscription[Told]) -> list[StoredEvent]:
    """The next event, once it comes, and what came with it."""
    batch = [(await anext(subscription)).event]
    while len(batch) < BATCH and (told := await subscription.next_if_any()) is not None:
        batch.append(told.event)
    return batch


async def _print(engine: Engine, target: Target, events: Sequence[StoredEvent]) -> None:
    if target.json:
        for event in events:
            screen.emit(event)
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
