"""The journal of one run of a handler: its calls, and the stored steps they stand for.

Every call of a durable verb takes its place when it is made, in the line of the task
that makes it. When it is awaited, the journal finds its stored step. The core decides which
one that is, and whether a call that is not stored may run. Outcomes reach the handler one
at a time, in order; see `core.journal.Order`.

If a call ends without a result, its failure is stored once the handler continues past it: before
the next call made after it runs, when the handler is parked, or when it completes. It does not
matter what refused the call or raised. The failure that ends a run is not stored, so that a retry
tries the call again.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Final, NamedTuple, NoReturn, Protocol

from flowfabric.core import journal
from flowfabric.core.pools import Pool
from flowfabric.core.records import Step, StepKind
from flowfabric.core.steps import NewStep, StepStored
from flowfabric.errors import CodeMismatch, InvalidInput, NotInAStep
from flowfabric.worker.asyncio_tasks import current_line, inside_step
from flowfabric.worker.branches import DurableCall, Line, SeenFailure, root_line
from flowfabric.worker.digests import BY_NAME, KnownBy
from flowfabric.worker.emitter import come_further
from flowfabric.worker.failures import (
    GIVEN_UP,
    Children,
    encode_failure,
    ends_in,
    is_end,
    raise_again,
)
from flowfabric.worker.functions import is_cancelled
from flowfabric.worker.moved_calls import NOTHING_KEPT, KeptSteps, Moves, stored_call
from flowfabric.worker.parking import Parking
from flowfabric.worker.pools import LOOK_AGAIN_S, Patience, Pools
from flowfabric.worker.turns import Turns

# Calls as they are stored, and stored steps as a run meets them -------------


def new_step(
    call: DurableCall,
    *,
    result: bytes | None = None,
    failure: bytes | None = None,
    sleep_ms: int | None = None,
    position: int | None = None,
) -> NewStep:
    asked = call.asked
    place = call.swapped or call
    return NewStep(
        step_key=call.key,
        after_key=place.after_key,
        kind=call.kind,
        line=place.line.known_as,
        name=asked.name,
        digest=asked.digest,
        number=asked.number,
        parallel=asked.parallel,
        asked_after=asked.after,
        position=position,
        result=result,
        failure=failure,
        sleep_ms=sleep_ms,
        duration_ms=call.took_ms,
    )


class StepStore(Protocol):
    """Where a journal stores steps."""

    async def store(self, step: NewStep) -> StepStored:
        """Store a step, after all that the handler did not wait for."""

    def store_later(self, step: NewStep) -> None:
        """Store a step while the handler goes on."""


class Gone:
    """The store of a handler that has ended: it stores nothing."""

    async def store(self, step: NewStep) -> StepStored:
        raise asyncio.CancelledError(HANDLER_ENDED)

    def store_later(self, step: NewStep) -> None:
        raise asyncio.CancelledError(HANDLER_ENDED)


HANDLER_ENDED: Final = "the handler has ended"
GONE: Final = Gone()
SWALLOWED_MAX: Final = 100
"""Verbs a handler may call after it was told to stop, each of which tells it again."""
GOES_ON: Final = "the handler has been told to stop, and goes on all the same"


class Patch(NamedTuple):
    """A question whether a patch is on, at its place in the code."""

    line: Line
    name: str
    number: int


class Journal:
    """The stored steps of one execution, as one run of its handler meets them.

    The parts that concern several lines are made only when there are several, or when earlier runs
    may have had several.
    """

    def __init__(
        self,
        store: StepStore,
        parking: Parking,
        steps: Sequence[Step],
    ) -> None:
        """`steps` are what earlier runs have stored."""
        self._store: StepStore = store
        self._parking: Parking | None = parking
        self.stored = KeptSteps(steps) if steps else NOTHING_KEPT
        self.ends = ends_in(steps)
        """How children ended, as the handler has seen it: by the names of the calls."""
        self._turns = Turns(parking, self.stored.positions.values())
        self.seen: list[SeenFailure] = []
        self._giving_up = 0
        self._suspected = 0
        """Calls that wait because others may have to ask first for steps that look like theirs."""
        self._keys = set(self.stored.steps)
        self._count = 0
        self.closed = False
        self._swallowed = 0
        self._root = root_line(self)
        self._pools: Pools | None = None
        """If earlier runs have started branches."""
        current_line.set(self._root)
        if steps:
            self._take_in(steps)

    @cached_property
    def _moves(self) -> Moves:
        self._turns.moves = made = Moves(self._root, self.stored.untaken)
        return made

    def _take_in(self, steps: Sequence[Step]) -> None:
        moves = self._moves
        moves.certain = self._turns.order.whole
        for step in steps:
            if step.kind is StepKind.SUBMIT and step.result is not None:
                self.children.submitted(step.result, stored_call(step))
            if step.failure == GIVEN_UP:
                moves.give_up()
            elif step.kind not in (StepKind.ACCEPT, StepKind.PATCH):
                moves.take_in(step)
        if self.stored.lines:
            self._pools = Pools(self._turns, moves, self.stored)

    @cached_property
    def children(self) -> Children:
        return Children()

    @cached_property
    def _passing(self) -> asyncio.Lock:
        """Held while failures that the handler has gone past are stored."""
        return asyncio.Lock()

    @cached_property
    def _unsuspected(self) -> asyncio.Event:
        """Set while no call is suspected."""
        unsuspected = asyncio.Event()
        unsuspected.set()
        return unsuspected

    @cached_property
    def _line_ids(self) -> set[str]:
        return journal.with_parents(self.stored.by_line)

    # Calls

    def ask(self, kind: StepKind, name: str, known: KnownBy = BY_NAME) -> DurableCall:
        """Take the place of a call. Call it when the verb is called, not when it is awaited."""
        self.check_outside_steps(name)
        if self.closed:
            self._stop_again()
        return self._line().ask(kind, name, known)

    def _stop_again(self) -> NoReturn:
        """Stop a handler that caught its cancellation and continues."""
        self._swallowed += 1
        if self._swallowed > SWALLOWED_MAX:
            # A loop that catches cancellations would just go round once more, and no other task
            # would ever get to run.
            raise RuntimeError(GOES_ON)
        raise asyncio.CancelledError("the handler has been told to stop")

    def _line(self) -> Line:
        line = current_line.get()
        return line if line is not None and line.journal is self else self._root

    @staticmethod
    def check_outside_steps(name: str) -> None:
        step = inside_step.get()
        if step is not None:
            raise NotInAStep(name, step.name)

    async def find(self, call: DurableCall) -> Step | None:
        """Wait for the call's turn and return its stored step; None if the call may run now.

        Raises the step's stored failure, if it has one.
        """
        step = await self.look_up(call)
        if step is None:
            return None
        await self.deliver(step)
        return step

    async def look_up(self, call: DurableCall) -> Step | None:
        """The same, but not in its turn: see `deliver`."""
        if self._pools is not None:
            await self._pools.out_of_doubt(call)
        call.line.place(call)
        if not call.is_stored:
            come_further(call)
        if call.step is None:
            await self._may_run(call)
        if call.step is not None:
            self.stored.untaken.discard(call.step.step_key)
            if call.step.failure == GIVEN_UP:
                await self._given_up()
        return call.step

    async def deliver(self, step: Step) -> None:
        """Wait until it is the turn of a stored step to reach the handler.

        Raises its failure, unless that says how a child ended.
        """
        position = self.stored.positions.get(step.step_key)
        # A sleep that has not ended has no position.
        if position is not None:
            await self._turns.take(position)
        if step.failure is not None and not (step.kind is StepKind.CHILD and is_end(step.failure)):
            raise_again(step.step_key, step.failure)

    async def _may_run(self, call: DurableCall) -> None:
        """Wait until a call that is not stored may run."""
        # What is stored comes first: it may end whatever made the call.
        at_rest = self._waits_for_rest(call)
        if not self._turns.runs_now(at_rest=at_rest):
            await self._turns.run_new(at_rest=at_rest)
        if self.stored.untaken and await self._takes_over(call):
            return
        refusal = call.refusal
        if not refusal and self.stored.untaken:
            refusal = await self._refusal(call)
        if self.closed:
            raise asyncio.CancelledError("the handler has been told to stop")
        if refusal:
            detail = journal.placed(self.children.told(refusal), call.line.known_as)
            left = self._moves.unaccounted(call.line)
            await self._until_code_fits(
                CodeMismatch(self.stored.accepted.name(call.line.known_as, call.refused), detail),
                likely=left is not None and left.line == call.line.known_as,
            )
        # While failures are being stored, the last of them is still among these.
        if self.seen:
            async with self._passing:
                await self._store_seen(call.line.gone_past(call))

    async def _takes_over(self, call: DurableCall) -> bool:
        """Whether a call takes over the step of an equal one that another branch does not get to.

        The branch that comes first may make a call for all, while the others wait at a lock.
        """
        patience = Patience()
        while self._moves.equal_in_another(call) is not None:
            await self._turns.run_new(at_rest=True)
            step = self._moves.equal_in_another(call)
            if step is not None and (not self._moves.at_work() or patience.is_over()):
                self.stored.of_line(step.line).take_key(step.step_key)
                self._moves.taken_over.append((step, call))
                call.line.take_over(call, step)
                return True
            await asyncio.sleep(LOOK_AGAIN_S)
        return False

    def _waits_for_rest(self, call: DurableCall) -> bool:
        """Whether another branch of the handler may be about to ask for what is left."""
        if self._turns.alone and call.holds_line:
            return False
        return bool(call.refusal) or self._moves.unaccounted(call.line) is not None

    async def _refusal(self, call: DurableCall) -> str:
        """Why a call must not run, now that the handler has made every call it makes without it."""
        left = self._moves.unaccounted(call.line)
        if left is not None:
            return _behind(call, left)
        refusal = call.line.shelf.missed(call.asked) if call.holds_line else ""
        if not refusal and self._moves.refusal(call):
            refusal = await self._lasting_refusal(call)
        left = None if refusal else self._left_to(call.line)
        if left is not None:
            refusal = _behind(call, left)
        if not refusal:
            await self._until_others_fit()
        return refusal

    async def _until_others_fit(self) -> None:
        """Run nothing new once the code does not fit: code that fits would not know of it."""
        # First let other calls that were released together with this one be checked.
        await asyncio.sleep(0)
        if self._suspected and self._parking is not None:
            with self._parking.idle():
                await self._unsuspected.wait()
        mismatch = None if self._parking is None else self._parking.mismatch
        if mismatch is not None:
            await self._until_code_fits(mismatch)

    def _left_to(self, line: Line) -> Step | None:
        """If a line is the only one running: a stored step of another line still ahead of it."""
        return self._moves.left_to(line) if self._turns.alone else None

    async def _lasting_refusal(self, call: DurableCall) -> str:
        """Why it still must not run a while later: work outside steps may take some time."""
        patience = Patience()
        self._suspected += 1
        self._unsuspected.clear()
        try:
            while refusal := self._moves.refusal(call):
                if self._giving_up:
                    # A branch that gave up a call before will do so again, and go on then.
                    return ""
                if self._turns.alone or patience.is_over():
                    break
                await asyncio.sleep(LOOK_AGAIN_S)
                await self._turns.run_new()
            return refusal
        finally:
            self._suspected -= 1
            if not self._suspected:
                self._unsuspected.set()

    async def store(
        self,
        call: DurableCall,
        *,
        result: bytes | None = None,
        failure: bytes | None = None,
    ) -> StepStored:
        """Store how a call ended; returns when it is its turn to reach the handler."""
        turns = self._turns
        position = turns.allot()
        try:
            new = new_step(call, result=result, failure=failure, position=position)
            stored = await self._store.store(new)
            call.has_result = True
            if not turns.deliver_now(position):
                await turns.take(position)
        finally:
            turns.give_up(position)
        return stored

    async def store_later(self, call: DurableCall, *, result: bytes) -> None:
        """Store a step while the handler goes on: for what every later run would find out again."""
        if call.kind is StepKind.SUBMIT:
            self.children.submitted(result, call.asked)
        position = self._turns.allot()
        try:
            self._store.store_later(new_step(call, result=result, position=position))
            call.has_result = True
            await self._turns.take(position)
        finally:
            self._turns.give_up(position)

    async def store_sleep(self, call: DurableCall, sleep_ms: int) -> int:
        """Store that a sleep begins, and return when it ends."""
        return (await self._store.store(new_step(call, sleep_ms=sleep_ms))).at_ms + sleep_ms

    async def woke(self, call: DurableCall) -> None:
        """A sleep has ended. When that was counts only beside something else."""
        if not self._turns.alone:
            await self.store(call)

    async def failed(self, call: DurableCall, error: BaseException) -> None:
        """A call ends without a result; returns when it is its turn to reach the handler.

        A handler that was told to stop sees nothing more. A call that never had its place, or
        whose outcome is stored, ends the same way in every run.
        """
        given_up = is_cancelled(error)
        if given_up and not self.closed:
            self._moves.give_up()
        if self.closed or not call.key or call.refusal or call.is_stored:
            return
        if given_up:
            call.line.pend(call, GIVEN_UP)
        elif not call.has_result:
            position = self._turns.allot()
            try:
                await self._turns.take(position)
            except asyncio.CancelledError:
                if not self.closed:
                    call.line.pend(call, GIVEN_UP)
                raise
            finally:
                self._turns.give_up(position)
            call.line.pend(call, encode_failure(error), position)

    async def store_failures(self) -> None:
        """The handler has gone on past every failure: it is parked, or has completed."""
        if self.seen:
            async with self._passing:
                await self._store_seen(list(self.seen))

    async def _store_seen(self, seen: Iterable[SeenFailure]) -> None:
        for each in seen:
            new = new_step(each.call, failure=each.failure, position=each.position)
            await self._store.store(new)
            # If the handler has ended meanwhile, it has dropped them.
            if each in self.seen:
                self.seen.remove(each)

    async def _given_up(self) -> None:
        """Wait for the handler to give up the call, as it did before."""
        if self._parking is not None:
            self._giving_up += 1
            try:
                await self._parking.stop_here()
            finally:
                self._giving_up -= 1

    async def _until_code_fits(self, mismatch: CodeMismatch, *, likely: bool = False) -> None:
        """Wait for the handler to be parked: the code does not fit what is stored."""
        if self._parking is None:
            raise mismatch
        await self._parking.until_code_fits(mismatch, likely=likely)

    # What is stored

    def never_asked_for(self) -> list[str]:
        """Stored steps that this run did not ask for."""
        return sorted(self.stored.untaken)

    # What lines ask

    def tick(self) -> int:
        """A number higher than all before: it orders what happens in this run."""
        self._count += 1
        return self._count

    def reached(self) -> int | None:
        """The position of the last outcome that has reached the handler, if it reacts to that."""
        return None if self._turns.at_work else self._turns.order.reached

    def asked(self) -> None:
        self._turns.calls += 1

    def began(self) -> None:
        if self._parking is not None:
            self._parking.begin()

    def ended(self) -> None:
        self._turns.calls -= 1
        if self._parking is not None:
            self._parking.end()

    def task_began(self, line: Line) -> None:
        """A task of the handler began, with a line of its own."""
        self._moves.task_began(line)
        self._turns.tasks = self._moves.tasks
        if self._parking is not None:
            self._parking.moved()

    def task_ended(self, line: Line, *, cut_off: bool) -> None:
        """A task of the handler has ended; `cut_off` if it was cancelled or has failed."""
        self._moves.task_ended(line)
        if cut_off:
            self._moves.cut_off(line)
        self._turns.tasks = self._moves.tasks
        if self._parking is not None:
            self._parking.moved()

    def is_uncertain(self) -> None:
        """The same code may make other calls than before, after the same outcomes."""
        self._turns.is_uncertain()

    def forgive(self, keys: Collection[str]) -> None:
        """Ignore these steps: a person has accepted that their lines do not ask for them."""
        self._moves.forgive(keys)
        lines = journal.with_parents(self.stored.steps[key].line for key in keys)
        for shelf in self.stored.lines.values():
            shelf.forgive(lines)

    def given_up(self, call: DurableCall) -> Collection[str] | None:
        """What was stored when a person accepted this call; None if nobody has."""
        accepted = self.stored.accepted
        if not accepted:
            return None
        line, steps = call.line.known_as, self.stored.steps.values()
        return accepted.given_up(line, call.refused, call.step, steps)

    def step(self, key: str) -> Step:
        return self.stored.steps[key]

    def pool_at(self, group: str, label: str) -> Pool | None:
        """What is stored of the lines of one coroutine function that were started at one place."""
        return None if self._pools is None else self._pools.at(group, label)

    def taker_of(self, line: str, asked: journal.MadeCall) -> DurableCall | None:
        """The call of another branch that has taken over what was stored of a call in a line."""
        moves = self._turns.moves
        return None if moves is None else moves.taker_of(line, asked)

    @property
    def by_arrival(self) -> bool:
        """Whether the handler may go on in the order in which branches have ended."""
        moves = self._turns.moves
        return moves is not None and moves.by_arrival

    @property
    def works_outside(self) -> bool:
        """Whether a branch was seen to do something outside of calls, beside others."""
        moves = self._turns.moves
        return moves is not None and (moves.outside or moves.by_arrival)

    def glance(self, line: Line) -> None:
        """Look at what a line that may continue now waits for, if there are other lines."""
        if self._turns.tasks and not self.closed:
            self._moves.glance(line)

    def is_beside_work(self, line: Line) -> bool:
        """Whether a branch like this one, or one it has started, works outside of calls."""
        return self._moves.is_beside_work(line)

    def new_line_id(self, parent: str, group: str, asked: journal.MadeCall) -> str:
        while (made := journal.line_id(parent, group, asked)) in self._line_ids:
            asked = asked._replace(
                number=asked.number + 1, equal=asked.equal + 1, same=asked.same + 1
            )
        self._line_ids.add(made)
        return made

    def ordered_at(self, line: str, asked: journal.MadeCall) -> journal.MadeCall:
        """A new call with its ordinal among those like it in a line, whoever has made them."""
        like = journal.alike(asked.kind, asked.name, asked.digest)
        return asked._replace(equal=self.stored.ordinal(line, like))

    def new_step_key(self, line: str, asked: journal.MadeCall) -> tuple[str, journal.MadeCall]:
        while (made := journal.step_key(line, asked)) in self._keys:
            asked = asked._replace(number=asked.number + 1)
        self._keys.add(made)
        return made, asked

    # Patches

    def ask_patch(self, name: str) -> "Patch":
        """Take the place of a question whether a patch is on."""
        self.check_outside_steps("patched")
        if self.closed:
            self._stop_again()
        line = self._line()
        return Patch(line, name, line.count_patch(name))

    async def patched(self, patch: "Patch") -> bool:
        """Whether a patch is on here: it is stored, or no earlier run has come past here."""
        self.asked()
        self.began()
        try:
            is_past = patch.line.is_past_here() or self._left_to(patch.line) is not None
            asked = journal.MadeCall(StepKind.PATCH, f"patch {patch.name}", "", patch.number)
            key = journal.step_key(patch.line.known_as, asked)
            stored = self.stored.steps.get(key)
            if stored is not None:
                await self.deliver(stored)
            elif not is_past:
                await self._store_patch(patch.line.known_as, key, asked)
            return stored is not None or not is_past
        finally:
            self.ended()

    async def _store_patch(self, line: str, key: str, asked: journal.MadeCall) -> None:
        position = self._turns.allot()
        new = NewStep(
            step_key=key,
            kind=StepKind.PATCH,
            line=line,
            name=asked.name,
            number=asked.number,
            position=position,
        )
        try:
            await self._store.store(new)
            await self._turns.take(position)
        finally:
            self._turns.give_up(position)

    # Branches with names

    @contextmanager
    def branch(self, name: str) -> Iterator[None]:
        """Everything called inside belongs to a line of this name."""
        made = self._line().named(name)
        named, entered = self._moves.named, self._moves.entered
        line = named.setdefault(made.known_as, made)
        if line.known_as in entered:
            raise InvalidInput("branch", "another branch of this name is under way", name)
        entered.add(line.known_as)
        line.parent, line.made, line.work = made.parent, made.made, made.work
        token = current_line.set(line)
        try:
            yield
        except BaseException:
            self._moves.cut_off(line)
            raise
        finally:
            # A branch discarded with its task is closed in another context.
            with suppress(ValueError):
                current_line.reset(token)
            entered.discard(line.known_as)
            line.left()

    def close(self) -> None:
        """From now on every call stops the handler where it is."""
        self.closed = True
        self._turns.close()

    def let_go(self) -> None:
        """Drop references back to the attempt: it is then freed without the garbage collector."""
        self.closed = True
        self._turns.let_go()
        if self._turns.moves is not None:
            self._turns.moves.let_go()
        if self._pools is not None:
            self._pools.let_go()
        self._root.let_go()
        self._root.work.end()
        self.seen.clear()
        self._store, self._parking = GONE, None


def _behind(call: DurableCall, left: Step) -> str:
    return journal.behind(call.asked, call.line.known_as, stored_call(left), left.line)
