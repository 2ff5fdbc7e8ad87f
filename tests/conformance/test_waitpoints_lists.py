"""Reading waitpoints: lists without tokens, and the token of one."""

import pytest

from flowfabric import Engine
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.conditions import (
    AllConditions,
    ByName,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
)
from flowfabric.core.records import SignalEffect, WaitpointState
from flowfabric.core.results import Claimed
from flowfabric.core.waitpoints import PendingWaitpoint, fingerprint
from flowfabric.engine.waitpoints import WaitpointView
from flowfabric.errors import NotFound
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, WORKER, Given
from tests.conformance.observed import refuses
from tests.conformance.pausing import effect_of, new_id, paused

TTL_MS = 10_000


async def create(engine: Engine, claimed: Claimed, key: str = "gate") -> PendingWaitpoint:
    return await engine.create_waitpoint(claimed.handle, key, expires_in_ms=TTL_MS)


# Lists ----------------------------------------------------------------------------


async def test_the_list_shows_what_each_waitpoint_waits_for_but_no_token(
    engine: Engine, given: Given
) -> None:
    condition = AllConditions(
        (
            Single("a", ByName("yes")),
            Count(1, CountKind.DISTINCT_SIGNALS, ("a", "b"), ByName("also")),
            Single("a", ByName("yes")),
        )
    )
    taken = await paused(given, condition, timeout_at_ms=given.clock.now_ms() + 9)
    page = await engine.list_pending_waitpoints(taken.execution_id)
    now_ms = given.clock.now_ms()
    expected = {
        key: WaitpointView(
            execution_id=taken.execution_id,
            waitpoint_id=taken.waitpoint(key)[0],
            waitpoint_key=taken.details.waitpoint_key
            if key == "a"
            else taken.details.additional_waitpoints[0].waitpoint_key,
            state=WaitpointState.ACTIVE,
            required_signal_names=names,
            created_at_ms=now_ms,
            activated_at_ms=now_ms,
            expires_at_ms=now_ms + 9,
            token_kid="k1",
            token_fingerprint=fingerprint(taken.waitpoint(key)[1]),
        )
        for key, names in (("a", ("yes", "also")), ("b", ("also",)))
    }
    assert {view.waitpoint_key: view for view in page.waitpoints} == expected
    assert page.next_cursor is None
    for key in "ab":
        assert taken.waitpoint(key)[1].reveal().partition(":")[2] not in repr(page)
        assert len(expected[key].token_fingerprint) == 16


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        (Single("gate", ByName("x")), ("x",)),
        (Single("gate"), ()),
        (OperatorOnly(), ("__operator_only__",)),
        (TimeoutOnly(), ("__timeout_only__",)),
    ],
)
async def test_required_names_of_simple_conditions(
    engine: Engine, given: Given, condition: Condition, names: tuple[str, ...]
) -> None:
    taken = await paused(given, condition, timeout_at_ms=given.clock.now_ms() + 9)
    (view,) = (await engine.list_pending_waitpoints(taken.execution_id)).waitpoints
    assert view.required_signal_names == names


async def test_the_list_comes_in_pages(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    made = sorted([(await create(engine, claimed)).waitpoint_id for _ in range(5)])
    seen: list[str] = []
    after: str | None = None
    sizes = []
    for _ in range(3):
        page = await engine.list_pending_waitpoints(claimed.execution_id, after=after, limit=2)
        seen += [view.waitpoint_id for view in page.waitpoints]
        sizes.append(len(page.waitpoints))
        after = page.next_cursor
    assert (seen, sizes, after) == (made, [2, 2, 1], None)


async def test_the_list_leaves_out_what_is_closed(engine: Engine, given: Given) -> None:
    taken = await paused(given)
    await taken.signal()
    assert (await engine.list_pending_waitpoints(taken.execution_id)).waitpoints == ()
    with pytest.raises(NotFound):
        await engine.list_pending_waitpoints(UNKNOWN_ID)
    await refuses(engine, "limit", "list_pending_waitpoints", taken.execution_id, limit=0)
    await refuses(
        engine, "limit", "list_pending_waitpoints", taken.execution_id, limit=PAGE_MAX + 1
    )
    await refuses(engine, "after", "list_pending_waitpoints", taken.execution_id, after="x")


# Tokens ---------------------------------------------------------------------------


async def test_the_token_of_an_open_waitpoint_can_be_read(engine: Engine, given: Given) -> None:
    taken = await paused(given)
    assert await engine.read_waitpoint_token(taken.execution_id, taken.waitpoint_id) == taken.token
    other = await paused(given)
    assert await engine.read_waitpoint_token(other.execution_id, taken.waitpoint_id) is None
    assert await engine.read_waitpoint_token(UNKNOWN_ID, taken.waitpoint_id) is None
    assert await engine.read_waitpoint_token(taken.execution_id, new_id()) is None
    await taken.signal()
    assert await engine.read_waitpoint_token(taken.execution_id, taken.waitpoint_id) is None
    await refuses(engine, "waitpoint_id", "read_waitpoint_token", taken.execution_id, "x")


async def test_a_token_whose_key_is_gone_is_signed_again_when_read(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await paused(given)
    await engine.rotate_waitpoint_hmac_secret_all("k2", "ab" * 32, grace_ms=100)
    assert await engine.read_waitpoint_token(taken.execution_id, taken.waitpoint_id) == taken.token
    clock.advance(ms=101)
    token = await engine.read_waitpoint_token(taken.execution_id, taken.waitpoint_id)
    assert token is not None
    assert token.reveal().startswith("k2:")
    (view,) = (await engine.list_pending_waitpoints(taken.execution_id)).waitpoints
    assert (view.token_kid, view.token_fingerprint) == ("k2", fingerprint(token))
    answer = await engine.deliver_signal(
        taken.execution_id, taken.waitpoint_id, waitpoint_token=token, signal_name="approved"
    )
    assert effect_of(answer) is SignalEffect.SATISFIED
    assert (await engine.claim(**WORKER)) is not None
