"""Finishing, parking and reporting: answers, effects and repeats."""

import pytest
from msgspec import structs

from flowfabric.core.decisions import NO_CHANGES, Timing
from flowfabric.core.executions import (
    Failure,
    decide_attempt_timeout,
    decide_complete,
    decide_deadline,
    decide_fail,
    decide_progress,
    decide_promote,
)
from flowfabric.core.parking import decide_delay, decide_wait_children, time_left
from flowfabric.core.policies import FixedBackoff, RetryPolicy
from flowfabric.core.results import AlreadySatisfied, Marked, RetryScheduled, TerminalFailed
from flowfabric.core.states import FailureClass, PublicState
from flowfabric.errors import ExecutionNotActive
from tests.unit.lives import (
    ENDED,
    LIVES,
    NOW_MS,
    RETRY,
    TIMING,
    Life,
    applied,
    completed,
    delayed,
    failed,
    fence_of,
    name_of,
    parked,
    resumable,
    retrying,
    running,
    vector,
    waiting,
    waiting_children,
)

HOLDER = fence_of(running())
ID = running().execution.execution_id


def test_a_failure_retries_while_the_policy_allows() -> None:
    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 70}}}
    scheduled = RetryScheduled(execution_id=ID, delay_until_ms=NOW_MS + 70, next_attempt_index=1)
    first = running(policy=policy)
    decision = decide_fail(first, HOLDER, Failure(reason="x"), TIMING)
    assert decision.answer == scheduled
    assert applied(first, decision.changes).execution.retry_count == 1
    permanent = Failure(reason="x", failure_class=FailureClass.PERMANENT)
    assert decide_fail(first, HOLDER, permanent, TIMING).answer == TerminalFailed(execution_id=ID)


def test_a_retry_policy_given_with_the_failure_stands_in_for_the_stored_one() -> None:
    now = RetryPolicy(backoff=FixedBackoff(delay_ms=0))
    answer = decide_fail(running(), HOLDER, Failure(reason="x"), TIMING, now).answer
    assert answer == RetryScheduled(execution_id=ID, delay_until_ms=NOW_MS, next_attempt_index=1)
    never = RetryPolicy(max_retries=0)
    answer = decide_fail(running(policy=RETRY), HOLDER, Failure(reason="x"), TIMING, never).answer
    assert answer == TerminalFailed(execution_id=ID)


def test_chance_spreads_the_retry() -> None:
    jitter = {"type": "exponential", "initial_delay_ms": 100, "jitter": True}
    held = running(policy={"retry_policy": {"backoff": jitter}})
    delays = []
    for chance in (0.0, 0.5, 0.999):
        timing = Timing(now_ms=NOW_MS, chance=chance)
        answer = decide_fail(held, HOLDER, Failure(reason="x"), timing).answer
        assert isinstance(answer, RetryScheduled)
        delays.append(answer.delay_until_ms - NOW_MS)
    assert delays == [50, 75, 100]


def test_a_category_left_out_is_the_class() -> None:
    failure = Failure(reason="x", failure_class=FailureClass.TIMEOUT)
    assert failure.named_category == "timeout"
    assert Failure(reason="x", category="disk").named_category == "disk"


def test_repeats_by_the_last_holder_change_nothing() -> None:
    failure = Failure(reason="other")
    repeated = [
        decide_complete(completed(), HOLDER, b"other", None, TIMING).changes,
        decide_fail(failed(), HOLDER, failure, TIMING).changes,
        decide_fail(retrying(), HOLDER, failure, TIMING).changes,
        decide_delay(parked(), HOLDER, NOW_MS, TIMING).changes,
        decide_delay(resumable(), HOLDER, NOW_MS, TIMING).changes,
        decide_wait_children(waiting_children(), HOLDER, TIMING).changes,
    ]
    assert repeated == [NO_CHANGES] * 6


