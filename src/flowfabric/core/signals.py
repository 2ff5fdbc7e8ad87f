"""What one signal does to the execution it is delivered to.

The caller has shown a token, or is an operator. Repeats come first: a sender
whose connection died before it saw our answer gets `Duplicate`, even when its
signal has resumed the execution meanwhile. Then the waitpoint must be open: a
pending one keeps the signal for later, an active one must belong to the open
suspension, whose condition is looked at again. A signal that the wait cannot use is
kept for a later one, and so is a signal by name that nothing waits for.
"""

import hashlib
from collections.abc import Sequence
from typing import Final, TypedDict

import msgspec
from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import bounds, checks, conditions, ids
from flowfabric.core.decisions import Changes, Decision, Subject, Timing, change
from flowfabric.core.events import Event, EventCategory, event_about
from flowfabric.core.policies import DEFAULT_POLICY, parse_policy
from flowfabric.core.records import (
    Execution,
    SignalDedup,
    SignalEffect,
    SignalFacts,
    SignalRecord,
    Suspension,
    Waitpoint,
    WaitpointState,
)
from flowfabric.core.resumption import NORMAL, RESUMED, resume, stored_policy
from flowfabric.core.states import LifecyclePhase, has_ended
from flowfabric.core.waitpoints import is_expired, token_expired

DEDUPED: Final = "deduped"
KEEPING: Final = (
    "; unless refused (keep=False, --no-keep) a signal is kept for the next wait of its name"
)
_TEXTS: Final = (
    "signal_category",
    "source_type",
    "source_identity",
    "payload_encoding",
    "correlation_id",
    "target_scope",
)
_EVENT_TYPES: Final = {
    SignalEffect.SATISFIED: "satisfied",
    SignalEffect.BUFFERED: "buffered",
    SignalEffect.KEPT: "buffered",
}


class SignalOptions(TypedDict, total=False):
    """Optional fields of a signal: see `SignalRequest`."""

    signal_id: str | None
    signal_category: str
    source_type: str
    source_identity: str
    payload: bytes | None
    payload_encoding: str
    correlation_id: str
    idempotency_key: str | None
    target_scope: str
    created_at_ms: int | None
    dedup_ttl_ms: int | None
    namespace: str | None


class SignalRequest(Struct, frozen=True, kw_only=True):
    """A signal as it is sent, without its address and token. A bad one is refused."""

    signal_name: str
    new_id: ids.SignalId
    """Generated just now, so that no row can have it: the id, unless `signal_id` is given."""
    signal_id: str | None = None
    signal_category: str = "default"
    source_type: str = "external"
    source_identity: str = ""
    payload: bytes | None = None
    payload_encoding: str = checks.JSON
    correlation_id: str = ""
    idempotency_key: str | None = None
    target_scope: str = "waitpoint"
    created_at_ms: int | None = None
    dedup_ttl_ms: int | None = None
    """How long the idempotency key holds; None for as long as the execution exists."""
    namespace: str | None = None
    """An execution of another one counts as unknown."""

    def __post_init__(self) -> None:
        checks.check_name("signal_name", self.signal_name)
        if self.signal_id is not None:
            ids.parse_uuid("signal_id", self.signal_id)
        for field in _TEXTS:
            checks.check_text(field, getattr(self, field))
        if self.payload is not None:
            checks.check_json(
                "payload",
                self.payload,
                bounds.SIGNAL_PAYLOAD_BYTES_MAX,
                encoding=self.payload_encoding,
            )
        checks.check_optional_text(
            "idempotency_key", self.idempotency_key, bytes_max=bounds.IDEMPOTENCY_KEY_BYTES_MAX
        )
        checks.check_optional_time("created_at_ms", self.created_at_ms)
        checks.optional(ids.parse_namespace, self.namespace)
        if self.dedup_ttl_ms is not None:
            ttl_max_ms = bounds.SIGNAL_DEDUP_TTL_MS_MAX
            checks.check_int("dedup_ttl_ms", self.dedup_ttl_ms, 0, ttl_max_ms)
        if self.idempotency_key == "":
            structs.force_setattr(self, "idempotency_key", None)

    @property
    def stored_id(self) -> ids.SignalId:
        return ids.SignalId(self.signal_id or self.new_id)


