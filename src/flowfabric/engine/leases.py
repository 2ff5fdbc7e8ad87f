"""Claiming work and renewing leases.

A claim looks at the ready rows of the routes this worker can serve, best first,
and takes up to `limit` of them in one round trip. The statement behind it
(`claim_ready`) stands in for `core.leases.grant_lease`; a differential test
holds the two together.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import ParamSpec, TypeVar

from msgspec import Struct, structs

from flowfabric.core.bounds import BATCH_MAX, FENCE_MS_MAX, FENCE_WAIT_MS_MIN
from flowfabric.core.checks import check_bool, check_int, check_list, check_offered, optional
from flowfabric.core.decisions import NO_SIGNS, Decision, Subject, Timing
from flowfabric.core.handles import Handle
from flowfabric.core.ids import (
    AttemptId,
    ExecutionId,
    LaneId,
    LeaseId,
    WorkerId,
    WorkerInstanceId,
    check_mark,
    make_execution_id,
    parse_execution_kind,
    parse_lane_id,
    parse_namespace,
    parse_worker_id,
    uuid_of,
)
from flowfabric.core.leases import (
    Fence,
    Granted,
    WorkerIdentity,
    check_holder,
    check_ttl,
    compare_fence,
    decide_hold,
    decide_renew,
    granted_before,
    is_held,
    on_last_chance,
    require_fence,
)
from flowfabric.core.records import Attempt, Execution, first_attempt, view_of
from flowfabric.core.results import Claimed, Renewed
from flowfabric.core.workers import LaneShares, LaneWeights
from flowfabric.engine import shell, topics
from flowfabric.engine.deaths import signs_of_life
from flowfabric.engine.gated_claims import ClaimQuery, ClaimRequest, ClaimRow, GatedClaims
from flowfabric.engine.gates import GATES_TOPIC
from flowfabric.engine.keeping_back import let_go_for
from flowfabric.engine.lone_members import LoneMembers
from flowfabric.engine.shell import Shell
from flowfabric.errors import (
    FlowFabricError,
    LeaseExpired,
    NotFound,
    RetryExhausted,
    Validation,
)
from flowfabric.store.base import Reader, Transaction, drive
from flowfabric.store.caller_connections import OnConnection
from flowfabric.store.mapping import answers_of

P = ParamSpec("P")
T = TypeVar("T")

LEASE_TTL_MS = 30_000
LOCK_WAIT_MS_MAX = 10_000
"""How long a renewal may wait for a row that is locked."""
QUERIES_REMEMBERED = 256
"""Workers, and what they ask for, that a process has checked: they ask the same all the time."""
SHARES_REMEMBERED = 256
"""Sets of lanes with weights whose turns a process remembers."""


def _ends_soon(leases: Sequence[ClaimRow], lease_ttl_ms: int) -> bool:
    """Whether a lease or an attempt runs out before the reconcilers' next regular look."""
    if lease_ttl_ms <= topics.DUE_HINT_WITHIN_MS:
        return bool(leases)
    later_ms = lease_ttl_ms - topics.DUE_HINT_WITHIN_MS
    return any(
        lease.attempt_deadline_ms is not None
        and lease.attempt_deadline_ms <= lease.lease_expires_at_ms - later_ms
        for lease in leases
    )


def _held_up(handle: Handle, execution: Execution, now_ms: int) -> FlowFabricError:
    """Why the lease of an execution that another transaction has locked is not renewed."""
    fence = shell.fence_of(handle)
    try:
        check_holder(execution, fence, now_ms)
    except LeaseExpired:
        # Its holder may have locked it, to keep the lease in a fence.
        try:
            compare_fence(execution, fence)
        except FlowFabricError as error:
            return error
    except FlowFabricError as error:
        return error
    return RetryExhausted(f"{handle.execution_id} is locked by another transaction")


def _handle_ask(handle: Handle) -> shell.Ask[Renewed]:
    return _renew_ask(handle.execution_id, shell.fence_of(handle), handle.lease_ttl_ms)


