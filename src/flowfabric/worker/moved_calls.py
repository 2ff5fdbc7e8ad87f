"""What earlier runs have stored, and stored calls that changed code has moved to another line.

How people deal with the latter is in docs/deploys.md.

When a call that is not stored is about to run, every call the handler makes without a new
result has been made, unless it does something outside steps first. If the same call is stored in a
line that has not asked for it and never will, the code has moved it, and its effect would happen
again. The same is true if a line that waits for this branch has a stored call next: an earlier run
got there without the new one. While its line is the only one running, anything stored elsewhere
lies ahead of it, except calls made beside others: those came in order of arrival.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextvars import Context
from typing import Final

from flowfabric.core import journal
from flowfabric.core.changed_code import Acceptances
from flowfabric.core.records import Step, StepKind
from flowfabric.core.step_matching import NOTHING, Shelf
from flowfabric.worker import branches
from flowfabric.worker.arrivals import waits_at_queue
from flowfabric.worker.asyncio_tasks import (
    OwnTasks,
    at_work,
    awaits_one_of,
    current_line,
    is_ours,
    is_waiting,
    picks,
)
from flowfabric.worker.failures import GIVEN_UP

GLANCES: Final = 3
"""Turns of the event loop for which a task is looked at after it may have gone on."""
_IDLE: Final = (StepKind.SLEEP, StepKind.NOW, StepKind.RANDOM, StepKind.UUID)


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


class KeptSteps:
    """What earlier runs of a handler have stored, and which part this run has not asked for."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = {step.step_key: step for step in steps}
        self.positions = positions_of(steps)
        self.accepted = Acceptances()
        self.by_line: dict[str, list[journal.StoredCall]] = {}
        for step in steps:
            if step.kind is StepKind.ACCEPT:
                self.accepted.take_in(step)
            elif step.kind is not StepKind.PATCH:
                self.by_line.setdefault(step.line, []).append(stored_call(step))
        self.untaken = {each.key for kept in self.by_line.values() for each in kept}
        lines = journal.kept_lines(self.by_line)
        self.lines = {group: Shelf(lines[group]) for group in sorted(lines)}
        """The lines by the place where they were started."""
        self._siblings: dict[str, list[Shelf]] = {}
        """The same by the line in which they were started."""
        for group, shelf in self.lines.items():
            self._siblings.setdefault(journal.parent_of_group(group), []).append(shelf)
        self._shelves: dict[str, Shelf] = {}
        self._ordinals: dict[tuple[str, tuple[str, str, str]], int] = {}

    def of_line(self, line: str) -> Shelf:
        """What is stored of a line."""
        if line not in self.by_line:
            return NOTHING
        if line not in self._shelves:
            kept = self.by_line[line]
            stored = ((each, self.steps[each.key]) for each in kept) if self.accepted else ()
            self._shelves[line] = Shelf(kept, self.accepted.only_equal(line, stored))
        return self._shelves[line]

    def lines_at(self, group: str) -> Shelf:
        """The lines that are stored as started at one place."""
        return self.lines.get(group, NOTHING)

    def lines_beside(self, group: str) -> Iterable[Shelf]:
        """Lines that are stored as started at any place of the same line."""
        return self._siblings.get(journal.parent_of_group(group), ())

    def lines_in(self, line: str) -> Iterable[Shelf]:
        """Lines that are stored as started in a line, at any place."""
        return self.lines_beside(journal.line_group(line, ""))

    def ordinal(self, line: str, like: tuple[str, str, str]) -> int:
        """The next ordinal of a new call among those like it in a line, whoever has made them."""
        if (line, like) not in self._ordinals:
            kept = (
                journal.alike(each.kind, each.name, each.digest)
                for each in self.by_line.get(line, ())
            )
            self._ordinals[line, like] = sum(each == like for each in kept)
        self._ordinals[line, like] += 1
        return self._ordinals[line, like]


NOTHING_KEPT: Final = KeptSteps(())
"""For the first run of a handler."""


