"""Signals that come before anything waits for them."""

import pytest

from flowfabric import Engine
from flowfabric.core.bounds import KEPT_SIGNAL_BYTES_MAX, KEPT_SIGNALS_MAX, SIGNAL_PAYLOAD_BYTES_MAX
from flowfabric.core.conditions import ByName, Count, CountKind, Single
from flowfabric.core.diagnosis import Cause
from flowfabric.core.records import SignalEffect
from flowfabric.core.results import Claimed
from flowfabric.core.signals import SignalAccepted, SignalDuplicate
from flowfabric.core.waitpoints import FreshWaitpoint
from flowfabric.engine.suspensions import Suspended, SuspendSatisfied
from flowfabric.errors import (
    InvalidInput,
    KeptSignalsFull,
    TargetNotSignalable,
    WaitpointClosed,
    WaitpointNotFound,
    WrongSignalName,
)
from flowfabric.testing import SettableClock
from tests.conditions import all_of_waitpoints
from tests.conformance.given import EVERY_STATE, LOST, SET_ASIDE, WAITING, Given
from tests.conformance.observed import execution_of, refused
from tests.conformance.pausing import TTL_MS, effect_of, pause

GO = Single("go", ByName("go"))
TWO = Count(2, CountKind.DISTINCT_SIGNALS, ("go",), ByName("go"))


async def send(
    engine: Engine, execution_id: str, name: str = "go", source: str = "", **options: object
) -> SignalAccepted | SignalDuplicate:
    key = options.pop("idempotency_key", None)
    assert key is None or isinstance(key, str)
    payload = options.pop("payload", None)
    assert payload is None or isinstance(payload, bytes)
    return await engine.deliver_operator_signal(
        execution_id,
        name,
        signal_name=name,
        source_identity=source,
        idempotency_key=key,
        payload=payload,
        keep=bool(options.pop("keep", True)),
    )


async def kept(engine: Engine, execution_id: str) -> list[tuple[str, str]]:
    snapshot = await engine.describe_execution(execution_id)
    assert snapshot is not None
    return [(each.name, each.source) for each in snapshot.kept_signals]


async def counted(engine: Engine, claimed: Claimed) -> list[str]:
    return [each.source_identity for each in await engine.observe_signals(claimed.handle)]


# Keeping ----------------------------------------------------------------------------


@pytest.mark.parametrize("state", [*WAITING, *SET_ASIDE, *LOST, "running", "overdue_lease"])
async def test_a_signal_by_name_is_kept_in_every_state_but_the_last(
    engine: Engine, given: Given, state: str
) -> None:
    execution_id = await given.state(state)
    answer = await send(engine, execution_id, source="ada")
    assert isinstance(answer, SignalAccepted)
    assert (answer.effect, answer.resumed, answer.kept) == (SignalEffect.KEPT, False, True)
    assert await kept(engine, execution_id) == [("go", "ada")]


@pytest.mark.parametrize(
    "state", [each for each in EVERY_STATE if each in ("completed", "failed", "cancelled")]
)
async def test_what_has_ended_keeps_nothing(engine: Engine, given: Given, state: str) -> None:
    execution_id = await given.state(state)
    async with refused(engine, TargetNotSignalable):
        await send(engine, execution_id)


