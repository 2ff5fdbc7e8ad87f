"""`flow`: list, show, cancel."""

import heapq
from collections.abc import AsyncIterator
from typing import Final

import click
from rich.text import Text

from flowfabric.cli import options, screen
from flowfabric.cli.screen import fixed, flexible, right
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.flow_endings import CancelWait, NoWait, WaitTimeout
from flowfabric.core.flow_records import CancellationPolicy, FlowState
from flowfabric.core.ids import parse_own_id
from flowfabric.core.policies import span
from flowfabric.core.results import CancellationScheduled, PartiallyCancelled
from flowfabric.core.states import PublicState
from flowfabric.core.views import FlowListItem, FlowStatus
from flowfabric.engine.details import UUID_PART_CHARS_MIN, UUID_PART_HINT
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow_reads import FlowPage
from flowfabric.engine.paging import pages
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.flows.graph import FlowGraph, flow_state, print_graph, read_graph
from flowfabric.parts import check_flow_in

REASONS_SHOWN_MAX: Final = 5
"""How many failed nodes `flow show` explains."""

COLUMNS: Final = (fixed("ID"), fixed("STATE"), flexible("FLOW"), right("AGE"))
_STATES: Final = {
    FlowStatus.ACTIVE: FlowState.RUNNING,
    FlowStatus.COMPLETED: FlowState.COMPLETED,
    FlowStatus.FAILED: FlowState.FAILED,
    FlowStatus.CANCELLED: FlowState.CANCELLED,
}


@click.group("flow")
def flow() -> None:
    """See and cancel flows: executions that wait for each other."""


@flow.command("ls")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([each.value for each in FlowStatus]),
    help="Only these; active is what has not ended: running, waiting or open in `flow show`.",
)
@options.limit_option
@options.on_engine("any")
async def list_flows(
    engine: Engine, target: options.Target, states: tuple[str, ...], limit: int
) -> None:
    """List flows, newest first. With --json: one per line."""
    flows, more = await _newest(engine, target.scope(), states, limit)
    now_ms = await engine.server_time_ms()
    rows = [
        (
            screen.short_id(each.flow_id),
            Text(each.status, style=flow_state(_STATES[each.status]).style),
            each.flow_kind,
            span(now_ms - each.created_at_ms),
        )
        for each in flows
    ]
    screen.show(flows, COLUMNS, rows, as_json=target.json, nothing="No flows match.")
    if more and not target.json:
        screen.err().print(f"[dim]Showing the newest {limit}; --limit shows more.[/]")


async def _newest(
    engine: Engine, namespace: str | None, states: tuple[str, ...], limit: int
) -> tuple[list[FlowListItem], bool]:
    """The engine lists by id, which says nothing about age if programs chose the ids."""
    newest: list[FlowListItem] = []
    count = 0
    async for page in _pages(engine, namespace):
        matching = [each for each in page.flows if not states or each.status in states]
        count += len(matching)
        newest = heapq.nlargest(
            limit, newest + matching, key=lambda each: (each.created_at_ms, each.flow_id)
        )
    return newest, count > limit


def _pages(engine: Engine, namespace: str | None) -> AsyncIterator[FlowPage]:
    return pages(lambda at: engine.list_flows(namespace=namespace, cursor=at, limit=PAGE_MAX))


async def resolve_flow_id(engine: Engine, target: options.Target, text: str) -> str:
    """Resolve a uuid, an own id, or the beginning or end of a uuid that fits only one flow."""
    part, namespace = text.lower(), target.scope()
    if parse_own_id(part, "flow_id") is None:
        flow_id = engine.check_flow_id(part)
        if namespace is not None:
            await check_flow_in(namespace, engine, flow_id, called=text)
        return flow_id
    named = await engine.find_named_flows(text, namespace=namespace)
    if len(named) > 1:
        places = ", ".join(sorted(named))
        raise InvalidInput("flow_id", f"exists in each of {places}; choose with --namespace", text)
    if named:
        return next(iter(named.values()))
    if len(part) < UUID_PART_CHARS_MIN:
        raise NotFound("flow", f"{text} ({UUID_PART_HINT})")
    fitting: list[str] = []
    async for page in _pages(engine, namespace):
        ids = [each.flow_id for each in page.flows]
        fitting += [each for each in ids if each.startswith(part) or each.endswith(part)]
        if len(fitting) > 1:
            break
    if not fitting:
        raise NotFound("flow", text)
    if len(fitting) > 1:
        raise InvalidInput("flow_id", f"fits several flows: {', '.join(fitting)}", text)
    return fitting[0]


