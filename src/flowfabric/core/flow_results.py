"""What the operations on flows answer."""

from enum import StrEnum

from msgspec import Struct

from flowfabric.core.flow_records import CancellationPolicy
from flowfabric.core.ids import EdgeId, ExecutionId, FlowId


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


class Resolved(Struct, frozen=True, kw_only=True):
    data_injected: bool = False
    """The downstream's payload was replaced by a passed result."""
    child_skipped: bool = False


class Satisfied(Resolved, frozen=True, kw_only=True, tag=True):
    """This edge fired the group, and the downstream may run."""


class Impossible(Resolved, frozen=True, kw_only=True, tag=True):
    """This edge fired the group, and the downstream can never run."""


class Pending(Resolved, frozen=True, kw_only=True, tag=True):
    """Counted; the group still waits for others."""


class AlreadyFired(Resolved, frozen=True, kw_only=True, tag=True):
    """Counted; the group had fired before."""


class AlreadyResolved(Resolved, frozen=True, kw_only=True, tag=True):
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
    """Members the cancellation takes along, as many as are shown."""
    member_count: int


class FlowAlreadyEnded(Struct, frozen=True, kw_only=True, tag="AlreadyTerminal"):
    stored_cancellation_policy: CancellationPolicy | None
    stored_cancel_reason: str | None
    member_execution_ids: tuple[ExecutionId, ...]
    """Members cancelled since the flow was, and those about to be, as many as are shown."""
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
