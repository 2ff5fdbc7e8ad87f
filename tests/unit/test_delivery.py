"""In which order outcomes reach a durable function.

What happens is written down as words: `2` the function asks for the stored outcome at position
2; `+` a new outcome gets a position, which is shown by its number in brackets from then on;
`[4]` it is stored; `-2`, `-[4]` nobody waits for it any more; `.` the function is at rest. For
each rest there is what reaches the function then, `run` if calls that are not stored run, or
nothing. `!` what should come first has been waited for long enough.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.journal import Order


def played(stored: list[int], what_happens: str) -> list[object]:
    """What each rest brings."""
    return ended(stored, what_happens)[0]


def ended(stored: list[int], what_happens: str) -> tuple[list[object], Order]:
    order = Order()
    order.take_in(stored)
    brought: list[object] = []
    for word in what_happens.split():
        if word == "+":
            order.allot()
        elif word == ".":
            position = order.next()
            brought.append(position or ("run" if order.may_run else None))
            if position is not None:
                order.deliver(position)
        elif word == "!":
            order.expect_no_more()
        elif word.startswith("-"):
            order.end(int(word.strip("-[]")))
        else:
            order.wait(int(word.strip("[]")))
    return brought, order


@pytest.mark.parametrize(
    ("stored", "what_happens", "brought"),
    [
        pytest.param([], ".", ["run"], id="nothing is stored: calls run"),
        pytest.param([1], "1 . .", [1, "run"], id="a stored outcome, then new calls"),
        pytest.param([1, 2, 3], "3 1 2 . . .", [1, 2, 3], id="in the order of the run before"),
        pytest.param([1, 2, 3], "3 . 1 .", [None, 1], id="a later one waits for an earlier one"),
        pytest.param([1, 2, 3], "3 . ! . 1 .", [None, 3, 1], id="but not for long"),
        pytest.param([1, 2], "1 . . ! .", [1, None, "run"], id="nor do new calls"),
        pytest.param([1, 2], ". ! . 2 .", [None, "run", 2], id="it may still come"),
        pytest.param([1, 2], "1 2 -1 . .", [2, "run"], id="what was given up is left out"),
        pytest.param([], "+ + [2] . [1] . .", ["run", 1, 2], id="new ones in their order"),
        pytest.param([], "+ + [2] . -[1] .", ["run", 2], id="without those that are given up"),
        pytest.param([5], "+ [6] 5 . .", [5, 6], id="new ones come after all stored ones"),
        pytest.param([5], "+ [6] . ! .", [None, 6], id="unless nobody asks for those"),
        pytest.param([5], "+ + [7] 5 . . [6] . .", [5, "run", 6, 7], id="calls run meanwhile"),
    ],
)
def test_outcomes_reach_the_function_in_their_order(
    stored: list[int], what_happens: str, brought: list[object]
) -> None:
    assert played(stored, what_happens) == brought


@pytest.mark.parametrize(
    ("stored", "what_happens", "reached"),
    [
        pytest.param([], ".", 0, id="nothing yet"),
        pytest.param([1, 2], "1 2 . .", 2, id="all that is stored"),
        pytest.param([1], "1 . + + [3] [2] . .", 3, id="and new ones"),
        pytest.param([1, 2], "1 . . !", 1, id="one that nobody asks for"),
        pytest.param([1, 2, 3], "1 3 . . ! .", None, id="another one in its place"),
        pytest.param([1, 2, 3], "1 3 . . ! . 2 .", None, id="which comes too late"),
        pytest.param([1, 3], "1 3 . .", None, id="the run before has seen more than it stored"),
        pytest.param([1, 2], "1 2 -1 .", None, id="one was given up"),
        pytest.param([1], "+ [2] . ! .", None, id="a new one before a stored one"),
    ],
)
def test_two_runs_have_seen_the_same_if_they_have_reached_the_same_outcome(
    stored: list[int], what_happens: str, reached: int | None
) -> None:
    assert ended(stored, what_happens)[1].reached == reached


def test_a_function_is_replayed_until_all_that_is_stored_has_reached_it() -> None:
    order = Order()
    order.take_in([1, 2])
    replaying = [order.replaying]
    for position in (2, 1):
        order.wait(position)
        order.end(position)
        replaying.append(order.replaying)
    assert replaying == [True, True, False]
    assert order.allot() == 3


@given(stored=st.sets(st.integers(1, 9)), data=st.data())
def test_whatever_is_asked_for_together_comes_in_order_and_once(
    stored: set[int], data: st.DataObject
) -> None:
    order = Order()
    order.take_in(stored)
    asked_for = data.draw(st.permutations(sorted(stored)))
    for position in asked_for:
        order.wait(position)
    new = [order.allot() for _ in range(data.draw(st.integers(0, 3)))]
    for position in data.draw(st.permutations(new)):
        order.wait(position)
    reached = []
    while (following := order.next()) is not None:
        order.end(following)
        reached.append(following)
    assert reached == [*sorted(stored), *new]
    assert not order.replaying
