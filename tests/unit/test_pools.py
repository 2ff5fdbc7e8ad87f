"""Calls of branches that may share their items: which of them are in doubt."""

from flowfabric.core.journal import Asked, Kept, Shelf
from flowfabric.core.pools import Burst, Pool


def asked(name: str, digest: str, number: int = 1, *, kind: str = "call") -> Asked:
    return Asked(kind, name, digest, number, tells=True)


def kept(name: str, digest: str, number: int = 1, *, kind: str = "call") -> Kept:
    return Kept(f"{name}#{number}", kind, name, digest, number)


def pool(*stored: Kept) -> Pool:
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
