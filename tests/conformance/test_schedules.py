"""Schedules: one execution per due time, however often and by whom it is looked for."""

import asyncio

import pytest
from msgspec import structs

from flowfabric import Engine, connect
from flowfabric.core.decisions import Changes
from flowfabric.core.results import Created
from flowfabric.core.schedules import (
    FIRINGS_MAX,
    CatchUp,
    Schedule,
    ScheduleDefinition,
    ScheduleKind,
)
from flowfabric.core.views import ExecutionSnapshot
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.engine.shell import Swept
from flowfabric.errors import InvalidInput, InvalidPolicyJson, NotFound, PayloadTooLarge
from flowfabric.reconcilers import due_among, run_due
from flowfabric.store.base import Transaction
from flowfabric.testing import SettableClock

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
HOURLY = ScheduleDefinition(schedule_id="hourly", execution_kind="report", every_ms=HOUR_MS)


async def executions(engine: Engine, schedule_id: str = "hourly") -> list[ExecutionSnapshot]:
    """What a schedule has created, oldest due time first."""
    page = await engine.find_executions(
        ExecutionFilter(tag=("flowfabric.schedule", schedule_id)), limit=1_000
    )
    assert page.next_cursor is None
    return sorted(page.executions, key=lambda each: int(each.tags.get("flowfabric.due_at_ms", 0)))


async def due_times(engine: Engine, schedule_id: str = "hourly") -> list[int]:
    return [
        int(each.tags["flowfabric.due_at_ms"]) for each in await executions(engine, schedule_id)
    ]


async def existing(engine: Engine, schedule_id: str = "hourly") -> Schedule:
    schedule = await engine.describe_schedule(schedule_id)
    assert schedule is not None
    return schedule


async def test_a_new_schedule_waits_for_its_first_due_time(
    engine: Engine, clock: SettableClock
) -> None:
    now_ms = clock.now_ms()
    definition = ScheduleDefinition(
        schedule_id="morning",
        namespace="shop",
        execution_kind="send report",
        cron="  0  6 * *  * ",
        timezone="Europe/Rome",
        catch_up="all",
        lane_id="mail",
        input_payload=b"\x00\xff",
        payload_encoding="raw",
        policy={"max_replay_count": 3},
        priority=7,
        tags={"b.x": "2", "a.x": "1"},
    )

    upserted = await engine.upsert_schedule(definition)

    assert upserted.change == "created"
    stored = await engine.describe_schedule("morning", namespace="shop")
    assert stored == upserted.schedule
    assert structs.asdict(upserted.schedule) == {
        "namespace": "shop",
        "schedule_id": "morning",
        "schedule_kind": ScheduleKind.CRON,
        "expression": "0 6 * * *",
        "timezone": "Europe/Rome",
        "anchor_at_ms": now_ms,
        "catch_up": CatchUp.ALL,
        "paused": False,
        "lane_id": "mail",
        "execution_kind": "send report",
        "payload": b"\x00\xff",
        "payload_encoding": "raw",
        "policy": '{"max_replay_count":3}',
        "priority": 7,
        "tags": '{"a.x":"1","b.x":"2"}',
        # 14 November 2023, 23:13:20 in Rome: the next six o'clock.
        "next_due_at_ms": 1_700_024_400_000,
        "last_due_at_ms": None,
        "last_fired_at_ms": None,
        "last_execution": None,
        "fired_count": 0,
        "last_error": None,
        "created_at_ms": now_ms,
        "updated_at_ms": now_ms,
    }
    assert await engine.describe_schedule("morning") is None


async def test_a_due_time_creates_an_execution_as_defined(
    engine: Engine, clock: SettableClock
) -> None:
    definition = structs.replace(
        HOURLY,
        lane_id="mail",
        input_payload=b"[1]",
        payload_encoding="json",
        priority=9,
        tags={"app.a": "1"},
        policy={"timeout_policy": {"attempt_timeout_ms": 5}},
    )
    await engine.upsert_schedule(definition)
    due_ms = clock.advance(hours=1)

    assert await run_due(engine) == {"schedules": 1}

    (created,) = await executions(engine)
    assert (created.execution_kind, created.lane_id, created.priority, created.tags) == (
        "report",
        "mail",
        9,
        {"app.a": "1", "flowfabric.due_at_ms": str(due_ms), "flowfabric.schedule": "hourly"},
    )
    context = await engine.read_execution_context(created.execution_id)
    assert (context.input_payload, context.payload_encoding) == (b"[1]", "json")
    schedule = await existing(engine)
    assert (schedule.last_execution, schedule.last_due_at_ms, schedule.fired_count) == (
        created.execution_id,
        due_ms,
        1,
    )
    assert schedule.next_due_at_ms == due_ms + HOUR_MS


