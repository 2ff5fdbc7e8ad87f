"""What people pass around: one class of every kind, nested in each other."""

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

import attrs
import msgspec
import pydantic


class Price(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    amount: Decimal
    currency: str = pydantic.Field("EUR", alias="cur")
    at: datetime


@dataclass
class Line:
    item: str
    price: Price
    notes: dict[str, list[Price]]


@attrs.define
class Basket:
    lines: list[Line]
    _number: int = 0


class Order(msgspec.Struct):
    basket: Basket
    discount: Price | None = None


def price(amount: str = "9.95") -> Price:
    return Price(amount=Decimal(amount), cur="CHF", at=datetime(2026, 3, 29, tzinfo=UTC))


def order() -> Order:
    line = Line("tea", price(), {"before": [price("12")]})
    return Order(Basket([line], number=7), price("1"))
