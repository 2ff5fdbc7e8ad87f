"""How a flow's graph grows, and when an execution that waits for others may run.

Nothing here looks at the database: the caller has locked the flow and loaded what
it names. Checks raise before anything is written.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

import msgspec
from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core.bounds import FLOW_EDGES_MAX, FLOW_MEMBERS_MAX
from flowfabric.core.checks import check_choice, check_int, check_optional_text, check_text
from flowfabric.core.decisions import change
from flowfabric.core.flow_records import (
    Edge,
    EdgeState,
    FlowRecord,
    FlowState,
    GroupState,
    JoinRecord,
    OnSatisfied,
    PolicyKind,
)
from flowfabric.core.ids import EdgeId, ExecutionId, FlowId, Namespace, parse_uuid, uuid4_from
from flowfabric.core.records import Execution
from flowfabric.core.states import TERMINAL_STATES, LifecyclePhase, PublicState, TerminalOutcome

# Join policies: when an execution that waits for others may run, or never can

QUORUM_MAX = 2**31 - 1

SIBLING_SATISFIED = "sibling_quorum_satisfied"
SIBLING_IMPOSSIBLE = "sibling_quorum_impossible"
SIBLING_REASONS = (SIBLING_SATISFIED, SIBLING_IMPOSSIBLE)
"""Why a join's policy cancels members that it no longer needs."""


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
    """A policy, or its JSON form as a mapping, as a group stores it."""
    if isinstance(policy, Mapping):
        try:
            policy = msgspec.convert(dict(policy), EdgeDependencyPolicy)
        except msgspec.ValidationError as error:
            raise errors.InvalidInput("policy", str(error), policy) from error
    match policy:
        case JoinAll():
            return ALL_OF
        case JoinAny():
            kind, k = PolicyKind.ANY_OF, 1
        case JoinQuorum():
            kind, k = PolicyKind.QUORUM, check_int("policy.k", policy.k, 1, QUORUM_MAX)
        case _:
            raise errors.InvalidInput(
                "policy", f"must be JoinAll, JoinAny or JoinQuorum of {__name__}", policy
            )
    on_satisfied = check_choice("policy.on_satisfied", policy.on_satisfied, OnSatisfied)
    return JoinRule(policy_kind=kind, k=k, on_satisfied=on_satisfied)


def is_spared(outcome: TerminalOutcome, cancellation_reason: str | None) -> bool:
    """Whether a member was cancelled because a join no longer needed it.

    That is what its flow was built to do, so it does not make the flow a failed one.
    """
    return outcome is TerminalOutcome.CANCELLED and cancellation_reason in SIBLING_REASONS


def policy_of(group: JoinRecord) -> EdgeDependencyPolicy:
    """The policy as users write it."""
    match group.policy_kind:
        case PolicyKind.ALL_OF:
            return JoinAll()
        case PolicyKind.ANY_OF:
            return JoinAny(on_satisfied=group.on_satisfied)
        case PolicyKind.QUORUM:
            return JoinQuorum(k=group.k, on_satisfied=group.on_satisfied)


def resolved_count(group: JoinRecord) -> int:
    return group.succeeded + group.failed + group.skipped


def needed_count(group: JoinRecord) -> int:
    """How many upstreams must succeed."""
    return group.staged if group.policy_kind is PolicyKind.ALL_OF else group.k


def evaluate(group: JoinRecord) -> GroupState:
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


def count_outcome(group: JoinRecord, outcome: TerminalOutcome, now_ms: int) -> JoinRecord:
    """The group after one more upstream has ended; it fires at most once."""
    match outcome:
        case TerminalOutcome.SUCCESS:
            group = structs.replace(group, succeeded=group.succeeded + 1)
        case TerminalOutcome.SKIPPED:
            group = structs.replace(group, skipped=group.skipped + 1)
        case _:
            group = structs.replace(group, failed=group.failed + 1)
    if resolved_count(group) > group.applied:
        raise errors.Bug(
            f"the join of {group.downstream_id} counted more endings than it has edges"
        )
    state = evaluate(group)
    if group.group_state is not GroupState.PENDING or state is GroupState.PENDING:
        return group
    reason = None
    if (
        group.policy_kind is not PolicyKind.ALL_OF
        and group.on_satisfied is OnSatisfied.CANCEL_REMAINING
    ):
        reason = SIBLING_SATISFIED if state is GroupState.SATISFIED else SIBLING_IMPOSSIBLE
    return structs.replace(group, group_state=state, fired_at_ms=now_ms, cancel_reason=reason)


