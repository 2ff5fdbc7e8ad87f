"""How an execution is treated: retries, timeouts, routing, retention.

A policy is fixed when the execution is created and stored as JSON. `parse_policy`
is the only way in: it accepts a policy object, a mapping or JSON text, and checks
all three alike, so a stored policy is always valid. `encode_policy` is the only way
out: it writes what differs from the defaults and nothing else, hence equal policies
have equal texts, and nothing is ever spelled `null`.
"""

import math
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Annotated, Final, Protocol, assert_never

import msgspec
from msgspec import Meta

from flowfabric.core import checks
from flowfabric.core.bounds import TIME_MS_MAX, WORKER_DEATHS_MAX
from flowfabric.core.ids import parse_uuid
from flowfabric.core.records import TimeoutBehavior
from flowfabric.core.states import FailureClass
from flowfabric.errors import InvalidInput, InvalidPolicyJson, PayloadTooLarge

POLICY_MAX_BYTES: Final = 65_536
DURATION_MAX_MS: Final = 10 * 365 * 24 * 60 * 60 * 1000

ASKED_PRIORITY_MIN: Final = -(2**31)
ASKED_PRIORITY_MAX: Final = 2**31 - 1
"""The priorities a request may name; they are clamped to `bounds.PRIORITY_MIN` and `PRIORITY_MAX`.
"""
COUNT_MAX: Final = 2**32 - 1
MULTIPLIER_MAX: Final = 1_000_000.0
LIST_MAX: Final = 64
TEXT_MAX_CHARS: Final = 256
EXPLAINED_MAX_CHARS: Final = 256
"""How much is said about what is wrong; the names of unknown fields are part of it."""

PolicyCount = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
DurationMs = Annotated[int, Meta(ge=0, le=DURATION_MAX_MS)]
TimestampMs = Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
Text = Annotated[str, Meta(min_length=1, max_length=TEXT_MAX_CHARS)]


