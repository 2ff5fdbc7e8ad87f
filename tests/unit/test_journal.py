"""Which stored step a call stands for, and whether a new call may run."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.journal import (
    BRANCH,
    LINE_BYTES_MAX,
    ROOT,
    STEP_KEY_BYTES_MAX,
    Going,
    MadeCall,
    StoredCall,
    branch_name,
    identity,
    in_any_order,
    kept_lines,
    label_of,
    line_group,
    line_id,
    may_ask_yet,
    moved,
    named_line,
    parent_of_group,
    siblings_name,
    step_key,
)
from flowfabric.core.step_matching import NEW, Match, Shelf


def asked(text: str) -> MadeCall:
    """`name:digest#number`, with `!` at the end if it is parallel, `?` if only to branches that
    make no calls."""
    rest, _, number = text.rstrip("!?").partition("#")
    name, _, digest = rest.partition(":")
    quiet = text.endswith("?")
    parallel = quiet or text.endswith("!")
    return MadeCall("call", name, digest, int(number or 1), parallel, quiet=quiet)


def kept(text: str) -> StoredCall:
    return StoredCall(text, *asked(text)[:7])


def branch(digest: str, number: int, equal: int, same: int) -> MadeCall:
    return MadeCall(BRANCH, "fetch", digest, number, equal=equal, same=same)


def taken(stored: Sequence[str], *bursts: Sequence[str]) -> list[list[str]]:
    """For each call the stored step it takes, `new`, or `refused`."""
    shelf = Shelf(kept(each) for each in stored)
    found = []
    for burst in bursts:
        matches = shelf.take([asked(each) for each in burst])
        found.append(
            [
                each.kept.key if each.kept else "refused" if each.refusal else "new"
                for each in matches
            ]
        )
    return found


@pytest.mark.parametrize(
    ("stored", "bursts", "expected"),
    [
        pytest.param([], [["a"]], [["new"]], id="nothing is stored"),
        pytest.param(["a"], [["a"]], [["a"]], id="the same call"),
        pytest.param(["a:1"], [["a:2"]], [["a:1"]], id="an argument may be the time"),
        pytest.param(["a:1", "a:2#2"], [["a:9"], ["a:8#2"]], [["a:1"], ["a:2#2"]], id="in a loop"),
        pytest.param(
            ["a:1", "a:2#2"],
            [["a:3"], ["a:2#2"], ["a:1#3"]],
            [["a:1"], ["a:2#2"], ["refused"]],
            id="a loop over a set, partly stored",
        ),
        pytest.param(
            ["a:1", "a:2#2"],
            [["a:9"], ["a:1#2"], ["a:2#3"]],
            [["a:1"], ["refused"], ["a:2#2"]],
            id="one is inserted before its like",
        ),
        pytest.param(
            ["a:1", "a:2#2"],
            [["a:2"], ["a:3#2"]],
            [["a:2#2"], ["refused"]],
            id="what a removed call leaves is for no other arguments",
        ),
        pytest.param(
            ["a:f.1", "a:f.2#2"],
            [["a:f.2"], ["a:f.3#2"]],
            [["a:f.2#2"], ["a:f.1"]],
            id="but for another time",
        ),
        pytest.param(
            ["a:1", "a:2#2", "a:3#3"],
            [["a:2"], ["a:3#2"]],
            [["a:2#2"], ["a:3#3"]],
            id="the first is removed",
        ),
        pytest.param(["a"], [["b"]], [["refused"]], id="renamed"),
        pytest.param(["a", "b"], [["a"], ["x"], ["b"]], [["a"], ["refused"], ["b"]], id="inserted"),
        pytest.param(["a", "b"], [["b"], ["a"], ["c"]], [["b"], ["a"], ["new"]], id="reordered"),
        pytest.param(["a"], [["a"], ["b"]], [["a"], ["new"]], id="appended"),
        pytest.param(
            ["a:2#2"], [["a:1", "a:2#2"]], [["new", "a:2#2"]], id="together, the second is stored"
        ),
        pytest.param(
            ["a:1", "a:2#2"], [["a:2", "a:1#2"]], [["a:2#2", "a:1"]], id="together, in other order"
        ),
        pytest.param(
            ["a:f.1", "a:f.2#2"],
            [["a:f.8", "a:f.9#2"]],
            [["a:f.1", "a:f.2#2"]],
            id="together, with other times",
        ),
        pytest.param(
            ["a:1", "a:1#3"],
            [["a:1", "a:1#2"], ["a:1#3"]],
            [["a:1", "refused"], ["a:1#3"]],
            id="an equal one is still to come",
        ),
        pytest.param(["b:2!"], [["b:1!"]], [["new"]], id="another one of parallel calls"),
        pytest.param(["b:2!"], [["c:1"]], [["new"]], id="parallel ones may still be asked for"),
        pytest.param(["b:2!"], [["b:1!"], ["b:2!"]], [["new"], ["b:2!"]], id="and are"),
        pytest.param(["b:f.2!"], [["b:f.1!"]], [["refused"]], id="cannot be told apart"),
        pytest.param(["b:2"], [["b:1!"]], [["refused"]], id="one behind that was in order"),
        pytest.param(["a:1?"], [["a:2?"], ["a:1?"]], [["new"], ["a:1?"]], id="another came first"),
        pytest.param(["a:f.1?"], [["a:f.2?"]], [["a:f.1?"]], id="a time tells nothing else"),
        pytest.param(
            ["a:f.1?", "a:f.2#2?"],
            [["a:f.8?"], ["a:f.9#2?"], ["a:f.7#3?"]],
            [["a:f.1?"], ["a:f.2#2?"], ["new"]],
            id="nor do several",
        ),
        pytest.param(
            ["a:1", "a:2#2"],
            [["a:2?"], ["a:1?"], ["a:3?"]],
            [["a:2#2"], ["a:1"], ["new"]],
            id="in order of arrival",
        ),
        pytest.param(
            ["a:1!", "a:2#4", "a:3#5"],
            [["a:3", "a:2#2"]],
            [["a:3#5", "a:2#4"]],
            id="numbers are a matter of chance after parallel ones",
        ),
    ],
)
def test_a_call_takes_its_own_step(
    stored: list[str], bursts: list[list[str]], expected: list[list[str]]
) -> None:
    assert taken(stored, *bursts) == expected


def test_a_branch_may_be_new_although_later_ones_of_its_place_are_stored() -> None:
    first, second, third = (branch("", number, number, number) for number in (1, 2, 3))
    shelf = Shelf([StoredCall("first", *first[:7]), StoredCall("third", *third[:7])])
    (one, two), (three,) = shelf.take([first, second]), shelf.take([third])
    assert [one.kept, two, three.kept] == [
        StoredCall("first", *first[:7]),
        Match(),
        StoredCall("third", *third[:7]),
    ]


def test_a_branch_that_has_stored_nothing_takes_no_other() -> None:
    first, second = (MadeCall(BRANCH, "fetch", str(number), number) for number in (1, 2))
    shelf = Shelf([StoredCall("second", *second[:7])])
    assert shelf.take([first])[0].kept is None
    assert shelf.take([second])[0].kept == StoredCall("second", *second[:7])


@pytest.mark.parametrize(
    ("stored", "burst", "expected"),
    [
        pytest.param(
            [("a", 3, 2, 2), ("b", 4, 2, 2)],
            [("b", 1, 1, 1), ("a", 2, 1, 1), ("b", 3, 2, 2), ("a", 4, 2, 2)],
            [None, None, 1, 0],
            id="the first of two equal ones has stored nothing",
        ),
        pytest.param(
            [("f.1", 3, 3, 2), ("f.2", 4, 4, 2)],
            [("f.2", 1, 1, 1), ("f.1", 2, 2, 1), ("f.2", 3, 3, 2), ("f.1", 4, 4, 2)],
            [None, None, 1, 0],
            id="they differ only in times, which are the same in every run",
        ),
        pytest.param(
            [("a.1", 1, 1, 1), ("b.1", 2, 1, 1)],
            [("b.2", 1, 1, 1), ("a.2", 2, 1, 1)],
            [1, 0],
            id="in another order, with other times",
        ),
        pytest.param([("a", 1, 1, 1)], [("b", 1, 1, 1)], [0], id="another argument"),
    ],
)
def test_a_branch_is_known_by_its_ordinal_among_its_equals(
    stored: list[tuple[str, int, int, int]],
    burst: list[tuple[str, int, int, int]],
    expected: list[int | None],
) -> None:
    lines = [StoredCall(str(n), *branch(*each)[:7]) for n, each in enumerate(stored)]
    found = [each.kept for each in Shelf(lines).take([branch(*each) for each in burst])]
    assert found == [None if each is None else lines[each] for each in expected]


def test_a_branch_is_found_at_another_place_by_its_ordinal_too() -> None:
    (stored,) = lines = [StoredCall("second", *branch("a", 1, 2, 2)[:7])]
    shelf = Shelf(lines)
    assert shelf.take_same(branch("a", 1, 1, 1)) is None
    assert shelf.take_same(branch("a", 3, 2, 2)) == stored


def test_an_inserted_call_may_be_accepted_in_place_of_the_one_it_was_taken_for() -> None:
    stored = [kept("a:1"), kept("a:2#2")]
    inserted, first, second = asked("a:0"), asked("a:1#2"), asked("a:2#3")
    shelf = Shelf(stored)
    assert shelf.take([inserted])[0].kept == stored[0]
    (match,) = shelf.take([first])
    assert match.refusal
    assert match.given_away == stored[0]
    accepted = Shelf(stored, only_equal=[stored[0].key])
    (new,) = accepted.take([inserted])
    assert (new.kept, new.given_away) == (None, None)
    assert [accepted.take([each])[0].kept for each in (first, second)] == stored


def test_another_kind_of_the_same_name_is_another_call() -> None:
    (match,) = Shelf([kept("sleep")]).take([MadeCall("sleep", "sleep", "", 1)])
    assert match.kept is None
    assert "step 'sleep' is and has not been asked for" in match.refusal


def test_branches_that_share_a_number_are_told_apart_by_their_arguments() -> None:
    stored = [StoredCall(f"2:{each}", BRANCH, "fetch", each, 2) for each in ("ada", "bob")]
    shelf = Shelf(stored)
    calls = [MadeCall(BRANCH, "fetch", "bob", 1), MadeCall(BRANCH, "fetch", "ada", 2)]
    assert [match.kept for match in shelf.take(calls)] == [stored[1], stored[0]]
    assert shelf.left == []


def test_a_change_that_a_person_accepted_is_no_reason_to_refuse() -> None:
    shelf = Shelf([kept("a"), kept("b")])
    shelf.forgive([kept("a").key, kept("b").key])
    assert [each.refusal for each in shelf.take([asked("c")])] == [""]
    assert [each.kept for each in shelf.take([asked("b")])] == [kept("b")]
    assert shelf.left == [kept("a")]


@pytest.mark.parametrize(
    ("call", "refused"),
    [
        pytest.param(MadeCall("call", "b", "1", 1, True, after=3), True, id="another name"),
        pytest.param(MadeCall("uuid", "a", "1", 1, True, after=3), True, id="another kind"),
        pytest.param(MadeCall("call", "a", "2", 1, True, after=3), False, id="of its name"),
        pytest.param(
            MadeCall("call", "b", "1", 1, True, after=4), False, id="after another outcome"
        ),
        pytest.param(MadeCall("call", "b", "1", 1, True), False, id="after who knows what"),
    ],
)
def test_a_line_asks_for_the_same_after_the_same_outcomes(call: MadeCall, refused: bool) -> None:
    stored = StoredCall("a", "call", "a", "1", 1, True, after=3)
    unknown = StoredCall("c", "call", "c", "1", 1, True)
    shelf = Shelf([stored, unknown])
    assert [match.refusal for match in shelf.take([call])] == [""]
    assert bool(shelf.missed(call)) == refused
    shelf.forgive(["a"])
    assert not shelf.missed(call), "a person has accepted it"
    shelf = Shelf([stored, unknown])
    shelf.take([MadeCall("call", "a", "1", 1, True, after=3)])
    assert not shelf.missed(call), "it was asked for"


def test_a_call_made_together_with_branches_is_known_by_its_order() -> None:
    stored = StoredCall("a~1", "call", "a", "1", 1, parallel=True, after=-3)
    at_once = MadeCall("call", "a", "2", 1, parallel=True, quiet=True, at_once=True, after=-3)
    for call, found in (
        (at_once, stored),
        (at_once._replace(after=-2), None),
        (at_once._replace(name="b"), None),
        (at_once._replace(at_once=False), None),
    ):
        assert Shelf([stored]).take([call])[0].kept == found


def test_what_was_stored_after_an_acceptance_still_has_to_be_asked_for() -> None:
    shelf = Shelf([kept("a"), kept("b")])
    shelf.forgive([kept("a").key])
    assert shelf.behind == kept("b")
    (match,) = shelf.take([asked("c")])
    assert match.refusal == "step 'c' is not stored, but step 'b' is and has not been asked for"
    shelf.take([asked("b")])
    assert shelf.behind is None


calls = st.tuples(st.sampled_from("ab"), st.sampled_from(("1", "2", "f.3", "f.4")))
programs = st.lists(st.lists(calls, min_size=1, max_size=4), min_size=1, max_size=5)


def numbered(program: list[list[tuple[str, str]]]) -> list[list[MadeCall]]:
    uses: dict[str, int] = {}
    bursts = []
    for burst in program:
        made = []
        for name, digest in burst:
            uses[name] = uses.get(name, 0) + 1
            made.append(MadeCall("call", name, digest, uses[name]))
        bursts.append(made)
    return bursts


@given(program=programs, data=st.data())
def test_every_call_of_an_unchanged_program_gets_its_own_step_after_a_crash(
    program: list[list[tuple[str, str]]], data: st.DataObject
) -> None:
    bursts = numbered(program)
    whole = data.draw(st.integers(0, len(bursts)))
    stored_of = {each: StoredCall(str(each), *each[:7]) for burst in bursts for each in burst}
    stored = {each for burst in bursts[:whole] for each in burst}
    if whole < len(bursts):
        stored |= {each for each in bursts[whole] if data.draw(st.booleans())}
    shelf = Shelf(stored_of[each] for each in stored)
    for burst in bursts:
        for each, match in zip(burst, shelf.take(burst), strict=True):
            assert match.refusal == ""
            if each in stored:
                assert match.kept == stored_of[each]
            else:
                assert match.kept is None


@given(program=programs, data=st.data())
def test_changing_times_among_the_arguments_change_nothing(
    program: list[list[tuple[str, str]]], data: st.DataObject
) -> None:
    bursts = numbered(program)
    shelf = Shelf(
        StoredCall(str(each.number) + each.name, *each[:7]) for burst in bursts for each in burst
    )
    for burst in bursts:
        later = [each._replace(digest=f"f.{data.draw(st.integers(10, 99))}") for each in burst]
        for each, match in zip(later, shelf.take(later), strict=True):
            assert match.kept is not None
            assert match.kept.name == each.name


@given(
    stored=st.lists(st.tuples(calls, st.booleans()), max_size=6, unique=True),
    burst=st.lists(calls, min_size=1, max_size=3),
)
def test_no_step_is_taken_twice_and_none_by_a_call_of_another_name(
    stored: list[tuple[tuple[str, str], bool]], burst: list[tuple[str, str]]
) -> None:
    shelf = Shelf(
        StoredCall(f"k{number}", "call", name, digest, number, parallel)
        for number, ((name, digest), parallel) in enumerate(stored)
    )
    (made,) = numbered([burst])
    before = len(shelf.left)
    found = [each.kept for each in shelf.take(made)]
    keys = [each.key for each in found if each is not None]
    assert len(set(keys)) == len(keys) == before - len(shelf.left)
    assert all(own is None or own.name == each.name for own, each in zip(found, made, strict=True))


def test_lines_are_found_again_from_the_names_they_are_stored_under() -> None:
    group = line_group(ROOT, "charge")
    first, second = (
        MadeCall(BRANCH, "shop.<locals>.fetch", "0a.1b", number, parallel)
        for number, parallel in ((1, False), (2, True))
    )
    stored = [
        line_id(ROOT, group, first),
        line_id(ROOT, group, second),
        ROOT,
        named_line(ROOT, "ada"),
    ]
    found = kept_lines([*stored, ROOT, named_line(ROOT, "ada")])
    assert found.keys() == {group}
    assert sorted(found[group]) == sorted(
        [StoredCall(stored[0], *first[:7]), StoredCall(stored[1], *second[:7])]
    )


def test_all_places_of_a_line_are_known_as_its_own() -> None:
    places = [line_group(line, key) for line in (ROOT, "=ada") for key in ("", "charge", "ship")]
    assert len(set(places)) == 6
    assert len(set(map(parent_of_group, places[:3]))) == 1
    assert len(set(map(parent_of_group, places))) == 2


def test_a_line_without_steps_of_its_own_is_found_by_those_started_in_it() -> None:
    outer_group = line_group(ROOT, "")
    outer = MadeCall(BRANCH, "shop.<locals>.outer", "0a", 1)
    outer_id = line_id(ROOT, outer_group, outer)
    inner_group = line_group(outer_id, "")
    inner = MadeCall(BRANCH, "shop.<locals>.inner", "1b", 2)
    inner_id = line_id(outer_id, inner_group, inner)
    assert kept_lines([inner_id]) == {
        outer_group: [StoredCall(outer_id, *outer[:7])],
        inner_group: [StoredCall(inner_id, *inner[:7])],
    }
    assert branch_name(inner_id) == "inner[2]"


def test_what_a_call_creates_is_found_again_in_whatever_order_a_set_gives() -> None:
    def identities(order: str) -> dict[str, str]:
        found = {}
        for number, item in enumerate(order, 1):
            branch = MadeCall(BRANCH, "shop.<locals>.fetch", item, number)
            line = line_id(ROOT, line_group(ROOT, ""), branch)
            found[item] = identity([ROOT, line], MadeCall("submit", "submit ship", item, 1))
            found[item * 2] = identity([ROOT], MadeCall("submit", "submit ship", item, number))
        return found

    assert identities("abc") == identities("cba")
    assert len(set(identities("abc").values())) == 6


def test_equal_calls_and_lines_create_things_of_their_own() -> None:
    group = line_group(ROOT, "")
    call = MadeCall("submit", "submit ship", "0a", 1)
    first, second = (
        line_id(ROOT, group, MadeCall(BRANCH, "fetch", "0a", number, equal=number))
        for number in (1, 2)
    )
    inner = line_id(first, line_group(first, ""), MadeCall(BRANCH, "fetch", "0a", 1))
    paths = [[ROOT], ["=ada"], [ROOT, first], [ROOT, second], ["=ada", first], [ROOT, first, inner]]
    made = [identity(path, call._replace(equal=equal)) for path in paths for equal in (1, 2)]
    assert len(set(made)) == len(made)


def test_a_wait_is_known_by_its_name_whatever_its_timeout() -> None:
    first, later = (MadeCall("signal", "signal paid", digest, 1) for digest in ("0a", "1b"))
    assert identity([ROOT], first) == identity([ROOT], later)
    assert identity([ROOT], first) != identity([ROOT], first._replace(equal=2))


def test_what_a_branch_creates_is_found_again_whatever_its_place() -> None:
    branch, call = MadeCall(BRANCH, "fetch", "0a", 1), MadeCall("submit", "submit ship", "", 1)
    places = [line_id(ROOT, line_group(ROOT, key), branch) for key in ("", "used")]
    assert places[0] != places[1]
    assert identity([ROOT, places[0]], call) == identity([ROOT, places[1]], call)


def test_lines_deep_inside_others_stay_short_enough() -> None:
    line = ROOT
    for depth in range(50):
        line = line_id(
            line, line_group(line, ""), MadeCall(BRANCH, "shop.<locals>.deeper", "0a", 1)
        )
        assert len(line.encode()) <= LINE_BYTES_MAX
        assert branch_name(line) == "deeper[1]"
        assert depth > 10 or len(kept_lines([line])) == depth + 1


def test_keys_are_readable_different_and_short_enough() -> None:
    fetch = line_id(ROOT, line_group(ROOT, "x"), MadeCall(BRANCH, "shop.<locals>.fetch", "0a", 2))
    other = line_id(ROOT, line_group(ROOT, "y"), MadeCall(BRANCH, "shop.<locals>.fetch", "0a", 2))
    long = named_line(named_line(ROOT, "ü" * 200), "ü" * 200)
    calls = [asked(each) for each in ("charge", "charge#2", "charge#1", "charge:0a!", "x" * 256)]
    keys = [step_key(line, each) for line in (ROOT, fetch, other, long) for each in calls]
    assert keys[0] == keys[2] == "charge"
    assert keys[1] == "charge#2"
    assert keys[5].startswith("charge@fetch[2].")
    assert len(set(keys)) == len(keys) - 4
    assert max(len(key.encode()) for key in keys) <= STEP_KEY_BYTES_MAX
    assert step_key(ROOT, MadeCall("call", "charge#2", "", 1)) == "charge#2#1"


def test_branches_of_one_function_share_what_is_accepted_and_so_do_named_ones() -> None:
    call = MadeCall("call", "charge", "1", 1)
    group = line_group(ROOT, "")
    first, second = (line_id(ROOT, group, branch("1", each, each, each)) for each in (1, 2))
    other = line_id(ROOT, group, branch("1", 1, 1, 1)._replace(name="mail"))
    named = named_line(ROOT, "ada"), named_line(ROOT, "bob")
    assert siblings_name(first, call) == siblings_name(second, call._replace(digest="2", number=2))
    assert siblings_name(named[0], call) == siblings_name(named[1], call)
    assert siblings_name(ROOT, call) == "charge"
    lines = ROOT, first, other, named[0]
    assert len({siblings_name(line, call) for line in lines}) == 4
    assert siblings_name(first, call) != siblings_name(first, call._replace(name="check"))


def test_a_long_name_of_a_coroutine_keeps_its_end() -> None:
    label = label_of("test_something_very_long." * 10 + "<locals>.fetch")
    assert label.endswith(".fetch")
    assert len(label) < 100


START, LATER = line_group(ROOT, ""), line_group(ROOT, "charge")
FETCH = line_id(ROOT, START, MadeCall(BRANCH, "shop.<locals>.fetch", "0a", 1))
OTHER = line_id(ROOT, LATER, MadeCall(BRANCH, "shop.<locals>.other", "0a", 1))
INNER = line_id(FETCH, line_group(FETCH, ""), MadeCall(BRANCH, "shop.<locals>.inner", "0a", 1))


@pytest.mark.parametrize(
    ("line", "going", "may_ask"),
    [
        pytest.param(ROOT, {"alive": [FETCH]}, False, id="the function waits for its branch"),
        pytest.param(FETCH, {}, False, id="a branch that nobody has started, or that has ended"),
        pytest.param(FETCH, {"alive": [FETCH]}, True, id="a branch that goes on"),
        pytest.param(FETCH, {"cut_off": [FETCH]}, True, id="a branch that was cancelled"),
        pytest.param(FETCH, {"places": [START]}, True, id="one that may be started now"),
        pytest.param(FETCH, {"places": [LATER]}, False, id="one whose place was passed"),
        pytest.param(FETCH, {"unknown": ["shop.<locals>.fetch"]}, True, id="one before its calls"),
        pytest.param(FETCH, {"unknown": ["shop.<locals>.other"]}, False, id="another one"),
        pytest.param(INNER, {"alive": [FETCH]}, True, id="one inside a branch that goes on"),
        pytest.param(INNER, {"cut_off": [FETCH]}, True, id="one inside a branch that failed"),
        pytest.param(INNER, {"alive": [OTHER]}, False, id="one inside of nothing that goes on"),
        pytest.param("=ada", {"alive": ["=bob"]}, False, id="a name that is gone"),
        pytest.param("=ada", {"alive": ["=ada"]}, True, id="a name in use"),
        pytest.param("=ada/bob", {"alive": ["=ada"]}, True, id="a name inside one in use"),
    ],
)
def test_what_is_stored_elsewhere_was_moved_if_nobody_may_ask_for_it_there(
    line: str, going: dict[str, list[str]], may_ask: bool
) -> None:
    nothing: dict[str, list[str]] = {each: [] for each in Going._fields}
    assert may_ask_yet(line, Going(**{**nothing, **going})) is may_ask


def test_a_moved_call_is_refused_with_the_place_where_it_is_stored() -> None:
    assert moved(asked("charge"), ROOT).endswith(
        "not stored here but in the function itself, where it has not been asked for"
    )
    assert "in the branch 'fetch[1]'" in moved(asked("charge"), FETCH)
    assert "in the branch 'ada'" in moved(asked("charge"), "=ada")


@pytest.mark.parametrize(("number", "shown"), [(1, "the sleep"), (2, "sleep number 2")])
def test_a_sleep_is_told_without_a_name(number: int, shown: str) -> None:
    match = Shelf([kept("a")]).take([MadeCall("sleep", "sleep", "", number)])[0]
    assert match.refusal.startswith(f"{shown} is not stored, but step 'a'")


def test_lines_in_branches_of_different_names_come_in_any_order() -> None:
    ada, bob, nested = named_line(ROOT, "ada"), named_line(ROOT, "bob"), named_line("=ada", "bob")

    def inside(parent: str) -> str:
        group = line_group(parent, "")
        return line_id(parent, group, MadeCall(BRANCH, "work", "", 1))

    deeper = inside(inside(ada))
    apart = [(ada, bob), (inside(ada), bob), (deeper, inside(bob)), (ada, nested)]
    together = [(ada, deeper), (inside(ada), deeper), (ROOT, ada), (inside(ROOT), inside(ada))]
    assert [in_any_order(*pair) for pair in apart] == [True] * len(apart)
    assert [in_any_order(*pair) for pair in together] == [False] * len(together)


def test_a_parallel_call_finds_what_was_stored_in_order_and_differs_only_in_times() -> None:
    def parallel(digest: str, *, quiet: bool) -> MadeCall:
        return MadeCall("call", "save", digest, 1, parallel=True, quiet=quiet, tells=True)

    def shelf() -> Shelf:
        return Shelf([StoredCall("save", "call", "save", "ada.noon", 1)])

    (quiet,) = shelf().take([parallel("ada.night", quiet=True)], "")
    assert quiet.kept is not None
    (beside,) = shelf().take([parallel("ada.night", quiet=False)], "")
    assert "may be the one that is stored or another one" in beside.refusal
    (other,) = shelf().take([parallel("bob.night", quiet=True)], "")
    assert other == NEW


def test_by_arrival_a_call_with_other_arguments_gets_nothing_by_its_number() -> None:
    def step(digest: str, *, tells: bool = True) -> MadeCall:
        return MadeCall("call", "invoice", digest, 1, tells=tells)

    def shelf() -> Shelf:
        return Shelf([StoredCall("invoice", "call", "invoice", "ada", 1)])

    (in_order,) = shelf().take([step("bob")])
    assert in_order.kept is not None
    (by_arrival,) = shelf().take([step("bob")], by_arrival=True)
    assert by_arrival.kept is None
    assert "may be in another order than before" in by_arrival.refusal
    (equal,) = shelf().take([step("ada")], by_arrival=True)
    assert equal.kept is not None
    (silent,) = shelf().take([step("bob", tells=False)], by_arrival=True)
    assert silent.kept is not None
