"""Suspends and signals write without holding locks: whoever comes between is noticed."""

import asyncio

import pytest

from flowfabric import Engine, connect
from flowfabric.core.conditions import ByName, Single
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.core.records import SignalEffect
from flowfabric.core.results import Claimed
from flowfabric.core.signals import SignalAccepted
from flowfabric.engine.suspensions import Suspended, SuspendOutcome
from flowfabric.errors import AlreadySuspended, LeaseConflict
from tests.races.given import running
from tests.races.rival import Rival

APPROVED = Single("gate", ByName("approved"))
OTHER = '{"Single":{"waitpoint_key":"gate","matcher":{"ByName":"other"}}}'
SECRET = "ab" * 32


async def suspend(
    engine: Engine, claimed: Claimed, *, idempotency_key: str | None = None
) -> SuspendOutcome:
    return await engine.suspend(
        claimed.handle, resume_condition=APPROVED, idempotency_key=idempotency_key
    )


async def paused(engine: Engine) -> ExecutionId:
    (claimed,) = await running(engine)
    await suspend(engine, claimed)
    return claimed.execution_id


async def signal(engine: Engine, execution_id: ExecutionId) -> SignalEffect:
    answer = await engine.deliver_operator_signal(execution_id, "gate", signal_name="approved")
    assert isinstance(answer, SignalAccepted)
    return answer.effect


async def signalled_while(
    engine: Engine, rival: Rival, execution_id: ExecutionId, statement: str
) -> SignalEffect:
    """Signal what the rival holds: it has been read by then, and is not written yet."""
    async with rival.holding(f"{statement} where execution_id = '{uuid_of(execution_id)}'"):
        (waiting,) = await rival.queued(signal(engine, execution_id))
    return await waiting


@pytest.mark.parametrize("table", ["live", "waitpoint"])
async def test_a_signal_counts_on_top_of_what_was_counted_meanwhile(
    engine: Engine, rival: Rival, table: str
) -> None:
    execution_id = await paused(engine)
    counted = f"update {table} set signal_count = 5"
    effect = await signalled_while(engine, rival, execution_id, counted)
    assert effect is SignalEffect.SATISFIED
    assert await rival.value(f"select signal_count from {table}") == 6
    assert await rival.count("select count(*) from signal") == 1


async def test_a_signal_is_judged_by_the_condition_as_it_is_when_it_counts(
    engine: Engine, rival: Rival
) -> None:
    execution_id = await paused(engine)
    changed = f"update suspension set resume_condition = '{OTHER}'"
    effect = await signalled_while(engine, rival, execution_id, changed)
    assert effect is SignalEffect.APPENDED
    assert await rival.value("select public_state from live") == "suspended"
    assert await rival.count("select count(*) from suspension where closed_at_ms is null") == 1


async def test_a_signal_waits_for_who_holds_a_row_and_leaves_it_as_it_is(
    engine: Engine, rival: Rival
) -> None:
    execution_id = await paused(engine)
    held = "select 1 from live where execution_id = '" + uuid_of(execution_id)
    async with rival.holding(f"{held}' for update"):
        (waiting,) = await rival.queued(signal(engine, execution_id))
    assert await waiting is SignalEffect.SATISFIED


async def test_a_suspend_is_refused_when_the_lease_is_lost_between_its_read_and_its_write(
    engine: Engine, rival: Rival
) -> None:
    # The first pause of all makes the key that signs tokens, under lock.
    await paused(engine)
    (claimed,) = await running(engine)
    lost = "update live set lease_epoch = lease_epoch + 1"
    async with rival.holding(f"{lost} where execution_id = '{uuid_of(claimed.execution_id)}'"):
        (waiting,) = await rival.queued(suspend(engine, claimed, idempotency_key="pause"))
    with pytest.raises(LeaseConflict):
        await waiting
    for table in ("suspension", "waitpoint"):
        assert await rival.count(f"select count(*) from {table}") == 1
    assert await rival.count("select count(*) from suspend_dedup") == 0


async def test_two_suspends_at_once_with_one_key_get_one_answer(
    engine: Engine, rival: Rival
) -> None:
    for claimed in await running(engine, 50):
        first, second = await asyncio.gather(
            suspend(engine, claimed, idempotency_key="pause"),
            suspend(engine, claimed, idempotency_key="pause"),
        )
        assert isinstance(first, Suspended)
        assert first == second
    assert await rival.count("select count(*) from suspension") == 50


async def test_of_two_suspends_at_once_without_a_key_one_comes_too_late(
    engine: Engine, rival: Rival
) -> None:
    for claimed in await running(engine, 50):
        outcomes = await asyncio.gather(
            suspend(engine, claimed), suspend(engine, claimed), return_exceptions=True
        )
        assert {type(each) for each in outcomes} == {Suspended, AlreadySuspended}
    assert await rival.count("select count(*) from suspension") == 50


async def test_a_key_that_another_engine_has_rotated_to_signs_the_next_token(
    engine: Engine, postgres_database: str
) -> None:
    before, after = await running(engine, 2)
    old = await suspend(engine, before)
    async with await connect(postgres_database) as other:
        await other.rotate_waitpoint_hmac_secret_all("next", SECRET)
    new = await suspend(engine, after)
    assert new.details.waitpoint_token.reveal().partition(":")[0] == "next"
    assert old.details.waitpoint_token.reveal().partition(":")[0] != "next"
    for claimed, made in ((before, old), (after, new)):
        answer = await engine.deliver_signal(
            claimed.execution_id,
            made.details.waitpoint_id,
            waitpoint_token=made.details.waitpoint_token,
            signal_name="approved",
        )
        assert isinstance(answer, SignalAccepted)
        assert answer.resumed