SUCCESS_ONLY = "success_only"
POLICY_FIXED = "edge_group_policy_already_fixed"


class Dependency(Struct, frozen=True, kw_only=True):
    """One upstream of a join."""

    upstream_execution_id: str
    data_passing_ref: str | None = None
    """The name under which its result is passed on."""
    replaces_payload: bool = True
    """Whether a passed result also becomes the input payload."""
    edge_id: str | None = None
    """Derived from the two executions if omitted, so that a repeat finds the same edge."""


class Join(Struct, frozen=True, kw_only=True):
    """Everything one execution waits for, and when it has waited enough."""

    downstream_execution_id: str
    dependencies: Sequence[Dependency]
    policy: EdgeDependencyPolicy | Mapping[str, object] | None = None
    """`JoinAll` if omitted."""


class NewEdge(Struct, frozen=True, kw_only=True):
    """A request for an edge, with every field valid."""

    edge_id: EdgeId
    upstream_id: ExecutionId
    downstream_id: ExecutionId
    data_passing_ref: str
    replaces_payload: bool

    @property
    def pair(self) -> tuple[ExecutionId, ExecutionId]:
        return self.upstream_id, self.downstream_id


def check_edge(
    edge_id: object,
    upstream_id: ExecutionId,
    downstream_id: ExecutionId,
    data_passing_ref: object,
    replaces_payload: bool = True,
) -> NewEdge:
    if upstream_id == downstream_id:
        raise errors.SelfReferencingEdge(f"{upstream_id} cannot depend on itself")
    return NewEdge(
        edge_id=EdgeId(parse_uuid("edge_id", edge_id)),
        upstream_id=upstream_id,
        downstream_id=downstream_id,
        data_passing_ref=check_optional_text("data_passing_ref", data_passing_ref) or "",
        replaces_payload=replaces_payload,
    )


def check_dependency_kind(kind: object) -> None:
    if check_text("dependency_kind", kind) != SUCCESS_ONLY:
        raise errors.InvalidInput("dependency_kind", f"must be {SUCCESS_ONLY}", kind)


def derived_edge_id(flow_id: FlowId, upstream_id: str, downstream_id: str) -> str:
    """The same id for the same pair, so that a repeated request adds nothing."""
    digest = hashlib.sha256(f"{flow_id}\x00{upstream_id}\x00{downstream_id}".encode()).digest()
    return uuid4_from(digest[:16])


# The flow --------------------------------------------------------------------


def new_flow(
    flow_id: FlowId, partition_key: int, flow_kind: str, namespace: Namespace, now_ms: int
) -> FlowRecord:
    return FlowRecord(
        partition_key=partition_key,
        flow_id=flow_id,
        namespace=namespace,
        flow_kind=flow_kind,
        public_flow_state=FlowState.OPEN,
        derived_state=FlowState.OPEN,
        created_at_ms=now_ms,
        last_mutation_at_ms=now_ms,
    )


def check_open(flow: FlowRecord) -> None:
    if flow.public_flow_state is not FlowState.OPEN:
        raise errors.FlowAlreadyTerminal(
            f"flow {flow.flow_id} is {flow.public_flow_state} and takes nothing new; create another"
        )


def check_same_namespace(flow: FlowRecord, namespace: Namespace) -> None:
    """Raise unless the existing flow is in the namespace of the request to create it."""
    if namespace != flow.namespace:
        raise errors.IdempotencyConflict(f"flow id {flow.flow_id} is taken; give another")


def check_new_member(flow: FlowRecord, namespace: Namespace) -> None:
    """Raise unless a member to be created is in the namespace of its flow."""
    if namespace != flow.namespace:
        raise errors.InvalidInput("namespace", "must be that of the flow", namespace)


def check_revision(flow: FlowRecord, expected: int | None) -> None:
    if expected is not None and expected != flow.graph_revision:
        raise errors.StaleGraphRevision(
            f"flow {flow.flow_id} is at graph revision {flow.graph_revision}, not {expected}"
        )


def check_joinable(execution: Execution, flow: FlowRecord) -> None:
    """Raise unless the execution may become a member: of the same namespace, in no other flow."""
    if execution.namespace != flow.namespace:
        raise errors.NotFound("execution", execution.execution_id)
    if execution.flow_id not in (None, flow.flow_id):
        raise errors.ExecutionAlreadyInFlow(f"already_member_of_different_flow:{execution.flow_id}")


