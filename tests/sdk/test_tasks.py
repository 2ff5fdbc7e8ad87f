"""How functions become tasks, and how their arguments travel."""

from collections.abc import AsyncIterator, Callable, Iterator
from decimal import Decimal

import pytest
from msgspec import Struct

from flowfabric import App, Context, Retry
from flowfabric.core.policies import ExecutionPolicy, RetentionPolicy, parse_policy
from flowfabric.errors import InvalidInput
from flowfabric.submission import check_options, read_submission, request_of
from flowfabric.task import Task, TaskSettings


class Item(Struct):
    name: str
    price: Decimal


def task_of(function: Callable[..., object]) -> Task[..., object]:
    return Task("t", function, TaskSettings())


def everything(
    ctx: Context, a: int, /, b: str = "b", *rest: float, c: Item, d: bool = True, **more: int
) -> None: ...


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {"c": Item("x", Decimal("1.5"))}),
        ((1, "two", 3.0, 4.0), {"c": Item("x", Decimal(2)), "d": False, "e": 5}),
    ],
)
def test_arguments_of_every_kind_come_back_as_they_were(
    args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    arguments = task_of(everything).arguments
    bound = arguments.decode(arguments.encode(args, kwargs))
    assert (bound.args, bound.kwargs) == (args, kwargs)


def test_a_default_that_is_not_given_is_left_to_the_function() -> None:
    def later(a: int = 1, b: int = 2) -> None: ...

    arguments = task_of(later).arguments
    assert arguments.encode([], {"b": 3}) == b'{"b":3}'
    bound = arguments.decode(b'{"b":3}')
    assert (bound.args, bound.kwargs) == ((), {"b": 3})


def test_a_task_says_how_long_its_runs_are_kept() -> None:
    app = App()

    @app.task(keep="1d", keep_failed="1w")
    def short_lived() -> None: ...

    @app.schedule(every="1h", keep="2d")
    def hourly() -> None: ...

    assert request_of(short_lived(), check_options({}), "default").policy == ExecutionPolicy(
        retention_policy=RetentionPolicy(completed_ms=86_400_000, failed_ms=7 * 86_400_000)
    )
    (schedule,) = app.schedules
    assert schedule.policy == ExecutionPolicy(
        retention_policy=RetentionPolicy(completed_ms=2 * 86_400_000)
    )
    with pytest.raises(InvalidInput, match="keep: must be a duration"):
        app.task(keep="a while")(everything)


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    def take(thing: object) -> None: ...

    with pytest.raises(InvalidInput, match="argument thing of t: cannot be stored"):
        task_of(take)(object())
    with pytest.raises(InvalidInput, match=r"argument thing of t\[1\]: is NaN or infinite"):
        task_of(take)([1.0, float("nan")])


def test_annotations_that_name_nothing_are_explained() -> None:
    def take(thing: int) -> None: ...

    take.__annotations__["thing"] = "Nowhere"
    with pytest.raises(InvalidInput, match="annotations of take: name 'Nowhere' is not defined"):
        _ = task_of(take).arguments


def test_settings_become_the_policy_of_every_execution() -> None:
    app = App()

    @app.task(
        lane="gpu",
        retry=Retry(max_retries=2, delay="1s", max_delay="10s", jitter=False),
        timeout="2m",
        priority=7,
        capabilities=["gpu"],
        max_worker_deaths=1,
    )
    async def train(name: str) -> None: ...

    call, options = read_submission(train, ["x"], {"deadline": "1h", "delay": 5})
    request = request_of(call, options, "default")
    assert (request.lane_id, request.priority, request.delay_ms) == ("gpu", 7, 5_000)
    assert request.input_payload == b'{"name":"x"}'
    policy = parse_policy(request.policy)
    assert policy.timeout_policy is not None
    assert policy.retry_policy is not None
    assert policy.routing_requirements is not None
    assert (
        policy.timeout_policy.attempt_timeout_ms,
        policy.timeout_policy.execution_deadline_ms,
        policy.retry_policy.max_retries,
        policy.routing_requirements.required_capabilities,
        policy.max_worker_deaths,
    ) == (120_000, 3_600_000, 2, ("gpu",), 1)


def test_two_tasks_cannot_have_one_name() -> None:
    app = App()

    @app.task(name="a")
    def first() -> None: ...

    with pytest.raises(InvalidInput, match=r"'a' is the name of .*first already"):

        @app.task(name="a")
        def second() -> None: ...


def test_a_keyword_that_could_be_argument_or_option_is_not_guessed() -> None:
    app = App()

    @app.task
    def tag(tags: dict[str, str]) -> None: ...

    with pytest.raises(InvalidInput, match="both an argument of tag and an option of submit"):
        read_submission(tag, [], {"tags": {"a.b": "c"}})
    call, options = read_submission(tag({"a.b": "c"}), [], {"tags": {"d.e": "f"}})
    assert call.payload == b'{"tags":{"a.b":"c"}}'
    assert options.tags == {"d.e": "f"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"prioritee": 1}, "prioritee: is not an option of submit; did you mean priority?"),
        ({"priority": "high"}, "priority: Expected `int | null`, got `str`"),
        ({"tags": {"a.b": 1}}, "tags"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        check_options(options)
    assert str(refusal.value).startswith(problem)


def test_a_process_runs_plain_functions_only() -> None:
    app = App()
    with pytest.raises(InvalidInput, match="a process runs plain functions"):

        @app.task(executor="process")
        async def slow() -> None: ...


def test_a_generator_is_no_task() -> None:
    app = App("sqlite:///:memory:")

    def numbers() -> Iterator[int]:
        yield 1

    async def later_numbers() -> AsyncIterator[int]:
        yield 1

    for function in (numbers, later_numbers):
        with pytest.raises(InvalidInput, match="is a generator; return a list"):
            app.task(function)
