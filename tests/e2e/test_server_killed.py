"""Server, database and network fail under load: what was accepted is there, once, and is done."""

import asyncio
import itertools
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from flowfabric import App, Engine, connect, errors, migrate
from flowfabric.core.states import PublicState
from flowfabric.core.views import ExecutionSnapshot
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.engine.topics import COMPLETION_TOPIC
from tests import postgres
from tests.e2e.conftest import PATIENCE_S, python, steps_run
from tests.e2e.errands import await_reply, errands, run_errand
from tests.e2e.programs import Program
from tests.silence import Network, Way

FAULTS = 3
BETWEEN = 40
"""Requests accepted between two faults."""
CLIENTS = 3
"""Of each kind."""
ASK_AGAIN_S = 0.02
ANSWER_S = 2.0
NAME = "test.name"


# Processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A real `flowfabric serve`, which can be killed and started again where it was."""

    def __init__(self, database: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._database = database
        self._running = AsyncExitStack()
        self._process: Program | None = None

    async def start(self) -> None:
        command = ("flowfabric.cli", "serve", "--port", str(self.port), "--log-level", "error")
        self._process = await self._running.enter_async_context(
            python(*command, FLOWFABRIC_URL=self._database)
        )
        async with httpx.AsyncClient(base_url=self.url) as client, asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get("/readyz")).is_success:
                        return
                assert self._process.returncode is None, "the server ended by itself"
                await asyncio.sleep(ASK_AGAIN_S)

    async def kill(self) -> None:
        """As `kill -9` does."""
        assert self._process is not None
        assert self._process.returncode is None, "the server ended by itself"
        self._process.kill()
        await self._process.wait()

    def terminate(self) -> None:
        """As whoever deploys does."""
        assert self._process is not None
        self._process.terminate()

    async def ended(self) -> int:
        """The status it ends with."""
        assert self._process is not None
        return await self._process.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._running:
            await self.start()
            yield


# Load


@dataclass
class Load:
    """Clients that ask until they are told to stop, and what they were told was done."""

    url: str
    journal: Path
    keyed: dict[str, str] = field(default_factory=dict)
    """The id each key was answered with."""
    plain: list[str] = field(default_factory=list)
    """Ids of what was asked for without a key, where an answer came."""
    replied: list[str] = field(default_factory=list)
    """Ids of those that were sent a signal."""
    refused: int = 0
    stopped: bool = False
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def accepted(self) -> int:
        return len(self.keyed) + len(self.plain) + len(self.replied)

    async def came_to(self, accepted: int) -> None:
        """Wait until so many requests were accepted."""
        async with asyncio.timeout(PATIENCE_S):
            while self.accepted < accepted:
                self._more.clear()
                await self._more.wait()

    def has_effects(self) -> bool:
        return self.journal.exists()

    def _took(self) -> None:
        self._more.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = App(self.url)
        app.adopt(errands)
        async with (
            app,
            httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S) as http,
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(CLIENTS):
                clients.create_task(self._post_with_keys(http))
                clients.create_task(self._post_without(http))
                clients.create_task(self._submit(app))
            clients.create_task(self._reply(app))
            try:
                yield
            finally:
                self.stopped = True

    async def _post_with_keys(self, http: httpx.AsyncClient) -> None:
        while not self.stopped:
            name = f"key-{next(self._numbers)}"
            self.keyed[name] = await self._posted(http, name)
            self._took()

    async def _posted(self, http: httpx.AsyncClient, name: str) -> str:
        """Ask until there is an answer."""
        while True:
            answered = await self._post(http, name, idempotency_key=name)
            if answered is not None:
                return answered
            await asyncio.sleep(ASK_AGAIN_S)

    async def _post_without(self, http: httpx.AsyncClient) -> None:
        while not self.stopped:
            answered = await self._post(http, f"plain-{next(self._numbers)}")
            if answered is None:
                await asyncio.sleep(ASK_AGAIN_S)
            else:
                self.plain.append(answered)
                self._took()

    async def _post(self, http: httpx.AsyncClient, name: str, **given: str) -> str | None:
        """The id of what was created, or had been; None without an answer that says so."""
        body = {
            "execution_kind": run_errand.name,
            "input_json": {"name": name, "journal": str(self.journal)},
            "tags": {NAME: name},
            **given,
        }
        try:
            answer = await http.post("/v1/executions", json=body)
        except httpx.TransportError:
            self.refused += 1
            return None
        if not answer.is_success:
            assert answer.status_code >= 500, answer.text
            self.refused += 1
            return None
        (created,) = answer.json().values()
        return str(created["execution_id"])

    async def _submit(self, app: App) -> None:
        while not self.stopped:
            name = f"app-{next(self._numbers)}"
            asked = run_errand(name, str(self.journal))
            while name not in self.keyed:
                try:
                    run = await app.submit(asked, idempotency_key=name, tags={NAME: name})
                except errors.Transport:
                    self.refused += 1
                    await asyncio.sleep(ASK_AGAIN_S)
                else:
                    self.keyed[name] = run.execution_id
                    self._took()

    async def _reply(self, app: App) -> None:
        while not self.stopped:
            name = f"reply-{next(self._numbers)}"
            asked = await_reply(name, str(self.journal))
            while name not in self.keyed:
                with suppress(errors.Transport):
                    run = await app.submit(asked, idempotency_key=name, tags={NAME: name})
                    await run.signal("reply", name, idempotency_key=name)
                    self.keyed[name] = run.execution_id
                    self.replied.append(run.execution_id)
                    self._took()
                    break
                await asyncio.sleep(ASK_AGAIN_S)


