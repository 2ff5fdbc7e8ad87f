"""Durable functions that hypothesis invents, and what they mean, read one line after another.

There are two kinds. In an *ordered* program the order of the code says which call is meant:
arguments may be missing, equal or new in every run. In a *wild* one calls are made in order of
arrival, beside branches that are still under way and that take their time outside of calls, over
sets of finished tasks and between timeouts: their arguments or their names tell them apart.
"""

from collections import Counter
from typing import Literal

import msgspec
from hypothesis import strategies as st

Verb = Literal[
    "step", "caught", "raises", "flaky", "sleep", "child", "lost child", "uuid", "signal",
    "nothing", "request"
]  # fmt: skip
Told = Literal["place", "change", "path", "bound", "method", "name"]
How = Literal[
    "gather", "gather all", "group", "named", "as completed", "spawned", "as waited", "timed",
    "first", "beside", "body"
]  # fmt: skip
Value = str | list["Value"]
TELLING: tuple[Told, ...] = ("path", "bound", "method")
"""They tell which is which in whatever order they come."""


class Call(msgspec.Struct, frozen=True):
    """One durable call."""

    verb: Verb
    name: str
    told: Told
    """By what it is told from others of its name: by its place alone, whether or not its
    arguments change, or by its arguments too, by what its function has bound, or by the record it
    is a method of. Or it has a name of its own."""


class Burst(msgspec.Struct, frozen=True):
    """Calls made at once, by the task itself."""

    verb: Literal["step", "child", "twin"]
    """Twins are equal children."""
    told: Told
    times: int


class Sequence(msgspec.Struct, frozen=True):
    parts: tuple["Program", ...]


class Parallel(msgspec.Struct, frozen=True):
    how: How
    told: Told
    branches: tuple["Program", ...]


class Loop(msgspec.Struct, frozen=True):
    times: int
    body: "Program"


class Caught(msgspec.Struct, frozen=True):
    """Whatever fails inside is caught."""

    body: "Program"


Program = Call | Burst | Sequence | Parallel | Loop | Caught

QUICK: tuple[Verb, ...] = ("step", "caught", "flaky", "uuid", "nothing")
VERBS: tuple[Verb, ...] = (*QUICK, "sleep", "child", "lost child")


