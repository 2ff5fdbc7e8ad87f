"""Creating executions."""

import asyncio
from collections.abc import Mapping

import pytest
from msgspec import structs

from flowfabric import Engine, EngineConfig, FlowFabricError
from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.events import EventCategory
from flowfabric.core.ids import ExecutionId, LaneId, Namespace
from flowfabric.core.records import Execution, Lane
from flowfabric.core.results import Created, Duplicate
from flowfabric.core.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LaneState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
)
from flowfabric.core.views import ExecutionContext
from flowfabric.errors import (
    IdempotencyConflict,
    InvalidCapabilities,
    InvalidInput,
    InvalidPolicyJson,
    PayloadTooLarge,
)
from flowfabric.testing import SettableClock
from tests.conformance.given import Given, new
from tests.conformance.observed import execution_of, refused, refuses, state_of, unchanged

ID = ExecutionId("{fp:7}:550e8400-e29b-41d4-a716-446655440000")
OTHER_ID = ExecutionId("{fp:7}:550e8400-e29b-41d4-a716-446655440001")
DAY_MS = 24 * 60 * 60 * 1_000


async def test_a_new_execution_waits_for_a_worker(engine: Engine, clock: SettableClock) -> None:
    now_ms = clock.now_ms()
    request = new(
        execution_id=ID,
        execution_kind="send mail",
        lane_id="mail",
        namespace="shop",
        input_payload=b"\x00\xff{}",
        payload_encoding="raw",
        priority=7,
        creator_identity="cron",
        tags={"app.a": "1", "cairn.instance_id": "i-1"},
    )
    assert await engine.create_execution(request) == Created(
        execution_id=ID, public_state=PublicState.WAITING
    )
    stored = await execution_of(engine, ID)
    assert stored == Execution(
        partition_key=7,
        execution_id=ID,
        namespace=Namespace("shop"),
        lane_id=LaneId("mail"),
        execution_kind="send mail",
        route_id=stored.route_id,
        priority=7,
        creator_identity="cron",
        instance_tag="i-1",
        lifecycle_phase=LifecyclePhase.RUNNABLE,
        ownership_state=OwnershipState.UNOWNED,
        eligibility_state=EligibilityState.ELIGIBLE_NOW,
        blocking_reason=BlockingReason.WAITING_FOR_WORKER,
        attempt_state=AttemptState.PENDING_FIRST_ATTEMPT,
        public_state=PublicState.WAITING,
        ready=True,
        created_at_ms=now_ms,
        last_transition_at_ms=now_ms,
        last_mutation_at_ms=now_ms,
        payload=b"\x00\xff{}",
        payload_encoding="raw",
        retention_ms=7 * DAY_MS,
        retention_failed_ms=30 * DAY_MS,
    )
    state = await state_of(engine)
    assert state.tags == {ID: {"app.a": "1", "cairn.instance_id": "i-1"}}
    assert (state.attempts, state.grants) == ({}, {})
    assert {event.category for event in state.events} == {EventCategory.TAG}
    assert state.lanes[1:] == (
        Lane(
            lane_id=LaneId("mail"),
            state=LaneState.ACTIVE,
            registered_at_ms=now_ms,
            registered_by="create_execution",
        ),
    )
    assert await engine.read_execution_context(ID) == ExecutionContext(
        input_payload=b"\x00\xff{}",
        payload_encoding="raw",
        execution_kind="send mail",
        tags={"app.a": "1", "cairn.instance_id": "i-1"},
    )


async def test_a_time_to_come_delays_a_new_execution(engine: Engine, clock: SettableClock) -> None:
    until_ms = clock.now_ms() + 1
    request = new(execution_id=ID, delay_until_ms=until_ms)
    assert await engine.create_execution(request) == Created(
        execution_id=ID, public_state=PublicState.DELAYED
    )
    await engine.create_execution(new(execution_id=OTHER_ID))
    assert await execution_of(engine, ID) == structs.replace(
        await execution_of(engine, OTHER_ID),
        execution_id=ID,
        eligibility_state=EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
        blocking_reason=BlockingReason.WAITING_FOR_DELAY,
        blocking_detail=f"delayed until {until_ms}",
        public_state=PublicState.DELAYED,
        ready=False,
        delay_until_ms=until_ms,
    )


