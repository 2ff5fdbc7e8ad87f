"""What the audit takes for left behind, and what it leaves alone; who may run at all."""

import pytest
from msgspec import structs

from flowfabric.core.flow_audit import next_audit, overlooked, requeued
from flowfabric.core.flow_endings import Ending, counts, holds_back, postponed
from flowfabric.core.flow_joins import NewEdge, new_edge, new_flow, new_group
from flowfabric.core.flow_records import (
    DependencyState,
    FlowAudit,
    GroupState,
    JoinRecord,
    PendingCancel,
)
from flowfabric.core.ids import FIRST_UUID, LAST_UUID, EdgeId, FlowId, Namespace
from flowfabric.core.records import Execution
from flowfabric.core.states import EligibilityState, LifecyclePhase, OwnershipState, TerminalOutcome
from flowfabric.core.views import EligibilityStatus, eligibility
from tests.store.records import an_execution

FLOW_ID = FlowId("00000000-0000-4000-8000-000000000002")
FLOW = new_flow(FLOW_ID, 7, "kind", Namespace("n"), 1_000)
BLOCKED = an_execution(
    lifecycle_phase=LifecyclePhase.RUNNABLE,
    ownership_state=OwnershipState.UNOWNED,
    eligibility_state=EligibilityState.BLOCKED_BY_DEPENDENCIES,
)
GROUP = structs.replace(new_group(FLOW, BLOCKED.execution_id), staged=2, applied=2)
EMPTY = new_group(FLOW, BLOCKED.execution_id)


def in_state(state: GroupState) -> JoinRecord:
    return structs.replace(GROUP, group_state=state)


# Members that wait for nothing


@pytest.mark.parametrize(
    ("group", "state"),
    [
        (None, GroupState.SATISFIED),
        (EMPTY, GroupState.SATISFIED),
        (in_state(GroupState.SATISFIED), GroupState.SATISFIED),
        (in_state(GroupState.IMPOSSIBLE), GroupState.IMPOSSIBLE),
        (in_state(GroupState.PENDING), None),
    ],
)
def test_a_member_is_overlooked_when_nothing_holds_it_back(
    group: JoinRecord | None, state: GroupState | None
) -> None:
    found = overlooked(FLOW, BLOCKED, group)
    assert (None if found is None else found.group_state) is state


@pytest.mark.parametrize(
    "fields",
    [
        {"cancel_requested": True},
        # A child wakes it when it ends.
        {"awaits_child": True},
        {"eligibility_state": EligibilityState.ELIGIBLE_NOW},
        {"eligibility_state": EligibilityState.NOT_ELIGIBLE_UNTIL_TIME},
        {"lifecycle_phase": LifecyclePhase.ACTIVE, "ownership_state": OwnershipState.LEASED},
        {"lifecycle_phase": LifecyclePhase.TERMINAL},
    ],
)
def test_a_member_that_does_not_wait_for_others_is_left_alone(fields: dict[str, object]) -> None:
    assert overlooked(FLOW, structs.replace(BLOCKED, **fields), None) is None


def test_whoever_waits_for_its_join_is_found_whatever_else_it_does() -> None:
    running = structs.replace(
        BLOCKED,
        lifecycle_phase=LifecyclePhase.ACTIVE,
        ownership_state=OwnershipState.LEASED,
        join_pending=True,
    )
    assert overlooked(FLOW, running, in_state(GroupState.SATISFIED)) is not None
    assert overlooked(FLOW, running, in_state(GroupState.PENDING)) is None


def test_a_member_marked_for_cancellation_is_queued_for_it() -> None:
    marked = structs.replace(BLOCKED, cancel_requested=True)
    closed = structs.replace(FLOW, cancel_reason="enough")
    row = requeued(closed, marked, 5_000)
    assert row is not None
    assert (row.execution_id, row.reason, row.due_at_ms) == (marked.execution_id, "enough", 5_000)
    assert requeued(closed, BLOCKED, 5_000) is None
    ended = structs.replace(marked, lifecycle_phase=LifecyclePhase.TERMINAL)
    assert requeued(closed, ended, 5_000) is None


# Which endings count


