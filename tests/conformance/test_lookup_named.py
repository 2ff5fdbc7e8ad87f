"""What people at a terminal ask for: the latest events, and executions by ids of their own."""

import pytest

from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import ExecutionId
from flowfabric.errors import InvalidInput, NotFound
from tests.conformance.observed import refuses


async def cancelled(engine: Engine, namespace: str, own_ids: list[str]) -> list[ExecutionId]:
    """Executions that ended together: one row of the log may hold several such events."""
    created = await engine.create_executions(
        [NewExecution(execution_kind="work", execution_id=i, namespace=namespace) for i in own_ids]
    )
    ids = [each.execution_id for each in created]
    await engine.cancel_executions(ids, reason="no")
    return ids


async def test_the_latest_events_are_counted_as_events(engine: Engine) -> None:
    assert await engine.before_latest_events(5) == 0
    for number in range(4):
        for namespace in ("default", "bank"):
            names = [f"{namespace}-{number}-{place}" for place in range(number + 1)]
            await cancelled(engine, namespace, names)
    everything = (await engine.read_events(after=0, limit=1_000)).events

    for only in (None, "bank"):
        for category in (None, "completion"):
            meant = [
                each
                for each in everything
                if only in (None, each.namespace) and category in (None, each.category)
            ]
            assert len(meant) >= 10
            for count in range(1, len(meant) + 3):
                after = await engine.before_latest_events(count, namespace=only, category=category)
                page = await engine.read_events(after=after, limit=1_000, category=category)
                found = [each for each in page.events if only in (None, each.namespace)]
                assert found == meant[-count:]
    await refuses(engine, "count", "before_latest_events", 0)


async def test_an_own_id_is_found_in_whatever_namespace_has_it(engine: Engine) -> None:
    (ours,) = await cancelled(engine, "shop", ["order-1"])
    assert await engine.resolve_execution_id("order-1", namespace=None) == ours
    with pytest.raises(NotFound):
        await engine.resolve_execution_id("order-1")
    with pytest.raises(NotFound):
        await engine.resolve_execution_id("order-2", namespace=None)

    (theirs,) = await cancelled(engine, "bank", ["order-1"])
    with pytest.raises(InvalidInput, match="bank, shop"):
        await engine.resolve_execution_id("order-1", namespace=None)
    assert await engine.resolve_execution_id("order-1", namespace="bank") == theirs
