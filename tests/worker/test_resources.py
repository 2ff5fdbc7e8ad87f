"""Resources: whatever a factory looks like, what it makes is opened once and closed."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Protocol

import pytest

from flowfabric.errors import InvalidInput
from flowfabric.worker.resources import Resources


class Database:
    """Notes what is done with it."""

    def __init__(self) -> None:
        self.did: list[str] = []


class Closing(Database):
    def close(self) -> None:
        self.did.append("closed")


class AsyncClosing(Database):
    def close(self) -> None:
        raise AssertionError("`aclose` is there for us")

    async def aclose(self) -> None:
        self.did.append("closed")


class Pool(Closing):
    """Like those of drivers: to be awaited, or to be entered, which is better."""

    def __await__(self) -> Iterator[None]:
        raise AssertionError("it can be entered")

    async def __aenter__(self) -> "Pool":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()


@contextmanager
def managed() -> Iterator[Database]:
    database = Database()
    yield database
    database.did.append("closed")


@asynccontextmanager
async def async_managed() -> AsyncIterator[Database]:
    database = Database()
    yield database
    database.did.append("closed")


def yielding() -> Iterator[Database]:
    with managed() as database:
        yield database


async def async_yielding() -> AsyncIterator[Database]:
    async with async_managed() as database:
        yield database


async def awaited() -> Database:
    return AsyncClosing()


async def awaited_manager() -> object:
    return async_managed()


@pytest.mark.parametrize(
    "factory",
    [
        Closing,
        AsyncClosing,
        Pool,
        managed,
        async_managed,
        yielding,
        async_yielding,
        lambda: yielding(),
        awaited,
        awaited_manager,
    ],
    ids=[
        "class",
        "aclose",
        "pool",
        "manager",
        "async_manager",
        "yields",
        "async_yields",
        "lambda",
        "async",
        "async_awaited",
    ],
)
async def test_what_a_factory_makes_is_found_and_closed(factory: Callable[[], Database]) -> None:
    resources = Resources()
    resources.provide(Database, factory)
    await resources.open()
    database = resources.get(Database)
    assert database.did == []
    await resources.close()
    assert database.did == ["closed"]


async def test_what_others_go_on_using_stays_open() -> None:
    database, resources = Closing(), Resources()
    resources.provide(Database, lambda: nullcontext(database))
    await resources.open()
    assert resources.get(Database) is database
    await resources.close()
    assert database.did == []


class Loose(Protocol):
    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("kind", "factory", "refusal"),
    [
        (Database, Database(), r"takes a function that makes a Database .* lambda: …\)"),
        (Database, None, "takes a function that makes a Database"),
        ("Database", Database, "takes the class under which handlers ask for the resource"),
        (Loose, Closing, "takes the class under which handlers ask for the resource"),
        (list[int], list, "takes the class under which handlers ask for the resource"),
    ],
    ids=["object", "none", "text", "protocol", "generic"],
)
def test_what_is_no_factory_of_a_class_is_refused(
    kind: object, factory: object, refusal: str
) -> None:
    provide: Callable[..., None] = Resources().provide
    with pytest.raises(InvalidInput, match=refusal):
        provide(kind, factory)


async def test_a_factory_that_makes_something_else_is_refused_and_what_is_open_closed() -> None:
    database, resources = Closing(), Resources()
    resources.provide(Database, lambda: database)
    untyped: Callable[..., None] = resources.provide
    untyped(Pool, managed)
    with pytest.raises(InvalidInput, match="the factory of Pool returned something else"):
        await resources.open()
    assert database.did == ["closed"]
    with pytest.raises(InvalidInput, match="nothing provides Database"):
        resources.get(Database)
