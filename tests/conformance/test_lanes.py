"""Lanes: registering, listing, pausing, draining, disabling."""

import asyncio
from collections import Counter

import pytest
from msgspec import structs

from flowfabric import Engine, EngineConfig, connect
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.decisions import Changes
from flowfabric.core.ids import LaneId
from flowfabric.core.records import Lane
from flowfabric.core.results import Duplicate
from flowfabric.core.states import LaneState, PublicState
from flowfabric.engine.lanes import LanePage
from flowfabric.errors import Corruption, LaneNotAccepting, NotFound
from flowfabric.store.base import Transaction
from flowfabric.testing import SettableClock
from tests.conformance.given import WORKER, Given, new
from tests.conformance.observed import execution_of, refused, refuses, unchanged

STATES = {
    "pause_lane": LaneState.PAUSED,
    "resume_lane": LaneState.ACTIVE,
    "drain_lane": LaneState.DRAINING,
    "disable_lane": LaneState.DISABLED,
}


async def test_the_default_lane_exists_from_the_start(engine: Engine, given: Given) -> None:
    (lane,) = (await engine.list_lanes()).lanes
    assert (lane.lane_id, lane.state, lane.registered_by) == (
        "default",
        LaneState.ACTIVE,
        "deployment",
    )
    await engine.pause_lane("default")
    await given.waiting()
    assert await engine.claim(**WORKER) is None


async def test_a_lane_may_be_known_before_its_first_execution(
    engine: Engine, clock: SettableClock
) -> None:
    lane = Lane(
        lane_id=LaneId("mail"),
        state=LaneState.ACTIVE,
        registered_at_ms=clock.now_ms(),
        registered_by="ann",
    )
    assert await engine.register_lane("mail", registered_by="ann") == lane
    clock.advance("1s")
    async with unchanged(engine):
        assert await engine.register_lane("mail", registered_by="bob") == lane
        assert await engine.register_lane("mail") == lane
    assert await engine.list_lanes(cursor="default") == LanePage(lanes=(lane,), next_cursor=None)


@pytest.mark.parametrize("config", [EngineConfig(lanes=("video", "mail", "mail"))])
async def test_lanes_of_the_settings_are_known_from_the_start(
    engine: Engine, clock: SettableClock, config: EngineConfig, store_url: str
) -> None:
    paused = await engine.pause_lane("mail")
    lanes = (await engine.list_lanes()).lanes
    assert [(lane.lane_id, lane.registered_by) for lane in lanes] == [
        ("default", "deployment"),
        ("mail", "configuration"),
        ("video", "configuration"),
    ]
    if not store_url.endswith(":memory:"):
        clock.advance("1s")
        async with await connect(store_url, config=config, clock=clock) as again:
            assert (await again.list_lanes()).lanes == (lanes[0], paused, lanes[2])


async def test_registering_leaves_the_state_of_a_lane_alone(engine: Engine) -> None:
    await engine.register_lane("mail")
    paused = await engine.pause_lane("mail")
    assert await engine.register_lane("mail") == paused


async def test_the_first_execution_registers_its_lane(engine: Engine, given: Given) -> None:
    await given.waiting(lane_id="b")
    await engine.create_executions([new(lane_id="a"), new(lane_id="b"), new(lane_id="c")])
    lanes = (await engine.list_lanes()).lanes
    assert [(lane.lane_id, lane.registered_by) for lane in lanes] == [
        ("a", "create_execution"),
        ("b", "create_execution"),
        ("c", "create_execution"),
        ("default", "deployment"),
    ]


async def test_lanes_are_listed_by_name_in_pages(engine: Engine) -> None:
    names = ["Zebra", "a", "a b", "ab", "default", "~"]
    for name in reversed(names):
        await engine.register_lane(name)
    pages = []
    cursor = None
    while True:
        page = await engine.list_lanes(cursor=cursor, limit=2)
        pages.append([lane.lane_id for lane in page.lanes])
        cursor = page.next_cursor
        if cursor is None:
            break
        assert cursor == pages[-1][-1]
    assert pages == [names[0:2], names[2:4], names[4:6]]
    nothing = LanePage(lanes=(), next_cursor=None)
    assert await engine.list_lanes(limit=0) == nothing
    assert await engine.list_lanes(cursor="~") == nothing


