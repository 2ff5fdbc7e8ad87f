"""Which workers are present: what each serves, and until when it counts as alive.

A worker is one process, known by its instance id; its worker id names the pool it belongs to.
It registers, says that it is alive before `liveness_ttl_ms` is over, and registers again if it
has been forgotten. Claims need none of this. It tells people who serves what, gives back the
leases of a worker that is known to be dead, and lets go of work that was kept back because
no worker could run it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, Final

import msgspec
from msgspec import Struct, structs

from flowfabric.core import bounds, decisions
from flowfabric.core.checks import check_int, check_list, check_name, split_kind
from flowfabric.core.ids import LaneId, Namespace, WorkerId, WorkerInstanceId, parse_lane_id
from flowfabric.core.leases import WorkerIdentity
from flowfabric.core.records import Execution, Record, view_of
from flowfabric.core.views import ExecutionSnapshot
from flowfabric.errors import InvalidInput

EVERYWHERE = Namespace("")
"""The namespace under which a worker that serves all of them is stored."""


class RegisteredWorker(Record, frozen=True, kw_only=True):
    """A registered worker, and what it serves."""

    table: ClassVar[str] = "worker"
    key: ClassVar[tuple[str, ...]] = ("namespace", "worker_instance_id")

    namespace: Namespace
    """Empty for a worker that serves every namespace."""
    worker_instance_id: WorkerInstanceId
    worker_id: WorkerId
    lanes: str
    """JSON lists; `kinds` is null for a worker that takes every kind."""
    kinds: str | None
    capabilities: str
    registered_at_ms: int
    running_since_ms: int
    """When its process began, if known; a new process may have the same instance id."""
    last_heartbeat_ms: int
    liveness_ttl_ms: int
    expires_at_ms: int
    """When it counts as gone unless it says before that it is alive."""


class WorkerEventKind(StrEnum):
    REGISTERED = "registered"
    MARKED_DEAD = "marked_dead"
    TTL_SWEPT = "ttl_swept"


STOPPED: Final = "stopped"
"""The reason a worker gives when it withdraws, since nobody else says so of it."""


class WorkerEvent(Record, frozen=True, kw_only=True):
    """What has happened to a worker, kept as long as other events."""

    table: ClassVar[str] = "worker_event"
    key: ClassVar[tuple[str, ...]] = ("event_id",)

    event_id: str
    """In the order of time."""
    namespace: Namespace
    """Empty for a worker that serves every namespace."""
    worker_instance_id: WorkerInstanceId
    worker_id: WorkerId
    event_kind: WorkerEventKind
    event_at_ms: int
    reason: str

    @property
    def words(self) -> tuple[str, str]:
        """What happened and why, for people."""
        match self.event_kind:
            case WorkerEventKind.MARKED_DEAD if self.reason == STOPPED:
                return "stopped", ""
            case WorkerEventKind.TTL_SWEPT:
                return "went quiet", self.reason
            case WorkerEventKind.REGISTERED | WorkerEventKind.MARKED_DEAD:
                return self.event_kind.replace("_", " "), self.reason


class Registered(Struct, frozen=True, kw_only=True, tag=True):
    """The worker was not known, or had been silent for too long."""

    expires_at_ms: int


class Refreshed(Struct, frozen=True, kw_only=True, tag=True):
    """The worker was known; what it serves has been replaced, if that was said."""

    expires_at_ms: int
    """When it counts as gone unless it says before that it is alive."""


class NotRegistered(Struct, frozen=True, kw_only=True, tag=True):
    """The worker does not exist, or no longer does."""

    revoked_leases: int = 0


class WorkerDead(Struct, frozen=True, kw_only=True, tag="Marked"):
    """The worker counts as gone."""

    revoked_leases: int
    """How many executions were taken away from it."""


class WorkerEntry(Struct, frozen=True, kw_only=True):
    """A worker as lists show it."""

    namespace: Namespace | None
    """None: it serves every namespace."""
    worker_id: WorkerId
    worker_instance_id: WorkerInstanceId
    lanes: tuple[LaneId, ...]
    kinds: tuple[str, ...] | None
    """None: it takes every kind."""
    capabilities: tuple[str, ...]
    registered_at_ms: int
    last_heartbeat_ms: int
    liveness_ttl_ms: int
    expires_at_ms: int
    held_leases: int


class Offer(Struct, frozen=True, kw_only=True):
    """Who a worker is and what it serves."""

    worker: WorkerIdentity
    namespace: Namespace | None
    lanes: tuple[LaneId, ...]
    kinds: tuple[str, ...] | None
    capabilities: tuple[str, ...]
    liveness_ttl_ms: int
    uptime_ms: int = 0


def check_liveness(liveness_ttl_ms: object) -> int:
    low, high = bounds.LIVENESS_TTL_MS_MIN, bounds.LIVENESS_TTL_MS_MAX
    return check_int("liveness_ttl_ms", liveness_ttl_ms, low, high)


def check_dead_reason(reason: object) -> str:
    return reason if reason == "" else check_name("reason", reason)


def outlived(worker: RegisteredWorker, began_ms: int, ended_ms: int) -> bool:
    """Whether the process that had a lease from `began_ms` on was heard of after it was over."""
    return worker.running_since_ms <= began_ms and worker.last_heartbeat_ms > ended_ms


def is_live(worker: RegisteredWorker, now_ms: int) -> bool:
    return worker.expires_at_ms > now_ms


def decide_register(
    before: RegisteredWorker | None, offer: Offer, now_ms: int
) -> decisions.Decision[Registered | Refreshed]:
    """Note what a worker serves. One instance belongs to one pool as long as it lives."""
    known = before is not None and is_live(before, now_ms)
    if before is not None and known and before.worker_id != offer.worker.worker_id:
        raise InvalidInput(
            "worker_instance_id",
            f"instance_id reassigned: it belongs to {before.worker_id} and is alive",
            offer.worker.worker_instance_id,
        )
    worker = RegisteredWorker(
        namespace=offer.namespace or EVERYWHERE,
        worker_instance_id=offer.worker.worker_instance_id,
        worker_id=offer.worker.worker_id,
        lanes=_names(offer.lanes),
        kinds=None if offer.kinds is None else _names(offer.kinds),
        capabilities=_names(offer.capabilities),
        registered_at_ms=before.registered_at_ms if before is not None and known else now_ms,
        running_since_ms=now_ms - offer.uptime_ms,
        last_heartbeat_ms=now_ms,
        liveness_ttl_ms=offer.liveness_ttl_ms,
        expires_at_ms=now_ms + offer.liveness_ttl_ms,
    )
    kind: type[Registered | Refreshed] = Refreshed if known else Registered
    changes = (
        decisions.Changes(inserts=(worker,))
        if before is None
        else decisions.Changes(updates=(worker,))
    )
    return decisions.Decision(answer=kind(expires_at_ms=worker.expires_at_ms), changes=changes)


def decide_heartbeat(
    before: RegisteredWorker | None, now_ms: int
) -> decisions.Decision[Refreshed | NotRegistered]:
    """Extend a worker's life. One that was silent for too long has to register again."""
    if before is None or not is_live(before, now_ms):
        return decisions.Decision(answer=NotRegistered())
    expires_at_ms = now_ms + before.liveness_ttl_ms
    alive = structs.replace(before, last_heartbeat_ms=now_ms, expires_at_ms=expires_at_ms)
    return decisions.Decision(
        answer=Refreshed(expires_at_ms=expires_at_ms),
        changes=decisions.Changes(updates=(alive,)),
    )


