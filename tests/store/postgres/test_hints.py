"""Hints between processes, over connections that die and poolers that swallow them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from flowfabric import App, Limit, connect
from flowfabric.core.conditions import ByName, Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.decisions import Changes
from flowfabric.engine.gates import GATES_TOPIC
from flowfabric.engine.topics import COMPLETION_TOPIC
from flowfabric.errors import Transport
from flowfabric.outages import statements_within
from flowfabric.store.base import HintListener, Store, Transaction
from flowfabric.store.hints import ANYBODY, EVERY_TOPIC, POLL_MAX_S
from flowfabric.store.postgres import hints
from flowfabric.store.postgres.hints import PAYLOADS_MAX, HintExchange, hint_payloads
from flowfabric.store.postgres.store import PostgresStore
from tests.silence import Network
from tests.store.records import a_lane, change_postgres

SHORT_S = 0.5
READY = "ready:default"
LISTENERS = """
select pg_terminate_backend(pid) from pg_stat_activity
 where datname = current_database() and query ilike 'listen%'
"""


@pytest.fixture
async def other_store(postgres_database: str) -> AsyncIterator[PostgresStore]:
    opened = PostgresStore(postgres_database)
    await opened.open()
    yield opened
    await opened.close()


async def until_live(store: Store, listener: HintListener) -> None:
    """Wait until hints arrive from elsewhere, and forget what was hinted so far."""
    while not store.hints_are_live:
        await listener.wait(1)
    while await listener.wait(0):
        pass


async def test_hints_reach_other_processes(
    postgres_store: PostgresStore, other_store: PostgresStore
) -> None:
    async def body(transaction: Transaction) -> None:
        transaction.hint("lanes")
        await transaction.save(Changes(inserts=(a_lane("a"),)))

    with postgres_store.hints(["lanes"]) as listener, postgres_store.hints(["other"]) as deaf:
        await until_live(postgres_store, listener)
        await until_live(postgres_store, deaf)
        await other_store.transact(body)
        assert await listener.wait(60)
        assert not await deaf.wait(0)


async def test_a_submission_after_a_rest_brings_its_hint_along(
    postgres_store: PostgresStore,
    postgres_database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever is idle hears of it as soon as it is committed; nothing else is sent."""
    work, apart = NewExecution(execution_kind="work"), list[object]()
    async with await connect(postgres_database) as engine:
        await engine.know_routes([engine.check_request(work)])
        with postgres_store.hints(["ready:default"]) as listener:
            await until_live(postgres_store, listener)
            monkeypatch.setattr(HintExchange, "_notify", noting(apart))
            await engine.create_execution(work)
            assert await listener.wait(60)
            assert apart == []


