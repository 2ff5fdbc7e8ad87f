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
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, NoReturn

from flowfabric.core import journal
from flowfabric.core.changed_code import Acceptances
from flowfabric.core.pools import Pool
from flowfabric.core.records import Step, StepKind
from flowfabric.core.step_matching import Shelf
from flowfabric.core.steps import NewStep, StepStored
from flowfabric.engine.details import Outcome
from flowfabric.errors import CodeMismatch, InvalidInput, NotInAStep
from flowfabric.worker.asyncio_tasks import current_line, inside_step
from flowfabric.worker.branches import DurableCall, Line, SeenFailure, root_line
from flowfabric.worker.digests import BY_NAME, KnownBy
from flowfabric.worker.failures import (
    GIVEN_UP,
    Children,
    encode_failure,
    ends_in,
    is_end,
    raise_again,
)
from flowfabric.worker.functions import is_cancelled
from flowfabric.worker.moved_calls import Moves
from flowfabric.worker.parking import Parking
from flowfabric.worker.pools import LOOK_AGAIN_S, Patience, Pools
from flowfabric.worker.reports import come_further
from flowfabric.worker.turns import Turns

# Calls as they are stored, and stored steps as a run meets them -------------


def positions_of(steps: Sequence[Step]) -> dict[str, int]:
    """The order in which stored outcomes reach the handler: a number of its own for each."""
    delivered = [step for step in steps if step.position is not None and step.failure != GIVEN_UP]
    found: dict[str, int] = {}
    last = 0
    for step in sorted(delivered, key=lambda step: (step.position or 0, step.step_key)):
        last = found[step.step_key] = max(last + 1, step.position or 0)
    return found


def stored_call(step: Step) -> journal.StoredCall:
    # What has not reached the handler has had no effect there.
    after = None if step.position is None else step.asked_after
    return journal.StoredCall(
        step.step_key, step.kind, step.name, step.digest, step.number, step.parallel,
        after=after, after_key=step.after_key
    )  # fmt: skip


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


StoreStep = Callable[[NewStep], Awaitable[StepStored]]
StoreLater = Callable[[NewStep], None]

NOTHING: Final = Shelf(())
SWALLOWED_MAX: Final = 100
"""Verbs a handler may call after it was told to stop, each of which tells it again."""


class Patch(NamedTuple):
    """A question whether a patch is on, at its place in the code."""

    line: Line
    name: str
    number: int


