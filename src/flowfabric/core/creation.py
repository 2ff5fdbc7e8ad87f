"""How executions are created.

A request is checked completely before anything is written: what many may share once
(`check_terms`), the rest for each (`check_new`). Then it is turned into a record under
the store's clock (`new_execution`). An idempotency
key is remembered in a guard of its own, so that the same key finds the same
execution in every lane as long as that execution exists.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct, structs

from flowfabric.core import checks, ids, states
from flowfabric.core.bounds import IDEMPOTENCY_KEY_BYTES_MAX
from flowfabric.core.decisions import DEFAULT_KEEP, Keep, keep_of, with_derived
from flowfabric.core.executions import clamp_priority
from flowfabric.core.gates import (
    NO_GATES,
    GateName,
    GateOwner,
    LimitUse,
    check_gates,
    check_uses,
    gate_ids_of,
)
from flowfabric.core.limits import DeclaredLimit
from flowfabric.core.policies import DURATION_MAX_MS, ExecutionPolicy, encode_policy, parse_policy
from flowfabric.core.records import Execution, ExecutionTag, IdempotencyGuard
from flowfabric.errors import IdempotencyConflict, InvalidInput, NotFound

PolicyInput = ExecutionPolicy | Mapping[str, object] | str | bytes | None


class NewExecution(Struct, frozen=True, kw_only=True):
    """A request to create one execution; only `execution_kind` has no default."""

    execution_kind: str
    lane_id: str = "default"
    namespace: str = "default"
    input_payload: bytes = b""
    payload_encoding: str | None = None
    priority: int | None = None
    creator_identity: str = ""
    idempotency_key: str | None = None
    strict: bool = False
    """Refuse a reused idempotency key or id when kind, lane or payload differ from the first use.

    The payload of a flow's member is not compared: its joins may have put in another.
    """
    tags: Mapping[str, str] = {}
    policy: PolicyInput = None
    delay_until_ms: int | None = None
    delay_ms: int | None = None
    """How long to wait from creation on, by the store's clock; `delay_until_ms` goes first."""
    execution_deadline_at_ms: int | None = None
    execution_id: str | None = None
    """An id in full, a uuid, or any other text: an id of the caller's own, within `namespace`.

    One in full whose partition is not that of its uuid is found again in full only.
    """
    id_is_chosen: bool = False
    """Refuse such an id, and one that disagrees with the idempotency key about what was created.

    An id of the caller's own and its key always have to agree.
    """
    partition_id: int | None = None
    """Where to create it; follows from `execution_id` if that is given."""
    parent_execution_id: str | None = None
    """The execution that submits this one. Once ended, a child is kept while its parent runs."""
    gates: Sequence[GateName] = ()
    """The limits and budgets that its claims ask, each with the value of its key."""
    limits: Sequence[LimitUse] = ()
    """More limits, declared along with their use."""


_SHARED: Final = (
    "execution_kind",
    "lane_id",
    "namespace",
    "payload_encoding",
    "priority",
    "creator_identity",
    "policy",
    "delay_until_ms",
    "delay_ms",
    "execution_deadline_at_ms",
    "gates",
    "limits",
)
"""The fields that make up terms, except tags."""


def shares_terms(request: object, other: object) -> bool:
    """Whether two requests surely have the same terms. What is equal may differ: 1 is True."""
    return (
        isinstance(request, NewExecution)
        and isinstance(other, NewExecution)
        and request.tags == other.tags == {}
        and all(getattr(request, name) is getattr(other, name) for name in _SHARED)
    )


class Terms(Struct, frozen=True, kw_only=True):
    """What a request says beside its id and its payload, checked and with every default filled in.

    Many requests share one: those of a task that are submitted with the same options.
    """

    namespace: ids.Namespace
    lane_id: ids.LaneId
    execution_kind: str
    required_capabilities: tuple[str, ...]
    payload_encoding: str | None
    priority: int
    creator_identity: str
    idempotency_ttl_ms: int | None
    tags: dict[str, str]
    policy: str
    attempt_timeout_ms: int | None
    retention_ms: int
    retention_failed_ms: int
    delay_until_ms: int | None
    delay_ms: int | None
    deadline_at_ms: int | None
    deadline_after_ms: int | None
    gates: tuple[GateName, ...] = ()
    gate_ids: str = NO_GATES
    """The ids of the gates as JSON, as routes store them."""
    limits: tuple[DeclaredLimit, ...] = ()
    """What the program declares of them."""

    def waits_until_ms(self, now_ms: int) -> int | None:
        """Until when what is created now is delayed, if it is."""
        until_ms = self.delay_until_ms
        if until_ms is None and self.delay_ms is not None:
            until_ms = now_ms + self.delay_ms
        return until_ms if until_ms is not None and until_ms > now_ms else None

    @property
    def instance_tag(self) -> str | None:
        return self.tags.get(checks.INSTANCE_TAG_KEY)


