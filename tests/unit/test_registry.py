"""What a program declares."""

import pytest

from flowfabric import App, Context
from flowfabric.core.policies import ExecutionPolicy, TimeoutPolicy
from flowfabric.core.schedules import ScheduleDefinition
from flowfabric.errors import InvalidInput


def test_a_schedule_is_a_task_and_a_definition() -> None:
    app = App("sqlite:///:memory:")

    @app.schedule("0 6 * * *", timezone="Europe/Rome", lane="mail", timeout="2m", priority=3)
    def morning_report(ctx: Context) -> None: ...

    assert app.tasks == {"morning_report": morning_report}
    assert app.schedules == [
        ScheduleDefinition(
            schedule_id="morning_report",
            execution_kind="morning_report",
            cron="0 6 * * *",
            timezone="Europe/Rome",
            lane_id="mail",
            input_payload=b"{}",
            payload_encoding="json",
            policy=ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout_ms=120_000)),
            priority=3,
        )
    ]


def test_a_call_can_be_scheduled_with_its_arguments() -> None:
    app = App("sqlite:///:memory:")

    @app.task
    async def publish(ctx: Context, article_id: int) -> None: ...

    app.add_schedule("forty-two", publish(42), every="1h30m", catch_up="all")
    (definition,) = app.schedules
    assert (definition.schedule_id, definition.execution_kind, definition.every_ms) == (
        "forty-two",
        "publish",
        5_400_000,
    )
    assert (definition.input_payload, definition.catch_up) == (b'{"article_id":42}', "all")


@pytest.mark.parametrize(
    ("cron", "every", "timezone", "field"),
    [
        pytest.param("61 * * * *", None, "UTC", "cron", id="bad cron"),
        pytest.param("* * * * *", None, "Mars", "timezone", id="bad zone"),
        pytest.param(None, "soon", "UTC", "every", id="bad interval"),
        pytest.param(None, "1ms", "UTC", "every", id="too often"),
        pytest.param(None, None, "UTC", "schedule", id="neither"),
        pytest.param("* * * * *", "1h", "UTC", "schedule", id="both"),
    ],
)
def test_a_mistake_is_found_where_it_is_made(
    cron: str | None, every: str | None, timezone: str, field: str
) -> None:
    app = App("sqlite:///:memory:")

    def tick() -> None: ...

    with pytest.raises(InvalidInput) as caught:
        app.schedule(cron, every=every, timezone=timezone)(tick)
    assert caught.value.field == field
    assert app.schedules == []


def test_names_of_tasks_and_schedules_are_unique() -> None:
    app = App("sqlite:///:memory:")

    @app.schedule(every="1h")
    def tick() -> None: ...

    with pytest.raises(InvalidInput, match="tick"):
        app.task(name="tick")(lambda: None)
    with pytest.raises(InvalidInput, match="tick"):
        app.add_schedule("tick", tick(), every="2h")
