"""Failing: again later, or for good."""

import pytest

from flowfabric import Engine
from flowfabric.core.bounds import BATCH_MAX, TEXT_BYTES_MAX
from flowfabric.core.policies import FixedBackoff, RetryPolicy
from flowfabric.core.results import RetryScheduled, TerminalFailed
from flowfabric.core.states import AttemptLifecycle, FailureClass, PublicState
from flowfabric.engine.executions import FailureReport
from flowfabric.errors import ExecutionNotActive
from flowfabric.testing import SettableClock
from tests.conformance.expected import (
    attempt_ended,
    completion_event,
    ended,
    lease_event,
    to_be_retried,
)
from tests.conformance.given import BACKOFF_MS, RETRYING, TAGGED, Given, fence_of
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    unchanged,
)

FORMS = ["fail", "fail_many", "fail_execution"]


@pytest.mark.parametrize("form", FORMS)
async def test_without_a_retry_policy_a_failure_is_the_end(
    engine: Engine, given: Given, clock: SettableClock, form: str
) -> None:
    running = await given.running(**TAGGED)
    execution_id = running.execution_id
    before = await execution_of(engine, execution_id)
    (attempt,) = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance("1s")
    failed: object
    if form == "fail":
        failed = await engine.fail(running.handle, "broken", category="disk")
    elif form == "fail_many":
        report = FailureReport(handle=running.handle, reason="broken", category="disk")
        (failed,) = await engine.fail_many([report])
    else:
        failed = await engine.fail_execution(
            execution_id, fence=fence_of(running), reason="broken", category="disk"
        )
    assert failed == TerminalFailed(execution_id=execution_id)
    after = await execution_of(engine, execution_id)
    assert after == ended(before, PublicState.FAILED, now_ms, failure_reason="broken")
    assert await engine.list_attempts(execution_id) == (
        attempt_ended(attempt, AttemptLifecycle.ENDED_FAILURE, now_ms, "broken", "disk"),
    )
    assert await events_since(engine, cursor) == [
        lease_event(before, "revoked", now_ms, "failed_terminal"),
        completion_event(after, now_ms),
    ]


@pytest.mark.parametrize("form", FORMS)
async def test_with_retries_left_a_failure_waits_for_the_next_attempt(
    engine: Engine, given: Given, clock: SettableClock, form: str
) -> None:
    policy = RETRYING | {"timeout_policy": {"attempt_timeout_ms": 9_000}}
    running = await given.running(
        policy=policy, execution_deadline_at_ms=clock.now_ms() + 99_000, **TAGGED
    )
    execution_id = running.execution_id
    before = await execution_of(engine, execution_id)
    (attempt,) = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance("1s")
    failed: object
    if form == "fail":
        failed = await engine.fail(running.handle, "flaky")
    elif form == "fail_many":
        (failed,) = await engine.fail_many([FailureReport(handle=running.handle, reason="flaky")])
    else:
        failed = await engine.fail_execution(execution_id, fence=fence_of(running), reason="flaky")
    until_ms = now_ms + BACKOFF_MS
    assert failed == RetryScheduled(
        execution_id=execution_id, delay_until_ms=until_ms, next_attempt_index=1
    )
    assert await execution_of(engine, execution_id) == to_be_retried(
        before, "flaky", until_ms, now_ms
    )
    assert await engine.list_attempts(execution_id) == (
        attempt_ended(attempt, AttemptLifecycle.ENDED_FAILURE, now_ms, "flaky", "transient"),
    )
    assert await events_since(engine, cursor) == [
        lease_event(before, "revoked", now_ms, "failed_retry_scheduled")
    ]