@flow.command("show")
@click.argument("flow_id", metavar="ID")
@click.option(
    "--all", "every_node", is_flag=True, help="Print a line for every node, however many there are."
)
@options.on_engine("any")
async def show_flow(engine: Engine, target: options.Target, flow_id: str, every_node: bool) -> None:
    """Show a flow: its nodes, who waits for whom, and how they are doing.

    ID is the flow's own id, or its uuid, which may be shortened to its beginning or end.
    """
    graph = await read_graph(engine, await resolve_flow_id(engine, target, flow_id))
    if graph is None:
        raise NotFound("flow", flow_id)
    if target.json:
        document = screen.plain(graph.flow)
        assert isinstance(document, dict)
        screen.emit(document | {"nodes": graph.nodes, "edges": graph.edges})
        return
    console = screen.out()
    print_graph(console, graph, every_node=every_node)
    await _print_failures(engine, graph)
    if graph.flow.cancel_reason:
        console.print()
        console.print(Text(f"cancelled: {graph.flow.cancel_reason}", style="dim"))


async def _print_failures(engine: Engine, graph: FlowGraph) -> None:
    failed = [
        each
        for each in graph.nodes
        if each.public_state in (PublicState.FAILED, PublicState.EXPIRED)
    ]
    if failed:
        screen.out().print()
    for each in failed[:REASONS_SHOWN_MAX]:
        execution = await engine.describe_execution(each.execution_id)
        reason = None if execution is None else execution.failure_reason
        line = Text.assemble(
            (f"{each.name} ", "red"),
            (f"{screen.short_id(each.execution_id)}  ", "dim"),
            screen.one_line(reason),
        )
        screen.out().print(line, soft_wrap=True)
    if len(failed) > REASONS_SHOWN_MAX:
        left = len(failed) - REASONS_SHOWN_MAX
        screen.out().print(Text(f"and {left} more: --all", style="dim"))


@flow.command("cancel")
@click.argument("flow_id", metavar="ID")
@click.option(
    "--policy",
    type=click.Choice([each.value for each in CancellationPolicy]),
    default=CancellationPolicy.CANCEL_ALL.value,
    show_default=True,
    help="flow_only: no member; cancel_all: every one; cancel_pending: those not yet begun.",
)
@click.option(
    "--reason",
    default="cancelled from the command line",
    show_default=True,
    help="Why; shown with what it cancels.",
)
@click.option(
    "--wait", metavar="DURATION", help="Wait this long for the members to end, such as 30s."
)
@options.on_engine("any")
async def cancel_flow(
    engine: Engine, target: options.Target, flow_id: str, policy: str, reason: str, wait: str | None
) -> int:
    """Close a flow and cancel its members."""
    mode: CancelWait = NoWait() if wait is None else WaitTimeout(options.duration_of("wait", wait))
    flow_id = await resolve_flow_id(engine, target, flow_id)
    answer = await engine.cancel_flow(flow_id, reason=reason, cancellation_policy=policy, wait=mode)
    refused: tuple[str, ...] = ()
    if isinstance(answer, PartiallyCancelled):
        refused, count = answer.failed_member_execution_ids, len(answer.member_execution_ids)
    else:
        count = answer.member_count
    underway = isinstance(answer, CancellationScheduled)
    if target.json:
        screen.emit(
            {
                "flow_id": flow_id,
                "cancellation_policy": answer.cancellation_policy,
                "members": count,
                "underway": underway,
                "refused": refused,
            }
        )
    else:
        how = "are being cancelled" if underway else "cancelled"
        screen.out().print(Text(f"flow {flow_id} closed, {count} members {how}"))
        for each in refused:
            screen.err().print(Text(f"  {screen.short_id(each)} was not cancelled", style="red"))
    return options.REFUSED if refused else options.OK
