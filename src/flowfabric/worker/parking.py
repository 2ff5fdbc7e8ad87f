"""Letting go of the worker in the middle of a handler.

A branch that has to wait long says so and stops there. The handler is parked when
nothing else in it is running: no call of another branch is under way, no branch works outside
calls, and it is at rest. So a result on its way to another branch is still used, and an exception
on its way out of the handler ends the run: it takes precedence over a wait. Until the handler is
parked, each wait checks for itself whether it is over.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from msgspec import Struct

from flowfabric.core.conditions import Condition
from flowfabric.core.ids import ExecutionId
from flowfabric.core.journal import Order
from flowfabric.core.waitpoints import FreshWaitpoint
from flowfabric.errors import CodecFailed, CodeMismatch, InvalidInput, Unsuccessful
from flowfabric.json_values import UNREADABLE
from flowfabric.worker.asyncio_tasks import current_line
from flowfabric.worker.branches import Line
from flowfabric.worker.failures import text_of

# When a handler has come to rest: it has reacted to all it was given, and waits for more
#
# A handler cannot be asked. It is taken to be at rest when, for some turns of the event loop, none
# of its tasks has begun or ended and none of its calls was made or has ended. Work outside steps,
# such as a request, leaves no such sign and counts as rest. A handler that never rests, because it
# starts task after task, gets what it waits for anyway.

QUIET_TURNS: Final = 20
"""Turns of the event loop without a sign of the handler, after which it is at rest."""
LOOK_TURNS: Final = (3, QUIET_TURNS)
"""When to look what its tasks wait for: also at what is over before it is at rest."""
TURNS_MAX: Final = 2_000
"""Turns after which a handler that is not at rest is treated as if it were."""


class Rest:
    """Tells its watchers that the handler is at rest."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._quiet_turns = 0
        self._turns = 0
        self._watching = False
        self._watchers: list[Callable[[], bool]] = []
        self.look: Callable[[], None] = _nothing
        """Called when the handler has reacted, for some turns, to what it was given."""

    def add_watcher(self, at_rest: Callable[[], bool]) -> None:
        """Call this at rest, before earlier watchers, until one returns that it has acted."""
        self._watchers.insert(0, at_rest)

    @property
    def reached(self) -> bool:
        """Whether the handler is at rest, as far as it was watched."""
        return self._quiet_turns >= QUIET_TURNS

    def moved(self) -> None:
        """There was a sign of the handler."""
        self._quiet_turns = 0

    def watch(self) -> None:
        """Some watcher wants to know when it is at rest."""
        if not self._watching:
            self._watching = True
            self._turns = 0
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        if not self.reached and self._turns < TURNS_MAX:
            self._quiet_turns += 1
            self._turns += 1
            if self._quiet_turns in LOOK_TURNS:
                self.look()
            self._loop.call_soon(self._look)
            return
        self._watching = False
        for at_rest in self._watchers:
            if at_rest():
                return

    def let_go(self) -> None:
        """Drop references back here."""
        self._watchers.clear()
        self.look = _nothing


LOOK_AGAIN_S: Final = 1.0
"""How often a branch that works is looked at again: it may have come to wait for another."""


class Pause(Struct, frozen=True, kw_only=True):
    """A suspension as a handler wants it."""

    suspension_id: str
    condition: Condition
    timeout_in_ms: int | None
    fresh: tuple[FreshWaitpoint, ...]
    """A waitpoint for each name it waits for, where none was made beforehand."""


