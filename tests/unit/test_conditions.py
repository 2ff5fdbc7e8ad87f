"""Conditions: what they are, how they are written, and what signals do to them."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from flowfabric.core.conditions import (
    AllConditions,
    ByName,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    Wildcard,
    accepts,
    check_condition,
    encode_condition,
    is_satisfied,
    observe,
    parse_condition,
    ranks_of,
    referenced_waitpoint_keys,
    required_signal_names,
    stored_condition,
)
from flowfabric.core.ids import SignalId, WaitpointId, WaitpointKey, parse_execution_id
from flowfabric.core.records import SignalEffect, SignalFacts
from flowfabric.errors import Corruption, InvalidInput
from tests.conditions import all_of_waitpoints

EXECUTION = parse_execution_id("{fp:7}:11111111-1111-4111-8111-111111111111")


def signal(
    key: str = "a", name: str = "x", source: tuple[str, str] = ("t", "alice"), number: int = 0
) -> SignalFacts:
    return SignalFacts(
        partition_key=7,
        execution_id=EXECUTION,
        signal_id=SignalId(f"00000000-0000-4000-8000-{number:012x}"),
        sequence=number,
        waitpoint_id=WaitpointId(f"22222222-2222-4222-8222-{ord(key):012x}"),
        waitpoint_key=WaitpointKey(key),
        suspension_id=None,
        signal_name=name,
        source_type=source[0],
        source_identity=source[1],
        observed_effect=SignalEffect.BUFFERED,
    )


def test_matchers_compare_names_exactly() -> None:
    assert accepts(Wildcard(), "")
    assert accepts(ByName("x"), "x")
    assert not accepts(ByName("x"), "X")


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        (
            Single("a", ByName("x")),
            '{"Single":{"waitpoint_key":"a","matcher":{"ByName":"x"}}}',
        ),
        (Single("a"), '{"Single":{"waitpoint_key":"a","matcher":"Wildcard"}}'),
        (OperatorOnly(), '"OperatorOnly"'),
        (TimeoutOnly(), '"TimeoutOnly"'),
        (
            AllConditions((Single("a"), OperatorOnly())),
            '{"Composite":{"kind":"AllOf","members":'
            '[{"Single":{"waitpoint_key":"a","matcher":"Wildcard"}},"OperatorOnly"]}}',
        ),
        (
            Count(2, CountKind.DISTINCT_SOURCES, ("a", "b"), ByName("x")),
            '{"Composite":{"kind":"Count","n":2,"count_kind":"DistinctSources",'
            '"matcher":{"ByName":"x"},"waitpoints":["a","b"]}}',
        ),
        (
            Count(1, CountKind.DISTINCT_WAITPOINTS, ("a",)),
            '{"Composite":{"kind":"Count","n":1,"count_kind":"DistinctWaitpoints",'
            '"waitpoints":["a"]}}',
        ),
    ],
)
def test_conditions_are_written_and_read(condition: Condition, text: str) -> None:
    assert encode_condition(condition) == text
    assert parse_condition(text) == condition


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "7",
        '"Sometimes"',
        "{}",
        '{"Single":{}}',
        '{"Single":{"waitpoint_key":"a","matcher":"Maybe"}}',
        '{"Composite":{"kind":"AnyOf","members":[]}}',
        '{"Composite":{"kind":"Count","n":"2","count_kind":"DistinctSources","waitpoints":[]}}',
        '{"Composite":{"kind":"Count","n":2,"count_kind":"Distinct","waitpoints":["a"]}}',
        '{"Composite":{"kind":"AllOf","members":[' * 6 + '"OperatorOnly"' + "]}}" * 6,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_condition(text)
    with pytest.raises(Corruption):
        stored_condition(text)


def test_keys_are_found_in_the_order_they_are_mentioned() -> None:
    condition = AllConditions(
        (
            Single("c"),
            AllConditions((Count(1, CountKind.DISTINCT_SIGNALS, ("b", "c", "a")), Single("b"))),
        )
    )
    assert referenced_waitpoint_keys(condition) == ("c", "b", "a")
    assert referenced_waitpoint_keys(OperatorOnly()) == ()


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        (Single("a", ByName("b")), "b"),
        (Single("a"), "a"),
        (AllConditions((Single("b", ByName("b")), Single("a", ByName("a")))), "b a"),
        (Count(1, CountKind.DISTINCT_SIGNALS, ("c", "a")), "c a"),
        (
            AllConditions((Single("c"), Count(2, CountKind.DISTINCT_SIGNALS, ("a", "c", "b")))),
            "c a b",
        ),
        (OperatorOnly(), ""),
    ],
)
def test_signals_stand_where_a_condition_first_names_them(condition: Condition, names: str) -> None:
    ranks = ranks_of(condition)
    assert sorted(ranks, key=lambda name: ranks[name]) == names.split()


def test_required_names() -> None:
    condition = AllConditions(
        (
            Single("a", ByName("x")),
            Single("a"),
            Count(1, CountKind.DISTINCT_SIGNALS, ("a", "b"), ByName("y")),
            Single("a", ByName("x")),
        )
    )
    assert required_signal_names(condition, "a") == ("x", "y")
    assert required_signal_names(condition, "b") == ("y",)
    assert required_signal_names(condition, "c") == ()


@pytest.mark.parametrize(
    "condition",
    [
        Single(""),
        Single("a" * 257),
        Single("a", ByName("x" * 257)),
        AllConditions((Single("a"), TimeoutOnly())),
        Count(10_001, CountKind.DISTINCT_SIGNALS, ("a",)),
        Count(-1, CountKind.DISTINCT_SIGNALS, ("a",)),
        Count(1, CountKind.DISTINCT_SIGNALS, ("",)),
        Count(1, CountKind.DISTINCT_SIGNALS, ("a",) * 257),
        Count(1, CountKind.DISTINCT_SIGNALS, ("a",), ByName("")),
    ],
)
def test_conditions_out_of_bounds_are_refused(condition: Condition) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_condition(condition)
    assert caught.value.field.startswith("resume_condition")


def test_the_same_waitpoint_may_be_counted_twice_by_signals_or_sources() -> None:
    for kind in (CountKind.DISTINCT_SIGNALS, CountKind.DISTINCT_SOURCES):
        check_condition(Count(5, kind, ("a", "a")))


def test_nothing_meets_what_waits_for_people_or_time() -> None:
    for condition in (OperatorOnly(), TimeoutOnly()):
        assert not is_satisfied(condition, [signal()])
        seen = observe(condition, [], signal(name="__operator_only__"))
        assert (seen.effect, seen.matched, seen.satisfier) == (SignalEffect.APPENDED, False, False)


def test_an_empty_all_of_is_never_met() -> None:
    assert not is_satisfied(AllConditions(()), [signal()])


def test_a_signal_elsewhere_is_not_in_the_condition() -> None:
    seen = observe(all_of_waitpoints(["a"]), [], signal("b"))
    assert seen.effect is SignalEffect.NOT_IN_CONDITION


# A second opinion: a count of each node over all signals so far, and nothing else. ------


def met(condition: Condition, signals: Sequence[SignalFacts]) -> bool:
    if isinstance(condition, AllConditions):
        return all(met(member, signals) for member in condition.members)
    if isinstance(condition, Single | Count):
        return len(counted(condition, signals)) >= (
            1 if isinstance(condition, Single) else condition.n
        )
    return False


def counted(leaf: Single | Count, signals: Sequence[SignalFacts]) -> set[str]:
    heard = set()
    for each in signals:
        keys = [leaf.waitpoint_key] if isinstance(leaf, Single) else leaf.waitpoints
        named = isinstance(leaf.matcher, Wildcard) or leaf.matcher.signal_name == each.signal_name
        if each.waitpoint_key in keys and named:
            if isinstance(leaf, Single):
                heard.add("it")
            elif leaf.count_kind == "DistinctSignals":
                heard.add(each.signal_id)
            elif leaf.count_kind == "DistinctWaitpoints":
                heard.add(each.waitpoint_key)
            else:
                heard.add(repr((each.source_type, each.source_identity)))
    return heard


KEYS = st.sampled_from("abc")
NAMES = st.sampled_from("xyz")
MATCHERS = st.one_of(st.just(Wildcard()), st.builds(ByName, NAMES))
SINGLES = st.builds(Single, KEYS, MATCHERS)
COUNTS = st.builds(
    Count,
    st.integers(1, 3),
    st.sampled_from(CountKind),
    st.lists(KEYS, min_size=1, max_size=3, unique=True).map(tuple),
    MATCHERS,
)
CONDITIONS = st.recursive(
    SINGLES | COUNTS,
    lambda inner: st.builds(AllConditions, st.lists(inner, min_size=1, max_size=3).map(tuple)),
    max_leaves=6,
)
SIGNALS = st.lists(
    st.tuples(
        KEYS,
        NAMES,
        st.sampled_from([("t", "alice"), ("t", "bob"), ("t:alice", ""), ("t", "alice:")]),
        st.integers(0, 9),
    ),
    max_size=12,
)


@for_all(CONDITIONS, SIGNALS)
def test_what_was_kept_tells_as_much_as_everything(
    condition: Condition, sent: list[tuple[str, str, tuple[str, str], int]]
) -> None:
    """Only signals that bring a condition forward are looked at again, and that is enough."""
    everything: list[SignalFacts] = []
    kept: list[SignalFacts] = []
    for key, name, source, number in sent:
        new = signal(key, name, source, number)
        lacking = [leaf for leaf in _leaves(condition) if not met(leaf, everything)]
        before = [counted(leaf, everything) for leaf in lacking]
        seen = observe(condition, kept, new)
        everything.append(new)
        assert seen.satisfier is (before != [counted(leaf, everything) for leaf in lacking])
        assert is_satisfied(condition, everything) is met(condition, everything)
        if seen.satisfier:
            kept.append(new)
            assert (seen.effect is SignalEffect.SATISFIED) is met(condition, everything)
        assert is_satisfied(condition, kept) is met(condition, everything)
        if met(condition, everything):
            break


def _leaves(condition: Condition) -> list[Single | Count]:
    if isinstance(condition, AllConditions):
        return list(itertools.chain.from_iterable(map(_leaves, condition.members)))
    return [condition] if isinstance(condition, Single | Count) else []


@for_all(CONDITIONS)
def test_every_condition_survives_being_written_down(condition: Condition) -> None:
    assert parse_condition(encode_condition(condition)) == condition
