"""Which stored step a call of a durable function stands for.

A function's calls form *lines*: a line is what one task of the function calls, one
call after another. The function itself is a line; each task it starts is a line
of its own, known by the call after which it was started, the name of its
coroutine, its arguments and what it has bound, and its number among its equals.

Within a line a call is known by kind and name. Calls made together, before any of
them is awaited, are matched together:

1. A call takes the stored step with equal arguments, if there is one.
2. What is left is matched by number, which is the order of the code. Arguments
   are no reason to refuse: one may be the time.
3. A call made while earlier calls or branches of its own line are still under way is
   *parallel*: its number is a matter of who came first, and whether it is made at all may be one
   of which branch fails first. Outcomes come in the same order in every run (see `delivery`), but
   what the code does outside of steps takes its own time. So it is known by kind, name and
   arguments alone, whether or not those branches have made a call.

A call that finds no stored step is new. It may run only if its line has left no step
of the line behind: otherwise the code no longer accounts for what is stored.
Parallel steps are no such sign, since their branch may still come. But a line that has
seen the same outcomes asks for the same: if an earlier run asked for another call in this line,
after the same outcome, and this run waits for a new one there instead, the code has changed. That
outcome is known (`Asked.after`) unless something else may have brought the line there: a branch
that works outside of calls, or several that ended since its last call, of which it may have
taken any first. Beside branches that work outside of calls and make none, the order of the code
counts until one of them has ended.

A line is known by its parent, its name, its arguments and its ordinal among its equals there,
which it gets when it is started, whether or not it ever stores anything: so the first of two
equal lines never takes what the second has stored. It is looked for at its place, with all its
arguments, then with those that stay the same in every run; then by number, which is the order of
the code; then with all its arguments at any other place of its parent: the calls before it
came in another order, or not at all.

What is left of a name because a call was removed goes to no call with other arguments. A call
that was given something by its number, and its arguments say later that it was another's, is
an inserted one: a person may accept that it runs.

A call that is new in its line, but stored in another where nobody may ask for it any more, has
been moved there by changed code. It must not run either. And while one line alone goes on, all
that is stored in others and was not asked for lies ahead of it: nothing new runs there, and a
patch is off.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from flowfabric.core.records import StepKind

STEP_KEY_BYTES_MAX: Final = 256
STEP_NAME_BYTES_MAX: Final = 256
LINE_BYTES_MAX: Final = 1_024
ROOT: Final = ""
"""The line of the function itself."""
BRANCH: Final = "branch"
"""The kind of a line among the lines started at one place."""

_PARENT_CHARS: Final = 6
_PLACE_CHARS: Final = 10
_SHORT_CHARS: Final = 10
_LABEL_CHARS_MAX: Final = 80
_NUMBERED: Final = re.compile(r"#\d+$")
_WITH_ARGUMENTS: Final = (StepKind.CALL, StepKind.SUBMIT)
_INSIDE: Final = "|"
"""Between a line and one started in it."""


class Asked(NamedTuple):
    """A call as the code makes it."""

    kind: str
    name: str
    digest: str
    """Of its arguments: one of those that stay the same in every run, as a rule, then,
    after a dot, one of all."""
    number: int
    """Which use of the name it is; of name and firm arguments, if it is parallel."""
    parallel: bool = False
    equal: int = 1
    """Which use of name and firm arguments it is, in its line."""
    same: int = 1
    """Which use of name and all its arguments it is, in its line."""
    quiet: bool = False
    """It is parallel only to branches that have made no call."""
    at_once: bool = False
    """It is made together with them: the order of the code tells which call it is."""
    after: int | None = None
    """If it is parallel: the position of the last outcome before it (see `delivery`), or, if its
    line alone makes calls, minus its number in the line; none, if what the code does outside of
    steps may have brought it here."""
    tells: bool = False
    """Its arguments say something that stays the same in every run."""


class Kept(NamedTuple):
    """A step, or a line, as it is stored."""

    key: str
    kind: str
    name: str
    digest: str
    number: int
    parallel: bool = False
    equal: int = 1
    same: int = 1
    after: int | None = None
    after_key: str | None = None
    """The key of the call before it in its line."""


class Match(NamedTuple):
    """What a call stands for: a stored step, or nothing yet."""

    kept: Kept | None = None
    refusal: str = ""
    """Why a call that stands for nothing yet must not run."""
    instead_of: str = ""
    """The key of what its number stands for, where only the arguments say that it is another's."""


