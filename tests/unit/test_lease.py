"""Leases: who may act, and how a lease is granted, kept and lost."""

from uuid import uuid4

import pytest
from msgspec import structs

from flowfabric.core.bounds import OUTAGE_MS_MIN, OUTAGE_SLACK_MS
from flowfabric.core.decisions import NO_CHANGES, Refusal, SignsOfLife, Subject, Timing
from flowfabric.core.handles import HandleKind
from flowfabric.core.ids import LeaseId
from flowfabric.core.leases import (
    check_fence,
    check_ttl,
    decide_expire_lease,
    decide_hold,
    decide_renew,
    decide_revoke,
    grant_lease,
    lease_is_dead,
    on_last_chance,
)
from flowfabric.core.parking import decide_delay
from flowfabric.core.records import Attempt
from flowfabric.core.results import AlreadySatisfied, Renewed, Revoked
from flowfabric.core.states import AttemptLifecycle, AttemptType
from flowfabric.errors import (
    ExecutionNotActive,
    FlowFabricError,
    InvalidInput,
    LeaseConflict,
    LeaseExpired,
    LeaseRevoked,
    StaleLease,
)
from tests.unit.lives import (
    LATE,
    LIVES,
    NOW_MS,
    TTL_MS,
    WORKER,
    Life,
    applied,
    expired_lease,
    fence_of,
    ids,
    name_of,
    replayed,
    resumable,
    retrying,
    revoked,
    running,
    taken,
    waiting,
)

HELD = running()


def refusal_of(subject: Subject, now_ms: int = NOW_MS) -> type[Exception]:
    with pytest.raises((FlowFabricError, Refusal)) as caught:
        check_fence(subject, fence_of(HELD), now_ms)
    error = caught.value
    return type(error.error if isinstance(error, Refusal) else error)


def test_a_lease_is_dead_from_the_millisecond_it_ends() -> None:
    execution = HELD.execution
    assert [lease_is_dead(execution, NOW_MS + TTL_MS + step) for step in (-1, 0, 1)] == [
        False,
        True,
        True,
    ]
    assert lease_is_dead(waiting().execution, 0)


def test_the_live_lease_and_nothing_else_may_act() -> None:
    check_fence(HELD, fence_of(HELD), NOW_MS + TTL_MS - 1)
    check_fence(HELD, fence_of(HELD, attempt_index=0), NOW_MS)
    check_fence(HELD, None, NOW_MS)
    wrong = (
        {"lease_id": ids(2).lease_id},
        {"lease_epoch": 2},
        {"attempt_id": ids(2).attempt_id},
        {"attempt_index": 1},
    )
    for fields in wrong:
        for by_handle, error in ((False, StaleLease), (True, LeaseConflict)):
            fence = fence_of(HELD, by_handle=by_handle, **fields)
            with pytest.raises(error):
                check_fence(HELD, fence, NOW_MS)


def test_phase_comes_before_revocation_before_expiry_before_the_fence() -> None:
    assert refusal_of(waiting(), LATE.now_ms) is ExecutionNotActive
    assert refusal_of(revoked(), LATE.now_ms) is LeaseRevoked
    assert refusal_of(taken(expired_lease(), 2), LATE.now_ms) is LeaseExpired
    assert refusal_of(taken(expired_lease(), 2)) is StaleLease


def test_an_expired_lease_is_noted_with_the_refusal_once() -> None:
    with pytest.raises(Refusal) as caught:
        check_fence(HELD, None, LATE.now_ms)
    noted = decide_expire_lease(HELD, LATE)
    assert caught.value.changes == noted.changes != NO_CHANGES
    with pytest.raises(Refusal) as again:
        check_fence(applied(HELD, noted.changes), None, LATE.now_ms)
    assert again.value.changes == NO_CHANGES


