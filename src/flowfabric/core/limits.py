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