NEW: Final = Match()


class Shelf:
    """What is stored of one line and has not been asked for in this run."""

    def __init__(self, kept: Iterable[Kept], only_equal: Collection[str] = ()) -> None:
        """`only_equal` are the keys of what a call with other arguments does not stand for."""
        self._only_equal = only_equal
        self._equal: dict[tuple[str, str, str], dict[tuple[int, bool], Kept]] = {}
        self._firm: dict[tuple[str, str, int], dict[str, Kept]] = {}
        """Branches by name, firm arguments and their ordinal among equals."""
        self._ordered: dict[tuple[str, str], dict[int, dict[str, Kept]]] = {}
        """By number. Branches started in no certain order may share one."""
        self._parallel: dict[tuple[str, str], dict[str, Kept]] = {}
        """By name. Where there are some, the numbers of that name are a matter of chance."""
        self._after: dict[int, list[Kept]] = {}
        """Parallel ones by the outcome after which they were asked for."""
        self._left: dict[str, Kept] = {}
        self._forgiven: set[str] = set()
        self._burst: set[tuple[str, str, int]] = set()
        self._reordered: Collection[str] = ()
        """The names of branches of a burst whose arguments tell that their order has changed."""
        self._by_chance: set[tuple[str, str]] = set()
        """Names called in parallel: other calls of them, too, come in the order branches end."""
        self._before: dict[str, str | None] = {}
        """The key of the step before each."""
        self._numbers: set[tuple[str, str, int]] = set()
        """What was stored in the order of the code, taken or not."""
        self._guessed: dict[tuple[str, str, str], str] = {}
        """The keys of what was given, by its number, to a call with other arguments."""
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
    def left(self) -> list[Kept]:
        return list(self._left.values())

    def holds(self, key: str) -> bool:
        """Whether it has not been asked for yet."""
        return key in self._left

    def numbered(self, asked: Asked) -> Kept | None:
        """What a call stands for by its number alone, although it has other arguments."""
        kept = self._numbered(asked)
        return kept if kept is not None and _differs(kept, asked) else None

    def take(self, burst: Sequence[Asked], forked_after: str | None = None) -> list[Match]:
        """What the calls of one burst stand for, taken off the shelf.

        If branches of the line are under way, `forked_after` is the key of the call before the
        first of them; empty, if there was none.
        """
        if not self._left and not self._guessed:
            return [NEW] * len(burst)
        found: list[Kept | None] = [None] * len(burst)
        self._burst = {(asked.kind, asked.name, asked.number) for asked in burst}
        passes = (self._same, self._equal_to, self._alike, self._numbered)
        for candidate in passes if self._left else ():
            self._reordered = _reordered(burst, found)
            for position, asked in enumerate(burst):
                if found[position] is None and not self._is_given_away(asked):
                    found[position] = self._remove(candidate(asked))
        if len(burst) == 1 and found[0] is None and not self._is_given_away(burst[0]):
            found[0] = self._remove(self._left_over(burst[0]))
        for asked, kept in zip(burst, found, strict=True):
            if kept is not None and _differs(kept, asked):
                self._guessed[kept.kind, kept.name, kept.digest] = kept.key
        return [
            Match(kept)
            if kept is not None
            else Match(None, self.refusal(asked, forked_after), self._instead_of(asked))
            for asked, kept in zip(burst, found, strict=True)
        ]

    def _instead_of(self, asked: Asked) -> str:
        if self._is_given_away(asked):
            return self._guessed[asked.kind, asked.name, asked.digest]
        kept = self._at_number(asked)
        return kept.key if kept is not None and kept.key in self._only_equal else ""

    def _is_given_away(self, asked: Asked) -> bool:
        """Whether another call has what is stored for this one: their order has changed."""
        equal = asked.kind, asked.name, asked.digest
        return equal in self._guessed and not self._equal.get(equal)

    def forgive(self, keys: Collection[str]) -> None:
        """A person has accepted that these are left behind: they are no sign any more."""
        self._forgiven.update(self._left.keys() & keys)

    def has_equal(self, asked: Asked) -> bool:
        """Whether something with the same name and arguments is left."""
        return self._same(asked) is not None or self._alike(asked) is not None

    def take_same(self, asked: Asked) -> Kept | None:
        """Take off what has the same name, arguments and ordinal among its equals."""
        return self._remove(self._same(asked)) if self._left else None

    @property
    def ahead(self) -> Collection[str]:
        """The keys of what may still be asked for."""
        return self._left.keys() - self._forgiven

    @property
    def behind(self) -> Kept | None:
        """A step that the code should have asked for before anything new."""
        return next(self._behind(), None)

    def _behind(self) -> Iterator[Kept]:
        left = self._left.values()
        return (kept for kept in left if not kept.parallel and kept.key not in self._forgiven)

    def _behind_call(self, asked: Asked, forked_after: str | None) -> Kept | None:
        """The same for a call. Beside branches, one may come before what an earlier run asked for
        once they had ended; but whatever lies before their start comes first in every run."""
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

    def missed(self, asked: Asked) -> str:
        """Why a call that holds its line must not run: an earlier run asked for another there.

        That was in the same line and after the same outcomes. If it had the name of this call, the
        two may be items of a set.
        """
        for kept in self._beside(asked):
            if kept.key not in self._forgiven and not _is_of(kept, asked):
                return left_behind(asked, kept)
        return ""

    def _beside(self, asked: Asked) -> Iterator[Kept]:
        """What was asked for at the same moment, and has not been in this run."""
        found = () if asked.after is None else self._after.get(asked.after, ())
        return (kept for kept in found if kept.key in self._left)

    # Candidates, best first

    def _same(self, asked: Asked) -> Kept | None:
        equal = self._equal.get((asked.kind, asked.name, asked.digest))
        return equal.get(_rank(asked)) if equal else None

    def _equal_to(self, asked: Asked) -> Kept | None:
        equal = self._equal.get((asked.kind, asked.name, asked.digest))
        # Among equal branches the ordinal tells which is which, although some are not stored.
        if not equal or asked.kind == BRANCH:
            return None
        # One that is as long as another by chance is not that one.
        if asked.kind == StepKind.SLEEP and self._at_number(asked) is not None:
            return None
        return next((kept for kept in equal.values() if self._moved(asked, kept)), None)

    def _moved(self, asked: Asked, kept: Kept) -> bool:
        """Whether the order has changed, rather than that an equal call is still to come."""
        return (
            asked.parallel
            or (kept.kind, kept.name) in self._parallel
            or kept.number < asked.number
            or (kept.kind, kept.name, kept.number) in self._burst
            or (asked.kind, asked.name, asked.number) in self._numbers
        )

    def _alike(self, asked: Asked) -> Kept | None:
        if asked.kind == BRANCH:
            return next(iter(self._firm.get(_firm_rank(asked), {}).values()), None)
        if asked.quiet:
            beside = self._parallel.get((asked.kind, asked.name), {}).values()
            return next((kept for kept in beside if _is_alike(asked, kept)), None)
        kept = self._at_number(asked)
        return kept if kept is not None and _is_alike(asked, kept) else None

    def _numbered(self, asked: Asked) -> Kept | None:
        if asked.name in self._reordered or self._is_by_chance(asked):
            return None
        kept = self._at_number(asked)
        return None if kept is None or kept.key in self._only_equal else kept

    def _is_by_chance(self, asked: Asked) -> bool:
        """Whether the number of a call with arguments is a matter of chance."""
        name = asked.kind, asked.name
        return asked.kind in _WITH_ARGUMENTS and name in self._by_chance and not asked.at_once

    def _at_number(self, asked: Asked) -> Kept | None:
        if asked.at_once:
            return next((kept for kept in self._beside(asked) if _is_of(kept, asked)), None)
        if asked.parallel:
            return None
        numbered = self._ordered.get((asked.kind, asked.name), {}).get(asked.number)
        return next(iter(numbered.values())) if numbered else None

    def _left_over(self, asked: Asked) -> Kept | None:
        """What the calls before have left of its name, if it differs in nothing but times."""
        ordered = self._ordered.get((asked.kind, asked.name))
        if not ordered or asked.parallel or asked.kind == BRANCH:
            return None
        kept = next(iter(next(iter(ordered.values())).values()))
        return kept if firm(kept.digest) == firm(asked.digest) else None

    def _remove(self, kept: Kept | None) -> Kept | None:
        if kept is not None:
            self.remove(kept)
        return kept

    def remove(self, kept: Kept) -> None:
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

    def _may_come(self, asked: Asked) -> bool:
        """Whether the stored branches at a place may be started after a new one.

        Branches are started there in several goes, and one without steps of its own is
        not stored. A new one is no sign, then, if another has been found, or if those that
        are stored have its name.
        """
        return not self.untouched or any(
            kept.name == asked.name for kept in self._left.values() if not kept.parallel
        )

    def refusal(self, asked: Asked, forked_after: str | None = None) -> str:
        """Why a call that is not stored must not run; empty if it may."""
        if self._is_given_away(asked):
            return (
                f"{shown(asked)} is stored, but another call of this name has been given its"
                " result: they come in another order than before, as in a loop over a set. Keep the"
                " order, or give each a name of its own or a branch: with ctx.branch(name)"
            )
        if not self._left:
            return ""
        behind = self._behind_call(asked, forked_after)
        if behind is not None and not (asked.kind == BRANCH and self._may_come(asked)):
            return left_behind(asked, behind)
        for kept in self._parallel.get((asked.kind, asked.name), {}).values():
            if firm(kept.digest) == firm(asked.digest):
                return (
                    f"{shown(asked)} may be the one that is stored or another one: branches of the"
                    " function run in parallel and its arguments differ only in times, random"
                    " numbers or the like. Take those from ctx.now(), ctx.random() and ctx.uuid(),"
                    " or give each branch a name: with ctx.branch(name)"
                )
        return ""


