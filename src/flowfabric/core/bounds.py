"""The bounds that several rooms enforce, or that concern the engine as a whole.

A bound of one noun alone stands in the room of that noun.
"""

PRIORITY_MIN = 0
PRIORITY_MAX = 9_000

WORKER_DEATHS_MAX = 3
"""How often in a row a worker may die over one execution, unless its policy says otherwise."""

LEASE_TTL_MS_MIN = 1
LEASE_TTL_MS_MAX = 24 * 60 * 60 * 1_000
FENCE_MS_MAX = 10 * 60 * 1_000
"""How long a fenced transaction may last; one that takes longer cannot commit."""
FENCE_WAIT_MS_MIN = 1_000
"""How long a fence waits at least for its row, before it looks whether its lease is live."""
GRANT_TTL_MS_MAX = 60_000
LIVENESS_TTL_MS_MIN = 1_000
LIVENESS_TTL_MS_MAX = 60 * 60 * 1_000
"""How long a worker may be silent before it counts as gone."""
WEIGHT_MAX = 1_000
"""The weight of one lane among those a worker serves."""
KEPT_BACK_MAX = 256
"""How many executions that no worker can run one call of a scheduler keeps back."""

PAYLOAD_BYTES_MAX = 4 * 1024 * 1024
"""Input payload and result, each. `EngineConfig.payload_bytes_max` changes it."""

PAYLOAD_DEPTH_MAX = 128
"""Lists and objects inside each other in any JSON that is stored; readers have limits, too."""

TEXT_BYTES_MAX = 64 * 1024
"""Failure reasons, progress messages and other free text; longer reasons are shortened."""
TRACEBACK_BYTES_MAX = 16 * 1024
"""Of a failure's traceback the end is kept, where the cause is."""
REASON_BYTES_MAX = 2**31
"""A reason before it is shortened."""
FAILURE_BYTES_MAX = 1024 * 1024
"""How a step failed, as later runs see it. No payload: it must be possible to store it."""
NAME_BYTES_MAX = 256
"""Identities, encodings, categories and other short text."""
IDEMPOTENCY_KEY_BYTES_MAX = 512

KEY_WAIT_MS = 10_000
"""How long a submission waits for another open transaction that decides its key or id."""

ROUTES_MAX = 100_000
"""Combinations of namespace, lane, kind and required capabilities in one database."""
GATED_ROUTES_MAX = 1_000_000
"""The same for work under limits, where each value of a key counts. Looked at now and then."""
GATES_PER_ROUTE_MAX = 16
"""Limits and budgets one execution may be under."""
ROUTE_KEEP_MS = 24 * 60 * 60 * 1_000
"""How long a route that no execution uses is kept after its last lookup."""
ROUTE_CACHE_MS = 60 * 60 * 1_000
"""How long a process remembers a route; far less than it is kept."""

AMOUNT_MAX = 2**53 - 1
"""The largest limit, amount and usage: every reader of JSON represents it exactly."""

BATCH_MAX = 1_000
"""Rows one call may create, claim, renew, complete or fail."""
PAGE_MAX = 1_000
"""Rows one page of a list may hold."""
EXPIRED_LEASES_PAGE_MAX = 10_000
SWEEP_BATCH = 500
"""Rows one sweep of a reconciler handles in one transaction."""

SIGNAL_PAYLOAD_BYTES_MAX = 64 * 1024
KEPT_SIGNALS_MAX = 1_000
"""Signals one execution keeps for waits to come."""
KEPT_SIGNAL_BYTES_MAX = 1024 * 1024
"""Payloads of all of them together."""
KEPT_SIGNALS_READ_MAX = 10_000
"""Kept signals one wait looks at, with those it gets back from pauses that ended unmet."""
KEPT_SIGNALS_SHOWN_MAX = 100
"""Kept signals the description of an execution lists."""
SIGNAL_DEDUP_TTL_MS_MAX = 7 * 24 * 60 * 60 * 1_000
SUSPEND_CLOCK_SKEW_MS = 600_000
"""How far in the past a suspension's timeout may lie and still be accepted, as due at once."""
SUSPEND_DEDUP_GRACE_MS = 60_000
SUSPEND_DEDUP_TTL_MS_MAX = 7 * 24 * 60 * 60 * 1_000
WAITPOINTS_PER_SUSPENSION_MAX = 64
OPEN_WAITPOINTS_MAX = 256
"""Waitpoints one execution may have open at once."""
WAITPOINT_TTL_MS_MAX = 10 * 365 * 24 * 60 * 60 * 1_000
ROTATION_GRACE_MS = 24 * 60 * 60 * 1_000

RETENTION_MS = 7 * 24 * 60 * 60 * 1_000
RETENTION_FAILED_MS = 30 * 24 * 60 * 60 * 1_000
"""How long ended executions are kept; `EngineConfig` and policies change it."""
HELD_MS_MIN = 60 * 1_000
HELD_MS_MAX = 60 * 60 * 1_000
"""How soon retention looks again at what is past its keep time and still needed."""
TIME_MS_MAX = 253_402_300_799_999
"""The end of the year 9999: no time beyond it is accepted."""

FLOW_MEMBERS_MAX = 100_000
FLOW_EDGES_MAX = 1_000_000
JOIN_EDGES_MAX = 10_000
"""Edges one call may add."""
MEMBERS_SHOWN_MAX = 1_000
"""Member ids an answer about a whole flow lists; it counts all of them."""
DISPATCH_BATCH = 500
"""Endings one transaction of the dispatcher works off."""
DISPATCH_EDGES_MAX = 2_000
"""Edges one transaction of the dispatcher resolves."""
CANCEL_BATCH = 200
"""Members one transaction cancels; a flow with no more is cancelled at once."""
EDGE_APPLY_AFTER_MS = 60_000
"""A staged edge that is never applied is applied after this long."""
AUDIT_EVERY_MS = 60_000
AUDIT_BATCH = 2_000
"""How often flows are searched for what was left behind, and how many members at a time."""
CANCEL_WAIT_MS_MAX = 300_000
"""The longest a caller may wait for a flow's members to be cancelled."""

OUTAGE_MS_MIN = 1_000
"""A search for expired leases that is kept waiting for this long has met an outage."""
OUTAGE_SLACK_MS = 2_000
"""How long after the end of a lease such a wait may begin, or before its grant or last renewal
end, and still explain it."""
