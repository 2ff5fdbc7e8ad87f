"""`bench`: what this machine and this database can do."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import click
from msgspec import Struct
from rich.text import Text

from flowfabric.cli import screen
from flowfabric.cli.options import Target, target_options
from flowfabric.cli.screen import fixed, right
from flowfabric.connection import connect
from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import Claimed
from flowfabric.engine.engine import Engine
from flowfabric.engine.executions import Completion

LANE: Final = "flowfabric.bench"
KIND: Final = "flowfabric.bench"
SINGLES: Final = 200
WORKER: Final = "bench"


class Measured(Struct, frozen=True):
    what: str
    count: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.count / self.seconds


@click.command("bench", short_help="Measure the engine for a few seconds.")
@click.option(
    "--count",
    default=5_000,
    show_default=True,
    type=click.IntRange(100, 1_000_000),
    help="Executions to create.",
)
@click.option(
    "--batch",
    default=100,
    show_default=True,
    type=click.IntRange(1, BATCH_MAX),
    help="Executions in a batch.",
)
@target_options
def bench(target: Target, count: int, batch: int) -> None:
    """Measure the engine for a few seconds: create, claim and complete, in batches and singly.

    Uses a SQLite file of its own unless a database is named. There it uses a lane of its own,
    and what it leaves behind is removed as all ended executions are.
    """
    measured = asyncio.run(_measure(target, count, batch))
    if target.json:
        rows = [
            {"what": m.what, "count": m.count, "seconds": m.seconds, "per_second": m.per_second}
            for m in measured
        ]
        screen.emit({"batch": batch, "measured": rows})
        return
    rows_shown = [
        (m.what, f"{m.count}", f"{m.seconds:.2f}s", f"{m.per_second:,.0f}/s") for m in measured
    ]
    screen.out().print(
        screen.table([fixed(""), right("COUNT"), right("TOOK"), right("RATE")], rows_shown)
    )


@asynccontextmanager
async def _engine(target: Target) -> AsyncIterator[Engine]:
    if target.url is not None or target.app is not None:
        async with await target.open() as engine:
            yield engine
        return
    with tempfile.TemporaryDirectory(prefix="flowfabric-bench-") as folder:
        async with await connect(f"sqlite:///{Path(folder) / 'bench.db'}") as engine:
            yield engine


async def _measure(target: Target, count: int, batch: int) -> list[Measured]:
    async with _engine(target) as engine:
        if not target.json:
            screen.err().print(Text(f"{engine.backend_label()}, batches of {batch}", style="dim"))
        with screen.err().status("Measuring …"):
            return [
                await _create(engine, count, batch),
                await _drain(engine, count, batch),
                await _one_by_one(engine),
            ]


async def _create(engine: Engine, count: int, batch: int) -> Measured:
    start = time.perf_counter()
    for done in range(0, count, batch):
        size = min(batch, count - done)
        await engine.create_executions([_new() for _ in range(size)])
    return Measured("create", count, time.perf_counter() - start)


async def _drain(engine: Engine, count: int, batch: int) -> Measured:
    start = time.perf_counter()
    done = 0
    while done < count:
        claimed = await _claim(engine, batch)
        if not claimed:
            break
        await engine.complete_many(
            [Completion(handle=each.handle, result=b"{}") for each in claimed]
        )
        done += len(claimed)
    return Measured("claim and complete", done, time.perf_counter() - start)


async def _one_by_one(engine: Engine) -> Measured:
    start = time.perf_counter()
    for _ in range(SINGLES):
        await engine.create_execution(_new())
        (claimed,) = await _claim(engine, 1)
        await engine.complete(claimed.handle, b"{}")
    return Measured("whole lives, one by one", SINGLES, time.perf_counter() - start)


async def _claim(engine: Engine, limit: int) -> Sequence[Claimed]:
    return await engine.claim_many(
        [LANE], limit=limit, kinds=[KIND], worker_id=WORKER, worker_instance_id=WORKER
    )


def _new() -> NewExecution:
    return NewExecution(execution_kind=KIND, lane_id=LANE, input_payload=b"{}")