async def test_the_first_run_under_a_limit_is_announced_by_what_commits(
    postgres_store: PostgresStore,
    postgres_database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who submits may end at once, and no idle worker asks again soon whether there are limits."""
    apart, app = list[object](), App(postgres_database)

    @app.task(limits=[Limit("provider", concurrency=5)])
    async def ask(prompt: str) -> None: ...

    with postgres_store.hints([GATES_TOPIC]) as gates, postgres_store.hints([READY]) as ready:
        await until_live(postgres_store, gates)
        await until_live(postgres_store, ready)
        monkeypatch.setattr(HintExchange, "_notify", noting(apart))
        async with app:
            await app.submit(ask, "x")
            assert await gates.wait(60)
            assert await ready.wait(60)
            assert apart == []


async def test_what_is_being_sent_when_a_store_closes_arrives(
    postgres_store: PostgresStore, other_store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending, send = asyncio.Event(), HintExchange._notify

    async def slowly(exchange: HintExchange, topics: set[str]) -> None:
        if not sending.is_set():
            sending.set()
            await asyncio.Event().wait()
        await send(exchange, topics)

    with postgres_store.hints(["lanes"]) as listener:
        await until_live(postgres_store, listener)
        monkeypatch.setattr(HintExchange, "_notify", slowly)
        other_store.hint("lanes")
        await sending.wait()
        await other_store.close()
        assert await listener.wait(60)


async def test_a_signal_after_a_rest_brings_its_hint_along(
    postgres_store: PostgresStore,
    postgres_database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart, gate = list[object](), Single("gate", ByName("approved"))
    async with await connect(postgres_database) as engine:
        await engine.create_execution(NewExecution(execution_kind="work"))
        claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
        assert claimed is not None
        await engine.suspend(claimed.handle, resume_condition=gate)
    async with await connect(postgres_database) as sender:
        with postgres_store.hints(["ready:default"]) as listener:
            await until_live(postgres_store, listener)
            monkeypatch.setattr(HintExchange, "_notify", noting(apart))
            await sender.deliver_operator_signal(
                claimed.execution_id, "gate", signal_name="approved"
            )
            assert await listener.wait(60)
    assert apart == []


async def test_a_completion_after_a_rest_brings_its_hint_along(
    postgres_store: PostgresStore,
    postgres_database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = list[object]()
    async with await connect(postgres_database) as engine:
        await engine.create_execution(NewExecution(execution_kind="work"))
        claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
        assert claimed is not None
    async with await connect(postgres_database) as worker:
        with postgres_store.hints([COMPLETION_TOPIC]) as listener:
            await until_live(postgres_store, listener)
            monkeypatch.setattr(HintExchange, "_notify", noting(apart))
            await worker.complete(claimed.handle)
            assert await listener.wait(60)
    assert apart == []


async def test_work_that_one_process_does_for_all_wakes_no_other_that_has_somebody_for_it(
    postgres_store: PostgresStore, other_store: PostgresStore
) -> None:
    topic = f"{ANYBODY}dispatch"
    with postgres_store.hints([topic]) as far, postgres_store.hints(["last"]) as last:
        await until_live(postgres_store, far)
        with other_store.hints([topic]) as near:
            other_store.hint(topic)
            other_store.hint("last")
            assert await near.wait(0)
            assert await last.wait(60)
            assert not far.take()
        other_store.hint(topic)
        assert await far.wait(60)


async def test_submissions_in_a_row_share_hints(
    postgres_store: PostgresStore,
    postgres_database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message with each would have those who commit queue up."""
    monkeypatch.setattr(hints, "SEND_INTERVAL_S", 3_600.0)
    work, apart = NewExecution(execution_kind="work"), list[object]()
    async with await connect(postgres_database) as engine:
        await engine.know_routes([engine.check_request(work)])
        with postgres_store.hints(["ready:default"]) as listener:
            await until_live(postgres_store, listener)
            monkeypatch.setattr(HintExchange, "_notify", noting(apart))
            await engine.create_execution(work)
            assert await listener.wait(60)
            await asyncio.gather(*(engine.create_execution(work) for _ in range(20)))
            assert not await listener.wait(0)
            assert apart == []
    assert apart == [{"ready:default"}], "at the latest when it closes"


def noting(told: list[object]) -> Callable[[HintExchange, set[str]], Awaitable[None]]:
    async def note(exchange: HintExchange, topics: set[str]) -> None:
        told.append(topics)

    return note


async def test_more_topics_than_a_message_holds_arrive_and_too_many_wake_everybody(
    postgres_store: PostgresStore, other_store: PostgresStore
) -> None:
    topics = [f"some rather long topic {number}" for number in range(10_000)]
    with (
        postgres_store.hints(topics[999:1_000]) as one,
        postgres_store.hints(["lanes"]) as another,
    ):
        await until_live(postgres_store, one)
        await until_live(postgres_store, another)
        for topic in topics[:1_000]:
            other_store.hint(topic)
        assert await one.wait(60)
        assert not await another.wait(0)
        for topic in topics:
            other_store.hint(topic)
        assert await another.wait(60)


async def test_a_listener_whose_connection_died_listens_again(
    postgres_store: PostgresStore, other_store: PostgresStore, postgres_database: str
) -> None:
    with postgres_store.hints(["lanes"]) as listener:
        await until_live(postgres_store, listener)
        await change_postgres(postgres_database, LISTENERS)
        # It says so when it listens again, because hints may have been missed meanwhile.
        while not await listener.wait(60):
            pass
        await until_live(postgres_store, listener)
        other_store.hint("lanes")
        assert await listener.wait(60)


async def test_once_a_statement_was_swallowed_nobody_waits_for_hints(
    postgres_database: str,
) -> None:
    async with Network(postgres_database).open() as network:
        store = PostgresStore(network.url)
        await store.open()
        try:
            with store.hints(["lanes"]) as listener:
                await until_live(store, listener)
                network.swallow()
                with statements_within(SHORT_S), pytest.raises(Transport):
                    await store.ping()
                # Whoever waits looks by himself, while the listening connection is asked.
                assert await listener.wait(60)
                assert not store.hints_are_live
                await until_live(store, listener)
        finally:
            await store.close()


class Swallower:
    """A proxy that lets everything through but notifications, like a pooler."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname, parts.port
        self.swallowed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(self.host, self.port)
        up = asyncio.create_task(self._copy(reader, server_writer))
        down = asyncio.create_task(self._filter(server_reader, writer))
        await asyncio.wait([up, down])

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _filter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            # The answer to the request for TLS is a single byte.
            writer.write(await reader.readexactly(1))
            while True:
                head = await reader.readexactly(5)
                body = await reader.readexactly(int.from_bytes(head[1:]) - 4)
                if head[:1] == b"A":
                    self.swallowed.set()
                else:
                    writer.write(head + body)
                    await writer.drain()
        writer.close()


async def test_a_pooler_that_swallows_notifications_is_noticed(postgres_database: str) -> None:
    swallower = Swallower(postgres_database)
    server = await asyncio.start_server(swallower.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    parts = urlsplit(postgres_database)
    store = PostgresStore(f"postgresql://{parts.username}@127.0.0.1:{port}{parts.path}")
    await store.open()
    with store.hints(["lanes"]) as listener:
        while not swallower.swallowed.is_set():
            assert not await listener.wait(60)
        before = asyncio.get_running_loop().time()
        assert not await listener.wait(600)
        assert not store.hints_are_live
        assert asyncio.get_running_loop().time() - before < POLL_MAX_S * 10
    await store.close()
    server.close()
    await server.wait_closed()


async def test_hints_take_another_way_than_statements_where_there_is_one(
    postgres_database: str,
) -> None:
    async with Network(postgres_database).open() as past_the_pooler:
        store = PostgresStore(postgres_database, listen_url=past_the_pooler.url)
        await store.open()
        try:
            with store.hints(["a"]) as listener:
                await until_live(store, listener)
            assert past_the_pooler.made == 1
        finally:
            await store.close()


def test_many_topics_travel_in_several_messages() -> None:
    topics = {f"stream:{number:036}" for number in range(1_000)}
    payloads = hint_payloads("origin", topics)
    assert 1 < len(payloads) <= PAYLOADS_MAX
    assert max(len(each.encode()) for each in payloads) < 8_000
    told = [each.split("\n") for each in payloads]
    assert {origin for origin, *_ in told} == {"origin"}
    assert {topic for _, *named in told for topic in named} == topics
    assert hint_payloads("origin", {"ü"}) == ["origin\nü"]
    assert hint_payloads("origin", set()) == []


def test_too_many_topics_are_all_of_them() -> None:
    topics = {f"stream:{number:036}" for number in range(10_000)}
    assert hint_payloads("origin", topics) == [f"origin\n{EVERY_TOPIC}"]
