"""Executions that wait for each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.audit import RING_NAMED_MAX, Wrong, ring_complaint, rings
from flowfabric.core.ids import ExecutionId


def waits(text: str) -> dict[ExecutionId, set[ExecutionId]]:
    """Of `ab bc`: `a` waits for `b`, and `b` for `c`."""
    return {ExecutionId(each[0]): {ExecutionId(o) for o in each[1:]} for each in text.split()}


@pytest.mark.parametrize(
    ("links", "ringed"),
    [
        pytest.param("", {}, id="nobody waits"),
        pytest.param("ab bc", {}, id="a row"),
        pytest.param("aa", {"a": "a"}, id="for itself"),
        pytest.param("ab ba", {"a": "ba", "b": "ab"}, id="two"),
        pytest.param("ab bc ca", {"a": "bca", "b": "cab", "c": "abc"}, id="three"),
        pytest.param("xa ab ba", {"a": "ba", "b": "ab"}, id="who waits for a ring is not in it"),
        pytest.param("abx ba", {}, id="one that another will wake"),
        pytest.param("ab bac cd dc", {"a": "ba", "b": "ab", "c": "dc", "d": "cd"}, id="two rings"),
        pytest.param("ab bacx cx", {}, id="a way out at any place is one for all"),
    ],
)
def test_a_ring_is_who_waits_for_itself(links: str, ringed: dict[str, str]) -> None:
    assert rings(waits(links)) == {each: tuple(way) for each, way in ringed.items()}


NAMES = st.sampled_from("abcdef").map(ExecutionId)


@given(st.dictionaries(NAMES, st.sets(NAMES, min_size=1, max_size=3)))
def test_nobody_in_a_ring_is_ever_woken_and_somebody_outside_always_is(
    links: dict[ExecutionId, set[ExecutionId]],
) -> None:
    """Play it: whoever waits for one that has ended is woken, and ends."""
    ended = {other for each in links.values() for other in each} - links.keys()
    while woken := {each for each in links if each not in ended and links[each] & ended}:
        ended |= woken
    left = links.keys() - ended
    found = rings(links)
    assert found.keys() <= left
    assert bool(found) is bool(left)
    for each, way in found.items():
        assert way[-1] == each
        assert all(after in links[before] for before, after in zip((each, *way), way, strict=False))


def test_a_complaint_names_a_few() -> None:
    way = [ExecutionId(each) for each in "bcdefa"]
    complaint = ring_complaint(ExecutionId("a"), way)
    assert complaint.wrong is Wrong.RING
    assert complaint.detail == "it waits for itself by way of b, c, d and 2 more"
    assert RING_NAMED_MAX == 3
    assert ring_complaint(ExecutionId("a"), way[-1:]).detail == "it waits for itself"
