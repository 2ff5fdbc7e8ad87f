"""Codes of what ran out, in words."""

import pytest

from flowfabric.core.policies import ExecutionPolicy, TimeoutPolicy, encode_policy, in_words

LIMITS = encode_policy(
    ExecutionPolicy(
        timeout_policy=TimeoutPolicy(attempt_timeout_ms=120_000, execution_deadline_ms=3_600_000)
    )
)


@pytest.mark.parametrize(
    ("reason", "policy", "words"),
    [
        ("attempt_timeout", LIMITS, "an attempt took longer than its timeout of 2m"),
        ("attempt_timeout", None, "an attempt took longer than its timeout"),
        ("execution_deadline", LIMITS, "it did not end within its deadline of 1h"),
        ("execution_deadline", "{}", "it did not end within its deadline"),
        ("ValueError: no", LIMITS, "ValueError: no"),
        ("", None, ""),
    ],
)
def test_what_ran_out_is_told_with_its_length(reason: str, policy: str | None, words: str) -> None:
    assert in_words(reason, policy) == words
