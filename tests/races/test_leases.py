"""Renewals race with reconcilers in other processes: a lease is either kept or lost, never both."""

import asyncio
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flowfabric import Engine, connect
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.events import START, Event, LeaseEventType
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.core.results import Renewed
from flowfabric.errors import (
    ExecutionNotActive,
    FlowFabricError,
    LeaseExpired,
    NotFound,
    RetryExhausted,
)
from flowfabric.worker.leases import BEATS_PER_LEASE, QUEUES_MAX, Heartbeat, HeldLease, clock_s
from tests.races.given import claim, create, running
from tests.races.rival import DEADLOCKS, Rival, connected

SWEEPERS = 3
KEPT = 30
ABANDONED = 30
LEASE_TTL_MS = 600
PATIENT_TTL_MS = 3_000
ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def sweepers(url: str) -> AsyncIterator[None]:
    """Processes that expire leases for as long as this lasts."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.races.sweeper", url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        for _ in range(SWEEPERS)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        await asyncio.gather(*(process.communicate(b"") for process in processes))
    assert [process.returncode for process in processes] == [0] * SWEEPERS


async def lease_events(engine: Engine) -> dict[str, list[Event]]:
    """What happened to each lease, in order."""
    by_lease: dict[str, list[Event]] = defaultdict(list)
    after = START
    while True:
        page = await engine.read_events(after=after, limit=PAGE_MAX, category="lease")
        for event in page.events:
            assert event.lease_id is not None
            by_lease[event.lease_id].append(event)
        if page.cursor == after:
            return by_lease
        after = page.cursor


async def renew_while_others_expire(engine: Engine, kept: list[Handle], rival: Rival) -> int:
    """Renew over and over until every abandoned lease is gone; return how often it worked."""
    expired = "select count(*) from event_log where event_type = 'expired'"
    renewed = 0
    while await rival.count(expired) < ABANDONED:
        outcomes = await engine.renew_many(kept)
        assert {type(outcome) for outcome in outcomes} <= {Renewed, LeaseExpired}
        renewed += sum(isinstance(outcome, Renewed) for outcome in outcomes)
    return renewed


async def test_a_lease_that_was_renewed_is_not_expired_and_the_other_way_round(
    engine: Engine, rival: Rival, postgres_database: str
) -> None:
    for _ in range(KEPT + ABANDONED):
        await create(engine)
    async with sweepers(postgres_database):
        claimed = await claim(engine, "a", limit=KEPT + ABANDONED, lease_ttl_ms=LEASE_TTL_MS)
        kept = [each.handle for each in claimed[:KEPT]]
        abandoned = {each.lease_id for each in claimed[KEPT:]}
        renewed = await renew_while_others_expire(engine, kept, rival)

    events = await lease_events(engine)
    told = [event for each in events.values() for event in each]
    assert renewed == sum(event.event_type == LeaseEventType.RENEWED for event in told)
    for lease_id, history in events.items():
        types = [event.event_type for event in history]
        middle, last = types[1:-1], types[-1]
        assert types[0] == LeaseEventType.ACQUIRED
        assert set(middle) <= {LeaseEventType.RENEWED}, "once it has expired, nothing more happens"
        if lease_id in abandoned:
            assert types == [LeaseEventType.ACQUIRED, LeaseEventType.EXPIRED]
        if last == LeaseEventType.EXPIRED:
            lasted_ms = history[-1].occurred_at_ms - history[-2].occurred_at_ms
            assert lasted_ms >= LEASE_TTL_MS, "not before its time"
    assert await rival.count(DEADLOCKS) == 0


def locking(execution_id: ExecutionId) -> str:
    return f"select from live where execution_id = '{uuid_of(execution_id)}' for update"


async def test_renewing_without_waiting_answers_for_what_others_have_locked(
    engine: Engine, rival: Rival
) -> None:
    locked, free, ended, gone = await running(engine, 4)
    await engine.complete(ended.handle)
    missing = f"where execution_id = '{uuid_of(gone.execution_id)}'"
    for table in ("live", "execution"):
        await rival.execute(f"delete from {table} {missing}")
    async with rival.holding(locking(locked.execution_id)):
        outcomes = await engine.renew_many(
            [each.handle for each in (locked, free, ended, gone)], lock_wait_ms=0
        )
    assert [type(outcome) for outcome in outcomes] == [
        RetryExhausted,
        Renewed,
        ExecutionNotActive,
        NotFound,
    ]
    (renewed,) = await engine.renew_many([locked.handle], lock_wait_ms=0)
    assert isinstance(renewed, Renewed)


async def test_a_row_that_somebody_has_locked_costs_no_other_lease(
    engine: Engine, rival: Rival
) -> None:
    for _ in range(2):
        await create(engine)
    locked, free = (
        HeldLease(claimed, clock_s())
        for claimed in await claim(engine, "holder", limit=2, lease_ttl_ms=PATIENT_TTL_MS)
    )
    renewals = (
        "select count(*) from event_log where event_type = 'renewed'"
        f" and execution_id = '{uuid_of(free.claimed.execution_id)}'"
    )
    heartbeat = Heartbeat(PATIENT_TTL_MS / 1_000, None, engine)
    heartbeat.add(locked)
    heartbeat.add(free)
    async with rival.holding(locking(locked.claimed.execution_id)):
        heartbeat.start()
        # So many take longer than the lease lasted at first.
        while await rival.count(renewals) < 2 * BEATS_PER_LEASE:
            assert free.lost is None
    await heartbeat.stop()
    assert free.may_be_live()


async def test_rows_that_were_locked_for_a_moment_are_renewed_together(
    engine: Engine, rival: Rival, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a batch of another transaction. What has ended meanwhile is not renewed at all."""
    for _ in range(KEPT):
        await create(engine)
    leases = [
        HeldLease(claimed, clock_s())
        for claimed in await claim(engine, "holder", limit=KEPT, lease_ttl_ms=PATIENT_TTL_MS)
    ]
    ended, live = leases[:10], leases[10:]
    heartbeat = Heartbeat(PATIENT_TTL_MS / 1_000, None, engine)
    asked: list[tuple[int, int | None, set[type]]] = []
    again = asyncio.Event()
    renew_many = engine.renew_many

    async def telling(
        handles: Sequence[Handle | bytes], *, lock_wait_ms: int | None = None
    ) -> list[Renewed | FlowFabricError]:
        outcomes = await renew_many(handles, lock_wait_ms=lock_wait_ms)
        if asked:
            again.set()
        else:
            await rival.execute("commit")
            for lease in ended:
                heartbeat.remove(lease)
        asked.append((len(handles), lock_wait_ms, {type(each) for each in outcomes}))
        return outcomes

    await rival.execute("begin")
    for lease in leases:
        heartbeat.add(lease)
        await rival.execute(locking(lease.claimed.execution_id))
    monkeypatch.setattr(engine, "renew_many", telling)
    heartbeat.start()
    async with asyncio.timeout(PATIENT_TTL_MS / 1_000):
        await again.wait()
    await heartbeat.stop()
    assert asked == [(len(leases), 0, {RetryExhausted}), (len(live), 0, {Renewed})]