@pytest.mark.parametrize(
    ("life", "kind", "attempt_type", "index"),
    [
        (waiting, HandleKind.FRESH, AttemptType.INITIAL, 0),
        (resumable, HandleKind.RESUMED, AttemptType.INITIAL, 0),
        (expired_lease, HandleKind.RECLAIMED, AttemptType.RECLAIM, 1),
        (revoked, HandleKind.RECLAIMED, AttemptType.RECLAIM, 1),
        (replayed, HandleKind.FRESH, AttemptType.REPLAY, 1),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_grant_starts_continues_or_takes_over(
    life: Life, kind: HandleKind, attempt_type: AttemptType, index: int
) -> None:
    before = life()
    granted = grant_lease(before, WORKER, TTL_MS, ids(2), NOW_MS).answer
    assert (granted.kind, granted.attempt.attempt_type) == (kind, attempt_type)
    assert granted.attempt.attempt_index == granted.execution.current_attempt_index == index
    assert granted.execution.lease_epoch == before.execution.lease_epoch + 1
    assert granted.execution.total_attempt_count == index + 1
    same = kind is HandleKind.RESUMED
    assert granted.attempt.attempt_id == ids(1 if same else 2).attempt_id


def test_a_continued_attempt_changes_hands_and_nothing_else() -> None:
    before = resumable()
    assert before.attempt is not None
    later_ms = NOW_MS + 99
    granted = grant_lease(before, WORKER, TTL_MS, ids(2), later_ms).answer
    assert granted.attempt == structs.replace(
        before.attempt,
        attempt_state=AttemptLifecycle.STARTED,
        resumed_at_ms=later_ms,
        suspended_at_ms=None,
        suspension_id=None,
        lease_id=ids(2).lease_id,
        lease_epoch=2,
    )


def test_a_taken_over_attempt_ends_and_another_starts() -> None:
    before = expired_lease()
    assert before.attempt is not None
    later_ms = LATE.now_ms + 99
    decision = grant_lease(before, WORKER, TTL_MS, ids(2), later_ms)
    ended = structs.replace(
        before.attempt,
        attempt_state=AttemptLifecycle.INTERRUPTED_RECLAIMED,
        ended_at_ms=before.execution.lease_expired_at_ms,
        failure_reason="lease_expired",
    )
    started = Attempt(
        partition_key=before.execution.partition_key,
        execution_id=before.execution.execution_id,
        attempt_index=1,
        attempt_id=ids(2).attempt_id,
        attempt_type=AttemptType.RECLAIM,
        attempt_state=AttemptLifecycle.STARTED,
        created_at_ms=later_ms,
        started_at_ms=later_ms,
        lease_id=ids(2).lease_id,
        lease_epoch=2,
        worker_id=WORKER.worker_id,
        worker_instance_id=WORKER.worker_instance_id,
        previous_attempt_index=0,
        reclaim_reason="lease_expired",
    )
    assert decision.changes.inserts == (started,)
    assert decision.changes.updates == (decision.answer.execution, ended)
    assert [(event.event_type, event.reason) for event in decision.changes.events] == [
        ("reclaimed", "lease_expired")
    ]


def test_what_is_not_ready_is_never_granted() -> None:
    for life in LIVES:
        subject = life()
        if not subject.execution.ready:
            with pytest.raises(AssertionError):
                grant_lease(subject, WORKER, TTL_MS, ids(2), NOW_MS)


def test_the_epoch_only_grows() -> None:
    subject = running()
    patient = structs.replace(subject.execution, policy='{"max_worker_deaths": 9}')
    subject = structs.replace(subject, execution=patient)
    epochs = [subject.execution.lease_epoch]
    for number in range(2, 6):
        lost = decide_expire_lease(subject, Timing(now_ms=NOW_MS + 10 * number * TTL_MS))
        subject = taken(applied(subject, lost.changes), number, NOW_MS + 10 * number * TTL_MS)
        epochs.append(subject.execution.lease_epoch)
    assert epochs == [1, 2, 3, 4, 5]
    assert subject.execution.lease_reclaim_count == 4


def test_renewing_counts_from_now_and_keeps_the_epoch() -> None:
    decision = decide_renew(HELD, fence_of(HELD), 301, NOW_MS + 5)
    assert decision.answer == Renewed(expires_at_ms=NOW_MS + 306, lease_epoch=1)
    assert [event.event_type for event in decision.changes.events] == ["renewed"]


def test_holding_extends_the_lease_as_renewing_does_but_tells_nobody() -> None:
    later_ms = NOW_MS + TTL_MS - 1
    held = decide_hold(HELD.execution, fence_of(HELD), TTL_MS, later_ms)
    renewed = decide_renew(HELD, fence_of(HELD), TTL_MS, later_ms)
    assert held.answer == renewed.answer
    assert held.changes.updates == renewed.changes.updates
    assert held.changes.events == ()
    with pytest.raises(LeaseExpired):
        decide_hold(HELD.execution, fence_of(HELD), TTL_MS, NOW_MS + TTL_MS)


def why_not_expired(subject: Subject, now_ms: int) -> str:
    decision = decide_expire_lease(subject, Timing(now_ms=now_ms))
    assert isinstance(decision.answer, AlreadySatisfied)
    assert decision.changes == NO_CHANGES
    return decision.answer.reason


def test_only_a_live_lease_can_expire() -> None:
    assert why_not_expired(running(), NOW_MS) == "not_yet_expired"
    assert why_not_expired(expired_lease(), LATE.now_ms) == "already_expired"
    assert why_not_expired(revoked(), LATE.now_ms) == "already_revoked"
    assert why_not_expired(retrying(), LATE.now_ms) == "not_active"


@pytest.mark.parametrize(
    ("waited_ms", "noticed_after_ms", "calm_ms", "deaths"),
    [
        pytest.param(0, 10, 0, 1, id="nobody was kept waiting"),
        pytest.param(OUTAGE_MS_MIN - 1, 10, 0, 1, id="hardly"),
        pytest.param(OUTAGE_MS_MIN, 10, 0, 0, id="it ended during an outage"),
        pytest.param(60_000, 50_000, 0, 0, id="an outage that began before it ended"),
        pytest.param(60_000, 60_000 + OUTAGE_SLACK_MS, 0, 0, id="or just after"),
        pytest.param(60_000, 60_001 + OUTAGE_SLACK_MS, 0, 1, id="long after"),
        pytest.param(60_000, 10, 5, 0, id="an outage that is over"),
        pytest.param(60_000, 0, TTL_MS, 0, id="it was granted as the outage ended"),
        pytest.param(60_000, 0, TTL_MS + OUTAGE_SLACK_MS, 0, id="or soon after"),
        pytest.param(60_000, 0, TTL_MS + OUTAGE_SLACK_MS + 1, 1, id="long after the outage"),
    ],
)
def test_a_lease_that_meets_an_outage_is_no_death(
    waited_ms: int, noticed_after_ms: int, calm_ms: int, deaths: int
) -> None:
    subject = running()
    ended_ms = subject.execution.lease_expires_at_ms
    assert ended_ms is not None
    now_ms = ended_ms + noticed_after_ms
    lost = decide_expire_lease(subject, Timing(now_ms=now_ms), waited_ms=waited_ms, calm_ms=calm_ms)
    assert applied(subject, lost.changes).execution.worker_deaths == deaths


def test_a_worker_that_notices_its_own_lease_is_alive() -> None:
    subject = running()
    stale = structs.replace(fence_of(subject), lease_id=LeaseId(str(uuid4())))
    for fence, deaths in ((fence_of(subject), 0), (stale, 1), (None, 1)):
        with pytest.raises(Refusal) as refusal:
            check_fence(subject, fence, LATE.now_ms)
        noted = applied(subject, refusal.value.changes).execution
        assert (noted.ready, noted.worker_deaths) == (True, deaths)


@pytest.mark.parametrize(
    ("policy", "deaths", "expected"),
    [
        ("{}", 0, False),
        ("{}", 1, False),
        ("{}", 2, True),
        ('{"max_worker_deaths": 1}', 0, False),
        ('{"max_worker_deaths": 2}', 1, True),
        ('{"max_worker_deaths": 9}', 7, False),
        ('{"max_worker_deaths": 9}', 8, True),
    ],
)
def test_the_last_chance_comes_one_death_before_the_end(
    policy: str, deaths: int, expected: bool
) -> None:
    suspect = structs.replace(HELD.execution, policy=policy, worker_deaths=deaths)
    assert on_last_chance(suspect) is expected


@pytest.mark.parametrize(("renews_first", "deaths"), [(True, 2), (False, 3)])
def test_what_is_renewed_before_it_begins_sees_no_death_until_then(
    *, renews_first: bool, deaths: int
) -> None:
    before = expired_lease()
    lost = structs.replace(before, execution=structs.replace(before.execution, worker_deaths=2))
    now_ms = LATE.now_ms
    claimed = grant_lease(lost, WORKER, TTL_MS, ids(2), now_ms, renews_first=renews_first)
    held = applied(lost, claimed.changes)
    policy = '{"max_worker_deaths": 9}'
    held = structs.replace(held, execution=structs.replace(held.execution, policy=policy))
    late = Timing(now_ms=now_ms + TTL_MS)
    assert applied(held, decide_expire_lease(held, late).changes).execution.worker_deaths == deaths
    renewed = applied(held, decide_renew(held, fence_of(held), TTL_MS, now_ms).changes)
    assert applied(renewed, decide_expire_lease(renewed, late).changes).execution.worker_deaths == 3


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        (SignsOfLife(), True),
        (SignsOfLife(holder_lives=True), True),
        (SignsOfLife(survivors=1), False),
        (SignsOfLife(survivors=2), False),
        (SignsOfLife(stepped=True), False),
    ],
)
def test_those_who_were_heard_of_since_bring_no_last_chance(
    signs: SignsOfLife, *, expected: bool
) -> None:
    suspect = structs.replace(HELD.execution, worker_deaths=2)
    assert on_last_chance(suspect, signs) is expected


