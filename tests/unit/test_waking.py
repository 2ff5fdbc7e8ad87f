"""Whom a change of executions wakes."""

import pytest

from flowfabric.engine.topics import (
    COMPLETION_TOPIC,
    DISPATCH_TOPIC,
    DUE_HINT_WITHIN_MS,
    DUE_TOPIC,
    ready_topic,
    topics_after,
)


@pytest.mark.parametrize(
    ("topics", "expected"),
    [
        pytest.param(topics_after(), set(), id="nothing of interest"),
        pytest.param(
            topics_after(lanes=["a", "b"]), {ready_topic("a"), ready_topic("b")}, id="room in lanes"
        ),
        pytest.param(topics_after(ended=True), {COMPLETION_TOPIC}, id="an end"),
        pytest.param(
            topics_after(ended=True, awaited=True, in_flow=True),
            {COMPLETION_TOPIC, DUE_TOPIC, DISPATCH_TOPIC},
            id="an end that others wait for",
        ),
        pytest.param(topics_after(awaited=True, in_flow=True), set(), id="not yet the end"),
        pytest.param(topics_after(due_in_ms=DUE_HINT_WITHIN_MS), {DUE_TOPIC}, id="due soon"),
        pytest.param(topics_after(due_in_ms=DUE_HINT_WITHIN_MS + 1), set(), id="due later"),
        pytest.param(topics_after(due_in_ms=-1), {DUE_TOPIC}, id="overdue"),
    ],
)
def test_whom_to_wake_after(topics: set[str], expected: set[str]) -> None:
    assert topics == expected
