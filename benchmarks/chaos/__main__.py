"""`make chaos`: faults under load, then an audit of what became of every job.

Two worker processes serve a steady stream of jobs on a durable Postgres while one
thing goes wrong. A scenario passes when every job has completed and no worker has
exited that was not killed; where workers are killed, some job must have been tried
again, and where the way to the server goes wrong, work must at least have paused, or the
fault has hit nothing. Lost are jobs that were acknowledged and gone afterwards, until
they were submitted again. Time to recover is the longest pause between two completions
from the fault on, or how much longer than the work itself the slowest job took,
whichever is more; where the way to the server goes wrong it may be the lease and five
seconds. Two holders is the longest time for which two processes both had a job, at most
a second; in a fence there must be none. Name scenarios to play only those.
"""

import asyncio
import logging
import sys

from rich.live import Live
from rich.table import Table

from benchmarks.chaos import deleted, failover, faults, network, strangers
from benchmarks.chaos.arena import Fault
from benchmarks.chaos.verdict import Verdict, play, row_of
from benchmarks.report import console
from tests.postgres import start_server

FAULTS: dict[str, Fault] = {**faults.SCENARIOS, **network.SCENARIOS, **strangers.SCENARIOS}
ON_THEIR_OWN = {failover.NAME: failover.play, deleted.NAME: deleted.play}
"""Scenarios that bring their own database."""
SCENARIOS = (*FAULTS, *ON_THEIR_OWN)


COLUMNS = (
    "scenario",
    "jobs",
    "recovered",
    "lost",
    "time to recover",
    "tried again",
    "start p50",
    "two holders",
    "in a fence",
    "verdict",
)


async def main(names: list[str]) -> bool:
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        sys.exit(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    # That the database was away is the point here.
    logging.getLogger("flowfabric").setLevel(logging.CRITICAL)
    table = Table(title="Faults under load", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("scenario", "verdict") else "right")
    verdicts: list[Verdict] = []
    server = start_server(durable=True)
    try:
        with Live(table, console=console):
            for name in names or SCENARIOS:
                if name in ON_THEIR_OWN:
                    verdicts.append(await ON_THEIR_OWN[name]())
                else:
                    verdicts.append(await play(server, name, FAULTS[name]))
                table.add_row(*row_of(verdicts[-1]))
    finally:
        server.stop()
    return all(verdict.passed for verdict in verdicts)


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main(sys.argv[1:])) else 1)
