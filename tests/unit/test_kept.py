"""Which kept signals a wait takes, and how many are kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.conditions import (
    AllConditions,
    ByName,
    Condition,
    Count,
    CountKind,
    Single,
    is_satisfied,
    progress,
)
from flowfabric.core.ids import (
    SignalId,
    SuspensionId,
    WaitpointId,
    WaitpointKey,
    parse_execution_id,
)
from flowfabric.core.records import (
    Requester,
    SignalEffect,
    SignalFacts,
    Suspension,
    SuspensionReason,
)
from flowfabric.core.signals import mailbox_id
from flowfabric.core.suspension import TakenSignals, take

EXECUTION = parse_execution_id("{fp:7}:11111111-1111-4111-8111-111111111111")
OTHER = parse_execution_id("{fp:7}:11111111-1111-4111-8111-111111111112")
PAUSE = Suspension(
    partition_key=7,
    execution_id=EXECUTION,
    suspension_id=SuspensionId("33333333-3333-4333-8333-333333333333"),
    attempt_index=0,
    waitpoint_id=WaitpointId("22222222-2222-4222-8222-222222222222"),
    reason_code=SuspensionReason.WAITING_FOR_SIGNAL,
    requested_by=Requester.WORKER,
    resume_condition="",
    resume_policy="",
    timeout_at_ms=None,
    timeout_behavior=None,
    continuation_metadata_pointer=None,
    created_at_ms=0,
)


def kept(*signals: tuple[str, str]) -> list[SignalFacts]:
    """Of these names and sources, in order."""
    return [
        SignalFacts(
            partition_key=7,
            execution_id=EXECUTION,
            signal_id=SignalId(f"00000000-0000-4000-8000-{number:012x}"),
            sequence=number,
            waitpoint_id=mailbox_id(EXECUTION, name),
            waitpoint_key=WaitpointKey(name),
            suspension_id=None,
            signal_name=name,
            source_type="t",
            source_identity=source,
            observed_effect=SignalEffect.KEPT,
        )
        for number, (name, source) in enumerate(signals)
    ]


@pytest.mark.parametrize(
    ("condition", "sources", "taken", "met"),
    [
        pytest.param(Single("go"), "ab", "a", True, id="the first, and no more"),
        pytest.param(Single("other"), "ab", "", False, id="none of another name"),
        pytest.param(
            Count(2, CountKind.DISTINCT_SOURCES, ("go",)), "aab", "ab", True, id="no repeats"
        ),
        pytest.param(
            Count(3, CountKind.DISTINCT_SOURCES, ("go",)), "aab", "ab", False, id="too few"
        ),
        pytest.param(
            Count(2, CountKind.DISTINCT_WAITPOINTS, ("go", "on")), "ab", "a", False, id="one place"
        ),
        pytest.param(
            AllConditions((Single("go"), Single("on"))), "aBc", "aB", True, id="one for each member"
        ),
        pytest.param(
            AllConditions((Single("go"), Single("on"))), "abB", "aB", True, id="no second one"
        ),
        pytest.param(
            AllConditions((Single("go"), Single("on"))), "ab", "a", False, id="nor without others"
        ),
        pytest.param(
            AllConditions((Count(1, CountKind.DISTINCT_SOURCES, ("go",)), Single("on"))),
            "abC",
            "aC",
            True,
            id="none for a part that has enough",
        ),
        pytest.param(
            AllConditions((Single("go"), Count(2, CountKind.DISTINCT_SIGNALS, ("go", "on")))),
            "aab",
            "aa",
            True,
            id="one for several parts",
        ),
        pytest.param(Single("go", ByName("other")), "ab", "", False, id="none that does not match"),
    ],
)
def test_a_wait_takes_what_it_can_use(
    condition: Condition, sources: str, taken: str, met: bool
) -> None:
    """Those of small letters are sent to `go`, those of capital ones to `on`."""
    sent = kept(*(("on" if source.isupper() else "go", source) for source in sources))
    found = take(condition, PAUSE, sent)
    assert "".join(each.source_identity for each in found.signals) == taken
    assert {each.suspension_id for each in found.signals} <= {PAUSE.suspension_id}
    assert (found.closer is not None, found.left) == (met, len(sources) - len(taken))


NAMES = st.sampled_from(("a", "b", "c"))
PARTS = st.builds(Single, NAMES) | st.builds(
    Count,
    st.integers(1, 3),
    st.sampled_from(list(CountKind)),
    st.lists(NAMES, min_size=1, max_size=2, unique=True).map(tuple),
)
CONDITIONS = PARTS | st.builds(AllConditions, st.lists(PARTS, min_size=1, max_size=3).map(tuple))


@given(CONDITIONS, CONDITIONS, st.lists(st.tuples(NAMES, st.sampled_from("xy")), max_size=8))
def test_two_waits_never_take_the_same_signal(
    first: Condition, second: Condition, sent: list[tuple[str, str]]
) -> None:
    signals = kept(*sent)
    one = take(first, PAUSE, signals)
    taken = {each.signal_id for each in one.signals}
    rest = [each for each in signals if each.signal_id not in taken]
    two = take(second, PAUSE, rest)
    assert taken.isdisjoint(each.signal_id for each in two.signals)
    for condition, found, had in ((first, one, signals), (second, two, rest)):
        check(condition, found, had)


def check(condition: Condition, found: TakenSignals, had: list[SignalFacts]) -> None:
    order = [each.sequence for each in found.signals]
    assert order == sorted(order)
    assert found.left == len(had) - len(found.signals)
    # Met exactly if all of them together would meet it; and then by the last one taken.
    assert (found.closer is not None) is is_satisfied(condition, had)
    if found.closer is not None:
        assert found.signals[-1].signal_id == found.closer
        assert not is_satisfied(condition, found.signals[:-1])
    # Each was of use when its turn came.
    for number, each in enumerate(found.signals):
        before = progress(condition, found.signals[:number]).came
        assert progress(condition, [*found.signals[:number], each]).came > before


def test_a_mailbox_belongs_to_one_name_of_one_execution() -> None:
    places = {mailbox_id(EXECUTION, "a"), mailbox_id(EXECUTION, "b"), mailbox_id(OTHER, "a")}
    assert len(places) == 3
    assert mailbox_id(EXECUTION, "a") in places