async def test_failing_again_gives_the_same_answer_and_changes_nothing(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    failed = await given.failed()
    retrying = await given.retrying()
    until_ms = clock.now_ms() + BACKOFF_MS
    clock.advance(ms=10)
    async with unchanged(engine):
        assert await engine.fail(failed.handle, "other") == TerminalFailed(
            execution_id=failed.execution_id
        )
        scheduled = RetryScheduled(
            execution_id=retrying.execution_id, delay_until_ms=until_ms, next_attempt_index=1
        )
        assert await engine.fail(retrying.handle, "other") == scheduled
        report = FailureReport(handle=retrying.handle, reason="other")
        assert await engine.fail_many([report, report]) == [scheduled, scheduled]
        assert scheduled == await engine.fail_execution(
            retrying.execution_id, fence=fence_of(retrying), reason="other"
        )


async def test_a_failure_repeated_after_the_retry_began_is_too_late(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    retrying = await given.retrying()
    clock.advance(ms=BACKOFF_MS)
    await engine.promote_delayed(retrying.execution_id)
    async with unchanged(engine):
        again = await engine.fail(retrying.handle, "other")
        assert isinstance(again, RetryScheduled)
    second = await given.taken()
    await engine.complete(second.handle)
    async with refused(engine, ExecutionNotActive):
        await engine.fail(retrying.handle, "other")


async def test_class_and_category_decide_whether_to_retry(engine: Engine, given: Given) -> None:
    cases: list[tuple[str, str, list[str], bool]] = [
        ("transient", "", [], True),
        ("infra_crash", "", [], True),
        ("timeout", "", [], True),
        ("permanent", "", [], False),
        ("cancelled", "", [], False),
        ("transient", "anything", [], True),
        ("transient", "disk", ["disk"], True),
        ("transient", "net", ["disk"], False),
        ("transient", "", ["disk"], False),
        ("timeout", "", ["timeout"], True),
        ("permanent", "disk", ["disk"], False),
    ]
    for failure_class, category, categories, retried in cases:
        policy = {"retry_policy": {"max_retries": 1, "retryable_categories": categories}}
        running = await given.running(policy=policy)
        failed = await engine.fail(
            running.handle, "x", failure_class=FailureClass(failure_class), category=category
        )
        assert isinstance(failed, RetryScheduled) == retried, (failure_class, category)
        (attempt,) = await engine.list_attempts(running.execution_id)
        assert attempt.failure_category == (category or failure_class)


async def test_retries_are_counted_and_back_off(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    backoff = {"type": "exponential", "initial_delay_ms": 101, "max_delay_ms": 200}
    policy = {"retry_policy": {"max_retries": 3, "backoff": backoff | {"multiplier": 1.5}}}
    execution_id = await given.waiting(policy=policy)
    for index, delay_ms in enumerate((101, 151, 200)):
        running = await given.claimed(execution_id)
        assert await engine.fail(running.handle, "again") == RetryScheduled(
            execution_id=execution_id,
            delay_until_ms=clock.now_ms() + delay_ms,
            next_attempt_index=index + 1,
        )
        clock.advance(ms=delay_ms)
        await engine.promote_delayed(execution_id)
    last = await given.claimed(execution_id)
    assert await engine.fail(last.handle, "again") == TerminalFailed(execution_id=execution_id)
    assert [each.attempt_index for each in await engine.list_attempts(execution_id)] == [0, 1, 2, 3]


async def test_jitter_spreads_retries_over_the_second_half_of_the_delay(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    backoff = {"type": "exponential", "initial_delay_ms": 60_000, "jitter": True}
    delays = set()
    for _ in range(8):
        running = await given.running(policy={"retry_policy": {"backoff": backoff}})
        failed = await engine.fail(running.handle, "again")
        assert isinstance(failed, RetryScheduled)
        delays.add(failed.delay_until_ms - clock.now_ms())
    assert len(delays) > 1
    assert all(30_000 <= delay_ms <= 60_000 for delay_ms in delays)


async def test_a_retry_policy_may_be_given_with_the_failure(engine: Engine, given: Given) -> None:
    immediately = RetryPolicy(max_retries=1, backoff=FixedBackoff(delay_ms=0))
    for policy, answer in ((immediately, RetryScheduled), (RetryPolicy(max_retries=0), None)):
        running = await given.running(policy=RETRYING)
        failed = await engine.fail_execution(
            running.execution_id, fence=fence_of(running), reason="x", retry_policy=policy
        )
        assert isinstance(failed, answer or TerminalFailed)


async def test_a_long_reason_is_shortened_and_an_unstorable_one_spelled_out(
    engine: Engine, given: Given
) -> None:
    for reason, stored in (
        ("", ""),
        ("ü" * TEXT_BYTES_MAX, "ü" * (TEXT_BYTES_MAX // 2 - 2) + "…"),
        ("a\x00b\ud800", "a\\0b\\ud800"),
    ):
        claimed = await given.failed(reason)
        after = await execution_of(engine, claimed.execution_id)
        assert after.failure_reason == stored


async def test_a_batch_fails_each_and_answers_in_order(engine: Engine, given: Given) -> None:
    final, retried = await given.running(), await given.running(policy=RETRYING)
    lost = await given.revoked()
    outcomes = await engine.fail_many(
        [
            FailureReport(handle=lost.handle, reason="x"),
            FailureReport(handle=retried.handle, reason="x"),
            FailureReport(handle=final.handle, reason="x", failure_class=FailureClass.PERMANENT),
        ]
    )
    names = [type(each).__name__ for each in outcomes]
    assert names == ["LeaseRevoked", "RetryScheduled", "TerminalFailed"]


async def test_bad_failures_are_refused(engine: Engine, given: Given) -> None:
    running = await given.running()
    handle = running.handle
    bad: list[tuple[str, dict[str, object]]] = [
        ("reason", {"reason": 5}),
        ("reason", {"reason": None}),
        ("failure_class", {"reason": "x", "failure_class": "annoying"}),
        ("failure_class", {"reason": "x", "failure_class": None}),
        ("category", {"reason": "x", "category": "c" * 257}),
        ("category", {"reason": "x", "category": 5}),
    ]
    async with unchanged(engine):
        for field, named in bad:
            await refuses(engine, field, "fail", handle, **named)
            by_fence = {"fence": fence_of(running), **named}
            await refuses(engine, field, "fail_execution", running.execution_id, **by_fence)
        await refuses(
            engine,
            "retry_policy",
            "fail_execution",
            running.execution_id,
            fence=fence_of(running),
            reason="x",
            retry_policy={"max_retries": 1},
        )
        await refuses(engine, "reports", "fail_many", handle)
        reports = [FailureReport(handle=handle, reason="x")] * (BATCH_MAX + 1)
        await refuses(engine, "reports", "fail_many", reports)
