"""Claims of work that not every worker can do: ten sets of capabilities, four workers each."""

import asyncio
import time

from benchmarks.bench import Bench
from benchmarks.report import figures
from flowfabric import Engine, connect
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import ClaimGrant
from flowfabric.engine.executions import Completion
from tests.postgres import server_version

SETS = 10
WORKERS_PER_SET = 4
EXECUTIONS = 20_000
GRANTED = 2_000
CREATE_BATCH = 1_000
KIND = "bench"


async def measure(bench: Bench) -> None:
    rows: list[tuple[str, str]] = []
    async with bench.database() as url, await connect(url) as engine:
        rows += await routed(engine, f"Postgres {await server_version(url)}")
    async with await connect(f"sqlite:///{bench.file('routing')}") as engine:
        rows += await routed(engine, "SQLite")
    figures(f"Capability routing: {SETS} sets, {WORKERS_PER_SET} workers each", rows)


async def routed(engine: Engine, store: str) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for batch in (1, 10, 100):
        await create(engine, EXECUTIONS)
        rate = await race(engine, batch)
        what = f"{store}: claim + complete, batches of {batch}"
        rows.append((what, f"{rate:,.0f} /s"))
    for number, name in crew():
        await engine.register_worker(
            ["default"],
            worker_id="bench",
            worker_instance_id=name,
            capabilities=capabilities(number),
            liveness_ttl_ms=60_000,
        )
    await create(engine, GRANTED)
    started = time.perf_counter()
    counts = await asyncio.gather(*(take_grants(engine, *each) for each in crew()))
    assert sum(counts) == GRANTED
    rate = GRANTED / (time.perf_counter() - started)
    rows.append((f"{store}: grants asked for, and claimed, one by one", f"{rate:,.0f} /s"))
    return rows


def crew() -> list[tuple[int, str]]:
    """The set of capabilities and the name of each worker."""
    return [(each, f"w-{each}-{n}") for each in range(SETS) for n in range(WORKERS_PER_SET)]


def capabilities(number: int) -> list[str]:
    return ["linux", f"set-{number}"]


async def create(engine: Engine, count: int) -> None:
    """Evenly over the sets."""
    policies = [
        {"routing_requirements": {"required_capabilities": capabilities(n)}} for n in range(SETS)
    ]
    for start in range(0, count, CREATE_BATCH):
        await engine.create_executions(
            [
                NewExecution(execution_kind=KIND, policy=policies[(start + n) % SETS])
                for n in range(min(CREATE_BATCH, count - start))
            ]
        )


async def race(engine: Engine, batch: int) -> float:
    """Executions per second of all workers together."""
    started = time.perf_counter()
    done = await asyncio.gather(*(work(engine, *each, batch) for each in crew()))
    assert sum(done) == EXECUTIONS
    return EXECUTIONS / (time.perf_counter() - started)


async def work(engine: Engine, number: int, name: str, batch: int) -> int:
    offered = capabilities(number)
    done = 0
    while True:
        claimed = await engine.claim_many(
            ["default"],
            limit=batch,
            worker_id="bench",
            worker_instance_id=name,
            capabilities=offered,
        )
        if not claimed:
            return done
        await engine.complete_many([Completion(handle=each.handle) for each in claimed])
        done += len(claimed)


async def take_grants(engine: Engine, number: int, name: str) -> int:
    """Ask for a grant and turn it into a lease, until there is none left."""
    taken = 0
    while True:
        grant = await engine.claim_for_worker(
            ["default"],
            worker_id="bench",
            worker_instance_id=name,
            capabilities=capabilities(number),
        )
        if grant is None:
            return taken
        assert isinstance(grant, ClaimGrant)
        claimed = await engine.claim_execution(
            grant.execution_id,
            worker_id="bench",
            worker_instance_id=name,
            grant_key=grant.grant_key,
        )
        await engine.complete(claimed.handle)
        taken += 1
