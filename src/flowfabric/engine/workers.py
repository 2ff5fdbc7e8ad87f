"""Workers: registered, alive, gone; and what follows from that.

A worker that registers, or says that it is alive, releases what was kept back for a worker like it.
One that is marked dead loses its leases at once. Silent ones are forgotten after a while.
"""

from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from flowfabric.core import bounds, workers
from flowfabric.core.checks import check_bool, check_int, optional
from flowfabric.core.decisions import Changes, Decision, Subject, Timing
from flowfabric.core.ids import ExecutionId, WorkerInstanceId, parse_namespace, parse_worker_id
from flowfabric.core.leases import decide_revoke
from flowfabric.core.records import Lane, view_of
from flowfabric.core.results import AlreadySatisfied, Revoked
from flowfabric.core.workers import RegisteredWorker, WorkerEvent, WorkerEventKind
from flowfabric.engine import paging, shell
from flowfabric.engine.gated_claims import ClaimQuery
from flowfabric.engine.keeping_back import let_go_for
from flowfabric.engine.leases import check_query, check_worker
from flowfabric.engine.shell import Swept
from flowfabric.store.base import Key, Reader, Transaction
from flowfabric.store.mapping import values_of

ROUNDS_MAX = 1_000
"""Batches of leases that one call works off."""
EVENTS_PAGE = 100


class WorkerPage(Struct, frozen=True, kw_only=True):
    workers: tuple[workers.WorkerEntry, ...]
    next_cursor: str | None


class Held(Struct, frozen=True, kw_only=True):
    """A row of `count_leases`."""

    worker_instance_id: WorkerInstanceId
    held: int


