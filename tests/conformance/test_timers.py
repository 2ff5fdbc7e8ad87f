"""What time does: leases, delays, attempt timeouts and deadlines."""

import asyncio

import pytest
from msgspec import structs

from flowfabric import Engine, EngineConfig
from flowfabric.core.bounds import BATCH_MAX, ROUTE_KEEP_MS
from flowfabric.core.events import ScannerFilter
from flowfabric.core.ids import ExecutionId
from flowfabric.core.results import AlreadySatisfied, Marked
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    BlockingReason,
    EligibilityState,
    OwnershipState,
    PublicState,
)
from flowfabric.engine.shell import Swept
from flowfabric.errors import NotFound
from flowfabric.reconcilers import SCOPED, SWEEPS, run_due, sweep_of
from flowfabric.testing import SettableClock
from tests.conformance.expected import (
    attempt_ended,
    attempts_ended,
    completion_event,
    ended,
    lease_event,
    to_be_retried,
)
from tests.conformance.given import (
    BACKOFF_MS,
    ENDED,
    RETRYING,
    SET_ASIDE,
    TAGGED,
    UNKNOWN_ID,
    Given,
)
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    unchanged,
)
from tests.conformance.pausing import paused

TIMED = {"timeout_policy": {"attempt_timeout_ms": 2_000}}
SWEEP_NAMES = (
    "expire_due_leases",
    "promote_due_delays",
    "expire_due_attempts",
    "expire_due_deadlines",
    "trim_retention",
    "trim_events",
    "trim_guards",
    "trim_routes",
)


# Leases


