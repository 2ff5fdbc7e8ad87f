"""Join policies: when an execution that waits for others may run, or never can."""

from collections.abc import Mapping

import msgspec
from msgspec import Struct, structs

from flowfabric.core.checks import check_int
from flowfabric.core.flow_records import EdgeGroup, GroupState, OnSatisfied, PolicyKind
from flowfabric.core.states import TerminalOutcome
from flowfabric.errors import Bug, InvalidInput

QUORUM_MAX = 2**31 - 1

SIBLING_SATISFIED = "sibling_quorum_satisfied"
SIBLING_IMPOSSIBLE = "sibling_quorum_impossible"
SIBLING_REASONS = (SIBLING_SATISFIED, SIBLING_IMPOSSIBLE)
"""Why members are cancelled that a join's policy has given up."""


class JoinAll(Struct, frozen=True, tag_field="kind", tag="all_of"):
    """Every upstream must succeed."""


class JoinAny(Struct, frozen=True, tag_field="kind", tag="any_of"):
    """One upstream must succeed."""

    on_satisfied: OnSatisfied = OnSatisfied.CANCEL_REMAINING


class JoinQuorum(Struct, frozen=True, tag_field="kind", tag="quorum"):
    """`k` upstreams must succeed."""

    k: int
    on_satisfied: OnSatisfied = OnSatisfied.CANCEL_REMAINING


EdgeDependencyPolicy = JoinAll | JoinAny | JoinQuorum


class JoinRule(Struct, frozen=True, kw_only=True):
    """A policy as a group stores it."""

    policy_kind: PolicyKind
    k: int
    on_satisfied: OnSatisfied


ALL_OF = JoinRule(policy_kind=PolicyKind.ALL_OF, k=0, on_satisfied=OnSatisfied.LET_RUN)


def check_policy(policy: object) -> JoinRule:
    """A policy, or its JSON form as a mapping, with every field valid."""
    if isinstance(policy, Mapping):
        policy = _from_mapping(policy)
    match policy:
        case JoinAll():
            return ALL_OF
        case JoinAny(on_satisfied=on_satisfied):
            return JoinRule(
                policy_kind=PolicyKind.ANY_OF, k=1, on_satisfied=_check_on_satisfied(on_satisfied)
            )
        case JoinQuorum(k=k, on_satisfied=on_satisfied):
            return JoinRule(
                policy_kind=PolicyKind.QUORUM,
                k=check_int("policy.k", k, 1, QUORUM_MAX),
                on_satisfied=_check_on_satisfied(on_satisfied),
            )
        case _:
            raise InvalidInput("policy", f"must be AllOf, AnyOf or Quorum of {__name__}", policy)


def _from_mapping(policy: Mapping[object, object]) -> EdgeDependencyPolicy:
    try:
        converted: EdgeDependencyPolicy = msgspec.convert(dict(policy), EdgeDependencyPolicy)
        return converted
    except msgspec.ValidationError as error:
        raise InvalidInput("policy", str(error), policy) from error


def _check_on_satisfied(value: object) -> OnSatisfied:
    try:
        return OnSatisfied(str(value))
    except ValueError as error:
        choices = ", ".join(OnSatisfied)
        raise InvalidInput("policy.on_satisfied", f"must be one of {choices}", value) from error


def is_spared(outcome: TerminalOutcome, cancellation_reason: str | None) -> bool:
    """Whether a member was cancelled because a join no longer needed it.

    That is what its flow was built to do, so it does not make the flow a failed one.
    """
    return outcome is TerminalOutcome.CANCELLED and cancellation_reason in SIBLING_REASONS


def rule_of(group: EdgeGroup) -> JoinRule:
    return JoinRule(policy_kind=group.policy_kind, k=group.k, on_satisfied=group.on_satisfied)


def policy_of(group: EdgeGroup) -> EdgeDependencyPolicy:
    """The policy as users write it."""
    match group.policy_kind:
        case PolicyKind.ALL_OF:
            return JoinAll()
        case PolicyKind.ANY_OF:
            return JoinAny(on_satisfied=group.on_satisfied)
        case PolicyKind.QUORUM:
            return JoinQuorum(k=group.k, on_satisfied=group.on_satisfied)


def resolved_count(group: EdgeGroup) -> int:
    return group.succeeded + group.failed + group.skipped


def needed_count(group: EdgeGroup) -> int:
    """How many upstreams must succeed."""
    return group.staged if group.policy_kind is PolicyKind.ALL_OF else group.k


def evaluate(group: EdgeGroup) -> GroupState:
    """Where the group stands. Staged edges count as still open, so none is overlooked.

    A quorum that has fewer edges than it needs is still being built: it waits for more.
    """
    needed = needed_count(group)
    if group.succeeded >= needed:
        return GroupState.SATISFIED
    if group.staged < needed:
        return GroupState.PENDING
    if group.failed + group.skipped > group.staged - needed:
        return GroupState.IMPOSSIBLE
    return GroupState.PENDING


def count_outcome(group: EdgeGroup, outcome: TerminalOutcome, now_ms: int) -> EdgeGroup:
    """The group after one more upstream has ended; it fires at most once."""
    match outcome:
        case TerminalOutcome.SUCCESS:
            group = structs.replace(group, succeeded=group.succeeded + 1)
        case TerminalOutcome.SKIPPED:
            group = structs.replace(group, skipped=group.skipped + 1)
        case _:
            group = structs.replace(group, failed=group.failed + 1)
    if resolved_count(group) > group.applied:
        raise Bug(f"the join of {group.downstream_id} counted more endings than it has edges")
    return fire_if_decided(group, now_ms)


def fire_if_decided(group: EdgeGroup, now_ms: int) -> EdgeGroup:
    if group.group_state is not GroupState.PENDING:
        return group
    state = evaluate(group)
    if state is GroupState.PENDING:
        return group
    return structs.replace(
        group, group_state=state, fired_at_ms=now_ms, cancel_reason=_sibling_reason(group, state)
    )


def _sibling_reason(group: EdgeGroup, state: GroupState) -> str | None:
    if (
        group.policy_kind is PolicyKind.ALL_OF
        or group.on_satisfied is not OnSatisfied.CANCEL_REMAINING
    ):
        return None
    return SIBLING_SATISFIED if state is GroupState.SATISFIED else SIBLING_IMPOSSIBLE
