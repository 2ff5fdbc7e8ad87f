"""What tells the arguments of parallel calls apart."""

import asyncio
import dataclasses
import enum
import uuid
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import PurePath

import msgspec
import pytest

from flowfabric.core.journal import firm
from flowfabric.worker.digests import KnownBy, Parts, known_by, parts_of


def digest_of(*values: object) -> str:
    return known_by(*values).digest


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: object
    y: object = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: object


class Row(msgspec.Struct):
    key: str


class Key(msgspec.Struct, frozen=True):
    key: str


class Opaque:
    def __init__(self, inside: int) -> None:
        self.inside = inside


def closing_over(value: object) -> Callable[[], object]:
    return lambda: value


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
    (PurePath("a"),),
    (PurePath("b"),),
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


def test_a_uuid_alone_tells_which_call_it_is() -> None:
    one, other = uuid.uuid4(), uuid.uuid4()
    assert firm(digest_of(one)) != firm(digest_of(other))
    assert [known_by(*values).tells for values in ((one,), (1.5,), (one, 1.5))] == [
        True,
        False,
        True,
    ]


def test_what_has_no_order_is_read_in_one() -> None:
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of({"x", "y", "z"}) == digest_of({"z", "y", "x"})


def test_the_inside_of_other_objects_does_not_count() -> None:
    one, other = Opaque(1), Opaque(2)
    assert known_by(one, [other]) == KnownBy(digest_of(other, [one]), (one, other), is_vague=True)
    assert known_by(one, "a") == KnownBy(digest_of(other, "a"), (one,), tells=True)


def test_what_was_not_read_to_its_end_tells_nothing_for_sure() -> None:
    assert [known_by([7] * count).tells for count in (400, 600)] == [True, False]


def test_functions_that_know_each_other_are_read_once() -> None:
    def one() -> object:
        return other

    def other() -> object:
        return one

    assert known_by(one) == known_by(one) != known_by(other)


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
    assert parts_of(coroutine) == Parts((1, 4, (2, 3), {"x": 5}))
    coroutine.close()
    assert parts_of(coroutine) == Parts()


def branch_of(value: object) -> Callable[[], Coroutine[object, object, object]]:
    async def branch() -> object:
        return value

    return branch


@pytest.mark.parametrize(
    ("one", "other"),
    [("ada", "bob"), (Frozen("ada"), Frozen("bob")), (closing_over(1), closing_over(2))],
)
async def test_what_a_coroutine_has_bound_tells_it_from_others(one: object, other: object) -> None:
    coroutines = [branch_of(value)() for value in (one, one, other)]
    first, again, different = (known_by(each) for each in coroutines)
    assert first == again != different
    assert (first.opaque, different.opaque) == ((), ())
    assert known_by(coroutines[0], 1) != known_by(coroutines[2], 1), "also as an argument"
    for each in coroutines:
        each.close()


def test_what_comes_from_around_a_function_is_second_to_its_arguments() -> None:
    one, other = known_by(closing_over(1), "ada").digest, known_by(closing_over(2), "ada").digest
    assert one != other
    assert firm(one) == firm(other) != firm(known_by(closing_over(1), "bob").digest)
    assert firm(known_by(partial(int, 1), "ada").digest) != firm(
        known_by(partial(int, 2), "ada").digest
    )


async def test_a_coroutine_that_has_begun_tells_nothing_but_its_name() -> None:
    async def branch(value: str) -> None:
        await asyncio.Event().wait()

    coroutines = [branch("ada"), branch("bob")]
    for each in coroutines:
        each.send(None)
    one, other = (known_by(each) for each in coroutines)
    assert one == other
    for each in coroutines:
        each.close()


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
        (closing_over, Frozen("ada"), Frozen("bob")),
        (closing_over, Key("ada"), Key("bob")),
        (lambda value: closing_over(closing_over(value)), "ada", "bob"),
        (partial(partial, partial), closing_over, inner),
    ],
)
def test_what_a_function_has_bound_tells_it_from_others(
    bind: Callable[[object], Callable[..., object]], one: object, other: object
) -> None:
    assert known_by(bind(one)) == known_by(bind(one)) != known_by(bind(other))
    assert known_by(bind(one)).opaque == ()


@pytest.mark.parametrize("one", [["ada"], {"name": "ada"}, Point(1), Opaque(1), bytearray(b"a")])
def test_what_may_change_while_a_function_has_it_tells_nothing(one: object) -> None:
    other = type(one)(1) if isinstance(one, Point | Opaque) else type(one)()
    assert known_by(closing_over(one)).digest == known_by(closing_over(other)).digest
    assert known_by(closing_over(one)).opaque == (one,)


def test_a_variable_that_a_function_changes_itself_does_not_count() -> None:
    count = 0

    def function() -> None:
        nonlocal count
        count += 1

    before = known_by(function)
    function()
    assert known_by(function) == before
    assert before.opaque == ()


def test_a_variable_without_a_value_is_no_obstacle() -> None:
    def function() -> object:
        return later

    assert known_by(function).digest
    later = 1
    assert function() == 1
