"""Rules of flows that need no database: graphs, derived states, cancellation requests."""

import itertools
from collections import Counter

import pytest
from msgspec import structs

from flowfabric.core.bounds import CANCEL_WAIT_MS_MAX, FLOW_EDGES_MAX, FLOW_MEMBERS_MAX
from flowfabric.core.flow_endings import (
    NoWait,
    WaitIndefinite,
    WaitTimeout,
    all_but,
    check_cancellation_policy,
    check_grace,
    reconciled,
    repeats_cancel,
    wait_ms,
)
from flowfabric.core.flow_joins import (
    MemberCounts,
    check_acyclic,
    count_endings,
    derive_flow_state,
    derived_edge_id,
    new_flow,
    new_group,
    with_derived_state,
    with_edges,
    with_last_end,
    with_members,
)
from flowfabric.core.flow_records import CancellationPolicy, FlowRecord, FlowState
from flowfabric.core.ids import FlowId, Namespace, make_execution_id, parse_uuid
from flowfabric.core.results import FlowCancelled, PartiallyCancelled, SiblingCancelAction
from flowfabric.core.states import PublicState, TerminalOutcome
from flowfabric.errors import CycleDetected, InvalidGraceMs, InvalidInput
from tests.store.records import an_execution

FLOW_ID = FlowId("00000000-0000-4000-8000-000000000002")
DAY_MS = 86_400_000


def a_flow(**fields: object) -> FlowRecord:
    return structs.replace(new_flow(FLOW_ID, 7, "kind", Namespace("n"), 1_000), **fields)


# Graphs


@pytest.mark.parametrize("edges", ["", "ab", "ab bc ac", "ab ab", "ab cd", "ac bc cd ce"])
def test_graphs_without_a_way_back_are_fine(edges: str) -> None:
    check_acyclic([(edge[0], edge[1]) for edge in edges.split()])


@pytest.mark.parametrize("edges", ["aa", "ab ba", "ab bc ca", "ab bc cd db", "xy ab bc ca"])
def test_a_way_back_is_a_cycle(edges: str) -> None:
    with pytest.raises(CycleDetected):
        check_acyclic([(edge[0], edge[1]) for edge in edges.split()])


def test_a_chain_of_any_length_is_walked() -> None:
    nodes = [str(number) for number in range(50_000)]
    chain = list(itertools.pairwise(nodes))
    check_acyclic(chain)
    with pytest.raises(CycleDetected):
        check_acyclic([*chain, (nodes[-1], nodes[0])])


def test_the_same_pair_has_the_same_edge_id() -> None:
    first = derived_edge_id(FLOW_ID, "a", "b")
    assert first == derived_edge_id(FLOW_ID, "a", "b") == parse_uuid("edge_id", first)
    assert len({first, derived_edge_id(FLOW_ID, "b", "a"), derived_edge_id(FLOW_ID, "a", "c")}) == 3


def test_a_flow_has_limits() -> None:
    with pytest.raises(InvalidInput) as caught:
        with_members(a_flow(node_count=FLOW_MEMBERS_MAX), [an_execution()], 5)
    assert caught.value.field == "members"
    with pytest.raises(InvalidInput) as caught:
        with_edges(a_flow(edge_count=FLOW_EDGES_MAX), 1, 5)
    assert caught.value.field == "edges"


# States


