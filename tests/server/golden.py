"""What clients of the reference's server send, and what it answered them, case by case.

Below each case stand its request and its answer. Words in capitals are bodies that follow at the
end, with fields replaced; `$names` are ids, made when a story first mentions them; `<…>` is
what differs from run to run. Where the answer is a problem, its text is nobody's business.
"""

from typing import Final

STORIES: Final = """
### GET /v1/executions
first page
    GET /v1/executions?partition=$here
    200 {"executions": ["$waiting"], "next_cursor": null}
limit 1
    GET /v1/executions?partition=$here&limit=1
    200 {"executions": ["$waiting"], "next_cursor": null}
empty partition
    GET /v1/executions?partition=$elsewhere
    200 {"executions": [], "next_cursor": null}
cursor
    GET /v1/executions?partition=$here&cursor=$waiting
    200 {"executions": [], "next_cursor": null}
limit 0
    GET /v1/executions?partition=$here&limit=0
    200 {"executions": [], "next_cursor": null}
partition not a number
    GET /v1/executions?partition=x
    400
partition out of range
    GET /v1/executions?partition=60000
    200 {"executions": [], "next_cursor": null}
bad cursor
    GET /v1/executions?partition=$here&cursor=zzz
    400

### POST /v1/executions
created
    POST /v1/executions CREATE {"execution_id": "$new1"}
    201 {"Created": {"execution_id": "$new1", "public_state": "waiting"}}
same execution_id again
    POST /v1/executions CREATE {"execution_id": "$new1"}
    200 {"Duplicate": {"execution_id": "$new1"}}
with idempotency_key
    POST /v1/executions CREATE {"execution_id": "$new2", "idempotency_key": "k"}
    201 {"Created": {"execution_id": "$new2", "public_state": "waiting"}}
same idempotency_key, other id, same partition
    POST /v1/executions CREATE {"execution_id": "$new3", "idempotency_key": "k"}
    200 {"Duplicate": {"execution_id": "$new2"}}
full policy
    POST /v1/executions CREATE {"execution_id": "$new4", "policy": "POLICY"}
    201 {"Created": {"execution_id": "$new4", "public_state": "waiting"}}
delayed
    POST /v1/executions CREATE {"execution_id": "$new5", "delay_until": 4000000000000}
    201 {"Created": {"execution_id": "$new5", "public_state": "delayed"}}
no body
    POST /v1/executions
    415
malformed JSON
    POST /v1/executions {
    400
missing fields
    POST /v1/executions {"execution_id": "$new6"}
    422
lane with a blank
    POST /v1/executions CREATE {"execution_id": "$new6", "lane_id": "a b"}
    201 {"Created": {"execution_id": "$new6", "public_state": "waiting"}}
priority out of i32
    POST /v1/executions CREATE {"priority": 2147483648}
    422
unknown field
    POST /v1/executions CREATE {"execution_id": "$new7", "odd": 1}
    201 {"Created": {"execution_id": "$new7", "public_state": "waiting"}}
payload as string
    POST /v1/executions CREATE {"input_payload": "{}"}
    422
payload too large (>1 MiB)
    POST /v1/executions <large>
    413 {"error": "payload_too_large", "limit_bytes": 1048576, "route": "/v1/executions"}

### GET /v1/executions/{id}
waiting
    GET /v1/executions/$waiting
    200 INFO {"execution_id": "$waiting"}
delayed
    GET /v1/executions/$delayed
    200 INFO {"execution_id": "$delayed", "public_state": "delayed", "blocking_detail": "<text>"}
not found
    GET /v1/executions/$ghost
    404
invalid id: bad uuid
    GET /v1/executions/{fp:7}:zzz
    400
invalid id: bad partition
    GET /v1/executions/{fp:x}:$nobody
    400
active
    GET /v1/executions/$running
    200 INFO {"execution_id": "$running", "public_state": "active", "started_at": "<digits>"}
completed
    GET /v1/executions/$completed
    200 INFO {"execution_id": "$completed", "public_state": "completed", "started_at": "<digits>",
        "completed_at": "<digits>"}
replay
    POST /v1/executions/$completed/replay
    200 {"Replayed": {"public_state": "waiting"}}
after replay
    GET /v1/executions/$completed
    200 INFO {"execution_id": "$completed", "started_at": "<digits>"}
after first failure (retry scheduled)
    GET /v1/executions/$retrying
    200 INFO {"execution_id": "$retrying", "public_state": "delayed", "started_at": "<digits>",
        "blocking_detail": "<text>"}
after last failure
    GET /v1/executions/$failed
    200 INFO {"execution_id": "$failed", "public_state": "failed", "started_at": "<digits>",
        "completed_at": "<digits>"}
cancelled
    GET /v1/executions/$cancelled
    200 INFO {"execution_id": "$cancelled", "public_state": "cancelled", "completed_at": "<digits>"}
after revoke
    GET /v1/executions/$revoked
    200 INFO {"execution_id": "$revoked", "public_state": "active", "started_at": "<digits>",
        "blocking_detail": "lease revoked: drained"}

### GET /v1/executions/{id}/state
waiting
    GET /v1/executions/$waiting/state
    200 "waiting"
delayed
    GET /v1/executions/$delayed/state
    200 "delayed"
not found
    GET /v1/executions/$ghost/state
    404
active
    GET /v1/executions/$running/state
    200 "active"
completed
    GET /v1/executions/$completed/state
    200 "completed"
worker's execution was cancelled
    GET /v1/executions/$cancelled/state
    200 "cancelled"
suspended
    GET /v1/executions/$suspended/state
    200 "suspended"
the failed member
    GET /v1/executions/$failed/state
    200 "failed"

### GET /v1/executions/{id}/pending-waitpoints
none
    GET /v1/executions/$waiting/pending-waitpoints
    200 []
not found
    GET /v1/executions/$ghost/pending-waitpoints
    404
one
    GET /v1/executions/$suspended/pending-waitpoints
    200 [{"activated_at": "<int>", "created_at": "<int>", "expires_at": "<int>",
        "execution_id": "$suspended", "required_signal_names": ["approved"], "state": "active",
        "token_fingerprint": "<text>", "token_kid": "<text>", "waitpoint_id": "$waitpoint",
        "waitpoint_key": "gate"}]

### GET /v1/executions/{id}/waitpoints/{waitpoint_id}/token
token
    GET /v1/executions/$suspended/waitpoints/$waitpoint/token
    200 {"token": "$token"}
unknown waitpoint
    GET /v1/executions/$suspended/waitpoints/$nobody/token
    404
bad waitpoint id
    GET /v1/executions/$suspended/waitpoints/zzz/token
    400

### GET /v1/executions/{id}/result
none yet
    GET /v1/executions/$waiting/result
    404
not found
    GET /v1/executions/$ghost/result
    404
bytes
    GET /v1/executions/$answered/result
    200 {"answer": 42}

### POST /v1/executions/{id}/cancel
already completed
    POST /v1/executions/$completed/cancel CANCEL {"execution_id": "$completed"}
    400
waiting one
    POST /v1/executions/$waiting/cancel CANCEL {"execution_id": "$waiting"}
    200 {"Cancelled": {"execution_id": "$waiting", "public_state": "cancelled"}}
again
    POST /v1/executions/$waiting/cancel CANCEL {"execution_id": "$waiting"}
    200 {"Cancelled": {"execution_id": "$waiting", "public_state": "cancelled"}}
id mismatch
    POST /v1/executions/$waiting/cancel CANCEL {"execution_id": "$ghost"}
    400
not found
    POST /v1/executions/$ghost/cancel CANCEL {"execution_id": "$ghost"}
    404
missing fields
    POST /v1/executions/$waiting/cancel {"execution_id": "$waiting"}
    422

### POST /v1/executions/{id}/signal
tampered token
    POST /v1/executions/$suspended/signal SIGNAL {"waitpoint_token": "${token}0"}
    400
empty token
    POST /v1/executions/$suspended/signal SIGNAL {"waitpoint_token": ""}
    400
no token field
    POST /v1/executions/$suspended/signal {"execution_id": "$suspended"}
    422
unknown kid
    POST /v1/executions/$suspended/signal SIGNAL {"waitpoint_token": "odd:00"}
    400
id mismatch
    POST /v1/executions/$suspended/signal SIGNAL {"execution_id": "$ghost"}
    400
unknown waitpoint
    POST /v1/executions/$suspended/signal SIGNAL {"waitpoint_id": "$nobody"}
    400
other name than awaited
    POST /v1/executions/$suspended/signal SIGNAL {"signal_name": "odd"}
    200 {"Accepted": {"effect": "appended_to_waitpoint", "signal_id": "$id1", "kept": true}}
idempotency key, first
    POST /v1/executions/$suspended/signal SIGNAL {"signal_id": "$id2", "idempotency_key": "k"}
    200 {"Accepted": {"effect": "resume_condition_satisfied", "signal_id": "$id2", "kept": false}}
idempotency key, again
    POST /v1/executions/$suspended/signal SIGNAL {"signal_id": "$id3", "idempotency_key": "k"}
    200 {"Duplicate": {"existing_signal_id": "$id2"}}

### PUT /v1/executions/{id}/priority
changed
    PUT /v1/executions/$waiting/priority {"new_priority": 5}
    200 {"Changed": {"execution_id": "$waiting"}}
not found
    PUT /v1/executions/$ghost/priority {"new_priority": 5}
    404
delayed execution
    PUT /v1/executions/$delayed/priority {"new_priority": 5}
    409 {"kind": "contention", "retryable": false}

### POST /v1/executions/{id}/replay
replay an active one
    POST /v1/executions/$running/replay
    409 {"kind": "execution_not_terminal", "retryable": false}
replay
    POST /v1/executions/$completed/replay
    200 {"Replayed": {"public_state": "waiting"}}
replay again while runnable
    POST /v1/executions/$completed/replay
    409 {"kind": "execution_not_terminal", "retryable": false}

### POST /v1/executions/{id}/revoke-lease
no lease
    POST /v1/executions/$waiting/revoke-lease
    200 {"AlreadySatisfied": {"reason": "no_active_lease"}}
leased
    POST /v1/executions/$running/revoke-lease
    200 {"Revoked": {"lease_epoch": "<digits>", "lease_id": "<text>"}}
again
    POST /v1/executions/$running/revoke-lease
    200 {"AlreadySatisfied": {"reason": "already_revoked"}}

### POST /v1/executions/{id}/reclaim
reclaim an active one
    POST /v1/executions/$running/reclaim RECLAIM {}
    200 {"detail": "<text>", "execution_id": "$running", "status": "not_reclaimable"}
revoked one
    POST /v1/executions/$revoked/reclaim RECLAIM {}
    200 {"execution_id": "$revoked", "expires_at_ms": "<int>", "grant_key": "<text>",
        "lane_id": "default", "partition_key": "<partition>", "status": "granted"}
again, by another worker
    POST /v1/executions/$revoked/reclaim RECLAIM {"worker_id": "other"}
    409 {"kind": "state_conflict", "retryable": false}
completed one
    POST /v1/executions/$completed/reclaim RECLAIM {}
    200 {"detail": "<text>", "execution_id": "$completed", "status": "not_reclaimable"}
not found
    POST /v1/executions/$ghost/reclaim RECLAIM {}
    404

### POST /v1/workers/{worker_id}/claim
claim: nothing there
    POST /v1/workers/w/claim CLAIM {}
    204
ttl 0
    POST /v1/workers/w/claim CLAIM {"grant_ttl_ms": 0}
    400
ttl too long
    POST /v1/workers/w/claim CLAIM {"grant_ttl_ms": 60001}
    400
empty instance
    POST /v1/workers/w/claim CLAIM {"worker_instance_id": ""}
    400
blank in worker id
    POST /v1/workers/a%20b/claim CLAIM {}
    400
bad lane
    POST /v1/workers/w/claim CLAIM {"lane_id": ""}
    400
missing fields
    POST /v1/workers/w/claim {"lane_id": "default"}
    422
bad capability
    POST /v1/workers/w/claim CLAIM {"capabilities": ["a,b"]}
    400
unknown lane
    POST /v1/workers/w/claim CLAIM {"lane_id": "odd"}
    204
created executions, as they are
    POST /v1/workers/w/claim CLAIM {"worker_instance_id": "for-$waiting"}
    200 {"execution_id": "$waiting", "expires_at_ms": "<int>", "grant_key": "<text>",
        "partition_key": "<partition>", "lane_id": "default", "kind": "ClaimGrant"}
second grant
    POST /v1/workers/w/claim CLAIM {}
    204

### GET /v1/executions/{id}/attempts/{idx}/stream
no frames yet
    GET /v1/executions/$running/attempts/0/stream
    200 {"count": 0, "frames": []}
frames
    GET /v1/executions/$speaking/attempts/0/stream
    200 {"count": 3, "frames": ["HELLO", "WORLD", "WORLD"]}
limit 1
    GET /v1/executions/$speaking/attempts/0/stream?limit=1
    200 {"count": 1, "frames": ["HELLO"]}
from/to
    GET /v1/executions/$speaking/attempts/0/stream?from=$frame&to=$frame
    200 {"count": 1, "frames": ["HELLO"]}
from=start to=end
    GET /v1/executions/$speaking/attempts/0/stream?from=start&to=end
    200 {"count": 3, "frames": ["HELLO", "WORLD", "WORLD"]}
from=- (raw XRANGE token)
    GET /v1/executions/$speaking/attempts/0/stream?from=-
    400
limit 0
    GET /v1/executions/$speaking/attempts/0/stream?limit=0
    400
limit 1001
    GET /v1/executions/$speaking/attempts/0/stream?limit=1001
    400

### GET /v1/executions/{id}/attempts/{idx}/stream/tail
tail, no frames, no block
    GET /v1/executions/$running/attempts/0/stream/tail
    200 {"count": 0, "frames": []}
tail, blocks
    GET /v1/executions/$running/attempts/0/stream/tail?block_ms=1
    200 {"count": 0, "frames": []}
tail after the first
    GET /v1/executions/$speaking/attempts/0/stream/tail?after=$frame
    200 {"count": 2, "frames": ["WORLD", "WORLD"]}
tail after the first, limit 1
    GET /v1/executions/$speaking/attempts/0/stream/tail?after=$frame&limit=1
    200 {"count": 1, "frames": ["WORLD"]}
tail limit 0
    GET /v1/executions/$speaking/attempts/0/stream/tail?limit=0
    400
tail block too long
    GET /v1/executions/$speaking/attempts/0/stream/tail?block_ms=30001
    400
tail after=start
    GET /v1/executions/$speaking/attempts/0/stream/tail?after=start
    400

### POST /v1/flows
created
    POST /v1/flows FLOW {"flow_id": "$id1"}
    201 {"Created": {"flow_id": "$id1"}}
again
    POST /v1/flows FLOW {"flow_id": "$id1"}
    200 {"AlreadySatisfied": {"flow_id": "$id1"}}
missing fields
    POST /v1/flows {"flow_id": "$id1"}
    422

### POST /v1/flows/{id}/members
added
    POST /v1/flows/$flow/members {"flow_id": "$flow", "execution_id": "$part1", "now": 1}
    201 {"Added": {"execution_id": "$part1", "new_node_count": 1}}
again
    POST /v1/flows/$flow/members {"flow_id": "$flow", "execution_id": "$part1", "now": 1}
    200 {"AlreadyMember": {"execution_id": "$part1", "node_count": 1}}
added
    POST /v1/flows/$flow/members {"flow_id": "$flow", "execution_id": "$part2", "now": 1}
    201 {"Added": {"execution_id": "$part2", "new_node_count": 2}}
execution of another partition
    POST /v1/flows/$flow/members {"flow_id": "$flow", "execution_id": "$outside", "now": 1}
    400
unknown flow
    POST /v1/flows/$nobody/members {"flow_id": "$nobody", "execution_id": "$part2", "now": 1}
    400
unknown execution
    POST /v1/flows/$flow/members {"flow_id": "$flow", "execution_id": "$missing", "now": 1}
    404
id mismatch
    POST /v1/flows/$flow/members {"flow_id": "$nobody", "execution_id": "$part2", "now": 1}
    400
bad flow id
    POST /v1/flows/zzz/members {"flow_id": "zzz", "execution_id": "$part2", "now": 1}
    400

### POST /v1/flows/{id}/cancel
cancel_all
    POST /v1/flows/$flow/cancel?of=$member1,$member2 END {}
    200 {"Cancelled": {"cancellation_policy": "cancel_all", "member_count": 2,
        "member_execution_ids": ["$member1", "$member2"]}}
again
    POST /v1/flows/$flow/cancel END {}
    200 {"Cancelled": {"cancellation_policy": "cancel_all", "member_count": 2,
        "member_execution_ids": ["$member1", "$member2"]}}

### POST /v1/flows/{id}/cancel?wait=true, cancel_all
cancel_all, wait=true
    POST /v1/flows/$flow/cancel?wait=true&of=$member1 END {}
    200 {"Cancelled": {"cancellation_policy": "cancel_all", "member_count": 1,
        "member_execution_ids": ["$member1"]}}
the member
    GET /v1/executions/$member1/state
    200 "cancelled"

### POST /v1/flows/{id}/cancel?wait=true, cancel_pending
cancel_pending, wait=true
    POST /v1/flows/$flow/cancel?wait=1&of=$member1 END {"cancellation_policy": "cancel_pending"}
    200 {"Cancelled": {"cancellation_policy": "cancel_pending", "member_count": 1,
        "member_execution_ids": ["$member1"]}}

### POST /v1/flows/{id}/cancel?wait=true, flow_only
flow_only, wait=true
    POST /v1/flows/$flow/cancel?wait=true&of=$member1 END {"cancellation_policy": "flow_only"}
    200 {"Cancelled": {"cancellation_policy": "flow_only", "member_count": 0,
        "member_execution_ids": []}}

### POST /v1/flows/{id}/edges
stale revision
    POST /v1/flows/$flow/edges EDGE {"expected_graph_revision": 1}
    409 {"kind": "contention", "retryable": true}
staged
    POST /v1/flows/$flow/edges EDGE {"expected_graph_revision": 2}
    201 {"Staged": {"edge_id": "$id1", "new_graph_revision": 3}}
same edge again
    POST /v1/flows/$flow/edges EDGE {"expected_graph_revision": 3}
    409 {"kind": "dependency_already_exists", "retryable": false}
second edge
    POST /v1/flows/$flow/edges EDGE {"edge_id": "$id2", "downstream_execution_id": "$member3",
        "expected_graph_revision": 4}
    201 {"Staged": {"edge_id": "$id2", "new_graph_revision": 5}}

### POST /v1/flows/{id}/edges/apply
staged
    POST /v1/flows/$flow/edges EDGE {"expected_graph_revision": 2}
    201 {"Staged": {"edge_id": "$id1", "new_graph_revision": 3}}
applied
    POST /v1/flows/$flow/edges/apply EDGE {"graph_revision": 3}
    200 {"Applied": {"unsatisfied_count": 1}}
again
    POST /v1/flows/$flow/edges/apply EDGE {"graph_revision": 3}
    200 "AlreadyApplied"
the blocked child
    GET /v1/executions/$member2/state
    200 "waiting_children"

### POST /v1/budgets
created
    POST /v1/budgets BUDGET {}
    201 {"Created": {"budget_id": "$id1"}}
again
    POST /v1/budgets BUDGET {}
    200 {"AlreadySatisfied": {"budget_id": "$id1"}}
missing fields
    POST /v1/budgets {"scope_id": "t"}
    422
limits of unequal length
    POST /v1/budgets BUDGET {"budget_id": "$id2", "hard_limits": [1]}
    400
fresh
    GET /v1/budgets/$id1
    200 {"breach_count": 0, "budget_id": "$id1", "created_at": "<digits>", "scope_type": "tenant",
        "enforcement_mode": "strict", "hard_limits": {"cost_micros": 1000, "tokens": 100},
        "last_breach_at": null, "last_breach_dim": null, "next_reset_at": null, "scope_id": "t",
        "soft_breach_count": 0, "soft_limits": {"cost_micros": 0, "tokens": 60}, "usage": {},
        "reserved": {}, "namespace": "default", "name": "$id1"}
not found
    GET /v1/budgets/$nobody
    404
within
    POST /v1/budgets/$id1/usage {"dimensions": {"tokens": 10}, "now": 1, "dedup_key": "k"}
    200 "Ok"
same dedup_key
    POST /v1/budgets/$id1/usage {"dimensions": {"tokens": 10}, "now": 1, "dedup_key": "k"}
    200 "AlreadyApplied"
over the soft limit
    POST /v1/budgets/$id1/usage {"dimensions": {"tokens": 60}, "now": 1, "dedup_key": null}
    200 {"SoftBreach": {"current_usage": 70, "dimension": "tokens", "soft_limit": 60,
        "undeclared": false}}
over the hard limit
    POST /v1/budgets/$id1/usage {"dimensions": {"tokens": 40}, "now": 1}
    200 {"HardBreach": {"current_usage": 70, "dimension": "tokens", "hard_limit": 100,
        "reserved": 0}}
unknown dimension
    POST /v1/budgets/$id1/usage {"dimensions": {"odd": 40}, "now": 1}
    200 "Ok"
reset
    POST /v1/budgets/$id1/reset
    200 {"Reset": {"next_reset_at": 0}}
reset not found
    POST /v1/budgets/$nobody/reset
    404

### POST /v1/quotas
created
    POST /v1/quotas QUOTA {}
    201 {"Created": {"quota_policy_id": "$id1"}}
again
    POST /v1/quotas QUOTA {}
    200 {"AlreadySatisfied": {"quota_policy_id": "$id1"}}
missing fields
    POST /v1/quotas {"quota_policy_id": "$id1"}
    422

### POST /v1/admin/rotate-waitpoint-secret
rotated
    POST /v1/admin/rotate-waitpoint-secret ROTATE {}
    200 {"failed": [], "new_kid": "k2", "rotated": 1}
same again
    POST /v1/admin/rotate-waitpoint-secret ROTATE {}
    200 {"failed": [], "new_kid": "k2", "rotated": 1}
same kid, other secret
    POST /v1/admin/rotate-waitpoint-secret ROTATE {"new_secret_hex": "cdcd"}
    400
bad hex
    POST /v1/admin/rotate-waitpoint-secret ROTATE {"new_secret_hex": "zz"}
    400
odd hex
    POST /v1/admin/rotate-waitpoint-secret ROTATE {"new_secret_hex": "abc"}
    400
empty kid
    POST /v1/admin/rotate-waitpoint-secret ROTATE {"new_kid": ""}
    400

### GET /healthz
ok
    GET /healthz
    200 {"status": "ok"}
"""