async def test_a_child_tells_who_submitted_it(given: Given, engine: Engine) -> None:
    parent = await given.waiting()
    child = await given.waiting(parent_execution_id=parent)
    described = await engine.describe_execution(child)
    info = await engine.read_execution_info(child)
    fields = await engine.read_exec_core_fields(child, ["parent_execution_id"])
    assert described is not None
    assert info is not None
    assert described.parent_execution_id == info.parent_execution_id == parent
    assert fields == {"parent_execution_id": parent}


@pytest.mark.parametrize("by", ["request", "policy"])
async def test_a_time_that_has_come_delays_nothing(
    engine: Engine, clock: SettableClock, by: str
) -> None:
    now_ms = clock.now_ms()
    delay = {"delay_until_ms": now_ms} if by == "request" else {"policy": {"delay_until": now_ms}}
    assert await engine.create_execution(new(execution_id=ID, **delay)) == Created(
        execution_id=ID, public_state=PublicState.WAITING
    )
    assert (await execution_of(engine, ID)).delay_until_ms is None


async def test_a_policy_may_delay_and_rank_a_new_execution(given: Given, engine: Engine) -> None:
    until_ms = given.clock.now_ms() + 5
    by_policy = await given.waiting(policy={"delay_until": until_ms, "priority": 12})
    assert (await execution_of(engine, by_policy)).delay_until_ms == until_ms
    assert (await execution_of(engine, by_policy)).priority == 12
    overruled = await given.waiting(
        policy={"delay_until": until_ms, "priority": 12}, delay_until_ms=until_ms + 5, priority=3
    )
    assert (await execution_of(engine, overruled)).delay_until_ms == until_ms + 5
    assert (await execution_of(engine, overruled)).priority == 3
    relative = await given.waiting(policy={"delay_until": until_ms}, delay_ms=20)
    assert (await execution_of(engine, relative)).delay_until_ms == given.clock.now_ms() + 20
    both = await given.waiting(delay_until_ms=until_ms, delay_ms=20)
    assert (await execution_of(engine, both)).delay_until_ms == until_ms
    at_once = await given.waiting(delay_ms=0)
    assert (await execution_of(engine, at_once)).delay_until_ms is None


async def test_a_priority_is_clamped(given: Given, engine: Engine) -> None:
    for priority, stored in ((10_000, 9_000), (-5, 0), (50, 50)):
        execution_id = await given.waiting(priority=priority)
        assert (await execution_of(engine, execution_id)).priority == stored


@pytest.mark.parametrize(
    ("fields", "deadline_ms"),
    [
        ({}, None),
        ({"execution_deadline_at_ms": 5}, 5),
        ({"policy": {"timeout_policy": {"execution_deadline_ms": 9}}}, 1_009),
        (
            {
                "execution_deadline_at_ms": 2_000,
                "policy": {"timeout_policy": {"execution_deadline_ms": 9}},
            },
            2_000,
        ),
    ],
    ids=["none", "past", "relative", "absolute before relative"],
)
async def test_a_deadline_is_a_time_or_counted_from_creation(
    given: Given, engine: Engine, fields: Mapping[str, object], deadline_ms: int | None
) -> None:
    given.clock.set_ms(1_000)
    execution_id = await given.waiting(**fields)
    assert (await execution_of(engine, execution_id)).deadline_at_ms == deadline_ms


# Repeats


async def test_an_id_that_exists_is_a_duplicate_whatever_the_rest_says(engine: Engine) -> None:
    await engine.create_execution(new(execution_id=ID))
    async with unchanged(engine):
        again = new(execution_id=ID, execution_kind="other", tags={"a.b": "c"}, priority=9)
        assert await engine.create_execution(again) == Duplicate(execution_id=ID)


async def test_an_idempotency_key_finds_its_execution_in_every_lane(
    given: Given, engine: Engine
) -> None:
    first = await given.waiting(idempotency_key="k")
    for repeat in (
        new(idempotency_key="k"),
        new(idempotency_key="k", lane_id="elsewhere", execution_kind="other"),
        new(idempotency_key="k", execution_id=ID),
    ):
        assert await engine.create_execution(repeat) == Duplicate(execution_id=first)
    assert list((await state_of(engine)).tags) == [first]


async def test_an_idempotency_key_counts_within_its_namespace(given: Given) -> None:
    keys = ({"idempotency_key": "k"}, {"idempotency_key": "k", "namespace": "other"})
    unkeyed = ({"idempotency_key": ""}, {"idempotency_key": ""}, {"idempotency_key": None})
    assert len({await given.waiting(**fields) for fields in (*keys, *unkeyed)}) == 5


