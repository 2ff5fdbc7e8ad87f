"""Submitting and waiting without an event loop.

One background thread runs an event loop and the connections; any number of
threads may call. Meant for scripts, Django views and other code that is not
async. The thread starts with the first call and ends with the process or `close`.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Generic, ParamSpec, Self, TypeVar, TypeVarTuple, Unpack, overload

from flowfabric import feed
from flowfabric.budgets import refuse_breach
from flowfabric.connection import Opened
from flowfabric.core.budgets import Amounts
from flowfabric.core.diagnosis import Explanation
from flowfabric.core.policies import Duration
from flowfabric.core.signals import SignalResult
from flowfabric.core.states import PublicState
from flowfabric.core.views import ExecutionDetails, StepView
from flowfabric.engine.budgets import BudgetStatus, usage_answer
from flowfabric.engine.engine import Engine
from flowfabric.engine.events import Told
from flowfabric.engine.ledger import Usage
from flowfabric.engine.waitpoints import Inbox
from flowfabric.errors import Unavailable
from flowfabric.registry import check_calls, check_task
from flowfabric.run import Run
from flowfabric.signals import SignalToken, deliver, send, send_named, token_for
from flowfabric.store.base import drive
from flowfabric.streams import Frame
from flowfabric.submission import check_options, read_submission
from flowfabric.task import Call, SubmitOptions, Task

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Blocking:
    """An app's submitting side for code without an event loop. Safe from any thread."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Engine]],
        namespace: str,
        meet: Callable[[Task[..., object]], None],
        acting: "Callable[[], Blocking] | None" = None,
    ) -> None:
        """`meet` is told of every task that is submitted; `acting` finds who does the work."""
        self._meet = meet
        self._acting = acting
        self.namespace = namespace
        self._connect = connect
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: Opened | None = None
        self._process = 0

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
    def submit(self, what: object, /, *args: object, **given: object) -> "BlockingRun[object]":
        """Store an execution; see `App.submit`."""
        call, options = read_submission(what, args, given)
        acting = self.acting
        acting._meet(call.task)
        opened = acting._open()
        (checked,) = opened.submissions.check([call], options, acting.namespace)
        if options.connection is None:
            created = acting.wait(opened.submissions.submit(checked))
        else:
            (created,) = opened.engine.create_checked_on_sync(options.connection, [checked])
        return BlockingRun(acting, opened.run_of(call.task, created, acting.namespace))

    def submit_many(
        self, calls: Sequence[Call[R]], **options: Unpack[SubmitOptions]
    ) -> "list[BlockingRun[R]]":
        """Submit many calls at once; see `App.submit_many`."""
        chosen, calls = check_options(options), check_calls(calls)
        acting = self.acting
        for task in {call.task: None for call in calls}:
            acting._meet(task)
        opened = acting._open()
        checked = opened.submissions.check(calls, chosen, acting.namespace)
        if chosen.connection is None:
            created = acting.wait(opened.submissions.submit_many(checked))
        else:
            created = opened.engine.create_checked_on_sync(chosen.connection, checked)
        return [
            BlockingRun(acting, opened.run_of(call.task, each, acting.namespace))
            for call, each in zip(calls, created, strict=True)
        ]

    def run(self, task: Task[..., R], execution_id: str) -> "BlockingRun[R]":
        """The run of an execution submitted elsewhere; see `App.run`."""
        check_task("run", task)
        acting = self.acting
        opened = acting._open()
        checked = opened.engine.named_execution_id(execution_id, acting.namespace)
        run = Run(opened, task, checked, namespace=acting.namespace, called=execution_id)
        return BlockingRun(acting, run)

    def events(
        self,
        *,
        after: str = feed.NOW,
        execution_id: str | None = None,
        task: Task[..., object] | str | None = None,
        category: str | None = None,
        tag: tuple[str, str] | None = None,
    ) -> Iterator[Told]:
        """What happens to the app's executions, as it happens; see `App.events`. Begins at once."""
        acting = self.acting
        opened = acting._open()
        subscription = acting.wait(
            feed.subscribe(
                opened.engine,
                acting.namespace,
                after=after,
                execution_id=execution_id,
                task=task,
                category=category,
                tag=tag,
            )
        )
        return iter(lambda: acting.wait(feed.next_told(opened, subscription)), None)

    @property
    def signals(self) -> "BlockingSignals":
        """Signals for what waits; see `App.signals`."""
        return BlockingSignals(self)

    @property
    def budgets(self) -> "BlockingBudgets":
        """What runs may spend; see `App.budgets`."""
        return BlockingBudgets(self)

    @property
    def acting(self) -> "Blocking":
        """What does the work: this, unless a test stands in for its app."""
        return self if self._acting is None else self._acting()

    def open(self) -> Engine:
        """The engine on the background loop, connected if it was not yet."""
        return self.acting._open().engine

    def wait(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the background loop and wait for it."""
        with self._lock:
            if self._loop is None:
                work.close()
                raise _closed()
            waited = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return waited.result()
        except CancelledError:
            raise _closed() from None

    def sending(
        self, connection: object, work: Callable[[Engine], Coroutine[object, object, T]]
    ) -> T:
        """Do something on the background loop; or on this thread, inside a transaction of it."""
        engine = self._open().engine
        if connection is None:
            return self.wait(work(engine))
        return _on_this_thread(work(engine.on(connection, sync=True)))

    def close(self) -> None:
        """End the background thread. The next call starts another."""
        with self._lock:
            loop, opened = self._loop, self._opened
            self._loop = self._opened = None
        if loop is None or self._process != os.getpid():
            return
        if opened is not None:
            asyncio.run_coroutine_threadsafe(opened.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self) -> Opened:
        with self._lock:
            # A forked process has none of its parent's threads.
            if self._opened is None or self._process != os.getpid():
                self._process = os.getpid()
                self._loop = _start_loop()
                self._opened = self.wait(Opened.through(self._connect))
            return self._opened


def _on_this_thread(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine on this thread, to which the caller's connection belongs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return drive(work)


def _closed() -> Unavailable:
    return Unavailable("app.blocking", "it was closed meanwhile; call it again")


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        # Threads may still wait for these.
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.wait(left) if left else asyncio.sleep(0))
        loop.close()

    threading.Thread(target=run, name="flowfabric-blocking", daemon=True).start()
    return loop


class BlockingRun(Generic[R_co]):
    """A submitted execution, for code without an event loop."""

    def __init__(self, blocking: Blocking, run: Run[R_co]) -> None:
        self.execution_id = run.execution_id
        self._blocking = blocking
        self._run = run

    def result(self, timeout: Duration | None = None) -> R_co:
        """Wait for the end and return what the task returned; see `Run.result`."""
        return self._blocking.wait(self._run.result(timeout))

    def state(self) -> PublicState:
        return self._blocking.wait(self._run.state())

    def cancel(self, reason: str = "cancelled by its submitter") -> None:
        self._blocking.wait(self._run.cancel(reason))

    def signal(
        self,
        name: str,
        payload: object = None,
        *,
        token: SignalToken | str | None = None,
        source: str = "",
        idempotency_key: str | None = None,
        keep: bool = True,
        connection: object = None,
    ) -> SignalResult:
        """Send what it waits for; see `Run.signal`. `connection` is one that is not async."""
        return self._blocking.sending(
            connection,
            lambda engine: send(
                engine,
                self.execution_id,
                name,
                payload,
                token=token,
                source=source,
                idempotency_key=idempotency_key,
                namespace=self._blocking.namespace,
                keep=keep,
            ),
        )

    def snapshot(self) -> ExecutionDetails:
        """Everything there is to see of the execution now; see `Run.snapshot`."""
        return self._blocking.wait(self._run.snapshot())

    def steps(self) -> tuple[StepView, ...]:
        """What its handler has done so far; see `Run.steps`."""
        return self._blocking.wait(self._run.steps())

    def stream(
        self, after: str = "start", *, superseded: bool = False, live: bool = True
    ) -> Iterator[Frame]:
        """What its attempts emit, as it comes; see `Run.stream`."""
        follower = self._run.follow(after, superseded=superseded, live=live)
        while (page := self._blocking.wait(follower.next_page())) is not None:
            yield from page

    def frames(self, *, superseded: bool = False, live: bool = True) -> list[Frame]:
        """What it has said so far, without waiting."""
        return self._blocking.wait(self._run.frames(superseded=superseded, live=live))

    def summary(self) -> dict[str, object] | None:
        """What its current attempt has summed up; see `Run.summary`."""
        return self._blocking.wait(self._run.summary())

    def accept_changes(self) -> None:
        """Let it run on although changed code has blocked it; see `Run.accept_changes`."""
        self._blocking.wait(self._run.accept_changes())

    def why(self) -> Explanation:
        return self._blocking.wait(self._run.why())


class BlockingBudgets:
    """Budgets, for code without an event loop."""

    def __init__(self, blocking: Blocking) -> None:
        self._given = blocking

    @property
    def _blocking(self) -> Blocking:
        return self._given.acting

    def report(
        self, name: str, amounts: Amounts, *, key: str | None = None, connection: object = None
    ) -> None:
        """Count what was used; see `AppBudgets.report`."""
        namespace = self._blocking.namespace
        usage = Usage(budget_id=name, amounts=amounts, namespace=namespace, dedup_key=key)
        told = self._blocking.sending(connection, lambda engine: engine.post_to_budgets([usage]))
        refuse_breach(name, usage_answer(told), amounts)

    def status(self, name: str) -> BudgetStatus:
        """What is used, reserved and left of it."""
        namespace = self._blocking.namespace
        return self._blocking.sending(
            None, lambda engine: engine.get_budget_status(name, namespace=namespace)
        )

    def reset(self, name: str) -> BudgetStatus:
        """Start a new period now: nothing is used."""
        namespace = self._blocking.namespace
        self._blocking.sending(None, lambda engine: engine.reset_budget(name, namespace=namespace))
        return self.status(name)


class BlockingSignals:
    """Signals, for code without an event loop."""

    def __init__(self, blocking: Blocking) -> None:
        self._given = blocking

    @property
    def _blocking(self) -> Blocking:
        return self._given.acting

    def deliver(
        self,
        token: SignalToken | str,
        name: str,
        payload: object = None,
        *,
        source: str = "",
        idempotency_key: str | None = None,
        connection: object = None,
    ) -> SignalResult:
        """Send a signal to whatever the token was made for; see `Signals.deliver`."""
        return self._blocking.sending(
            connection,
            lambda engine: deliver(
                engine,
                token,
                name,
                payload,
                source=source,
                idempotency_key=idempotency_key,
                namespace=self._blocking.namespace,
            ),
        )

    def send(
        self,
        execution_id: str,
        name: str,
        payload: object = None,
        *,
        source: str = "",
        idempotency_key: str | None = None,
        keep: bool = True,
        connection: object = None,
    ) -> SignalResult:
        """Send a signal as an operator, without a token; see `Signals.send`."""
        return self._blocking.sending(
            connection,
            lambda engine: send_named(
                engine,
                execution_id,
                name,
                payload,
                source=source,
                idempotency_key=idempotency_key,
                namespace=self._blocking.namespace,
                keep=keep,
            ),
        )

    def token(self, execution_id: str, name: str) -> SignalToken:
        """The token of what an execution waits for under a name, to hand out."""
        engine = self._blocking.open()
        namespace = self._blocking.namespace
        return self._blocking.wait(token_for(engine, execution_id, name, namespace=namespace))

    def pending(self, *, cursor: str | None = None, limit: int = 100) -> Inbox:
        """What suspended executions wait for; see `Signals.pending`."""
        engine = self._blocking.open()
        namespace = self._blocking.namespace
        return self._blocking.wait(
            engine.list_inbox(namespace=namespace, cursor=cursor, limit=limit)
        )
