"""The suite is about every operation on executions and flows, under its name."""

import inspect
from pathlib import Path

from flowfabric import Engine

HERE = Path(__file__).parent
OPERATIONS = """
    create_execution claim renew progress complete fail cancel delay wait_children
    describe_execution read_execution_context read_current_attempt_index
    read_total_attempt_count read_execution_state read_execution_info get_execution_result
    list_executions list_lanes resolve_execution_flow_id set_execution_tag get_execution_tag
    get_execution_namespace read_exec_core_fields cancel_execution revoke_lease change_priority
    replay_execution renew_lease complete_execution fail_execution claim_execution
    mark_lease_expired_if_due promote_delayed expire_execution trim_retention
    list_expired_leases backend_label capabilities prepare ping shutdown_prepare server_time_ms
    create_flow add_execution_to_flow stage_dependency_edge apply_dependency_to_child
    resolve_dependency set_edge_group_policy evaluate_flow_eligibility cascade_completion
    describe_flow list_flows list_edges describe_edge set_flow_tag get_flow_tag cancel_flow
    cancel_flow_header ack_cancel_member project_flow_summary
    reconcile_sibling_cancel_group
    claim_for_worker issue_claim_grant issue_grant_and_claim issue_reclaim_grant
    reclaim_execution claim_resumed_execution claim_from_resume_grant
    block_execution_for_admission unblock_execution
    register_worker heartbeat_worker mark_worker_dead list_workers
"""


def test_every_operation_exists_and_is_exercised_here() -> None:
    operations = OPERATIONS.split()
    tests = "".join(path.read_text() for path in HERE.glob("test_*.py") if path != Path(__file__))
    assert [name for name in operations if not callable(getattr(Engine, name, None))] == []
    assert [name for name in operations if name not in tests] == []


async def test_operations_are_those_of_the_engines_groups_under_the_same_name(
    engine: Engine,
) -> None:
    operations = {
        name: made
        for name, made in vars(Engine).items()
        if inspect.isfunction(made) and hasattr(made, "__wrapped__")
    }
    assert len(operations) > 150
    for name, made in operations.items():
        group = inspect.getclosurevars(made).nonlocals["group"]
        assert getattr(type(getattr(engine, group)), name) is inspect.unwrap(made)
        assert getattr(engine, name).__doc__ == inspect.unwrap(made).__doc__
