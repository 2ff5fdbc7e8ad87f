"""One writer, many units of work: committed together, failing apart."""

import asyncio
import itertools
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowfabric.core.decisions import Changes
from flowfabric.core.records import Lane
from flowfabric.errors import Bug, DatabaseGone, Transport, Unavailable
from flowfabric.store.base import Body, Reader, Row, Transaction
from flowfabric.store.sqlite import writer
from flowfabric.store.sqlite.connection import FileIdentity, MachineClock, connect
from flowfabric.store.sqlite.store import SqliteStore, apply_pending
from flowfabric.store.sqlite.writer import MUCH_TO_READ, Committer, RowsUnit, Unit, WriterJob
from tests.store.records import a_lane, change_sqlite, save, start_python

NOTHING: tuple[str, ...] = ()
NOTHING_TO_COMPLETE = dict.fromkeys(
    ("lease_ids", "partition_keys", "execution_ids", "results", "result_encodings"), NOTHING
)


@pytest.fixture
def foreign_file(path: Path) -> Path:
    path.write_bytes(b"certainly no database" * 100)
    return path


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    opened = SqliteStore(str(path))
    await opened.open()
    yield opened
    await opened.close()


def inserts(name: str) -> Body[str]:
    async def body(transaction: Transaction) -> str:
        await transaction.save(Changes(inserts=(a_lane(name),)))
        return name

    return body


def lanes_in(path: Path) -> list[str]:
    """Those that tests have added."""
    added = "select lane_id from lane where registered_by = 'tests' order by 1"
    return [str(name) for (name,) in change_sqlite(path, added)]


async def hold_the_writer(store: SqliteStore) -> tuple[threading.Event, asyncio.Task[None]]:
    """Occupy the writer with a unit of work until the event is set."""
    started, go = threading.Event(), threading.Event()

    async def body(transaction: Transaction) -> None:
        started.set()
        go.wait()

    task = asyncio.create_task(store.transact(body))
    await asyncio.to_thread(started.wait)
    return go, task


async def test_units_that_wait_together_are_committed_together(
    store: SqliteStore, path: Path
) -> None:
    seen: list[list[str]] = []

    async def look(transaction: Transaction) -> None:
        seen.append(lanes_in(path))

    go, held = await hold_the_writer(store)
    waiting = [asyncio.create_task(store.transact(inserts(name))) for name in "abc"]
    last = asyncio.create_task(store.transact(look))
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(*waiting) == ["a", "b", "c"]
    await asyncio.gather(held, last)
    assert seen == [[]], "nothing was committed while the group was running"
    assert lanes_in(path) == ["a", "b", "c"]


async def test_a_failing_unit_leaves_its_neighbours_alone(store: SqliteStore, path: Path) -> None:
    async def fails(transaction: Transaction) -> str:
        await transaction.save(Changes(inserts=(a_lane("lost"),)))
        raise LookupError("no")

    go, held = await hold_the_writer(store)
    units = [inserts("a"), fails, inserts("a"), inserts("b")]
    waiting = [asyncio.create_task(store.transact(unit)) for unit in units]
    await asyncio.sleep(0)
    go.set()
    await held
    first, second, third, fourth = await asyncio.gather(*waiting, return_exceptions=True)
    assert (first, fourth) == ("a", "b")
    assert isinstance(second, LookupError)
    assert "lane" in str(third)
    assert lanes_in(path) == ["a", "b"]


async def write_and_find(transaction: Transaction) -> Sequence[Row]:
    await transaction.save(Changes(inserts=tuple(a_lane(str(n)) for n in range(MUCH_TO_READ))))
    return await transaction.select("list_lanes", after="", limit=100)


@pytest.fixture
def committer(path: Path) -> Iterator[Committer]:
    with closing(connect(str(path), "full")) as connection:
        apply_pending(connection)
        identity = FileIdentity(str(path))
        yield Committer(connection, MachineClock(), identity, on_disk=True)


async def test_rows_can_be_read_before_they_are_committed(committer: Committer, path: Path) -> None:
    seen: list[list[str]] = []

    def read(rows: Sequence[Row]) -> int:
        seen.append(lanes_in(path))
        return len(rows)

    def read_early(group: list[WriterJob]) -> None:
        assert unit.has_much_to_read
        unit.prepare()
        assert not future.done()

    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    unit = RowsUnit(write_and_find, read, future)
    committer.run(unit, (), read_early)
    unit.settle()
    assert (await future, seen) == (MUCH_TO_READ + 1, [[]]), "with the lane of the deployment"
    assert len(lanes_in(path)) == MUCH_TO_READ