@pytest.mark.parametrize(
    ("change", "takes", "gives"),
    [
        ("pause_lane", True, False),
        ("resume_lane", True, True),
        ("drain_lane", False, True),
        ("disable_lane", False, False),
    ],
)
async def test_a_lanes_state_says_whether_it_takes_work_and_hands_it_out(
    engine: Engine, given: Given, change: str, takes: bool, gives: bool
) -> None:
    waiting = await given.waiting(lane_id="mail", priority=9)
    next_one = await given.waiting(lane_id="mail", priority=8)
    running = await given.running(lane_id="mail")
    await given.waiting(lane_id="other")
    lane = await engine.register_lane("mail")
    changed_at_ms = None if STATES[change] is lane.state else await engine.server_time_ms()
    changed = structs.replace(lane, state=STATES[change], state_changed_at_ms=changed_at_ms)
    assert await getattr(engine, change)("mail") == changed
    async with unchanged(engine):
        assert await getattr(engine, change)("mail") == changed
    if takes:
        await given.waiting(lane_id="mail")
    else:
        async with refused(engine, LaneNotAccepting):
            await engine.create_execution(new(lane_id="mail"))
        async with refused(engine, LaneNotAccepting):
            await engine.create_executions([new(lane_id="other"), new(lane_id="mail")])
    claimed = await engine.claim("mail", **WORKER)
    assert (None if claimed is None else claimed.execution_id) == (waiting if gives else None)
    granted = await engine.claim_for_worker(["mail"], **WORKER)
    assert (None if granted is None else granted.execution_id) == (next_one if gives else None)
    assert (await engine.complete(running.handle)).public_state is PublicState.COMPLETED


async def test_a_resumed_lane_goes_on_where_it_was(engine: Engine, given: Given) -> None:
    waiting = await given.waiting()
    for change in ("pause_lane", "disable_lane"):
        await getattr(engine, change)("default")
        assert await engine.claim(**WORKER) is None
        assert await engine.read_execution_state(waiting) is PublicState.WAITING
    await engine.resume_lane("default")
    assert (await given.taken()).execution_id == waiting


async def test_resuming_a_lane_wakes_the_workers_that_wait_for_it(
    engine: Engine, given: Given
) -> None:
    waiting = await given.waiting()
    await engine.pause_lane("default")
    claim = asyncio.create_task(engine.claim(**WORKER, max_wait_ms=60_000))
    await asyncio.sleep(0)
    await engine.resume_lane("default")
    claimed = await claim
    assert claimed is not None
    assert claimed.execution_id == waiting


async def test_one_paused_lane_does_not_hold_up_the_others(engine: Engine, given: Given) -> None:
    await given.waiting(lane_id="paused", priority=9)
    other = await given.waiting(lane_id="open")
    await engine.pause_lane("paused")
    claimed = await engine.claim_many(["paused", "open"], limit=5, **WORKER)
    assert [each.execution_id for each in claimed] == [other]


@pytest.mark.parametrize("operation", STATES)
async def test_a_state_may_be_asked_for_twice(engine: Engine, operation: str) -> None:
    await engine.register_lane("mail")
    once = await getattr(engine, operation)("mail")
    assert once.state is STATES[operation]
    async with unchanged(engine):
        assert await getattr(engine, operation)("mail") == once


async def test_a_lane_nobody_could_have_registered_is_corruption(engine: Engine) -> None:
    bad = structs.replace(await engine.register_lane("mail"), lane_id=LaneId("bad\nlane"))

    async def body(tx: Transaction) -> None:
        await tx.save(Changes(inserts=(bad,)))

    await engine.store.transact(body)
    with pytest.raises(Corruption, match="lane_id"):
        await engine.list_lanes()


async def test_bad_lanes_are_refused(engine: Engine) -> None:
    bad: list[object] = ["", "l" * 65, "bad\nlane", "läne", None, 5]
    async with unchanged(engine):
        for lane_id in bad:
            for operation in ("register_lane", *STATES):
                await refuses(engine, "lane_id", operation, lane_id)
        for registered_by in (5, None, "r" * 257):
            await refuses(
                engine, "registered_by", "register_lane", "mail", registered_by=registered_by
            )
        for limit in (-1, PAGE_MAX + 1, "5"):
            await refuses(engine, "limit", "list_lanes", limit=limit)
        for cursor in ("", "l" * 65, 5):
            await refuses(engine, "cursor", "list_lanes", cursor=cursor)
    async with refused(engine, NotFound) as caught:
        await engine.resume_lane("unknown")
    assert (caught.value.entity, caught.value.id) == ("lane", "unknown")


async def test_a_lane_can_be_closed_before_its_first_execution(engine: Engine) -> None:
    assert (await engine.drain_lane("mail")).state is LaneState.DRAINING
    async with refused(engine, LaneNotAccepting):
        await engine.create_execution(new(lane_id="mail"))
    assert (await engine.resume_lane("mail")).state is LaneState.ACTIVE


