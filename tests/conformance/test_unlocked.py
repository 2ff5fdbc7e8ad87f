"""What is decided without locks leaves the same behind as what is decided under them."""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from msgspec import structs

from flowfabric import Engine, EngineConfig
from flowfabric.core.conditions import AllConditions, ByName, Condition, Count, CountKind, Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.flow_records import FlowState
from flowfabric.core.records import Execution, Record, Waitpoint
from flowfabric.core.states import FailureClass
from flowfabric.engine.shell import Swept, execution_key
from flowfabric.engine.topics import DISPATCH_TOPIC
from flowfabric.errors import WaitpointNotFound
from flowfabric.store.base import Key, Reader, Store, UnlockedBody
from flowfabric.store.postgres.store import PostgresStore
from flowfabric.store.sqlite.store import SqliteStore
from flowfabric.testing import SettableClock
from tests.conformance.graphs import new_graph

T = TypeVar("T")
R = TypeVar("R", bound=Record)

SECRET = "ab" * 32
CHANCE = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|fp:\d+|partition_key=\d+|token_fingerprint='[0-9a-f]+'"
)
"""What differs between two executions that go the same way."""
GATE = Single("gate", ByName("approved"))
SIDE = Single("side", ByName("approved"))
TWO_SIGNALS = Count(2, CountKind.DISTINCT_SIGNALS, ("gate", "side"))


class LockingSqlite(SqliteStore):
    async def try_unlocked(self, body: UnlockedBody[T]) -> T | None:
        return None


class LockingPostgres(PostgresStore):
    async def try_unlocked(self, body: UnlockedBody[T]) -> T | None:
        return None


@pytest.fixture(params=["sqlite", "postgres"])
def stores(request: pytest.FixtureRequest) -> list[Callable[[SettableClock], Store]]:
    """The same database twice: with its short cut, and without."""
    if request.param == "sqlite":
        return [
            lambda clock: SqliteStore(":memory:", clock=clock),
            lambda clock: LockingSqlite(":memory:", clock=clock),
        ]
    url = str(request.getfixturevalue("postgres_database"))
    return [
        lambda clock: PostgresStore(url, clock=clock),
        lambda clock: LockingPostgres(url, clock=clock),
    ]


async def left_behind(store: Store, clock: SettableClock, condition: Condition) -> list[str]:
    """Everything that two pauses of one attempt, and the signals to them, write and answer."""
    engine = await Engine.open(store, EngineConfig())
    try:
        await engine.seed_waitpoint_hmac_secret("k1", SECRET)
        events_before = (await engine.read_events(limit=1_000)).cursor
        created = await engine.create_execution(NewExecution(execution_kind="work"))
        found: list[object] = []
        for key in ("first", "second"):
            found += await one_pause(engine, clock, condition, key)
        found.append(await record_of(engine, Execution, execution_key(created.execution_id)))
        found += await engine.list_attempts(created.execution_id)
        events = (await engine.read_events(after=events_before, limit=1_000)).events
        found += [structs.replace(each, event_id=0) for each in events]
        await engine.cancel_execution(created.execution_id, reason="seen enough")
        return without_chance(found)
    finally:
        await engine.close()


async def one_pause(
    engine: Engine, clock: SettableClock, condition: Condition, key: str
) -> list[object]:
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    clock.advance(ms=5)
    paused = await engine.suspend(
        claimed.handle, resume_condition=condition, timeout_in_ms=60_000, idempotency_key=key
    )
    answers: list[object] = [paused.details]
    for name, signal_name in (("gate", "late"), ("gate", "approved"), ("side", "approved")):
        clock.advance(ms=5)
        try:
            answers.append(
                await engine.deliver_operator_signal(
                    claimed.execution_id, name, signal_name=signal_name, source_identity=name
                )
            )
        except WaitpointNotFound as refused:
            answers.append(str(refused))
    details = paused.details
    answers.append(await engine.describe_suspension(claimed.execution_id, details.suspension_id))
    others = [each.waitpoint_id for each in details.additional_waitpoints]
    for waitpoint_id in (details.waitpoint_id, *others):
        at = (*execution_key(claimed.execution_id), waitpoint_id)
        answers.append(await record_of(engine, Waitpoint, at))
    return answers


async def record_of(engine: Engine, record: type[R], key: Key) -> R:
    async def body(reader: Reader) -> R:
        return (await reader.get(record, [key]))[key]

    return await engine.store.read(body)


def without_chance(found: Sequence[object]) -> list[str]:
    """As text, in which ids are told apart by when they first come up."""
    names: dict[str, str] = {}
    return [
        CHANCE.sub(lambda match: names.setdefault(match[0], f"<{len(names)}>"), repr(each))
        for each in found
    ]


