"""Kinds, lanes and requirements: as many as there may be, and whatever is accepted is stored."""

import random

import pytest

from flowfabric import Engine
from flowfabric.core.bounds import IDEMPOTENCY_KEY_BYTES_MAX, NAME_BYTES_MAX, ROUTE_KEEP_MS
from flowfabric.core.checks import CSV_MAX_BYTES, TAG_VALUE_MAX_BYTES
from flowfabric.core.gates import GateName, GateOwner
from flowfabric.core.limits import policy_id_of
from flowfabric.core.results import Created
from flowfabric.core.schedules import ScheduleDefinition
from flowfabric.engine.executions import Completion
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.engine.shell import Swept
from flowfabric.errors import InvalidInput
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conformance.auditing import complaints_of
from tests.conformance.given import DAY_MS, WORKER, Given, new
from tests.conformance.graphs import new_graph

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
CHANCE = random.Random(11)


def incompressible(length: int) -> str:
    return "".join(CHANCE.choices(LETTERS, k=length))


async def test_sixty_capabilities_of_sixty_characters_can_be_stored(engine: Engine) -> None:
    needs = [incompressible(60) for _ in range(60)]
    policy = {"routing_requirements": {"required_capabilities": needs}}
    created = await engine.create_execution(new(policy=policy))
    repeated = await engine.create_execution(new(policy=policy))
    claimed = await engine.claim(**WORKER, capabilities=needs)

    assert {type(created), type(repeated)} == {Created}
    assert claimed is not None
    assert await engine.claim(**WORKER, capabilities=needs[1:]) is None


async def test_whatever_is_accepted_can_be_stored(engine: Engine) -> None:
    token = incompressible(CSV_MAX_BYTES)
    value = incompressible(TAG_VALUE_MAX_BYTES)
    created = await engine.create_execution(
        new(
            execution_kind=incompressible(NAME_BYTES_MAX),
            namespace=incompressible(NAME_BYTES_MAX),
            lane_id=incompressible(64),
            idempotency_key=incompressible(IDEMPOTENCY_KEY_BYTES_MAX),
            creator_identity=incompressible(NAME_BYTES_MAX),
            tags={"some.tag": value, "other.tag": value},
            policy={"routing_requirements": {"required_capabilities": [token]}},
        )
    )
    page = await engine.find_executions(ExecutionFilter(tag=("some.tag", value)))

    assert isinstance(created, Created)
    assert [each.execution_id for each in page.executions] == [created.execution_id]


