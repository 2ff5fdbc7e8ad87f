"""What operations answer.

Refusals are exceptions (`errors.py`); everything here is a success, including
the ones that found nothing left to do.
"""

from msgspec import Struct

from flowfabric.core.handles import Handle
from flowfabric.core.ids import AttemptId, ExecutionId, FlowId, LaneId, LeaseId, Namespace
from flowfabric.core.states import AttemptType, PublicState


class Created(Struct, frozen=True, kw_only=True, tag=True, gc=False):
    execution_id: ExecutionId
    public_state: PublicState


class Duplicate(Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The idempotency key, or the id itself, was used before; nothing was written."""

    execution_id: ExecutionId


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


class Renewed(Struct, frozen=True, kw_only=True, tag=True):
    expires_at_ms: int
    lease_epoch: int


class Updated(Struct, frozen=True, kw_only=True, tag=True):
    execution_id: ExecutionId


class Completed(Struct, frozen=True, kw_only=True, tag=True, gc=False):
    execution_id: ExecutionId
    public_state: PublicState


class RetryScheduled(Struct, frozen=True, kw_only=True, tag=True):
    execution_id: ExecutionId
    delay_until_ms: int
    next_attempt_index: int


class TerminalFailed(Struct, frozen=True, kw_only=True, tag=True):
    execution_id: ExecutionId


class Delayed(Struct, frozen=True, kw_only=True, tag=True):
    execution_id: ExecutionId
    public_state: PublicState


class Moved(Struct, frozen=True, kw_only=True, tag=True):
    """The execution now waits for its children."""

    execution_id: ExecutionId
    public_state: PublicState


class HandedBack(Struct, frozen=True, kw_only=True, tag=True):
    """The lease was returned; the execution is ready again."""

    execution_id: ExecutionId


class Cancelled(Struct, frozen=True, kw_only=True, tag=True):
    execution_id: ExecutionId
    public_state: PublicState


class Revoked(Struct, frozen=True, kw_only=True, tag=True):
    lease_id: LeaseId
    lease_epoch: int


class AlreadySatisfied(Struct, frozen=True, kw_only=True, tag=True):
    """There was nothing to do; `reason` says why."""

    reason: str


class Changed(Struct, frozen=True, kw_only=True, tag=True):
    execution_id: ExecutionId


class Replayed(Struct, frozen=True, kw_only=True, tag=True):
    public_state: PublicState


class Marked(Struct, frozen=True, kw_only=True, tag=True):
    """Time has done its work: a lease expired, a delay ended, a deadline passed."""

    execution_id: ExecutionId
    public_state: PublicState


FailResult = RetryScheduled | TerminalFailed
CreateResult = Created | Duplicate
RevokeResult = Revoked | AlreadySatisfied
TimerResult = Marked | AlreadySatisfied
