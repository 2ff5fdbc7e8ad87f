"""`schedules`: list, pause, resume, run, remove."""

from collections.abc import Awaitable, Callable
from typing import Final

import click
from rich.text import Text

from flowfabric.cli import options, screen
from flowfabric.cli.screen import REMARK, flexible, right, spare, whole
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.ids import uuid_of
from flowfabric.core.policies import span
from flowfabric.core.schedules import Schedule, ScheduleKind
from flowfabric.engine.engine import Engine
from flowfabric.engine.paging import pages

WORDS_MIN: Final = 9
"""What WHEN and KIND keep before names are cut: `every 10m` can be read."""
OVERDUE_MS: Final = 5_000
"""How late a schedule may be before it counts as overdue: workers may be about to fire it."""
COLUMNS: Final = (
    whole("SCHEDULE"),
    flexible("WHEN", at_least=WORDS_MIN),
    right("NEXT"),
    spare("LAST"),
    spare("FIRED"),
    flexible("KIND", at_least=WORDS_MIN),
    REMARK,
)


@click.group("schedules")
def schedules() -> None:
    """See and steer schedules, which create executions at set times."""


@schedules.command("list")
@options.on_engine("any")
async def list_schedules(engine: Engine, target: options.Target) -> None:
    """List schedules. With --json: one per line."""
    found = pages(
        lambda at: engine.list_schedules(namespace=target.scope(), cursor=at, limit=PAGE_MAX)
    )
    schedules = [schedule async for page in found for schedule in page.schedules]
    now_ms = await engine.server_time_ms()
    rows = [_row(schedule, now_ms) for schedule in schedules]
    screen.show(schedules, COLUMNS, rows, as_json=target.json, nothing="No schedules.")


def _row(schedule: Schedule, now_ms: int) -> tuple[str | Text, ...]:
    next_due: str | Text = screen.ago(schedule.next_due_at_ms, now_ms)
    if schedule.next_due_at_ms is not None and schedule.next_due_at_ms < now_ms - OVERDUE_MS:
        next_due = Text("overdue", style="yellow")
    if schedule.paused:
        next_due = Text("paused", style="yellow")
    return (
        screen.named(schedule.namespace, schedule.schedule_id),
        when(schedule),
        next_due,
        screen.ago(schedule.last_due_at_ms, now_ms),
        str(schedule.fired_count),
        schedule.execution_kind,
        Text(screen.one_line(schedule.last_error), style="red"),
    )


def when(schedule: Schedule) -> str:
    match schedule.schedule_kind:
        case ScheduleKind.INTERVAL:
            return f"every {span(int(schedule.expression)).replace('.0s', 's')}"
        case ScheduleKind.CRON if schedule.timezone == "UTC":
            return schedule.expression
        case ScheduleKind.CRON:
            return f"{schedule.expression} {schedule.timezone}"


def _steer(
    name: str,
    done: str,
    operation: Callable[[Engine, str, str], Awaitable[Schedule]],
    help_text: str,
) -> None:
    @schedules.command(name, help=help_text)
    @click.argument("schedule")
    @options.on_engine("own")
    async def command(engine: Engine, target: options.Target, schedule: str) -> None:
        changed = await operation(engine, schedule, target.own_namespace())
        next_due = ""
        if changed.next_due_at_ms is not None and name == "resume":
            next_due = f", next {screen.moment(changed.next_due_at_ms)}"
        sentence = f"schedule {changed.schedule_id} {done}{next_due}"
        screen.answer(changed, sentence, as_json=target.json)


_steer(
    "pause",
    "is paused",
    lambda engine, schedule, namespace: engine.pause_schedule(schedule, namespace=namespace),
    "Pause SCHEDULE: due times pass without creating anything.",
)
_steer(
    "resume",
    "is active",
    lambda engine, schedule, namespace: engine.resume_schedule(schedule, namespace=namespace),
    "Resume SCHEDULE, from its next due time on.",
)
_steer(
    "remove",
    "is removed",
    lambda engine, schedule, namespace: engine.remove_schedule(schedule, namespace=namespace),
    "Remove SCHEDULE. Executions it has created stay.",
)


@schedules.command("run")
@click.argument("schedule")
@options.on_engine("own")
async def run(engine: Engine, target: options.Target, schedule: str) -> None:
    """Create an execution of SCHEDULE now, apart from its times."""
    created = await engine.trigger_schedule(schedule, namespace=target.own_namespace())
    execution_id = created.execution_id
    screen.answer({"execution_id": execution_id}, uuid_of(execution_id), as_json=target.json)
