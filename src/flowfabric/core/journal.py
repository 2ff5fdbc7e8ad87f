"""Which stored step a call of a durable function stands for.

A function's calls form *lines*: a line is what one task of the function calls, one
call after another. The function itself is a line; each task it starts is a line
of its own, known by the call after which it was started, the name of its
coroutine, its arguments and what it has bound, and its number among its equals.

Within a line a call is known by kind and name. Calls made together, before any of
them is awaited, are matched together:

1. A call takes the stored step with equal arguments, if there is one.
2. The rest are matched by number, which is the order of the code. Different arguments are no
   reason to refuse, since one may be the time; but once branches have worked outside steps they
   are, because the code may then continue in the order in which those branches ended.
3. A call made while earlier calls or branches of its own line are still under way is
   *parallel*: its number depends on which branch came first, and whether it is made at all may
   depend on which branch fails first. Outcomes arrive in the same order in every run (see
   `Order`), but work outside steps takes a different time in each. So a parallel call is known by
   kind, name and arguments alone, whether or not those branches have made a call. The same goes
   for every call of a line that has begun to take results as they arrive from branches that
   work outside steps.

A call that matches no stored step is new. It may run only if its line has skipped no stored step:
otherwise the code no longer fits what is stored. A parallel step that was not asked for proves
nothing, since its branch may still ask. But a line that has seen the same outcomes makes the same
calls: if an earlier run made another call in this line after the same outcome, and this run waits
for a new one there instead, the code has changed. That outcome is known (`MadeCall.after`) unless
something else may have brought the line there: a branch that works outside calls, or several
branches that ended since its last call, any of which it may have handled first. Next to branches
that work outside calls and make none, the order of the code counts until one of them has ended.

A line is known by its parent, its name, its arguments and its ordinal among its equals there,
which it gets when it is started, whether or not it ever stores anything: so the first of two
equal lines never takes what the second has stored. The stored line is looked up at its place, by
all its arguments, then by those that are the same in every run, then by number, which is the order
of the code; and last by all its arguments at any other place of its parent, in case the calls
before it came in another order, or not at all.

What is left of a name because a call was removed goes to no call with other arguments. A call
that was given something by its number, and its arguments say later that it was another's, is
an inserted one: a person may accept that it runs (see `changed_code`). The other call is refused
until then, in whatever branch: it is stored, and must not run again.

A call that is new in its line, but stored in another where nobody may ask for it any more, has
been moved here by changed code. It must not run either. If that other line is still on its way to
the call, say at a lock, and an earlier run continued this line without the call, whichever line
comes first makes the call for both: this call takes the stored step, and if the other line makes
the call after all, it takes this call's place. And while only one line is running, every stored
step that other lines have not asked for still lies ahead: nothing new runs, and patches are off.
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


class MadeCall(NamedTuple):
    """A call as the code makes it."""

    kind: str
    name: str
    digest: str
    """Of its arguments: usually a digest of those that stay the same in every run, then, after a
    dot, a digest of all of them."""
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
    """If it is parallel: the position of the last outcome before it (see `Order`) or, if only its
    line makes calls, the negative of its number in the line. None if something the code did
    outside steps may have led here."""
    tells: bool = False
    """Its arguments say something that stays the same in every run."""


class StoredCall(NamedTuple):
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


def left_behind(asked: MadeCall, left: StoredCall) -> str:
    """Why a new call must not run: a stored one should have been asked for before."""
    return f"{shown(asked)} is not stored, but {shown(left)} is and has not been asked for"


def indistinct(asked: MadeCall) -> str:
    """Why a call must not run that comes in the order in which other branches end."""
    return (
        f"{shown(asked)} cannot be told from others of its name: branches that make no calls of"
        " their own are under way, and it may come in the order in which they end. Give it"
        " arguments that say which one it is, or a name of its own: with ctx.branch(name)"
    )


class Going(NamedTuple):
    """The lines that may still make calls when a call that is not stored is about to run.

    By then every stored outcome has reached the function. So a line makes another call only because
    of something done outside steps: if nothing is, no line counts as alive.
    """

    alive: Collection[str]
    """Lines that are running, except that of the call and its parents, which wait for it."""
    places: Collection[str]
    """Where they are: the next branches start at one of these."""
    unknown: Collection[str]
    """Labels of branches that have made no call: each may be any line with its label."""
    cut_off: Collection[str]
    """Lines that were cancelled or failed: nobody knows what they would have called next."""


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


def moved(asked: MadeCall, line: str) -> str:
    """Why a call must not run that is stored in a line where nobody asks for it."""
    where = _where(line)
    return f"{shown(asked)} is not stored here but in {where}, where it has not been asked for"


def behind(asked: MadeCall, here: str, left: StoredCall, line: str) -> str:
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


def shown(call: MadeCall | StoredCall) -> str:
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


def line_id(parent: str, group: str, asked: MadeCall) -> str:
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


def identity(lines: Sequence[str], asked: MadeCall) -> str:
    """What identifies a call before it is stored: its arguments, then its ordinal among equals.

    The ids of what a call creates outside the journal are derived from it. So a loop over a set,
    whose order differs from run to run, finds what an earlier run created but did not store.
    `lines` leads from the function, or from a named line, to the line of the call.

    Branches may share their items, so another branch may submit a child in the next run. A child
    is therefore identified by its arguments alone where possible: equal children are
    interchangeable.
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


