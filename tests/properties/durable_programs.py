"""Durable functions that hypothesis invents, and what they mean, read one line after another."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Literal

import msgspec
from hypothesis import strategies as st

from flowfabric import Context, Task
from flowfabric.errors import ExecutionFailed

Verb = Literal["step", "caught", "raises", "sleep", "child", "lost child", "uuid", "signal"]
Value = str | list["Value"]


class Call(msgspec.Struct, frozen=True):
    """One durable call."""

    verb: Verb
    name: str
    told_apart: bool
    """Whether its arguments tell it from others of its name."""


class Sequence(msgspec.Struct, frozen=True):
    parts: tuple["Program", ...]


class Parallel(msgspec.Struct, frozen=True):
    how: Literal["gather", "group"]
    told_apart: bool
    branches: tuple["Program", ...]


class Loop(msgspec.Struct, frozen=True):
    times: int
    body: "Program"


class Caught(msgspec.Struct, frozen=True):
    """Whatever fails inside is caught."""

    body: "Program"


Program = Call | Sequence | Parallel | Loop | Caught

VERBS: tuple[Verb, ...] = ("step", "caught", "sleep", "child", "lost child", "uuid")


def calls(*verbs: Verb) -> st.SearchStrategy[Program]:
    return st.builds(Call, st.sampled_from(verbs), st.sampled_from(("a", "b")), st.booleans())


def several(programs: st.SearchStrategy[Program]) -> st.SearchStrategy[tuple[Program, ...]]:
    return st.lists(programs, min_size=1, max_size=3).map(tuple)


def larger(programs: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
    may_fail = st.one_of(programs, calls("raises"))
    return st.one_of(
        st.builds(Sequence, several(programs)),
        st.builds(Parallel, st.sampled_from(("gather", "group")), st.booleans(), several(programs)),
        st.builds(Loop, st.integers(1, 3), programs),
        st.builds(Caught, st.builds(Sequence, several(may_fail))),
        st.builds(Caught, st.builds(Parallel, st.just("group"), st.booleans(), several(may_fail))),
    )


programs = st.builds(
    Sequence,
    st.lists(
        st.one_of(st.recursive(calls(*VERBS), larger, max_leaves=8), calls("signal")),
        min_size=1,
        max_size=4,
    ).map(tuple),
)


class Meaning:
    """What a program returns, and which effects it certainly has."""

    def __init__(self) -> None:
        self.effects: set[str] = set()

    def of(self, program: Program, path: str) -> Value:
        match program:
            case Call(verb, name, _):
                return self._call(verb, name, path)
            case Sequence(parts):
                return [self.of(part, f"{path}.{n}") for n, part in enumerate(parts)]
            case Loop(times, body):
                return [self.of(body, f"{path}.{n}") for n in range(times)]
            case Caught(body):
                try:
                    return self.of(body, path)
                except ValueError:
                    return "caught"
            case Parallel(_, _, branches):
                return self._parallel(branches, path)

    def _parallel(self, branches: tuple[Program, ...], path: str) -> Value:
        before = set(self.effects)
        found: list[Value] = []
        failed = False
        for n, branch in enumerate(branches):
            try:
                found.append(self.of(branch, f"{path}.{n}"))
            except ValueError:
                failed = True
        if failed:
            # How far the others came is a matter of chance.
            self.effects = before
            raise ValueError(path)
        return found

    def _call(self, verb: Verb, name: str, path: str) -> Value:
        if verb in ("step", "caught", "raises", "child", "lost child"):
            self.effects.add(path)
        if verb == "raises":
            raise ValueError(path)
        return name if verb == "signal" else verb if verb in ("sleep", "uuid") else [verb, path]


class Performer:
    """Runs a program as a handler; others may come first between any two calls."""

    def __init__(
        self,
        effect: Callable[[str, bool], Awaitable[str]],
        child: Task[[str, bool], str],
        chance: random.Random,
    ) -> None:
        self._effect = effect
        self._child = child
        self._chance = chance

    async def run(self, ctx: Context, program: Program, path: str) -> Value:
        match program:
            case Call():
                for _ in range(self._chance.choice((0, 0, 1, 2, 7, 30))):
                    await asyncio.sleep(0)
                return await self._call(ctx, program, path)
            case Sequence(parts):
                return [await self.run(ctx, part, f"{path}.{n}") for n, part in enumerate(parts)]
            case Loop(times, body):
                return [await self.run(ctx, body, f"{path}.{n}") for n in range(times)]
            case Caught(body):
                try:
                    return await self.run(ctx, body, path)
                except* ValueError:
                    pass
                return "caught"
            case Parallel(how, told_apart, branches):
                return await self._parallel(ctx, how, told_apart, branches, path)

    async def _parallel(
        self,
        ctx: Context,
        how: str,
        told_apart: bool,
        branches: tuple[Program, ...],
        path: str,
    ) -> Value:
        async def known_by_its_arguments(number: int) -> Value:
            return await self.run(ctx, branches[number], f"{path}.{number}")

        def known_by_its_place(number: int) -> Coroutine[object, object, Value]:
            async def branch() -> Value:
                return await self.run(ctx, branches[number], f"{path}.{number}")

            return branch()

        numbers = range(len(branches))
        if told_apart:
            made = [known_by_its_arguments(number) for number in numbers]
        else:
            made = [known_by_its_place(number) for number in numbers]
        if how == "gather":
            return list(await asyncio.gather(*made))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in made]
        return [task.result() for task in tasks]

    async def _call(self, ctx: Context, call: Call, path: str) -> Value:
        fails = call.verb in ("caught", "raises")

        async def nameless() -> str:
            return await self._effect(path, fails)

        match call.verb:
            case "step" | "caught" | "raises":
                try:
                    if call.told_apart:
                        found = await ctx.step(call.name, self._effect, path, fails)
                    else:
                        found = await ctx.step(call.name, nameless)
                    return [call.verb, found]
                except ValueError as error:
                    if call.verb == "raises":
                        raise
                    return [call.verb, str(error)]
            case "child":
                return [call.verb, await (await ctx.submit(self._child, path, False)).result()]
            case "lost child":
                child = await ctx.submit(self._child, path, True)
                try:
                    await child.result()
                except ExecutionFailed as error:
                    return [call.verb, error.reason.partition(": ")[2].partition(" ")[0]]
                return "no failure"
            case "sleep":
                await ctx.sleep(10)
            case "uuid":
                await ctx.uuid()
            case "signal":
                return (await ctx.wait_for_signal(call.name)).name
        return call.verb
