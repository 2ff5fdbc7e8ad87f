"""How figures are printed: ours, what they stand beside, and their ratio, all from one run."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.baseline import Figure
from benchmarks.meter import Cost

console = Console(width=110)

BUSY_MAX = 0.1


class Goal(NamedTuple):
    """A figure the project has promised."""

    what: str
    measured: float
    limit: float
    met: bool
    side: str


def rates(title: str, rows: Sequence[tuple[str, float, float]]) -> None:
    """Operations per second beside the floor's."""
    table = _table(title, "floor /s", "FlowFabric /s", "ratio")
    for what, floor, ours in rows:
        table.add_row(what, f"{floor:,.0f}", f"{ours:,.0f}", f"{ours / floor:.2f}")
    console.print(table)


def costs(title: str, rows: Sequence[tuple[str, Cost, float | None]], beside: str) -> None:
    """CPU and WAL per job, the rate, and its ratio to that of what it stands beside."""
    table = _table(title, "Python µs", "Postgres µs", "WAL bytes", "jobs/s", beside)
    for what, cost, ratio in rows:
        table.add_row(
            what,
            f"{cost.each(cost.python_us):.1f}",
            f"{cost.each(cost.postgres_us):.1f}",
            f"{cost.each(cost.wal_bytes):,.0f}",
            f"{cost.rate:,.0f}",
            "" if ratio is None else f"{ratio:.2f}",
        )
    console.print(table)


def compared(title: str, rows: Sequence[tuple[str, str, Figure, Figure]]) -> None:
    """Beside the baseline, which is in brackets."""
    table = _table(
        title, "measured", "floors", "Python µs", "Postgres µs", "floors ratio", "CPU ratio"
    )
    for what, measured, now, then in rows:
        table.add_row(
            what,
            measured,
            f"{now.floors:.3g} ({then.floors:.3g})",
            f"{now.python_us:,.0f} ({then.python_us:,.0f})",
            f"{now.postgres_us:,.0f} ({then.postgres_us:,.0f})",
            f"{now.floors / then.floors:.2f}",
            f"{now.cpu_us / then.cpu_us:.2f}",
        )
    console.print(table)


def figures(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Anything else that was measured."""
    table = _table(title, "measured")
    for what, value in rows:
        table.add_row(what, value)
    console.print(table)


def goals(rows: Sequence[Goal]) -> None:
    """What was promised, and whether this run kept it."""
    if not rows:
        return
    table = _table("Goals", "measured", "wanted", "met")
    for goal in rows:
        wanted = f"{goal.side} {goal.limit:,g}"
        table.add_row(goal.what, f"{goal.measured:,.2f}", wanted, "yes" if goal.met else "NO")
    console.print(table)


def busy(share: float) -> None:
    """Warn of rates, latencies and floors that other processes have spoilt."""
    if share > BUSY_MAX:
        console.print(
            f"Between sections, other processes kept up to {share:.0%} of the machine busy. CPU and"
            " WAL hold; rates, latencies and ratios of them do not: run again when it is quiet."
        )


def percentile(samples: Sequence[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median(samples: Sequence[float]) -> float:
    return percentile(samples, 0.5)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    for column in columns:
        table.add_column(column, justify="right")
    return table
