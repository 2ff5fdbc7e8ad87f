"""Why an execution is not running."""

import json

from flowfabric import Engine
from flowfabric.core.diagnosis import Cause, Explanation
from flowfabric.core.states import PublicState
from flowfabric.engine.reads import QUEUE_COUNT_MAX
from flowfabric.errors import NotFound
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, Given, new
from tests.conformance.observed import execution_of, refused, unchanged


async def present(
    engine: Engine,
    lanes: str = '["default"]',
    kinds: str | None = None,
    capabilities: str = "[]",
    name: str = "w-1",
) -> None:
    """A worker that is there."""

    await engine.register_worker(
        json.loads(lanes),
        worker_id="w",
        worker_instance_id=name,
        liveness_ttl_ms=60_000,
        kinds=None if kinds is None else json.loads(kinds),
        capabilities=json.loads(capabilities),
    )


async def why(engine: Engine, execution_id: str) -> tuple[Cause, str]:
    explanation = await engine.explain_execution(execution_id)
    return explanation.cause, explanation.sentence


async def test_a_queued_execution_knows_how_many_go_first(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await present(engine)
    await given.waiting(priority=5)
    await given.waiting(execution_kind="other", priority=9)
    execution_id = await given.waiting(priority=1)
    await given.waiting(priority=0)
    assert await engine.explain_execution(execution_id) == Explanation(
        execution_id=execution_id,
        public_state=PublicState.WAITING,
        cause=Cause.QUEUED,
        sentence="It is next in line after 1 other of its kind.",
        detail={
            "lane_id": "default",
            "execution_kind": "work",
            "required_capabilities": "",
            "ahead": 1,
        },
    )


async def test_of_one_millisecond_the_earlier_uuid_goes_first(engine: Engine, given: Given) -> None:
    """Whatever the partition, which says nothing about who came first."""
    await present(engine)
    uuids = [f"00000000-0000-4000-8000-00000000000{digit}" for digit in (1, 2, 3)]
    ids = [f"{{fp:{fp}}}:{uuid}" for fp, uuid in zip((86, 9, 120), uuids, strict=True)]
    for execution_id in reversed(ids):
        await given.waiting(execution_id=execution_id)
    ahead = [(await engine.explain_execution(each)).detail["ahead"] for each in ids]
    assert ahead == [0, 1, 2]
    assert [(await given.taken()).execution_id for _ in range(3)] == ids


async def test_a_long_queue_is_many(engine: Engine, given: Given, clock: SettableClock) -> None:
    await present(engine)
    await engine.create_executions([new()] * 999)
    clock.advance(ms=1)
    last = [await given.waiting() for _ in range(3)]
    assert QUEUE_COUNT_MAX == 1_000
    await engine.change_priority(last[0], 1)
    await engine.change_priority(last[1], 1)
    explanation = await engine.explain_execution(last[2])
    assert explanation.detail["ahead"] is None
    assert explanation.sentence == "It is next in line after many others of its kind."


async def test_an_execution_nobody_asks_for_says_what_it_needs(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["gpu", "cuda"]}}
    execution_id = await given.waiting(policy=policy)
    await present(engine, lanes='["other"]', capabilities='["cuda","gpu"]', name="wrong-lane")
    await present(engine, kinds='["other"]', capabilities='["cuda","gpu"]', name="wrong-kind")
    await present(engine, capabilities='["gpu"]', name="not-able")
    assert await engine.explain_execution(execution_id) == Explanation(
        execution_id=execution_id,
        public_state=PublicState.WAITING,
        cause=Cause.NO_WORKER,
        sentence=(
            "No running worker has a task 'work' in lane 'default' with capabilities"
            " cuda, gpu: start one that does (flowfabric worker module:app --capability cuda"
            " --capability gpu)."
        ),
        needs_somebody=True,
        detail={
            "lane_id": "default",
            "execution_kind": "work",
            "required_capabilities": "cuda,gpu",
            "ahead": 0,
        },
    )
    await present(engine, capabilities='["gpu","cuda"]', kinds='["work"]', name="able")
    assert (await why(engine, execution_id))[0] is Cause.QUEUED
    clock.advance("1m")
    assert (await why(engine, execution_id))[0] is Cause.NO_WORKER


