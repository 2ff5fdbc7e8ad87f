"""What a program declares is refused where it is written, not where a worker comes across it."""

import inspect
from collections.abc import Iterable
from typing import Final, TypeVar

from flowfabric.config import EngineConfig
from flowfabric.core.checks import check_bool, check_int
from flowfabric.errors import InvalidInput
from flowfabric.store.urls import POSTGRES, check_url
from flowfabric.task import Call, Task

R = TypeVar("R")

POOL_MAX: Final = 10_000


def check_app(
    *,
    url: object,
    config: object,
    clock: object,
    pool_max: object,
    migrate: object,
    listen_url: object,
) -> None:
    """What an app is made with, its namespace and its codec apart."""
    check_url(url)
    if not isinstance(config, EngineConfig | None):
        raise InvalidInput("config", 'must be an EngineConfig, such as EngineConfig(keep="3d")')
    if clock is not None and not callable(getattr(clock, "now_ms", None)):
        raise InvalidInput("clock", "needs a method now_ms() -> int", clock)
    check_int("pool_max", pool_max, 1, POOL_MAX)
    check_bool("migrate", migrate)
    if listen_url is not None and not check_url(listen_url, "listen_url").startswith(POSTGRES):
        raise InvalidInput("listen_url", "is for Postgres: postgresql://…")


def check_function(given: object) -> None:
    """What `@app.task` and `@app.schedule` make a task of."""
    if isinstance(given, str):
        raise InvalidInput(
            "task", f"takes the function; to give it a name, write @app.task(name={given!r})"
        )
    if isinstance(given, Task):
        raise InvalidInput(
            "task",
            f"{given.name} is a task already; app.add_schedule(…, {given.name}(…), …) runs it by"
            " the clock",
        )
    if not callable(given):
        raise InvalidInput("task", "takes a function", given)
    try:
        inspect.signature(given)
    except ValueError:
        problem = "has parameters that Python cannot tell; call it in a function of your own"
        raise InvalidInput("task", problem, given) from None


def check_cron(given: object) -> None:
    """What `@app.schedule` is called with, or what it is put on without being called."""
    if callable(given):
        raise InvalidInput(
            "schedule",
            'needs to know when: write @app.schedule("0 6 * * *") or @app.schedule(every="10m")',
        )
    if not isinstance(given, str | None):
        raise InvalidInput("cron", 'must be text, such as "0 6 * * *"', given)


def check_middleware(around: object) -> None:
    if not callable(around):
        raise InvalidInput("middleware", "takes a coroutine function", around)
    try:
        inspect.signature(around).bind(None, None)
    except TypeError:
        raise InvalidInput(
            "middleware", "is called with a context and the call: async def traced(ctx, call)"
        ) from None
    except ValueError:
        # Python does not know the signature of every builtin.
        return


def check_task(field: str, given: object) -> None:
    if not isinstance(given, Task):
        raise InvalidInput(field, "takes the task itself, which @app.task has made", given)


def check_call(field: str, given: object) -> None:
    if isinstance(given, Task):
        raise InvalidInput(
            field, f"is a task without its arguments; call it, as in {given.name}(…)", given
        )
    if not isinstance(given, Call):
        raise InvalidInput(field, "must be a call of a task, such as publish(42)", given)


def check_calls(calls: Iterable[Call[R]]) -> list[Call[R]]:
    given: object = calls
    if isinstance(given, Call | Task | str) or not isinstance(given, Iterable):
        raise InvalidInput("calls", "must be a list, such as [publish(1), publish(2)]", given)
    checked = list(calls)
    if {Call}.issuperset(map(type, checked)):
        return checked
    for number, each in enumerate(checked):
        check_call(f"calls[{number}]", each)
    return checked
