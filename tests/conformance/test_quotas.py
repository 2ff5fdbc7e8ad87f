"""Quota policies, and slots that are taken by hand."""

from collections.abc import Awaitable
from typing import TypedDict

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.gates import (
    AdmissionOutcome,
    Admitted,
    AlreadyAdmitted,
    ConcurrencyExceeded,
    GateName,
    GateOwner,
    RateExceeded,
)
from flowfabric.core.ids import QuotaPolicyId
from flowfabric.core.limits import DeclaredLimit, LimitSource, QuotaSpec
from flowfabric.core.results import AlreadySatisfied
from flowfabric.engine.limits import (
    AdmissionReleased,
    GatePage,
    GateUse,
    PolicyCreated,
    QuotaLimits,
)
from flowfabric.errors import Conflict, InvalidInput, InvalidQuotaSpec, NotFound, Terminal
from flowfabric.testing import SettableClock
from tests.conformance.given import NOBODY, UNKNOWN_ID, Given
from tests.conformance.observed import refused, unchanged

POLICY = QuotaPolicyId("7d9f2c1e-1a1b-4c4d-8e8f-000000000001")
OTHER = "7d9f2c1e-1a1b-4c4d-8e8f-000000000002"


class Numbers(TypedDict, total=False):
    window_seconds: int
    max_requests_per_window: int
    max_concurrent: int
    jitter_ms: int


async def test_a_policy_is_created_once_and_keeps_its_limits(engine: Engine) -> None:
    assert await engine.read_quota_policy_limits(POLICY) is None
    created = await engine.create_quota_policy(
        POLICY, window_seconds=60, max_requests_per_window=100, max_concurrent=5
    )
    assert created == PolicyCreated(quota_policy_id=POLICY)
    again = await engine.create_quota_policy(POLICY, max_concurrent=7)
    assert again == AlreadySatisfied(reason="exists")
    assert await engine.read_quota_policy_limits(POLICY) == QuotaLimits(
        max_requests_per_window=100,
        requests_per_window_seconds=60,
        active_concurrency_cap=5,
        jitter_ms=0,
    )


async def test_a_name_belongs_to_one_policy_of_a_namespace(engine: Engine) -> None:
    await engine.create_quota_policy(POLICY, max_concurrent=1, name="mail")
    with pytest.raises(Conflict, match="mail"):
        await engine.create_quota_policy(OTHER, max_concurrent=1, name="mail")
    await engine.create_quota_policy(OTHER, max_concurrent=1, name="mail", namespace="shop")


async def test_the_namespaces_of_policies_are_found(engine: Engine) -> None:
    await engine.create_quota_policy(POLICY, max_concurrent=1, namespace="shop")

    assert await engine.find_limit_namespaces([POLICY, NOBODY]) == {POLICY: "shop"}
    assert await engine.find_limit_namespaces([]) == {}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "active_concurrency_cap"),
        ({"window_seconds": 60}, "active_concurrency_cap"),
        ({"max_requests_per_window": 5}, "window"),
    ],
)
async def test_a_policy_that_limits_nothing_is_refused(
    engine: Engine, fields: Numbers, named: str
) -> None:
    with pytest.raises(InvalidQuotaSpec, match=named):
        await engine.create_quota_policy(POLICY, **fields)
    assert await engine.read_quota_policy_limits(POLICY) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"window_seconds": -1},
        {"window_seconds": 32 * 24 * 60 * 60},
        {"max_requests_per_window": -1},
        {"max_concurrent": 2**53},
        {"max_concurrent": True},
        {"jitter_ms": -1},
    ],
)
async def test_bad_numbers_are_refused(engine: Engine, fields: Numbers) -> None:
    with pytest.raises(InvalidInput):
        await engine.create_quota_policy(POLICY, **Numbers(max_concurrent=1) | fields)


