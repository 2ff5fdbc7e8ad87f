"""Claiming executions by id, with a grant.

A scheduler asks what a worker should run next (`claim_for_worker`), or picks an execution itself
(`issue_claim_grant`, `issue_reclaim_grant`); the worker then turns the grant into a lease. Until
then the execution is kept for that worker.

Under limits, a grant holds a slot as a lease does, from the moment it is issued. Unless it resumes
an attempt it also counts as a start, since claiming with it asks no limit again. An unused grant
gives that start back to the gates that counted it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import bounds, grants, results, situations, workers
from flowfabric.core.checks import (
    check_bool,
    check_int,
    check_offered,
    check_optional_int,
    check_optional_time,
    optional,
)
from flowfabric.core.decisions import NO_CHANGES, Changes, Decision, Subject, Timing, combine
from flowfabric.core.gates import Gate, allot, check_room
from flowfabric.core.ids import (
    ExecutionId,
    GateId,
    LaneId,
    Namespace,
    parse_lane_id,
    parse_uuid,
)
from flowfabric.core.leases import Granted, check_ttl
from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.core.records import Execution, GrantKind, Lane, StoredGrant
from flowfabric.core.states import AttemptState, BlockingReason, LifecyclePhase
from flowfabric.engine import gated_claims, gates, leases, shell, topics
from flowfabric.engine.executions import Executions
from flowfabric.engine.keeping_back import find_kept_back, let_go
from flowfabric.engine.routes import required_capabilities
from flowfabric.engine.shell import Shell, Swept
from flowfabric.engine.workers import present_workers
from flowfabric.store.base import Transaction

T = TypeVar("T")
GRANT_TTL_MS = 5_000
CANDIDATES = 64
"""How many of the best executions to try until one is found that no other claim is taking."""
NO_CAPABLE_WORKER = "no connected worker satisfies required_capabilities"
AnyGrant = results.ClaimGrant | results.ResumeGrant | results.ReclaimGrant
Offered = AnyGrant | results.NotReclaimable | results.ReclaimCapExceeded
Decide = Callable[[Subject, grants.Where, Timing], Decision[T]]
DecideClaim = Callable[[Subject, grants.GrantClaim, Lane | None, Timing], Decision[T]]


class ResumeToken(Struct, frozen=True, kw_only=True):
    """A grant, with the worker that claims and its terms."""

    grant: results.ResumeGrant
    worker_id: str
    worker_instance_id: str
    lease_ttl_ms: int = leases.LEASE_TTL_MS


class Grants(shell.Group):
    def __init__(self, shell: Shell, executions: Executions) -> None:
        super().__init__(shell)
        self._executions = executions
        self._limited_first = False
        self._after: dict[gated_claims.ClaimQuery, int] = {}
        """The limited route that was granted from last, by query."""

    # Issuing

    async def claim_for_worker(
        self,
        lane_ids: workers.LaneWeights,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
        namespace: str | None = None,
        grant_ttl_ms: int = GRANT_TTL_MS,
    ) -> AnyGrant | None:
        """Reserve the best ready execution of the lanes for a worker; None if there is none.

        The kind of grant says which operation turns it into a lease. With weights, as in
        `{"mail": 5, "default": 1}`, each lane gets its share of the grants.
        """
        request = _check_request(worker_id, worker_instance_id, capabilities, grant_ttl_ms)
        query = leases.check_query(lane_ids, kinds, capabilities, namespace)

        shares = self._executions.shares(worker_id, lane_ids)
        limited = await self._executions.gated.serves(query)
        self._limited_first = not self._limited_first

        async def body(tx: Transaction) -> AnyGrant | None:
            best = await self._lock_best(tx, query, shares, limited=limited)
            if best is None and await self._let_go(tx, query):
                best = await self._lock_best(tx, query, shares, limited=limited)
            if best is None:
                await self._keep_back_unserved(tx, query)
                return None
            outcome = await self._decide_in(tx, best, self._offer(request))
            return outcome if isinstance(outcome, AnyGrant) else None

        granted = await self.store.transact(body)
        if granted is None and (await self.return_due_grants()).acted:
            # An execution whose grant was not used in time may be the best there is.
            granted = await self.store.transact(body)
        return granted

    async def _lock_best(
        self,
        tx: Transaction,
        query: gated_claims.ClaimQuery,
        shares: workers.LaneShares | None,
        *,
        limited: bool,
    ) -> ExecutionId | None:
        """Lock the best ready execution, of the lane whose turn it is if lanes take turns.

        Executions under limits and those without take turns, too.
        """
        left: set[str] = set(query.lanes)
        while left:
            lanes = query.lanes if shares is None else (LaneId(shares.next(left)),)
            served = structs.replace(query, lanes=lanes)
            for under_limits in (self._limited_first, not self._limited_first):
                if not under_limits:
                    best = await _lock_best_of(tx, served)
                elif limited:
                    best = await self._lock_best_limited(tx, served)
                else:
                    continue
                if best is not None:
                    return best
            left -= set(lanes)
        return None

    async def _lock_best_limited(
        self, tx: Transaction, query: gated_claims.ClaimQuery
    ) -> ExecutionId | None:
        """Lock the best ready execution of the next route whose limits leave room for one."""
        after = self._after.pop(query, 0)
        if len(self._after) >= gated_claims.REMEMBERED_MAX:
            self._after.clear()
        for start in (after, 0) if after else (0,):
            search = await gated_claims.search_routes(tx, query, start, gated_claims.ROUTES_MIN)
            now_ms = await tx.now_ms()
            for allowed in allot(search.routes, search.states, 1, now_ms):
                route_id = allowed.route_id
                if allowed.starts:
                    best = await _lock_best_of(tx, query, route_id)
                else:
                    resuming = await tx.select_as(ExecutionId, "best_resuming", route_id=route_id)
                    best = next(iter(resuming), None)
                if best is not None:
                    self._after[query] = route_id
                    return best
        return None

    async def _let_go(self, tx: Transaction, query: gated_claims.ClaimQuery) -> bool:
        """Release executions that were kept back for a worker like this one."""
        kept_back = await find_kept_back(tx, query, bounds.KEPT_BACK_MAX)
        await self.shell.decide_in(tx, [shell.Ask(each, let_go) for each in kept_back])
        return bool(kept_back)

    async def _keep_back_unserved(self, tx: Transaction, query: gated_claims.ClaimQuery) -> None:
        """Keep back the executions in these lanes that no present worker can run.

        Those that another worker can run are left to that worker.
        """
        parameters = {**query.parameters, "limit": bounds.KEPT_BACK_MAX}
        if not await tx.select_as(Unserved, "ready_beyond_capabilities", **parameters):
            return
        # A worker that registers holds the lanes it serves: it is seen here, or sees these.
        await tx.lock(Lane, [(lane,) for lane in sorted(query.lanes)])
        rows = await tx.select_as(Unserved, "ready_beyond_capabilities", **parameters)
        present = await present_workers(tx)
        needs = {each.execution_id: each.need for each in rows}
        served = {
            need: any(workers.serves(each, need) for each in present)
            for need in set(needs.values())
        }
        alone = [execution_id for execution_id, need in needs.items() if not served[need]]
        await self.shell.decide_in(tx, [shell.Ask(each, _keep_back) for each in alone])
        if alone:
            # A worker that asks without having registered may be able to run it.
            tx.hint(gates.GATES_TOPIC)

    async def issue_claim_grant(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Sequence[str] = (),
        grant_ttl_ms: int = GRANT_TTL_MS,
    ) -> results.ClaimGrant | results.ResumeGrant:
        """Reserve one waiting execution for one worker, which then claims it by id."""
        request = _check_request(worker_id, worker_instance_id, capabilities, grant_ttl_ms)
        grant = await self._decide(execution_id, self._offer_claim(request))
        assert not isinstance(grant, results.ReclaimGrant)
        return grant

    async def issue_reclaim_grant(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Sequence[str] = (),
        grant_ttl_ms: int = GRANT_TTL_MS,
    ) -> results.ReclaimGrant | results.NotReclaimable | results.ReclaimCapExceeded:
        """Reserve one execution that has lost its lease, which `reclaim_execution` then takes.

        A lease that has ended counts as lost, recorded or not.
        """
        request = _check_request(worker_id, worker_instance_id, capabilities, grant_ttl_ms)
        outcome = await self._decide(execution_id, self._offer_reclaim(request))
        assert not isinstance(outcome, results.ClaimGrant | results.ResumeGrant)
        return outcome

    def _offer_claim(self, request: grants.GrantRequest) -> Decide[AnyGrant]:
        def decide(subject: Subject, place: grants.Where, timing: Timing) -> Decision[AnyGrant]:
            made = grants.decide_grant(subject, request, place=place, now_ms=timing.now_ms)
            answer = self._shown(made.answer, subject.execution)
            return Decision(answer=answer, changes=made.changes)

        return decide

    def _offer_reclaim(self, request: grants.GrantRequest) -> Decide[Offered]:
        def decide(subject: Subject, place: grants.Where, timing: Timing) -> Decision[Offered]:
            made = grants.decide_reclaim_grant(subject, request, place=place, timing=timing)
            if not isinstance(made.answer, StoredGrant):
                return Decision(answer=made.answer, changes=made.changes)
            answer = self._shown(made.answer, subject.execution)
            return Decision(answer=answer, changes=made.changes)

        return decide

    def _offer(self, request: grants.GrantRequest) -> Decide[Offered]:
        """A claim or a reclaim grant, as the execution needs."""
        claim, reclaim = self._offer_claim(request), self._offer_reclaim(request)

        def decide(subject: Subject, place: grants.Where, timing: Timing) -> Decision[Offered]:
            lost = subject.execution.lifecycle_phase is LifecyclePhase.ACTIVE
            return reclaim(subject, place, timing) if lost else claim(subject, place, timing)

        return decide

    def _shown(self, grant: StoredGrant, execution: Execution) -> AnyGrant:
        claim = results.ClaimGrant(
            execution_id=execution.execution_id,
            partition_key=f"{{fp:{execution.partition_key}}}",
            grant_key=grants.show(grant, execution, self.shell.deployment.handle_key),
            expires_at_ms=grant.expires_at_ms,
        )
        if grant.kind is GrantKind.RECLAIM:
            return results.ReclaimGrant(**structs.asdict(claim), lane_id=execution.lane_id)
        if execution.attempt_state is AttemptState.ATTEMPT_INTERRUPTED:
            return results.ResumeGrant(**structs.asdict(claim), lane_id=execution.lane_id)
        return claim

    # Using

    async def claim_execution(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        grant_key: str,
        lane_id: str | None = None,
        lease_ttl_ms: int = leases.LEASE_TTL_MS,
        expected_attempt_index: int | None = None,
        attempt_timeout_ms: int | None = None,
        execution_deadline_at_ms: int | None = None,
    ) -> results.Claimed:
        """Claim one execution by id with a grant issued to this worker before.

        The same process may repeat it as long as it holds the lease, and gets the same answer.
        """
        claim = structs.replace(
            self._check_claim(worker_id, worker_instance_id, grant_key, lane_id, lease_ttl_ms),
            attempt_timeout_ms=check_optional_int(
                "attempt_timeout_ms", attempt_timeout_ms, 0, DURATION_MAX_MS
            ),
            deadline_at_ms=check_optional_time(
                "execution_deadline_at_ms", execution_deadline_at_ms
            ),
            attempt_index=_check_index("expected_attempt_index", expected_attempt_index),
        )
        granted = await self._use(execution_id, claim, grants.decide_claim_granted)
        return await self._executions.claimed(granted, lease_ttl_ms)

    async def claim_resumed_execution(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        grant_key: str,
        lane_id: str | None = None,
        lease_id: str | None = None,
        lease_ttl_ms: int = leases.LEASE_TTL_MS,
        current_attempt_index: int | None = None,
        remaining_attempt_timeout_ms: int | None = None,
    ) -> results.Claimed:
        """Continue an interrupted attempt, with a grant issued to this worker before.

        The attempt gets the time it had left when it was parked, unless
        `remaining_attempt_timeout_ms` says otherwise; 0 means no timeout.
        """
        claim = structs.replace(
            self._check_claim(worker_id, worker_instance_id, grant_key, lane_id, lease_ttl_ms),
            lease_id=optional(partial(parse_uuid, "lease_id"), lease_id),
            attempt_index=_check_index("current_attempt_index", current_attempt_index),
            attempt_time_left_ms=check_optional_int(
                "remaining_attempt_timeout_ms", remaining_attempt_timeout_ms, 0, DURATION_MAX_MS
            ),
        )
        granted = await self._use(execution_id, claim, grants.decide_claim_resumed)
        return await self._executions.claimed(granted, lease_ttl_ms)

    async def claim_from_resume_grant(self, token: ResumeToken) -> results.Claimed | None:
        """The same from a grant alone; None when the execution has ended meanwhile."""
        if not isinstance(token, ResumeToken):
            raise errors.InvalidInput("token", "must be a ResumeToken", token)
        if not isinstance(token.grant, results.ResumeGrant):
            raise errors.InvalidInput("token.grant", "must be a ResumeGrant", token.grant)
        grant, ttl_ms = token.grant, token.lease_ttl_ms
        claim = self._check_claim(
            token.worker_id, token.worker_instance_id, grant.grant_key, grant.lane_id, ttl_ms
        )

        def decide(
            subject: Subject, claim: grants.GrantClaim, lane: Lane | None, timing: Timing
        ) -> Decision[Granted | None]:
            if subject.execution.lifecycle_phase is LifecyclePhase.TERMINAL:
                return Decision(answer=None)
            return grants.decide_claim_resumed(subject, claim, lane, timing)

        granted = await self._use(grant.execution_id, claim, decide)
        return None if granted is None else await self._executions.claimed(granted, ttl_ms)

    async def reclaim_execution(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        grant_key: str,
        lane_id: str | None = None,
        lease_id: str | None = None,
        attempt_id: str | None = None,
        lease_ttl_ms: int = leases.LEASE_TTL_MS,
        max_reclaim_count: int | None = None,
    ) -> (
        results.Claimed
        | results.NotReclaimable
        | results.ReclaimCapExceeded
        | results.GrantNotFound
    ):
        """Take over an execution that has lost its lease, with a grant issued before.

        `max_reclaim_count` lowers the number of losses that its policy allows; after the last,
        the execution fails.
        """
        claim = structs.replace(
            self._check_claim(worker_id, worker_instance_id, grant_key, lane_id, lease_ttl_ms),
            lease_id=optional(partial(parse_uuid, "lease_id"), lease_id),
            attempt_id=optional(partial(parse_uuid, "attempt_id"), attempt_id),
            max_reclaim_count=check_optional_int(
                "max_reclaim_count", max_reclaim_count, 0, 2**31 - 1
            ),
        )
        outcome = await self._use(execution_id, claim, grants.decide_reclaim)
        if not isinstance(outcome, Granted):
            return outcome
        return await self._executions.claimed(outcome, lease_ttl_ms)

    async def issue_grant_and_claim(
        self,
        execution_id: str,
        *,
        lane_id: str | None = None,
        lease_duration_ms: int = leases.LEASE_TTL_MS,
        force: bool = False,
    ) -> results.Claimed:
        """Claim one waiting execution by id, as the operator, whatever it requires of workers.

        With `force`, a sleeping attempt is woken.
        """
        ttl_ms = check_ttl(lease_duration_ms, "lease_duration_ms")
        check_bool("force", force)
        lane_meant = optional(parse_lane_id, lane_id)
        ids = shell.new_lease_ids()
        checked = self.shell.check_execution_id(execution_id)

        def decide(subject: Subject, place: grants.Where, timing: Timing) -> Decision[Granted]:
            grants.check_lane_meant(subject.execution, lane_meant)
            return grants.decide_grant_and_claim(
                subject, ids, ttl_ms, lane=place.lane, force=force, now_ms=timing.now_ms
            )

        async def body(tx: Transaction) -> Granted | errors.FlowFabricError:
            outcome = await self._decide_in(tx, checked, decide)
            if isinstance(outcome, Granted):
                await _pass_by(tx, outcome.execution)
            return outcome

        granted = shell.answered(await self.store.transact(body))
        return await self._executions.claimed(granted, ttl_ms)

    def _check_claim(
        self,
        worker_id: object,
        worker_instance_id: object,
        grant_key: object,
        lane_id: object,
        lease_ttl_ms: object,
    ) -> grants.GrantClaim:
        return grants.GrantClaim(
            worker=leases.check_worker(worker_id, worker_instance_id),
            key=grants.read_key(grant_key),
            secret=self.shell.deployment.handle_key,
            lane_id=optional(parse_lane_id, lane_id),
            lease_ttl_ms=check_ttl(lease_ttl_ms),
        )

    # Time

    async def return_due_grants(self, *, limit: int = bounds.SWEEP_BATCH) -> Swept:
        """Forget grants that were not used in time: any worker may claim their executions."""
        check_int("limit", limit, 1, bounds.BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            due = await tx.select_as(
                ExecutionId, "due_grants", now_ms=await tx.now_ms(), limit=limit
            )
            subjects = await _lock_granted(tx, due)
            now_ms = await tx.now_ms()
            made = [grants.decide_return(each, now_ms) for each in subjects.values()]
            changes = combine(each.changes for each in made)
            await _give_back_starts(tx, list(subjects.values()), changes, now_ms)
            await tx.save(changes)
            topics.hint_about(tx, changes, now_ms)
            acted = sum(each.answer is not None for each in made)
            return Swept(acted=acted, full=len(due) == limit)

        return await self.store.transact(body)

    # Deciding

    async def _decide(self, execution_id: str, decide: Decide[T]) -> T:
        """Decide in a transaction of its own; a refusal is raised once its changes are saved."""
        checked = self.shell.check_execution_id(execution_id)
        return shell.answered(
            await self.store.transact(lambda tx: self._decide_in(tx, checked, decide))
        )

    async def _decide_in(
        self, tx: Transaction, execution_id: ExecutionId, decide: Decide[T]
    ) -> T | errors.FlowFabricError:
        """Decide about an execution and its grant.

        A new grant takes a slot of the limits it is under; one that expires unused gives its start
        back.
        """
        subject = (await _lock_granted(tx, [execution_id])).get(execution_id)
        if subject is None:
            raise errors.NotFound("execution", execution_id)
        place = grants.Where(
            lane=await tx.get_one(Lane, (subject.execution.lane_id,)),
            required=await required_capabilities(tx, subject.execution.route_id),
        )
        now_ms = await tx.now_ms()
        made = shell.decided(decide, subject, place, self.shell.timing(now_ms))
        changes = made.changes
        if changes is NO_CHANGES:
            return made.outcome
        await _give_back_starts(tx, [subject], changes, now_ms)
        if isinstance(made.outcome, AnyGrant):
            changes = grants.counted(changes, await _admit_grant(tx, subject.execution))
        await tx.save(changes)
        topics.hint_about(tx, changes, now_ms)
        return made.outcome

    async def _use(self, execution_id: str, claim: grants.GrantClaim, decide: DecideClaim[T]) -> T:
        """Decide about a claim of one execution, with its grant and its lane."""
        return await self._decide(
            execution_id,
            lambda subject, place, timing: decide(subject, claim, place.lane, timing),
        )


async def _lock_granted(
    tx: Transaction, execution_ids: Sequence[ExecutionId]
) -> dict[ExecutionId, Subject]:
    """Lock executions with their grants, including grants they no longer refer to."""
    subjects = await shell.lock_subjects(tx, execution_ids)
    keys = [shell.execution_key(each) for each in subjects]
    stored = await tx.get(StoredGrant, keys)
    return {
        each: structs.replace(subject, grant=stored.get(shell.execution_key(each)))
        for each, subject in subjects.items()
    }


async def _lock_best_of(
    tx: Transaction, query: gated_claims.ClaimQuery, route_id: int | None = None
) -> ExecutionId | None:
    """Lock the best ready execution: of a route under limits, or of those without."""
    best = await tx.select_as(
        ExecutionId, "best_ready", **query.parameters, route_id=route_id, candidates=CANDIDATES
    )
    return best[0] if best else None


async def _admit_grant(tx: Transaction, execution: Execution) -> list[GateId]:
    """Take a slot at each gate the execution passes, and count its start. Raise if one is full.

    Returns the gates that have counted it.
    """
    gate_ids = await gates.gates_of(tx, execution.route_id)
    if not gate_ids:
        return []
    await tx.lock(Gate, [(gate_id,) for gate_id in sorted(gate_ids)])
    now_ms = await tx.now_ms()
    states = {each.gate_id: each.state for each in await gates.load(tx, gate_ids)}
    resumes = situations.resumes(execution)
    for state in states.values():
        check_room(state, execution.called, now_ms, resumes=resumes)
    await gated_claims.count_starts(tx, states, {} if resumes else dict.fromkeys(states, 1), now_ms)
    return [] if resumes else [each for each, state in states.items() if state.limits.rate]


async def _pass_by(tx: Transaction, execution: Execution) -> None:
    """Recount the execution's gates, which a claim by hand bypasses."""
    gate_ids = await gates.gates_of(tx, execution.route_id)
    locked = await tx.lock(Gate, [(gate_id,) for gate_id in sorted(gate_ids)])
    known = [each for each in locked.values() if each.spare is not None]
    await tx.save(Changes(updates=tuple(structs.replace(each, spare=None) for each in known)))


