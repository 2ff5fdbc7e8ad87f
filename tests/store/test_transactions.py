"""What every store promises about a unit of work."""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec import structs

from flowfabric.core.decisions import Changes
from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import Execution, Lane
from flowfabric.core.states import LaneState
from flowfabric.errors import Corruption
from flowfabric.store.base import Key, Reader, Row, Store, Transaction, UniqueViolation
from tests.store.records import (
    ENDED,
    NOW_MS,
    PARTITION,
    SetClock,
    a_lane,
    an_event,
    an_execution,
    key,
    save,
)

ABSENT: Key = (PARTITION, ExecutionId(f"{{fp:{PARTITION}}}:ffffffff-0000-7000-8000-000000000000"))


async def load(store: Store, *executions: Execution) -> dict[Key, Execution]:
    async def body(reader: Reader) -> dict[Key, Execution]:
        return await reader.get(Execution, [key(execution) for execution in executions])

    return await store.read(body)


async def test_rows_are_found_by_key_and_absent_ones_are_left_out(store: Store) -> None:
    one, other = an_execution(), an_execution()
    await save(store, Changes(inserts=(one, other)))

    async def body(reader: Reader) -> dict[Key, Execution]:
        return await reader.get(Execution, [key(other), ABSENT, key(one), key(one)])

    assert await store.read(body) == {key(one): one, key(other): other}


async def test_asking_for_no_rows_is_allowed(store: Store) -> None:
    async def body(transaction: Transaction) -> None:
        assert await transaction.get(Execution, []) == {}
        assert await transaction.lock(Execution, []) == {}
        assert await transaction.insert_new([]) == set()
        await transaction.save(Changes())

    await store.transact(body)


async def test_one_save_writes_every_kind_of_change(store: Store) -> None:
    old, doomed, new = an_execution(), an_execution(), an_execution()
    await save(store, Changes(inserts=(old, doomed, a_lane("a"))))
    moved = structs.replace(old, **ENDED, priority=5, result=b"42", flow_id=None)
    changes = Changes(
        inserts=(new, a_lane("b")),
        updates=(moved, a_lane("a", LaneState.PAUSED)),
        deletes=(doomed,),
        events=(an_event(old, "one"), an_event(new, "two")),
    )

    async def body(transaction: Transaction) -> None:
        await transaction.lock(Execution, [key(old), key(doomed)])
        await transaction.save(changes)

    await store.transact(body)
    assert await load(store, old, doomed, new) == {key(old): moved, key(new): new}
    page = await store.read_events(after=0, limit=10)
    assert [event.reason for event in page.events] == ["one", "two"]

    async def lanes(reader: Reader) -> dict[Key, Lane]:
        return await reader.get(Lane, [("a",), ("b",)])

    assert await store.read(lanes) == {
        ("a",): a_lane("a", LaneState.PAUSED),
        ("b",): a_lane("b"),
    }


async def test_several_saves_of_one_row_add_up(store: Store) -> None:
    first = an_execution()
    second = structs.replace(first, priority=1, progress_message="r")
    third = structs.replace(second, progress_message=None, progress_pct=50)

    async def body(transaction: Transaction) -> None:
        await transaction.insert_new([first])
        await transaction.save(Changes(updates=(second,)))
        await transaction.save(Changes(updates=(third,)))

    await store.transact(body)
    assert await load(store, first) == {key(first): third}


async def test_several_changes_of_one_row_in_one_save_end_in_the_last(store: Store) -> None:
    first, gone = an_execution(), an_execution()
    last = structs.replace(first, priority=3)
    changes = Changes(
        inserts=(first, gone), updates=(structs.replace(first, priority=2), last), deletes=(gone,)
    )
    await save(store, changes)
    assert await load(store, first, gone) == {key(first): last}


async def test_rows_with_different_changes_are_saved_together(store: Store) -> None:
    one, other, same = an_execution(), an_execution(), an_execution()
    await save(store, Changes(inserts=(one, other, same)))
    new_one = structs.replace(one, priority=1)
    new_other = structs.replace(other, payload=b"new", instance_tag="t")

    async def body(transaction: Transaction) -> None:
        await transaction.lock(Execution, [key(one), key(other), key(same)])
        await transaction.save(Changes(updates=(new_one, new_other, same)))

    await store.transact(body)
    expected = {key(row): row for row in (new_one, new_other, same)}
    assert await load(store, one, other, same) == expected


