"""What tells the arguments of parallel calls apart."""

import asyncio
import dataclasses
import enum
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial

import msgspec
import pytest

from flowfabric.core.journal import firm
from flowfabric.worker.functions import coroutine_arguments, digest_of, function_digest, opaque_in


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: object
    y: object = 0


class Row(msgspec.Struct):
    key: str


class Opaque:
    def __init__(self, inside: int) -> None:
        self.inside = inside


DIFFERENT = [
    (),
    (None,),
    (True,),
    (1,),
    ("1",),
    (b"1",),
    ("a", "b"),
    ("ab",),
    (["a"],),
    (("a",),),
    ({"a": 1},),
    ({"a": 2},),
    ({1, 2},),
    (Colour.RED,),
    (Colour.BLUE,),
    (Decimal(1),),
    (timedelta(1),),
    (Point(1),),
    (Point(2),),
    (Row("a"),),
    (Row("b"),),
    (digest_of,),
    (firm,),
    (Opaque(1),),
    ([[1], 2],),
    ([1, [2]],),
]


def test_different_values_have_different_digests() -> None:
    digests = [digest_of(*values) for values in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT)
    assert [digest_of(*values) for values in DIFFERENT] == digests


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (datetime.now(UTC), datetime(2000, 1, 1, tzinfo=UTC)),
        (1.5, 2.5),
        (uuid.uuid4(), uuid.uuid4()),
        (Point(1.5), Point(2.5)),
        ({"at": 1.5}, {"at": 2.5}),
    ],
)
def test_times_floats_and_uuids_count_only_in_the_second_part(one: object, other: object) -> None:
    assert digest_of("a", one) != digest_of("a", other)
    assert firm(digest_of("a", one)) == firm(digest_of("a", other))
    assert firm(digest_of("a", one)) != firm(digest_of("b", one))


def test_what_has_no_order_is_read_in_one() -> None:
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of({"x", "y", "z"}) == digest_of({"z", "y", "x"})


def test_the_inside_of_other_objects_does_not_count() -> None:
    assert digest_of(Opaque(1)) == digest_of(Opaque(2))


def test_endless_and_huge_values_end() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert digest_of(endless)
    assert digest_of(list(range(100_000)))
    assert digest_of(range(10**18)) != digest_of(range(10**18 + 1))


async def test_the_arguments_of_a_coroutine_are_those_it_was_called_with() -> None:
    async def fetch(first: int, *more: int, last: int = 0, **rest: int) -> None:
        inner = first
        await asyncio.sleep(inner)

    coroutine = fetch(1, 2, 3, last=4, x=5)
    assert coroutine_arguments(coroutine) == (1, 4, (2, 3), {"x": 5})
    coroutine.close()
    assert coroutine_arguments(coroutine) == ()


def closing_over(value: object) -> Callable[[], object]:
    return lambda: value


def inner(value: object) -> Callable[[], object]:
    def function() -> object:
        return value

    return function


@pytest.mark.parametrize(
    ("bind", "one", "other"),
    [
        (closing_over, "ada", "bob"),
        (closing_over, ("ada", 1), ("ada", 2)),
        (inner, Colour.RED, Colour.BLUE),
        (partial(partial, int), "1", "2"),
        (lambda value: value.upper, "ada", "bob"),
    ],
)
def test_what_a_function_has_bound_tells_it_from_others(
    bind: Callable[[object], Callable[..., object]], one: object, other: object
) -> None:
    assert function_digest(bind(one), ()) == function_digest(bind(one), ())
    assert function_digest(bind(one), ()) != function_digest(bind(other), ())
    assert opaque_in(bind(one)) == ()


@pytest.mark.parametrize("one", [["ada"], {"name": "ada"}, Point(1), Opaque(1), bytearray(b"a")])
def test_what_may_change_while_a_function_has_it_tells_nothing(one: object) -> None:
    other = type(one)(1) if isinstance(one, Point | Opaque) else type(one)()
    assert function_digest(closing_over(one), ()) == function_digest(closing_over(other), ())
    assert opaque_in(closing_over(one)) == (one,)


def test_a_variable_that_a_function_changes_itself_does_not_count() -> None:
    count = 0

    def function() -> None:
        nonlocal count
        count += 1

    before = function_digest(function, ())
    function()
    assert function_digest(function, ()) == before
    assert opaque_in(function) == ()


def test_a_variable_without_a_value_is_no_obstacle() -> None:
    def function() -> object:
        return later

    assert function_digest(function, ())
    later = 1
    assert function() == 1
