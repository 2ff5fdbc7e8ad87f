"""Limits are set and declared while somebody removes them."""

from collections.abc import Callable, Coroutine

import pytest

from flowfabric import Engine
from flowfabric.core.limits import DeclaredLimit, QuotaPolicy, QuotaSpec
from tests.races.rival import Rival

Have = Callable[[Engine], Coroutine[object, object, QuotaPolicy]]


async def set_again(engine: Engine) -> QuotaPolicy:
    return await engine.set_limit("mail", active_concurrency_cap=2)


async def declare(engine: Engine) -> QuotaPolicy:
    spec = QuotaSpec(active_concurrency_cap=2)
    (policy,) = await engine.declare_limits(
        [DeclaredLimit(name="mail", namespace="default", spec=spec)]
    )
    return policy


@pytest.mark.parametrize("have", [set_again, declare])
async def test_a_limit_that_is_removed_meanwhile_is_stored_again(
    engine: Engine, rival: Rival, have: Have
) -> None:
    await engine.set_limit("mail", active_concurrency_cap=1)
    async with rival.holding("select 1 from quota_policy for update"):
        (having,) = await rival.queued(have(engine))
        await rival.execute("delete from quota_policy")
    policy = await having
    assert policy.active_concurrency_cap == 2
    assert await engine.read_limit("mail") == policy
