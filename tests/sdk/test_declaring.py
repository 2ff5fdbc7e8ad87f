"""Mistakes in what a program declares are found where it is written, and leave nothing behind."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from zoneinfo import ZoneInfo

import pydantic
import pytest

from flowfabric import App, Context, WorkerSettings, testing
from flowfabric.errors import InvalidInput
from flowfabric.registry import TaskOptions
from flowfabric.submission import OPTION_NAMES
from flowfabric.task import SubmitOptions, TaskSettings


def refused(refusal: str) -> "pytest.RaisesExc[InvalidInput]":
    return pytest.raises(InvalidInput, match=re.escape(refusal))


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"url": None}, "url: must be a string (got 'NoneType')"),
        ({"url": "mysql://localhost/shop"}, "url: must look like one of sqlite:///"),
        ({"url": ""}, "url: must look like one of sqlite:///"),
        *(
            ({"url": url}, f"url: needs three slashes before the path: {right} (got '{url}')")
            for url, right in (
                ("sqlite://shop.db", "sqlite:///shop.db"),
                ("sqlite:shop.db", "sqlite:///shop.db"),
                ("postgresql+embedded://data", "postgresql+embedded:///data"),
            )
        ),
        ({"url": "data/shop.db"}, "url: is a path; write sqlite:///data/shop.db"),
        ({"config": {}}, "config: must be an EngineConfig, such as EngineConfig("),
        ({"clock": 3}, "clock: needs a method now_ms() -> int"),
        (
            {"url": "postgresql+asyncpg://ada:secret@db/shop"},
            "url: names a driver; write postgresql://… (got 'postgresql+asyncpg')",
        ),
        ({"pool_max": 0}, "pool_max: must be 1 to"),
        ({"pool_max": "10"}, "pool_max: must be an integer"),
        ({"migrate": "yes"}, "migrate: must be true or false"),
        ({"listen_url": 3}, "listen_url: must be a string"),
        ({"listen_url": "sqlite:///shop.db"}, "listen_url: is for Postgres"),
        ({"namespace": None}, "namespace"),
        ({"codec": 3}, "codec: needs a method encode"),
    ],
    ids=str,
)
def test_a_wrong_setting_of_an_app_is_refused(given: Mapping[str, object], refusal: str) -> None:
    untyped: Callable[..., App] = App
    with refused(refusal):
        untyped(**given)


def test_type_checkers_know_the_options_that_are_taken() -> None:
    assert SubmitOptions.__annotations__.keys() == OPTION_NAMES
    assert list(TaskOptions.__annotations__) == [each.name for each in fields(TaskSettings)]


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"threads": 0}, "threads: must be 1 to"),
        ({"processes": "2"}, "processes: must be an integer"),
        ({"reconcile": 1}, "reconcile: must be true or false"),
    ],
    ids=str,
)
def test_a_wrong_setting_of_a_worker_is_refused(given: Mapping[str, object], refusal: str) -> None:
    untyped: Callable[..., WorkerSettings] = WorkerSettings
    with refused(refusal):
        untyped(**given)


async def test_settings_of_a_worker_are_no_dictionary() -> None:
    untyped: Callable[..., Awaitable[None]] = App("sqlite:///:memory:").run_worker
    with refused("settings: must be WorkerSettings"):
        await untyped(settings={"threads": 8})


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ("greet", "task: takes the function; to give it a name, write @app.task(name='greet')"),
        (3, "task: takes a function (got 3)"),
        (max, "task: has a signature Python cannot inspect; wrap it in a function of your own"),
        (App, "task: takes a function, not a class"),
        (partial(print, "x"), "name: is missing: only functions have their own name"),
    ],
    ids=str,
)
def test_a_task_is_made_of_a_function(given: object, refusal: str) -> None:
    app = App()
    task: Callable[..., object] = app.task
    with refused(refusal):
        task(given)
    with refused(refusal):
        schedule: Callable[..., object] = app.schedule(every="1h")
        schedule(given)
    assert not app.tasks
    assert not app.schedules


@pytest.mark.parametrize("name", ["", 3, "a@2"])
def test_a_task_has_a_name_that_is_text(name: object) -> None:
    task: Callable[..., Callable[[object], object]] = App().task
    with refused("name: must"):
        task(name=name)(lambda: None)


def test_what_is_a_task_already_is_scheduled_by_a_call() -> None:
    app = App()

    @app.task
    async def publish(ctx: Context) -> None: ...

    schedule: Callable[..., object] = app.schedule(every="1h")
    with refused("publish is a task already; app.add_schedule(…, publish(…), …)"):
        schedule(publish)


def test_a_schedule_takes_cron_by_name_and_a_zone_as_an_object() -> None:
    app = App()

    @app.schedule(cron="0 6 * * *", timezone=ZoneInfo("Europe/Rome"))
    def report(ctx: Context) -> None: ...

    (schedule,) = app.schedules
    assert (schedule.cron, schedule.timezone) == ("0 6 * * *", "Europe/Rome")


def test_a_schedule_needs_parentheses() -> None:
    app = App()

    def tidy_up() -> None: ...

    schedule: Callable[..., object] = app.schedule
    with refused('schedule: needs to know when: write @app.schedule("0 6 * * *")'):
        schedule(tidy_up)
    with refused('cron: must be text, such as "0 6 * * *" (got 6)'):
        schedule(6)


@pytest.mark.parametrize("cron", ["61 * * * *", "bad", ""])
def test_a_schedule_that_is_refused_leaves_no_task(cron: str) -> None:
    app = App()

    def tidy_up() -> None: ...

    with pytest.raises(InvalidInput):
        app.schedule(cron)(tidy_up)
    assert not app.tasks
    app.schedule("0 6 * * *")(tidy_up)
    assert [each.schedule_id for each in app.schedules] == list(app.tasks) == ["tidy_up"]


def test_a_function_with_arguments_cannot_be_scheduled_and_leaves_no_task() -> None:
    app = App()

    def greet(name: str) -> None: ...

    schedule: Callable[..., object] = app.schedule(every="1h")
    with refused("missing a required argument: 'name'"):
        schedule(greet)
    assert not app.tasks


def test_a_context_without_its_annotation_is_refused() -> None:
    task: Callable[..., Callable[[object], object]] = App().task
    with refused("argument ctx of greet: has no annotation, so it would be an argument; for"):
        task(name="greet")(lambda ctx, name: name)


def test_a_context_that_does_not_come_first_is_refused() -> None:
    app = App()
    with refused(
        "argument c of greet: is the context, which must come first: def greet(c: Context, …)"
    ):

        @app.task
        async def greet(name: str, c: Context) -> None: ...

    assert not app.tasks


@pytest.mark.parametrize("around", ["traced", lambda: None, lambda ctx: None], ids="abc")
def test_middleware_takes_a_context_and_a_call(around: object) -> None:
    untyped: Callable[..., object] = App().middleware
    with refused("middleware: "):
        untyped(around)


def test_where_a_call_is_needed_a_task_is_refused(tmp_path: object) -> None:
    app = App(f"sqlite:///{tmp_path}/calls.db")

    @app.task
    async def publish(ctx: Context, article_id: int) -> None: ...

    add: Callable[..., object] = app.add_schedule
    with refused("call: is a task without arguments; call it, as in publish(…)"):
        add("nightly", publish, every="1h")
    with refused("call: must be a call of a task, such as publish(42)"):
        add("nightly", "publish", every="1h")
    many: Callable[..., Awaitable[object]] = app.submit_many
    blocking: Callable[..., object] = app.blocking.submit_many

    async def submit(calls: object) -> None:
        await many(calls)

    for each in (lambda calls: asyncio.run(submit(calls)), blocking):
        with refused("calls[1]: is a task without arguments; call it, as in publish(…)"):
            each([publish(1), publish])
        with refused("calls: must be a list, such as [publish(1), publish(2)]"):
            each(publish(1))
    with refused("run: takes the task itself"):
        run: Callable[..., object] = app.blocking.run
        run("publish", "order-42")
    assert not app.schedules
    app.blocking.close()


async def test_what_was_submitted_is_asked_by_the_task() -> None:
    async with testing.engine() as app:
        submitted: Callable[..., Awaitable[object]] = app.submitted
        with refused("submitted: takes the task itself, as @app.task returns it (got 'publish')"):
            await submitted("publish")


class Point(pydantic.BaseModel):
    x: int


def test_a_model_that_is_no_object_is_refused_in_one_sentence() -> None:
    @App().task
    async def draw(ctx: Context, points: list[Point]) -> None: ...

    untyped: Callable[..., object] = draw
    with pytest.raises(InvalidInput, match=r"argument points\S* of draw: \w[^:]*$"):
        untyped([3])


def test_a_key_that_does_not_fit_is_refused_by_the_argument_it_is_in() -> None:
    @App().task
    async def price(ctx: Context, sizes: dict[int, str]) -> None: ...

    untyped: Callable[..., object] = price
    refusal = "argument sizes of price: has a key that does not fit: expected `int`, got `str`"
    with refused(refusal):
        untyped({"x": "a"})


def test_an_unknown_option_of_a_task_is_refused_with_those_there_are() -> None:
    options: dict[str, object] = {"retries": 3}
    every = (
        "budget, capabilities, concurrency, executor, keep, keep_failed, key, lane, limits,"
        " max_worker_deaths, name, priority, rate_limit, retry, timeout, version, while_suspended"
    )
    with refused(f"retries: is not an option of a task; those are {every}"):
        # As a program without a type checker would write it.
        getattr(App("sqlite:///shop.db"), "task")(**options)  # noqa: B009


async def test_a_call_that_is_awaited_says_that_it_has_to_be_submitted() -> None:
    app = App("sqlite:///:memory:")

    @app.task
    async def greet(name: str) -> str:
        return name

    call: object = greet("Ada")
    assert isinstance(call, Awaitable)
    with pytest.raises(TypeError, match=r"greet\(…\) is a call to submit.*app\.submit\(greet, …\)"):
        await call


TWICE = """
import asyncio
import sys

from flowfabric import App

app = App("sqlite:///:memory:")

if __name__ == "__main__":
    sys.path.insert(0, ".")
    import shop

    @shop.app.task
    async def greet() -> None: ...

    asyncio.run(app.submit(greet))
"""


def test_a_program_that_has_been_imported_as_well_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(TWICE)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "shop.py")], capture_output=True, text=True, cwd=tmp_path
    )
    assert "greet belongs to the App object of 'shop'" in ran.stderr
    assert "Python has loaded it twice" in ran.stderr


async def test_a_worker_without_tasks_says_so(caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()
    stop.set()
    await App("sqlite:///:memory:").run_worker(stop=stop)
    assert "this worker has no tasks" in caplog.text
