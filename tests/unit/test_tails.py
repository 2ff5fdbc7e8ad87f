"""Streams as their readers see them: places, ends, and what still counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flowfabric.core.flow_endings import DEPENDENCY_IMPOSSIBLE
from flowfabric.core.states import AttemptLifecycle, LifecyclePhase, OwnershipState, TerminalOutcome
from flowfabric.core.streams import Encoding, ModeName, next_id, show_id
from flowfabric.core.tails import (
    END,
    Closed,
    CloseReason,
    ExecutionCursor,
    StreamFacts,
    StreamFrame,
    TakeOver,
    closing,
    read_after,
    read_execution_cursor,
    read_position,
)
from flowfabric.errors import InvalidInput

# Places


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("start", 0, (1 << 20) - 1),
        ("end", END.at_least(), 2**63 - 1),
        ("123", 123 << 20, (123 << 20) + (1 << 20) - 1),
        ("0-0", 0, 0),
        ("123-4", (123 << 20) + 4, (123 << 20) + 4),
        ("99999999999999999999", 2**63, 2**63 - 1),
    ],
)
def test_a_place_is_a_whole_millisecond_or_one_frame(text: str, low: int, high: int) -> None:
    position = read_position("from", text)
    assert (position.at_least(), position.at_most()) == (low, high)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must not be empty"),
        ("-", "use 'start' or 'end'"),
        ("+", "use 'start' or 'end'"),
        ("1-", "must be 'start'"),
        ("-1", "must be 'start'"),
        ("1-2-3", "must be 'start'"),
        ("１２", "must be 'start'"),
        ("1 ", "must be 'start'"),
        ("Start", "must be 'start'"),
        (5, "must be a stream cursor"),
        (None, "must be a stream cursor"),
    ],
)
def test_what_is_no_place_is_refused(text: object, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        read_position("from", text)


@pytest.mark.parametrize("text", ["start", "end"])
def test_a_tail_begins_after_a_frame(text: str) -> None:
    with pytest.raises(InvalidInput, match="requires concrete after cursor"):
        read_after(text)
    assert (read_after("0-0"), read_after("7"), read_after("7-2")) == (0, 7 << 20, (7 << 20) + 2)


@given(st.integers(0, 2**62), st.integers(0, 2**41))
def test_a_frame_is_found_again_by_its_id(last_id: int, now_ms: int) -> None:
    frame_id = next_id(last_id, now_ms)
    position = read_position("from", show_id(frame_id))
    assert position.at_least() == position.at_most() == read_after(show_id(frame_id)) == frame_id


def test_the_cursor_of_an_execution_is_read_back() -> None:
    cursor = ExecutionCursor(3, (7 << 20) + 2)
    assert str(cursor) == "3:7-2"
    assert read_execution_cursor(str(cursor)) == cursor
    assert read_execution_cursor("start") == ExecutionCursor(0, 0)
    assert read_execution_cursor("end") is None
    for wrong in ("", "3", "3:7", "7-2", 3, None, "a:1-1"):
        with pytest.raises(InvalidInput):
            read_execution_cursor(wrong)


# Ends

RUNNING = StreamFacts(
    lifecycle_phase=LifecyclePhase.ACTIVE,
    ownership_state=OwnershipState.LEASED,
    terminal_outcome=TerminalOutcome.NONE,
    current_attempt_index=1,
    total_attempt_count=2,
    completed_at_ms=None,
    lease_expired_at_ms=None,
    last_mutation_at_ms=40,
    attempt_state=AttemptLifecycle.STARTED,
    ended_at_ms=None,
    failure_reason=None,
    failure_category=None,
    last_frame_id=None,
    frame_count=None,
    kept_after=None,
    expires_at_ms=None,
)
FAILURE, CANCELLED = AttemptLifecycle.ENDED_FAILURE, AttemptLifecycle.ENDED_CANCELLED


@pytest.mark.parametrize(
    ("state", "why", "category", "reason"),
    [
        (AttemptLifecycle.ENDED_SUCCESS, None, None, CloseReason.ATTEMPT_SUCCESS),
        (FAILURE, "ValueError", "disk", CloseReason.ATTEMPT_FAILURE),
        (FAILURE, "ValueError", "timeout", CloseReason.ATTEMPT_FAILURE),
        (FAILURE, "attempt_timeout", "disk", CloseReason.ATTEMPT_FAILURE),
        (FAILURE, "attempt_timeout", "timeout", CloseReason.EXPIRED),
        (FAILURE, "execution_deadline", "timeout", CloseReason.EXPIRED),
        (FAILURE, "suspension_timeout:fail", "timeout", CloseReason.SUSPENSION_TIMEOUT),
        (FAILURE, "suspension_timeout:expire", "timeout", CloseReason.SUSPENSION_TIMEOUT),
        (CANCELLED, "suspension_timeout:cancel", "timeout", CloseReason.SUSPENSION_TIMEOUT),
        (CANCELLED, "cancelled: no", "cancelled", CloseReason.ATTEMPT_CANCELLED),
        (CANCELLED, DEPENDENCY_IMPOSSIBLE, None, CloseReason.DEPENDENCY_IMPOSSIBLE),
        (AttemptLifecycle.INTERRUPTED_RECLAIMED, "lease_expired", None, CloseReason.RECLAIMED),
    ],
)
def test_a_stream_is_closed_by_what_ended_its_attempt(
    state: AttemptLifecycle, why: str | None, category: str | None, reason: CloseReason
) -> None:
    ended = structs.replace(
        RUNNING, attempt_state=state, ended_at_ms=30, failure_reason=why, failure_category=category
    )
    # Whatever became of the execution afterwards.
    for execution in (ended, structs.replace(ended, lifecycle_phase=LifecyclePhase.TERMINAL)):
        assert closing(execution, 1) == Closed(at_ms=30, reason=reason)


@pytest.mark.parametrize(
    ("facts", "closed"),
    [
        pytest.param(None, None, id="no execution"),
        pytest.param(structs.replace(RUNNING, total_attempt_count=0), None, id="not begun"),
        pytest.param(structs.replace(RUNNING, current_attempt_index=0), None, id="a later one"),
        pytest.param(RUNNING, None, id="running"),
        pytest.param(
            structs.replace(
                RUNNING,
                lifecycle_phase=LifecyclePhase.SUSPENDED,
                attempt_state=AttemptLifecycle.SUSPENDED,
            ),
            None,
            id="suspended",
        ),
        pytest.param(
            structs.replace(RUNNING, ownership_state=OwnershipState.LEASE_REVOKED),
            None,
            id="revoked, and may be appended to by nobody",
        ),
        pytest.param(
            structs.replace(
                RUNNING,
                ownership_state=OwnershipState.LEASE_EXPIRED_RECLAIMABLE,
                lease_expired_at_ms=30,
            ),
            Closed(at_ms=30, reason=CloseReason.LEASE_EXPIRED),
            id="its lease was found to have expired",
        ),
        pytest.param(
            structs.replace(
                RUNNING,
                lifecycle_phase=LifecyclePhase.TERMINAL,
                terminal_outcome=TerminalOutcome.SUCCESS,
                completed_at_ms=30,
                attempt_state=None,
            ),
            Closed(at_ms=30, reason=CloseReason.ATTEMPT_SUCCESS),
            id="an attempt that needed no row",
        ),
        pytest.param(
            structs.replace(RUNNING, current_attempt_index=2),
            Closed(at_ms=40, reason=CloseReason.RECLAIMED),
            id="another attempt has begun",
        ),
    ],
)
def test_a_stream_is_open_as_long_as_its_attempt(
    facts: StreamFacts | None, closed: Closed | None
) -> None:
    assert closing(facts, 1) == closed


def test_frames_past_their_time_are_hidden_before_they_are_deleted() -> None:
    stream = structs.replace(RUNNING, frame_count=9, kept_after=4, expires_at_ms=50)
    assert (stream.hidden_through(49), stream.hidden_through(50)) == (4, 9)
    assert RUNNING.hidden_through(50) == 0


# What still counts


def a_frame(attempt_index: int, step_key: str | None = None) -> StreamFrame:
    return StreamFrame(
        id="1-0",
        attempt_index=attempt_index,
        frame_type="delta",
        ts=1,
        payload=b"\xff",
        encoding=Encoding.BASE64,
        source="worker",
        mode=ModeName.DURABLE,
        step_key=step_key,
    )


def test_a_later_attempt_supersedes_all_but_frames_of_finished_steps() -> None:
    take_over = TakeOver(attempt_index=2, kept_steps={"write": 1, "send": 2})
    assert take_over.supersedes(a_frame(1))
    assert take_over.supersedes(a_frame(1, "check"))
    assert not take_over.supersedes(a_frame(1, "write"))
    assert take_over.supersedes(a_frame(0, "write")), "begun there, and finished later"
    assert take_over.supersedes(a_frame(1, "send"))
    assert not take_over.supersedes(a_frame(2))


def test_the_fields_of_a_frame_are_text() -> None:
    assert a_frame(0).fields == {
        "encoding": "base64",
        "frame_type": "delta",
        "mode": "durable",
        "payload": "/w==",
        "source": "worker",
        "ts": "1",
    }
