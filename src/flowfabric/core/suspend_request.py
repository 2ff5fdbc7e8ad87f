"""A suspension as it is asked for, and what can be refused without looking at the execution."""

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, TypeVar

from msgspec import Struct

from flowfabric.core.checks import (
    check_bool,
    check_int,
    check_name,
    check_optional_text,
    check_time,
)
from flowfabric.core.conditions import (
    Condition,
    Single,
    TimeoutOnly,
    check_condition,
    referenced_waitpoint_keys,
)
from flowfabric.core.ids import SuspensionId, WaitpointId, WaitpointKey, parse_uuid
from flowfabric.core.limits import (
    IDEMPOTENCY_KEY_BYTES_MAX,
    TEXT_BYTES_MAX,
    WAITPOINTS_PER_SUSPENSION_MAX,
)
from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.core.records import Requester, SuspensionReason, TimeoutBehavior
from flowfabric.errors import InvalidInput

Word = TypeVar("Word", SuspensionReason, Requester, TimeoutBehavior)


class FreshWaitpoint(Struct, frozen=True, kw_only=True):
    """A waitpoint made by the suspension itself. Ids left out are made up."""

    waitpoint_key: str | None = None
    """`wpk:<waitpoint_id>` when left out."""
    waitpoint_id: str | None = None
    own_name_only: bool = False
    """Refuse signals whose name is not the key."""


class UsePending(Struct, frozen=True, kw_only=True):
    """A waitpoint made beforehand; its key and token stay."""

    waitpoint_id: str
    any_attempt: bool = False
    """Take over what an earlier attempt of the same execution made, too."""


Binding: TypeAlias = FreshWaitpoint | UsePending