async def test_much_to_read_ends_a_group(committer: Committer, path: Path) -> None:
    loop = asyncio.get_running_loop()
    reading = RowsUnit(write_and_find, len, loop.create_future())
    before, after = (Unit(inserts(name), loop.create_future()) for name in ("before", "after"))
    waiting: Iterator[WriterJob] = iter([reading, after])
    done: list[object] = [*committer.run(before, waiting)]
    assert done == [before, reading]
    assert list(waiting) == [after]
    assert {"before", "0"} < set(lanes_in(path))


async def test_news_is_told_as_a_long_step_begins(committer: Committer) -> None:
    told: list[str] = []

    async def body(transaction: Transaction) -> None:
        told.append("short")
        await transaction.select("list_lanes", after="", limit=1)
        told.append("long")
        await transaction.select("complete_leased", **NOTHING_TO_COMPLETE)
        told.append("done")

    committer.connection.before_step = lambda: told.append("news")
    unit = Unit(body, asyncio.get_running_loop().create_future())
    committer.run(unit)
    assert (told, unit.failure) == (["short", "long", "news", "done"], None)


async def test_news_is_told_after_one_unit_at_the_latest(committer: Committer) -> None:
    told: list[str] = []
    loop = asyncio.get_running_loop()

    async def body(transaction: Transaction) -> None:
        loop.call_soon(told.append, "second")

    committer.news.loop = loop
    committer.news.add(lambda: told.append("news"))
    units = [Unit(each, loop.create_future()) for each in (inserts("a"), body)]
    committer.run(units[0], units[1:])
    await asyncio.sleep(0)
    assert told == ["news", "second"]


async def test_what_was_read_of_a_commit_that_fails_is_not_told(
    committer: Committer, path: Path
) -> None:
    def read_and_lose_the_file(group: list[WriterJob]) -> None:
        unit.prepare()
        path.unlink()

    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    unit = RowsUnit(write_and_find, len, future)
    committer.run(unit, (), read_and_lose_the_file)
    unit.settle()
    with pytest.raises(DatabaseGone):
        await future


async def test_rows_that_cannot_be_read_are_reported(store: SqliteStore) -> None:
    def read(rows: Sequence[Row]) -> int:
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        await store.execute_and_read("list_lanes", read, after="", limit=1)
    assert await store.transact(inserts("a")) == "a"


async def test_a_unit_whose_caller_gave_up_is_not_run(store: SqliteStore, path: Path) -> None:
    go, held = await hold_the_writer(store)
    waiting = asyncio.create_task(store.transact(inserts("a")))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    go.set()
    await held
    assert lanes_in(path) == []


async def test_a_unit_that_awaits_something_else_is_refused(store: SqliteStore, path: Path) -> None:
    async def body(transaction: Transaction) -> None:
        await transaction.save(Changes(inserts=(a_lane("a"),)))
        await asyncio.sleep(0)

    with pytest.raises(Bug, match="other than its transaction"):
        await store.transact(body)
    assert lanes_in(path) == []


async def test_closing_finishes_what_is_queued(path: Path) -> None:
    store = SqliteStore(str(path))
    await store.open()
    waiting = [asyncio.create_task(store.transact(inserts(str(n)))) for n in range(200)]
    await asyncio.sleep(0)
    await store.close()
    assert len(await asyncio.gather(*waiting)) == 200


async def test_readers_see_one_snapshot(store: SqliteStore) -> None:
    written = threading.Event()
    first_look = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def body(reader: Reader) -> list[int]:
        counts = [len(await reader.get(Lane, [("a",)]))]
        loop.call_soon_threadsafe(first_look.set)
        written.wait()
        return [*counts, len(await reader.get(Lane, [("a",)]))]

    reading = asyncio.create_task(store.read(body))
    await first_look.wait()
    await save(store, Changes(inserts=(a_lane("a"),)))
    written.set()
    assert await reading == [0, 0]


async def test_a_file_that_stays_locked_is_reported(path: Path) -> None:
    store = SqliteStore(str(path), busy_timeout_ms=1)
    await store.open()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin immediate")
        with pytest.raises(Transport, match="locked"):
            await store.transact(inserts("a"))
        other.execute("rollback")
    assert await store.transact(inserts("a")) == "a"
    await store.close()


