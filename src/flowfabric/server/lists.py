"""How lists are read over HTTP.

All are read page by page: `next_cursor` is the `cursor` of the next page, and is for that alone.
"""

from typing import Annotated, TypeVar

from litestar.params import FromQuery, QueryParameter
from msgspec import Struct

from flowfabric.core.bounds import PAGE_MAX
from flowfabric.errors import InvalidInput

PAGE = 100
FROM_A_PAGE = "must be the next_cursor of an earlier page"
T = TypeVar("T")
AfterCursor = FromQuery[str | None]
InNamespace = FromQuery[str | None]
PageLimit = Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)]


class Page(Struct, kw_only=True):
    next_cursor: str | None
    """None on the last page."""


def cut(
    found: tuple[T, ...], keys: list[str], cursor: str | None, limit: int
) -> tuple[list[T], str | None]:
    """Those after a cursor, and the cursor of the next page."""
    if cursor is not None and cursor not in keys:
        raise InvalidInput("cursor", FROM_A_PAGE, cursor)
    start = 0 if cursor is None else keys.index(cursor) + 1
    end = start + limit
    return list(found[start:end]), keys[end - 1] if end < len(found) else None


def pair(cursor: tuple[str, str] | None) -> str | None:
    """Names have no line breaks in them."""
    return None if cursor is None else "\n".join(cursor)


def read_pair(cursor: str | None) -> tuple[str, str] | None:
    if cursor is None:
        return None
    namespace, found, name = cursor.partition("\n")
    if not found:
        raise InvalidInput("cursor", FROM_A_PAGE, cursor)
    return namespace, name
