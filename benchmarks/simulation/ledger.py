"""What the simulated handlers have done, and whether they were allowed to.

A handler says when it begins and before each effect. Two things are checked on the
spot: an effect never runs once its step is stored, and never after another process
has begun the same execution. A handler that an operator cancelled learns of it a
little late, so the second does not apply to what an operator touched.
"""

from collections import defaultdict
from contextvars import ContextVar
from dataclasses import dataclass, field

from benchmarks.simulation.link import Link
from benchmarks.simulation.virtual import VirtualClock
from flowfabric import Engine

HERE: ContextVar[Link] = ContextVar("here")
"""The link of the process that the running code belongs to."""


@dataclass(frozen=True)
class Performance:
    """One run of a handler."""

    execution_id: str
    number: int


@dataclass
class Ledger:
    """Effects and violations of one world."""

    clock: VirtualClock
    observer: Engine
    """Sees the store as it is: its words are not part of the simulation."""
    effects: int = 0
    performances: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    touched: set[str] = field(default_factory=set)
    """Executions that an operator cancelled or replayed."""
    violations: list[str] = field(default_factory=list)

    def begin(self, execution_id: str) -> Performance:
        self.performances[execution_id] += 1
        return Performance(execution_id, self.performances[execution_id])

    async def act(self, performance: Performance, name: str, value: int) -> int:
        """An effect of a step called `name`."""
        await HERE.get().survive()
        execution_id = performance.execution_id
        self.effects += 1
        steps = await self.observer.list_steps(execution_id)
        stored = {step.step_key.partition("@")[0] for step in steps}
        if name in stored:
            self.report(f"{execution_id}: ran step {name!r}, which is stored")
        newest = self.performances[execution_id]
        if newest > performance.number and execution_id not in self.touched:
            self.report(
                f"{execution_id}: run {performance.number} performed {name!r}"
                f" after run {newest} had begun"
            )
        return value

    def report(self, violation: str) -> None:
        self.violations.append(f"{self.clock.now_s:.3f} s  {violation}")
