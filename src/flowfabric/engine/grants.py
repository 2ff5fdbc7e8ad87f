"""Claiming executions by id, with a grant.

A scheduler asks what a worker should run next (`claim_for_worker`), or picks an execution itself
(`issue_claim_grant`, `issue_reclaim_grant`); the worker then turns the grant into a lease. Until
then the execution is kept for that worker.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import bounds, grants, keeping_back, results, workers
from flowfabric.core.checks import (
    check_bool,
    check_int,
    check_offered,
    check_optional_int,
    optional,
)
from flowfabric.core.ids import ExecutionId, LaneId, Namespace, parse_lane_id, parse_uuid
from flowfabric.core.leases import Granted, check_ttl
from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.core.records import GrantKind, Lane, StoredGrant
from flowfabric.core.states import AttemptState, BlockingReason, LifecyclePhase
from flowfabric.core.transitions import NO_CHANGES, Decision, Subject, Timing, combine
from flowfabric.engine import leases, shell, topics
from flowfabric.engine.executions import Executions
from flowfabric.engine.gates import GATES_TOPIC, REMEMBERED_MAX, ClaimQuery
from flowfabric.engine.grant_limits import (
    admit,
    best_limited,
    best_ready,
    give_back_starts,
    pass_by,
)
from flowfabric.engine.keeping_back import find_kept_back, let_go
from flowfabric.engine.routes import required_capabilities
from flowfabric.engine.shell import Shell, Swept
from flowfabric.engine.workers import present_workers
from flowfabric.store.base import Parameter, Transaction

T = TypeVar("T")
GRANT_TTL_MS = 5_000
AnyGrant = results.ClaimGrant | results.ResumeGrant | results.ReclaimGrant
Decide = Callable[[Subject, grants.Where, Timing], Decision[T]]
DecideClaim = Callable[[Subject, grants.GrantClaim, Lane | None, Timing], Decision[T]]


class ResumeToken(Struct, frozen=True, kw_only=True):
    """A grant, and what the worker wants done with it."""

    grant: results.ResumeGrant
    worker_id: str
    worker_instance_id: str
    lease_ttl_ms: int = leases.LEASE_TTL_MS


class Grants(shell.Group):
    def __init__(self, shell: Shell, executions: Executions) -> None:
        super().__init__(shell)
        self._executions = executions
        self._limited_first = False
        self._after: dict[ClaimQuery, int] = {}
        """The limited route that was granted from last, by what was asked for."""

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
            found = await self._best(tx, query, shares, limited=limited)
            if found is None and await self._let_go(tx, query):
                found = await self._best(tx, query, shares, limited=limited)
            if found is None:
                await self._keep_back_unserved(tx, query)
                return None
            outcome = await self._issue_in(tx, found, _offer(request))
            return self._shown(outcome) if isinstance(outcome, Issued) else None

        granted = await self.store.transact(body)
        if granted is None and (await self.return_due_grants()).acted:
            # What was granted before and not used in time may be the best there is.
            granted = await self.store.transact(body)
        return granted

    async def _best(
        self,
        tx: Transaction,
        query: ClaimQuery,
        shares: workers.LaneShares | None,
        *,
        limited: bool,
    ) -> ExecutionId | None:
        """Lock the best ready execution, of the lane whose turn it is if they take turns.

        What is under limits and what is not take turns, too.
        """
        left: set[str] = set(query.lanes)
        while left:
            lanes = query.lanes if shares is None else (LaneId(shares.next(left)),)
            served = structs.replace(query, lanes=lanes)
            for under_limits in (self._limited_first, not self._limited_first):
                if not under_limits:
                    found = await best_ready(tx, served)
                elif limited:
                    found = await self._best_limited(tx, served)
                else:
                    continue
                if found is not None:
                    return found
            left -= set(lanes)
        return None

    async def _best_limited(self, tx: Transaction, query: ClaimQuery) -> ExecutionId | None:
        pick = await best_limited(tx, query, self._after.get(query, 0))
        if len(self._after) >= REMEMBERED_MAX:
            self._after.clear()
        self._after[query] = pick.after
        return pick.execution_id

    async def _let_go(self, tx: Transaction, query: ClaimQuery) -> bool:
        """Release what was kept back for a worker like this one."""
        found = await find_kept_back(tx, query, bounds.KEPT_BACK_MAX)
        await self.shell.decide_in(tx, [shell.Ask(each, let_go) for each in found])
        return bool(found)

    async def _keep_back_unserved(self, tx: Transaction, query: ClaimQuery) -> None:
        """Keep back what waits in these lanes and no present worker can run.

        What another worker can run is left to that worker.
        """
        asked: dict[str, Parameter] = {
            "namespace": query.namespace,
            "lanes": query.lanes,
            "kinds": query.kinds,
            "capabilities": query.capabilities,
            "limit": bounds.KEPT_BACK_MAX,
        }
        if not await tx.select_as(Unserved, "ready_beyond_capabilities", **asked):
            return
        # A worker that registers holds the lanes it serves: it is seen here, or sees these.
        await tx.lock(Lane, [(lane,) for lane in sorted(query.lanes)])
        rows = await tx.select_as(Unserved, "ready_beyond_capabilities", **asked)
        present = await present_workers(tx)
        served: dict[workers.Need, bool] = {}
        alone: list[ExecutionId] = []
        for row in rows:
            need = row.need
            if need not in served:
                served[need] = any(workers.serves(each, need) for each in present)
            if not served[need]:
                alone.append(row.execution_id)
        await self.shell.decide_in(tx, [shell.Ask(each, _keep_back) for each in alone])
        if alone:
            # A worker that asks without having registered may be able to run it.
            tx.hint(GATES_TOPIC)

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

        grant = self._shown(await self._issue(execution_id, _offer_claim(request)))
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
        outcome = await self._issue(execution_id, _offer_reclaim(request))
        if not isinstance(outcome, Issued):
            return outcome
        grant = self._shown(outcome)
        assert isinstance(grant, results.ReclaimGrant)
        return grant

    def _shown(self, issued: "Issued") -> AnyGrant:
        grant, execution = issued.grant, issued.subject.execution
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
            timers=grants.check_timers(attempt_timeout_ms, execution_deadline_at_ms),
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
        `remaining_attempt_timeout_ms` says otherwise; 0 is without end.
        """
        claim = structs.replace(
            self._check_claim(worker_id, worker_instance_id, grant_key, lane_id, lease_ttl_ms),
            lease_id=_check_uuid("lease_id", lease_id),
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
            made = grants.decide_claim_resumed(subject, claim, lane, timing)
            return Decision(answer=made.answer, changes=made.changes)

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

        `max_reclaim_count` is how often it may lose it, if that is less than its policy allows:
        the execution fails then.
        """
        claim = structs.replace(
            self._check_claim(worker_id, worker_instance_id, grant_key, lane_id, lease_ttl_ms),
            lease_id=_check_uuid("lease_id", lease_id),
            attempt_id=_check_uuid("attempt_id", attempt_id),
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

        With `force`, one whose attempt sleeps is woken for it.
        """
        ttl_ms = check_ttl(lease_duration_ms, "lease_duration_ms")
        check_bool("force", force)
        asked_lane = optional(parse_lane_id, lane_id)
        ids = shell.new_lease_ids()

        asked = self.shell.check_execution_id(execution_id)

        async def load(tx: Transaction) -> tuple[Subject, grants.Where]:
            found = await self._about(tx, asked)
            await pass_by(tx, found[0].execution)
            return found

        def decide(found: tuple[Subject, grants.Where], timing: Timing) -> Decision[Granted]:
            subject, place = found
            grants.check_lane_meant(subject.execution, asked_lane)
            return grants.decide_grant_and_claim(
                subject, ids, ttl_ms, lane=place.lane, force=force, now_ms=timing.now_ms
            )

        granted = await self.shell.decide_loaded(load, decide)
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
        """Forget grants that were not used in time: any worker may claim what they reserved."""
        check_int("limit", limit, 1, bounds.BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            due = await tx.select_as(
                ExecutionId, "due_grants", now_ms=await tx.now_ms(), limit=limit
            )
            subjects = await _lock_granted(tx, due)
            now_ms = await tx.now_ms()
            await give_back_starts(tx, list(subjects.values()))
            made = [grants.decide_return(each, now_ms) for each in subjects.values()]
            changes = combine(each.changes for each in made)
            await tx.save(changes)
            topics.hint_about(tx, changes, now_ms)
            acted = sum(each.answer is not None for each in made)
            return Swept(acted=acted, full=len(due) == limit)

        return await self.store.transact(body)

    # Deciding

    async def _issue(self, execution_id: str, decide: Decide[T]) -> T:
        """Decide in a transaction of its own; a refusal is raised once what it noted is saved."""
        asked = self.shell.check_execution_id(execution_id)

        async def body(tx: Transaction) -> T | errors.FlowFabricError:
            return await self._issue_in(tx, asked, decide)

        return shell.answered(await self.store.transact(body))

    async def _issue_in(
        self, tx: Transaction, execution_id: ExecutionId, decide: Decide[T]
    ) -> T | errors.FlowFabricError:
        """Decide about a grant; a new one takes a slot of the limits it is under."""
        subject, place = await self._about(tx, execution_id)
        now_ms = await tx.now_ms()
        made = shell.decided(decide, subject, place, self.shell.timing(now_ms))
        if isinstance(made.outcome, Issued) and made.changes is not NO_CHANGES:
            await give_back_starts(tx, [subject])
            await admit(tx, subject.execution)
        await tx.save(made.changes)
        topics.hint_about(tx, made.changes, now_ms)
        return made.outcome

    async def _use(self, execution_id: str, claim: grants.GrantClaim, decide: DecideClaim[T]) -> T:
        """Decide about a claim of one execution, with its grant and its lane."""
        asked = self.shell.check_execution_id(execution_id)
        return await self.shell.decide_loaded(
            lambda tx: self._about(tx, asked),
            lambda found, timing: decide(found[0], claim, found[1].lane, timing),
        )

    async def _about(
        self, tx: Transaction, execution_id: ExecutionId
    ) -> tuple[Subject, grants.Where]:
        subject = (await _lock_granted(tx, [execution_id])).get(execution_id)
        if subject is None:
            raise errors.NotFound("execution", execution_id)
        execution = subject.execution
        place = grants.Where(
            lane=await tx.get_one(Lane, (execution.lane_id,)),
            required=await required_capabilities(tx, execution.route_id),
        )
        return subject, place


class Issued(Struct, frozen=True, kw_only=True):
    """A grant and what it is for."""

    grant: StoredGrant
    subject: Subject


async def _lock_granted(
    tx: Transaction, execution_ids: Sequence[ExecutionId]
) -> dict[ExecutionId, Subject]:
    """Lock executions with their grants, including grants that are no longer referred to."""
    subjects = await shell.lock_subjects(tx, execution_ids)
    keys = [shell.execution_key(each) for each in subjects]
    stored = await tx.get(StoredGrant, keys)
    return {
        each: structs.replace(subject, grant=stored.get(shell.execution_key(each)))
        for each, subject in subjects.items()
    }


NO_CAPABLE_WORKER = "no connected worker satisfies required_capabilities"


def _keep_back(subject: Subject, timing: Timing) -> Decision[results.Blocked | None]:
    if not subject.execution.ready:
        # It was claimed or granted since it was found.
        return Decision(answer=None)
    why = BlockingReason.WAITING_FOR_CAPABLE_WORKER
    made = keeping_back.decide_keep_back(subject, why, NO_CAPABLE_WORKER, timing)
    return Decision(answer=made.answer, changes=made.changes)


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


def _offer_claim(request: grants.GrantRequest) -> Decide[Issued]:
    def decide(subject: Subject, place: grants.Where, timing: Timing) -> Decision[Issued]:
        made = grants.decide_grant(subject, request, place=place, now_ms=timing.now_ms)
        return Decision(answer=Issued(grant=made.answer, subject=subject), changes=made.changes)

    return decide


Offered = Issued | results.NotReclaimable | results.ReclaimCapExceeded


def _offer_reclaim(request: grants.GrantRequest) -> Decide[Offered]:
    def decide(subject: Subject, place: grants.Where, timing: Timing) -> Decision[Offered]:
        made = grants.decide_reclaim_grant(subject, request, place=place, timing=timing)
        if isinstance(made.answer, StoredGrant):
            answer: Offered = Issued(grant=made.answer, subject=subject)
        else:
            answer = made.answer
        return Decision(answer=answer, changes=made.changes)

    return decide


def _offer(request: grants.GrantRequest) -> Decide[Offered]:
    """A claim or a reclaim grant, as the execution needs."""
    claim, reclaim = _offer_claim(request), _offer_reclaim(request)

    def decide(subject: Subject, place: grants.Where, timing: Timing) -> Decision[Offered]:
        if subject.execution.lifecycle_phase is LifecyclePhase.ACTIVE:
            return reclaim(subject, place, timing)
        made = claim(subject, place, timing)
        return Decision(answer=made.answer, changes=made.changes)

    return decide


def _check_uuid(field: str, value: object) -> str | None:
    return None if value is None else parse_uuid(field, value)


def _check_index(field: str, index: object) -> int | None:
    return check_optional_int(field, index, 0, 2**31)
