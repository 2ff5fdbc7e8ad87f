"""Input no well-meaning caller sends: refused by name on every store, and nothing is written."""

from collections.abc import Awaitable, Callable, Mapping

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.conditions import ByName, Condition, Count, CountKind, Single
from flowfabric.core.ids import FIRST_UUID
from flowfabric.core.policies import ExponentialBackoff, RetryPolicy
from flowfabric.core.records import StepKind
from flowfabric.core.results import HandedBack
from flowfabric.core.resumption import ResumePolicy
from flowfabric.core.schedules import ScheduleDefinition
from flowfabric.core.steps import NewStep
from flowfabric.engine.steps import StepReport
from flowfabric.errors import InvalidHandle, InvalidInput, InvalidPolicyJson, PayloadTooLarge
from tests.conformance.given import Given, fence_of, new

NUL = "a\x00b"
HALF = "\ud800"
"""A lone surrogate: no encoding has it."""

Untyped = Callable[..., Awaitable[object]]
"""An operation as a caller sees it who does not check types."""


def untyped(operation: Untyped) -> Untyped:
    return operation


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"after_key": NUL}, "after_key"),
        ({"after_key": HALF}, "after_key"),
        ({"after_key": 5}, "after_key"),
        ({"kind": "other"}, "kind"),
        ({"kind": []}, "kind"),
        ({"asked_after": -2_000_000_000}, "asked_after"),
        ({"asked_after": True}, "asked_after"),
        ({"position": 0}, "position"),
        ({"position": True}, "position"),
        ({"position": 2**31}, "position"),
        ({"sleep_ms": -1}, "sleep_ms"),
        ({"sleep_ms": 1.5}, "sleep_ms"),
        ({"sleep_ms": 2**64}, "sleep_ms"),
    ],
)
async def test_a_malformed_step_is_refused_by_its_field(
    engine: Engine, given: Given, fields: Mapping[str, object], refused: str
) -> None:
    claimed = await given.running()
    step = structs.replace(NewStep(step_key="write"), **fields)

    (answer,) = await engine.record_steps([StepReport(handle=claimed.handle, step=step)])

    assert isinstance(answer, InvalidInput)
    assert answer.field == refused
    assert await engine.list_steps(claimed.execution_id) == ()


async def test_a_step_may_name_its_kind_in_plain_text(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    step = structs.replace(NewStep(step_key="write"), kind="now")

    await engine.record_steps([StepReport(handle=claimed.handle, step=step)])

    assert [each.kind for each in await engine.list_steps(claimed.execution_id)] == [StepKind.NOW]


async def test_one_forged_handle_does_not_keep_the_others_from_being_handed_back(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    forged = structs.replace(claimed.handle, lease_epoch=99)

    refused, returned = await engine.hand_back_many([forged, claimed.handle], reason="stop")

    assert isinstance(refused, InvalidHandle)
    assert isinstance(returned, HandedBack)


@pytest.mark.parametrize("cursor", [f"{NUL}\na", f"a\n{HALF}", "a", ("a", "b"), 7])
async def test_a_made_up_cursor_of_schedules_is_refused(engine: Engine, cursor: object) -> None:
    with pytest.raises(InvalidInput) as refusal:
        await untyped(engine.list_schedules)(cursor=cursor)

    assert refusal.value.field == "cursor"


@pytest.mark.parametrize(
    ("definition", "refused"),
    [
        (None, "definition"),
        (structs.replace(ScheduleDefinition(schedule_id="s", execution_kind="k", every_ms=1_000),
                         tags=None), "tags"),
    ],
)  # fmt: skip
async def test_a_malformed_schedule_is_refused_by_its_field(
    engine: Engine, definition: object, refused: str
) -> None:
    with pytest.raises(InvalidInput) as refusal:
        await untyped(engine.upsert_schedule)(definition)

    assert refusal.value.field == refused


@pytest.mark.parametrize(
    "condition",
    [
        Single(HALF),
        Single(NUL),
        Single("key", ByName(HALF)),
        Single("key", ByName(NUL)),
        Count(1, CountKind.DISTINCT_SIGNALS, ("key", HALF)),
        Count(1, CountKind.DISTINCT_SIGNALS, ("key",), ByName(NUL)),
    ],
)
async def test_a_condition_on_names_no_signal_can_have_is_refused(
    engine: Engine, given: Given, condition: Condition
) -> None:
    claimed = await given.running()

    with pytest.raises(InvalidInput, match="NUL character or lone surrogate") as refusal:
        await engine.suspend(claimed.handle, resume_condition=condition)

    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("resume_target", HALF),
        ("consume_matched_signals", 1),
        ("retain_signal_buffer_until_closed", {None: 1}),
        ("close_waitpoint_on_resume", "yes"),
    ],
)
async def test_a_malformed_resume_policy_is_refused_by_its_field(
    engine: Engine, given: Given, field: str, value: object
) -> None:
    claimed = await given.running()
    policy = structs.replace(ResumePolicy(), **{field: value})

    with pytest.raises(InvalidInput) as refusal:
        await engine.suspend(claimed.handle, resume_condition=Single("key"), resume_policy=policy)

    assert refusal.value.field == f"resume_policy.{field}"


