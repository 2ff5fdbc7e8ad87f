"""Which executions a worker may claim by id."""

from collections.abc import Callable

import pytest
from msgspec import structs

from flowfabric.core.decisions import NO_CHANGES, Changes, Refusal, Subject
from flowfabric.core.grants import (
    GrantKey,
    GrantRequest,
    Where,
    check_leaseable,
    decide_grant,
    decide_reclaim_grant,
    hands_out,
    opens,
    read_key,
    show,
    unused_starts,
)
from flowfabric.core.ids import ExecutionId, GateId, LaneId
from flowfabric.core.records import Execution, GrantKind, Lane
from flowfabric.core.situations import READY, Hold, Operation, held_by, situation_of
from flowfabric.core.states import (
    AttemptState,
    EligibilityState,
    LaneState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.errors import (
    ActiveAttemptExists,
    ExecutionNotActive,
    ExecutionNotLeaseable,
    FlowFabricError,
    LeaseConflict,
)
from tests.unit.lives import (
    NOW_MS,
    TIMING,
    WORKER,
    Life,
    applied,
    expired_lease,
    resumable,
    revoked,
    waiting,
)
from tests.unit.test_situations import OPERATIONS, Act

IN_ORDER: list[tuple[dict[str, object], type[FlowFabricError]]] = [
    ({"lifecycle_phase": LifecyclePhase.TERMINAL}, ExecutionNotActive),
    ({"lifecycle_phase": LifecyclePhase.ACTIVE}, ExecutionNotLeaseable),
    ({"lifecycle_phase": LifecyclePhase.SUSPENDED}, ExecutionNotLeaseable),
    ({"lifecycle_phase": LifecyclePhase.SUBMITTED}, ExecutionNotLeaseable),
    ({"ownership_state": OwnershipState.LEASED}, LeaseConflict),
    ({"eligibility_state": EligibilityState.BLOCKED_BY_BUDGET}, ExecutionNotLeaseable),
    ({"terminal_outcome": TerminalOutcome.FAILED}, ExecutionNotLeaseable),
    ({"cancel_requested": True}, ExecutionNotLeaseable),
    ({"attempt_state": AttemptState.RUNNING_ATTEMPT}, ActiveAttemptExists),
]
"""What stands in the way of a claim, the first to be told first."""


def spoilt(*reasons: dict[str, object]) -> Execution:
    execution = waiting().execution
    for fields in reasons:
        execution = structs.replace(execution, **fields)
    return execution


def test_what_waits_for_a_worker_may_be_claimed() -> None:
    check_leaseable(waiting().execution)


@pytest.mark.parametrize(("fields", "error"), IN_ORDER, ids=str)
def test_anything_else_is_refused(fields: dict[str, object], error: type[FlowFabricError]) -> None:
    with pytest.raises(error):
        check_leaseable(spoilt(fields))


@pytest.mark.parametrize("place", range(len(IN_ORDER)))
def test_the_first_reason_is_the_one_told(place: int) -> None:
    fields, error = IN_ORDER[place]
    later = [each for each, _ in IN_ORDER[place + 1 :] if not each.keys() & fields.keys()]
    with pytest.raises(error):
        check_leaseable(spoilt(*later, fields))


# Keeping ----------------------------------------------------------------------

REQUEST = GrantRequest(
    grant_id="00000000-0000-4000-8000-0000000000d1",
    worker=WORKER,
    offered=frozenset(),
    ttl_ms=500,
)
ANYWHERE = Where(lane=None, required=())
SECRET = b"s" * 32


def granted(subject: Subject) -> Subject:
    if subject.execution.lifecycle_phase is LifecyclePhase.ACTIVE:
        made = decide_reclaim_grant(subject, REQUEST, place=ANYWHERE, timing=TIMING).changes
    else:
        made = decide_grant(subject, REQUEST, place=ANYWHERE, now_ms=NOW_MS).changes
    return applied(subject, made)


READY_LIVES = (waiting, resumable, expired_lease, revoked)
ALL_OPERATIONS = [(operation, act) for operation, acts in OPERATIONS.items() for act in acts]


@pytest.mark.parametrize("life", READY_LIVES)
def test_what_is_granted_is_kept_from_others(life: Life) -> None:
    before = life()
    after = granted(before)
    assert (before.execution.ready, after.execution.ready) == (True, False)
    assert situation_of(after.execution) is situation_of(before.execution)
    assert held_by(after.execution) is Hold.GRANT


@pytest.mark.parametrize("life", READY_LIVES)
@pytest.mark.parametrize(("operation", "act"), ALL_OPERATIONS)
def test_whatever_happens_to_it_the_grant_stays_usable_or_is_forgotten(
    life: Life, operation: Operation, act: Act
) -> None:
    subject = granted(life(execution_deadline_at_ms=NOW_MS + 10**9))
    try:
        after = applied(subject, act(subject, TIMING)).execution
    except (FlowFabricError, Refusal):
        return
    usable = situation_of(after) in READY
    assert (after.granted_until_ms is not None) == usable
    assert not after.ready or after.granted_until_ms is None


def test_a_start_goes_back_if_its_grant_goes_and_was_not_used_in_time() -> None:
    gate_id = GateId("6f0c3a52-3d6e-4a0f-9d55-0d9f0d0f5a11")
    before = granted(waiting())
    assert before.grant is not None
    grant = structs.replace(before.grant, counted_by=f'["{gate_id}"]')
    subject, late_ms = structs.replace(before, grant=grant), grant.expires_at_ms + 1
    for changes in (Changes(deletes=(grant,)), Changes(updates=(grant,))):
        assert unused_starts([subject], changes, late_ms) == {gate_id: [grant.issued_at_ms]}
        assert unused_starts([subject], changes, grant.expires_at_ms) == {}
        assert unused_starts([before], changes, late_ms) == {}
        elsewhere = structs.replace(subject.execution, granted_until_ms=None)
        leftover = structs.replace(subject, execution=elsewhere)
        assert unused_starts([leftover], changes, late_ms) == {}
    assert unused_starts([subject], NO_CHANGES, late_ms) == {}


# Keys -------------------------------------------------------------------------


def test_a_key_is_read_as_it_was_shown_and_names_no_secret() -> None:
    subject = granted(waiting())
    assert subject.grant is not None
    text = show(subject.grant, subject.execution, SECRET)
    key = read_key(text)
    assert (key.kind, key.grant_id, key.expires_at_ms) == (
        GrantKind.CLAIM,
        REQUEST.grant_id,
        NOW_MS + 500,
    )
    assert opens(key, subject.execution, "w", SECRET)
    assert key.signature.hex() not in repr(key)


SPOILT: list[Callable[[GrantKey], GrantKey]] = [
    lambda key: structs.replace(key, kind=GrantKind.RECLAIM),
    lambda key: structs.replace(key, grant_id="00000000-0000-4000-8000-0000000000d2"),
    lambda key: structs.replace(key, expires_at_ms=key.expires_at_ms + 1),
    lambda key: structs.replace(key, signature=b""),
    lambda key: structs.replace(key, signature=bytes(16)),
]


def test_a_key_opens_only_what_it_was_made_for() -> None:
    subject = granted(waiting())
    execution = subject.execution
    assert subject.grant is not None
    key = read_key(show(subject.grant, execution, SECRET))
    for spoil in SPOILT:
        assert not opens(spoil(key), execution, "w", SECRET)
    other = structs.replace(execution, lane_id=LaneId("other"))
    assert not opens(key, other, "w", SECRET)
    other = structs.replace(execution, execution_id=ExecutionId(execution.execution_id[:-1] + "f"))
    assert not opens(key, other, "w", SECRET)
    assert not opens(key, execution, "w2", SECRET)
    assert not opens(key, execution, "w", b"t" * 32)


@pytest.mark.parametrize("state", LaneState)
def test_lanes_hand_out_work_unless_they_are_paused_or_disabled(state: LaneState) -> None:
    lane = Lane(lane_id=LaneId("l"), state=state, registered_at_ms=0, registered_by="x")
    assert hands_out(lane) == (state in (LaneState.ACTIVE, LaneState.DRAINING))
    assert hands_out(None)
