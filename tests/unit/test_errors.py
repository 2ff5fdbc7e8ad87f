"""The error tree: codes, classes, statuses, messages."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowfabric
from flowfabric import errors
from flowfabric.errors import (
    AccessDenied,
    BackendErrorKind,
    Bug,
    CapabilityMismatch,
    Conflict,
    Contention,
    DependencyAlreadyExists,
    ErrorClass,
    ExecutionNotActive,
    FlowFabricError,
    InvalidInput,
    NotFound,
    OperationTimeout,
    PayloadTooLarge,
    ResourceExhausted,
    SchemaTooNew,
    SchemaTooOld,
    StateConflict,
    Transport,
    Unavailable,
    Validation,
)

ALL = [
    member
    for name, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, FlowFabricError) and not name.startswith("_")
]

CODES_BY_FAMILY: dict[type[FlowFabricError], str] = {
    Validation: """
        invalid_input capability_mismatch invalid_capabilities invalid_policy_json
        invalid_blocking_reason payload_too_large not_in_a_step not_awaited
        signal_limit_exceeded kept_signals_full wrong_signal_name invalid_waitpoint_key
        invalid_token missing_token token_expired
        not_storable invalid_lease_for_suspend invalid_dependency
        invalid_waitpoint_for_execution invalid_kid invalid_secret_hex invalid_grace_ms
        corruption handle_from_other_backend invalid_handle retention_limit_exceeded
        invalid_budget_scope invalid_quota_spec
    """,
    Contention: """
        use_claim_resumed_execution not_a_resumed_execution execution_not_leaseable
        lease_conflict invalid_claim_grant claim_grant_expired lane_paused waitpoint_not_found
        rate_limit_exceeded concurrency_limit_exceeded
        stale_graph_revision execution_not_active execution_not_eligible no_active_lease
        retry_exhausted key_undecided lock_timeout
    """,
    Conflict: """
        idempotency_conflict dependency_already_exists cycle_detected self_referencing_edge
        execution_already_in_flow waitpoint_already_exists rotation_conflict
        active_attempt_exists budget_exists
    """,
    StateConflict: """
        lane_not_accepting stale_lease lease_expired lease_revoked target_not_signalable
        execution_not_terminal max_replays_exhausted execution_not_in_flow flow_already_terminal
        terminal execution_not_suspended already_suspended waitpoint_closed
        grant_already_exists waitpoint_not_open waitpoint_not_pending pending_waitpoint_expired
        stream_closed stale_owner_cannot_append budget_exceeded
    """,
}

INFORMATIONAL = """
    execution_not_suspended already_suspended waitpoint_closed
    grant_already_exists waitpoint_not_open waitpoint_not_pending pending_waitpoint_expired
    execution_not_eligible no_active_lease waitpoint_already_exists
