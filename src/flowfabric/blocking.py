"""Submitting and waiting without an event loop, for scripts, Django views and the like.

One background thread runs an event loop with the connections; any number of threads may
call. It starts with the first call and ends with the process or `close`.
"""

import asyncio
import atexit
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Concatenate, Final, ParamSpec, Self, TypeVar, TypeVarTuple, Unpack, overload

from flowfabric import streams
from flowfabric.budgets import AppBudgets
from flowfabric.core.policies import Duration
from flowfabric.engine.engine import Engine
from flowfabric.engine.events import Subscription, Told
from flowfabric.errors import FlowFabricError, InvalidInput, Unavailable
from flowfabric.parts import AppPart, Twin, waits
from flowfabric.run import Opened, Run
from flowfabric.signals import Signals
from flowfabric.store.base import drive
from flowfabric.streams import Frame
from flowfabric.submission import Options, check_calls, check_options, read_submission
from flowfabric.task import Call, SubmitOptions, Task

P = ParamSpec("P")
Part_co = TypeVar("Part_co", bound=AppPart, covariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

AT_EXIT_S: Final = 2.0
"""How long the end of the process waits for the database, and then for a background loop."""
CANCELS_MAX: Final = 10
"""How many rounds of cancelling there are: a task that is cancelled may start another."""


def _iterated(
    subscribe: Callable[Concatenate[Engine, str, P], Coroutine[object, object, Subscription[Told]]],
) -> "Callable[Concatenate[Blocking, P], Iterator[Told]]":
    """A function that subscribes, as a method that iterates. It begins when it is called."""

    def iterate(self: "Blocking", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Told]:
        acting = self.acting
        opened = acting._open()
        subscription = acting.wait(subscribe(opened.engine, acting.namespace, *args, **kwargs))
        read = partial(streams.next_event, opened.endings, subscription)
        return iter(lambda: acting.wait(read()), None)

    functools.update_wrapper(iterate, subscribe)
    return iterate


class Blocking:
    """An app's submitting side for code without an event loop. Safe from any thread."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Engine]],
        namespace: str,
        meet: Callable[[Task[..., object]], None],
        acting: "Callable[[], Blocking] | None" = None,
    ) -> None:
        """`meet` is called with every task submitted; `acting` returns what does the work."""
        self._meet = meet
        self._acting = acting
        self.namespace = namespace
        self._connect = connect
        self._lock = threading.RLock()
        self._background: BackgroundLoop | None = None
        self._opened: Opened | None = None

    @overload
    def submit(
        self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> "BlockingRun[R]": ...
    @overload
    def submit(
        self,
        task: Callable[[Unpack[Ts]], Call[R]],
        /,
        *args: *Ts,
        **options: Unpack[SubmitOptions],
    ) -> "BlockingRun[R]": ...
    @overload
    def submit(self, call: Call[R], /, **options: Unpack[SubmitOptions]) -> "BlockingRun[R]": ...
    def submit(self, what: object, /, *args: object, **keywords: object) -> "BlockingRun[object]":
        """Store an execution; see `App.submit`."""
        call, options = read_submission(what, args, keywords)
        (run,) = self._submit([call], options, grouped=True)
        return run

    def submit_many(
        self, calls: Sequence[Call[R]], **options: Unpack[SubmitOptions]
    ) -> "list[BlockingRun[R]]":
        """Submit many calls at once; see `App.submit_many`."""
        chosen = check_options(options)
        return self._submit(check_calls(calls), chosen, grouped=False)

    def _submit(
        self, calls: Sequence[Call[R]], options: Options, *, grouped: bool
    ) -> "list[BlockingRun[R]]":
        acting = self.acting
        for task in {call.task: None for call in calls}:
            acting._meet(task)
        work = acting._open().submit(calls, options, acting.namespace, grouped=grouped)
        return [BlockingRun(acting, run) for run in acting.sending(options.connection, work)]

    def run(self, task: Task[..., R], execution_id: str) -> "BlockingRun[R]":
        """The run of an execution submitted elsewhere; see `App.run`."""
        acting = self.acting
        return BlockingRun(acting, acting._open().run(task, execution_id, acting.namespace))

    events = _iterated(streams.subscribe)

    @property
    def signals(self) -> "BlockingSignals":
        """Signals for what waits; see `App.signals`."""
        return BlockingSignals(self, Signals)

    @property
    def budgets(self) -> "BlockingBudgets":
        """What runs may spend; see `App.budgets`."""
        return BlockingBudgets(self, AppBudgets)

    @property
    def acting(self) -> "Blocking":
        """What does the work: this one, unless a test app replaces its app."""
        return self if self._acting is None else self._acting()

    def open(self) -> Engine:
        """The engine on the background loop; connects first if necessary."""
        return self.acting._open().engine

    def wait(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the background loop and wait for it."""
        with self._lock:
            if self._background is None:
                work.close()
                raise _closed()
            waited = self._background.begin(work)
        try:
            return waited.result()
        except CancelledError:
            raise _closed() from None

    def check_may_wait(self, verb: str) -> None:
        """Refuse to hold up an event loop until something happens that may need that loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise InvalidInput(
            f"app.blocking…{verb}",
            "waits, and would hold up this event loop; use the method of app itself, with await",
        )

    def sending(self, connection: object, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the background loop, or on this thread if it is inside the
        transaction of a connection.

        There it never waits, and runs without an event loop: Django, for one, hands out its
        connection only where none runs.
        """
        return self.wait(work) if connection is None else drive(work)

    def close(self) -> None:
        """End the background thread. The next call starts another."""
        self._end(None)

    def _close_at_exit(self) -> None:
        """Leave the database, if it answers; nobody is left to be told that it did not."""
        # A store that needs a pool of threads finds it closed by now: a `RuntimeError`.
        with suppress(FlowFabricError, TimeoutError, CancelledError, RuntimeError):
            self._end(AT_EXIT_S)

    def _end(self, patience_s: float | None) -> None:
        with self._lock:
            background, opened = self._background, self._opened
            self._background = self._opened = None
        atexit.unregister(self._close_at_exit)
        # A forked process has the loop but not its thread.
        if background is None or background.process != os.getpid():
            return
        try:
            if opened is not None:
                background.begin(opened.close()).result(patience_s)
        finally:
            background.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self) -> Opened:
        with self._lock:
            # A forked process has none of its parent's threads.
            background = self._background
            if background is None or self._opened is None or background.process != os.getpid():
                self._background = BackgroundLoop()
                atexit.register(self._close_at_exit)
                self._opened = self.wait(Opened.through(self._connect, blocks=True))
            return self._opened


