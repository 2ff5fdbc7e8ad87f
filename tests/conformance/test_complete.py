"""Finishing successfully."""

import asyncio

import pytest

from flowfabric import Engine, EngineConfig
from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.results import Completed
from flowfabric.core.states import AttemptLifecycle, PublicState
from flowfabric.engine.executions import Completion
from flowfabric.errors import ExecutionNotActive, InvalidInput, PayloadTooLarge
from flowfabric.testing import SettableClock
from tests.conformance.expected import attempt_ended, completion_event, ended, lease_event
from tests.conformance.given import Given, fence_of
from tests.conformance.observed import (
    call,
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    unchanged,
)

BYTES = b"\x00\xff\xfe not utf-8"


@pytest.mark.parametrize("form", ["complete", "complete_many", "complete_execution"])
async def test_completing_ends_the_execution_with_its_result(
    engine: Engine, given: Given, clock: SettableClock, form: str
) -> None:
    running = await given.running(
        namespace="shop",
        tags={"cairn.instance_id": "i-1"},
        policy={"timeout_policy": {"attempt_timeout_ms": 5_000}},
    )
    execution_id = running.execution_id
    before = await execution_of(engine, execution_id)
    (attempt,) = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance("1s")
    done: object
    if form == "complete":
        done = await engine.complete(running.handle, BYTES, result_encoding="raw")
    elif form == "complete_many":
        (done,) = await engine.complete_many(
            [Completion(handle=running.handle, result=BYTES, result_encoding="raw")]
        )
    else:
        done = await engine.complete_execution(
            execution_id, fence=fence_of(running), result=BYTES, result_encoding="raw"
        )
    assert done == Completed(execution_id=execution_id, public_state=PublicState.COMPLETED)
    after = await execution_of(engine, execution_id)
    assert after == ended(
        before, PublicState.COMPLETED, now_ms, result=BYTES, result_encoding="raw"
    )
    assert await engine.list_attempts(execution_id) == (
        attempt_ended(attempt, AttemptLifecycle.ENDED_SUCCESS, now_ms),
    )
    assert await events_since(engine, cursor) == [
        lease_event(before, "revoked", now_ms, "completed"),
        completion_event(after, now_ms),
    ]
    assert await engine.get_execution_result(execution_id) == BYTES


