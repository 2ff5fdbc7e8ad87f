"""The worker: claims what it has slots for, runs it, and stops without losing anything.

Claims come in batches, into free slots only, plus some ahead while handlers are
quick, so that the next are on their way while these run. The worker hands back those that get
no slot. It begins one at a time of those that the next death of a worker would fail.
All leases of the process are renewed together. Told to stop, it claims
no more, hands back what it has not started, lets running handlers finish for a
while, then stops them and hands their leases back too: nothing is left to expire.
No trouble with the database or a handler ends it, unless the database is gone for good, as when
its file was deleted or replaced. Then it can hand nothing back.
"""

import asyncio
import os
import random
import socket
import time
import uuid
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from flowfabric.core.bounds import BATCH_MAX, LIVENESS_TTL_MS_MAX, LIVENESS_TTL_MS_MIN
from flowfabric.core.checks import check_bool, check_int, check_offered
from flowfabric.core.ids import (
    ExecutionId,
    LaneId,
    Namespace,
    WorkerId,
    WorkerInstanceId,
    parse_worker_id,
    uuid_of,
)
from flowfabric.core.leases import WorkerIdentity
from flowfabric.core.policies import Duration, check_duration, duration_ms
from flowfabric.core.results import Renewed
from flowfabric.core.workers import LaneShares, LaneWeights, Offer
from flowfabric.engine.engine import Engine
from flowfabric.engine.leases import claim_topics, sooner
from flowfabric.engine.topics import LOST_TOPIC
from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.logs import open_log
from flowfabric.outages import ASK_AGAIN, FOR_NOBODY, first_of, level_of, statements_within
from flowfabric.reconcilers import Supervisor
from flowfabric.store.base import HintListener
from flowfabric.submission import Submissions
from flowfabric.task import Task
from flowfabric.worker.asyncio_tasks import watch_tasks
from flowfabric.worker.attempt import Middleware, RunningAttempt, Stop
from flowfabric.worker.context import IN_PROCESS_SLEEP_MS
from flowfabric.worker.functions import Functions
from flowfabric.worker.leases import (
    ALONE_S,
    BEATS_PER_LEASE,
    SUSPECTS_APART_MS,
    Connect,
    Heartbeat,
    HeldLease,
    LastChances,
    clock_s,
)
from flowfabric.worker.lost_claims import LostClaims, new_mark
from flowfabric.worker.presence import Presence, release_blocked
from flowfabric.worker.reports import Reports
from flowfabric.worker.resources import Resources
from flowfabric.worker.services import Shared


def lanes_of(tasks: Mapping[str, Task[..., object]]) -> list[str]:
    """The lanes that tasks are submitted to."""
    return sorted({task.settings.lane for task in tasks.values()}) or ["default"]


# How a worker runs, checked once --------------------------------------------

CONCURRENCY_MAX = 100_000
WORKER_LEASE_TTL_MS_MIN = 1_000
WORKER_LEASE_TTL_MS_MAX = 24 * 60 * 60 * 1_000
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
    """Claimed ahead while handlers take less than half a second on average. By default a quarter of
    `concurrency`, at most 50, or as many as `concurrency` while they take less than 50 ms, so that
    worker and database work at the same time."""
    worker_id: str = field(default_factory=_name)
    worker_instance_id: str = field(default_factory=_instance)
    lease_ttl: Duration = "30s"
    drain_timeout: Duration = "25s"
    """How long running handlers may take to finish once the worker has to stop."""
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
        check_duration(
            "lease_ttl", self.lease_ttl, WORKER_LEASE_TTL_MS_MIN, WORKER_LEASE_TTL_MS_MAX
        )
        for name in ("drain_timeout", "cancel_grace", "in_process_sleep"):
            duration_ms(name, getattr(self, name))
        for name in ("threads", "processes"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, CONCURRENCY_MAX)
        check_bool("reconcile", self.reconcile)

    def with_given(
        self, lanes: LaneWeights | None, capabilities: Sequence[str], concurrency: int | None
    ) -> "WorkerSettings":
        """These settings with the given values in place of their own."""
        return replace(
            self,
            lanes=lanes or self.lanes,
            capabilities=capabilities or self.capabilities,
            concurrency=self.concurrency if concurrency is None else concurrency,
        )

    @property
    def lease_ttl_ms(self) -> int:
        return duration_ms("lease_ttl", self.lease_ttl)

    @property
    def liveness_ttl_ms(self) -> int:
        """How long the worker may be silent before others take it for dead."""
        return min(max(2 * self.lease_ttl_ms, LIVENESS_TTL_MS_MIN), LIVENESS_TTL_MS_MAX)

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


