"""A submitted execution as its caller sees it, and the state of an open app.

All waits of a process share one reader. It looks for the ends of all awaited executions with
one statement, whenever a hint says that something has ended and now and then without a hint.

Some waits need a person: to start a worker, resume a lane or deploy compatible code. After a
few seconds the caller is told so, and told again when the reason changes, whether it waits for a
result or for what a run emits.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Generic, Self, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.checks import ENCODED
from flowfabric.core.creation import Checked
from flowfabric.core.diagnosis import Explanation, Gist, gist
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.core.policies import Duration, duration_ms
from flowfabric.core.results import Created, CreateResult
from flowfabric.core.signals import SignalResult
from flowfabric.core.states import PublicState
from flowfabric.core.views import ExecutionDetails, StepView
from flowfabric.engine.details import Outcome
from flowfabric.engine.engine import Engine
from flowfabric.engine.topics import COMPLETION_TOPIC
from flowfabric.engine.values import NO_CODEC
from flowfabric.logs import open_log
from flowfabric.outages import AFTER_ERROR_S, NEVER, level_of, statements_within
from flowfabric.parts import check_execution_in, check_task_of
from flowfabric.signals import SignalToken, send
from flowfabric.store.base import HintListener
from flowfabric.streams import Follower, Frame, without_codec
from flowfabric.submission import Options, Submissions, check_task
from flowfabric.task import Call, Task

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

log = open_log(__name__)

LOOK_AGAIN_S: Final = 1.0
READ_GAP_S: Final = 0.002
"""Between two reads, per thousand awaited executions: a burst of ends costs few reads."""
READ_TIMEOUT_S: Final = 5.0
"""How long one read may take: a network that drops it must not delay the caller."""
REASON_TIMEOUT_S: Final = 1.0
"""How long a caller whose wait timed out waits for the reason."""
TELL_AFTER_S: Final = 5.0
"""How long a caller waits before it is told what only a person can change."""
ASK_AGAIN_S: Final = 30.0
"""When to check after that whether the reason has changed."""
ASK_GAP_S: Final = 1.0
"""Between two such checks, however many callers wait."""
_ENDINGS: Final[dict[PublicState, type[errors.Unsuccessful]]] = {
    PublicState.FAILED: errors.ExecutionFailed,
    PublicState.CANCELLED: errors.ExecutionCancelled,
    PublicState.EXPIRED: errors.ExecutionExpired,
    PublicState.SKIPPED: errors.ExecutionSkipped,
}


def result_of(task: Task[..., R_co], outcome: Outcome) -> R_co:
    """The decoded result, or the error that says how it ended without one."""
    ending = _ENDINGS.get(outcome.public_state)
    if ending is not None:
        raise ending(outcome.execution_id, outcome.reason)
    if outcome.result is not None and outcome.result.startswith(ENCODED):
        what = f"the result of {task.name}"
        raise errors.CodecFailed(outcome.unread or NO_CODEC, decoding=True, what=what)
    return task.decode_result(outcome.result)


async def find_reason(engine: Engine, execution_id: ExecutionId) -> Explanation | None:
    """Why an execution has not ended, if the database says so soon."""
    try:
        with statements_within(REASON_TIMEOUT_S):
            return await engine.explain_execution(execution_id)
    except errors.FlowFabricError:
        return None


def tell_on_log(called: str, why: Explanation) -> None:
    log.warning("still waiting for %s: %s", called, why.sentence)


class Obstacles:
    """Finds out why awaited executions have not ended, one at a time, and tells their callers.

    It does not repeat what it said about another execution that is still awaited. Belongs to one
    event loop.
    """

    def __init__(
        self, engine: Engine, tell: Callable[[str, Explanation], None] = tell_on_log
    ) -> None:
        """`tell` is called with a name of the execution and the reason why it waits."""
        self._engine = engine
        self._tell = tell
        self._waits: dict[ExecutionId, int] = {}
        """How many callers wait for each."""
        self._timers: dict[ExecutionId, asyncio.TimerHandle] = {}
        self._overdue: dict[ExecutionId, None] = {}
        """What to look at next, in order."""
        self._reasons: dict[ExecutionId, Gist | None] = {}
        """The last reason; None if nobody has to act."""
        self._asker: asyncio.Task[None] | None = None

    @contextmanager
    def waiting(self, execution_id: ExecutionId) -> Iterator[None]:
        """Around a wait for an execution."""
        count = self._waits[execution_id] = self._waits.get(execution_id, 0) + 1
        if count == 1:
            self._ask_in(TELL_AFTER_S, execution_id)
        try:
            yield
        finally:
            self._waits[execution_id] -= 1
            if not self._waits[execution_id]:
                del self._waits[execution_id]
                self._timers.pop(execution_id).cancel()
                self._overdue.pop(execution_id, None)
                self._reasons.pop(execution_id, None)

    async def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        if self._asker is not None:
            self._asker.cancel()
            await asyncio.gather(self._asker, return_exceptions=True)

    def _ask_in(self, seconds: float, execution_id: ExecutionId) -> None:
        loop = asyncio.get_running_loop()
        self._timers[execution_id] = loop.call_later(seconds, self._ask_about, execution_id)

    def _ask_about(self, execution_id: ExecutionId) -> None:
        self._overdue[execution_id] = None
        if self._asker is None or self._asker.done():
            self._asker = asyncio.create_task(self._ask(), name="flowfabric-obstacles")

    async def _ask(self) -> None:
        while self._overdue:
            execution_id = next(iter(self._overdue))
            del self._overdue[execution_id]
            why = await find_reason(self._engine, execution_id)
            if execution_id in self._waits:
                self._note(execution_id, why if why is not None and why.needs_somebody else None)
                self._ask_in(ASK_AGAIN_S, execution_id)
            await asyncio.sleep(ASK_GAP_S)

    def _note(self, execution_id: ExecutionId, why: Explanation | None) -> None:
        reason = None if why is None else gist(why)
        if why is not None and reason not in self._reasons.values():
            self._tell(why.own_id or uuid_of(execution_id), why)
        self._reasons[execution_id] = reason


class Endings:
    """Waits for the ends of executions. Belongs to one event loop."""

    def __init__(self, engine: Engine, obstacles: Obstacles | None = None) -> None:
        """Without `obstacles`, callers are not told what their waits depend on."""
        self._engine = engine
        self._obstacles = obstacles
        self._awaited: dict[ExecutionId, set[asyncio.Future[Outcome]]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._hints: HintListener | None = None

    async def wait(self, execution_id: ExecutionId, timeout_s: float | None) -> Outcome:
        """Wait for the end of an execution.

        Raises `OperationTimeout` if it does not end in time, and `NotFound` if there is no such
        execution, or no longer.
        """
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(execution_id, set()).add(future)
        if self._hints is not None:
            # A new waiter looks at once.
            self._hints.wake()
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read(), name="flowfabric-results")
        started_s = time.monotonic()
        try:
            with self.waiting(execution_id):
                async with asyncio.timeout(timeout_s):
                    return await future
        except TimeoutError:
            elapsed_ms = round((time.monotonic() - started_s) * 1_000)
            why = await find_reason(self._engine, execution_id)
            called, sentence = uuid_of(execution_id), ""
            if why is not None:
                called, sentence = why.own_id or called, why.sentence
            raise errors.OperationTimeout(f"waiting for {called}", elapsed_ms, sentence) from None
        finally:
            waiting = self._awaited[execution_id]
            waiting.discard(future)
            if not waiting:
                del self._awaited[execution_id]

    happens = True
    """False under `LocalApp` (tests), where work runs only when the test drains it."""

    async def is_idle(self) -> bool:
        """Whether nothing more will end unless a test runs it."""
        return False

    def waiting(self, execution_id: ExecutionId) -> AbstractContextManager[None]:
        """Around a wait for an execution: tells its caller what only people can change."""
        return nullcontext() if self._obstacles is None else self._obstacles.waiting(execution_id)

    async def close(self) -> None:
        if self._obstacles is not None:
            await self._obstacles.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        with self._engine.store.hints([COMPLETION_TOPIC]) as hints:
            self._hints = hints
            while self._awaited:
                try:
                    with statements_within(READ_TIMEOUT_S):
                        answers = await self._look()
                except NEVER as error:
                    for future in [each for all_ in self._awaited.values() for each in all_]:
                        if not future.done():
                            future.set_exception(error)
                    return
                except errors.FlowFabricError as error:
                    log.log(level_of(error), "could not read results; trying again: %s", error)
                    await asyncio.sleep(AFTER_ERROR_S)
                    continue
                if answers:
                    hints.found_work()
                await asyncio.sleep(READ_GAP_S * (1 + len(self._awaited) / BATCH_MAX))
                if self._awaited:
                    await hints.wait(LOOK_AGAIN_S)

    async def _look(self) -> int:
        awaited, answers = list(self._awaited), 0
        for start in range(0, len(awaited), BATCH_MAX):
            known = await self._engine.find_outcomes(awaited[start : start + BATCH_MAX])
            answers += len(known.ended) + len(known.missing)
            for execution_id, outcome in known.ended.items():
                for future in self._waiting(execution_id):
                    future.set_result(outcome)
            for execution_id in known.missing:
                for future in self._waiting(execution_id):
                    future.set_exception(errors.NotFound("execution", execution_id))
        return answers

    def _waiting(self, execution_id: ExecutionId) -> list[asyncio.Future[Outcome]]:
        return [each for each in self._awaited.get(execution_id, ()) if not each.done()]


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
        return self.engine if connection is None else self.engine.on(connection, sync=self.blocks)

    def submit(
        self, calls: Sequence[Call[R]], options: Options, namespace: str, *, grouped: bool
    ) -> Coroutine[object, object, "list[Run[R]]"]:
        """Check calls now, on the thread of the caller, and store them when awaited.

        `grouped` stores a single call together with other submissions of the process.
        """
        checked = self.submissions.check(calls, options, namespace)
        return self._store(calls, checked, options.connection, namespace, grouped=grouped)

    async def _store(
        self,
        calls: Sequence[Call[R]],
        checked: Sequence[Checked],
        connection: object,
        namespace: str,
        *,
        grouped: bool,
    ) -> "list[Run[R]]":
        results: Sequence[CreateResult]
        if connection is not None and self.blocks:
            results = self.engine.create_checked_on_sync(connection, checked)
        elif connection is not None:
            results = await self.engine.create_checked_on(connection, checked)
        elif grouped:
            results = [await self.submissions.submit(each) for each in checked]
        else:
            results = await self.submissions.submit_many(checked)
        # An execution that was just created is known to be in its namespace.
        return [
            Run(
                self,
                call.task,
                each.execution_id,
                namespace=None if isinstance(each, Created) else namespace,
            )
            for call, each in zip(calls, results, strict=True)
        ]

    def run(self, task: Task[..., R], execution_id: str, namespace: str) -> "Run[R]":
        """The run of an execution submitted elsewhere; see `App.run`."""
        check_task("run", task)
        named = self.engine.named_execution_id(execution_id, namespace)
        return Run(self, task, named, namespace=namespace, called=execution_id)

    async def close(self) -> None:
        """Send what is pending, and disconnect."""
        await self.submissions.close()
        await self.endings.close()
        await self.engine.close()


class Run(Generic[R_co]):
    """One execution of a task, and a typed way to its result."""

    __slots__ = ("_called", "_looked_up", "_namespace", "_opened", "execution_id", "task")

    def __init__(
        self,
        opened: Opened,
        task: Task[..., R_co],
        execution_id: ExecutionId,
        *,
        namespace: str | None = None,
        called: str | None = None,
    ) -> None:
        """With a `namespace`, executions of other namespaces do not exist here.

        `called` is the id that the caller looked it up by: that of a run of `task`.
        """
        self.execution_id = execution_id
        self._looked_up = called is not None
        self._called = called or execution_id
        self.task = task
        self._namespace = namespace
        self._opened = opened

    def __repr__(self) -> str:
        return f"<run of {self.task.kind} {self.execution_id}>"

    async def result(self, timeout: Duration | None = None) -> R_co:
        """Wait until the run ends and return what the task returned.

        Raises `ExecutionFailed`, `ExecutionCancelled` or `ExecutionExpired` if the run ended
        without a result, `CodecFailed` if it cannot be decoded, `OperationTimeout` if it did not
        end in time, and `NotFound` if there is no such run: it was deleted, or submitted in a
        transaction that is not committed.
        """
        timeout_s = None if timeout is None else duration_ms("timeout", timeout) / 1_000
        opened = await self._checked_app()
        return result_of(self.task, await opened.endings.wait(self.execution_id, timeout_s))

    async def state(self) -> PublicState:
        opened = await self._checked_app()
        state = await opened.engine.read_execution_state(self.execution_id)
        if state is None:
            raise errors.NotFound("execution", self._called)
        return state

    async def snapshot(self) -> ExecutionDetails:
        """The whole execution as it is now, with its steps, attempts and children."""
        opened = await self._opened.on_this_loop()
        details = await opened.engine.inspect_execution(self.execution_id)
        if details is None or self._namespace not in (None, details.namespace):
            raise errors.NotFound("execution", self._called)
        if self._looked_up:
            check_task_of(details, called=self._called, kind=self.task.kind)
        return details

    async def steps(self) -> tuple[StepView, ...]:
        """What its handler has done so far, in order.

        A step that the codec cannot decode has the codec's error as its own, and no result.
        """
        return (await self.snapshot()).steps

    # What it says

    async def stream(
        self, after: str = "start", *, superseded: bool = False, live: bool = True
    ) -> AsyncIterator[Frame]:
        """Iterate over what its attempts emit, as they emit it, until the run ends.

        Begins at the `start`, `now`, or after the cursor of a frame. When a later attempt takes
        over, a frame of kind `superseded` says which earlier frames no longer count. Frames that
        are already superseded are omitted unless `superseded` is set; `live=False` omits frames
        meant only for live viewers.
        """
        follower = self.follow(after, superseded=superseded, live=live)
        while (page := await follower.next_page()) is not None:
            for frame in page:
                yield frame

    async def frames(self, *, superseded: bool = False, live: bool = True) -> list[Frame]:
        """Everything emitted so far, without waiting."""
        return await self.follow("start", superseded=superseded, live=live).now()

    async def summary(self) -> dict[str, object] | None:
        """The summary that the current attempt wrote with `ctx.summary`, if any."""
        opened = await self._checked_app()
        try:
            index = await opened.engine.read_current_attempt_index(self.execution_id)
        except errors.InvalidInput:
            raise errors.NotFound("execution", self._called) from None
        summary = await opened.engine.read_summary(self.execution_id, index)
        if summary is None:
            return None
        if summary.document.startswith(ENCODED):
            raise without_codec("the summary of the run")
        return msgspec.json.decode(summary.document, type=dict[str, object])

    def follow(self, after: str, *, superseded: bool, live: bool) -> Follower:
        async def here() -> tuple[Engine, Endings]:
            opened = await self._checked_app()
            return opened.engine, opened.endings

        return Follower(
            here,
            self.execution_id,
            after=after,
            superseded=superseded,
            live=live,
        )

    async def cancel(self, reason: str = "cancelled by its submitter") -> None:
        """End the run, whatever it is doing. Raises `Terminal` if it already ended differently."""
        opened = await self._checked_app()
        try:
            await opened.engine.cancel_execution(self.execution_id, reason=reason)
        except errors.InvalidInput as error:
            # Its id is good, so this can only be about how it ended.
            if error.field != "execution_id":
                raise
            raise errors.Terminal(
                f"{self._called}: {error.problem}; there is nothing to cancel, and only a replay"
                " would run it again"
            ) from None

    async def signal(
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
        """Send the run a signal: with a token, or without one as an operator.

        `source` names the sender, for waits that count distinct sources. If nothing waits for
        `name` yet, the next wait for that name takes the signal; with `keep=False` this raises
        `WaitpointNotFound` instead. With `connection=` the signal is sent if and when that
        connection's transaction commits.
        """
        opened = self._opened = await self._opened.on_this_loop()
        engine = opened.engine_on(connection)
        if self._looked_up and connection is not None:
            # Nothing is known for good there: what is in the transaction may be rolled back.
            await self._check(engine)
        elif self._looked_up:
            await self._checked_app()
        return await send(
            engine,
            self.execution_id,
            name,
            payload,
            token=token,
            source=source,
            idempotency_key=idempotency_key,
            namespace=self._namespace,
            keep=keep,
            called=self._called,
        )

    async def accept_changes(self) -> None:
        """Let the run continue although changed code blocks it; see `Engine.accept_changes`."""
        opened = await self._checked_app()
        await opened.engine.accept_changes(self.execution_id)

    async def why(self) -> Explanation:
        """Why it is not running, or how it ended, in one sentence."""
        opened = await self._checked_app()
        return await opened.engine.explain_execution(self.execution_id)

    async def _checked_app(self) -> Opened:
        """The app, once the execution is known to be in its namespace; executions never move."""
        opened = self._opened = await self._opened.on_this_loop()
        await self._check(opened.engine)
        self._namespace = None
        return opened

    async def _check(self, engine: Engine) -> None:
        if self._namespace is not None:
            await check_execution_in(
                self._namespace,
                engine,
                self.execution_id,
                called=self._called,
                kind=self.task.kind if self._looked_up else None,
            )