@pytest.mark.parametrize(
    ("outcomes", "spared", "node_count", "state"),
    [
        ([], 0, 0, FlowState.OPEN),
        (["success"], 0, 2, FlowState.OPEN),
        (["success", "skipped"], 0, 2, FlowState.COMPLETED),
        (["success", "failed"], 0, 2, FlowState.FAILED),
        (["success", "expired"], 0, 2, FlowState.FAILED),
        (["cancelled"], 0, 1, FlowState.FAILED),
        (["success", "cancelled"], 1, 2, FlowState.COMPLETED),
        (["success", "cancelled", "cancelled"], 1, 3, FlowState.FAILED),
        (["failed", "cancelled"], 1, 2, FlowState.FAILED),
        (["expired", "cancelled"], 1, 2, FlowState.FAILED),
        (["success", "cancelled"], 1, 3, FlowState.OPEN),
    ],
)
def test_a_flow_ends_with_its_last_member(
    outcomes: list[str], spared: int, node_count: int, state: FlowState
) -> None:
    flow = count_endings(
        a_flow(node_count=node_count), map(TerminalOutcome, outcomes), spared=spared
    )
    settled = with_derived_state(flow, 5_000, DAY_MS)
    assert settled.derived_state is state
    ended = state is not FlowState.OPEN
    assert settled.retain_until_ms == (5_000 + DAY_MS if ended else None)
    assert settled.ended_at_ms == (5_000 if ended else None)
    closed = structs.replace(flow, public_flow_state=FlowState.CANCELLED)
    expected = FlowState.CANCELLED if ended or node_count == 0 else FlowState.OPEN
    assert with_derived_state(closed, 5_000, DAY_MS).derived_state is expected


def test_a_member_that_comes_back_opens_the_flow() -> None:
    ended = with_derived_state(
        count_endings(a_flow(node_count=1), [TerminalOutcome.FAILED]), 5_000, DAY_MS
    )
    back = with_derived_state(count_endings(ended, [TerminalOutcome.FAILED], by=-1), 6_000, DAY_MS)
    assert back == a_flow(node_count=1)
    spared = count_endings(back, [TerminalOutcome.CANCELLED], spared=1)
    assert count_endings(spared, [TerminalOutcome.CANCELLED], by=-1, spared=1) == back


def test_an_ended_execution_joins_as_what_it_ended_as() -> None:
    given_up = an_execution(
        terminal_outcome=TerminalOutcome.CANCELLED, cancellation_reason="sibling_quorum_satisfied"
    )
    unwanted = structs.replace(given_up, cancellation_reason="not needed")
    joined = with_members(a_flow(), [given_up, unwanted], 5)
    assert (joined.node_count, joined.members_cancelled, joined.members_spared) == (2, 2, 1)


def test_a_settled_flow_keeps_the_time_of_its_end_and_the_longest_keep_time() -> None:
    flow = a_flow(node_count=1, members_completed=1, ended_at_ms=4_000, member_retention_ms=9_000)
    settled = with_derived_state(flow, 5_000, 2_000)
    assert (settled.ended_at_ms, settled.retain_until_ms) == (4_000, 13_000)


def test_the_keep_time_counts_from_the_last_end_however_late_that_is_counted() -> None:
    flow = count_endings(a_flow(node_count=2), [TerminalOutcome.SUCCESS] * 2)
    flow = with_last_end(with_last_end(flow, [3_000]), [1_000, 2_000])
    settled = with_derived_state(flow, 5_000, 2_000)
    assert (settled.ended_at_ms, settled.retain_until_ms) == (3_000, 5_000)
    ended = an_execution(
        terminal_outcome=TerminalOutcome.SUCCESS, completed_at_ms=4_000, retention_ms=2_000
    )
    grown = with_derived_state(with_members(settled, [ended], 9_000), 9_000, 2_000)
    assert (grown.ended_at_ms, grown.retain_until_ms) == (4_000, 6_000)


@pytest.mark.parametrize(
    ("states", "cancelled", "state"),
    [
        ("completed spared", False, FlowState.COMPLETED),
        ("failed spared", False, FlowState.FAILED),
        ("expired spared", False, FlowState.FAILED),
        ("cancelled spared", False, FlowState.FAILED),
        ("spared spared", True, FlowState.CANCELLED),
        ("active spared", False, FlowState.RUNNING),
        ("", False, FlowState.OPEN),
        ("", True, FlowState.CANCELLED),
        ("completed skipped", False, FlowState.COMPLETED),
        ("completed failed", False, FlowState.FAILED),
        ("completed cancelled", False, FlowState.FAILED),
        ("completed expired", False, FlowState.FAILED),
        ("completed failed", True, FlowState.CANCELLED),
        ("active failed", False, FlowState.RUNNING),
        ("active suspended", True, FlowState.RUNNING),
        ("waiting suspended", False, FlowState.BLOCKED),
        ("waiting delayed", False, FlowState.BLOCKED),
        ("rate_limited", False, FlowState.BLOCKED),
        ("waiting_children completed", False, FlowState.BLOCKED),
        ("waiting completed", False, FlowState.OPEN),
    ],
)
def test_the_first_rule_that_matches_names_the_flows_state(
    states: str, cancelled: bool, state: FlowState
) -> None:
    names = states.replace("spared", "cancelled").split()
    members = MemberCounts(Counter(map(PublicState, names)), states.count("spared"))
    assert derive_flow_state(members, cancelled=cancelled) is state


