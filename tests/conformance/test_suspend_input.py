"""What a suspend refuses before it looks at the execution, and what it never shows."""

import pytest

from flowfabric import Engine
from flowfabric.core.bounds import WAITPOINTS_PER_SUSPENSION_MAX
from flowfabric.core.conditions import (
    AllConditions,
    ByName,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    Wildcard,
)
from flowfabric.core.resumption import ResumePolicy
from flowfabric.core.waitpoints import FreshWaitpoint, UsePending
from flowfabric.errors import AlreadySuspended, InvalidInput
from tests.conditions import all_of_waitpoints
from tests.conformance.given import Given
from tests.conformance.observed import call, refused, refuses, unchanged
from tests.conformance.pausing import APPROVED, new_id, paused

DEEP = all_of_waitpoints(["gate"])
for _ in range(3):
    DEEP = AllConditions((DEEP,))
"""As deep as a condition may be."""

# Bad input ----------------------------------------------------------------------

FRESH = FreshWaitpoint(waitpoint_key="gate")
SAME_ID = new_id()
PENDING = UsePending(waitpoint_id=SAME_ID)


@pytest.mark.parametrize(
    ("condition", "waitpoints", "problem"),
    [
        (APPROVED, [], "waitpoints_empty: leave it out to get one for each key of the condition"),
        (Single("other"), [FRESH], "waitpoint_key_mismatch: the condition waits at 'other'"),
        (
            all_of_waitpoints(["gate", "b"]),
            [FRESH, FreshWaitpoint(waitpoint_key="")],
            "additional_waitpoint_binding_empty_key at waitpoints[1]: name it",
        ),
        (
            all_of_waitpoints(["gate", "b"]),
            [FreshWaitpoint(waitpoint_key="gate", waitpoint_id=SAME_ID), PENDING],
            "duplicate_waitpoint_id: each must occur once",
        ),
        (APPROVED, [PENDING, PENDING], "duplicate_waitpoint_id: each must occur once"),
        (
            all_of_waitpoints(["gate", "b"]),
            [FRESH],
            "referenced_waitpoint_key_missing_binding: b",
        ),
        (
            all_of_waitpoints(["gate"]),
            [FRESH, FreshWaitpoint(waitpoint_key="b")],
            "extra_binding_not_referenced_by_condition: b",
        ),
        (
            OperatorOnly(),
            [FRESH, FreshWaitpoint(waitpoint_key="b")],
            "extra_binding_not_referenced_by_condition: b",
        ),
        (
            all_of_waitpoints(["gate", "b"]),
            [
                FreshWaitpoint(waitpoint_key="gate", waitpoint_id=SAME_ID),
                FreshWaitpoint(waitpoint_key="b", waitpoint_id=SAME_ID),
            ],
            "duplicate_waitpoint_id: each must occur once",
        ),
        (
            APPROVED,
            [FRESH, FRESH],
            "duplicate_waitpoint_key: only waitpoints made beforehand share a key",
        ),
        (APPROVED, "gate", "must be a list of bindings"),
        (APPROVED, 7, "must be a list of bindings"),
        (APPROVED, ["gate"], "must be FreshWaitpoint or UsePending"),
        (
            APPROVED,
            [FRESH] * (WAITPOINTS_PER_SUSPENSION_MAX + 1),
            f"must be at most {WAITPOINTS_PER_SUSPENSION_MAX}",
        ),
    ],
)
async def test_bindings_that_do_not_fit_the_condition_are_refused(
    engine: Engine, given: Given, condition: Condition, waitpoints: object, problem: str
) -> None:
    claimed = await given.running()
    async with refused(engine, InvalidInput) as caught:
        await call(
            engine, "suspend", claimed.handle, resume_condition=condition, waitpoints=waitpoints
        )
    assert (caught.value.field, caught.value.problem) == ("waitpoints", problem)


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        (Single("gate", ByName("")), "empty signal name (use Wildcard instead)"),
        (
            AllConditions((DEEP,)),
            "depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]",
        ),
        (AllConditions(()), "allof_empty_members at path <root>: give at least one"),
        (
            AllConditions((AllConditions(()),)),
            "allof_empty_members at path members[0]: give at least one",
        ),
        (
            Count(0, CountKind.DISTINCT_SIGNALS, ("gate",)),
            "count_n_zero at path <root>: must be at least 1",
        ),
        (
            Count(1, CountKind.DISTINCT_SIGNALS, ()),
            "count_waitpoints_empty at path <root>: name at least one",
        ),
        (
            Count(3, CountKind.DISTINCT_WAITPOINTS, ("gate", "b")),
            "count_exceeds_waitpoint_set: needs signals at 3 different waitpoints of 'gate', 'b',"
            " and only 2 exist; create the others first",
        ),
        (
            Count(1, CountKind.DISTINCT_WAITPOINTS, ("gate", "gate")),
            "count_duplicate_waitpoints at path <root>: name each once",
        ),
        (
            AllConditions((APPROVED, OperatorOnly())),
            "unsatisfiable: no signal can meet the member at path members[1]",
        ),
        (
            AllConditions((Single("gate", ByName("")),)),
            "empty signal name (use Wildcard instead) at path members[0]",
        ),
        (AllConditions((APPROVED,) * 256), "has more than 256 nodes"),
        ("OperatorOnly", "must be a condition"),
    ],
)
async def test_conditions_nothing_could_meet_are_refused(
    engine: Engine, given: Given, condition: object, problem: str
) -> None:
    claimed = await given.running()
    async with refused(engine, InvalidInput) as caught:
        await call(engine, "suspend", claimed.handle, resume_condition=condition)
    assert (caught.value.field, caught.value.problem) == ("resume_condition", problem)