class Workers(shell.Group):
    async def register_worker(
        self,
        lane_ids: workers.LaneWeights,
        *,
        worker_id: str,
        worker_instance_id: str,
        liveness_ttl_ms: int,
        capabilities: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
        namespace: str | None = None,
        uptime_ms: int = 0,
    ) -> workers.Registered | workers.Refreshed:
        """Register a worker and what it serves; it counts as alive for `liveness_ttl_ms`.

        Without a `namespace` it serves every one, without `kinds` every kind. Weights of lanes
        are its own business. A process that registers again says by `uptime_ms` for how long it
        has been running: leases that expired since then do not mean that it died.
        """
        query = check_query(lane_ids, kinds, capabilities, namespace)
        offer = workers.Offer(
            worker=check_worker(worker_id, worker_instance_id),
            namespace=query.namespace,
            lanes=query.lanes,
            kinds=query.kinds,
            capabilities=query.capabilities,
            liveness_ttl_ms=workers.check_liveness(liveness_ttl_ms),
            uptime_ms=check_int("uptime_ms", uptime_ms, 0, bounds.TIME_MS_MAX),
        )
        event_id = shell.new_uuid()

        async def body(tx: Transaction) -> workers.Registered | workers.Refreshed:
            # A claim that holds work back because no worker can run it locks the lane as well.
            await tx.lock(Lane, [(lane,) for lane in sorted(offer.lanes)])
            return await _register(tx, offer, event_id)

        answer = await self.store.transact(body)
        await let_go_for(self.shell, query)
        return answer

    async def heartbeat_worker(
        self, worker_instance_id: str, *, namespace: str | None = None
    ) -> workers.Refreshed | workers.NotRegistered:
        """Say that a worker is alive. `NotRegistered`: it has to register again."""
        found_in, instance_id = _key(worker_instance_id, namespace)
        rows = await self.store.execute_alone(
            "refresh_worker", namespace=found_in, worker_instance_id=instance_id
        )
        if not rows:
            return workers.NotRegistered()
        (worker,) = values_of(RegisteredWorker, rows)
        await let_go_for(self.shell, _query(worker))
        return workers.Refreshed(expires_at_ms=worker.expires_at_ms)

    async def mark_worker_dead(
        self,
        worker_instance_id: str,
        *,
        reason: str = "",
        namespace: str | None = None,
        revoke_leases: bool = True,
    ) -> workers.WorkerDead | workers.NotRegistered:
        """Forget a worker that is gone, and give what it had in hand to others at once.

        Safe to repeat: leases it still has are taken from it whether or not it is registered. A
        worker that is alive after all registers again.
        """
        key = _key(worker_instance_id, namespace)
        why = workers.check_dead_reason(reason)
        check_bool("revoke_leases", revoke_leases)
        event_id = shell.new_uuid()

        async def body(tx: Transaction) -> tuple[bool, Swept]:
            worker = await tx.lock_one(RegisteredWorker, key)
            live = worker is not None and workers.is_live(worker, await tx.now_ms())
            if worker is not None:
                kind = WorkerEventKind.MARKED_DEAD if live else WorkerEventKind.TTL_SWEPT
                await _forget(tx, [worker], kind, [event_id], why if live else "")
            if not revoke_leases:
                return live, Swept(acted=0, full=False)
            return live, await self._revoke_some(tx, key, why)

        known, swept = await self.store.transact(body)
        revoked = swept.acted
        for _ in range(ROUNDS_MAX):
            if not swept.full:
                break
            swept = await self.store.transact(lambda tx: self._revoke_some(tx, key, why))
            revoked += swept.acted
        if not known:
            return workers.NotRegistered(revoked_leases=revoked)
        return workers.WorkerDead(revoked_leases=revoked)

    async def _revoke_some(self, tx: Transaction, key: Key, reason: str) -> Swept:
        """Take a batch of leases from a worker."""
        namespace, instance_id = str(key[0]), str(key[1])
        held = await tx.select_as(
            ExecutionId,
            "leases_of_worker",
            worker_instance_id=instance_id,
            namespace=namespace or None,
            limit=bounds.SWEEP_BATCH,
        )
        said = f"its worker is dead{f': {reason}' if reason else ''}"

        def decide(subject: Subject, timing: Timing) -> Decision[Revoked | AlreadySatisfied]:
            return decide_revoke(
                subject,
                expected_lease_id="",
                worker_instance_id=instance_id,
                reason=said,
                now_ms=timing.now_ms,
            )

        asks = [shell.Ask(each, decide) for each in held]
        outcomes = await self.shell.decide_in(tx, asks)
        acted = sum(isinstance(outcome, Revoked) for outcome in outcomes)
        return Swept(acted=acted, full=len(held) == bounds.SWEEP_BATCH)

    async def list_workers(
        self,
        *,
        namespace: str | None = None,
        cursor: str | None = None,
        limit: int = bounds.PAGE_MAX,
        include_expired: bool = False,
    ) -> WorkerPage:
        """Workers by namespace and instance id, after `cursor`, with what they have in hand.

        Of a `namespace`: those that serve it, with what they have of it. Those that were silent
        for too long are left out unless asked for.
        """
        check_int("limit", limit, 1, bounds.PAGE_MAX)
        check_bool("include_expired", include_expired)
        within = optional(parse_namespace, namespace)
        after = paging.by_name(cursor)

        async def body(reader: Reader) -> tuple[Sequence[RegisteredWorker], Sequence[Held]]:
            now_ms = await reader.now_ms()
            found = await reader.select_records(
                RegisteredWorker,
                "list_workers",
                alive_at_ms=0 if include_expired else now_ms,
                namespace=within,
                limit=limit + 1,
                **after,
            )
            if not found:
                return found, ()
            return found, await reader.select_as(
                Held, "count_leases", now_ms=now_ms, namespace=within
            )

        found, rows = await self.store.read(body)
        held = {row.worker_instance_id: row.held for row in rows}
        page, last = paging.cut_by_name(found, limit, lambda each: each.worker_instance_id)
        present = tuple(workers.entry(each, held.get(each.worker_instance_id, 0)) for each in page)
        return WorkerPage(workers=present, next_cursor=last)

    async def list_worker_events(
        self,
        *,
        namespace: str | None = None,
        worker_instance_id: str | None = None,
        limit: int = EVENTS_PAGE,
    ) -> tuple[WorkerEvent, ...]:
        """Recent events about workers, newest first."""
        check_int("limit", limit, 1, bounds.PAGE_MAX)
        asked = optional(parse_namespace, namespace)
        instance_id = optional(partial(parse_worker_id, "worker_instance_id"), worker_instance_id)
        return tuple(
            await self.select_records(
                WorkerEvent,
                "list_worker_events",
                before_ms=bounds.TIME_MS_MAX + 1,
                before_id="",
                namespace=asked,
                worker_instance_id=instance_id,
                limit=limit,
            )
        )

    async def expire_workers(self, *, limit: int = bounds.SWEEP_BATCH) -> Swept:
        """Forget workers that were silent for too long, and what happened to workers long ago."""
        check_int("limit", limit, 1, bounds.BATCH_MAX)
        event_ids = [shell.new_uuid() for _ in range(limit)]
        keep_ms = self.shell.config.event_retention_ms

        async def body(tx: Transaction) -> Swept:
            now_ms = await tx.now_ms()
            gone = await tx.select_records(
                RegisteredWorker, "due_workers", now_ms=now_ms, limit=limit
            )
            await _forget(tx, gone, WorkerEventKind.TTL_SWEPT, event_ids)
            old = await tx.select_records(
                WorkerEvent, "old_worker_events", before_ms=now_ms - keep_ms, limit=limit
            )
            await tx.save(Changes(deletes=tuple(old)))
            return Swept(acted=len(gone) + len(old), full=limit in (len(gone), len(old)))

        return await self.store.transact(body)