def kept_lines(line_ids: Iterable[str]) -> dict[str, list[StoredCall]]:
    """The stored lines by the place they were started at; without those that have names."""
    groups: dict[str, list[StoredCall]] = {}
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


def _kept_line(line: str) -> StoredCall:
    _, number, equal, same, digest, parallel, label = _own(line)
    ordinals = int(equal), int(same)
    return StoredCall(line, BRANCH, label, digest, int(number), parallel == "p", *ordinals)


def group_of(line: str) -> str:
    """The place at which a line without a name was started."""
    return _own(line)[0]


def _own(line: str) -> list[str]:
    return line.rpartition(_INSIDE)[2].split(":", 6)


def step_key(line: str, asked: MadeCall) -> str:
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


def siblings_name(line: str, call: MadeCall | StoredCall) -> str:
    """A call as a person accepts it: the same in all branches that are like this one."""
    name = call.name if call.kind == StepKind.CALL else f"{call.kind} {call.name}"
    if line == ROOT:
        return _short(name)
    label = "any with a name" if line.startswith("=") else _kept_line(line).name
    return _short(f"{name} in {label}")


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
# 1. Outcomes reach the function one at a time. The next one is delivered once the function is at
#    rest again, that is, once it has made every call it can make without another outcome.
# 2. The lowest position goes first. A position is allotted when an outcome is about to be stored;
#    while that is under way, no later one is delivered.
# 3. A call that is not stored runs once every stored outcome has been delivered: by then the
#    function has come as far as it did in the previous run.
# 4. If it is the turn of a stored outcome that the function has not asked for, we wait only a
#    moment: the function may be doing something outside steps first, or may never ask for it.
#
# So the function sees one sequence of outcomes, however often it runs, and makes the same
# calls.


class Undelivered:
    """Outcomes that earlier runs have stored and that have not reached the function in this one."""

    __slots__ = ("_asked_for", "_expected", "left")

    def __init__(self, positions: Iterable[int]) -> None:
        self.left = set(positions)
        self._expected = deque(sorted(self.left))
        """The same in order, without those that were waited for in vain."""
        self._asked_for: list[int] = []
        """Those of them the function waits for; a heap."""

    def ask(self, position: int) -> None:
        """The function waits for it."""
        heapq.heappush(self._asked_for, position)

    @property
    def expects(self) -> bool:
        """Whether it is the turn of an outcome that nobody asks for."""
        while self._expected and self._expected[0] not in self.left:
            self._expected.popleft()
        first = self.first_asked_for()
        return bool(self._expected) and (first is None or self._expected[0] < first)

    def expect_no_more(self) -> None:
        while self.expects:
            self._expected.popleft()

    def first_asked_for(self) -> int | None:
        while self._asked_for and self._asked_for[0] not in self.left:
            heapq.heappop(self._asked_for)
        return self._asked_for[0] if self._asked_for else None


class Order:
    """The outcomes of one run that have not reached the function yet."""

    __slots__ = ("_allotted", "_last", "_replay", "reached", "whole")

    def __init__(self) -> None:
        self._last = 0
        self._replay: Undelivered | None = None
        """If something is stored."""
        self._allotted: dict[int, bool] = {}
        """New ones in order, and whether they are stored by now."""
        self.whole = True
        """Whether all outcomes are stored that have reached the function before the last one."""
        self.reached: int | None = 0
        """The position of the last outcome delivered; None once an earlier one was left out,
        because the function has then seen a different sequence."""

    def take_in(self, positions: Iterable[int]) -> None:
        """Know what earlier runs have stored."""
        replay = Undelivered(positions)
        if replay.left:
            self._replay = replay
            self._last = max(replay.left)
            self.whole = self._last == len(replay.left)

    def allot(self) -> int:
        """A position for a new outcome, which is about to be stored."""
        self._last += 1
        self._allotted[self._last] = False
        return self._last

    def wait(self, position: int) -> None:
        """The outcome is ready for the function: it was stored earlier, or just now."""
        if self._replay is not None and position in self._replay.left:
            self._replay.ask(position)
        else:
            self._allotted[position] = True

    def deliver(self, position: int) -> None:
        """It reaches the function now."""
        self.reached = position if self.reached == position - 1 else None
        self.end(position)

    def end(self, position: int) -> None:
        """Nobody waits for it any more, or it has reached the function."""
        if self._replay is not None:
            self._replay.left.discard(position)
        self._allotted.pop(position, None)

    def next(self, *, patient: bool = True) -> int | None:
        """What to deliver now that the function is at rest; if `patient`, strictly in order."""
        if patient and self.expects:
            return None
        asked_for = None if self._replay is None else self._replay.first_asked_for()
        if asked_for is not None:
            return asked_for
        first = next(iter(self._allotted), None)
        return first if first is not None and self._allotted[first] else None

    @property
    def replaying(self) -> bool:
        """Whether some stored outcomes have not been delivered: they may be asked for yet."""
        return self._replay is not None and bool(self._replay.left)

    @property
    def may_run(self) -> bool:
        """Whether a call that is not stored runs now that the function is at rest."""
        replay = self._replay
        return replay is None or (replay.first_asked_for() is None and not replay.expects)

    @property
    def expects(self) -> bool:
        """Whether it is the turn of a stored outcome that nobody asks for."""
        return self._replay is not None and self._replay.expects

    def expect_no_more(self) -> None:
        """Give up waiting for outcomes that nobody asks for: others go first."""
        if self._replay is not None:
            self._replay.expect_no_more()