async def test_an_expired_lease_leaves_the_execution_ready_for_another(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running(ttl_ms=1_000, policy=TIMED, **TAGGED)
    execution_id = running.execution_id
    before = await execution_of(engine, execution_id)
    attempts = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    clock.advance(ms=999)
    async with unchanged(engine):
        assert await engine.mark_lease_expired_if_due(execution_id) == AlreadySatisfied(
            reason="not_yet_expired"
        )
    now_ms = clock.advance(ms=1)
    assert await engine.mark_lease_expired_if_due(execution_id) == Marked(
        execution_id=execution_id, public_state=PublicState.ACTIVE
    )
    assert await execution_of(engine, execution_id) == structs.replace(
        before,
        ownership_state=OwnershipState.LEASE_EXPIRED_RECLAIMABLE,
        blocking_reason=BlockingReason.WAITING_FOR_WORKER,
        blocking_detail="lease expired, awaiting reclaim",
        attempt_state=AttemptState.ATTEMPT_INTERRUPTED,
        ready=True,
        worker_deaths=1,
        lease_expired_at_ms=now_ms,
        attempt_deadline_ms=None,
        last_mutation_at_ms=now_ms,
    )
    assert await engine.list_attempts(execution_id) == attempts
    assert await events_since(engine, cursor) == [lease_event(before, "expired", now_ms)]


async def test_there_may_be_no_lease_to_expire(engine: Engine, given: Given) -> None:
    reasons = {
        **dict.fromkeys(("waiting", *SET_ASIDE, *ENDED), "not_active"),
        "expired_lease": "already_expired",
        "revoked": "already_revoked",
    }
    for state, reason in reasons.items():
        execution_id = await given.state(state)
        async with unchanged(engine):
            assert await engine.mark_lease_expired_if_due(execution_id) == AlreadySatisfied(
                reason=reason
            ), state
    assert await engine.mark_lease_expired_if_due(UNKNOWN_ID) == AlreadySatisfied(
        reason="execution_not_found"
    )


# Delays


@pytest.mark.parametrize("state", ["delayed", "parked", "retrying"])
async def test_a_delay_ends_when_its_time_has_come(
    engine: Engine, given: Given, clock: SettableClock, state: str
) -> None:
    execution_id = await given.state(state)
    before = await execution_of(engine, execution_id)
    assert before.delay_until_ms is not None
    cursor = await cursor_of(engine)
    clock.set_ms(before.delay_until_ms - 1)
    async with unchanged(engine):
        assert await engine.promote_delayed(execution_id) == AlreadySatisfied(reason="not_yet_due")
    now_ms = clock.advance(ms=1)
    assert await engine.promote_delayed(execution_id) == Marked(
        execution_id=execution_id, public_state=PublicState.WAITING
    )
    assert await execution_of(engine, execution_id) == structs.replace(
        before,
        eligibility_state=EligibilityState.ELIGIBLE_NOW,
        blocking_reason=BlockingReason.WAITING_FOR_WORKER,
        blocking_detail="",
        public_state=PublicState.WAITING,
        ready=True,
        delay_until_ms=None,
        last_mutation_at_ms=now_ms,
    )
    assert await events_since(engine, cursor) == []
    async with unchanged(engine):
        assert await engine.promote_delayed(execution_id) == AlreadySatisfied(reason="not_delayed")


async def test_what_is_not_delayed_is_not_promoted(engine: Engine, given: Given) -> None:
    for state in ("waiting", "waiting_children", "running", "revoked", *ENDED):
        execution_id = await given.state(state)
        async with unchanged(engine):
            assert await engine.promote_delayed(execution_id) == AlreadySatisfied(
                reason="not_delayed"
            ), state
    async with refused(engine, NotFound):
        await engine.promote_delayed(UNKNOWN_ID)


# Attempt timeouts


async def test_an_attempt_that_takes_too_long_expires_the_execution(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running(policy=TIMED, **TAGGED)
    execution_id = running.execution_id
    before = await execution_of(engine, execution_id)
    (attempt,) = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    clock.advance(ms=1_999)
    async with unchanged(engine):
        assert await engine.expire_execution(execution_id, "attempt_timeout") == AlreadySatisfied(
            reason="not_yet_due"
        )
    now_ms = clock.advance(ms=1)
    assert await engine.expire_execution(execution_id, "attempt_timeout") == Marked(
        execution_id=execution_id, public_state=PublicState.EXPIRED
    )
    after = await execution_of(engine, execution_id)
    assert after == ended(before, PublicState.EXPIRED, now_ms, failure_reason="attempt_timeout")
    assert await engine.list_attempts(execution_id) == (
        attempt_ended(
            attempt, AttemptLifecycle.ENDED_FAILURE, now_ms, "attempt_timeout", "timeout"
        ),
    )
    assert await events_since(engine, cursor) == [
        lease_event(before, "expired", now_ms, "expired:attempt_timeout"),
        completion_event(after, now_ms),
    ]


async def test_an_attempt_that_takes_too_long_is_retried_if_the_policy_says_so(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running(policy=TIMED | RETRYING, **TAGGED)
    execution_id = running.execution_id
    before = await execution_of(engine, execution_id)
    (attempt,) = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance(ms=2_000)
    assert await engine.expire_execution(execution_id, "attempt_timeout") == Marked(
        execution_id=execution_id, public_state=PublicState.DELAYED
    )
    until_ms = now_ms + BACKOFF_MS
    assert await execution_of(engine, execution_id) == to_be_retried(
        before, "attempt_timeout", until_ms, now_ms
    )
    assert await engine.list_attempts(execution_id) == (
        attempt_ended(
            attempt, AttemptLifecycle.ENDED_FAILURE, now_ms, "attempt_timeout", "timeout"
        ),
    )
    assert await events_since(engine, cursor) == [
        lease_event(before, "revoked", now_ms, "failed_retry_scheduled")
    ]


async def test_only_a_running_attempt_times_out(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    reasons = {
        **dict.fromkeys(("waiting", *SET_ASIDE, *ENDED), "not_active"),
        **dict.fromkeys(("expired_lease", "revoked"), "not_yet_due"),
    }
    for state, reason in reasons.items():
        execution_id = await given.state(state, policy=TIMED | RETRYING)
        clock.advance("1h")
        async with unchanged(engine):
            answer = await engine.expire_execution(execution_id, "attempt_timeout")
            assert answer == AlreadySatisfied(reason=reason), state
    untimed = await given.running()
    clock.advance("1h")
    assert await engine.expire_execution(
        untimed.execution_id, "attempt_timeout"
    ) == AlreadySatisfied(reason="not_yet_due")


# Deadlines


async def test_a_deadline_ends_an_execution_whatever_it_was_doing(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    for state in (
        "waiting",
        "resumable",
        *SET_ASIDE,
        "running",
        "overdue_lease",
        "expired_lease",
        "revoked",
    ):
        deadline_ms = clock.now_ms() + 100_000
        execution_id = await given.state(state, execution_deadline_at_ms=deadline_ms, **TAGGED)
        before = await execution_of(engine, execution_id)
        attempts = await engine.list_attempts(execution_id)
        cursor = await cursor_of(engine)
        clock.set_ms(deadline_ms - 1)
        async with unchanged(engine):
            answer = await engine.expire_execution(execution_id, "execution_deadline")
            assert answer == AlreadySatisfied(reason="not_yet_due")
        clock.set_ms(deadline_ms)
        assert await engine.expire_execution(execution_id, "execution_deadline") == Marked(
            execution_id=execution_id, public_state=PublicState.EXPIRED
        )
        after = await execution_of(engine, execution_id)
        assert after == ended(
            before, PublicState.EXPIRED, deadline_ms, failure_reason="execution_deadline"
        ), state
        assert await engine.list_attempts(execution_id) == attempts_ended(
            attempts,
            AttemptLifecycle.ENDED_FAILURE,
            deadline_ms,
            "execution_deadline",
            "timeout",
        )
        released = (
            [lease_event(before, "expired", deadline_ms, "expired:execution_deadline")]
            if before.ownership_state is OwnershipState.LEASED
            else []
        )
        told = await events_since(engine, cursor)
        assert told == [*released, completion_event(after, deadline_ms)], state


async def test_what_has_ended_or_has_no_deadline_does_not_expire(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    for state in ENDED:
        execution_id = await given.state(state)
        async with unchanged(engine):
            answer = await engine.expire_execution(execution_id, "execution_deadline")
            assert answer == AlreadySatisfied(reason="already_terminal")
    endless = await given.waiting()
    assert await engine.expire_execution(endless, "execution_deadline") == AlreadySatisfied(
        reason="not_yet_due"
    )
    for phase in ("attempt_timeout", "execution_deadline"):
        async with refused(engine, NotFound):
            await engine.expire_execution(UNKNOWN_ID, phase)
    async with unchanged(engine):
        bad: list[object] = ["later", "", None]
        for phase_ in bad:
            await refuses(engine, "phase", "expire_execution", endless, phase_)


# Sweeps


async def test_a_sweep_takes_the_longest_overdue_first_and_says_whether_there_is_more(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    late = await given.delayed(by_ms=20)
    early = await given.delayed(by_ms=10)
    never = await given.delayed(by_ms=90_000)
    clock.advance(ms=20)
    assert await engine.promote_due_delays(limit=1) == swept(early, full=True)
    assert await engine.read_execution_state(early) is PublicState.WAITING
    assert await engine.promote_due_delays(limit=2) == swept(late)
    assert await engine.read_execution_state(late) is PublicState.WAITING
    assert await engine.read_execution_state(never) is PublicState.DELAYED
    assert await engine.promote_due_delays() == Swept(acted=0, full=False)


def swept(*changed: str, full: bool = False) -> Swept:
    ids = tuple(ExecutionId(each) for each in sorted(changed))
    return Swept(acted=len(ids), full=full, executions=ids)


def in_order(found: Swept) -> Swept:
    return structs.replace(found, executions=tuple(sorted(found.executions)))


async def due_in(given: Given, **fields: object) -> dict[str, str]:
    """An execution for each sweep that looks after some only, by the name of its reconciler."""
    now_ms = given.clock.now_ms()
    waited = await given.running(ttl_ms=60_000, **fields)
    await given.engine.create_waitpoint(waited.handle, "gate", expires_in_ms=1_000)
    suspended = await paused(given, fields=fields, timeout_at_ms=now_ms + 1_000)
    return {
        "retention": (
            await given.completed(b"", policy={"retention_policy": {"completed_ms": 1}}, **fields)
        ).execution_id,
        "lease_expiry": (await given.running(ttl_ms=1_000, **fields)).execution_id,
        "attempt_timeout": (
            await given.running(policy=TIMED, ttl_ms=60_000, **fields)
        ).execution_id,
        "delayed": await given.delayed(by_ms=1_000, **fields),
        "deadline": await given.waiting(execution_deadline_at_ms=now_ms + 1_000, **fields),
        "suspension_timeout": suspended.execution_id,
        "waitpoint_expiry": waited.execution_id,
    }


@pytest.mark.parametrize(
    "only",
    [
        ScannerFilter(namespace="shop"),
        ScannerFilter(tag=("app.tenant", "acme")),
        ScannerFilter(namespace="shop", tag=("app.tenant", "acme")),
    ],
    ids=str,
)
async def test_a_sweep_of_some_leaves_all_others_alone(
    engine: Engine, given: Given, clock: SettableClock, only: ScannerFilter
) -> None:
    theirs = await due_in(given, namespace="other", tags={"app.tenant": "other"})
    ours = await due_in(given, namespace="shop", tags={"app.tenant": "acme"})
    before = {name: await engine.describe_execution(each) for name, each in theirs.items()}
    assert SCOPED.keys() == ours.keys()
    clock.advance(ms=2_000)
    for name in SCOPED:
        swept = await sweep_of(name, only)(engine)
        assert (name, swept.acted) == (name, 1)
        assert (await sweep_of(name, only)(engine)).acted == 0
    assert {name: await engine.describe_execution(each) for name, each in theirs.items()} == before
    for name, each in ours.items():
        assert await engine.describe_execution(each) != before[name]
    acted = await run_due(engine)
    assert {name: acted[name] for name in SCOPED} == dict.fromkeys(SCOPED, 1)


async def test_what_is_left_alone_does_not_fill_the_batch(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    for _ in range(3):
        await given.delayed(by_ms=10)
    due = await given.delayed(by_ms=20, namespace="shop")
    clock.advance(ms=20)
    only = ScannerFilter(namespace="shop")
    assert await engine.promote_due_delays(limit=1, only=only) == swept(due, full=True)
    assert await engine.promote_due_delays(limit=1, only=only) == Swept(acted=0, full=False)


async def test_each_sweep_does_what_its_single_form_does(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    leases = [(await given.running(ttl_ms=5)).execution_id for _ in range(3)]
    timed = [(await given.running(policy=TIMED, ttl_ms=9_000)).execution_id for _ in range(2)]
    doomed = [await given.waiting(execution_deadline_at_ms=clock.now_ms() + 5)]
    for _ in range(2):
        later = {"timeout_policy": {"attempt_timeout_ms": 2_001, "execution_deadline_ms": 2_001}}
        await given.running(policy=later, ttl_ms=2_001)
    clock.advance(ms=2_000)
    # A limit of one more than are due: what is not due yet must not fill the batch.
    assert in_order(await engine.expire_due_leases(limit=4)) == swept(*leases)
    assert in_order(await engine.expire_due_attempts(limit=3)) == swept(*timed)
    assert await engine.expire_due_deadlines(limit=2) == swept(*doomed)
    found = [(await execution_of(engine, each)) for each in (*leases, *timed, *doomed)]
    assert [each.ownership_state for each in found[:3]] == [
        OwnershipState.LEASE_EXPIRED_RECLAIMABLE
    ] * 3
    assert [each.failure_reason for each in found[3:]] == [
        "attempt_timeout",
        "attempt_timeout",
        "execution_deadline",
    ]
    async with unchanged(engine):
        for name in SWEEP_NAMES:
            assert await getattr(engine, name)() == Swept(acted=0, full=False)


async def test_sweeps_that_run_at_once_do_everything_once(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    for _ in range(12):
        await given.running(ttl_ms=5)
    clock.advance(ms=5)
    cursor = await cursor_of(engine)
    swept = await asyncio.gather(*(engine.expire_due_leases() for _ in range(3)))
    acted = sum(each.acted for each in swept) + (await engine.expire_due_leases()).acted
    assert acted == 12
    assert len(await events_since(engine, cursor)) == 12


async def test_bad_limits_of_sweeps_are_refused(engine: Engine) -> None:
    async with unchanged(engine):
        bad: list[object] = [0, BATCH_MAX + 1, "5", None, True]
        for name in SWEEP_NAMES:
            for limit in bad:
                await refuses(engine, "limit", name, limit=limit)


# What is due next


@pytest.mark.parametrize("config", [EngineConfig(keep="70ms", keep_events="80ms")])
async def test_the_next_due_times_tell_each_reconciler_when_to_look(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    assert await engine.next_due() == {}
    await given.delayed(by_ms=20)
    await given.delayed(by_ms=10)
    await given.waiting(execution_deadline_at_ms=clock.now_ms() + 30)
    await given.waiting(idempotency_key="k", policy={"dedup_window_ms": 60})
    assert await engine.next_due() == {
        "delayed": 10,
        "deadline": 30,
        "guard_retention": 60,
        "route_retention": ROUTE_KEEP_MS,
    }
    await given.running(ttl_ms=40, policy={"timeout_policy": {"attempt_timeout_ms": 50}})
    await given.completed(execution_deadline_at_ms=clock.now_ms())
    await paused(given, timeout_at_ms=clock.now_ms() + 65)
    holder = await given.running(ttl_ms=1_000)
    await engine.create_waitpoint(holder.handle, expires_in_ms=68)
    dues = {
        "delayed": 10,
        "deadline": 30,
        "lease_expiry": 40,
        "attempt_timeout": 50,
        "guard_retention": 60,
        "suspension_timeout": 65,
        "waitpoint_expiry": 68,
        "retention": 70,
        "event_retention": 80,
        "route_retention": ROUTE_KEEP_MS,
    }
    assert await engine.next_due() == dues
    clock.advance(ms=15)
    assert await engine.next_due() == {name: due_ms - 15 for name, due_ms in dues.items()}
    assert dues.keys() <= SWEEPS.keys()


@pytest.mark.parametrize(
    "config", [EngineConfig(keep="70ms", keep_failed="75ms", keep_events="80ms")]
)
async def test_what_is_due_to_the_millisecond_is_done(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await given.delayed(by_ms=10)
    await given.waiting(execution_deadline_at_ms=clock.now_ms() + 30)
    await given.waiting(idempotency_key="k", policy={"dedup_window_ms": 60})
    timed = {"timeout_policy": {"attempt_timeout_ms": 50}}
    await given.running(ttl_ms=40)
    await given.running(ttl_ms=99, policy=timed)
    await given.completed()
    while (waits := await engine.next_due()).keys() != {"route_retention"}:
        clock.advance(ms=max(0, min(waits.values())))
        due = sorted(name for name, left_ms in (await engine.next_due()).items() if left_ms <= 0)
        acted = await run_due(engine)
        assert (sorted(acted), min(acted.values()) > 0) == (due, True)
    clock.advance(ms=waits["route_retention"])
    # One still waits, so that its kind stays known and is looked at again a day later.
    assert await run_due(engine) == {"route_retention": 0}
    assert await engine.next_due() == {"route_retention": ROUTE_KEEP_MS}
