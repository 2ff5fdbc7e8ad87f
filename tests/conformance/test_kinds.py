"""Kinds, lanes and requirements: as many as there may be, and whatever is accepted is stored."""

import random

import pytest

from flowfabric import Engine
from flowfabric.core.capabilities import CSV_MAX_BYTES
from flowfabric.core.limits import IDEMPOTENCY_KEY_BYTES_MAX, NAME_BYTES_MAX, ROUTE_KEEP_MS
from flowfabric.core.results import Created
from flowfabric.core.tags import TAG_VALUE_MAX_BYTES
from flowfabric.engine.filters import ExecutionFilter
from flowfabric.engine.operators import Swept
from flowfabric.errors import InvalidInput
from flowfabric.reconcilers.supervisor import run_due
from flowfabric.testing import SettableClock
from tests.conformance.given import WORKER, Given, new

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


async def test_a_process_asks_for_its_kinds_again_long_before_they_could_be_forgotten(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    await given.waiting(execution_kind="used")
    assert engine.routes
    monkeypatch.setattr("flowfabric.engine.routes.ROUTE_CACHE_MS", -1)

    engine.forget_routes()

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