def _rank(call: Asked | Kept) -> tuple[int, bool]:
    """What tells a call from others of its name and arguments."""
    return (call.same, False) if call.kind == BRANCH else (call.number, call.parallel)


def _is_of(kept: Kept, asked: Asked) -> bool:
    return kept.kind == asked.kind and kept.name == asked.name


def _is_alike(asked: Asked, kept: Kept) -> bool:
    return kept.number == asked.number and firm(kept.digest) == firm(asked.digest)


def _differs(kept: Kept, asked: Asked) -> bool:
    """Whether a call was given a step of another, as far as its arguments tell."""
    # How long a sleep is may differ in every run.
    return firm(kept.digest) != firm(asked.digest) and asked.kind != StepKind.SLEEP


def _firm_rank(call: Asked | Kept) -> tuple[str, str, int]:
    return call.name, firm(call.digest), call.equal


def left_behind(asked: Asked, left: Kept) -> str:
    """Why a new call must not run: a stored one should have been asked for before."""
    return f"{shown(asked)} is not stored, but {shown(left)} is and has not been asked for"


def indistinct(asked: Asked) -> str:
    """Why a call must not run that comes in the order in which other branches end."""
    return (
        f"{shown(asked)} cannot be told from others of its name: branches that make no calls of"
        " their own are under way, and it may come in the order in which they end. Give it"
        " arguments that say which one it is, or a name of its own: with ctx.branch(name)"
    )


