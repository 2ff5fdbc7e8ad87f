"""Being told that somebody writes to the file."""

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowfabric.core.decisions import Changes
from flowfabric.store.sqlite.store import SqliteStore
from flowfabric.store.sqlite.watcher import FileChanges
from tests.store.records import a_lane, save

PATIENCE_S = 30.0

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of writes")


@linux_only
async def test_a_write_is_told_once_and_a_quiet_file_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with FileChanges(str(file)) as changes:
        assert changes.is_watching
        file.write_text("a")
        assert await changes.wait(PATIENCE_S)
        assert not await changes.wait(0)
        waiting = asyncio.create_task(changes.wait(PATIENCE_S))
        await asyncio.sleep(0)
        file.write_text("b")
        assert await waiting
    assert not changes.is_watching


@linux_only
async def test_writes_interrupt_nobody_who_does_not_wait_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, reads, read = tmp_path / "file", list[int](), os.read

    def counted(descriptor: int, size: int) -> bytes:
        reads.append(descriptor)
        return read(descriptor, size)

    file.touch()
    monkeypatch.setattr(os, "read", counted)
    with FileChanges(str(file)) as changes:
        for _ in range(100):
            file.write_text("a")
            await asyncio.sleep(0)
        assert reads == []
        assert await changes.wait(PATIENCE_S)
        assert len(reads) == 1


async def test_a_file_that_is_not_there_tells_nothing_and_costs_the_time_given(
    tmp_path: Path,
) -> None:
    with FileChanges(str(tmp_path / "missing")) as changes:
        assert not changes.is_watching
        assert not await changes.wait(0)


@linux_only
async def test_a_file_that_was_deleted_tells_nothing_more(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with FileChanges(str(file)) as changes:
        file.unlink()
        assert await changes.wait(PATIENCE_S)
        assert not changes.is_watching
        file.write_text("another")
        assert not await changes.wait(0)


@linux_only
async def test_without_descriptors_nothing_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with FileChanges(str(file)) as changes:
            told = changes.is_watching
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not told


@pytest.fixture
async def stores(path: Path) -> AsyncIterator[tuple[SqliteStore, SqliteStore]]:
    """Ours and theirs, on one file."""
    ours, theirs = SqliteStore(str(path)), SqliteStore(str(path))
    await ours.open()
    await theirs.open()
    yield ours, theirs
    await theirs.close()
    await ours.close()


@linux_only
async def test_the_log_beside_the_file_tells_of_commits_by_others(
    path: Path, stores: tuple[SqliteStore, SqliteStore]
) -> None:
    _, theirs = stores
    with FileChanges(f"{path}-wal") as changes:
        assert changes.is_watching
        await save(theirs, Changes(inserts=(a_lane("other"),)))
        assert await changes.wait(PATIENCE_S)


async def test_a_commit_by_another_connection_wakes_whoever_has_waited_long(
    stores: tuple[SqliteStore, SqliteStore],
) -> None:
    ours, theirs = stores
    with ours.hints(["anything"]) as hints:
        assert not await hints.wait(0.1)
        waiting = asyncio.create_task(hints.wait(PATIENCE_S))
        await save(theirs, Changes(inserts=(a_lane("other"),)))
        assert await waiting
