"""Whether and when a failed attempt is tried again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.policies import (
    COUNT_MAX,
    DURATION_MAX_MS,
    ExponentialBackoff,
    FixedBackoff,
    RetryPolicy,
    decide_retry,
)
from flowfabric.core.states import FailureClass

ALWAYS = COUNT_MAX

durations = st.integers(0, DURATION_MAX_MS)
chances = st.floats(0, 1, exclude_max=True)
backoffs = st.builds(
    ExponentialBackoff,
    initial_delay_ms=durations,
    max_delay_ms=durations,
    multiplier=st.floats(1, 1_000_000),
    jitter=st.just(False),
)


def decide(
    policy: RetryPolicy | None,
    *,
    retry_count: int = 0,
    failure_class: FailureClass = FailureClass.TRANSIENT,
    category: str = "transient",
    chance: float = 0.0,
) -> int | None:
    return decide_retry(
        policy,
        retry_count=retry_count,
        failure_class=failure_class,
        category=category,
        chance=chance,
    )


def test_without_a_policy_nothing_is_retried() -> None:
    assert decide(None) is None


@pytest.mark.parametrize(
    ("max_retries", "retry_count", "retried"),
    [(0, 0, False), (1, 0, True), (1, 1, False), (3, 2, True), (3, 3, False), (3, 4, False)],
)
def test_retries_are_counted_without_the_first_attempt(
    max_retries: int, retry_count: int, retried: bool
) -> None:
    delay_ms = decide(RetryPolicy(max_retries=max_retries), retry_count=retry_count)
    assert (delay_ms is not None) is retried


@pytest.mark.parametrize(
    ("failure_class", "retried"),
    [
        (FailureClass.TRANSIENT, True),
        (FailureClass.INFRA_CRASH, True),
        (FailureClass.TIMEOUT, True),
        (FailureClass.PERMANENT, False),
        (FailureClass.CANCELLED, False),
    ],
)
def test_the_class_decides_unless_categories_are_listed(
    failure_class: FailureClass, retried: bool
) -> None:
    policy = RetryPolicy()
    for category in (failure_class.value, "rate_limited_by_provider", ""):
        delay_ms = decide(policy, failure_class=failure_class, category=category)
        assert (delay_ms is not None) is retried


@pytest.mark.parametrize(
    ("failure_class", "category", "retried"),
    [
        (FailureClass.TRANSIENT, "provider_busy", True),
        (FailureClass.TIMEOUT, "timeout", True),
        (FailureClass.TRANSIENT, "transient", False),
        (FailureClass.TRANSIENT, "PROVIDER_BUSY", False),
        (FailureClass.PERMANENT, "provider_busy", False),
        (FailureClass.CANCELLED, "provider_busy", False),
    ],
)
def test_listed_categories_narrow_what_is_retried(
    failure_class: FailureClass, category: str, retried: bool
) -> None:
    policy = RetryPolicy(retryable_categories=("provider_busy", "timeout"))
    delay_ms = decide(policy, failure_class=failure_class, category=category)
    assert (delay_ms is not None) is retried


@pytest.mark.parametrize("retry_count", [0, 1, 1000])
def test_a_fixed_backoff_never_changes(retry_count: int) -> None:
    policy = RetryPolicy(max_retries=ALWAYS, backoff=FixedBackoff(delay_ms=10))
    assert decide(policy, retry_count=retry_count, chance=0.9) == 10


@pytest.mark.parametrize(
    ("retry_count", "delay_ms"),
    [(0, 1000), (1, 2000), (2, 4000), (5, 32_000), (6, 60_000), (7, 60_000), (10**9, 60_000)],
)
def test_the_default_backoff_doubles_from_a_second_to_a_minute(
    retry_count: int, delay_ms: int
) -> None:
    assert decide(RetryPolicy(max_retries=ALWAYS), retry_count=retry_count) == delay_ms


@pytest.mark.parametrize(
    ("backoff", "retry_count", "delay_ms"),
    [
        pytest.param(ExponentialBackoff(initial_delay_ms=3, multiplier=1.5), 1, 4, id="4.5"),
        pytest.param(ExponentialBackoff(initial_delay_ms=3, multiplier=1.5), 2, 6, id="6.75"),
        pytest.param(ExponentialBackoff(initial_delay_ms=0), 50, 0, id="nothing to multiply"),
        pytest.param(ExponentialBackoff(max_delay_ms=0), 0, 0, id="nothing is allowed"),
        pytest.param(ExponentialBackoff(max_delay_ms=999), 0, 999, id="limit below the start"),
        pytest.param(ExponentialBackoff(multiplier=1.0), 10**9, 1000, id="never grows"),
    ],
)
def test_an_exponential_delay_is_rounded_down_and_limited(
    backoff: ExponentialBackoff, retry_count: int, delay_ms: int
) -> None:
    policy = RetryPolicy(max_retries=ALWAYS, backoff=backoff)
    assert decide(policy, retry_count=retry_count) == delay_ms


@given(backoff=backoffs, retry_count=st.integers(0, COUNT_MAX - 2))
def test_delays_grow_and_never_pass_the_limit(
    backoff: ExponentialBackoff, retry_count: int
) -> None:
    policy = RetryPolicy(max_retries=ALWAYS, backoff=backoff)
    now_ms = decide(policy, retry_count=retry_count)
    next_ms = decide(policy, retry_count=retry_count + 1)
    assert isinstance(now_ms, int)
    assert isinstance(next_ms, int)
    assert 0 <= now_ms <= next_ms <= backoff.max_delay_ms


@given(delay_ms=durations, chance=chances)
def test_jitter_stays_between_half_the_delay_and_the_delay(delay_ms: int, chance: float) -> None:
    backoff = ExponentialBackoff(initial_delay_ms=delay_ms, max_delay_ms=delay_ms, jitter=True)
    jittered_ms = decide(RetryPolicy(backoff=backoff), chance=chance)
    assert isinstance(jittered_ms, int)
    assert delay_ms / 2 <= jittered_ms <= delay_ms


def test_jitter_reaches_both_ends_and_treats_every_value_alike() -> None:
    backoff = ExponentialBackoff(initial_delay_ms=10, jitter=True)
    found = [decide(RetryPolicy(backoff=backoff), chance=step / 60) for step in range(60)]
    assert {value: found.count(value) for value in found} == dict.fromkeys(range(5, 11), 10)
