"""What operators do: `cancel`, `replay`, `accept`, `priority`, `revoke`, `lanes`, `schedules`."""

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Concatenate, Final, ParamSpec, Protocol

import click
from msgspec import structs
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from flowfabric.cli import options, screen
from flowfabric.cli.screen import REMARK, fixed, flexible, right
from flowfabric.core.bounds import PAGE_MAX, PRIORITY_MAX, PRIORITY_MIN, SWEEP_BATCH
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.core.policies import span
from flowfabric.core.records import Lane
from flowfabric.core.results import Revoked
from flowfabric.core.schedules import Schedule, ScheduleKind
from flowfabric.core.states import TERMINAL_STATES, PublicState
from flowfabric.core.views import ExecutionSnapshot
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow_operators import BULK_MAX
from flowfabric.engine.paging import pages
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.engine.workers import LaneCounts
from flowfabric.errors import FlowFabricError, NoActiveLease, NotFound

# `cancel`, `replay`, `accept`, `priority`, `revoke`: by id, or on everything a filter matches

P = ParamSpec("P")

REFUSALS_SHOWN_MAX: Final = 10

Action = Callable[[Sequence[str]], Awaitable[Sequence[object]]]


def by_id_or_filter(
    reason: str | None = None,
) -> Callable[
    [Callable[Concatenate[Engine, options.Target, options.Chosen, P], Awaitable[int]]],
    Callable[P, int],
]:
    """Adds what every command has that acts on executions by id or by filter."""

    def decorate(
        command: Callable[Concatenate[Engine, options.Target, options.Chosen, P], Awaitable[int]],
    ) -> Callable[P, int]:
        made = options.on_engine("any")(command)
        made = click.option("--yes", "-y", is_flag=True, help="Do not ask.")(made)
        if reason is not None:
            made = click.option("--reason", default=reason, show_default=True)(made)
        ids = click.argument("execution_ids", metavar="[ID]...", nargs=-1)
        return ids(options.filter_options(made))

    return decorate


@click.command("cancel", short_help="End executions, by id or by filter.")
@by_id_or_filter(reason="cancelled from the command line")
async def cancel(
    engine: Engine,
    target: options.Target,
    chosen: options.Chosen,
    execution_ids: tuple[str, ...],
    reason: str,
    yes: bool,
) -> int:
    """Cancel executions: those with the given IDs, or all unfinished ones that match."""

    async def act(ids: Sequence[str]) -> Sequence[object]:
        return await engine.cancel_executions(ids, reason=reason)

    unfinished = set(PublicState) - TERMINAL_STATES
    ids = await _choose(engine, target, "cancel", execution_ids, chosen, unfinished, yes)
    return await _act_on(engine, target, "cancelled", ids, act)


@click.command("replay", short_help="Run ended executions again, by id or by filter.")
@by_id_or_filter(reason="replayed from the command line")
async def replay(
    engine: Engine,
    target: options.Target,
    chosen: options.Chosen,
    execution_ids: tuple[str, ...],
    reason: str,
    yes: bool,
) -> int:
    """Run ended executions again: those with the given IDs, or all failed, cancelled and expired
    ones that match the filters. Name --state completed to run those again, too.
    """

    async def act(ids: Sequence[str]) -> Sequence[object]:
        return await engine.replay_executions(ids, reason=reason, requested_by=options.user())

    ended = set(TERMINAL_STATES)
    if not chosen.states:
        ended -= {PublicState.COMPLETED, PublicState.SKIPPED}
    ids = await _choose(engine, target, "replay", execution_ids, chosen, ended, yes)
    return await _act_on(engine, target, "replayed", ids, act)


@click.command("accept", short_help="Let blocked executions run with the code as it is now.")
@by_id_or_filter()
async def accept(
    engine: Engine,
    target: options.Target,
    chosen: options.Chosen,
    execution_ids: tuple[str, ...],
    yes: bool,
) -> int:
    """Let executions that changed code has blocked run on: those with the given IDs, or all
    blocked ones that match. The step each of them asked for runs, and stored steps that the code
    has not asked for by then no longer count. What is stored stays as it is: executions whose
    arguments or stored results do not fit the types in the code are refused.
    """

    async def act(ids: Sequence[str]) -> Sequence[object]:
        outcomes: list[object] = []
        for each in ids:
            try:
                outcomes.append(await engine.accept_changes(each))
            except FlowFabricError as error:
                outcomes.append(error)
        return outcomes

    ids = await _choose(
        engine,
        target,
        "accept",
        execution_ids,
        chosen,
        {PublicState.DELAYED},
        yes,
        among=lambda each: each.blocked,
    )
    return await _act_on(engine, target, "accepted", ids, act)


