"""Connections that break while a handler pauses: it neither hangs nor runs twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from flowfabric import App, Context, Run
from flowfabric.core.signals import SignalAccepted, SignalDuplicate
from flowfabric.core.states import PublicState
from flowfabric.errors import Transport
from tests.apps import reached, working
from tests.conformance.observed import execution_of
from tests.severing import Cut, Network

# Longer than any test has patience: none of them is saved by a lease that expires.
LEASE_TTL = "1h"


@pytest.fixture
async def network(postgres_database: str) -> AsyncIterator[Network]:
    async with Network(postgres_database).open() as opened:
        yield opened


@pytest.fixture
async def outside(postgres_database: str) -> AsyncIterator[App]:
    """An app whose connections are sound."""
    async with App(postgres_database) as app:
        yield app


class Gate:
    """A task that charges, waits and answers; and how often it did each."""

    def __init__(self, app: App, *, early: bool = False) -> None:
        self.begun = self.charged = self.went_on = 0

        async def charge() -> str:
            self.charged += 1
            return "receipt"

        @app.task
        async def gate(ctx: Context) -> object:
            self.begun += 1
            await ctx.step("charge", charge)
            if early:
                token = await ctx.waitpoint("go")
                await app.signals.deliver(token, "go", 7, idempotency_key="once")
            signal = await ctx.wait_for_signal("go")
            self.went_on += 1
            return signal.payload

        self.task = gate


async def was_undisturbed(run: Run[object], gate: Gate) -> None:
    """The attempt that paused is the one that went on, once."""
    assert (gate.begun, gate.charged, gate.went_on) == (2, 1, 1)
    shown = await run.snapshot()
    assert (shown.public_state, shown.lease_reclaim_count, shown.retry_count) == (
        PublicState.COMPLETED,
        0,
        0,
    )
    assert shown.total_attempt_count == 1


@pytest.mark.parametrize("cut", Cut)
async def test_a_suspend_cut_off_at_its_commit(network: Network, outside: App, cut: Cut) -> None:
    async with App(network.url) as app:
        gate = Gate(app)
        network.cut_commit("suspension", cut)
        async with working(app, lease_ttl=LEASE_TTL):
            run = await app.submit(gate.task)
            await network.was_cut.wait()
            seen = outside.run(gate.task, run.execution_id)
            await reached(seen, PublicState.SUSPENDED)
            assert len((await outside.signals.pending()).entries) == 1
            await outside.signals.send(run.execution_id, "go", 7)
            assert await seen.result(timeout="20s") == 7
            await was_undisturbed(seen, gate)


@pytest.mark.parametrize("cut", Cut)
async def test_a_suspend_that_early_signals_meet_cut_off_at_its_commit(
    network: Network, outside: App, cut: Cut
) -> None:
    async with App(network.url) as app:
        gate = Gate(app, early=True)
        network.cut_commit("suspension", cut)
        async with working(app, lease_ttl=LEASE_TTL):
            run = await app.submit(gate.task)
            await network.was_cut.wait()
            seen = outside.run(gate.task, run.execution_id)
            assert await seen.result(timeout="20s") == 7
            await was_undisturbed(seen, gate)


@asynccontextmanager
async def signal_to_cut_off(
    network: Network, outside: App, cut: Cut
) -> AsyncIterator[tuple[App, Run[object]]]:
    """A run that waits for a signal, and an app whose next signal is cut off."""
    gate = Gate(outside)
    async with working(outside, lease_ttl=LEASE_TTL), App(network.url) as app:
        run = await outside.submit(gate.task)
        await reached(run, PublicState.SUSPENDED)
        network.cut_commit("signal", cut)
        yield app, run
        assert network.was_cut.is_set()
        assert await run.result(timeout="20s") == 7
        await was_undisturbed(run, gate)
        assert (await execution_of(outside.engine, run.execution_id)).signal_count == 1


@pytest.mark.parametrize("cut", Cut)
async def test_a_signal_cut_off_at_its_commit_is_sent_again_and_counts_once(
    network: Network, outside: App, cut: Cut
) -> None:
    async with signal_to_cut_off(network, outside, cut) as (app, run):
        with pytest.raises(Transport):
            await app.signals.send(run.execution_id, "go", 7, idempotency_key="click")
        answer = await app.signals.send(run.execution_id, "go", 7, idempotency_key="click")
        accepted_before = cut is Cut.BEFORE_THE_ANSWER_ARRIVES
        assert isinstance(answer, SignalDuplicate if accepted_before else SignalAccepted)


@pytest.mark.parametrize("cut", Cut)
async def test_a_signal_that_is_a_transaction_by_itself_cut_off_is_delivered_and_counts_once(
    network: Network, outside: App, cut: Cut
) -> None:
    """Its sender gave it no key; whether it was stored is told by the id it got before it left."""
    async with signal_to_cut_off(network, outside, cut) as (app, run):
        answer = await app.signals.send(run.execution_id, "go", 7)
        assert isinstance(answer, SignalAccepted)


async def test_a_claim_whose_answer_is_lost_is_taken_up(network: Network, outside: App) -> None:
    """Its lease would keep the run from everybody for an hour."""
    async with App(network.url) as app:
        begun: list[int] = []

        @app.task
        async def work(ctx: Context) -> str:
            begun.append(ctx.attempt_index)
            return "done"

        outside.adopt(app)
        network.cut_commit("event", Cut.BEFORE_THE_ANSWER_ARRIVES)
        run = await outside.submit(work)
        async with working(app, lease_ttl=LEASE_TTL):
            assert await run.result(timeout="20s") == "done"
        assert network.was_cut.is_set()
        shown = await run.snapshot()
    assert begun == [0]
    assert (shown.total_attempt_count, shown.lease_reclaim_count) == (1, 0)


async def test_what_earlier_claims_were_granted_is_not_begun_again(
    network: Network, outside: App
) -> None:
    async with App(network.url) as app:
        begun: list[int] = []
        both = asyncio.Event()

        @app.task
        async def work(number: int) -> int:
            begun.append(number)
            if len(begun) == 1:
                network.end_connections()
                network.cut_commit("event", Cut.BEFORE_THE_ANSWER_ARRIVES)
                await outside.submit(work, 2)
            else:
                both.set()
            await both.wait()
            return number

        outside.adopt(app)
        async with working(app, lease_ttl=LEASE_TTL):
            first = await outside.submit(work, 1)
            assert await first.result(timeout="20s") == 1
        assert network.was_cut.is_set()
    assert begun == [1, 2]


async def test_what_goes_on_after_a_wait_is_taken_up_as_well(
    network: Network, outside: App
) -> None:
    async with working(outside, lease_ttl=LEASE_TTL):
        gate = Gate(outside)
        run = await outside.submit(gate.task)
        await reached(run, PublicState.SUSPENDED)
    await outside.signals.send(run.execution_id, "go", 7)
    async with App(network.url) as app:
        app.adopt(outside)
        network.cut_commit("event", Cut.BEFORE_THE_ANSWER_ARRIVES)
        async with working(app, lease_ttl=LEASE_TTL):
            assert await run.result(timeout="20s") == 7
        assert network.was_cut.is_set()
    await was_undisturbed(run, gate)


async def test_what_a_lost_claim_was_granted_is_handed_back_by_a_worker_that_stops(
    network: Network, outside: App
) -> None:
    async with App(network.url) as app:

        @app.task
        async def work() -> str:
            return "done"

        outside.adopt(app)
        run = await outside.submit(work)
        network.cut_commit("event", Cut.BEFORE_THE_ANSWER_ARRIVES)
        async with working(app, lease_ttl=LEASE_TTL) as stop:
            await network.was_cut.wait()
            stop.set()
        async with working(outside, lease_ttl=LEASE_TTL):
            assert await run.result(timeout="20s") == "done"
