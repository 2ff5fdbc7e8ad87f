"""`lanes`: list, pause, resume, drain."""

from collections.abc import Awaitable, Callable
from typing import Final

import click
from msgspec import structs
from rich.text import Text

from flowfabric.cli import options, screen
from flowfabric.cli.screen import fixed, right, spare, whole
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.records import Lane
from flowfabric.engine.engine import Engine
from flowfabric.engine.lanes import LaneCounts
from flowfabric.engine.paging import pages

COUNTED: Final = ("ready", "running", "delayed", "suspended", "held")
COLUMNS: Final = (
    whole("LANE"),
    fixed("STATE"),
    spare("SINCE"),
    *(right(name.upper()) for name in COUNTED[:2]),
    *(spare(name.upper()) for name in COUNTED[2:]),
)


@click.group("lanes")
def lanes() -> None:
    """See and steer lanes, the named queues executions wait in."""


@lanes.command("list")
@options.on_engine()
async def list_lanes(engine: Engine, target: options.Target) -> None:
    """List lanes, and how much work there is in each. With --json: one per line."""
    lanes = await every_lane(engine)
    counts = {each.lane_id: each for each in await engine.count_lanes()}
    counted = [(lane, counts.get(lane.lane_id, LaneCounts(lane_id=lane.lane_id))) for lane in lanes]
    now_ms = await engine.server_time_ms()
    screen.show(
        [structs.asdict(lane) | structs.asdict(count) for lane, count in counted],
        COLUMNS,
        [_row(lane, count, now_ms) for lane, count in counted],
        as_json=target.json,
        nothing="No lanes yet: the first execution in a lane creates it.",
    )


async def every_lane(engine: Engine) -> list[Lane]:
    found = pages(lambda cursor: engine.list_lanes(cursor=cursor, limit=PAGE_MAX))
    return [lane async for page in found for lane in page.lanes]


def _row(lane: Lane, count: LaneCounts, now_ms: int) -> tuple[Text | str, ...]:
    since = screen.ago(_since_ms(lane), now_ms)
    numbers = (str(getattr(count, name)) for name in COUNTED)
    return lane.lane_id, screen.lane_state(lane.state), since, *numbers


def _since_ms(lane: Lane) -> int:
    """When it entered its state."""
    if lane.state_changed_at_ms is None:
        return lane.registered_at_ms
    return lane.state_changed_at_ms


def _steer(name: str, operation: Callable[[Engine, str], Awaitable[Lane]], help_text: str) -> None:
    @lanes.command(name, help=help_text)
    @click.argument("lane")
    @options.on_engine()
    async def command(engine: Engine, target: options.Target, lane: str) -> None:
        changed = await operation(engine, lane)
        sentence = f"lane {changed.lane_id} is {changed.state}"
        screen.answer(changed, sentence, as_json=target.json)


_steer(
    "pause",
    lambda engine, lane: engine.pause_lane(lane),
    "Hand out no work from LANE; it still takes submissions.",
)
_steer(
    "resume",
    lambda engine, lane: engine.resume_lane(lane),
    "Take work into LANE and hand it out again.",
)
_steer(
    "drain",
    lambda engine, lane: engine.drain_lane(lane),
    "Take no new executions into LANE; workers finish what is there.",
)
