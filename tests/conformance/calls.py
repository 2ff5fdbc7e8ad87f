"""Every operation on executions with arguments it accepts, by name."""

from collections.abc import Mapping

from flowfabric.core.budget_terms import BudgetDefinition, BudgetUpdate, UsageDimensions
from flowfabric.core.events import EVERYBODY, ScannerFilter
from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import FailedStep
from flowfabric.core.results import Claimed, ReclaimGrant
from flowfabric.core.states import FailureClass, PublicState
from flowfabric.core.streams import NewFrame
from flowfabric.engine.executions import Completion, FailureReport
from flowfabric.engine.ledger import Usage
from flowfabric.engine.reads import EVERYTHING, ExecutionFilter
from flowfabric.engine.streams import FrameAppend
from tests.conformance.given import NOBODY, WORKER, Given, fence_of, new

Arguments = Mapping[str, object]

BY_ID = (
    "called", "describe_execution", "explain_execution", "get_execution_namespace",
    "get_execution_result",
    "inspect_execution",
    "list_attempts", "mark_lease_expired_if_due", "promote_delayed", "read_current_attempt_index",
    "read_execution_context", "read_execution_info", "read_execution_state",
    "read_total_attempt_count", "resolve_execution_flow_id",
)  # fmt: skip
BY_LANE = ("pause_lane", "resume_lane", "drain_lane", "disable_lane")
SWEEPS = (
    "act_on_breaches", "check_reservations", "reset_due_budgets", "trim_budgets",
    "expire_workers", "return_due_grants", "trim_events", "trim_guards", "trim_routes",
    "trim_streams", "wake_awaiting",
)  # fmt: skip
SCOPED_SWEEPS = (
    "expire_due_attempts", "expire_due_deadlines", "expire_due_suspensions",
    "expire_due_waitpoints", "promote_due_delays", "trim_retention",
)  # fmt: skip
ELSEWHERE: Arguments = {"only": ScannerFilter(namespace="n", tag=("a", "b"))}
FAILED = ExecutionFilter(states=(PublicState.FAILED,))
FRAME = NewFrame(payload=b"text")


async def valid_calls(given: Given) -> dict[str, Arguments]:
    running, waiting = await given.running(), await given.waiting()
    ended = (await given.completed()).execution_id
    blocked = (await given.blocked()).execution_id
    return (
        claiming()
        | holding(running, waiting)
        | operating(running, waiting, ended)
        | reading(waiting)
        | {"accept_changes": {"execution_id": blocked}}
        | await granting(given)
        | registering()
        | await budgeting(given, running)
    )


async def budgeting(given: Given, running: Claimed) -> dict[str, Arguments]:
    one: Arguments = {"budget_id": "team", "namespace": "n"}
    definition = BudgetDefinition(budget_id="team", namespace="n", hard_limits={"tokens": 1_000})
    await given.engine.create_budget(definition)
    unused = BudgetDefinition(budget_id="unused", namespace="n", hard_limits={"tokens": 1})
    await given.engine.create_budget(unused)
    usage = Usage(budget_id="team", amounts={"tokens": 1}, namespace="n", dedup_key="k")
    return {
        "create_budget": {"definition": definition, "if_exists": "keep"},
        "update_budget": {**one, "update": BudgetUpdate(hard_limits={"tokens": 1_000})},
        "get_budget_status": one,
        "read_budget_usage_and_limits": one,
        "list_budgets": {"namespace": "n", "cursor": "n\na", "limit": 1},
        "post_to_budgets": {"requests": [usage]},
        "report_usage": {
            **one,
            "handle": running.handle,
            "usage": UsageDimensions(input_tokens=1),
            "require_declared": True,
        },
        "report_usage_admin": {
            **one,
            "dimensions": ["tokens"],
            "deltas": [1],
            "dedup_key": "k",
            "require_declared": True,
        },
        "record_spend": {
            **one,
            "execution_id": running.execution_id,
            "deltas": {"tokens": 1},
            "idempotency_key": "k",
        },
        "release_budget": {**one, "execution_id": running.execution_id},
        "reserve_budget": {
            **one,
            "handle": running.handle,
            "amounts": {"tokens": 1},
            "reservation_id": "r",
            "waits": False,
        },
        "settle_reservation": {
            **one,
            "reservation_id": "r",
            "used": {"tokens": 1},
            "handle": running.handle,
        },
        "reset_budget": one,
        "remove_budget": {"budget_id": "unused", "namespace": "n"},
    }


