"""Which stored step a call of a durable function stands for.

A function's calls form *lines*: a line is what one task of the function calls, one
call after another. The function itself is a line; each task it starts is a line
of its own, known by the call after which it was started, the name of its
coroutine, its arguments and what it has bound, and its number among its equals.

Within a line a call is known by kind and name. Calls made together, before any of
them is awaited, are matched together:

1. A call takes the stored step with equal arguments, if there is one.
2. What is left is matched by number, which is the order of the code. Arguments
   are no reason to refuse: one may be the time. But they are once branches have worked outside of
   steps: then the code may go on in the order in which they ended.
3. A call made while earlier calls or branches of its own line are still under way is
   *parallel*: its number is a matter of who came first, and whether it is made at all may be one
   of which branch fails first. Outcomes come in the same order in every run (see `Order`), but
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
been moved there by changed code. It must not run either. If that line is on its way there, at a
lock say, and this one went on without the call in an earlier run, whichever comes first makes it
for both: the call stands for that step, and if the other line makes it after all, it takes the
place of this call. And while one line alone goes on, all that is stored in others and was not asked
for lies ahead of it: nothing new runs there, and a patch is off.
"""

import hashlib
import heapq
import re
from collections import deque
from collections.abc import Collection, Iterable, Sequence
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
    """If it is parallel: the position of the last outcome before it (see `Order`), or, if its
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


# In which order outcomes reach the function ---------------------------------
#
# A function that goes on in order of arrival, as a loop over `asyncio.as_completed` does,
# calls what it calls because of the order in which it saw the outcomes of earlier calls. So
# each outcome has a *position*, which is stored with its step, and every run delivers by
# these rules:
#
# 1. Outcomes reach the function one at a time: the next one when the function has come to rest
#    after the one before, that is, when it has asked for all it asks for without another.
# 2. The lowest position goes first. A position is allotted when an outcome is about to be stored;
#    while that is under way, no later one is delivered.
# 3. A call that is not stored runs when every stored outcome was delivered: by then the function
#    has come as far as the run before had come.
# 4. A stored outcome whose turn it is, but which nobody asks for, is waited for only a moment. The
#    function may do something outside of steps before it asks, or may not ask at all.
#
# So the function sees one sequence of outcomes, however often it runs, and makes the same
# calls.


class Order:
    """The outcomes of one run that have not reached the function yet."""

    def __init__(self) -> None:
        self._last = 0
        self._stored: set[int] = set()
        """Stored by earlier runs, and not delivered in this one."""
        self._expected: deque[int] = deque()
        """The same in order, without those that were waited for in vain."""
        self._asked_for: list[int] = []
        """Those of them the function waits for; a heap."""
        self._allotted: dict[int, bool] = {}
        """New ones in order, and whether they are stored by now."""
        self.whole = True
        """Whether all outcomes are stored that have reached the function before the last one."""
        self.reached: int | None = 0
        """The position of the last outcome delivered; none once one before it was left out, since
        the function has seen another sequence then."""

    def take_in(self, positions: Iterable[int]) -> None:
        """Know what earlier runs have stored."""
        self._stored.update(positions)
        self._expected.extend(sorted(self._stored))
        self._last = max(self._stored, default=0)
        self.whole = self._last == len(self._stored)

    def allot(self) -> int:
        """A position for a new outcome, which is about to be stored."""
        self._last += 1
        self._allotted[self._last] = False
        return self._last

    def wait(self, position: int) -> None:
        """The function can have this outcome: it was stored before, or is stored now."""
        if position in self._stored:
            heapq.heappush(self._asked_for, position)
        else:
            self._allotted[position] = True

    def deliver(self, position: int) -> None:
        """It reaches the function now."""
        self.reached = position if self.reached == position - 1 else None
        self.end(position)

    def end(self, position: int) -> None:
        """Nobody waits for it any more, or it has reached the function."""
        self._stored.discard(position)
        self._allotted.pop(position, None)

    def next(self, *, patient: bool = True) -> int | None:
        """What reaches the function now that it is at rest; `patient`, in its order."""
        if patient and self.expects:
            return None
        asked_for = self._first_asked_for()
        if asked_for is not None:
            return asked_for
        first = next(iter(self._allotted), None)
        return first if first is not None and self._allotted[first] else None

    @property
    def replaying(self) -> bool:
        """Whether some stored outcomes have not been delivered: they may be asked for yet."""
        return bool(self._stored)

    @property
    def may_run(self) -> bool:
        """Whether a call that is not stored runs now that the function is at rest."""
        return self._first_asked_for() is None and not self.expects

    @property
    def expects(self) -> bool:
        """Whether it is the turn of a stored outcome that nobody asks for."""
        while self._expected and self._expected[0] not in self._stored:
            self._expected.popleft()
        asked_for = self._first_asked_for()
        return bool(self._expected) and (asked_for is None or self._expected[0] < asked_for)

    def expect_no_more(self) -> None:
        """It was waited for long enough: others go first."""
        while self.expects:
            self._expected.popleft()

    def _first_asked_for(self) -> int | None:
        while self._asked_for and self._asked_for[0] not in self._stored:
            heapq.heappop(self._asked_for)
        return self._asked_for[0] if self._asked_for else None
