"""Many clients submit under one idempotency key: there is one execution, and all learn its id."""

import asyncio
import random

from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import Created, CreateResult, Duplicate
from tests.races.rival import DEADLOCKS, Rival

CLIENTS = 32
KEYS = 20

EXECUTIONS = "select count(*) from execution"
GUARDS = "select count(*) from idempotency_guard"


def keyed(key: str) -> NewExecution:
    return NewExecution(execution_kind="work", idempotency_key=key)


def created_ids(results: list[CreateResult]) -> list[str]:
    return [result.execution_id for result in results if isinstance(result, Created)]


async def test_one_key_from_many_connections_makes_one_execution(
    engine: Engine, rival: Rival
) -> None:
    results = await asyncio.gather(
        *(engine.create_execution(keyed("order-1")) for _ in range(CLIENTS))
    )
    (winner,) = created_ids(results)
    others = [result for result in results if not isinstance(result, Created)]
    assert {*others} == {Duplicate(execution_id=results[0].execution_id)}
    assert results[0].execution_id == winner
    assert await rival.count(EXECUTIONS) == 1
    assert await rival.count(GUARDS) == 1


async def test_batches_with_the_same_keys_in_any_order_make_each_execution_once(
    engine: Engine, rival: Rival
) -> None:
    keys = [f"order-{i}" for i in range(KEYS)]
    batches = [random.sample(keys, KEYS) for _ in range(CLIENTS)]
    results = await asyncio.gather(
        *(engine.create_executions([keyed(key) for key in batch]) for batch in batches)
    )
    by_key: dict[str, set[str]] = {key: set() for key in keys}
    for batch, answers in zip(batches, results, strict=True):
        for key, answer in zip(batch, answers, strict=True):
            by_key[key].add(answer.execution_id)
    assert {len(ids) for ids in by_key.values()} == {1}
    assert len([each for answers in results for each in created_ids(answers)]) == KEYS
    assert await rival.count(EXECUTIONS) == KEYS
    assert await rival.count(DEADLOCKS) == 0


async def test_the_same_ids_in_any_order_make_each_execution_once(
    engine: Engine, rival: Rival
) -> None:
    ids = [f"{{fp:{i}}}:00000000-0000-4000-8000-{i:012x}" for i in range(KEYS)]
    batches = [random.sample(ids, KEYS) for _ in range(CLIENTS)]
    results = await asyncio.gather(
        *(
            engine.create_executions(
                [NewExecution(execution_kind="work", execution_id=each) for each in batch]
            )
            for batch in batches
        )
    )
    assert sorted(each for answers in results for each in created_ids(answers)) == sorted(ids)
    assert await rival.count(EXECUTIONS) == KEYS
    assert await rival.count(DEADLOCKS) == 0


async def test_a_guard_deleted_while_a_repeat_waits_for_it_is_set_anew(
    engine: Engine, rival: Rival
) -> None:
    """Retention deletes a guard between the moment it is met and the moment it is locked."""
    (first,) = created_ids([await engine.create_execution(keyed("order-1"))])
    async with rival.holding("select 1 from idempotency_guard for update"):
        (repeating,) = await rival.queued(engine.create_execution(keyed("order-1")))
        await rival.execute("delete from idempotency_guard")

    (second,) = created_ids([await repeating])
    assert second != first
    assert await engine.create_execution(keyed("order-1")) == Duplicate(
        execution_id=(await repeating).execution_id
    )
