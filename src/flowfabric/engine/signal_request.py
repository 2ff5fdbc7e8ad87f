"""A signal as it is asked for, and the trace that refused ones leave."""

import time
from typing import TypedDict

from flowfabric.core.checks import (
    check_int,
    check_json,
    check_name,
    check_optional_text,
    check_optional_time,
    check_text,
)
from flowfabric.core.ids import ExecutionId, SignalId, parse_namespace, parse_uuid
from flowfabric.core.limits import (
    IDEMPOTENCY_KEY_BYTES_MAX,
    SIGNAL_DEDUP_TTL_MS_MAX,
    SIGNAL_PAYLOAD_BYTES_MAX,
)
from flowfabric.core.signals import SignalRequest
from flowfabric.engine.unit import new_uuid
from flowfabric.logs import open_log

log = open_log(__name__)

REFUSALS_LOGGED_EVERY_S = 1.0
"""How often at most a process writes a line about wrong tokens."""


class SignalOptions(TypedDict, total=False):
    """What may be said about a signal beside its name."""

    signal_id: str | None
    """Made up when left out."""
    signal_category: str
    source_type: str
    source_identity: str
    payload: bytes | None
    payload_encoding: str
    correlation_id: str
    idempotency_key: str | None
    target_scope: str
    created_at_ms: int | None
    dedup_ttl_ms: int | None
    """How long the idempotency key holds; as long as the execution exists, when left out."""
    namespace: str | None
    """An execution of another one counts as unknown."""


class Refusals:
    """Leaves a trace of wrong tokens in the log, in few lines however many come."""

    def __init__(self) -> None:
        self._since = 0
        self._last_s: float | None = None

    def note(self, execution_id: ExecutionId, code: str) -> None:
        self._since += 1
        now_s = time.monotonic()
        if self._last_s is not None and now_s - self._last_s < REFUSALS_LOGGED_EVERY_S:
            return
        log.warning("%d signals refused: %s, the last for %s", self._since, code, execution_id)
        self._last_s, self._since = now_s, 0


REFUSALS = Refusals()
"""Of this process."""


def check_signal(
    signal_name: object,
    *,
    signal_id: object = None,
    signal_category: object = "default",
    source_type: object = "external",
    source_identity: object = "",
    payload: object = None,
    payload_encoding: object = "json",
    correlation_id: object = "",
    idempotency_key: object = None,
    target_scope: object = "waitpoint",
    created_at_ms: object = None,
    dedup_ttl_ms: object = None,
    namespace: object = None,
) -> SignalRequest:
    return SignalRequest(
        signal_id=SignalId(new_uuid() if signal_id is None else parse_uuid("signal_id", signal_id)),
        signal_id_is_new=signal_id is None,
        signal_name=check_name("signal_name", signal_name),
        signal_category=check_text("signal_category", signal_category),
        source_type=check_text("source_type", source_type),
        source_identity=check_text("source_identity", source_identity),
        payload=None
        if payload is None
        else check_json("payload", payload, SIGNAL_PAYLOAD_BYTES_MAX, encoding=payload_encoding),
        payload_encoding=check_text("payload_encoding", payload_encoding),
        correlation_id=check_text("correlation_id", correlation_id),
        idempotency_key=check_optional_text(
            "idempotency_key", idempotency_key, bytes_max=IDEMPOTENCY_KEY_BYTES_MAX
        )
        or None,
        target_scope=check_text("target_scope", target_scope),
        created_at_ms=check_optional_time("created_at_ms", created_at_ms),
        namespace=None if namespace is None else parse_namespace(namespace),
        dedup_ttl_ms=None
        if dedup_ttl_ms is None
        else check_int("dedup_ttl_ms", dedup_ttl_ms, 0, SIGNAL_DEDUP_TTL_MS_MAX),
    )
