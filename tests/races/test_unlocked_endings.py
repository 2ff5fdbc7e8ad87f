"""Dependents are told without holding locks: whatever comes between is noticed."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from flowfabric import Engine, connect
from flowfabric.core.records import Record
from flowfabric.store.base import Joined, Parameter
from flowfabric.store.postgres.transaction import UnlockedTransaction
from tests.conformance.auditing import complaints_of
from tests.conformance.graphs import Graph, new_graph
from tests.races.rival import Rival

Deed = Callable[[Graph], Awaitable[object]]


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    """`a` has ended, and `b` waits for it."""
    made = await new_graph(engine)
    await made.build({"b": "a"}, passing=True)
    await made.run("a")
    return made


@pytest.fixture
async def other(graph: Graph, postgres_database: str) -> AsyncIterator[Graph]:
    """The same flow in another process."""
    async with await connect(postgres_database) as engine:
        same = Graph(engine, graph.flow_id)
        same.ids = graph.ids
        yield same


async def dispatch_while(
    monkeypatch: pytest.MonkeyPatch, graph: Graph, deed: Callable[[], Awaitable[object]]
) -> None:
    """Tell of endings, with `deed` done between the read and the write."""
    read = UnlockedTransaction.select_joined
    left = [deed]

    async def reading(
        tx: UnlockedTransaction, records: Sequence[type[Record]], name: str, **asked: Parameter
    ) -> Sequence[Joined]:
        found = await read(tx, records, name, **asked)
        if left:
            await left.pop()()
        return found

    monkeypatch.setattr(UnlockedTransaction, "select_joined", reading)
    await graph.engine.dispatch_completions()
    assert not left


async def told(graph: Graph) -> None:
    assert (await graph.engine.dispatch_completions()).acted == 2


async def cancelled(graph: Graph) -> None:
    await graph.engine.cancel_execution(graph["b"], reason="no longer needed")


async def joined(graph: Graph) -> None:
    members = graph.new("c")
    await graph.engine.add_dependencies(graph.flow_id, [graph.join("c", "a")], members=members)


async def replayed(graph: Graph) -> None:
    await graph.engine.replay_execution(graph["a"])


async def held_longer(graph: Graph) -> None:
    await graph.member("c")
    await graph.edge("c", "b")


@pytest.mark.parametrize(
    ("deed", "states"),
    [
        (told, {"a": "completed", "b": "waiting"}),
        (cancelled, {"a": "completed", "b": "cancelled"}),
        (joined, {"a": "completed", "b": "waiting", "c": "waiting"}),
        (replayed, {"a": "waiting", "b": "waiting_children"}),
        (held_longer, {"a": "completed", "b": "waiting_children", "c": "waiting"}),
    ],
)
async def test_endings_are_told_once_and_to_all(
    monkeypatch: pytest.MonkeyPatch,
    graph: Graph,
    other: Graph,
    deed: Deed,
    states: dict[str, str],
) -> None:
    await dispatch_while(monkeypatch, graph, lambda: deed(other))
    await graph.settle()
    assert {name: await graph.state(name) for name in states} == states
    assert await complaints_of(graph.engine) == []


async def test_who_holds_the_flow_is_not_waited_for(graph: Graph, rival: Rival) -> None:
    async with rival.holding("select 1 from flow for update"):
        assert (await graph.engine.dispatch_completions()).held
    assert (await graph.engine.dispatch_completions()).acted == 2
    assert await graph.state("b") == "waiting"