async def test_nothing_fires_before_its_time_or_twice(engine: Engine, clock: SettableClock) -> None:
    await engine.upsert_schedule(HOURLY)
    clock.advance(ms=HOUR_MS - 1)
    assert due_among(await engine.next_due()) == []
    assert await engine.fire_due_schedules() == Swept(acted=0, full=False)

    due_ms = clock.advance(ms=1)
    assert await engine.fire_due_schedules() == Swept(acted=1, full=False)
    assert await engine.fire_due_schedules() == Swept(acted=0, full=False)
    assert await due_times(engine) == [due_ms]


async def test_defining_it_again_changes_nothing(engine: Engine, clock: SettableClock) -> None:
    first = await engine.upsert_schedule(HOURLY)
    clock.advance(minutes=59)
    again = await engine.upsert_schedule(HOURLY)
    assert (again.change, again.schedule) == ("unchanged", first.schedule)


async def test_a_changed_payload_keeps_the_next_due_time(
    engine: Engine, clock: SettableClock
) -> None:
    first = await engine.upsert_schedule(HOURLY)
    now_ms = clock.advance(minutes=59)
    again = await engine.upsert_schedule(structs.replace(HOURLY, input_payload=b"new"))
    assert again.change == "changed"
    assert again.schedule == structs.replace(first.schedule, payload=b"new", updated_at_ms=now_ms)
    assert await existing(engine) == again.schedule


async def test_a_changed_timing_counts_from_now(engine: Engine, clock: SettableClock) -> None:
    await engine.upsert_schedule(HOURLY)
    now_ms = clock.advance(minutes=59)
    again = await engine.upsert_schedule(structs.replace(HOURLY, every_ms=2 * HOUR_MS))
    assert again.schedule.next_due_at_ms == now_ms + 2 * HOUR_MS


@pytest.mark.parametrize(
    ("catch_up", "missed_hours"),
    [("latest", [5]), ("all", [1, 2, 3, 4, 5]), ("none", [])],
)
async def test_due_times_nobody_noticed(
    engine: Engine, clock: SettableClock, catch_up: str, missed_hours: list[int]
) -> None:
    start_ms = clock.now_ms()
    await engine.upsert_schedule(structs.replace(HOURLY, catch_up=catch_up))
    clock.advance(hours=5, minutes=30)

    await run_due(engine)

    assert await due_times(engine) == [start_ms + hour * HOUR_MS for hour in missed_hours]
    assert (await existing(engine)).next_due_at_ms == start_ms + 6 * HOUR_MS


async def test_many_missed_due_times_are_made_up_for_in_bounded_transactions(
    engine: Engine, clock: SettableClock
) -> None:
    await engine.upsert_schedule(structs.replace(HOURLY, every_ms=1_000, catch_up="all"))
    start_ms = clock.now_ms()
    clock.advance(seconds=2 * FIRINGS_MAX + 5)

    assert await engine.fire_due_schedules() == Swept(acted=1, full=True)
    assert len(await executions(engine)) == FIRINGS_MAX
    assert await run_due(engine) == {"schedules": 2}
    assert await due_times(engine) == [
        start_ms + second * 1_000 for second in range(1, 2 * FIRINGS_MAX + 6)
    ]
    assert (await existing(engine)).fired_count == 2 * FIRINGS_MAX + 5