class SignalAccepted(Struct, frozen=True, kw_only=True, tag="Accepted"):
    signal_id: ids.SignalId
    effect: SignalEffect
    kept: bool = False
    """Whether it is kept for a wait that the execution has not reached yet."""

    @property
    def resumed(self) -> bool:
        """Whether this signal brought the execution back."""
        return self.effect is SignalEffect.SATISFIED


class SignalDuplicate(Struct, frozen=True, kw_only=True, tag="Duplicate"):
    """The same signal was accepted before; nothing was done."""

    existing_signal_id: ids.SignalId

    @property
    def resumed(self) -> bool:
        """A repeat brings nothing back, whatever the first signal did."""
        return False

    @property
    def kept(self) -> bool:
        return False


SignalResult = SignalAccepted | SignalDuplicate


class Mailbox(Struct, frozen=True, kw_only=True):
    """Where a signal goes."""

    waitpoint_id: ids.WaitpointId
    waitpoint_key: ids.WaitpointKey


class KeptSize(Struct, frozen=True, kw_only=True):
    """What an execution keeps for waits to come."""

    signals: int = 0
    bytes: int = 0


def mailbox_id(execution_id: ids.ExecutionId, waitpoint_key: str) -> ids.WaitpointId:
    """Stands in for the waitpoint of a signal that has none, so that repeats are recognised."""
    digest = hashlib.sha256(f"mailbox\x00{execution_id}\x00{waitpoint_key}".encode()).digest()
    return ids.WaitpointId(ids.uuid4_from(digest[:16]))


def check_mailbox_room(execution: Execution, kept: KeptSize, signal: SignalRecord) -> None:
    if kept.signals >= bounds.KEPT_SIGNALS_MAX:
        raise errors.KeptSignalsFull(
            f"{execution.called} keeps {kept.signals} signals for its next waits;"
            f" at most {bounds.KEPT_SIGNALS_MAX} are kept."
            f" Send {signal.signal_name!r} when it waits"
        )
    size = kept.bytes + len(signal.payload or b"")
    if size > bounds.KEPT_SIGNAL_BYTES_MAX:
        raise errors.KeptSignalsFull(
            f"{execution.called}: with {signal.signal_name!r} the signals kept for its next"
            f" waits would be {size} bytes; at most {bounds.KEPT_SIGNAL_BYTES_MAX} are kept"
        )


class SignalFindings(Struct, frozen=True, kw_only=True):
    """The rows that a delivery depends on, besides the execution's own."""

    mailbox: Mailbox
    """Where it goes; it is kept there when there is no waitpoint."""
    waitpoint: Waitpoint | None
    by_token: bool = False
    """Whether the sender has shown a token, and is no operator."""
    keep: bool = True
    """Whether to keep it when the wait at its waitpoint cannot use it."""
    dedup: SignalDedup | None = None
    """What its idempotency key delivered before, live or expired."""
    recorded: bool = False
    """A signal of this id was accepted before."""
    satisfiers: Sequence[SignalFacts] = ()
    """What brought the open suspension's condition forward so far, in order."""
    kept: KeptSize = KeptSize()


