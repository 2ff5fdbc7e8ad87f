"""What an application's handlers share: opened with the app, closed with it, found by type."""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
)
from typing import TypeVar

from flowfabric.errors import InvalidInput

T = TypeVar("T")

Factory = Callable[
    [], AbstractAsyncContextManager[T] | AbstractContextManager[T] | Awaitable[T] | T
]


class Resources:
    """Factories by type, and what they made while the app is open."""

    def __init__(self) -> None:
        self._factories: dict[type, Callable[[], object]] = {}
        self._open: dict[type, object] = {}
        self._stack: AsyncExitStack | None = None

    def provide(self, kind: type[T], factory: Factory[T]) -> None:
        if kind in self._factories:
            raise InvalidInput("provide", f"{kind.__name__} is provided already")
        self._factories[kind] = factory

    def kinds(self) -> frozenset[type]:
        return frozenset(self._factories)

    def adopt(self, other: "Resources") -> None:
        """Provide what another provides."""
        self._factories |= other._factories

    async def open(self) -> None:
        """Make everything, in the order it was provided; what fails closes the rest."""
        if self._stack is not None:
            return
        async with AsyncExitStack() as stack:
            for kind, factory in self._factories.items():
                self._open[kind] = await _enter(stack, factory())
            self._stack = stack.pop_all()

    async def close(self) -> None:
        """Close everything in the opposite order."""
        stack, self._stack = self._stack, None
        self._open.clear()
        if stack is not None:
            await stack.aclose()

    def get(self, kind: type[T]) -> T:
        found = self._open.get(kind)
        if not isinstance(found, kind):
            raise InvalidInput(
                "get", f"nothing provides {kind.__name__}; call app.provide({kind.__name__}, …)"
            )
        return found


async def _enter(stack: AsyncExitStack, made: object) -> object:
    if isinstance(made, AbstractAsyncContextManager):
        entered: object = await stack.enter_async_context(made)
        return entered
    if isinstance(made, AbstractContextManager):
        value: object = stack.enter_context(made)
        return value
    if inspect.isawaitable(made):
        result: object = await made
        return result
    return made
