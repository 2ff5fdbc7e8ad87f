"""Lists, page by page: a page cut from the rows found, and a list read to its end.

A list asks for one row more than the limit: if it gets it, there is another page.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar

from flowfabric.core.checks import check_text
from flowfabric.core.ids import FIRST_UUID, ExecutionId, parse_uuid, uuid_of
from flowfabric.errors import InvalidInput

PAGES_MAX: Final = 10_000
"""The most pages one list is read in, so that a cursor that goes in circles ends."""

TIME_DIGITS_MAX: Final = 15
FROM_A_PAGE: Final = "must be the next_cursor of an earlier page"

C = TypeVar("C")
T = TypeVar("T")


def cut(found: Sequence[T], limit: int, cursor: Callable[[T], C]) -> tuple[tuple[T, ...], C | None]:
    """A page, and where it ends if there are more."""
    page = tuple(found[:limit])
    return page, cursor(page[-1]) if page and len(found) > limit else None


class Owned(Protocol):
    @property
    def namespace(self) -> str: ...


N = TypeVar("N", bound=Owned)


def by_name(cursor: object) -> dict[str, str]:
    """Where a list by namespace and name continues, as parameters of its statement."""
    after = {"after_namespace": "", "after_name": ""}
    if cursor is not None:
        namespace, found, name = cursor.partition("\n") if isinstance(cursor, str) else ("",) * 3
        if not found:
            raise InvalidInput("cursor", FROM_A_PAGE, cursor)
        after["after_namespace"] = check_text("cursor", namespace)
        after["after_name"] = check_text("cursor", name)
    return after


def cut_by_name(
    found: Sequence[N], limit: int, name: Callable[[N], str]
) -> tuple[tuple[N, ...], str | None]:
    """A page of such a list, and where it ends: neither part has line breaks."""
    return cut(found, limit, lambda each: f"{each.namespace}\n{name(each)}")


def split_time(cursor: object) -> tuple[int, str]:
    """Where a list by time continues: the time, and the rest of the cursor."""
    time, _, rest = cursor.partition("-") if isinstance(cursor, str) else ("", "", "")
    if not (time.isascii() and time.isdigit()) or len(time) > TIME_DIGITS_MAX:
        raise InvalidInput("cursor", FROM_A_PAGE, cursor)
    return int(time), rest


def by_time(cursor: object) -> dict[str, int | str]:
    """Where a list of executions by time and uuid continues, as parameters of its statement."""
    if cursor is None:
        return {"after_ms": -1, "after_id": FIRST_UUID}
    time_ms, uuid = split_time(cursor)
    return {"after_ms": time_ms, "after_id": parse_uuid("cursor", uuid)}


def time_cursor(time_ms: int, execution_id: ExecutionId) -> str:
    """Where such a list ends."""
    return f"{time_ms}-{uuid_of(execution_id)}"


class Paged(Protocol):
    @property
    def next_cursor(self) -> str | None: ...


P = TypeVar("P", bound=Paged)


async def pages(fetch: Callable[[str | None], Awaitable[P]]) -> AsyncIterator[P]:
    """Every page of a list, from the first."""
    cursor: str | None = None
    for _ in range(PAGES_MAX):
        page = await fetch(cursor)
        yield page
        cursor = page.next_cursor
        if cursor is None:
            return