class Moves:
    """Which lines a run has started, and which stored steps no line asks for."""

    def __init__(
        self,
        root: branches.Line,
        untaken: Set[str],
    ) -> None:
        """`untaken` are the keys of stored steps that were not asked for."""
        self._root = root
        self._untaken = untaken
        self.named: dict[str, branches.Line] = {}
        """Lines with names."""
        self.entered: set[str] = set()
        """Named lines that are in use."""
        self._alike: dict[tuple[str, ...], list[Step]] = {}
        self._stored: dict[str, Step] = {}
        self._tasks: set[branches.Line] = set()
        self._cut_off: set[str] = set()
        """Lines that were cancelled or have failed."""
        self._unknown: set[str] = set()
        """Labels of cancelled or failed lines that had made no call."""
        self._acting = {""}
        """Named branches that have stored a step with an effect; "" (no name) always counts."""
        self._forgiven: set[str] = set()
        self.taken_over: list[tuple[Step, branches.DurableCall]] = []
        """Stored steps that equal calls of other branches stand for, with these."""
        self.shared: set[str] = set()
        """Lines of branches that share their items."""
        self.in_doubt: Callable[[], Collection[str]] = set
        """Lines whose steps a call may stand for that waits to know."""
        self._running: set[object] = set()
        self._waits = OwnTasks(self._is_own, self._runs_in)
        self.certain = True
        """Only stored outcomes have brought the handler where it is."""
        self._gives_up = False
        """The handler gave up something it waited for, in this run or an earlier one."""
        self.by_arrival = False
        """A branch was seen, beside others, waiting for something else: what they leave in a list,
        or do when they end, comes in a different order in every run."""

        self._glances: dict[branches.Line, int] = {}
        """Lines that are looked at, and for how many turns of the event loop."""
        self.outside = False
        """A branch was seen beside others to wait for anything else, if only for a moment."""

    def glance(self, line: branches.Line) -> None:
        """Look in the next turns at what a line waits for that may continue now."""
        if line not in self._glances:
            asyncio.get_running_loop().call_soon(self._glance, line)
        self._glances[line] = GLANCES

    def _glance(self, line: branches.Line) -> None:
        running, work = line.work.running, line.work
        turns = self._glances.pop(line, 0) - 1
        if turns > 0 and running is not None:
            self._glances[line] = turns
            asyncio.get_running_loop().call_soon(self._glance, line)
        if not work.held and is_waiting(running):
            if not self.outside and len(self._tasks) > 1:
                self._running = {each.work.running for each in self._tasks}
                in_order = self._waits.in_order(running, work.branches)
                self.outside = not in_order and self._works_outside(line)
            if waits_at_queue(running):
                _note_queue(line)

    def look(self) -> None:
        """Look whether a task goes on by anything but durable calls. Call it at rest."""
        if self.by_arrival or not self._untaken:
            return
        self._running = {line.work.running for line in self._tasks}
        for line in (self._root, *self._tasks):
            work = line.work
            if work.held:
                continue
            if not self._waits.in_order(work.running, work.branches):
                self.certain = False
                self.by_arrival |= len(self._tasks) > 1 and self._works_outside(line)
            else:
                work.picks = work.picks or picks(work.running)

    def _works_outside(self, line: branches.Line) -> bool:
        """Whether a branch waits for something unrelated to the handler's calls."""
        work = line.work
        waits = getattr(work.running, "_fut_waiter", None) is not None
        return (
            line is not self._root
            and waits
            and work.is_outside_calls
            and at_work(work.running, self._running)
        )

    def _is_own(self, future: object) -> bool:
        if not isinstance(future, asyncio.Task):
            return False
        return future.done() or future in self._running or is_ours(future.get_coro())

    def _runs_in(self, context: Context) -> bool:
        line = context.get(current_line)
        return line is not None and line.journal is self._root.journal

    def taker_of(self, line: str, asked: journal.MadeCall) -> branches.DurableCall | None:
        """The call of another branch that has taken over what was stored of a call in a line."""
        for position, (step, call) in enumerate(self.taken_over):
            equal = step.kind == asked.kind and step.name == asked.name
            if equal and step.line == line and step.digest == asked.digest:
                del self.taken_over[position]
                return call
        return None

    def unaccounted(self, line: branches.Line) -> Step | None:
        """What the same code would have asked for by now, before anything new in a line."""
        left = self._left(line) if self.certain else ()
        # Which branch gets to a shared item, and when, differs from run to run.
        others = self.shared.union(self.in_doubt()) if left else self.shared
        return min((step for step in left if step.line not in others), key=_place, default=None)

    def _left(self, line: branches.Line) -> list[Step]:
        """Stored steps that were not asked for, as far as they concern a line."""
        if not self._untaken:
            return []
        left = (self._stored.get(key) for key in self._untaken - self._forgiven)
        # Named branches may come in any order, and one that has only slept may be left over from
        # code that gave it another name and was blocked.
        return [
            step
            for step in left
            if step is not None
            and not journal.in_any_order(line.known_as, step.line)
            and journal.name_of(step.line) in self._acting
        ]

    @property
    def tasks(self) -> int:
        """How many tasks the handler has started that have not ended."""
        return len(self._tasks)

    def at_work(self) -> bool:
        """Whether a task of the handler works outside of durable calls.

        One with branches of its own waits for them, as the handler itself does.
        """
        leaves, tasks = self._outside_calls()
        return any(at_work(leaf, tasks) for leaf in leaves)

    def is_beside_work(self, line: branches.Line) -> bool:
        """Whether a branch like this one, or one it has started, works outside of durable calls."""
        leaves, tasks = self._outside_calls()
        return any(
            at_work(each.work.running, tasks)
            for each in (self._tasks if leaves else ())
            if each.work.is_outside_calls and line.is_beside(each)
        )

    def has_calls_beside(self, line: branches.Line, in_doubt: Collection[branches.Line]) -> bool:
        """Whether calls of other lines go on by themselves, without those in doubt."""
        others = {self._root, *self._tasks}.difference(in_doubt, line.and_above())
        return any(each.work.is_acting for each in others)

    def is_at_work(self, line: branches.Line) -> bool:
        """Whether the task of a line does anything but wait for calls or its branches."""
        work, tasks = line.work, {each.work.running for each in self._tasks}
        self._running = tasks
        return not (
            work.held
            or awaits_one_of(tasks, work.running)
            or self._waits.in_order(work.running, work.branches)
        )

    def _may_call(self) -> bool:
        """Whether a task is between two calls: at work, or at a lock that another may have."""
        leaves, tasks = self._outside_calls()
        return not all(awaits_one_of(tasks, leaf) for leaf in leaves)

    def _outside_calls(self) -> tuple[list[object], set[object]]:
        """The tasks that wait neither in a call nor for branches of their own, and all tasks."""
        leaves = [line.work.running for line in self._tasks if line.work.is_outside_calls]
        return leaves, {line.work.running for line in self._tasks} if leaves else set()

    def take_in(self, step: Step) -> None:
        """Take note of a stored step that has an outcome."""
        self._alike.setdefault(journal.alike(step.kind, step.name, step.digest), []).append(step)
        self._stored[step.step_key] = step
        if step.kind not in _IDLE:
            self._acting.add(journal.name_of(step.line))

    def task_began(self, line: branches.Line) -> None:
        self._tasks.add(line)

    def task_ended(self, line: branches.Line) -> None:
        self._tasks.discard(line)

    def cut_off(self, line: branches.Line) -> None:
        """A line ends because it was cancelled, or has failed."""
        self.give_up()
        if line.id is None:
            self._unknown.add(line.asked.name)
        else:
            self._cut_off.add(line.id)

    def give_up(self) -> None:
        """A call, or a branch, is given up; a timer may decide when, or whether at all."""
        self.certain = False
        self._gives_up = True

    def forgive(self, keys: Collection[str]) -> None:
        self._forgiven.update(keys)

    def refusal(self, call: branches.DurableCall) -> str:
        """Why a call that is not stored must not run; empty if it may."""
        asked = call.asked
        if asked.kind in _IDLE and not self.certain:
            # It has no effect that could happen again, and its equals may be left for any reason.
            return ""
        here = call.line.known_as
        for each in self._that_wait_for(call.line):
            left = each.next_stored
            if left is not None:
                return journal.behind(asked, here, left, each.journal.step(left.key).line)
        alike = self._alike.get(journal.alike(asked.kind, asked.name, asked.digest), ())
        renamed = _may_be_renamed(call, alike)
        elsewhere = {
            step.line
            for step in alike
            if step.step_key in self._untaken and step.step_key not in self._forgiven
            if renamed or not journal.in_any_order(here, step.line)
        }
        # The pool has looked at what is left in branches that share items with this one.
        pool = call.line.pool
        elsewhere -= {here} if pool is None or not pool.exchanged else {here, *pool.lines}
        if elsewhere:
            going = self._going(call.line)
            for line in sorted(elsewhere):
                if not journal.may_ask_yet(line, going):
                    return journal.moved(asked, line)
        return ""

    def equal_in_another(self, call: branches.DurableCall) -> Step | None:
        """The stored step of an equal call in a branch still on its way to it, say at a lock.

        Each branch may make such a call for itself. But if an earlier run continued this line
        without it, so that it would skip a step now, another branch made the call for all of them.
        """
        if self.certain or not (call.says_all and call.refusal):
            return None
        asked, here = call.asked, call.line
        on_their_way = {each.id for each in self._tasks if each.work.is_outside_calls}
        if here.pool is not None and here.pool.exchanged:
            on_their_way.difference_update(here.pool.lines)
        equal = (
            step
            for step in self._alike.get(journal.alike(asked.kind, asked.name, asked.digest), ())
            if step.digest == asked.digest
            and step.line in on_their_way
            and journal.name_of(step.line) == journal.name_of(here.known_as)
            and step.step_key in self._untaken
            and step.step_key not in self._forgiven
        )
        return min(equal, key=_place, default=None)

    def _that_wait_for(self, line: branches.Line) -> Iterator[branches.Line]:
        """Lines that continue once this one has ended, if only stored outcomes decide that.

        Whatever such a line called by itself, an earlier run called after this one had ended.
        """
        # What works outside of calls may end the waiting first, as a timer does.
        if self._gives_up or self.at_work():
            return
        # Lines whose only calls are inside named branches have never been identified.
        unknown = {None, *self.in_doubt()}
        yield from (
            each for each in line.and_above() if each is not line and each.id not in unknown
        )

    def left_to(self, line: branches.Line) -> Step | None:
        """Steps stored elsewhere that no line has asked for, nor will, while this line is alone."""
        left = [
            step for step in self._left(line) if step.line != line.known_as and not _is_beside(step)
        ]
        if left:
            going = self._going(line)
            for step in sorted(left, key=lambda step: step.step_key):
                if not journal.may_ask_yet(step.line, going):
                    return step
        return None

    def _going(self, line: branches.Line) -> journal.Going:
        waiting = list(line.and_above())
        for each in waiting:
            each.identify()
        others = self._tasks.difference(waiting) if self._may_call() else set[branches.Line]()
        known = [each for each in others if each.id is not None]
        named = {each for each in self.entered if self.named[each] not in waiting}
        # A named line is identified by its name alone, wherever it is started.
        places = () if line.is_named else (each.whereabouts for each in known)
        return journal.Going(
            alive={each.known_as for each in known} | (named if others else set()),
            places={place for place in places if place is not None},
            unknown=self._unknown | {each.asked.name for each in others if each.id is None},
            cut_off=self._cut_off,
        )

    def let_go(self) -> None:
        """Drop the lines, which point back to the attempt."""
        self._tasks.clear()
        self._glances.clear()
        self.named.clear()
        self.taken_over.clear()
        self.in_doubt = set


def _note_queue(line: branches.Line) -> None:
    """Note that a line waits at a queue, which others may fill as they end."""
    # Given a time, Python 3.11 waits there in a task of its own.
    taker = line.parent if line.asked.name == "Queue.get" else line
    # Branches of one function that do so share their items: see `core.pools`.
    if taker is not None and (taker.is_alone or taker.work.branches > 0):
        taker.arrivals.at_queue(taker.work.running)


def _place(step: Step) -> tuple[float, str]:
    """Where it comes in the order of outcomes; last, if it has none yet."""
    return math.inf if step.position is None else step.position, step.step_key


def _may_be_renamed(call: branches.DurableCall, alike: Collection[Step]) -> bool:
    """Whether the same call, stored under another branch name, may have been moved here.

    Named branches may come in any order, and all of them may sleep equally long. But if only one of
    them has had an effect, and this branch is about to have that effect first of all, the branch
    was renamed.
    """
    others = {journal.name_of(step.line) for step in alike} - {""}
    return call.begins and len(others) == 1


def _is_beside(step: Step) -> bool:
    """Whether it was called in parallel: then another run may never make the call."""
    return step.parallel or step.asked_after is not None or journal.started_beside(step.line)
