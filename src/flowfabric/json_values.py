"""Values as JSON: what arguments, results, steps and signals are stored as.

msgspec knows its own structs, dataclasses, attrs classes, typed dicts and the types of the
standard library; Pydantic models are written and read by themselves.

JSON has no NaN and no infinities, and the encoder writes null for them. Its keys are text, and the
encoder writes 1 and "1" alike. Since nothing may be stored as something else, or lost, such numbers
and such keys are refused, with their place.
"""

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from operator import is_
from typing import Final, Protocol, Self, TypeVar, runtime_checkable
from uuid import UUID

import msgspec
from msgspec import Raw, Struct, inspect, structs

from flowfabric.core.checks import check_depth
from flowfabric.errors import InvalidInput, abbreviated

# Fields of Pydantic models that are not written as they are: secrets --------
#
# Pydantic writes asterisks for them, unless the program has a serializer for the field, the
# model or the type, which the model's schema shows.

T = TypeVar("T")

_NO_PARTS: Final = ("metadata", "serialization", "config")
SECRET: Final = "get_secret_value"
"""The method that only types of secrets have."""


def hidden_field(model: type) -> str | None:
    """A field, here or in a model inside, that would not come back as it was."""
    # A model that names classes which are not defined yet is checked again later.
    return _hidden_field(model, getattr(model, "__pydantic_complete__", True) is True)


@lru_cache(maxsize=1024)
def _hidden_field(model: type, complete: bool) -> str | None:
    schema: object = getattr(model, "__pydantic_core_schema__", None)
    return _search(schema, model.__name__) if complete else None


def _search(node: object, place: str) -> str | None:
    if isinstance(node, Mapping):
        return _search_in(node, place)
    if isinstance(node, Sequence) and not isinstance(node, str | bytes):
        return _first(_search(each, place) for each in node)
    return place if isinstance(node, type) and hasattr(node, SECRET) else None


def _search_in(node: Mapping[str, object], place: str) -> str | None:
    how = node.get("serialization")
    writer: object = how.get("function") if isinstance(how, Mapping) else None
    if writer is not None:
        module = str(getattr(writer, "__module__", ""))
        if module.partition(".")[0] != "pydantic":
            # The program has a serializer for it.
            return None
        if "secret" in str(getattr(writer, "__qualname__", "")):
            return place
    match node:
        case {"type": "model", "cls": type() as kind, "schema": inner}:
            return _search(inner, kind.__name__)
        case {"type": "dataclass-field", "name": name, "schema": inner}:
            return _search(inner, f"{place}.{name}")
        case {"fields": Mapping() as fields}:
            return _first(_search(each, f"{place}.{name}") for name, each in fields.items())
        case _:
            parts = (each for key, each in node.items() if key not in _NO_PARTS)
            return _first(_search(each, place) for each in parts)


def _first(found: Iterable[str | None]) -> str | None:
    return next((each for each in found if each is not None), None)


# Fields of attrs classes whose names begin with an underscore ---------------
#
# The encoder omits them but the decoder reads them, so the object would come back with their
# defaults. Such objects are therefore written as dictionaries, wherever in a value they are.

_WHOLE: Final = frozenset(
    {str, int, float, bool, type(None), bytes, datetime, date, time, timedelta, Decimal, UUID, Raw}
)
"""Types of values that contain no others."""


def with_private_fields(value: object) -> object:
    """The value itself, or a copy if it contains such objects."""
    # If attrs is not loaded, no class was made with it.
    return _shown(value) if "attr" in sys.modules else value


def _shown(value: object) -> object:
    if type(value) in _WHOLE:
        return value
    if isinstance(value, dict):
        if _WHOLE.issuperset(map(type, value.values())):
            return value
        members = {key: _shown(each) for key, each in value.items()}
        return value if all(map(is_, members.values(), value.values())) else members
    if isinstance(value, list | tuple | set | frozenset):
        if _WHOLE.issuperset(map(type, value)):
            return value
        items = [_shown(each) for each in value]
        return value if all(map(is_, items, value)) else items
    return _shown_object(value)


def _shown_object(value: object) -> object:
    kind: type = type(value)
    names, private = fields_of(kind)
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}
    shown = {name: _shown(each) for name, each in held.items()}
    if private:
        return shown
    changed = {name: each for name, each in shown.items() if each is not held[name]}
    if not changed:
        return value
    made = copy.copy(value)
    for name, each in changed.items():
        if isinstance(made, Struct):
            structs.force_setattr(made, name, each)
        else:
            object.__setattr__(made, name, each)
    return made


