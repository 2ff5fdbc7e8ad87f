"""Explanations: one cause for every situation."""

import pytest
from msgspec import structs

from flowfabric.core.conditions import Progress
from flowfabric.core.explain import Cause, Surroundings, explain
from flowfabric.core.ids import LaneId
from flowfabric.core.model import Lane
from flowfabric.core.states import BlockingReason, EligibilityState, LaneState, LifecyclePhase
from flowfabric.core.step_model import FailedStep
from flowfabric.core.transition import change
from tests.unit.lives import (
    LIVES,
    NOW_MS,
    TTL_MS,
    Life,
    failed,
    name_of,
    retrying,
    running,
    waiting,
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
    assert ended.sentence == "It has ended as failed at step 'charge': broken."
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
    assert "the lease ended 0ms ago" in explanation.sentence


def test_a_long_delay_is_told_in_days_and_hours() -> None:
    in_two_days = change(
        waiting().execution,
        NOW_MS,
        eligibility_state=EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
        blocking_reason=BlockingReason.WAITING_FOR_DELAY,
        delay_until_ms=NOW_MS + 2 * 86_400_000 + 4 * 3_600_000,
    )
    assert explain(in_two_days, SERVED).sentence == "It waits 2d4h more (delay)."


@pytest.mark.parametrize("state", LaneState)
def test_a_closed_lane_comes_before_everything_else(state: LaneState) -> None:
    lane = Lane(lane_id=LaneId("default"), state=state, registered_at_ms=0, registered_by="x")
    alone = structs.replace(SERVED, lane=lane, served=False)
    closed = state in (LaneState.PAUSED, LaneState.DISABLED)
    expected = Cause.LANE_CLOSED if closed else Cause.NO_WORKER
    assert explain(waiting().execution, alone).cause is expected


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