def _renew_ask(execution_id: ExecutionId, fence: Fence, lease_ttl_ms: int) -> shell.Ask[Renewed]:
    def decide(subject: Subject, timing: Timing) -> Decision[Renewed]:
        return decide_renew(subject, fence, lease_ttl_ms, timing.now_ms)

    return shell.Ask(execution_id, decide)


def _remembering(check: Callable[P, T]) -> Callable[P, T]:
    """The same check, which remembers what it has answered: lists count by what is in them."""
    known = lru_cache(QUERIES_REMEMBERED)(check)

    def ask(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return known(*(tuple(each) if isinstance(each, list) else each for each in args))
        except (TypeError, Validation):
            # Lanes with weights cannot be a key; and a refusal has to show what was given.
            return check(*args, **kwargs)

    return ask


@_remembering
def check_worker(worker_id: object, worker_instance_id: object) -> WorkerIdentity:
    return WorkerIdentity(
        worker_id=WorkerId(parse_worker_id("worker_id", worker_id)),
        worker_instance_id=WorkerInstanceId(
            parse_worker_id("worker_instance_id", worker_instance_id)
        ),
    )


def sooner(one_s: float | None, other_s: float | None) -> float | None:
    return min((each for each in (one_s, other_s) if each is not None), default=None)


def claim_topics(lanes: Iterable[str]) -> list[str]:
    """What tells that there may be something to claim."""
    return [GATES_TOPIC, *(topics.ready_topic(lane) for lane in lanes)]


@_remembering
def check_query(
    lane_ids: object, kinds: object, capabilities: object, namespace: object
) -> ClaimQuery:
    if isinstance(lane_ids, Mapping):
        lanes: Sequence[object] = LaneShares(lane_ids, "lane_ids").names
    else:
        lanes = check_list("lane_ids", lane_ids, 1, BATCH_MAX)
    wanted = None if kinds is None else check_list("kinds", kinds, 0, BATCH_MAX)
    return ClaimQuery(
        namespace=optional(parse_namespace, namespace),
        lanes=tuple(dict.fromkeys(parse_lane_id(lane_id) for lane_id in lanes)),
        kinds=None
        if wanted is None
        else tuple(dict.fromkeys(parse_execution_kind(kind) for kind in wanted)),
        capabilities=tuple(sorted(check_offered(capabilities))),
    )


class RenewedRow(Struct, frozen=True, gc=False, array_like=True):
    position: int
    expires_at_ms: int
    lease_epoch: int


Taken = tuple[ClaimRow, Claimed]
"""A lease as its row says, and as its worker is told."""

BrokenBy = Callable[[BaseException], bool]
"""Whether an error means that the database went away before a transaction could commit."""


class Leases(shell.Group):
    def __init__(self, shell: Shell) -> None:
        super().__init__(shell)
        self.gated = GatedClaims(shell.store)
        self._gated_first = False
        self.lone_members = LoneMembers()
        self._shares: dict[object, LaneShares] = {}

    async def claim(
        self,
        lane_id: str = "default",
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
        namespace: str | None = None,
        lease_ttl_ms: int = LEASE_TTL_MS,
        max_wait_ms: int = 0,
    ) -> Claimed | None:
        """Take the best ready execution of a lane, waiting up to `max_wait_ms` for one.

        Without a `namespace`, those of every namespace count.
        """
        claimed = await self.claim_many(
            [lane_id],
            limit=1,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            kinds=kinds,
            namespace=namespace,
            lease_ttl_ms=lease_ttl_ms,
            max_wait_ms=max_wait_ms,
        )
        return claimed[0] if claimed else None

    async def claim_many(
        self,
        lane_ids: LaneWeights,
        *,
        limit: int,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
        namespace: str | None = None,
        lease_ttl_ms: int = LEASE_TTL_MS,
        max_wait_ms: int = 0,
        mark: str | None = None,
        renews_first: bool = False,
    ) -> list[Claimed]:
        """Take up to `limit` ready executions, best first over all lanes together.

        The highest priority is best, then the earliest creation; of one millisecond, the
        smallest uuid. With weights, as in `{"mail": 5, "default": 1}`, each lane gets its share
        of what is claimed, call after call; what it has no work for goes to the others.

        A caller that loses the answer asks `find_claimed` for it, by a `mark` of its own choosing:
        twelve random hexadecimal digits, used once. One that `renews_first` renews the leases of
        executions over which workers have died before it begins them: until then they end without
        counting as a death.
        """
        check_int("limit", limit, 1, BATCH_MAX)
        check_int("max_wait_ms", max_wait_ms, 0, 10 * 60 * 1_000)
        check_ttl(lease_ttl_ms)
        worker = check_worker(worker_id, worker_instance_id)
        request = ClaimRequest(
            worker_id=worker.worker_id,
            worker_instance_id=worker.worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
            renews_first=check_bool("renews_first", renews_first),
            lease_mark=bytes.fromhex(optional(partial(check_mark, "mark"), mark) or ""),
        )
        query = check_query(lane_ids, kinds, capabilities, namespace)
        shares = self.shares(worker_id, lane_ids)
        if max_wait_ms == 0:
            return await self._claim_shares(query, shares, request, limit)
        deadline_s = time.monotonic() + max_wait_ms / 1_000
        with self.store.hints(claim_topics(query.lanes)) as hints:
            while True:
                claimed = await self._claim_shares(query, shares, request, limit)
                left_s = deadline_s - time.monotonic()
                if claimed or left_s <= 0:
                    return claimed
                await hints.wait(min(left_s, 1.0, self.gated.again_in_s or 1.0))

    async def find_claimed(
        self,
        mark: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        namespace: str | None = None,
        lease_ttl_ms: int = LEASE_TTL_MS,
    ) -> list[Claimed]:
        """What a claim with this mark was granted, as far as those leases are live still.

        Changes nothing. It reads the rows of all leased executions: ask only for a lost answer.
        """
        check_ttl(lease_ttl_ms)
        worker = check_worker(worker_id, worker_instance_id)
        digits = check_mark("mark", mark)
        begins = f"{digits[:8]}-{digits[8:]}-"
        within = optional(parse_namespace, namespace)

        async def body(reader: Reader) -> list[Granted]:
            now_ms = await reader.now_ms()
            found = await reader.select_as(
                ExecutionId,
                "leases_of_claim",
                worker_instance_id=worker.worker_instance_id,
                namespace=within,
                lease_ids=f"{begins}%",
                now_ms=now_ms,
                limit=BATCH_MAX,
            )
            executions = await reader.get(Execution, [shell.execution_key(each) for each in found])
            # One may have ended in between.
            held = {
                key: each
                for key, each in executions.items()
                if (each.lease_id or "").startswith(begins) and is_held(each, now_ms)
            }
            attempts = await reader.get(
                Attempt, [(*key, each.current_attempt_index) for key, each in held.items()]
            )
            by_id = {each.execution_id: each for each in attempts.values()}
            return [
                granted_before(each, attempt)
                for each in held.values()
                if (attempt := by_id.get(each.execution_id) or first_attempt(each)) is not None
            ]

        granted = await self.store.read(body)
        return [await self.claimed(each, lease_ttl_ms) for each in granted]

    def shares(self, worker_id: str, lanes: LaneWeights) -> LaneShares | None:
        """Whose turn it is among the lanes of a pool; None where they have no weights."""
        if not isinstance(lanes, Mapping):
            return None
        key = (worker_id, *lanes.items())
        shares = self._shares.get(key)
        if shares is None:
            if len(self._shares) >= SHARES_REMEMBERED:
                self._shares.clear()
            shares = self._shares[key] = LaneShares(lanes, "lane_ids")
        return None if shares.alike else shares

    async def _claim_shares(
        self,
        query: ClaimQuery,
        shares: LaneShares | None,
        request: ClaimRequest,
        limit: int,
    ) -> list[Claimed]:
        """Claim from each lane its share, and what one has no work for from the others."""
        if shares is None:
            return await self._claim(query, request, limit)
        claimed: list[Claimed] = []
        lanes: set[str] = set(query.lanes)
        again_in_s: float | None = None
        while lanes and len(claimed) < limit:
            for lane, count in shares.turns(limit - len(claimed), lanes).items():
                own = structs.replace(query, lanes=(LaneId(lane),))
                found = await self._claim(own, request, count)
                claimed += found
                if len(found) < count:
                    lanes.discard(lane)
                again_in_s = sooner(again_in_s, self.gated.again_in_s)
        self.gated.again_in_s = again_in_s
        return claimed

    async def _claim(self, query: ClaimQuery, request: ClaimRequest, limit: int) -> list[Claimed]:
        self.gated.again_in_s = None
        if await self.gated.serves(query):
            taken = await self._claim_both(query, request, limit)
        else:
            taken = await self._claim_unlimited(query, request, limit)
        if not taken and self.gated.may_be_kept_back(query) and await let_go_for(self.shell, query):
            taken = await self._claim_both(query, request, limit)
        leases = [lease for lease, _ in taken]
        if _ends_soon(leases, request.lease_ttl_ms):
            self.store.hint(topics.DUE_TOPIC)
        self.lone_members.note(leases)
        last = await self._on_last_chance(leases)
        claimed = [
            structs.replace(
                each,
                last_chance=lease.lease_id in last,
                renew_first=request.renews_first,
            )
            if lease.worker_deaths
            else each
            for lease, each in taken
        ]
        return list(await self.shell.values.through_all(claimed, self._shown))

    async def _on_last_chance(self, leases: Sequence[ClaimRow]) -> set[LeaseId]:
        """The leases whose execution fails if its worker dies once more: hardly ever any."""
        suspects = {
            shell.execution_key(make_execution_id(each.partition_key, each.execution_id)): each
            for each in leases
            if each.worker_deaths
        }
        if not suspects:
            return set()

        async def body(tx: Reader) -> set[LeaseId]:
            found = await tx.get(Execution, list(suspects))
            signs = await signs_of_life(tx, found.values())
            return {
                suspects[key].lease_id
                for key, each in found.items()
                if on_last_chance(each, signs.get(each.execution_id, NO_SIGNS))
            }

        return await self.store.read(body)

    async def _claim_unlimited(
        self, query: ClaimQuery, request: ClaimRequest, limit: int
    ) -> list[Taken]:
        """Claim what no limit holds up."""
        return await self.store.execute_and_read(
            "claim_free",
            lambda rows: self._read_claims(answers_of(ClaimRow, rows), request),
            **query.parameters,
            **request.parameters(limit),
        )

    async def _claim_both(
        self, query: ClaimQuery, request: ClaimRequest, limit: int
    ) -> list[Taken]:
        """Alternate between limited and unlimited work; the second gets the remaining slots."""
        self._gated_first = not self._gated_first
        if not self._gated_first:
            taken = await self._claim_unlimited(query, request, limit)
            if len(taken) < limit:
                rows = await self.gated.claim(query, request, limit - len(taken))
                taken += self._read_claims(rows, request)
            return taken
        rows = await self.gated.claim(query, request, limit)
        taken = self._read_claims(rows, request)
        if len(taken) < limit:
            taken += await self._claim_unlimited(query, request, limit - len(taken))
        return taken

    def _read_claims(self, leases: Sequence[ClaimRow], request: ClaimRequest) -> list[Taken]:
        instance_id, lease_ttl_ms = request.worker_instance_id, request.lease_ttl_ms
        return [(lease, self._read_claim(lease, instance_id, lease_ttl_ms)) for lease in leases]

    async def renew(self, handle: Handle | bytes) -> Renewed:
        """Extend the lease by the time it was claimed for."""
        (outcome,) = await self.renew_many([handle])
        return shell.answered(outcome)

    async def renew_many(
        self, handles: Sequence[Handle | bytes], *, lock_wait_ms: int | None = None
    ) -> list[Renewed | FlowFabricError]:
        """Renew all leases of a process at once; each handle gets its own answer.

        `lock_wait_ms` is how long to wait for executions that other transactions have locked:
        `LockTimeout` is raised after that. With 0, `RetryExhausted` is the answer for a live
        lease whose execution is locked: nothing delays the answers for the others.
        """
        check_list("handles", handles, 0, BATCH_MAX)
        if lock_wait_ms is not None:
            check_int("lock_wait_ms", lock_wait_ms, 0, LOCK_WAIT_MS_MAX)
        opened = [shell.value_or_error(self.shell.open_handle, handle) for handle in handles]
        sure = await self._renew_sure(opened)
        if lock_wait_ms == 0:
            return await shell.answers_in_order(opened, sure, self._renew_free)
        return await self.shell.decide_opened(
            opened, _handle_ask, sure=sure, lock_wait_ms=lock_wait_ms
        )

    async def find_lost_leases(self, handles: Sequence[Handle | bytes]) -> list[Handle]:
        """The given leases that were taken away. Changes nothing."""
        check_list("handles", handles, 0, BATCH_MAX)
        opened = [self.shell.open_handle(handle) for handle in handles]
        if not opened:
            return []

        lost = await self.select_as(int, "lost_leases", **shell.lease_columns(opened))
        return [opened[position] for position in lost]

    async def _renew_free(self, handles: Sequence[Handle]) -> list[Renewed | FlowFabricError]:
        """Decide about those that no other transaction has locked; read the others as they are."""

        async def body(tx: Transaction) -> list[Renewed | FlowFabricError]:
            held = await shell.lock_free(tx, [each.execution_id for each in handles])
            asks = [_handle_ask(each) for each in handles if each.execution_id not in held]
            outcomes = await self.shell.decide_in(tx, asks)
            decided = iter(outcomes)
            now_ms = await tx.now_ms()
            return [
                _held_up(each, held[each.execution_id], now_ms)
                if each.execution_id in held
                else next(decided)
                for each in handles
            ]

        return await self.store.transact(body)

    async def _renew_sure(self, opened: Sequence[Handle | FlowFabricError]) -> dict[int, Renewed]:
        """Renew those that are certainly live, in one statement, by position."""
        given = {i: each for i, each in enumerate(opened) if isinstance(each, Handle)}
        if not given:
            return {}
        places, handles = list(given), list(given.values())
        rows = await self.store.execute_alone(
            "renew_leased",
            lease_ttls_ms=[handle.lease_ttl_ms for handle in handles],
            **shell.lease_columns(handles),
        )
        return {
            places[row.position]: Renewed(
                expires_at_ms=row.expires_at_ms, lease_epoch=row.lease_epoch
            )
            for row in answers_of(RenewedRow, rows)
        }

    async def renew_lease(
        self,
        execution_id: str,
        *,
        fence: Fence | None,
        lease_ttl_ms: int = LEASE_TTL_MS,
    ) -> Renewed:
        """Extend a lease named by its fence instead of a handle."""
        check_ttl(lease_ttl_ms)
        given = require_fence(fence)
        ask = _renew_ask(self.shell.check_execution_id(execution_id), given, lease_ttl_ms)
        return await self.shell.decide(ask)

    async def claimed(self, granted: Granted, lease_ttl_ms: int) -> Claimed:
        """What the core granted, read as if it were a row of the claim statement."""
        execution, attempt = granted.execution, granted.attempt
        assert execution.worker_instance_id is not None
        payload, encoding = execution.taken_payload
        row = view_of(
            ClaimRow,
            execution,
            payload=payload,
            payload_encoding=encoding,
            execution_id=uuid_of(execution.execution_id),
            kind=granted.kind,
            attempt_index=attempt.attempt_index,
            attempt_id=attempt.attempt_id,
            attempt_type=attempt.attempt_type,
            progress=None,
        )
        claimed = self._read_claim(
            row,
            execution.worker_instance_id,
            lease_ttl_ms,
            last_chance=on_last_chance(execution),
        )
        return await self.shell.values.through(claimed, self._shown)

    def _shown(self, claimed: Claimed) -> Claimed:
        return structs.replace(claimed, payload=self.shell.values.show(claimed.payload))

    def _read_claim(
        self,
        row: ClaimRow,
        worker_instance_id: WorkerInstanceId,
        lease_ttl_ms: int,
        *,
        last_chance: bool = False,
    ) -> Claimed:
        handle = Handle(
            backend_tag=self.store.backend_tag,
            kind=row.kind,
            execution_id=make_execution_id(row.partition_key, row.execution_id),
            attempt_index=row.attempt_index,
            attempt_id=row.attempt_id or AttemptId(row.lease_id),
            lease_id=row.lease_id,
            lease_epoch=row.lease_epoch,
            lease_ttl_ms=lease_ttl_ms,
            lane_id=row.lane_id,
            worker_instance_id=worker_instance_id,
        )
        return Claimed(
            handle=self.shell.signer.sign(handle),
            attempt_type=row.attempt_type,
            lease_expires_at_ms=row.lease_expires_at_ms,
            namespace=row.namespace,
            execution_kind=row.execution_kind,
            priority=row.priority,
            payload=row.payload,
            payload_encoding=row.payload_encoding,
            flow_id=row.flow_id,
            retry_count=row.retry_count,
            created_at_ms=row.created_at_ms,
            deadline_at_ms=row.deadline_at_ms,
            attempt_deadline_ms=row.attempt_deadline_ms,
            # What went through a codec has to be read one by one.
            progress=None if self.shell.values.coded else row.progress,
            last_chance=last_chance,
        )

    # Keeping a lease inside the caller's own database transaction

    async def enter_fence_on(self, connection: object, handle: Handle) -> BrokenBy:
        """Raise unless the handle's lease is live, and keep it so until `connection` commits.

        Its row stays locked until then, and the lease lasts for `FENCE_MS_MAX` in there;
        `leave_fence_on`, just before the commit, gives it its usual time again. Raises
        `LockTimeout`, with their transaction still sound, when others keep the row locked for
        longer than a sixth of the lease; ask again then.

        Returns a predicate: did this error mean that the database went away before
        that commit.
        """
        return await self._hold(handle, FENCE_MS_MAX, connection)

    async def leave_fence_on(self, connection: object, handle: Handle) -> None:
        """Raise if the transaction has taken longer than a fence may last."""
        await self._hold(handle, handle.lease_ttl_ms, connection)

    def enter_fence_on_sync(self, connection: object, handle: Handle) -> BrokenBy:
        """`enter_fence_on` for a connection that is not async, on the calling thread."""
        return drive(self._hold(handle, FENCE_MS_MAX, connection, sync=True))

    def leave_fence_on_sync(self, connection: object, handle: Handle) -> None:
        """`leave_fence_on` for a connection that is not async, on the calling thread."""
        drive(self._hold(handle, handle.lease_ttl_ms, connection, sync=True))

    async def _hold(
        self, handle: Handle, lease_ttl_ms: int, connection: object, *, sync: bool = False
    ) -> BrokenBy:
        opened = self.shell.open_handle(handle)
        key = shell.execution_key(opened.execution_id)
        lasts_ms = max(lease_ttl_ms, opened.lease_ttl_ms)

        async def body(tx: Transaction) -> BrokenBy:
            execution = await tx.lock_one(Execution, key)
            if execution is None:
                raise NotFound("execution", opened.execution_id)
            decision = decide_hold(execution, shell.fence_of(opened), lasts_ms, await tx.now_ms())
            await tx.save(decision.changes)
            return tx.broken_by

        joined = OnConnection(self.store, connection, sync=sync)
        wait_ms = max(handle.lease_ttl_ms // 6, FENCE_WAIT_MS_MIN)
        return await joined.transact(body, lock_wait_ms=wait_ms)
