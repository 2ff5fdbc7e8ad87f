"""Streams as their readers see them.

A stream is closed by what ended its attempt. A reader says so only after it has looked at
the attempt, and then reads the frames: nothing can be appended to a stream that is closed, so a
page that says `closed` and has no more is the end.

A later attempt takes the place of what earlier ones have emitted, except for frames of steps
that they finished: their results are kept, and so is what they said.
"""

import base64
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct, structs

from flowfabric.core import states, streams
from flowfabric.core.checks import check_int
from flowfabric.core.flow_endings import DEPENDENCY_IMPOSSIBLE
from flowfabric.core.policies import ATTEMPT_TIMEOUT, EXECUTION_DEADLINE
from flowfabric.core.records import view_of
from flowfabric.errors import InvalidInput


class CloseReason(StrEnum):
    ATTEMPT_SUCCESS = "attempt_success"
    ATTEMPT_FAILURE = "attempt_failure"
    ATTEMPT_CANCELLED = "attempt_cancelled"
    LEASE_EXPIRED = "lease_expired"
    RECLAIMED = "reclaimed"
    EXPIRED = "expired"
    SUSPENSION_TIMEOUT = "suspension_timeout"
    DEPENDENCY_IMPOSSIBLE = "dependency_impossible"


class Closed(Struct, frozen=True, kw_only=True):
    at_ms: int
    reason: CloseReason


class StreamFacts(Struct, frozen=True, kw_only=True):
    """The columns of execution, attempt and stream that say how a stream stands."""

    lifecycle_phase: states.LifecyclePhase
    ownership_state: states.OwnershipState
    terminal_outcome: states.TerminalOutcome
    current_attempt_index: int
    total_attempt_count: int
    completed_at_ms: int | None
    lease_expired_at_ms: int | None
    last_mutation_at_ms: int
    attempt_state: states.AttemptLifecycle | None
    """From the attempt's own row, if it has one."""
    ended_at_ms: int | None
    failure_reason: str | None
    failure_category: str | None
    last_frame_id: int | None
    """From the stream's row, if it has one."""
    frame_count: int | None
    kept_after: int | None
    expires_at_ms: int | None

    @property
    def has_ended(self) -> bool:
        """Whether the execution has: there will be no further attempt, unless it is replayed."""
        return self.lifecycle_phase is states.LifecyclePhase.TERMINAL

    @property
    def latest_attempt(self) -> int:
        """The index of the attempt that began last; -1 before the first."""
        return self.current_attempt_index if self.total_attempt_count else -1

    def hidden_through(self, now_ms: int) -> int:
        """Frames up to this number are gone, though some may still have rows."""
        if self.expires_at_ms is not None and self.expires_at_ms <= now_ms:
            return self.frame_count or 0
        return self.kept_after or 0


def closing(facts: StreamFacts | None, attempt_index: int) -> Closed | None:
    """How the stream of an attempt was closed; none while it is open, or has not begun."""
    if facts is None or attempt_index > facts.latest_attempt:
        return None
    if facts.attempt_state is not None and facts.attempt_state.is_terminal:
        assert facts.ended_at_ms is not None, "an attempt that ended has a time"
        return Closed(at_ms=facts.ended_at_ms, reason=_reason(facts))
    if attempt_index < facts.latest_attempt:
        return Closed(at_ms=facts.last_mutation_at_ms, reason=CloseReason.RECLAIMED)
    if facts.has_ended:
        # The attempt that needs no row is one that succeeded.
        at_ms = facts.completed_at_ms or facts.last_mutation_at_ms
        return Closed(at_ms=at_ms, reason=CloseReason.ATTEMPT_SUCCESS)
    if facts.ownership_state is states.OwnershipState.LEASE_EXPIRED_RECLAIMABLE:
        at_ms = facts.lease_expired_at_ms or facts.last_mutation_at_ms
        return Closed(at_ms=at_ms, reason=CloseReason.LEASE_EXPIRED)
    return None


