"""Models as arguments, results, steps and signals, on every store."""

import io
import socket
from collections.abc import Callable, Iterator
from typing import TypedDict

import pydantic
import pytest

from flowfabric import App, Context, testing
from flowfabric.core.states import PublicState
from flowfabric.errors import InvalidInput
from tests.apps import reached, working
from tests.sdk.models import Basket, Line, Order, Price, order, price


async def test_models_of_every_kind_go_everywhere_and_come_back(waiting_app: App) -> None:
    app = waiting_app

    def bill(given: Order) -> dict[str, Price]:
        assert isinstance(given.basket, Basket)
        assert isinstance(given.basket.lines[0], Line)
        return {"total": given.basket.lines[0].price}

    @app.task
    async def check(ctx: Context, given: Order, *more: Line, tip: Price | None = None) -> Order:
        billed = await ctx.step("bill", bill, given)
        assert billed == {"total": price()}
        assert (more, tip) == ((given.basket.lines[0],), price("2"))
        answer = await ctx.wait_for_signal("paid", timeout="1h", type=Price)
        assert answer.payload == price("3")
        child = await ctx.submit(double, [given.basket])
        assert await child.result() == [given.basket, given.basket]
        return given

    @app.task
    def double(baskets: list[Basket]) -> list[Basket]:
        return baskets * 2

    async with working(app):
        run = await app.submit(check(order(), order().basket.lines[0], tip=price("2")))
        await reached(run, PublicState.SUSPENDED)
        await run.signal("paid", price("3"))
        assert await run.result(timeout="20s") == order()


async def test_a_flow_passes_models_on() -> None:
    app = App("sqlite:///never-opened.db")

    @app.task
    async def make() -> Price:
        return price()

    @app.task
    async def use(given: Price, rest: list[Price]) -> Line:
        return Line("all", given, {"rest": rest})

    async with testing.engine(app=app) as local:
        flow = local.flow("shop")
        node = flow.add(use, flow.add(make), join=[flow.add(make), flow.add(make)])
        run = await flow.start()
        await local.drain()
        assert await run.result(node) == Line("all", price(), {"rest": [price(), price()]})


async def test_a_model_that_does_not_fit_names_the_argument_and_the_field() -> None:
    app = App()

    @app.task
    async def pay(given: Price) -> None: ...

    with pytest.raises(
        InvalidInput, match=r"argument given of pay: amount: .*; at: Field required"
    ):
        pay.arguments.decode(b'{"given": {"amount": [], "cur": "EUR"}}')


async def test_numbers_json_lacks_are_refused_inside_models_too() -> None:
    class Point(pydantic.BaseModel):
        x: float

    app = App()

    @app.task
    async def plot(points: list[Point]) -> None: ...

    with pytest.raises(InvalidInput, match="NaN or infinite"):
        plot([Point(x=float("nan"))])


def generator() -> Iterator[int]:
    return iter([1])


def callback(then: Callable[[], None]) -> None: ...


def opened(connections: dict[str, list[socket.socket]]) -> None: ...


def file() -> list[io.BytesIO]:
    return []


def either(given: Price | Line) -> None: ...


class Login(pydantic.BaseModel):
    password: pydantic.SecretStr


def sign_in(logins: list[Login]) -> None: ...


def signed_in() -> Login:
    return Login(password=pydantic.SecretStr("s"))


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (generator, "the result of generator: Iterator cannot be stored"),
        (callback, "argument then of callback: Callable cannot be stored"),
        (opened, "argument connections of opened: socket cannot be stored"),
        (file, "the result of file: BytesIO cannot be stored"),
        (either, "argument given of either: cannot be stored"),
        (sign_in, "argument logins of sign_in: cannot be stored: Login.password is a secret"),
        (signed_in, "the result of signed_in: cannot be stored: Login.password is a secret"),
    ],
)
def test_what_cannot_be_stored_is_refused_when_the_task_is_declared(
    function: Callable[..., object], named: str
) -> None:
    with pytest.raises(InvalidInput, match=named):
        App().task(function)


def test_an_annotation_of_a_class_that_comes_later_is_looked_at_later() -> None:
    app = App()

    @app.task
    async def early(given: "Later") -> None: ...

    assert early({"name": "Ada"}).payload == b'{"given":{"name":"Ada"}}'


class Later(TypedDict):
    name: str
