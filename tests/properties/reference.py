"""What executions must do, told a second time and as plainly as possible.

`Reference` keeps a few facts about each execution and says what every operation has
to answer. It knows no tables, no records and no event log, and shares no code with
the engine beyond its names for states and errors. The stateful test drives both and
compares.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from flowfabric import errors
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId
from flowfabric.core.results import Claimed
from flowfabric.core.states import AttemptLifecycle as Attempted
from flowfabric.core.states import OwnershipState as Ownership
from flowfabric.core.states import PublicState as Public
from tests.properties.world import Life

ENDED = frozenset({Public.COMPLETED, Public.FAILED, Public.CANCELLED, Public.EXPIRED})
OPEN = frozenset({Attempted.STARTED, Attempted.SUSPENDED})
BY_LOSS = {
    "": Ownership.LEASED,
    "expired": Ownership.LEASE_EXPIRED_RECLAIMABLE,
    "revoked": Ownership.LEASE_REVOKED,
}

Refused = type[errors.FlowFabricError]
Answer = Refused | str
"""What a call must give: an error of this type, or a result whose type has this name."""


@dataclass(frozen=True)
class Rules:
    """The part of a policy that changes what happens. Retries wait a fixed time."""

    retries: int = 0
    backoff_ms: int = 0
    reclaims: int = 100
    replays: int = 10
    attempt_timeout_ms: int | None = None
    deadline_after_ms: int | None = None
    needs: frozenset[str] = frozenset()

    def policy(self) -> dict[str, object]:
        policy: dict[str, object] = {
            "max_reclaim_count": self.reclaims,
            # A rule of its own, which would end most histories before they get interesting.
            "max_worker_deaths": 1_000,
            "max_replay_count": self.replays,
            "routing_requirements": {"required_capabilities": sorted(self.needs)},
        }
        if self.retries:
            backoff = {"type": "fixed", "delay_ms": self.backoff_ms}
            policy["retry_policy"] = {"max_retries": self.retries, "backoff": backoff}
        timeouts = {
            "attempt_timeout_ms": self.attempt_timeout_ms,
            "execution_deadline_ms": self.deadline_after_ms,
        }
        if any(value is not None for value in timeouts.values()):
            policy["timeout_policy"] = {k: v for k, v in timeouts.items() if v is not None}
        return policy


@dataclass
class Known:
    """One execution. `lease` is the lease last granted, until it is given back or revoked."""

    execution_id: ExecutionId
    lane: str
    kind: str
    rules: Rules
    priority: int
    created_at_ms: int
    state: Public
    delay_until_ms: int | None = None
    deadline_at_ms: int | None = None

    epoch: int = 0
    attempts: list[Attempted] = field(default_factory=list)
    attempt_id: str | None = None
    lease: str | None = None
    lease_until_ms: int = 0
    lost: str = ""
    """`expired` or `revoked` while the execution is active without an owner."""
    parked_for: str = ""
    """`delay` or `children` while an attempt is set aside."""
    to_retry: bool = False
    attempt_deadline_ms: int | None = None
    time_left_ms: int | None = None
    retries: int = 0
    reclaims: int = 0
    replays: int = 0
    retain_until_ms: int | None = None
    grant: tuple[str, int] | None = None
    """Whom it is kept for, and until when."""
    grant_id: str | None = None

    @property
    def claimable(self) -> bool:
        return self.grant is None and (self.state is Public.WAITING or bool(self.lost))

    @property
    def ownership(self) -> Ownership:
        if self.state is not Public.ACTIVE:
            return Ownership.UNOWNED
        return BY_LOSS[self.lost]

    @property
    def view(self) -> tuple[object, ...]:
        """What the stored rows must show; `view_of` reads the same from them."""
        return (
            self.state,
            self.ownership,
            self.epoch,
            tuple(self.attempts),
            self.lease,
            self.lease and self.lease_until_ms,
            self.delay_until_ms,
            self.deadline_at_ms,
            self.attempt_deadline_ms,
            self.time_left_ms,
            (self.retries, self.reclaims, self.replays),
            self.priority,
            self.retain_until_ms,
            self.grant,
        )

    def overdue(self, now_ms: int) -> bool:
        return self.state is Public.ACTIVE and not self.lost and self.lease_until_ms <= now_ms

    def held_last_by(self, handle: Handle) -> bool:
        return (self.epoch, self.attempt_id) == (handle.lease_epoch, handle.attempt_id)


def view_of(life: Life) -> tuple[object, ...]:
    execution, grant = life.execution, life.grant
    return (
        execution.public_state,
        execution.ownership_state,
        execution.lease_epoch,
        tuple(attempt.attempt_state for attempt in life.attempts),
        execution.lease_id,
        execution.lease_expires_at_ms,
        execution.delay_until_ms,
        execution.deadline_at_ms,
        execution.attempt_deadline_ms,
        execution.attempt_time_left_ms,
        (execution.retry_count, execution.lease_reclaim_count, execution.replay_count),
        execution.priority,
        execution.retain_until_ms,
        grant and (grant.worker_id, grant.expires_at_ms),
    )


class Reference:
    def __init__(self, retention_ms: int) -> None:
        self.retention_ms = retention_ms
        self.now_ms = 0
        self.known: dict[ExecutionId, Known] = {}

    # Claiming

    def best(
        self, lanes: Collection[str], kinds: Collection[str] | None, offered: Collection[str]
    ) -> list[ExecutionId]:
        """What a worker gets, in this order."""
        served = [
            known
            for known in self.known.values()
            if known.claimable
            and known.lane in lanes
            and (kinds is None or known.kind in kinds)
            and known.rules.needs <= set(offered)
        ]
        served.sort(key=lambda k: (-k.priority, k.created_at_ms, k.execution_id[-36:]))
        return [known.execution_id for known in served]

    def take(self, claimed: Claimed, ttl_ms: int) -> None:
        """The execution now belongs to the worker that got `claimed`."""
        known = self.known[claimed.execution_id]
        assert known.lease is None or known.lost, "two workers at once"
        timeout_ms = known.rules.attempt_timeout_ms
        if known.parked_for:
            known.attempts[-1] = Attempted.STARTED
            timeout_ms = known.time_left_ms
            assert claimed.attempt_id == known.attempt_id
        else:
            if known.lost:
                known.attempts[-1] = Attempted.INTERRUPTED_RECLAIMED
                known.reclaims += 1
            known.attempts.append(Attempted.STARTED)
        known.epoch += 1
        known.attempt_deadline_ms = self.now_ms + timeout_ms if timeout_ms else None
        known.lease, known.lease_until_ms = claimed.lease_id, self.now_ms + ttl_ms
        known.attempt_id = claimed.attempt_id
        known.state, known.lost, known.parked_for = Public.ACTIVE, "", ""
        known.to_retry, known.time_left_ms = False, None

    def issue_grant(
        self, known: Known, worker: str, offered: Collection[str], ttl_ms: int
    ) -> Answer:
        if known.state is not Public.WAITING:
            return errors.ExecutionNotEligible
        kind = "ResumeGrant" if known.parked_for else "ClaimGrant"
        if known.grant is not None and known.grant[1] >= self.now_ms:
            return kind if known.grant[0] == worker else errors.GrantAlreadyExists
        if not known.rules.needs <= set(offered):
            return errors.CapabilityMismatch
        known.grant = (worker, self.now_ms + ttl_ms)
        return kind

    def claim_granted(self, known: Known, key: tuple[str, int] | None) -> Answer:
        """Whether the grant holds, by its id and its end; `take` then does the rest."""
        if key is not None and known.lease == key[0]:
            live = not known.lost and known.lease_until_ms > self.now_ms
            if live and known.state is Public.ACTIVE:
                return "Claimed"
        if known.state in ENDED:
            return errors.ExecutionNotActive
        if known.state is not Public.WAITING:
            return errors.ExecutionNotLeaseable
        if known.parked_for:
            return errors.UseClaimResumedExecution
        if key is None:
            return errors.InvalidClaimGrant
        held = known.grant is not None and known.grant_id == key[0]
        late = key[1] < self.now_ms
        if held:
            known.grant = None
        if late:
            return errors.ClaimGrantExpired
        return "Claimed" if held else errors.InvalidClaimGrant

    def return_grants(self) -> None:
        for known in self.known.values():
            if known.grant is not None and known.grant[1] < self.now_ms:
                known.grant = None

    # Holding

    def refusal(self, known: Known, handle: Handle) -> Refused | None:
        """Why the holder of `handle` may not act; noticing an expired lease leaves a trace."""
        if known.state is not Public.ACTIVE:
            return errors.ExecutionNotActive
        if known.lost == "revoked":
            return errors.LeaseRevoked
        if known.lost == "expired" or known.lease_until_ms <= self.now_ms:
            self.notice_expiry(known)
            return errors.LeaseExpired
        return None if known.lease == handle.lease_id else errors.LeaseConflict

    def renew(self, known: Known, handle: Handle) -> Answer:
        if refusal := self.refusal(known, handle):
            return refusal
        known.lease_until_ms = self.now_ms + handle.lease_ttl_ms
        return "Renewed"

    def progress(self, known: Known, handle: Handle) -> Answer:
        if known.overdue(self.now_ms):
            return errors.LeaseExpired
        return self.refusal(known, handle) or "Updated"

    def complete(self, known: Known, handle: Handle) -> Answer:
        if known.state is Public.COMPLETED and known.held_last_by(handle):
            return "Completed"
        if refusal := self.refusal(known, handle):
            return refusal
        self.end(known, Public.COMPLETED, Attempted.ENDED_SUCCESS)
        return "Completed"

    def fail(self, known: Known, handle: Handle, hopeless: bool = False) -> Answer:
        if known.state is Public.FAILED and known.held_last_by(handle):
            return "TerminalFailed"
        if known.to_retry and known.epoch == handle.lease_epoch:
            return "RetryScheduled"
        if refusal := self.refusal(known, handle):
            return refusal
        if not hopeless and self.retry(known):
            return "RetryScheduled"
        self.end(known, Public.FAILED, Attempted.ENDED_FAILURE)
        return "TerminalFailed"

    def delay(self, known: Known, handle: Handle, until_ms: int) -> Answer:
        if known.parked_for == "delay" and known.held_last_by(handle):
            return "Delayed"
        if refusal := self.refusal(known, handle):
            return refusal
        self.park(known, "delay")
        known.state, known.delay_until_ms = Public.DELAYED, until_ms
        return "Delayed"

    def wait_children(self, known: Known, handle: Handle) -> Answer:
        if known.parked_for == "children" and known.held_last_by(handle):
            return "Moved"
        if refusal := self.refusal(known, handle):
            return refusal
        self.park(known, "children")
        # It depends on nothing.
        known.state = Public.WAITING
        return "Moved"

    def give_up(self, known: Known, handle: Handle) -> Answer:
        if known.state is Public.CANCELLED and known.held_last_by(handle):
            return "Cancelled"
        if refusal := self.refusal(known, handle):
            return refusal
        self.end(known, Public.CANCELLED, Attempted.ENDED_CANCELLED)
        return "Cancelled"

    # People

    def cancel(self, known: Known) -> Answer:
        if known.state is Public.CANCELLED:
            return "Cancelled"
        if known.state in ENDED:
            return errors.InvalidInput
        known.epoch += 1
        self.end(known, Public.CANCELLED, Attempted.ENDED_CANCELLED)
        return "Cancelled"

    def revoke(self, known: Known) -> Answer:
        if known.overdue(self.now_ms):
            self.notice_expiry(known)
            return "AlreadySatisfied"
        if known.state is not Public.ACTIVE or known.lost:
            return "AlreadySatisfied"
        known.epoch += 1
        self.lose(known, "revoked")
        return "Revoked"

    def change_priority(self, known: Known, priority: int) -> Answer:
        if known.state is not Public.WAITING:
            return errors.ExecutionNotEligible
        known.priority = min(max(priority, 0), 9_000)
        return "Changed"

    def replay(self, known: Known) -> Answer:
        if known.state not in ENDED:
            return errors.ExecutionNotTerminal
        if known.replays >= known.rules.replays:
            return errors.MaxReplaysExhausted
        known.state, known.epoch, known.replays = Public.WAITING, known.epoch + 1, known.replays + 1
        known.retries = known.reclaims = 0
        known.attempt_id = known.retain_until_ms = None
        if known.rules.deadline_after_ms is not None:
            known.deadline_at_ms = self.now_ms + known.rules.deadline_after_ms
        elif known.deadline_at_ms is not None and known.deadline_at_ms <= self.now_ms:
            known.deadline_at_ms = None
        return "Replayed"

    # Time

    def expire_leases(self) -> None:
        for known in self.known.values():
            self.look_at_lease(known)

    def look_at_lease(self, known: Known) -> Answer:
        if not known.overdue(self.now_ms):
            return "AlreadySatisfied"
        self.notice_expiry(known)
        return "Marked"

    def promote(self) -> None:
        for known in self.known.values():
            self.look_at_delay(known)

    def look_at_delay(self, known: Known) -> Answer:
        if not self.has_come(known.delay_until_ms):
            return "AlreadySatisfied"
        known.state, known.delay_until_ms = Public.WAITING, None
        return "Marked"

    def expire_attempts(self) -> None:
        for known in self.known.values():
            self.look_at_attempt(known)

    def look_at_attempt(self, known: Known) -> Answer:
        if not self.has_come(known.attempt_deadline_ms):
            return "AlreadySatisfied"
        if not self.retry(known):
            self.end(known, Public.EXPIRED, Attempted.ENDED_FAILURE)
        return "Marked"

    def expire_deadlines(self) -> None:
        for known in self.known.values():
            self.look_at_deadline(known)

    def look_at_deadline(self, known: Known) -> Answer:
        if known.state in ENDED or not self.has_come(known.deadline_at_ms):
            return "AlreadySatisfied"
        self.end(known, Public.EXPIRED, Attempted.ENDED_FAILURE)
        return "Marked"

    def has_come(self, time_ms: int | None) -> bool:
        return time_ms is not None and time_ms <= self.now_ms

    def trim(self) -> None:
        for known in list(self.known.values()):
            if known.retain_until_ms is not None and known.retain_until_ms <= self.now_ms:
                del self.known[known.execution_id]

    # Shared

    def notice_expiry(self, known: Known) -> None:
        if known.lost:
            return
        lease = known.lease
        self.lose(known, "expired")
        if known.state is Public.ACTIVE:
            known.lease = lease

    def lose(self, known: Known, how: str) -> None:
        known.lost, known.lease, known.attempt_deadline_ms = how, None, None
        if known.reclaims >= known.rules.reclaims:
            self.end(known, Public.FAILED, Attempted.INTERRUPTED_RECLAIMED)

    def retry(self, known: Known) -> bool:
        if known.retries >= known.rules.retries:
            return False
        known.attempts[-1] = Attempted.ENDED_FAILURE
        known.state, known.delay_until_ms = (
            Public.DELAYED,
            self.now_ms + known.rules.backoff_ms,
        )
        known.retries, known.to_retry = known.retries + 1, True
        known.lease = known.attempt_deadline_ms = known.attempt_id = None
        return True

    def park(self, known: Known, what: str) -> None:
        due_ms = known.attempt_deadline_ms
        known.time_left_ms = None if due_ms is None else max(1, due_ms - self.now_ms)
        known.attempts[-1] = Attempted.SUSPENDED
        known.parked_for = what
        known.lease = known.attempt_deadline_ms = None

    def end(self, known: Known, state: Public, attempted: Attempted) -> None:
        known.grant = None
        if known.attempts and known.attempts[-1] in OPEN:
            known.attempts[-1] = attempted
        known.state, known.lost, known.parked_for, known.to_retry = state, "", "", False
        known.lease = known.delay_until_ms = None
        known.attempt_deadline_ms = known.time_left_ms = None
        known.retain_until_ms = self.now_ms + self.retention_ms
