"""Events that commit late, and who subscribes meanwhile."""

import asyncio

from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from tests.races.given import running
from tests.races.rival import Rival

LATE = """
insert into event (occurred_at_ms, category, event_type, namespace, partition_key, execution_id)
values (1, 'operator', 'late', 'default', '{1}', '{00000000-0000-4000-8000-00000000abcd}')
"""


async def submit(engine: Engine, team: str) -> None:
    await engine.create_execution(NewExecution(execution_kind="work", tags={"app.team": team}))


async def test_who_subscribes_while_an_event_is_on_its_way_is_told_of_it(
    engine: Engine, rival: Rival
) -> None:
    (first, second) = await running(engine, 2)
    async with rival.holding(LATE):
        await engine.complete(first.handle)
        subscription = await engine.subscribe_events()
        older = await engine.subscribe_events(after="0")
        await engine.complete(second.handle)
    seen: list[str] = []
    async with asyncio.timeout(10):
        while seen.count("success") < 1:
            told = await anext(subscription)
            seen.append(told.event.event_type)
    assert seen.count("late") == 1
    assert told.event.execution_id == second.execution_id, "the first had ended before"
    async with asyncio.timeout(10):
        all_of_them = [(await anext(older)).event.event_type for _ in range(7)]
    assert all_of_them.index("late") < all_of_them.index("success")


async def test_the_first_event_of_a_log_may_be_on_its_way_when_somebody_subscribes(
    engine: Engine, rival: Rival
) -> None:
    async with rival.holding(LATE):
        await submit(engine, "early")
        subscription = await engine.subscribe_events()
        told = asyncio.ensure_future(anext(subscription))
        await submit(engine, "later")
    async with asyncio.timeout(10):
        assert (await told).event.event_type == "late"
        later = (await anext(subscription)).event
    assert later.details == '{"key":"app.team","value":"later"}'
    assert await subscription.next_if_any() is None


async def test_what_was_rolled_back_is_not_waited_for_and_brings_nothing_back(
    engine: Engine, rival: Rival
) -> None:
    await submit(engine, "first")
    transaction = rival.connection.transaction()
    await transaction.start()
    await rival.execute(LATE)
    await submit(engine, "early")
    await transaction.rollback()
    async with rival.holding(LATE):
        subscription = await engine.subscribe_events()
    async with asyncio.timeout(10):
        assert (await anext(subscription)).event.event_type == "late"
    assert await subscription.next_if_any() is None
