"""How a worker runs, checked once."""

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flowfabric.core.checks import check_bool, check_int, check_offered
from flowfabric.core.ids import parse_worker_id
from flowfabric.core.limits import BATCH_MAX
from flowfabric.core.policies import Duration, duration_ms
from flowfabric.errors import InvalidInput
from flowfabric.worker.context import IN_PROCESS_SLEEP_MS
from flowfabric.worker.lanes import LaneShares, LaneWeights

CONCURRENCY_MAX = 100_000
LEASE_TTL_MS_MIN = 1_000
QUICK_S = 0.5
VERY_QUICK_S = 0.05


def _name() -> str:
    return socket.gethostname().replace(" ", "-") or "worker"


def _instance() -> str:
    return f"{_name()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How a worker runs."""

    lanes: LaneWeights | None = None
    """A list, or a mapping to weights: a lane of weight 3 gets thrice the turns. Those of the
    worker's tasks unless given."""
    capabilities: Sequence[str] = ()
    concurrency: int = 100
    """Handlers that run at the same time."""
    prefetch: int | None = None
    """Claimed ahead while handlers take less than half a second on average. Unless told, a quarter
    of `concurrency`; as many again while they take less than a twentieth, so that worker and
    database work at the same time."""
    worker_id: str = field(default_factory=_name)
    worker_instance_id: str = field(default_factory=_instance)
    lease_ttl: Duration = "30s"
    drain_timeout: Duration = "25s"
    """How long running handlers may go on once the worker is told to stop."""
    cancel_grace: Duration = "10s"
    """How long a handler may take to stop before its slot is given to another."""
    in_process_sleep: Duration = IN_PROCESS_SLEEP_MS / 1_000
    """Longer sleeps of handlers release the worker."""
    threads: int | None = None
    processes: int | None = None
    reconcile: bool = True
    """Run the reconcilers in this process too: timers, retries and expired leases."""

    def __post_init__(self) -> None:
        if self.lanes is not None:
            LaneShares(self.lanes)
        check_offered(self.capabilities)
        check_int("concurrency", self.concurrency, 1, CONCURRENCY_MAX)
        if self.prefetch is not None:
            check_int("prefetch", self.prefetch, 0, BATCH_MAX)
        parse_worker_id("worker_id", self.worker_id)
        parse_worker_id("worker_instance_id", self.worker_instance_id)
        check_int("lease_ttl", self.lease_ttl_ms, LEASE_TTL_MS_MIN, 24 * 60 * 60 * 1_000)
        for name in ("drain_timeout", "cancel_grace", "in_process_sleep"):
            duration_ms(name, getattr(self, name))
        for name in ("threads", "processes"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, CONCURRENCY_MAX)
        check_bool("reconcile", self.reconcile)

    def with_given(
        self, lanes: LaneWeights | None, capabilities: Sequence[str], concurrency: int | None
    ) -> "WorkerSettings":
        """The same, but for what is given."""
        return replace(
            self,
            lanes=lanes or self.lanes,
            capabilities=capabilities or self.capabilities,
            concurrency=self.concurrency if concurrency is None else concurrency,
        )

    @property
    def lease_ttl_ms(self) -> int:
        return duration_ms("lease_ttl", self.lease_ttl)

    def ahead(self, average_s: float) -> int:
        """How many executions may be claimed ahead of a free slot, by how long handlers take."""
        if average_s >= QUICK_S:
            return 0
        if self.prefetch is not None:
            return self.prefetch
        if average_s < VERY_QUICK_S:
            return min(self.concurrency, BATCH_MAX)
        return min(self.concurrency // 4, 50)


def check_worker_settings(given: object) -> None:
    if not isinstance(given, WorkerSettings | None):
        raise InvalidInput("settings", "must be WorkerSettings, such as WorkerSettings(threads=8)")
