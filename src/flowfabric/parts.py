"""Parts of an app, such as `app.signals`; and their twins, which block instead of being awaited.

Whatever a part does stays in the app's namespace: what is in another one is not found.
And what cannot be awaited, although people try to.
"""

import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Concatenate, Generic, Never, ParamSpec, Self, TypeVar

from flowfabric.engine.engine import Engine
from flowfabric.errors import NotFound

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")


class NotAwaitable:
    """The call of a task, which people await as if it were the call of a function."""

    __slots__ = ()

    # Type checkers refuse it anyway, as long as they do not know of this.
    if not TYPE_CHECKING:

        def __await__(self) -> Never:
            name = self.task.name
            raise TypeError(
                f"{name}(…) is a call to submit, and runs nothing when it is awaited. Write"
                f" `run = await app.submit({name}, …)`, or `ctx.submit` within a task, and"
                f" `await run.result()`; {name}.function is the function itself"
            )


class AppPart:
    """A part of an app: it works on the app's engine, in the app's namespace."""

    def __init__(
        self,
        engine: Callable[[], Awaitable[Engine]],
        namespace: Callable[[], str],
        *,
        blocks: bool = False,
    ) -> None:
        """If it `blocks`, the connections of its callers are not async."""
        self._engine = engine
        self._namespace = namespace
        self._blocks = blocks

    @classmethod
    def on(cls, engine: Engine, namespace: str) -> Self:
        """The same part of an app whose engine is open, for callers that block."""

        async def opened() -> Engine:
            return engine

        return cls(opened, lambda: namespace, blocks=True)

    async def _engine_on(self, connection: object) -> Engine:
        """The engine inside the transaction of a caller's connection, if there is one."""
        return engine_on(await self._engine(), connection, sync=self._blocks)


async def check_execution_in(
    namespace: str, engine: Engine, execution_id: str, *, called: str
) -> None:
    """Raise `NotFound`, with the id it was `called` by, unless it exists in this namespace."""
    if await engine.get_execution_namespace(execution_id) != namespace:
        raise NotFound("execution", called)


async def check_flow_in(namespace: str, engine: Engine, flow_id: str, *, called: str) -> None:
    """The same for a flow."""
    if await engine.get_flow_namespace(flow_id) != namespace:
        raise NotFound("flow", called)


def engine_on(engine: Engine, connection: object, *, sync: bool) -> Engine:
    """The engine inside the transaction of a connection, if there is one."""
    return engine if connection is None else engine.on(connection, sync=sync)


class Twin(Generic[A_co]):
    """Has the methods of another class, without `await`."""

    def _call(self, method: Callable[[A_co], Coroutine[object, object, T]]) -> T:
        """Call a method of the other one and wait for its result."""
        raise NotImplementedError


def waits(
    method: Callable[Concatenate[A, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[Twin[A], P], T]:
    """A coroutine method, as a method of the twin."""

    def call(self: Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(lambda other: method(other, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call
