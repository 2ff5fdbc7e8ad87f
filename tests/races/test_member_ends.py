"""A member ends in one statement: locks of others are not waited for, their changes are noticed."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

import pytest

from flowfabric import Engine, FlowFabricError, connect
from flowfabric.core.results import Claimed
from flowfabric.engine.topics import DISPATCH_TOPIC
from tests.conformance.auditing import complaints_of
from tests.conformance.graphs import Graph, new_graph
from tests.races.rival import Rival

Deed = Callable[[Graph], Awaitable[object]]

SLOW = """
create function flowfabric.waited_for() returns boolean language plpgsql volatile as $$
begin
    perform pg_advisory_xact_lock_shared(1);
    return true;
end $$;
create role {role} login;
grant usage on schema flowfabric to {role};
grant all on all tables in schema flowfabric to {role};
grant all on all sequences in schema flowfabric to {role};
alter table flowfabric.edge_group enable row level security;
create policy slow on flowfabric.edge_group to {role}
 using (flowfabric.waited_for()) with check (true);
"""
"""The role waits where it looks at a join: a statement has its snapshot by then, and no locks."""
GONE = "drop policy slow on flowfabric.edge_group; drop owned by {role}; drop role {role}"


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    """`b` waits for `a`, and `c` for `b`."""
    made = await new_graph(engine)
    await made.build({"b": "a", "c": "b"}, passing=True)
    return made


@pytest.fixture
async def slow(rival: Rival, postgres_database: str) -> AsyncIterator[Engine]:
    """Another process, as a role that waits."""
    role = f"slow_{uuid.uuid4().hex}"
    await rival.execute(SLOW.format(role=role))
    parts = urlsplit(postgres_database)
    place = parts.netloc.rpartition("@")[2]
    async with await connect(parts._replace(netloc=f"{role}@{place}").geturl()) as engine:
        yield engine
    await rival.execute(GONE.format(role=role))


async def claimed(engine: Engine) -> Claimed:
    found = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert found is not None
    return found


async def revoked(graph: Graph) -> None:
    await graph.engine.revoke_lease(graph["a"], reason="needed elsewhere")


async def cancelled(graph: Graph) -> None:
    await graph.engine.cancel_execution(graph["b"], reason="no longer needed")


async def joined(graph: Graph) -> None:
    members = graph.new("d")
    await graph.engine.add_dependencies(graph.flow_id, [graph.join("d", "a")], members=members)


async def held_longer(graph: Graph) -> None:
    await graph.member("d")
    await graph.edge("d", "b")


async def staged(graph: Graph) -> None:
    await graph.member("d")
    await graph.stage("a", "d")


@pytest.mark.parametrize(
    ("deed", "states"),
    [
        (revoked, {"a": "active", "b": "waiting_children"}),
        (cancelled, {"a": "completed", "b": "cancelled", "c": "skipped"}),
        (joined, {"a": "completed", "b": "waiting", "d": "waiting"}),
        (held_longer, {"a": "completed", "b": "waiting_children", "d": "waiting"}),
        (staged, {"a": "completed", "b": "waiting", "d": "waiting_children"}),
    ],
)
async def test_what_comes_between_is_noticed(
    graph: Graph, slow: Engine, rival: Rival, deed: Deed, states: dict[str, str]
) -> None:
    handle = (await claimed(slow)).handle
    with slow.store.hints([DISPATCH_TOPIC]):
        await rival.execute("select pg_advisory_lock(1)")
        completing = asyncio.create_task(slow.complete(handle, b"1"))
        await rival.until_waiting(1)
        await deed(graph)
        await rival.execute("select pg_advisory_unlock(1)")
        (ended,) = await asyncio.gather(completing, return_exceptions=True)
    assert isinstance(ended, FlowFabricError) is (deed is revoked)
    await graph.settle()
    assert {name: await graph.state(name) for name in states} == states
    assert await complaints_of(graph.engine) == []


@pytest.mark.parametrize(
    "held",
    [
        "select from flow for update",
        "select from edge for update",
        "select from edge_group for update",
        "select from live where join_pending for update",
    ],
)
async def test_nobody_is_waited_for(graph: Graph, rival: Rival, held: str) -> None:
    """The end is then left to the dispatcher."""
    handle = (await claimed(graph.engine)).handle
    with graph.engine.store.hints([DISPATCH_TOPIC]):
        async with rival.holding(held):
            await graph.engine.complete(handle, b"1")
    assert await graph.states() == {
        "a": "completed",
        "b": "waiting_children",
        "c": "waiting_children",
    }
    await graph.settle()
    assert await graph.state("b") == "waiting"
    assert await complaints_of(graph.engine) == []


async def test_an_end_reaches_the_next_in_one_statement(graph: Graph) -> None:
    with graph.engine.store.hints([DISPATCH_TOPIC]):
        await graph.engine.complete((await claimed(graph.engine)).handle, b"1")
    assert await graph.state("b") == "waiting"
    following = await claimed(graph.engine)
    assert (following.execution_id, following.payload) == (graph["b"], b"1")
    assert not (await graph.engine.dispatch_completions()).acted