async def test_insert_new_takes_free_keys_and_leaves_others_alone(store: Store) -> None:
    taken, free = an_execution(), an_execution()
    await save(store, Changes(inserts=(taken,)))

    async def body(transaction: Transaction) -> set[Key]:
        return await transaction.insert_new([structs.replace(taken, priority=9), free])

    assert await store.transact(body) == {key(free)}
    assert await load(store, taken, free) == {key(taken): taken, key(free): free}


async def test_inserting_a_taken_key_is_a_unique_violation_of_its_table(store: Store) -> None:
    await save(store, Changes(inserts=(a_lane("a"),)))
    with pytest.raises(UniqueViolation) as caught:
        await save(store, Changes(inserts=(a_lane("a"),)))
    assert caught.value.table == "lane"


async def test_updating_a_row_that_is_gone_is_refused(store: Store) -> None:
    with pytest.raises(Corruption, match="gone"):
        await save(store, Changes(updates=(an_execution(),)))


async def test_a_body_that_raises_leaves_nothing_behind(store: Store) -> None:
    execution = an_execution()

    async def body(transaction: Transaction) -> None:
        event = an_event(execution, "never")
        await transaction.save(Changes(inserts=(execution,), events=(event,)))
        raise LookupError("changed my mind")

    with pytest.raises(LookupError, match="changed my mind"):
        await store.transact(body)
    assert await load(store, execution) == {}
    assert (await store.read_events(after=0, limit=1)).events == ()


async def test_concurrent_increments_are_all_counted(store: Store) -> None:
    execution = an_execution()
    await save(store, Changes(inserts=(execution,)))

    async def body(transaction: Transaction) -> None:
        found = (await transaction.lock(Execution, [key(execution)]))[key(execution)]
        next_one = structs.replace(found, retry_count=found.retry_count + 1)
        await transaction.save(Changes(updates=(next_one,)))

    await asyncio.gather(*(store.transact(body) for _ in range(50)))
    assert (await load(store, execution))[key(execution)].retry_count == 50


async def test_time_comes_from_the_injected_clock_and_stands_still(
    store: Store, clock: SetClock
) -> None:
    async def body(transaction: Transaction) -> list[int]:
        before = await transaction.now_ms()
        clock.value_ms += 1_000
        return [before, await transaction.now_ms()]

    assert await store.transact(body) == [NOW_MS, NOW_MS]


async def test_records_can_be_selected_by_a_statement(store: Store) -> None:
    lanes = [a_lane("a"), a_lane("b")]
    await save(store, Changes(inserts=tuple(lanes)))

    async def body(reader: Reader) -> list[Lane]:
        return list(await reader.select_records(Lane, "list_lanes", after="", limit=9))

    assert (await store.read(body))[:2] == lanes


async def test_a_deployment_is_seeded_once(store: Store) -> None:
    (row,) = await store.execute_alone("get_deployment")
    partitions = [row[f"num_{kind}_partitions"] for kind in ("flow", "budget", "quota")]
    assert partitions == [256, 32, 32]
    assert isinstance(row["handle_key"], bytes)
    assert len(row["handle_key"]) == 32


async def test_the_rows_of_a_statement_can_be_read_on_their_way(store: Store) -> None:
    await save(store, Changes(inserts=tuple(a_lane(f"lane-{n:02}") for n in range(20))))

    def names(rows: Sequence[Row]) -> list[object]:
        return [row["lane_id"] for row in rows]

    assert await store.execute_and_read("list_lanes", names, after="lane-", limit=100) == [
        f"lane-{n:02}" for n in range(20)
    ]
    assert await store.execute_and_read("list_lanes", names, after="lane-19", limit=100) == []


async def test_a_store_answers_pings(store: Store) -> None:
    await store.ping()


async def test_events_are_read_in_pages_and_by_category(store: Store) -> None:
    execution = an_execution()
    await save(store, Changes(events=tuple(an_event(execution, str(n)) for n in range(5))))
    first = await store.read_events(after=0, limit=2)
    second = await store.read_events(after=first.cursor, limit=10)
    assert [event.reason for event in (*first.events, *second.events)] == list("01234")
    last = second.events[-1].event_id
    assert second.cursor == last
    other = await store.read_events(after=0, limit=10, category="lease")
    assert (other.events, other.cursor) == ((), last)
    assert (await store.read_events(after=last, limit=10)).cursor == last
