"""`make bench`: every figure of this project, from one run against one Postgres.

    make bench                                     everything, with databases grown a little
    make bench-grown                               drains of databases grown to their full size
    python -m benchmarks costs latency             some sections

Read ratios and costs: what is compared runs in turns on the same machine, so whatever else
the machine is doing hits both. `FLOWFABRIC_TEST_POSTGRES_URL` names another server to measure;
its CPU can be read only on this machine.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from benchmarks import (
    budgets,
    costs,
    executions,
    flows,
    grown,
    latency,
    limits,
    processes,
    report,
    retention,
    routing,
    sdk,
    server,
    streams,
    suspension,
)
from benchmarks.bench import Bench, Scale, wear_in
from benchmarks.meter import busy_share
from benchmarks.peer import Peer
from flowfabric.cli.running import exempt_imports_from_collection
from tests.postgres import start_server

SECTIONS: dict[str, Callable[[Bench], Awaitable[None]]] = {
    "costs": costs.measure,
    "executions": executions.measure,
    "latency": latency.measure,
    "processes": processes.measure,
    "grown": grown.measure,
    "worker": sdk.measure,
    "flows": flows.measure,
    "suspension": suspension.measure,
    "streams": streams.measure,
    "budgets": budgets.measure,
    "limits": limits.measure,
    "retention": retention.measure,
    "routing": routing.measure,
    "server": server.measure,
}


async def main(sections: Sequence[str], scale: Scale) -> None:
    postgres = start_server(durable=True)
    goals: list[report.Goal] = []
    try:
        busy = [await busy_share()]
        await wear_in(postgres.url)
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(postgres.url, Path(directory), await Peer.ready(), scale, goals)
            for name in sections:
                report.console.rule(name)
                await SECTIONS[name](bench)
                busy.append(await busy_share())
    finally:
        postgres.stop()
        # Those of the sections so far, if one failed or the run was interrupted.
        report.goals(goals)
    report.busy(max(busy))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("sections", nargs="*", help=f"any of {', '.join(SECTIONS)}")
    parser.add_argument("--ended", type=int, default=200_000, help="ended executions behind")
    parser.add_argument("--others", type=int, default=100_000, help="waiting ones in front")
    chosen = parser.parse_args()
    if unknown := set(chosen.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return chosen


if __name__ == "__main__":
    asked = options()
    # As the command line of the worker does.
    exempt_imports_from_collection()
    asyncio.run(main(asked.sections or list(SECTIONS), Scale(asked.ended, asked.others)))
