"""Signals that no wait has taken yet.

An execution keeps what reaches it before it waits: at a pending waitpoint, or under a
name that nothing waits for so far. The next wait of that name takes kept signals in the
order they came, those it can use (`conditions.observe`) until it is met. What it cannot
use stays for the wait after it, as does what reaches it while it lasts and cannot be used;
what it took but was not met by goes back. So a signal counts once, and one that was
accepted is never lost.
"""

import hashlib
from collections.abc import Sequence

from msgspec import Struct, structs

from flowfabric.core.conditions import Condition, observe
from flowfabric.core.ids import ExecutionId, SignalId, WaitpointId, WaitpointKey, uuid4_from
from flowfabric.core.limits import KEPT_SIGNAL_BYTES_MAX, KEPT_SIGNALS_MAX
from flowfabric.core.records import (
    Execution,
    SignalEffect,
    SignalFacts,
    SignalRecord,
    Suspension,
    Waitpoint,
)
from flowfabric.errors import KeptSignalsFull


class Mailbox(Struct, frozen=True, kw_only=True):
    """Where a signal goes."""

    waitpoint_id: WaitpointId
    waitpoint_key: WaitpointKey


class KeptSize(Struct, frozen=True, kw_only=True):
    """What an execution keeps for waits to come."""

    signals: int = 0
    bytes: int = 0


def mailbox_id(execution_id: ExecutionId, waitpoint_key: str) -> WaitpointId:
    """Stands for the waitpoint of a signal that met none. Repeats are found by it."""
    digest = hashlib.sha256(f"mailbox\x00{execution_id}\x00{waitpoint_key}".encode()).digest()
    return WaitpointId(uuid4_from(digest[:16]))


def check_mailbox_room(execution: Execution, kept: KeptSize, signal: SignalRecord) -> None:
    if kept.signals >= KEPT_SIGNALS_MAX:
        raise KeptSignalsFull(
            f"{execution.called} keeps {kept.signals} signals for its next waits;"
            f" at most {KEPT_SIGNALS_MAX} are kept. Send {signal.signal_name!r} when it waits"
        )
    size = kept.bytes + len(signal.payload or b"")
    if size > KEPT_SIGNAL_BYTES_MAX:
        raise KeptSignalsFull(
            f"{execution.called}: with {signal.signal_name!r} the signals kept for its next"
            f" waits would be {size} bytes; at most {KEPT_SIGNAL_BYTES_MAX} are kept"
        )


class TakenSignals(Struct, frozen=True, kw_only=True):
    """Kept signals as they count for the suspension."""

    signals: tuple[SignalFacts, ...] = ()
    """Those it takes."""
    closer: SignalId | None = None
    left: int = 0
    """How many stay kept."""

    def counted(self, waitpoint: Waitpoint) -> Waitpoint:
        """The waitpoint with those of its signals that count."""
        own = (each for each in self.signals if each.waitpoint_id == waitpoint.waitpoint_id)
        return structs.replace(waitpoint, matched_signal_count=sum(each.matched for each in own))


def take(condition: Condition, suspension: Suspension, kept: Sequence[SignalFacts]) -> TakenSignals:
    """Use kept signals, in the order they came, until the condition is met."""
    taken: list[SignalFacts] = []
    for signal in kept:
        seen = observe(condition, taken, signal)
        if not seen.satisfier:
            continue
        taken.append(
            structs.replace(
                signal, suspension_id=suspension.suspension_id, matched=True, satisfier=True
            )
        )
        if seen.effect is SignalEffect.SATISFIED:
            left = len(kept) - len(taken)
            return TakenSignals(signals=tuple(taken), closer=signal.signal_id, left=left)
    return TakenSignals(signals=tuple(taken), left=len(kept) - len(taken))
