"""Outcomes reach a handler in the order of `core.journal`, each after it has used the last one."""

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from flowfabric.core.journal import Order

if TYPE_CHECKING:
    from flowfabric.worker.moved_calls import Moves
    from flowfabric.worker.parking import Parking

# When a handler has come to rest: it has reacted to all it was given, and waits for more ---
#
# A handler cannot be asked. It counts as at rest when, for some turns of the event loop, none of
# its tasks has begun or ended and none of its calls was made or has ended. Work outside steps,
# such as a request, leaves no such sign and counts as rest. A handler that never rests, because it
# starts task after task, gets what it waits for anyway.

QUIET_TURNS: Final = 20
"""Turns of the event loop without a sign of the handler, after which it is at rest."""
LOOK_TURNS: Final = (3, QUIET_TURNS)
"""When to look at what its tasks wait for, including waits that end before it is at rest."""
TURNS_MAX: Final = 2_000
"""Turns after which a handler that is not at rest is treated as if it were."""


class Rest:
    """Tells its watchers that the handler is at rest."""

    def __init__(self, look: Callable[[], None], *watchers: Callable[["Rest"], bool]) -> None:
        """`look` is called when the handler has reacted, for some turns, to what it was given;
        `watchers` at rest, in order, until one returns that it has acted."""
        self._loop = asyncio.get_running_loop()
        self._quiet_turns = 0
        self._turns = 0
        self._watching = False
        self._watchers = watchers
        self._look_around = look

    @property
    def reached(self) -> bool:
        """Whether the handler is at rest, as far as it was watched."""
        return self._quiet_turns >= QUIET_TURNS

    def moved(self) -> None:
        """The handler showed a sign of life."""
        self._quiet_turns = 0

    def watch(self) -> None:
        """A watcher wants to know when it is at rest."""
        if not self._watching:
            self._watching = True
            self._turns = 0
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        if not self._watchers:
            return
        if not self.reached and self._turns < TURNS_MAX:
            self._quiet_turns += 1
            self._turns += 1
            if self._quiet_turns in LOOK_TURNS:
                self._look_around()
            self._loop.call_soon(self._look)
            return
        self._watching = False
        for at_rest in self._watchers:
            if at_rest(self):
                return

    def let_go(self) -> None:
        """Drop references back here."""
        self._watchers = ()
        self._look_around = _nothing


def _nothing() -> None:
    pass


# Whose turn it is. A handler of which one line alone goes on gets everything at once. ------

PATIENCE_S: Final = 0.2
"""How long to wait for the handler to ask for a stored outcome whose turn it is."""