@pytest.mark.parametrize(("begun", "deaths"), [(True, 0), (False, 2)])
def test_only_what_has_begun_gets_on_by_being_put_aside(begun: bool, deaths: int) -> None:
    suspect = structs.replace(HELD, execution=structs.replace(HELD.execution, worker_deaths=2))
    aside = decide_delay(suspect, fence_of(HELD), NOW_MS, Timing(now_ms=NOW_MS), begun=begun)
    assert applied(suspect, aside.changes).execution.worker_deaths == deaths


@pytest.mark.parametrize("life", LIVES, ids=name_of)
def test_revoking_answers_in_every_state(life: Life) -> None:
    answers = {
        "running": Revoked(lease_id=ids(1).lease_id, lease_epoch=2),
        "expired_lease": AlreadySatisfied(reason="already_expired"),
        "revoked": AlreadySatisfied(reason="already_revoked"),
    }
    decision = decide_revoke(
        life(),
        expected_lease_id="",
        worker_instance_id="",
        reason="x",
        now_ms=NOW_MS,
    )
    assert decision.answer == answers.get(life.__name__, AlreadySatisfied(reason="no_active_lease"))


def test_a_lease_lasts_a_millisecond_to_a_day() -> None:
    assert [check_ttl(ttl_ms) for ttl_ms in (1, 86_400_000)] == [1, 86_400_000]
    bad: list[object] = [0, 86_400_001, -1, 1.0, "1", None, True]
    for ttl in bad:
        with pytest.raises(InvalidInput, match="lease_ttl_ms"):
            check_ttl(ttl)
