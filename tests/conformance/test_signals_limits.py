"""What signals may be, and how many."""

from flowfabric import Engine
from flowfabric.core.conditions import (
    OperatorOnly,
)
from flowfabric.core.limits import SIGNAL_PAYLOAD_BYTES_MAX
from flowfabric.core.signals import SignalAccepted
from flowfabric.core.suspension_model import SignalEffect
from flowfabric.errors import (
    PayloadTooLarge,
    SignalLimitExceeded,
)
from tests.conformance.given import Given
from tests.conformance.observed import (
    refused,
    refuses,
    unchanged,
)
from tests.conformance.pausing import (
    duplicate_of,
    paused,
)

SATISFIED = SignalEffect.SATISFIED
APPENDED = SignalEffect.APPENDED
DUPLICATE = SignalEffect.APPENDED_DUPLICATE
FAILED = SignalEffect.MATCHER_FAILED

# Limits -------------------------------------------------------------------------


async def test_an_execution_accepts_as_many_signals_as_its_policy_allows(
    engine: Engine, given: Given
) -> None:
    pause = await paused(given, OperatorOnly(), fields={"policy": {"max_signals_per_execution": 2}})
    await pause.signal()
    answer = await engine.deliver_signal(
        pause.execution_id,
        pause.waitpoint_id,
        waitpoint_token=pause.token,
        signal_name="x",
        idempotency_key="k",
    )
    async with refused(engine, SignalLimitExceeded):
        await engine.deliver_signal(
            pause.execution_id, pause.waitpoint_id, waitpoint_token=pause.token, signal_name="x"
        )
    again = await engine.deliver_signal(
        pause.execution_id,
        pause.waitpoint_id,
        waitpoint_token=pause.token,
        signal_name="x",
        idempotency_key="k",
    )
    assert isinstance(answer, SignalAccepted)
    assert duplicate_of(again) == answer.signal_id


async def test_a_policy_of_zero_sets_no_limit(given: Given) -> None:
    pause = await paused(given, OperatorOnly(), fields={"policy": {"max_signals_per_execution": 0}})
    for _ in range(3):
        assert await pause.signal() is APPENDED


async def test_payloads_are_bytes_up_to_a_limit(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    payload = bytes(range(256)) * (SIGNAL_PAYLOAD_BYTES_MAX // 256)
    async with refused(engine, PayloadTooLarge):
        await engine.deliver_signal(
            pause.execution_id,
            pause.waitpoint_id,
            waitpoint_token=pause.token,
            signal_name="approved",
            payload=payload + b"x",
        )
    await engine.deliver_signal(
        pause.execution_id,
        pause.waitpoint_id,
        waitpoint_token=pause.token,
        signal_name="approved",
        payload=payload,
    )
    (signal,) = await engine.observe_signals(pause.handle)
    assert signal.payload == payload


async def test_every_field_of_a_signal_is_checked(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    bad: list[tuple[str, dict[str, object]]] = [
        ("signal_name", {"signal_name": ""}),
        ("signal_name", {"signal_name": 7}),
        ("signal_name", {"signal_name": "x" * 257}),
        ("signal_id", {"signal_id": "mine"}),
        ("signal_category", {"signal_category": None}),
        ("source_type", {"source_type": "\x00"}),
        ("source_identity", {"source_identity": "x" * 257}),
        ("payload", {"payload": "text"}),
        ("payload_encoding", {"payload_encoding": 1}),
        ("correlation_id", {"correlation_id": "x" * 257}),
        ("idempotency_key", {"idempotency_key": "x" * 513}),
        ("target_scope", {"target_scope": []}),
        ("created_at_ms", {"created_at_ms": -1}),
        ("dedup_ttl_ms", {"dedup_ttl_ms": -1}),
        ("waitpoint_token", {"waitpoint_token": None}),
        ("waitpoint_token", {"waitpoint_token": b"k1:00"}),
    ]
    base: dict[str, object] = {"waitpoint_token": pause.token, "signal_name": "approved"}
    async with unchanged(engine):
        for field, arguments in bad:
            await refuses(
                engine,
                field,
                "deliver_signal",
                pause.execution_id,
                pause.waitpoint_id,
                **base | arguments,
            )
        await refuses(engine, "execution_id", "deliver_signal", "x", pause.waitpoint_id, **base)
        await refuses(engine, "waitpoint_id", "deliver_signal", pause.execution_id, "x", **base)
