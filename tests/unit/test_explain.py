"""Explanations: one cause for every situation."""

import pytest
from msgspec import structs

from flowfabric.core.conditions import Progress
from flowfabric.core.decisions import Subject, change
from flowfabric.core.diagnosis import Cause, Surroundings, explain
from flowfabric.core.ids import LaneId
from flowfabric.core.records import FailedStep, Lane
from flowfabric.core.states import BlockingReason, EligibilityState, LaneState, LifecyclePhase
from tests.unit.lives import (
    LIVES,
    NOW_MS,
    TTL_MS,
    Life,
    completed,
    delayed,
    failed,
    name_of,
    retrying,
    revoked,
    running,
    suspended,
    waiting,
    waiting_children,
)

SERVED = Surroundings(lane=None, required=(), ahead=0, served=True, now_ms=NOW_MS)
CAUSES = {
    "waiting": Cause.QUEUED,
    "delayed": Cause.DELAYED,
    "running": Cause.RUNNING,
    "retrying": Cause.DELAYED,
    "parked": Cause.DELAYED,
    "resumable": Cause.QUEUED,
    "waiting_children": Cause.BLOCKED,
    "suspended": Cause.SUSPENDED,
    "expired_lease": Cause.LEASE_LOST,
    "revoked": Cause.LEASE_LOST,
    "completed": Cause.ENDED,
    "failed": Cause.ENDED,
    "cancelled": Cause.ENDED,
    "expired": Cause.ENDED,
    "replayed": Cause.QUEUED,
}


@pytest.mark.parametrize("life", LIVES, ids=name_of)
def test_every_life_has_a_cause(life: Life) -> None:
    explanation = explain(life().execution, SERVED)
    assert explanation.cause is CAUSES[life.__name__]
    assert explanation.sentence.endswith(".")


def test_a_suspension_says_what_it_waits_for() -> None:
    suspended = change(
        running().execution,
        NOW_MS,
        lifecycle_phase=LifecyclePhase.SUSPENDED,
        blocking_reason=BlockingReason.WAITING_FOR_SIGNAL,
    )
    explanation = explain(suspended, SERVED)
    assert (explanation.cause, explanation.sentence) == (
        Cause.SUSPENDED,
        "It is suspended: waiting_for_signal.",
    )
    assert explanation.detail == {
        "blocking_reason": "waiting_for_signal",
        "blocking_detail": "",
    }
    named = explain(suspended, structs.replace(SERVED, waits_for=("legal", "finance")))
    assert named.sentence == "It is suspended until it gets a signal: 'legal', 'finance'."
    for came, wanted, left, sentence, remark in (
        (0, 1, ("go",), "It is suspended: waiting_for_signal.", "waits for go"),
        (0, 2, ("a", "b"), "It is suspended: waiting_for_signal.", "0 of 2: still a, b"),
        (1, 2, ("b",), "It is suspended, with 1 of 2 signals: still 'b'.", "1 of 2: still b"),
    ):
        at = structs.replace(SERVED, progress=Progress(came=came, wanted=wanted, left=left))
        explanation = explain(suspended, at)
        assert (explanation.sentence, explanation.remark) == (sentence, remark)


def test_a_suspension_with_a_timeout_says_when() -> None:
    suspended = change(
        running().execution,
        NOW_MS,
        lifecycle_phase=LifecyclePhase.SUSPENDED,
        blocking_reason=BlockingReason.WAITING_FOR_SIGNAL,
    )
    at_ms = 1_800_000_000_000
    timed = structs.replace(
        SERVED, waits_for=("go",), now_ms=at_ms - 7_200_000, times_out_at_ms=at_ms
    )
    explanation = explain(suspended, timed)
    assert explanation.sentence == (
        "It is suspended until it gets a signal: 'go'. It times out in 2h."
    )
    assert explanation.detail["times_out_at_ms"] == at_ms


