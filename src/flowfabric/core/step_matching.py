"""Matches the calls of one line with the steps that earlier runs stored for it.

The rules are those of `journal`. A call takes, in this order, the step with the same name and
arguments, one that differs only in times and the like, or one with the same number. A call that
matches nothing is new, and is refused if the line has skipped a stored step.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from flowfabric.core.journal import BRANCH, MadeCall, StoredCall, firm, left_behind, shown
from flowfabric.core.records import StepKind

_WITH_ARGUMENTS: Final = (StepKind.CALL, StepKind.SUBMIT)


class Match(NamedTuple):
    """What a call stands for: a stored step, or nothing yet."""

    kept: StoredCall | None = None
    refusal: str = ""
    """Why a call that stands for nothing yet must not run."""
    given_away: StoredCall | None = None
    """What is stored of it, if another call was given that by its number."""


NEW: Final = Match()


class Shelf:
    """What is stored of one line and has not been asked for in this run."""

    def __init__(self, kept: Iterable[StoredCall], only_equal: Collection[str] = ()) -> None:
        """`only_equal` are the keys of steps that only a call with equal arguments may take."""
        self._only_equal = only_equal
        self._equal: dict[tuple[str, str, str], dict[tuple[int, bool], StoredCall]] = {}
        self._firm: dict[tuple[str, str, int], dict[str, StoredCall]] = {}
        """Branches by name, firm arguments and their ordinal among equals."""
        self._ordered: dict[tuple[str, str], dict[int, dict[str, StoredCall]]] = {}
        """By number. Branches started in no certain order may share one."""
        self._parallel: dict[tuple[str, str], dict[str, StoredCall]] = {}
        """By name. If a name has any, the numbers of its other calls depend on timing."""
        self._after: dict[int, list[StoredCall]] = {}
        """Parallel steps, by the outcome that came before the call."""
        self._left: dict[str, StoredCall] = {}
        self._forgiven: set[str] = set()
        self._burst: set[tuple[str, str, int]] = set()
        self._by_arrival = False
        self._reordered: Collection[str] = ()
        """Names of branches in the burst whose arguments show that their order has changed."""
        self._by_chance: set[tuple[str, str]] = set()
        """Names with parallel calls: their other calls, too, come in the order branches end."""
        self._before: dict[str, str | None] = {}
        """The key of the step before each."""
        self._numbers: set[tuple[str, str, int]] = set()
        """What was stored in the order of the code, taken or not."""
        self._guessed: dict[tuple[str, str, str], StoredCall] = {}
        """What was given, by its number, to a call with other arguments."""
        self.untouched = True
        """Nothing has been taken off it in this run."""
        for each in sorted(kept, key=lambda kept: (kept.number, kept.key)):
            name = each.kind, each.name
            self._before[each.key] = each.after_key
            self._equal.setdefault((*name, each.digest), {}).setdefault(_rank(each), each)
            if each.kind == BRANCH:
                self._firm.setdefault(_firm_rank(each), {})[each.key] = each
            if each.parallel:
                self._by_chance.add(name)
                self._parallel.setdefault(name, {})[each.key] = each
                if each.after is not None:
                    self._after.setdefault(each.after, []).append(each)
            else:
                numbered = self._ordered.setdefault(name, {}).setdefault(each.number, {})
                numbered[each.key] = each
                self._numbers.add((*name, each.number))
            self._left[each.key] = each

    @property
    def left(self) -> list[StoredCall]:
        return list(self._left.values())

    def holds(self, key: str) -> bool:
        """Whether it has not been asked for yet."""
        return key in self._left

    def numbered(self, asked: MadeCall) -> StoredCall | None:
        """What a call stands for by its number alone, although it has other arguments."""
        kept = self._numbered(asked)
        return kept if kept is not None and _differs(kept, asked) else None

    def take(
        self,
        burst: Sequence[MadeCall],
        forked_after: str | None = None,
        *,
        by_arrival: bool = False,
    ) -> list[Match]:
        """Match the calls of one burst, and take their steps off the shelf.

        If branches of the line are under way, `forked_after` is the key of the call before the
        first of them, or empty if there was none. With `by_arrival`, calls may come in the order
        in which branches ended, whatever those did.
        """
        self._by_arrival = by_arrival
        if not self._left and not self._guessed:
            return [NEW] * len(burst)
        found: list[StoredCall | None] = [None] * len(burst)
        self._burst = {(asked.kind, asked.name, asked.number) for asked in burst}
        passes = (self._same, self._equal_to, self._alike, self._numbered)
        for candidate in passes if self._left else ():
            self._reordered = _reordered(burst, found)
            for position, asked in enumerate(burst):
                if found[position] is None and self.given_away(asked) is None:
                    found[position] = self._remove(candidate(asked))
        if len(burst) == 1 and found[0] is None and self.given_away(burst[0]) is None:
            found[0] = self._remove(self._left_over(burst[0]))
        for asked, kept in zip(burst, found, strict=True):
            if kept is not None and _differs(kept, asked):
                self._guessed[kept.kind, kept.name, kept.digest] = kept
        return [
            Match(kept)
            if kept is not None
            else Match(None, self.refusal(asked, forked_after), self.given_away(asked))
            for asked, kept in zip(burst, found, strict=True)
        ]

    def given_away(self, asked: MadeCall) -> StoredCall | None:
        """What is stored for a call, if another call has it: their order has changed."""
        equal = asked.kind, asked.name, asked.digest
        return None if self._equal.get(equal) else self._guessed.get(equal)

    def forgive(self, keys: Collection[str]) -> None:
        """No longer count these as skipped steps: a person has accepted that they were skipped."""
        self._forgiven.update(self._left.keys() & keys)

    def has_equal(self, asked: MadeCall) -> bool:
        """Whether something with the same name and arguments is left."""
        return self._same(asked) is not None or self._alike(asked) is not None

    def take_same(self, asked: MadeCall) -> StoredCall | None:
        """Take off what has the same name, arguments and ordinal among its equals."""
        return self._remove(self._same(asked)) if self._left else None

    def take_key(self, key: str) -> None:
        """Take off what has this key."""
        self.remove(self._left[key])

    @property
    def ahead(self) -> Collection[str]:
        """The keys of what may still be asked for."""
        return self._left.keys() - self._forgiven

    @property
    def behind(self) -> StoredCall | None:
        """A step that the code should have asked for before anything new."""
        return next(self._behind(), None)

    def _behind(self) -> Iterator[StoredCall]:
        left = self._left.values()
        return (kept for kept in left if not kept.parallel and kept.key not in self._forgiven)

    def _behind_call(self, asked: MadeCall, forked_after: str | None) -> StoredCall | None:
        """The same for one call. While branches run, a call may come earlier than steps that an
        earlier run made after they ended; steps from before they started come first in every run.
        """
        left = self._behind()
        if (asked.kind, asked.name) in self._by_chance:
            left = (kept for kept in left if (kept.kind, kept.name) not in self._by_chance)
        if forked_after is not None:
            before = self._up_to(forked_after)
            left = (kept for kept in left if kept.key in before)
        return next(left, None)

    def _up_to(self, key: str) -> set[str]:
        """The keys of a step and of all before it."""
        found: set[str] = set()
        each: str | None = key
        while each is not None and each in self._before and each not in found:
            found.add(each)
            each = self._before[each]
        return found

    def missed(self, asked: MadeCall) -> str:
        """Why a call that holds its line must not run: an earlier run made a different one there.

        It did so in the same line, after the same outcomes. A call of the same name does not count:
        the two may be items of a set.
        """
        for kept in self._beside(asked):
            if kept.key not in self._forgiven and not _is_of(kept, asked):
                return left_behind(asked, kept)
        return ""

    def _beside(self, asked: MadeCall) -> Iterator[StoredCall]:
        """What was asked for at the same moment, and has not been in this run."""
        found = () if asked.after is None else self._after.get(asked.after, ())
        return (kept for kept in found if kept.key in self._left)

    # Candidates, best first

    def _same(self, asked: MadeCall) -> StoredCall | None:
        equal = self._equal.get((asked.kind, asked.name, asked.digest))
        return equal.get(_rank(asked)) if equal else None

    def _equal_to(self, asked: MadeCall) -> StoredCall | None:
        equal = self._equal.get((asked.kind, asked.name, asked.digest))
        # Among equal branches the ordinal tells which is which, although some are not stored.
        if not equal or asked.kind == BRANCH:
            return None
        # One that is as long as another by chance is not that one.
        if asked.kind == StepKind.SLEEP and self._at_number(asked) is not None:
            return None
        return next((kept for kept in equal.values() if self._moved(asked, kept)), None)

    def _moved(self, asked: MadeCall, kept: StoredCall) -> bool:
        """Whether the order has changed, rather than that an equal call is still to come."""
        return (
            asked.parallel
            or (kept.kind, kept.name) in self._parallel
            or kept.number < asked.number
            or (kept.kind, kept.name, kept.number) in self._burst
            or (asked.kind, asked.name, asked.number) in self._numbers
        )

    def _alike(self, asked: MadeCall) -> StoredCall | None:
        if asked.kind == BRANCH:
            return next(iter(self._firm.get(_firm_rank(asked), {}).values()), None)
        if asked.quiet:
            beside = self._parallel.get((asked.kind, asked.name), {}).values()
            found = next((kept for kept in beside if _is_alike(asked, kept)), None)
            return found or next(self._with_other_times(asked), None)
        kept = self._at_number(asked)
        return kept if kept is not None and _is_alike(asked, kept) else None

    def _with_other_times(self, asked: MadeCall) -> Iterator[StoredCall]:
        """What was stored in the order of the code, and differs in nothing but times."""
        ordered = self._ordered.get((asked.kind, asked.name), {})
        numbered = itertools.chain.from_iterable(each.values() for each in ordered.values())
        return (kept for kept in numbered if firm(kept.digest) == firm(asked.digest))

    def _numbered(self, asked: MadeCall) -> StoredCall | None:
        if asked.name in self._reordered or self._is_by_chance(asked):
            return None
        kept = self._at_number(asked)
        if kept is None or kept.key in self._only_equal or self._is_of_another(asked, kept):
            return None
        return kept

    def _is_of_another(self, asked: MadeCall, kept: StoredCall) -> bool:
        """Whether an earlier run may have made the call for another item at this place."""
        return (
            self._by_arrival
            and asked.tells
            and asked.kind in _WITH_ARGUMENTS
            and _differs(kept, asked)
        )

    def _is_by_chance(self, asked: MadeCall) -> bool:
        """Whether the number of a call with arguments is a matter of chance."""
        name = asked.kind, asked.name
        return asked.kind in _WITH_ARGUMENTS and name in self._by_chance and not asked.at_once

    def _at_number(self, asked: MadeCall) -> StoredCall | None:
        if asked.at_once:
            return next((kept for kept in self._beside(asked) if _is_of(kept, asked)), None)
        if asked.parallel:
            return None
        numbered = self._ordered.get((asked.kind, asked.name), {}).get(asked.number)
        return next(iter(numbered.values())) if numbered else None

    def _left_over(self, asked: MadeCall) -> StoredCall | None:
        """The first step of its name that earlier calls have left, if only times differ."""
        ordered = self._ordered.get((asked.kind, asked.name))
        if not ordered or asked.parallel or asked.kind == BRANCH:
            return None
        kept = next(iter(next(iter(ordered.values())).values()))
        return kept if firm(kept.digest) == firm(asked.digest) else None

    def _remove(self, kept: StoredCall | None) -> StoredCall | None:
        if kept is not None:
            self.remove(kept)
        return kept

    def remove(self, kept: StoredCall) -> None:
        self.untouched = False
        name = kept.kind, kept.name
        equal = self._equal[*name, kept.digest]
        if equal.get(_rank(kept)) is kept:
            del equal[_rank(kept)]
        if kept.kind == BRANCH:
            del self._firm[_firm_rank(kept)][kept.key]
        if kept.parallel:
            del self._parallel[name][kept.key]
        else:
            ordered = self._ordered[name]
            del ordered[kept.number][kept.key]
            if not ordered[kept.number]:
                del ordered[kept.number]
        del self._left[kept.key]

    def _may_come(self, asked: MadeCall) -> bool:
        """Whether the stored branches at a place may still be started after a new one.

        Code may start branches there in several batches, and a branch without steps is not
        stored. So a new branch proves nothing if another one has been found already, or if a
        stored one has its name.
        """
        return not self.untouched or any(
            kept.name == asked.name for kept in self._left.values() if not kept.parallel
        )

    def refusal(self, asked: MadeCall, forked_after: str | None = None) -> str:
        """Why a call that is not stored must not run; empty if it may."""
        if self._guessed and self.given_away(asked) is not None:
            return taken_by_another(asked)
        if not self._left:
            return ""
        kept = self._at_number(asked)
        if kept is not None and self._is_of_another(asked, kept):
            return (
                f"{shown(asked)} is stored with other arguments. Branches have worked outside of"
                " steps: what they have left in a list, say, may be in another order than before."
                " Sort it, or give each call a name of its own or a branch: with ctx.branch(name)."
                " If an argument is new in every run, take it from a step"
            )
        behind = self._behind_call(asked, forked_after)
        if behind is not None and not (asked.kind == BRANCH and self._may_come(asked)):
            return left_behind(asked, behind)
        beside = self._parallel.get((asked.kind, asked.name), {}).values()
        in_any_order = asked.parallel and asked.kind in _WITH_ARGUMENTS
        in_order = self._with_other_times(asked) if in_any_order else ()
        for kept in itertools.chain(beside, in_order):
            if firm(kept.digest) == firm(asked.digest):
                return (
                    f"{shown(asked)} may be the one that is stored or another one: branches of the"
                    " function run in parallel and its arguments differ only in times, random"
                    " numbers or the like. Take those from ctx.now(), ctx.random() and ctx.uuid(),"
                    " or give each branch a name: with ctx.branch(name)"
                )
        return ""


NOTHING: Final = Shelf(())
"""Nothing is ever taken off it, so all may share it."""


def taken_by_another(asked: MadeCall) -> str:
    """Why a call must not run whose stored step was given to a call with other arguments."""
    return (
        f"{shown(asked)} is stored, but another call of this name has been given its"
        " result: they come in another order than before, as in a loop over a set. Keep the"
        " order, or give each a name of its own or a branch: with ctx.branch(name)"
    )


def _rank(call: MadeCall | StoredCall) -> tuple[int, bool]:
    """What tells a call from others of its name and arguments."""
    return (call.same, False) if call.kind == BRANCH else (call.number, call.parallel)


def _is_of(kept: StoredCall, asked: MadeCall) -> bool:
    return kept.kind == asked.kind and kept.name == asked.name


def _is_alike(asked: MadeCall, kept: StoredCall) -> bool:
    return kept.number == asked.number and firm(kept.digest) == firm(asked.digest)


def _differs(kept: StoredCall, asked: MadeCall) -> bool:
    """Whether a call was given a step of another, as far as its arguments tell."""
    # How long a sleep is may differ in every run.
    return firm(kept.digest) != firm(asked.digest) and asked.kind != StepKind.SLEEP


def _firm_rank(call: MadeCall | StoredCall) -> tuple[str, str, int]:
    return call.name, firm(call.digest), call.equal


def _reordered(burst: Sequence[MadeCall], found: Sequence[StoredCall | None]) -> Collection[str]:
    """The names of branches that are stored under other numbers: numbers mean nothing for them."""
    return {
        asked.name
        for asked, kept in zip(burst, found, strict=True)
        if kept is not None and asked.kind == BRANCH and kept.number != asked.number
    }
