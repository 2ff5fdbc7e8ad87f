"""Ids as people give them: in full, as a bare uuid, and ids of their own."""

import pytest

from flowfabric import Engine
from flowfabric.core.ids import partition_of, uuid_of
from flowfabric.core.results import Created, Duplicate
from flowfabric.core.states import PublicState
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.testing import SettableClock
from tests.conformance.given import Given, new
from tests.conformance.graphs import new_graph
from tests.conformance.observed import refused, refuses, unchanged

UUID = "550e8400-e29b-41d4-a716-446655440000"


async def test_a_bare_uuid_serves_wherever_an_id_does(engine: Engine, given: Given) -> None:
    graph = await new_graph(engine)
    await graph.build({"b": "a"})
    for execution_id in (await given.waiting(), graph["a"]):
        bare = uuid_of(execution_id)
        described = await engine.describe_execution(bare)
        assert described is not None
        assert described.execution_id == execution_id
        assert await engine.read_execution_state(bare) is PublicState.WAITING
        assert (await engine.cancel_execution(bare, reason="test")).execution_id == execution_id
        assert list(await engine.read_outcomes([bare])) == [execution_id]


async def test_a_uuid_of_the_callers_is_taken_bare(engine: Engine) -> None:
    created = await engine.create_execution(new(execution_id=UUID))
    assert created == Created(execution_id=created.execution_id, public_state=PublicState.WAITING)
    assert created.execution_id == f"{{fp:24}}:{UUID}"
    assert await engine.create_execution(new(execution_id=UUID, lane_id="b")) == Duplicate(
        execution_id=created.execution_id
    )


async def test_executions_of_one_lane_are_spread_over_partitions(given: Given) -> None:
    partitions = {partition_of(await given.waiting()) for _ in range(20)}
    assert len(partitions) > 5


async def test_an_id_of_ones_own_finds_its_execution_again(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    first = await given.waiting(execution_id="order-42")
    described = await engine.describe_execution(first)
    assert described is not None
    assert described.own_id == "order-42"
    assert engine.named_execution_id("order-42", "default") == first
    assert await engine.resolve_execution_id("order-42") == first
    assert await engine.create_execution(
        new(execution_id="order-42", lane_id="other", input_payload=b"x")
    ) == Duplicate(execution_id=first)
    elsewhere = await given.waiting(execution_id="order-42", namespace="shop")
    assert elsewhere != first
    assert await engine.resolve_execution_id("order-42", namespace="shop") == elsewhere

    await engine.cancel_execution(first, reason="no use")
    clock.advance(days=31)
    await engine.trim_retention()
    assert await given.waiting(execution_id="order-42") == first


async def test_an_own_id_that_nobody_has_is_not_found(engine: Engine, given: Given) -> None:
    async with refused(engine, NotFound):
        await engine.resolve_execution_id("order-42")
    beef = await given.waiting(execution_id="beef")
    assert await engine.resolve_execution_id("beef") == beef
    await refuses(engine, "execution_id", "describe_execution", "order-42")


async def test_an_id_of_only_spaces_is_refused(engine: Engine) -> None:
    async with unchanged(engine):
        for text in (" ", "   ", "\u00a0"):
            await refuses(engine, "execution_id", "create_execution", new(execution_id=text))


async def test_the_limit_of_an_id_is_in_bytes(engine: Engine, given: Given) -> None:
    await given.waiting(execution_id="ä" * 128)
    with pytest.raises(InvalidInput, match="258 bytes, at most 256 allowed"):
        await engine.create_execution(new(execution_id="ä" * 129))
