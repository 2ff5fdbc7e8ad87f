"""Exceptions of steps, stored and made again: the same, or a stand-in, or `StepFailed`."""

import dataclasses
import enum
import json
import re
import socket
import sqlite3
import subprocess
import urllib.error
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from email.message import Message
from typing import ClassVar
from uuid import UUID

import asyncpg
import attrs
import httpx
import msgspec
import psycopg
import psycopg2
import pydantic
import pytest
import sqlalchemy.exc
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.errors import InvalidInput, StepFailed, Transport
from flowfabric.worker.failures import encode_failure, rebuilt


class WithAttribute(Exception):
    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class ByKeyword(Exception):
    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code

    def __str__(self) -> str:
        return f"{self.args[0]} ({self.code})"


class WithoutSuper(Exception):
    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class WithSlots(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__("told otherwise")


class Computed(Exception):
    def __init__(self, amount: str) -> None:
        super().__init__(amount)
        self.amount = Decimal(amount)


class OwnNew(Exception):
    def __new__(cls, one: int, other: int) -> "OwnNew":
        return super().__new__(cls, one, other)


@attrs.define
class WithAttrs(Exception):
    code: int
    why: str


@dataclasses.dataclass
class WithDataclass(Exception):
    code: int
    why: str


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class OwnGroup(ExceptionGroup[ValueError]):
    pass


class Holder(Exception):
    """Holds what cannot be stored."""

    def __init__(self, text: str, held: object) -> None:
        super().__init__(text)
        self.held = held
        self.code = 7

    def __str__(self) -> str:
        return f"{self.args[0]}: {type(self.held).__name__}"

    __repr__ = __str__


class Counted(Exception):
    """Knows the classes derived from it."""

    derived: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        cls.derived.append(cls)

    def __init__(self, held: object) -> None:
        super().__init__("counted")
        self.held = held


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class NeverEqual:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    def __hash__(self) -> int:
        return 0


class Colour(enum.StrEnum):
    RED = "red"


class Priced(pydantic.BaseModel):
    price: int


def raised(call: Callable[..., object], *args: object, **kwargs: object) -> Exception:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error.with_traceback(None)
    raise AssertionError("raises nothing")


def noted() -> Exception:
    error = ValueError("n")
    error.add_note("a note")
    return error


SAME = [
    ValueError("no"),
    ValueError(),
    ValueError((1, 2), {"a": [1]}, None, True, 1.5, b"by"),
    ValueError("\ud800\x00"),
    ValueError(2**80),
    KeyError("a", 1),
    raised({}.__getitem__, (1, 2)),
    WithAttribute("m", code=7),
    ByKeyword("m", code=3),
    WithoutSuper(7),
    WithSlots(4),
    Computed("1.50"),
    OwnNew(1, 2),
    WithAttrs(1, "w"),
    WithDataclass(1, "w"),
    Frozen(1),
    noted(),
    raised(open, "/nonexistent/x"),
    raised(bytes.decode, b"\xff", "utf8"),
    raised("\ud800".encode),
    raised(compile, "a b", "f", "exec"),
    raised(__import__, "nonexistent_module"),
    raised(json.loads, "{"),
    raised(subprocess.run, ["false"], check=True),
    subprocess.TimeoutExpired(["sleep", "9"], 0.1, output=b"out"),
    socket.gaierror(-2, "Name"),
    raised(zoneinfo.ZoneInfo, "No/Where"),
    raised(sqlite3.connect(":memory:").execute, "selec"),
    raised(msgspec.json.decode, b"{"),
    raised(msgspec.convert, "x", int),
    raised(Priced, price="x"),
    psycopg.errors.UniqueViolation("dup"),
    asyncpg.UniqueViolationError("dup"),
    ExceptionGroup("g", [ValueError(1), ExceptionGroup("h", [ByKeyword("m", code=3)])]),
    OwnGroup("g", [ValueError(1)]),
    InvalidInput("field", "is wrong", 7),
]  # fmt: skip

STOOD_IN_FOR = [
    Transport("op", "detail"),
    psycopg2.IntegrityError("dup"),
    ValueError("x" * 20_000),
    ValueError(float("nan")),
    ValueError(10**5_000),
    ValueError(Decimal("1.5")),
    ValueError(Colour.RED),
    KeyError(UUID(int=5)),
    Holder("m", object()),
    Holder("m", NeverEqual()),
    NoText("x"),
    raised(httpx.Response(500, request=httpx.Request("GET", "http://x")).raise_for_status),
    httpx.ConnectError("nope", request=httpx.Request("GET", "http://x")),
    sqlalchemy.exc.IntegrityError("stmt", {}, ValueError("dup")),
    urllib.error.HTTPError("http://x", 404, "nf", Message(), None),
    ExceptionGroup("g", [Holder("m", object())]),
]  # fmt: skip


def named(error: Exception) -> str:
    return type(error).__name__


def text_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"<its text cannot be had: {type(failure).__name__}>"


def held(error: Exception) -> dict[str, str]:
    """All that can be asked of an exception, but for methods and what the stored one adds."""
    found = {name: getattr(error, name, "none") for name in dir(error)}
    return {
        name: re.sub(" at 0x[0-9a-f]+", "", repr(value))
        for name, value in found.items()
        if not callable(value) and not name.startswith("__")
    }


@pytest.mark.parametrize("error", SAME, ids=named)
def test_what_can_be_made_again_is_the_same(error: Exception) -> None:
    again = rebuilt("charge", encode_failure(error))
    assert type(again) is type(error)
    assert (str(again), repr(again)) == (str(error), repr(error))
    assert held(again) == held(error)
    assert again.__notes__ == [
        *getattr(error, "__notes__", ()),
        "stored by an earlier run, as the failure of step charge",
    ]


@pytest.mark.parametrize("error", STOOD_IN_FOR, ids=named)
def test_a_stand_in_has_the_class_and_the_text(error: Exception) -> None:
    again = rebuilt("charge", encode_failure(error))
    assert isinstance(again, type(error))
    assert type(again).__name__ == type(error).__name__
    expected = text_of(error)
    assert str(again) == expected if len(expected) < 8_000 else expected.startswith(str(again)[:-1])
    assert repr(again)
    with pytest.raises(type(error)):
        raise again
    third = rebuilt("charge", encode_failure(again))
    assert (isinstance(third, type(error)), str(third)) == (True, str(again))


def test_a_stand_in_has_what_is_plain_and_says_what_it_lacks() -> None:
    again = rebuilt("charge", encode_failure(Holder("m", object())))
    assert isinstance(again, Holder)
    assert (again.code, again.args, str(again)) == (7, ("m",), "m: object")
    with pytest.raises(
        AttributeError, match="this Holder has no held: it comes from an earlier run"
    ):
        _ = again.held


def test_a_stand_in_does_not_look_for_what_it_lacks_where_its_class_would() -> None:
    error = urllib.error.HTTPError("http://x", 404, "nf", Message(), None)
    again = rebuilt("charge", encode_failure(error))
    assert isinstance(again, urllib.error.HTTPError)
    assert (again.code, again.reason, again.filename) == (404, "nf", "http://x")
    with pytest.raises(AttributeError, match="this HTTPError has no nothing_of_the_kind"):
        getattr(again, "nothing_of_the_kind")  # noqa: B009


def test_a_stand_in_is_none_of_the_classes_a_program_has() -> None:
    again = rebuilt("charge", encode_failure(Counted(object())))
    assert isinstance(again, Counted)
    assert Counted.derived == []


def test_what_a_group_holds_is_found_by_its_class() -> None:
    seen: list[object] = []
    try:
        raise rebuilt("charge", encode_failure(ExceptionGroup("g", [KeyError(1), OSError(2, "x")])))
    except* KeyError as group:
        seen.append(group.exceptions[0].args)
    except* OSError as group:
        seen.append(group.exceptions[0].args)
    assert seen == [(1,), (2, "x")]


class Local:
    class Nested(Exception):
        pass


def unfindable() -> list[Exception]:
    class Inside(Exception):
        pass

    nameless = type("Nameless", (Exception,), {"__module__": None})
    hidden = type("Local", (Exception,), {"__module__": __name__})
    return [
        Inside("in"),
        nameless("t"),
        hidden("h"),
        raised(Priced, price=object()),
        ExceptionGroup("g", [ValueError(n) for n in range(100)]),
    ]


@pytest.mark.parametrize("error", unfindable(), ids=named)
def test_what_cannot_be_found_or_stood_in_for_is_a_failed_step(error: Exception) -> None:
    again = rebuilt("charge", encode_failure(error))
    assert isinstance(again, StepFailed)
    assert again.message == str(error)
    assert type(error).__name__ in again.type_name


def test_a_nested_class_is_found() -> None:
    assert type(rebuilt("s", encode_failure(Local.Nested("n")))) is Local.Nested


def test_a_class_that_has_changed_since_is_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = encode_failure(WithoutSuper(7))
    monkeypatch.setattr(WithoutSuper, "__str__", lambda error: f"number {error.number}")
    again = rebuilt("charge", stored)
    assert isinstance(again, WithoutSuper)
    assert (str(again), again.code) == ("code 7", 7)


def test_a_class_that_is_gone_is_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = encode_failure(WithoutSuper(7))
    monkeypatch.delattr(f"{__name__}.WithoutSuper")
    assert str(rebuilt("charge", stored)) == "step charge: WithoutSuper: code 7"


class Anything(Exception):
    """Takes anything, and keeps some of it."""

    def __init__(self, *args: object, **held: object) -> None:
        super().__init__(*args)
        vars(self).update(held)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=6,
)
values = plain | st.sampled_from([object(), Decimal(1), Colour.RED, NeverEqual()])
kinds = st.sampled_from([ValueError, KeyError, OSError, ImportError, Anything, ExceptionGroup])


@given(
    kind=kinds,
    args=st.lists(values, max_size=4),
    attributes=st.dictionaries(st.text("abc_", min_size=1), values, max_size=3),
)
def test_whatever_an_exception_holds_it_comes_back_with_its_class_and_text(
    kind: type[Exception], args: list[object], attributes: dict[str, object]
) -> None:
    try:
        error = kind("g", [ValueError(*args)]) if kind is ExceptionGroup else kind(*args)
        vars(error).update(attributes)
        text = str(error)
    except Exception:
        return
    again = rebuilt("charge", encode_failure(error))
    assert isinstance(again, kind)
    assert str(again) == text.replace("\x00", "\\0")
    if type(again) is kind:
        ours = {name: value for name, value in vars(again).items() if name != "__notes__"}
        assert repr((again.args, ours)) == repr((error.args, attributes))
    for name in attributes:
        stands_in = isinstance(again, kind) and type(again) is not kind
        assert stands_in or getattr(again, name) == attributes[name]