class Checked(Struct, frozen=True, kw_only=True, gc=False):
    """A request with every field valid and every default filled in."""

    terms: Terms
    execution_id: ids.ExecutionId
    payload: bytes
    id_is_new: bool = False
    """Whether it was generated for this request, so that nobody else can have it."""
    id_is_chosen: bool = False
    own_id: str | None = None
    idempotency_key: str | None = None
    strict: bool = False
    fingerprint: bytes = b""
    parent_execution_id: ids.ExecutionId | None = None


def check_terms(request: NewExecution, keep: Keep = DEFAULT_KEEP) -> Terms:
    """Raise on the first field that is wrong, of those that requests may share."""
    policy = parse_policy(request.policy)
    kept = keep_of(policy, keep)
    routing = policy.routing_requirements
    timeout = policy.timeout_policy
    delay_until_ms = request.delay_until_ms
    if delay_until_ms is None and request.delay_ms is None:
        delay_until_ms = policy.delay_until
    terms = Terms(
        namespace=ids.parse_namespace(request.namespace),
        lane_id=ids.parse_lane_id(request.lane_id),
        execution_kind=ids.parse_execution_kind(request.execution_kind),
        required_capabilities=()
        if routing is None
        else checks.check_required(routing.required_capabilities),
        payload_encoding=checks.check_optional_text("payload_encoding", request.payload_encoding),
        priority=clamp_priority(policy.priority if request.priority is None else request.priority),
        creator_identity=checks.check_text("creator_identity", request.creator_identity),
        idempotency_ttl_ms=policy.dedup_window_ms,
        tags=checks.check_tags(request.tags),
        policy="{}" if request.policy is None else encode_policy(policy),
        attempt_timeout_ms=None if timeout is None else timeout.attempt_timeout_ms,
        retention_ms=kept.completed_ms,
        retention_failed_ms=kept.failed_ms,
        delay_until_ms=checks.check_optional_time("delay_until_ms", delay_until_ms),
        delay_ms=checks.check_optional_int("delay_ms", request.delay_ms, 0, DURATION_MAX_MS),
        deadline_at_ms=checks.check_optional_time(
            "execution_deadline_at_ms", request.execution_deadline_at_ms
        ),
        deadline_after_ms=None if timeout is None else timeout.execution_deadline_ms,
    )
    named = [
        *(GateName(GateOwner.BUDGET, each) for each in policy.budget_ids),
        *(GateName(GateOwner.QUOTA, q.quota_policy_id, q.key) for q in policy.quota_policies),
    ]
    if request.gates == () and request.limits == () and not named:
        return terms
    terms = structs.replace(terms, gates=(*check_gates(request.gates), *named))
    return with_limits(terms, check_uses(request.limits))


def with_limits(terms: Terms, uses: Iterable[LimitUse]) -> Terms:
    """The same terms under limits."""
    passed = check_gates({*terms.gates, *(each.gate for each in uses)})
    return structs.replace(
        terms,
        gates=passed,
        gate_ids=gate_ids_of(passed),
        limits=tuple({each.limit.quota_policy_id: each.limit for each in uses}.values()),
    )


