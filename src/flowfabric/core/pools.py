"""Branches that take their items from something they share: a queue, a list, an iterator.

Branches of one coroutine function that are started at one place are a *pool*. If they share a
queue, and something outside steps decides which comes first, each takes different items in the
next run: then the branch no longer tells which call is being made. Until there is evidence of
that, each branch sticks to its own stored steps (see `journal`). These rules are added:

1. A call is *in doubt* if no step with its arguments is left in its own line, and one is left in
   the line of another branch, or its number belongs to a step with other arguments, or it would
   skip a step of its line. It is also in doubt if the step with its arguments has another number in
   its own line: the branch may have reached a later item of its own. A call in doubt waits until
   the other branches are at rest: a branch that asks for its own step gets it.
2. Then a step that its own branch has moved past goes to the branch that asks for it. That is an
   *exchange*: the branches of this pool share their items. If no branch has moved past the step
   before it yet, the step waits, while other branches continue, for the branch that gets there.
3. If no branch exchanges anything, and no other branch can continue on its own, the number decides,
   as in any line: an argument may be the time. A new call of another branch runs first, since that
   branch may then take an item that is stored here.
4. From the first exchange on, in this run and all later ones, numbers mean nothing in the pool. A
   call is known by its arguments and by the step before it, which links all calls for one item
   whichever branch made them. A call whose arguments tell nothing is known by the step before it
   alone.
5. A value drawn before the first call for an item, such as a time, may belong to this item or to
   the one before it: if items have been exchanged since, the call is refused before it runs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from flowfabric.core.journal import MadeCall, StoredCall, alike, left_behind, shown
from flowfabric.core.records import StepKind
from flowfabric.core.step_matching import NEW, Match, Shelf, taken_by_another

VALUES: Final = (StepKind.NOW, StepKind.RANDOM, StepKind.UUID, StepKind.SIGNAL)
"""What they return may be meant for the item of the next call."""


class Burst(NamedTuple):
    """Calls a branch makes together."""

    line: str
    calls: Sequence[MadeCall]
    after: str | None
    """The key of the call before them."""
    after_value: bool = False
    """Whether that call returned a value, such as a time, which no argument shows."""
    forked_after: str | None = None
    """If branches of it are under way: the key of the call before the first of them."""


class Pool:
    """What is stored of the branches of one coroutine function, started at one place."""

    def __init__(self, shelves: Mapping[str, Shelf]) -> None:
        """`shelves` by line."""
        self._shelves = shelves
        self._steps: dict[str, tuple[str, StoredCall]] = {}
        self._alike: dict[tuple[str, str, str], list[str]] = {}
        self._followers: dict[str, list[str]] = {}
        self._changing: set[tuple[str, str]] = set()
        """Names of calls that matched a step with other arguments, or a step at another place."""
        self._gone_past: set[str] = set()
        """The keys of calls after which another one was made in this run."""
        for line, shelf in shelves.items():
            for kept in shelf.left:
                self._steps[kept.key] = line, kept
                self._alike.setdefault(_alike(kept), []).append(kept.key)
                if kept.after_key is not None:
                    self._followers.setdefault(kept.after_key, []).append(kept.key)
        self.exchanged = any(
            self._steps[before][0] != self._steps[key][0]
            for before, keys in self._followers.items()
            if before in self._steps
            for key in keys
        )

    def in_doubt(self, burst: Burst) -> bool:
        """Whether other branches have to come to rest before a burst is placed."""
        return any(
            self._exact(burst, asked)
            or (not self.exchanged and (self._guessed(burst, asked) or self._is_passed_by(burst)))
            for asked in burst.calls
            if not self._is_known(burst, asked)
        )

    def line_of(self, key: str | None) -> str | None:
        """The branch that has stored a step, if one of these has."""
        return self._steps[key][0] if key in self._steps else None

    @property
    def lines(self) -> Collection[str]:
        return self._shelves.keys()

    def owners(self, burst: Burst) -> set[str]:
        """The branches that have stored what the calls of a burst in doubt ask for."""
        return {line for line, _ in self._wanted(burst)}

    def is_claimed(self, burst: Burst) -> bool:
        """Whether a step that a burst in doubt asks for follows one that no branch has passed."""
        return any(
            kept.after_key in self._steps and kept.after_key not in self._gone_past
            for _, kept in self._wanted(burst)
        )

    def resolve(self, waiting: Iterable[Burst], others_go_on: Callable[[], bool]) -> list[str]:
        """The lines of those bursts in doubt that can be placed now that all are at rest.

        `others_go_on` says whether branches that are not in doubt may still ask for something.
        """
        bursts = list(waiting)
        exact = {each.line: self._wanted(each) for each in bursts}
        # A branch that falls back on its number goes on in its own line, and may ask for the rest.
        going_on = {
            each.line: self._fallbacks(each)
            for each in bursts
            if not self.exchanged and not exact[each.line]
        }
        left = {
            line: [kept for owner, kept in wanted if self._is_free(kept, owner, going_on)]
            for line, wanted in exact.items()
        }
        passed = self._gone_past.union(each.after or "" for each in bursts)
        found = [
            line
            for line, steps in left.items()
            if any(kept.after_key not in self._steps or kept.after_key in passed for kept in steps)
        ]
        if not found:
            # A burst without anything to fall back on need not wait for other branches.
            settled = [line for line, keys in going_on.items() if not keys]
            if settled or others_go_on():
                return settled
        found = found or [line for line, steps in left.items() if steps]
        if found:
            self.exchanged = True
            return found
        return list(going_on) or list(exact)

    @staticmethod
    def _is_free(kept: StoredCall, owner: str, going_on: Mapping[str, Collection[str]]) -> bool:
        return not going_on.get(owner) or kept.key in going_on[owner]

    def take(self, burst: Burst) -> list[Match]:
        """What the calls of a burst stand for, taken off the shelves."""
        shelf = self._shelf(burst.line)
        self._gone_past.add(burst.after or "")
        if not self.exchanged:
            matches = shelf.take(burst.calls, burst.forked_after)
            self._changing.update(
                (asked.kind, asked.name)
                for asked, match in zip(burst.calls, matches, strict=True)
                if match.kept is not None
                and (_alike(match.kept) != _alike(asked) or match.kept.number != asked.number)
            )
        else:
            matches = [self._take_one(burst, asked) for asked in burst.calls]
        return [
            match if match.kept is not None else self._unless_given_away(asked, match)
            for asked, match in zip(burst.calls, matches, strict=True)
        ]

    def _unless_given_away(self, asked: MadeCall, new: Match) -> Match:
        """Refuse a call whose step a branch has given to a call with other arguments."""
        left = any(map(self._is_left, self._alike.get(_alike(asked), ())))
        given = (shelf.given_away(asked) for shelf in self._shelves.values())
        kept = None if left or not _tells(asked) else next(filter(None, given), None)
        return new if kept is None else Match(None, taken_by_another(asked), kept)

    def _take_one(self, burst: Burst, asked: MadeCall) -> Match:
        kept = next(self._candidates(burst, asked), None)
        if kept is None:
            return self._new(burst, asked)
        if kept.after_key != burst.after and (burst.after_value or self._follows_value(kept)):
            return Match(None, _mixed(asked))
        self._shelf(self._steps[kept.key][0]).remove(kept)
        return Match(kept)

    def _new(self, burst: Burst, asked: MadeCall) -> Match:
        """A call that is stored nowhere; refused if another name followed the same step."""
        for key in self._followers.get(burst.after or "", ()):
            line, kept = self._steps[key]
            if line != burst.line and burst.after not in self._steps:
                continue
            if self._is_left(key) and not any(_is_of(kept, each) for each in burst.calls):
                return Match(None, left_behind(asked, kept))
        return NEW

    def left_after(self, key: str | None) -> StoredCall | None:
        """The step that followed another in its branch, not in parallel, and is still to come."""
        followers = (self._steps[each] for each in self._followers.get(key or "", ()))
        return next(
            (
                kept
                for line, kept in followers
                if not kept.parallel and kept.key in self._shelf(line).ahead
            ),
            None,
        )

    # Candidates

    def _candidates(self, burst: Burst, asked: MadeCall) -> Iterator[StoredCall]:
        """What a call may stand for once branches have exchanged items, best first."""
        left = [
            self._steps[key] for key in self._alike.get(_alike(asked), ()) if self._is_left(key)
        ]
        yield from sorted(
            (kept for _, kept in left if kept.after_key == burst.after),
            key=lambda kept: (kept.digest != asked.digest, kept.number),
        )
        if _tells(asked):
            others = sorted(
                (line != burst.line, kept.digest != asked.digest, kept.number, kept.key, kept)
                for line, kept in left
            )
            yield from (kept for *_, kept in others)

    def _is_known(self, burst: Burst, asked: MadeCall) -> bool:
        """Whether a call finds its step without those of other branches."""
        if self.exchanged:
            first = next(self._candidates(burst, asked), None)
            return first is None or first.after_key == burst.after
        return not self._skips(burst, asked) and any(
            self._steps[key][0] == burst.line and self._is_left(key)
            for key in self._alike.get(_alike(asked), ())
        )

    def _skips(self, burst: Burst, asked: MadeCall) -> bool:
        """Whether a branch may have reached a different one of its own items than last time."""
        return _tells(asked) and self._guessed(burst, asked) is not None

    def _exact(self, burst: Burst, asked: MadeCall) -> list[tuple[str, StoredCall]]:
        """What is left with the same arguments in other branches; once exchanged, in any."""
        if not _tells(asked):
            return []
        found = (self._steps[key] for key in self._alike.get(_alike(asked), ()))
        return [
            (line, kept)
            for line, kept in found
            if (self.exchanged or line != burst.line) and self._is_left(kept.key)
        ]

    def _wanted(self, burst: Burst) -> list[tuple[str, StoredCall]]:
        return [
            each
            for asked in burst.calls
            if not self._is_known(burst, asked)
            for each in self._exact(burst, asked)
        ]

    def _guessed(self, burst: Burst, asked: MadeCall) -> StoredCall | None:
        """What a call with other arguments stands for by its number."""
        if (asked.kind, asked.name) in self._changing:
            return None
        return self._shelf(burst.line).numbered(asked)

    def _is_passed_by(self, burst: Burst) -> bool:
        """Whether a new call leaves something behind, which another branch may be about to take."""
        shelf = self._shelf(burst.line)
        taken = {_alike(asked) for asked in burst.calls}
        numbered = self._fallbacks(burst)
        return any(
            kept.key in shelf.ahead and kept.key not in numbered and _alike(kept) not in taken
            for kept in shelf.left
            if not kept.parallel
        )

    def _fallbacks(self, burst: Burst) -> list[str]:
        shelf = self._shelf(burst.line)
        found = (shelf.numbered(asked) for asked in burst.calls)
        return [kept.key for kept in found if kept is not None]

    def _follows_value(self, kept: StoredCall) -> bool:
        _, before = self._steps.get(kept.after_key or "", ("", None))
        return before is not None and before.kind in VALUES

    def _shelf(self, line: str) -> Shelf:
        return self._shelves.get(line) or _EMPTY

    def _is_left(self, key: str) -> bool:
        return self._shelf(self._steps[key][0]).holds(key)


_EMPTY: Final = Shelf(())


def _alike(call: MadeCall | StoredCall) -> tuple[str, str, str]:
    # How long a sleep is says nothing about an item.
    return alike(call.kind, call.name, "" if call.kind == StepKind.SLEEP else call.digest)


def _tells(asked: MadeCall) -> bool:
    return asked.tells and asked.kind != StepKind.SLEEP


def _is_of(kept: StoredCall, asked: MadeCall) -> bool:
    return kept.kind == asked.kind and kept.name == asked.name


def _mixed(asked: MadeCall) -> str:
    return (
        f"{shown(asked)} is stored, but branches that share their items have taken other ones this"
        " time, and a time, a random value or a signal was asked for before it: that may belong to"
        " another item. Ask for it between the first and the last step for an item, or make all"
        " calls for an item in a branch of its own name: with ctx.branch(name)"
    )


def may_be_of_another(asked: MadeCall) -> str:
    """Why a new branch must not run where another is stored: their items may be swapped."""
    return (
        f"{shown(asked)} is not stored, but another one is in its place: branches of the function"
        " may have exchanged the items they share. Make a call with the item among its arguments"
        " before starting branches for it, or give each item a branch: with ctx.branch(name)"
    )
