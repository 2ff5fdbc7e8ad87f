"""The state vector and its one derived label."""

from enum import StrEnum
from itertools import product

import pytest

from flowfabric.core import states
from flowfabric.core.states import (
    TERMINAL_STATES,
    AttemptLifecycle,
    EligibilityState,
    LifecyclePhase,
    PublicState,
    TerminalOutcome,
    derive_public_state,
)

VALUES = {
    "LifecyclePhase": "submitted runnable active suspended terminal",
    "OwnershipState": "unowned leased lease_expired_reclaimable lease_revoked",
    "EligibilityState": """
        eligible_now not_eligible_until_time blocked_by_dependencies blocked_by_budget
        blocked_by_quota blocked_by_route blocked_by_lane_state blocked_by_operator not_applicable
    """,
    "BlockingReason": """
        none waiting_for_worker waiting_for_retry_backoff waiting_for_resume_delay
        waiting_for_delay waiting_for_signal waiting_for_approval waiting_for_callback
        waiting_for_tool_result waiting_for_children waiting_for_budget waiting_for_quota
        waiting_for_capable_worker waiting_for_locality_match paused_by_operator
        paused_by_policy paused_by_flow_cancel waiting_for_code
    """,
    "TerminalOutcome": "none success failed cancelled expired skipped",
    "AttemptState": """
        none pending_first_attempt running_attempt attempt_interrupted pending_retry_attempt
        pending_replay_attempt attempt_terminal
    """,
    "PublicState": """
        waiting delayed rate_limited waiting_children active suspended resumable completed
        failed cancelled expired skipped
    """,
    "AttemptLifecycle": """
        created started suspended ended_success ended_failure ended_cancelled
        interrupted_reclaimed
    """,
    "AttemptType": "initial retry reclaim replay fallback",
    "LaneState": "active paused draining disabled",
    "FailureClass": "transient permanent infra_crash timeout cancelled",
}

BY_ELIGIBILITY = {
    "eligible_now": "waiting",
    "not_eligible_until_time": "delayed",
    "blocked_by_dependencies": "waiting_children",
    "blocked_by_budget": "rate_limited",
    "blocked_by_quota": "rate_limited",
    "blocked_by_route": "waiting",
    "blocked_by_lane_state": "waiting",
    "blocked_by_operator": "waiting",
    "not_applicable": "waiting",
}

BY_OUTCOME = {
    "success": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
    "expired": "expired",
    "skipped": "skipped",
    "none": "failed",
}

EVERY_COMBINATION = list(product(LifecyclePhase, EligibilityState, TerminalOutcome))


@pytest.mark.parametrize("name", VALUES)
def test_a_dimension_has_exactly_these_values_under_upper_case_names(name: str) -> None:
    dimension = getattr(states, name)
    assert issubclass(dimension, StrEnum)
    assert [member.value for member in dimension] == VALUES[name].split()
    assert [member.name for member in dimension] == VALUES[name].upper().split()


@pytest.mark.parametrize(("phase", "eligibility", "outcome"), EVERY_COMBINATION)
def test_every_combination_has_its_public_state(
    phase: LifecyclePhase, eligibility: EligibilityState, outcome: TerminalOutcome
) -> None:
    expected = {
        "submitted": "waiting",
        "runnable": BY_ELIGIBILITY[eligibility],
        "active": "active",
        "suspended": "suspended",
        "terminal": BY_OUTCOME[outcome],
    }
    assert derive_public_state(phase, eligibility, outcome) == expected[phase]


def test_resumable_is_never_derived_and_everything_else_can_be() -> None:
    derived = {derive_public_state(*combination) for combination in EVERY_COMBINATION}
    assert derived == set(PublicState) - {PublicState.RESUMABLE}


def test_the_terminal_states_are_those_of_the_terminal_phase() -> None:
    derived = {
        derive_public_state(phase, eligibility, outcome)
        for phase, eligibility, outcome in EVERY_COMBINATION
        if phase is LifecyclePhase.TERMINAL
    }
    assert derived == TERMINAL_STATES


def test_an_attempt_is_over_once_it_ended_or_was_taken_away() -> None:
    assert [state for state in AttemptLifecycle if not state.is_terminal] == [
        AttemptLifecycle.CREATED,
        AttemptLifecycle.STARTED,
        AttemptLifecycle.SUSPENDED,
    ]
