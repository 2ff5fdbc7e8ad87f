"""Private fields of attrs classes are stored like others."""

from dataclasses import dataclass

import attrs
import pytest
from msgspec import Struct

from flowfabric.json_values import encode_value, read_as, with_private_fields


@attrs.define
class Account:
    owner: str
    _balance: int = 0


@attrs.define(slots=False, frozen=True)
class Required:
    _number: int


@attrs.define
class Late:
    _made: int = attrs.field(init=False)


@attrs.define
class Public:
    accounts: list[Account]


@dataclass(frozen=True)
class Data:
    accounts: dict[str, Account]
    _own: int = 5


class Record(Struct, frozen=True, rename="camel"):
    first_account: Account
    other: tuple[int, Public]


def account(balance: int = 4) -> Account:
    return Account("ada", balance)


VALUES = [
    (account(), Account),
    (Required(7), Required),
    ([account(1), account(2)], list[Account]),
    ({"a": [account()]}, dict[str, list[Account]]),
    ((account(), 1), tuple[Account, int]),
    ({Required(7), Required(8)}, set[Required]),
    (Public([account()]), Public),
    (Data({"a": account()}), Data),
    (Record(account(), (1, Public([account(8)]))), Record),
]


@pytest.mark.parametrize(("value", "kind"), VALUES)
def test_private_fields_come_back_as_they_were(value: object, kind: object) -> None:
    before = repr(value)
    assert read_as(encode_value("it", value), kind) == value
    assert repr(value) == before


def test_a_private_field_is_stored_by_its_name() -> None:
    assert encode_value("it", Required(7)) == b'{"_number":7}'
    assert encode_value("it", Late()) == b"{}"


@pytest.mark.parametrize(
    "value", [1, [1, {"a": (2, None)}], Public([]), Data({}), {"deep": [Public([])]}]
)
def test_nothing_is_copied_without_need(value: object) -> None:
    assert with_private_fields(value) is value
