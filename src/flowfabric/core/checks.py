"""Checks of input values, and of the small languages in them: names, tags, versions, capabilities.

Each refusal names the field, the limit and the value. Text that came from outside is made
safe to show here too.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from enum import StrEnum
from typing import Final, TypeVar, get_args

from msgspec import Struct, structs

from flowfabric.core import bounds
from flowfabric.errors import InvalidCapabilities, InvalidInput, PayloadTooLarge

Choice = TypeVar("Choice", bound=StrEnum)
T = TypeVar("T")
V = TypeVar("V")

# Text that others wrote, made safe to show ----------------------------------
#
# What comes out of the database was chosen by anyone who may submit work: a failure reason may
# clear a terminal, set its title, forge a line of a log or turn the reading order around.
# `visible` replaces whatever acts instead of being seen by an escape that is seen: control
# characters of both sets, line breaks of every kind, directional overrides and isolates,
# whatever Unicode wants ignored when there is no glyph for it (fillers, joiners, variation
# selectors, tags), and halves of surrogate pairs. Everything else stays as it is, so that text
# which is made visible twice stays the same.
#
# Names are refused at the door instead (`check_name`), by the same rule.

_PLAIN_BREAKS: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_LINE_BREAK: Final = re.compile("\r\n|\n")
"""What ends a line of a text with several; all else that might is shown as an escape."""
_IGNORABLE: Final = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Unicode's Default_Ignorable_Code_Point: some of them count as letters or marks."""


def is_visible(text: str) -> bool:
    """Whether every character is seen and none acts; spaces of any width are seen."""
    return _is_plain(text) or all(map(_seen, text))


def visible(text: str) -> str:
    """`text` on one line, with escapes for what would not be seen."""
    return text if _is_plain(text) else "".join(map(_shown, text))


def visible_lines(text: str) -> list[str]:
    """The lines of `text`, each visible; for what is known to be shown on several lines."""
    return [visible(line.expandtabs(4)) for line in _LINE_BREAK.split(text)]


def visible_json(document: str) -> str:
    """A JSON text that means the same, with JSON's own escapes for what would not be seen."""
    if _is_plain(document):
        return document
    return "".join(each if _seen(each) else json.dumps(each)[1:-1] for each in document)


def _is_plain(text: str) -> bool:
    return text.isprintable() and (text.isascii() or _IGNORABLE.search(text) is None)


def _seen(character: str) -> bool:
    return _is_plain(character) or unicodedata.category(character) == "Zs"


def _shown(character: str) -> str:
    if _seen(character):
        return character
    if character in _PLAIN_BREAKS:
        return _PLAIN_BREAKS[character]
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def and_more(shown: Iterable[str], count: int) -> str:
    """Those that are shown of `count`, and how many more there are."""
    names = list(shown)
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return ", ".join(names) + more


# Checks of plain input values: each refusal names the field, the limit and the value

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


def optional(check: Callable[[V], T], value: V | None) -> T | None:
    """The checked value, if there is one."""
    return None if value is None else check(value)


def check_optional_int(field: str, value: object, low: int, high: int) -> int | None:
    return None if value is None else check_int(field, value, low, high)


def check_priority(value: object) -> int:
    return check_int("priority", value, bounds.PRIORITY_MIN, bounds.PRIORITY_MAX)


def check_names(field: str, value: object) -> None:
    """Any collection of names; a single string is refused, not split into letters."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidInput(field, 'must be a list, such as ["gpu"]', value)


def check_bool(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(field, "must be true or false", value)
    return value


def check_choice(field: str, value: object, choices: type[Choice]) -> Choice:
    if isinstance(value, choices):
        return value
    if isinstance(value, str) and value in list(choices):
        return choices(value)
    raise InvalidInput(field, f"must be one of {', '.join(choices)}", value)


def check_list(field: str, value: object, low: int, high: int) -> Sequence[object]:
    """A list of `low` to `high` items; text is not accepted as a list of characters."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidInput(field, "must be a list", value)
    if not low <= len(value) <= high:
        raise InvalidInput(field, f"must have {low} to {high} items", len(value))
    return value


def check_time(field: str, value: object) -> int:
    """A point in time in milliseconds since the epoch."""
    return check_int(field, value, 0, bounds.TIME_MS_MAX)


def check_optional_time(field: str, value: object) -> int | None:
    return None if value is None else check_time(field, value)


