"""The lines of a durable function: who calls what, one after another.

1. A call takes its place in the line of the task that makes it, when it is made. Calls
   made before one of them is awaited form a burst, which is placed as a whole.
2. A task the handler starts is a line, forked from the line it is started in. Its place
   there is after the last burst. What is forked at one place is identified together,
   when the first of it makes a call.
3. A call made while a call or a branch of its line is under way is parallel. So is a fork, but
   for it a branch is under way from its first call on: those started together are in order. Once
   code takes results as they arrive (see `arrivals`) of branches that work outside, all are.
4. Placing a call first identifies its line, which first identifies its parent, up to the root.
   The core then says which stored step or line it is or, if there is none, why it may not run.
5. A failure belongs to the line that saw it and, once that has ended, to its parent. It
   is past when a call is made there after it.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from flowfabric.core.journal import (
    BRANCH,
    ROOT,
    MadeCall,
    StoredCall,
    alike,
    firm,
    group_of,
    identity,
    indistinct,
    label_of,
    line_group,
    named_line,
)
from flowfabric.core.pools import VALUES, Burst, Pool, may_be_of_another
from flowfabric.core.records import Step, StepKind
from flowfabric.core.step_matching import NOTHING, Shelf
from flowfabric.worker.arrivals import Arrivals
from flowfabric.worker.asyncio_tasks import TaskActivity
from flowfabric.worker.digests import KnownBy, known_by

if TYPE_CHECKING:
    from flowfabric.worker.journal import Journal

T = TypeVar("T")

_EFFECTS: Final = (StepKind.CALL, StepKind.SUBMIT)


class DurableCall:
    """One call of a durable verb. While it is under way, use it as a context."""

    __slots__ = (
        "after_key", "asked", "before", "begins", "beside", "has_result", "holds_line", "home",
        "key", "kind", "line", "made", "refusal", "refused", "says_all", "step", "swapped",
        "took_ms", "work"
    )  # fmt: skip

    def __init__(self, line: "Line", kind: StepKind, asked: MadeCall, made: int) -> None:
        self.line = line
        self.kind = kind
        self.asked = asked
        self.made = made
        self.key = ""
        self.home: str | None = None
        """The line of the calls before it, where branches that share items have swapped them."""
        self.after_key: str | None = None
        self.step: Step | None = None
        """What is stored of it."""
        self.before: Forks | None = line.before
        """The place before it, until it has its key."""
        self.beside: Forks | None = None
        """Where the first of the branches that are under way was started."""
        self.work = line.work
        self.holds_line = False
        """The task of its line awaits it: nothing more is called there meanwhile."""
        self.begins = False
        """It is the first call of its line with an effect, and its arguments identify it."""
        self.has_result = False
        """What it returns is stored by this run, or is being stored."""
        self.took_ms: int | None = None
        self.says_all = False
        """Any other step with its name and arguments would do as well."""
        self.swapped: DurableCall | None = None
        """The call of another branch that took this call's step; this call takes its place."""
        self.refusal = ""
        self.refused: MadeCall | StoredCall = asked
        """What a person accepts by letting it run: the call as it was made, or the step that it
        should have got."""

    @property
    def name(self) -> str:
        return self.asked.name

    @property
    def forked_after(self) -> str | None:
        """The key of the call before the branches that are under way; None if there are none."""
        return None if self.beside is None else self.beside.key

    @property
    def identity(self) -> str:
        """What the ids of things it creates derive from: stable across runs, stored or not."""
        path: list[str] = []
        for line in self.line.and_above():
            path.insert(0, line.known_as)
            if line.is_named:
                break
        if self.home is not None:
            path[-1] = self.home
        return identity(path, self.asked)

    @property
    def is_stored(self) -> bool:
        """Whether an earlier run stored its end; the row of a sleep may only say that it began."""
        step = self.step
        return step is not None and (step.kind is not StepKind.SLEEP or step.position is not None)

    async def __aenter__(self) -> None:
        self.work.calls += 1
        self.holds_line = asyncio.current_task() is self.work.running
        self.work.held += self.holds_line
        self.line.begin()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # GeneratorExit is thrown into a coroutine that nobody awaits any more.
            if exc is not None and not isinstance(exc, GeneratorExit):
                await self.line.journal.failed(self, exc)
        finally:
            self.work.calls -= 1
            self.work.held -= self.holds_line
            self.line.end(beside=not self.holds_line)


