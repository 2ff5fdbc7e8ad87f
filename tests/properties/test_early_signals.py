"""Signals that come early, under a fault at any word to the store: each counts once.

A function waits after branches and beside them, and all it waits for was sent before. The
worker crashes, or loses the database, before or after any one of its words. Whatever
happens, every signal is in one stored wait, or kept.

Invented functions wait for one thing after the other, crash in between and time out, while
signals come early and late: each wait returns what a count by hand says.
"""

import asyncio
from typing import Final, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfabric import Context, Retry, Run, all_of, any_of, count
from flowfabric.core.conditions import Condition
from flowfabric.core.handles import Handle
from flowfabric.core.records import StepKind
from flowfabric.core.states import PublicState
from flowfabric.engine.waitpoints import SuspensionView
from flowfabric.reconcilers import run_due
from flowfabric.submission import Submissions
from flowfabric.testing import LocalApp
from flowfabric.worker import reports, signals
from flowfabric.worker.inline import InlineWorker
from flowfabric.worker.signals import WaitOutcome
from tests.properties.test_durable_functions import Fault, FaultyEngine
from tests.properties.test_several_waits import Ledger
from tests.properties.test_suspensions import Sent

WORDS: Final = 24
ROUNDS_MAX: Final = 60
SENT: Final = ("x", "y", "y", "z", "unasked")


class TakingEngine(FaultyEngine):
    taken = 0

    async def take_signals(
        self,
        handle: Handle | bytes,
        *,
        suspension_id: str,
        resume_condition: Condition,
        announce: bool = False,
    ) -> SuspensionView | None:
        saying = super().take_signals
        view = await self.word(
            lambda: saying(
                handle,
                suspension_id=suspension_id,
                resume_condition=resume_condition,
                announce=announce,
            )
        )
        self.taken += view is not None
        return view


async def nothing() -> None:
    """A step."""


async def waits(ctx: Context) -> list[object]:
    """After branches, beside one, and in one."""
    begun = [asyncio.create_task(_step(ctx, name)) for name in ("p", "q")]
    first = await ctx.wait_for_signal("x")
    for each in begun:
        await each
    second = await ctx.wait_for_signal("y")
    beside = asyncio.Event()
    working = asyncio.create_task(_until(ctx, beside))
    third = await ctx.wait_for_signal("z")
    beside.set()
    await working
    last = await asyncio.create_task(_wait(ctx, "y"))
    return [first.payload, second.payload, third.payload, last]


async def _step(ctx: Context, name: str) -> None:
    await ctx.step(name, nothing)


async def _until(ctx: Context, beside: asyncio.Event) -> None:
    async def work() -> None:
        # Not for ever: a worker that has crashed ends nothing.
        async with asyncio.timeout(5):
            await beside.wait()

    await ctx.step("beside", work)


async def _wait(ctx: Context, name: str) -> object:
    return (await ctx.wait_for_signal(name)).payload


async def play(faults: dict[int, Fault]) -> TakingEngine:
    """Run it to its end; check what became of every signal."""
    async with LocalApp() as app:
        engine = TakingEngine(app.engine.store, app.engine.config, app.engine.deployment)
        engine.faults, engine.recorded, engine.crashed = faults, set(), set()
        run: Run[object] = await app.submit(app.task(retry=Retry(max_retries=0))(waits))
        for number, name in enumerate(SENT):
            await run.signal(name, number)
        submissions = Submissions(engine)
        worker = InlineWorker(
            engine, app.tasks, submissions, app.resources, (), app.namespace, asyncio.sleep
        )
        try:
            for _ in range(ROUNDS_MAX):
                await run_due(app.engine)
                await worker.run_ready()
                if await run.state() is PublicState.COMPLETED:
                    break
                if await run.state() is PublicState.ACTIVE:
                    await app.engine.revoke_lease(run.execution_id, reason="its worker crashed")
                app.clock.advance("2s")
        finally:
            await worker.close()
            await submissions.close()
        assert await run.result(timeout=1) == [0, 1, 3, 2], faults
        stored = [step for step in await run.steps() if step.kind is StepKind.SIGNAL]
        counted = [
            each.name
            for step in stored
            for each in msgspec.json.decode(step.result or b"", type=WaitOutcome).signals
        ]
        kept = [each.name for each in (await run.snapshot()).kept_signals]
        assert sorted([*counted, *kept]) == sorted(SENT), faults
        return engine


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", get_args(Fault))
async def test_a_fault_at_any_word_loses_no_early_signal(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "BACKOFF_FIRST_S", 0.0)
    monkeypatch.setattr(signals, "BESIDE_AFTER_S", 0.0)
    undisturbed = await play({})
    assert undisturbed.taken > 0, "some are taken beside work"
    assert undisturbed.words <= WORDS
    for word in range(undisturbed.words):
        await play({word: fault})