@pytest.mark.parametrize(
    "policy",
    [
        structs.replace(RetryPolicy(), max_retries=None),
        structs.replace(RetryPolicy(), backoff=None),
        RetryPolicy(backoff=ExponentialBackoff(multiplier=float("nan"))),
        RetryPolicy(backoff=ExponentialBackoff(initial_delay_ms=-1)),
        RetryPolicy(backoff=ExponentialBackoff(max_delay_ms=10**400)),
        RetryPolicy(retryable_categories=(HALF,)),
    ],
)
async def test_a_malformed_retry_policy_of_one_failure_is_refused(
    engine: Engine, given: Given, policy: RetryPolicy
) -> None:
    claimed = await given.running()

    with pytest.raises(InvalidPolicyJson):
        await engine.fail_execution(
            claimed.execution_id, fence=fence_of(claimed), reason="no", retry_policy=policy
        )


@pytest.mark.parametrize(
    "policy",
    [{HALF: 1}, {"x" * 100_000: 1}, {"retry_policy": {"retryable_categories": [HALF]}}],
    ids=["half a character", "long name", "half a character inside"],
)
async def test_a_policy_that_cannot_be_written_is_refused_in_few_words(
    engine: Engine, policy: object
) -> None:
    with pytest.raises(InvalidPolicyJson) as refusal:
        await engine.create_execution(new(policy=policy))

    assert len(str(refusal.value)) < 500


async def test_a_policy_is_as_limited_as_an_object_as_it_is_as_text(engine: Engine) -> None:
    tier = {"provider": "é" * 256, "model": "é" * 256}

    with pytest.raises(PayloadTooLarge):
        await engine.create_execution(new(policy={"fallback_policy": {"tiers": [tier] * 64}}))


@pytest.mark.parametrize("text", [None, 5, b"abcd", HALF])
async def test_an_id_that_is_no_text_is_not_looked_for(engine: Engine, text: object) -> None:
    with pytest.raises(InvalidInput):
        await untyped(engine.resolve_execution_id)(text)


async def test_a_tag_key_of_a_wrong_type_is_refused(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()

    with pytest.raises(InvalidInput):
        await untyped(engine.set_execution_tag)(execution_id, [], "v")


@pytest.mark.parametrize("ids", [None, 5, "{fp:0}:x", {}])
async def test_ids_that_are_no_list_are_refused(engine: Engine, given: Given, ids: object) -> None:
    claimed = await given.running()

    with pytest.raises(InvalidInput):
        await untyped(engine.read_outcomes)(ids)
    with pytest.raises(InvalidInput):
        await untyped(engine.await_executions)(claimed.handle, ids)


ACTING = ["a\x1b[2J", "a\nb", "a\x9b", "a\u202eb", "a\u2066b", "a\u200bb", "\x7f"]


@pytest.mark.parametrize("name", ACTING, ids=ascii)
async def test_a_name_that_would_act_on_a_terminal_is_refused(
    engine: Engine, given: Given, name: str
) -> None:
    claimed = await given.running()
    schedule = ScheduleDefinition(schedule_id=name, execution_kind="k", every_ms=1_000)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "kind": lambda: engine.create_execution(new(execution_kind=name)),
        "lane": lambda: engine.create_execution(new(lane_id=name)),
        "namespace": lambda: engine.create_execution(new(namespace=name)),
        "tag key": lambda: engine.create_execution(new(tags={name: "v"})),
        "worker": lambda: engine.claim(worker_id=name, worker_instance_id="w-1"),
        "instance": lambda: engine.claim(worker_id="w", worker_instance_id=name),
        "schedule": lambda: engine.upsert_schedule(schedule),
        "flow": lambda: engine.create_flow(FIRST_UUID, flow_kind=name),
        "waitpoint": lambda: engine.create_waitpoint(claimed.handle, name, expires_in_ms=60_000),
        "signal": lambda: engine.deliver_signal(
            claimed.execution_id, FIRST_UUID, waitpoint_token=f"k1:{'0' * 64}", signal_name=name
        ),
        "condition": lambda: engine.suspend(
            claimed.handle, resume_condition=Single("key", ByName(name))
        ),
    }
    accepted: list[str] = []
    for what, call in calls.items():
        try:
            await call()
        except InvalidInput:
            continue
        accepted.append(what)
    assert accepted == []


async def test_json_that_is_nested_too_deep_is_refused_at_every_door(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    deep = b"[" * 100_000 + b"]" * 100_000
    json = {"payload_encoding": "json"}
    schedule = ScheduleDefinition(schedule_id="s", execution_kind="k", every_ms=1_000)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "arguments": lambda: engine.create_execution(new(input_payload=deep, **json)),
        "result": lambda: engine.complete(claimed.handle, deep, result_encoding="json"),
        "schedule": lambda: engine.upsert_schedule(
            structs.replace(schedule, input_payload=deep, payload_encoding="json")
        ),
        "signal": lambda: engine.deliver_signal(
            claimed.execution_id,
            FIRST_UUID,
            waitpoint_token=f"k1:{'0' * 64}",
            signal_name="s",
            payload=deep[:500] + deep[-500:],
            payload_encoding="json",
        ),
    }
    for call in calls.values():
        with pytest.raises(InvalidInput, match="nested at most 128 deep"):
            await call()
