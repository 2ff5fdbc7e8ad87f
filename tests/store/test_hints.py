"""Wake-ups inside one process, as every store gives them."""

import asyncio
import time

import pytest

from flowfabric.core.decisions import Changes
from flowfabric.store.base import Store, Transaction
from flowfabric.store.hints import EVERY_TOPIC, POLL_FIRST_S, HintBoard, look_s, poll_s
from tests.store.records import a_lane


async def test_a_hint_wakes_whoever_waits_for_its_topic() -> None:
    board = HintBoard()
    with board.listen(["a", "b"]) as listener, board.listen(["c"]) as other:
        waiting = asyncio.create_task(listener.wait(30))
        await asyncio.sleep(0)
        board.publish(["b"])
        assert await waiting
        assert not await other.wait(0)


async def test_a_hint_between_two_waits_is_kept_once() -> None:
    board = HintBoard()
    with board.listen(["a"]) as listener:
        board.publish(["a"])
        board.publish(["a"])
        assert await listener.wait(30)
        assert not await listener.wait(0)


async def test_the_wildcard_wakes_everybody() -> None:
    board = HintBoard()
    with board.listen(["a"]) as one, board.listen(["b"]) as other:
        board.publish([EVERY_TOPIC])
        assert await one.wait(0)
        assert await other.wait(0)


async def test_a_closed_listener_hears_nothing() -> None:
    board = HintBoard()
    with board.listen(["a"]) as listener:
        pass
    board.publish(["a"])
    assert not await listener.wait(0)


@pytest.mark.parametrize(
    ("idle_s", "expected_s"), [(0, 0.005), (0.04, 0.005), (0.8, 0.1), (4, 0.5), (8, 1), (600, 1)]
)
def test_polls_grow_rarer_the_longer_there_was_nothing_to_do(
    idle_s: float, expected_s: float
) -> None:
    assert poll_s(idle_s) == pytest.approx(expected_s)


@pytest.mark.parametrize(("idle_s", "expected_s"), [(0, 2), (8, 2), (12, 3), (20, 5), (600, 5)])
def test_looks_grow_rarer_the_longer_there_was_nothing_to_do(
    idle_s: float, expected_s: float
) -> None:
    assert look_s(idle_s, 2, 5) == pytest.approx(expected_s)


async def test_waits_are_short_while_hints_from_elsewhere_do_not_arrive() -> None:
    board = HintBoard()
    board.live = False
    loop = asyncio.get_running_loop()
    lasted: list[float] = []
    with board.listen(["a"]) as listener:
        for _ in range(20):
            before = loop.time()
            assert not await listener.wait(600)
            lasted.append(loop.time() - before)
            listener.found_work()
    # A busy machine may be late for some of them.
    assert POLL_FIRST_S <= min(lasted) < POLL_FIRST_S * 10


async def test_short_waits_add_up() -> None:
    """Whoever waits briefly, again and again, is worth listening for as well."""
    board = HintBoard()
    with board.listen(["a"]) as listener, board.listen(["b"]) as other:
        before_s = time.monotonic()
        for _ in range(5):
            await asyncio.gather(listener.wait(0.002), other.wait(0.002))
        lasted_s = time.monotonic() - before_s
    assert 5 * 0.002 <= board.waited_s <= lasted_s
    assert board.waited_s == board.waited_s, "nobody waits any more"


async def test_a_hint_is_given_when_the_transaction_has_committed(store: Store) -> None:
    async def body(transaction: Transaction) -> None:
        transaction.hint("lanes")
        await transaction.save(Changes(inserts=(a_lane("a"),)))

    with store.hints(["lanes"]) as listener, store.hints(["other"]) as other:
        await store.transact(body)
        assert await listener.wait(30)
        assert not await other.wait(0)


async def test_a_transaction_that_fails_hints_at_nothing(store: Store) -> None:
    async def body(transaction: Transaction) -> None:
        transaction.hint("lanes")
        raise LookupError("no")

    with store.hints(["lanes"]) as listener:
        with pytest.raises(LookupError):
            await store.transact(body)
        assert not await listener.wait(0)


async def test_a_hint_can_be_given_by_hand(store: Store) -> None:
    with store.hints(["lanes"]) as listener:
        store.hint("lanes")
        assert await listener.wait(30)