def addressed(
    subject: Subject,
    waitpoint_key: str,
    delivered: Sequence[SignalDedup],
    now_ms: int,
    *,
    keep: bool,
) -> ids.WaitpointId:
    """Where a signal by name goes: to what is waited for now before what is for later.

    `delivered` is what the signal's idempotency key delivered before under that name. A
    repeat goes where the first went, or it would count for the next wait of the same name.
    What nothing waits for goes to the mailbox of the name; refused unless `keep`.
    """
    for each in delivered:
        if each.holds(now_ms):
            return each.waitpoint_id
    fitting = [
        waitpoint
        for waitpoint in subject.waitpoints
        if waitpoint.waitpoint_key == waitpoint_key and not is_expired(waitpoint, now_ms)
    ]
    if fitting:
        return min(fitting, key=_turn).waitpoint_id
    if not keep:
        keys = [waitpoint.waitpoint_key for waitpoint in subject.waitpoints]
        raise not_awaited(subject.execution.called, waitpoint_key, keys, KEEPING)
    return mailbox_id(subject.execution.execution_id, waitpoint_key)


def _turn(waitpoint: Waitpoint) -> tuple[bool, int, int]:
    """Of several waitpoints with one name, unused ones come first."""
    waited_for = waitpoint.state is WaitpointState.ACTIVE
    return not waited_for, waitpoint.signal_count, waitpoint.created_at_ms


def not_awaited(
    called: str, name: str, awaited: Sequence[str], advice: str = ""
) -> errors.WaitpointNotFound:
    others = ", ".join(dict.fromkeys(repr(str(each)) for each in awaited))
    waits = f"it waits for {others}" if others else "it waits for no signal"
    return errors.WaitpointNotFound(f"{called} does not wait for {name!r} now: {waits}{advice}")


def decide_deliver(
    subject: Subject, request: SignalRequest, found: SignalFindings, timing: Timing
) -> Decision[SignalResult]:
    _check_name(found.waitpoint, request.signal_name)
    repeated = _repeated(subject.execution, request, found, timing.now_ms)
    if repeated is not None:
        return repeated
    if found.by_token:
        _check_token(found.waitpoint, timing.now_ms)
    suspension = _open_suspension(subject, found.waitpoint, timing.now_ms)
    _check_limit(subject.execution)
    signal = _new_signal(subject.execution, request, found, timing.now_ms)
    if suspension is not None:
        signal = _seen(signal, suspension, found)
    if signal.suspension_id is None:
        check_mailbox_room(subject.execution, found.kept, signal)
    changes = _noted(subject, signal, found.waitpoint, suspension, timing.now_ms)
    dedup = _dedup(signal, request, timing.now_ms)
    event = delivery_event(
        subject.execution, signal, _EVENT_TYPES.get(signal.observed_effect), timing.now_ms
    )
    return Decision(
        answer=SignalAccepted(
            signal_id=signal.signal_id,
            effect=signal.observed_effect,
            kept=signal.suspension_id is None,
        ),
        changes=structs.replace(
            changes,
            inserts=(signal, *(dedup if found.dedup is None else ())),
            updates=(*changes.updates, *(() if found.dedup is None else dedup)),
            events=(*changes.events, event),
        ),
    )


def _check_name(waitpoint: Waitpoint | None, signal_name: str) -> None:
    """A token for `reject` must not allow its holder to send `approve`."""
    if waitpoint is None or not waitpoint.own_name_only:
        return
    if signal_name != waitpoint.waitpoint_key:
        raise errors.WrongSignalName(
            f"signal_name: the waitpoint takes {waitpoint.waitpoint_key!r} only,"
            f" not {signal_name!r}"
        )


def _check_token(waitpoint: Waitpoint | None, now_ms: int) -> None:
    """A token has its own end: a wait that uses its waitpoint may last longer."""
    if waitpoint is not None and token_expired(waitpoint, now_ms):
        raise errors.WaitpointClosed(
            f"the token of waitpoint {waitpoint.waitpoint_id} has expired: ask for another one, or"
            " have an operator send the signal"
        )


