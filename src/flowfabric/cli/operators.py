"""`cancel`, `replay`, `accept`, `priority`, `revoke`: by id, or on everything a filter matches."""

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Concatenate, Final, ParamSpec

import click
from msgspec import Struct
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from flowfabric.cli import options, screen
from flowfabric.core.bounds import PAGE_MAX, PRIORITY_MAX, PRIORITY_MIN, SWEEP_BATCH
from flowfabric.core.executions import ALREADY_TERMINAL
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.core.results import Revoked
from flowfabric.core.states import TERMINAL_STATES, PublicState
from flowfabric.core.views import ExecutionSnapshot
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow_operators import BULK_MAX
from flowfabric.engine.paging import pages
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.errors import FlowFabricError, InvalidInput, NoActiveLease, NotFound

P = ParamSpec("P")

REFUSALS_SHOWN_MAX: Final = 10

Action = Callable[[Sequence[str]], Awaitable[Sequence[object]]]


class Selection(Struct, frozen=True):
    """The executions to act on."""

    ids: Sequence[ExecutionId]
    unknown: Mapping[str, FlowFabricError] = {}
    """Ids as given that mean no execution, or several, and why."""


def by_id_or_filter(
    reason: str | None = None,
) -> Callable[
    [Callable[Concatenate[Engine, options.Target, options.Chosen, P], Awaitable[int]]],
    Callable[P, int],
]:
    """Adds the arguments and options of commands that act on executions by id or by filter."""

    def decorate(
        command: Callable[Concatenate[Engine, options.Target, options.Chosen, P], Awaitable[int]],
    ) -> Callable[P, int]:
        made = options.on_engine("any")(command)
        made = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")(made)
        if reason is not None:
            made = click.option(
                "--reason",
                default=reason,
                show_default=True,
                help="Why; shown with the executions.",
            )(made)
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
    act = partial(engine.cancel_executions, reason=reason)
    unfinished = set(PublicState) - TERMINAL_STATES
    found = await _choose(engine, target, "cancel", execution_ids, chosen, unfinished, yes)
    return await _act_on(engine, target, "cancelled", found, act)


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
    act = partial(engine.replay_executions, reason=reason, requested_by=options.user())
    ended = set(TERMINAL_STATES)
    if not chosen.states:
        ended -= {PublicState.COMPLETED, PublicState.SKIPPED}
    found = await _choose(engine, target, "replay", execution_ids, chosen, ended, yes)
    return await _act_on(engine, target, "replayed", found, act)


@click.command("accept", short_help="Let blocked executions run with the code as it is now.")
@by_id_or_filter()
async def accept(
    engine: Engine,
    target: options.Target,
    chosen: options.Chosen,
    execution_ids: tuple[str, ...],
    yes: bool,
) -> int:
    """Let executions continue that changed code has blocked: those with the given IDs, or all
    blocked ones that match.

    The call that was refused runs, and stored steps that the code has not asked for by then are
    given up. Nothing that is stored changes: an execution whose arguments or stored results do
    not fit the types in the code is refused.
    """
    found = await _choose(
        engine,
        target,
        "accept",
        execution_ids,
        chosen,
        {PublicState.DELAYED},
        yes,
        among=lambda each: each.blocked,
    )
    act = partial(_one_by_one, engine.accept_changes)
    return await _act_on(engine, target, "accepted", found, act)


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
    sentence = f"{execution.own_id or uuid_of(found)} now has priority {execution.priority}"
    document = {"execution_id": found, "priority": execution.priority}
    screen.answer(document, sentence, as_json=target.json)


@click.command("revoke", short_help="Take executions from their workers.")
@click.argument("execution_ids", metavar="ID...", nargs=-1, required=True)
@click.option(
    "--reason",
    default="revoked from the command line",
    show_default=True,
    help="Why; shown with the executions.",
)
@options.on_engine("any")
async def revoke(
    engine: Engine, target: options.Target, execution_ids: tuple[str, ...], reason: str
) -> int:
    """Take executions from the workers that hold them; other workers may claim them at once."""

    async def take(execution_id: str) -> object:
        answer = await engine.revoke_lease(execution_id, reason=reason)
        if not isinstance(answer, Revoked):
            raise NoActiveLease("nobody holds it")
        return answer

    found = await _find_all(engine, target, execution_ids)
    return await _act_on(engine, target, "revoked", found, partial(_one_by_one, take))


