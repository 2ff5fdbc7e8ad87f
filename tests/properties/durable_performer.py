"""Runs an invented durable function as a handler does; see `durable_programs`."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine

import msgspec

from flowfabric import Context, Retry, Task
from flowfabric.errors import ExecutionFailed
from tests.properties.durable_programs import (
    TELLING,
    Burst,
    Call,
    Caught,
    Loop,
    Parallel,
    Program,
    Sequence,
    Told,
    Value,
    creates,
)

AGAIN = Retry(max_retries=2, delay=0)
MOMENTS = (0, 0.0002, 0.001, 0.004, 0.02)
"""How long something takes outside of calls, in seconds: another time in every run."""


class World(msgspec.Struct, frozen=True):
    """What a program acts on."""

    effect: Callable[[str, bool], Awaitable[str]]
    flaky: Callable[[str], Awaitable[str]]
    """Fails at first."""
    child: Task[[str, bool], str]
    twin: Task[[str], str]


class Hidden:
    """A branch that nobody can look into: its place alone tells it."""

    def __init__(self, program: Program, path: str) -> None:
        self._program = program
        self._path = path

    async def branch(self, performer: "Performer", ctx: Context) -> Value:
        return await performer.run(ctx, self._program, self._path)


class Record(msgspec.Struct, frozen=True):
    """A branch, or a step, that is known by the record it is a method of."""

    path: str

    async def branch(self, performer: "Performer", ctx: Context, programs: list[Program]) -> Value:
        return await performer.run(ctx, programs[0], self.path)

    async def step(self, effect: Callable[[str, bool], Awaitable[str]], fails: bool) -> str:
        return await effect(self.path, fails)


class Performer:
    """Performs a program; others may come first between any two calls."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self._world = world
        self._chance = chance

    async def run(self, ctx: Context, program: Program, path: str) -> Value:
        match program:
            case Call():
                await self._turns()
                return await self._call(ctx, program, path)
            case Burst():
                await self._turns()
                return await self._burst(ctx, program, path)
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
            case Parallel():
                return await self._parallel(ctx, program, path)

    async def _turns(self) -> None:
        for _ in range(self._chance.choice((0, 0, 1, 2, 7, 30))):
            await asyncio.sleep(0)

    def _order(self, told: Told, count: int) -> list[int]:
        """The order of the code; that of a set, if arguments tell which is which."""
        numbers = list(range(count))
        if told in (*TELLING, "name"):
            self._chance.shuffle(numbers)
        return numbers

    # Branches

    async def _parallel(self, ctx: Context, program: Parallel, path: str) -> Value:
        if program.how == "body":
            return await self._body(ctx, program, path)
        order = self._order(program.told, len(program.branches))
        made = [self._branch(ctx, program, f"{path}.{number}", number) for number in order]
        match program.how:
            case "gather" | "named":
                found = await asyncio.gather(*made)
            case "gather all":
                found = self._checked(await asyncio.gather(*made, return_exceptions=True))
            case "group":
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(each) for each in made]
                found = [task.result() for task in tasks]
            case "as completed" | "spawned" | "as waited" | "timed":
                found = await self._in_order_of_arrival(ctx, program, order, made, path)
            case "first" | "beside":
                found = await self._beside(ctx, program.how, made, path)
        return [value for _, value in sorted(zip(order, found, strict=True), key=lambda x: x[0])]

    def _branch(
        self, ctx: Context, program: Parallel, path: str, number: int
    ) -> Coroutine[object, object, Value]:
        async def known_by_its_arguments(path: str) -> Value:
            return await self.run(ctx, program.branches[number], path)

        async def known_by_what_it_has_bound() -> Value:
            return await self.run(ctx, program.branches[number], path)

        async def known_by_its_name() -> Value:
            with ctx.branch(path):
                return await self.run(ctx, program.branches[number], path)

        if program.how == "named":
            return known_by_its_name()
        if program.told == "place":
            return Hidden(program.branches[number], path).branch(self, ctx)
        if program.told in ("path", "name"):
            return known_by_its_arguments(path)
        if program.told == "bound":
            return known_by_what_it_has_bound()
        if program.told == "method":
            return Record(path).branch(self, ctx, [program.branches[number]])

        async def known_although_it_changes(_: float | str) -> Value:
            return await self.run(ctx, program.branches[number], path)

        # What a branch creates before anything of it is stored is known by firm arguments.
        changing = self._chance.random()
        creating = creates(program.branches[number])
        return known_although_it_changes(changing if creating else str(changing))

    @staticmethod
    def _checked(found: list[Value | BaseException]) -> list[Value]:
        values: list[Value] = []
        for each in found:
            if isinstance(each, BaseException):
                assert isinstance(each, ValueError | ExceptionGroup), repr(each)
                values.append("failed")
            else:
                values.append(each)
        return values

    async def _body(self, ctx: Context, program: Parallel, path: str) -> Value:
        """Perform the first one oneself, while the others are under way."""
        tasks: dict[int, asyncio.Task[Value]] = {}
        async with asyncio.TaskGroup() as group:
            for number in self._order(program.told, len(program.branches) - 1):
                branch = self._branch(ctx, program, f"{path}.{number + 1}", number + 1)
                tasks[number + 1] = group.create_task(branch)
            own = await self.run(ctx, program.branches[0], f"{path}.0")
        return [own, *(tasks[number].result() for number in sorted(tasks))]

    async def _in_order_of_arrival(
        self,
        ctx: Context,
        program: Parallel,
        order: list[int],
        made: list[Coroutine[object, object, Value]],
        path: str,
    ) -> list[Value]:
        """Go on in order of arrival, each time with an argument or a name of its own."""
        found: dict[int, Value] = {}

        async def numbered(_: str, number: int, branch: Coroutine[object, object, Value]) -> int:
            found[number] = await branch
            return number

        async def use(number: int) -> None:
            used = f"{path}.{number}.used"
            if program.how == "timed":
                with ctx.branch(used):
                    await self._step(ctx, "used", program.told, used)
            else:
                await self._step(ctx, "used", program.told, used)
            if program.how in ("as completed", "as waited"):
                # It is parked, and comes by here again with others finished meanwhile.
                await ctx.sleep(10)

        coming = [numbered(path, n, branch) for n, branch in zip(order, made, strict=True)]
        if program.how == "as completed":
            for each in asyncio.as_completed(coming):
                await use(await each)
        elif program.how == "spawned":
            using = [asyncio.create_task(use(await each)) for each in asyncio.as_completed(coming)]
            await asyncio.gather(*using)
        else:
            over = asyncio.Event()
            # Where nothing else is under way, the order of the code counts, and sets have none.
            beside = asyncio.create_task(self._until(ctx, over))
            pending = {asyncio.create_task(each) for each in coming}
            while pending:
                timeout = self._chance.choice(MOMENTS) if program.how == "timed" else None
                done, pending = await asyncio.wait(
                    pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                # As a set has them.
                for task in self._chance.sample(list(done), len(done)):
                    await use(task.result())
            over.set()
            await beside
        return [found[number] for number in order]

    @staticmethod
    async def _until(ctx: Context, over: asyncio.Event) -> None:
        """Be under way until the others are done."""
        await ctx.uuid()
        await over.wait()

    async def _beside(
        self,
        ctx: Context,
        how: str,
        made: list[Coroutine[object, object, Value]],
        path: str,
    ) -> list[Value]:
        """Make a call while branches are under way: at once, or when one of them has ended."""
        tasks = [asyncio.create_task(each) for each in made]
        if how == "first":
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await ctx.step("beside", self._world.effect, f"{path}.{how}", False)
        return [await task for task in tasks]

    # Calls

    async def _burst(self, ctx: Context, burst: Burst, path: str) -> Value:
        world = self._world
        order = self._order(burst.told, burst.times)
        if burst.verb == "step":
            found = await asyncio.gather(
                *(self._step(ctx, "burst", burst.told, f"{path}.{n}") for n in order)
            )
        elif burst.verb == "twin":
            twins = await asyncio.gather(*(ctx.submit(world.twin, path) for _ in order))
            found = await asyncio.gather(*(twin.result() for twin in twins))
        else:
            children = await asyncio.gather(
                *(ctx.submit(world.child, f"{path}.{n}", False) for n in order)
            )
            found = await asyncio.gather(*(child.result() for child in children))
        return [value for _, value in sorted(zip(order, found, strict=True))]

    def _step(
        self, ctx: Context, name: str, told: Told, path: str, fails: bool = False
    ) -> Coroutine[object, object, str]:
        """Not a coroutine: the call is made by whoever calls this."""
        effect = self._world.effect
        # What may change while a function has it does not tell it from others.
        hidden = [path]

        async def nameless() -> str:
            return await effect(hidden[0], fails)

        async def changing(_: str) -> str:
            return await effect(hidden[0], fails)

        # No lambda: it would run in a thread, and end there after its attempt was stopped.
        async def bound() -> str:
            return await effect(path, fails)

        if told in ("path", "name"):
            return ctx.step(path if told == "name" else name, effect, path, fails)
        if told == "bound":
            return ctx.step(name, bound)
        if told == "method":
            return ctx.step(name, Record(path).step, effect, fails)
        if told == "change":
            return ctx.step(name, changing, str(self._chance.random()))
        return ctx.step(name, nameless)

    async def _call(self, ctx: Context, call: Call, path: str) -> Value:
        world = self._world
        match call.verb:
            case "step" | "raises":
                fails = call.verb == "raises"
                return [call.verb, await self._step(ctx, call.name, call.told, path, fails)]
            case "caught":
                try:
                    return await self._step(ctx, call.name, call.told, path, fails=True)
                except ValueError as error:
                    return [call.verb, str(error)]
            case "flaky":
                return [call.verb, await ctx.step(call.name, world.flaky, path, retry=AGAIN)]
            case "child":
                return [call.verb, await (await ctx.submit(world.child, path, False)).result()]
            case "lost child":
                child = await ctx.submit(world.child, path, True)
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
            case "request":
                await asyncio.sleep(self._chance.choice(MOMENTS))
            case "nothing":
                pass
        return call.verb