# One wait after the other ---------------------------------------------------------------

Word = tuple[str, str] | None
"""A name and a source to send; or the next timeout."""
CONDITIONS: Final[tuple[Condition, ...]] = (
    any_of("a"),
    any_of("a", "b"),
    all_of("a", "b"),
    all_of(any_of("a", "b"), "b"),
    count(2, "a", distinct="sources"),
    count(2, "a", "b"),
)


class Expected:
    """What each wait returns, by hand."""

    def __init__(self, waits: list[Condition]) -> None:
        self.ledger, self.waits = Ledger(), list(waits)
        self.returned: list[list[int] | None] = []

    def go_on(self) -> None:
        while self.waits and self.ledger.condition is None:
            self.ledger.begin(self.waits.pop(0))
            self._note()

    def tell(self, name: str, source: str, number: int) -> None:
        waited = self.ledger.condition is not None
        self.ledger.tell(Sent(name, name, source, number, False))
        if waited:
            self._note()
            self.go_on()

    def time_out(self) -> None:
        self.ledger.end()
        self.returned.append(None)
        self.go_on()

    def _note(self) -> None:
        if self.ledger.condition is None:
            assert self.ledger.met is not None
            self.returned.append([each.number for each in self.ledger.met])


async def run_waits(
    waits: list[Condition], crashes: set[int], early: int, words: list[Word]
) -> None:
    async with LocalApp() as app:
        expected, left = Expected(waits), set(crashes)

        @app.task(retry=Retry(max_retries=10, delay="1s"))
        async def one_after_the_other(ctx: Context) -> list[list[int] | None]:
            returned: list[list[int] | None] = []
            for place, condition in enumerate(waits):
                found = await ctx.wait_for(condition, type=int, timeout="1h", default=None)
                returned.append(None if found is None else [each.payload for each in found])
                if place in left:
                    left.remove(place)
                    raise RuntimeError("a crash")
            return returned

        async def settle() -> None:
            await app.drain()
            while await run.state() is PublicState.DELAYED:
                app.clock.advance("2s")
                await app.drain()

        async def time_out() -> None:
            if await run.state() is PublicState.SUSPENDED:
                app.clock.advance("61m")
                expected.time_out()
                await settle()

        run = await app.submit(one_after_the_other)
        for number, word in enumerate([*words, *[None] * len(waits)]):
            if number == early:
                expected.go_on()
                await settle()
            if await run.state() is PublicState.COMPLETED:
                break
            if word is None and number >= early:
                await time_out()
            elif word is not None:
                await run.signal(word[0], number, source=word[1])
                expected.tell(*word, number)
                if number >= early:
                    await settle()
        returned = await run.result(timeout=1)
        # A wait has an order of its own for them.
        assert [each and sorted(each) for each in returned] == expected.returned
        kept = [each.source for each in (await run.snapshot()).kept_signals]
        assert kept == [each.source for each in expected.ledger.kept]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(CONDITIONS), min_size=2, max_size=4),
    st.sets(st.integers(0, 3)),
    st.integers(0, 6),
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("xyz")) | st.none(),
        min_size=3,
        max_size=12,
    ),
)
def test_each_wait_returns_what_it_can_use(
    waits: list[Condition], crashes: set[int], early: int, words: list[Word]
) -> None:
    asyncio.run(run_waits(waits, crashes, min(early, len(words)), words))