# What came of it


async def all_done(engine: Engine) -> list[ExecutionSnapshot]:
    """Every execution there is, as soon as all have ended."""
    with engine.store.hints([COMPLETION_TOPIC]) as hints:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found: list[ExecutionSnapshot] = []
                cursor: str | None = None
                while True:
                    page = await engine.find_executions(
                        ExecutionFilter(), cursor=cursor, limit=1_000
                    )
                    found += page.executions
                    if (cursor := page.next_cursor) is None:
                        break
                if all(each.public_state is PublicState.COMPLETED for each in found):
                    return found
                await hints.wait(0.5)


async def check(database: str, load: Load) -> None:
    async with await connect(database) as engine:
        done = await all_done(engine)
        stored = {each.execution_id for each in done}
        names = Counter(each.tags[NAME] for each in done)
        results = {
            each.tags[NAME]: await engine.get_execution_result(each.execution_id)
            for each in done
            if each.execution_id in load.replied
        }
    assert {*load.keyed.values(), *load.plain} <= stored
    assert {names[key] for key in load.keyed} == {1}
    assert len(results) == len(load.replied)
    assert results == {name: f'"{name}"'.encode() for name in results}
    effects = steps_run(load.journal)
    attempts = {each.tags[NAME]: each.total_attempt_count for each in done}
    assert effects.keys() == names.keys()
    # A step is taken once by each worker that holds the run: mostly there was one.
    once = {name for name, count in attempts.items() if count == 1 and names[name] == 1}
    assert {effects[name] for name in once} == {1}
    assert len(once) > len(names) / 2
    assert all(effects[name] <= attempts[name] for name in load.keyed)


async def suffer(url: str, journal: Path, fault: Callable[[], Awaitable[None]]) -> Load:
    """Clients and a worker at `url` through so many faults; what the clients were told."""
    load = Load(url, journal)
    async with load.running():
        # The worker has begun when there is an effect.
        while not load.has_effects():
            await load.came_to(load.accepted + 1)
        for _ in range(FAULTS):
            before = load.accepted
            await fault()
            await load.came_to(before + BETWEEN)
    return load


def remote_worker(url: str) -> AbstractAsyncContextManager[Program]:
    return python("tests.e2e.errands", url)


async def test_killing_the_server_loses_nothing_it_has_accepted(
    store_url: str, tmp_path: Path
) -> None:
    await migrate(store_url)
    server = ServerProcess(store_url)

    async def kill() -> None:
        await server.kill()
        await server.start()

    async with server.running(), remote_worker(server.url):
        load = await suffer(server.url, tmp_path / "journal", kill)
        assert load.refused
        await check(store_url, load)


async def test_killing_the_database_loses_nothing_the_server_has_accepted(tmp_path: Path) -> None:
    # Not one that the environment names: only our own may be restarted.
    database = await asyncio.to_thread(postgres.start_bundled, durable=True)
    restart = database.restart
    assert restart is not None

    async def kill() -> None:
        await asyncio.to_thread(restart, "immediate")

    try:
        await migrate(database.url)
        server = ServerProcess(database.url)
        async with server.running(), remote_worker(server.url):
            load = await suffer(server.url, tmp_path / "journal", kill)
            await check(database.url, load)
    finally:
        await asyncio.to_thread(database.stop)


async def test_a_network_that_fails_loses_nothing_the_server_has_accepted(
    store_url: str, tmp_path: Path
) -> None:
    await migrate(store_url)
    server = ServerProcess(store_url)
    faults = itertools.cycle(["down", "deaf", "silent"])

    async with server.running(), Network(server.url).open() as network:

        async def fail() -> None:
            match next(faults):
                case "down":
                    network.go_down()
                    await network.was_tried(CLIENTS)
                case "deaf":
                    # What is asked is done, and nobody hears of it.
                    network.swallow([Way.ANSWERS])
                case _:
                    network.swallow()
            network.heal()

        url = network.url.replace("@", "")
        async with remote_worker(url):
            load = await suffer(url, tmp_path / "journal", fail)
            assert load.refused
            await check(store_url, load)
