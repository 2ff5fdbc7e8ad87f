"""Flows: what a node costs to build, run and cancel by the size of its flow; wide joins."""

import time
import uuid
from collections.abc import Awaitable
from typing import TypedDict, TypeVar

from benchmarks.bench import Bench
from benchmarks.report import figures
from flowfabric import Engine, connect
from flowfabric.core.creation import NewExecution
from flowfabric.core.flow_endings import WaitIndefinite
from flowfabric.core.flow_joins import Dependency, Join
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.executions import Completion

T = TypeVar("T")

LANE = "flows"
KIND = "bench"
BUILD_BATCH = 1_000
CLAIM_BATCH = 500
WIDTH = 25


class Worker(TypedDict):
    worker_id: str
    worker_instance_id: str


WORKER: Worker = {"worker_id": "bench", "worker_instance_id": "bench-1"}
NODE_COUNTS = (100, 5_000)
FAN_IN = 5_000


async def measure(bench: Bench) -> None:
    async with bench.database() as url, await connect(url) as engine:
        await cost_by_size("Postgres", engine, NODE_COUNTS)
        await fan_in("Postgres", engine, FAN_IN)
    async with await connect(f"sqlite:///{bench.file('flows')}") as engine:
        await cost_by_size("SQLite", engine, NODE_COUNTS)
        await fan_in("SQLite", engine, FAN_IN)


async def cost_by_size(store: str, engine: Engine, sizes: tuple[int, ...]) -> None:
    """Milliseconds per node: each node waits for one or two nodes of the layer before."""
    rows: list[tuple[str, str]] = []
    base: dict[str, float] = {}
    for size in sizes:
        build_ms, flow_id = await timed(build_layers(engine, size))
        run_ms, _ = await timed(run_all(engine, size))
        assert await state_of(engine, flow_id) == "completed"
        doomed = await build_layers(engine, size)
        cancel_ms, _ = await timed(engine.cancel_flow(doomed, wait=WaitIndefinite()))
        await dispatch_all(engine)
        for what, total_ms in (("build", build_ms), ("run", run_ms), ("cancel", cancel_ms)):
            each_ms = total_ms / size
            base.setdefault(what, each_ms)
            rows.append(
                (f"{what}, {size:,} nodes", f"{each_ms:.3f} ms/node ({each_ms / base[what]:.2f}x)")
            )
    figures(f"Flows by size on {store}", rows)


async def fan_in(store: str, engine: Engine, width: int) -> None:
    """One execution that waits for very many."""
    flow_id = await new_flow(engine)
    upstreams = [engine.new_member_id(flow_id) for _ in range(width)]
    last = engine.new_member_id(flow_id)

    async def build() -> None:
        for start in range(0, width, BUILD_BATCH):
            await engine.add_dependencies(
                flow_id, members=[member(each) for each in upstreams[start : start + BUILD_BATCH]]
            )
        join = Join(
            downstream_execution_id=last,
            dependencies=[Dependency(upstream_execution_id=each) for each in upstreams],
        )
        await engine.add_dependencies(flow_id, [join], members=[member(last)])

    build_ms, _ = await timed(build())
    complete_ms, _ = await timed(complete_ready(engine, width))
    dispatch_ms, _ = await timed(dispatch_all(engine))
    assert await complete_ready(engine, 1) == 1
    await dispatch_all(engine)
    figures(
        f"Fan-in of {width:,} on {store}",
        [
            ("build", f"{build_ms:,.0f} ms"),
            ("claim and complete the upstreams", f"{complete_ms:,.0f} ms"),
            ("tell the one that waits", f"{dispatch_ms:,.0f} ms"),
        ],
    )


# Building and running


async def build_layers(engine: Engine, size: int) -> str:
    """Layers of `WIDTH` nodes; each waits for its own column and the one beside it."""
    flow_id = await new_flow(engine)
    nodes = [engine.new_member_id(flow_id) for _ in range(size)]
    for start in range(0, size, BUILD_BATCH):
        batch = range(start, min(start + BUILD_BATCH, size))
        joins = [
            Join(
                downstream_execution_id=nodes[place],
                dependencies=[
                    Dependency(upstream_execution_id=nodes[above])
                    for above in {place - WIDTH, place - WIDTH + (-1 if place % WIDTH else 0)}
                ],
            )
            for place in batch
            if place >= WIDTH
        ]
        await engine.add_dependencies(
            flow_id, joins, members=[member(nodes[place]) for place in batch]
        )
    return flow_id


async def run_all(engine: Engine, size: int) -> None:
    done = 0
    while done < size:
        done += await complete_ready(engine, CLAIM_BATCH)
        await dispatch_all(engine)


async def complete_ready(engine: Engine, limit: int) -> int:
    """Claim and complete up to `limit`, in batches."""
    done = 0
    while done < limit:
        claimed = await engine.claim_many([LANE], limit=min(CLAIM_BATCH, limit - done), **WORKER)
        if not claimed:
            break
        await engine.complete_many([Completion(handle=each.handle) for each in claimed])
        done += len(claimed)
    return done


async def dispatch_all(engine: Engine) -> None:
    while (await engine.dispatch_completions()).acted:
        pass


async def new_flow(engine: Engine) -> str:
    flow_id = str(uuid.uuid4())
    await engine.create_flow(flow_id, flow_kind=KIND)
    return flow_id


async def state_of(engine: Engine, flow_id: str) -> str:
    flow = await engine.describe_flow(flow_id)
    assert flow is not None
    return flow.state


def member(execution_id: ExecutionId) -> NewExecution:
    return NewExecution(execution_kind=KIND, lane_id=LANE, execution_id=execution_id)


async def timed(work: Awaitable[T]) -> tuple[float, T]:
    """How long it took in milliseconds, and what it answered."""
    started = time.perf_counter()
    answer = await work
    return (time.perf_counter() - started) * 1_000, answer