async def test_memory_is_private_to_its_store() -> None:
    one, other = SqliteStore(":memory:"), SqliteStore(":memory:")
    await asyncio.gather(one.open(), other.open())
    await asyncio.gather(one.transact(inserts("a")), other.transact(inserts("a")))
    await asyncio.gather(one.close(), other.close())


async def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(
        Unavailable, match=f"a.db cannot be opened: there is no directory {missing}"
    ):
        await SqliteStore(str(missing / "a.db")).open()
    with pytest.raises(Unavailable, match="it is a directory; name a file"):
        await SqliteStore(str(tmp_path)).open()


@pytest.mark.parametrize("set_up", [True, False])
async def test_a_file_system_that_is_read_only_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, set_up: bool
) -> None:
    store = SqliteStore(str(path))
    await store.open()
    await store.close()
    real = os.statvfs(path.parent)

    def refuse(*args: object, **rest: object) -> sqlite3.Connection:
        error = sqlite3.OperationalError("unable to open database file")
        error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
        raise error

    monkeypatch.setattr(sqlite3, "connect", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=real.f_flag | 1))
    with pytest.raises(Unavailable, match=f"{path} cannot be opened: .* read-only file system"):
        await SqliteStore(str(path), set_up=set_up).open()


async def test_a_full_disk_is_one_outage_though_readers_are_answered(
    store: SqliteStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def full(transaction: Transaction) -> None:
        await save_lane(transaction)
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    async def look(reader: Reader) -> None:
        await reader.get(Lane, [("a",)])

    async def save_lane(transaction: Transaction) -> None:
        await transaction.save(Changes(inserts=(a_lane("a"),)))

    for _ in range(3):
        with pytest.raises(Transport, match="full"):
            await store.transact(full)
        await store.read(look)
        # As a claim that finds nothing does.
        await store.transact(look)
    assert [each.getMessage().partition(": ")[0] for each in caplog.records] == [
        f"the database in {path} does not answer"
    ]
    await store.transact(save_lane)
    assert [each.getMessage().partition(",")[0] for each in caplog.records][1:] == [
        f"the database in {path} answers again"
    ]


KEEPS_THE_FILE_LOCKED = """
import sqlite3, sys, threading
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("begin immediate")
print("locked", flush=True)
threading.Event().wait()
"""


async def test_a_file_that_another_process_keeps_locked_is_one_outage(
    store: SqliteStore,
    path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "LOCKED_S", 0.05)
    process = start_python(KEEPS_THE_FILE_LOCKED, path)
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "locked\n"
        waiting = [asyncio.create_task(store.transact(inserts(name))) for name in "abc"]
        async with asyncio.timeout(20):
            for _ in itertools.count():
                if caplog.records:
                    break
                await asyncio.sleep(0)
    finally:
        process.kill()
        process.communicate()
    assert await asyncio.gather(*waiting) == ["a", "b", "c"]
    away, back = [each.getMessage() for each in caplog.records]
    assert away == f"the database in {path} does not answer: another process keeps the file locked"
    assert back.startswith(f"the database in {path} answers again, after ")


async def test_a_file_that_is_no_database_is_refused(foreign_file: Path) -> None:
    with pytest.raises(Transport, match="not a database"):
        await SqliteStore(str(foreign_file)).open()


WRITES_UNTIL_THE_DISK_IS_FULL = """
import asyncio, resource, signal, sys
from flowfabric.core.decisions import Changes
from flowfabric.errors import Transport
from flowfabric.store.sqlite.store import SqliteStore
from tests.store.records import an_execution, save

async def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = SqliteStore(sys.argv[1])
    await store.open()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))
    kept = []
    for _ in range(100):
        execution = an_execution(payload=bytes(100_000))
        try:
            await save(store, Changes(inserts=(execution,)))
        except Transport:
            break
        kept.append(execution.execution_id[-36:])
    else:
        raise SystemExit("the disk never became full")
    print(*kept)

asyncio.run(main())
"""


def test_a_full_disk_fails_the_write_and_keeps_what_was_there(path: Path) -> None:
    process = start_python(WRITES_UNTIL_THE_DISK_IS_FULL, path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    kept = output.split()
    assert kept
    stored = change_sqlite(path, "select execution_id from execution order by 1")
    assert [name for (name,) in stored] == sorted(kept)
    assert change_sqlite(path, "pragma integrity_check") == [("ok",)]