def check_new(
    request: NewExecution,
    terms: Terms,
    payload: bytes,
    *,
    plain_payload: bytes,
    new_uuid: str,
    partitions: ids.PartitionConfig,
) -> Checked:
    """Raise on the first of the fields that is wrong which requests do not share.

    `payload` is what to store for the `plain_payload` of the caller, and `new_uuid` is the id
    of a request that names none.
    """
    own_id = None if request.execution_id is None else ids.parse_own_id(request.execution_id)
    key = request.idempotency_key
    return Checked(
        terms=terms,
        execution_id=_check_id(request, terms.namespace, own_id, new_uuid, partitions),
        payload=payload,
        id_is_new=request.execution_id is None,
        id_is_chosen=checks.check_bool("id_is_chosen", request.id_is_chosen) or own_id is not None,
        own_id=own_id,
        idempotency_key=checks.check_optional_text(
            "idempotency_key", key, bytes_max=IDEMPOTENCY_KEY_BYTES_MAX
        )
        or None,
        strict=checks.check_bool("strict", request.strict),
        fingerprint=fingerprint(terms.lane_id, terms.execution_kind, plain_payload)
        if key or request.strict
        else b"",
        parent_execution_id=None
        if request.parent_execution_id is None
        else ids.parse_any_id(request.parent_execution_id, partitions, "parent_execution_id"),
    )


def _check_id(
    request: NewExecution,
    namespace: ids.Namespace,
    own_id: str | None,
    new_uuid: str,
    partitions: ids.PartitionConfig,
) -> ids.ExecutionId:
    if own_id is not None:
        execution_id = ids.own_execution_id(namespace, own_id, partitions)
    elif request.execution_id is None:
        return _made_id(request.partition_id, new_uuid, partitions)
    else:
        execution_id = ids.parse_any_id(request.execution_id, partitions)
        ids.check_partition(ids.partition_of(execution_id), partitions)
        if request.id_is_chosen:
            ids.check_own_partition(execution_id, partitions)
    if request.partition_id not in (None, ids.partition_of(execution_id)):
        raise InvalidInput(
            "partition_id", f"differs from that of {execution_id}", request.partition_id
        )
    return execution_id


def _made_id(
    partition_id: int | None, uuid: str, partitions: ids.PartitionConfig
) -> ids.ExecutionId:
    if partition_id is not None:
        ids.check_partition(
            checks.check_int("partition_id", partition_id, 0, ids.INDEX_MAX), partitions
        )
        uuid = ids.fitted(uuid, partition_id, partitions)
    return ids.solo_execution_id(uuid, partitions)


def fingerprint(lane_id: str, execution_kind: str, payload: bytes) -> bytes:
    """What a strict repeat must agree on."""
    head = f"{lane_id}\x00{execution_kind}\x00".encode()
    return hashlib.sha256(head + payload).digest()


def check_repeat(checked: Checked, namespace: str) -> None:
    """Raise unless the execution that has the id of a request is in its namespace."""
    if namespace != checked.terms.namespace:
        raise IdempotencyConflict(
            f"execution id {checked.execution_id} is taken; give another, or none"
        )


def of_another_task(wanted_kind: str, kind: str) -> str:
    """What is wrong with an id that names a run of a `kind`, if that is another task than that of
    the kind that was wanted. Versions of a task share their ids."""
    wanted, has = checks.split_kind(wanted_kind)[0], checks.split_kind(kind)[0]
    return "" if wanted == has else f"belongs to a run of task {has!r}, not of {wanted!r}"


def check_same_task(checked: Checked, known: Execution) -> None:
    """Raise when what has the chosen id is a run of another task."""
    problem = of_another_task(checked.terms.execution_kind, known.execution_kind)
    if checked.id_is_chosen and problem:
        raise IdempotencyConflict(
            f"execution id {checked.own_id or checked.execution_id} {problem}; give another id"
        )


def check_key_agrees(checked: Checked, winner: str) -> None:
    """Raise when a key has created something else than what the chosen id names."""
    if checked.id_is_chosen and winner != checked.execution_id:
        raise IdempotencyConflict(
            f"idempotency key {checked.idempotency_key!r} already created {winner}, not"
            f" {checked.own_id or checked.execution_id}; give the id or the key, or another key"
        )


def check_id_agrees(checked: Checked, known: Execution) -> None:
    """Raise when what has the chosen id was created by another key, or by none.

    The key of the request would be forgotten.
    """
    if checked.id_is_chosen and checked.idempotency_key not in (None, known.idempotency_key):
        by = "no key" if known.idempotency_key is None else f"key {known.idempotency_key!r}"
        raise IdempotencyConflict(
            f"execution {checked.own_id or checked.execution_id} exists already, created by {by},"
            f" not by {checked.idempotency_key!r}; give the id or the key, or another id"
        )


