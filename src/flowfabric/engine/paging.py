"""Reading a list page by page, to its end and never further than a bound."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Protocol, TypeVar, overload

PAGES_MAX: Final = 10_000
"""Pages that one list is read in: a cursor that leads nowhere new ends."""

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


class Paged(Protocol[C_co]):
    @property
    def next_cursor(self) -> C_co | None: ...


ByText = TypeVar("ByText", bound=Paged[str])
ByPair = TypeVar("ByPair", bound=Paged[tuple[str, str]])


@overload
def pages(fetch: Callable[[str | None], Awaitable[ByText]]) -> AsyncIterator[ByText]: ...


@overload
def pages(
    fetch: Callable[[tuple[str, str] | None], Awaitable[ByPair]],
) -> AsyncIterator[ByPair]: ...


async def pages(fetch: Callable[[C | None], Awaitable[Paged[C]]]) -> AsyncIterator[Paged[C]]:
    """Every page of a list, from the first."""
    cursor: C | None = None
    for _ in range(PAGES_MAX):
        page = await fetch(cursor)
        yield page
        cursor = page.next_cursor
        if cursor is None:
            return
