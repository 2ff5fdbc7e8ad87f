"""Parts of an app such as `app.signals`, and their blocking twins.

A part works in the namespace of its app and finds nothing outside of it.
"""

import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar

from flowfabric.core.creation import of_another_task
from flowfabric.core.views import ExecutionSnapshot
from flowfabric.engine.engine import Engine
from flowfabric.errors import InvalidInput, NotFound

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")


class AppPart:
    """A part of an app: it works on the app's engine, in the app's namespace."""

    def __init__(
        self,
        engine: Callable[[], Awaitable[Engine]],
        namespace: Callable[[], str],
        *,
        blocks: bool = False,
    ) -> None:
        """With `blocks`, callers pass connections that are not async."""
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
        engine = await self._engine()
        return engine if connection is None else engine.on(connection, sync=self._blocks)


async def check_execution_in(
    namespace: str, engine: Engine, execution_id: str, *, called: str, kind: str | None = None
) -> None:
    """Raise `NotFound`, with the id it was `called` by, unless it exists in this namespace.

    With a `kind`, raise `InvalidInput` if it is a run of another task.
    """
    if kind is None:
        if await engine.get_execution_namespace(execution_id) != namespace:
            raise NotFound("execution", called)
        return
    snapshot = await engine.describe_execution(execution_id)
    if snapshot is None or snapshot.namespace != namespace:
        raise NotFound("execution", called)
    check_task_of(snapshot, called=called, kind=kind)


def check_task_of(snapshot: ExecutionSnapshot, *, called: str, kind: str) -> None:
    if problem := of_another_task(kind, snapshot.execution_kind):
        raise InvalidInput("execution_id", problem, called)


async def check_flow_in(namespace: str, engine: Engine, flow_id: str, *, called: str) -> None:
    """The same for a flow."""
    if await engine.get_flow_namespace(flow_id) != namespace:
        raise NotFound("flow", called)


class Twin(Generic[A_co]):
    """Has the methods of another class, without `await`."""

    def _call(
        self, method: Callable[[A_co], Coroutine[object, object, T]], connection: object
    ) -> T:
        """Call a method of the other class, which may join the transaction of a connection."""
        raise NotImplementedError


def waits(
    method: Callable[Concatenate[A, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[Twin[A], P], T]:
    """A coroutine method, as a method of the twin. Any `connection=` is one that is not async."""

    def call(self: Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(lambda other: method(other, *args, **kwargs), kwargs.get("connection"))

    functools.update_wrapper(call, method)
    return call