async def test_an_idempotency_key_holds_as_long_as_its_execution_exists(
    given: Given, engine: Engine
) -> None:
    first = await given.waiting(idempotency_key="k")
    repeat = new(idempotency_key="k")
    given.clock.advance(days=400)
    await engine.trim_guards()
    assert await engine.create_execution(repeat) == Duplicate(execution_id=first)
    await engine.cancel_execution(first, reason="no use")
    given.clock.advance(days=29)
    await engine.trim_retention()
    assert await engine.create_execution(repeat) == Duplicate(execution_id=first)
    given.clock.advance(days=1)
    await engine.trim_retention()
    second = await given.waiting(idempotency_key="k")
    assert await engine.create_execution(repeat) == Duplicate(execution_id=second)


async def test_another_key_for_something_that_exists_is_not_remembered(
    given: Given, engine: Engine
) -> None:
    await given.waiting(execution_id=ID, idempotency_key="first")
    again = new(execution_id=ID, idempotency_key="other")
    assert await engine.create_execution(again) == Duplicate(execution_id=ID)
    assert await engine.create_execution(again) == Duplicate(execution_id=ID)
    await engine.cancel_execution(ID, reason="no use")
    given.clock.advance(days=31)
    await engine.trim_retention()
    for key in ("first", "other"):
        assert await given.waiting(idempotency_key=key) != ID


async def test_an_idempotency_key_is_free_again_after_its_window(
    given: Given, engine: Engine
) -> None:
    policy = {"dedup_window_ms": 50, "retention_policy": {"failed_ms": 0}}
    first = await given.waiting(idempotency_key="k", policy=policy)
    given.clock.advance(ms=49)
    repeat = new(idempotency_key="k", policy=policy)
    assert await engine.create_execution(repeat) == Duplicate(execution_id=first)
    given.clock.advance(ms=1)
    second = await given.waiting(idempotency_key="k", policy=policy)
    assert second != first
    await engine.cancel_execution(first, reason="no use")
    assert (await engine.trim_retention()).acted == 1
    assert await engine.create_execution(repeat) == Duplicate(execution_id=second)


async def test_a_window_of_no_time_finds_nothing_again(given: Given) -> None:
    windowless = {"idempotency_key": "k", "policy": {"dedup_window_ms": 0}}
    assert len({await given.waiting(**windowless) for _ in range(3)}) == 3


async def test_a_strict_repeat_must_have_the_same_content(given: Given, engine: Engine) -> None:
    first = await given.waiting(idempotency_key="k", strict=True, input_payload=b"1")
    await engine.register_lane("b")
    same = new(idempotency_key="k", strict=True, input_payload=b"1", priority=5)
    assert await engine.create_execution(same) == Duplicate(execution_id=first)
    for other in ({"input_payload": b"2"}, {"lane_id": "b"}, {"execution_kind": "b"}):
        request = structs.replace(same, **other)
        async with refused(engine, IdempotencyConflict):
            await engine.create_execution(request)
        lenient = structs.replace(request, strict=False)
        assert await engine.create_execution(lenient) == Duplicate(execution_id=first)


@pytest.mark.parametrize("own_id", ["order-7", ID])
async def test_a_strict_repeat_of_an_id_must_have_the_same_content(
    given: Given, engine: Engine, own_id: str
) -> None:
    first = await given.waiting(execution_id=own_id, input_payload=b"1")
    await engine.register_lane("b")
    same = new(execution_id=own_id, strict=True, input_payload=b"1", priority=5)
    assert await engine.create_execution(same) == Duplicate(execution_id=first)
    for other in ({"input_payload": b"2"}, {"lane_id": "b"}, {"execution_kind": "b"}):
        request = structs.replace(same, **other)
        async with refused(engine, IdempotencyConflict):
            await engine.create_executions([new(), request])
        lenient = structs.replace(request, strict=False)
        if own_id != ID and "execution_kind" in other:
            async with refused(engine, IdempotencyConflict):
                await engine.create_execution(lenient)
        else:
            assert await engine.create_execution(lenient) == Duplicate(execution_id=first)


async def test_of_concurrent_creations_with_one_key_one_wins(engine: Engine) -> None:
    results = await asyncio.gather(
        *(engine.create_execution(new(idempotency_key="k")) for _ in range(8))
    )
    created = [result for result in results if isinstance(result, Created)]
    assert len(created) == 1
    assert {result.execution_id for result in results} == {created[0].execution_id}


