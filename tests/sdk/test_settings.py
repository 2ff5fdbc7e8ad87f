"""What is said about tasks, submissions and schedules is refused by the name it was said under."""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping

import pytest

from flowfabric import App, Retry
from flowfabric.errors import InvalidInput
from flowfabric.task import TaskSettings

WRONG: list[tuple[Mapping[str, object], str]] = [
    ({"retry": 3}, "retry: must be a Retry, such as Retry(max_retries=3)"),
    ({"retry": "3"}, "retry: must be a Retry"),
    ({"timeout": "2 mins"}, "timeout: must be a duration"),
    ({"timeout": object}, "timeout: must be a duration"),
    ({"keep": True}, "keep: must be a duration"),
    ({"keep_failed": [1]}, "keep_failed: must be a duration"),
    ({"priority": "high"}, "priority: must be an integer"),
    ({"priority": 10**9}, "priority: must be 0 to 9000"),
    ({"priority": -1}, "priority: must be 0 to 9000"),
    ({"lane": ""}, "lane"),
    ({"lane": 3}, "lane"),
    ({"capabilities": "gpu"}, 'capabilities: must be a list, such as ["gpu"]'),
    ({"capabilities": 1}, "capabilities: must be a list"),
    ({"executor": "fork"}, "executor: must be thread or process"),
]


@pytest.mark.parametrize(("given", "refusal"), WRONG, ids=lambda each: str(each)[:40])
def test_a_wrong_setting_of_a_task_is_refused_where_it_is_written(
    given: Mapping[str, object], refusal: str
) -> None:
    app = App()
    for declare in (app.task, app.schedule):
        if declare == app.schedule and "executor" in given:
            continue
        timing = {"every": "1h"} if declare == app.schedule else {}
        untyped: Callable[..., Callable[[Callable[[], None]], object]] = declare
        with pytest.raises(InvalidInput, match=re.escape(refusal)):
            untyped(**given, **timing)(lambda: None)
    assert not app.tasks


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"max_retries": "3"}, "retry.max_retries: must be an integer"),
        ({"max_retries": -1}, "retry.max_retries: must be 0 to"),
        ({"delay": "soon"}, "retry.delay: must be a duration"),
        ({"max_delay": None}, "retry.max_delay: must be a duration"),
        ({"multiplier": 0.5}, "retry.multiplier: must be 1 to 1000000"),
        ({"multiplier": float("nan")}, "retry.multiplier: must be 1 to 1000000"),
        ({"multiplier": "2"}, "retry.multiplier: must be a number"),
        ({"jitter": "yes"}, "retry.jitter: must be true or false"),
        ({"never_on": "ValueError"}, "retry.never_on: must be exception classes, such as"),
        ({"never_on": ["ValueError"]}, "retry.never_on: must be exception classes"),
        ({"never_on": int}, "retry.never_on: must be exception classes"),
        ({"never_on": ValueError("x")}, "retry.never_on: must be exception classes"),
        ({"never_on": None}, "retry.never_on: must be exception classes"),
    ],
    ids=str,
)
def test_a_wrong_retry_is_refused_where_it_is_written(
    given: Mapping[str, object], refusal: str
) -> None:
    untyped: Callable[..., Retry] = Retry
    with pytest.raises(InvalidInput, match=re.escape(refusal)):
        untyped(**given)


@pytest.mark.parametrize("never_on", [KeyError, (KeyError,), [KeyError], {KeyError}], ids=str)
def test_one_class_or_several_are_never_tried_again(
    never_on: type[BaseException] | Iterable[type[BaseException]],
) -> None:
    assert Retry(never_on=never_on).final == (KeyError,)


def test_right_settings_are_taken() -> None:
    settings = TaskSettings(retry=Retry(max_retries=3), priority=9_000, capabilities=["gpu"])
    assert settings.policy is not None


@pytest.mark.parametrize(
    ("option", "value", "refusal"),
    [
        ("priority", 10**9, "priority: must be 0 to 9000"),
        ("priority", -1, "priority: must be 0 to 9000"),
        ("lane", "", "lane"),
    ],
)
async def test_a_wrong_option_of_a_submission_is_refused(
    store_url: str, option: str, value: object, refusal: str
) -> None:
    async with App(store_url, migrate=True) as app:

        @app.task
        async def work() -> None: ...

        add: Callable[..., object] = app.flow("f").add
        untyped: Callable[..., Awaitable[object]] = app.submit
        with pytest.raises(InvalidInput, match=refusal):
            add(work, **{option: value})
        with pytest.raises(InvalidInput, match=refusal):
            await untyped(work, **{option: value})
        assert not (await app.engine.find_executions()).executions


@pytest.mark.parametrize("every", ["10ms", "0s", "367d"])
def test_an_interval_is_refused_as_it_was_written(every: str) -> None:
    app = App()

    @app.task
    async def work() -> None: ...

    with pytest.raises(InvalidInput, match=rf"every: must be 1s to 366d .*{every}"):
        app.add_schedule("often", work(), every=every)


def test_a_schedule_needs_one_timing() -> None:
    app = App()

    @app.task
    async def work() -> None: ...

    with pytest.raises(InvalidInput, match=r"give either cron, .* or every="):
        app.add_schedule("never", work())
    with pytest.raises(InvalidInput, match=r"give either cron, .* or every="):
        app.add_schedule("both", work(), cron="* * * * *", every="1h")
