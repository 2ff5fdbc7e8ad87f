"""`lanes`: list, pause, resume, drain."""

from collections.abc import Awaitable, Callable

import click
from rich.text import Text

from flowfabric.cli import screen
from flowfabric.cli.options import Target, target_options, with_engine
from flowfabric.cli.screen import fixed, flexible, right
from flowfabric.core.limits import PAGE_MAX
from flowfabric.core.records import Lane
from flowfabric.engine.engine import Engine


@click.group("lanes")
def lanes() -> None:
    """See and steer lanes, the named queues executions wait in."""


@lanes.command("list")
@target_options
@with_engine
async def list_lanes(engine: Engine, target: Target) -> None:
    """List lanes. With --json: one per line."""
    found: list[Lane] = []
    cursor: str | None = None
    while True:
        page = await engine.list_lanes(cursor=cursor, limit=PAGE_MAX)
        found += page.lanes
        cursor = page.next_cursor
        if cursor is None:
            break
    if target.json:
        for lane in found:
            screen.emit(lane)
        return
    if not found:
        screen.err().print("[dim]No lanes yet: the first execution in a lane creates it.[/]")
        return
    now_ms = await engine.server_time_ms()
    rows = [
        (lane.lane_id, screen.lane_state(lane.state), screen.ago(_since_ms(lane), now_ms))
        for lane in found
    ]
    screen.out().print(screen.table([flexible("LANE"), fixed("STATE"), right("SINCE")], rows))


def _since_ms(lane: Lane) -> int:
    """Since when it is in its state."""
    if lane.state_changed_at_ms is None:
        return lane.registered_at_ms
    return lane.state_changed_at_ms


def _steer_lane(
    name: str, operation: Callable[[Engine, str], Awaitable[Lane]], help_text: str
) -> None:
    @lanes.command(name, help=help_text)
    @click.argument("lane")
    @target_options
    @with_engine
    async def command(engine: Engine, target: Target, lane: str) -> None:
        changed = await operation(engine, lane)
        if target.json:
            screen.emit(changed)
        else:
            screen.out().print(Text(f"lane {changed.lane_id} is {changed.state}"))


_steer_lane("pause", Engine.pause_lane, "Hand out no work from LANE; submissions are still taken.")
_steer_lane("resume", Engine.resume_lane, "Take and hand out work again.")
_steer_lane("drain", Engine.drain_lane, "Take no new executions; what is there is worked off.")