def registering() -> dict[str, Arguments]:
    one: Arguments = {"worker_instance_id": "w-1", "namespace": "n"}
    return {
        "register_worker": {
            **one,
            "lane_ids": ["default"],
            "worker_id": "w",
            "liveness_ttl_ms": 1_000,
            "capabilities": [],
            "kinds": ["work"],
            "uptime_ms": 0,
        },
        "heartbeat_worker": one,
        "mark_worker_dead": {**one, "reason": "gone", "revoke_leases": True},
        "list_workers": {"namespace": "n", "cursor": None, "limit": 5, "include_expired": True},
        "list_worker_events": {**one, "limit": 5},
    }


async def granting(given: Given) -> dict[str, Arguments]:
    engine = given.engine
    fresh, kept_back = await given.waiting(), await given.waiting()
    await engine.block_execution_for_admission(kept_back, reason="waiting_for_quota")
    grant = await engine.issue_claim_grant(fresh, **WORKER)
    resumable = await given.resumable()
    resume_grant = await engine.issue_claim_grant(resumable.execution_id, **WORKER)
    lost = [(await given.revoked()).execution_id for _ in range(2)]
    reclaim_grant = await engine.issue_reclaim_grant(lost[0], **WORKER)
    assert isinstance(reclaim_grant, ReclaimGrant)
    issue: Arguments = {**WORKER, "capabilities": [], "grant_ttl_ms": 5}
    use: Arguments = {**WORKER, "lane_id": "default", "lease_ttl_ms": 1_000}
    new_lease: Arguments = {"lease_id": NOBODY}
    return {
        "claim_for_worker": {**issue, "lane_ids": ["x"], "kinds": ["none"], "namespace": "n"},
        "issue_claim_grant": {**issue, "execution_id": await given.waiting()},
        "issue_reclaim_grant": {**issue, "execution_id": lost[1]},
        "claim_execution": {
            **use,
            "execution_id": fresh,
            "grant_key": grant.grant_key,
            "expected_attempt_index": 0,
            "attempt_timeout_ms": 5,
            "execution_deadline_at_ms": 5,
        },
        "claim_resumed_execution": {
            **use,
            **new_lease,
            "execution_id": resumable.execution_id,
            "grant_key": resume_grant.grant_key,
            "current_attempt_index": 0,
            "remaining_attempt_timeout_ms": 5,
        },
        "reclaim_execution": {
            **use,
            **new_lease,
            "execution_id": lost[0],
            "grant_key": reclaim_grant.grant_key,
            "attempt_id": NOBODY,
            "max_reclaim_count": 5,
        },
        "issue_grant_and_claim": {
            "execution_id": await given.waiting(),
            "lane_id": "default",
            "lease_duration_ms": 1_000,
            "force": False,
        },
        "block_execution_for_admission": {
            "execution_id": await given.waiting(),
            "reason": "waiting_for_budget",
            "reason_detail": "team: tokens 5/5",
            "lane_id": "default",
        },
        "unblock_execution": {
            "execution_id": kept_back,
            "expected_blocking_reason": "waiting_for_quota",
            "lane_id": "default",
        },
    }


def claiming() -> dict[str, Arguments]:
    claim: Arguments = {
        **WORKER,
        "capabilities": ["gpu"],
        "kinds": ["none"],
        "namespace": "n",
        "lease_ttl_ms": 1_000,
        "max_wait_ms": 0,
    }
    return {
        "create_execution": {"request": new()},
        "create_executions": {"requests": [new()], "key_wait_ms": 100},
        "claim": {"lane_id": "default", **claim},
        "claim_many": {
            "lane_ids": ["default"],
            "limit": 1,
            **claim,
            "mark": "0123456789ab",
            "renews_first": True,
        },
        "find_claimed": {
            "mark": "0123456789ab",
            **WORKER,
            "namespace": "n",
            "lease_ttl_ms": 1_000,
        },
    }


def holding(running: Claimed, waiting: ExecutionId) -> dict[str, Arguments]:
    by_handle: Arguments = {"handle": running.handle}
    by_fence: Arguments = {"execution_id": running.execution_id, "fence": fence_of(running)}
    result: Arguments = {"result": b"done", "result_encoding": "json"}
    typed: Arguments = {**by_fence, "attempt_index": 0, "source": "worker"}
    failure: Arguments = {
        "reason": "broken",
        "failure_class": FailureClass.TRANSIENT,
        "category": "disk",
    }
    failed = FailedStep(step_key="charge", name="charge", error="ValueError")
    return {
        "renew": by_handle,
        "renew_many": {"handles": [running.handle], "lock_wait_ms": 0},
        "find_lost_leases": {"handles": [running.handle]},
        "renew_lease": {**by_fence, "lease_ttl_ms": 1_000},
        "progress": {**by_handle, "percent": 5, "message": "on it"},
        "complete": {**by_handle, **result},
        "complete_many": {"completions": [Completion(handle=running.handle)]},
        "complete_execution": {**typed, **result},
        "fail": {**by_handle, **failure, "traceback": "in main", "step": failed},
        "fail_many": {"reports": [FailureReport(handle=running.handle, reason="broken")]},
        "fail_execution": {**typed, **failure, "retry_policy": None},
        "delay_execution": {**typed, "delay_until_ms": 5},
        "move_to_waiting_children": typed,
        "update_progress": {**by_fence, "percent": 5, "message": "on it"},
        "delay": {**by_handle, "delay_until_ms": 5, "begun": True, "why": "a budget is spent"},
        "wait_children": by_handle,
        "await_executions": {**by_handle, "execution_ids": [waiting], "until_ms": 5},
        "block_on_code": {
            **by_handle,
            "step_key": "charge",
            "detail": "the code has changed",
            "advice": "mend",
        },
        "cancel": {**by_handle, "reason": "no"},
        "hand_back": {**by_handle, "reason": "stopping"},
        "hand_back_many": {"handles": [running.handle], "reason": "stopping"},
        "append_frame": {**by_handle, "frame": FRAME, "retention_maxlen": 5},
        "append_frames": {"appends": [FrameAppend(handle=running.handle, frames=(FRAME,))]},
    }