def event_of(
    worker: RegisteredWorker, kind: WorkerEventKind, event_id: str, now_ms: int, reason: str = ""
) -> WorkerEvent:
    return view_of(
        WorkerEvent, worker, event_id=event_id, event_kind=kind, event_at_ms=now_ms, reason=reason
    )


# Which lane's turn it is, where a worker serves several with different weights

LaneWeights = Sequence[str] | Mapping[str, int]
"""Lanes, or lanes with weights: one of weight 3 gets three times as many turns as one of weight 1.
"""


class LaneShares:
    """Smooth weighted round robin: of any few turns in a row each lane gets its share.

    Turns go only to lanes that take part, and none is given later instead: a lane that had no work
    for a while gets no extra share when it has work again.
    """

    def __init__(self, lanes: LaneWeights, field: str = "lanes") -> None:
        weights = lanes if isinstance(lanes, Mapping) else _alike(field, lanes)
        check_list(field, list(weights), 1, bounds.BATCH_MAX)
        self.weights: dict[str, int] = {
            parse_lane_id(lane): check_int(f"{field}[{lane!r}]", weight, 1, bounds.WEIGHT_MAX)
            for lane, weight in weights.items()
        }
        self.names = tuple(self.weights)
        self.alike = len(set(self.weights.values())) == 1
        self._credit = dict.fromkeys(self.names, 0)

    def next(self, among: Collection[str] | None = None) -> str:
        """The lane whose turn it is, of those that take part."""
        taking = self.names if among is None else [lane for lane in self.names if lane in among]
        for lane in taking:
            self._credit[lane] += self.weights[lane]
        chosen = max(taking, key=lambda lane: self._credit[lane])
        self._credit[chosen] -= sum(self.weights[lane] for lane in taking)
        return chosen

    def turns(self, count: int, among: Collection[str]) -> dict[str, int]:
        """How many of the next turns each lane gets, in the order of its first."""
        return dict(Counter(self.next(among) for _ in range(count)))


