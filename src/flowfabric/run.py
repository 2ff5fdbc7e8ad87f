"""A submitted execution, as its caller sees it.

All waits of a process share one reader. It looks for the ends of all awaited
executions with one statement, whenever a hint says that something has ended and now and
then without a hint.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.checks import ENCODED
from flowfabric.core.diagnosis import Explanation
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.core.policies import Duration, duration_ms
from flowfabric.core.signals import SignalResult
from flowfabric.core.states import PublicState
from flowfabric.core.views import ExecutionDetails, StepView
from flowfabric.engine.details import Outcome
from flowfabric.engine.engine import Engine
from flowfabric.engine.topics import COMPLETION_TOPIC
from flowfabric.logs import open_log
from flowfabric.obstacles import Obstacles, find_reason
from flowfabric.outages import AFTER_ERROR_S, NEVER, level_of, statements_within
from flowfabric.parts import check_execution_in
from flowfabric.signals import SignalToken, send
from flowfabric.store.base import HintListener
from flowfabric.streams import Follower, Frame, without_codec
from flowfabric.task import Task

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

log = open_log(__name__)

Document = dict[str, object]

LOOK_AGAIN_S: Final = 1.0
READ_GAP_S: Final = 0.002
"""Between two reads, per thousand awaited executions: a burst of ends costs few reads."""
READ_TIMEOUT_S: Final = 5.0
"""How long one read may take: a network that drops it must not delay the caller."""
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
    return task.decode_result(outcome.result)


class Endings:
    """Waits for the ends of executions. Belongs to one event loop."""

    def __init__(self, engine: Engine, obstacles: Obstacles | None = None) -> None:
        """Without `obstacles`, nobody is told what a wait is for."""
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
        if self._obstacles is not None:
            self._obstacles.begin(execution_id)
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            elapsed_ms = round((time.monotonic() - started_s) * 1_000)
            raise await self._timed_out(execution_id, elapsed_ms) from None
        finally:
            if self._obstacles is not None:
                self._obstacles.end(execution_id)
            self._end_wait(execution_id, future)

    def _end_wait(self, execution_id: ExecutionId, future: asyncio.Future[Outcome]) -> None:
        waiting = self._awaited.get(execution_id)
        if waiting is None:
            return
        waiting.discard(future)
        if not waiting:
            del self._awaited[execution_id]

    async def _timed_out(
        self, execution_id: ExecutionId, elapsed_ms: int
    ) -> errors.OperationTimeout:
        """The error, with the reason why it has not ended if the database gives it soon."""
        why = await find_reason(self._engine, execution_id)
        if why is None:
            return errors.OperationTimeout(f"waiting for {uuid_of(execution_id)}", elapsed_ms)
        called = why.own_id or uuid_of(execution_id)
        return errors.OperationTimeout(f"waiting for {called}", elapsed_ms, why.sentence)

    happens = True
    """False under `LocalApp` (tests), where work runs only when the test drains it."""

    async def is_idle(self) -> bool:
        """Whether nothing more will end unless a test runs it."""
        return False

    def waiting(self, execution_id: ExecutionId) -> AbstractContextManager[None]:
        """Around a wait for anything of an execution: what only people can change is told."""
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
                        found = await self._look()
                except NEVER as error:
                    for future in [each for all_ in self._awaited.values() for each in all_]:
                        if not future.done():
                            future.set_exception(error)
                    return
                except errors.FlowFabricError as error:
                    log.log(level_of(error), "could not read results; trying again: %s", error)
                    await asyncio.sleep(AFTER_ERROR_S)
                    continue
                if found:
                    hints.found_work()
                await asyncio.sleep(READ_GAP_S * (1 + len(self._awaited) / BATCH_MAX))
                if self._awaited:
                    await hints.wait(LOOK_AGAIN_S)

    async def _look(self) -> int:
        asked = list(self._awaited)
        found = 0
        for start in range(0, len(asked), BATCH_MAX):
            known = await self._engine.find_outcomes(asked[start : start + BATCH_MAX])
            found += len(known.ended) + len(known.missing)
            for execution_id, outcome in known.ended.items():
                for future in self._waiting(execution_id):
                    future.set_result(outcome)
            for execution_id in known.missing:
                for future in self._waiting(execution_id):
                    future.set_exception(errors.NotFound("execution", execution_id))
        return found

    def _waiting(self, execution_id: ExecutionId) -> list[asyncio.Future[Outcome]]:
        return [each for each in self._awaited.get(execution_id, ()) if not each.done()]


class OpenedApp(Protocol):
    """What a run needs of an app that is open."""

    @property
    def engine(self) -> Engine: ...
    @property
    def endings(self) -> Endings: ...
    def engine_on(self, connection: object) -> Engine: ...
    async def on_this_loop(self) -> "OpenedApp":
        """The same on the event loop of the caller."""
        ...


class Run(Generic[R_co]):
    """One execution of a task, and a typed way to its result."""

    __slots__ = ("_called", "_namespace", "_opened", "execution_id", "task")

    def __init__(
        self,
        opened: OpenedApp,
        task: Task[..., R_co],
        execution_id: ExecutionId,
        *,
        namespace: str | None = None,
        called: str | None = None,
    ) -> None:
        """With a `namespace`, executions of other namespaces do not exist here.

        `called` is the id that the caller used.
        """
        self.execution_id = execution_id
        self._called = called or execution_id
        self.task = task
        self._namespace = namespace
        self._opened = opened

    def __repr__(self) -> str:
        return f"<run of {self.task.kind} {self.execution_id}>"

    async def result(self, timeout: Duration | None = None) -> R_co:
        """Wait for the end and return what the task returned.

        Raises `ExecutionFailed`, `ExecutionCancelled` or `ExecutionExpired` when it
        ended otherwise, `OperationTimeout` when it did not end in time, and `NotFound`
        when there is no such run: it was deleted, or submitted in a transaction that has
        not been committed.
        """
        timeout_s = None if timeout is None else duration_ms("timeout", timeout) / 1_000
        opened = await self._checked_app()
        return result_of(self.task, await opened.endings.wait(self.execution_id, timeout_s))

    async def state(self) -> PublicState:
        opened = await self._checked_app()
        found = await opened.engine.read_execution_state(self.execution_id)
        if found is None:
            raise errors.NotFound("execution", self._called)
        return found

    async def snapshot(self) -> ExecutionDetails:
        """The whole execution as it is now, with its steps, attempts and children."""
        opened = await self._opened.on_this_loop()
        found = await opened.engine.inspect_execution(self.execution_id)
        if found is None or self._namespace not in (None, found.namespace):
            raise errors.NotFound("execution", self._called)
        return found

    async def steps(self) -> tuple[StepView, ...]:
        """What its handler has done so far, in the order it was done in."""
        return (await self.snapshot()).steps

    # What it says

    async def stream(
        self, after: str = "start", *, superseded: bool = False, live: bool = True
    ) -> AsyncIterator[Frame]:
        """What its attempts emit, as it comes; ends when the run ends.

        From the `start`, from `now` on, or after the cursor of a frame. When a later attempt
        takes over, a frame of kind `superseded` says which earlier frames no longer count. Frames
        that are already superseded are omitted unless `superseded` is set; `live=False` omits
        frames meant only for those watching live.
        """
        follower = self.follow(after, superseded=superseded, live=live)
        while (page := await follower.next_page()) is not None:
            for frame in page:
                yield frame

    async def frames(self, *, superseded: bool = False, live: bool = True) -> list[Frame]:
        """What it has emitted so far, without waiting."""
        return await self.follow("start", superseded=superseded, live=live).now()

    async def summary(self) -> dict[str, object] | None:
        """The summary its current attempt has written with `ctx.summary`, if any."""
        opened = await self._checked_app()
        try:
            index = await opened.engine.read_current_attempt_index(self.execution_id)
        except errors.InvalidInput:
            raise errors.NotFound("execution", self._called) from None
        found = await opened.engine.read_summary(self.execution_id, index)
        if found is None:
            return None
        if found.document.startswith(ENCODED):
            raise without_codec("the summary of the run")
        return msgspec.json.decode(found.document, type=Document)

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
        """End it, whatever it is doing. Raises `Terminal` if it has already ended another way."""
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
        """Send what it waits for: with a token, or without one as an operator.

        `source` names the sender, for waits that count distinct sources. If nothing waits for
        `name` yet, the next wait for that name takes the signal; with `keep=False` this raises
        `WaitpointNotFound` instead. With `connection=` the signal is sent if and when that
        connection's transaction commits.
        """
        opened = await self._opened.on_this_loop()
        return await send(
            opened.engine_on(connection),
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
        """Let it run on although changed code has blocked it; see `Engine.accept_changes`."""
        opened = await self._checked_app()
        await opened.engine.accept_changes(self.execution_id)

    async def why(self) -> Explanation:
        """Why it is not running, or how it ended, in one sentence."""
        opened = await self._checked_app()
        return await opened.engine.explain_execution(self.execution_id)

    async def _checked_app(self) -> OpenedApp:
        """The app, once the execution is known to be in its namespace; executions never move."""
        opened = self._opened = await self._opened.on_this_loop()
        if self._namespace is not None:
            await check_execution_in(
                self._namespace, opened.engine, self.execution_id, called=self._called
            )
            self._namespace = None
        return opened