def operating(running: Claimed, waiting: ExecutionId, ended: ExecutionId) -> dict[str, Arguments]:
    fence: Arguments = {"lease_id": None, "lease_epoch": None, "attempt_id": None}
    source = "operator_override"
    again: Arguments = {"reason": "again", "requested_by": "ann"}
    return {
        "cancel_execution": {"execution_id": waiting, "reason": "no", "source": source, **fence},
        "cancel_executions": {"execution_ids": [waiting], "reason": "no"},
        "cancel_matching": {"matching": FAILED, "reason": "no", "limit": 5},
        "revoke_lease": {
            "execution_id": running.execution_id,
            "reason": "no",
            "expected_lease_id": "",
            "worker_instance_id": "",
        },
        "change_priority": {
            "execution_id": waiting,
            "new_priority": 5,
            "lane_id": "default",
            "any_runnable": False,
        },
        "replay_execution": {"execution_id": ended, **again},
        "replay_executions": {"execution_ids": [ended], **again},
        "replay_matching": {"matching": FAILED, **again, "limit": 5},
        "expire_execution": {"execution_id": waiting, "phase": "attempt_timeout"},
        "release_blocked": {
            "kinds": ["work"],
            "namespace": "default",
            "blocked_before_ms": 5,
            "limit": 5,
        },
        "set_execution_tag": {"execution_id": waiting, "key": "a.b", "value": "c"},
        "set_execution_tags": {"execution_id": waiting, "tags": {"a.b": "c"}},
        "register_lane": {"lane_id": "default", "registered_by": "ann"},
        **{name: {"lane_id": "default"} for name in BY_LANE},
        **{name: {"limit": 5} for name in SWEEPS},
        **{name: {"limit": 5, **ELSEWHERE} for name in SCOPED_SWEEPS},
        "expire_due_leases": {"limit": 5, "waited_ms": 5, "calm_ms": 5, **ELSEWHERE},
    }


def reading(waiting: ExecutionId) -> dict[str, Arguments]:
    page: Arguments = {"cursor": None, "limit": 5}
    return {
        **{name: {"execution_id": waiting} for name in BY_ID},
        "get_execution_tag": {"execution_id": waiting, "key": "a.b"},
        "read_exec_core_fields": {"execution_id": waiting, "names": ["lane_id"], "partition": None},
        "resolve_execution_id": {"text": waiting, "namespace": "default", "strictly": False},
        "own_ids": {"execution_ids": [waiting]},
        "find_namespaces": {"execution_ids": [waiting]},
        "required_capabilities": {"execution_ids": [waiting]},
        "before_latest_events": {"count": 5, "namespace": "n", "category": None},
        "list_executions": {"partition": 5, "namespace": "n", **page},
        "list_children": {"execution_id": waiting, **page},
        "find_executions": {"matching": EVERYTHING, **page},
        "list_lanes": page,
        "list_expired_leases": {"as_of_ms": 5, "namespace": "n", **page},
        "read_events": {"after": 0, "limit": 5, "category": None},
        **following(waiting),
    }


def following(waiting: ExecutionId) -> dict[str, Arguments]:
    stream: Arguments = {"execution_id": waiting, "attempt_index": 0}
    page: Arguments = {"count_limit": 5, "visibility": "", "only": EVERYBODY}
    return {
        "read_stream": {**stream, **page, "from_cursor": "start", "to_cursor": "end"},
        "tail_stream": {**stream, **page, "after": "0-0", "block_ms": 0},
        "tail_execution": {
            "execution_id": waiting,
            **page,
            "after": "start",
            "block_ms": 0,
            "superseded": False,
        },
        "read_summary": stream,
        "last_frame_at": stream,
    }
