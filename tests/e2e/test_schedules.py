"""Two scheduler processes, days on which clocks change, every due time once."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from flowfabric import Engine, connect
from flowfabric.core.schedules import ScheduleDefinition
from flowfabric.engine.reads import ExecutionFilter
from tests.e2e import programs
from tests.e2e.schedule_process import FileClock
from tests.properties.slow_cron import slow_truth

ZONES = ("Europe/Rome", "America/New_York", "Australia/Lord_Howe", "UTC")
EXPRESSIONS = ("30 2 * * *", "15 1,2,3 * * *", "10 */6 * * 1-5", "45 * * * *", "0,30 2 * * 0")
DAYS = 9
MINUTE_MS = 60_000

# Each window holds a week and the days on which clocks change somewhere.
WINDOWS = {
    "New York forward": "2026-03-06",
    "Rome forward, Lord Howe back": "2026-03-28",
    "Lord Howe forward": "2026-09-28",
    "Rome back, New York back": "2026-10-24",
}


class Scheduler:
    """A process that fires what is due each time it is asked to."""

    def __init__(self, process: programs.Program) -> None:
        self.process = process

    @classmethod
    async def start(cls, url: str, clock_path: Path) -> "Scheduler":
        scheduler = cls(await programs.start("tests.e2e.schedule_process", url, str(clock_path)))
        assert await scheduler.answer() == "ready"
        return scheduler

    async def answer(self) -> str:
        return (await self.process.stdout.readline()).decode().strip()

    def go(self) -> None:
        self.process.stdin.write(b"go\n")

    async def kill(self) -> None:
        self.process.kill()
        await self.process.communicate()


@pytest.fixture
async def schedulers(store_url: str, tmp_path: Path) -> AsyncIterator[list[Scheduler]]:
    """Two processes; whatever is in the list at the end is ended."""
    started: list[Scheduler] = []
    yield started
    for scheduler in started:
        await scheduler.kill()


async def define_schedules(engine: Engine) -> dict[str, tuple[str, str]]:
    defined = {f"{zone} {cron}": (zone, cron) for zone in ZONES for cron in EXPRESSIONS}
    for name, (zone, cron) in defined.items():
        await engine.upsert_schedule(
            ScheduleDefinition(
                schedule_id=name, execution_kind="work", cron=cron, timezone=zone, catch_up="all"
            )
        )
    return defined


async def fired(engine: Engine) -> Counter[tuple[str, int]]:
    """How often each due time of each schedule has created an execution."""
    counted: Counter[tuple[str, int]] = Counter()
    cursor: str | None = None
    while True:
        page = await engine.find_executions(ExecutionFilter(), cursor=cursor, limit=1_000)
        counted.update(
            (each.tags["flowfabric.schedule"], int(each.tags["flowfabric.due_at_ms"]))
            for each in page.executions
        )
        cursor = page.next_cursor
        if cursor is None:
            return counted


@pytest.mark.parametrize("window", WINDOWS)
async def test_every_due_time_fires_exactly_once_over_days_when_clocks_change(
    store_url: str, tmp_path: Path, schedulers: list[Scheduler], window: str
) -> None:
    """Both look at the same moments; one is killed while it fires and another takes its place."""
    start = datetime.fromisoformat(WINDOWS[window]).replace(tzinfo=UTC)
    now_ms = round(start.timestamp()) * 1_000 - 1
    end_ms = now_ms + DAYS * 24 * 60 * MINUTE_MS
    clock = FileClock(tmp_path / "clock")
    clock.set_ms(now_ms)
    moments = random.Random(window)
    async with await connect(store_url, clock=clock) as engine:
        defined = await define_schedules(engine)
        schedulers += [await Scheduler.start(store_url, tmp_path / "clock") for _ in range(2)]
        rounds = 0
        while now_ms < end_ms:
            now_ms = min(end_ms, now_ms + moments.choice((20, 60, 150, 400, 700)) * MINUTE_MS)
            clock.set_ms(now_ms)
            for scheduler in schedulers:
                scheduler.go()
            rounds += 1
            if rounds == 20:
                await schedulers.pop(0).kill()
                schedulers.append(await Scheduler.start(store_url, tmp_path / "clock"))
                schedulers[-1].go()
            for scheduler in schedulers:
                assert (await scheduler.answer()).isdigit()
        expected = Counter(
            (name, due_ms)
            for name, (zone, cron) in defined.items()
            for due_ms in slow_truth(cron, ZoneInfo(zone), start, DAYS)
        )
        assert await fired(engine) == expected
        assert len(expected) > 20 * DAYS
