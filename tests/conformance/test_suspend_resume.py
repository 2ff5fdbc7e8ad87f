"""Coming back from a pause: by an operator, by time, by a grant; and the list of who is away."""

import pytest
from msgspec import json, structs

from flowfabric import Engine
from flowfabric.core.conditions import OperatorOnly, TimeoutOnly, all_of_waitpoints
from flowfabric.core.events import EventCategory
from flowfabric.core.handles import HandleKind
from flowfabric.core.results import AlreadySatisfied
from flowfabric.core.resuming import Resumed, SuspensionExpired
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    PublicState,
    TerminalOutcome,
)
from flowfabric.core.suspend_request import ResumePolicy
from flowfabric.core.suspension_model import (
    SignalEffect,
    SuspensionReason,
    TimeoutBehavior,
    WaitpointState,
)
from flowfabric.engine.resumes import ResumeToken
from flowfabric.engine.suspension_reads import SuspendedExecution
from flowfabric.errors import (
    ClaimGrantExpired,
    ExecutionNotLeaseable,
    ExecutionNotSuspended,
    InvalidClaimGrant,
    InvalidInput,
    NotAResumedExecution,
    NotFound,
    UseClaimResumedExecution,
)
from flowfabric.reconcilers.supervisor import run_due
from flowfabric.testing import SettableClock
from tests.conformance.given import OTHER_WORKER, UNKNOWN_ID, WORKER, Given
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    state_of,
    unchanged,
)
from tests.conformance.pausing import (
    Pause,
    new_id,
    pause,
    paused,
    suspension_of,
    waitpoint_of,
)

TIMEOUT_MS = 5_000

# Operators ------------------------------------------------------------------------


async def test_an_operator_resumes_whatever_the_condition_says(
    engine: Engine, given: Given
) -> None:
    taken = await paused(given, all_of_waitpoints(["a", "b"]))
    cursor = await cursor_of(engine)
    answer = await engine.resume_execution(taken.execution_id, trigger_type="operator")
    assert answer == Resumed(public_state=PublicState.WAITING)
    stored = await suspension_of(engine, taken.execution_id, taken.details.suspension_id)
    assert (stored.close_reason, stored.satisfied_at_ms) == ("resumed_by_operator", None)
    for key in "ab":
        waitpoint = await waitpoint_of(engine, taken.execution_id, taken.waitpoint(key)[0])
        assert (waitpoint.state, waitpoint.close_reason) == (
            WaitpointState.CLOSED,
            "resumed_by_operator",
        )
    (event,) = await events_since(engine, cursor)
    assert (event.category, event.event_type) == (EventCategory.OPERATOR, "resumed")
    assert json.decode(event.details or "") == {
        "suspension_id": taken.details.suspension_id,
        "trigger_type": "operator",
        "resume_delay_ms": 0,
    }
    resumed = await given.taken()
    assert resumed.attempt_id == taken.claimed.attempt_id
    assert await engine.observe_signals(resumed.handle) == ()