class Journal:
    """The stored steps of one execution, as one run of its handler meets them."""

    def __init__(
        self,
        store: StoreStep,
        store_later: StoreLater,
        parking: Parking,
        steps: Sequence[Step],
    ) -> None:
        """`steps` are what earlier runs have stored."""
        self._store = store
        self._store_later = store_later
        self._parking: Parking | None = parking
        self._turns = Turns(parking, self.is_uncertain)
        self._passing = asyncio.Lock()
        self.seen: list[SeenFailure] = []
        self._steps: dict[str, Step] = {}
        self._positions: dict[str, int] = {}
        self._by_line: dict[str, list[journal.StoredCall]] = {}
        self._lines: dict[str, Shelf] = {}
        self._siblings: dict[str, list[Shelf]] = {}
        """The same by the line in which they were started."""
        self._giving_up = 0
        self._suspected = 0
        """Calls that wait for others which may have to ask first for what looks like them."""
        self._unsuspected = asyncio.Event()
        self._unsuspected.set()
        self._shelves: dict[str, Shelf] = {}
        self._taken_over: list[tuple[Step, DurableCall]] = []
        """Stored steps that equal calls of other branches stand for, with these."""
        self._ordinals: dict[tuple[str, tuple[str, str, str]], int] = {}
        self._branched = False
        self._accepted = Acceptances()
        self._keys: set[str] = set()
        self._line_ids: set[str] = set()
        self.children = Children()
        self.ends: dict[str, Outcome] = {}
        """How children ended, as the handler has seen it: by the names of the calls."""
        self._named: dict[str, Line] = {}
        self._entered: set[str] = set()
        self._count = 0
        self._untaken: set[str] = set()
        self.closed = False
        self._swallowed = 0
        self._root = root_line(self)
        self._moves = Moves(self._root, self._untaken, self._named, self._entered)
        self._pools = Pools(self._turns, self._moves, self.steps_of, self.lines_at)
        parking.at_work = self._moves.at_work
        parking.rest.look = self._moves.look
        current_line.set(self._root)
        if steps:
            self._take_in(steps)

    # Calls

    def ask(self, kind: StepKind, name: str, known: KnownBy = BY_NAME) -> DurableCall:
        """Take the place of a call. Call it when the verb is called, not when it is awaited."""
        self.check_outside_steps(name)
        if self.closed:
            self._stop_again()
        return self._line().ask(kind, name, known)

    def _stop_again(self) -> NoReturn:
        """For a handler that goes on although it was told to stop, and has been caught at it."""
        self._swallowed += 1
        if self._swallowed > SWALLOWED_MAX:
            # A loop that catches cancellations would just go round once more, and no other task
            # would ever get to run.
            raise RuntimeError("the handler has been told to stop, and goes on all the same")
        raise asyncio.CancelledError("the handler has been told to stop")

    def _line(self) -> Line:
        line = current_line.get()
        return line if line is not None and line.journal is self else self._root

    @staticmethod
    def check_outside_steps(name: str) -> None:
        step = inside_step.get()
        if step is not None:
            raise NotInAStep(name, step)

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
        if self._branched:
            await self._pools.out_of_doubt(call)
        call.line.place(call)
        if not call.is_stored:
            come_further(call)
        if call.step is None:
            await self._may_run(call)
        if call.step is not None:
            self._untaken.discard(call.step.step_key)
            if call.step.failure == GIVEN_UP:
                await self._given_up()
        return call.step

    async def deliver(self, step: Step) -> None:
        """Wait until it is the turn of a stored step to reach the handler.

        Raises its failure, unless that says how a child ended.
        """
        position = self._positions.get(step.step_key)
        # A sleep that has not ended has no position.
        if position is not None:
            await self._turns.take(position)
        if step.failure is not None and not (step.kind is StepKind.CHILD and is_end(step.failure)):
            raise_again(step.step_key, step.failure)

    async def _may_run(self, call: DurableCall) -> None:
        """Wait until a call that is not stored may run."""
        # What is stored comes first: it may end whatever made the call.
        await self._turns.run_new(at_rest=self._waits_for_rest(call))
        if self._untaken and await self._takes_over(call):
            return
        refusal = call.refusal
        if not refusal and self._untaken:
            refusal = await self._refusal(call)
        if self.closed:
            raise asyncio.CancelledError("the handler has been told to stop")
        if refusal:
            detail = journal.placed(self.children.told(refusal), call.line.known_as)
            left = self._moves.unaccounted(call.line)
            await self._until_code_fits(
                CodeMismatch(self._accepted.name(call.line.known_as, call.refused), detail),
                likely=left is not None and left.line == call.line.known_as,
            )
        if self.seen or self._passing.locked():
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
                self.steps_of(step.line).take_key(step.step_key)
                self._taken_over.append((step, call))
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
        with self._turns.allot() as position:
            new = new_step(call, result=result, failure=failure, position=position)
            stored = await self._store(new)
            call.has_result = True
            await self._turns.take(position)
        return stored

    async def store_later(self, call: DurableCall, *, result: bytes) -> None:
        """Store a step while the handler goes on: for what every later run would find out again."""
        if call.kind is StepKind.SUBMIT:
            self.children.submitted(result, call.asked)
        with self._turns.allot() as position:
            self._store_later(new_step(call, result=result, position=position))
            call.has_result = True
            await self._turns.take(position)

    async def store_sleep(self, call: DurableCall, sleep_ms: int) -> int:
        """Store that a sleep begins, and return when it ends."""
        return (await self._store(new_step(call, sleep_ms=sleep_ms))).at_ms + sleep_ms

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
            try:
                with self._turns.allot() as position:
                    await self._turns.take(position)
            except asyncio.CancelledError:
                if not self.closed:
                    call.line.pend(call, GIVEN_UP)
                raise
            call.line.pend(call, encode_failure(error), position)

    async def store_failures(self) -> None:
        """The handler has gone on past every failure: it is parked, or has completed."""
        async with self._passing:
            await self._store_seen(list(self.seen))

    async def _store_seen(self, seen: Iterable[SeenFailure]) -> None:
        for each in seen:
            new = new_step(each.call, failure=each.failure, position=each.position)
            await self._store(new)
            # A handler that has ended meanwhile has let go of them.
            if each in self.seen:
                self.seen.remove(each)

    async def _given_up(self) -> None:
        """Wait for the handler to give the call up as it did before."""
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

    def _take_in(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._steps[step.step_key] = step
            if step.kind is StepKind.SUBMIT and step.result is not None:
                self.children.submitted(step.result, stored_call(step))
            if step.kind is StepKind.ACCEPT:
                self._accepted.take_in(step)
            if step.kind in (StepKind.ACCEPT, StepKind.PATCH):
                continue
            self._by_line.setdefault(step.line, []).append(stored_call(step))
            if step.failure == GIVEN_UP:
                self._moves.give_up()
            else:
                self._moves.take_in(step)
        self.ends = ends_in(steps)
        self._positions = positions_of(steps)
        self._turns.order.take_in(self._positions.values())
        self._moves.certain &= self._turns.order.whole
        self._keys.update(self._steps)
        self._untaken.update(each.key for kept in self._by_line.values() for each in kept)
        self._line_ids.update(journal.with_parents(self._by_line))
        self._lines = {
            group: Shelf(kept) for group, kept in journal.kept_lines(self._by_line).items()
        }
        for group in sorted(self._lines):
            beside = self._siblings.setdefault(journal.parent_of_group(group), [])
            beside.append(self._lines[group])
        self._branched = bool(self._lines)
        self._pools.take_in(self._by_line)

    def never_asked_for(self) -> list[str]:
        """Stored steps this run did not come by."""
        return sorted(self._untaken)

    # What lines ask

    def tick(self) -> int:
        """The next number of all: whatever happens later gets a higher one."""
        self._count += 1
        return self._count

    def reached(self) -> int | None:
        """The position of the last outcome that has reached the handler, if it reacts to that."""
        return None if self._moves.at_work() else self._turns.order.reached

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
        self._moves.certain = False

    def forgive(self, keys: Collection[str]) -> None:
        """Ignore these from now on: a person has accepted that their lines do not ask for them."""
        self._moves.forgive(keys)
        lines = journal.with_parents(self._steps[key].line for key in keys)
        for shelf in self._lines.values():
            shelf.forgive(lines)

    def given_up(self, call: DurableCall) -> Collection[str] | None:
        """What was stored when a person accepted this call; None if nobody has."""
        line, steps = call.line.known_as, self._steps.values()
        return self._accepted.given_up(line, call.refused, call.step, steps)

    def step(self, key: str) -> Step:
        return self._steps[key]

    def steps_of(self, line: str) -> Shelf:
        """What is stored of a line."""
        if line not in self._by_line:
            return NOTHING
        if line not in self._shelves:
            kept = self._by_line[line]
            stored = ((each, self._steps[each.key]) for each in kept) if self._accepted else ()
            self._shelves[line] = Shelf(kept, self._accepted.only_equal(line, stored))
        return self._shelves[line]

    def pool_at(self, group: str, label: str) -> Pool | None:
        """What is stored of the lines of one coroutine function that were started at one place."""
        return self._pools.at(group, label)

    def lines_at(self, group: str) -> Shelf:
        """The lines that are stored as started at one place."""
        if group not in self._lines:
            self._lines[group] = Shelf(())
        return self._lines[group]

    def stored_at(self, line: str, key: str) -> Shelf:
        """The lines that were started in a line after a call; cheap where none are stored."""
        return self.lines_at(journal.line_group(line, key)) if self._branched else NOTHING

    def lines_beside(self, group: str) -> Iterable[Shelf]:
        """Those that are stored as started at any place of the same line."""
        return self._siblings.get(journal.parent_of_group(group), ())

    def lines_in(self, line: str) -> Iterable[Shelf]:
        """Those that are stored as started in a line, at any place."""
        return self._siblings.get(journal.parent_of_group(journal.line_group(line, "")), ())

    def taker_of(self, line: str, asked: journal.MadeCall) -> DurableCall | None:
        """The call of another branch that has taken over what was stored of a call in a line."""
        for position, (step, call) in enumerate(self._taken_over):
            equal = step.kind == asked.kind and step.name == asked.name
            if equal and step.line == line and step.digest == asked.digest:
                del self._taken_over[position]
                return call
        return None

    @property
    def by_arrival(self) -> bool:
        """Whether the handler may go on in the order in which branches have ended."""
        return self._moves.by_arrival

    @property
    def works_outside(self) -> bool:
        """Whether a branch was seen to do something outside of calls, beside others."""
        return self._moves.outside or self._moves.by_arrival

    def glance(self, line: Line) -> None:
        """Look what a line waits for that may go on now, if there are others."""
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
        if (line, like) not in self._ordinals:
            stored = (
                journal.alike(each.kind, each.name, each.digest)
                for each in self._by_line.get(line, ())
            )
            self._ordinals[line, like] = sum(each == like for each in stored)
        self._ordinals[line, like] += 1
        return asked._replace(equal=self._ordinals[line, like])

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
            stored = self._steps.get(key)
            if stored is not None:
                await self.deliver(stored)
            elif not is_past:
                await self._store_patch(patch.line.known_as, key, asked)
            return stored is not None or not is_past
        finally:
            self.ended()

    async def _store_patch(self, line: str, key: str, asked: journal.MadeCall) -> None:
        with self._turns.allot() as position:
            await self._store(
                NewStep(
                    step_key=key,
                    kind=StepKind.PATCH,
                    line=line,
                    name=asked.name,
                    number=asked.number,
                    position=position,
                )
            )
            await self._turns.take(position)

    # Branches with names

    @contextmanager
    def branch(self, name: str) -> Iterator[None]:
        """Everything called inside belongs to a line of this name."""
        made = self._line().named(name)
        line = self._named.setdefault(made.known_as, made)
        if line.known_as in self._entered:
            raise InvalidInput("branch", "another branch of this name is under way", name)
        self._entered.add(line.known_as)
        line.parent, line.made, line.work = made.parent, made.made, made.work
        token = current_line.set(line)
        try:
            yield
        except BaseException:
            self._moves.cut_off(line)
            raise
        finally:
            # A branch that is thrown away with its task is closed in another context.
            with suppress(ValueError):
                current_line.reset(token)
            self._entered.discard(line.known_as)
            line.left()

    def close(self) -> None:
        """From now on every call stops the handler where it is."""
        self.closed = True
        self._turns.close()

    def let_go(self) -> None:
        """Drop references back to the attempt: it is then freed without the garbage collector."""
        self.closed = True
        self._turns.let_go()
        self._moves.let_go()
        self._pools.let_go()
        self._root.let_go()
        self._root.work.end()
        self._named.clear()
        self._taken_over.clear()
        self.seen.clear()
        self._store, self._store_later, self._parking = _gone, _gone_too, None


def _behind(call: DurableCall, left: Step) -> str:
    return journal.behind(call.asked, call.line.known_as, stored_call(left), left.line)


async def _gone(step: NewStep) -> StepStored:
    raise asyncio.CancelledError("the handler has ended")


def _gone_too(step: NewStep) -> None:
    raise asyncio.CancelledError("the handler has ended")