class Turns:
    """Whose turn it is among the calls of one handler."""

    def __init__(self, parking: "Parking", stored: Collection[int]) -> None:
        """`stored` are the positions of outcomes that are stored."""
        self.order = Order()
        if stored:
            self.order.take_in(stored)
        self.moves: Moves | None = None
        """Made if something is stored, or the handler has started branches."""
        self.tasks = 0
        """Tasks the handler has started that have not ended."""
        self.calls = 0
        """Calls it has made that have not ended."""
        self._parking: Parking | None = parking
        parking.turns = self
        self._settled = True
        """The handler has come to rest since it was given something."""
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._held: dict[asyncio.Future[None], None] = {}
        self._doubtful: dict[asyncio.Future[None], None] = {}
        self.doubts = 0
        """How many calls are in doubt about their step. Nothing new runs meanwhile."""
        self._patience: asyncio.TimerHandle | None = None
        self._patient = True
        self._closed = False

    @property
    def alone(self) -> bool:
        """Whether the call that asks is all that goes on in the handler."""
        return self._settled and self.tasks == 0 and self.calls <= 1

    def allot(self) -> int:
        """A position for a new outcome, to be given up whether or not it reaches the handler."""
        return self.order.allot()

    def deliver_now(self, position: int) -> bool:
        """Whether an outcome may reach the handler at once: then it does."""
        now = self.alone or self._closed
        if now:
            self.order.deliver(position)
        return now

    async def take(self, position: int) -> None:
        """Wait until it is the turn of an outcome to reach the handler."""
        if self.deliver_now(position):
            return
        self.order.wait(position)
        turn = self._waiting[position] = asyncio.get_running_loop().create_future()
        self._watch()
        try:
            await turn
        finally:
            del self._waiting[position]
            self.give_up(position)

    def give_up(self, position: int) -> None:
        """An outcome will not reach the handler, or has."""
        self.order.end(position)
        if self._waiting:
            self._watch()

    def _watch(self) -> None:
        """Say when the handler is at rest; once it has ended, nobody waits for that."""
        if self._parking is not None:
            self._parking.rest.watch()

    def runs_now(self, *, at_rest: bool = False) -> bool:
        """Whether a new call may run at once; see `run_new`."""
        if self._closed or self._parking is None:
            return True
        return not at_rest and (self.alone or not self.order.replaying)

    async def run_new(self, *, at_rest: bool = False) -> None:
        """Wait until a new call may run; with `at_rest`, also until other branches are idle."""
        if not self.runs_now(at_rest=at_rest):
            await self._at_next_rest(self._held)

    async def _at_next_rest(self, turns: "dict[asyncio.Future[None], None]") -> None:
        parking = self._parking
        if parking is None:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turns[turn] = None
        self._watch()
        try:
            # Nothing new runs if the code turns out not to fit.
            with parking.idle():
                await turn
        finally:
            turns.pop(turn)
            self._watch()

    def _at_rest_in_doubt(self, rest: Rest) -> bool:
        """Give the handler what is stored, in whatever order it asks; then look at the doubts."""
        position = self.order.next(patient=False)
        if position is not None:
            self._deliver(position, rest)
        else:
            for turn in self._doubtful:
                end_turn(turn)
        return position is not None or bool(self._doubtful)

    def _deliver(self, position: int, rest: Rest) -> None:
        self._settled = False
        if not rest.reached:
            self.order.reached = None
        self.order.deliver(position)
        end_turn(self._waiting[position])
        rest.moved()
        rest.watch()

    def run_held(self) -> bool:
        """Let calls that are certainly new run; return whether there are any."""
        for turn in self._held:
            end_turn(turn)
        return bool(self._held)

    async def doubt(self) -> None:
        """Wait until the handler is at rest and has got every stored outcome it asks for."""
        await self._at_next_rest(self._doubtful)

    def is_uncertain(self) -> None:
        """The same code may make other calls than before, after the same outcomes."""
        # Without anything stored there is no before.
        if self.moves is not None:
            self.moves.certain = False

    def look(self) -> None:
        """Look at what the handler's tasks wait for, now that it has reacted."""
        if self.moves is not None:
            self.moves.look()

    @property
    def at_work(self) -> bool:
        """Whether a branch works outside of calls."""
        return self.moves is not None and self.moves.at_work()

    def at_rest(self, rest: Rest) -> bool:
        """Give the handler the next outcome, if any; return whether there was one."""
        self._settled = True
        if self._closed or self._parking is None:
            return False
        if self.doubts or self._doubtful:
            return self._at_rest_in_doubt(rest)
        if self.order.expects and (self._waiting or self._held):
            if self._patient:
                self._wait_for_expected()
                return True
            self.order.expect_no_more()
        self._lose_patience(False)
        if not rest.reached:
            # Chance decides what it has asked for by now.
            self.is_uncertain()
        runs = self.order.may_run and bool(self._held) and self._parking.mismatch is None
        if runs:
            for turn in self._held:
                end_turn(turn)
        # What runs now may not fit what is stored: nothing else goes on before that is known.
        position = None if runs else self.order.next()
        if position is not None:
            self._deliver(position, rest)
        return runs or position is not None

    def _wait_for_expected(self) -> None:
        """Wait a moment, and then for one more rest of the handler."""
        if self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(PATIENCE_S, self._lose_patience, True)

    def _lose_patience(self, lost: bool) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._patient = not lost
        if lost and self._parking is not None:
            self._parking.rest.moved()
            self._parking.rest.watch()

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


def end_turn(turn: "asyncio.Future[None] | None") -> None:
    if turn is not None and not turn.done():
        turn.set_result(None)