"""

CLASS_EXCEPTIONS = {
    **dict.fromkeys(INFORMATIONAL.split(), ErrorClass.INFORMATIONAL),
    "execution_not_active": ErrorClass.TERMINAL,
    "active_attempt_exists": ErrorClass.BUG,
    "budget_exceeded": ErrorClass.COOPERATIVE,
}

STATUS_EXCEPTIONS = {
    "rate_limit_exceeded": 429,
    "concurrency_limit_exceeded": 429,
    "retry_exhausted": 503,
    "unauthorized": 401,
    "lock_timeout": 503,
    "file_locked": 503,
    "corruption": 500,
}


def family_of(error: type[FlowFabricError]) -> type[FlowFabricError]:
    return next(base for base in reversed(error.__mro__[:-1]) if FlowFabricError in base.__bases__)


def kinds_of(family: type[FlowFabricError]) -> list[type[FlowFabricError]]:
    return [error for error in ALL if issubclass(error, family) and error is not family]


@pytest.mark.parametrize("family", CODES_BY_FAMILY, ids=lambda family: family.__name__)
def test_each_family_has_exactly_its_kinds(family: type[FlowFabricError]) -> None:
    assert {kind.code for kind in kinds_of(family)} == set(CODES_BY_FAMILY[family].split())


def test_every_error_of_the_package_is_on_the_one_page() -> None:
    for module in pkgutil.walk_packages(flowfabric.__path__, "flowfabric."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    defined = [FlowFabricError]
    for error in defined:
        defined += error.__subclasses__()
    elsewhere = {
        f"{error.__module__}.{error.__name__}"
        for error in defined
        if error.__module__.startswith("flowfabric.")
        and error.__module__ not in ("flowfabric.errors", "flowfabric.errors")
    }
    assert elsewhere == set()


def test_no_two_errors_share_a_code() -> None:
    assert len({error.code for error in ALL}) == len(ALL)


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_every_error_explains_itself_in_one_line_or_more(error: type[FlowFabricError]) -> None:
    assert error.__doc__
    assert error.__doc__.partition("\n")[0].rstrip().endswith((".", "…"))


@pytest.mark.parametrize(
    ("family", "error_class", "http_status"),
    [
        (NotFound, ErrorClass.TERMINAL, 404),
        (Validation, ErrorClass.TERMINAL, 400),
        (Contention, ErrorClass.RETRYABLE, 409),
        (Conflict, ErrorClass.TERMINAL, 409),
        (StateConflict, ErrorClass.TERMINAL, 409),
        (Bug, ErrorClass.BUG, 500),
        (Transport, ErrorClass.TERMINAL, 500),
        (AccessDenied, ErrorClass.TERMINAL, 403),
        (Unavailable, ErrorClass.TERMINAL, 503),
        (ResourceExhausted, ErrorClass.RETRYABLE, 429),
        (OperationTimeout, ErrorClass.TERMINAL, 504),
    ],
)
def test_a_family_sets_class_and_status_for_its_kinds_unless_they_say_otherwise(
    family: type[FlowFabricError], error_class: ErrorClass, http_status: int
) -> None:
    for error in [family, *kinds_of(family)]:
        assert family_of(error) is family
        assert error.error_class is CLASS_EXCEPTIONS.get(error.code, error_class)
        assert error.http_status == STATUS_EXCEPTIONS.get(error.code, http_status)


@pytest.mark.parametrize("error_class", ErrorClass)
def test_only_the_retryable_class_is_retryable(error_class: ErrorClass) -> None:
    error = Contention("busy")
    error.error_class = error_class
    assert error.retryable is (error_class is ErrorClass.RETRYABLE)


def test_a_capability_mismatch_is_not_retryable_for_the_same_execution() -> None:
    error = CapabilityMismatch(("cuda", "gpu"))
    assert (error.detail, error.missing, error.retryable) == ("cuda,gpu", ("cuda", "gpu"), False)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NotFound("execution", "e1"), "execution not found: e1"),
        (
            InvalidInput("priority", "must be an integer", "x"),
            "priority: must be an integer (got 'x')",
        ),
        (InvalidInput("fence", "is required"), "fence: is required"),
        (InvalidInput("key", "must be a string", None), "key: must be a string (got None)"),
        (PayloadTooLarge("input", 10, 11), "input: 11 bytes, at most 10 allowed"),
        (Transport("postgres", "gone"), "transport (postgres): gone"),
        (Unavailable("subscribe"), "subscribe is unavailable"),
        (Unavailable("subscribe", "closing"), "subscribe: closing"),
        (ResourceExhausted("streams", 8), "streams: all 8 are in use"),
        (ResourceExhausted("streams", 8, 50), "streams: all 8 are in use; retry after 50 ms"),
        (OperationTimeout("claim", 1500), "claim timed out after 1.5 s"),
        (OperationTimeout("claim", 9, "It sleeps."), "claim timed out after 9 ms: It sleeps."),
        (Conflict("two of them"), "two of them"),
        (Conflict(), "The request contradicts something that already exists."),
        (
            ExecutionNotActive(
                "e1",
                lifecycle_phase="terminal",
                terminal_outcome="success",
                lease_epoch=7,
                attempt_id="a1",
            ),
            "execution e1 is terminal (outcome success, lease epoch 7)",
        ),
        (
            SchemaTooOld(3, 5),
            "schema: the database is at version 3, this package needs 5; run: flowfabric migrate"
            " --app module:app (or set FLOWFABRIC_URL, and run: flowfabric migrate)",
        ),
        (
            SchemaTooNew(5, 3),
            "schema: the database is at version 5, this package knows only 3;"
            " upgrade the flowfabric package",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_message_is_for_people(error: FlowFabricError, message: str) -> None:
    assert (str(error), error.detail) == (message, message)


def test_the_attributes_are_for_programs() -> None:
    error = ExecutionNotActive(
        "e1", lifecycle_phase="runnable", terminal_outcome="none", lease_epoch=2, attempt_id=None
    )
    assert vars(error) == {
        "detail": str(error),
        "execution_id": "e1",
        "lifecycle_phase": "runnable",
        "terminal_outcome": "none",
        "lease_epoch": 2,
        "attempt_id": None,
        "reason": "",
    }
    assert DependencyAlreadyExists("differs", existing="edge").existing == "edge"


def test_a_missing_stream_is_expected_and_anything_else_missing_is_not() -> None:
    assert NotFound("stream", "s").error_class is ErrorClass.EXPECTED
    assert NotFound("flow", "f").error_class is ErrorClass.TERMINAL


@given(value=st.text() | st.binary() | st.integers() | st.lists(st.integers()) | st.none())
def test_a_value_never_takes_more_than_eighty_characters_of_a_message(value: object) -> None:
    error = InvalidInput("field", "is wrong", value)
    assert len(str(error)) <= len("field: is wrong (got )") + 80
    assert error.value == value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        pytest.param("a" * 78, repr("a" * 78), id="just fits"),
        pytest.param("a" * 79, "'" + "a" * 78 + "…", id="one too long"),
        pytest.param("a" * 1_000_000, "'" + "a" * 78 + "…", id="huge"),
        pytest.param(10**5000, "<int>", id="a number Python refuses to print"),
    ],
)
def test_long_values_are_abbreviated(value: object, shown: str) -> None:
    assert str(InvalidInput("f", "p", value)) == f"f: p (got {shown})"


@pytest.mark.parametrize(
    ("kind", "text", "retryable"),
    [
        (BackendErrorKind.TRANSPORT, "transport", True),
        (BackendErrorKind.PROTOCOL, "protocol", False),
        (BackendErrorKind.TIMEOUT, "timeout", True),
        (BackendErrorKind.AUTH, "auth", False),
        (BackendErrorKind.CLUSTER, "cluster", True),
        (BackendErrorKind.BUSY_LOADING, "busy_loading", True),
        (BackendErrorKind.OTHER, "other", False),
    ],
)
def test_a_transport_error_is_retryable_if_its_kind_is(
    kind: BackendErrorKind, text: str, retryable: bool
) -> None:
    error = Transport("postgres", "lost", kind=kind)
    assert (error.kind, str(kind), error.retryable) == (kind, text, retryable)


def test_every_error_that_the_documentation_names_can_be_imported_from_the_package() -> None:
    pages = (Path(__file__).parents[2] / "docs").glob("*.md")
    named = {name for page in pages for name in re.findall(r"`([A-Z]\w+)`", page.read_text())}
    public = {name for name in named if hasattr(errors, name)} - {"ErrorClass"}
    assert "BudgetExceeded" in public
    assert public <= set(flowfabric.__all__)
