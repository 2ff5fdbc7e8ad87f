"""Concurrent single calls are made together."""

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from flowfabric.batching import GroupCommit
from flowfabric.errors import FlowFabricError, InvalidInput, NotStorable, Transport


async def test_calls_of_one_moment_share_a_batch_of_bounded_size() -> None:
    batches: list[int] = []

    async def commit(items: Sequence[int]) -> Sequence[int]:
        batches.append(len(items))
        await asyncio.sleep(0)
        return [item * 2 for item in items]

    group = GroupCommit[int, int](commit, count_max=100, parallel=1)
    answers = await asyncio.gather(*(group.add(number) for number in range(250)))
    assert answers == [2 * number for number in range(250)]
    assert batches == [100, 100, 50]
    await group.close()


async def test_one_bad_item_does_not_spoil_its_batch() -> None:
    async def commit(items: Sequence[int]) -> Sequence[int]:
        if 3 in items:
            raise InvalidInput("item", "is three")
        return items

    group = GroupCommit[int, int](commit)
    outcomes = await asyncio.gather(*(group.add(n) for n in range(5)), return_exceptions=True)
    assert [o for o in outcomes if isinstance(o, int)] == [0, 1, 2, 4]
    assert isinstance(outcomes[3], InvalidInput)


async def test_what_the_database_cannot_store_is_refused_alone() -> None:
    async def commit(items: Sequence[int]) -> Sequence[int]:
        if 3 in items:
            raise NotStorable("postgres", "index row size 3712 exceeds btree maximum 2704")
        return items

    group = GroupCommit[int, int](commit)
    outcomes = await asyncio.gather(*(group.add(n) for n in range(5)), return_exceptions=True)
    assert [o for o in outcomes if isinstance(o, int)] == [0, 1, 2, 4]
    assert isinstance(outcomes[3], NotStorable)


async def test_an_item_that_has_to_wait_holds_up_no_other_of_its_batch() -> None:
    gate = asyncio.Event()

    async def commit(items: Sequence[int]) -> Sequence[int]:
        if len(items) > 1:
            raise InvalidInput("item", "is among them")
        if items == [0]:
            await gate.wait()
        return items

    group = GroupCommit[int, int](commit)
    waiting = asyncio.create_task(group.add(0))
    assert await asyncio.gather(*(group.add(n) for n in range(1, 9))) == list(range(1, 9))
    assert not waiting.done()
    gate.set()
    assert await waiting == 0


async def test_an_outage_is_everybody_s_error_and_asked_about_once() -> None:
    calls: list[int] = []

    async def commit(items: Sequence[int]) -> Sequence[int | FlowFabricError]:
        calls.append(len(items))
        raise Transport("test", "away")

    group = GroupCommit[int, int](commit, parallel=1)
    outcomes = await asyncio.gather(*(group.add(n) for n in range(4)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {Transport}
    assert calls == [4]


async def test_whoever_gave_up_is_left_out() -> None:
    seen: list[int] = []
    begun, gate = asyncio.Event(), asyncio.Event()

    async def commit(items: Sequence[int]) -> Sequence[int]:
        seen.extend(items)
        begun.set()
        await gate.wait()
        return items

    group = GroupCommit[int, int](commit, count_max=1, parallel=1)
    first, second = (asyncio.create_task(group.add(number)) for number in (1, 2))
    await begun.wait()
    second.cancel()
    gate.set()
    assert await first == 1
    with pytest.raises(asyncio.CancelledError):
        await second
    await group.close()
    assert seen == [1]


async def test_an_item_handed_in_while_the_last_flush_ends_is_not_left_behind() -> None:
    async def double(items: Sequence[int]) -> Sequence[int]:
        return [2 * item for item in items]

    group: GroupCommit[int, int] = GroupCommit(double, parallel=1)

    async def chain(item: int) -> int:
        # The answer arrives in the very step of the loop in which the flush finds nothing more.
        return await group.add(await group.add(item))

    async with asyncio.timeout(20):
        assert await asyncio.gather(*(chain(item) for item in range(20))) == [
            4 * item for item in range(20)
        ]


async def test_an_outage_is_told_to_those_who_waited_long_enough_behind_it() -> None:
    batches: list[Sequence[int]] = []
    began, gate = asyncio.Event(), asyncio.Event()

    async def commit(items: Sequence[int]) -> Sequence[int]:
        batches.append(items)
        began.set()
        await gate.wait()
        raise Transport("postgres", "no answer in time", may_have_happened=True)

    group = GroupCommit[int, int](commit, count_max=1, parallel=1, patience_s=0.0)
    adding = [asyncio.create_task(group.add(number)) for number in range(3)]
    await began.wait()
    gate.set()
    outcomes = await asyncio.gather(*adding, return_exceptions=True)
    assert batches == [[0]]
    assert [isinstance(o, Transport) and o.may_have_happened for o in outcomes] == [
        True,
        False,
        False,
    ]
    await group.close()


async def test_each_item_that_is_handed_in_is_told_its_answer() -> None:
    async def commit(items: Sequence[int]) -> Sequence[int | FlowFabricError]:
        if len(items) > 1:
            raise InvalidInput("item", "is among them")
        return [InvalidInput("item", "is one")] if items == [1] else items

    told: dict[int, object] = {}
    group = GroupCommit[int, int](commit)
    for number in range(3):
        group.hand_in(number, partial(told.__setitem__, number))
    await group.close()
    assert (told[0], told[2]) == (0, 2)
    assert isinstance(told[1], InvalidInput)