@pytest.mark.parametrize("condition", [GATE, AllConditions((GATE, SIDE)), TWO_SIGNALS])
async def test_the_short_cut_leaves_what_the_long_way_leaves(
    stores: Sequence[Callable[[SettableClock], Store]], condition: Condition
) -> None:
    quick, thorough = [
        await left_behind(make(clock), clock, condition)
        for make, clock in ((make, SettableClock()) for make in stores)
    ]
    assert quick == thorough


# Telling dependents

ROUTE = re.compile(r"route_id=\d+")
CHAIN = {"b": "a", "c": "b", "d": "c"}
FAN = {"b": "a", "c": "a", "d": "b c"}


async def flow_left_behind(
    store: Store,
    clock: SettableClock,
    shape: dict[str, str],
    *,
    passing: bool,
    fails: str = "none",
    told_after_ms: int = 5,
) -> list[str]:
    """Everything that a flow writes until its end, if the member `fails` does."""
    engine = await Engine.open(store, EngineConfig())
    try:
        graph = await new_graph(engine)
        events_before = (await engine.read_events(limit=1_000)).cursor
        await graph.build(shape, passing=passing)
        for _ in graph.ids:
            for name, claimed in sorted((await graph.claim()).items()):
                clock.advance(ms=5)
                if name == fails:
                    await engine.fail(
                        claimed.handle, "broken", failure_class=FailureClass.PERMANENT
                    )
                else:
                    await engine.complete(claimed.handle, f"of {name}".encode())
                clock.advance(ms=told_after_ms)
                await graph.settle()
        found: list[object] = [structs.replace(await graph.flow(), edge_groups=())]
        for name, each in graph.ids.items():
            found.append(await record_of(engine, Execution, execution_key(each)))
            found.append(sorted((await engine.read_execution_inputs(each)).items()))
            found.append(await graph.stored_group(name))
        edges = {
            (graph.name(each.upstream_execution_id), graph.name(each.downstream_execution_id)): each
            for each in await engine.list_edges(graph.flow_id)
        }
        found += [edges[ends] for ends in sorted(edges)]
        events = (await engine.read_events(after=events_before, limit=1_000)).events
        found += [structs.replace(each, event_id=0) for each in events]
        # Where several are skipped at once, their ids say who comes first.
        return sorted(ROUTE.sub("", each) for each in without_chance(found))
    finally:
        await engine.close()


@pytest.mark.parametrize("fails", ["none", "a", "b"])
@pytest.mark.parametrize("passing", [False, True])
@pytest.mark.parametrize("shape", [CHAIN, FAN], ids=["chain", "fan"])
async def test_endings_told_without_locks_leave_what_those_under_lock_leave(
    stores: Sequence[Callable[[SettableClock], Store]],
    shape: dict[str, str],
    passing: bool,
    fails: str,
) -> None:
    quick, thorough = [
        await flow_left_behind(make(clock), clock, shape, passing=passing, fails=fails)
        for make, clock in ((make, SettableClock()) for make in stores)
    ]
    assert quick == thorough


@pytest.mark.parametrize("passing", [False, True])
@pytest.mark.parametrize("shape", [CHAIN, FAN], ids=["chain", "fan"])
async def test_a_completion_that_tells_dependents_leaves_what_a_dispatcher_leaves(
    stores: Sequence[Callable[[SettableClock], Store]], shape: dict[str, str], passing: bool
) -> None:
    make, clock = stores[0], SettableClock()
    store = make(clock)
    with store.hints([DISPATCH_TOPIC]):
        at_once = await flow_left_behind(store, clock, shape, passing=passing, told_after_ms=0)
    clock = SettableClock()
    afterwards = await flow_left_behind(make(clock), clock, shape, passing=passing, told_after_ms=0)
    assert at_once == afterwards


async def test_a_completion_leaves_nothing_to_the_dispatcher_of_its_process(
    engine: Engine,
) -> None:
    graph = await new_graph(engine)
    await graph.build(CHAIN)
    with engine.store.hints([DISPATCH_TOPIC]):
        for _ in graph.ids:
            for claimed in (await graph.claim()).values():
                await engine.complete(claimed.handle)
                assert await engine.dispatch_completions() == Swept(acted=0, full=False)
    assert (await graph.flow()).state is FlowState.COMPLETED


async def test_members_that_run_at_the_same_time_leave_their_ends_to_the_dispatcher(
    engine: Engine,
) -> None:
    graph = await new_graph(engine)
    await graph.build(FAN)
    with engine.store.hints([DISPATCH_TOPIC]):
        (first,) = (await graph.claim()).values()
        await engine.complete(first.handle)
        told: list[int] = []
        for claimed in (await graph.claim()).values():
            await engine.complete(claimed.handle)
            told.append((await engine.dispatch_completions()).acted)
    # An ending and an edge; the other one is alone by then.
    assert told == [2, 0]