async def present_workers(reader: Reader) -> Sequence[workers.WorkerEntry]:
    """The workers that are alive."""
    now_ms = await reader.now_ms()
    found = await reader.select_records(RegisteredWorker, "live_workers", now_ms=now_ms)
    return [workers.entry(each) for each in found]


async def _register(
    tx: Transaction, offer: workers.Offer, event_id: str
) -> workers.Registered | workers.Refreshed:
    key = (offer.namespace or workers.EVERYWHERE, offer.worker.worker_instance_id)
    before = await tx.lock_one(RegisteredWorker, key)
    now_ms = await tx.now_ms()
    decision = workers.decide_register(before, offer, now_ms)
    if before is None and not await tx.insert_new(decision.changes.inserts):
        # Another process has registered it since: its row is the current one.
        before = await tx.lock_one(RegisteredWorker, key)
        decision = workers.decide_register(before, offer, now_ms)
    if before is not None:
        await tx.save(decision.changes)
    (worker,) = (*decision.changes.inserts, *decision.changes.updates)
    assert isinstance(worker, RegisteredWorker)
    if isinstance(decision.answer, workers.Registered):
        event = workers.event_of(worker, WorkerEventKind.REGISTERED, event_id, now_ms)
        await tx.save(Changes(inserts=(event,)))
    return decision.answer


async def _forget(
    tx: Transaction,
    gone: Sequence[RegisteredWorker],
    kind: WorkerEventKind,
    event_ids: Sequence[str],
    reason: str = "",
) -> None:
    now_ms = await tx.now_ms()
    events = [
        workers.event_of(worker, kind, event_id, now_ms, reason)
        for worker, event_id in zip(gone, event_ids, strict=False)
    ]
    await tx.save(Changes(inserts=tuple(events), deletes=tuple(gone)))


def _key(worker_instance_id: object, namespace: object) -> Key:
    instance_id = WorkerInstanceId(parse_worker_id("worker_instance_id", worker_instance_id))
    found_in = workers.EVERYWHERE if namespace is None else parse_namespace(namespace)
    return (found_in, instance_id)


def _query(worker: RegisteredWorker) -> ClaimQuery:
    """What it can run."""
    return view_of(ClaimQuery, workers.entry(worker))
