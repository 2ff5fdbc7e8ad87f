"""Work that kills its workers is not handed out without end; what gets on is."""

from collections.abc import Awaitable, Callable

import pytest

from flowfabric import Engine
from flowfabric.core.results import Claimed
from flowfabric.core.states import PublicState
from flowfabric.core.steps import NewStep
from flowfabric.engine.steps import StepReport
from flowfabric.testing import SettableClock
from tests.conformance.given import WORKER, Given
from tests.conformance.observed import call

TTL_MS = 1_000


async def claim(engine: Engine) -> Claimed | None:
    return await engine.claim(**WORKER, lease_ttl_ms=TTL_MS)


async def lose(engine: Engine, clock: SettableClock) -> None:
    """The worker is gone, and its lease runs out."""
    clock.advance(ms=TTL_MS)
    await engine.expire_due_leases()


@pytest.mark.parametrize(("policy", "deaths"), [({}, 3), ({"max_worker_deaths": 1}, 1)])
async def test_work_that_kills_its_workers_fails_and_says_how_often(
    engine: Engine,
    given: Given,
    clock: SettableClock,
    policy: dict[str, object],
    deaths: int,
) -> None:
    execution_id = await given.waiting(policy=policy)
    for _ in range(deaths):
        assert await claim(engine) is not None
        await lose(engine, clock)

    ended = await engine.describe_execution(execution_id)
    assert ended is not None
    assert ended.public_state is PublicState.FAILED
    times = "once" if deaths == 1 else f"{deaths} times"
    assert ended.failure_reason is not None
    assert ended.failure_reason.startswith(f"its worker died {times} in a row")
    assert await claim(engine) is None