def _reason(facts: StreamFacts) -> CloseReason:
    why = facts.failure_reason or ""
    timed_out = facts.failure_category == states.FailureClass.TIMEOUT
    match facts.attempt_state:
        case states.AttemptLifecycle.ENDED_SUCCESS:
            return CloseReason.ATTEMPT_SUCCESS
        case states.AttemptLifecycle.INTERRUPTED_RECLAIMED:
            return CloseReason.RECLAIMED
        case _ if timed_out and why.startswith("suspension_timeout:"):
            return CloseReason.SUSPENSION_TIMEOUT
        case _ if timed_out and why in (ATTEMPT_TIMEOUT, EXECUTION_DEADLINE):
            return CloseReason.EXPIRED
        case states.AttemptLifecycle.ENDED_CANCELLED if why == DEPENDENCY_IMPOSSIBLE:
            return CloseReason.DEPENDENCY_IMPOSSIBLE
        case states.AttemptLifecycle.ENDED_CANCELLED:
            return CloseReason.ATTEMPT_CANCELLED
        case _:
            return CloseReason.ATTEMPT_FAILURE


# Places ---------------------------------------------------------------------------


class FramePosition(Struct, frozen=True):
    """A place in a stream: a frame id, of which the second part may be missing."""

    ms: int
    seq: int | None = None

    def at_least(self) -> int:
        """The lowest frame id from here on."""
        return (
            min(self.ms, streams.MS_MAX + 1) << streams.SEQ_BITS if self.seq is None else self._id()
        )

    def at_most(self) -> int:
        """The highest frame id up to here."""
        return (
            min(self.ms, streams.MS_MAX) << streams.SEQ_BITS | streams.SEQ_MASK
            if self.seq is None
            else self._id()
        )

    def _id(self) -> int:
        assert self.seq is not None
        return min(self.ms, streams.MS_MAX) << streams.SEQ_BITS | min(self.seq, streams.SEQ_MASK)


START: Final = FramePosition(0)
END: Final = FramePosition(streams.MS_MAX)
_POSITION: Final = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?", re.ASCII)


def read_position(field: str, given: object) -> FramePosition:
    """A cursor as people and programs write it: `start`, `end`, `<ms>` or `<ms>-<seq>`."""
    if not isinstance(given, str):
        raise InvalidInput(field, "must be a stream cursor, such as 'start' or '0-0'", given)
    if not given:
        raise InvalidInput(field, "stream cursor must not be empty")
    if given in ("-", "+"):
        raise InvalidInput(field, "use 'start' or 'end'", given)
    if given in ("start", "end"):
        return START if given == "start" else END
    parts = _POSITION.fullmatch(given)
    if parts is None:
        raise InvalidInput(field, "must be 'start', 'end', '<ms>' or '<ms>-<seq>'", given)
    return FramePosition(int(parts[1]), None if parts[2] is None else int(parts[2]))


def read_after(given: object) -> int:
    """The frame id a tail begins after; it names a frame, or `0-0` for the beginning."""
    if given in ("start", "end"):
        raise InvalidInput(
            "after", "tail_stream requires concrete after cursor; '0-0' is the beginning", given
        )
    position = read_position("after", given)
    return structs.replace(position, seq=position.seq or 0).at_least()


# What readers get -------------------------------------------------------------------


