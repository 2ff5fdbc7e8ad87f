"""A short name for the arguments of a call or branch, which tells parallel ones apart.

There are two digests: one of values that usually stay the same from run to run, and one that also
covers times and floats. A uuid may be an id or random: it is in the first only if nothing else
tells the call apart. Objects that are not plain values count by type alone. Large arguments are
read up to a limit.

A function is identified by its name and what it has bound: the object of a method, the arguments
of a partial, defaults, and the values that an inner function takes from around it. So is a
coroutine that has not begun, together with its arguments. Bound values count only if they are
immutable, or functions themselves: a list may change while the program runs. The values around a
function may be all that tells it from others. If its arguments do that, these values may be
incidental, such as a counter, and are in the second digest only.
"""

import datetime
import decimal
import dis
import enum
import hashlib
import inspect
import pathlib
import types
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from msgspec import Struct

from flowfabric.json_values import fields_of

NODES_MAX: Final = 500
"""How many values of one call are read, including those inside others."""
DEPTH_MAX: Final = 16
CHARS: Final = 12

_FIRM: Final = (
    bool, int, str, bytes, bytearray, decimal.Decimal, datetime.timedelta, pathlib.PurePath
)  # fmt: skip
_FLEETING: Final = (float, complex, datetime.date, datetime.time)
_NAMED: Final = (
    type,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
"""Known by their names."""
_BINDING: Final = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.CoroutineType,
    partial,
)
"""Known by their names and what they have bound."""
_PLAIN: Final = (*_FIRM, *_FLEETING, uuid.UUID, enum.Enum)
_FIXED: Final = (*_PLAIN, type(None), type)
"""Types whose values nobody can change; bytearray is not one."""
_rebinding: "weakref.WeakKeyDictionary[types.CodeType, frozenset[str]]" = (
    weakref.WeakKeyDictionary()
)


class KnownBy(NamedTuple):
    """What distinguishes a call or a branch from others of its name."""

    digest: str
    """`firm`, or `firm.full` when some of the values may change from run to run."""
    opaque: tuple[object, ...] = ()
    """The contents that the digest does not cover."""
    is_vague: bool = False
    """It contains nothing else."""
    tells: bool = False
    """It was read completely, and something in it stays the same in every run."""
    says_all: bool = False
    """It was read completely and stays the same: equal name and digest mean equal values."""


BY_NAME: Final = KnownBy("")


def known_by(*values: object) -> KnownBy:
    """What distinguishes a call, by its function and arguments, or a branch, by its coroutine."""
    reading = _Reading()
    digest = _digest(reading.text(values, 0))
    alone = not reading.tells
    if reading.fleeting or ((reading.tells_around or reading.has_uuids) and not alone):
        firm = _digest(_Reading(firm_only=True, alone=alone).text(values, 0))
        digest = digest if firm == digest else f"{firm}.{digest}"
    tells = reading.tells or reading.tells_around or reading.has_uuids
    vague = bool(reading.opaque) and not tells
    says_all = reading.is_complete and "." not in digest
    says_all = says_all and not (reading.opaque or reading.has_lambdas)
    return KnownBy(digest, tuple(reading.opaque), vague, tells and reading.is_complete, says_all)


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:CHARS]


class Parts(NamedTuple):
    """What a function, or a coroutine that has not begun, carries with it."""

    arguments: tuple[object, ...] = ()
    bound: tuple[object, ...] = ()
    around: tuple[object, ...] = ()
    """The values of variables from around it."""


def parts_of(function: object) -> Parts:
    if isinstance(function, types.FunctionType):
        code, cells, bound = function.__code__, function.__closure__, function.__defaults__ or ()
        if cells is None:
            return Parts(bound=bound)
        values = {name: _content(cell) for name, cell in zip(code.co_freevars, cells, strict=True)}
        return Parts(bound=bound, around=_around(code, values))
    if isinstance(function, partial):
        return Parts(bound=(function.func, *function.args, *function.keywords.values()))
    if inspect.ismethod(function):
        return Parts(bound=(function.__func__, function.__self__))
    if inspect.isbuiltin(function):
        return Parts(bound=(function.__self__,))
    if not inspect.iscoroutine(function) or function.cr_frame is None or function.cr_suspended:
        return Parts()
    code, values = function.cr_code, function.cr_frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    arguments = tuple(values.get(name) for name in code.co_varnames[:count])
    return Parts(arguments, around=_around(code, values))


def _around(code: types.CodeType, values: Mapping[str, object]) -> tuple[object, ...]:
    if not code.co_freevars:
        return ()
    changing = _rebound(code)
    return tuple(values.get(name) for name in code.co_freevars if name not in changing)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # Its variable has no value yet.


def _rebound(code: types.CodeType) -> frozenset[str]:
    """Variables from around a function that it assigns itself, such as a counter."""
    rebound = _rebinding.get(code)
    if rebound is None:
        stores = (each for each in dis.get_instructions(code) if each.opname == "STORE_DEREF")
        rebound = _rebinding[code] = frozenset(each.argval for each in stores)
    return rebound


