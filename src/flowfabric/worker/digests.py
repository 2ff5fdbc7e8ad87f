"""A short name for the arguments of a call, by which parallel calls are told apart.

Two digests: one of what stays the same from run to run as a rule, and one that has
times, floats and uuids too. Of objects that are no plain values only the type
counts. Large arguments are read up to a limit.

What a function has bound is an argument as well: the values a lambda or an inner function takes
from around it, the object of a method, the arguments of a partial. Of these only what nobody can
change counts: a list that is filled meanwhile tells nothing.
"""

import dataclasses
import datetime
import decimal
import dis
import enum
import hashlib
import inspect
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final

from msgspec import Struct

NODES_MAX: Final = 500
"""Values of one call that are looked at, those inside others included."""
DEPTH_MAX: Final = 16
CHARS: Final = 12

_FIRM: Final = (bool, int, str, bytes, bytearray, decimal.Decimal, datetime.timedelta)
_FLEETING: Final = (float, complex, datetime.date, datetime.time, uuid.UUID)
_NAMED: Final = (
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
"""Classes and functions: known by their names."""
_FIXED: Final = (*_FIRM, *_FLEETING, enum.Enum, type(None), type)
"""What nobody can change; a bytearray is none of it."""
_rebinding: "weakref.WeakKeyDictionary[types.CodeType, frozenset[str]]" = (
    weakref.WeakKeyDictionary()
)
_NOTHING: Final = hashlib.sha256(b"").hexdigest()[:CHARS]


def digest_of(*values: object) -> str:
    """`firm`, or `firm.full` when some of the values may change from run to run."""
    if not values:
        return _NOTHING
    reading = _Reading()
    full = _digest(reading.text(values, 0))
    if not reading.fleeting:
        return full
    firm = _digest(_Reading(firm_only=True).text(values, 0))
    return firm if firm == full else f"{firm}.{full}"


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:CHARS]


def function_digest(function: Callable[..., object], args: Sequence[object]) -> str:
    """Of a function with its arguments, and what it has bound."""
    return digest_of(function, *args, tuple(filter(_is_fixed, bound_in(function))))


def opaque_in(function: Callable[..., object]) -> tuple[object, ...]:
    """What a function has bound and a digest says nothing of."""
    return tuple(each for each in bound_in(function) if not _is_fixed(each))


def bound_in(function: Callable[..., object]) -> tuple[object, ...]:
    """What a function brings along beside the arguments it is called with."""
    if isinstance(function, types.FunctionType):
        defaults, cells = function.__defaults__ or (), function.__closure__
        return defaults if cells is None else (*defaults, *_closed_over(function.__code__, cells))
    if isinstance(function, partial):
        return (*bound_in(function.func), *function.args, *function.keywords.values())
    if inspect.ismethod(function):
        return (*bound_in(function.__func__), function.__self__)
    if inspect.isbuiltin(function):
        return (function.__self__,)
    return ()


def _closed_over(code: types.CodeType, cells: tuple[types.CellType, ...]) -> list[object]:
    changing = _rebound(code)
    named = zip(code.co_freevars, cells, strict=True)
    return [_content(cell) for name, cell in named if name not in changing]


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # Its variable has no value yet.


def _rebound(code: types.CodeType) -> frozenset[str]:
    """Variables from around a function that it gives new values itself, as a counter."""
    found = _rebinding.get(code)
    if found is None:
        stores = (each for each in dis.get_instructions(code) if each.opname == "STORE_DEREF")
        found = _rebinding[code] = frozenset(each.argval for each in stores)
    return found


def _is_fixed(value: object) -> bool:
    """Whether a value stays what it is, with all that is inside."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_fixed, value))
    return isinstance(value, _FIXED) and not isinstance(value, bytearray)


def coroutine_arguments(coroutine: object) -> tuple[object, ...]:
    """What a coroutine that has not begun was called with; nothing for others."""
    if not inspect.iscoroutine(coroutine) or coroutine.cr_frame is None:
        return ()
    code, values = coroutine.cr_code, coroutine.cr_frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return tuple(values.get(name) for name in code.co_varnames[:count])


class _Reading:
    """One walk through the arguments of a call."""

    def __init__(self, *, firm_only: bool = False) -> None:
        self._firm_only = firm_only
        self._nodes = 0
        self.fleeting = False

    def text(self, value: object, depth: int) -> bytes:
        """The value's type and what it holds, so that no other value has the same text."""
        self._nodes += 1
        if value is None or self._nodes > NODES_MAX or depth > DEPTH_MAX:
            content = b""
        elif isinstance(value, enum.Enum):
            content = value.name.encode()
        elif isinstance(value, _FIRM):
            content = bytes(value) if isinstance(value, bytes | bytearray) else _text(value)
        elif isinstance(value, _FLEETING):
            self.fleeting = True
            content = b"" if self._firm_only else _text(value)
        else:
            content = b"".join(self._parts(value, depth + 1))
        return b"%b %d:%b" % (type(value).__qualname__.encode(), len(content), content)

    def _parts(self, value: object, depth: int) -> Iterable[bytes]:
        if isinstance(value, _NAMED):
            return (value.__qualname__.encode(),)
        # Concrete types first: to ask for any sequence or mapping takes much longer.
        if isinstance(value, list | tuple):
            return self._items(value, depth)
        if isinstance(value, dict):
            items = value.items()
            return sorted(self.text(key, depth) + self.text(held, depth) for key, held in items)
        if isinstance(value, set | frozenset):
            return sorted(self.text(each, depth) for each in value)
        if isinstance(value, Sequence):
            return self._items(value, depth)
        if isinstance(value, Mapping):
            return self._parts(dict(value), depth)
        return [self.text(getattr(value, name, None), depth) for name in _fields(value)]

    def _items(self, values: Sequence[object], depth: int) -> Iterable[bytes]:
        """The first of them, and how many there are."""
        read = (self.text(each, depth) for each in islice(values, NODES_MAX))
        return (b"%d" % len(values), *read)


def _text(value: object) -> bytes:
    return str(value).encode(errors="surrogatepass")


def _fields(value: object) -> Iterable[str]:
    """The fields of a record; none of an object whose inside is its own affair."""
    kind = type(value)
    if isinstance(value, Struct):
        return value.__struct_fields__
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    attributes = getattr(kind, "__attrs_attrs__", None)
    if attributes is not None:
        return [str(attribute.name) for attribute in attributes]
    return list(getattr(kind, "__pydantic_fields__", ()))