def test_a_failure_names_its_step() -> None:
    around = structs.replace(
        SERVED, failed_step=FailedStep(step_key="charge#2", name="charge", error="ValueError: no")
    )
    ended = explain(failed().execution, around)
    assert ended.sentence == "It failed at step 'charge': broken."
    retried = explain(retrying().execution, around)
    assert retried.sentence.endswith(" Try 1 failed at step 'charge': flaky.")
    for explanation in (ended, retried):
        assert explanation.detail["failed_step"] == "charge"
        assert explanation.detail["failed_step_key"] == "charge#2"
    assert explain(retrying().execution, SERVED).sentence.endswith(" Try 1 failed: flaky.")


def test_a_lease_that_ended_unnoticed_is_lost() -> None:
    late = structs.replace(SERVED, now_ms=NOW_MS + TTL_MS)
    explanation = explain(running().execution, late)
    assert explanation.cause is Cause.LEASE_LOST
    assert "went quiet 0ms ago" in explanation.sentence
    assert "w-1 went quiet" in explanation.sentence


def test_a_long_delay_is_told_in_days_and_hours() -> None:
    in_two_days = change(
        waiting().execution,
        NOW_MS,
        eligibility_state=EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
        blocking_reason=BlockingReason.WAITING_FOR_DELAY,
        delay_until_ms=NOW_MS + 2 * 86_400_000 + 4 * 3_600_000,
    )
    assert explain(in_two_days, SERVED).sentence == "It waits 2d4h more (delay)."


START = "start one (flowfabric worker module:app)."
NOBODY = (
    "No running worker has a task 'work' in lane 'default': start one that does"
    " (flowfabric worker module:app)."
)


@pytest.mark.parametrize(
    ("late_ms", "served", "cause", "sentence"),
    [
        (-90_000, False, Cause.DELAYED, "It waits 1m30s more (delay)."),
        (0, True, Cause.DELAYED, "It is due (delay): a worker takes it up shortly."),
        (0, False, Cause.NO_WORKER, f"It should have started 0ms ago. {NOBODY}"),
        (448_000, False, Cause.NO_WORKER, f"It should have started 7m28s ago. {NOBODY}"),
    ],
)
def test_what_is_due_and_stays_delayed_lacks_a_worker(
    late_ms: int, served: bool, cause: Cause, sentence: str
) -> None:
    execution = delayed().execution
    assert execution.delay_until_ms is not None
    around = structs.replace(SERVED, served=served, now_ms=execution.delay_until_ms + late_ms)
    explanation = explain(execution, around)
    assert (explanation.cause, explanation.sentence) == (cause, sentence)


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        (
            {"works", "send"},
            "No running worker has a task 'work' in lane 'default'; did you mean 'works'?",
        ),
        ({"send"}, NOBODY),
    ],
)
def test_a_misspelt_task_is_told_which_one_workers_have(kinds: set[str], says: str) -> None:
    around = structs.replace(SERVED, served=False, other_kinds=frozenset(kinds))
    assert explain(waiting().execution, around).sentence == says


def test_a_retry_that_nobody_makes_says_so_and_what_failed() -> None:
    execution = retrying().execution
    around = structs.replace(SERVED, served=False, now_ms=NOW_MS + 60_000)
    assert explain(execution, around).sentence == (
        f"It should have been tried again 59.9s ago. {NOBODY} Try 1 failed: flaky."
    )


@pytest.mark.parametrize(
    ("late_ms", "served", "sentence"),
    [
        (-60_000, False, "It is blocked: no. A worker looks again in 1m."),
        (0, True, "It is blocked: no. A worker looks again shortly."),
        (1, False, f"It is blocked: no. {NOBODY}"),
    ],
)
def test_what_code_blocked_lacks_a_worker_once_it_is_due(
    late_ms: int, served: bool, sentence: str
) -> None:
    execution = change(
        delayed().execution,
        NOW_MS,
        blocking_reason=BlockingReason.WAITING_FOR_CODE,
        blocking_detail="no",
    )
    assert execution.delay_until_ms is not None
    around = structs.replace(SERVED, served=served, now_ms=execution.delay_until_ms + late_ms)
    explanation = explain(execution, around)
    assert (explanation.cause, explanation.sentence) == (Cause.CODE_CHANGED, sentence)