@pytest.mark.parametrize(
    "condition",
    [
        DEEP,
        Count(9, CountKind.DISTINCT_SIGNALS, ("gate",)),
        Count(9, CountKind.DISTINCT_SOURCES, ("gate",)),
        AllConditions(
            (AllConditions((AllConditions((Count(1, CountKind.DISTINCT_SIGNALS, ("gate",)),)),)),)
        ),
        Single("gate", Wildcard()),
        OperatorOnly(),
    ],
)
async def test_conditions_at_the_limits_are_accepted(given: Given, condition: Condition) -> None:
    await paused(given, condition)


async def test_every_other_field_is_checked(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    bad: list[tuple[str, dict[str, object]]] = [
        ("suspension_id", {"suspension_id": "mine"}),
        ("resume_policy", {"resume_policy": "fast"}),
        (
            "resume_policy.resume_delay_ms",
            {"resume_policy": ResumePolicy(resume_delay_ms=-1)},
        ),
        ("reason_code", {"reason_code": "tired"}),
        ("requested_by", {"requested_by": "me"}),
        ("timeout_at_ms", {"timeout_at_ms": -1}),
        ("timeout_at_ms", {"timeout_at_ms": "soon"}),
        ("timeout_behavior", {"timeout_behavior": "explode"}),
        ("continuation_metadata_pointer", {"continuation_metadata_pointer": "x" * 65_537}),
        ("idempotency_key", {"idempotency_key": "x" * 513}),
        ("waitpoint_key", {"waitpoints": [FreshWaitpoint(waitpoint_key="x" * 257)]}),
        ("waitpoint_id", {"waitpoints": [FreshWaitpoint(waitpoint_id="x")]}),
    ]
    async with unchanged(engine):
        for field, arguments in bad:
            asked = {"resume_condition": OperatorOnly()} | arguments
            await refuses(engine, field, "suspend", claimed.handle, **asked)
        await refuses(
            engine, "timeout_at_ms", "suspend", claimed.handle, resume_condition=TimeoutOnly()
        )
        await refuses(
            engine,
            "fence",
            "suspend_by_triple",
            claimed.execution_id,
            fence=None,
            resume_condition=APPROVED,
        )


async def test_an_empty_idempotency_key_is_none(engine: Engine, given: Given) -> None:
    pause = await paused(given, idempotency_key="")
    with pytest.raises(AlreadySuspended):
        await engine.suspend(pause.claimed.handle, resume_condition=APPROVED, idempotency_key="")


async def test_a_condition_is_refused_before_the_handle_is_looked_at(engine: Engine) -> None:
    with pytest.raises(InvalidInput) as caught:
        await engine.suspend(b"garbage", resume_condition=TimeoutOnly())
    assert caught.value.problem.startswith("timeout_only_without_deadline: without a timeout")


async def test_a_handle_that_ended_with_its_suspension_is_told_so_first(
    engine: Engine, given: Given
) -> None:
    pause = await paused(given, idempotency_key="once")
    for condition, key in ((APPROVED, None), (APPROVED, "once"), (TimeoutOnly(), None)):
        async with refused(engine, AlreadySuspended):
            await engine.suspend(pause.handle, resume_condition=condition, idempotency_key=key)


async def test_nothing_a_suspender_is_given_shows_its_tokens(given: Given) -> None:
    pause = await paused(given, all_of_waitpoints(["a", "b"]))
    secret = pause.token.reveal().partition(":")[2]
    for shown in (repr(pause.details), str(pause.token), f"{pause.token}", repr([pause.token])):
        assert secret not in shown
    assert repr(pause.token) == "k1:<REDACTED:len=64>"