def check_member(flow: FlowRecord, execution_id: ExecutionId, flow_id: str | None) -> None:
    if flow_id != flow.flow_id:
        raise errors.ExecutionNotInFlow(f"{execution_id} is not a member of flow {flow.flow_id}")


def check_can_wait(execution: Execution, group: JoinRecord | None) -> None:
    """An execution that has ended, or whose join has fired, waits for nothing more."""
    if execution.lifecycle_phase is LifecyclePhase.TERMINAL:
        raise errors.Terminal(f"{execution.execution_id} has ended as {execution.public_state}")
    if group is not None and group.group_state is not GroupState.PENDING:
        raise errors.Terminal(
            f"the join of {execution.execution_id} is {group.group_state} already"
        )


def with_members(flow: FlowRecord, members: Sequence[Execution], now_ms: int) -> FlowRecord:
    """The flow with new members; those that had ended before count as ended."""
    count = flow.node_count + len(members)
    if count > FLOW_MEMBERS_MAX:
        raise errors.InvalidInput(
            "members", f"a flow has at most {FLOW_MEMBERS_MAX} members", count
        )
    counted = count_endings(
        flow,
        (each.terminal_outcome for each in members),
        spared=sum(is_spared(e.terminal_outcome, e.cancellation_reason) for e in members),
    )
    ends = [each.completed_at_ms for each in members if each.completed_at_ms is not None]
    return structs.replace(
        with_last_end(counted, ends),
        node_count=count,
        graph_revision=flow.graph_revision + len(members),
        member_retention_ms=max(flow.member_retention_ms, *(e.retention_ms for e in members)),
        member_retention_failed_ms=max(
            flow.member_retention_failed_ms, *(e.retention_failed_ms for e in members)
        ),
        last_mutation_at_ms=now_ms,
    )


def join_flow(execution: Execution, flow: FlowRecord, now_ms: int) -> Execution:
    """The execution as a member. From now on the flow decides how long it is kept."""
    return change(execution, now_ms, flow_id=flow.flow_id, retain_until_ms=None)


def with_edges(flow: FlowRecord, count: int, now_ms: int) -> FlowRecord:
    total = flow.edge_count + count
    if total > FLOW_EDGES_MAX:
        raise errors.InvalidInput("edges", f"a flow has at most {FLOW_EDGES_MAX} edges", total)
    return structs.replace(
        flow,
        edge_count=total,
        graph_revision=flow.graph_revision + count,
        last_mutation_at_ms=now_ms,
    )


_COUNTERS = {
    TerminalOutcome.SUCCESS: "members_completed",
    TerminalOutcome.FAILED: "members_failed",
    TerminalOutcome.CANCELLED: "members_cancelled",
    TerminalOutcome.EXPIRED: "members_expired",
    TerminalOutcome.SKIPPED: "members_skipped",
}


def count_endings(
    flow: FlowRecord, outcomes: Iterable[TerminalOutcome], by: int = 1, *, spared: int = 0
) -> FlowRecord:
    """The flow after members ended, or with `by=-1` after ended ones came back.

    `spared` says how many of them were cancelled because a join no longer needed them.
    """
    counts = {"members_spared": flow.members_spared + by * spared}
    for outcome in outcomes:
        if outcome is not TerminalOutcome.NONE:
            name = _COUNTERS[outcome]
            counts[name] = counts.get(name, getattr(flow, name)) + by
    return structs.replace(flow, **counts)


def with_last_end(flow: FlowRecord, ended_at_ms: Iterable[int]) -> FlowRecord:
    """The flow after members ended at these times, whenever that is counted."""
    known = () if flow.last_ended_at_ms is None else (flow.last_ended_at_ms,)
    return structs.replace(flow, last_ended_at_ms=max((*known, *ended_at_ms), default=None))


ENDED_BADLY = {PublicState.FAILED, PublicState.EXPIRED}
HELD_UP = {
    PublicState.SUSPENDED,
    PublicState.DELAYED,
    PublicState.RATE_LIMITED,
    PublicState.WAITING_CHILDREN,
}


class MemberCounts(Struct, frozen=True):
    """How many members are in which state."""

    by_state: Mapping[PublicState, int]
    spared: int = 0
    """Of the cancelled ones: those that a join no longer needed."""
    ends_ms: tuple[int, ...] = ()
    """When the last member in each state ended; empty in counts of running flows."""


