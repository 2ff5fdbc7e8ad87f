"""Which due times a schedule acts on."""

import pytest
from msgspec import structs

from flowfabric.core.ids import LaneId, Namespace
from flowfabric.core.schedules import (
    CATCH_UP_MAX,
    FIRINGS_MAX,
    LATENESS_MAX_MS,
    CatchUp,
    FiringPlan,
    Interval,
    Schedule,
    ScheduleDefinition,
    ScheduleKind,
    check_definition,
    latest_due,
    merge,
    pause,
    plan,
    resume,
)
from flowfabric.errors import InvalidInput

NOW = 1_000_000_000
EVERY_MS = 10_000
TENS = Interval(EVERY_MS, 0)
SCHEDULE = Schedule(
    namespace=Namespace("default"),
    schedule_id="tens",
    schedule_kind=ScheduleKind.INTERVAL,
    expression=str(EVERY_MS),
    timezone="UTC",
    anchor_at_ms=0,
    catch_up=CatchUp.LATEST,
    lane_id=LaneId("default"),
    execution_kind="work",
    next_due_at_ms=NOW,
    created_at_ms=1,
    updated_at_ms=1,
)


def due(catch_up: CatchUp, next_due_at_ms: int | None) -> Schedule:
    return structs.replace(SCHEDULE, catch_up=catch_up, next_due_at_ms=next_due_at_ms)


@pytest.mark.parametrize("catch_up", CatchUp)
def test_a_due_time_that_has_just_come_fires(catch_up: CatchUp) -> None:
    assert plan(due(catch_up, NOW), TENS, NOW) == FiringPlan((NOW,), NOW + EVERY_MS)
    assert plan(due(catch_up, NOW), TENS, NOW + 900) == FiringPlan((NOW,), NOW + EVERY_MS)


@pytest.mark.parametrize("catch_up", CatchUp)
def test_nothing_fires_early_or_while_paused(catch_up: CatchUp) -> None:
    assert plan(due(catch_up, NOW + EVERY_MS), TENS, NOW) == FiringPlan((), NOW + EVERY_MS)
    assert plan(due(catch_up, None), TENS, NOW) == FiringPlan((), None)


def test_latest_makes_up_for_the_last_missed_due_time_only() -> None:
    missed = due(CatchUp.LATEST, NOW - 500 * EVERY_MS)
    assert plan(missed, TENS, NOW + 1) == FiringPlan((NOW,), NOW + EVERY_MS)


def test_all_makes_up_for_each_missed_due_time_in_order() -> None:
    missed = due(CatchUp.ALL, NOW - 2 * EVERY_MS)
    assert plan(missed, TENS, NOW + 1) == FiringPlan(
        (NOW - 2 * EVERY_MS, NOW - EVERY_MS, NOW), NOW + EVERY_MS
    )


def test_all_goes_on_in_the_next_transaction_after_a_bounded_number() -> None:
    first = NOW - 250 * EVERY_MS
    planned = plan(due(CatchUp.ALL, first), TENS, NOW)
    assert planned.due_at_ms == tuple(first + i * EVERY_MS for i in range(FIRINGS_MAX))
    assert planned.next_due_at_ms == first + FIRINGS_MAX * EVERY_MS


