"""Whether a failed attempt is followed by another one, and when.

The decision is a number of milliseconds to wait, or None for never. Randomness
comes in as `chance`, so the same inputs always give the same answer.
"""

import math
from typing import Final, assert_never

from flowfabric.core.policies import ExponentialBackoff, FixedBackoff, RetryPolicy
from flowfabric.core.states import FailureClass

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