def _closed() -> Unavailable:
    return Unavailable("app.blocking", "it was closed meanwhile; call it again")


class BackgroundLoop:
    """An event loop on a thread of its own, until it is stopped."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="flowfabric-blocking", daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[object, object, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """Cancel what runs on the loop and end its thread, unless it has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(AT_EXIT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._stopped.wait())
        # Threads may still wait for tasks, and one that is cancelled may start another to clean
        # up. Python complains about each task that is destroyed while it waits.
        for _ in range(CANCELS_MAX):
            if not (left := asyncio.all_tasks(self._loop)):
                break
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()


class BlockingRun(Twin[Run[R_co]]):
    """A submitted execution, for code without an event loop."""

    def __init__(self, blocking: Blocking, run: Run[R_co]) -> None:
        self.execution_id = run.execution_id
        self._blocking = blocking
        self._run = run

    def _call(
        self, method: Callable[[Run[R_co]], Coroutine[object, object, T]], connection: object
    ) -> T:
        return self._blocking.sending(connection, method(self._run))

    def result(self, timeout: Duration | None = None) -> R_co:
        """Wait for the end and return what the task returned; see `Run.result`."""
        self._blocking.check_may_wait("result")
        return self._blocking.wait(self._run.result(timeout))

    def stream(
        self, after: str = "start", *, superseded: bool = False, live: bool = True
    ) -> Iterator[Frame]:
        """What its attempts emit, as it comes; see `Run.stream`."""
        follower = self._run.follow(after, superseded=superseded, live=live)
        while (page := self._blocking.wait(follower.next_page())) is not None:
            yield from page

    state = waits(Run.state)
    cancel = waits(Run.cancel)
    signal = waits(Run.signal)
    snapshot = waits(Run.snapshot)
    steps = waits(Run.steps)
    frames = waits(Run.frames)
    summary = waits(Run.summary)
    accept_changes = waits(Run.accept_changes)
    why = waits(Run.why)


class BlockingPart(Twin[Part_co]):
    """A part of an app, for code without an event loop."""

    def __init__(self, blocking: Blocking, part: type[Part_co]) -> None:
        self._blocking = blocking
        self._part = part

    def _call(
        self, method: Callable[[Part_co], Coroutine[object, object, T]], connection: object
    ) -> T:
        acting = self._blocking.acting
        part = self._part.on(acting.open(), acting.namespace)
        return acting.sending(connection, method(part))


class BlockingSignals(BlockingPart[Signals]):
    """Signals, for code without an event loop."""

    deliver = waits(Signals.deliver)
    send = waits(Signals.send)
    token = waits(Signals.token)
    pending = waits(Signals.pending)


class BlockingBudgets(BlockingPart[AppBudgets]):
    """Budgets, for code without an event loop."""

    status = waits(AppBudgets.status)
    reset = waits(AppBudgets.reset)
    report = waits(AppBudgets.report)
