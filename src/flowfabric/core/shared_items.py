"""Branches that take their items from something they share: a queue, a list, an iterator.

Branches of one coroutine function that are started at one place are a *pool*. If they share a
queue, and anything outside of steps decides who comes first, each takes other items in the next
run: then the branch that makes a call does not tell which call it is. As long as nothing speaks
for that, each branch keeps to what is stored of it (see `journal`). These rules come on top:

1. A call whose arguments are not left in its own line is *in doubt*, if they are left in the line
   of another branch, or if its number stands for other arguments, or if it would leave a step of
   its line behind. So is one whose arguments are left in its own line under another number: the
   branch may have come to a later item of its own. It waits until the other branches are at rest:
   one that asks for its own step gets it.
2. Then a step that its own branch has passed by goes to the branch that asks for it. That is an
   *exchange*: the branches of this pool share their items. A step that follows one which nobody has
   passed by yet is left, as long as others go on, to whoever comes by there.
3. If nobody exchanges anything, and no other branch goes on by itself, the number decides, as in
   any line: an argument may be the time. A branch with a new call goes on: that runs first, since
   the branch may take an item afterwards that is stored here.
4. From the first exchange on, in this run and in every later one, numbers tell nothing in the
   pool. A call is known by the step after which it was made, which leads through all calls for
   one item whoever made them, and by its arguments. One whose arguments tell nothing is known by
   the step before it alone.
5. A value drawn before the first call for an item, such as a time, is one item's or the other's: if
   they were exchanged since, the call is refused before it runs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from flowfabric.core.journal import Asked, Kept, alike, left_behind, shown
from flowfabric.core.records import StepKind
from flowfabric.core.shelf import NEW, Match, Shelf

VALUES: Final = (StepKind.NOW, StepKind.RANDOM, StepKind.UUID, StepKind.SIGNAL)
"""What they return may be meant for the item of the next call."""


class Burst(NamedTuple):
    """Calls a branch makes together."""

    line: str
    calls: Sequence[Asked]
    after: str | None
    """The key of the call before them."""
    after_value: bool = False
    """That returned a value which no argument tells."""


class Pool:
    """What is stored of the branches of one coroutine function, started at one place."""

    def __init__(self, shelves: Mapping[str, Shelf]) -> None:
        """`shelves` by line."""
        self._shelves = shelves
        self._steps: dict[str, tuple[str, Kept]] = {}
        self._alike: dict[tuple[str, str, str], list[str]] = {}
        self._followers: dict[str, list[str]] = {}
        self._changing: set[tuple[str, str]] = set()
        """Names of calls whose number has stood for other arguments, or which changed places."""
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
        """Whether what a burst in doubt asks for follows a call after which nobody has gone on."""
        return any(
            kept.after_key in self._steps and kept.after_key not in self._gone_past
            for _, kept in self._wanted(burst)
        )

    def settle(self, waiting: Iterable[Burst], others_go_on: Callable[[], bool]) -> list[str]:
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
            # Where there is nothing to fall back on, nobody else has to ask first.
            settled = [line for line, keys in going_on.items() if not keys]
            if settled or others_go_on():
                return settled
        found = found or [line for line, steps in left.items() if steps]
        if found:
            self.exchanged = True
            return found
        return list(going_on) or list(exact)

    @staticmethod
    def _is_free(kept: Kept, owner: str, going_on: Mapping[str, Collection[str]]) -> bool:
        return not going_on.get(owner) or kept.key in going_on[owner]

    def take(self, burst: Burst) -> list[Match]:
        """What the calls of a burst stand for, taken off the shelves."""
        shelf = self._shelf(burst.line)
        self._gone_past.add(burst.after or "")
        if not self.exchanged:
            matches = shelf.take(burst.calls)
            self._changing.update(
                (asked.kind, asked.name)
                for asked, match in zip(burst.calls, matches, strict=True)
                if match.kept is not None
                and (_alike(match.kept) != _alike(asked) or match.kept.number != asked.number)
            )
            return matches
        return [self._take_one(burst, asked) for asked in burst.calls]

    def _take_one(self, burst: Burst, asked: Asked) -> Match:
        kept = next(self._candidates(burst, asked), None)
        if kept is None:
            return self._new(burst, asked)
        if kept.after_key != burst.after and (burst.after_value or self._follows_value(kept)):
            return Match(None, _mixed(asked))
        self._shelf(self._steps[kept.key][0]).remove(kept)
        return Match(kept)

    def _new(self, burst: Burst, asked: Asked) -> Match:
        """A call that is stored nowhere; refused if another name followed the same step."""
        for key in self._followers.get(burst.after or "", ()):
            line, kept = self._steps[key]
            if line != burst.line and burst.after not in self._steps:
                continue
            if self._is_left(key) and not any(_is_of(kept, each) for each in burst.calls):
                return Match(None, left_behind(asked, kept))
        return NEW

    def left_after(self, key: str | None) -> Kept | None:
        """What followed a step in its branch, with nothing beside it, and is to be asked for."""
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

    def _candidates(self, burst: Burst, asked: Asked) -> Iterator[Kept]:
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

    def _is_known(self, burst: Burst, asked: Asked) -> bool:
        """Whether a call finds its step without those of other branches."""
        if self.exchanged:
            first = next(self._candidates(burst, asked), None)
            return first is None or first.after_key == burst.after
        return not self._skips(burst, asked) and any(
            self._steps[key][0] == burst.line and self._is_left(key)
            for key in self._alike.get(_alike(asked), ())
        )

    def _skips(self, burst: Burst, asked: Asked) -> bool:
        """Whether a branch may have come to another item of its own than it had here before."""
        return _tells(asked) and self._guessed(burst, asked) is not None

    def _exact(self, burst: Burst, asked: Asked) -> list[tuple[str, Kept]]:
        """What is left with the same arguments in other branches; once exchanged, in any."""
        if not _tells(asked):
            return []
        found = (self._steps[key] for key in self._alike.get(_alike(asked), ()))
        return [
            (line, kept)
            for line, kept in found
            if (self.exchanged or line != burst.line) and self._is_left(kept.key)
        ]

    def _wanted(self, burst: Burst) -> list[tuple[str, Kept]]:
        return [
            each
            for asked in burst.calls
            if not self._is_known(burst, asked)
            for each in self._exact(burst, asked)
        ]

    def _guessed(self, burst: Burst, asked: Asked) -> Kept | None:
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

    def _follows_value(self, kept: Kept) -> bool:
        _, before = self._steps.get(kept.after_key or "", ("", None))
        return before is not None and before.kind in VALUES

    def _shelf(self, line: str) -> Shelf:
        return self._shelves.get(line) or _EMPTY

    def _is_left(self, key: str) -> bool:
        return self._shelf(self._steps[key][0]).holds(key)


_EMPTY: Final = Shelf(())


def _alike(call: Asked | Kept) -> tuple[str, str, str]:
    # How long a sleep is says nothing about an item.
    return alike(call.kind, call.name, "" if call.kind == StepKind.SLEEP else call.digest)


def _tells(asked: Asked) -> bool:
    return asked.tells and asked.kind != StepKind.SLEEP


def _is_of(kept: Kept, asked: Asked) -> bool:
    return kept.kind == asked.kind and kept.name == asked.name


def _mixed(asked: Asked) -> str:
    return (
        f"{shown(asked)} is stored, but branches that share their items have taken other ones this"
        " time, and a time, a random value or a signal was asked for before it: that may belong to"
        " another item. Ask for it after the first step for an item, or make all calls for an item"
        " in a branch of its own name: with ctx.branch(name)"
    )


def may_be_of_another(asked: Asked) -> str:
    """Why a branch must not run that stands where another was, beside lines of a pool."""
    return (
        f"{shown(asked)} is not stored, but another one is in its place: branches of the function"
        " may have exchanged the items they share. Make a call with the item among its arguments"
        " before starting branches for it, or give each item a branch: with ctx.branch(name)"
    )