class Parking:
    """What the branches of one handler wait for."""

    def __init__(self, park: Callable[[], None]) -> None:
        self._park = park
        self._busy = 0
        self._ended = False
        self.at_work: Callable[[], bool] = _nobody
        """Whether a branch works outside of calls."""
        self._look: asyncio.TimerHandle | None = None
        self._decided = False
        self._stopped: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.rest = Rest()
        self.rest.add_watcher(self._at_rest)
        self.until_ms: list[int] = []
        self.executions: list[ExecutionId] = []
        self.pause: Pause | None = None
        self._mismatches: list[CodeMismatch] = []

    @property
    def mismatch(self) -> CodeMismatch | None:
        """Why the code does not fit what is stored; nothing else is waited for then."""
        return self._mismatches[0] if self._mismatches else None

    @property
    def wanted(self) -> bool:
        return bool(self.until_ms or self.executions or self.pause or self.mismatch)

    def working(self) -> "Working":
        """Around whatever must not be cut off."""
        return Working(self)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Around a wait for other branches: those that go on are busy themselves."""
        self.end()
        try:
            yield
        finally:
            self.begin()

    def begin(self) -> None:
        self._busy += 1
        self.moved()

    def end(self) -> None:
        self._busy -= 1
        self.moved()

    def moved(self) -> None:
        """Something of the handler began or ended: look again whether it is at rest."""
        self.rest.moved()
        if self.wanted:
            self.rest.watch()

    def _at_rest(self) -> bool:
        # A branch that is busy says so when it ends.
        idle = self.wanted and self._busy == 0 and not self._ended
        parked = idle and self.rest.reached
        if idle and not parked:
            self.rest.watch()
        # Code that does not fit what is stored is not run any further, nowhere.
        if parked and self.mismatch is None and self.at_work():
            self._look_again()
            return False
        if parked:
            # Unwinding the branches must not change any more what they wait for.
            self._decided = True
            self._park()
        return parked

    def _look_again(self) -> None:
        if self._look is None:
            self._look = self._loop.call_later(LOOK_AGAIN_S, self._looked)

    def _looked(self) -> None:
        self._look = None
        self.moved()

    async def until(self, time_ms: int, for_s: float) -> None:
        """Stop here until a time, which is in `for_s`: the handler is unwound and runs again.

        Returns if it is not parked by then.
        """
        self.check_free()
        self.until_ms.append(time_ms)
        try:
            await self.stop_here(for_s)
        finally:
            if not self._decided:
                self.until_ms.remove(time_ms)

    async def until_ended(self, execution_id: ExecutionId) -> None:
        """Stop here until another execution has ended.

        Returns after a moment if the handler is not parked by then: look again.
        """
        self.check_free()
        self.executions.append(execution_id)
        try:
            await self.stop_here(LOOK_AGAIN_S)
        finally:
            if not self._decided:
                self.executions.remove(execution_id)

    async def until_signalled(self, pause: Pause) -> None:
        """Stop here until signals end the pause. Does not return."""
        self._refuse(bool(self.until_ms or self.executions or self.pause))
        self.pause = pause
        try:
            await self.stop_here()
        finally:
            if not self._decided:
                self.pause = None

    async def until_code_fits(self, mismatch: CodeMismatch, *, likely: bool = False) -> None:
        """Stop here until other code is deployed, or this one accepted. Does not return either.

        Of several, people are told the one that is `likely` the change itself.
        """
        self._mismatches.insert(0 if likely else len(self._mismatches), mismatch)
        try:
            await self.stop_here()
        finally:
            if not self._decided:
                self._mismatches.remove(mismatch)
                self.rest.watch()

    def check_free(self) -> None:
        """Refuse to wait long for anything but signals while another branch waits for those."""
        self._refuse(self.pause is not None)

    @staticmethod
    def _refuse(taken: bool) -> None:
        # An execution has one open suspension, which ends for one reason.
        if taken:
            raise InvalidInput(
                "wait",
                "while one branch of a handler waits for signals, no other can wait long;"
                " wait for several signals with ctx.wait_for(all_of(…)), or submit a child",
            )

    async def stop_here(self, for_s: float | None = None) -> None:
        """Wait without being busy, until the handler is unwound, or for so long."""
        forever: asyncio.Future[None] = self._loop.create_future()
        timer = None if for_s is None else self._loop.call_later(for_s, end_turn, forever)
        self._stopped.add(forever)
        line = current_line.get()
        self._stop(line, 1)
        try:
            await forever
        finally:
            if timer is not None:
                timer.cancel()
            self._stop(line, -1)
            self._stopped.discard(forever)

    def _stop(self, line: Line | None, calls: int) -> None:
        if line is not None:
            line.work.stopped += calls
        self._busy -= calls
        self.moved()

    def let_go(self) -> None:
        """End what still waits here after the handler has ended."""
        self._ended = True
        self.at_work = _nobody
        if self._look is not None:
            self._look.cancel()
        self.rest.let_go()
        for forever in self._stopped:
            forever.cancel()


class Working:
    """As long as it lasts the handler is busy. Use as a context."""

    __slots__ = ("_parking",)

    def __init__(self, parking: Parking) -> None:
        self._parking = parking

    def __enter__(self) -> None:
        self._parking.begin()

    def __exit__(self, *exc_info: object) -> None:
        self._parking.end()


def _nobody() -> bool:
    return False


def _nothing() -> None:
    pass


# Lets outcomes reach a handler in the order of `core.journal` ---------------
#
# A handler of which one line alone goes on gets everything at once.

PATIENCE_S: Final = 0.2
"""How long to wait for the handler to ask for a stored outcome whose turn it is."""


class Turns:
    """Whose turn it is among the calls of one handler."""

    def __init__(self, parking: Parking, restless: Callable[[], None]) -> None:
        """`restless` is called if the handler goes on without end."""
        self.order = Order()
        self._restless = restless
        self.tasks = 0
        """Tasks the handler has started that have not ended."""
        self.calls = 0
        """Calls it has made that have not ended."""
        self._parking: Parking | None = parking
        self._rest = parking.rest
        self._settled = True
        """The handler has come to rest since it was given something."""
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._held: list[asyncio.Future[None]] = []
        self._doubtful: list[asyncio.Future[None]] = []
        self.doubts = 0
        """How many calls are in doubt about their step. Nothing new runs meanwhile."""
        self._patience: asyncio.TimerHandle | None = None
        self._patient = True
        self._closed = False
        self._rest.add_watcher(self._at_rest)

    @property
    def alone(self) -> bool:
        """Whether nothing of the handler goes on but the call that asks."""
        return self._settled and self.tasks == 0 and self.calls <= 1

    def allot(self) -> "Allotted":
        """A position for a new outcome, which is given up if it does not reach the handler."""
        return Allotted(self)

    async def take(self, position: int) -> None:
        """Wait until it is the turn of an outcome to reach the handler."""
        if self.alone or self._closed:
            self.order.deliver(position)
            return
        self.order.wait(position)
        turn = self._waiting[position] = asyncio.get_running_loop().create_future()
        self._rest.watch()
        try:
            await turn
        finally:
            del self._waiting[position]
            self.give_up(position)

    def give_up(self, position: int) -> None:
        """An outcome will not reach the handler, or has."""
        self.order.end(position)
        if self._waiting:
            self._rest.watch()

    async def run_new(self, *, at_rest: bool = False) -> None:
        """Wait until a new call may run; with `at_rest`, also until other branches are idle."""
        parking = self._parking
        if self._closed or parking is None:
            return
        if not at_rest and (self.alone or not self.order.replaying):
            return
        await self._at_next_rest(self._held)

    async def _at_next_rest(self, turns: "list[asyncio.Future[None]]") -> None:
        parking = self._parking
        if parking is None:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turns.append(turn)
        self._rest.watch()
        try:
            # Nothing new runs if the code turns out not to fit.
            with parking.idle():
                await turn
        finally:
            turns.remove(turn)
            self._rest.watch()

    def _at_rest_in_doubt(self) -> bool:
        """Give the handler what is stored, in whatever order it asks; then look at the doubts."""
        position = self.order.next(patient=False)
        if position is not None:
            self._deliver(position)
        else:
            for turn in self._doubtful:
                end_turn(turn)
        return position is not None or bool(self._doubtful)

    def _deliver(self, position: int) -> None:
        self._settled = False
        if not self._rest.reached:
            self.order.reached = None
        self.order.deliver(position)
        end_turn(self._waiting[position])
        self._rest.moved()
        self._rest.watch()

    def run_held(self) -> bool:
        """Let calls run that are new for certain; whether there are any."""
        for turn in self._held:
            end_turn(turn)
        return bool(self._held)

    async def doubt(self) -> None:
        """Wait until the handler is at rest, and has everything stored that it asks for."""
        await self._at_next_rest(self._doubtful)

    def _at_rest(self) -> bool:
        self._settled = True
        if self._closed or self._parking is None:
            return False
        if self.doubts or self._doubtful:
            return self._at_rest_in_doubt()
        if self.order.expects and (self._waiting or self._held):
            if self._patient:
                self._wait_for_expected()
                return True
            self.order.expect_no_more()
        self._lose_patience(False)
        if not self._rest.reached:
            # What it has asked for by now is a matter of chance.
            self._restless()
        runs = self.order.may_run and bool(self._held) and self._parking.mismatch is None
        if runs:
            for turn in self._held:
                end_turn(turn)
        # What runs now may not fit what is stored: nothing else goes on before that is known.
        position = None if runs else self.order.next()
        if position is not None:
            self._deliver(position)
        return runs or position is not None

    def _wait_for_expected(self) -> None:
        """For a moment; after that, for one more rest of the handler."""
        if self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(PATIENCE_S, self._lose_patience, True)

    def _lose_patience(self, lost: bool) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._patient = not lost
        if lost:
            self._rest.moved()
            self._rest.watch()

    def close(self) -> None:
        """Nothing more reaches the handler."""
        self._closed = True
        self._lose_patience(False)
        for turn in (*self._waiting.values(), *self._held, *self._doubtful):
            turn.cancel()

    def let_go(self) -> None:
        """Drop references back to the attempt."""
        self.close()
        self._parking = None


class Allotted:
    """The position of a new outcome, as long as it is on its way. Use as a context."""

    __slots__ = ("_position", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> int:
        self._position = self._turns.order.allot()
        return self._position

    def __exit__(self, *exc_info: object) -> None:
        self._turns.give_up(self._position)


def end_turn(turn: "asyncio.Future[None] | None") -> None:
    if turn is not None and not turn.done():
        turn.set_result(None)


# Reading what a run has stored by the types that the code has today ---------
#
# It fitted the types of the code that stored it. If it no longer does, because a model has got a
# new field or a function a new annotation, the run is blocked, as by any other changed code.

MEND_CODEC: Final = "mend the codec or bring back what it needs"

T = TypeVar("T")


async def fitting(parking: Parking, read: Callable[[], T]) -> T:
    """What `read` returns; if it cannot, the handler is parked here, inside of a call."""
    try:
        return read()
    except Unsuccessful:
        raise
    except Exception as error:
        # Whatever it raises: reading runs code of the program's own, which has changed.
        await parking.until_code_fits(unfitting(error))
        raise


def unfitting(error: Exception) -> CodeMismatch:
    """Why a run is blocked: by changed code, or by a codec that cannot read what is stored."""
    unread = isinstance(error, InvalidInput) and error.problem == UNREADABLE
    codec = unread or isinstance(error, CodecFailed)
    return CodeMismatch(None, text_of(error), MEND_CODEC if codec else None)
