"""Subscriptions: every event once, in order, from any place, through filters."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest

from flowfabric import Engine
from flowfabric.core.conditions import Single
from flowfabric.core.events import CompletionOutcome, DeliveryEffect, LeaseEventType, TagEventType
from flowfabric.core.states import FailureClass
from flowfabric.engine.events import Subscription, Told
from flowfabric.engine.topics import EVENT_TOPIC
from flowfabric.errors import InvalidInput, ResourceExhausted, Unavailable
from flowfabric.testing import SettableClock
from tests.conformance.given import TTL_MS, Given

T = TypeVar("T")

TENANT = {"app.tenant": "acme"}


async def some(subscription: Subscription[T], count: int) -> list[T]:
    """The next so many, which are there or about to come."""
    async with asyncio.timeout(10):
        return [await anext(subscription) for _ in range(count)]


async def test_events_come_in_order_from_the_start_or_from_now_on(
    engine: Engine, given: Given
) -> None:
    before = await given.completed()
    from_start = await engine.subscribe_events(after="0")
    from_now = await engine.subscribe_events()
    after = await given.completed()
    expected = ["acquired", "revoked", "success"]
    told = await some(from_start, 6)
    assert [each.event.event_type for each in told] == expected * 2
    assert [each.event.execution_id for each in told] == [before.execution_id] * 3 + [
        after.execution_id
    ] * 3
    assert await some(from_now, 3) == told[3:]


async def test_a_subscriber_that_keeps_its_cursor_misses_and_repeats_nothing(
    engine: Engine, given: Given
) -> None:
    for _ in range(4):
        await given.completed()
    everything = await some(await engine.subscribe_events(after="0"), 12)
    cursor, seen = "0", []
    for _ in range(12):
        subscription = await engine.subscribe_events(after=cursor)
        seen += await some(subscription, 1)
        cursor = subscription.cursor
    assert seen == everything
    for told in everything:
        assert (await engine.subscribe_events(after=told.cursor)).cursor == told.cursor


async def test_a_parked_subscriber_is_woken(engine: Engine, given: Given) -> None:
    subscriptions = [await engine.subscribe_events() for _ in range(20)]
    waiting = [asyncio.create_task(some(each, 3)) for each in subscriptions]
    await asyncio.wait(waiting, timeout=0.05)
    ended = await given.completed()
    for told in await asyncio.gather(*waiting):
        assert {each.event.execution_id for each in told} == {ended.execution_id}


async def test_a_parked_subscriber_is_told_that_its_engine_was_closed(engine: Engine) -> None:
    subscription = await engine.subscribe_events()
    waiting = asyncio.create_task(some(subscription, 1))
    await asyncio.wait([waiting], timeout=0.05)
    await engine.following.close_subscriptions()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await some(subscription, 1)


async def test_so_many_subscribers_may_be_parked_and_no_more(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.events.SUBSCRIPTIONS_MAX", 1)
    first, second = await engine.subscribe_events(), await engine.subscribe_events()
    waiting = [asyncio.create_task(some(each, 3)) for each in (first, second)]
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [type(each.exception()) for each in done] == [ResourceExhausted]
    ended = await given.completed()
    (other,) = others
    assert {told.event.execution_id for told in await other} == {ended.execution_id}


async def test_what_people_do_is_hinted(engine: Engine, given: Given) -> None:
    """A subscriber in another process would look only now and then."""
    waiting, running = await given.waiting(), await given.running()
    with engine.store.hints([EVENT_TOPIC]) as hints:
        await engine.change_priority(waiting, 5)
        assert await hints.wait(10)
        await engine.deliver_operator_signal(running.execution_id, "x", signal_name="x")
        assert await hints.wait(10)
        await engine.renew(running.handle)
        assert not await hints.wait(0)


@pytest.mark.parametrize(
    ("wanted", "passes"),
    [
        ({"namespace": "shop"}, "shop both"),
        ({"kind": "mail"}, "mail versioned"),
        ({"kind": "mail@2"}, "versioned"),
        ({"tag": ("app.tenant", "acme")}, "tagged both"),
        ({"tag": ("app.tenant", "acme"), "namespace": "shop"}, "both"),
        ({}, "plain shop mail versioned tagged both"),
    ],
    ids=str,
)
async def test_a_filter_lets_through_what_is_equal_in_everything_it_names(
    engine: Engine, given: Given, wanted: dict[str, object], passes: str
) -> None:
    subscribe: Callable[..., Awaitable[Subscription[Told]]] = engine.subscribe_events
    subscription = await subscribe(category="completion", **wanted)
    everything = await engine.subscribe_events(category="completion")
    made = {
        "plain": await given.completed(),
        "shop": await given.completed(namespace="shop"),
        "mail": await given.completed(execution_kind="mail"),
        "versioned": await given.completed(execution_kind="mail@2"),
        "tagged": await given.completed(tags=TENANT),
        "both": await given.completed(tags=TENANT, namespace="shop"),
    }
    names = {claimed.execution_id: name for name, claimed in made.items()}
    await some(everything, len(made))
    # What comes last passes whatever the filter.
    last = await given.completed(execution_kind="mail@2", tags=TENANT, namespace="shop")
    names[last.execution_id] = "last"
    told = await some(subscription, len(passes.split()) + 1)
    assert [names[each.event.execution_id] for each in told] == [*passes.split(), "last"]


async def test_one_execution_can_be_watched(engine: Engine, given: Given) -> None:
    watched = await given.waiting()
    subscription = await engine.subscribe_events(execution_id=watched)
    await given.completed()
    claimed = await given.claimed(watched)
    await engine.fail(claimed.handle, "no", failure_class=FailureClass.PERMANENT)
    told = await some(subscription, 3)
    assert [each.event.event_type for each in told] == ["acquired", "revoked", "failed"]
    assert {each.event.execution_id for each in told} == {watched}


async def test_the_cursor_moves_past_what_is_filtered_out(engine: Engine, given: Given) -> None:
    subscription = await engine.subscribe_events(after="0", namespace="shop")
    for _ in range(3):
        await given.completed()
    wanted = await given.completed(namespace="shop")
    (first, *_others) = await some(subscription, 3)
    assert first.event.execution_id == wanted.execution_id
    again = await engine.subscribe_events(after=subscription.cursor)
    await given.completed()
    assert [told.event.event_type for told in await some(again, 1)] == ["acquired"]


# By category, typed


async def test_ends_are_told_with_their_outcome(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    subscription = await engine.subscribe_completion()
    ended = {
        CompletionOutcome.SUCCESS: (await given.completed()).execution_id,
        CompletionOutcome.FAILURE: (await given.failed()).execution_id,
        CompletionOutcome.CANCELLED: await given.cancelled(),
        CompletionOutcome.EXPIRED: await given.expired(),
    }
    told = await some(subscription, 4)
    assert {each.outcome: each.execution_id for each in told} == ended
    assert {each.at_ms for each in told} == {clock.now_ms()}
    again = await engine.subscribe_completion(after=told[1].cursor)
    assert await some(again, 2) == told[2:]


async def test_leases_are_told_with_their_holders(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    subscription = await engine.subscribe_lease_history(namespace="shop")
    await given.running()
    lost = await given.running(namespace="shop")
    await engine.renew(lost.handle)
    clock.advance(ms=2 * TTL_MS)
    await engine.mark_lease_expired_if_due(lost.execution_id)
    again = await given.taken()
    if again.execution_id != lost.execution_id:
        again = await given.taken()
    await engine.revoke_lease(again.execution_id, reason="drained")
    told = await some(subscription, 5)
    assert [(each.event_type, each.lease_id, each.revoked_by) for each in told] == [
        (LeaseEventType.ACQUIRED, lost.lease_id, None),
        (LeaseEventType.RENEWED, lost.lease_id, None),
        (LeaseEventType.EXPIRED, lost.lease_id, None),
        (LeaseEventType.RECLAIMED, again.lease_id, None),
        (LeaseEventType.REVOKED, again.lease_id, "drained"),
    ]
    assert told[0].worker_instance_id == lost.handle.worker_instance_id
    assert told[3].worker_instance_id == again.handle.worker_instance_id


async def test_signals_are_told_with_their_effect(engine: Engine, given: Given) -> None:
    subscription = await engine.subscribe_signal_delivery()
    running = await given.running()
    await engine.deliver_operator_signal(
        running.execution_id, "gate", signal_name="gate", source_identity="ann"
    )
    await engine.suspend(running.handle, resume_condition=Single("other"))
    await engine.deliver_operator_signal(
        running.execution_id, "other", signal_name="other", source_identity="bob"
    )
    told = await some(subscription, 2)
    assert [(each.source_identity, each.effect) for each in told] == [
        ("ann", DeliveryEffect.BUFFERED),
        ("bob", DeliveryEffect.SATISFIED),
    ]
    assert all(each.signal_id for each in told)


@pytest.mark.parametrize("only", [{"namespace": "shop"}, {"tag": ("app.tenant", "acme")}], ids=str)
async def test_two_tenants_see_nothing_of_each_other(
    engine: Engine, given: Given, only: dict[str, object]
) -> None:
    subscribes: tuple[Callable[..., Awaitable[AsyncIterator[object]]], ...] = (
        engine.subscribe_completion,
        engine.subscribe_lease_history,
        engine.subscribe_signal_delivery,
        engine.subscribe_instance_tags,
    )
    subscriptions = [await subscribe(**only) for subscribe in subscribes]
    whole = [
        {"namespace": name, "tags": {"app.tenant": tenant}}
        for name, tenant in (("other", "other"), ("shop", "acme"))
    ]
    for fields in whole:
        claimed = await given.running(**fields)
        await engine.deliver_operator_signal(claimed.execution_id, "x", signal_name="x")
        await engine.complete(claimed.handle)
    async with asyncio.timeout(10):
        told = [await anext(subscription) for subscription in subscriptions]
    assert [getattr(each, "execution_id", None) for each in told] == [claimed.execution_id] * 4


async def test_tags_are_told_as_they_change(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    subscription = await engine.subscribe_instance_tags()
    elsewhere = await engine.subscribe_instance_tags(namespace="shop", tag=("app.tenant", "acme"))
    tagged = await given.waiting(tags=TENANT)
    in_shop = await given.waiting(tags=TENANT, namespace="shop")
    now_ms = clock.advance("1s")
    await engine.set_execution_tags(tagged, {"app.tenant": "acme", "app.stage": "two"})
    await engine.set_execution_tag(tagged, "app.tenant", "other")
    await engine.set_execution_tag(tagged, "app.stage", "")
    told = await some(subscription, 5)
    attached, cleared = TagEventType.ATTACHED, TagEventType.CLEARED
    assert [(each.execution_id, each.event_type, each.tag, each.value) for each in told] == [
        (tagged, attached, "app.tenant", "acme"),
        (in_shop, attached, "app.tenant", "acme"),
        (tagged, attached, "app.stage", "two"),
        (tagged, attached, "app.tenant", "other"),
        (tagged, cleared, "app.stage", ""),
    ]
    assert told[-1].at_ms == now_ms
    assert [each.execution_id for each in await some(elsewhere, 1)] == [in_shop]
    again = await engine.subscribe_instance_tags(after=told[2].cursor)
    assert await some(again, 2) == told[3:]


async def test_bad_input_is_refused_when_subscribing(engine: Engine) -> None:
    subscribe: Callable[..., Awaitable[object]] = engine.subscribe_events
    for wrong in (
        {"after": "x"},
        {"after": None},
        {"after": -1},
        {"namespace": ""},
        {"namespace": 5},
        {"category": "other"},
        {"execution_id": "no id"},
        {"kind": ""},
        {"tag": "a=b"},
        {"tag": ("a", 5)},
        {"tag": ("", "b")},
    ):
        with pytest.raises(InvalidInput):
            await subscribe(**wrong)
    for typed in (
        engine.subscribe_completion,
        engine.subscribe_lease_history,
        engine.subscribe_signal_delivery,
        engine.subscribe_instance_tags,
    ):
        with pytest.raises(InvalidInput):
            await typed(after="x")


async def test_a_filter_by_tag_asks_for_the_tags_of_the_moment_it_reads(
    engine: Engine, given: Given
) -> None:
    ended = await given.completed(tags=TENANT)
    await engine.set_execution_tag(ended.execution_id, "app.tenant", "other")
    before = await engine.subscribe_events(after="0", tag=("app.tenant", "acme"))
    after = await engine.subscribe_events(after="0", tag=("app.tenant", "other"))
    assert await before.next_if_any() is None
    told = [each.event.event_type for each in await some(after, 5)]
    assert told == ["attached", "acquired", "revoked", "success", "attached"]
