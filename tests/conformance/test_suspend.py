"""Suspending: what a worker that pauses gets, and what becomes of the execution."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import OPEN_WAITPOINTS_MAX
from flowfabric.core.conditions import AllConditions, OperatorOnly
from flowfabric.core.decisions import NO_LEASE
from flowfabric.core.events import LeaseEventType, lease_event
from flowfabric.core.handles import HandleKind
from flowfabric.core.records import (
    Requester,
    Suspension,
    SuspensionReason,
    TimeoutBehavior,
    Waitpoint,
    WaitpointState,
)
from flowfabric.core.resumption import ResumePolicy
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
)
from flowfabric.core.waitpoints import Binding, FreshWaitpoint, UsePending, fingerprint
from flowfabric.engine.suspensions import Suspended, SuspendSatisfied
from flowfabric.errors import (
    AlreadySuspended,
    ExecutionNotActive,
    InvalidInput,
    InvalidLeaseForSuspend,
    LeaseConflict,
    LeaseExpired,
    LeaseRevoked,
    NotFound,
    SignalLimitExceeded,
    StaleLease,
    WaitpointAlreadyExists,
)
from flowfabric.testing import SettableClock
from tests.conditions import all_of_waitpoints
from tests.conformance.given import UNKNOWN_ID, Given, fence_of
from tests.conformance.observed import (
    call,
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    unchanged,
)
from tests.conformance.pausing import APPROVED, new_id, pause, paused, suspension_of, waitpoint_of

DEEP = all_of_waitpoints(["gate"])
for _ in range(3):
    DEEP = AllConditions((DEEP,))
"""As deep as a condition may be."""


async def test_suspending_releases_the_lease_and_parks_the_attempt(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running(policy={"timeout_policy": {"attempt_timeout_ms": 10_000}})
    before = await execution_of(engine, claimed.execution_id)
    cursor = await cursor_of(engine)
    given.clock.advance(ms=400)
    now_ms = given.clock.now_ms()
    outcome = await engine.suspend(
        claimed.handle,
        resume_condition=APPROVED,
        reason_code="waiting_for_approval",
        timeout_at_ms=now_ms + 5_000,
    )
    assert isinstance(outcome, Suspended)
    details = outcome.details
    after = await execution_of(engine, claimed.execution_id)
    assert after == structs.replace(
        before,
        **NO_LEASE,
        lifecycle_phase=LifecyclePhase.SUSPENDED,
        ownership_state=OwnershipState.UNOWNED,
        eligibility_state=EligibilityState.NOT_APPLICABLE,
        blocking_reason=BlockingReason.WAITING_FOR_APPROVAL,
        blocking_detail="waiting_for_approval: gate",
        attempt_state=AttemptState.ATTEMPT_INTERRUPTED,
        public_state=PublicState.SUSPENDED,
        attempt_time_left_ms=9_600,
        current_suspension_id=details.suspension_id,
        current_waitpoint_id=details.waitpoint_id,
        open_waitpoint_count=1,
        last_transition_at_ms=now_ms,
        last_mutation_at_ms=now_ms,
    )
    (attempt,) = await engine.list_attempts(claimed.execution_id)
    assert (attempt.attempt_state, attempt.suspended_at_ms, attempt.suspension_id) == (
        AttemptLifecycle.SUSPENDED,
        now_ms,
        details.suspension_id,
    )
    released = lease_event(before, LeaseEventType.REVOKED, now_ms, "suspend")
    assert await events_since(engine, cursor) == [released]


async def test_suspending_stores_the_pause_and_its_waitpoint(engine: Engine, given: Given) -> None:
    now_ms = given.clock.now_ms()
    suspension_id = new_id()
    pause = await paused(
        given,
        suspension_id=suspension_id,
        resume_policy=ResumePolicy(resume_delay_ms=50, consume_matched_signals=False),
        requested_by="policy",
        timeout_at_ms=now_ms + 5_000,
        timeout_behavior="cancel",
        continuation_metadata_pointer="step 4",
    )
    execution = await execution_of(engine, pause.execution_id)
    assert await suspension_of(engine, pause.execution_id, suspension_id) == Suspension(
        partition_key=execution.partition_key,
        execution_id=pause.execution_id,
        suspension_id=pause.details.suspension_id,
        attempt_index=0,
        waitpoint_id=pause.waitpoint_id,
        reason_code=SuspensionReason.WAITING_FOR_SIGNAL,
        requested_by=Requester.POLICY,
        resume_condition='{"Single":{"waitpoint_key":"gate","matcher":{"ByName":"approved"}}}',
        resume_policy='{"consume_matched_signals":false,"resume_delay_ms":50}',
        timeout_at_ms=now_ms + 5_000,
        timeout_behavior=TimeoutBehavior.CANCEL,
        continuation_metadata_pointer="step 4",
        created_at_ms=now_ms,
    )
    assert await waitpoint_of(engine, pause.execution_id, pause.waitpoint_id) == Waitpoint(
        partition_key=execution.partition_key,
        execution_id=pause.execution_id,
        waitpoint_id=pause.waitpoint_id,
        waitpoint_key=pause.details.waitpoint_key,
        suspension_id=pause.details.suspension_id,
        attempt_index=0,
        state=WaitpointState.ACTIVE,
        token_kid="k1",
        token_fingerprint=fingerprint(pause.token),
        required_signal_names='["approved"]',
        created_at_ms=now_ms,
        activated_at_ms=now_ms,
        expires_at_ms=now_ms + 5_000,
    )
    assert pause.details.suspension_id == suspension_id


async def test_the_handle_of_a_suspended_attempt_names_the_same_lease(
    engine: Engine, given: Given
) -> None:
    pause = await paused(given)
    held = pause.claimed.handle
    assert structs.replace(pause.handle, kind=held.kind, signature=b"") == structs.replace(
        held, signature=b""
    )
    assert pause.handle.kind is HandleKind.SUSPENDED
    for verb in ("renew", "complete"):
        async with refused(engine, AlreadySuspended):
            await call(engine, verb, pause.handle)
    async with refused(engine, AlreadySuspended):
        await engine.suspend(pause.handle, resume_condition=APPROVED)


@pytest.mark.parametrize(
    ("reason_code", "blocking"),
    [
        ("waiting_for_signal", BlockingReason.WAITING_FOR_SIGNAL),
        ("step_boundary", BlockingReason.WAITING_FOR_SIGNAL),
        ("waiting_for_approval", BlockingReason.WAITING_FOR_APPROVAL),
        ("waiting_for_callback", BlockingReason.WAITING_FOR_CALLBACK),
        ("waiting_for_tool_result", BlockingReason.WAITING_FOR_TOOL_RESULT),
        ("waiting_for_operator_review", BlockingReason.PAUSED_BY_OPERATOR),
        ("manual_pause", BlockingReason.PAUSED_BY_OPERATOR),
        ("paused_by_policy", BlockingReason.PAUSED_BY_POLICY),
        ("paused_by_budget", BlockingReason.WAITING_FOR_BUDGET),
    ],
)
async def test_the_reason_decides_what_people_see(
    engine: Engine, given: Given, reason_code: str, blocking: BlockingReason
) -> None:
    pause = await paused(given, reason_code=reason_code)
    snapshot = await engine.describe_execution(pause.execution_id)
    assert snapshot is not None
    assert (snapshot.blocking_reason, snapshot.current_waitpoint) == (blocking, pause.waitpoint_id)
    said = await engine.explain_execution(pause.execution_id)
    kind = "" if blocking is BlockingReason.WAITING_FOR_SIGNAL else f" ({blocking})"
    assert said.sentence == f"It is suspended{kind} until it gets a signal: 'gate'."
    assert said.detail["blocking_detail"] == f"{reason_code}: gate"


# Waitpoints of a pause ----------------------------------------------------------


async def test_each_key_of_the_condition_gets_a_waitpoint_with_its_own_token(
    engine: Engine, given: Given
) -> None:
    pause = await paused(given, all_of_waitpoints(["b", "a", "c"]))
    extras = pause.details.additional_waitpoints
    assert pause.details.waitpoint_key == "b"
    assert [extra.waitpoint_key for extra in extras] == ["a", "c"]
    revealed = {pause.token.reveal(), *(extra.waitpoint_token.reveal() for extra in extras)}
    assert len(revealed) == 3
    assert (await execution_of(engine, pause.execution_id)).open_waitpoint_count == 3


async def test_waitpoints_keep_the_order_and_ids_they_are_bound_with(
    engine: Engine, given: Given
) -> None:
    ids = [new_id() for _ in range(3)]
    keys = ["first", "second", "third"]
    bindings = [
        FreshWaitpoint(waitpoint_key=key, waitpoint_id=each)
        for key, each in zip(keys, ids, strict=True)
    ]
    pause = await paused(given, all_of_waitpoints(reversed(keys)), waitpoints=bindings)
    extras = pause.details.additional_waitpoints
    assert [pause.waitpoint_id, *(extra.waitpoint_id for extra in extras)] == ids


async def test_a_waitpoint_without_a_key_is_called_after_its_id(given: Given) -> None:
    pause = await paused(given, OperatorOnly())
    assert pause.details.waitpoint_key == f"wpk:{pause.waitpoint_id}"


async def test_an_id_of_a_waitpoint_is_never_used_twice(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    await pause.signal()
    again = await given.taken()
    binding = FreshWaitpoint(waitpoint_key="gate", waitpoint_id=pause.waitpoint_id)
    async with refused(engine, WaitpointAlreadyExists):
        await engine.suspend(again.handle, resume_condition=APPROVED, waitpoints=[binding])


async def test_an_id_of_a_suspension_is_never_used_twice(engine: Engine, given: Given) -> None:
    suspension_id = new_id()
    pause = await paused(given, suspension_id=suspension_id)
    await pause.signal()
    again = await given.taken()
    async with refused(engine, InvalidInput) as caught:
        await engine.suspend(again.handle, resume_condition=APPROVED, suspension_id=suspension_id)
    assert caught.value.field == "suspension_id"


async def test_an_execution_has_a_bounded_number_of_open_waitpoints(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    for _ in range(OPEN_WAITPOINTS_MAX - 1):
        await engine.create_waitpoint(claimed.handle, expires_in_ms=1_000)
    async with refused(engine, SignalLimitExceeded):
        await engine.suspend(claimed.handle, resume_condition=all_of_waitpoints(["a", "b"]))
    await engine.create_waitpoint(claimed.handle, expires_in_ms=1_000)
    async with refused(engine, SignalLimitExceeded):
        await engine.create_waitpoint(claimed.handle, expires_in_ms=1_000)


# Timeouts -----------------------------------------------------------------------


async def test_a_suspension_without_a_timeout_takes_the_one_of_the_policy(
    engine: Engine, given: Given
) -> None:
    policy = {"suspension_policy": {"default_timeout_ms": 7_000, "timeout_behavior": "escalate"}}
    pause = await paused(given, fields={"policy": policy})
    stored = await suspension_of(engine, pause.execution_id, pause.details.suspension_id)
    assert (stored.timeout_at_ms, stored.timeout_behavior) == (
        given.clock.now_ms() + 7_000,
        TimeoutBehavior.ESCALATE,
    )


async def test_a_timeout_may_count_from_when_the_execution_suspends(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    pause = await paused(given, timeout_in_ms=5_000)
    stored = await suspension_of(engine, pause.execution_id, pause.details.suspension_id)
    assert stored.timeout_at_ms == clock.now_ms() + 5_000
    claimed = await given.running()
    for wrong in ({"timeout_in_ms": -1}, {"timeout_in_ms": 1, "timeout_at_ms": clock.now_ms()}):
        await refuses(
            engine,
            "timeout_in_ms",
            "suspend",
            claimed.handle,
            resume_condition=APPROVED,
            **wrong,
        )


async def test_a_timeout_that_has_just_passed_is_accepted_and_due(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    pause = await paused(given, timeout_at_ms=clock.now_ms() - 600_000)
    assert (await engine.next_due())["suspension_timeout"] == -600_000
    claimed = await given.running()
    async with refused(engine, InvalidInput) as caught:
        await engine.suspend(
            claimed.handle, resume_condition=APPROVED, timeout_at_ms=clock.now_ms() - 600_001
        )
    earliest_ms = clock.now_ms() - 600_000
    assert caught.value.field == "timeout_at_ms"
    assert caught.value.problem == f"timeout_at_in_past: must be {earliest_ms} or later"
    assert await engine.read_execution_state(pause.execution_id) is PublicState.SUSPENDED


# Who may ------------------------------------------------------------------------


async def test_only_the_live_lease_may_suspend(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    for fields in ({"lease_epoch": 2}, {"lease_id": new_id()}, {"attempt_id": new_id()}):
        async with refused(engine, StaleLease):
            await engine.suspend_by_triple(
                claimed.execution_id, fence=fence_of(claimed, **fields), resume_condition=APPROVED
            )
    async with refused(engine, InvalidLeaseForSuspend):
        await engine.suspend_by_triple(
            claimed.execution_id,
            fence=fence_of(claimed, attempt_index=3),
            resume_condition=APPROVED,
        )


async def test_a_worker_that_was_replaced_cannot_suspend(engine: Engine, given: Given) -> None:
    old = await given.expired_lease()
    await given.taken()
    async with refused(engine, LeaseConflict):
        await engine.suspend(old.handle, resume_condition=APPROVED)


async def test_a_dead_lease_cannot_suspend(engine: Engine, given: Given) -> None:
    overdue = await given.overdue_lease()
    with pytest.raises(LeaseExpired):
        await engine.suspend(overdue.handle, resume_condition=APPROVED)
    state = await execution_of(engine, overdue.execution_id)
    assert state.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE
    revoked = await given.revoked()
    async with refused(engine, LeaseRevoked):
        await engine.suspend(revoked.handle, resume_condition=APPROVED)


@pytest.mark.parametrize("state", ["completed", "failed", "parked", "retrying"])
async def test_only_active_executions_suspend(engine: Engine, given: Given, state: str) -> None:
    claimed = await getattr(given, state)()
    async with refused(engine, ExecutionNotActive):
        await engine.suspend(claimed.handle, resume_condition=APPROVED)


async def test_a_second_suspend_by_the_same_holder_is_told_so(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    async with refused(engine, AlreadySuspended):
        await engine.suspend(pause.claimed.handle, resume_condition=APPROVED)


async def test_suspending_by_triple_gives_a_handle_to_observe_with(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running(ttl_ms=12_345)
    outcome = await engine.suspend_by_triple(
        claimed.execution_id, fence=fence_of(claimed), resume_condition=APPROVED
    )
    assert isinstance(outcome, Suspended)
    assert outcome.handle.kind is HandleKind.SUSPENDED
    assert structs.replace(
        outcome.handle, kind=claimed.handle.kind, signature=b""
    ) == structs.replace(claimed.handle, signature=b"")
    assert await engine.observe_signals(outcome.handle) == ()


async def test_suspending_what_does_not_exist_says_so(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    async with refused(engine, NotFound):
        await engine.suspend_by_triple(
            UNKNOWN_ID, fence=fence_of(claimed), resume_condition=APPROVED
        )


# Repeats ------------------------------------------------------------------------


async def test_a_repeat_with_the_same_key_gets_the_first_answer(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    first = await engine.suspend(
        claimed.handle, resume_condition=all_of_waitpoints(["a", "b"]), idempotency_key="once"
    )
    async with unchanged(engine):
        again = await engine.suspend(
            claimed.handle, resume_condition=APPROVED, idempotency_key="once"
        )
        by_triple = await engine.suspend_by_triple(
            claimed.execution_id,
            fence=fence_of(claimed),
            resume_condition=APPROVED,
            idempotency_key="once",
        )
    assert first == again == by_triple


async def test_a_repeat_by_a_stranger_is_refused(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    await engine.suspend(claimed.handle, resume_condition=APPROVED, idempotency_key="once")
    async with refused(engine, StaleLease):
        await engine.suspend_by_triple(
            claimed.execution_id,
            fence=fence_of(claimed, lease_id=new_id()),
            resume_condition=APPROVED,
            idempotency_key="once",
        )


async def test_the_same_key_of_another_execution_is_another_key(
    engine: Engine, given: Given
) -> None:
    one = await paused(given, idempotency_key="once")
    other = await paused(given, idempotency_key="once")
    assert one.details.suspension_id != other.details.suspension_id


async def test_a_key_is_forgotten_when_the_pause_is_long_over(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running(ttl_ms=1_000_000)
    first = await pause(
        given, claimed, timeout_at_ms=clock.now_ms() + 1_000, idempotency_key="once"
    )
    await first.signal()
    resumed = await given.taken(ttl_ms=1_000_000)
    clock.advance(ms=60_999)
    again = await engine.suspend(resumed.handle, resume_condition=APPROVED, idempotency_key="once")
    assert again.details == first.details
    clock.advance(ms=1)
    anew = await engine.suspend(resumed.handle, resume_condition=APPROVED, idempotency_key="once")
    assert anew.details.suspension_id != first.details.suspension_id


async def test_an_answer_that_kept_the_lease_is_repeated_as_such(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    pending = await engine.create_waitpoint(claimed.handle, "gate", expires_in_ms=10_000)
    await engine.deliver_signal(
        claimed.execution_id,
        pending.waitpoint_id,
        waitpoint_token=pending.waitpoint_token,
        signal_name="approved",
    )
    bindings: list[Binding] = [UsePending(waitpoint_id=pending.waitpoint_id)]
    first = await engine.suspend(
        claimed.handle, resume_condition=APPROVED, waitpoints=bindings, idempotency_key="once"
    )
    assert isinstance(first, SuspendSatisfied)
    async with unchanged(engine):
        again = await engine.suspend(
            claimed.handle, resume_condition=APPROVED, waitpoints=bindings, idempotency_key="once"
        )
    assert again == first
