"""Keys take turns: what others have waiting does not make a small tenant wait."""

from collections import deque
from collections.abc import Iterable

import pytest

from flowfabric import Engine
from flowfabric.core.gates import GateName, GateOwner
from flowfabric.core.handles import Handle
from flowfabric.core.results import Created
from flowfabric.engine.executions import Completion
from tests.conformance.given import WORKER, new

CAP = "7d9f2c1e-1a1b-4c4d-8e8f-0000000000fa"
TENANTS = 1_000
LARGEST = 2_000
AT_ONCE = 100
"""How many end between two claims: with every tenant at its cap, a run lasts ten of them."""
LASTS = TENANTS // AT_ONCE
NEWCOMERS = 10
TTL_MS = 10 * 60 * 1_000
BATCH = 500


def tenant(key: str) -> list[GateName]:
    return [GateName(GateOwner.QUOTA, CAP, key)]


async def submit(engine: Engine, keys: Iterable[str]) -> list[str]:
    requests = [new(gates=tenant(key)) for key in keys]
    made: list[str] = []
    for start in range(0, len(requests), BATCH):
        for each in await engine.create_executions(requests[start : start + BATCH]):
            assert isinstance(each, Created)
            made.append(each.execution_id)
    return made


async def claim(engine: Engine, spare: int = 0) -> list[tuple[str, Handle]]:
    claimed = await engine.claim_many(
        ["default"], limit=AT_ONCE + spare, lease_ttl_ms=TTL_MS, **WORKER
    )
    return [(each.execution_id, each.handle) for each in claimed]


async def claims_until(
    engine: Engine, execution_id: str, held: deque[Handle], spare: int = 0
) -> int:
    """How often workers ask until one of them has it. The oldest hundred end each time."""
    for asked in range(1, 50):
        ended = [held.popleft() for _ in range(min(AT_ONCE, len(held)))]
        await engine.complete_many([Completion(handle=each) for each in ended])
        claimed = await claim(engine, spare)
        held.extend(handle for _, handle in claimed)
        if execution_id in {each for each, _ in claimed}:
            return asked
    raise AssertionError(f"{execution_id} was never claimed")


async def fill(engine: Engine) -> deque[Handle]:
    """Every tenant at its cap, most with little behind it and one with a lot."""
    backlog = ["tenant-0"] * LARGEST
    backlog += [f"tenant-{n}" for n in range(1, TENANTS) for _ in range(2 + LARGEST // (10 * n))]
    await submit(engine, backlog)
    held = deque[Handle]()
    while claimed := await claim(engine):
        held.extend(handle for _, handle in claimed)
    assert len(held) == TENANTS
    return held


@pytest.fixture
async def empty(engine: Engine) -> int:
    """How many claims a run of one tenant waits where there is nobody else."""
    await engine.create_quota_policy(CAP, max_concurrent=1)
    (alone,) = await submit(engine, ["alone"])
    return await claims_until(engine, alone, deque())


async def test_the_smallest_of_a_thousand_tenants_starts_at_once_where_workers_have_room(
    engine: Engine, empty: int
) -> None:
    held = await fill(engine)
    for number in range(NEWCOMERS):
        (small,) = await submit(engine, [f"small-{number}"])
        assert await claims_until(engine, small, held, spare=AT_ONCE // 10) <= 2 * empty


async def test_the_smallest_of_a_thousand_tenants_is_done_in_twice_the_time_where_workers_are_full(
    engine: Engine, empty: int
) -> None:
    held = await fill(engine)
    for number in range(NEWCOMERS):
        (small,) = await submit(engine, [f"small-{number}"])
        waited = await claims_until(engine, small, held)
        assert waited + LASTS <= 2 * (empty + LASTS)