# Batches


async def test_a_batch_is_answered_in_order_and_sees_its_own_repeats(engine: Engine) -> None:
    await engine.create_execution(new(execution_id=ID, idempotency_key="old"))
    results = await engine.create_executions(
        [
            new(execution_id=OTHER_ID, idempotency_key="k"),
            new(idempotency_key="k"),
            new(execution_id=ID),
            new(execution_id=OTHER_ID),
            new(idempotency_key="old"),
            new(),
        ]
    )
    assert results[:5] == [
        Created(execution_id=OTHER_ID, public_state=PublicState.WAITING),
        Duplicate(execution_id=OTHER_ID),
        Duplicate(execution_id=ID),
        Duplicate(execution_id=OTHER_ID),
        Duplicate(execution_id=ID),
    ]
    assert isinstance(results[5], Created)


async def test_a_repeat_under_one_key_does_not_hide_a_new_execution_of_the_same_id(
    engine: Engine,
) -> None:
    await engine.create_execution(new(execution_id=ID, idempotency_key="old"))
    results = await engine.create_executions(
        [
            new(execution_id=OTHER_ID, idempotency_key="old"),
            new(execution_id=OTHER_ID, idempotency_key="k"),
        ]
    )
    assert results == [
        Duplicate(execution_id=ID),
        Created(execution_id=OTHER_ID, public_state=PublicState.WAITING),
    ]
    repeat = new(idempotency_key="k")
    assert await engine.create_execution(repeat) == Duplicate(execution_id=OTHER_ID)


async def test_of_two_requests_for_one_id_in_a_batch_the_first_creates_it(engine: Engine) -> None:
    first = new(execution_id=ID, execution_kind="first", tags={"a.b": "first"})
    second = new(execution_id=ID, execution_kind="second", tags={"a.b": "second"})
    assert await engine.create_executions([first, second]) == [
        Created(execution_id=ID, public_state=PublicState.WAITING),
        Duplicate(execution_id=ID),
    ]
    context = await engine.read_execution_context(ID)
    assert (context.execution_kind, context.tags) == ("first", {"a.b": "first"})


async def test_an_empty_batch_creates_nothing(engine: Engine) -> None:
    async with unchanged(engine):
        assert await engine.create_executions([]) == []


async def test_a_batch_of_the_largest_size_is_created_and_a_larger_one_refused(
    engine: Engine,
) -> None:
    async with refused(engine, InvalidInput) as caught:
        await engine.create_executions([new()] * (BATCH_MAX + 1))
    assert caught.value.field == "requests"
    results = await engine.create_executions([new()] * BATCH_MAX)
    assert len({result.execution_id for result in results}) == BATCH_MAX


async def test_one_bad_request_refuses_its_batch(engine: Engine) -> None:
    # A lane is made known at once and for good, whatever becomes of the request.
    await engine.register_lane("default", registered_by="create_execution")
    async with refused(engine, InvalidInput):
        await engine.create_executions([new(), new(execution_kind="")])
    strict = {"idempotency_key": "k", "strict": True}
    async with refused(engine, IdempotencyConflict):
        await engine.create_executions(
            [new(), new(**strict), new(**strict, input_payload=b"other")]
        )
    strict = {"execution_id": ID, "strict": True}
    async with refused(engine, IdempotencyConflict):
        await engine.create_executions([new(**strict), new(**strict, input_payload=b"other")])


# Bad input


@pytest.mark.parametrize("config", [EngineConfig(payload_bytes_max=4)])
async def test_a_payload_may_be_as_large_as_the_settings_say(given: Given, engine: Engine) -> None:
    await given.waiting(input_payload=b"1234")
    async with refused(engine, PayloadTooLarge) as caught:
        await engine.create_execution(new(input_payload=b"12345"))
    error = caught.value
    assert (error.field, error.limit_bytes, error.actual_bytes) == ("input_payload", 4, 5)