def test_all_drops_what_is_older_than_its_bound() -> None:
    missed = due(CatchUp.ALL, NOW - 1_000_000 * EVERY_MS // 10)
    planned = plan(missed, TENS, NOW)
    assert planned.due_at_ms[0] == NOW - (CATCH_UP_MAX - 1) * EVERY_MS


def test_none_drops_what_is_noticed_too_late() -> None:
    hourly = Interval(3_600_000, 0)
    schedule = due(CatchUp.NONE, 3_600_000)
    in_time, too_late = 3_600_000 + LATENESS_MAX_MS, 3_600_001 + LATENESS_MAX_MS
    assert plan(schedule, hourly, in_time) == FiringPlan((3_600_000,), 7_200_000)
    assert plan(schedule, hourly, too_late) == FiringPlan((), 7_200_000)


@pytest.mark.parametrize("now_ms", [NOW, NOW + 1, NOW + EVERY_MS - 1])
def test_the_latest_due_time_is_found_however_long_ago_the_first_was(now_ms: int) -> None:
    for missed in (0, 1, 2, 3, 1_000, 99_999):
        assert latest_due(TENS, NOW - missed * EVERY_MS, now_ms) == NOW


def test_an_interval_counts_from_its_anchor() -> None:
    every = Interval(1_000, 250)
    assert [every.next_after(at) for at in (0, 250, 1_249, 1_250, 9_999)] == [
        1_250, 1_250, 1_250, 2_250, 10_250,
    ]  # fmt: skip


def test_the_same_definition_again_changes_nothing() -> None:
    existing = structs.replace(SCHEDULE, fired_count=3, last_due_at_ms=NOW - EVERY_MS)
    wanted = structs.replace(
        SCHEDULE,
        anchor_at_ms=NOW + 5,
        next_due_at_ms=NOW + 5 + EVERY_MS,
        created_at_ms=9,
        updated_at_ms=9,
    )
    assert merge(existing, wanted) is existing


def test_another_payload_keeps_the_place_in_time() -> None:
    wanted = structs.replace(
        SCHEDULE, payload=b"new", anchor_at_ms=5, next_due_at_ms=NOW + 77, updated_at_ms=9
    )
    assert merge(SCHEDULE, wanted) == structs.replace(SCHEDULE, payload=b"new", updated_at_ms=9)


def test_another_timing_starts_anew_and_keeps_the_history() -> None:
    existing = structs.replace(SCHEDULE, fired_count=3)
    wanted = structs.replace(
        SCHEDULE, expression="20000", anchor_at_ms=5, next_due_at_ms=NOW + 77, updated_at_ms=9
    )
    assert merge(existing, wanted) == structs.replace(wanted, fired_count=3)


def test_a_pause_outlives_a_new_definition() -> None:
    existing = pause(SCHEDULE, 5)
    wanted = structs.replace(SCHEDULE, expression="20000", updated_at_ms=9)
    assert merge(existing, wanted) == structs.replace(wanted, paused=True, next_due_at_ms=None)


def test_resuming_drops_what_passed_during_the_pause() -> None:
    paused = pause(SCHEDULE, 5)
    assert paused == structs.replace(SCHEDULE, paused=True, next_due_at_ms=None, updated_at_ms=5)
    assert pause(paused, 6) is paused
    resumed = resume(paused, TENS, NOW + 5 * EVERY_MS + 3)
    assert resumed == structs.replace(
        SCHEDULE, next_due_at_ms=NOW + 6 * EVERY_MS, updated_at_ms=NOW + 5 * EVERY_MS + 3
    )
    assert resume(resumed, TENS, NOW + 99 * EVERY_MS) is resumed


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        pytest.param({"every_ms": None}, "cron", id="neither cron nor interval"),
        pytest.param({"cron": "* * * * *"}, "cron", id="both"),
        pytest.param({"every_ms": 999}, "every_ms", id="too often"),
        pytest.param({"every_ms": 1.5}, "every_ms", id="not whole milliseconds"),
        pytest.param({"catch_up": "some"}, "catch_up", id="unknown policy"),
        pytest.param({"schedule_id": ""}, "schedule_id", id="no name"),
        pytest.param({"schedule_id": "x" * 257}, "schedule_id", id="long name"),
        pytest.param({"timezone": ""}, "timezone", id="no zone"),
        pytest.param({"lane_id": ""}, "lane_id", id="no lane"),
        pytest.param({"execution_kind": ""}, "execution_kind", id="no kind"),
        pytest.param({"priority": "high"}, "priority", id="priority in words"),
        pytest.param({"tags": {f"a.b{n}": "" for n in range(63)}}, "tags", id="too many tags"),
    ],
)
def test_a_definition_is_refused_with(fields: dict[str, object], field: str) -> None:
    fine = ScheduleDefinition(schedule_id="s", execution_kind="work", every_ms=1_000)
    with pytest.raises(InvalidInput) as caught:
        check_definition(structs.replace(fine, **fields), payload_bytes_max=10, now_ms=0)
    assert caught.value.field == field