BODIES: Final = """
CREATE {"namespace": "default", "lane_id": "default", "execution_kind": "demo",
    "input_payload": [123, 125], "payload_encoding": null, "priority": 0,
    "creator_identity": "golden", "idempotency_key": null, "tags": {}, "policy": null,
    "delay_until": null, "execution_deadline_at": null, "partition_id": 1, "now": 1}
POLICY {"priority": 3, "retry_policy": {"max_retries": 2, "backoff": {"type": "exponential",
    "initial_delay_ms": 100, "max_delay_ms": 1000, "multiplier": 2.0, "jitter": false},
    "retryable_categories": []}, "timeout_policy": {"attempt_timeout_ms": 60000,
    "max_reclaim_count": 5}, "max_reclaim_count": 100,
    "suspension_policy": {"default_timeout_ms": 1000, "timeout_behavior": "fail"},
    "fallback_policy": {"tiers": [{"provider": "p", "model": "m"}]}, "max_replay_count": 10,
    "budget_ids": [], "routing_requirements": {"required_capabilities": ["gpu"]},
    "stream_policy": {"durability_mode": "buffered", "retention_maxlen": 100},
    "max_signals_per_execution": 10}
CANCEL {"reason": "golden", "source": "operator_override", "now": 1, "lease_id": null,
    "lease_epoch": null, "attempt_id": null}
SIGNAL {"execution_id": "$suspended", "waitpoint_id": "$waitpoint", "signal_id": "$id1",
    "signal_name": "approved", "signal_category": "decision", "source_type": "user",
    "source_identity": "ada", "target_scope": "waitpoint", "waitpoint_token": "$token",
    "payload": [123, 125], "payload_encoding": "json", "correlation_id": null,
    "idempotency_key": null, "created_at": null, "dedup_ttl_ms": null, "now": 1,
    "resume_delay_ms": null, "max_signals_per_execution": null, "signal_maxlen": null}
RECLAIM {"worker_id": "w", "worker_instance_id": "w-1", "lane_id": "default",
    "grant_ttl_ms": 5000, "worker_capabilities": []}
CLAIM {"lane_id": "default", "worker_instance_id": "w-1", "capabilities": [],
    "grant_ttl_ms": 5000}
FLOW {"flow_kind": "golden", "namespace": "default", "now": 1}
EDGE {"flow_id": "$flow", "edge_id": "$id1", "upstream_execution_id": "$member1",
    "downstream_execution_id": "$member2", "dependency_kind": "success_only",
    "data_passing_ref": null, "now": 1}
END {"flow_id": "$flow", "reason": "golden", "cancellation_policy": "cancel_all", "now": 1}
BUDGET {"budget_id": "$id1", "scope_type": "tenant", "scope_id": "t",
    "enforcement_mode": "strict", "on_hard_limit": "reject", "on_soft_limit": "warn",
    "reset_interval_ms": 0, "dimensions": ["tokens", "cost_micros"], "hard_limits": [100, 1000],
    "soft_limits": [60, 0], "now": 1}
QUOTA {"quota_policy_id": "$id1", "window_seconds": 60, "max_requests_per_window": 5,
    "max_concurrent": 2, "now": 1}
ROTATE {"new_kid": "k2",
    "new_secret_hex": "abababababababababababababababababababababababababababababababab"}
INFO {"namespace": "default", "lane_id": "default", "execution_kind": "work", "priority": 0,
    "public_state": "waiting", "state_vector": "<states>", "blocking_detail": "",
    "created_at": "<digits>", "current_attempt_index": 0, "flow_id": null,
    "parent_execution_id": null}
HELLO {"id": "<text>", "fields": {"encoding": "utf8", "frame_type": "token", "mode": "durable",
    "source": "worker", "ts": "<digits>", "payload": "hello"}}
WORLD {"id": "<text>", "fields": {"encoding": "utf8", "frame_type": "token", "mode": "durable",
    "source": "worker", "ts": "<digits>", "payload": "world", "correlation_id": "c-1"}}
"""