def derive_flow_state(members: MemberCounts, *, cancelled: bool) -> FlowState:
    """What the members' states make of the flow. An empty flow is open."""
    states = {state for state, count in members.by_state.items() if count}
    if states <= TERMINAL_STATES and (states or cancelled):
        if cancelled:
            return FlowState.CANCELLED
        unwanted = members.by_state.get(PublicState.CANCELLED, 0) - members.spared
        return FlowState.FAILED if unwanted or states & ENDED_BADLY else FlowState.COMPLETED
    if PublicState.ACTIVE in states:
        return FlowState.RUNNING
    return FlowState.BLOCKED if states & HELD_UP else FlowState.OPEN


def with_derived_state(flow: FlowRecord, now_ms: int, retention_ms: int) -> FlowRecord:
    """The flow with the state its counters show once all members have ended, and its keep time."""
    counts = {state: getattr(flow, f"members_{state}") for state in TERMINAL_STATES}
    state = FlowState.OPEN
    if sum(counts.values()) >= flow.node_count:
        cancelled = flow.public_flow_state is FlowState.CANCELLED
        members = MemberCounts(counts, flow.members_spared)
        state = derive_flow_state(members, cancelled=cancelled)
    if state is FlowState.OPEN:
        return structs.replace(flow, derived_state=state, ended_at_ms=None, retain_until_ms=None)
    known = [each for each in (flow.ended_at_ms, flow.last_ended_at_ms) if each is not None]
    ended_at_ms = max(known, default=now_ms)
    kept_ms = flow.member_retention_ms
    if state is not FlowState.COMPLETED:
        kept_ms = flow.member_retention_failed_ms
    return structs.replace(
        flow,
        derived_state=state,
        ended_at_ms=ended_at_ms,
        retain_until_ms=ended_at_ms + max(retention_ms, kept_ms),
    )


def recounted(flow: FlowRecord, ended: MemberCounts) -> FlowRecord:
    """The flow with its counters, and the time of the last end, set to those of `ended`."""
    counts = {f"members_{state}": ended.by_state.get(state, 0) for state in TERMINAL_STATES}
    counted = structs.replace(flow, members_spared=ended.spared, **counts)
    return with_last_end(counted, ended.ends_ms)


# Edges and groups --------------------------------------------------------------


def new_group(flow: FlowRecord, downstream_id: ExecutionId, rule: JoinRule = ALL_OF) -> JoinRecord:
    return JoinRecord(
        partition_key=flow.partition_key,
        downstream_id=downstream_id,
        flow_id=flow.flow_id,
        policy_kind=rule.policy_kind,
        k=rule.k,
        on_satisfied=rule.on_satisfied,
    )


def with_rule(group: JoinRecord, rule: JoinRule) -> JoinRecord:
    """The group under another policy, which is fixed once there is an edge."""
    changed = structs.replace(
        group, policy_kind=rule.policy_kind, k=rule.k, on_satisfied=rule.on_satisfied
    )
    if changed == group:
        return group
    if group.staged:
        raise errors.InvalidInput(
            "policy",
            f"{POLICY_FIXED}: {group.downstream_id} has dependencies; set the policy before them",
        )
    return changed


def new_edge(flow: FlowRecord, new: NewEdge, now_ms: int, *, applied: bool) -> Edge:
    return Edge(
        partition_key=flow.partition_key,
        flow_id=flow.flow_id,
        edge_id=new.edge_id,
        upstream_id=new.upstream_id,
        downstream_id=new.downstream_id,
        dependency_kind=SUCCESS_ONLY,
        data_passing_ref=new.data_passing_ref,
        replaces_payload=new.replaces_payload,
        edge_state=EdgeState.APPLIED if applied else EdgeState.PENDING,
        created_at_ms=now_ms,
        applied_at_ms=now_ms if applied else None,
    )


def with_staged(group: JoinRecord, edges: Sequence[NewEdge], *, applied: bool) -> JoinRecord:
    return structs.replace(
        group,
        staged=group.staged + len(edges),
        applied=group.applied + (len(edges) if applied else 0),
        named_inputs=group.named_inputs + sum(bool(edge.data_passing_ref) for edge in edges),
    )


Pair = tuple[str, str]


def check_acyclic(pairs: Iterable[Pair]) -> None:
    """Raise when following the edges ever leads back to where one started."""
    upstreams: dict[str, set[str]] = {}
    for upstream, downstream in pairs:
        upstreams.setdefault(downstream, set()).add(upstream)
    try:
        TopologicalSorter(upstreams).prepare()
    except CycleError as error:
        member = min(error.args[1])
        raise errors.CycleDetected(
            f"the dependencies would lead from {member} back to itself"
        ) from None
