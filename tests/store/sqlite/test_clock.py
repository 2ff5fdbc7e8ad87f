"""A wall clock that is set while leases are held."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import Claimed
from flowfabric.engine.shell import Swept
from flowfabric.errors import LeaseExpired
from flowfabric.store.sqlite.connection import Machine, MachineClock
from flowfabric.store.sqlite.store import SqliteStore

TTL_MS = 30_000
HOUR_MS = 3_600_000


class Times:
    """What the clocks of a machine show."""

    def __init__(self) -> None:
        self.uptime_ms = 50_000
        self.wall_ms = 1_800_000_000_000

    def pass_by(self, ms: int) -> None:
        self.uptime_ms += ms
        self.wall_ms += ms


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
async def processes(tmp_path: Path, times: Times) -> AsyncIterator[tuple[Engine, Engine]]:
    """Two engines on one file, as in two processes of one machine."""
    machine = Machine("this", lambda: times.wall_ms, lambda: times.uptime_ms)
    opened = [
        await Engine.open(SqliteStore(f"{tmp_path}/shop.db", clock=MachineClock(machine)))
        for _ in range(2)
    ]
    yield opened[0], opened[1]
    for engine in opened:
        await engine.close()


async def held_by(engine: Engine) -> Claimed:
    await engine.create_execution(NewExecution(execution_kind="work"))
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1", lease_ttl_ms=TTL_MS)
    assert claimed is not None
    return claimed


@pytest.mark.parametrize("set_by_ms", [HOUR_MS, -HOUR_MS])
async def test_setting_the_clock_takes_no_live_lease_away(
    processes: tuple[Engine, Engine], times: Times, set_by_ms: int
) -> None:
    holder, other = processes
    claimed = await held_by(holder)
    times.pass_by(TTL_MS - 1)
    times.wall_ms += set_by_ms
    assert await other.expire_due_leases() == Swept(acted=0, full=False)
    assert await other.server_time_ms() == times.wall_ms
    await holder.complete(claimed.handle, b"done")


@pytest.mark.parametrize("set_by_ms", [HOUR_MS, -HOUR_MS])
async def test_nor_does_it_make_one_last_longer(
    processes: tuple[Engine, Engine], times: Times, set_by_ms: int
) -> None:
    holder, other = processes
    claimed = await held_by(holder)
    times.wall_ms += set_by_ms
    await other.create_execution(NewExecution(execution_kind="work"))
    times.pass_by(TTL_MS)
    with pytest.raises(LeaseExpired):
        await holder.complete(claimed.handle, b"too late")
