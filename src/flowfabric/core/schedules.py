"""When schedules fire.

A schedule stands for a set of instants, its due times, which `next_after` lists. The record keeps
the first due time not yet handled; `plan` says which due times to act on now and where to continue.
Acting on them and moving on commit together, so each due time is acted on once, by whichever
process holds the row.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, Final, Protocol

import msgspec
from msgspec import Struct, structs

from flowfabric.core import checks, ids, policies
from flowfabric.core.bounds import NAME_BYTES_MAX
from flowfabric.core.creation import NewExecution, PolicyInput
from flowfabric.core.records import Record
from flowfabric.errors import InvalidInput

# The record of a schedule: what to create, and when next --------------------


class ScheduleKind(StrEnum):
    CRON = "cron"
    INTERVAL = "interval"


class CatchUp(StrEnum):
    """What happens to due times that passed while nothing was running."""

    LATEST = "latest"
    """Only the latest missed run is created."""
    ALL = "all"
    """Every missed run is created, oldest first; see `CATCH_UP_MAX`."""
    NONE = "none"
    """All are dropped; see `LATENESS_MAX_MS`."""


class Schedule(Record, frozen=True, kw_only=True):
    """Creates an execution at each of its due times."""

    table: ClassVar[str] = "schedule"
    key: ClassVar[tuple[str, ...]] = ("namespace", "schedule_id")

    namespace: ids.Namespace
    schedule_id: str
    """The name its owner gave it."""
    schedule_kind: ScheduleKind
    expression: str
    """Five cron fields, or the interval in milliseconds."""
    timezone: str
    anchor_at_ms: int
    """Where the multiples of an interval are counted from; when the timing was defined."""
    catch_up: CatchUp
    paused: bool = False

    lane_id: ids.LaneId
    execution_kind: str
    payload: bytes = b""
    payload_encoding: str | None = None
    policy: str = "{}"
    priority: int | None = None
    tags: str = "{}"
    """A JSON object."""

    next_due_at_ms: int | None
    """Null while paused."""
    last_due_at_ms: int | None = None
    """The latest due time that created an execution."""
    last_fired_at_ms: int | None = None
    last_execution: str | None = None
    """The full id of the execution created last."""
    fired_count: int = 0
    last_error: str | None = None
    """Why the latest due time created nothing; null when it did."""
    created_at_ms: int
    updated_at_ms: int
    """When the definition, or whether it is paused, last changed."""


EVERY_MS_MIN: Final = 1_000
EVERY_MS_MAX: Final = 366 * 24 * 60 * 60 * 1_000
CATCH_UP_MAX: Final = 1_000
"""Missed due times that `all` makes up for: the newest. Older ones are dropped."""
FIRINGS_MAX: Final = 100
"""Due times of one schedule that one transaction handles; the next one continues from there."""
LATENESS_MAX_MS: Final = 60_000
"""With `none`, a due time noticed later than this is dropped."""

SCHEDULE_TAG: Final = "flowfabric.schedule"
DUE_TAG: Final = "flowfabric.due_at_ms"

_FIRST_SPAN_MS: Final = 60_000


class Recurrence(Protocol):
    """The due times of a schedule."""

    def next_after(self, at_ms: int) -> int | None:
        """The first due time later than `at_ms`; None if there is none."""
        ...


class Interval(Struct, frozen=True):
    """Multiples of `every_ms`, counted from `anchor_at_ms`."""

    every_ms: int
    anchor_at_ms: int

    def next_after(self, at_ms: int) -> int | None:
        passed = max(0, (at_ms - self.anchor_at_ms) // self.every_ms)
        return self.anchor_at_ms + (passed + 1) * self.every_ms


class ScheduleDefinition(Struct, frozen=True, kw_only=True):
    """A request to have a schedule; give either `cron` or `every_ms`."""

    schedule_id: str
    execution_kind: str
    cron: str | None = None
    every_ms: int | None = None
    timezone: str = "UTC"
    catch_up: str = CatchUp.LATEST
    namespace: str = "default"
    lane_id: str = "default"
    input_payload: bytes = b""
    payload_encoding: str | None = None
    policy: PolicyInput = None
    priority: int | None = None
    tags: Mapping[str, str] = {}


def check_schedule_id(schedule_id: object) -> str:
    return checks.check_name("schedule_id", schedule_id)


def check_definition(
    definition: ScheduleDefinition, *, payload_bytes_max: int, now_ms: int
) -> Schedule:
    """The schedule of a definition, as if it were new; its first due time is still to be found.

    Raises on the first field that is wrong. Whether cron and time zone make sense
    is checked where calendars are known.
    """
    if not isinstance(definition, ScheduleDefinition):
        raise InvalidInput("definition", "must be a ScheduleDefinition", definition)
    kind, expression = _check_timing(definition)
    tags = checks.check_tags(definition.tags)
    if len(tags) > checks.TAGS_MAX - 2:
        raise InvalidInput("tags", f"must be at most {checks.TAGS_MAX - 2}", len(tags))
    policy = definition.policy
    return Schedule(
        namespace=ids.parse_namespace(definition.namespace),
        schedule_id=check_schedule_id(definition.schedule_id),
        schedule_kind=kind,
        expression=expression,
        timezone=checks.check_text("timezone", definition.timezone, empty=False),
        anchor_at_ms=now_ms,
        catch_up=checks.check_choice("catch_up", definition.catch_up, CatchUp),
        lane_id=ids.parse_lane_id(definition.lane_id),
        execution_kind=ids.parse_execution_kind(definition.execution_kind),
        payload=checks.check_json(
            "input_payload",
            definition.input_payload,
            payload_bytes_max,
            encoding=definition.payload_encoding,
        ),
        payload_encoding=checks.check_optional_text(
            "payload_encoding", definition.payload_encoding
        ),
        policy="{}" if policy is None else policies.encode_policy(policies.parse_policy(policy)),
        priority=checks.check_optional_int(
            "priority",
            definition.priority,
            policies.ASKED_PRIORITY_MIN,
            policies.ASKED_PRIORITY_MAX,
        ),
        tags=msgspec.json.encode(dict(sorted(tags.items()))).decode(),
        next_due_at_ms=None,
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
    )


def _check_timing(definition: ScheduleDefinition) -> tuple[ScheduleKind, str]:
    if (definition.cron is None) is (definition.every_ms is None):
        raise InvalidInput("cron", "give either cron or every_ms", definition.cron)
    if definition.cron is not None:
        text = checks.check_text("cron", definition.cron, bytes_max=NAME_BYTES_MAX, empty=False)
        return ScheduleKind.CRON, " ".join(text.split())
    if definition.timezone != "UTC":
        raise InvalidInput("timezone", "an interval is the same in every zone", definition.timezone)
    every_ms = checks.check_int("every_ms", definition.every_ms, EVERY_MS_MIN, EVERY_MS_MAX)
    return ScheduleKind.INTERVAL, str(every_ms)


def merge(existing: Schedule | None, wanted: Schedule) -> Schedule:
    """What to store when `wanted` is defined and `existing` is stored.

    A definition whose timing is unchanged keeps its place in time, so registering
    it again at every start of a process neither loses nor repeats a due time. A
    pause outlives every definition: an operator asked for it.
    """
    if existing is None:
        return wanted
    merged = structs.replace(
        wanted,
        paused=existing.paused,
        last_due_at_ms=existing.last_due_at_ms,
        last_fired_at_ms=existing.last_fired_at_ms,
        last_execution=existing.last_execution,
        fired_count=existing.fired_count,
        last_error=existing.last_error,
        created_at_ms=existing.created_at_ms,
        next_due_at_ms=None if existing.paused else wanted.next_due_at_ms,
    )
    if timing_of(existing) == timing_of(wanted):
        merged = structs.replace(
            merged,
            anchor_at_ms=existing.anchor_at_ms,
            next_due_at_ms=existing.next_due_at_ms,
        )
    unchanged = structs.replace(merged, updated_at_ms=existing.updated_at_ms)
    return existing if unchanged == existing else merged


def timing_of(schedule: Schedule) -> tuple[str, str, str]:
    return (schedule.schedule_kind, schedule.expression, schedule.timezone)


def pause(schedule: Schedule, now_ms: int) -> Schedule:
    if schedule.paused:
        return schedule
    return structs.replace(schedule, paused=True, next_due_at_ms=None, updated_at_ms=now_ms)


def resume(schedule: Schedule, recurrence: Recurrence, now_ms: int) -> Schedule:
    """Continue with the next due time; those that passed during the pause are dropped."""
    if not schedule.paused:
        return schedule
    return structs.replace(
        schedule,
        paused=False,
        next_due_at_ms=recurrence.next_after(now_ms),
        updated_at_ms=now_ms,
    )


# Firing ---------------------------------------------------------------------


class FiringPlan(Struct, frozen=True):
    due_at_ms: tuple[int, ...]
    """Due times to act on now, oldest first."""
    next_due_at_ms: int | None


def plan(schedule: Schedule, recurrence: Recurrence, now_ms: int) -> FiringPlan:
    """Which due times to act on, by the schedule's catch-up policy, and where to continue."""
    first_ms = schedule.next_due_at_ms
    if first_ms is None or first_ms > now_ms:
        return FiringPlan((), first_ms)
    match schedule.catch_up:
        case CatchUp.ALL:
            return _plan_all(recurrence, first_ms, now_ms)
        case CatchUp.LATEST:
            lateness_max_ms = now_ms
        case CatchUp.NONE:
            lateness_max_ms = LATENESS_MAX_MS
    latest_ms = latest_due(recurrence, first_ms, now_ms)
    in_time = now_ms - latest_ms <= lateness_max_ms
    return FiringPlan((latest_ms,) if in_time else (), recurrence.next_after(now_ms))


