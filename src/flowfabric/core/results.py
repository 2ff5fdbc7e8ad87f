"""What operations answer.

Refusals are exceptions (`errors.py`); everything here is a success, including
the ones that found nothing left to do.
"""

from enum import StrEnum

from msgspec import Struct

from flowfabric.core.flow_records import CancellationPolicy
from flowfabric.core.handles import Handle
from flowfabric.core.ids import AttemptId, EdgeId, ExecutionId, FlowId, LaneId, LeaseId, Namespace
from flowfabric.core.states import AttemptType, BlockingReason, PublicState


class ExecutionAnswer(Struct, frozen=True, kw_only=True):
    """An answer about one execution."""

    execution_id: ExecutionId


class StateAnswer(ExecutionAnswer, frozen=True, kw_only=True):
    """An answer that says where the execution stands now."""

    public_state: PublicState


class Created(StateAnswer, frozen=True, kw_only=True, tag=True, gc=False):
    """There was no such execution before."""


class Duplicate(ExecutionAnswer, frozen=True, kw_only=True, tag=True, gc=False):
    """The idempotency key, or the id itself, was used before; nothing was written."""


class Claimed(Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """A lease, and all a worker needs to start: no second read."""

    handle: Handle
    attempt_type: AttemptType
    lease_expires_at_ms: int
    namespace: Namespace
    execution_kind: str
    priority: int
    payload: bytes
    payload_encoding: str | None
    flow_id: FlowId | None
    retry_count: int
    created_at_ms: int
    deadline_at_ms: int | None
    attempt_deadline_ms: int | None
    progress: str | None = None
    """What earlier runs have left, as JSON, if it is small; `read_progress` always has it."""
    last_chance: bool = False
    """Whether its worker has died, and the next death fails it: begin one such at a time, and
    `delay` the others with `begun=False`."""
    renew_first: bool = False
    """Whether it is to be renewed before it begins: the end of its lease is no death until then."""

    @property
    def execution_id(self) -> ExecutionId:
        return self.handle.execution_id

    @property
    def lane_id(self) -> LaneId:
        return self.handle.lane_id

    @property
    def lease_id(self) -> LeaseId:
        return self.handle.lease_id

    @property
    def lease_epoch(self) -> int:
        return self.handle.lease_epoch

    @property
    def attempt_index(self) -> int:
        return self.handle.attempt_index

    @property
    def attempt_id(self) -> AttemptId:
        return self.handle.attempt_id


class IssuedGrant(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    partition_key: str
    grant_key: str
    expires_at_ms: int


class ClaimGrant(IssuedGrant, frozen=True, kw_only=True, tag=True):
    """For `claim_execution`: an attempt begins."""


class ResumeGrant(IssuedGrant, frozen=True, kw_only=True, tag=True):
    """For `claim_resumed_execution`: an attempt goes on."""

    lane_id: LaneId


class ReclaimGrant(IssuedGrant, frozen=True, kw_only=True, tag=True):
    """For `reclaim_execution`: an attempt follows one whose lease was lost."""

    lane_id: LaneId


class NotReclaimable(ExecutionAnswer, frozen=True, kw_only=True, tag=True):
    """The execution has not lost its lease, or not to this worker."""

    detail: str


class ReclaimCapExceeded(ExecutionAnswer, frozen=True, kw_only=True, tag=True):
    """The execution has lost its lease as often as it may: it is not handed out again."""

    reclaim_count: int
    """How often it may."""


class GrantNotFound(ExecutionAnswer, frozen=True, kw_only=True, tag=True):
    """The grant does not exist, or no longer does. Ask for another."""


class Blocked(ExecutionAnswer, frozen=True, kw_only=True, tag=True):
    reason: BlockingReason


class Unblocked(ExecutionAnswer, frozen=True, kw_only=True, tag=True):
    """No limit keeps it back any more."""


class Renewed(Struct, frozen=True, kw_only=True, tag=True):
    expires_at_ms: int
    lease_epoch: int


class Updated(ExecutionAnswer, frozen=True, kw_only=True, tag=True):
    """Its progress was stored."""


class Completed(StateAnswer, frozen=True, kw_only=True, tag=True, gc=False):
    """It has ended with a result."""


class RetryScheduled(ExecutionAnswer, frozen=True, kw_only=True, tag=True):
    delay_until_ms: int
    next_attempt_index: int


class TerminalFailed(ExecutionAnswer, frozen=True, kw_only=True, tag=True):
    """It failed, and is not tried again."""


class Delayed(StateAnswer, frozen=True, kw_only=True, tag=True):
    """Its attempt was put aside until a time."""


class Moved(StateAnswer, frozen=True, kw_only=True, tag=True):
    """The execution now waits for its children."""


class HandedBack(ExecutionAnswer, frozen=True, kw_only=True, tag=True):
    """The lease was returned; the execution is ready again."""


class Cancelled(StateAnswer, frozen=True, kw_only=True, tag=True):
    """It was cancelled, or `public_state` says where it was left."""


class Revoked(Struct, frozen=True, kw_only=True, tag=True):
    lease_id: LeaseId
    lease_epoch: int


class AlreadySatisfied(Struct, frozen=True, kw_only=True, tag=True):
    """There was nothing to do; `reason` says why."""

    reason: str


class Changed(ExecutionAnswer, frozen=True, kw_only=True, tag=True):
    """The operator's change was made."""


class Replayed(Struct, frozen=True, kw_only=True, tag=True):
    public_state: PublicState


class Marked(StateAnswer, frozen=True, kw_only=True, tag=True):
    """Time has done its work: a lease expired, a delay ended, a deadline passed."""


FailResult = RetryScheduled | TerminalFailed
CreateResult = Created | Duplicate
RevokeResult = Revoked | AlreadySatisfied
TimerResult = Marked | AlreadySatisfied


# What the operations on flows answer ----------------------------------------


class FlowCreated(Struct, frozen=True, kw_only=True, tag="Created"):
    flow_id: FlowId


class FlowExists(Struct, frozen=True, kw_only=True, tag="AlreadySatisfied"):
    flow_id: FlowId


class Added(Struct, frozen=True, kw_only=True, tag=True):
    execution_id: ExecutionId
    new_node_count: int


class AlreadyMember(Struct, frozen=True, kw_only=True, tag=True):
    execution_id: ExecutionId
    node_count: int


class Staged(Struct, frozen=True, kw_only=True, tag=True):
    edge_id: EdgeId
    new_graph_revision: int


class Applied(Struct, frozen=True, kw_only=True, tag=True):
    unsatisfied_count: int
    """Applied edges into the downstream that are still open."""


class AlreadyApplied(Struct, frozen=True, kw_only=True, tag=True):
    pass


class Set(Struct, frozen=True, kw_only=True, tag=True):
    pass


class AlreadySet(Struct, frozen=True, kw_only=True, tag=True):
    pass


class DependenciesAdded(Struct, frozen=True, kw_only=True, tag=True):
    """What one bulk call added. A repeat of the call adds nothing and says so."""

    members_added: int
    edges_added: int
    node_count: int
    edge_count: int
    graph_revision: int


class EdgeAnswer(Struct, frozen=True, kw_only=True):
    data_injected: bool = False
    """The downstream's payload was replaced by a passed result."""
    child_skipped: bool = False


class Satisfied(EdgeAnswer, frozen=True, kw_only=True, tag=True):
    """This edge fired the group, and the downstream may run."""


class Impossible(EdgeAnswer, frozen=True, kw_only=True, tag=True):
    """This edge fired the group, and the downstream can never run."""


class Pending(EdgeAnswer, frozen=True, kw_only=True, tag=True):
    """Counted; the group still waits for others."""


class AlreadyFired(EdgeAnswer, frozen=True, kw_only=True, tag=True):
    """Counted; the group had fired before."""


class AlreadyResolved(EdgeAnswer, frozen=True, kw_only=True, tag=True):
    """The edge had resolved before."""


class CascadeOutcome(Struct, frozen=True, kw_only=True, tag=True):
    resolved: int
    """Edges that resolved."""
    cascaded_children: int
    """Dependents that were skipped; their own endings follow."""
    synchronous: bool = False


class FlowCancelled(Struct, frozen=True, kw_only=True, tag="Cancelled"):
    cancellation_policy: CancellationPolicy
    member_execution_ids: tuple[ExecutionId, ...]
    """The first members that are cancelled with it."""
    member_count: int


class FlowAlreadyEnded(Struct, frozen=True, kw_only=True, tag="AlreadyTerminal"):
    stored_cancellation_policy: CancellationPolicy | None
    stored_cancel_reason: str | None
    member_execution_ids: tuple[ExecutionId, ...]
    """The first members that were cancelled since the flow was, or are about to be."""
    member_count: int


class CancellationScheduled(Struct, frozen=True, kw_only=True, tag=True):
    cancellation_policy: CancellationPolicy
    member_execution_ids: tuple[ExecutionId, ...]
    member_count: int


class PartiallyCancelled(Struct, frozen=True, kw_only=True, tag=True):
    cancellation_policy: CancellationPolicy
    member_execution_ids: tuple[ExecutionId, ...]
    failed_member_execution_ids: tuple[ExecutionId, ...]


class SiblingCancelAction(StrEnum):
    """What became of the queue of upstreams that a join no longer needs."""

    SREMMED_STALE = "sremmed_stale"
    """The join does not want them cancelled, or is gone: they are off the queue."""
    COMPLETED_DRAIN = "completed_drain"
    """All of them have ended or are gone: they are off the queue."""
    NO_OP = "no_op"
    """None is queued, or some have not ended and will be cancelled."""


CreateFlowResult = FlowCreated | FlowExists
AddResult = Added | AlreadyMember
ApplyResult = Applied | AlreadyApplied
SetPolicyResult = Set | AlreadySet
ResolveResult = Satisfied | Impossible | Pending | AlreadyFired | AlreadyResolved
CancelHeaderResult = FlowCancelled | FlowAlreadyEnded
CancelFlowResult = FlowCancelled | CancellationScheduled | PartiallyCancelled