def _repeated(
    execution: Execution, request: SignalRequest, found: SignalFindings, now_ms: int
) -> Decision[SignalResult] | None:
    existing: ids.SignalId | None = None
    if found.dedup is not None and found.dedup.holds(now_ms):
        existing = found.dedup.signal_id
    elif found.recorded:
        existing = request.stored_id
    if existing is None:
        return None
    signal = _new_signal(execution, request, found, now_ms)
    repeated = structs.replace(signal, signal_id=existing)
    return Decision(
        answer=SignalDuplicate(existing_signal_id=existing),
        changes=Changes(events=(delivery_event(execution, repeated, DEDUPED, now_ms),)),
    )


def _open_suspension(
    subject: Subject, waitpoint: Waitpoint | None, now_ms: int
) -> Suspension | None:
    """The suspension the signal counts for; none if it is kept for a later one."""
    execution, suspension = subject.execution, subject.suspension
    if execution.lifecycle_phase is LifecyclePhase.TERMINAL:
        raise errors.TargetNotSignalable(
            f"{execution.called} {has_ended(execution.public_state)}, so it takes no signals"
            " (replay it first)"
        )
    if waitpoint is None:
        return None
    if waitpoint.state is WaitpointState.CLOSED or is_expired(waitpoint, now_ms):
        raise errors.WaitpointClosed(f"waitpoint {waitpoint.waitpoint_id} takes no more signals")
    if waitpoint.state is WaitpointState.PENDING:
        return None
    if suspension is None or waitpoint.suspension_id != suspension.suspension_id:
        raise errors.WaitpointClosed(f"waitpoint {waitpoint.waitpoint_id} takes no more signals")
    return suspension


def _check_limit(execution: Execution) -> None:
    limit = parse_policy(execution.policy).max_signals_per_execution
    if limit and execution.signal_count >= limit:
        raise errors.SignalLimitExceeded(
            f"{execution.called} has accepted {execution.signal_count} signals;"
            f" its policy allows {limit}"
        )


def _new_signal(
    execution: Execution, request: SignalRequest, found: SignalFindings, now_ms: int
) -> SignalRecord:
    return SignalRecord(
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        signal_id=request.stored_id,
        sequence=execution.signal_count,
        waitpoint_id=found.mailbox.waitpoint_id,
        waitpoint_key=found.mailbox.waitpoint_key,
        suspension_id=None,
        signal_name=request.signal_name,
        signal_category=request.signal_category,
        source_type=request.source_type,
        source_identity=request.source_identity,
        correlation_id=request.correlation_id,
        idempotency_key=request.idempotency_key,
        target_scope=request.target_scope,
        created_at_ms=now_ms if request.created_at_ms is None else request.created_at_ms,
        accepted_at_ms=now_ms,
        payload=request.payload,
        payload_encoding=request.payload_encoding,
        observed_effect=SignalEffect.KEPT if found.waitpoint is None else SignalEffect.BUFFERED,
    )


def _seen(signal: SignalRecord, suspension: Suspension, found: SignalFindings) -> SignalRecord:
    """The signal as the open suspension sees it: used by it, or kept for a later one."""
    condition = conditions.stored_condition(suspension.resume_condition)
    seen = conditions.observe(condition, found.satisfiers, signal)
    if not (seen.satisfier or found.keep):
        awaited = conditions.progress(condition, found.satisfiers).left
        raise not_awaited(signal.execution_id, signal.waitpoint_key, awaited)
    return structs.replace(
        signal,
        suspension_id=suspension.suspension_id if seen.satisfier else None,
        observed_effect=seen.effect,
        matched=seen.matched,
        satisfier=seen.satisfier,
    )


