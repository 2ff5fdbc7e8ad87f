"""Several processes on one file, and processes that die."""

import asyncio
from pathlib import Path

from flowfabric.core.decisions import Changes
from flowfabric.core.records import Execution
from flowfabric.store.base import Reader
from flowfabric.store.sqlite.store import SqliteStore
from tests.store.records import (
    a_lane,
    add_route,
    an_execution,
    change_sqlite,
    key,
    save,
    start_python,
)

INCREMENTS = """
import asyncio, sys
from msgspec import structs
from flowfabric.core.decisions import Changes
from flowfabric.core.records import Execution
from flowfabric.store.sqlite.store import SqliteStore

async def main(path, partition, execution_id, times):
    store = SqliteStore(path)
    await store.open()
    key = (int(partition), execution_id)

    async def body(transaction):
        found = (await transaction.lock(Execution, [key]))[key]
        more = structs.replace(found, retry_count=found.retry_count + 1)
        await transaction.save(Changes(updates=(more,)))

    for _ in range(int(times)):
        await store.transact(body)
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""

WRITES_FOREVER = """
import asyncio, sys
from flowfabric.core.decisions import Changes
from flowfabric.store.sqlite.store import SqliteStore
from tests.store.records import an_event, an_execution, save

async def write(store):
    while True:
        execution = an_execution(payload=bytes(5_000))
        event = an_event(execution, "written")
        await save(store, Changes(inserts=(execution,), events=(event,)))
        print(execution.execution_id[-36:], flush=True)

async def main(path):
    store = SqliteStore(path)
    await store.open()
    await asyncio.gather(*(write(store) for _ in range(8)))

asyncio.run(main(*sys.argv[1:]))
"""


async def test_processes_take_turns_and_lose_nothing(path: Path) -> None:
    execution = an_execution()
    store = SqliteStore(str(path))
    await store.open()
    await add_route(store, execution)
    await save(store, Changes(inserts=(execution,)))
    processes = [start_python(INCREMENTS, path, *key(execution), 50) for _ in range(3)]
    codes = [await asyncio.to_thread(process.wait, 60) for process in processes]
    assert codes == [0, 0, 0]

    async def body(reader: Reader) -> int:
        return (await reader.get(Execution, [key(execution)]))[key(execution)].retry_count

    assert await store.read(body) == 150
    await store.close()
    for process in processes:
        process.communicate()


def test_what_was_acknowledged_survives_a_kill_in_the_middle_of_writing(path: Path) -> None:
    process = start_python(WRITES_FOREVER, path)
    assert process.stdout is not None
    acknowledged = [process.stdout.readline().strip() for _ in range(100)]
    process.kill()
    rest, _ = process.communicate()
    # The last line may have been cut short by the kill.
    acknowledged += [line for line in rest.splitlines() if len(line) == 36]

    assert change_sqlite(path, "pragma integrity_check") == [("ok",)]
    executions = {str(row[0]) for row in change_sqlite(path, "select execution_id from execution")}
    events = {str(row[0]) for row in change_sqlite(path, "select execution_id from event")}
    assert set(acknowledged) <= executions
    assert executions == events, "an execution and its event are written together or not at all"


async def test_a_commit_of_another_process_wakes_those_who_wait(path: Path) -> None:
    here, there = SqliteStore(str(path)), SqliteStore(str(path))
    await asyncio.gather(here.open(), there.open())
    with here.hints(["lanes"]) as listener:
        waiting = asyncio.create_task(listener.wait(30))
        await save(there, Changes(inserts=(a_lane("a"),)))
        assert await waiting
    await asyncio.gather(here.close(), there.close())


async def test_a_commit_right_after_opening_wakes_those_who_wait(path: Path) -> None:
    store = SqliteStore(str(path))
    await store.open()
    with store.hints(["lanes"]) as listener:
        # Nothing else has run since the file was opened.
        change_sqlite(path, "create table theirs (id integer)")
        assert await listener.wait(10)
    await store.close()