async def test_every_situation_is_explained(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await present(engine)
    running = await given.running()
    delayed = await given.delayed(by_ms=1_500)
    retrying = await given.retrying()
    children = await given.waiting_children()
    awaiting = await execution_of(engine, children.execution_id)
    completed, failed = await given.completed(), await given.failed("no disk")
    cancelled = await given.cancelled("not needed")
    until_ms = clock.now_ms() + 1_500
    retry_ms = clock.now_ms() + 5_000
    sentences = {
        running.execution_id: (
            Cause.RUNNING,
            "It is running: try 1 on worker worker-1-instance.",
        ),
        delayed: (Cause.DELAYED, "It waits 1.5s more (delay)."),
        retrying.execution_id: (
            Cause.DELAYED,
            "It waits 5.0s more (retry backoff). Try 1 failed: try again.",
        ),
        children.execution_id: (
            Cause.BLOCKED,
            f"It is {awaiting.blocking_detail}.",
        ),
        completed.execution_id: (Cause.ENDED, "It completed."),
        failed.execution_id: (Cause.ENDED, "It failed: no disk."),
        cancelled: (Cause.ENDED, "It was cancelled: not needed."),
    }
    async with unchanged(engine):
        for execution_id, expected in sentences.items():
            assert await why(engine, execution_id) == expected
    details = {each: (await engine.explain_execution(each)).detail for each in sentences}
    assert list(details.values()) == [
        {
            "worker_instance_id": "worker-1-instance",
            "lease_expires_at_ms": running.lease_expires_at_ms,
        },
        {"delay_until_ms": until_ms, "blocking_reason": "waiting_for_delay"},
        {"delay_until_ms": retry_ms, "blocking_reason": "waiting_for_retry_backoff"},
        {
            "blocking_reason": "waiting_for_children",
            "blocking_detail": awaiting.blocking_detail,
        },
        {"completed_at_ms": clock.now_ms()},
        {"completed_at_ms": clock.now_ms()},
        {"completed_at_ms": clock.now_ms()},
    ]


async def test_a_suspended_execution_names_the_signals_it_waits_for(
    engine: Engine, given: Given
) -> None:
    suspended = await given.suspended()
    waiting = (await engine.list_pending_waitpoints(suspended.execution_id)).waitpoints
    names = ", ".join(repr(str(each.waitpoint_key)) for each in waiting)
    assert names
    assert await why(engine, suspended.execution_id) == (
        Cause.SUSPENDED,
        f"It is suspended until it gets a signal: {names}.",
    )


async def test_a_closed_lane_is_the_reason(engine: Engine, given: Given) -> None:
    await present(engine)
    execution_id = await given.waiting()
    for change, state in (("pause_lane", "paused"), ("disable_lane", "disabled")):
        await getattr(engine, change)("default")
        explanation = await engine.explain_execution(execution_id)
        assert explanation.cause is Cause.LANE_CLOSED
        resume = "resume the lane (flowfabric lanes resume default)"
        assert explanation.sentence == f"Its lane 'default' is {state}: {resume}."
        assert explanation.detail == {"lane_id": "default", "state": state}
    await engine.drain_lane("default")
    assert (await why(engine, execution_id))[0] is Cause.QUEUED


async def test_a_lost_worker_is_the_reason(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    revoked, expired = await given.revoked("drain"), await given.expired_lease()
    overdue = await given.overdue_lease()
    clock.advance("2.5s")
    await present(engine)
    assert await why(engine, overdue.execution_id) == (
        Cause.LEASE_LOST,
        "Its worker worker-3-instance went quiet 2.5s ago, or keeps it in a fence: another worker"
        " takes it over.",
    )
    assert await why(engine, revoked.execution_id) == (
        Cause.LEASE_LOST,
        "Its worker was lost (lease revoked: drain).",
    )
    assert await why(engine, expired.execution_id) == (
        Cause.LEASE_LOST,
        "Its worker was lost (lease expired, awaiting reclaim).",
    )


async def test_an_unknown_execution_is_not_explained(engine: Engine) -> None:
    async with refused(engine, NotFound):
        await engine.explain_execution(UNKNOWN_ID)