class ResumePolicy(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """How the execution comes back. Only the delay is acted upon; the rest is kept for readers."""

    resume_target: Literal["runnable"] = "runnable"
    consume_matched_signals: bool = True
    retain_signal_buffer_until_closed: bool = False
    resume_delay_ms: int | None = None
    close_waitpoint_on_resume: bool = True


NORMAL: Final = ResumePolicy()
RESUME_TARGET: Final = NORMAL.resume_target
RESUME_FLAGS: Final = (
    "consume_matched_signals",
    "retain_signal_buffer_until_closed",
    "close_waitpoint_on_resume",
)


class BoundWaitpoint(Struct, frozen=True, kw_only=True):
    """A fresh binding with its ids."""

    waitpoint_id: WaitpointId
    waitpoint_key: WaitpointKey
    own_name_only: bool = False


class SuspendRequest(Struct, frozen=True, kw_only=True):
    """A suspension as it was asked for, checked."""

    suspension_id: SuspensionId
    bindings: tuple[BoundWaitpoint | UsePending, ...]
    """The first is the primary one."""
    condition: Condition
    resume_policy: ResumePolicy
    reason_code: SuspensionReason
    requested_by: Requester
    timeout_at_ms: int | None
    timeout_behavior: TimeoutBehavior | None
    timeout_in_ms: int | None = None
    """The timeout counted from when the execution suspends, by the store's clock."""
    continuation_metadata_pointer: str | None
    idempotency_key: str | None
    take_pending: bool = False
    """Take over every pending waitpoint of the condition's names in place of fresh ones."""

    @property
    def fresh(self) -> tuple[BoundWaitpoint, ...]:
        return tuple(each for each in self.bindings if isinstance(each, BoundWaitpoint))

    @property
    def pending(self) -> tuple[UsePending, ...]:
        return tuple(each for each in self.bindings if isinstance(each, UsePending))


# Checking -------------------------------------------------------------------------


def check_bindings(
    waitpoints: Sequence[Binding],
    condition: Condition,
    new_ids: Sequence[str],
    *,
    take_pending: bool = False,
) -> tuple[BoundWaitpoint | UsePending, ...]:
    """Fill in the ids, and refuse bindings that do not fit the condition.

    The keys of waitpoints made beforehand are not known here; `check_keys` looks at all.
    """
    if not waitpoints:
        raise InvalidInput(
            "waitpoints", "waitpoints_empty: leave it out to get one for each key of the condition"
        )
    if len(waitpoints) > WAITPOINTS_PER_SUSPENSION_MAX:
        raise InvalidInput(
            "waitpoints", f"must be at most {WAITPOINTS_PER_SUSPENSION_MAX}", len(waitpoints)
        )
    primary = waitpoints[0]
    if isinstance(primary, FreshWaitpoint) and isinstance(condition, Single):
        check_same_key(primary.waitpoint_key, condition)
    for index, extra in enumerate(waitpoints[1:], start=1):
        _check_extra(extra, index)
    bound = tuple(
        _bind(binding, new_id) for binding, new_id in zip(waitpoints, new_ids, strict=False)
    )
    if len({each.waitpoint_id for each in bound}) != len(bound):
        raise InvalidInput("waitpoints", "duplicate_waitpoint_id: each must occur once")
    keys = [each.waitpoint_key for each in bound if isinstance(each, BoundWaitpoint)]
    if len(set(keys)) != len(keys):
        raise InvalidInput(
            "waitpoints", "duplicate_waitpoint_key: only waitpoints made beforehand share a key"
        )
    if len(keys) == len(bound) and not take_pending:
        check_keys(keys, condition)
    return bound


def check_same_key(key: str | None, condition: Single) -> None:
    if key is not None and key != condition.waitpoint_key:
        waits_at = condition.waitpoint_key
        raise InvalidInput(
            "waitpoints", f"waitpoint_key_mismatch: the condition waits at {waits_at!r}", key
        )


def _check_extra(extra: object, index: int) -> None:
    if isinstance(extra, FreshWaitpoint) and extra.waitpoint_key == "":
        raise InvalidInput(
            "waitpoints", f"additional_waitpoint_binding_empty_key at waitpoints[{index}]: name it"
        )


def _bind(binding: object, new_id: str) -> BoundWaitpoint | UsePending:
    if isinstance(binding, UsePending):
        parse_uuid("waitpoint_id", binding.waitpoint_id)
        check_bool("any_attempt", binding.any_attempt)
        return binding
    if not isinstance(binding, FreshWaitpoint):
        raise InvalidInput("waitpoints", "must be FreshWaitpoint or UsePending", binding)
    waitpoint_id = new_id if binding.waitpoint_id is None else binding.waitpoint_id
    key = binding.waitpoint_key
    return BoundWaitpoint(
        waitpoint_id=WaitpointId(parse_uuid("waitpoint_id", waitpoint_id)),
        waitpoint_key=WaitpointKey(
            f"wpk:{waitpoint_id}" if key is None else check_name("waitpoint_key", key)
        ),
        own_name_only=check_bool("own_name_only", binding.own_name_only),
    )


def check_keys(bound: Sequence[str], condition: Condition) -> None:
    """Every key the condition mentions is bound, and the other way round."""
    mentioned = referenced_waitpoint_keys(condition)
    for missing in mentioned:
        if missing not in bound:
            raise InvalidInput("waitpoints", f"referenced_waitpoint_key_missing_binding: {missing}")
    # A condition that no signal meets mentions nothing, and has a waitpoint all the same.
    spare = bound if mentioned else bound[1:]
    for extra in spare:
        if extra not in mentioned:
            raise InvalidInput("waitpoints", f"extra_binding_not_referenced_by_condition: {extra}")


def default_bindings(condition: Condition) -> tuple[Binding, ...]:
    """One fresh waitpoint for each key the condition mentions."""
    keys = referenced_waitpoint_keys(condition)
    return tuple(FreshWaitpoint(waitpoint_key=key) for key in keys) or (FreshWaitpoint(),)


def check_sequence(waitpoints: object) -> tuple[Binding, ...]:
    if not isinstance(waitpoints, list | tuple):
        raise InvalidInput("waitpoints", "must be a list of bindings", waitpoints)
    return tuple(waitpoints)


def check_suspend(
    *,
    new_ids: Sequence[str],
    resume_condition: object,
    waitpoints: object = None,
    suspension_id: object = None,
    resume_policy: object = NORMAL,
    reason_code: object = SuspensionReason.WAITING_FOR_SIGNAL,
    requested_by: object = Requester.WORKER,
    timeout_at_ms: object = None,
    timeout_in_ms: object = None,
    timeout_behavior: object = None,
    continuation_metadata_pointer: object = None,
    idempotency_key: object = None,
    take_pending: object = False,
) -> SuspendRequest:
    """Everything about a request that can be refused without looking at the execution.

    `new_ids` are for what the caller leaves unnamed: the suspension and each waitpoint.
    """
    condition = check_condition(resume_condition)
    chosen = default_bindings(condition) if waitpoints is None else check_sequence(waitpoints)
    taking = check_bool("take_pending", take_pending)
    bindings = check_bindings(chosen, condition, new_ids[1:], take_pending=taking)
    if timeout_at_ms is not None and timeout_in_ms is not None:
        raise InvalidInput("timeout_in_ms", "give either timeout_at_ms or timeout_in_ms")
    if isinstance(condition, TimeoutOnly) and timeout_at_ms is None and timeout_in_ms is None:
        raise InvalidInput(
            "timeout_at_ms",
            "timeout_only_without_deadline: without a timeout nothing would ever end this",
        )
    return SuspendRequest(
        suspension_id=SuspensionId(
            parse_uuid("suspension_id", new_ids[0] if suspension_id is None else suspension_id)
        ),
        bindings=bindings,
        condition=condition,
        resume_policy=check_resume_policy(resume_policy),
        reason_code=_one_of(SuspensionReason, "reason_code", reason_code),
        requested_by=_one_of(Requester, "requested_by", requested_by),
        timeout_at_ms=None if timeout_at_ms is None else check_time("timeout_at_ms", timeout_at_ms),
        timeout_behavior=check_behavior(timeout_behavior),
        timeout_in_ms=None
        if timeout_in_ms is None
        else check_int("timeout_in_ms", timeout_in_ms, 0, DURATION_MAX_MS),
        continuation_metadata_pointer=check_optional_text(
            "continuation_metadata_pointer",
            continuation_metadata_pointer,
            bytes_max=TEXT_BYTES_MAX,
        ),
        idempotency_key=check_optional_text(
            "idempotency_key", idempotency_key, bytes_max=IDEMPOTENCY_KEY_BYTES_MAX
        )
        or None,
        take_pending=taking,
    )


def check_resume_policy(policy: object) -> ResumePolicy:
    if not isinstance(policy, ResumePolicy):
        raise InvalidInput("resume_policy", "must be a ResumePolicy", policy)
    if policy.resume_delay_ms is not None:
        check_int("resume_policy.resume_delay_ms", policy.resume_delay_ms, 0, DURATION_MAX_MS)
    if policy.resume_target != RESUME_TARGET:
        raise InvalidInput(
            "resume_policy.resume_target", f"must be {RESUME_TARGET}", policy.resume_target
        )
    for flag in RESUME_FLAGS:
        check_bool(f"resume_policy.{flag}", getattr(policy, flag))
    return policy


def check_behavior(behavior: object) -> TimeoutBehavior | None:
    if behavior is None:
        return None
    if behavior == "auto_resume":
        return TimeoutBehavior.AUTO_RESUME
    return _one_of(TimeoutBehavior, "timeout_behavior", behavior)


def _one_of(words: type[Word], field: str, value: object) -> Word:
    try:
        return words(str(value))
    except ValueError:
        raise InvalidInput(field, f"must be one of {', '.join(words)}", value) from None
