"""Gates of routes: made known before the first execution that has to pass them, and looked at."""

from collections.abc import Collection, Sequence

import msgspec
from msgspec import Struct

from flowfabric.core.gates import (
    Gate,
    GateName,
    GateOwner,
    GateState,
    Limits,
    QuotaPolicy,
)
from flowfabric.core.ids import GateId, GateOwnerId
from flowfabric.core.limits import GATED_ROUTES_MAX
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.store.base import Reader, Transaction

GATES_TOPIC = "gates"
"""Limits have changed, or there are some where there were none."""


async def register(tx: Transaction, names: Collection[GateName]) -> None:
    """Add gates that are new. A limit has to exist; a budget may be used before it is declared."""
    if not names:
        return
    quotas = sorted({each.owner_id for each in names if each.owner_kind is GateOwner.QUOTA})
    known = await tx.get(QuotaPolicy, [(each,) for each in quotas])
    for each in quotas:
        if (each,) not in known:
            raise NotFound("quota_policy", each)
    await tx.insert_new([each.new() for each in sorted(names)])
    tx.hint(GATES_TOPIC)


def check_count(total: int) -> None:
    """Refuse more routes with gates than there may be."""
    if total > GATED_ROUTES_MAX:
        raise InvalidInput(
            "gates",
            f"there may be {GATED_ROUTES_MAX} values of keys that limit work in a database; those"
            " that nothing uses are forgotten after a day",
        )


class GateRow(Struct, frozen=True, kw_only=True):
    """A row of `gates_in_use`."""

    gate_id: GateId
    owner_kind: GateOwner
    owner_id: GateOwnerId
    gate_key: str
    starts: str
    opens_at_ms: int | None
    closed: bool
    window_ms: int
    rate: int
    cap: int
    jitter_ms: int
    has_policy: bool
    leased: int
    granted: int
    admitted: int
    now_ms: int

    @property
    def state(self) -> GateState:
        return GateState(
            gate=Gate(
                gate_id=self.gate_id,
                owner_kind=self.owner_kind,
                owner_id=self.owner_id,
                gate_key=self.gate_key,
                starts=self.starts,
                opens_at_ms=self.opens_at_ms,
                closed=self.closed,
            ),
            limits=Limits(window_ms=self.window_ms, rate=self.rate, cap=self.cap),
            in_use=self.leased + self.granted + self.admitted,
        )


async def load(
    reader: Reader, gate_ids: Sequence[GateId], *, always: bool = False
) -> list[GateRow]:
    """Gates as they are now. What is held is counted where it is limited, or `always`."""
    if not gate_ids:
        return []
    rows = await reader.select("gates_in_use", gate_ids=gate_ids, counts_all=always)
    return msgspec.convert(rows, list[GateRow], strict=False)