class Going(NamedTuple):
    """Who may still ask for something, as far as a call that is not stored is concerned.

    Every outcome that is stored has reached the function by then. So nobody asks for more but by
    something done outside of steps: if nothing is, no line goes on in this sense.
    """

    alive: Collection[str]
    """Lines that go on; without that of the call and those it was started in, which wait for it."""
    places: Collection[str]
    """Where they are: what is started next is started at one of these."""
    unknown: Collection[str]
    """Labels of branches that have made no call: they may be any of their label."""
    cut_off: Collection[str]
    """Lines that were cancelled or have failed: what they would have asked for, nobody knows."""


def may_ask_yet(line: str, going: Going) -> bool:
    """Whether a branch may still ask for what is stored of a line.

    If not, and a call is made elsewhere that looks the same, the code has moved it there.
    """
    if line == ROOT:
        return False
    family = with_parents([line])
    if not family.isdisjoint({*going.alive, *going.cut_off}):
        return True
    if line.startswith("="):
        return any(each.startswith("=") and line.startswith(f"{each}/") for each in going.alive)
    return any(
        group_of(each) in going.places or _kept_line(each).name in going.unknown for each in family
    )


def moved(asked: Asked, line: str) -> str:
    """Why a call must not run that is stored in a line where nobody asks for it."""
    where = _where(line)
    return f"{shown(asked)} is not stored here but in {where}, where it has not been asked for"