@pytest.mark.parametrize(
    ("late_ms", "attended", "end"),
    [
        (-60_000, False, "It times out in 1m."),
        (0, True, "It has timed out: a worker sees to it shortly."),
        (60_000, False, f"It should have timed out 1m ago. No worker is there: {START}"),
    ],
)
def test_a_timeout_that_nobody_notices_says_so(late_ms: int, attended: bool, end: str) -> None:
    around = structs.replace(
        SERVED, attended=attended, now_ms=NOW_MS + late_ms, times_out_at_ms=NOW_MS
    )
    assert explain(suspended().execution, around).sentence.endswith(f" {end}")


@pytest.mark.parametrize("state", LaneState)
def test_a_closed_lane_comes_before_everything_else(state: LaneState) -> None:
    lane = Lane(lane_id=LaneId("default"), state=state, registered_at_ms=0, registered_by="x")
    alone = structs.replace(SERVED, lane=lane, served=False)
    closed = state in (LaneState.PAUSED, LaneState.DISABLED)
    expected = Cause.LANE_CLOSED if closed else Cause.NO_WORKER
    assert explain(waiting().execution, alone).cause is expected


def blocked_by_code(**fields: object) -> Subject:
    held = delayed(**fields)
    blocked = change(held.execution, NOW_MS, blocking_reason=BlockingReason.WAITING_FOR_CODE)
    return structs.replace(held, execution=blocked)


ALONE = structs.replace(SERVED, served=False, attended=False)
PAUSED = Lane(
    lane_id=LaneId("default"), state=LaneState.PAUSED, registered_at_ms=0, registered_by="x"
)


@pytest.mark.parametrize(
    ("life", "around", "needs"),
    [
        pytest.param(waiting, ALONE, True, id="no worker serves it"),
        pytest.param(waiting, structs.replace(SERVED, lane=PAUSED), True, id="its lane is paused"),
        pytest.param(blocked_by_code, SERVED, True, id="changed code blocks it"),
        pytest.param(waiting_children, ALONE, True, id="no worker sees to what it depends on"),
        pytest.param(revoked, ALONE, True, id="no worker takes it over"),
        pytest.param(waiting, SERVED, False, id="it is in line"),
        pytest.param(delayed, ALONE, False, id="it is not due"),
        pytest.param(running, ALONE, False, id="it runs"),
        pytest.param(suspended, ALONE, False, id="it waits for a signal"),
        pytest.param(waiting_children, SERVED, False, id="others have to end first"),
        pytest.param(completed, ALONE, False, id="it has ended"),
    ],
)
def test_what_only_people_can_change_needs_somebody(
    life: Life, around: Surroundings, needs: bool
) -> None:
    assert explain(life().execution, around).needs_somebody is needs


def test_the_command_that_starts_a_worker_names_lane_and_capabilities() -> None:
    around = structs.replace(SERVED, served=False, required=("cuda", "gpu"))
    assert explain(waiting(lane_id="slow mail").execution, around).sentence == (
        "No running worker has a task 'work' in lane 'slow mail' with capabilities cuda, gpu:"
        " start one that does (flowfabric worker module:app --lane 'slow mail' --capability cuda"
        " --capability gpu)."
    )


@pytest.mark.parametrize(
    ("ahead", "sentence"),
    [
        (0, "It is next in line."),
        (1, "It is next in line after 1 other of its kind."),
        (3, "It is next in line after 3 others of its kind."),
        (None, "It is next in line after many others of its kind."),
    ],
)
def test_the_queue_is_counted(ahead: int | None, sentence: str) -> None:
    around = structs.replace(SERVED, ahead=ahead, required=("cuda", "gpu"))
    explanation = explain(waiting().execution, around)
    assert explanation.sentence == sentence
    assert explanation.detail == {
        "lane_id": "default",
        "execution_kind": "work",
        "required_capabilities": "cuda,gpu",
        "ahead": ahead,
    }