@lru_cache(maxsize=1024)
def fields_of(kind: type) -> tuple[tuple[str, ...], bool]:
    """The fields of a class, and whether the encoder would omit some."""
    if issubclass(kind, Struct):
        return kind.__struct_fields__, False
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind)), False
    listed: object = getattr(kind, "__attrs_attrs__", ())
    assert isinstance(listed, tuple)
    names = tuple(str(field.name) for field in listed)
    return names, any(name.startswith("_") for name in names)


# Keys of one dictionary that are the same text in JSON -----------------------
#
# Every value is checked for them, so this only says whether there are any, not where.

_TEXT: Final = frozenset({str})


def has_colliding_keys(value: object) -> bool:
    kind = type(value)
    if kind in _WHOLE:
        return False
    if isinstance(value, dict):
        if not _TEXT.issuperset(map(type, value)) and _collision(value) is not None:
            return True
        inside: Iterable[object] = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    elif dataclasses.is_dataclass(kind) or isinstance(value, Struct):
        inside = [each for _, each in _parts_of(value)]
    else:
        return False
    return not _WHOLE.issuperset(map(type, inside)) and any(map(has_colliding_keys, inside))


def _where(
    value: object, trouble: Callable[[object], T | None], seen: set[int]
) -> tuple[str, T] | None:
    """The first place in a value with a problem, and which one; the value may contain itself."""
    found = trouble(value)
    if found is not None:
        return "", found
    if type(value) in _WHOLE or id(value) in seen:
        return None
    seen.add(id(value))
    for place, each in _parts_of(value):
        within = _where(each, trouble, seen)
        if within is not None:
            return place + within[0], within[1]
    return None