@pytest.mark.parametrize("close", ["pause_lane", "drain_lane", "disable_lane"])
async def test_a_repeat_is_answered_wherever_the_lane_stands(
    engine: Engine, given: Given, close: str
) -> None:
    keyed = await given.waiting(idempotency_key="k")
    named = await given.waiting()
    await getattr(engine, close)("default")
    for repeat, found in ((new(idempotency_key="k"), keyed), (new(execution_id=named), named)):
        assert await engine.create_execution(repeat) == Duplicate(execution_id=found)
    if close != "pause_lane":
        for request in (new(idempotency_key="fresh"), new()):
            async with refused(engine, LaneNotAccepting):
                await engine.create_execution(request)
        async with refused(engine, LaneNotAccepting):
            await engine.create_executions([new(idempotency_key="k"), new()])


async def test_a_lane_knows_since_when_it_is_in_its_state(
    engine: Engine, clock: SettableClock
) -> None:
    registered = await engine.register_lane("mail")
    assert registered.state_changed_at_ms is None
    paused_at_ms = clock.advance("1m")
    assert (await engine.pause_lane("mail")).state_changed_at_ms == paused_at_ms
    clock.advance("1m")
    paused = await engine.pause_lane("mail")
    assert paused.state_changed_at_ms == paused_at_ms
    lanes = {lane.lane_id: lane for lane in (await engine.list_lanes()).lanes}
    assert lanes[paused.lane_id] == paused
    resumed_at_ms = clock.advance("1m")
    assert (await engine.resume_lane("mail")).state_changed_at_ms == resumed_at_ms


# Weights ------------------------------------------------------------------------


async def fill(given: Given, count: int) -> None:
    for lane in ("a", "b", "c"):
        for _ in range(count):
            await given.waiting(lane_id=lane)


WEIGHTS = {"a": 5, "b": 3, "c": 1}


@pytest.mark.parametrize("limit", [1, 4, 9, 30])
async def test_lanes_with_weights_get_their_share_call_after_call(
    engine: Engine, given: Given, limit: int
) -> None:
    await fill(given, 60)
    got: Counter[str] = Counter()
    while sum(got.values()) < 90:
        claimed = await engine.claim_many(WEIGHTS, limit=limit, **WORKER)
        assert len(claimed) == limit
        got.update(each.lane_id for each in claimed)
    total = sum(got.values())
    shares = {lane: got[lane] / total for lane in WEIGHTS}
    assert shares == pytest.approx({"a": 5 / 9, "b": 3 / 9, "c": 1 / 9}, rel=0.1)


async def test_what_a_lane_has_no_work_for_goes_to_the_others(engine: Engine, given: Given) -> None:
    await given.waiting(lane_id="a")
    for _ in range(6):
        await given.waiting(lane_id="c")
    claimed = await engine.claim_many(WEIGHTS, limit=5, **WORKER)
    assert Counter(each.lane_id for each in claimed) == {"a": 1, "c": 4}
    claimed = await engine.claim_many(WEIGHTS, limit=5, **WORKER)
    assert Counter(each.lane_id for each in claimed) == {"c": 2}
    assert await engine.claim_many(WEIGHTS, limit=5, **WORKER) == []


async def test_lanes_of_equal_weight_are_one_queue(engine: Engine, given: Given) -> None:
    low = await given.waiting(lane_id="a", priority=1)
    high = await given.waiting(lane_id="b", priority=2)
    claimed = await engine.claim_many({"a": 3, "b": 3}, limit=2, **WORKER)
    assert [each.execution_id for each in claimed] == [high, low]


async def test_a_scheduler_grants_by_weight_too(engine: Engine, given: Given) -> None:
    await fill(given, 10)
    got: Counter[str] = Counter()
    for _ in range(18):
        grant = await engine.claim_for_worker(WEIGHTS, **WORKER)
        assert grant is not None
        got[(await execution_of(engine, grant.execution_id)).lane_id] += 1
    assert got == {"a": 10, "b": 6, "c": 2}
    for _ in range(12):
        assert await engine.claim_for_worker(WEIGHTS, **WORKER) is not None
    assert await engine.claim_for_worker(WEIGHTS, **WORKER) is None


async def test_bad_weights_are_refused(engine: Engine) -> None:
    async with unchanged(engine):
        for field, lanes in (
            ("lane_ids", {}),
            ("lane_ids['a']", {"a": 0}),
            ("lane_ids['a']", {"a": "5"}),
            ("lane_id", {"": 1}),
        ):
            await refuses(engine, field, "claim_many", lanes, limit=1, **WORKER)
            await refuses(engine, field, "claim_for_worker", lanes, **WORKER)
