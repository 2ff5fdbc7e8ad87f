"""Random durable functions under random faults return what they would without any.

Every word to the store may be the last of an attempt, be lost on its way there or back, or
meet an outage; branches arrive in random order. Against that stands a reading of the same
program, one line after another: the same result, and every effect once. An effect may
happen again only if a crash fell between it and its record.

`FLOWFABRIC_EXAMPLES=5000 pytest tests/properties/test_durable_functions.py --hypothesis-seed=7`
looks longer, and elsewhere.
"""

import itertools
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal, TypeVar, Unpack

import pytest
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from flowfabric import App, Context, Retry
from flowfabric.app import MEMORY_URL
from flowfabric.core.conditions import Condition
from flowfabric.core.creation import Checked
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId
from flowfabric.core.results import Completed, CreateResult, Delayed, FailResult, Moved
from flowfabric.core.states import PublicState
from flowfabric.core.steps import StepStored
from flowfabric.engine.details import Outcome
from flowfabric.engine.engine import Engine
from flowfabric.engine.executions import Completion, FailureReport
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.engine.steps import StepReport
from flowfabric.engine.suspensions import SuspendOptions, SuspendOutcome
from flowfabric.engine.waitpoints import PastRuns, SuspensionView
from flowfabric.errors import BackendErrorKind, FlowFabricError, LeaseExpired, Transport
from flowfabric.reconcilers import run_due
from flowfabric.run import Run
from flowfabric.submission import Submissions
from flowfabric.testing import LocalApp, SettableClock
from flowfabric.worker import reports
from flowfabric.worker.inline import InlineWorker
from tests.properties.asyncio_runner import run
from tests.properties.durable_performer import Performer, World
from tests.properties.durable_programs import FOUND, Meaning, Program, programs, wild_programs

T = TypeVar("T")

