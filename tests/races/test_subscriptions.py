"""Events that commit late, and who subscribes meanwhile."""

import asyncio

from flowfabric import Engine
from tests.races.given import running
from tests.races.rival import Rival

LATE = """
insert into event (occurred_at_ms, category, event_type, namespace, partition_key, execution_id)
values (1, 'operator', 'late', 'default', '{1}', '{00000000-0000-4000-8000-00000000abcd}')
"""


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
        while seen.count("success") < 2:
            seen.append((await anext(subscription)).event.event_type)
    assert seen.count("late") == 1
    async with asyncio.timeout(10):
        all_of_them = [(await anext(older)).event.event_type for _ in range(7)]
    assert all_of_them.index("late") < all_of_them.index("success")
