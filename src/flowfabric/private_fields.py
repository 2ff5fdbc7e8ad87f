"""Fields of attrs classes whose names begin with an underscore.

The encoder leaves them out, and reads them all the same: the object would come back with
their defaults. So such objects are written as dictionaries, wherever in a value they are.
"""

import copy
import dataclasses
import sys
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Final
from uuid import UUID

from msgspec import Raw, Struct, structs

_WHOLE: Final = frozenset(
    {str, int, float, bool, type(None), bytes, datetime, date, time, timedelta, Decimal, UUID, Raw}
)
"""Types of values that hold no others."""


def with_private_fields(value: object) -> object:
    """The value itself; a copy, if there are such objects in it."""
    # Nobody can have made a class with a package that is not there.
    return _shown(value) if "attr" in sys.modules else value


def _shown(value: object) -> object:
    if type(value) in _WHOLE:
        return value
    if isinstance(value, dict):
        return _shown_dict(value)
    if isinstance(value, list | tuple | set | frozenset):
        if _WHOLE.issuperset(map(type, value)):
            return value
        items = [_shown(each) for each in value]
        return value if all(map(_is, items, value)) else items
    return _shown_object(value)


def _shown_dict(value: dict[object, object]) -> object:
    if _WHOLE.issuperset(map(type, value.values())):
        return value
    items = {key: _shown(each) for key, each in value.items()}
    return value if all(map(_is, items.values(), value.values())) else items


def _shown_object(value: object) -> object:
    kind: type = type(value)
    names, private = _fields(kind)
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    shown = {name: _shown(each) for name, each in found.items()}
    if private:
        return shown
    changed = {name: each for name, each in shown.items() if each is not found[name]}
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
def _fields(kind: type) -> tuple[tuple[str, ...], bool]:
    """The fields of a class, and whether the encoder would leave some out."""
    if issubclass(kind, Struct):
        return kind.__struct_fields__, False
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind)), False
    listed: object = getattr(kind, "__attrs_attrs__", ())
    assert isinstance(listed, tuple)
    names = tuple(str(field.name) for field in listed)
    return names, any(name.startswith("_") for name in names)


def _is(one: object, other: object) -> bool:
    return one is other
