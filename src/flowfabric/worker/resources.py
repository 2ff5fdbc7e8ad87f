"""What handlers share: opened when a worker starts, closed when it stops, found by type."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from functools import partial
from typing import TypeVar

from flowfabric.errors import InvalidInput

T = TypeVar("T")

Managed = AbstractAsyncContextManager[T] | AbstractContextManager[T]
Factory = Callable[[], Managed[T] | Iterator[T] | AsyncIterator[T] | Awaitable[Managed[T] | T] | T]
"""Makes a resource: returns it or a context manager around it, `async` or not, or yields it."""


class Resources:
    """Factories by type, and what they made for the handlers of a running worker."""

    def __init__(self) -> None:
        self._factories: dict[type, Callable[[], object]] = {}
        self._open: dict[type, object] = {}
        self._stack: AsyncExitStack | None = None

    def provide(self, kind: type[T], factory: Factory[T]) -> None:
        _check_kind(kind)
        if not callable(factory):
            raise InvalidInput(
                "provide",
                f"takes a function that makes a {kind.__name__} when a worker starts, as in"
                f" app.provide({kind.__name__}, lambda: …)",
                factory,
            )
        if kind in self._factories:
            raise InvalidInput("provide", f"{kind.__name__} is already provided")
        self._factories[kind] = factory

    def kinds(self) -> frozenset[type]:
        return frozenset(self._factories)

    def adopt(self, other: "Resources") -> None:
        """Provide everything that another provides."""
        self._factories |= other._factories

    async def open(self) -> None:
        """Make everything, in the order it was provided; if one fails, close the others."""
        if self._stack is not None:
            return
        opened: dict[type, object] = {}
        async with AsyncExitStack() as stack:
            for kind, factory in self._factories.items():
                made = opened[kind] = await _enter(stack, factory())
                if not isinstance(made, kind):
                    raise InvalidInput(
                        "provide", f"the factory of {kind.__name__} returned something else", made
                    )
            self._stack = stack.pop_all()
        self._open = opened

    async def close(self) -> None:
        """Close everything in the opposite order."""
        stack, self._stack = self._stack, None
        self._open.clear()
        if stack is not None:
            await stack.aclose()

    def get(self, kind: type[T]) -> T:
        resource = self._open.get(kind)
        if not isinstance(resource, kind):
            raise InvalidInput(
                "get", f"nothing provides {kind.__name__}; call app.provide({kind.__name__}, …)"
            )
        return resource


def _check_kind(kind: object) -> None:
    """Resources are found by `isinstance`, which not every annotation allows."""
    try:
        is_class = isinstance(kind, type) and isinstance(None, kind) in (True, False)
    except TypeError:
        is_class = False
    if not is_class:
        raise InvalidInput(
            "provide", "takes the class under which handlers ask for the resource", kind
        )


async def _enter(stack: AsyncExitStack, made: object) -> object:
    """What a factory made, opened; the stack closes it."""
    managed = isinstance(made, AbstractAsyncContextManager | AbstractContextManager)
    if inspect.isawaitable(made) and not managed:
        made = await made
    if inspect.isgenerator(made):
        made = contextmanager(partial(_same, made))()
    elif inspect.isasyncgen(made):
        made = asynccontextmanager(partial(_same, made))()
    if isinstance(made, AbstractAsyncContextManager):
        entered: object = await stack.enter_async_context(made)
        return entered
    if isinstance(made, AbstractContextManager):
        value: object = stack.enter_context(made)
        return value
    stack.push_async_callback(_close, made)
    return made


def _same(made: T) -> T:
    return made


async def _close(made: object) -> None:
    """Call its `aclose` or `close`, if it has one."""
    close: object = getattr(made, "aclose", None) or getattr(made, "close", None)
    if not callable(close):
        return
    closing: object = close()
    if inspect.isawaitable(closing):
        await closing