async def test_a_lease_that_runs_out_in_an_outage_is_no_death(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting(policy={"max_worker_deaths": 1})
    for _ in range(3):
        assert await claim(engine) is not None
        clock.advance("7s")
        await engine.expire_due_leases(waited_ms=7_000)
    assert await engine.read_execution_state(execution_id) is PublicState.ACTIVE
    assert await claim(engine) is not None
    await lose(engine, clock)
    assert await engine.read_execution_state(execution_id) is PublicState.FAILED


async def test_a_claim_that_an_outage_held_up_is_no_death(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    """The database carries it out as it comes back, for a worker that has given up waiting."""
    execution_id = await given.waiting(policy={"max_worker_deaths": 1})
    assert await claim(engine) is not None
    clock.advance(ms=TTL_MS)
    await engine.expire_due_leases(waited_ms=7_000, calm_ms=TTL_MS)
    assert await engine.read_execution_state(execution_id) is PublicState.ACTIVE
    assert await claim(engine) is not None
    clock.advance(ms=10 * TTL_MS)
    await engine.expire_due_leases(waited_ms=7_000, calm_ms=14 * TTL_MS)
    assert await engine.read_execution_state(execution_id) is PublicState.FAILED


async def test_what_stores_steps_between_deaths_goes_on(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting()
    for number in range(10):
        claimed = await claim(engine)
        assert claimed is not None
        step = NewStep(step_key=f"step-{number}")
        (stored,) = await engine.record_steps([StepReport(handle=claimed.handle, step=step)])
        assert not isinstance(stored, Exception)
        await lose(engine, clock)

    assert await engine.read_execution_state(execution_id) is PublicState.ACTIVE


async def test_what_waits_between_deaths_goes_on(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting()
    for _ in range(4):
        for _ in range(2):
            assert await claim(engine) is not None
            await lose(engine, clock)
        claimed = await claim(engine)
        assert claimed is not None
        await engine.delay(claimed.handle, clock.now_ms() + 10)
        clock.advance(ms=10)
        await engine.promote_due_delays()

    claimed = await claim(engine)
    assert claimed is not None
    assert claimed.execution_id == execution_id


async def test_a_claim_says_whether_the_next_death_fails_the_execution(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await given.waiting()
    told = []
    while (claimed := await claim(engine)) is not None:
        told.append(claimed.last_chance)
        await lose(engine, clock)
    assert told == [False, False, True]


async def test_what_never_began_is_on_its_last_chance_whenever_it_is_claimed_again(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting()
    for _ in range(2):
        assert await claim(engine) is not None
        await lose(engine, clock)
    for _ in range(4):
        claimed = await claim(engine)
        assert claimed is not None
        assert claimed.last_chance
        await engine.delay(claimed.handle, clock.now_ms() + 10, begun=False)
        clock.advance(ms=10)
        await engine.promote_due_delays()
    assert await claim(engine) is not None
    await lose(engine, clock)
    assert await engine.read_execution_state(execution_id) is PublicState.FAILED


async def test_what_gets_on_is_on_its_last_chance_no_longer(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await given.waiting()
    for _ in range(2):
        assert await claim(engine) is not None
        await lose(engine, clock)
    claimed = await claim(engine)
    assert claimed is not None
    step = StepReport(handle=claimed.handle, step=NewStep(step_key="step"))
    await engine.record_steps([step])
    await lose(engine, clock)
    claimed = await claim(engine)
    assert claimed is not None
    assert not claimed.last_chance


async def test_a_worker_that_dies_before_it_begins_a_run_does_not_count(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    """It renews the lease of one on its last chance before it begins it."""
    execution_id = await given.waiting()
    for _ in range(2):
        assert await claim(engine) is not None
        await lose(engine, clock)
    for _ in range(4):
        (claimed,) = await claim_apart(engine)
        assert (claimed.last_chance, claimed.renew_first) == (True, True)
        await lose(engine, clock)
    assert await engine.read_execution_state(execution_id) is PublicState.ACTIVE
    (claimed,) = await claim_apart(engine)
    await engine.renew(claimed.handle)
    await lose(engine, clock)
    assert await engine.read_execution_state(execution_id) is PublicState.FAILED


async def test_what_no_worker_died_over_needs_no_renewal_before_it_begins(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting(policy={"max_worker_deaths": 1})
    (claimed,) = await claim_apart(engine)
    assert not claimed.renew_first
    await lose(engine, clock)
    assert await engine.read_execution_state(execution_id) is PublicState.FAILED


async def claim_apart(engine: Engine) -> list[Claimed]:
    return await engine.claim_many(
        ["default"], limit=10, **WORKER, lease_ttl_ms=TTL_MS, renews_first=True
    )


async def test_what_is_handed_back_or_taken_away_is_no_death(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting()
    for _ in range(5):
        claimed = await claim(engine)
        assert claimed is not None
        await engine.hand_back_many([claimed.handle], reason="the worker stops")
    for _ in range(5):
        assert await claim(engine) is not None
        await engine.revoke_lease(execution_id, reason="it hangs")

    assert await claim(engine) is not None


HOUR_MS = 3_600_000


async def register(engine: Engine, **fields: object) -> None:
    asked: dict[str, object] = {"lane_ids": ["default"], "liveness_ttl_ms": HOUR_MS, **WORKER}
    await call(engine, "register_worker", **asked, **fields)


async def heard_of(engine: Engine, clock: SettableClock) -> None:
    await engine.heartbeat_worker(WORKER["worker_instance_id"])


async def registered_again(engine: Engine, clock: SettableClock) -> None:
    """By the same process, after everybody had forgotten it."""
    await engine.mark_worker_dead(WORKER["worker_instance_id"], revoke_leases=False)
    await register(engine, uptime_ms=clock.now_ms() - BEGAN_MS)


async def restarted(engine: Engine, clock: SettableClock) -> None:
    """The next process has the same name."""
    await register(engine)


async def in_silence(engine: Engine, clock: SettableClock) -> None:
    """It is registered, and was not heard of since."""


BEGAN_MS = SettableClock().now_ms()


@pytest.mark.parametrize(
    ("afterwards", "lives"),
    [(heard_of, True), (registered_again, True), (restarted, False), (in_silence, False)],
)
async def test_a_worker_that_is_heard_of_later_did_not_die(
    engine: Engine,
    given: Given,
    clock: SettableClock,
    afterwards: Callable[[Engine, SettableClock], Awaitable[None]],
    *,
    lives: bool,
) -> None:
    execution_id = await given.waiting()
    await register(engine)
    for _ in range(3):
        assert await claim(engine) is not None
        clock.advance(ms=10)
        await afterwards(engine, clock)
        await lose(engine, clock)
    expected = PublicState.ACTIVE if lives else PublicState.FAILED
    assert await engine.read_execution_state(execution_id) is expected


async def test_a_worker_that_is_heard_of_before_it_claims_again_did_not_die(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    """Others may have taken over by the time it is heard of next."""
    execution_id = await given.waiting()
    await register(engine)
    for _ in range(4):
        claimed = await claim(engine)
        assert claimed is not None
        assert not claimed.last_chance
        await lose(engine, clock)
        clock.advance(ms=10)
        await heard_of(engine, clock)
        clock.advance(ms=10)
    assert await engine.read_execution_state(execution_id) is PublicState.ACTIVE


async def test_a_worker_that_lives_on_does_not_hide_those_that_died(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting()
    await register(engine)
    for survives in (True, False, False, False):
        assert await engine.read_execution_state(execution_id) is not PublicState.FAILED
        if survives:
            assert await claim(engine) is not None
        else:
            claimed = await engine.claim(
                worker_id="other", worker_instance_id=f"other-{clock.now_ms()}", lease_ttl_ms=TTL_MS
            )
            assert claimed is not None
            clock.advance(ms=10)
            await heard_of(engine, clock)
        await lose(engine, clock)
    assert await engine.read_execution_state(execution_id) is PublicState.FAILED


async def test_a_replay_counts_anew(engine: Engine, given: Given, clock: SettableClock) -> None:
    execution_id = await given.waiting()
    for _ in range(3):
        assert await claim(engine) is not None
        await lose(engine, clock)
    await engine.replay_execution(execution_id)
    for _ in range(2):
        assert await claim(engine) is not None
        await lose(engine, clock)

    assert await claim(engine) is not None