def latest_due(recurrence: Recurrence, first_ms: int, now_ms: int) -> int:
    """The last due time not later than `now_ms`, given that `first_ms` is one.

    A binary search: a schedule may have missed a million due times, or one.
    """
    latest_ms, low_ms, high_ms = first_ms, first_ms, now_ms
    while low_ms < high_ms:
        middle_ms = (low_ms + high_ms) // 2
        due_ms = recurrence.next_after(middle_ms)
        if due_ms is None or due_ms > now_ms:
            high_ms = middle_ms
        else:
            latest_ms = low_ms = due_ms
    return latest_ms


def _plan_all(recurrence: Recurrence, first_ms: int, now_ms: int) -> FiringPlan:
    due = [_oldest_kept(recurrence, first_ms, now_ms)]
    for due_ms in between(recurrence, due[0], now_ms):
        if len(due) == FIRINGS_MAX:
            return FiringPlan(tuple(due), due_ms)
        due.append(due_ms)
    return FiringPlan(tuple(due), recurrence.next_after(now_ms))


def _oldest_kept(recurrence: Recurrence, first_ms: int, now_ms: int) -> int:
    """The oldest missed due time to create a run for: looks back further and further."""
    span_ms = _FIRST_SPAN_MS
    while (start_ms := now_ms - span_ms) >= first_ms:
        newest = deque(between(recurrence, start_ms, now_ms), maxlen=CATCH_UP_MAX)
        if len(newest) == CATCH_UP_MAX:
            return newest[0]
        span_ms *= 2
    newest = deque(between(recurrence, first_ms, now_ms), maxlen=CATCH_UP_MAX)
    return newest[0] if len(newest) == CATCH_UP_MAX else first_ms


