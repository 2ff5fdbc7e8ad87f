"""What a change always does: stamps, the public state, and whether it is ready."""

import pytest
from msgspec import structs

from flowfabric.core.decisions import change, with_derived
from flowfabric.core.situations import is_ready
from flowfabric.core.states import LifecyclePhase, PublicState
from tests.unit.lives import LIVES, NOW_MS, Life, name_of, vector, waiting

NOW = "runnable unowned eligible_now waiting_for_worker"
UNTIL_TIME = "runnable unowned not_eligible_until_time"
ENDED = "terminal unowned not_applicable none"
VECTORS = {
    "waiting": f"{NOW} none pending_first_attempt waiting",
    "delayed": f"{UNTIL_TIME} waiting_for_delay none pending_first_attempt delayed",
    "running": "active leased not_applicable none none running_attempt active",
    "retrying": f"{UNTIL_TIME} waiting_for_retry_backoff none pending_retry_attempt delayed",
    "parked": f"{UNTIL_TIME} waiting_for_delay none attempt_interrupted delayed",
    "resumable": f"{NOW} none attempt_interrupted waiting",
    "suspended": (
        "suspended unowned not_applicable waiting_for_signal none attempt_interrupted suspended"
    ),
    "waiting_children": (
        "runnable unowned blocked_by_dependencies waiting_for_children none attempt_interrupted"
        " waiting_children"
    ),
    "expired_lease": (
        "active lease_expired_reclaimable not_applicable waiting_for_worker none"
        " attempt_interrupted active"
    ),
    "revoked": (
        "active lease_revoked not_applicable waiting_for_worker none attempt_interrupted active"
    ),
    "completed": f"{ENDED} success attempt_terminal completed",
    "failed": f"{ENDED} failed attempt_terminal failed",
    "cancelled": f"{ENDED} cancelled pending_first_attempt cancelled",
    "expired": f"{ENDED} expired pending_first_attempt expired",
    "replayed": f"{NOW} none pending_replay_attempt waiting",
}
READY = {"waiting", "resumable", "expired_lease", "revoked", "replayed"}


@pytest.mark.parametrize("life", LIVES, ids=name_of)
def test_each_transition_leaves_its_state_vector(life: Life) -> None:
    execution = life().execution
    assert vector(execution) == VECTORS[life.__name__]
    assert execution.ready == (life.__name__ in READY)


def test_a_change_stamps_mutations_always_and_transitions_when_the_phase_changes() -> None:
    execution = waiting().execution
    same_phase = change(execution, NOW_MS + 1, priority=3, lifecycle_phase=LifecyclePhase.RUNNABLE)
    assert same_phase == structs.replace(execution, priority=3, last_mutation_at_ms=NOW_MS + 1)
    moved = change(execution, NOW_MS + 2, lifecycle_phase=LifecyclePhase.SUSPENDED)
    assert moved == structs.replace(
        execution,
        lifecycle_phase=LifecyclePhase.SUSPENDED,
        public_state=PublicState.SUSPENDED,
        ready=False,
        last_transition_at_ms=NOW_MS + 2,
        last_mutation_at_ms=NOW_MS + 2,
    )


@pytest.mark.parametrize("life", LIVES, ids=name_of)
def test_settling_what_is_settled_changes_nothing(life: Life) -> None:
    execution = life().execution
    assert with_derived(execution) == execution
    assert is_ready(execution) == execution.ready
