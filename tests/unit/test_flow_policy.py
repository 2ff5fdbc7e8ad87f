"""Join policies, without a database."""

import pytest
from msgspec import json, structs

from flowfabric.core.flow_joins import (
    ALL_OF,
    EdgeDependencyPolicy,
    JoinAll,
    JoinAny,
    JoinQuorum,
    JoinRule,
    check_policy,
    count_outcome,
    evaluate,
    is_spared,
    policy_of,
)
from flowfabric.core.flow_records import GroupState, JoinRecord, OnSatisfied, PolicyKind
from flowfabric.core.ids import ExecutionId, FlowId
from flowfabric.core.states import TerminalOutcome
from flowfabric.errors import Bug, InvalidInput

CANCEL = OnSatisfied.CANCEL_REMAINING
LET_RUN = OnSatisfied.LET_RUN

GROUP = JoinRecord(
    partition_key=1,
    downstream_id=ExecutionId("{fp:1}:00000000-0000-4000-8000-000000000001"),
    flow_id=FlowId("00000000-0000-4000-8000-000000000002"),
    policy_kind=PolicyKind.ALL_OF,
    k=0,
    on_satisfied=LET_RUN,
    staged=3,
    applied=3,
)


def group(policy: EdgeDependencyPolicy, **fields: int) -> JoinRecord:
    return structs.replace(GROUP, **structs.asdict(check_policy(policy)), **fields)


@pytest.mark.parametrize(
    ("policy", "succeeded", "failed", "skipped", "state"),
    [
        (JoinAll(), 0, 0, 0, GroupState.PENDING),
        (JoinAll(), 2, 0, 0, GroupState.PENDING),
        (JoinAll(), 3, 0, 0, GroupState.SATISFIED),
        (JoinAll(), 2, 1, 0, GroupState.IMPOSSIBLE),
        (JoinAll(), 0, 0, 1, GroupState.IMPOSSIBLE),
        (JoinAny(), 0, 1, 1, GroupState.PENDING),
        (JoinAny(), 1, 1, 1, GroupState.SATISFIED),
        (JoinAny(), 0, 2, 1, GroupState.IMPOSSIBLE),
        (JoinQuorum(2), 1, 1, 0, GroupState.PENDING),
        (JoinQuorum(2), 2, 1, 0, GroupState.SATISFIED),
        (JoinQuorum(2), 1, 1, 1, GroupState.IMPOSSIBLE),
        # Fewer edges than it needs: more are to come.
        (JoinQuorum(4), 0, 1, 0, GroupState.PENDING),
        (JoinQuorum(4), 3, 0, 0, GroupState.PENDING),
        (JoinQuorum(3), 0, 1, 0, GroupState.IMPOSSIBLE),
    ],
)
def test_where_a_group_stands(
    policy: EdgeDependencyPolicy, succeeded: int, failed: int, skipped: int, state: GroupState
) -> None:
    counted = group(policy, succeeded=succeeded, failed=failed, skipped=skipped)
    assert evaluate(counted) is state


def test_an_edge_that_is_only_staged_keeps_the_group_open() -> None:
    assert evaluate(group(JoinAll(), applied=2, succeeded=2)) is GroupState.PENDING
    assert evaluate(group(JoinAny(), applied=2, failed=2)) is GroupState.PENDING


@pytest.mark.parametrize(
    ("outcome", "counter"),
    [
        (TerminalOutcome.SUCCESS, "succeeded"),
        (TerminalOutcome.SKIPPED, "skipped"),
        (TerminalOutcome.FAILED, "failed"),
        (TerminalOutcome.CANCELLED, "failed"),
        (TerminalOutcome.EXPIRED, "failed"),
    ],
)
def test_every_outcome_has_its_counter(outcome: TerminalOutcome, counter: str) -> None:
    before = group(JoinQuorum(2))
    after = count_outcome(before, outcome, 5)
    assert after == structs.replace(before, **{counter: 1})


@pytest.mark.parametrize(
    ("policy", "outcome", "reason"),
    [
        (JoinAny(CANCEL), TerminalOutcome.SUCCESS, "sibling_quorum_satisfied"),
        (JoinQuorum(3, CANCEL), TerminalOutcome.FAILED, "sibling_quorum_impossible"),
        (JoinAny(LET_RUN), TerminalOutcome.SUCCESS, None),
        (JoinQuorum(3, LET_RUN), TerminalOutcome.FAILED, None),
        (JoinAll(), TerminalOutcome.FAILED, None),
    ],
)
def test_firing_says_whether_the_others_are_given_up(
    policy: EdgeDependencyPolicy, outcome: TerminalOutcome, reason: str | None
) -> None:
    fired = count_outcome(group(policy), outcome, 5)
    assert (fired.fired_at_ms, fired.cancel_reason) == (5, reason)


@pytest.mark.parametrize(
    ("outcome", "reason", "spared"),
    [
        (TerminalOutcome.CANCELLED, "sibling_quorum_satisfied", True),
        (TerminalOutcome.CANCELLED, "sibling_quorum_impossible", True),
        (TerminalOutcome.CANCELLED, "flow_cancelled", False),
        (TerminalOutcome.CANCELLED, None, False),
        # Cancelled once, replayed since, and ended otherwise.
        (TerminalOutcome.FAILED, "sibling_quorum_satisfied", False),
        (TerminalOutcome.SUCCESS, None, False),
    ],
)
def test_only_what_a_join_gave_up_is_spared(
    outcome: TerminalOutcome, reason: str | None, spared: bool
) -> None:
    assert is_spared(outcome, reason) is spared


def test_a_group_fires_once_and_counts_on() -> None:
    fired = count_outcome(group(JoinAny()), TerminalOutcome.SUCCESS, 5)
    later = count_outcome(fired, TerminalOutcome.FAILED, 9)
    assert later == structs.replace(fired, failed=1)


def test_more_endings_than_edges_are_a_bug() -> None:
    with pytest.raises(Bug):
        count_outcome(group(JoinAll(), succeeded=3), TerminalOutcome.SUCCESS, 5)


@pytest.mark.parametrize(
    ("policy", "text", "rule"),
    [
        (JoinAll(), b'{"kind":"all_of"}', ALL_OF),
        (
            JoinAny(LET_RUN),
            b'{"kind":"any_of","on_satisfied":"let_run"}',
            JoinRule(policy_kind=PolicyKind.ANY_OF, k=1, on_satisfied=LET_RUN),
        ),
        (
            JoinQuorum(2),
            b'{"kind":"quorum","k":2,"on_satisfied":"cancel_remaining"}',
            JoinRule(policy_kind=PolicyKind.QUORUM, k=2, on_satisfied=CANCEL),
        ),
    ],
)
def test_a_policy_has_one_form_in_json_and_one_in_a_group(
    policy: EdgeDependencyPolicy, text: bytes, rule: JoinRule
) -> None:
    assert json.encode(policy) == text
    assert check_policy(policy) == check_policy(json.decode(text)) == rule
    assert policy_of(group(policy)) == policy


@pytest.mark.parametrize(
    ("field", "policy"),
    [
        ("policy.k", JoinQuorum(0)),
        ("policy.k", JoinQuorum(2**31)),
        ("policy.k", structs.replace(JoinQuorum(1), k=True)),
        ("policy.on_satisfied", structs.replace(JoinAny(), on_satisfied="stop")),
        ("policy", None),
        ("policy", {"kind": "some_of"}),
        ("policy", {"kind": "any_of", "on_satisfied": "stop"}),
    ],
)
def test_a_malformed_policy_is_refused_by_field(field: str, policy: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_policy(policy)
    assert caught.value.field == field