def behind(asked: Asked, here: str, left: Kept, line: str) -> str:
    """Why a call must not run in its line, while something is left in that line or another."""
    if here == line:
        return left_behind(asked, left)
    return (
        f"{shown(asked)} is not stored, but {shown(left)} in {_where(line)} is and has not been"
        " asked for"
    )


def placed(refusal: str, line: str) -> str:
    """The same, with the branch in which it is."""
    return refusal if line == ROOT else f"in {_where(line)}, {refusal}"


def _where(line: str) -> str:
    return "the function itself" if line == ROOT else f"the branch {branch_name(line)!r}"


def firm(digest: str) -> str:
    """The part of a digest that stays the same in every run."""
    return digest.partition(".")[0]


def shown(call: Asked | Kept) -> str:
    if call.kind == StepKind.SLEEP:
        return "the sleep" if call.number == 1 else f"sleep number {call.number}"
    what = "the branch" if call.kind == BRANCH else "step" if call.kind == "call" else ""
    number = f" (number {call.number})" if call.number > 1 else ""
    return f"{what} {call.name!r}{number}".lstrip()


# Names for lines and steps


def named_line(parent: str, name: str) -> str:
    """The line of a branch that the code gives a name; names are nested, places are not."""
    path = f"{parent}/{name}" if parent.startswith("=") else f"={name}"
    return path if len(path.encode()) <= LINE_BYTES_MAX else f"={_hash(path)}"


def line_group(parent: str, fork_key: str) -> str:
    """The place at which lines are started: a line, and the call made there before."""
    place = parent_of_group(_hash(parent)) + _hash(fork_key)[:_PLACE_CHARS]
    name = name_of(parent)
    return f"{place}={name}" if name else place


def name_of(line: str) -> str:
    """The branch with a name in which a line is, the innermost one, in short; empty if in none."""
    if line.startswith("="):
        return _hash(line)[:_SHORT_CHARS]
    return "" if line == ROOT else group_of(line).partition("=")[2]


def in_any_order(one: str, other: str) -> bool:
    """Whether two lines are in branches with different names: the code may come to either first."""
    return "" != name_of(one) != name_of(other) != ""


def parent_of_group(group: str) -> str:
    """What all places of a line have in common, and those of no other."""
    return group[:_PARENT_CHARS]


def line_id(parent: str, group: str, asked: Asked) -> str:
    """A line inside its parent, which may have no steps of its own and is found by it then."""
    parallel = "p" if asked.parallel else ""
    ordinals = f"{asked.number}:{asked.equal}:{asked.same}"
    own = f"{group}:{ordinals}:{asked.digest}:{parallel}:{asked.name}"
    if parent == ROOT or parent.startswith("="):
        return own
    path = f"{parent}{_INSIDE}{own}"
    return path if len(path.encode()) <= LINE_BYTES_MAX else own


def branch_name(line: str) -> str:
    """A line as people know it: the name it was given, or that of its coroutine and its number."""
    if line == ROOT or line.startswith("="):
        return line[1:]
    kept = _kept_line(line)
    return f"{kept.name.rpartition('.')[2]}[{kept.number}]"


def identity(lines: Sequence[str], asked: Asked) -> str:
    """What a call is known by before it is stored: its arguments, then its order among equals.

    Ids of what a call creates outside the journal are made of it. So a loop over a set,
    in another order each time, finds what an earlier run created and did not store. `lines`
    leads from the function, or a line with a name, to the line of the call.

    Branches may share their items, and another one may submit a child in the next run. So the
    arguments of a child alone tell it, if they can: equal children are as good as each other.
    """
    parts = [lines[0]]
    alone = len(lines) > 1 and asked.kind == StepKind.SUBMIT and asked.tells
    alone = alone and firm(asked.digest) == asked.digest
    for each in lines[1:]:
        kept = _kept_line(each)
        parts += (kept.name,) if alone else (kept.name, firm(kept.digest), str(kept.equal))
    parts += *alike(asked.kind, asked.name, asked.digest), "" if alone else str(asked.equal)
    return _hash("\x00".join(parts))


