"""Calls of branches that may share their items: which are in doubt, and what they stand for."""

from flowfabric.core.journal import MadeCall, StoredCall
from flowfabric.core.pools import Burst, Pool
from flowfabric.core.step_matching import Shelf


def asked(name: str, digest: str, number: int = 1, *, kind: str = "call") -> MadeCall:
    return MadeCall(kind, name, digest, number, tells=True)


def kept(
    name: str, digest: str, number: int = 1, *, kind: str = "call", after: str | None = None
) -> StoredCall:
    return StoredCall(f"{name}#{number} {digest}", kind, name, digest, number, after_key=after)


def nobody() -> bool:
    return False


def somebody() -> bool:
    return True


def pool(*stored: StoredCall) -> Pool:
    return Pool({"a": Shelf(stored)})


def test_a_new_call_that_leaves_a_step_behind_waits_for_others() -> None:
    assert pool(kept("one", "x")).in_doubt(Burst("a", [asked("two", "y")], None))
    assert not pool().in_doubt(Burst("a", [asked("two", "y")], None))


def test_calls_made_together_of_which_some_are_stored_wait_for_nobody() -> None:
    burst = Burst("a", [asked("one", "x"), asked("two", "y")], None)
    assert not pool(kept("one", "x")).in_doubt(burst)


def test_a_call_that_is_stored_under_another_number_waits_for_others() -> None:
    stored = pool(kept("one", "x", 1), kept("one", "y", 2))
    assert stored.in_doubt(Burst("a", [asked("one", "y", 1)], None))
    assert not stored.in_doubt(Burst("a", [asked("one", "x", 1)], None))


def test_how_long_a_sleep_is_does_not_make_it_another() -> None:
    stored = pool(kept("sleep", "1", 1, kind="sleep"), kept("sleep", "2", 2, kind="sleep"))
    assert not stored.in_doubt(Burst("a", [asked("sleep", "2", 1, kind="sleep")], None))


def test_a_call_of_another_item_takes_its_number_only_when_nobody_else_goes_on() -> None:
    stored = pool(kept("one", "x"))
    burst = Burst("a", [asked("one", "y")], None)
    assert stored.resolve([burst], somebody) == []
    assert stored.resolve([burst], nobody) == ["a"]
    assert not stored.exchanged
    assert [match.kept for match in stored.take(burst)] == [kept("one", "x")]


def test_a_step_that_was_passed_by_goes_to_the_branch_that_asks_for_it() -> None:
    stored = Pool({"a": Shelf([kept("one", "x")]), "b": Shelf([])})
    burst = Burst("b", [asked("one", "x")], None)
    assert stored.resolve([burst], somebody) == ["b"]
    assert stored.exchanged
    assert [match.kept for match in stored.take(burst)] == [kept("one", "x")]


def test_a_step_is_left_to_whoever_comes_by_the_one_before_it() -> None:
    first, second = kept("one", "x"), kept("two", "all", after="one#1 x")
    stored = Pool({"a": Shelf([first, second]), "b": Shelf([])})
    early = Burst("b", [asked("two", "all")], "another")
    assert stored.resolve([early], somebody) == []
    stored.take(Burst("a", [asked("one", "x")], None))
    assert stored.resolve([early], somebody) == []
    passing = Burst("a", [asked("three", "z")], first.key)
    assert stored.resolve([early, passing], somebody) == ["b"]


def test_what_a_branch_was_given_by_its_number_is_not_run_again_by_another() -> None:
    mine, theirs = kept("one", "x"), kept("two", "y")
    for exchanged in (False, True):
        stored = Pool({"a": Shelf([mine]), "b": Shelf([theirs])})
        (given,) = stored.take(Burst("a", [asked("one", "other")], None))
        assert given.kept == mine
        stored.exchanged = exchanged
        (refused,) = stored.take(Burst("b", [asked("one", "x")], None))
        assert (refused.kept, refused.given_away) == (None, mine)
        assert "another call of this name has been given its result" in refused.refusal
