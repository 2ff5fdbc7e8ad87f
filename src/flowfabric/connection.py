"""From a URL to an open engine, and to what an app keeps beside it."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Final, Generic, Self, TypeVar

from flowfabric.codec import Codec, CodedValues
from flowfabric.config import EngineConfig
from flowfabric.core.creation import Checked
from flowfabric.core.results import Created, CreateResult
from flowfabric.engine.engine import Engine
from flowfabric.errors import SchemaTooOld, Unavailable
from flowfabric.obstacles import Obstacles
from flowfabric.parts import engine_on
from flowfabric.registry import check_task
from flowfabric.run import Endings, Run
from flowfabric.store.base import Clock
from flowfabric.store.urls import HTTP, open_store, redact
from flowfabric.submission import Options, Submissions
from flowfabric.task import Call, Task

R = TypeVar("R")

TOKEN_VARIABLE: Final = "FLOWFABRIC_TOKEN"


async def connect(
    url: str,
    *,
    config: EngineConfig | None = None,
    clock: Clock | None = None,
    pool_max: int = 10,
    listen_url: str | None = None,
    set_up: bool = True,
    codec: Codec | None = None,
    token: str | None = None,
) -> Engine:
    """Open an engine on `sqlite:///path.db`, `sqlite:///:memory:` or `postgresql://…`.

    A SQLite database is set up on first use, unless `set_up` says no; a Postgres database
    by `migrate`. All payloads go through the `codec`, if there is one. `http://…` connects to a
    server instead, with the `token`, or the one in FLOWFABRIC_TOKEN.
    """
    if url.startswith(HTTP):
        return await _reach(url, token)
    store = open_store(url, clock=clock, pool_max=pool_max, listen_url=listen_url, set_up=set_up)
    try:
        return await Engine.open(store, config, None if codec is None else CodedValues(codec))
    except SchemaTooOld as error:
        # A masked URL cannot be pasted into a shell.
        pasted = quote(url) if redact(url) == url else None
        raise SchemaTooOld(error.found, error.expected, pasted) from None


async def _reach(url: str, token: str | None) -> Engine:
    # Imported here: it needs an extra that programs with a database need not install.
    try:
        from flowfabric.remote import RemoteEngine
    except ModuleNotFoundError as error:
        raise Unavailable("http", f"needs {error.name}: pip install flowfabric[remote]") from error
    return await RemoteEngine.reach(url, token or os.environ.get(TOKEN_VARIABLE) or None)


async def migrate(url: str) -> tuple[str, ...]:
    """Bring the schema at `url` up to date; return the migrations applied."""
    store = open_store(url)
    try:
        return tuple(await store.migrate())
    finally:
        await store.close()


@dataclass(frozen=True)
class Opened:
    """What an app has while it is open, on the event loop it was opened on."""

    engine: Engine
    submissions: Submissions
    endings: Endings
    loop: asyncio.AbstractEventLoop
    again: "Callable[[], Awaitable[Opened]] | None" = None
    blocks: bool = False
    """Whether callers wait without an event loop: their connections are not async."""

    @classmethod
    async def through(
        cls,
        connect: Callable[[], Awaitable[Engine]],
        again: "Callable[[], Awaitable[Opened]] | None" = None,
        *,
        blocks: bool = False,
    ) -> Self:
        """`again` opens it on another event loop, for use after this one has ended."""
        engine = await connect()
        loop = asyncio.get_running_loop()
        endings = Endings(engine, Obstacles(engine))
        return cls(engine, Submissions(engine), endings, loop, again, blocks)

    async def on_this_loop(self) -> "Opened":
        """The same on the event loop of the caller."""
        return self if self.again is None else await self.again()

    def engine_on(self, connection: object) -> Engine:
        """The engine inside the transaction of a caller's connection, if there is one."""
        return engine_on(self.engine, connection, sync=self.blocks)

    def check(
        self, calls: Sequence[Call[R]], options: Options, namespace: str
    ) -> "CheckedCalls[R]":
        """What to submit; a bad call is refused here, on the caller's thread."""
        checked = self.submissions.check(calls, options, namespace)
        return CheckedCalls(self, calls, options, namespace, checked)

    def run(self, task: Task[..., R], execution_id: str, namespace: str) -> Run[R]:
        """The run of an execution submitted elsewhere; see `App.run`."""
        check_task("run", task)
        found = self.engine.named_execution_id(execution_id, namespace)
        return Run(self, task, found, namespace=namespace, called=execution_id)

    async def close(self) -> None:
        """Send what is underway and disconnect."""
        await self.submissions.close()
        await self.endings.close()
        await self.engine.close()


@dataclass(frozen=True)
class CheckedCalls(Generic[R]):
    """Calls that are about to be submitted."""

    opened: Opened
    calls: Sequence[Call[R]]
    options: Options
    namespace: str
    checked: Sequence[Checked]

    async def submit(self) -> Run[R]:
        """Submit the only one of them, together with others of this process."""
        (call,), (checked,) = self.calls, self.checked
        if self.options.connection is None:
            created = await self.opened.submissions.submit(checked)
        else:
            (created,) = await self._create_joined()
        return self._run(call, created)

    async def submit_many(self) -> list[Run[R]]:
        """Submit all of them, in as few transactions as possible."""
        if self.options.connection is None:
            created = await self.opened.submissions.submit_many(self.checked)
        else:
            created = await self._create_joined()
        return [self._run(call, each) for call, each in zip(self.calls, created, strict=True)]

    async def _create_joined(self) -> list[CreateResult]:
        engine, connection = self.opened.engine, self.options.connection
        if self.opened.blocks:
            return engine.create_checked_on_sync(connection, self.checked)
        return await engine.create_checked_on(connection, self.checked)

    def _run(self, call: Call[R], created: CreateResult) -> Run[R]:
        # One that was just created is known to be in its namespace.
        namespace = None if isinstance(created, Created) else self.namespace
        return Run(self.opened, call.task, created.execution_id, namespace=namespace)
