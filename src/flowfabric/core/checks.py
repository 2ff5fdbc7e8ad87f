"""Checks of plain input values: each refusal names the field, the limit and the value."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from flowfabric.core.limits import (
    NAME_BYTES_MAX,
    PAYLOAD_DEPTH_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    REASON_BYTES_MAX,
    TEXT_BYTES_MAX,
    TIME_MS_MAX,
)
from flowfabric.core.visible import is_visible
from flowfabric.errors import InvalidInput, PayloadTooLarge

JSON: Final = "json"
"""The encoding of what tasks are given and return."""
ENCODED: Final = b"\x01"
"""What a value begins with that a codec has written; JSON never does."""
_TEXTS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_SAME_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")

UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
"""Characters no store takes as text: NUL, and surrogates that are half of nothing."""


def check_int(field: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(field, "must be an integer", value)
    if not low <= value <= high:
        raise InvalidInput(field, f"must be {low} to {high}", value)
    return value


def check_priority(value: object) -> int:
    return check_int("priority", value, PRIORITY_MIN, PRIORITY_MAX)


def check_names(field: str, value: object) -> None:
    """Any collection of names; one name alone is none of its letters."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidInput(field, 'must be a list, such as ["gpu"]', value)


def check_bool(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(field, "must be true or false", value)
    return value


def check_list(field: str, value: object, low: int, high: int) -> Sequence[object]:
    """A list of `low` to `high` items; text is no list of its characters."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidInput(field, "must be a list", value)
    if not low <= len(value) <= high:
        raise InvalidInput(field, f"must have {low} to {high} items", len(value))
    return value


def check_time(field: str, value: object) -> int:
    """A point in time in milliseconds since the epoch."""
    return check_int(field, value, 0, TIME_MS_MAX)


def check_optional_time(field: str, value: object) -> int | None:
    return None if value is None else check_time(field, value)


def check_text(
    field: str, value: object, *, bytes_max: int = NAME_BYTES_MAX, empty: bool = True
) -> str:
    if not isinstance(value, str):
        raise InvalidInput(field, "must be a string", value)
    if not empty and not value:
        raise InvalidInput(field, "must not be empty", value)
    if "\x00" in value:
        raise InvalidInput(field, "must not contain NUL characters", value)
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput(field, "must be valid Unicode", value) from error
    if size > bytes_max:
        raise InvalidInput(field, f"must be at most {bytes_max} bytes, is {size}", value)
    return value


def check_name(field: str, value: object, *, bytes_max: int = NAME_BYTES_MAX) -> str:
    """Text people call something by: not empty, and nothing in it acts unseen."""
    name = check_text(field, value, bytes_max=bytes_max, empty=False)
    if not is_visible(name):
        raise InvalidInput(field, "must not contain control or invisible characters", name)
    return name


def check_reason(value: object) -> str:
    """Text of any length, shortened: it is a message to people."""
    return shorten(check_text("reason", value, bytes_max=REASON_BYTES_MAX), TEXT_BYTES_MAX)


def check_optional_text(
    field: str, value: object, *, bytes_max: int = NAME_BYTES_MAX
) -> str | None:
    return None if value is None else check_text(field, value, bytes_max=bytes_max)


def check_bytes(field: str, value: object, bytes_max: int) -> bytes:
    if not isinstance(value, bytes):
        raise InvalidInput(field, "must be bytes", value)
    if len(value) > bytes_max:
        raise PayloadTooLarge(field, bytes_max, len(value))
    return value


def check_optional_bytes(field: str, value: object, bytes_max: int) -> bytes | None:
    return None if value is None else check_bytes(field, value, bytes_max)


def shorten_front(text: str, bytes_max: int) -> str:
    """The end of `text`, cut at a character boundary, within `bytes_max` bytes."""
    data = text.replace("\x00", "\\0").encode(errors="backslashreplace")
    if len(data) <= bytes_max:
        return data.decode()
    return "…" + data[len(data) - bytes_max + 3 :].decode(errors="ignore")


def check_json(field: str, value: object, bytes_max: int, *, encoding: object) -> bytes:
    """Bytes that, where their encoding says so, are JSON not nested too deep."""
    data = check_bytes(field, value, bytes_max)
    if encoding == JSON and not data.startswith(ENCODED):
        check_depth(field, data)
    return data


def check_depth(field: str, document: bytes) -> None:
    """Refuse JSON with more lists and objects inside each other than can be read back."""
    if document.count(b"[") + document.count(b"{") <= PAYLOAD_DEPTH_MAX:
        return
    brackets = _TEXTS.sub(b"", document).translate(_SAME_BRACKETS, _NOT_BRACKETS)
    # Each pass takes away the innermost level.
    for _ in range(PAYLOAD_DEPTH_MAX):
        less = brackets.replace(b"[]", b"")
        if len(less) == len(brackets):
            break
        brackets = less
    if b"[]" in brackets:
        problem = f"must be nested at most {PAYLOAD_DEPTH_MAX} deep, in lists and objects"
        raise InvalidInput(field, problem)


def shorten(text: str, bytes_max: int) -> str:
    """The beginning of `text`, cut at a character boundary, within `bytes_max` bytes."""
    text = text.replace("\x00", "\\0")
    data = text.encode(errors="backslashreplace")
    if len(data) <= bytes_max:
        return data.decode()
    return data[: bytes_max - 3].decode(errors="ignore") + "…"
