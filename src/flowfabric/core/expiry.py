"""What ran out when an execution, or an attempt of it, ran out of time.

Stored is a code; people are told what it means and how much time there was.
"""

from typing import Final

from flowfabric.core.durations import span
from flowfabric.core.policies import TimeoutPolicy, parse_policy

ATTEMPT_TIMEOUT: Final = "attempt_timeout"
EXECUTION_DEADLINE: Final = "execution_deadline"


def in_words(reason: str, policy: str | None) -> str:
    """A stored reason as people are told it; `policy` is that of the execution."""
    if reason not in (ATTEMPT_TIMEOUT, EXECUTION_DEADLINE):
        return reason
    limits = parse_policy(policy).timeout_policy or TimeoutPolicy()
    if reason == ATTEMPT_TIMEOUT:
        return f"an attempt took longer than its timeout{_of(limits.attempt_timeout_ms)}"
    return f"it did not end within its deadline{_of(limits.execution_deadline_ms)}"


def _of(limit_ms: int | None) -> str:
    return "" if limit_ms is None else f" of {span(limit_ms)}"