async def test_a_renewal_takes_its_turn_at_a_row_that_is_locked_without_a_break(
    engine: Engine, rival: Rival, postgres_database: str
) -> None:
    """As by a handler that stores one thing after another: no renewal finds it free."""
    await create(engine)
    (claimed,) = await claim(engine, "holder", limit=1, lease_ttl_ms=PATIENT_TTL_MS)
    lease = HeldLease(claimed, clock_s())
    heartbeat = Heartbeat(PATIENT_TTL_MS / 1_000, None, engine)
    heartbeat.add(lease)
    until_s = clock_s() + 2 * PATIENT_TTL_MS / 1_000

    async def take(holder: Rival) -> None:
        await holder.execute(f"begin; {locking(claimed.execution_id)}")

    async with connected(postgres_database) as other:
        holder, next_one = rival, other
        await take(holder)
        heartbeat.start()
        while clock_s() < until_s and lease.lost is None:
            taking = asyncio.create_task(take(next_one))
            await holder.until_waiting(1)
            await holder.execute("commit")
            await taking
            holder, next_one = next_one, holder
        await holder.execute("commit")
    await heartbeat.stop()
    assert lease.may_be_live()


async def test_a_heartbeat_that_stops_while_renewals_wait_for_locked_rows_says_nothing(
    engine: Engine, rival: Rival, postgres_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One more than wait at a time: it would begin when the engine has been closed."""
    heartbeat = Heartbeat(PATIENT_TTL_MS / 1_000, lambda: connect(postgres_database), engine)
    for claimed in await running(engine, QUEUES_MAX + 1):
        heartbeat.add(HeldLease(claimed, clock_s()))
    async with rival.holding("select from live for update"):
        heartbeat.start()
        await rival.until_waiting(QUEUES_MAX)
        await heartbeat.stop()
    assert caplog.messages == []