def _any(_: ExecutionSnapshot) -> bool:
    return True


@click.command("priority", short_help="Move a waiting execution in its queue.")
@click.argument("execution_id", metavar="ID")
@click.argument("priority", type=click.IntRange(PRIORITY_MIN, PRIORITY_MAX))
@options.on_engine("any")
async def priority(
    engine: Engine, target: options.Target, execution_id: str, priority: int
) -> None:
    """Move a waiting execution in its queue: higher goes first."""
    found = await target.find(engine, execution_id)
    await engine.change_priority(found, priority, any_runnable=True)
    execution = await engine.describe_execution(found)
    assert execution is not None
    if target.json:
        screen.emit({"execution_id": found, "priority": execution.priority})
    else:
        shown = execution.own_id or uuid_of(found)
        screen.out().print(Text(f"{shown} now has priority {execution.priority}"))


@click.command("revoke", short_help="Take executions from their workers.")
@click.argument("execution_ids", metavar="ID...", nargs=-1, required=True)
@click.option("--reason", default="revoked from the command line", show_default=True)
@options.on_engine("any")
async def revoke(
    engine: Engine, target: options.Target, execution_ids: tuple[str, ...], reason: str
) -> int:
    """Take executions from the workers that hold them; other workers may claim them at once."""

    async def act(ids: Sequence[str]) -> Sequence[object]:
        outcomes: list[object] = []
        for each in ids:
            try:
                answer = await engine.revoke_lease(each, reason=reason)
            except FlowFabricError as error:
                outcomes.append(error)
            else:
                held = isinstance(answer, Revoked)
                outcomes.append(answer if held else NoActiveLease("nobody holds it"))
        return outcomes

    ids = [await target.find(engine, each) for each in execution_ids]
    return await _act_on(engine, target, "revoked", ids, act)


async def _choose(
    engine: Engine,
    target: options.Target,
    verb: str,
    given: tuple[str, ...],
    chosen: options.Chosen,
    possible: set[PublicState],
    yes: bool,
    *,
    among: Callable[[ExecutionSnapshot], bool] = _any,
) -> list[ExecutionId]:
    """The ids to act on. What a filter matches is counted and confirmed first."""
    if given and not chosen.empty:
        raise click.UsageError("give either IDs or filters")
    if given:
        return [await target.find(engine, each) for each in given]
    if chosen.empty and target.namespace is None:
        raise click.UsageError("which ones? Give IDs, or a filter such as --state or --lane")
    matching = await chosen.resolve(engine, target)
    states = possible & set(matching.states) if matching.states else possible
    if not states:
        wanted = ", ".join(sorted(possible))
        raise click.UsageError(f"{verb} acts on executions in these states: {wanted}")
    ids = await _matching_ids(
        engine,
        matching.with_states(tuple(sorted(states))),
        lambda each: among(each) and chosen.fits(each),
    )
    if ids and not yes:
        await _confirm(verb, len(ids))
    return ids


async def _matching_ids(
    engine: Engine, matching: ExecutionFilter, among: Callable[[ExecutionSnapshot], bool]
) -> list[ExecutionId]:
    ids: list[ExecutionId] = []
    found = pages(lambda at: engine.find_executions(matching, cursor=at, limit=PAGE_MAX))
    with screen.err().status("Looking for executions …"):
        async for page in found:
            ids += [each.execution_id for each in page.executions if among(each)]
            if len(ids) >= BULK_MAX:
                break
    return ids[:BULK_MAX]


async def _confirm(verb: str, count: int) -> None:
    things = "1 execution" if count == 1 else f"{count} executions"
    if not sys.stdin.isatty():
        raise click.UsageError(f"this would {verb} {things}; confirm with --yes")
    click.echo(f"{verb.capitalize()} {things}? [y/N]: ", nl=False, err=True)
    # On the event loop, which an interrupt reaches only there.
    loop, typed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, typed.set)
    try:
        await typed.wait()
    finally:
        loop.remove_reader(sys.stdin)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise click.Abort


async def _act_on(
    engine: Engine, target: options.Target, done: str, ids: Sequence[ExecutionId], act: Action
) -> int:
    """Act in batches, show how far it is, and report what was refused."""
    refused: dict[ExecutionId, FlowFabricError] = {}
    with _progress(len(ids)) as progress:
        task = progress.add_task(done, total=len(ids))
        for start in range(0, len(ids), SWEEP_BATCH):
            batch = ids[start : start + SWEEP_BATCH]
            outcomes = zip(batch, await act(batch), strict=True)
            refused |= {each: e for each, e in outcomes if isinstance(e, FlowFabricError)}
            progress.advance(task, len(batch))
    touched = len(ids) - len(refused)
    if target.json:
        reasons = {each: {"code": e.code, "message": str(e)} for each, e in refused.items()}
        screen.emit({done: touched, "refused": reasons})
    else:
        screen.out().print(f"{touched} {done}")
        _print_refused(refused, await engine.own_ids([*refused][:REFUSALS_SHOWN_MAX]))
    if not refused:
        return options.OK
    missing = all(isinstance(error, NotFound) for error in refused.values())
    return options.NOT_FOUND if missing else options.REFUSED


