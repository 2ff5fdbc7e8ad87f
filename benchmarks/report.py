"""How figures are printed: ours, the floor, and their ratio, all from one run."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.meter import Cost

console = Console()


def rates(title: str, rows: Sequence[tuple[str, float, float]]) -> None:
    """Operations per second beside the floor's."""
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    for column in ("floor /s", "FlowFabric /s", "ratio"):
        table.add_column(column, justify="right")
    for what, floor, ours in rows:
        table.add_row(what, f"{floor:,.0f}", f"{ours:,.0f}", f"{ours / floor:.2f}")
    console.print(table)


def costs(title: str, rows: Sequence[tuple[str, Cost]]) -> None:
    """CPU and WAL per job, and the rate."""
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    for column in ("Python µs", "Postgres µs", "WAL bytes", "jobs/s"):
        table.add_column(column, justify="right")
    for what, cost in rows:
        table.add_row(
            what,
            f"{cost.each(cost.python_us):.1f}",
            f"{cost.each(cost.postgres_us):.1f}",
            f"{cost.each(cost.wal_bytes):,.0f}",
            f"{cost.rate:,.0f}",
        )
    console.print(table)


def figures(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Anything else that was measured."""
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    for what, value in rows:
        table.add_row(what, value)
    console.print(table)


def percentile(samples: Sequence[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
