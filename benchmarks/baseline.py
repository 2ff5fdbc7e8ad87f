"""Figures to stay ahead of: those of 16 November 2026, of one row per execution.

As CPU, and in floors of the same run: a rate by the floor's rate in batches of a hundred, a
latency by the time the floor takes for one job alone. CPU holds on a busy machine; floors hold
on other machines, if those are quiet.
"""

from typing import NamedTuple


class Figure(NamedTuple):
    """Of one job."""

    python_us: float
    postgres_us: float
    floors: float

    @property
    def cpu_us(self) -> float:
        return self.python_us + self.postgres_us


WORKFLOW = Figure(python_us=790, postgres_us=320, floors=0.021)
"""A task of three steps, drained."""
HOP = Figure(python_us=2_900, postgres_us=2_800, floors=8.1)
"""From the end of a parent to the claim of its child."""
SIGNAL = Figure(python_us=3_450, postgres_us=2_450, floors=6.7)
"""From a signal to the line of the handler after its wait."""