def _parts_of(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", each) for number, each in enumerate(value))
    else:
        kind: type = type(value)
        names, _ = fields_of(kind)
        yield from ((f".{name}", getattr(value, name, None)) for name in names)


def _collision(value: object) -> str | None:
    """Two keys of a dictionary that would be one."""
    if not isinstance(value, dict) or len(set(map(type, value))) < 2:
        return None
    seen: dict[object, object] = {}
    for key in value:
        (text,) = msgspec.to_builtins({key: None}, str_keys=True)
        if text in seen:
            return f"the keys {seen[text]!r} and {key!r}"
        seen[text] = key
    return None


# Keys that have no text in JSON: None, true, tuples -------------------------
#
# The encoder asks about such a key as about any other value it does not know, without saying that
# it is a key. So we look for its place once the value has been refused.


def _key_without_text(value: object) -> str | None:
    keys = value if isinstance(value, dict) else ()
    return next((abbreviated(key) for key in keys if not _has_text(key)), None)


def _has_text(key: object) -> bool:
    try:
        msgspec.to_builtins({key: None}, str_keys=True)
    except (TypeError, ValueError):
        return False
    return True


UNREADABLE = (
    "was stored through a codec that this app does not have, or that could not read it; see"
    " App(codec=…)"
)
KINDS = "Pydantic models, dataclasses, attrs classes, msgspec structs and what JSON has"


@runtime_checkable
class Model(Protocol):
    """A Pydantic model. The package itself is not needed here."""

    def model_dump(self, *, mode: str, by_alias: bool) -> dict[str, object]: ...
    @classmethod
    def model_validate_json(cls, json_data: bytes) -> Self: ...


def encode_value(field: str, value: object) -> bytes:
    """Raises `InvalidInput` that names `field` and what in it cannot be stored."""
    try:
        value = with_private_fields(value)
        data = _ENCODER.encode(value)
        # Only a null in the JSON can stand for a number that JSON lacks.
        lacking = (
            _where(msgspec.to_builtins(value, enc_hook=_plain_or_raw), _not_finite, set())
            if b"null" in data
            else None
        )
        clash = _where(value, _collision, set()) if has_colliding_keys(value) else None
    except Exception as error:
        raise _unstorable(field, value, error) from error
    if lacking is not None:
        raise InvalidInput(
            f"{field}{lacking[0]}",
            "is NaN or infinite, which JSON cannot hold; use None or text instead",
        )
    if clash is not None:
        where, keys = clash
        raise InvalidInput(
            f"{field}{where}",
            f"{keys} are the same text in JSON, which would keep only one of them",
        )
    check_depth(field, data)
    return data


def _unstorable(field: str, value: object, error: Exception) -> InvalidInput:
    try:
        odd = _where(value, _key_without_text, set()) if isinstance(error, TypeError) else None
    except RecursionError:
        odd = None
    if isinstance(error, RecursionError):
        return InvalidInput(field, f"cannot be stored: it {_too_deep(value)}. What can: {KINDS}")
    if odd is not None:
        place, key = odd
        problem = f"cannot be stored: JSON has no key like {key}; use text instead"
        return InvalidInput(f"{field}{place}", problem)
    return InvalidInput(field, f"cannot be stored: {error}. What can: {KINDS}", value)


def _too_deep(value: object) -> str:
    """What keeps a value from being walked to its end."""
    return "holds itself" if _holds_itself(value) else "nests too deeply"


def _holds_itself(value: object) -> bool:
    """Whether a value is among those that lead to it, through what JSON has."""
    # Without recursion, which is what has failed. True marks that all in a value has been seen.
    inside: dict[int, object] = {}
    left: list[tuple[object, bool]] = [(value, False)]
    while left:
        each, over = left.pop()
        if over:
            inside.pop(id(each), None)
        elif id(each) in inside:
            return True
        elif parts := [part for _, part in _parts_of(each)]:
            inside[id(each)] = each
            left.append((each, True))
            left += [(part, False) for part in parts]
    return False


def decoder_of(kind: type[T]) -> "msgspec.json.Decoder[T]":
    """Reads a type from JSON. Raises `TypeError` for a type that cannot be read."""
    return msgspec.json.Decoder(kind, dec_hook=typed)


def read_as(data: bytes | msgspec.Raw, kind: object) -> object:
    """Raises `msgspec.ValidationError` for JSON that does not fit."""
    decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder(type=kind, dec_hook=typed)
    return decoder.decode(data)


def check_storable(field: str, kind: object) -> None:
    """Raise `InvalidInput` for an annotation that values cannot be stored for."""
    try:
        described = inspect.type_info(kind)
    except TypeError as error:
        raise InvalidInput(field, f"cannot be stored: {error}. What can: {KINDS}") from None
    for each in _parts(described, set()):
        if isinstance(each, inspect.CustomType) and not _is_read(each.cls):
            name = getattr(each.cls, "__qualname__", each.cls)
            raise InvalidInput(
                field,
                f"{name} cannot be stored. What can: {KINDS}. Pass what it is made of and make it"
                f" inside the function, or call app.provide({name}, …) before the task is declared",
            )
        if isinstance(each, inspect.CustomType) and isinstance(each.cls, type):
            hidden = hidden_field(each.cls)
            if hidden is not None:
                raise InvalidInput(field, f"cannot be stored: {_secret(hidden)}")


def _parts(described: inspect.Type, seen: set[int]) -> Iterator[inspect.Type]:
    """A type and all it consists of; types may contain themselves."""
    if id(described) in seen:
        return
    seen.add(id(described))
    yield described
    for name in described.__struct_fields__:
        value: object = getattr(described, name)
        for each in value if isinstance(value, tuple) else (value,):
            inner = each.type if isinstance(each, inspect.Field) else each
            if isinstance(inner, inspect.Type):
                yield from _parts(inner, seen)


def _is_read(kind: object) -> bool:
    return kind is object or (isinstance(kind, type) and issubclass(kind, Model))


def _plain(value: object) -> object:
    """Turn a value that msgspec does not know into one it knows."""
    if isinstance(value, Model):
        hidden = hidden_field(type(value))
        if hidden is not None:
            raise TypeError(_secret(hidden))
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"a value of type {type(value).__qualname__} has no JSON form")


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_plain)


def _secret(place: str) -> str:
    return (
        f"{place} is a secret, which Pydantic writes as asterisks. Pass what the secret is found by"
        " and look it up inside the function, or give the field a serializer (@field_serializer)"
    )


def typed(kind: type, value: object) -> object:
    """Make a value of a type that msgspec does not know from what it has read."""
    if not issubclass(kind, Model):
        return value
    try:
        return kind.model_validate_json(msgspec.json.encode(value))
    except ValueError as error:
        raise ValueError(_one_line(error)) from None


def _one_line(error: ValueError) -> str:
    """One line for all problems, which Pydantic spreads over several."""
    listed: object = getattr(error, "errors", list)()
    if not isinstance(listed, list):
        return str(error)
    problems = [_problem(each) for each in listed if isinstance(each, dict)]
    return "; ".join(problems) or str(error)


def _problem(error: Mapping[str, object]) -> str:
    places = error.get("loc")
    where = ".".join(map(str, places)) if isinstance(places, tuple) else ""
    return f"{where}: {error.get('msg')}" if where else str(error.get("msg"))


def _plain_or_raw(value: object) -> object:
    """JSON that the caller has written is stored unchanged."""
    return None if isinstance(value, msgspec.Raw) else _plain(value)


def _not_finite(value: object) -> float | None:
    return value if isinstance(value, float) and not math.isfinite(value) else None