def _noted(
    subject: Subject,
    signal: SignalRecord,
    waitpoint: Waitpoint | None,
    suspension: Suspension | None,
    now_ms: int,
) -> Changes:
    """Count the signal, and resume if it has met the condition."""
    execution = change(
        subject.execution,
        now_ms,
        signal_count=subject.execution.signal_count + 1,
        keeps_signals=subject.execution.keeps_signals or signal.suspension_id is None,
    )
    if waitpoint is None:
        return Changes(updates=(execution,))
    counted = structs.replace(
        waitpoint,
        signal_count=waitpoint.signal_count + 1,
        matched_signal_count=waitpoint.matched_signal_count + signal.matched,
        last_signal_at_ms=now_ms,
    )
    if suspension is None:
        return Changes(updates=(execution, counted))
    noted = structs.replace(suspension, last_signal_at_ms=now_ms)
    if signal.observed_effect is not SignalEffect.SATISFIED:
        return Changes(updates=(execution, counted, noted))
    others = (w for w in subject.waitpoints if w.waitpoint_id != waitpoint.waitpoint_id)
    after = structs.replace(
        subject, execution=execution, suspension=noted, waitpoints=(counted, *others)
    )
    return resume(
        after,
        RESUMED,
        now_ms,
        delay_ms=stored_policy(suspension).resume_delay_ms or 0,
        cause=f" (signal {signal.signal_name})",
        suspension_fields={"satisfied_at_ms": now_ms, "closer_signal_id": signal.signal_id},
    )


def _dedup(signal: SignalRecord, request: SignalRequest, now_ms: int) -> tuple[SignalDedup, ...]:
    if request.idempotency_key is None or request.dedup_ttl_ms == 0:
        return ()
    return (
        SignalDedup(
            partition_key=signal.partition_key,
            execution_id=signal.execution_id,
            waitpoint_id=signal.waitpoint_id,
            idempotency_key=request.idempotency_key,
            signal_id=signal.signal_id,
            expires_at_ms=None if request.dedup_ttl_ms is None else now_ms + request.dedup_ttl_ms,
        ),
    )


def delivery_event(
    execution: Execution, signal: SignalRecord, event_type: str | None, now_ms: int
) -> Event:
    """The event of one delivery. Effects without an event type of their own go by their text."""
    effect = event_type or signal.observed_effect.value
    before, after = _details(signal.signal_id, signal.source_identity, effect)
    return event_about(
        execution,
        EventCategory.SIGNAL,
        effect,
        now_ms,
        attempt_index=execution.current_attempt_index,
        details=f"{before}{signal.waitpoint_id}{after}",
    )


def _details(signal_id: ids.SignalId, source_identity: str, effect: str) -> tuple[str, str]:
    """The details of a delivery's event, before and after the id of the waitpoint."""
    before = msgspec.json.encode({"signal_id": signal_id}).decode()
    after = msgspec.json.encode({"source_identity": source_identity, "effect": effect}).decode()
    return f'{before[:-1]},"waitpoint_id":"', f'",{after[1:]}'


# Deliveries that a statement makes without a decision --------------------------


def sure_signal(
    request: SignalRequest, waitpoint_key: ids.WaitpointKey
) -> dict[str, str | int | bytes | tuple[str, str] | None]:
    """A signal by name as the parameters of `signal_waiting`, the statement that delivers it to an
    execution that waits for nothing else."""
    effect = SignalEffect.SATISFIED
    before, after = _details(request.new_id, request.source_identity, _EVENT_TYPES[effect])
    return {
        **{name: getattr(request, name) for name in _SURE_FIELDS},
        "signal_id": request.new_id,
        "waitpoint_key": waitpoint_key,
        # The stored conditions that this signal alone meets.
        "conditions": (
            conditions.encode_condition(
                conditions.Single(waitpoint_key, conditions.ByName(request.signal_name))
            ),
            conditions.encode_condition(conditions.Single(waitpoint_key, conditions.WILDCARD)),
        ),
        "resume_policy": _NORMAL,
        # For an execution whose policy says nothing else.
        "signals_max": DEFAULT_POLICY.max_signals_per_execution,
        "effect": effect.value,
        "details_before": before,
        "details_after": after,
    }


_NORMAL: Final = msgspec.json.encode(NORMAL).decode()
_SURE_FIELDS: Final = ("signal_name", "payload", "created_at_ms", "namespace", *_TEXTS)
