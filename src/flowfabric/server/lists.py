"""How lists are read over HTTP.

All are read page by page: `next_cursor` is the `cursor` of the next page, and is for that alone.
"""

from typing import Annotated, TypeVar

from litestar.params import FromQuery, QueryParameter
from msgspec import Struct

from flowfabric.core.bounds import PAGE_MAX
from flowfabric.engine import paging
from flowfabric.errors import InvalidInput
from flowfabric.server.problems import refuse

PAGE = 100
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
        raise InvalidInput("cursor", paging.FROM_A_PAGE, cursor)
    start = 0 if cursor is None else keys.index(cursor) + 1
    end = start + limit
    return list(found[start:end]), keys[end - 1] if end < len(found) else None


def read_tag(text: str) -> tuple[str, str]:
    """The key and the value of a tag that a list is filtered by."""
    key, equals, value = text.partition("=")
    if not equals:
        raise refuse(400, "invalid_input", f"tag: must read key=value (got {text!r})", field="tag")
    return key, value
