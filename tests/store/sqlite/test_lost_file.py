"""The file is deleted or replaced under processes that use it."""

import asyncio
import logging
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from flowfabric import App, Engine, WorkerSettings, connect
from flowfabric.core.creation import NewExecution
from flowfabric.errors import (
    DatabaseGone,
    HistoryChanged,
    OperationTimeout,
    SchemaTooOld,
    Transport,
    Unavailable,
)

REQUEST = NewExecution(execution_kind="work")


def contents(path: Path) -> bytes:
    return path.read_bytes()


def is_there(path: Path) -> bool:
    return path.exists()


def restore(path: Path, backup: bytes) -> None:
    path.write_bytes(backup)


@pytest.fixture
async def engine(path: Path) -> AsyncIterator[Engine]:
    async with await connect(f"sqlite:///{path}") as opened:
        await opened.create_execution(REQUEST)
        yield opened


async def test_nothing_is_acknowledged_into_a_deleted_file(engine: Engine, path: Path) -> None:
    os.unlink(path)

    with pytest.raises(Unavailable, match="was deleted while it was in use"):
        await engine.create_execution(REQUEST)
    with pytest.raises(Unavailable, match="was deleted while it was in use"):
        await engine.list_lanes()


async def test_a_deleted_file_is_not_made_anew_by_who_reads(engine: Engine, path: Path) -> None:
    os.unlink(path)
    answers = await asyncio.gather(*(engine.list_lanes() for _ in range(8)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {DatabaseGone}
    assert not is_there(path)


async def test_nor_into_one_that_was_replaced(engine: Engine, path: Path, tmp_path: Path) -> None:
    async with await connect(f"sqlite:///{tmp_path / 'other.db'}"):
        pass
    (tmp_path / "other.db").replace(path)

    with pytest.raises(Unavailable, match="was replaced while it was in use"):
        await engine.create_execution(REQUEST)
    with pytest.raises(Unavailable, match="was replaced while it was in use"):
        await engine.list_lanes()


@pytest.mark.parametrize("beside", ["-wal", "-shm"])
async def test_nor_when_only_the_log_beside_it_was_deleted(
    engine: Engine, path: Path, beside: str
) -> None:
    os.unlink(f"{path}{beside}")

    with pytest.raises(DatabaseGone, match=f"{path}{beside} was deleted while it was in use"):
        await engine.create_execution(REQUEST)
    with pytest.raises(DatabaseGone, match=f"{path}{beside} was deleted while it was in use"):
        await engine.list_lanes()


async def test_what_is_refused_is_not_stored(engine: Engine, path: Path) -> None:
    restore(path.with_suffix(".copy"), contents(path))
    os.replace(path.with_suffix(".copy"), path)
    for _ in range(3):
        with pytest.raises(DatabaseGone, match="was replaced while it was in use"):
            await engine.create_execution(REQUEST)

    # The copy finds the log of the file it was copied from, and what was committed there.
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("select count(*) from execution").fetchone() == (1,)


async def test_a_file_that_is_put_back_serves_again(engine: Engine, path: Path) -> None:
    os.rename(path, path.with_suffix(".away"))
    with pytest.raises(Unavailable):
        await engine.create_execution(REQUEST)
    os.rename(path.with_suffix(".away"), path)

    await engine.create_execution(REQUEST)


async def test_a_transaction_of_the_user_is_not_joined_either(path: Path) -> None:
    app = App(f"sqlite:///{path}")

    @app.task
    def work() -> None: ...

    async with app:
        await app.submit(work)
        connection = sqlite3.connect(path)
        os.unlink(path)
        connection.execute("begin")
        with pytest.raises(Unavailable, match="was deleted"):
            await app.submit(work, connection=connection)
        connection.close()


async def test_whoever_waits_for_a_result_learns_of_it(path: Path) -> None:
    app = App(f"sqlite:///{path}")

    @app.task
    def work() -> None: ...

    async with app:
        run = await app.submit(work)
        os.unlink(path)
        with pytest.raises(Unavailable, match="was deleted"):
            await run.state()


async def test_a_wait_for_a_result_ends_with_the_file(path: Path) -> None:
    app = App(f"sqlite:///{path}")

    @app.task
    def work() -> None: ...

    async with app:
        run = await app.submit(work)
        waiting = asyncio.create_task(run.result(timeout="20s"))
        with pytest.raises(OperationTimeout):
            await run.result(timeout="1ms")
        os.unlink(path)
        with pytest.raises(DatabaseGone, match="was deleted"):
            await waiting


@pytest.mark.parametrize("busy", [False, True])
async def test_a_worker_says_so_once_and_stops(
    path: Path, caplog: pytest.LogCaptureFixture, busy: bool
) -> None:
    app = App(f"sqlite:///{path}")
    begun = asyncio.Event()

    @app.task
    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    @app.task
    async def nothing() -> None: ...

    settings = WorkerSettings(lanes=["default"], concurrency=1, lease_ttl="3s")
    async with app:
        worker = asyncio.create_task(app.run_worker(settings=settings, signals=False))
        await (await app.submit(nothing)).result("20s")
        if busy:
            await app.submit(work)
            await begun.wait()
        os.unlink(path)
        with pytest.raises(DatabaseGone, match="was deleted"):
            await asyncio.wait_for(worker, 20)
    told = [each.getMessage() for each in caplog.records if each.levelno > logging.WARNING]
    assert len(told) == 1, told
    assert told[0].startswith(f"the database in {path} is gone: sqlite: {path} was deleted")


async def test_looking_creates_no_file(path: Path) -> None:
    with pytest.raises(Transport):
        await connect(f"sqlite:///{path}", set_up=False)

    assert os.listdir(path.parent) == []


async def test_looking_leaves_a_file_that_is_not_ours_as_it_is(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("create table theirs (id integer)")
    connection.close()
    before = contents(path)

    with pytest.raises(SchemaTooOld):
        await connect(f"sqlite:///{path}", set_up=False)

    assert contents(path) == before
    assert os.listdir(path.parent) == [path.name]


async def test_looking_opens_a_file_that_is_up_to_date(engine: Engine, path: Path) -> None:
    async with await connect(f"sqlite:///{path}", set_up=False) as other:
        assert [each.lane_id for each in (await other.list_lanes()).lanes] == ["default"]


async def test_a_reader_of_events_is_told_of_a_restored_backup(path: Path) -> None:
    url = f"sqlite:///{path}"
    async with await connect(url) as engine:
        await claim_one(engine)
    backup = contents(path)
    async with await connect(url) as engine:
        await claim_one(engine)
        seen = (await engine.read_events()).cursor
    restore(path, backup)
    async with await connect(url) as engine:
        newer = [await claim_one(engine) for _ in range(3)]
        with pytest.raises(HistoryChanged) as told:
            await engine.read_events(after=seen)
        resumed = await engine.read_events(after=told.value.resume_after)

    assert set(newer) <= {event.execution_id for event in resumed.events}


async def claim_one(engine: Engine) -> str:
    created = await engine.create_execution(REQUEST)
    while (await engine.claim(worker_id="w", worker_instance_id="w-1")) is not None:
        pass
    return created.execution_id