class _Policy(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Shared settings of every part of a policy."""


class ExponentialBackoff(_Policy, frozen=True, kw_only=True, tag_field="type", tag="exponential"):
    """Wait longer after each failure, up to a limit."""

    initial_delay_ms: DurationMs = 1000
    max_delay_ms: DurationMs = 60_000
    multiplier: Annotated[float, Meta(ge=1, le=MULTIPLIER_MAX)] = 2.0
    jitter: bool = False


class FixedBackoff(_Policy, frozen=True, kw_only=True, tag_field="type", tag="fixed"):
    """Wait the same time after each failure."""

    delay_ms: DurationMs


class RetryPolicy(_Policy, frozen=True, kw_only=True):
    """How often to try again, and when. `max_retries` does not count the first attempt."""

    max_retries: PolicyCount = 3
    backoff: ExponentialBackoff | FixedBackoff = ExponentialBackoff()
    retryable_categories: Annotated[tuple[Text, ...], Meta(max_length=LIST_MAX)] = ()


class TimeoutPolicy(_Policy, frozen=True, kw_only=True):
    """How long one attempt, and the whole execution since its creation, may take."""

    attempt_timeout_ms: DurationMs | None = None
    execution_deadline_ms: DurationMs | None = None
    max_reclaim_count: PolicyCount | None = None
    """Goes before the policy's own, if given."""


class SuspensionPolicy(_Policy, frozen=True, kw_only=True):
    """What a suspension without a timeout of its own does."""

    default_timeout_ms: DurationMs | None = None
    timeout_behavior: TimeoutBehavior = TimeoutBehavior.FAIL


class FallbackTier(_Policy, frozen=True, kw_only=True):
    """One provider to fall back to."""

    provider: Text
    model: Text
    timeout_ms: DurationMs | None = None


class FallbackPolicy(_Policy, frozen=True, kw_only=True):
    """Providers in the order they are tried."""

    tiers: Annotated[tuple[FallbackTier, ...], Meta(max_length=LIST_MAX)] = ()


class RoutingRequirements(_Policy, frozen=True, kw_only=True):
    """What a worker must offer to run the execution."""

    required_capabilities: Annotated[tuple[str, ...], Meta(max_length=checks.TOKENS_MAX)] = ()
    preferred_locality: Text | None = None
    isolation_level: Text | None = None


class QuotaUse(_Policy, frozen=True, kw_only=True):
    """A quota policy the execution is under, and the value of its key."""

    quota_policy_id: Text
    key: Annotated[str, Meta(max_length=TEXT_MAX_CHARS)] = ""


class StreamPolicy(_Policy, frozen=True, kw_only=True):
    """How the execution's output is kept."""

    durability_mode: Text = "buffered"
    retention_maxlen: PolicyCount = 10_000
    retention_ttl_ms: DurationMs | None = None


class RetentionPolicy(_Policy, frozen=True, kw_only=True):
    """How long the execution is kept once it has completed, or ended in any other way."""

    completed_ms: DurationMs | None = None
    failed_ms: DurationMs | None = None


class ExecutionPolicy(_Policy, frozen=True, kw_only=True):
    """Everything a caller may say about how an execution is treated.

    No `retry_policy` means no retries.
    """

    priority: Annotated[int, Meta(ge=ASKED_PRIORITY_MIN, le=ASKED_PRIORITY_MAX)] = 0
    delay_until: TimestampMs | None = None
    retry_policy: RetryPolicy | None = None
    timeout_policy: TimeoutPolicy | None = None
    max_reclaim_count: PolicyCount = 100
    max_worker_deaths: PolicyCount = WORKER_DEATHS_MAX
    """How often in a row its worker may die before a step is stored or it waits."""
    suspension_policy: SuspensionPolicy | None = None
    fallback_policy: FallbackPolicy | None = None
    max_replay_count: PolicyCount = 10
    budget_ids: Annotated[tuple[str, ...], Meta(max_length=LIST_MAX)] = ()
    quota_policies: Annotated[tuple[QuotaUse, ...], Meta(max_length=LIST_MAX)] = ()
    routing_requirements: RoutingRequirements | None = None
    dedup_window_ms: DurationMs | None = None
    stream_policy: StreamPolicy | None = None
    retention_policy: RetentionPolicy | None = None
    max_signals_per_execution: PolicyCount = 10_000


DEFAULT_POLICY: Final = ExecutionPolicy()


def reclaim_limit(policy: ExecutionPolicy) -> int:
    """How often an execution may lose its lease and be handed to another worker."""
    timeout = policy.timeout_policy
    if timeout is None or timeout.max_reclaim_count is None:
        return policy.max_reclaim_count
    return timeout.max_reclaim_count


def parse_policy(
    value: ExecutionPolicy | str | bytes | Mapping[str, object] | None,
) -> ExecutionPolicy:
    """Check a policy in any of its forms. Nothing, or empty text, is the default policy.

    Raises `InvalidPolicyJson` naming the field, `InvalidCapabilities` naming the rule
    its required capabilities break, or `PayloadTooLarge`.
    """
    if value is None or value is DEFAULT_POLICY or value == "{}":
        return DEFAULT_POLICY
    return _parse_text(value) if isinstance(value, str) else _parse(value)


@lru_cache(maxsize=1024)
def _parse_text(text: str) -> ExecutionPolicy:
    """The executions of a task all have the same text, and every failure reads it again."""
    return _parse(text)


def _parse(value: ExecutionPolicy | str | bytes | Mapping[str, object]) -> ExecutionPolicy:
    document = _decode_text(value) if isinstance(value, str | bytes) else _decode_object(value)
    if not document:
        return DEFAULT_POLICY
    _check_routing(document)
    try:
        policy = msgspec.convert(document, ExecutionPolicy)
        size_bytes = len(msgspec.json.encode(policy))
    except msgspec.ValidationError as error:
        raise InvalidPolicyJson(_explain(error)) from None
    except UnicodeEncodeError:
        raise InvalidPolicyJson("malformed") from None
    if size_bytes > POLICY_MAX_BYTES:
        raise PayloadTooLarge("policy", POLICY_MAX_BYTES, size_bytes)
    _check_budget_ids(policy.budget_ids)
    return policy


def encode_policy(policy: ExecutionPolicy) -> str:
    """The policy as JSON: fields in their declared order, defaults omitted."""
    if policy is DEFAULT_POLICY:
        return "{}"
    return msgspec.json.encode(_present(policy)).decode()


def _decode_text(text: str | bytes) -> dict[str, object]:
    if not text:
        return {}
    try:
        size_bytes = len(text.encode()) if isinstance(text, str) else len(text)
        if size_bytes > POLICY_MAX_BYTES:
            raise PayloadTooLarge("policy", POLICY_MAX_BYTES, size_bytes)
        return msgspec.json.decode(text, type=dict[str, object])
    except (ValueError, RecursionError):
        raise InvalidPolicyJson("malformed") from None


def _decode_object(value: object) -> dict[str, object]:
    try:
        return msgspec.convert(msgspec.to_builtins(value), dict[str, object])
    except (ValueError, TypeError, RecursionError):
        raise InvalidPolicyJson("malformed") from None


def _check_routing(document: dict[str, object]) -> None:
    """Check the required capabilities and put them into canonical order."""
    if "routing_requirements" not in document:
        return
    routing = document["routing_requirements"]
    if not isinstance(routing, dict):
        raise InvalidPolicyJson("routing_requirements:not_object")
    if "required_capabilities" in routing:
        required = checks.check_required(routing["required_capabilities"])
        document["routing_requirements"] = {**routing, "required_capabilities": required}


def _check_budget_ids(budget_ids: tuple[str, ...]) -> None:
    for index, budget_id in enumerate(budget_ids):
        try:
            parse_uuid(f"budget_ids[{index}]", budget_id)
        except InvalidInput as error:
            raise InvalidPolicyJson(error.detail) from None


def _explain(error: msgspec.ValidationError) -> str:
    """Turn ``Expected `int` >= 0 - at `$.a.b` `` into ``a.b: expected `int` >= 0``."""
    problem, place = checks.split_misfit(str(error))
    told = checks.explained(
        checks.uncapitalized(problem)[:EXPLAINED_MAX_CHARS], place, ExecutionPolicy
    )
    return f"{place or 'policy'}: {told}"


@cache
def _defaults(kind: type[_Policy]) -> tuple[tuple[str, object], ...]:
    fields = msgspec.structs.fields(kind)
    return tuple((field.name, field.default) for field in fields)


def _present(value: object) -> object:
    if isinstance(value, tuple):
        return [_present(item) for item in value]
    if not isinstance(value, _Policy):
        return value
    config = value.__struct_config__
    present: dict[str, object] = {config.tag_field: config.tag} if config.tag_field else {}
    for name, default in _defaults(type(value)):
        current: object = getattr(value, name)
        if current != default:
            present[name] = _present(current)
    return present


# How long something takes, as people write it -------------------------------
#
# `"2m"`, `"1h30m"`, `"500ms"` and `"1.5d"` are text; a number is seconds; a
# `datetime.timedelta` is itself. Everything becomes whole milliseconds here and
# nowhere else, and text for people again.


class TimeSpan(Protocol):
    """The part of `datetime.timedelta` that we use."""

    def total_seconds(self) -> float: ...


Duration = str | int | float | TimeSpan

_UNITS_MS: Final = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 7 * 86_400_000,
}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")
_WHOLE: Final = re.compile(rf"(?:{_PART.pattern})+")


