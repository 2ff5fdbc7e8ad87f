"""Reading one execution."""

from collections.abc import Mapping, Sequence

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.decisions import Changes
from flowfabric.core.ids import LaneId, Namespace, WorkerInstanceId, partition_of
from flowfabric.core.records import Execution
from flowfabric.core.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.core.views import (
    AttemptSummary,
    ExecutionContext,
    ExecutionInfo,
    ExecutionSnapshot,
    LeaseSummary,
    StateVector,
)
from flowfabric.errors import Corruption, NotFound
from flowfabric.store.base import Transaction
from flowfabric.testing import SettableClock
from tests.conformance.given import BACKOFF_MS, ENDED, NO_GRANT, UNKNOWN_ID, WORKER, Given
from tests.conformance.observed import call, execution_of, refused, refuses, unchanged


async def test_a_fresh_execution_is_described_whole(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    now_ms = clock.now_ms()
    execution_id = await given.waiting(
        lane_id="mail",
        execution_kind="send",
        namespace="shop",
        priority=4,
        tags={"b.b": "2", "a.a": "1"},
        execution_deadline_at_ms=now_ms + 9,
    )
    snapshot = await engine.describe_execution(execution_id)
    assert snapshot == ExecutionSnapshot(
        execution_id=execution_id,
        own_id=None,
        flow_id=None,
        parent_execution_id=None,
        lane_id=LaneId("mail"),
        namespace=Namespace("shop"),
        execution_kind="send",
        priority=4,
        public_state=PublicState.WAITING,
        blocked=False,
        blocking_reason=BlockingReason.WAITING_FOR_WORKER,
        blocking_detail=None,
        current_attempt=None,
        current_lease=None,
        current_waitpoint=None,
        created_at_ms=now_ms,
        started_at_ms=None,
        completed_at_ms=None,
        last_mutation_at_ms=now_ms,
        total_attempt_count=0,
        retry_count=0,
        lease_reclaim_count=0,
        replay_count=0,
        progress_pct=None,
        progress_message=None,
        failure_reason=None,
        cancellation_reason=None,
        cancelled_by=None,
        delay_until_ms=None,
        deadline_at_ms=now_ms + 9,
        tags={"a.a": "1", "b.b": "2"},
    )
    assert list(snapshot.tags) == ["a.a", "b.b"]


async def test_a_running_execution_shows_its_attempt_and_lease(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    fresh = await engine.describe_execution(await given.waiting())
    assert fresh is not None
    started_ms = clock.advance("1s")
    running = await given.taken(ttl_ms=5_000)
    now_ms = clock.advance("1s")
    await engine.renew(running.handle)
    await engine.progress(running.handle, percent=7, message="on it")
    assert await engine.describe_execution(running.execution_id) == structs.replace(
        fresh,
        public_state=PublicState.ACTIVE,
        blocking_reason=None,
        current_attempt=AttemptSummary(attempt_id=running.attempt_id, attempt_index=0),
        current_lease=LeaseSummary(
            lease_id=running.lease_id,
            lease_epoch=1,
            attempt_index=0,
            worker_instance_id=WorkerInstanceId("worker-1-instance"),
            expires_at_ms=now_ms + 5_000,
            last_heartbeat_at_ms=now_ms,
        ),
        started_at_ms=started_ms,
        last_mutation_at_ms=now_ms,
        total_attempt_count=1,
        progress_pct=7,
        progress_message="on it",
    )


async def test_a_snapshot_tells_why_and_how_something_waits_or_ended(
    engine: Engine, given: Given
) -> None:
    delayed = await engine.describe_execution(await given.delayed(by_ms=50))
    assert delayed is not None
    until_ms = given.clock.now_ms() + 50
    assert (delayed.blocking_reason, delayed.blocking_detail, delayed.delay_until_ms) == (
        BlockingReason.WAITING_FOR_DELAY,
        f"delayed until {until_ms}",
        until_ms,
    )
    failed = await engine.describe_execution((await given.failed("why")).execution_id)
    assert failed is not None
    assert (failed.failure_reason, failed.completed_at_ms) == ("why", given.clock.now_ms())
    assert failed.current_lease is None
    cancelled = await engine.describe_execution(await given.cancelled("why"))
    assert cancelled is not None
    assert (cancelled.cancellation_reason, cancelled.cancelled_by) == ("why", "operator_override")
    assert cancelled.current_attempt is None


def vector(*values: str) -> StateVector:
    phase, ownership, eligibility, blocking, outcome, attempt, public = values
    return StateVector(
        lifecycle_phase=LifecyclePhase(phase),
        ownership_state=OwnershipState(ownership),
        eligibility_state=EligibilityState(eligibility),
        blocking_reason=BlockingReason(blocking),
        terminal_outcome=TerminalOutcome(outcome),
        attempt_state=AttemptState(attempt),
        public_state=PublicState(public),
    )


def terminal(outcome: str, attempt: str, public: str) -> StateVector:
    return vector("terminal", "unowned", "not_applicable", "none", outcome, attempt, public)


def runnable(eligibility: str, blocking: str, attempt: str, public: str) -> StateVector:
    return vector("runnable", "unowned", eligibility, blocking, "none", attempt, public)


def active(ownership: str, blocking: str, attempt: str) -> StateVector:
    return vector("active", ownership, "not_applicable", blocking, "none", attempt, "active")


UNTIL_TIME = "not_eligible_until_time"
INTERRUPTED = "attempt_interrupted"
VECTORS = {
    "waiting": runnable("eligible_now", "waiting_for_worker", "pending_first_attempt", "waiting"),
    "resumable": runnable("eligible_now", "waiting_for_worker", INTERRUPTED, "waiting"),
    "delayed": runnable(UNTIL_TIME, "waiting_for_delay", "pending_first_attempt", "delayed"),
    "retrying": runnable(
        UNTIL_TIME, "waiting_for_retry_backoff", "pending_retry_attempt", "delayed"
    ),
    "parked": runnable(UNTIL_TIME, "waiting_for_delay", INTERRUPTED, "delayed"),
    "waiting_children": runnable(
        "blocked_by_dependencies", "waiting_for_children", INTERRUPTED, "waiting_children"
    ),
    "running": active("leased", "none", "running_attempt"),
    "overdue_lease": active("leased", "none", "running_attempt"),
    "expired_lease": active("lease_expired_reclaimable", "waiting_for_worker", INTERRUPTED),
    "revoked": active("lease_revoked", "waiting_for_worker", INTERRUPTED),
    "completed": terminal("success", "attempt_terminal", "completed"),
    "failed": terminal("failed", "attempt_terminal", "failed"),
    "cancelled": terminal("cancelled", "pending_first_attempt", "cancelled"),
    "expired": terminal("expired", "pending_first_attempt", "expired"),
}


async def test_info_gives_every_dimension_and_times_as_text(engine: Engine, given: Given) -> None:
    for state, expected in VECTORS.items():
        execution_id = await given.state(state, priority=3, lane_id="mail", namespace="shop")
        stored = await execution_of(engine, execution_id)
        assert await engine.read_execution_info(execution_id) == ExecutionInfo(
            execution_id=execution_id,
            namespace=Namespace("shop"),
            lane_id=LaneId("mail"),
            priority=3,
            execution_kind="work",
            state_vector=expected,
            public_state=expected.public_state,
            created_at=str(stored.created_at_ms),
            started_at=str(stored.started_at_ms) if stored.started_at_ms else None,
            completed_at=str(given.clock.now_ms()) if state in ENDED else None,
            current_attempt_index=0,
            flow_id=None,
            parent_execution_id=None,
            blocking_detail=stored.blocking_detail,
        ), state
        assert await engine.read_execution_state(execution_id) is expected.public_state


async def test_the_context_is_what_a_worker_needs(engine: Engine, given: Given) -> None:
    full = await given.waiting(
        input_payload=b"\xff\x00", payload_encoding="raw", tags={"b.b": "2", "a.a": "1"}
    )
    assert await engine.read_execution_context(full) == ExecutionContext(
        input_payload=b"\xff\x00",
        payload_encoding="raw",
        execution_kind="work",
        tags={"a.a": "1", "b.b": "2"},
    )
    assert await engine.read_execution_context(await given.waiting()) == ExecutionContext(
        input_payload=b"", payload_encoding=None, execution_kind="work", tags={}
    )


async def test_the_attempt_that_is_and_the_number_of_attempts_differ(
    engine: Engine, given: Given
) -> None:
    async def counts(execution_id: str) -> tuple[int, int, int]:
        return (
            await engine.read_current_attempt_index(execution_id),
            await engine.read_total_attempt_count(execution_id),
            len(await engine.list_attempts(execution_id)),
        )

    fresh = await given.waiting()
    assert await counts(fresh) == (0, 0, 0)
    retrying = await given.retrying()
    assert await counts(retrying.execution_id) == (0, 1, 1)
    given.clock.advance(ms=BACKOFF_MS)
    await engine.promote_delayed(retrying.execution_id)
    await given.claimed(retrying.execution_id)
    assert await counts(retrying.execution_id) == (1, 2, 2)


async def test_a_result_is_there_once_there_is_one(engine: Engine, given: Given) -> None:
    for state in ("waiting", "running", "failed", "cancelled"):
        assert await engine.get_execution_result(await given.state(state)) is None
    claimed = await given.completed(b'{"json": "\xc3\xbc"}')
    assert await engine.get_execution_result(claimed.execution_id) == b'{"json": "\xc3\xbc"}'


async def test_an_execution_of_no_flow_resolves_to_none(engine: Engine, given: Given) -> None:
    assert await engine.resolve_execution_flow_id(await given.waiting()) is None
    assert await engine.resolve_execution_flow_id(UNKNOWN_ID) is None


async def test_fields_are_read_by_name_as_text(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    budget = "00000000-0000-4000-8000-00000000b0d6"
    policy = {
        "routing_requirements": {"required_capabilities": ["gpu", "cuda"]},
        "budget_ids": [budget],
    }
    deadline_ms = clock.now_ms() + 9_000
    running = await given.running(policy=policy, priority=3, execution_deadline_at_ms=deadline_ms)
    execution_id = running.execution_id
    fields = {
        "lane_id": "default",
        "lifecycle_phase": "active",
        "ownership_state": "leased",
        "eligibility_state": "not_applicable",
        "public_state": "active",
        "attempt_state": "running_attempt",
        "blocking_reason": "none",
        "cancellation_reason": None,
        "cancel_reason": None,
        "cancelled_by": None,
        "attempt_index": "0",
        "current_attempt_index": "0",
        "flow_id": None,
        "priority": "3",
        "created_at_ms": str(clock.now_ms()),
        "terminal_at_ms": None,
        "completed_at": None,
        "deadline_at_ms": str(deadline_ms),
        "required_capabilities": "cuda,gpu",
        "current_waitpoint_id": None,
        "current_worker_instance_id": "worker-1-instance",
        "budget_ids": budget,
        "quota_policy_id": None,
        "no_such_field": None,
    }
    assert await engine.read_exec_core_fields(execution_id, list(fields)) == fields
    assert (
        await engine.read_exec_core_fields(execution_id, [], partition=partition_of(execution_id))
        == {}
    )
    assert await engine.read_exec_core_fields(UNKNOWN_ID, ["lane_id", "x"]) == {
        "lane_id": None,
        "x": None,
    }
    await engine.cancel_execution(execution_id, reason="why")
    ended = await engine.read_exec_core_fields(
        execution_id, ["cancel_reason", "cancelled_by", "terminal_at_ms", "completed_at"]
    )
    now = str(clock.now_ms())
    assert list(ended.values()) == ["why", "operator_override", now, now]
    async with unchanged(engine):
        for partition in (85, "86"):
            await refuses(
                engine,
                "partition",
                "read_exec_core_fields",
                execution_id,
                ["lane_id"],
                partition=partition,
            )
        for names in ("lane_id", None, [5], ["x"] * 1_001):
            await refuses(engine, "names", "read_exec_core_fields", execution_id, names)


# Ids


READS = {
    "describe_execution": (),
    "read_execution_context": (),
    "read_execution_state": (),
    "read_execution_info": (),
    "get_execution_result": (),
    "resolve_execution_flow_id": (),
    "read_current_attempt_index": (),
    "read_total_attempt_count": (),
    "list_attempts": (),
    "read_exec_core_fields": (["lane_id"],),
    "explain_execution": (),
    "get_execution_tag": ("a.b",),
    "get_execution_namespace": (),
    "set_execution_tag": ("a.b", "c"),
    "set_execution_tags": ({"a.b": "c"},),
    "promote_delayed": (),
    "mark_lease_expired_if_due": (),
    "expire_execution": ("attempt_timeout",),
    "change_priority": (1,),
    "replay_execution": (),
}
WITH_REASON = ("cancel_execution", "revoke_lease")
WITH_WORKER = ("issue_claim_grant", "issue_reclaim_grant")
WITH_GRANT = ("claim_execution", "claim_resumed_execution", "reclaim_execution")


async def test_a_missing_execution_is_none_or_refused(engine: Engine) -> None:
    async with unchanged(engine):
        for name in (
            "describe_execution",
            "read_execution_state",
            "read_execution_info",
            "get_execution_result",
        ):
            assert await getattr(engine, name)(UNKNOWN_ID) is None
        assert await engine.list_attempts(UNKNOWN_ID) == ()
        for name in (
            "read_execution_context",
            "read_current_attempt_index",
            "read_total_attempt_count",
        ):
            await refuses(engine, "execution_id", name, UNKNOWN_ID)


async def test_nothing_is_done_to_a_missing_execution(engine: Engine) -> None:
    calls: list[tuple[str, tuple[object, ...], Mapping[str, object]]] = [
        ("cancel_execution", (), {"reason": "x"}),
        ("revoke_lease", (), {"reason": "x"}),
        ("change_priority", (1,), {}),
        ("replay_execution", (), {}),
        ("issue_claim_grant", (), WORKER),
        ("claim_execution", (), {**WORKER, "grant_key": NO_GRANT}),
        ("complete_execution", (), {"source": "operator_override"}),
        ("fail_execution", (), {"source": "operator_override", "reason": "x"}),
        ("promote_delayed", (), {}),
        ("expire_execution", ("execution_deadline",), {}),
        ("set_execution_tags", ({"a.b": "c"},), {}),
        ("explain_execution", (), {}),
    ]
    for name, arguments, named in calls:
        async with refused(engine, NotFound) as caught:
            await call(engine, name, UNKNOWN_ID, *arguments, **named)
        assert (caught.value.entity, caught.value.id) == ("execution", UNKNOWN_ID), name


async def test_what_no_operation_could_have_written_is_corruption_and_named(
    engine: Engine, given: Given
) -> None:
    running = await execution_of(engine, (await given.running()).execution_id)
    bad: dict[str, tuple[object, Sequence[str]]] = {
        "lease_id": (None, ["describe_execution"]),
    }
    if engine.backend_label() == "sqlite":
        # Elsewhere the columns' types keep them out.
        bad["public_state"] = ("dancing", ["describe_execution", "read_execution_state"])
        bad["flow_id"] = ("no flow", ["describe_execution", "resolve_execution_flow_id"])
    for field, (value, readers) in bad.items():
        spoilt = structs.replace(running, **{field: value})

        async def body(tx: Transaction, spoilt: Execution = spoilt) -> None:
            await tx.save(Changes(updates=(spoilt,)))

        await engine.store.transact(body)
        for reader in readers:
            with pytest.raises(Corruption, match=field):
                await call(engine, reader, running.execution_id)


async def test_an_execution_whose_route_is_gone_is_corruption_and_named(
    engine: Engine, given: Given
) -> None:
    running = await execution_of(engine, (await given.running()).execution_id)

    async def body(tx: Transaction) -> None:
        await tx.save(Changes(updates=(structs.replace(running, route_id=1_000_000),)))

    await engine.store.transact(body)
    with pytest.raises(Corruption, match="namespace"):
        await engine.describe_execution(running.execution_id)


async def test_every_operation_refuses_an_id_it_cannot_read(engine: Engine) -> None:
    bad: list[tuple[str, object]] = [
        ("execution_id", ""),
        ("execution_id", None),
        ("execution_id", 5),
        ("execution_id", "550E8400-e29b-41d4-a716-446655440000"),
        ("execution_id", "order-42"),
        ("execution_id", "{fp:086}:550e8400-e29b-41d4-a716-446655440000"),
        ("execution_id", "{fp:86}:550E8400-E29B-41D4-A716-446655440000"),
        ("execution_id", "{fp:65536}:550e8400-e29b-41d4-a716-446655440000"),
        ("partition", "{fp:256}:550e8400-e29b-41d4-a716-446655440000"),
    ]
    async with unchanged(engine):
        for field, execution_id in bad:
            for name, arguments in READS.items():
                await refuses(engine, field, name, execution_id, *arguments)
            for name in WITH_REASON:
                await refuses(engine, field, name, execution_id, reason="x")
            for name in WITH_WORKER:
                await refuses(engine, field, name, execution_id, **WORKER)
            for name in WITH_GRANT:
                shown = {**WORKER, "grant_key": NO_GRANT}
                await refuses(engine, field, name, execution_id, **shown)
            await refuses(engine, field, "issue_grant_and_claim", execution_id)
            await refuses(engine, field, "unblock_execution", execution_id)
            await refuses(engine, field, "cancel_executions", [execution_id], reason="x")
            await refuses(engine, field, "replay_executions", [execution_id])