ROUNDS_MAX = 400
ENDED = (PublicState.COMPLETED, PublicState.FAILED, PublicState.CANCELLED, PublicState.EXPIRED)
WORDS = 40
EXAMPLES = int(os.environ.get("FLOWFABRIC_EXAMPLES", "75"))
FOUND_SEEDS = 10
"""In how many orders of arrival each program is played that was wrong once."""
PROGRAMS = {"ordered": programs, "wild": wild_programs}
STORED_EXAMPLES = max(1, EXAMPLES // 10)
"""How many to try where each word to the store takes its time."""

Fault = Literal["crash before", "crash after", "outage before", "outage after"]
faults = st.dictionaries(
    st.integers(0, WORDS),
    st.sampled_from(("crash before", "crash after", "outage before", "outage after")),
    max_size=5,
)


class FaultyEngine(Engine):
    """The engine as a worker in trouble meets it."""

    faults: dict[int, Fault]
    words = 0
    round = 0
    crashed: set[int]
    """The rounds in which a worker crashed."""
    recorded: set[bytes]

    async def word(self, say: Callable[[], Awaitable[T]]) -> T:
        fault = self.faults.get(self.words)
        self.words += 1
        self._fail(fault, "before")
        answer = await say()
        self._fail(fault, "after")
        return answer

    def _fail(self, fault: Fault | None, when: str) -> None:
        if fault is None or not fault.endswith(when):
            return
        if fault.startswith("crash"):
            self.crashed.add(self.round)
            raise LeaseExpired("the worker has crashed")
        raise Transport("test", "away", kind=BackendErrorKind.TRANSPORT)

    async def answers(
        self, count: int, say: Callable[[], Awaitable[list[T | FlowFabricError]]]
    ) -> list[T | FlowFabricError]:
        try:
            return await self.word(say)
        except LeaseExpired as crash:
            return [crash] * count

    async def record_steps(
        self, reports: Sequence[StepReport]
    ) -> list[StepStored | FlowFabricError]:
        async def say() -> list[StepStored | FlowFabricError]:
            stored = await super(FaultyEngine, self).record_steps(reports)
            for report, answer in zip(reports, stored, strict=True):
                if isinstance(answer, StepStored):
                    self.recorded.add(report.step.result or report.step.failure or b"")
            return stored

        return await self.answers(len(reports), say)

    async def complete_many(
        self, completions: Sequence[Completion]
    ) -> list[Completed | FlowFabricError]:
        saying = super().complete_many
        return await self.answers(len(completions), lambda: saying(completions))

    async def fail_many(
        self, reports: Sequence[FailureReport]
    ) -> list[FailResult | FlowFabricError]:
        try:
            return await self.word(lambda: super(FaultyEngine, self).fail_many(reports))
        except LeaseExpired as crash:
            return [crash] * len(reports)

    async def read_progress(self, execution_id: str) -> PastRuns:
        saying = super().read_progress
        return await self.word(lambda: saying(execution_id))

    async def read_outcomes(self, execution_ids: Sequence[str]) -> dict[ExecutionId, Outcome]:
        saying = super().read_outcomes
        return await self.word(lambda: saying(execution_ids))

    async def create_checked(
        self, checked: Sequence[Checked], *, key_wait_ms: int = 0
    ) -> list[CreateResult]:
        saying = super().create_checked
        return await self.word(lambda: saying(checked))

    async def delay(
        self,
        handle: Handle | bytes,
        delay_until_ms: int,
        *,
        begun: bool = True,
        why: str | None = None,
    ) -> Delayed:
        saying = super().delay
        return await self.word(lambda: saying(handle, delay_until_ms, begun=begun, why=why))

    async def await_executions(
        self, handle: Handle | bytes, execution_ids: Sequence[str], *, until_ms: int | None = None
    ) -> Moved:
        saying = super().await_executions
        return await self.word(lambda: saying(handle, execution_ids, until_ms=until_ms))

    async def suspend(
        self,
        handle: Handle | bytes,
        *,
        resume_condition: Condition,
        **options: Unpack[SuspendOptions],
    ) -> SuspendOutcome:
        saying = super().suspend
        return await self.word(lambda: saying(handle, resume_condition=resume_condition, **options))

    async def describe_suspension(
        self, execution_id: str, suspension_id: str
    ) -> SuspensionView | None:
        saying = super().describe_suspension
        return await self.word(lambda: saying(execution_id, suspension_id))


class StageApp(LocalApp):
    """An app that nobody else on its database sees, and whose time others go on from."""

    numbers = itertools.count()

    def __init__(self, url: str, clock: SettableClock) -> None:
        super().__init__(App(namespace=f"stage-{next(self.numbers)}"), clock)
        self.url = url


@asynccontextmanager
async def worker_in_trouble(app: LocalApp, engine: FaultyEngine) -> AsyncIterator[InlineWorker]:
    submissions = Submissions(engine)
    worker = InlineWorker(engine, app.tasks, submissions, app.resources, (), app.namespace, no_time)
    try:
        yield worker
    finally:
        await worker.close()
        await submissions.close()


class Stage:
    """A program, run to its end by workers in trouble."""

    def __init__(
        self, app: LocalApp, program: Program, faults: dict[int, Fault], seed: int
    ) -> None:
        self._app = app
        self._engine = FaultyEngine(app.engine.store, app.engine.config, app.engine.deployment)
        self._engine.faults = faults
        self._engine.recorded = set()
        self._engine.crashed = set()
        self.ran: Counter[str] = Counter()
        self.twins: Counter[str] = Counter()
        self._ran_in: dict[str, int] = {}
        self._tried: set[str] = set()
        chance = random.Random(seed)

        @app.task(name="child", retry=Retry(max_retries=0))
        async def child(ctx: Context, path: str, fails: bool) -> str:
            try:
                return await ctx.step("effect", self.effect, path, fails)
            except ValueError as error:
                raise RuntimeError(str(error)) from None

        @app.task(name="twin", retry=Retry(max_retries=0))
        async def twin(ctx: Context, path: str) -> str:
            await ctx.step("effect", self.effect, f"{path} in {ctx.execution_id}", False)
            return path

        self._performer = Performer(World(self.effect, self.flaky, child, twin), chance)

        @app.task(name="program", retry=Retry(max_retries=0))
        async def main(ctx: Context) -> object:
            return await self._performer.run(ctx, program, "p")

        self._main = main

    async def effect(self, path: str, fails: bool) -> str:
        for recorded in self._engine.recorded:
            assert f'"{path}"'.encode() not in recorded, f"{path} is stored and ran again"
        if self.ran[path]:
            assert self._ran_in[path] in self._engine.crashed, f"{path} ran again for no reason"
        else:
            self.twins[path.partition(" in ")[0]] += 1
        self.ran[path] += 1
        self._ran_in[path] = self._engine.round
        if fails:
            raise ValueError(path)
        return path

    async def flaky(self, path: str) -> str:
        if path not in self._tried:
            self._tried.add(path)
            raise ConnectionError(path)
        return await self.effect(path, False)

    async def play(self) -> object:
        submitted = await self._app.submit(self._main)
        async with worker_in_trouble(self._app, self._engine) as worker:
            for _ in range(ROUNDS_MAX):
                self._engine.round += 1
                await run_due(self._app.engine)
                if await worker.run_ready() == 0 and await self._nothing_is_left(submitted):
                    return await submitted.result(timeout=1)
        raise AssertionError(f"it does not end: {await submitted.snapshot()}")

    async def _nothing_is_left(self, submitted: Run[object]) -> bool:
        """Do what the world does while no worker has anything to do."""
        engine = self._app.engine
        own = ExecutionFilter(namespace=self._app.namespace)
        page = await engine.find_executions(own, limit=1_000)
        for each in page.executions:
            if each.public_state is PublicState.ACTIVE:
                await engine.revoke_lease(each.execution_id, reason="its worker has crashed")
        inbox = await engine.list_inbox(namespace=self._app.namespace, limit=10)
        for entry in inbox.entries:
            await submitted.signal(entry.name)
        self._app.clock.advance("10s")
        return await submitted.state() in ENDED


async def no_time(seconds: float) -> None:
    """Nothing here takes time."""


async def check(app: LocalApp, program: Program, faults: dict[int, Fault], seed: int) -> None:
    meaning = Meaning()
    expected = meaning.of(program, "p")
    async with app:
        stage = Stage(app, program, faults, seed)
        assert await stage.play() == expected
    assert meaning.effects <= stage.ran.keys()
    for path, count in meaning.twins.items():
        assert stage.twins[path] == count


@pytest.mark.timeout(600 + EXAMPLES)
@pytest.mark.parametrize("kind", ["ordered", "wild"])
def test_a_durable_function_does_what_it_says_whatever_happens(
    store_url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "BACKOFF_FIRST_S", 0.0)
    examples = EXAMPLES if store_url == MEMORY_URL else STORED_EXAMPLES
    clock = SettableClock()

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(program=PROGRAMS[kind], faults=faults, seed=st.integers(0, 2**32))
    def holds(program: Program, faults: dict[int, Fault], seed: int) -> None:
        note(f"{program}")
        run(check(StageApp(store_url, clock), program, faults, seed))

    seeds = FOUND_SEEDS if store_url == MEMORY_URL else 1
    for program in FOUND:
        for seed in range(max(seeds, examples // len(FOUND) // 10)):
            holds = example(program=program, faults={}, seed=seed)(holds)
    holds()