class SeenFailure:
    """A failure the handler has seen, which is stored as soon as the handler goes on."""

    __slots__ = ("call", "failure", "line", "position", "since")

    def __init__(self, call: DurableCall, failure: bytes, position: int | None, since: int) -> None:
        self.call = call
        self.line = call.line
        """The line that saw it or, once that has ended, the line that started it."""
        self.failure = failure
        self.position = position
        self.since = since


class Forks:
    """The lines started after some calls of a line that were made together."""

    __slots__ = ("after", "numbers", "waiting")

    def __init__(self, after: list[DurableCall]) -> None:
        self.after = after
        self.waiting: dict[Line, None] = {}
        """Lines whose stored line has not been looked for yet."""
        self.numbers: dict[tuple[str, ...], int] = {}

    @property
    def key(self) -> str:
        """The key of the place: that of one of the calls before it, all placed by now.

        Not of the last one: a loop over a set makes them in a different order each time.
        """
        return min((call.key for call in self.after), default="")

    def line(self, parent: "Line") -> str:
        """The line of that call: branches that share their items may have stored it in another."""
        steps = (call.step for call in self.after if call.key == self.key)
        step = next(steps, None)
        return parent.known_as if step is None or step.step_key != self.key else step.line


class Line:
    """Calls made one after another: those of one task, as a rule."""

    def __init__(
        self, journal: "Journal", parent: "Line | None", asked: MadeCall, made: int = 0
    ) -> None:
        self.journal = journal
        self.parent = parent
        self.asked = asked
        self.made = made
        self.id: str | None = None
        self.refusal = ""
        self.forks = Forks([])
        self.before = self.forks
        """The lines started before the calls that are being made."""
        self.started_at: Forks | None = None if parent is None else parent.forks
        self._after_key: str | None = None
        self._after_value = False
        self.pool: Pool | None = None
        """What is stored of it and its equals, if anything."""
        self._burst: list[DurableCall] | None = None
        """The calls that are being made together."""
        self._bursts: deque[list[DurableCall]] = deque()
        self._numbers: dict[tuple[str, ...], int] = {}
        self._equals: dict[tuple[str, ...], int] = {}
        self._opaque: dict[tuple[str, ...], tuple[object, ...]] = {}
        self._first: Forks | None = None
        """Where it started its first branches."""
        self.arrivals = Arrivals()
        self._shelf: Shelf | None = None
        self._open = 0
        self._made = 0
        """How many calls."""
        self._acts = False
        """One of them may have an effect."""
        self._active = False
        self._under_way: dict[Line, None] = {}
        """Branches that have not ended, in the order they were started."""
        self._quiet: dict[Line, None] = {}
        """Branches that have made no call yet."""
        self._arrived = False
        """One of them has ended."""
        self._ended_beside = 0
        """Branches, and calls awaited by others, that have ended since its last call."""
        self._in_turn = True
        """It may have handled those one at a time. If they came from a set, their order differs in
        every run."""
        self.work = TaskActivity()
        """Of the task that makes its calls."""
        self.news_ms: int = 0 if parent is None else parent.news_ms
        self._started = 0
        """How many branches."""
        self.order: int = 0 if parent is None else hash((parent.order, parent._started))
        """The same in every run in which the lines around it start as many branches."""

    # Calling

    def ask(self, kind: StepKind, name: str, known: KnownBy) -> DurableCall:
        """Take the place of the next call. Call it in the order of the code."""
        self.journal.asked()
        self._go_on()
        work = self.work
        ended, work.ended = work.ended, work.unseen
        self._activate()
        beside = self._open > 0 or work.branches > 0
        arrives = self._arrives()
        parallel = beside or arrives
        quiet = parallel and self._open == 0
        number = _numbered(self._numbers, name, known.digest, parallel)
        burst = self._burst
        if burst is None:
            burst = self._burst = []
            self._bursts.append(burst)
            self.before, self.forks = self.forks, Forks(burst)
        equal = _count(self._equals, alike(kind, name, known.digest))
        made = self.journal.tick()
        self._in_turn = not beside or (self._in_turn and self._ended_beside <= 1)
        self._ended_beside = work.unseen = work.unseen if beside else 0
        after = None if arrives else self._after(beside, quiet)
        at_once = quiet and after is not None and not self._quiet
        # No argument of a child may be hidden.
        tells = known.tells and not (kind is StepKind.SUBMIT and known.opaque)
        asked = MadeCall(
            kind, name, known.digest, number, parallel, equal, 1, quiet, at_once, after, tells
        )
        call = DurableCall(self, kind, asked, made)
        if self._under_way:
            call.beside = next(iter(self._under_way)).started_at
        if arrives:
            call.beside = self._first or Forks([])
        if known.opaque:
            call.refusal = self._indistinct(asked, known.opaque, ended)
        if kind in _EFFECTS:
            call.begins, self._acts = not (self._acts or known.is_vague), True
            call.says_all = known.says_all and kind is StepKind.CALL
        burst.append(call)
        return call

    def _indistinct(self, asked: MadeCall, opaque: tuple[object, ...], ended: int) -> str:
        """Why a call or a branch must not run: it differs only in something unreadable, and may
        come in the order in which branches without calls end."""
        key = asked.kind, asked.name, asked.digest
        beside = bool(self._quiet) and self._arrived
        first = self._opaque.get(key, opaque) if beside or ended else opaque
        if beside:
            # Not at once: what is made or started together is in the order of the code.
            asyncio.get_running_loop().call_soon(self._opaque.setdefault, key, opaque)
        same = all(one is other for one, other in zip(first, opaque, strict=False))
        return "" if same else indistinct(asked)

    def _after(self, parallel: bool, quiet: bool) -> int | None:
        """What tells a call of another name that came at the same moment in an earlier run."""
        self._made += 1
        if not parallel:
            return 0 if self._is_beside else None
        if quiet:
            return None if self.work.in_turn else -self._made
        return self.journal.reached() if self._in_turn and not self._quiet else None

    def _go_on(self) -> None:
        """Its task continues after its own branches have ended."""
        if self.work.picks and self.work.ended > 1:
            self.journal.is_uncertain()

    @property
    def _is_beside(self) -> bool:
        """Whether a named line came beside others: its id does not tell."""
        line: Line | None = self if self.is_named else None
        while line is not None:
            around = line.parent
            if line.asked.parallel or (line.is_named and around and around._open > line._active):
                return True
            line = around
        return False

    def _arrives(self) -> bool:
        """Whether code goes on here as results arrive of branches that work outside of calls."""
        found = self.journal.works_outside and bool(self.arrivals)
        if found:
            self.journal.is_uncertain()
        return found

    @property
    def is_alone(self) -> bool:
        """Whether it is the only branch of its coroutine function started at its place."""
        return self.started_at is not None and self.started_at.numbers[self.asked.name,] == 1

    def begin(self) -> None:
        """One of its calls is awaited: calls made from now on belong to another burst."""
        self._open += 1
        self._burst = None
        self.journal.began()

    def end(self, *, beside: bool) -> None:
        self._open -= 1
        self._ended_beside += beside
        self.journal.ended()
        self.journal.glance(self)

    def _activate(self) -> None:
        """From its first call on, a branch counts as something under way in its parent."""
        line: Line | None = self
        while line is not None and not line._active:
            line._active = True
            if line.parent is not None:
                line.parent._open += 1
                line.parent._quiet.pop(line, None)
            line = line.parent

    # Finding out what is meant

    def place(self, call: DurableCall) -> None:
        """Say what a call stands for: a stored step, or a key for a new one."""
        if call.key:
            return
        self.identify()
        while not call.key:
            self._place_burst(self._bursts.popleft())

    def in_doubt(self, call: DurableCall) -> Burst | None:
        """The burst of a call, if another branch may be the one to ask for its step; else None."""
        if call.key:
            return None
        self.identify()
        if self.pool is None:
            return None
        while call not in self._bursts[0]:
            self._place_burst(self._bursts.popleft())
        burst = self._asked_in(self._bursts[0])
        return burst if self.pool.in_doubt(burst) else None

    def _asked_in(self, burst: list[DurableCall]) -> Burst:
        asked = [call.asked for call in burst]
        forked_after = burst[0].forked_after
        return Burst(self.known_as, asked, self._after_key, self._after_value, forked_after)

    def is_past_here(self) -> bool:
        """Whether an earlier run has come further in this line than the calls made so far."""
        self.identify()
        self._burst = None
        while self._bursts:
            self._place_burst(self._bursts.popleft())
        started = self._branches_at(self.forks)
        return bool(self.refusal or self.shelf.ahead or (started.untouched and started.behind))

    def count_patch(self, name: str) -> int:
        """Which use of a patch's name this is. It is no call, and leaves no trace in the order."""
        return _count(self._numbers, ("patch", name))

    def _place_burst(self, burst: list[DurableCall]) -> None:
        if burst is self._burst:
            self._burst = None
        if self.pool is None:
            asked = [call.asked for call in burst]
            by_arrival = self.journal.by_arrival
            matches = self.shelf.take(asked, burst[0].forked_after, by_arrival=by_arrival)
        else:
            matches = self.pool.take(self._asked_in(burst))
        for call, match in zip(burst, matches, strict=True):
            call.after_key = self._after_key
            if match.kept is not None:
                call.key, call.step = match.kept.key, self.journal.step(match.kept.key)
            elif (other := self.journal.taker_of(self.known_as, call.asked)) is not None:
                call.swapped, call.key, call.asked = other, other.key, other.asked
            else:
                if self.pool is not None and self.pool.exchanged:
                    call.home = self.pool.line_of(self._after_key) or self.known_as
                    call.asked = self.journal.ordered_at(call.home, call.asked)
                call.key, call.asked = self.journal.new_step_key(self.known_as, call.asked)
                call.refusal = (
                    self.refusal or call.refusal or match.refusal or self._refusal_of_branches(call)
                )
                call.refused = match.given_away or call.refused
            self._accept(call)
            call.before = None
        self._after_key = burst[-1].key
        self._after_value = self.pool is not None and any(call.kind in VALUES for call in burst)

    def _accept(self, call: DurableCall) -> None:
        """Let a call run that a person has accepted, itself or in another branch like this one."""
        given_up = self.journal.given_up(call)
        if given_up is None:
            return
        if isinstance(call.refused, MadeCall):
            call.refusal = self.refusal = ""
        self.journal.forgive(given_up)
        for line in self.and_above():
            if line.id is not None:
                line.shelf.forgive(given_up)

    def _refusal_of_branches(self, call: DurableCall) -> str:
        """Why a new call must not run: branches are stored from before it, and none is started."""
        branches = NOTHING if call.before is None else self._branches_at(call.before)
        return branches.refusal(call.asked) if branches.untouched else ""

    def _branches_at(self, forks: Forks) -> Shelf:
        """Stored branches that were started at a place, and are not started in this run."""
        if forks.waiting:
            next(iter(forks.waiting)).identify()
        stored = self.journal.stored
        return stored.lines_at(line_group(forks.line(self), forks.key)) if stored.lines else NOTHING

    def identify(self) -> None:
        """Find the stored line this one continues, together with those started with it."""
        forks, parent = self.started_at, self.parent
        if self.id is not None or forks is None or parent is None:
            return
        around, group = self._origin(parent, forks)
        after_key = forks.key or None
        waiting, forks.waiting = list(forks.waiting), {}
        if self not in waiting:
            waiting.append(self)
        here = self.journal.stored.lines_at(group)
        exchanged = {line: parent._exchanged(line.asked, here) for line in waiting}
        rest = [line for line, kept in exchanged.items() if kept is None]
        matches = dict(zip(rest, here.take([each.asked for each in rest]), strict=True))
        for line in waiting:
            line._after_key = after_key
            kept = exchanged[line]
            if kept is None:
                line.refusal = line.refusal or matches[line].refusal
                # An equal one may be stored after a call that this run has not made.
                beside = self.journal.stored.lines_beside(group)
                kept = matches[line].kept or _take_same(line.asked, beside)
            if kept is not None and parent._may_be_exchanged(line.asked, kept):
                line.refusal, kept = may_be_of_another(line.asked), None
            if kept is not None:
                line.refusal, line.id = "", kept.key
            else:
                line.id = self.journal.new_line_id(around, group, line.asked)
            # Where it is stored, which may be after a call that this run has not made.
            line.pool = self.journal.pool_at(group_of(line.known_as), line.asked.name)

    @staticmethod
    def _origin(parent: "Line", forks: Forks) -> tuple[str, str]:
        """The stored line in which branches were started, and their place there."""
        parent.identify()
        if forks.after:
            parent.place(forks.after[0])
        around = forks.line(parent)
        return around, line_group(around, forks.key)

    def is_guessed(self) -> bool:
        """Whether only its number identifies it so far, and it may be for another line's item.

        True also if that holds for a line identified together with it. Its parents are identified.
        """
        forks, parent = self.started_at, self.parent
        if self.id is not None or forks is None or parent is None or parent.pool is None:
            return False
        here = self.journal.stored.lines_at(self._origin(parent, forks)[1])
        return any(parent._guesses(line.asked, here) for line in (self, *forks.waiting))

    def _guesses(self, asked: MadeCall, here: Shelf) -> bool:
        """Whether a branch of this line is found by its number alone and may be another line's."""
        kept = None if here.has_equal(asked) else here.numbered(asked)
        return kept is not None and self._may_be_exchanged(asked, kept)

    def _exchanged(self, asked: MadeCall, here: Shelf) -> StoredCall | None:
        """An equal branch that another line started for the item that this line has now."""
        if self.pool is None or not asked.tells or here.has_equal(asked):
            return None
        stored = self.journal.stored
        others = (stored.lines_in(line) for line in self.pool.lines if line != self.id)
        kept = _take_same(asked, itertools.chain.from_iterable(others))
        if kept is not None:
            self.pool.exchanged = True
        return kept

    def _may_be_exchanged(self, asked: MadeCall, kept: StoredCall) -> bool:
        """Whether a branch found by its number alone may be for an item that another line has."""
        if self.pool is None or not asked.tells or firm(asked.digest) == firm(kept.digest):
            return False
        return self.pool.exchanged or self.journal.is_beside_work(self)

    def and_above(self) -> "Iterator[Line]":
        """This line, and those it was started in."""
        line: Line | None = self
        while line is not None:
            yield line
            line = line.parent

    @property
    def whereabouts(self) -> str | None:
        """Where it starts others now; None while calls before that are to be placed."""
        if self.id is None or any(not call.key for call in self.forks.after):
            return None
        return line_group(self.forks.line(self), self.forks.key)

    @property
    def is_named(self) -> bool:
        return self.id is not None and self.id.startswith("=")

    def is_beside(self, other: "Line") -> bool:
        """Whether another, or one it was started in, is of the same function and place."""
        around = list(other.and_above())
        alike = self.started_at, self.asked.name
        return self not in around and any((a.started_at, a.asked.name) == alike for a in around)

    @property
    def known_as(self) -> str:
        assert self.id is not None
        return self.id

    @property
    def shelf(self) -> Shelf:
        if self._shelf is None:
            self._shelf = self.journal.stored.of_line(self.known_as)
        return self._shelf

    @property
    def next_stored(self) -> StoredCall | None:
        """What an earlier run asked for next, with no branch of it under way; None if nothing."""
        if self.arrivals and self.journal.works_outside:
            return None
        if self.pool is not None and self.pool.exchanged:
            return self.pool.left_after(self._after_key)
        return self.shelf.behind

    # Branches

    def fork(self, coroutine: object) -> "Line":
        """A line for a task that is being created here."""
        self._go_on()
        label = label_of(getattr(coroutine, "__qualname__", type(coroutine).__name__))
        known = known_by(coroutine)
        digest = known.digest
        parallel = self._open > 0 or self._arrives()
        number = _numbered(self.forks.numbers, label, digest, parallel)
        equal = _count(self._equals, alike(BRANCH, label, digest))
        same = _count(self._equals, (BRANCH, label, digest, "same"))
        asked = MadeCall(BRANCH, label, digest, number, parallel, equal, same, tells=known.tells)
        made = Line(self.journal, self, asked, self.journal.tick())
        if known.opaque:
            made.refusal = self._indistinct(asked, known.opaque, self.work.ended)
        made.work = TaskActivity(self.work)
        self._started += 1
        self._first = self._first or self.forks
        self.forks.waiting[made] = None
        self._under_way[made] = None
        # Not at once: what is started together is in the order of the code.
        asyncio.get_running_loop().call_soon(self._quiet.setdefault, made)
        self.journal.task_began(made)
        return made

    def named(self, name: str) -> "Line":
        """A line the code gives a name: it is known by that alone, wherever it is."""
        above: Line | None = self
        while above is not None and not above.is_named:
            above = above.parent
        path = named_line(above.known_as if above is not None else ROOT, name)
        made = Line(self.journal, self, MadeCall(BRANCH, name, "", 1), self.journal.tick())
        made.id = path
        made.work = self.work
        return made

    def ended(self, task: "asyncio.Future[T]") -> None:
        """Its task has ended; its parent decides what its failures meant."""
        # The task that awaits it retrieves what it failed with.
        cut_off = task.cancelled() or getattr(task, "_exception", task) is not None
        self.left()
        self.let_go()
        self.work.end(cut_off=cut_off)
        line = self.parent
        while line is not None:
            line._ended_beside += 1
            # Calls inside a named branch are made by the task around it.
            line = line.parent if line.is_named else None
        self.journal.task_ended(self, cut_off=cut_off)
        if self.parent is not None:
            self.journal.glance(self.parent)

    def left(self) -> None:
        """Nothing more is called in it for now."""
        parent = self.parent
        if parent is None:
            return
        parent.news_ms = max(parent.news_ms, self.news_ms)
        parent._arrived |= self in parent._quiet
        parent._quiet.pop(self, None)
        parent._under_way.pop(self, None)
        if self._active:
            self._active = False
            parent._open -= 1
        now = self.journal.tick()
        for seen in self.journal.seen:
            if seen.line is self:
                seen.line, seen.since = parent, now

    def let_go(self) -> None:
        """Drop references back here: it is then freed without the garbage collector."""
        self.forks = self.before = Forks([])
        self._shelf = None
        self._burst = None
        self._bursts.clear()
        self._quiet.clear()
        self._under_way.clear()
        self._opaque.clear()
        self._first = None
        self.arrivals.let_go()

    def take_over(self, call: DurableCall, step: Step) -> None:
        """A call of this line stands for an equal one of another branch.

        It leaves no trace: in the next run the other branch may come first again.
        """
        call.step, call.refusal = step, ""
        if self._after_key == call.key:
            self._after_key = call.after_key

    # Failures

    def pend(self, call: DurableCall, failure: bytes, position: int | None = None) -> None:
        self.journal.seen.append(SeenFailure(call, failure, position, self.journal.tick()))

    def gone_past(self, call: DurableCall) -> list[SeenFailure]:
        """The failures after which `call` was made: the handler has gone on past them."""
        found: list[SeenFailure] = []
        line: Line | None = self
        made = call.made
        while line is not None and self.journal.seen:
            here = line
            found += [seen for seen in self.journal.seen if seen.line is here and seen.since < made]
            made, line = line.made, line.parent
        return found


def _take_same(asked: MadeCall, shelves: Iterable[Shelf]) -> StoredCall | None:
    found = (shelf.take_same(asked) for shelf in shelves)
    return next((kept for kept in found if kept is not None), None)


def _numbered(counts: dict[tuple[str, ...], int], name: str, digest: str, parallel: bool) -> int:
    """Which use of a name it is, of all; of name and firm arguments, if it is parallel."""
    number = _count(counts, (name,))
    return _count(counts, (name, firm(digest))) if parallel else number


def _count(counts: dict[tuple[str, ...], int], what: tuple[str, ...]) -> int:
    counts[what] = number = counts.get(what, 0) + 1
    return number


def root_line(journal: "Journal") -> Line:
    line = Line(journal, None, MadeCall(BRANCH, ROOT, "", 1))
    line.id = ROOT
    line.work.running = asyncio.current_task()
    return line
