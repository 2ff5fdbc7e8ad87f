"""`cancel`, `replay`, `accept`, `priority`, `revoke`: by id, or on everything a filter matches."""

import getpass
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from flowfabric.cli import options, screen
from flowfabric.cli.options import Target, namespace_option, target_options, with_engine
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.core.limits import PAGE_MAX, PRIORITY_MAX, PRIORITY_MIN, SWEEP_BATCH
from flowfabric.core.results import Revoked
from flowfabric.core.states import TERMINAL_STATES, PublicState
from flowfabric.core.views import ExecutionSnapshot
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow_operators import BULK_MAX
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.errors import FlowFabricError, NoActiveLease, NotFound

REFUSALS_SHOWN_MAX: Final = 10

Action = Callable[[Sequence[str]], Awaitable[Sequence[object]]]


@click.command("cancel", short_help="End executions, by id or by filter.")
@click.argument("execution_ids", metavar="[ID]...", nargs=-1)
@options.filter_options
@click.option("--reason", default="cancelled from the command line", show_default=True)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@namespace_option
@target_options
@with_engine
async def cancel(
    engine: Engine,
    target: Target,
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
@click.argument("execution_ids", metavar="[ID]...", nargs=-1)
@options.filter_options
@click.option("--reason", default="replayed from the command line", show_default=True)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@namespace_option
@target_options
@with_engine
async def replay(
    engine: Engine,
    target: Target,
    chosen: options.Chosen,
    execution_ids: tuple[str, ...],
    reason: str,
    yes: bool,
) -> int:
    """Run ended executions again: those with the given IDs, or all failed, cancelled and expired
    ones that match the filters. Name --state completed to run those again, too.
    """

    async def act(ids: Sequence[str]) -> Sequence[object]:
        return await engine.replay_executions(ids, reason=reason, requested_by=_user())

    ended = set(TERMINAL_STATES)
    if not chosen.states:
        ended -= {PublicState.COMPLETED, PublicState.SKIPPED}
    ids = await _choose(engine, target, "replay", execution_ids, chosen, ended, yes)
    return await _act_on(engine, target, "replayed", ids, act)


@click.command("accept", short_help="Let blocked executions run with the code as it is now.")
@click.argument("execution_ids", metavar="[ID]...", nargs=-1)
@options.filter_options
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@namespace_option
@target_options
@with_engine
async def accept(
    engine: Engine,
    target: Target,
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
@namespace_option
@target_options
@with_engine
async def priority(engine: Engine, target: Target, execution_id: str, priority: int) -> None:
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
@namespace_option
@target_options
@with_engine
async def revoke(
    engine: Engine, target: Target, execution_ids: tuple[str, ...], reason: str
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
    target: Target,
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
        _confirm(verb, len(ids))
    return ids


async def _matching_ids(
    engine: Engine, matching: ExecutionFilter, among: Callable[[ExecutionSnapshot], bool]
) -> list[ExecutionId]:
    ids: list[ExecutionId] = []
    cursor: str | None = None
    with screen.err().status("Looking for executions …"):
        while len(ids) < BULK_MAX:
            page = await engine.find_executions(matching, cursor=cursor, limit=PAGE_MAX)
            ids += [each.execution_id for each in page.executions if among(each)]
            cursor = page.next_cursor
            if cursor is None:
                break
    return ids[:BULK_MAX]


def _confirm(verb: str, count: int) -> None:
    things = "1 execution" if count == 1 else f"{count} executions"
    if not sys.stdin.isatty():
        raise click.UsageError(f"this would {verb} {things}; confirm with --yes")
    click.confirm(f"{verb.capitalize()} {things}?", abort=True, err=True)


async def _act_on(
    engine: Engine, target: Target, done: str, ids: Sequence[ExecutionId], act: Action
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


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "cli"
