"""Sixteen processes claim work under limits, and are killed in the middle of it."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

import pytest

from flowfabric import Engine, connect
from flowfabric.core.creation import NewExecution
from flowfabric.core.events import StoredEvent
from flowfabric.core.gates import GateName, GateOwner
from flowfabric.core.results import Created
from flowfabric.core.states import PublicState
from flowfabric.engine.reads import ExecutionFilter
from tests.e2e.claimer import LEASE_TTL_MS
from tests.e2e.conftest import PATIENCE_S, python
from tests.e2e.programs import Program

PROCESSES = 16
KILLED = 8
KEYS = 8
EACH = 60
ALL = "7d9f2c1e-1a1b-4c4d-8e8f-00000000000a"
KEYED = "7d9f2c1e-1a1b-4c4d-8e8f-00000000000b"
RATE, WINDOW_MS, CAP, KEY_CAP = 100, 1_000, 10, 2


async def fill(engine: Engine) -> dict[str, str]:
    """Work under two limits; the key of each execution."""
    await engine.create_quota_policy(
        ALL, window_seconds=WINDOW_MS // 1_000, max_requests_per_window=RATE, max_concurrent=CAP
    )
    await engine.create_quota_policy(KEYED, max_concurrent=KEY_CAP)
    keys: dict[str, str] = {}
    for number in range(KEYS):
        request = NewExecution(
            execution_kind="call",
            policy={"max_worker_deaths": 1_000},
            gates=[
                GateName(GateOwner.QUOTA, ALL),
                GateName(GateOwner.QUOTA, KEYED, f"key-{number}"),
            ],
        )
        for made in await engine.create_executions([request] * EACH):
            assert isinstance(made, Created)
            keys[made.execution_id] = f"key-{number}"
    return keys


async def all_events(engine: Engine, endings: int) -> list[StoredEvent]:
    """The log up to the last of so many endings. A killed process may hold up readers for a while:
    until it is found gone, it might still commit what it has numbers for."""
    found: list[StoredEvent] = []
    cursor: str | int = 0
    while endings > 0:
        page = await engine.read_events(after=cursor, limit=1_000)
        found += page.events
        endings -= sum(each.category == "completion" for each in page.events)
        cursor = page.cursor
    return found


def starts_of(events: Sequence[StoredEvent]) -> list[tuple[int, int, str]]:
    """When each lease began and ended, and whose it was."""
    ended = {
        event.execution_id: event.occurred_at_ms
        for event in events
        if event.category == "completion"
    }
    found: list[tuple[int, int, str]] = []
    for event in events:
        if event.event_type in ("acquired", "reclaimed"):
            assert event.execution_id is not None
            until_ms = event.occurred_at_ms + LEASE_TTL_MS
            # Completed under this lease, unless it had expired before.
            end_ms = ended.get(event.execution_id, until_ms)
            found.append((event.occurred_at_ms, min(end_ms, until_ms), event.execution_id))
    return found


def most_at_once(spans: Sequence[tuple[int, int]]) -> int:
    """What ends in a millisecond has ended before what begins in it."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, 0) for _, end in spans])
    now = most = 0
    for _, begins in changes:
        now += 1 if begins else -1
        most = max(most, now)
    return most


def check(events: Sequence[StoredEvent], keys: Mapping[str, str]) -> None:
    starts = starts_of(events)
    times = sorted(begin for begin, _, _ in starts)
    for first, later in zip(times, times[RATE:], strict=False):
        assert later - first >= WINDOW_MS, "a window has one start too many"
    assert most_at_once([(begin, end) for begin, end, _ in starts]) <= CAP
    by_key = defaultdict[str, list[tuple[int, int]]](list)
    for begin, end, execution_id in starts:
        by_key[keys[execution_id]].append((begin, end))
    assert {key: most_at_once(spans) <= KEY_CAP for key, spans in by_key.items()} == dict.fromkeys(
        keys.values(), True
    )


@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize("store_url", ["postgres"], indirect=True)
async def test_no_limit_is_ever_passed_and_no_slot_is_left(store_url: str) -> None:
    completed = ExecutionFilter(states=(PublicState.COMPLETED,))
    async with await connect(store_url) as engine, AsyncExitStack() as processes:
        keys = await fill(engine)
        running: list[Program] = []

        async def start() -> None:
            name = f"claimer-{len(running)}"
            opened = python("tests.e2e.claimer", store_url, name)
            running.append(await processes.enter_async_context(opened))

        for _ in range(PROCESSES):
            await start()
        killed = done = 0
        while done < len(keys):
            done = len((await engine.find_executions(completed, limit=1_000)).executions)
            (use,) = (await engine.list_limit_use(ALL)).gates
            assert use.running <= CAP
            assert use.started <= RATE
            if killed < KILLED and done > (killed + 1) * len(keys) // (KILLED + 2):
                running.pop(random.randrange(len(running))).kill()
                killed += 1
                await start()
        for process in running:
            process.stdin.close()
        assert killed == KILLED
        check(await all_events(engine, len(keys)), keys)
        for policy in (ALL, KEYED):
            assert {each.running for each in (await engine.list_limit_use(policy)).gates} == {0}
