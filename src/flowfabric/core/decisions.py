"""What operations decide, as data: how an execution's record changes, and how it ends.

`Subject` is what an operation locks before it decides: the execution, its
current attempt, any claim grant, and what is open of suspension and waitpoints.
`change` is the only way to make the next version of an execution: it stamps the
times, holds back what waits for its join, puts in what that passed on, forgets a grant that
can no longer be used, and derives `public_state` and `ready` from the six state dimensions,
so the two can never disagree.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, TypeVar

from msgspec import Struct, structs

from flowfabric.core import situations, states
from flowfabric.core.bounds import HELD_MS_MAX, HELD_MS_MIN, RETENTION_FAILED_MS, RETENTION_MS
from flowfabric.core.events import Event, LeaseEventType, completion_event, lease_event
from flowfabric.core.flow_records import CompletionDispatch
from flowfabric.core.policies import ExecutionPolicy
from flowfabric.core.records import (
    Attempt,
    Execution,
    Record,
    StoredGrant,
    Suspension,
    Waitpoint,
    WaitpointState,
)
from flowfabric.errors import FlowFabricError

# What an operation wants written: the only thing a store ever saves ---------
#
# A decision holds whole records and events, so every change of state travels
# with its history and both land in one transaction or not at all.

A = TypeVar("A", covariant=True)


class Changes(Struct, frozen=True, kw_only=True):
    """Rows to insert, update and delete, and the events to log."""

    inserts: tuple[Record, ...] = ()
    updates: tuple[Record, ...] = ()
    deletes: tuple[Record, ...] = ()
    events: tuple[Event, ...] = ()


NO_CHANGES = Changes()


class Decision(Struct, Generic[A], frozen=True, kw_only=True):
    """Changes, and the answer to the caller."""

    answer: A
    changes: Changes = NO_CHANGES


class Refusal(Exception):
    """A refused request that still leaves something to write.

    Noticing that a lease has expired is worth keeping even though the request
    that noticed it fails: the changes are committed, then `error` is raised.
    """

    def __init__(self, error: FlowFabricError, changes: Changes) -> None:
        super().__init__(str(error))
        self.error = error
        self.changes = changes


Place = tuple[type[Record], tuple[str | int, ...]]
"""Which row of which table."""


class Writes(NamedTuple):
    """What becomes of each row, once."""

    inserts: dict[Place, Record]
    updates: dict[Place, Record]
    deletes: dict[Place, Record]


def place_of(record: Record) -> Place:
    kind = type(record)
    return kind, _key_getter(kind)(record)


@cache
def _key_getter(kind: type[Record]) -> Callable[[Record], tuple[str | int, ...]]:
    if len(kind.key) > 1:
        return attrgetter(*kind.key)
    (name,) = kind.key
    return lambda record: (getattr(record, name),)


def writes_of(parts: Iterable[Changes], absent: Collection[Place] = ()) -> Writes:
    """One write per row: of several changes to a row, the last one counts.

    An update of a row that is known to be `absent` is an insert.
    """
    inserts, updates, deletes = writes = Writes({}, {}, {})
    for part in parts:
        new = {place_of(record): record for record in part.inserts}
        assert len(new) == len(part.inserts), f"inserted twice: one of {list(new)}"
        for place, record in new.items():
            # A row deleted before and inserted again is there all along.
            (inserts if deletes.pop(place, None) is None else updates)[place] = record
        for record in part.updates:
            place = place_of(record)
            (inserts if place in inserts or place in absent else updates)[place] = record
        for record in part.deletes:
            place = place_of(record)
            updates.pop(place, None)
            if inserts.pop(place, None) is None:
                deletes[place] = record
    return writes


def combine(several: Iterable[Changes]) -> Changes:
    """All changes as one, in which each row is written once."""
    parts = tuple(several)
    writes = writes_of(parts)
    return Changes(
        inserts=tuple(writes.inserts.values()),
        updates=tuple(writes.updates.values()),
        deletes=tuple(writes.deletes.values()),
        events=tuple(event for part in parts for event in part.events),
    )


Field = str | int | bool | bytes | None

NO_LEASE: Final[dict[str, Field]] = dict.fromkeys((
    "lease_id", "worker_id", "worker_instance_id", "lease_acquired_at_ms", "lease_expires_at_ms",
    "lease_last_renewed_at_ms", "lease_expired_at_ms", "lease_revoked_at_ms",
    "lease_revoke_reason", "attempt_deadline_ms",
))  # fmt: skip
"""The columns that releasing a lease clears. Epoch and attempt id stay, to recognise repeats."""

UNBLOCKED: dict[str, Field] = {**situations.into(situations.Situation.WAITING)}
"""Nothing but a worker is missing; or its join, see `readiness`."""


def final_lease(execution: Execution) -> dict[str, Field]:
    """The lease an execution holds, as it is remembered when the execution ends."""
    return {
        "final_lease_id": execution.lease_id,
        "final_worker_id": execution.worker_id,
        "final_worker_instance_id": execution.worker_instance_id,
    }


class SignsOfLife(Struct, frozen=True, kw_only=True):
    """Signs of life since workers seemed to die over an execution."""

    stepped: bool = False
    """It has stored a step in its current attempt."""
    survivors: int = 0
    """How many of the workers that counted as dead have been heard of since."""
    holder_lives: bool = False
    """Whether the one that has it has been heard of since the end of its lease."""


NO_SIGNS: Final = SignsOfLife()


class Timing(Struct, frozen=True, kw_only=True):
    """What a decision needs to know about time and chance."""

    now_ms: int
    chance: float = 0.0
    """Uniform in [0, 1): spreads retries with jitter."""


class Subject(Struct, frozen=True, kw_only=True):
    execution: Execution
    attempt: Attempt | None
    """The row of `current_attempt_index`; none before the first claim."""
    signs: SignsOfLife = NO_SIGNS
    """Asked only where its worker has died before."""
    grant: StoredGrant | None = None
    suspension: Suspension | None = None
    """The open one."""
    waitpoints: tuple[Waitpoint, ...] = ()
    """The open ones, by id."""


def advance(subject: Subject, changes: Changes) -> Subject:
    """The subject as it will be once `changes` are saved."""
    execution_id = subject.execution.execution_id
    written = (*changes.inserts, *changes.updates)
    for record in written:
        if isinstance(record, Execution) and record.execution_id == execution_id:
            subject = structs.replace(subject, execution=record)
    # Which attempt is the current one, the new execution says.
    index = subject.execution.current_attempt_index
    for record in written:
        match record:
            case Attempt() if (record.execution_id, record.attempt_index) == (execution_id, index):
                subject = structs.replace(subject, attempt=record)
            case Suspension() if record.execution_id == execution_id:
                still_open = record if record.closed_at_ms is None else None
                subject = structs.replace(subject, suspension=still_open)
            case Waitpoint() if record.execution_id == execution_id:
                after = _with_waitpoint(subject.waitpoints, record)
                subject = structs.replace(subject, waitpoints=after)
            case _:
                pass
    return subject


def _with_waitpoint(before: Iterable[Waitpoint], changed: Waitpoint) -> tuple[Waitpoint, ...]:
    """The open waitpoints, by id."""
    others = [each for each in before if each.waitpoint_id != changed.waitpoint_id]
    if changed.state is not WaitpointState.CLOSED:
        others.append(changed)
    return tuple(sorted(others, key=lambda each: each.waitpoint_id))


def with_derived(execution: Execution) -> Execution:
    """The same execution with its derived fields brought up to date."""
    if situations.falls_to_join(execution):
        execution = structs.replace(execution, **situations.HELD_BY_JOIN)
    if execution.next_input is not None and situations.takes_payload(execution):
        execution = structs.replace(
            execution,
            input=execution.next_input,
            input_encoding=execution.next_input_encoding,
            next_input=None,
            next_input_encoding=None,
        )
    if execution.granted_until_ms is not None and not situations.keeps_grant(execution):
        execution = structs.replace(execution, granted_until_ms=None)
    return structs.replace(
        execution,
        public_state=states.derive_public_state(
            execution.lifecycle_phase, execution.eligibility_state, execution.terminal_outcome
        ),
        ready=situations.is_ready(execution),
    )


def change(execution: Execution, now_ms: int, **fields: Field) -> Execution:
    """The next version of `execution`."""
    if fields.get("lifecycle_phase", execution.lifecycle_phase) != execution.lifecycle_phase:
        fields["last_transition_at_ms"] = now_ms
    return with_derived(structs.replace(execution, last_mutation_at_ms=now_ms, **fields))


# How long what has ended is kept --------------------------------------------
#
# Failures are kept longer than successes: people still have to look at them. How long
# an execution is kept is settled when it is created, from its policy or the engine's
# settings, and written on its row.


class Keep(Struct, frozen=True, kw_only=True):
    """Keep times from the end on, by how it ended."""

    completed_ms: int = RETENTION_MS
    failed_ms: int = RETENTION_FAILED_MS


DEFAULT_KEEP = Keep()


def keep_of(policy: ExecutionPolicy, default: Keep) -> Keep:
    """What a policy asks for; where it asks for nothing, the default."""
    retention = policy.retention_policy
    stream = policy.stream_policy
    ttl_ms = None if stream is None else stream.retention_ttl_ms
    completed_ms = None if retention is None else retention.completed_ms
    failed_ms = None if retention is None else retention.failed_ms
    if ttl_ms is not None:
        default = Keep(completed_ms=ttl_ms, failed_ms=ttl_ms)
    return Keep(
        completed_ms=default.completed_ms if completed_ms is None else completed_ms,
        failed_ms=default.failed_ms if failed_ms is None else failed_ms,
    )


def kept_ms(execution: Execution, outcome: states.TerminalOutcome) -> int:
    """How long an execution is kept that ends with `outcome`."""
    succeeded = outcome is states.TerminalOutcome.SUCCESS
    return execution.retention_ms if succeeded else execution.retention_failed_ms


def held_until_ms(ended_at_ms: int, now_ms: int) -> int:
    """When to re-check something that is past its retention time but still referenced.

    After as long as it has been kept already, within limits: what is needed for long
    costs little, and what is needed briefly goes soon.
    """
    return now_ms + min(max(now_ms - ended_at_ms, HELD_MS_MIN), HELD_MS_MAX)


# How executions end ---------------------------------------------------------
#
# `finish` is the one terminal transition, whatever causes it: it ends the attempt,
# frees the lease, closes the suspension and every waitpoint, drops any claim grant,
# sets the time after which the row may be deleted, and appends the completion event.
# The end of a flow's member is also queued for its dependents; the flow decides how
# long to keep it.

NOTHING_MORE: Mapping[str, Field] = MappingProxyType({})


def finish(
    subject: Subject,
    outcome: states.TerminalOutcome,
    now_ms: int,
    *,
    attempt_end: states.AttemptLifecycle,
    reason: str,
    attempt_failure: str | None = None,
    attempt_category: str | None = None,
    attempt_fields: Mapping[str, Field] = NOTHING_MORE,
    lease_event_type: LeaseEventType = LeaseEventType.REVOKED,
    fields: Mapping[str, Field] = NOTHING_MORE,
) -> Changes:
    """End the execution with `outcome`.

    `reason` goes into the lease event when a live lease is released, and onto what
    is closed; `attempt_failure` onto the attempt. `fields` are further changes to
    the row, `attempt_fields` to that of the attempt.
    """
    before = subject.execution
    had_attempt = before.total_attempt_count > 0
    ended_fields: dict[str, Field] = {
        **NO_LEASE,
        **final_lease(before),
        **situations.into(situations.BY_OUTCOME[outcome]),
        "attempt_state": states.AttemptState.ATTEMPT_TERMINAL
        if had_attempt
        else before.attempt_state,
        "delay_until_ms": None,
        "awaits_child": False,
        "attempt_time_left_ms": None,
        "current_suspension_id": None,
        "current_waitpoint_id": None,
        "open_waitpoint_count": 0,
        "keeps_signals": before.keeps_signals or got_signals(subject.suspension),
        "completed_at_ms": now_ms,
        "retain_until_ms": None if before.flow_id else now_ms + kept_ms(before, outcome),
    }
    after = change(before, now_ms, **(ended_fields | dict(fields)))
    released = (
        (lease_event(before, lease_event_type, now_ms, reason),)
        if before.ownership_state is states.OwnershipState.LEASED
        else ()
    )
    return Changes(
        inserts=dispatch_of(after, now_ms),
        updates=(
            after,
            *end_attempt(
                subject.attempt,
                attempt_end,
                now_ms,
                attempt_failure,
                attempt_category,
                attempt_fields,
            ),
            *close_suspension(subject.suspension, reason, now_ms),
            *close_waitpoints(subject.waitpoints, reason, now_ms, with_execution=True),
        ),
        deletes=() if subject.grant is None else (subject.grant,),
        events=(*released, completion_event(after, outcome, now_ms)),
    )


def dispatch_of(ended: Execution, now_ms: int) -> tuple[CompletionDispatch, ...]:
    """The row by which the dispatcher learns that a flow member has ended."""
    if ended.flow_id is None:
        return ()
    return (
        CompletionDispatch(
            partition_key=ended.partition_key,
            flow_id=ended.flow_id,
            execution_id=ended.execution_id,
            replay_count=ended.replay_count,
            outcome=ended.terminal_outcome,
            enqueued_at_ms=now_ms,
        ),
    )


def end_attempt(
    attempt: Attempt | None,
    end: states.AttemptLifecycle,
    now_ms: int,
    failure: str | None = None,
    category: str | None = None,
    fields: Mapping[str, Field] = NOTHING_MORE,
) -> tuple[Attempt, ...]:
    """The attempt's last version, or nothing when none is open."""
    if attempt is None or attempt.attempt_state.is_terminal:
        return ()
    return (
        structs.replace(
            attempt,
            attempt_state=end,
            ended_at_ms=now_ms,
            failure_reason=failure,
            failure_category=category,
            **fields,
        ),
    )


def close_suspension(
    suspension: Suspension | None, reason: str, now_ms: int
) -> tuple[Suspension, ...]:
    """The suspension's last version, or nothing when none is open."""
    if suspension is None:
        return ()
    return (structs.replace(suspension, closed_at_ms=now_ms, close_reason=reason),)


def got_signals(suspension: Suspension | None) -> bool:
    """Whether a pause that ends unmet may have signals to give back to later waits."""
    return suspension is not None and suspension.last_signal_at_ms is not None


def close_waitpoints(
    waitpoints: Iterable[Waitpoint], reason: str, now_ms: int, *, with_execution: bool = False
) -> tuple[Waitpoint, ...]:
    return tuple(
        structs.replace(
            waitpoint,
            state=WaitpointState.CLOSED,
            closed_at_ms=now_ms,
            close_reason=reason,
            ended_with_execution=with_execution,
        )
        for waitpoint in waitpoints
    )