async def _one_by_one(
    act: Callable[[str], Awaitable[object]], execution_ids: Sequence[str]
) -> list[object]:
    """Act on each execution separately: what came of it, or the error."""
    outcomes: list[object] = []
    for execution_id in execution_ids:
        try:
            outcomes.append(await act(execution_id))
        except FlowFabricError as error:
            outcomes.append(error)
    return outcomes


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
) -> Selection:
    """The ids to act on. If they come from a filter, the user confirms their number first."""
    if given and not chosen.empty:
        raise click.UsageError("give either IDs or filters")
    if given:
        return await _find_all(engine, target, given)
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
    return Selection(ids)


async def _find_all(engine: Engine, target: options.Target, given: Sequence[str]) -> Selection:
    """The executions that ids mean. One id that means none is refused by itself."""
    if len(given) == 1:
        return Selection([await target.find(engine, given[0])])
    ids: list[ExecutionId] = []
    unknown: dict[str, FlowFabricError] = {}
    for each in given:
        try:
            ids.append(await target.find(engine, each))
        except (NotFound, InvalidInput) as error:
            unknown[each] = error
    return Selection(ids, unknown)


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
    # Wait on the event loop: an interrupt reaches it only there.
    loop, typed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, typed.set)
    try:
        await typed.wait()
    finally:
        loop.remove_reader(sys.stdin)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise click.Abort


async def _act_on(
    engine: Engine, target: options.Target, done: str, found: Selection, act: Action
) -> int:
    """Act in batches, show progress, and report what was refused."""
    ids = found.ids
    refused: dict[ExecutionId, FlowFabricError] = {}
    with _progress(len(ids)) as progress:
        task = progress.add_task(done, total=len(ids))
        for start in range(0, len(ids), SWEEP_BATCH):
            batch = ids[start : start + SWEEP_BATCH]
            outcomes = zip(batch, await act(batch), strict=True)
            refused |= {each: e for each, e in outcomes if isinstance(e, FlowFabricError)}
            progress.advance(task, len(batch))
    touched = len(ids) - len(refused)
    every = dict[str, FlowFabricError]([*found.unknown.items(), *refused.items()])
    if target.json:
        reasons = {each: {"code": e.code, "message": str(e)} for each, e in every.items()}
        screen.emit({done: touched, "refused": reasons})
    else:
        screen.out().print(f"{touched} {done}")
        own_ids = await engine.own_ids([*refused][:REFUSALS_SHOWN_MAX])
        called: dict[str, str] = {
            each: own_ids.get(each) or screen.short_id(each) for each in refused
        }
        _print_refused(every, called)
    if not every:
        return options.OK
    if not all(isinstance(error, NotFound) for error in every.values()):
        return options.REFUSED
    return options.FAILED if touched else options.NOT_FOUND


def _print_refused(refused: Mapping[str, FlowFabricError], called: Mapping[str, str]) -> None:
    if not refused:
        return
    console = screen.err()
    counts = Counter(_refusal(error)[0] for error in refused.values())
    summary = ", ".join(f"{count} {what}" for what, count in counts.most_common())
    console.print(Text(f"{len(refused)} refused: {summary}", style="red"))
    for each, error in list(refused.items())[:REFUSALS_SHOWN_MAX]:
        console.print(Text(f"  {called.get(each, each)}  {_refusal(error)[1]}", style="dim"))


def _refusal(error: FlowFabricError) -> tuple[str, str]:
    """What kind of refusal it is, and the refusal itself with what to do."""
    if isinstance(error, InvalidInput) and error.problem.startswith(ALREADY_TERMINAL):
        state = error.problem.removeprefix(ALREADY_TERMINAL)
        return "already ended", f"is {state}: nothing to cancel; `replay` would run it again"
    return error.code.replace("_", " "), str(error)


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
