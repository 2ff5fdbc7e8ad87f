"""How an execution's record changes.

`Subject` is what an operation locks before it decides: the execution, its
current attempt, any claim grant, and what is open of suspension and waitpoints.
`change` is the only way to make the next version of an execution: it stamps the
times, holds back what waits for its join, puts in what that passed on, and derives
`public_state` and `ready` from the six state dimensions, so the two can never disagree.
"""

from msgspec import Struct, structs

from flowfabric.core.records import Attempt, ClaimGrant, Execution, Suspension, Waitpoint
from flowfabric.core.situations import (
    HELD_BY_JOIN,
    Situation,
    falls_to_join,
    into,
    is_ready,
    takes_payload,
)
from flowfabric.core.states import derive_public_state

Field = str | int | bool | bytes | None

NO_LEASE: dict[str, Field] = {
    "lease_id": None,
    "worker_id": None,
    "worker_instance_id": None,
    "lease_acquired_at_ms": None,
    "lease_expires_at_ms": None,
    "lease_last_renewed_at_ms": None,
    "lease_renewal_deadline_ms": None,
    "lease_expired_at_ms": None,
    "lease_revoked_at_ms": None,
    "lease_revoke_reason": None,
    "attempt_deadline_ms": None,
}
"""What releasing a lease clears. Epoch and attempt id stay: repeats are recognised by them."""

UNBLOCKED: dict[str, Field] = {**into(Situation.WAITING)}
"""Nothing but a worker is missing; or its join, see `readiness`."""


def final_lease(execution: Execution) -> dict[str, Field]:
    """The lease an execution holds, as it is remembered when the execution ends."""
    return {
        "final_lease_id": execution.lease_id,
        "final_worker_id": execution.worker_id,
        "final_worker_instance_id": execution.worker_instance_id,
    }


class Subject(Struct, frozen=True, kw_only=True):
    execution: Execution
    attempt: Attempt | None
    """The row of `current_attempt_index`; none before the first claim."""
    stepped: bool = False
    """Whether a step was stored in it; asked only where its worker has died before."""
    grant: ClaimGrant | None = None
    suspension: Suspension | None = None
    """The open one."""
    waitpoints: tuple[Waitpoint, ...] = ()
    """The open ones, by id."""


def settle(execution: Execution) -> Execution:
    """The same execution with its derived fields brought up to date."""
    if falls_to_join(execution):
        execution = structs.replace(execution, **HELD_BY_JOIN)
    if execution.next_input is not None and takes_payload(execution):
        execution = structs.replace(
            execution,
            input=execution.next_input,
            input_encoding=execution.next_input_encoding,
            next_input=None,
            next_input_encoding=None,
        )
    return structs.replace(
        execution,
        public_state=derive_public_state(
            execution.lifecycle_phase, execution.eligibility_state, execution.terminal_outcome
        ),
        ready=is_ready(execution),
    )


def change(execution: Execution, now_ms: int, **fields: Field) -> Execution:
    """The next version of `execution`."""
    if fields.get("lifecycle_phase", execution.lifecycle_phase) != execution.lifecycle_phase:
        fields["last_transition_at_ms"] = now_ms
    return settle(structs.replace(execution, last_mutation_at_ms=now_ms, **fields))
