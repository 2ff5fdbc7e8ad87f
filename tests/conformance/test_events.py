"""The event log: what each operation tells, and reading it page by page."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from flowfabric import Engine
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.events import START, EventCategory
from flowfabric.engine.events import EventLogPage
from flowfabric.engine.reads import EVERYTHING
from flowfabric.errors import HistoryChanged, InvalidInput
from flowfabric.testing import SettableClock
from tests.conformance.given import TAGGED, WORKER, Given, new
from tests.conformance.observed import cursor_of, events_since, refuses, unchanged


async def create(given: Given) -> None:
    await given.waiting(**TAGGED)


async def create_again(given: Given) -> None:
    request = new(**TAGGED, idempotency_key="k")
    await given.engine.create_executions([request, request])


async def grant(given: Given) -> None:
    await given.engine.issue_claim_grant(await given.waiting(**TAGGED), **WORKER)


async def promote(given: Given) -> None:
    await given.engine.promote_delayed(await given.delayed(by_ms=0, **TAGGED))


async def tag(given: Given) -> None:
    await given.engine.set_execution_tag(await given.waiting(**TAGGED), "a.b", "c")


async def claim(given: Given) -> None:
    await given.waiting(**TAGGED)
    await given.taken()


async def renew(given: Given) -> None:
    await given.engine.renew((await given.running(**TAGGED)).handle)


async def progress(given: Given) -> None:
    await given.engine.progress((await given.running(**TAGGED)).handle, percent=1)


async def reclaim_expired(given: Given) -> None:
    await given.expired_lease(**TAGGED)
    await given.taken()


async def reclaim_revoked(given: Given) -> None:
    await given.revoked("drain", **TAGGED)
    await given.taken()


async def complete(given: Given) -> None:
    await given.state("completed", **TAGGED)


async def retry(given: Given) -> None:
    await given.state("retrying", **TAGGED)


async def fail(given: Given) -> None:
    await given.state("failed", **TAGGED)


async def delay(given: Given) -> None:
    await given.state("parked", **TAGGED)


async def resume(given: Given) -> None:
    await given.resumable(**TAGGED)
    await given.taken()


async def wait_children(given: Given) -> None:
    await given.waiting_children(**TAGGED)


async def cancel_running(given: Given) -> None:
    running = await given.running(**TAGGED)
    await given.engine.cancel_execution(running.execution_id, reason="x")


async def cancel_by_worker(given: Given) -> None:
    await given.engine.cancel((await given.running(**TAGGED)).handle, "x")


async def cancel_waiting(given: Given) -> None:
    await given.state("cancelled", **TAGGED)


async def cancel_lost(given: Given) -> None:
    lost = await given.revoked("drain", **TAGGED)
    await given.engine.cancel_execution(lost.execution_id, reason="x")


async def time_out(given: Given) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 5}}
    running = await given.running(**TAGGED, policy=policy)
    given.clock.advance(ms=5)
    await given.engine.expire_execution(running.execution_id, "attempt_timeout")


async def expire_waiting(given: Given) -> None:
    await given.expired(**TAGGED)


async def wear_out(given: Given) -> None:
    await given.expired_lease(**TAGGED, policy={"max_reclaim_count": 0})


async def reprioritise(given: Given) -> None:
    await given.engine.change_priority(await given.waiting(**TAGGED), 5)


async def replay(given: Given) -> None:
    await given.engine.replay_execution(await given.state("cancelled", **TAGGED))


ACQUIRED = ("lease", "acquired", None)
ATTACHED = ("tag", "attached", None)
TOLD: dict[Callable[[Given], Awaitable[None]], list[tuple[str, str, str | None]]] = {
    create: [],
    create_again: [],
    grant: [],
    promote: [],
    tag: [ATTACHED],
    claim: [ACQUIRED],
    renew: [ACQUIRED, ("lease", "renewed", None)],
    progress: [ACQUIRED],
    reclaim_expired: [
        ACQUIRED,
        ("lease", "expired", None),
        ("lease", "reclaimed", "lease_expired"),
    ],
    reclaim_revoked: [
        ACQUIRED,
        ("lease", "revoked", "drain"),
        ("lease", "reclaimed", "lease_revoked"),
    ],
    complete: [ACQUIRED, ("lease", "revoked", "completed"), ("completion", "success", None)],
    retry: [ACQUIRED, ("lease", "revoked", "failed_retry_scheduled")],
    fail: [ACQUIRED, ("lease", "revoked", "failed_terminal"), ("completion", "failed", None)],
    delay: [ACQUIRED, ("lease", "revoked", "worker_delay")],
    resume: [
        ACQUIRED,
        ("lease", "revoked", "worker_delay"),
        ("lease", "acquired", "claim_resumed"),
    ],
    wait_children: [ACQUIRED, ("lease", "revoked", "waiting_children")],
    cancel_running: [
        ACQUIRED,
        ("lease", "revoked", "cancelled"),
        ("completion", "cancelled", None),
    ],
    cancel_by_worker: [
        ACQUIRED,
        ("lease", "revoked", "cancelled"),
        ("completion", "cancelled", None),
    ],
    cancel_waiting: [("completion", "cancelled", None)],
    cancel_lost: [ACQUIRED, ("lease", "revoked", "drain"), ("completion", "cancelled", None)],
    time_out: [
        ACQUIRED,
        ("lease", "expired", "expired:attempt_timeout"),
        ("completion", "expired", None),
    ],
    expire_waiting: [("completion", "expired", None)],
    wear_out: [ACQUIRED, ("lease", "expired", None), ("completion", "failed", None)],
    reprioritise: [("operator", "priority_changed", None)],
    replay: [("completion", "cancelled", None), ("operator", "replayed", None)],
}


async def test_every_operation_tells_what_it_did(engine: Engine, given: Given) -> None:
    for happen, told in TOLD.items():
        cursor = await cursor_of(engine)
        await happen(given)
        events = await events_since(engine, cursor)
        summary = [(event.category, event.event_type, event.reason) for event in events]
        # Each of them is about an execution that begins with a tag.
        assert summary == [ATTACHED, *told], happen.__name__
        assert {(event.namespace, event.instance_tag) for event in events} <= {("shop", "i-1")}
        # What is ready now must not be in the way of the next one.
        await engine.cancel_matching(EVERYTHING, reason="done")


async def test_the_log_is_read_from_a_cursor(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    assert await engine.read_events() == EventLogPage(events=(), cursor=START)
    await given.completed()
    await given.completed()
    whole = await engine.read_events()
    assert len(whole.events) == 6
    ids = [event.event_id for event in whole.events]
    assert ids == sorted(set(ids))
    first = await engine.read_events(limit=4)
    assert first.events == whole.events[:4]
    rest = await engine.read_events(after=first.cursor, limit=4)
    assert (rest.events, rest.cursor) == (whole.events[4:], whole.cursor)
    assert await engine.read_events(after=rest.cursor) == EventLogPage(
        events=(), cursor=rest.cursor
    )


async def test_one_category_is_read_alone(engine: Engine, given: Given) -> None:
    await given.completed()
    await engine.change_priority(await given.waiting(), 5)
    whole = await engine.read_events()
    for category in EventCategory:
        page = await engine.read_events(category=category)
        wanted = tuple(event for event in whole.events if event.category is category)
        assert (page.events, page.cursor) == (wanted, whole.cursor), category
    first = await engine.read_events(category="lease", limit=1)
    assert first.events == whole.events[:1]


async def test_of_events_written_at_once_none_is_passed_over(engine: Engine, given: Given) -> None:
    handles = [(await given.running()).handle for _ in range(8)]
    seen: list[int] = []
    cursor = await cursor_of(engine)
    ending = asyncio.gather(*(engine.complete(handle) for handle in handles))
    while len(seen) < 16:
        page = await engine.read_events(after=cursor, limit=5)
        seen += [event.event_id for event in page.events]
        cursor = page.cursor
        await asyncio.sleep(0)
    await ending
    everything = await engine.read_events(limit=PAGE_MAX)
    assert seen == [event.event_id for event in everything.events[8:]]


async def test_bad_reads_of_the_log_are_refused(engine: Engine) -> None:
    bad: list[tuple[str, object]] = [
        ("after", -1),
        ("after", None),
        ("limit", 0),
        ("limit", PAGE_MAX + 1),
        ("limit", "5"),
        ("category", "gossip"),
        ("category", ""),
        ("category", 5),
    ]
    async with unchanged(engine):
        for field, value in bad:
            await refuses(engine, field, "read_events", **{field: value})


async def test_a_cursor_that_saw_another_event_under_its_number_is_told_so(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await given.completed()
    clock.advance(ms=120_000)
    before = await cursor_of(engine)
    await given.completed()
    number, at_ms, _ = (await cursor_of(engine)).split("-")

    with pytest.raises(HistoryChanged, match="a standby that lagged took over") as told:
        await engine.read_events(after=f"{number}-{at_ms}-0123456789ab")

    assert told.value.resume_after == before
    resumed = await engine.read_events(after=told.value.resume_after)
    assert len(resumed.events) == 3


@pytest.mark.parametrize("category", [None, "lease"])
async def test_a_cursor_ahead_of_the_log_is_told_so_and_skips_nothing(
    engine: Engine, given: Given, category: str | None
) -> None:
    await given.completed()
    number, at_ms, mark = (await cursor_of(engine)).split("-")
    ahead = int(number) + 1_000_000

    for cursor in (f"{ahead}-{at_ms}-{mark}", ahead):
        with pytest.raises(HistoryChanged) as told:
            await engine.read_events(after=cursor, category=category)
        resumed = await engine.read_events(after=told.value.resume_after)
        assert resumed.events == (await engine.read_events()).events


async def test_a_cursor_on_an_event_that_retention_deleted_reads_on(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await given.completed()
    cursor = await cursor_of(engine)
    clock.advance(ms=8 * 24 * 60 * 60 * 1_000)
    await engine.trim_events()
    await given.completed()

    assert len((await engine.read_events(after=cursor)).events) == 3


async def test_whoever_has_not_come_to_what_retention_deleted_is_told(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await given.completed()
    first = await engine.read_events(limit=1)
    clock.advance(ms=8 * 24 * 60 * 60 * 1_000)
    await engine.trim_events()
    await given.completed()

    for read in (
        engine.read_events(after=first.cursor),
        anext(await engine.subscribe_events(after=first.cursor)),
    ):
        with pytest.raises(HistoryChanged, match="deleted for their age") as told:
            await read
    kept = await engine.read_events(after=told.value.resume_after)
    assert len(kept.events) == 3
    assert (await engine.read_events(after=kept.cursor)).events == ()


@pytest.mark.parametrize("made_up", ["", "x", "1-2", "-1", "1-2-3", "9" * 30, None, 1.5, True, -1])
async def test_a_made_up_cursor_is_refused(engine: Engine, made_up: object) -> None:
    read: Callable[..., Awaitable[object]] = engine.read_events
    with pytest.raises(InvalidInput) as refusal:
        await read(after=made_up)

    assert refusal.value.field == "after"