def _alike(field: str, lanes: Sequence[str]) -> dict[str, int]:
    return {str(lane): 1 for lane in check_list(field, lanes, 1, bounds.BATCH_MAX)}


# Who serves what ------------------------------------------------------------


class Need(Struct, frozen=True, kw_only=True):
    """What an execution asks of a worker."""

    namespace: Namespace
    lane_id: LaneId
    execution_kind: str
    required: tuple[str, ...]


def need_of(execution: Execution | ExecutionSnapshot, required: tuple[str, ...]) -> Need:
    return view_of(Need, execution, required=required)


def serves(worker: WorkerEntry, need: Need) -> bool:
    """Whether the worker would claim an execution that asks for this."""
    return (
        worker.namespace in (None, need.namespace)
        and need.lane_id in worker.lanes
        and (worker.kinds is None or need.execution_kind in worker.kinds)
        and set(need.required) <= set(worker.capabilities)
    )


def other_versions(
    present: Iterable[WorkerEntry], execution: Execution | ExecutionSnapshot
) -> tuple[int, ...]:
    """Which other versions of the task present workers serve in its lane."""
    name, version = split_kind(execution.execution_kind)
    served = {
        split_kind(kind)
        for worker in present
        if worker.namespace in (None, execution.namespace) and execution.lane_id in worker.lanes
        for kind in worker.kinds or ()
    }
    return tuple(sorted(other for found, other in served if found == name and other != version))


def other_kinds(present: Iterable[WorkerEntry], execution: Execution) -> frozenset[str]:
    """What workers in its lane serve in place of its kind; nothing if one of them serves that."""
    serving = [
        worker
        for worker in present
        if worker.namespace in (None, execution.namespace) and execution.lane_id in worker.lanes
    ]
    if any(each.kinds is None or execution.execution_kind in each.kinds for each in serving):
        return frozenset()
    return frozenset(kind for each in serving for kind in each.kinds or ())


def entry(worker: RegisteredWorker, held_leases: int = 0) -> WorkerEntry:
    return view_of(
        WorkerEntry,
        worker,
        namespace=worker.namespace or None,
        lanes=tuple(LaneId(each) for each in read_names(worker.lanes)),
        kinds=None if worker.kinds is None else tuple(read_names(worker.kinds)),
        capabilities=tuple(read_names(worker.capabilities)),
        held_leases=held_leases,
    )


def _names(names: Sequence[str]) -> str:
    return msgspec.json.encode(names).decode()


def read_names(text: str) -> list[str]:
    return msgspec.json.decode(text, type=list[str])