BAD_FIELDS: list[tuple[str, dict[str, object]]] = [
    ("execution_kind", {"execution_kind": ""}),
    ("execution_kind", {"execution_kind": "k" * 257}),
    ("execution_kind", {"execution_kind": 5}),
    ("execution_kind", {"execution_kind": "a\nb"}),
    ("lane_id", {"lane_id": ""}),
    ("lane_id", {"lane_id": "l" * 65}),
    ("lane_id", {"lane_id": "bad\nlane"}),
    ("lane_id", {"lane_id": None}),
    ("namespace", {"namespace": ""}),
    ("namespace", {"namespace": "n" * 257}),
    ("input_payload", {"input_payload": "text"}),
    ("input_payload", {"input_payload": None}),
    ("payload_encoding", {"payload_encoding": "e" * 257}),
    ("payload_encoding", {"payload_encoding": 1}),
    ("priority", {"priority": "high"}),
    ("priority", {"priority": True}),
    ("creator_identity", {"creator_identity": "c" * 257}),
    ("creator_identity", {"creator_identity": "a\x00b"}),
    ("creator_identity", {"creator_identity": None}),
    ("idempotency_key", {"idempotency_key": "k" * 513}),
    ("idempotency_key", {"idempotency_key": 5}),
    ("strict", {"strict": "yes"}),
    ("tags", {"tags": ["a.b"]}),
    ("tags", {"tags": {f"a.k{n}": "" for n in range(65)}}),
    ("tag key", {"tags": {"cairn=x": "1"}}),
    ("tags[a.b]", {"tags": {"a.b": 5}}),
    ("tags[a.b]", {"tags": {"a.b": "v" * 4_097}}),
    ("delay_until_ms", {"delay_until_ms": -1}),
    ("delay_until_ms", {"delay_until_ms": 253_402_300_800_000}),
    ("delay_until_ms", {"delay_until_ms": "soon"}),
    ("delay_ms", {"delay_ms": -1}),
    ("delay_ms", {"delay_ms": "1s"}),
    ("execution_deadline_at_ms", {"execution_deadline_at_ms": 1.5}),
    ("execution_deadline_at_ms", {"execution_deadline_at_ms": -1}),
    ("execution_id", {"execution_id": "550E8400-e29b-41d4-a716-446655440000"}),
    ("execution_id", {"execution_id": ""}),
    ("execution_id", {"execution_id": "order\n42"}),
    ("execution_id", {"execution_id": ID.upper()}),
    ("execution_id", {"execution_id": 5}),
    ("partition", {"execution_id": ID.replace("7", "256", 1)}),
    ("parent_execution_id", {"parent_execution_id": "{fp:7}:nobody"}),
    ("parent_execution_id", {"parent_execution_id": 5}),
    ("partition_id", {"execution_id": ID, "partition_id": 8}),
    ("partition_id", {"partition_id": "86"}),
]


async def test_a_bad_field_is_named_and_nothing_is_written(engine: Engine) -> None:
    async with unchanged(engine):
        for field, fields in BAD_FIELDS:
            await refuses(engine, field, "create_execution", new(**fields))
        for request in (None, "work", {"execution_kind": "work"}):
            await refuses(engine, "request", "create_execution", request)


BAD_POLICIES: list[tuple[object, type[FlowFabricError], str]] = [
    ("{", InvalidPolicyJson, "malformed"),
    ("[]", InvalidPolicyJson, "malformed"),
    (5, InvalidPolicyJson, "malformed"),
    ({"no_such_field": 1}, InvalidPolicyJson, "policy: "),
    ({"retry_policy": {"max_retries": -1}}, InvalidPolicyJson, "retry_policy.max_retries: "),
    ({"routing_requirements": []}, InvalidPolicyJson, "routing_requirements:not_object"),
    ({}, InvalidCapabilities, "required:not_array"),
    (None, InvalidCapabilities, "required:not_array"),
    ("gpu", InvalidCapabilities, "required:not_array"),
    ([5], InvalidCapabilities, "required:non_string_token"),
    ([""], InvalidCapabilities, "required:empty_token"),
    (["a,b"], InvalidCapabilities, "required:comma_in_token"),
    (["a b"], InvalidCapabilities, "required:control_or_whitespace"),
    (["a\x7fb"], InvalidCapabilities, "required:control_or_whitespace"),
    ([f"t{n}" for n in range(257)], InvalidCapabilities, "required:too_many_tokens"),
    (["t" * 4_097], InvalidCapabilities, "required:too_many_bytes"),
]


async def test_a_bad_policy_is_refused_by_its_rule(engine: Engine) -> None:
    async with unchanged(engine):
        for policy, error, detail in BAD_POLICIES:
            if error is InvalidCapabilities:
                policy = {"routing_requirements": {"required_capabilities": policy}}
            with pytest.raises(error) as caught:
                await engine.create_execution(new(policy=policy))
            assert caught.value.detail.startswith(detail)
