"""`schedules`: list, pause, resume, run, remove."""

from collections.abc import Awaitable, Callable
from typing import Final

import click
from rich.text import Text

from flowfabric.app import DEFAULT_NAMESPACE
from flowfabric.cli import screen
from flowfabric.cli.options import (
    Target,
    namespace_option,
    own_namespace_option,
    target_options,
    with_engine,
)
from flowfabric.cli.screen import REMARK, flexible, right
from flowfabric.core.ids import uuid_of
from flowfabric.core.limits import PAGE_MAX
from flowfabric.core.policies import span
from flowfabric.core.schedules import Schedule, ScheduleKind
from flowfabric.engine.engine import Engine

COLUMNS: Final = (
    flexible("SCHEDULE"),
    flexible("WHEN"),
    right("NEXT"),
    right("LAST"),
    right("FIRED"),
    flexible("KIND"),
    REMARK,
)


@click.group("schedules")
def schedules() -> None:
    """See and steer what is started by the clock."""


@schedules.command("list")
@namespace_option
@target_options
@with_engine
async def list_schedules(engine: Engine, target: Target) -> None:
    """List schedules. With --json: one per line."""
    found: list[Schedule] = []
    cursor: tuple[str, str] | None = None
    while True:
        page = await engine.list_schedules(namespace=target.scope(), cursor=cursor, limit=PAGE_MAX)
        found += page.schedules
        cursor = page.next_cursor
        if cursor is None:
            break
    if target.json:
        for schedule in found:
            screen.emit(schedule)
        return
    if not found:
        screen.err().print("[dim]No schedules.[/]")
        return
    now_ms = await engine.server_time_ms()
    screen.out().print(
        screen.table(
            COLUMNS,
            [_row(schedule, now_ms) for schedule in found],
        )
    )


def _row(schedule: Schedule, now_ms: int) -> tuple[str | Text, ...]:
    prefix = "" if schedule.namespace == "default" else f"{schedule.namespace}/"
    next_due: str | Text = screen.ago(schedule.next_due_at_ms, now_ms)
    if schedule.paused:
        next_due = Text("paused", style="yellow")
    return (
        f"{prefix}{schedule.schedule_id}",
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


ScheduleAct = Callable[[Engine, str, str], Awaitable[Schedule]]


def _steer_schedule(name: str, done: str, operation: ScheduleAct, help_text: str) -> None:
    @schedules.command(name, help=help_text)
    @click.argument("schedule")
    @own_namespace_option
    @target_options
    @with_engine
    async def command(engine: Engine, target: Target, schedule: str) -> None:
        changed = await operation(engine, schedule, target.scope() or DEFAULT_NAMESPACE)
        if target.json:
            screen.emit(changed)
        else:
            next_due = ""
            if changed.next_due_at_ms is not None and name == "resume":
                next_due = f", next {screen.moment(changed.next_due_at_ms)}"
            screen.out().print(Text(f"schedule {changed.schedule_id} {done}{next_due}"))


async def _pause(engine: Engine, schedule_id: str, namespace: str) -> Schedule:
    return await engine.pause_schedule(schedule_id, namespace=namespace)


async def _resume(engine: Engine, schedule_id: str, namespace: str) -> Schedule:
    return await engine.resume_schedule(schedule_id, namespace=namespace)


async def _remove(engine: Engine, schedule_id: str, namespace: str) -> Schedule:
    return await engine.remove_schedule(schedule_id, namespace=namespace)


_steer_schedule("pause", "is paused", _pause, "Let due times pass without effect.")
_steer_schedule("resume", "is active", _resume, "Go on with the next due time.")
_steer_schedule("remove", "is removed", _remove, "Forget it; executions it has created stay.")


@schedules.command("run")
@click.argument("schedule")
@own_namespace_option
@target_options
@with_engine
async def run(engine: Engine, target: Target, schedule: str) -> None:
    """Create its execution now, out of turn."""
    namespace = target.scope() or DEFAULT_NAMESPACE
    created = await engine.trigger_schedule(schedule, namespace=namespace)
    if target.json:
        screen.emit({"execution_id": created.execution_id})
    else:
        screen.out().print(Text(uuid_of(created.execution_id)))