def check_strict(checked: Checked, known: Execution, plain: Callable[[bytes], bytes]) -> None:
    """Raise when a strict request has the id of something else.

    `plain` gives the payload of a request from the one that is stored.
    """
    payload = plain(known.payload)
    if checked.fingerprint != fingerprint(known.lane_id, known.execution_kind, payload):
        raise IdempotencyConflict(
            f"execution {checked.own_id or checked.execution_id} exists already, with another"
            " lane, kind or payload"
        )


def check_parent(checked: Checked, namespaces: Mapping[ids.ExecutionId, str]) -> None:
    """Raise when the parent is in another namespace; one that is gone may be anywhere."""
    parent = checked.parent_execution_id
    own = checked.terms.namespace
    if parent is not None and namespaces.get(parent, own) != own:
        raise NotFound("execution", parent)


def new_execution(checked: Checked, route_id: int, now_ms: int) -> Execution:
    terms = checked.terms
    delay_until_ms = terms.waits_until_ms(now_ms)
    delayed = delay_until_ms is not None
    deadline_at_ms = terms.deadline_at_ms
    if deadline_at_ms is None and terms.deadline_after_ms is not None:
        deadline_at_ms = now_ms + terms.deadline_after_ms
    return with_derived(
        Execution(
            partition_key=ids.partition_of(checked.execution_id),
            execution_id=checked.execution_id,
            own_id=checked.own_id,
            namespace=terms.namespace,
            lane_id=terms.lane_id,
            execution_kind=terms.execution_kind,
            route_id=route_id,
            priority=terms.priority,
            creator_identity=terms.creator_identity,
            idempotency_key=checked.idempotency_key,
            parent_execution_id=checked.parent_execution_id,
            instance_tag=terms.instance_tag,
            lifecycle_phase=states.LifecyclePhase.RUNNABLE,
            ownership_state=states.OwnershipState.UNOWNED,
            eligibility_state=states.EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
            if delayed
            else states.EligibilityState.ELIGIBLE_NOW,
            blocking_reason=states.BlockingReason.WAITING_FOR_DELAY
            if delayed
            else states.BlockingReason.WAITING_FOR_WORKER,
            blocking_detail=f"delayed until {delay_until_ms}" if delayed else "",
            attempt_state=states.AttemptState.PENDING_FIRST_ATTEMPT,
            public_state=states.PublicState.WAITING,
            ready=False,
            created_at_ms=now_ms,
            last_transition_at_ms=now_ms,
            last_mutation_at_ms=now_ms,
            delay_until_ms=delay_until_ms,
            deadline_at_ms=deadline_at_ms,
            payload=checked.payload,
            payload_encoding=terms.payload_encoding,
            policy=terms.policy,
            attempt_timeout_ms=terms.attempt_timeout_ms,
            retention_ms=terms.retention_ms,
            retention_failed_ms=terms.retention_failed_ms,
        )
    )


def like_new(alike: Execution, checked: Checked) -> Execution:
    """What `new_execution` makes of another request with the same terms at the same time."""
    return structs.replace(
        alike,
        partition_key=ids.partition_of(checked.execution_id),
        execution_id=checked.execution_id,
        payload=checked.payload,
        own_id=checked.own_id,
        idempotency_key=checked.idempotency_key,
        parent_execution_id=checked.parent_execution_id,
    )


def new_tags(execution: Execution, tags: Mapping[str, str]) -> tuple[ExecutionTag, ...]:
    return tuple(
        ExecutionTag(
            partition_key=execution.partition_key,
            execution_id=execution.execution_id,
            tag_key=key,
            tag_value=value,
            created_at_ms=execution.created_at_ms,
        )
        for key, value in tags.items()
    )


def new_guard(checked: Checked, now_ms: int) -> IdempotencyGuard:
    assert checked.idempotency_key is not None
    ttl_ms = checked.terms.idempotency_ttl_ms
    return IdempotencyGuard(
        namespace=checked.terms.namespace,
        idempotency_key=checked.idempotency_key,
        execution=checked.execution_id,
        fingerprint=checked.fingerprint,
        expires_at_ms=None if ttl_ms is None else now_ms + ttl_ms,
    )
