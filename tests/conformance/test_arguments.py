"""Every argument of every operation: what cannot be meant is refused, and nothing is written.

The values follow from the annotations, so an operation or an argument that is added is
tried here as well: each is given everything its annotation excludes, numbers beyond any
range and text no store takes.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

import pytest
from msgspec import Struct, structs

from flowfabric import Engine, FlowFabricError
from flowfabric.engine.budgets import Budgets
from flowfabric.engine.creation import Creation
from flowfabric.engine.details import Details
from flowfabric.engine.executions import Executions
from flowfabric.engine.flow_operators import FlowReplays
from flowfabric.engine.grants import Grants
from flowfabric.engine.leases import Leases
from flowfabric.engine.operators import Operators
from flowfabric.engine.parking import ParkingOperations
from flowfabric.engine.reads import Reads
from flowfabric.engine.streams import Streams
from flowfabric.engine.sweeps import Sweeps
from flowfabric.engine.tails import Tails
from flowfabric.engine.workers import Workers
from flowfabric.errors import Validation
from tests.conformance.calls import Arguments, valid_calls
from tests.conformance.given import Given
from tests.conformance.observed import call, unchanged

GROUPS = (
    Creation,
    Leases,
    Workers,
    Grants,
    Executions,
    Operators,
    Sweeps,
    ParkingOperations,
    Reads,
    Details,
    FlowReplays,
    Budgets,
    Streams,
    Tails,
)
INTERNAL = {
    "claimed", "complete_opened", "create_checked", "create_checked_on", "find_outcomes",
    "from_store", "open_completions", "read_outcomes", "to_store", "wait_for",
}  # fmt: skip
"""They take what has been checked before, or check it for an operation that is called here."""
ELSEWHERE = {
    "claim_from_resume_grant", "create_executions_on", "enter_fence_on",
    "expire_suspension", "leave_fence_on", "resume_execution",
}  # fmt: skip
"""Pauses and callers' transactions have tests of their own."""

ONE_OF_EACH: tuple[object, ...] = (
    None, False, True, 5, 1.5, "text", b"bytes", [5], {"key": 5}, object(),
)  # fmt: skip
"""False and True equal the numbers 0 and 1, so comparing does not tell them apart."""
NUMBERS_BEYOND = (-1, 2**70)
TEXTS_BEYOND = ("x" * 100_000, "a\x00b", "\ud800")

CLAMPED = {("change_priority", "new_priority"), ("NewExecution", "priority")}
MESSAGES = {
    "cancel", "cancel_execution", "cancel_executions", "cancel_matching", "fail", "fail_execution",
    "hand_back", "hand_back_many", "revoke_lease", "FailureReport",
}  # fmt: skip
"""Their reasons and tracebacks are for people: whatever is said is kept, if need be shortened."""
PARTS = 4
"""Each call needs executions of its own, which take long to make for all of them in one test."""
WITH_RULES_OF_ITS_OWN = {("NewExecution", "policy"), ("Fence", "by_handle")}


def admits(annotation: object, value: object) -> bool:
    """Whether `value` is of the kind the annotation names."""
    kind = get_origin(annotation) or getattr(annotation, "__supertype__", annotation)
    if kind in (Union, UnionType):
        return any(admits(each, value) for each in get_args(annotation))
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind in (Sequence, tuple):
        return isinstance(value, list)
    assert isinstance(kind, type), annotation
    if issubclass(kind, Enum):
        return value in list(kind)
    return isinstance(value, kind)


def wrong_values(owner: str, name: str, annotation: object) -> Iterator[object]:
    yield from (value for value in ONE_OF_EACH if not admits(annotation, value))
    if admits(annotation, 5) and (owner, name) not in CLAMPED:
        yield from NUMBERS_BEYOND
    if admits(annotation, "text") and not (name in ("reason", "traceback") and owner in MESSAGES):
        yield from TEXTS_BEYOND


def public_operations() -> set[str]:
    return (
        {
            name
            for group in GROUPS
            for name, made in vars(group).items()
            if inspect.iscoroutinefunction(made)
            and not name.startswith("_")
            and len(inspect.signature(made).parameters) > 1
        }
        - INTERNAL
        - ELSEWHERE
    )


async def refusal_of(engine: Engine, operation: str, arguments: Arguments) -> object:
    """The error, also of the only item of a batch; None when there is none."""
    try:
        answer = await call(engine, operation, **arguments)
    except FlowFabricError as error:
        return error
    return answer[0] if isinstance(answer, list) and answer else None


async def test_every_argument_of_a_wrong_kind_or_beyond_its_range_is_refused(
    engine: Engine, given: Given
) -> None:
    calls = await valid_calls(given)
    # Replaying is among the flows' operations, which have tests of their own.
    assert public_operations() <= calls.keys()
    accepted = []
    async with unchanged(engine):
        for operation, arguments in calls.items():
            hints = get_type_hints(getattr(Engine, operation))
            del hints["return"]
            assert hints.keys() == arguments.keys(), operation
            for name, annotation in hints.items():
                for value in wrong_values(operation, name, annotation):
                    outcome = await refusal_of(engine, operation, {**arguments, name: value})
                    if not isinstance(outcome, Validation):
                        accepted.append((operation, name, repr(value)[:20], outcome))
        assert accepted == []


@pytest.mark.parametrize("part", range(PARTS))
async def test_every_argument_tried_above_is_accepted_when_it_is_right(
    engine: Engine, given: Given, part: int
) -> None:
    """Otherwise the refusals above would show nothing."""
    for operation in list(await valid_calls(given))[part::PARTS]:
        arguments = (await valid_calls(given))[operation]
        outcome = await refusal_of(engine, operation, arguments)
        assert not isinstance(outcome, FlowFabricError), operation
        await engine.resume_lane("default")


REQUESTS: Mapping[str, tuple[str, str]] = {
    "NewExecution": ("create_execution", "request"),
    "ExecutionFilter": ("find_executions", "matching"),
    "Fence": ("renew_lease", "fence"),
    "Completion": ("complete_many", "completions"),
    "FailureReport": ("fail_many", "reports"),
    "FrameAppend": ("append_frames", "appends"),
    "NewFrame": ("append_frame", "frame"),
    "BudgetDefinition": ("create_budget", "definition"),
    "BudgetUpdate": ("update_budget", "update"),
    "Usage": ("post_to_budgets", "requests"),
    "UsageDimensions": ("report_usage", "usage"),
}


@pytest.mark.parametrize("kind", REQUESTS)
async def test_every_field_of_a_request_of_a_wrong_kind_or_beyond_its_range_is_refused(
    engine: Engine, given: Given, kind: str
) -> None:
    operation, name = REQUESTS[kind]
    arguments = (await valid_calls(given))[operation]
    given_request = arguments[name]
    batch = isinstance(given_request, list)
    request = given_request[0] if isinstance(given_request, list) else given_request
    assert isinstance(request, Struct)
    accepted = []
    async with unchanged(engine):
        for field, annotation in get_type_hints(type(request)).items():
            if (kind, field) in WITH_RULES_OF_ITS_OWN:
                continue
            for value in wrong_values(kind, field, annotation):
                changed = structs.replace(request, **{field: value})
                asked = {**arguments, name: [changed] if batch else changed}
                outcome = await refusal_of(engine, operation, asked)
                if not isinstance(outcome, Validation):
                    accepted.append((field, repr(value)[:20], outcome))
        assert accepted == []
