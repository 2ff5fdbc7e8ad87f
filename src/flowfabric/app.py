"""The application: tasks, where they are stored, and a worker that runs them.

    app = App("sqlite:///shop.db")

    @app.task(retry=Retry(max_retries=5), timeout="2m")
    async def publish(ctx: Context, article_id: int) -> str: ...

    run = await app.submit(publish, 42, priority=10)
    print(await run.result(timeout="1h"))

`App` is sugar over `Engine`, which is `app.engine` once the app is open. It opens
by itself when first used and belongs to that event loop; `async with app` opens
and closes it explicitly.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from signal import Signals as StopSignal
from typing import Concatenate, Final, ParamSpec, Self, TypeVar, TypeVarTuple, Unpack, overload

from msgspec import structs

from flowfabric import streams
from flowfabric.blocking import Blocking
from flowfabric.budgets import AppBudgets
from flowfabric.codec import Codec, check_codec
from flowfabric.config import EngineConfig
from flowfabric.connection import connect, migrate
from flowfabric.core.ids import named_flow_id
from flowfabric.core.workers import LaneWeights
from flowfabric.engine.engine import Engine
from flowfabric.engine.events import Told
from flowfabric.errors import Unavailable
from flowfabric.flows.builder import Flow
from flowfabric.flows.run import FlowRun
from flowfabric.limits import AppLimits
from flowfabric.logs import open_log
from flowfabric.outages import everything_within, waited_out
from flowfabric.parts import AppPart
from flowfabric.registry import (
    Registry,
    TaskOptions,
    check_app,
    check_imported_once,
    check_middleware,
    check_settings,
)
from flowfabric.run import Opened, Run
from flowfabric.signals import Signals
from flowfabric.stop_signals import STOP_SIGNALS, hand_on, is_main_task
from flowfabric.store.base import Clock
from flowfabric.submission import Options, check_calls, check_options, read_submission
from flowfabric.task import Call, SubmitOptions, Task, TaskSettings
from flowfabric.worker.attempt import Middleware
from flowfabric.worker.context import Context
from flowfabric.worker.functions import check_not_imported
from flowfabric.worker.leases import CONNECTIONS_MAX
from flowfabric.worker.resources import Factory
from flowfabric.worker.stopping import Stopping
from flowfabric.worker.worker import (
    Worker,
    WorkerSettings,
    check_worker_settings,
    lanes_of,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
M = TypeVar("M", bound=Middleware)
Part = TypeVar("Part", bound=AppPart)

log = open_log(__name__)

DEFAULT_URL = "sqlite:///flowfabric.db"
DEFAULT_NAMESPACE = "default"
MEMORY_URL = "sqlite:///:memory:"
READY_S = 2.0
"""How long the database may take to answer before it counts as away, for `check_ready`."""


TESTS_OF_NO_APP: Final[list["App"]] = []
"""The open test apps that were not told which app they replace."""


class App(Registry):
    """Tasks on one database."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        codec: Codec | None = None,
        config: EngineConfig | None = None,
        clock: Clock | None = None,
        pool_max: int = 10,
        migrate: bool = False,
        listen_url: str | None = None,
        token: str | None = None,
    ) -> None:
        """Apps of different namespaces share a database and see nothing of each other.

        With `migrate`, opening brings the schema of the database up to date.
        All payloads go through the `codec`, if there is one; see `Codec`.
        If `url` goes through PgBouncer in transaction mode, set `listen_url` to a direct
        connection: notifications arrive over it instead of by polling.
        With `http://…` everything goes through a server (`flowfabric serve`), which must know the
        `token`, or the one in FLOWFABRIC_TOKEN; the server has its own settings and codec.
        """
        super().__init__(namespace)
        check_app(
            url=url,
            config=config,
            clock=clock,
            pool_max=pool_max,
            migrate=migrate,
            listen_url=listen_url,
            codec=codec,
            token=token,
        )
        if codec is not None:
            check_codec(codec)
        self.url = url
        self.codec = codec
        self.config = config
        self.middlewares: list[Middleware] = []
        self.adopted: list[App] = []
        """Apps whose tasks this one runs."""
        self._stand_ins: list[App] = []
        self._pool_max = pool_max
        self._migrate = migrate and url != MEMORY_URL
        self._connect_to = partial(
            connect,
            url,
            config=config,
            clock=clock,
            codec=codec,
            listen_url=listen_url,
            token=token,
        )
        self._opened: Opened | None = None
        self._workers: dict[Worker, asyncio.Event] = {}
        """The workers that run, each with an event that is set when it has ended."""
        self._guard: AsyncGenerator[None, None] | None = None
        """Closes the connections when the event loop ends, at the latest."""
        self._closed = False
        self._opening: asyncio.Lock | None = None

    def __repr__(self) -> str:
        return f"<App {self.url.partition('://')[0]}, {len(self.tasks)} tasks>"

    # Tasks

    @overload
    def task(self, function: Callable[Concatenate[Context, P], Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        version: int = 1,
        **settings: Unpack[TaskOptions],
    ) -> "TaskDecorator": ...
    def task(
        self,
        function: Callable[..., object] | None = None,
        /,
        *,
        name: str | None = None,
        version: int = 1,
        **settings: Unpack[TaskOptions],
    ) -> "Task[..., object] | TaskDecorator":
        """Make a function a task, under its own name or another `name`; see `TaskOptions`.

        Async functions run on the worker's event loop, plain ones in a thread or, with
        `executor="process"`, in another process. A name may have several versions side by side;
        a run keeps the version it began with.
        """
        checked = check_settings(settings)
        if function is None:
            return TaskDecorator(self, name, checked, version)
        return self.register_task(name, function, checked, version)

    def middleware(self, around: M) -> M:
        """Run a coroutine function around every handler; the first one added is outermost.

        It takes the handler's context and a function that makes the call:
        `async def traced(ctx, call): …; return await call()`.
        """
        check_middleware(around)
        self.middlewares.append(around)
        return around

    def provide(self, kind: type[T], factory: Factory[T]) -> None:
        """Give handlers a resource: as `ctx.get(kind)`, and as any parameter annotated with `kind`
        in tasks declared afterwards.

        `factory` returns the resource or a context manager around it, async or not, or yields it.
        The worker makes the resource when it starts and closes it when it stops: through the
        context manager, the generator, or the resource's own `aclose()` or `close()`.
        """
        self.resources.provide(kind, factory)

    def adopt(self, other: "App") -> None:
        """Add another app's tasks, schedules, middleware and resources to this one.

        Raises `InvalidInput` if this app already has a task or schedule of the same name.
        Adopting the same app again changes nothing.
        """
        if other in self.adopted:
            return
        self.check_adoptable(other)
        self.tasks |= other.tasks
        for task in other.tasks.values():
            task.namespaces.add(self.namespace)
        self.schedules += [
            structs.replace(each, namespace=self.namespace) for each in other.schedules
        ]
        self.middlewares += other.middlewares
        self.resources.adopt(other.resources)
        self.adopted.append(other)

    def meet(self, task: Task[..., object]) -> None:
        """Hook: called for every task submitted through this app."""

    @property
    def _acting(self) -> "App":
        """The app that handles calls: this one, or the test app that replaces it.

        The latest test app does; one that was never closed ends with its event loop.
        """
        return next((each for each in reversed(self._stand_ins) if each.is_open()), self)

    def is_open(self) -> bool:
        return self._opened is not None and not self._opened.loop.is_closed()

    def replace_with(self, other: "App") -> None:
        """From now on let `other` handle the calls of this app and of the apps it has adopted."""
        if other not in self._stand_ins:
            self._stand_ins.append(other)
            for each in self.adopted:
                each.replace_with(other)

    def restore_from(self, other: "App") -> None:
        """Undo `replace_with`."""
        if other in self._stand_ins:
            self._stand_ins.remove(other)
            for each in self.adopted:
                each.restore_from(other)

    # Submitting

    @overload
    async def submit(self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    async def submit(
        self,
        task: Callable[[Unpack[Ts]], Call[R]],
        /,
        *args: *Ts,
        **options: Unpack[SubmitOptions],
    ) -> Run[R]: ...
    @overload
    async def submit(self, call: Call[R], /, **options: Unpack[SubmitOptions]) -> Run[R]: ...
    async def submit(self, what: object, /, *args: object, **keywords: object) -> Run[object]:
        """Store an execution and return at once; see `SubmitOptions`.

        Pass options by keyword after the task's positional arguments. To combine options with
        keyword arguments, make a call first: `submit(publish(42, draft=True), priority=10)`.

        With `connection=` the execution becomes part of that connection's open
        transaction: it exists if and when the transaction commits.
        """
        call, options = read_submission(what, args, keywords)
        (run,) = await self._submit([call], options, grouped=True)
        return run

    async def submit_many(
        self, calls: Sequence[Call[R]], **options: Unpack[SubmitOptions]
    ) -> list[Run[R]]:
        """Submit many calls, `[publish(1), publish(2)]`, in as few transactions as possible."""
        chosen = check_options(options)
        return await self._submit(check_calls(calls), chosen, grouped=False)

    async def _submit(
        self, calls: Sequence[Call[R]], options: Options, *, grouped: bool
    ) -> list[Run[R]]:
        acting = self._acting
        for task in {call.task: None for call in calls}:
            check_imported_once(task, self)
            acting.meet(task)
        opened = await acting._open_unless_closed()
        return await opened.submit(calls, options, acting.namespace, grouped=grouped)

    def flow(
        self,
        kind: str,
        *,
        tags: Mapping[str, str] | None = None,
        flow_id: str | None = None,
        budget: str | Sequence[str] = (),
    ) -> Flow:
        """A new flow: tasks that wait for each other's results; see `Flow.add`.

        With your own `flow_id`, building and starting the same flow again adds nothing. All its
        nodes are attached to the `budget`, or to each of several.
        """
        acting = self._acting
        return Flow(
            acting._open_unless_closed,
            kind,
            namespace=acting.namespace,
            tags=tags,
            flow_id=flow_id,
            budget=budget,
            meet=acting.meet,
        )

    def flow_run(self, flow_id: str) -> FlowRun:
        """A flow started elsewhere, by its uuid or your own id. The app must have been open."""
        acting = self._acting
        opened = acting._require()
        named = named_flow_id(flow_id, acting.namespace)
        return FlowRun(opened, named, namespace=acting.namespace, called=flow_id)

    def run(self, task: Task[..., R], execution_id: str) -> Run[R]:
        """The run of an execution submitted elsewhere, by its full id, its uuid or your own id.

        The app must be open, or have been, on an event loop before this one.
        """
        acting = self._acting
        return acting._require().run(task, execution_id, acting.namespace)

    async def events(
        self,
        *,
        after: str = streams.NOW,
        execution_id: str | None = None,
        task: Task[..., object] | str | None = None,
        category: str | None = None,
        tag: tuple[str, str] | None = None,
    ) -> AsyncIterator[Told]:
        """Events of this app's namespace, in order and without gaps, for ever.

        Begins `now`, at the `start` of the log, or after the cursor of an event: keep the cursor
        to continue from there, in any process. `category` is `completion`, `lease`, `signal`,
        `operator`, `tag` or `budget`; `task` is a task or its name; `execution_id` is any id
        that `App.run` takes.
        """
        opened = await self._open_unless_closed()
        subscription = await streams.subscribe(
            opened.engine,
            self.namespace,
            after=after,
            execution_id=execution_id,
            task=task,
            category=category,
            tag=tag,
        )
        while (event := await streams.next_event(opened.endings, subscription)) is not None:
            yield event

    @cached_property
    def blocking(self) -> Blocking:
        """The same without an event loop, for scripts and frameworks such as Django."""
        return Blocking(self._connect, self.namespace, self.meet, lambda: self._acting.blocking)

    @cached_property
    def signals(self) -> Signals:
        """Signals for executions that wait, and the list of what they wait for."""
        return self._part(Signals)

    @cached_property
    def budgets(self) -> AppBudgets:
        """Budgets: create them, report usage, read what is left."""
        return self._part(AppBudgets)

    @cached_property
    def limits(self) -> AppLimits:
        """Limits of the app's runs: read them, or change them without a deploy."""
        return self._part(AppLimits)

    def _part(self, kind: type[Part]) -> Part:
        async def engine() -> Engine:
            return (await self._open_unless_closed()).engine

        return kind(engine, lambda: self._acting.namespace)

    # Opening and closing

    @property
    def engine(self) -> Engine:
        """The engine beneath; the app must be open."""
        return self._acting._require().engine

    async def open(self) -> Opened:
        """Connect, if it is not connected yet."""
        if self._acting is not self:
            return await self._acting.open()
        self._closed = False
        if self._opened is not None and self._opened.loop.is_closed():
            self._opened = self._guard = self._opening = None
        if self._opened is None:
            if self._opening is None:
                self._opening = asyncio.Lock()
            async with self._opening:
                if self._opened is None:
                    opened = await Opened.through(self._connect, self._open_unless_closed)
                    self._guard = _closing_at_the_end(opened)
                    await anext(self._guard)
                    self._opened = opened
        if self._opened.loop is not asyncio.get_running_loop():
            raise Unavailable("app", "it was opened on another event loop; close it there first")
        return self._opened

    def _check_usable(self) -> None:
        """Refuse to connect where nothing may be submitted or claimed."""
        check_not_imported()
        if any(each.is_open() for each in TESTS_OF_NO_APP):
            raise Unavailable(
                "app",
                f"{self!r} is not part of the test that is open: what it submits would go to its"
                " own database. Pass it, as in testing.engine(app=shop.app)",
            )

    async def _connect(self) -> Engine:
        self._check_usable()
        if self._migrate:
            await migrate(self.url)
            self._migrate = False
        return await self._connect_to(pool_max=self._pool_max)

    async def _connect_heartbeat(self) -> Engine:
        # A second engine must find the file of the first.
        return await self._connect_to(pool_max=CONNECTIONS_MAX, set_up=False)

    async def _open_unless_closed(self) -> Opened:
        """Scripts may submit without opening; after closing, that would leak a connection."""
        if self._closed and self._opened is None and self._acting is self:
            raise Unavailable("app", "it has been closed; `async with app:` opens it again")
        return await self.open()

    async def close(self) -> None:
        """Send what is pending and disconnect. The app may be opened again.

        A worker that is still running stops first and hands back its executions.
        """
        if self._acting is not self:
            return  # The test closes the app that replaces it.
        working = list(self._workers.items())
        for worker, _ in working:
            if worker.drain():
                named = worker.settings.worker_instance_id
                log.warning("the app is closed while its worker %s runs, which stops first", named)
        for _, ended in working:
            await ended.wait()
        self._closed = True
        guard, self._guard = self._guard, None
        self._opened = self._opening = None
        if guard is not None:
            await guard.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # Working

    async def run_worker(
        self,
        *,
        lanes: LaneWeights | None = None,
        capabilities: Sequence[str] = (),
        concurrency: int | None = None,
        settings: WorkerSettings | None = None,
        stop: asyncio.Event | None = None,
        signals: bool = True,
    ) -> None:
        """Run tasks until `stop` is set, or SIGTERM, SIGINT or SIGHUP arrives.

        A second signal stops handlers at once, and so does cancelling this call. Once the worker
        has stopped, the first one does what it would have done without it: SIGINT ends
        `asyncio.run` with KeyboardInterrupt, SIGTERM the process. With `signals=False` the worker
        leaves signals alone. `lanes` default to those of the app's tasks. `settings` holds
        everything else; the other arguments override it. While the database is away the worker
        waits, even at the start. Raises `DatabaseGone` if its SQLite file is deleted or replaced,
        and `AccessDenied` if a server refuses its token or one of its requests.
        """
        check_worker_settings(settings)
        chosen = (settings or WorkerSettings()).with_given(lanes, capabilities, concurrency)
        heard = await self.work(chosen, stop, signals=STOP_SIGNALS if signals else ())
        # The main task of a program learns from the return of this that the worker has stopped.
        if heard is not None and not is_main_task():
            hand_on(heard)

    async def work(
        self,
        settings: WorkerSettings,
        stop: asyncio.Event | None = None,
        *,
        signals: Sequence[StopSignal] = STOP_SIGNALS,
    ) -> StopSignal | None:
        """What `run_worker` does, but for handing on a signal: it is returned instead."""
        if not self.tasks:
            log.warning(
                "this worker has no tasks, so it runs nothing: import the modules that declare them"
                " with this App object before it starts"
            )
        opened = await waited_out(self._open_with_schedules, stop)
        if opened is None:
            return None
        worker = self._worker(opened, settings)
        await self.resources.open()
        ended = self._workers[worker] = asyncio.Event()
        try:
            with Stopping(worker, stop, signals) as stopping:
                await worker.run()
        finally:
            del self._workers[worker]
            ended.set()
            await self.resources.close()
        return stopping.heard

    async def check_ready(self) -> None:
        """Raise unless a worker of this app takes work and its database answers.

        For your own health checks; `flowfabric worker --health-port` has them built in.
        """
        if not any(worker.takes_work for worker in self._workers):
            raise Unavailable("worker", "none has started here, or it is stopping")
        with everything_within(READY_S):
            await self.engine.ping()

    async def _open_with_schedules(self) -> Opened:
        opened = await self.open()
        await self.declare_limits(opened.engine)
        await self.store_schedules(opened.engine)
        return opened

    def lanes(self) -> list[str]:
        """The lanes of the app's tasks."""
        return lanes_of(self.tasks)

    def _worker(self, opened: Opened, settings: WorkerSettings) -> Worker:
        # A database in memory cannot be opened a second time.
        in_memory = self._acting.url == MEMORY_URL
        return Worker(
            opened.engine,
            self.tasks,
            settings=settings,
            submissions=opened.submissions,
            resources=self.resources,
            middleware=self.middlewares,
            connect=None if in_memory else self._connect_heartbeat,
            namespace=self._acting.namespace,
        )

    def _require(self) -> Opened:
        if self._opened is None:
            raise Unavailable("app", "it is not open: `async with app:` or `await app.open()`")
        return self._opened


async def _closing_at_the_end(opened: Opened) -> AsyncGenerator[None, None]:
    """Close when the event loop ends: it closes remaining generators and waits for them."""
    try:
        yield
    finally:
        await opened.close()


@dataclass(frozen=True)
class TaskDecorator:
    """What `@app.task(…)` returns: makes a function a task."""

    _app: App
    _name: str | None
    _settings: TaskSettings
    _version: int

    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], Awaitable[R]], /
    ) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...
    def __call__(self, function: Callable[..., object], /) -> Task[..., object]:
        return self._app.register_task(self._name, function, self._settings, self._version)