def _print_refused(
    refused: Mapping[ExecutionId, FlowFabricError], own_ids: Mapping[ExecutionId, str]
) -> None:
    if not refused:
        return
    console = screen.err()
    counts = Counter(error.code for error in refused.values())
    summary = ", ".join(f"{count} {code.replace('_', ' ')}" for code, count in counts.most_common())
    console.print(Text(f"{len(refused)} refused: {summary}", style="red"))
    for each, error in list(refused.items())[:REFUSALS_SHOWN_MAX]:
        console.print(Text(f"  {own_ids.get(each) or screen.short_id(each)}  {error}", style="dim"))


def _progress(total: int) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=screen.err(),
        transient=True,
        disable=total <= SWEEP_BATCH or not screen.err().is_terminal,
    )


# `lanes`: list, pause, resume, drain ----------------------------------------

COUNTED: Final = ("ready", "running", "delayed", "suspended", "held")
LANE_COLUMNS: Final = (
    flexible("LANE"),
    fixed("STATE"),
    right("SINCE"),
    *(right(name.upper()) for name in COUNTED),
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
        LANE_COLUMNS,
        [_lane_row(lane, count, now_ms) for lane, count in counted],
        as_json=target.json,
        nothing="No lanes yet: the first execution in a lane creates it.",
    )


async def every_lane(engine: Engine) -> list[Lane]:
    found = pages(lambda cursor: engine.list_lanes(cursor=cursor, limit=PAGE_MAX))
    return [lane async for page in found for lane in page.lanes]


def _lane_row(lane: Lane, count: LaneCounts, now_ms: int) -> tuple[Text | str, ...]:
    since = screen.ago(_since_ms(lane), now_ms)
    numbers = (str(getattr(count, name)) for name in COUNTED)
    return lane.lane_id, screen.lane_state(lane.state), since, *numbers


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
    @options.on_engine()
    async def command(engine: Engine, target: options.Target, lane: str) -> None:
        changed = await operation(engine, lane)
        if target.json:
            screen.emit(changed)
        else:
            screen.out().print(Text(f"lane {changed.lane_id} is {changed.state}"))


_steer_lane(
    "pause",
    lambda engine, lane: engine.pause_lane(lane),
    "Hand out no work from LANE; submissions are still taken.",
)
_steer_lane(
    "resume", lambda engine, lane: engine.resume_lane(lane), "Take and hand out work again."
)
_steer_lane(
    "drain",
    lambda engine, lane: engine.drain_lane(lane),
    "Take no new executions; what is there is worked off.",
)


# `schedules`: list, pause, resume, run, remove ------------------------------

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


class ScheduleAct(Protocol):
    def __call__(
        self, engine: Engine, schedule_id: str, /, *, namespace: str
    ) -> Awaitable[Schedule]: ...


def _steer_schedule(name: str, done: str, operation: ScheduleAct, help_text: str) -> None:
    @schedules.command(name, help=help_text)
    @click.argument("schedule")
    @options.on_engine("own")
    async def command(engine: Engine, target: options.Target, schedule: str) -> None:
        changed = await operation(engine, schedule, namespace=target.own_namespace())
        if target.json:
            screen.emit(changed)
        else:
            next_due = ""
            if changed.next_due_at_ms is not None and name == "resume":
                next_due = f", next {screen.moment(changed.next_due_at_ms)}"
            screen.out().print(Text(f"schedule {changed.schedule_id} {done}{next_due}"))


_steer_schedule("pause", "is paused", Engine.pause_schedule, "Let due times pass without effect.")
_steer_schedule("resume", "is active", Engine.resume_schedule, "Go on with the next due time.")
_steer_schedule(
    "remove", "is removed", Engine.remove_schedule, "Forget it; executions it has created stay."
)


@schedules.command("run")
@click.argument("schedule")
@options.on_engine("own")
async def run(engine: Engine, target: options.Target, schedule: str) -> None:
    """Create its execution now, out of turn."""
    created = await engine.trigger_schedule(schedule, namespace=target.own_namespace())
    if target.json:
        screen.emit({"execution_id": created.execution_id})
    else:
        screen.out().print(Text(uuid_of(created.execution_id)))