def alike(kind: str, name: str, digest: str) -> tuple[str, str, str]:
    """What a call has in common with its equals."""
    # The timeout of a wait may change: waits are known by their names alone.
    return kind, name, "" if kind == StepKind.SIGNAL else firm(digest)


def _reordered(burst: Sequence[Asked], found: Sequence[Kept | None]) -> Collection[str]:
    """The names of branches that are stored under other numbers: theirs tell nothing here."""
    return {
        asked.name
        for asked, kept in zip(burst, found, strict=True)
        if kept is not None and asked.kind == BRANCH and kept.number != asked.number
    }


def label_of(qualified_name: str) -> str:
    """The name of a coroutine as lines are known by it."""
    qualified_name = qualified_name.replace(_INSIDE, "/")
    if len(qualified_name) <= _LABEL_CHARS_MAX:
        return qualified_name
    last = qualified_name.rpartition(".")[2][:_LABEL_CHARS_MAX]
    return f"{_hash(qualified_name)[:_SHORT_CHARS]}.{last}"


def with_parents(line_ids: Iterable[str]) -> set[str]:
    """Lines, and those they were started in."""
    found: set[str] = set()
    for each in line_ids:
        line = each
        while line not in found:
            found.add(line)
            if not line.startswith("="):
                line = line.rpartition(_INSIDE)[0] or line
    return found


def started_beside(line: str) -> bool:
    """Whether it, or one it is in, was started while others of the same line were under way."""
    return any(
        each != ROOT and not each.startswith("=") and _kept_line(each).parallel
        for each in with_parents([line])
    )


def kept_lines(line_ids: Iterable[str]) -> dict[str, list[Kept]]:
    """The stored lines by the place they were started at; without those that have names."""
    groups: dict[str, list[Kept]] = {}
    for each in with_parents(line_ids):
        if each != ROOT and not each.startswith("="):
            groups.setdefault(group_of(each), []).append(_kept_line(each))
    return groups


def pooled(line_ids: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """The lines among these without names, by the place they were started at and their label."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in line_ids:
        if each != ROOT and not each.startswith("="):
            found.setdefault((group_of(each), _kept_line(each).name), []).append(each)
    return found


def _kept_line(line: str) -> Kept:
    _, number, equal, same, digest, parallel, label = _own(line)
    ordinals = int(equal), int(same)
    return Kept(line, BRANCH, label, digest, int(number), parallel == "p", *ordinals)


def group_of(line: str) -> str:
    """The place at which a line without a name was started."""
    return _own(line)[0]


def _own(line: str) -> list[str]:
    return line.rpartition(_INSIDE)[2].split(":", 6)


def step_key(line: str, asked: Asked) -> str:
    """A name for a step: `charge`, `charge#2`; in a branch `charge@fetch[2].1f3a9c0b2d`."""
    key = asked.name
    if asked.parallel:
        key += f"~{asked.digest}"
    if asked.number > 1 or _NUMBERED.search(asked.name):
        key += f"#{asked.number}"
    if line.startswith("="):
        key += f"@{line[1:]}"
    elif line != ROOT:
        key += f"@{branch_name(line)}.{_hash(line)[:_SHORT_CHARS]}"
    return _short(key)


def inserted_key(key: str) -> str:
    """What is accepted where a call came between: that a step is given to none but its equal."""
    return _short(f"instead of {key}")


def siblings_key(line: str, asked: Asked) -> str:
    """What is accepted of a call in a branch: that it runs in all that are like this one."""
    if line == ROOT:
        return ""
    label = "any with a name" if line.startswith("=") else _kept_line(line).name
    return _short(f"{asked.kind} {asked.name} in {label}")


def _short(key: str) -> str:
    if len(key.encode()) <= STEP_KEY_BYTES_MAX:
        return key
    return f"{key.encode()[: STEP_KEY_BYTES_MAX // 2].decode(errors='ignore')}~{_hash(key)[:32]}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