async def test_a_signal_may_insist_on_being_waited_for(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    async with refused(engine, WaitpointNotFound):
        await send(engine, claimed.execution_id, keep=False)
    taken = await pause(given, claimed, GO)
    assert effect_of(await send(engine, taken.execution_id, keep=False)) is SignalEffect.SATISFIED


async def test_the_next_wait_of_a_name_takes_one_and_leaves_the_others(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    for source in ("ada", "bob"):
        await send(engine, claimed.execution_id, source=source)
    await send(engine, claimed.execution_id, "other", source="eve")
    for source in ("ada", "bob"):
        outcome = await engine.suspend(claimed.handle, resume_condition=GO)
        assert isinstance(outcome, SuspendSatisfied)
        assert await counted(engine, claimed) == [source]
    assert await kept(engine, claimed.execution_id) == [("other", "eve")]
    taken = await pause(given, claimed, GO)
    assert effect_of(await send(engine, taken.execution_id)) is SignalEffect.SATISFIED


async def test_a_signal_between_two_waits_counts_for_the_second(
    engine: Engine, given: Given
) -> None:
    first = await given.running()
    await pause(given, first, GO)
    await send(engine, first.execution_id, source="ada")
    # Resumed, and not yet on a worker; then on a worker, and not yet waiting.
    await send(engine, first.execution_id, source="bob")
    claimed = await given.taken()
    await send(engine, first.execution_id, source="cyd")
    outcome = await engine.suspend(claimed.handle, resume_condition=TWO)
    assert isinstance(outcome, SuspendSatisfied)
    assert await counted(engine, claimed) == ["bob", "cyd"]


async def test_kept_signals_count_together_with_later_ones(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    await send(engine, claimed.execution_id, source="ada")
    taken = await pause(given, claimed, TWO)
    assert await kept(engine, taken.execution_id) == []
    assert effect_of(await send(engine, taken.execution_id)) is SignalEffect.SATISFIED
    assert await counted(engine, claimed) == ["ada", ""]


async def test_another_name_meanwhile_is_kept_for_later(engine: Engine, given: Given) -> None:
    taken = await pause(given, await given.running(), GO)
    assert effect_of(await send(engine, taken.execution_id, "next")) is SignalEffect.KEPT
    await send(engine, taken.execution_id)
    claimed = await given.taken()
    outcome = await engine.suspend(claimed.handle, resume_condition=Single("next"))
    assert isinstance(outcome, SuspendSatisfied)


async def test_kept_signals_survive_a_crash_and_a_retry(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    lost = await given.expired_lease()
    await send(engine, lost.execution_id, source="ada")
    claimed = await given.taken()
    assert claimed.attempt_index == 1
    outcome = await engine.suspend(claimed.handle, resume_condition=GO)
    assert isinstance(outcome, SuspendSatisfied)
    assert await counted(engine, claimed) == ["ada"]


async def test_a_replay_finds_what_its_first_life_did_not_take(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    await send(engine, claimed.execution_id, source="ada")
    await engine.cancel_execution(claimed.execution_id, reason="enough")
    await engine.replay_execution(claimed.execution_id)
    again = await given.taken()
    outcome = await engine.suspend(again.handle, resume_condition=GO)
    assert isinstance(outcome, SuspendSatisfied)
    assert await counted(engine, again) == ["ada"]


async def test_a_repeat_of_a_kept_signal_is_kept_once(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    first = await send(engine, claimed.execution_id, idempotency_key="click")
    assert isinstance(first, SignalAccepted)
    for _ in range(2):
        again = await send(engine, claimed.execution_id, idempotency_key="click")
        assert again == SignalDuplicate(existing_signal_id=first.signal_id)
        assert (again.resumed, again.kept) == (False, False)
    taken = await pause(given, claimed, TWO)
    # The first counts already; a repeat adds nothing while it waits either.
    again = await send(engine, taken.execution_id, idempotency_key="click")
    assert again == SignalDuplicate(existing_signal_id=first.signal_id)


async def test_what_is_kept_is_bounded_in_number(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.core.bounds.KEPT_SIGNALS_MAX", 3)
    claimed = await given.running()
    for _ in range(3):
        await send(engine, claimed.execution_id)
    async with refused(engine, KeptSignalsFull):
        await send(engine, claimed.execution_id)
    await engine.suspend(claimed.handle, resume_condition=GO)
    assert effect_of(await send(engine, claimed.execution_id)) is SignalEffect.KEPT
    assert KEPT_SIGNALS_MAX == 1_000


async def test_what_is_kept_is_bounded_in_bytes(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    large = b"1" * SIGNAL_PAYLOAD_BYTES_MAX
    for _ in range(KEPT_SIGNAL_BYTES_MAX // SIGNAL_PAYLOAD_BYTES_MAX):
        await send(engine, claimed.execution_id, payload=large)
    async with refused(engine, KeptSignalsFull):
        await send(engine, claimed.execution_id, payload=b"1")
    await send(engine, claimed.execution_id)


async def test_what_is_kept_is_explained(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    for name in ("go", "stop", "go"):
        await send(engine, claimed.execution_id, name)
    told = await engine.explain_execution(claimed.execution_id)
    assert told.cause is Cause.RUNNING
    assert told.sentence.endswith(" 3 signals are kept for its next waits: 'go' (2), 'stop'.")
    assert told.detail["kept_signals"] == 3


# Never lost ---------------------------------------------------------------------------


async def test_every_signal_to_waitpoints_of_one_name_counts(engine: Engine, given: Given) -> None:
    """A token for each approver: one uses it early, one late, one never."""
    claimed = await given.running()
    made = [
        await engine.create_waitpoint(claimed.handle, "go", expires_in_ms=TTL_MS) for _ in range(3)
    ]

    async def use(number: int) -> SignalEffect:
        return effect_of(
            await engine.deliver_signal(
                claimed.execution_id,
                made[number].waitpoint_id,
                waitpoint_token=made[number].waitpoint_token,
                signal_name="go",
                source_identity=f"approver {number}",
            )
        )

    assert await use(1) is SignalEffect.BUFFERED
    taken = await pause(given, claimed, TWO, take_pending=True)
    assert await use(0) is SignalEffect.SATISFIED
    assert await counted(engine, claimed) == ["approver 1", "approver 0"]
    with pytest.raises(WaitpointClosed):
        await use(2)
    assert (await execution_of(engine, taken.execution_id)).open_waitpoint_count == 0


async def test_more_signals_than_are_shown_are_counted(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.core.bounds.KEPT_SIGNALS_SHOWN_MAX", 2)
    execution_id = await given.waiting()
    for source in "abc":
        await send(engine, execution_id, source=source)
    for look in (engine.describe_execution, engine.inspect_execution):
        seen = await look(execution_id)
        assert seen is not None
        assert [each.source for each in seen.kept_signals] == ["a", "b"]
        assert seen.kept_signal_count == 3


@pytest.mark.parametrize("n", [2, 3])
async def test_waitpoints_of_one_name_are_distinct(engine: Engine, given: Given, n: int) -> None:
    claimed = await given.running()
    made = [
        await engine.create_waitpoint(claimed.handle, "go", expires_in_ms=TTL_MS) for _ in range(2)
    ]
    condition = Count(n, CountKind.DISTINCT_WAITPOINTS, ("go",))
    if n > len(made):
        with pytest.raises(InvalidInput, match="count_exceeds_waitpoint_set"):
            await engine.suspend(claimed.handle, resume_condition=condition, take_pending=True)
        return
    await pause(given, claimed, condition, take_pending=True)
    effects = [
        effect_of(
            await engine.deliver_signal(
                claimed.execution_id,
                each.waitpoint_id,
                waitpoint_token=each.waitpoint_token,
                signal_name="go",
            )
        )
        for each in (made[0], made[0], made[1])
    ]
    assert effects == [
        SignalEffect.APPENDED,
        SignalEffect.APPENDED_DUPLICATE,
        SignalEffect.SATISFIED,
    ]


@pytest.mark.parametrize("by_name", [False, True])
async def test_waitpoints_of_kept_signals_count_though_they_have_expired(
    engine: Engine, given: Given, clock: SettableClock, by_name: bool
) -> None:
    """Two approvals that came in time are enough, however late the run waits for them."""
    claimed = await given.running(ttl_ms=10 * TTL_MS)
    condition = Count(2, CountKind.DISTINCT_WAITPOINTS, ("go",), ByName("go"))
    made = [
        await engine.create_waitpoint(claimed.handle, "go", expires_in_ms=TTL_MS)
        for _ in range(1 if by_name else 2)
    ]
    for each in made:
        await engine.deliver_signal(
            claimed.execution_id,
            each.waitpoint_id,
            waitpoint_token=each.waitpoint_token,
            signal_name="go",
        )
    clock.advance(ms=TTL_MS)
    await engine.expire_due_waitpoints()
    if by_name:
        await send(engine, claimed.execution_id)
    outcome = await engine.suspend(claimed.handle, resume_condition=condition, take_pending=True)
    assert isinstance(outcome, SuspendSatisfied)
    assert len(await counted(engine, claimed)) == 2


async def test_a_kept_signal_of_another_name_is_no_waitpoint_to_count(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    await send(engine, claimed.execution_id, "other")
    condition = Count(2, CountKind.DISTINCT_WAITPOINTS, ("go",), ByName("go"))
    async with refused(engine, InvalidInput) as caught:
        await engine.suspend(claimed.handle, resume_condition=condition, take_pending=True)
    assert "count_exceeds_waitpoint_set" in str(caught.value)


async def test_a_signal_outlives_the_waitpoint_it_came_to(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running(ttl_ms=10 * TTL_MS)
    made = await engine.create_waitpoint(claimed.handle, "go", expires_in_ms=TTL_MS)
    await engine.deliver_signal(
        claimed.execution_id,
        made.waitpoint_id,
        waitpoint_token=made.waitpoint_token,
        signal_name="go",
        source_identity="ada",
    )
    clock.advance(ms=TTL_MS)
    assert (await engine.expire_due_waitpoints()).acted == 1
    assert await kept(engine, claimed.execution_id) == [("go", "ada")]
    outcome = await engine.suspend(claimed.handle, resume_condition=GO, take_pending=True)
    assert isinstance(outcome, SuspendSatisfied)
    assert await counted(engine, claimed) == ["ada"]


@pytest.mark.parametrize("end", ["timeout", "operator", "replay"])
async def test_a_pause_that_ends_unmet_gives_back_what_it_took(
    engine: Engine, given: Given, clock: SettableClock, end: str
) -> None:
    """A reminder after a day must not cost the first of two approvals."""
    taken = await pause(
        given, await given.running(), TWO, timeout_in_ms=1_000, timeout_behavior="auto_resume"
    )
    await send(engine, taken.execution_id, source="ada")
    match end:
        case "timeout":
            clock.advance(ms=1_000)
            await engine.expire_due_suspensions()
        case "operator":
            await engine.resume_execution(taken.execution_id, trigger_type="operator")
        case _:
            await engine.cancel_execution(taken.execution_id, reason="enough")
            await engine.replay_execution(taken.execution_id)
    assert await kept(engine, taken.execution_id) == [("go", "ada")]
    claimed = await given.taken()
    await pause(given, claimed, TWO)
    assert effect_of(await send(engine, taken.execution_id, source="bob")) is SignalEffect.SATISFIED
    assert await counted(engine, claimed) == ["ada", "bob"]


async def test_a_wait_takes_over_every_waitpoint_of_its_names(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    one, two, other = [
        await engine.create_waitpoint(claimed.handle, key, expires_in_ms=TTL_MS)
        for key in ("a", "a", "c")
    ]
    outcome = await engine.suspend(
        claimed.handle, resume_condition=all_of_waitpoints(["a", "b"]), take_pending=True
    )
    assert isinstance(outcome, Suspended)
    details = outcome.details
    bound = [details.waitpoint_id, *(each.waitpoint_id for each in details.additional_waitpoints)]
    assert bound[:2] == sorted([one.waitpoint_id, two.waitpoint_id])
    assert (len(bound), other.waitpoint_id in bound) == (3, False)


# Own names ----------------------------------------------------------------------------


async def test_a_token_is_good_for_its_own_name_only(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    early = await engine.create_waitpoint(
        claimed.handle, "reject", expires_in_ms=TTL_MS, own_name_only=True
    )

    async def use(name: str) -> SignalEffect:
        answer = await engine.deliver_signal(
            claimed.execution_id,
            early.waitpoint_id,
            waitpoint_token=early.waitpoint_token,
            signal_name=name,
        )
        return effect_of(answer)

    async with refused(engine, WrongSignalName):
        await use("approve")
    await pause(
        given,
        claimed,
        Count(1, CountKind.DISTINCT_SIGNALS, ("approve", "reject")),
        waitpoints=[
            FreshWaitpoint(waitpoint_key="approve", own_name_only=True),
            FreshWaitpoint(waitpoint_key="reject", own_name_only=True),
        ],
        take_pending=True,
    )
    async with refused(engine, WrongSignalName):
        await use("approve")
    assert await use("reject") is SignalEffect.SATISFIED
