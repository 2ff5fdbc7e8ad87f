"""An execution is stored by phase of its life, in three tables.

`execution` is what was asked for: written once, never updated. `live` is what is going
on: narrow, and there exactly as long as the execution has not ended. `ending` is how it
ended; a replay takes it back. So the rows that change are as few as the work in hand,
however many executions have ended.

To the core an execution is one record, `Execution`, which is read from a view over the
three. Here a change of that record becomes the writes of the tables.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from flowfabric.core.records import Execution, Record
from flowfabric.core.states import (
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.store.changes import Place, Writes

_KEY: Final = ("partition_key", "execution_id")
_ASKED: Final = (
    "route_id", "created_at_ms", "attempt_timeout_ms", "retention_ms", "retention_failed_ms",
    "namespace", "lane_id", "execution_kind", "creator_identity", "policy", "payload",
    "payload_encoding", "own_id", "idempotency_key", "parent_execution_id",
)  # fmt: skip
_COPIED: Final = ("route_id", "created_at_ms")
"""What was asked and stands in the other tables too, for their indexes."""
AFTER_THE_END: Final[Mapping[str, object]] = {
    "lifecycle_phase": LifecyclePhase.TERMINAL,
    "ownership_state": OwnershipState.UNOWNED,
    "eligibility_state": EligibilityState.NOT_APPLICABLE,
    "blocking_reason": BlockingReason.NONE,
    "blocking_detail": "",
    "ready": False,
    "lease_id": None,
    "worker_id": None,
    "worker_instance_id": None,
    "lease_acquired_at_ms": None,
    "lease_expires_at_ms": None,
    "lease_last_renewed_at_ms": None,
    "lease_renewal_deadline_ms": None,
    "lease_expired_at_ms": None,
    "lease_revoked_at_ms": None,
    "lease_revoke_reason": None,
    "delay_until_ms": None,
    "attempt_deadline_ms": None,
    "attempt_time_left_ms": None,
    "current_suspension_id": None,
    "current_waitpoint_id": None,
    "open_waitpoint_count": 0,
    "awaits_child": False,
}
"""What only `live` holds, and what it is once the execution has ended."""
BEFORE_THE_END: Final[Mapping[str, object]] = {
    "terminal_outcome": TerminalOutcome.NONE,
    "completed_at_ms": None,
    "retain_until_ms": None,
    "final_lease_id": None,
    "final_worker_id": None,
    "final_worker_instance_id": None,
    "failure_reason": None,
    "cancellation_reason": None,
    "cancelled_by": None,
    "result": None,
    "result_encoding": None,
}
"""What only `ending` holds, and what it is before."""

_NAMES: Final = tuple(field.name for field in structs.fields(Execution))
STATES: Final = frozenset(
    field.name
    for field in structs.fields(Execution)
    if isinstance(field.type, type) and issubclass(field.type, StrEnum)
)
"""Columns with a closed set of values."""
BLANKS: Final[Mapping[str, str]] = {
    field.name: "false" if field.default is False else repr(field.default)
    for field in structs.fields(Execution)
    if field.default in (0, "")
}
"""What is the same in nearly every row, as SQL spells it; a store need not write it."""
IMPLIED: Final[Mapping[str, Mapping[str, str]]] = {
    "live": {
        "last_mutation_at_ms": "last_transition_at_ms",
        "lease_last_renewed_at_ms": "lease_acquired_at_ms",
        "started_at_ms": "lease_acquired_at_ms",
        "current_attempt_id": "lease_id",
    },
    "ending": {
        "last_mutation_at_ms": "completed_at_ms",
        "last_transition_at_ms": "completed_at_ms",
        "current_attempt_id": "final_lease_id",
    },
}
"""By table, columns that nearly always equal another one: a store need not write them then."""
_POSITIONS: Final = {name: position for position, name in enumerate(_NAMES)}


def _part(name: str, table: str, columns: Iterable[str]) -> type[Record]:
    wanted = set(columns)
    types = {field.name: field.type for field in structs.fields(Execution)}
    part = msgspec.defstruct(
        name,
        [(each, types[each]) for each in _NAMES if each in wanted],
        bases=(Record,),
        namespace={"table": table, "key": _KEY},
        module=__name__,
        frozen=True,
    )
    assert issubclass(part, Record)
    return part


AskedRow: Final = _part("Asked", "execution", {*_KEY, *_ASKED})
Live: Final = _part(
    "Live", "live", {*_KEY, *_COPIED} | set(_NAMES) - set(_ASKED) - BEFORE_THE_END.keys()
)
EndingRow: Final = _part(
    "Ending", "ending", {*_KEY, *_COPIED} | set(_NAMES) - set(_ASKED) - AFTER_THE_END.keys()
)


def _picker(part: type[Record]) -> "itemgetter[tuple[object, ...]]":
    return itemgetter(*(_POSITIONS[field.name] for field in structs.fields(part)))


_PICKERS: Final = {part: _picker(part) for part in (AskedRow, Live, EndingRow)}


class RowWrites(NamedTuple):
    """What to write, table by table. An update goes with what the row was, where that is known."""

    inserts: Sequence[Record]
    updates: Sequence[tuple[Record, Record | None]]
    deletes: Sequence[Record]


def rows_of(writes: Writes, loaded: Mapping[Place, Record]) -> RowWrites:
    """The writes of a decision as writes of tables."""
    inserts: list[Record] = []
    updates: list[tuple[Record, Record | None]] = []
    deletes: list[Record] = []
    for record in writes.inserts.values():
        inserts += parts_of(record)
    for place, record in writes.updates.items():
        before = loaded.get(place)
        if not isinstance(record, Execution):
            updates.append((record, before))
            continue
        asked, new = parts_of(record)
        if not isinstance(before, Execution):
            updates += (asked, None), (new, None)
            continue
        asked_before, old = parts_of(before)
        updates.append((asked, asked_before))
        if type(old) is type(new):
            updates.append((new, old))
        else:
            deletes.append(old)
            inserts.append(new)
    for record in writes.deletes.values():
        deletes += parts_of(record)
    return RowWrites(inserts, updates, deletes)


def parts_of(record: Record) -> tuple[Record, ...]:
    """The rows a record consists of; the first one is there as long as any."""
    if not isinstance(record, Execution):
        return (record,)
    return _pick(AskedRow, record), phase_of(record)


def phase_of(execution: Execution) -> Record:
    """The row of `live` or `ending`."""
    ended = execution.lifecycle_phase is LifecyclePhase.TERMINAL
    _check_rest(execution, ended=ended)
    return _pick(EndingRow if ended else Live, execution)


def phase_table(record: Record) -> type[Record]:
    """The table with the row of a record that changes."""
    if not isinstance(record, Execution):
        return type(record)
    return EndingRow if record.lifecycle_phase is LifecyclePhase.TERMINAL else Live


def _pick(part: type[Record], execution: Execution) -> Record:
    return part(*_PICKERS[part](structs.astuple(execution)))


def _check_rest(execution: Execution, *, ended: bool) -> None:
    """What its table does not hold must be what it is read as."""
    for name, value in (AFTER_THE_END if ended else BEFORE_THE_END).items():
        assert getattr(execution, name) == value, f"{name} would be lost: {execution}"