class StreamFrame(Struct, frozen=True, kw_only=True):
    """One frame of a stream, as it was appended."""

    id: str
    """`<ms>-<seq>`: also the cursor after it."""
    attempt_index: int
    frame_type: str
    ts: int
    payload: bytes
    encoding: streams.Encoding
    source: str
    mode: streams.ModeName
    correlation_id: str | None = None
    step_key: str | None = None
    summary_version: int | None = None
    ttl_ms: int | None = None
    coded: bool = False
    """The payload went through a codec that is missing here."""
    superseded: bool = False
    """A later attempt has taken its place; only readers of a whole execution see this."""

    @property
    def text(self) -> str:
        """The payload as text; base64 if it is binary, or needs a codec that is missing here."""
        if self.encoding is streams.Encoding.BASE64 or self.coded:
            return base64.b64encode(self.payload).decode()
        return self.payload.decode()

    @property
    def fields(self) -> dict[str, str]:
        """All fields as text, by name."""
        values: dict[str, object] = {
            "frame_type": self.frame_type,
            "ts": self.ts,
            "payload": self.text,
            "encoding": self.encoding,
            "source": self.source,
            "mode": self.mode,
            "correlation_id": self.correlation_id,
            "summary_version": self.summary_version,
            "ttl_ms": self.ttl_ms,
            "step_key": self.step_key,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


class StreamFrames(Struct, frozen=True, kw_only=True):
    """A page of a stream, oldest first."""

    frames: tuple[StreamFrame, ...]
    next_cursor: str
    """Read on after this one."""
    has_more: bool = False
    """The page is full: there may be more at once."""
    closed_at_ms: int | None = None
    closed_reason: CloseReason | None = None

    @property
    def is_end(self) -> bool:
        """Nothing will ever follow."""
        return self.closed_at_ms is not None and not self.has_more


class TakeOver(Struct, frozen=True, kw_only=True):
    """A later attempt takes over here: what earlier ones have said no longer counts."""

    attempt_index: int
    kept_steps: Mapping[str, int]
    """Finished steps, and which attempt finished each: what they said in it still counts."""

    def drops(self, attempt_index: int, step_key: str | None) -> bool:
        """Whether what an attempt has said, in a step or outside of steps, no longer counts."""
        kept = step_key is not None and self.kept_steps.get(step_key) == attempt_index
        return attempt_index < self.attempt_index and not kept

    def supersedes(self, frame: StreamFrame) -> bool:
        return self.drops(frame.attempt_index, frame.step_key)


class ExecutionFrames(Struct, frozen=True, kw_only=True):
    """A page of what all attempts of an execution have emitted, in their order."""

    frames: tuple[StreamFrame, ...]
    cursor: str
    """Read on after this one. Opaque."""
    take_over: TakeOver | None = None
    """An attempt has taken over from an earlier one, before these frames."""
    is_end: bool = False
    """The execution has ended, and this is all of it."""


class SummaryDocument(Struct, frozen=True, kw_only=True):
    """An attempt's summary so far."""

    document: bytes
    version: int
    patch_kind: str
    last_updated_ms: int
    first_applied_ms: int


def shown(frame: streams.FrameRecord) -> StreamFrame:
    frame_id = frame.frame_id
    return view_of(
        StreamFrame,
        frame,
        id=streams.show_id(frame_id),
        ts=frame_id >> streams.SEQ_BITS,
        superseded=False,
    )


class ExecutionCursor(Struct, frozen=True):
    """After which frame of which attempt."""

    attempt_index: int = 0
    frame_id: int = 0

    def __str__(self) -> str:
        return f"{self.attempt_index}:{streams.show_id(self.frame_id)}"


_EXECUTION_CURSOR: Final = re.compile(r"(\d{1,9}):(\d{1,20}-\d{1,20})", re.ASCII)


def read_execution_cursor(given: object) -> ExecutionCursor | None:
    """Where a reader of a whole execution continues; None for `end`: from now on."""
    if given == "start":
        return ExecutionCursor()
    if given == "end":
        return None
    parts = _EXECUTION_CURSOR.fullmatch(given) if isinstance(given, str) else None
    if parts is None:
        raise InvalidInput("after", "must be 'start', 'end' or the cursor of a page", given)
    return ExecutionCursor(int(parts[1]), read_position("after", parts[2]).at_least())


def check_count(count_limit: object) -> int:
    if isinstance(count_limit, int) and not isinstance(count_limit, bool):
        if count_limit < 1:
            raise InvalidInput("count_limit", "count_limit must be >= 1", count_limit)
        if count_limit > streams.READ_FRAMES_MAX:
            problem = f"count_limit_exceeds_hard_cap: at most {streams.READ_FRAMES_MAX}"
            raise InvalidInput("count_limit", problem, count_limit)
    return check_int("count_limit", count_limit, 1, streams.READ_FRAMES_MAX)


def check_visibility(visibility: object) -> streams.Visibility:
    if visibility not in list(streams.Visibility):
        choices = " or ".join(repr(each.value) for each in streams.Visibility)
        raise InvalidInput("visibility", f"must be {choices}", visibility)
    return streams.Visibility(str(visibility))
