"""How long what has ended is kept.

Failures are kept longer than successes: somebody still has to look at them. How long
an execution is kept is settled when it is created, from its policy or the engine's
settings, and written on its row.
"""

from msgspec import Struct

from flowfabric.core.limits import HELD_MS_MAX, HELD_MS_MIN, RETENTION_FAILED_MS, RETENTION_MS
from flowfabric.core.policies import ExecutionPolicy
from flowfabric.core.records import Execution
from flowfabric.core.states import TerminalOutcome


class Keep(Struct, frozen=True, kw_only=True):
    """Keep times from the end on, by how it ended."""

    completed_ms: int = RETENTION_MS
    failed_ms: int = RETENTION_FAILED_MS


DEFAULT_KEEP = Keep()


def keep_of(policy: ExecutionPolicy, default: Keep) -> Keep:
    """What a policy asks for; where it asks for nothing, the default."""
    asked = policy.retention_policy
    stream = policy.stream_policy
    ttl_ms = None if stream is None else stream.retention_ttl_ms
    completed_ms = None if asked is None else asked.completed_ms
    failed_ms = None if asked is None else asked.failed_ms
    return Keep(
        completed_ms=_first(completed_ms, ttl_ms, default.completed_ms),
        failed_ms=_first(failed_ms, ttl_ms, default.failed_ms),
    )


def kept_ms(execution: Execution, outcome: TerminalOutcome, retention_ms: int) -> int:
    """How long an execution is kept that ends with `outcome`.

    `retention_ms` serves for a row that says nothing itself.
    """
    completed_ms = retention_ms if execution.retention_ms is None else execution.retention_ms
    if outcome is TerminalOutcome.SUCCESS or execution.retention_failed_ms is None:
        return completed_ms
    return execution.retention_failed_ms


def held_until_ms(ended_at_ms: int, now_ms: int) -> int:
    """When to look again at something past its keep time that somebody still needs.

    After as long as it has been kept already, within limits: what is needed for long
    costs little, and what is needed briefly goes soon.
    """
    return now_ms + min(max(now_ms - ended_at_ms, HELD_MS_MIN), HELD_MS_MAX)


def _first(asked: int | None, ttl_ms: int | None, default: int) -> int:
    if asked is not None:
        return asked
    return default if ttl_ms is None else ttl_ms
