"""What was accepted of a run: which calls that lets run, what is given up, what is for equals."""

import pytest

from flowfabric.core.changed_code import Acceptances
from flowfabric.core.ids import ExecutionId
from flowfabric.core.journal import (
    BRANCH,
    ROOT,
    MadeCall,
    StoredCall,
    line_group,
    line_id,
    named_line,
)
from flowfabric.core.records import Step, StepKind
from flowfabric.core.steps import accepted_key

AT_MS = 100
FIRST, SECOND = (
    line_id(ROOT, line_group(ROOT, ""), MadeCall(BRANCH, "fetch", str(each), each))
    for each in (1, 2)
)
OTHER = line_id(ROOT, line_group(ROOT, ""), MadeCall(BRANCH, "mail", "1", 1))
ADA, BOB = named_line(ROOT, "ada"), named_line(ROOT, "bob")


def call(number: int = 1, name: str = "charge", *, after: int | None = None) -> MadeCall:
    """One after another, or together with branches after so many calls."""
    return MadeCall("call", name, "x", number, parallel=after is not None, after=after)


def step(key: str, recorded_at_ms: int, kind: StepKind = StepKind.CALL) -> Step:
    return Step(
        partition_key=0,
        execution_id=ExecutionId("e"),
        step_key=key,
        kind=kind,
        attempt_index=0,
        recorded_at_ms=recorded_at_ms,
    )


def kept(asked: MadeCall) -> StoredCall:
    return StoredCall(f"{asked.name}#{asked.number}", *asked[:6], after=asked.after)


def accepted(*calls: tuple[str, MadeCall]) -> Acceptances:
    found = Acceptances()
    for line, each in calls:
        found.take_in(step(accepted_key(found.name(line, each)), AT_MS, StepKind.ACCEPT))
    return found


@pytest.mark.parametrize(
    ("line", "made", "runs"),
    [
        pytest.param(ROOT, call(2), True, id="the call itself"),
        pytest.param(ROOT, call(3), True, id="one after it"),
        pytest.param(ROOT, call(1), False, id="one before it"),
        pytest.param(ROOT, call(2, "check"), False, id="another name"),
        pytest.param(FIRST, call(2), False, id="in a branch"),
    ],
)
def test_an_accepted_call_runs_and_gives_up_what_was_stored_before(
    line: str, made: MadeCall, runs: bool
) -> None:
    stored = [step("old", AT_MS), step("new", AT_MS + 1)]
    found = accepted((ROOT, call(2))).given_up(line, made, None, stored)
    assert found == (["old"] if runs else None)


@pytest.mark.parametrize(
    ("line", "runs"), [(FIRST, True), (SECOND, True), (OTHER, False), (ADA, False), (ROOT, False)]
)
def test_what_is_accepted_in_a_branch_holds_for_others_of_its_function(
    line: str, runs: bool
) -> None:
    found = accepted((FIRST, call(2)))
    assert (found.given_up(line, call(1), None, []) is not None) == runs


def test_what_is_accepted_in_a_named_branch_holds_for_all_with_names() -> None:
    assert accepted((ADA, call())).given_up(BOB, call(), None, []) == []


@pytest.mark.parametrize(("recorded_at_ms", "runs"), [(AT_MS - 1, False), (AT_MS + 1, True)])
def test_an_accepted_call_is_known_by_when_it_was_stored(recorded_at_ms: int, runs: bool) -> None:
    found = accepted((ROOT, call()))
    mine = step("charge#4", recorded_at_ms)
    assert (found.given_up(ROOT, call(), mine, []) is not None) == runs


def only_equal(line: str, asked: MadeCall, by: Acceptances, recorded_at_ms: int = AT_MS) -> bool:
    stored = kept(asked)
    return bool(by.only_equal(line, [(stored, step(stored.key, recorded_at_ms))]))


def test_from_the_accepted_call_on_numbers_tell_nothing_of_what_was_stored() -> None:
    by = accepted((FIRST, call(2)))
    found = [only_equal(SECOND, call(number), by) for number in (1, 2, 3)]
    assert found == [False, True, True]
    assert not only_equal(SECOND, call(2), by, AT_MS + 1), "it was stored by the new code"
    assert not only_equal(OTHER, call(2), by)
    assert not only_equal(SECOND, call(2)._replace(kind=StepKind.SLEEP), by)


def test_numbers_of_calls_beside_branches_and_of_others_do_not_mix() -> None:
    beside, by_chance = call(1, after=-3), call(1, after=3)
    by = accepted((FIRST, beside))
    assert only_equal(FIRST, beside, by)
    assert not only_equal(FIRST, call(4), by)
    assert not only_equal(FIRST, call(1, after=-2), by)
    assert not only_equal(FIRST, by_chance, accepted((FIRST, by_chance)))


@pytest.mark.parametrize("name", ["charge", "charge#2", "charge~1+", "x" * 256])
@pytest.mark.parametrize("number", [1, 2])
def test_each_acceptance_has_a_name_of_its_own_that_tells_the_call(number: int, name: str) -> None:
    by = Acceptances()
    names = []
    for _ in range(3):
        names.append(by.name(ROOT, call(number, name)))
        by.take_in(step(accepted_key(names[-1]), AT_MS, StepKind.ACCEPT))
        assert by.given_up(ROOT, call(number, name), None, []) == []
        assert (by.given_up(ROOT, call(1, name), None, []) is None) == (number == 2)
    assert len({*names}) == 3


def test_the_first_call_of_a_name_is_accepted_by_that() -> None:
    assert Acceptances().name(ROOT, call(1, "notify")) == "notify"
    assert Acceptances().name(FIRST, call(2, "notify")) == "notify in fetch#2"