async def test_kinds_that_nothing_uses_are_forgotten_after_a_day(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await given.waiting(execution_kind="used")
    await engine.know_routes([engine.check_request(new(execution_kind="unused"))])
    assert await engine.trim_routes() == Swept(acted=0, full=False)

    clock.advance(ms=ROUTE_KEEP_MS)
    assert (await run_due(engine))["route_retention"] == 1
    assert (await run_due(engine)).get("route_retention", 0) == 0

    claimed = await engine.claim(**WORKER)
    assert claimed is not None
    assert claimed.execution_kind == "used"


async def test_a_kind_that_was_forgotten_is_registered_again(
    engine: Engine, clock: SettableClock
) -> None:
    checked = engine.check_request(new(execution_kind="seldom"))
    await engine.know_routes([checked])
    clock.advance(ms=ROUTE_KEEP_MS)
    assert await engine.trim_routes() == Swept(acted=1, full=False)

    stranger = Engine(engine.store, engine.config, engine.deployment)
    await stranger.create_checked([checked])
    claimed = await engine.claim(**WORKER)
    assert claimed is not None
    assert claimed.execution_kind == "seldom"


async def create(engine: Engine, way: str) -> None:
    """Create an execution of the kind `seldom`."""
    match way:
        case "alone":
            await engine.create_execution(new(execution_kind="seldom"))
        case "among others":
            await engine.create_executions([new(), new(execution_kind="seldom")])
        case "in a flow":
            graph = await new_graph(engine)
            members = graph.new("a", execution_kind="seldom")
            await engine.add_dependencies(graph.flow_id, members=members)
        case _:
            await engine.fire_due_schedules()


@pytest.mark.parametrize("way", ["alone", "among others", "in a flow", "by a schedule"])
async def test_what_is_created_with_a_kind_forgotten_since_can_be_claimed(
    engine: Engine, clock: SettableClock, way: str
) -> None:
    """Processes remember kinds by their own clock, and the database forgets them by its."""
    if way == "by a schedule":
        daily = ScheduleDefinition(
            schedule_id="daily", execution_kind="seldom", every_ms=ROUTE_KEEP_MS
        )
        await engine.upsert_schedule(daily)
    await engine.know_routes([engine.check_request(new(execution_kind="seldom"))])
    clock.advance(ms=ROUTE_KEEP_MS)
    assert await engine.trim_routes() == Swept(acted=1, full=False)
    # Another kind may get the number of the one that is gone.
    stranger = Engine(engine.store, engine.config, engine.deployment)
    await stranger.know_routes([engine.check_request(new(execution_kind="other"))])

    await create(engine, way)

    claimed = await engine.claim(**WORKER, kinds=["seldom"])
    assert claimed is not None
    assert claimed.execution_kind == "seldom"
    assert await complaints_of(engine) == []


async def test_more_kinds_in_use_than_one_look_takes_are_all_looked_at(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    for number in range(3):
        await given.waiting(execution_kind=f"used-{number}")
    clock.advance(ms=ROUTE_KEEP_MS)

    assert await engine.trim_routes(limit=2) == Swept(acted=0, full=True)
    assert await engine.trim_routes(limit=2) == Swept(acted=0, full=False)
    assert (await engine.next_due())["route_retention"] == ROUTE_KEEP_MS


async def test_a_process_asks_for_its_kinds_again_long_before_they_could_be_forgotten(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    await given.waiting(execution_kind="used")
    assert engine.routes
    monkeypatch.setattr("flowfabric.engine.routes.ROUTE_CACHE_MS", -1)

    engine.shell.forget_routes()

    assert engine.routes == {}


async def test_there_is_a_limit_to_kinds_that_says_its_name(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.routes.ROUTES_MAX", 2)
    await given.waiting(execution_kind="a")
    await given.waiting(execution_kind="b")

    with pytest.raises(InvalidInput, match="there may be 2 kinds in a database") as refusal:
        await engine.create_execution(new(execution_kind="c"))

    assert refusal.value.field == "execution_kind"
    assert isinstance(await engine.create_execution(new(execution_kind="a")), Created)


KEYED = policy_id_of("default", "keyed")
KEYS = 10_000


def under(key: str) -> list[GateName]:
    return [GateName(GateOwner.QUOTA, KEYED, key)]


async def finish_all(engine: Engine) -> None:
    while claimed := await engine.claim_many(["default"], limit=1_000, **WORKER):
        await engine.complete_many([Completion(handle=each.handle) for each in claimed])


async def keys_of(engine: Engine) -> list[str]:
    page = await engine.list_limit_use(KEYED, limit=1_000)
    return [each.key for each in page.gates]


async def test_keys_that_nothing_uses_are_forgotten_in_batches(
    engine: Engine, clock: SettableClock
) -> None:
    await engine.set_limit("keyed", active_concurrency_cap=1)
    requests = [new(gates=under(f"key-{n:05}")) for n in range(KEYS)]
    for start in range(0, KEYS, 1_000):
        await engine.create_executions(requests[start : start + 1_000])
    await finish_all(engine)
    clock.advance("40d")
    while (await engine.trim_retention()).full:
        pass
    await engine.create_execution(new(gates=under("key-00007")))
    acted = 0
    while (swept := await engine.trim_routes()).full:
        acted += swept.acted

    assert acted + swept.acted == KEYS - 1
    assert await keys_of(engine) == ["key-00007"]
    assert await engine.claim(**WORKER) is not None
    await engine.create_execution(new(gates=under("key-00008")))
    assert await engine.claim(**WORKER) is not None


async def test_a_key_is_remembered_as_long_as_one_of_its_starts_counts(
    engine: Engine, clock: SettableClock, given: Given
) -> None:
    await engine.set_limit("keyed", window_ms=30 * DAY_MS, max_requests_per_window=1)
    await given.waiting(gates=under("a"), policy={"stream_policy": {"retention_ttl_ms": 1}})
    await finish_all(engine)
    clock.advance("2d")
    await run_due(engine)
    assert await keys_of(engine) == ["a"]
    await given.waiting(gates=under("a"))
    assert await engine.claim(**WORKER) is None
    clock.advance("28d")
    await finish_all(engine)
    clock.advance("40d")
    for _ in range(3):
        await run_due(engine)
    assert await keys_of(engine) == []