log = open_log(__name__)

NAMED_MAX: Final = 5
"""How many running tasks are named when the worker stops."""
OWN_IDS_S: Final = 1.0
"""How long a stopping worker looks up the ids that users gave those tasks."""
IDLE_S: Final = 5.0
"""How often an idle worker looks for work that no hint has announced."""
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 2.0
STUCK_S: Final = 1.0
"""How long work that was claimed ahead waits while no slot comes free at all."""
GATHER_S: Final = 0.005
"""How long a busy worker lets room gather before it asks for a few executions only."""
UNREPORTED_PER_SLOT: Final = 4
"""How many results per slot may wait to be reported before claiming pauses."""


class Worker:
    """Runs the tasks of an app until told to stop."""

    def __init__(
        self,
        engine: Engine,
        tasks: Mapping[str, Task[..., object]],
        *,
        settings: WorkerSettings,
        submissions: Submissions,
        resources: Resources,
        middleware: Sequence[Middleware] = (),
        connect: Connect | None = None,
        namespace: str | None = None,
    ) -> None:
        """`connect` opens another engine on the same database, for the heartbeat.

        Without a `namespace` it serves all of them.
        """
        # A signature that cannot be stored is refused here, before anything is claimed.
        for task in tasks.values():
            _ = task.arguments
        self.settings = settings
        self._engine = engine
        self._tasks = tasks
        self._namespace = namespace
        self.middleware = tuple(middleware)
        self._shares = LaneShares(settings.lanes or lanes_of(tasks))
        self._patience_s = settings.lease_ttl_ms / 1_000 / BEATS_PER_LEASE
        """How long a statement may take before its connection is given up."""
        self._reports = Reports(engine, self._patience_s)
        self._functions = Functions(
            settings.threads or settings.concurrency, settings.processes or 2
        )
        self._shared = Shared(
            engine,
            self._reports,
            submissions,
            self._functions,
            resources,
            duration_ms("in_process_sleep", settings.in_process_sleep),
        )
        self._heartbeat = Heartbeat(settings.lease_ttl_ms / 1_000, connect, engine)
        self._heartbeat.on_gone = self._give_up
        self._gone: FlowFabricError | None = None
        self._waiting: deque[HeldLease] = deque()
        self._running: dict[RunningAttempt, None] = {}
        """Those whose handlers hold a slot, in the order they began; so they are stopped in it."""
        self._attempts: dict[RunningAttempt, None] = {}
        """Attempts whose end has not been reported."""
        self._ready: HintListener | None = None
        """Wakes the worker when it is idle."""
        self._slot_freed = asyncio.Event()
        self._suspects = LastChances(self._slot_freed.set)
        offer = self._offer()
        self._presence = Presence(engine, offer, self._patience_s)
        self._lost_claims = LostClaims(
            engine, offer, lease_ttl_ms=settings.lease_ttl_ms, patience_s=self._patience_s
        )
        self._stopping = asyncio.Event()
        self._deadline_passed = asyncio.Event()
        self._average_s = QUICK_S
        self._started_at_s = 0.0
        """When a handler was last started, by the monotonic clock."""

    def _offer(self) -> Offer:
        settings, namespace = self.settings, self._namespace
        return Offer(
            worker=WorkerIdentity(
                worker_id=WorkerId(settings.worker_id),
                worker_instance_id=WorkerInstanceId(settings.worker_instance_id),
            ),
            namespace=None if namespace is None else Namespace(namespace),
            lanes=tuple(LaneId(each) for each in self._shares.names),
            kinds=tuple(self._tasks),
            capabilities=tuple(settings.capabilities),
            liveness_ttl_ms=settings.liveness_ttl_ms,
        )

    # Living

    def stop(self) -> None:
        """The first call lets running handlers finish, the second stops them now."""
        if not self.drain():
            self._deadline_passed.set()

    def drain(self) -> bool:
        """Let running handlers finish, and claim no more. False if it was told so before."""
        if self._stopping.is_set():
            return False
        self._stopping.set()
        if self._ready is not None:
            self._ready.wake()
        return True

    @property
    def takes_work(self) -> bool:
        return not self._stopping.is_set()

    async def run(self) -> None:
        """Work until `stop` is called and everything has been handed back.

        Cancelling this stops handlers now, and hands back what they had. Raises `DatabaseGone` when
        the file was deleted or replaced, and `AccessDenied` when a server does not take its
        token, or not for this.
        """
        # In a separate task: a cancelled claim may leave behind leases that nobody knows of.
        running = asyncio.create_task(self._run())
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self.stop()
            self.stop()
            await running
            raise

    async def _run(self) -> None:
        log.info("worker %s starts", self.settings.worker_instance_id)
        namespace = self._namespace
        announcing = asyncio.create_task(self._presence.announce())
        background = [
            asyncio.create_task(release_blocked(self._engine, self._tasks, namespace)),
            asyncio.create_task(self._watch_for_lost()),
        ]
        unwatch = watch_tasks(asyncio.get_running_loop())
        supervisor = (
            Supervisor(self._engine, patience_s=self._patience_s)
            if self.settings.reconcile and not self._engine.is_remote
            else None
        )
        withdrawing = False
        self._heartbeat.start()
        if supervisor is not None:
            supervisor.start()
        try:
            await self._claim_until_stopped()
            # Unclaimed work must not look as if this worker will take it.
            withdrawing = announcing.cancel()
            await self._drain()
        finally:
            if supervisor is not None:
                await supervisor.stop()
            # A second cancellation would keep a worker from withdrawing its presence. Checking the
            # task would not help: an expired timeout cancels it too.
            if not withdrawing:
                announcing.cancel()
            for task in background:
                task.cancel()
            await asyncio.gather(announcing, *background, return_exceptions=True)
            await self._heartbeat.stop()
            self._functions.close()
            unwatch()
            log.info("worker %s has stopped", self.settings.worker_instance_id)
        if self._gone is not None:
            raise self._gone

    def _give_up(self, gone: FlowFabricError) -> None:
        """Stop at once: nothing done from here on would count."""
        self._gone = gone
        self._deadline_passed.set()
        self.stop()

    # Claiming

    async def _claim_until_stopped(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        with self._engine.store.hints(claim_topics(self._shares.names)) as hints:
            self._ready = hints
            while not self._stopping.is_set():
                if self._is_stuck():
                    # Handlers are no longer quick: other workers may have slots for these.
                    self._average_s = QUICK_S
                    handing_back = self._hand_back_waiting("its worker has no slot for it")
                    await first_of(handing_back, self._stopping.wait())
                alone_s = self._suspects.alone_s
                wanted = 0 if alone_s else self._wanted()
                look_s = None if alone_s else self._lost_claims.due_in_s
                if wanted == 0 and look_s != 0:
                    until_s = alone_s or look_s or (STUCK_S if self._waiting else None)
                    freed, stopped = self._slot_freed.wait(), self._stopping.wait()
                    await first_of(freed, stopped, timeout_s=until_s)
                    self._slot_freed.clear()
                    continue
                if 0 < wanted < self.settings.concurrency // 4 and self._average_s < QUICK_S:
                    # Handlers finish constantly: wait a moment and claim a larger batch.
                    await asyncio.sleep(GATHER_S)
                    wanted = self._wanted() or wanted
                try:
                    await self._recover()
                    if self._suspects.alone_s:
                        wanted = 0
                    found = await self._claim(wanted) if wanted else 0
                except FOR_NOBODY as gone:
                    self._give_up(gone)
                    return
                except FlowFabricError as error:
                    self._presence.doubt()
                    log.log(
                        level_of(error),
                        "could not claim; trying again in %.1f s: %s",
                        backoff_s,
                        error,
                    )
                    pause_s = backoff_s * random.uniform(0.5, 1.0)
                    await first_of(self._stopping.wait(), timeout_s=pause_s)
                    backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
                    continue
                backoff_s = BACKOFF_FIRST_S
                if found:
                    hints.found_work()
                if found == wanted:
                    # There may be more: the next claim is under way before these start.
                    asyncio.get_running_loop().call_soon(self._fill_slots)
                else:
                    self._fill_slots()
                    idle_s = STUCK_S if self._waiting else IDLE_S
                    look_s = self._lost_claims.due_in_s
                    if look_s != 0:
                        again_s = sooner(self._engine.claims_again_in_s, look_s)
                        await hints.wait(min(idle_s, again_s or idle_s))

    def _is_stuck(self) -> bool:
        """Whether claimed work waits and no slot has come free for it in a while."""
        return (
            bool(self._waiting)
            and len(self._running) >= self.settings.concurrency
            and time.monotonic() - self._started_at_s > STUCK_S
        )

    def _wanted(self) -> int:
        """How many executions there is room for."""
        settings = self.settings
        ahead = settings.ahead(self._average_s)
        reporting = len(self._attempts) - len(self._running)
        if reporting > UNREPORTED_PER_SLOT * settings.concurrency:
            return 0
        room = settings.concurrency + ahead - len(self._running) - len(self._waiting)
        # Not all of it at once: the next are on their way here while these run.
        return max(0, min(room, max(settings.concurrency, ahead), BATCH_MAX))

    async def _claim(self, limit: int) -> int:
        """Take up to `limit`, to be started; where lanes have weights, from each its share."""
        if not self._tasks:
            return 0
        asked_at_s, mark = clock_s(), new_mark()
        try:
            with statements_within(self._patience_s):
                claimed = await self._engine.claim_many(
                    self._shares.names if self._shares.alike else self._shares.weights,
                    limit=limit,
                    worker_id=self.settings.worker_id,
                    worker_instance_id=self.settings.worker_instance_id,
                    capabilities=self.settings.capabilities,
                    kinds=list(self._tasks),
                    namespace=self._namespace,
                    lease_ttl_ms=self.settings.lease_ttl_ms,
                    mark=mark,
                    renews_first=True,
                )
        except ASK_AGAIN:
            self._lost_claims.note(mark)
            raise
        await self._take([HeldLease(each, asked_at_s) for each in claimed])
        return len(claimed)

    async def _recover(self) -> None:
        """After an outage: be heard of, and take up what claims without an answer were granted."""
        if self._presence.in_doubt:
            await self._presence.say()
        if self._lost_claims.due_in_s == 0:
            await self._take(await self._lost_claims.find())

    async def _take(self, leases: list[HeldLease]) -> None:
        """Let them wait for their slots, as far as others have no turn before."""
        self._heartbeat.add(*(lease for lease in leases if not lease.claimed.renew_first))
        suspects = [lease for lease in leases if lease.claimed.last_chance]
        if suspects:
            leases = [lease for lease in leases if not lease.claimed.last_chance]
            chosen = self._suspects.choose(suspects)
            back_ms = {
                lease: self._suspects.back_in_ms() for lease in suspects if lease is not chosen
            }
            if chosen is not None:
                back_ms |= dict.fromkeys([*self._waiting, *leases], SUSPECTS_APART_MS)
                self._waiting.clear()
                leases = [chosen]
            # Before any of them begins: it may kill the worker at once.
            await asyncio.gather(*map(self._put_aside, back_ms.keys(), back_ms.values()))
            if chosen is not None:
                await self._until_quiet()
        self._waiting.extend(await self._renewed_first(leases))

    async def _until_quiet(self) -> None:
        """What began a moment ago may kill the worker, and take along what begins beside it."""
        quiet_s = min(ALONE_S, self._patience_s)
        while self._running and not self._stopping.is_set():
            left_s = self._started_at_s + quiet_s - time.monotonic()
            if left_s <= 0:
                break
            await first_of(self._slot_freed.wait(), self._stopping.wait(), timeout_s=left_s)
            self._slot_freed.clear()
        self._suspects.begins()

    async def _renewed_first(self, leases: Sequence[HeldLease]) -> list[HeldLease]:
        """Say of those over which workers have died that they begin; leave out the others of them.

        If their worker dies before that, it is not for their sake.
        """
        first = [lease for lease in leases if lease.claimed.renew_first]
        if not first:
            return list(leases)
        asked_at_s = clock_s()
        renew = partial(self._engine.renew_many, [lease.handle for lease in first])
        try:
            answers = await self._reports.call_engine(first[0], renew)
        except FlowFabricError as error:
            log.log(level_of(error), "%d leases could not be renewed: %s", len(first), error)
            answers = []
        begin = {
            lease
            for lease, answer in zip(first, answers, strict=False)
            if isinstance(answer, Renewed)
        }
        for lease in first:
            if lease in begin:
                lease.confirm(asked_at_s)
                self._heartbeat.add(lease)
            else:
                self._forget(lease)
        return [lease for lease in leases if lease not in first or lease in begin]

    async def _put_aside(self, lease: HeldLease, back_in_ms: int) -> None:
        """Release an execution that has not begun, because another goes first.

        Deaths of its workers still count.
        """
        back_ms = lease.store_now_ms() + back_in_ms
        delay = partial(self._engine.delay, lease.handle, back_ms, begun=False)
        try:
            await self._reports.call_engine(lease, delay)
        except FlowFabricError as error:
            log.log(level_of(error), "could not be put aside: %s", error, extra=lease.log_fields)
        self._heartbeat.remove(lease)

    # Running

    def _fill_slots(self) -> None:
        while self._waiting and len(self._running) < self.settings.concurrency:
            lease = self._waiting.popleft()
            if not lease.may_be_live():
                self._forget(lease)
                continue
            task = self._tasks[lease.claimed.execution_kind]
            attempt = RunningAttempt(self._shared, lease, task, self)
            self._running[attempt] = None
            self._attempts[attempt] = None
            attempt.start()
            self._started_at_s = attempt.started_s

    def handler_ended(self, attempt: RunningAttempt) -> None:
        if attempt in self._running:
            took_s = time.monotonic() - attempt.started_s
            self._average_s = 0.9 * self._average_s + 0.1 * took_s
            self._free(attempt)

    def _free(self, attempt: RunningAttempt) -> None:
        self._running.pop(attempt, None)
        if self._waiting and not self._stopping.is_set():
            self._fill_slots()
        self._slot_freed.set()

    def attempt_ended(self, attempt: RunningAttempt) -> None:
        self._attempts.pop(attempt, None)
        self._forget(attempt.lease)
        self._slot_freed.set()

    def _forget(self, lease: HeldLease) -> None:
        self._heartbeat.remove(lease)
        self._suspects.let_go(lease)

    def stop_asked(self, attempt: RunningAttempt) -> None:
        """Give the handler a while to stop, then continue without it."""
        if attempt.lease.lost is not None:
            self._presence.doubt()
        grace_s = duration_ms("cancel_grace", self.settings.cancel_grace) / 1_000
        asyncio.get_running_loop().call_later(grace_s, self._abandon, attempt)

    def _abandon(self, attempt: RunningAttempt) -> None:
        if attempt not in self._running:
            return
        log.error(
            "the handler of %s ignores its cancellation; its slot goes to others and whatever"
            " it returns is refused",
            attempt.lease.handle.execution_id,
            extra=attempt.lease.log_fields,
        )
        self._suspects.let_go(attempt.lease)
        attempt.continue_without_handler()
        self._free(attempt)

    async def _watch_for_lost(self) -> None:
        """Something was cancelled or revoked: check at once whether it is ours."""
        with self._engine.store.hints([LOST_TOPIC]) as hints:
            while True:
                if await hints.wait(3_600) and self._running:
                    self._heartbeat.check_now()

    # Stopping

    async def _drain(self) -> None:
        with suppress(FlowFabricError):
            self._waiting.extend(await self._lost_claims.find(all_now=True))
        await self._hand_back_waiting("the worker stops")
        drain_s = duration_ms("drain_timeout", self.settings.drain_timeout) / 1_000
        deadline_s = time.monotonic() + drain_s
        own_ids = await self._own_ids()
        if self._running and not self._deadline_passed.is_set():
            log.info(
                "stopping: waiting up to %.0f s for %s; press Ctrl-C again to stop them now",
                drain_s,
                _named(self._running, own_ids),
            )
        while self._running and not self._deadline_passed.is_set():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            await first_of(self._slot_freed.wait(), self._deadline_passed.wait(), timeout_s=left_s)
            self._slot_freed.clear()
        for attempt in list(self._running):
            attempt.stop(Stop.DRAIN, "the worker stops")
        grace_s = duration_ms("cancel_grace", self.settings.cancel_grace) / 1_000
        deadline_s = time.monotonic() + grace_s + 1
        while self._attempts and (left_s := deadline_s - time.monotonic()) > 0:
            await first_of(self._slot_freed.wait(), timeout_s=left_s)
            self._slot_freed.clear()
        if self._attempts:
            log.error("%d handlers did not stop; their leases will expire", len(self._attempts))

    async def _own_ids(self) -> Mapping[ExecutionId, str]:
        """What people call the first running executions; nothing if the database is slow."""
        first = [attempt.lease.claimed.execution_id for attempt in self._running][:NAMED_MAX]
        try:
            async with asyncio.timeout(OWN_IDS_S):
                return await self._engine.own_ids(first) if first else {}
        except (FlowFabricError, TimeoutError):
            return {}

    async def _hand_back_waiting(self, reason: str) -> None:
        waiting, self._waiting = list(self._waiting), deque()
        for start in range(0, len(waiting), BATCH_MAX):
            batch = waiting[start : start + BATCH_MAX]
            hand_back = partial(
                self._engine.hand_back_many,
                [lease.handle for lease in batch],
                reason=reason,
            )
            try:
                await self._reports.call_engine(batch[0], hand_back)
            except FlowFabricError as error:
                log.log(
                    level_of(error), "%d leases could not be handed back: %s", len(batch), error
                )
            for lease in batch:
                self._forget(lease)


def _named(running: Collection[RunningAttempt], own_ids: Mapping[ExecutionId, str]) -> str:
    """Which tasks these are, for people."""
    claimed = [attempt.lease.claimed for attempt in running]
    shown = [
        f"{each.execution_kind} {own_ids.get(each.execution_id) or uuid_of(each.execution_id)}"
        for each in claimed[:NAMED_MAX]
    ]
    more = f" and {len(claimed) - NAMED_MAX} more" if len(claimed) > NAMED_MAX else ""
    return ", ".join(shown) + more
