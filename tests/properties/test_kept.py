"""Parents, children and whoever waits, under retention: nothing is stranded, nothing is left.

Invented histories submit, wait, end, move the clock past every keep time and trim at
random. After each operation every execution has something that moves it, every row
belongs to something, and nothing has gone that somebody needed.
"""

from collections import defaultdict
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric import Engine
from flowfabric.core.audit import Complaint, Wrong
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId
from flowfabric.core.states import TERMINAL_STATES
from flowfabric.errors import FlowFabricError
from flowfabric.reconcilers import run_due
from tests.conformance.auditing import complaints_of
from tests.conformance.given import new
from tests.properties.test_differential import SHRINKING_TAKES_S, tuned
from tests.properties.world import RETENTION_MS, World

VERBS = ("submit", "claim", "await", "complete", "cancel", "pass", "trim", "wake", "sweep")
Step = tuple[str, int, int]

steps = st.lists(
    st.tuples(st.sampled_from(VERBS), st.integers(0, 7), st.integers(0, 7)),
    min_size=10,
    max_size=40,
)


class Family:
    """Executions of one history, and who needs whom."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.engine: Engine = world.engine
        self.ids: list[ExecutionId] = []
        self.handles: list[Handle] = []
        self.needed_by: dict[ExecutionId, set[ExecutionId]] = defaultdict(set)

    async def play(self, verb: str, one: int, other: int) -> None:
        with suppress(FlowFabricError):
            await self._play(verb, one, other)

    async def _play(self, verb: str, one: int, other: int) -> None:
        engine = self.engine
        match verb:
            case "submit":
                parent = self.ids[one % len(self.ids)] if self.ids and other else None
                created = await engine.create_execution(
                    new(parent_execution_id=parent, idempotency_key=f"k{one}{other}")
                )
                if parent not in (None, created.execution_id):
                    self.needed_by[created.execution_id].add(parent)
                self.ids.append(created.execution_id)
            case "claim":
                claimed = await engine.claim(
                    worker_id="w", worker_instance_id="w-1", lease_ttl_ms=10 * RETENTION_MS
                )
                if claimed is not None:
                    self.handles.append(claimed.handle)
            case "await" if self.handles and self.ids:
                handle = self.handles[-1 - one % len(self.handles)]
                target = self.ids[other % len(self.ids)]
                await engine.await_executions(handle, [target])
                self.needed_by[target].add(handle.execution_id)
            case "complete" if self.handles:
                await engine.complete(self.handles[-1 - one % len(self.handles)])
            case "cancel" if self.ids:
                await engine.cancel_execution(self.ids[one % len(self.ids)], reason="test")
            case "pass":
                self.world.clock.advance(ms=(1, RETENTION_MS, 3_600_000)[one % 3])
            case "trim":
                await engine.trim_retention(limit=1 + other)
            case "wake":
                await engine.wake_awaiting()
            case _:
                await run_due(engine)

    async def living(self) -> dict[ExecutionId, bool]:
        """Those that exist, and whether each has not ended."""
        states = {each: await self.engine.read_execution_state(each) for each in self.ids}
        return {
            each: state not in TERMINAL_STATES
            for each, state in states.items()
            if state is not None
        }

    async def end(self) -> None:
        """Leave nothing behind, and see that nothing is."""
        for each in self.ids:
            with suppress(FlowFabricError):
                await self.engine.cancel_execution(each, reason="the end")
        for _ in range(len(self.ids) + 2):
            self.world.clock.advance("1d")
            await run_due(self.engine)
        assert await self.living() == {}
        assert await complaints_of(self.engine) == []


async def wrongs_of(engine: Engine) -> list[Complaint]:
    """Without those that an invented history has wait for each other."""
    return [each for each in await complaints_of(engine) if each.wrong is not Wrong.RING]


async def check_history(family: Family, history: list[Step]) -> None:
    before: dict[ExecutionId, bool] = {}
    for verb, one, other in history:
        await family.play(verb, one, other)
        assert await wrongs_of(family.engine) == [], verb
        after = await family.living()
        for gone in before.keys() - after.keys():
            assert not any(after.get(each) for each in family.needed_by[gone]), verb
            family.needed_by.pop(gone)
        before = after
    await family.end()


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_nothing_that_somebody_needs_is_trimmed_and_nobody_is_stranded(world: World) -> None:
    @tuned(world, 200)
    @given(history=steps)
    def check(history: list[Step]) -> None:
        world.begin()
        world.run(check_history(Family(world), history))

    check()