# Cancellation requests


def test_cancellation_policies_have_one_name_and_one_alias() -> None:
    assert [check_cancellation_policy(policy) for policy in CancellationPolicy] == list(
        CancellationPolicy
    )
    assert check_cancellation_policy("cancel_flow_only") is CancellationPolicy.FLOW_ONLY
    with pytest.raises(InvalidInput):
        check_cancellation_policy("")


def test_how_long_to_wait() -> None:
    assert wait_ms(NoWait()) is None
    assert wait_ms(WaitTimeout(5)) == 5
    assert wait_ms(WaitIndefinite()) == CANCEL_WAIT_MS_MAX
    for wrong in (WaitTimeout(-1), WaitTimeout(CANCEL_WAIT_MS_MAX + 1), None):
        with pytest.raises(InvalidInput):
            wait_ms(wrong)


@pytest.mark.parametrize("grace_ms", [-1, 1.5, 2**53, "abc", True])
def test_a_malformed_grace_is_refused(grace_ms: object) -> None:
    check_grace(None)
    check_grace(30_000)
    with pytest.raises(InvalidGraceMs):
        check_grace(grace_ms)


def test_members_that_could_not_be_cancelled_are_told_apart() -> None:
    one, two = (make_execution_id(7, f"00000000-0000-4000-8000-00000000000{n}") for n in (1, 2))
    header = FlowCancelled(
        cancellation_policy=CancellationPolicy.CANCEL_ALL,
        member_execution_ids=(one, two),
        member_count=2,
    )
    assert all_but(header, ()) is header
    assert all_but(header, (two,)) == PartiallyCancelled(
        cancellation_policy=CancellationPolicy.CANCEL_ALL,
        member_execution_ids=(one,),
        failed_member_execution_ids=(two,),
    )


@pytest.mark.parametrize(
    ("reason", "queued", "unended", "action"),
    [
        ("fired", 0, 0, "no_op"),
        (None, 0, 0, "no_op"),
        (None, 2, 2, "sremmed_stale"),
        (None, 2, 0, "sremmed_stale"),
        ("fired", 2, 1, "no_op"),
        ("fired", 2, 0, "completed_drain"),
    ],
)
def test_siblings_stay_queued_as_long_as_a_join_wants_one_cancelled(
    reason: str | None, queued: int, unended: int, action: str
) -> None:
    group = new_group(a_flow(), make_execution_id(7, FLOW_ID))
    wanting = structs.replace(group, cancel_reason=reason)
    assert reconciled(wanting, queued, unended) is SiblingCancelAction(action)
    gone = "sremmed_stale" if queued else "no_op"
    assert reconciled(None, queued, unended) is SiblingCancelAction(gone)


@pytest.mark.parametrize("decided", [None, *CancellationPolicy])
@pytest.mark.parametrize("asked", CancellationPolicy)
def test_cancelling_again_is_a_repeat_unless_it_reaches_further(
    decided: CancellationPolicy | None, asked: CancellationPolicy
) -> None:
    reach = [
        None,
        CancellationPolicy.FLOW_ONLY,
        CancellationPolicy.CANCEL_PENDING,
        CancellationPolicy.CANCEL_ALL,
    ]
    flow = a_flow(cancellation_policy=decided)
    assert repeats_cancel(flow, asked) is (reach.index(asked) <= reach.index(decided))