def between(recurrence: Recurrence, after_ms: int, through_ms: int) -> Iterator[int]:
    """Due times later than `after_ms`, up to and including `through_ms`."""
    due_ms = recurrence.next_after(after_ms)
    while due_ms is not None and due_ms <= through_ms:
        yield due_ms
        due_ms = recurrence.next_after(due_ms)


def firing_request(
    schedule: Schedule, due_at_ms: int, *, out_of_turn: bool = False
) -> NewExecution:
    """The execution a due time asks for, or, out of turn, somebody who asks for it now.

    The idempotency key holds even against a schedule that was removed and defined
    again within the key's lifetime.
    """
    tags = msgspec.json.decode(schedule.tags, type=dict[str, str])
    tags |= {SCHEDULE_TAG: schedule.schedule_id, DUE_TAG: str(due_at_ms)}
    return NewExecution(
        execution_kind=schedule.execution_kind,
        lane_id=schedule.lane_id,
        namespace=schedule.namespace,
        input_payload=schedule.payload,
        payload_encoding=schedule.payload_encoding,
        priority=schedule.priority,
        creator_identity="schedule",
        idempotency_key=None if out_of_turn else f"schedule:{schedule.schedule_id}:{due_at_ms}",
        tags=tags,
        policy=schedule.policy,
    )


def fired(
    schedule: Schedule, planned: FiringPlan, executions: Sequence[str], now_ms: int
) -> Schedule:
    """The schedule after acting on a plan: each of its due times has created an execution."""
    moved = structs.replace(schedule, next_due_at_ms=planned.next_due_at_ms)
    if not executions:
        return moved
    return structs.replace(
        moved,
        last_due_at_ms=planned.due_at_ms[-1],
        last_execution=executions[-1],
        last_fired_at_ms=now_ms,
        fired_count=schedule.fired_count + len(executions),
        last_error=None,
    )


def refused(schedule: Schedule, planned: FiringPlan, error: str) -> Schedule:
    """The schedule when nothing could be created: it moves on and remembers why."""
    return structs.replace(schedule, next_due_at_ms=planned.next_due_at_ms, last_error=error)
