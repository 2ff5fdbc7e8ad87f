"""Notices calls that changed code has moved from one line to another; see docs/deploys.md.

When a call that is not stored is about to run, every call the handler makes without a new result
has been made, unless it does something outside of steps first. If one like it is stored in a line
where nobody asks for it, and nobody will, the code has moved it, and its effect would happen again.
"""

from collections.abc import Collection, Mapping

from flowfabric.core.journal import Going, alike, may_ask_yet, moved
from flowfabric.core.records import Step
from flowfabric.worker.at_work import at_work
from flowfabric.worker.lines import DurableCall, Line


class Moves:
    """Which lines a run has started, and what is stored where nobody asks for it."""

    def __init__(
        self,
        untaken: Collection[str],
        named: Mapping[str, Line],
        entered: Collection[str],
    ) -> None:
        """The keys of stored steps that were not asked for; lines with names, and those in use."""
        self._untaken = untaken
        self._named = named
        self._entered = entered
        self._alike: dict[tuple[str, ...], list[Step]] = {}
        self._tasks: set[Line] = set()
        self._cut_off: set[str] = set()
        """Lines that were cancelled or have failed."""
        self._unknown: set[str] = set()
        """Labels of those of them that had made no call."""
        self._forgiven: set[str] = set()

    @property
    def tasks(self) -> int:
        """How many tasks the handler has started that have not ended."""
        return len(self._tasks)

    def at_work(self) -> bool:
        """Whether a task of the handler works outside of durable calls.

        One with branches of its own waits for them, as the handler itself does.
        """
        leaves = [line.work for line in self._tasks if line.work.is_outside_calls]
        tasks = {line.work.running for line in self._tasks} if leaves else set()
        return any(at_work(leaf.running, tasks) for leaf in leaves)

    def take_in(self, step: Step) -> None:
        """Know a stored step that has an outcome."""
        self._alike.setdefault(alike(step.kind, step.name, step.digest), []).append(step)

    def task_began(self, line: Line) -> None:
        self._tasks.add(line)

    def task_ended(self, line: Line) -> None:
        self._tasks.discard(line)

    def cut_off(self, line: Line) -> None:
        """A line ends because it was cancelled, or has failed."""
        if line.id is None:
            self._unknown.add(line.asked.name)
        else:
            self._cut_off.add(line.id)

    def forgive(self, keys: Collection[str]) -> None:
        self._forgiven.update(keys)

    def refusal(self, call: DurableCall) -> str:
        """Why a call that is not stored must not run; empty if it may."""
        asked = call.asked
        lines = {
            step.line
            for step in self._alike.get(alike(asked.kind, asked.name, asked.digest), ())
            if step.step_key in self._untaken and step.step_key not in self._forgiven
        }
        lines.discard(call.line.known_as)
        if lines:
            going = self._going(call.line)
            for line in sorted(lines):
                if not may_ask_yet(line, going):
                    return moved(asked, line)
        return ""

    def _going(self, line: Line) -> Going:
        waiting = list(line.and_above())
        for each in waiting:
            each.identify()
        others = self._tasks.difference(waiting) if self.at_work() else set[Line]()
        known = [each for each in others if each.id is not None]
        named = {each for each in self._entered if self._named[each] not in waiting}
        # A line with a name is known by that alone, wherever it is started.
        places = () if line.is_named else (each.whereabouts for each in known)
        return Going(
            alive={each.known_as for each in known} | (named if others else set()),
            places={place for place in places if place is not None},
            unknown=self._unknown | {each.asked.name for each in others if each.id is None},
            cut_off=self._cut_off,
        )

    def let_go(self) -> None:
        """Of the lines, which point back to the attempt."""
        self._tasks.clear()