async def test_an_operator_may_resume_later(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await paused(given, resume_policy=ResumePolicy(resume_delay_ms=9_999))
    answer = await engine.resume_execution(taken.execution_id, resume_delay_ms=700)
    assert answer == Resumed(public_state=PublicState.DELAYED)
    execution = await execution_of(engine, taken.execution_id)
    assert execution.delay_until_ms == clock.now_ms() + 700
    clock.advance(ms=700)
    assert await run_due(engine) == {"delayed": 1}
    assert (await given.taken()).handle.kind is HandleKind.RESUMED


async def test_only_what_is_suspended_resumes(engine: Engine, given: Given) -> None:
    for state in ("waiting", "running", "completed", "parked"):
        execution_id = await given.state(state)
        async with refused(engine, ExecutionNotSuspended):
            await engine.resume_execution(execution_id)
    async with refused(engine, NotFound):
        await engine.resume_execution(UNKNOWN_ID)
    taken = await paused(given)
    async with unchanged(engine):
        asked = ("resume_execution", taken.execution_id)
        await refuses(engine, "trigger_type", *asked, trigger_type="whim")
        await refuses(engine, "resume_delay_ms", *asked, resume_delay_ms=-1)
    await engine.resume_execution(taken.execution_id)
    async with refused(engine, ExecutionNotSuspended):
        await engine.resume_execution(taken.execution_id)


# Time -----------------------------------------------------------------------------


async def timing_out(given: Given, behavior: str, **fields: object) -> Pause:
    return await paused(
        given,
        all_of_waitpoints(["a", "b"]),
        fields=fields,
        timeout_at_ms=given.clock.now_ms() + TIMEOUT_MS,
        timeout_behavior=behavior,
    )


@pytest.mark.parametrize(
    ("behavior", "outcome", "attempt_end"),
    [
        ("fail", TerminalOutcome.FAILED, AttemptLifecycle.ENDED_FAILURE),
        ("cancel", TerminalOutcome.CANCELLED, AttemptLifecycle.ENDED_CANCELLED),
        ("expire", TerminalOutcome.EXPIRED, AttemptLifecycle.ENDED_FAILURE),
    ],
)
async def test_a_pause_that_lasts_too_long_ends_the_execution(
    engine: Engine,
    given: Given,
    clock: SettableClock,
    behavior: str,
    outcome: TerminalOutcome,
    attempt_end: AttemptLifecycle,
) -> None:
    taken = await timing_out(given, behavior, policy={"retry_policy": {"max_retries": 5}})
    clock.advance(ms=TIMEOUT_MS - 1)
    async with unchanged(engine):
        assert await run_due(engine) == {}
        assert await engine.expire_suspension(taken.execution_id) == AlreadySatisfied(
            reason="not_yet_due"
        )
    cursor = await cursor_of(engine)
    clock.advance(ms=1)
    assert await engine.expire_suspension(taken.execution_id) == SuspensionExpired(
        behavior_applied=TimeoutBehavior(behavior)
    )
    execution = await execution_of(engine, taken.execution_id)
    assert (
        execution.lifecycle_phase,
        execution.terminal_outcome,
        execution.attempt_state,
        execution.failure_reason,
        execution.completed_at_ms,
        execution.current_suspension_id,
        execution.open_waitpoint_count,
    ) == (
        LifecyclePhase.TERMINAL,
        outcome,
        AttemptState.ATTEMPT_TERMINAL,
        f"suspension_timeout:{behavior}",
        clock.now_ms(),
        None,
        0,
    )
    (attempt,) = await engine.list_attempts(taken.execution_id)
    assert (attempt.attempt_state, attempt.ended_at_ms) == (attempt_end, clock.now_ms())
    stored = await suspension_of(engine, taken.execution_id, taken.details.suspension_id)
    assert stored.close_reason == f"timed_out_{behavior}"
    for key in "ab":
        waitpoint = await waitpoint_of(engine, taken.execution_id, taken.waitpoint(key)[0])
        assert waitpoint.close_reason == f"timed_out_{behavior}"
    (event,) = await events_since(engine, cursor)
    assert (event.category, event.event_type) == (EventCategory.COMPLETION, outcome)
    assert await engine.observe_signals(taken.handle) == ()
    async with unchanged(engine):
        assert await engine.expire_suspension(taken.execution_id) == AlreadySatisfied(
            reason="not_suspended_cleaned"
        )


@pytest.mark.parametrize("behavior", ["auto_resume_with_timeout_signal", "auto_resume"])
async def test_a_timeout_may_resume_with_a_signal_that_says_so(
    engine: Engine, given: Given, clock: SettableClock, behavior: str
) -> None:
    taken = await paused(
        given,
        all_of_waitpoints(["a", "b"]),
        resume_policy=ResumePolicy(resume_delay_ms=60_000),
        timeout_at_ms=clock.now_ms() + TIMEOUT_MS,
        timeout_behavior=behavior,
    )
    await taken.signal("first", key="b")
    clock.advance(ms=TIMEOUT_MS)
    cursor = await cursor_of(engine)
    assert await run_due(engine) == {"suspension_timeout": 1}
    execution = await execution_of(engine, taken.execution_id)
    assert (execution.public_state, execution.attempt_state, execution.delay_until_ms) == (
        PublicState.WAITING,
        AttemptState.ATTEMPT_INTERRUPTED,
        None,
    )
    assert await events_since(engine, cursor) == []
    resumed = await given.taken()
    signals = await engine.observe_signals(resumed.handle)
    assert [signal.signal_name for signal in signals] == ["first", "timeout"]
    timeout = signals[1]
    assert (
        timeout.signal_category,
        timeout.source_type,
        timeout.source_identity,
        timeout.payload,
        timeout.accepted_at_ms,
    ) == ("system", "system", "suspension_timeout", None, clock.now_ms())
    view = await engine.describe_suspension(taken.execution_id, taken.details.suspension_id)
    assert view is not None
    assert (view.resumed, view.close_reason) == (True, "timed_out_auto_resume")


async def test_a_timeout_may_hand_over_to_an_operator(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await timing_out(given, "escalate")
    before = await execution_of(engine, taken.execution_id)
    stored = await suspension_of(engine, taken.execution_id, taken.details.suspension_id)
    due_ms = clock.advance(ms=TIMEOUT_MS)
    assert await run_due(engine) == {"suspension_timeout": 1}
    assert await execution_of(engine, taken.execution_id) == structs.replace(
        before,
        blocking_reason=BlockingReason.PAUSED_BY_OPERATOR,
        blocking_detail=f"suspension timeout at {due_ms}: needs an operator",
        last_mutation_at_ms=due_ms,
    )
    assert await suspension_of(
        engine, taken.execution_id, taken.details.suspension_id
    ) == structs.replace(
        stored,
        reason_code=SuspensionReason.WAITING_FOR_OPERATOR_REVIEW,
        timeout_at_ms=None,
        timeout_behavior=None,
    )
    clock.advance(days=30)
    assert "suspension_timeout" not in await engine.next_due()
    assert await taken.signal(key="a") is SignalEffect.APPENDED
    assert await taken.signal(key="b") is SignalEffect.SATISFIED


async def test_what_only_its_timeout_resumes(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await paused(
        given,
        TimeoutOnly(),
        timeout_at_ms=clock.now_ms() + TIMEOUT_MS,
        timeout_behavior="auto_resume",
    )
    assert await taken.signal() is SignalEffect.APPENDED
    clock.advance(ms=TIMEOUT_MS)
    await run_due(engine)
    assert (await given.taken()).attempt_id == taken.claimed.attempt_id


async def test_a_timeout_never_touches_what_was_resumed(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await timing_out(given, "fail")
    await taken.signal(key="a")
    await taken.signal(key="b")
    resumed = await given.taken(ttl_ms=1_000_000)
    clock.advance(ms=TIMEOUT_MS)
    async with unchanged(engine):
        assert await run_due(engine) == {}
        assert await engine.expire_suspension(taken.execution_id) == AlreadySatisfied(
            reason="not_suspended_cleaned"
        )
    await engine.complete(resumed.handle)


async def test_a_missing_execution_has_no_timeout(engine: Engine, given: Given) -> None:
    assert await engine.expire_suspension(UNKNOWN_ID) == AlreadySatisfied(
        reason="not_found_cleaned"
    )
    taken = await paused(given)
    async with unchanged(engine):
        assert await engine.expire_suspension(taken.execution_id) == AlreadySatisfied(
            reason="not_yet_due"
        )


async def test_due_pauses_are_handled_in_bounded_batches(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    for _ in range(3):
        await timing_out(given, "fail")
    clock.advance(ms=TIMEOUT_MS)
    swept = await engine.expire_due_suspensions(limit=2)
    assert (swept.acted, swept.full) == (2, True)
    swept = await engine.expire_due_suspensions(limit=2)
    assert (swept.acted, swept.full) == (1, False)
    for sweep in ("expire_due_suspensions", "expire_due_waitpoints"):
        await refuses(engine, "limit", sweep, limit=0)


async def test_a_due_pause_wakes_the_reconcilers(engine: Engine, given: Given) -> None:
    claimed = await given.running(ttl_ms=100_000)
    with engine.store.hints(["due"]) as hints:
        await pause(given, claimed, timeout_at_ms=given.clock.now_ms() + 100)
        assert await hints.wait(5)


# By grant -------------------------------------------------------------------------


async def granted(given: Given) -> Pause:
    """Resumed, and reserved for `WORKER`."""
    taken = await paused(given)
    await taken.signal()
    await given.engine.issue_claim_grant(taken.execution_id, **WORKER, grant_ttl_ms=1_000)
    return taken


async def test_a_grant_continues_the_attempt(engine: Engine, given: Given) -> None:
    taken = await granted(given)
    async with refused(engine, UseClaimResumedExecution):
        await engine.claim_execution(taken.execution_id, **WORKER)
    lease_id = new_id()
    claimed = await engine.claim_resumed_execution(
        taken.execution_id,
        **WORKER,
        lane_id="default",
        lease_id=lease_id,
        lease_ttl_ms=4_000,
        current_attempt_index=0,
        remaining_attempt_timeout_ms=2_500,
    )
    now_ms = given.clock.now_ms()
    first = taken.claimed
    assert (claimed.handle.kind, claimed.attempt_id, claimed.attempt_index) == (
        HandleKind.RESUMED,
        first.attempt_id,
        first.attempt_index,
    )
    assert (claimed.lease_id, claimed.lease_epoch) == (lease_id, first.lease_epoch + 1)
    assert (claimed.lease_expires_at_ms, claimed.attempt_deadline_ms) == (
        now_ms + 4_000,
        now_ms + 2_500,
    )
    assert (await state_of(engine)).grants == {}
    async with refused(engine, ExecutionNotLeaseable):
        await engine.claim_resumed_execution(taken.execution_id, **WORKER)
    assert len(await engine.observe_signals(claimed.handle)) == 1


async def test_a_resume_token_is_a_grant_and_a_wish(engine: Engine, given: Given) -> None:
    taken = await paused(given)
    await taken.signal()
    grant = await engine.issue_claim_grant(taken.execution_id, **WORKER)
    claimed = await engine.claim_from_resume_grant(ResumeToken.of(grant, lease_ttl_ms=9_000))
    assert claimed is not None
    assert (claimed.handle.kind, claimed.attempt_id) == (
        HandleKind.RESUMED,
        taken.claimed.attempt_id,
    )
    assert claimed.lease_expires_at_ms == given.clock.now_ms() + 9_000
    async with refused(engine, ExecutionNotLeaseable):
        await engine.claim_from_resume_grant(ResumeToken.of(grant))


async def test_a_resume_token_for_what_has_ended_gives_nothing(
    engine: Engine, given: Given
) -> None:
    taken = await paused(given)
    await taken.signal()
    grant = await engine.issue_claim_grant(taken.execution_id, **WORKER)
    await engine.cancel_execution(taken.execution_id, reason="enough")
    async with unchanged(engine):
        assert await engine.claim_from_resume_grant(ResumeToken.of(grant)) is None
    await refuses(engine, "token", "claim_from_resume_grant", "token")


async def test_a_grant_is_good_for_its_worker_only(engine: Engine, given: Given) -> None:
    taken = await granted(given)
    async with refused(engine, InvalidClaimGrant):
        await engine.claim_resumed_execution(taken.execution_id, **OTHER_WORKER)
    async with refused(engine, InvalidClaimGrant):
        await engine.claim_resumed_execution(
            taken.execution_id, worker_id="worker", worker_instance_id="another-instance"
        )
    async with refused(engine, InvalidClaimGrant):
        await engine.claim_from_resume_grant(
            ResumeToken(execution_id=taken.execution_id, grant_id=new_id(), **WORKER)
        )
    ungranted = await paused(given)
    await ungranted.signal()
    async with refused(engine, InvalidClaimGrant):
        await engine.claim_resumed_execution(ungranted.execution_id, **WORKER)


async def test_an_expired_grant_is_removed(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await granted(given)
    clock.advance(ms=1_001)
    with pytest.raises(ClaimGrantExpired):
        await engine.claim_resumed_execution(taken.execution_id, **WORKER)
    assert (await state_of(engine)).grants == {}


async def test_only_resumed_work_is_claimed_as_resumed(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    fresh = await given.waiting()
    async with refused(engine, NotAResumedExecution):
        await engine.claim_resumed_execution(fresh, **WORKER)
    suspended = await paused(given)
    async with refused(engine, ExecutionNotLeaseable):
        await engine.claim_resumed_execution(suspended.execution_id, **WORKER)
    delayed = await paused(given)
    await engine.resume_execution(delayed.execution_id, resume_delay_ms=1_000)
    async with refused(engine, ExecutionNotLeaseable):
        await engine.claim_resumed_execution(delayed.execution_id, **WORKER)
    async with refused(engine, NotFound):
        await engine.claim_resumed_execution(UNKNOWN_ID, **WORKER)


async def test_what_a_claim_says_must_fit(engine: Engine, given: Given) -> None:
    taken = await granted(given)
    async with refused(engine, InvalidInput) as caught:
        await engine.claim_resumed_execution(taken.execution_id, **WORKER, lane_id="other")
    assert caught.value.problem.startswith("lane_mismatch:")
    async with unchanged(engine):
        for field, arguments in (
            ("current_attempt_index", {"current_attempt_index": 4}),
            ("current_attempt_index", {"current_attempt_index": -1}),
            ("lease_ttl_ms", {"lease_ttl_ms": 0}),
            ("lease_id", {"lease_id": "mine"}),
            ("remaining_attempt_timeout_ms", {"remaining_attempt_timeout_ms": -1}),
        ):
            named: dict[str, object] = {**WORKER, **arguments}
            await refuses(engine, field, "claim_resumed_execution", taken.execution_id, **named)


async def test_the_attempt_keeps_the_time_it_had_left(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 10_000}}
    claimed = await given.running(policy=policy)
    clock.advance(ms=4_000)
    taken = await pause(given, claimed, OperatorOnly())
    clock.advance(days=3)
    await engine.resume_execution(taken.execution_id)
    await engine.issue_claim_grant(taken.execution_id, **WORKER)
    resumed = await engine.claim_resumed_execution(taken.execution_id, **WORKER)
    assert resumed.attempt_deadline_ms == clock.now_ms() + 6_000


# Who is away ----------------------------------------------------------------------


async def test_the_list_of_the_suspended_goes_by_time(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    pauses = []
    for lane in ("default", "other", "default"):
        pauses.append(
            await paused(
                given,
                fields={"lane_id": lane},
                reason_code="waiting_for_approval",
                timeout_at_ms=clock.now_ms() + TIMEOUT_MS,
            )
        )
        clock.advance(ms=5)
    await given.running()
    first = await engine.list_suspended(limit=2)
    assert first.executions == tuple(
        SuspendedExecution(
            execution_id=each.execution_id,
            suspension_id=each.details.suspension_id,
            suspended_at_ms=clock.now_ms() - ago_ms,
            timeout_at_ms=clock.now_ms() - ago_ms + TIMEOUT_MS,
            reason=SuspensionReason.WAITING_FOR_APPROVAL,
        )
        for each, ago_ms in zip(pauses[:2], (15, 10), strict=True)
    )
    second = await engine.list_suspended(cursor=first.next_cursor, limit=2)
    assert [each.execution_id for each in second.executions] == [pauses[2].execution_id]
    assert second.next_cursor is None
    for each in pauses:
        await engine.resume_execution(each.execution_id)
    assert (await engine.list_suspended()).executions == ()


async def test_the_list_can_be_of_one_partition(engine: Engine, given: Given) -> None:
    one = await paused(given, fields={"lane_id": "one"})
    other = await paused(given, fields={"lane_id": "two"})
    partition = (await execution_of(engine, one.execution_id)).partition_key
    assert (await execution_of(engine, other.execution_id)).partition_key != partition
    page = await engine.list_suspended(partition=partition)
    assert [each.execution_id for each in page.executions] == [one.execution_id]
    assert (await engine.list_suspended(limit=0)).executions == ()
    await refuses(engine, "limit", "list_suspended", limit=-1)
    await refuses(engine, "partition", "list_suspended", partition=70_000)
    for cursor in ("", "x", "12", "12-x", f"-{new_id()}"):
        await refuses(engine, "cursor", "list_suspended", cursor=cursor)


async def test_a_suspended_execution_is_not_ready(engine: Engine, given: Given) -> None:
    taken = await paused(given)
    async with unchanged(engine):
        assert await engine.claim(**WORKER) is None
    execution = await execution_of(engine, taken.execution_id)
    assert execution.eligibility_state is EligibilityState.NOT_APPLICABLE