@pytest.mark.parametrize("life", LIVES, ids=name_of)
def test_nobody_but_the_holder_repeats_anything(life: Life) -> None:
    subject = life()
    if subject.execution.lifecycle_phase == "active":
        return
    stranger = fence_of(running(), lease_epoch=9)
    for fence in (stranger, None):
        with pytest.raises(ExecutionNotActive):
            decide_complete(subject, fence, None, None, TIMING)
        with pytest.raises(ExecutionNotActive):
            decide_fail(subject, fence, Failure(reason="x"), TIMING)
        with pytest.raises(ExecutionNotActive):
            decide_delay(subject, fence, NOW_MS, TIMING)
        with pytest.raises(ExecutionNotActive):
            decide_wait_children(subject, fence, TIMING)


def test_progress_writes_what_is_given() -> None:
    held = running()
    assert decide_progress(held, HOLDER, None, None, TIMING).changes == NO_CHANGES
    half = applied(held, decide_progress(held, HOLDER, 50, None, TIMING).changes)
    told = applied(half, decide_progress(half, HOLDER, None, "on", TIMING).changes)
    execution = told.execution
    assert (execution.progress_pct, execution.progress_message) == (50, "on")


@pytest.mark.parametrize(
    ("deadline_ms", "left_ms"), [(None, None), (NOW_MS + 5, 5), (NOW_MS, 1), (NOW_MS - 9, 1)]
)
def test_parked_time_does_not_count_against_the_attempt(
    deadline_ms: int | None, left_ms: int | None
) -> None:
    execution = structs.replace(running().execution, attempt_deadline_ms=deadline_ms)
    assert time_left(execution, NOW_MS) == left_ms


def test_a_delay_ends_at_its_time_and_keeps_what_the_attempt_is() -> None:
    early = decide_promote(delayed(), Timing(now_ms=NOW_MS + 49))
    assert (early.answer, early.changes) == (AlreadySatisfied(reason="not_yet_due"), NO_CHANGES)
    for life in (delayed, parked, retrying):
        subject = life()
        decision = decide_promote(subject, Timing(now_ms=NOW_MS + 70))
        assert decision.answer == Marked(execution_id=ID, public_state=PublicState.WAITING)
        after = applied(subject, decision.changes).execution
        assert after.attempt_state is subject.execution.attempt_state
        assert (after.delay_until_ms, after.ready) == (None, True)
    for life in (waiting, running, waiting_children, *ENDED):
        assert decide_promote(life(), TIMING).answer == AlreadySatisfied(reason="not_delayed")


def test_an_attempt_times_out_at_its_deadline() -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 5}}
    due = Timing(now_ms=NOW_MS + 5)
    held = running(policy=policy)
    assert decide_attempt_timeout(held, TIMING).answer == AlreadySatisfied(reason="not_yet_due")
    assert decide_attempt_timeout(running(), due).answer == AlreadySatisfied(reason="not_yet_due")
    ended = decide_attempt_timeout(held, due)
    assert ended.answer == Marked(execution_id=ID, public_state=PublicState.EXPIRED)
    retried = running(policy=policy | RETRY)
    decision = decide_attempt_timeout(retried, due)
    assert decision.answer == Marked(execution_id=ID, public_state=PublicState.DELAYED)
    assert vector(applied(retried, decision.changes).execution) == vector(retrying().execution)


def test_a_deadline_ends_whatever_has_not_ended() -> None:
    for life in LIVES:
        subject = life(execution_deadline_at_ms=NOW_MS) if life not in ENDED else life()
        if life in ENDED or life.__name__ == "replayed":
            continue
        decision = decide_deadline(subject, TIMING)
        after = applied(subject, decision.changes).execution
        assert (after.public_state, after.failure_reason) == (
            PublicState.EXPIRED,
            "execution_deadline",
        )
    for life in ENDED:
        assert decide_deadline(life(), TIMING).answer == AlreadySatisfied(reason="already_terminal")