def _is_fixed(value: object) -> bool:
    """Whether a value and everything inside it stay as they are."""
    # The usual types first, as in `_Reading.text`.
    if type(value) in (int, str):
        return True
    if isinstance(value, tuple | frozenset):
        return all(map(_is_fixed, value))
    if isinstance(value, _FIXED):
        return not isinstance(value, bytearray)
    return _is_frozen(type(value)) and all(
        _is_fixed(getattr(value, name, None)) for name in _fields(value)
    )


def _is_frozen(kind: type) -> bool:
    """Whether it is a class of records that nobody can change."""
    if issubclass(kind, Struct):
        return kind.__struct_config__.frozen
    parameters: object = getattr(kind, "__dataclass_params__", None)
    return bool(getattr(parameters, "frozen", False))


class _Reading:
    """One walk through the arguments of a call."""

    __slots__ = (
        "_alone", "_firm_only", "_functions", "_inside_around", "_nodes", "fleeting",
        "has_lambdas", "has_uuids", "opaque", "tells", "tells_around"
    )  # fmt: skip

    def __init__(self, *, firm_only: bool = False, alone: bool = True) -> None:
        """`firm_only` omits times and floats and, unless they are `alone`, uuids and what comes
        from around functions."""
        self._firm_only = firm_only
        self._alone = alone
        self._inside_around = 0
        self._nodes = 0
        self._functions: set[int] = set()
        self.fleeting = False
        self.has_uuids = False
        self.tells = False
        """Whether an argument stays the same in every run."""
        self.tells_around = False
        """Whether something from around a function does."""
        self.opaque: list[object] = []
        self.has_lambdas = False
        """Functions whose names say nothing of what they do."""

    def text(self, value: object, depth: int) -> bytes:
        """The value's type and what it holds, so that no other value has the same text."""
        self._nodes += 1
        kind = type(value)
        if value is None or self._nodes > NODES_MAX or depth > DEPTH_MAX:
            content = b""
        # The usual types first: checking for any other kind takes much longer.
        elif kind is str or kind is int:
            self._note_telling()
            content = _text(value)
        elif kind is tuple or kind is dict:
            content = b"".join(self._parts(value, depth + 1))
        elif isinstance(value, _BINDING):
            content = b"".join(self._function(value, depth + 1))
        elif isinstance(value, _PLAIN):
            content = self._plain(value)
        else:
            content = b"".join(self._parts(value, depth + 1))
        return b"%b %d:%b" % (kind.__qualname__.encode(), len(content), content)

    @property
    def is_complete(self) -> bool:
        return self._nodes <= NODES_MAX

    def _note_telling(self) -> None:
        if self._inside_around:
            self.tells_around = True
        else:
            self.tells = True

    def _plain(self, value: object) -> bytes:
        if isinstance(value, _FLEETING):
            self.fleeting = True
            return b"" if self._firm_only else _text(value)
        if isinstance(value, uuid.UUID):
            self.has_uuids = True
            return _text(value) if self._alone else b""
        self._note_telling()
        if isinstance(value, enum.Enum):
            return value.name.encode()
        return bytes(value) if isinstance(value, bytes | bytearray) else _text(value)

    def _function(self, value: object, depth: int) -> list[bytes]:
        """Its name and, the first time, its arguments and what it has bound."""
        name = str(getattr(value, "__qualname__", ""))
        self.has_lambdas |= name.endswith("<lambda>")
        texts = [name.encode()]
        if id(value) in self._functions:
            return texts
        self._functions.add(id(value))
        arguments, bound, around = parts_of(value)
        texts += [self.text(each, depth) for each in arguments]
        self._add_fixed(texts, bound, depth)
        if around and self._alone:
            self._inside_around += 1
            self._add_fixed(texts, around, depth)
            self._inside_around -= 1
        return texts

    def _add_fixed(self, texts: list[bytes], bound: tuple[object, ...], depth: int) -> None:
        for each in bound:
            if isinstance(each, _BINDING) or _is_fixed(each):
                texts.append(self.text(each, depth))
            else:
                self.opaque.append(each)

    def _parts(self, value: object, depth: int) -> Iterable[bytes]:
        # Concrete types first: checking for any sequence or mapping takes much longer.
        if isinstance(value, tuple | list):
            return self._items(value, depth)
        if isinstance(value, dict):
            items = value.items()
            return sorted([self.text(key, depth) + self.text(held, depth) for key, held in items])
        if isinstance(value, _NAMED):
            return (value.__qualname__.encode(),)
        if isinstance(value, set | frozenset):
            return sorted(self.text(each, depth) for each in value)
        if isinstance(value, Sequence):
            return self._items(value, depth)
        if isinstance(value, Mapping):
            return self._parts(dict(value), depth)
        fields = _fields(value)
        if not fields:
            self.opaque.append(value)
        return [self.text(getattr(value, name, None), depth) for name in fields]

    def _items(self, values: Sequence[object], depth: int) -> Iterable[bytes]:
        """The first of them, and how many there are."""
        return [
            b"%d" % len(values),
            *[self.text(each, depth) for each in islice(values, NODES_MAX)],
        ]


def _text(value: object) -> bytes:
    return str(value).encode(errors="surrogatepass")


def _fields(value: object) -> Sequence[str]:
    """The fields of a record; none for an object whose contents are private."""
    kind: type = type(value)
    return fields_of(kind)[0] or list(getattr(kind, "__pydantic_fields__", ()))