class Family:
    """Programs of one kind."""

    def __init__(
        self,
        told: tuple[Told, ...],
        safe: tuple[How, ...],
        failing: tuple[How, ...],
        verbs: tuple[Verb, ...] = (),
    ) -> None:
        """`verbs` are those that others do not have."""
        self._verbs = (*VERBS, *verbs)
        self.told = st.sampled_from(told)
        self.safe = st.sampled_from(safe)
        self.failing = st.sampled_from(failing)
        """How branches are started of which some may fail."""

    def calls(self, *verbs: Verb) -> st.SearchStrategy[Program]:
        return st.builds(Call, st.sampled_from(verbs), st.sampled_from(("a", "b")), self.told)

    def bursts(self, *verbs: str) -> st.SearchStrategy[Program]:
        return st.builds(Burst, st.sampled_from(verbs), self.told, st.integers(1, 3))

    def larger(self, programs: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
        may_fail = st.one_of(programs, self.calls("raises"))
        return st.one_of(
            st.builds(Sequence, several(programs)),
            st.builds(Parallel, self.safe, self.told, several(programs)),
            st.builds(Parallel, st.just("gather all"), self.told, several(may_fail)),
            st.builds(Loop, st.integers(1, 3), programs),
            st.builds(Caught, st.builds(Sequence, several(may_fail))),
            st.builds(Caught, st.builds(Parallel, self.failing, self.told, several(may_fail))),
        )

    def with_signals(self) -> st.SearchStrategy[Program]:
        """One branch waits for signals, and no other waits long."""
        quick = st.one_of(self.calls(*QUICK), self.bursts("step"))
        waiting = st.builds(Sequence, several(st.one_of(quick, self.calls("signal"))))
        others = several(st.recursive(quick, self.larger, max_leaves=4))
        branches = st.builds(lambda one, rest: (*rest, one), waiting, others)
        return st.builds(Parallel, self.safe, self.told, branches)

    def programs(self, *others: Verb) -> st.SearchStrategy[Program]:
        """`others` are called in between, by the function itself."""
        leaves = st.one_of(self.calls(*self._verbs), self.bursts("step", "child", "twin"))
        parts = st.recursive(leaves, self.larger, max_leaves=8)
        if others:
            parts = st.one_of(parts, self.calls(*others))
        return st.builds(Sequence, st.lists(parts, min_size=1, max_size=4).map(tuple))

    def programs_with_signals(self) -> st.SearchStrategy[Program]:
        quick = st.recursive(self.calls(*QUICK), self.larger, max_leaves=4)
        parts = st.one_of(quick, self.with_signals())
        return st.builds(Sequence, st.lists(parts, min_size=1, max_size=3).map(tuple))


def several(programs: st.SearchStrategy[Program]) -> st.SearchStrategy[tuple[Program, ...]]:
    return st.lists(programs, min_size=1, max_size=3).map(tuple)


ordered = Family(
    told=("place", "change", *TELLING),
    safe=("gather", "gather all", "group", "named"),
    failing=("group", "gather all"),
)
wild = Family(
    told=(*TELLING, "name"),
    safe=(
        "gather", "group", "named", "as completed", "spawned", "as waited", "timed", "first",
        "beside", "body"
    ),
    failing=(
        "gather", "group", "as completed", "spawned", "as waited", "timed", "first", "beside",
        "body"
    ),
    verbs=("request",),
)  # fmt: skip
programs = st.one_of(ordered.programs("signal"), ordered.programs_with_signals())
# Without signals: a branch that was left behind may wait long meanwhile.
wild_programs = wild.programs()


def _call(verb: Verb) -> Call:
    return Call(verb, "a", "path")


def _place(verb: Verb) -> Call:
    return Call(verb, "a", "place")


def _named(verb: Verb) -> Call:
    return Call(verb, "a", "name")


def _parallel(how: How, *branches: Program) -> Parallel:
    return Parallel(how, "path", branches)


FOUND: tuple[Program, ...] = (
    Sequence(
        (
            Parallel("gather", "place", (_place("step"), Burst("step", "place", 2))),
            Loop(1, Call("step", "b", "change")),
            _place("signal"),
            _place("step"),
        )
    ),
    Sequence(
        (
            Parallel("group", "place", (_place("step"), _place("nothing"))),
            _place("step"),
            Parallel("gather", "place", (_place("step"), _place("signal"))),
        )
    ),
    Sequence(
        (
            Caught(_parallel("as completed", _call("raises"), _call("caught"))),
            _parallel("gather", _call("sleep"), _call("step")),
        )
    ),
    Sequence(
        (
            Caught(_parallel("gather", _call("raises"), _call("raises"))),
            _parallel("gather", _call("step")),
            _parallel("gather", _call("step")),
            _call("sleep"),
        )
    ),
    Sequence(
        (
            Caught(_parallel("as completed", Burst("step", "path", 1), _call("raises"))),
            _parallel("gather", Burst("child", "path", 2)),
            _parallel("first", Burst("child", "path", 2)),
        )
    ),
    Sequence(
        (
            Parallel(
                "as waited",
                "name",
                (_named("step"), _named("step"), Sequence((_named("step"), _named("sleep")))),
            ),
        )
    ),
    Sequence(
        (
            Loop(3, Caught(_parallel("body", _call("step"), _call("raises")))),
            _call("step"),
            _call("sleep"),
        )
    ),
    Sequence(
        (
            Loop(
                3,
                Caught(
                    _parallel("body", Burst("step", "name", 3), _named("raises"), _call("raises"))
                ),
            ),
            _call("sleep"),
            _call("sleep"),
        )
    ),
    Sequence(
        (
            Parallel(
                "gather",
                "place",
                (
                    Parallel("gather all", "change", (_place("raises"), _place("uuid"))),
                    _place("step"),
                    _place("signal"),
                ),
            ),
        )
    ),
    Sequence(
        (
            Caught(_parallel("as waited", _call("raises"), Burst("step", "bound", 3))),
            _parallel("gather all", _call("sleep")),
        )
    ),
)
"""Programs that once went wrong, for some orders of arrival."""


def creates(program: Program) -> bool:
    """Whether it creates something before its step is stored: a child, or a pause."""
    match program:
        case Call(verb, _, _):
            return verb in ("child", "lost child", "signal")
        case Burst(verb, _, _):
            return verb != "step"
        case Sequence(parts) | Parallel(branches=parts):
            return any(map(creates, parts))
        case Loop(body=body) | Caught(body):
            return creates(body)


class Meaning:
    """What a program returns, and which effects it certainly has."""

    def __init__(self) -> None:
        self.effects: set[str] = set()
        self.twins: Counter[str] = Counter()

    def of(self, program: Program, path: str) -> Value:
        match program:
            case Call(verb, name, _):
                return self._call(verb, name, path)
            case Burst(verb, _, times):
                return self._burst(verb, times, path)
            case Sequence(parts):
                return [self.of(part, f"{path}.{n}") for n, part in enumerate(parts)]
            case Loop(times, body):
                return [self.of(body, f"{path}.{n}") for n in range(times)]
            case Caught(body):
                try:
                    return self.of(body, path)
                except ValueError:
                    return "caught"
            case Parallel(how, _, branches):
                return self._parallel(how, branches, path)

    def _parallel(self, how: How, branches: tuple[Program, ...], path: str) -> Value:
        before, twins = set(self.effects), self.twins.copy()
        found: list[Value] = []
        failed = False
        for n, branch in enumerate(branches):
            try:
                found.append(self.of(branch, f"{path}.{n}"))
            except ValueError:
                found.append("failed")
                failed = True
        if failed and how != "gather all":
            # How far the others came is a matter of chance.
            self.effects, self.twins = before, twins
            raise ValueError(path)
        if how in ("first", "beside"):
            self.effects.add(f"{path}.{how}")
        if how in ("as completed", "spawned", "as waited", "timed"):
            self.effects.update(f"{path}.{n}.used" for n in range(len(branches)))
        return found

    def _burst(self, verb: str, times: int, path: str) -> Value:
        if verb == "twin":
            self.twins[path] += times
            return [path] * times
        paths = [f"{path}.{n}" for n in range(times)]
        self.effects.update(paths)
        return list(paths)

    def _call(self, verb: Verb, name: str, path: str) -> Value:
        if verb in ("step", "caught", "raises", "flaky", "child", "lost child"):
            self.effects.add(path)
        if verb == "raises":
            raise ValueError(path)
        if verb in ("sleep", "uuid", "nothing", "request"):
            return verb
        return name if verb == "signal" else [verb, path]
