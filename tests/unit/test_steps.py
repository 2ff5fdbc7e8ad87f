"""The order of steps as a person reads them."""

import itertools

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import Step, StepKind
from flowfabric.core.steps import in_order


def step(key: str, after: str | None, at_ms: int) -> Step:
    return Step(
        partition_key=0,
        execution_id=ExecutionId("{fp:0}:00000000-0000-4000-8000-000000000000"),
        step_key=key,
        after_key=after,
        kind=StepKind.CALL,
        attempt_index=0,
        recorded_at_ms=at_ms,
    )


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        pytest.param([], [], id="none"),
        pytest.param([("b", None, 1), ("a", "b", 2)], ["b", "a"], id="by time"),
        pytest.param([("b", None, 1), ("a", "b", 1)], ["b", "a"], id="one millisecond"),
        pytest.param(
            [("z", None, 1), ("y", "z", 1), ("x", "y", 1), ("w", "x", 1)],
            ["z", "y", "x", "w"],
            id="a long line in one millisecond",
        ),
        pytest.param(
            [("start", None, 1), ("left", "start", 2), ("a", "start", 2), ("end", "a", 2)],
            ["start", "a", "end", "left"],
            id="side by side, by name",
        ),
        pytest.param([("b", None, 7), ("a", "b", 3)], ["b", "a"], id="the clock was set back"),
        pytest.param([("a", "gone", 1), ("b", "a", 1)], ["a", "b"], id="its forerunner is unknown"),
        pytest.param([("a", "b", 1), ("b", "a", 1)], ["b", "a"], id="a circle still ends"),
    ],
)
def test_a_step_stands_after_the_one_before_it(
    made: list[tuple[str, str | None, int]], expected: list[str]
) -> None:
    for shuffled in itertools.permutations(made):
        found = in_order(step(*each) for each in shuffled)
        assert [each.step_key for each in found] == expected
