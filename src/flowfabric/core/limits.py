"""Every bound the engine enforces, in one place."""

PRIORITY_MIN = 0
PRIORITY_MAX = 9_000

LEASE_TTL_MS_MIN = 1
LEASE_TTL_MS_MAX = 24 * 60 * 60 * 1_000
GRANT_TTL_MS_MAX = 60_000

PAYLOAD_BYTES_MAX = 4 * 1024 * 1024
"""Input payload and result, each. `EngineConfig.payload_bytes_max` changes it."""

TEXT_BYTES_MAX = 64 * 1024
"""Failure reasons, progress messages and other free text; longer reasons are shortened."""
NAME_BYTES_MAX = 256
"""Identities, encodings, categories and other short text."""
IDEMPOTENCY_KEY_BYTES_MAX = 512
IDEMPOTENCY_TTL_MS = 24 * 60 * 60 * 1_000

BATCH_MAX = 1_000
"""Rows one call may create, claim, renew, complete or fail."""
PAGE_MAX = 1_000
"""Rows one page of a list may hold."""
EXPIRED_LEASES_PAGE_MAX = 10_000
SWEEP_BATCH = 500
"""Rows one sweep of a reconciler handles in one transaction."""

RETENTION_MS = 24 * 60 * 60 * 1_000
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
"""A staged edge nobody applied is applied after this long."""
CANCEL_WAIT_MS_MAX = 300_000
"""The longest a caller may wait for a flow's members to be cancelled."""