@pytest.mark.parametrize(
    ("replay_count", "counts_from_replay", "counted"),
    [(0, 0, True), (2, 0, True), (0, 1, False), (1, 2, False), (2, 2, True)],
)
def test_an_ending_counts_unless_the_downstream_was_replayed_since(
    replay_count: int, counts_from_replay: int, counted: bool
) -> None:
    ending = Ending(outcome=TerminalOutcome.FAILED, replay_count=replay_count)
    wanted = NewEdge(
        edge_id=EdgeId("00000000-0000-4000-8000-000000000003"),
        upstream_id=an_execution().execution_id,
        downstream_id=BLOCKED.execution_id,
        data_passing_ref="",
        replaces_payload=True,
    )
    edge = structs.replace(
        new_edge(FLOW, wanted, 1_000, applied=True), counts_from_replay=counts_from_replay
    )
    assert counts(edge, ending) is counted
    resolved = structs.replace(edge, dep_state=DependencyState.SATISFIED)
    assert not counts(resolved, ending)


ONE, SEVEN = f"{FIRST_UUID[:-1]}1", f"{FIRST_UUID[:-1]}7"


@pytest.mark.parametrize(
    ("last", "following"),
    [
        pytest.param(("flow", FIRST_UUID), ("flow", ONE), id="the member after it"),
        pytest.param((FIRST_UUID, LAST_UUID), (ONE, FIRST_UUID), id="the flow after it"),
        pytest.param((LAST_UUID, LAST_UUID), (FIRST_UUID, FIRST_UUID), id="none follows"),
        pytest.param(None, (FIRST_UUID, FIRST_UUID), id="the page was the last"),
    ],
)
def test_a_look_goes_on_after_its_page_and_begins_anew_after_the_last(
    last: tuple[str, str] | None, following: tuple[str, str]
) -> None:
    audit = FlowAudit(next_flow_id=SEVEN, next_execution_id=SEVEN, due_at_ms=0)
    assert next_audit(audit, last, "waiter", 1_000) == FlowAudit(
        next_flow_id=following[0],
        next_execution_id=following[1],
        after_waiter="waiter",
        due_at_ms=61_000,
    )
    assert next_audit(audit, last, None, 1_000).after_waiter == ""


# Who may run


@pytest.mark.parametrize(
    ("group", "held"),
    [
        (None, False),
        (EMPTY, False),
        (in_state(GroupState.PENDING), True),
        (in_state(GroupState.IMPOSSIBLE), True),
        (in_state(GroupState.SATISFIED), False),
    ],
)
def test_a_join_holds_back_until_it_is_satisfied(group: JoinRecord | None, held: bool) -> None:
    assert holds_back(group) is held


@pytest.mark.parametrize(
    ("execution", "group", "status"),
    [
        (None, None, EligibilityStatus.NOT_FOUND),
        (
            structs.replace(BLOCKED, lifecycle_phase=LifecyclePhase.ACTIVE),
            None,
            EligibilityStatus.NOT_RUNNABLE,
        ),
        (
            structs.replace(BLOCKED, ownership_state=OwnershipState.LEASED),
            None,
            EligibilityStatus.OWNED,
        ),
        (
            structs.replace(BLOCKED, terminal_outcome=TerminalOutcome.SKIPPED),
            None,
            EligibilityStatus.TERMINAL,
        ),
        (
            structs.replace(BLOCKED, awaits_child=True),
            None,
            EligibilityStatus.BLOCKED_BY_DEPENDENCIES,
        ),
        (BLOCKED, None, EligibilityStatus.ELIGIBLE),
        (BLOCKED, EMPTY, EligibilityStatus.ELIGIBLE),
        (BLOCKED, in_state(GroupState.SATISFIED), EligibilityStatus.ELIGIBLE),
        (BLOCKED, in_state(GroupState.IMPOSSIBLE), EligibilityStatus.IMPOSSIBLE),
        (BLOCKED, in_state(GroupState.PENDING), EligibilityStatus.BLOCKED_BY_DEPENDENCIES),
    ],
)
def test_the_first_reason_against_running_counts(
    execution: Execution | None, group: JoinRecord | None, status: EligibilityStatus
) -> None:
    assert eligibility(execution, group) is status


# Cancellations that failed


def test_a_cancellation_that_fails_again_waits_twice_as_long() -> None:
    row = PendingCancel(
        partition_key=7,
        execution_id=BLOCKED.execution_id,
        flow_id=FLOW_ID,
        reason="enough",
        enqueued_at_ms=1_000,
        due_at_ms=1_000,
    )
    pauses = []
    for _ in range(9):
        row = postponed(row, 10_000)
        pauses.append(row.due_at_ms - 10_000)
    assert pauses == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000, 60_000]
    assert (row.attempts, row.enqueued_at_ms) == (9, 1_000)