async def _give_back_starts(
    tx: Transaction, subjects: Sequence[Subject], changes: Changes, now_ms: int
) -> None:
    """Take back the starts of grants that expire unused with `changes`."""
    times = grants.unused_starts(subjects, changes, now_ms)
    if not times:
        return
    # Lock all gates of a route, in order: a grant that replaces another one asks them next.
    passed = await gates.routes_gates(tx, {each.execution.route_id for each in subjects})
    await tx.lock(Gate, sorted({(each,) for each in times} | {(each.gate_id,) for each in passed}))
    rows = [each for each in await gates.load(tx, sorted(times)) if each.rate]
    if rows:
        after = [each.state.without(times[each.gate_id], now_ms) for each in rows]
        await tx.save(Changes(updates=tuple(after)))
        tx.hint(gates.GATES_TOPIC)


def _keep_back(subject: Subject, timing: Timing) -> Decision[results.Blocked | None]:
    if not subject.execution.ready:
        # It was claimed or granted since it was found.
        return Decision(answer=None)
    why = BlockingReason.WAITING_FOR_CAPABLE_WORKER
    return grants.decide_keep_back(subject, why, NO_CAPABLE_WORKER, timing)


class Unserved(Struct, frozen=True, kw_only=True):
    """A row of `ready_beyond_capabilities`."""

    partition_key: int
    execution_id: ExecutionId
    namespace: Namespace
    lane_id: LaneId
    execution_kind: str
    capabilities: str

    @property
    def need(self) -> workers.Need:
        return workers.Need(
            namespace=self.namespace,
            lane_id=self.lane_id,
            execution_kind=self.execution_kind,
            required=tuple(workers.read_names(self.capabilities)),
        )


def _check_request(
    worker_id: object, worker_instance_id: object, capabilities: object, grant_ttl_ms: object
) -> grants.GrantRequest:
    return grants.GrantRequest(
        grant_id=shell.new_random_uuid(),
        worker=leases.check_worker(worker_id, worker_instance_id),
        offered=check_offered(capabilities),
        ttl_ms=check_int("grant_ttl_ms", grant_ttl_ms, 1, bounds.GRANT_TTL_MS_MAX),
    )


def _check_index(field: str, index: object) -> int | None:
    return check_optional_int(field, index, 0, 2**31)