async def test_completing_again_succeeds_and_changes_nothing(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running()
    first = await engine.complete(running.handle, b"first")
    clock.advance("2h")
    async with unchanged(engine):
        assert await engine.complete(running.handle, b"second") == first
        again = Completion(handle=running.handle)
        assert await engine.complete_many([again, again]) == [first, first]
        assert first == await engine.complete_execution(
            running.execution_id, fence=fence_of(running)
        )
    assert await engine.get_execution_result(running.execution_id) == b"first"


async def test_only_the_one_who_completed_may_repeat_it(engine: Engine, given: Given) -> None:
    running = await given.running()
    await engine.complete_execution(running.execution_id, source="operator_override")
    assert (await engine.complete(running.handle)).public_state is PublicState.COMPLETED
    for fields in ({"lease_epoch": 2}, {"attempt_id": "00000000-0000-4000-8000-00000000dead"}):
        async with refused(engine, ExecutionNotActive):
            await engine.complete_execution(running.execution_id, fence=fence_of(running, **fields))


@pytest.mark.parametrize("result", [None, b""])
async def test_no_result_and_an_empty_one_are_the_same(
    engine: Engine, given: Given, result: bytes | None
) -> None:
    claimed = await given.completed(result)
    assert await engine.get_execution_result(claimed.execution_id) is None


async def test_a_policy_says_how_long_the_end_is_kept(engine: Engine, given: Given) -> None:
    claimed = await given.completed(policy={"stream_policy": {"retention_ttl_ms": 77}})
    after = await execution_of(engine, claimed.execution_id)
    assert after.retain_until_ms == given.clock.now_ms() + 77


@pytest.mark.parametrize("config", [EngineConfig(keep="5ms", keep_failed="9ms")])
async def test_settings_say_how_long_ends_are_kept(engine: Engine, given: Given) -> None:
    for state, kept_ms in (("completed", 5), ("failed", 9), ("cancelled", 9), ("expired", 9)):
        after = await execution_of(engine, await given.state(state))
        assert after.retain_until_ms == given.clock.now_ms() + kept_ms


@pytest.mark.parametrize("odd", [None, b"", b"odd", BYTES])
async def test_each_of_a_batch_has_its_result_though_nearly_all_have_the_same(
    engine: Engine, given: Given, odd: bytes | None
) -> None:
    handles = [(await given.running()).handle for _ in range(12)]
    results = [BYTES] * 11 + [odd]
    await engine.complete_many(
        [
            Completion(handle=handle, result=each)
            for handle, each in zip(handles, results, strict=True)
        ]
    )
    stored = [await engine.get_execution_result(handle.execution_id) for handle in handles]
    assert stored == [each or None for each in results]


async def test_a_batch_completes_each_and_answers_in_order(engine: Engine, given: Given) -> None:
    handles = [(await given.running()).handle for _ in range(3)]
    lost = await given.revoked()
    batch = [
        Completion(handle=handles[0], result=b"0"),
        Completion(handle=lost.handle),
        Completion(handle=handles[1], result=b"1"),
        Completion(handle=handles[2]),
        Completion(handle=handles[0], result=b"again"),
    ]
    outcomes = await engine.complete_many(batch)
    assert [type(each).__name__ for each in outcomes] == [
        "Completed",
        "LeaseRevoked",
        "Completed",
        "Completed",
        "Completed",
    ]
    results = [await engine.get_execution_result(handle.execution_id) for handle in handles]
    assert results == [b"0", b"1", None]
    completions = await engine.read_events(category="completion")
    assert sorted(event.execution_id for event in completions.events) == sorted(
        handle.execution_id for handle in handles
    )


async def test_of_a_completion_and_a_cancellation_at_once_one_happens(
    engine: Engine, given: Given
) -> None:
    for _ in range(5):
        running = await given.running()
        await asyncio.gather(
            engine.complete(running.handle),
            engine.cancel_execution(running.execution_id, reason="no"),
            return_exceptions=True,
        )
    completions = (await engine.read_events(category="completion")).events
    assert len({event.execution_id for event in completions}) == len(completions) == 5


@pytest.mark.parametrize("config", [EngineConfig(payload_bytes_max=4)])
async def test_bad_completions_are_refused(engine: Engine, given: Given) -> None:
    running = await given.running()
    handle, fence = running.handle, fence_of(running)
    async with unchanged(engine):
        bad: list[tuple[str, object]] = [("result", "text"), ("result_encoding", 5)]
        for field, value in bad:
            await refuses(engine, field, "complete", handle, **{field: value})
            await refuses(
                engine,
                field,
                "complete_execution",
                running.execution_id,
                fence=fence,
                **{field: value},
            )
        await refuses(engine, "result_encoding", "complete", handle, result_encoding="e" * 257)
        await refuses(engine, "completions", "complete_many", handle)
        await refuses(
            engine, "completions", "complete_many", [Completion(handle=handle)] * (BATCH_MAX + 1)
        )
        (outcome,) = await engine.complete_many([Completion(handle=handle, result=b"12345")])
        assert isinstance(outcome, PayloadTooLarge)
        assert (outcome.field, outcome.limit_bytes, outcome.actual_bytes) == ("result", 4, 5)
        with pytest.raises(PayloadTooLarge):
            await engine.complete_execution(running.execution_id, fence=fence, result=b"12345")
        outcomes = await call(engine, "complete_many", [handle])
        assert isinstance(outcomes, list)
        assert isinstance(outcomes[0], InvalidInput)
    assert (await engine.complete(handle, b"1234")).public_state is PublicState.COMPLETED
