"""Which executions a worker may claim by id."""

import pytest
from msgspec import structs

from flowfabric.core.leases import check_leaseable
from flowfabric.core.records import Execution
from flowfabric.core.states import (
    AttemptState,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.errors import (
    ActiveAttemptExists,
    ExecutionNotActive,
    ExecutionNotLeaseable,
    FlowFabricError,
    LeaseConflict,
)
from tests.unit.lives import waiting

IN_ORDER: list[tuple[dict[str, object], type[FlowFabricError]]] = [
    ({"lifecycle_phase": LifecyclePhase.TERMINAL}, ExecutionNotActive),
    ({"lifecycle_phase": LifecyclePhase.ACTIVE}, ExecutionNotActive),
    ({"lifecycle_phase": LifecyclePhase.SUSPENDED}, ExecutionNotLeaseable),
    ({"lifecycle_phase": LifecyclePhase.SUBMITTED}, ExecutionNotLeaseable),
    ({"ownership_state": OwnershipState.LEASED}, LeaseConflict),
    ({"eligibility_state": EligibilityState.BLOCKED_BY_BUDGET}, ExecutionNotLeaseable),
    ({"terminal_outcome": TerminalOutcome.FAILED}, ExecutionNotLeaseable),
    ({"cancel_requested": True}, ExecutionNotLeaseable),
    ({"attempt_state": AttemptState.RUNNING_ATTEMPT}, ActiveAttemptExists),
]
"""What stands in the way of a claim, the first to be told first."""


def spoilt(*reasons: dict[str, object]) -> Execution:
    execution = waiting().execution
    for fields in reasons:
        execution = structs.replace(execution, **fields)
    return execution


def test_what_waits_for_a_worker_may_be_claimed() -> None:
    check_leaseable(waiting().execution)


@pytest.mark.parametrize(("fields", "error"), IN_ORDER, ids=str)
def test_anything_else_is_refused(fields: dict[str, object], error: type[FlowFabricError]) -> None:
    with pytest.raises(error):
        check_leaseable(spoilt(fields))


@pytest.mark.parametrize("place", range(len(IN_ORDER)))
def test_the_first_reason_is_the_one_told(place: int) -> None:
    fields, error = IN_ORDER[place]
    later = [each for each, _ in IN_ORDER[place + 1 :] if not each.keys() & fields.keys()]
    with pytest.raises(error):
        check_leaseable(spoilt(*later, fields))