async def test_a_rate_counts_what_was_admitted_in_the_window_that_ends_now(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await engine.create_quota_policy(POLICY, window_seconds=1, max_requests_per_window=2)
    one, two, three = [await given.waiting() for _ in range(3)]
    assert await engine.check_admission(POLICY, one) == Admitted()
    clock.advance("0.5s")
    assert await engine.check_admission(POLICY, two) == Admitted()
    assert await engine.check_admission(POLICY, three) == RateExceeded(retry_after_ms=500)
    assert await engine.check_admission(POLICY, one) == AlreadyAdmitted()
    clock.advance("0.5s")
    assert await engine.check_admission(POLICY, three) == Admitted()


async def test_jitter_is_added_to_the_wait(engine: Engine, given: Given) -> None:
    await engine.create_quota_policy(
        POLICY, window_seconds=1, max_requests_per_window=1, jitter_ms=50
    )
    await engine.check_admission(POLICY, await given.waiting())
    refusal = await engine.check_admission(POLICY, await given.waiting())
    assert isinstance(refusal, RateExceeded)
    assert 1_000 <= refusal.retry_after_ms <= 1_050


async def test_a_slot_is_held_until_its_execution_ends(engine: Engine, given: Given) -> None:
    await engine.create_quota_policy(POLICY, max_concurrent=2)
    running, cancelled, third = await given.running(), await given.waiting(), await given.waiting()
    assert await engine.check_admission(POLICY, running.execution_id) == Admitted()
    assert await engine.check_admission(POLICY, cancelled) == Admitted()
    assert await engine.check_admission(POLICY, third) == ConcurrencyExceeded()
    await engine.complete(running.handle)
    assert await engine.check_admission(POLICY, third) == Admitted()
    fourth = await given.waiting()
    assert await engine.check_admission(POLICY, fourth) == ConcurrencyExceeded()
    await engine.cancel_execution(cancelled, reason="gone")
    assert await engine.check_admission(POLICY, fourth) == Admitted()


async def test_a_slot_of_an_earlier_life_does_not_count(engine: Engine, given: Given) -> None:
    await engine.create_quota_policy(POLICY, max_concurrent=1)
    claimed = await given.running()
    assert await engine.check_admission(POLICY, claimed.execution_id) == Admitted()
    await engine.fail(claimed.handle, "no")
    await engine.replay_execution(claimed.execution_id)
    other = await given.waiting()
    assert await engine.check_admission(POLICY, other) == Admitted()
    assert await engine.check_admission(POLICY, claimed.execution_id) == ConcurrencyExceeded()


async def test_a_released_slot_is_free_and_releasing_repeats(engine: Engine, given: Given) -> None:
    await engine.create_quota_policy(POLICY, max_concurrent=1)
    one, two = await given.waiting(), await given.waiting()
    assert await engine.release_admission(POLICY, two) == AdmissionReleased()
    await engine.check_admission(POLICY, one)
    assert await engine.release_admission(POLICY, two) == AdmissionReleased()
    assert await engine.check_admission(POLICY, two) == ConcurrencyExceeded()
    for _ in range(2):
        assert await engine.release_admission(POLICY, one) == AdmissionReleased()
    assert await engine.check_admission(POLICY, two) == Admitted()


async def test_each_dimension_is_a_gate_of_its_own(engine: Engine, given: Given) -> None:
    await engine.create_quota_policy(POLICY, max_concurrent=1)
    one, two = await given.waiting(), await given.waiting()
    assert await engine.check_admission(POLICY, one, dimension="ann") == Admitted()
    assert await engine.check_admission(POLICY, two, dimension="bob") == Admitted()
    assert await engine.check_admission(POLICY, two, dimension="ann") == ConcurrencyExceeded()
    page = await engine.list_limit_use(POLICY, limit=1)
    assert page == GatePage(
        gates=(GateUse(key="ann", running=1, started=0, opens_at_ms=None),), next_cursor="ann"
    )
    page = await engine.list_limit_use(POLICY, cursor=page.next_cursor)
    assert [each.key for each in page.gates] == ["bob"]


async def test_the_policy_wins_over_the_limits_of_the_caller(engine: Engine, given: Given) -> None:
    one, two, three = [await given.waiting() for _ in range(3)]

    def ask(execution_id: str) -> Awaitable[AdmissionOutcome]:
        return engine.check_admission(POLICY, execution_id, window_seconds=1, rate_limit=1)

    assert await ask(one) == Admitted()
    assert await ask(two) == RateExceeded(retry_after_ms=1_000)
    await engine.create_quota_policy(POLICY, max_concurrent=2)
    assert await ask(two) == Admitted()
    assert await ask(three) == ConcurrencyExceeded()


async def test_what_is_not_there_is_refused(engine: Engine, given: Given) -> None:
    waiting = await given.waiting()
    with pytest.raises(NotFound, match="quota_policy"):
        await engine.check_admission(POLICY, waiting)
    await engine.create_quota_policy(POLICY, max_concurrent=1)
    with pytest.raises(NotFound, match="execution"):
        await engine.check_admission(POLICY, UNKNOWN_ID)
    ended = await given.running()
    await engine.complete(ended.handle)
    with pytest.raises(Terminal):
        await engine.check_admission(POLICY, ended.execution_id)
    with pytest.raises(NotFound, match="quota_policy"):
        await given.waiting(gates=[GateName(GateOwner.QUOTA, NOBODY)])


async def test_an_execution_under_the_policy_takes_its_slot_when_it_is_claimed(
    engine: Engine, given: Given
) -> None:
    await engine.create_quota_policy(POLICY, max_concurrent=1)
    limited = await given.waiting(gates=[GateName(GateOwner.QUOTA, POLICY)])
    with pytest.raises(InvalidInput, match="submitted under this limit"):
        await engine.check_admission(POLICY, limited)


@pytest.mark.parametrize(
    "gates",
    [
        [GateName(GateOwner.QUOTA, "x")],
        [GateName(GateOwner.QUOTA, POLICY, "\x00")],
        [GateName(GateOwner.QUOTA, POLICY, "k" * 257)],
        ["mail"],
        [GateName(GateOwner.QUOTA, POLICY, str(number)) for number in range(17)],
        "mail",
        None,
    ],
)
async def test_bad_gates_are_refused(engine: Engine, given: Given, gates: object) -> None:
    await engine.create_quota_policy(POLICY, max_concurrent=1)
    async with refused(engine, InvalidInput):
        await given.waiting(gates=gates)


# What programs declare and people change


def mail(active_concurrency_cap: int) -> DeclaredLimit:
    spec = QuotaSpec(active_concurrency_cap=active_concurrency_cap)
    return DeclaredLimit(namespace="default", name="mail", spec=spec)


async def test_what_a_program_declares_counts_until_it_declares_something_else(
    engine: Engine, clock: SettableClock
) -> None:
    (first,) = await engine.declare_limits([mail(active_concurrency_cap=3)])
    assert (first.source, first.active_concurrency_cap) == (LimitSource.CODE, 3)
    clock.advance("1s")
    assert await engine.declare_limits([mail(active_concurrency_cap=3)]) == [first]
    (second,) = await engine.declare_limits([mail(active_concurrency_cap=4)])
    assert second == structs.replace(
        first,
        active_concurrency_cap=4,
        declared=second.declared,
        updated_at_ms=first.updated_at_ms + 1_000,
    )
    assert await engine.read_limit("mail") == second


async def test_what_is_set_at_run_time_wins_until_it_is_reset(engine: Engine) -> None:
    await engine.declare_limits([mail(active_concurrency_cap=3)])
    stored = await engine.set_limit("mail", active_concurrency_cap=9)
    assert (stored.source, stored.active_concurrency_cap) == (LimitSource.STORED, 9)
    (counts,) = await engine.declare_limits([mail(active_concurrency_cap=5)])
    assert (counts.source, counts.active_concurrency_cap) == (LimitSource.STORED, 9)
    assert await engine.read_limit("mail") == counts
    back = await engine.reset_limit("mail")
    assert (back.source, back.active_concurrency_cap) == (LimitSource.CODE, 5)


async def test_a_limit_may_be_set_before_any_program_declares_it(engine: Engine) -> None:
    await engine.set_limit("mail", window_ms=1_000, max_requests_per_window=3)
    (counts,) = await engine.declare_limits([mail(active_concurrency_cap=5)])
    assert (counts.max_requests_per_window, counts.active_concurrency_cap) == (3, 0)
    assert (await engine.reset_limit("mail")).active_concurrency_cap == 5


async def test_a_limit_that_no_program_declares_cannot_be_reset(engine: Engine) -> None:
    await engine.set_limit("mail", active_concurrency_cap=1)
    for name in ("mail", "nobody"):
        with pytest.raises(NotFound, match=name):
            await engine.reset_limit(name)
    with pytest.raises(NotFound, match="nobody"):
        await engine.read_limit("nobody")


async def test_a_limit_that_was_only_set_can_be_removed(engine: Engine) -> None:
    for namespace in ("default", "shop"):
        policy = await engine.set_limit("mail", namespace=namespace, active_concurrency_cap=1)
    assert await engine.remove_limit("mail", namespace="shop") == policy
    assert [each.namespace for each in (await engine.list_limits()).limits] == ["default"]
    with pytest.raises(NotFound, match="mail"):
        await engine.remove_limit("mail", namespace="shop")
    again = await engine.set_limit("mail", namespace="shop", active_concurrency_cap=2)
    assert again.quota_policy_id == policy.quota_policy_id


async def test_a_limit_that_was_declared_is_removed_until_it_is_declared_again(
    engine: Engine,
) -> None:
    (declared,) = await engine.declare_limits([mail(active_concurrency_cap=3)])
    await engine.set_limit("mail", active_concurrency_cap=9)
    assert (await engine.remove_limit("mail")).active_concurrency_cap == 9
    assert (await engine.list_limits()).limits == ()
    with pytest.raises(NotFound, match="mail"):
        await engine.reset_limit("mail")
    (again,) = await engine.declare_limits([mail(active_concurrency_cap=3)])
    assert again.spec == declared.spec


async def test_a_limit_that_work_is_under_cannot_be_removed(engine: Engine, given: Given) -> None:
    policy = await engine.set_limit("mail", active_concurrency_cap=9)
    execution_id = await given.waiting()
    await engine.check_admission(policy.quota_policy_id, execution_id)
    async with unchanged(engine):
        with pytest.raises(Conflict, match=r"^limit 'mail' has runs.* set it without a rate"):
            await engine.remove_limit("mail")


async def test_limits_are_listed_by_namespace_and_name(engine: Engine) -> None:
    for namespace, name in [("shop", "b"), ("default", "z"), ("shop", "a")]:
        await engine.set_limit(name, namespace=namespace, active_concurrency_cap=1)
    page = await engine.list_limits(limit=2)
    assert [(each.namespace, each.name) for each in page.limits] == [
        ("default", "z"),
        ("shop", "a"),
    ]
    page = await engine.list_limits(cursor=page.next_cursor)
    assert [each.name for each in page.limits] == ["b"]
    assert page.next_cursor is None
    page = await engine.list_limits(namespace="shop")
    assert [each.name for each in page.limits] == ["a", "b"]
    with pytest.raises(InvalidInput, match="cursor"):
        await engine.list_limits(cursor="x")