async def test_a_paused_schedule_lets_due_times_pass(engine: Engine, clock: SettableClock) -> None:
    start_ms = clock.now_ms()
    await engine.upsert_schedule(structs.replace(HOURLY, catch_up="all"))
    paused = await engine.pause_schedule("hourly")
    assert (paused.paused, paused.next_due_at_ms) == (True, None)
    clock.advance(hours=3)
    assert await run_due(engine) == {}
    assert (await engine.upsert_schedule(structs.replace(HOURLY, every_ms=1_000))).schedule.paused
    await engine.upsert_schedule(structs.replace(HOURLY, catch_up="all"))

    resumed = await engine.resume_schedule("hourly")

    assert (resumed.paused, resumed.next_due_at_ms) == (False, start_ms + 4 * HOUR_MS)
    assert await existing(engine) == resumed
    clock.advance(hours=1)
    await run_due(engine)
    assert await due_times(engine) == [start_ms + 4 * HOUR_MS]


async def test_a_removed_schedule_fires_no_more_and_its_executions_stay(
    engine: Engine, clock: SettableClock
) -> None:
    await engine.upsert_schedule(HOURLY)
    clock.advance(hours=1)
    await run_due(engine)
    removed = await engine.remove_schedule("hourly")
    assert removed.fired_count == 1
    clock.advance(hours=5)
    assert await run_due(engine) == {}
    assert len(await executions(engine)) == 1
    assert await engine.describe_schedule("hourly") is None


