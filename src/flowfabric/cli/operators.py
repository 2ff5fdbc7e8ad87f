"""`cancel`, `replay`, `accept`, `priority`, `revoke`: by id, or on everything a filter matches."""

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import partial, wraps
from typing import Final, TypeVar

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
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow_operators import BULK_MAX
from flowfabric.engine.paging import pages
from flowfabric.errors import FlowFabricError, InvalidInput, NoActiveLease, NotFound

F = TypeVar("F", bound=Callable[..., object])

REFUSALS_SHOWN_MAX: Final = 10
UNFINISHED: Final = frozenset(PublicState) - TERMINAL_STATES
UNSUCCESSFUL: Final = TERMINAL_STATES - {PublicState.COMPLETED, PublicState.SKIPPED}

Action = Callable[[Engine, Sequence[str], str], Awaitable[Sequence[object]]]
"""Acts on executions for a reason; returns an outcome or an error for each."""


class Selection(Struct, frozen=True):
    """The executions to act on."""

    ids: Sequence[ExecutionId]
    unknown: Mapping[str, FlowFabricError] = {}
    """Ids from the command line that mean no execution, or several, and why."""


def reason_option(default: str) -> Callable[[F], F]:
    return click.option(
        "--reason", default=default, show_default=True, help="Why; shown with the executions."
    )


def by_id_or_filter(
    verb: str,
    done: str,
    *,
    possible: Set[PublicState],
    usual: Set[PublicState] | None = None,
    blocked_only: bool = False,
    default_reason: str | None = None,
) -> Callable[[Action], Callable[..., int]]:
    """Makes an action a command about executions in a `possible` state, by id or by filter.

    Unless --state names states, filters choose executions in a `usual` one. Without a default
    reason there is no option --reason.
    """

    def decorate(action: Action) -> Callable[..., int]:
        @wraps(action)
        async def command(
            engine: Engine,
            target: options.Target,
            chosen: options.Chosen,
            execution_ids: tuple[str, ...],
            yes: bool,
            reason: str = "",
        ) -> int:
            if execution_ids and not chosen.empty:
                raise click.UsageError("give either IDs or filters")
            if execution_ids:
                found = await _find_all(engine, target, execution_ids)
            else:
                states = possible if usual is None or chosen.states else usual
                ids = await _matching_ids(engine, target, verb, chosen, states, blocked_only)
                if ids and not yes:
                    await _confirm(verb, len(ids))
                found = Selection(ids)
            return await _act_on(
                engine, target, done, found, lambda ids: action(engine, ids, reason)
            )

        made = options.on_engine("any")(command)
        made = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")(made)
        if default_reason is not None:
            made = reason_option(default_reason)(made)
        ids = click.argument("execution_ids", metavar="[ID]...", nargs=-1)
        return ids(options.filter_options(made))

    return decorate


@click.command("cancel", short_help="End executions, by id or by filter.")
@by_id_or_filter(
    "cancel", "cancelled", possible=UNFINISHED, default_reason="cancelled from the command line"
)
async def cancel(engine: Engine, execution_ids: Sequence[str], reason: str) -> Sequence[object]:
    """Cancel executions: those with the given IDs, or all unfinished ones that match."""
    return await engine.cancel_executions(execution_ids, reason=reason)


@click.command("replay", short_help="Run ended executions again, by id or by filter.")
@by_id_or_filter(
    "replay",
    "replayed",
    possible=TERMINAL_STATES,
    usual=UNSUCCESSFUL,
    default_reason="replayed from the command line",
)
async def replay(engine: Engine, execution_ids: Sequence[str], reason: str) -> Sequence[object]:
    """Run ended executions again: those with the given IDs, or all failed, cancelled and expired
    ones that match the filters. Name --state completed to run those again, too.
    """
    return await engine.replay_executions(execution_ids, reason=reason, requested_by=options.user())


@click.command("accept", short_help="Let blocked executions run with the code as it is now.")
@by_id_or_filter("accept", "accepted", possible={PublicState.DELAYED}, blocked_only=True)
async def accept(engine: Engine, execution_ids: Sequence[str], _reason: str) -> Sequence[object]:
    """Let executions continue that changed code has blocked: those with the given IDs, or all
    blocked ones that match.

    The call that was refused runs, and stored steps that the code has not asked for by then are
    given up. Nothing that is stored changes: an execution whose arguments or stored results do
    not fit the types in the code is refused.
    """
    return await _one_by_one(engine.accept_changes, execution_ids)


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
@reason_option("revoked from the command line")
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
    engine: Engine,
    target: options.Target,
    verb: str,
    chosen: options.Chosen,
    possible: Set[PublicState],
    blocked_only: bool,
) -> list[ExecutionId]:
    if chosen.empty and target.namespace is None:
        raise click.UsageError("which ones? Give IDs, or a filter such as --state or --lane")
    matching = await chosen.resolve(engine, target)
    states = possible & set(matching.states) if matching.states else possible
    if not states:
        wanted = ", ".join(sorted(possible))
        raise click.UsageError(f"{verb} acts on executions in these states: {wanted}")
    matching = matching.with_states(tuple(sorted(states)))
    ids: list[ExecutionId] = []
    found = pages(lambda at: engine.find_executions(matching, cursor=at, limit=PAGE_MAX))
    with screen.err().status("Looking for executions …"):
        async for page in found:
            fitting = (each for each in page.executions if each.blocked or not blocked_only)
            ids += [each.execution_id for each in fitting if chosen.fits(each)]
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
    engine: Engine,
    target: options.Target,
    done: str,
    found: Selection,
    act: Callable[[Sequence[str]], Awaitable[Sequence[object]]],
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