def duration_ms(field: str, value: object) -> int:
    """The duration in milliseconds; anything else is refused by the name of its field."""
    if isinstance(value, str):
        total_ms = _text_ms(field, value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        total_ms = value * 1_000
    elif hasattr(value, "total_seconds"):
        total_ms = float(value.total_seconds()) * 1_000
    else:
        raise InvalidInput(field, _EXPECTED, value)
    if total_ms < 0:
        raise InvalidInput(field, "must be at least 0 s", value)
    if not math.isfinite(total_ms) or total_ms > DURATION_MAX_MS:
        raise InvalidInput(field, f"must be at most {span(DURATION_MAX_MS)}", value)
    return math.ceil(total_ms)


def check_duration(field: str, value: object, low_ms: int, high_ms: int) -> int:
    """The duration in milliseconds, refused with its limits as people write them."""
    total_ms = duration_ms(field, value)
    if not low_ms <= total_ms <= high_ms:
        low, high = (span(each).replace(".0s", "s") for each in (low_ms, high_ms))
        raise InvalidInput(field, f"must be {low} to {high}", value)
    return total_ms


def optional_duration_ms(field: str, value: object) -> int | None:
    return None if value is None else duration_ms(field, value)


def _text_ms(field: str, text: str) -> float:
    compact = text.replace(" ", "")
    if _WHOLE.fullmatch(compact) is None:
        raise InvalidInput(field, _EXPECTED, text)
    return sum(float(amount) * _UNITS_MS[unit] for amount, unit in _PART.findall(compact))


_EXPECTED: Final = 'must be a duration such as "90s", "1h30m", a number of seconds or a timedelta'

_UNITS_S: Final = ((86_400, "d"), (3_600, "h"), (60, "m"))


def span(ms: int) -> str:
    """A duration in at most two units: `340ms`, `12.5s`, `3m12s`, `2d4h`."""
    if ms < 1_000:
        return f"{max(0, ms)}ms"
    if ms < 60_000:
        return f"{ms / 1_000:.1f}s"
    seconds, parts = ms // 1_000, list[str]()
    for size, unit in _UNITS_S:
        count, seconds = divmod(seconds, size)
        if count or parts:
            parts.append(f"{count}{unit}")
    parts.append(f"{seconds}s")
    first, second = parts[:2]
    return first if second[0] == "0" else first + second


# What ran out when an execution, or an attempt of it, ran out of time -------
#
# A code is stored; people see what it means and how much time there was.

ATTEMPT_TIMEOUT: Final = "attempt_timeout"
EXECUTION_DEADLINE: Final = "execution_deadline"


def in_words(reason: str, policy: str | None) -> str:
    """A stored reason in words; `policy` is that of the execution."""
    if reason not in (ATTEMPT_TIMEOUT, EXECUTION_DEADLINE):
        return reason
    limits = parse_policy(policy).timeout_policy or TimeoutPolicy()
    if reason == ATTEMPT_TIMEOUT:
        return f"an attempt took longer than its timeout{_of(limits.attempt_timeout_ms)}"
    return f"it did not end within its deadline{_of(limits.execution_deadline_ms)}"


def _of(limit_ms: int | None) -> str:
    return "" if limit_ms is None else f" of {span(limit_ms)}"


# Whether a failed attempt is followed by another one, and when --------------
#
# The decision is a number of milliseconds to wait, or None for never. Randomness
# comes in as `chance`, so the same inputs always give the same answer.

_NEVER_RETRIED: Final = frozenset({FailureClass.PERMANENT, FailureClass.CANCELLED})


def decide_retry(
    policy: RetryPolicy | None,
    *,
    retry_count: int,
    failure_class: FailureClass,
    category: str,
    chance: float,
) -> int | None:
    """How long to wait before the next attempt, or None if there is none.

    `retry_count` is how many retries were made before this failure. `category` is the
    worker's own word for the failure and matters only if the policy lists categories.
    `chance` is uniform in [0, 1) and matters only if the backoff has jitter.
    """
    assert retry_count >= 0, "retries are counted from zero"
    assert 0 <= chance < 1, "a chance is at least 0 and below 1"
    if policy is None or retry_count >= policy.max_retries or failure_class in _NEVER_RETRIED:
        return None
    if policy.retryable_categories and category not in policy.retryable_categories:
        return None
    match policy.backoff:
        case FixedBackoff(delay_ms=delay_ms):
            return delay_ms
        case ExponentialBackoff() as backoff:
            delay_ms = _exponential_delay_ms(backoff, retry_count)
            return _with_jitter(delay_ms, chance) if backoff.jitter else delay_ms
        case _:
            assert_never(policy.backoff)


def _exponential_delay_ms(backoff: ExponentialBackoff, retry_count: int) -> int:
    """`initial * multiplier ** retry_count`, rounded down, at most `max_delay_ms`."""
    initial_ms, max_ms = backoff.initial_delay_ms, backoff.max_delay_ms
    if initial_ms == 0 or initial_ms >= max_ms:
        return min(initial_ms, max_ms)
    # Compared as logarithms first: the power itself overflows for large counts.
    if retry_count * math.log(backoff.multiplier) > math.log(max_ms / initial_ms) + 1:
        return max_ms
    return min(math.floor(initial_ms * backoff.multiplier**retry_count), max_ms)


def _with_jitter(delay_ms: int, chance: float) -> int:
    """A whole number between half the delay and the delay, each equally likely."""
    least_ms = (delay_ms + 1) // 2
    return min(least_ms + math.floor(chance * (delay_ms - least_ms + 1)), delay_ms)
