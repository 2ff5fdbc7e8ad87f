"""Fields of Pydantic models that are not written as they are: secrets.

Pydantic writes asterisks for them, unless the program says how to write them: by a serializer
of the field, of the model or of the type. What it does is read from the model's schema.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

_NO_PARTS: Final = ("metadata", "serialization", "config")
SECRET: Final = "get_secret_value"
"""What tells a type of secrets from others."""


def hidden_field(model: type) -> str | None:
    """A field, here or in a model inside, that would not come back as it was."""
    # One that names classes which are not defined yet is looked at again.
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
    writer = _serializer(node)
    if writer is not None and not _is_pydantics(writer):
        # The program says how it is written.
        return None
    if writer is not None and "secret" in str(getattr(writer, "__qualname__", "")):
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


def _serializer(node: Mapping[str, object]) -> object:
    how = node.get("serialization")
    function: object = how.get("function") if isinstance(how, Mapping) else None
    return function


def _is_pydantics(function: object) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "pydantic"


def _first(found: Iterable[str | None]) -> str | None:
    return next((each for each in found if each is not None), None)