async def test_a_schedule_removed_and_defined_again_repeats_no_due_time(
    engine: Engine, clock: SettableClock
) -> None:
    cron = structs.replace(HOURLY, every_ms=None, cron="0 * * * *")
    await engine.upsert_schedule(cron)
    clock.set_ms((clock.now_ms() // HOUR_MS + 1) * HOUR_MS)
    await run_due(engine)
    await engine.remove_schedule("hourly")
    clock.set_ms(clock.now_ms() - 1)
    await engine.upsert_schedule(cron)
    clock.advance(ms=1)
    assert await run_due(engine) == {"schedules": 1}
    assert await due_times(engine) == [clock.now_ms()]


@pytest.mark.parametrize(
    "operation", ["pause_schedule", "resume_schedule", "remove_schedule", "trigger_schedule"]
)
async def test_operations_on_a_schedule_that_does_not_exist(engine: Engine, operation: str) -> None:
    await engine.upsert_schedule(HOURLY)
    with pytest.raises(NotFound) as caught:
        await getattr(engine, operation)("hourly", namespace="elsewhere")
    assert (caught.value.entity, caught.value.id) == ("schedule", "hourly")


async def test_a_schedule_runs_out_of_turn_when_asked(engine: Engine, clock: SettableClock) -> None:
    schedule = (await engine.upsert_schedule(HOURLY)).schedule
    created = await engine.trigger_schedule("hourly")
    assert isinstance(created, Created)
    (execution,) = await executions(engine)
    assert (execution.execution_id, execution.tags) == (
        created.execution_id,
        {"flowfabric.schedule": "hourly", "flowfabric.due_at_ms": str(clock.now_ms())},
    )
    assert await existing(engine) == schedule


async def test_a_schedule_that_cannot_be_served_says_so_and_does_not_hold_up_others(
    engine: Engine, clock: SettableClock
) -> None:
    await engine.upsert_schedule(structs.replace(HOURLY, schedule_id="a", lane_id="closed"))
    await engine.upsert_schedule(structs.replace(HOURLY, schedule_id="b"))
    await engine.register_lane("closed")
    await engine.drain_lane("closed")
    due_ms = clock.advance(hours=1)

    await run_due(engine)

    assert await due_times(engine, "a") == []
    assert await due_times(engine, "b") == [due_ms]
    refused = await existing(engine, "a")
    assert refused.last_error == "lane 'closed' is draining and takes no new executions"
    assert refused.next_due_at_ms == due_ms + HOUR_MS

    await engine.resume_lane("closed")
    clock.advance(hours=1)
    await run_due(engine)
    assert (await existing(engine, "a")).last_error is None


async def test_a_time_zone_unknown_here_does_not_hold_up_others(
    engine: Engine, clock: SettableClock
) -> None:
    schedule = (await engine.upsert_schedule(HOURLY)).schedule
    foreign = structs.replace(
        schedule,
        schedule_id="a",
        schedule_kind=ScheduleKind.CRON,
        expression="0 * * * *",
        timezone="Moon/Tycho",
    )

    async def store(tx: Transaction) -> None:
        await tx.save(Changes(inserts=(foreign,)))

    await engine.store.transact(store)
    due_ms = clock.advance(hours=1)

    await run_due(engine)

    assert await due_times(engine) == [due_ms]
    stuck = await existing(engine, "a")
    assert stuck.next_due_at_ms == due_ms + MINUTE_MS
    assert stuck.last_error is not None
    assert "Moon/Tycho" in stuck.last_error


async def test_a_paused_lane_takes_what_its_schedules_create(
    engine: Engine, clock: SettableClock
) -> None:
    await engine.upsert_schedule(HOURLY)
    await engine.register_lane("default")
    await engine.pause_lane("default")
    due_ms = clock.advance(hours=1)
    await run_due(engine)
    assert await due_times(engine) == [due_ms]


async def test_lists_go_by_namespace_and_name_page_by_page(engine: Engine) -> None:
    for namespace, name in (("b", "x"), ("a", "y"), ("a", "x"), ("a", "Z")):
        await engine.upsert_schedule(structs.replace(HOURLY, schedule_id=name, namespace=namespace))

    async def names(namespace: str | None = None) -> list[list[tuple[str, str]]]:
        pages: list[list[tuple[str, str]]] = []
        cursor: str | None = None
        for _ in range(10):
            page = await engine.list_schedules(namespace=namespace, cursor=cursor, limit=2)
            pages.append([(s.namespace, s.schedule_id) for s in page.schedules])
            cursor = page.next_cursor
            if cursor is None:
                break
        return pages

    assert await names() == [[("a", "Z"), ("a", "x")], [("a", "y"), ("b", "x")]]
    assert await names("a") == [[("a", "Z"), ("a", "x")], [("a", "y")]]
    assert await names("c") == [[]]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        pytest.param({"every_ms": None, "cron": "61 * * * *"}, InvalidInput, id="bad cron"),
        pytest.param({"timezone": "Europe/Rome"}, InvalidInput, id="interval in a zone"),
        pytest.param({"every_ms": 10}, InvalidInput, id="too often"),
        pytest.param({"tags": {"b=d": "x"}}, InvalidInput, id="bad tag"),
        pytest.param({"policy": "{"}, InvalidPolicyJson, id="bad policy"),
        pytest.param({"input_payload": b"x" * 5_000_000}, PayloadTooLarge, id="big payload"),
        pytest.param({"schedule_id": "x" * 300}, InvalidInput, id="long name"),
        pytest.param({"namespace": ""}, InvalidInput, id="no namespace"),
    ],
)
async def test_bad_definitions_are_refused_and_nothing_is_written(
    engine: Engine, fields: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await engine.upsert_schedule(structs.replace(HOURLY, **fields))
    assert (await engine.list_schedules()).schedules == ()


async def test_many_processes_that_define_and_fire_at_once_agree(
    store_url: str, engine: Engine, clock: SettableClock
) -> None:
    if ":memory:" in store_url:
        others = [engine, engine]
    else:
        others = [await connect(store_url, clock=clock) for _ in range(2)]
    everyone = [engine, *others]
    try:
        upserted = await asyncio.gather(*(each.upsert_schedule(HOURLY) for each in everyone))
        assert sorted(each.change for each in upserted) == ["created", "unchanged", "unchanged"]
        expected: list[int] = []
        for _ in range(5):
            expected.append(clock.advance(hours=1))
            await asyncio.gather(*(each.fire_due_schedules() for each in everyone))
    finally:
        for other in others:
            if other is not engine:
                await other.close()
    assert await due_times(engine) == expected


async def test_a_schedule_about_to_be_due_wakes_the_reconcilers(engine: Engine) -> None:
    with engine.store.hints(["due"]) as hints:
        await engine.upsert_schedule(HOURLY)
        assert not await hints.wait(0)
        await engine.upsert_schedule(structs.replace(HOURLY, every_ms=1_000))
        assert await hints.wait(5)


async def test_created_executions_are_claimed_like_any_other(
    engine: Engine, clock: SettableClock
) -> None:
    await engine.upsert_schedule(HOURLY)
    clock.advance(hours=1)
    await run_due(engine)
    (execution,) = await executions(engine)
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    assert claimed.execution_id == execution.execution_id
