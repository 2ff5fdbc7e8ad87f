"""How long whoever asks the database for something waits in a network that swallows packets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from flowfabric import App, signals, submission
from flowfabric.errors import BackendErrorKind, Transport
from flowfabric.flows import builder
from flowfabric.store.postgres import pool
from tests.apps import PATIENCE_S
from tests.silence import BOTH, Network, Way

SHORT_S = 0.5


@pytest.fixture
async def network(postgres_database: str) -> AsyncIterator[Network]:
    async with Network(postgres_database).open() as opened:
        yield opened


@pytest.fixture
def app(network: Network) -> App:
    made = App(network.url)

    @made.task
    async def echo(number: int) -> int:
        return number

    return made


@contextmanager
def impatience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (submission, "SUBMIT_PATIENCE_S"),
            (submission, "MANY_PATIENCE_S"),
            (builder, "MANY_PATIENCE_S"),
            (signals, "SIGNAL_PATIENCE_S"),
            (pool, "COMMAND_TIMEOUT_S"),
            (pool, "CONNECT_TIMEOUT_S"),
        ):
            patch.setattr(module, name, SHORT_S)
        yield


async def submit(app: App, execution_id: str) -> None:
    await app.submit(app.tasks["echo"](7), idempotency_key="seven")


async def submit_many(app: App, execution_id: str) -> None:
    await app.submit_many([app.tasks["echo"](7)], idempotency_key="seven")


async def start_flow(app: App, execution_id: str) -> None:
    flow = app.flow("sevens", flow_id="019a0000-0000-7000-8000-000000000007")
    flow.add(app.tasks["echo"], 7)
    await flow.start()


async def signal(app: App, execution_id: str) -> None:
    await app.signals.send(execution_id, "approved", idempotency_key="seven")


async def look(app: App, execution_id: str) -> None:
    await app.run(app.tasks["echo"], execution_id).snapshot()


async def ask_why(app: App, execution_id: str) -> None:
    await app.run(app.tasks["echo"], execution_id).why()


async def list_all(app: App, execution_id: str) -> None:
    await app.engine.find_executions()


async def cancel(app: App, execution_id: str) -> None:
    await app.run(app.tasks["echo"], execution_id).cancel()


@pytest.mark.parametrize("ways", [BOTH, (Way.REQUESTS,), (Way.ANSWERS,)], ids=str)
@pytest.mark.parametrize(
    "send", [submit, submit_many, start_flow, signal, look, ask_why, list_all, cancel]
)
async def test_who_is_not_answered_is_told_and_may_repeat(
    app: App, network: Network, send: Callable[[App, str], Awaitable[None]], ways: tuple[Way, ...]
) -> None:
    async with app, asyncio.timeout(PATIENCE_S):
        run = await app.submit(app.tasks["echo"](6))
        network.swallow(ways, new_too=True)
        with impatience(), pytest.raises(Transport) as failure:
            await send(app, run.execution_id)
        assert failure.value.kind is BackendErrorKind.TIMEOUT
        # A submission is one statement, and keys make it safe to repeat.
        assert failure.value.may_have_happened is (send in (submit, submit_many))
        network.heal()
        await send(app, run.execution_id)


async def test_a_first_submission_does_not_wait_for_ever_for_its_connection(
    app: App, network: Network
) -> None:
    network.swallow(new_too=True)
    async with asyncio.timeout(PATIENCE_S):
        with impatience(), pytest.raises(Transport):
            await app.submit(app.tasks["echo"](7))
    network.heal()
    await app.submit(app.tasks["echo"](7))
    await app.close()


async def test_opening_during_an_outage_raises_and_works_afterwards(
    app: App, network: Network
) -> None:
    network.go_down()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Transport):
            await app.open()
    network.heal()
    async with app:
        await app.submit(app.tasks["echo"](7))


async def test_blocking_submissions_are_told_as_well(app: App, network: Network) -> None:
    def twice() -> None:
        app.blocking.submit(app.tasks["echo"](6))
        network.swallow(new_too=True)
        with impatience(), pytest.raises(Transport):
            app.blocking.submit(app.tasks["echo"](7))
        network.heal()
        app.blocking.submit(app.tasks["echo"](7))
        app.blocking.close()

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.to_thread(twice)
