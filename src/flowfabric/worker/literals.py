"""Plain values as text, from which exactly the same can be read again."""

import ast
from typing import Final

from flowfabric.errors import InvalidInput

LITERAL_BYTES_MAX: Final = 8 * 1024
_SCALARS: Final = (type(None), bool, int, float, str, bytes)


def literal(value: object) -> str | None:
    """None for what is no plain value, or too long."""
    try:
        if not _is_plain(value):
            return None
        text = ascii(value)
        # Numbers can be too long to be read, or be none.
        if len(text) > LITERAL_BYTES_MAX or ast.literal_eval(text) != value:
            return None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return text


def read_literal(text: str) -> object:
    value: object = ast.literal_eval(text)
    return value


def read_tuple(text: str) -> tuple[object, ...]:
    value = read_literal(text)
    if not isinstance(value, tuple):
        raise InvalidInput("arguments", "must be a tuple", value)
    return value


def _is_plain(value: object) -> bool:
    """Exactly of these types: an enum is text too, but would not come back as an enum."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if isinstance(value, list | tuple) and kind in (list, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict) and kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return False