def check_text(
    field: str, value: object, *, bytes_max: int = bounds.NAME_BYTES_MAX, empty: bool = True
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


def check_name(field: str, value: object, *, bytes_max: int = bounds.NAME_BYTES_MAX) -> str:
    """Text people call something by: not empty, and nothing in it acts unseen."""
    name = check_text(field, value, bytes_max=bytes_max, empty=False)
    if not is_visible(name):
        raise InvalidInput(field, "must not contain control or invisible characters", name)
    return name


def check_reason(value: object) -> str:
    """Text of any length, shortened: it is a message to people."""
    return shorten(
        check_text("reason", value, bytes_max=bounds.REASON_BYTES_MAX), bounds.TEXT_BYTES_MAX
    )


def check_optional_text(
    field: str, value: object, *, bytes_max: int = bounds.NAME_BYTES_MAX
) -> str | None:
    return None if value is None else check_text(field, value, bytes_max=bytes_max)


def check_key(value: str | None) -> str | None:
    """Refuse an empty idempotency key of a caller: it may be a variable that was never set."""
    if value == "":
        raise InvalidInput(
            "idempotency_key", "must not be empty, which would make every call a new one", value
        )
    return value


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
    if len(document) <= bounds.PAYLOAD_DEPTH_MAX:
        return
    if document.count(b"[") + document.count(b"{") <= bounds.PAYLOAD_DEPTH_MAX:
        return
    brackets = _TEXTS.sub(b"", document).translate(_SAME_BRACKETS, _NOT_BRACKETS)
    # Each pass takes away the innermost level.
    for _ in range(bounds.PAYLOAD_DEPTH_MAX):
        less = brackets.replace(b"[]", b"")
        if len(less) == len(brackets):
            break
        brackets = less
    if b"[]" in brackets:
        problem = f"must be nested at most {bounds.PAYLOAD_DEPTH_MAX} deep, in lists and objects"
        raise InvalidInput(field, problem)


def shorten(text: str, bytes_max: int) -> str:
    """The beginning of `text`, cut at a character boundary, within `bytes_max` bytes."""
    text = text.replace("\x00", "\\0")
    data = text.encode(errors="backslashreplace")
    if len(data) <= bytes_max:
        return data.decode()
    return data[: bytes_max - 3].decode(errors="ignore") + "…"


# Tags: flat labels on executions and flows ----------------------------------
#
# A key is any text people can read and type: `team`, `app.team`, `Kunde Nr.`. Nothing in it
# separates anything; what tools write begins with a name of theirs and a dot.

INSTANCE_TAG_KEY: Final = "cairn.instance_id"
"""Events carry the value of this tag, so that subscribers can filter by it."""

TAGS_MAX: Final = 64
TAG_KEY_MAX_BYTES: Final = 256
TAG_VALUE_MAX_BYTES: Final = 4096


def check_tag_key(key: object) -> str:
    name = check_name("tag key", key, bytes_max=TAG_KEY_MAX_BYTES)
    if "=" in name or name != name.strip():
        raise InvalidInput("tag key", "must not contain =, nor begin or end with a space", key)
    return name


def check_tag_value(key: str, value: object) -> str:
    field = f"tags[{key}]"
    if not isinstance(value, str):
        raise InvalidInput(field, "must be a string", value)
    if UNSTORABLE.search(value):
        raise InvalidInput(field, "must not contain null characters or lone surrogates", value)
    if len(value.encode()) > TAG_VALUE_MAX_BYTES:
        raise InvalidInput(field, f"must be at most {TAG_VALUE_MAX_BYTES} bytes", value)
    return value


def check_tags(tags: object) -> dict[str, str]:
    """A copy of `tags`, every key and value checked; an empty mapping is fine."""
    if not isinstance(tags, Mapping):
        raise InvalidInput("tags", "must be a mapping of strings", tags)
    if len(tags) > TAGS_MAX:
        raise InvalidInput("tags", f"must be at most {TAGS_MAX}", len(tags))
    checked: dict[str, str] = {}
    for candidate, value in tags.items():
        key = check_tag_key(candidate)
        checked[key] = check_tag_value(key, value)
    return checked


# Versions of a task, as they are stored: kind `publish` is version 1, `publish@2` version 2

SEPARATOR: Final = "@"
VERSION_MAX: Final = 1_000_000
_VERSIONED: Final = re.compile(r"(.+)@([1-9][0-9]{0,6})")


def check_task_name(given: object) -> str:
    """A task's own name; what follows an @ would be taken for a version."""
    name = check_text("name", given, empty=False)
    if SEPARATOR in name:
        raise InvalidInput("name", "must not contain @, which separates a task's version", name)
    return name


def check_version(version: object) -> int:
    return check_int("version", version, 1, VERSION_MAX)


def kind_of(name: str, version: int) -> str:
    """The kind of executions of a task's version."""
    return name if version == 1 else f"{name}{SEPARATOR}{version}"


def split_kind(kind: str) -> tuple[str, int]:
    """The task's name and version; `publish@1` is another spelling of `publish`."""
    found = _VERSIONED.fullmatch(kind)
    return (kind, 1) if found is None else (found[1], int(found[2]))


def names_version(kind: str) -> bool:
    """Whether a kind, as people write it, says which version it means."""
    return _VERSIONED.fullmatch(kind) is not None


# What work requires and what workers offer ----------------------------------
#
# A capability is an opaque token: `torch>=2.3` is compared letter by letter, nothing
# is parsed out of it. A worker may run an execution when it offers every token the
# execution requires. Both sides are checked when they enter the system, before
# anything is written, so that matching itself is a plain subset test.

TOKENS_MAX: Final = 256
CSV_MAX_BYTES: Final = 4096

# Lone surrogates cannot be stored as UTF-8, so both sides refuse them too.
_FORBIDDEN_IN_REQUIRED: Final = re.compile("[\x00-\x20\x7f\ud800-\udfff]")
_FORBIDDEN_IN_OFFERED: Final = re.compile(r"[\x00-\x20\x7f-\x9f\s\ud800-\udfff]")


def check_required(tokens: object) -> tuple[str, ...]:
    """The capabilities an execution requires, sorted and without repeats."""
    return _check(tokens, side="required", forbidden=_FORBIDDEN_IN_REQUIRED)


def check_offered(tokens: object) -> frozenset[str]:
    """The capabilities a worker offers."""
    return frozenset(_check(tokens, side="worker", forbidden=_FORBIDDEN_IN_OFFERED))


def missing(required: Iterable[str], offered: Set[str]) -> tuple[str, ...]:
    """The required tokens that are not offered, sorted; empty when the worker may run the work."""
    return tuple(sorted(set(required) - offered))


def _check(tokens: object, *, side: str, forbidden: re.Pattern[str]) -> tuple[str, ...]:
    if not isinstance(tokens, list | tuple | set | frozenset):
        raise InvalidCapabilities(f"{side}:not_array")
    if len(tokens) > TOKENS_MAX:
        raise InvalidCapabilities(f"{side}:too_many_tokens")
    unique: set[str] = set()
    for token in tokens:
        if not isinstance(token, str):
            raise InvalidCapabilities(f"{side}:non_string_token")
        if not token:
            raise InvalidCapabilities(f"{side}:empty_token")
        if "," in token:
            raise InvalidCapabilities(f"{side}:comma_in_token")
        if forbidden.search(token):
            raise InvalidCapabilities(f"{side}:control_or_whitespace")
        unique.add(token)
    in_order = tuple(sorted(unique))
    if len(",".join(in_order).encode()) > CSV_MAX_BYTES:
        raise InvalidCapabilities(f"{side}:too_many_bytes")
    return in_order


# What msgspec says of JSON that does not fit a type --------------------------

_MISFIT: Final = re.compile(r"(.*) - at (`key` in )?`\$\.?([^`]*)`", re.DOTALL)


def split_misfit(message: str) -> tuple[str, str]:
    """Split ``Expected `int`, got `str` - at `$.a.b` `` into the problem and `a.b`.

    The place is empty if it is the whole document. For a bad key, it is the object that holds it.
    """
    found = _MISFIT.fullmatch(message)
    if found is None:
        return message, ""
    problem, key, place = found.groups()
    return f"has a key that does not fit: {uncapitalized(problem)}" if key else problem, place


def uncapitalized(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


# Members that JSON objects do not have: what they do have, and which one was meant

MEMBER_MAX_CHARS: Final = 64
"""Longer names are not compared with others: that takes time, and no member has such a name."""
COMPARED_MAX: Final = 16
"""How many unknown members of one object are compared with those that it may have."""
_UNKNOWN: Final = re.compile("unknown field `(.*)`$", re.DOTALL)


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one is probably a misspelling of."""
    if len(name) > MEMBER_MAX_CHARS:
        return None
    return next(iter(get_close_matches(name, known, 1)), None)


def instead(name: str, known: Sequence[str]) -> str:
    """What an object may have instead of a member that it does not know."""
    meant, there_are = closest(name, known), f"there are {', '.join(known)}"
    return f"did you mean `{meant}`? T{there_are[1:]}" if meant else there_are


def misspelt(given: Mapping[str, object], known: Sequence[str]) -> tuple[str, str] | None:
    """A member that is unknown and looks like a known one, and what there is instead."""
    unknown = [name for name in given if name not in known]
    for name in unknown[:COMPARED_MAX]:
        if closest(name, known):
            return name, instead(name, known)
    return None


def explained(problem: str, place: str, kind: object) -> str:
    """What msgspec says about a document of a kind, and for an unknown member what there is."""
    found = _UNKNOWN.search(problem)
    owner = _object_at(kind, place) if found else None
    if found is None or owner is None:
        return problem
    return f"{problem}; {instead(found[1], list(_members(owner)))}"


def _object_at(kind: object, place: str) -> type[Struct] | None:
    """The record at a place such as `executions[3].policy`; none if it could be several."""
    owner = _only_record(kind)
    for step in place.split(".") if place else ():
        if owner is None:
            return None
        owner = _only_record(_members(owner).get(step.partition("[")[0]))
    return owner


def _members(kind: type[Struct]) -> dict[str, object]:
    return {each.encode_name: each.type for each in structs.fields(kind)}


def _only_record(hint: object) -> type[Struct] | None:
    found = set(_records(hint))
    return found.pop() if len(found) == 1 else None


def _records(hint: object) -> Iterable[type[Struct]]:
    if isinstance(hint, type) and issubclass(hint, Struct):
        yield hint
    for each in get_args(hint):
        yield from _records(each)
