"""Several want to end an execution at once: one does, once, and the others learn of it."""

import asyncio
from collections.abc import Coroutine

import pytest

from flowfabric import Engine, FlowFabricError
from flowfabric.core.results import Cancelled, Claimed, Completed
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionNotActive, InvalidInput
from tests.races.given import create, running
from tests.races.rival import DEADLOCKS, Rival

CANCELLERS = 8
ROUNDS = 40

COMPLETIONS = "select count(*) from event_log where category = 'completion'"
REVOCATIONS = "select count(*) from event_log where category = 'lease' and event_type = 'revoked'"
LOCK_ALL = "select 1 from live for update"

Ending = Completed | Cancelled | FlowFabricError


async def ending(call: Coroutine[object, object, Completed | Cancelled]) -> Ending:
    try:
        return await call
    except FlowFabricError as error:
        return error


def cancel(engine: Engine, execution_id: str) -> Coroutine[object, object, Ending]:
    return ending(engine.cancel_execution(execution_id, reason="unwanted"))


def complete(engine: Engine, claimed: Claimed) -> Coroutine[object, object, Ending]:
    return ending(engine.complete(claimed.handle, b"done"))


async def test_of_many_cancels_all_succeed_and_one_is_told(engine: Engine, rival: Rival) -> None:
    (claimed,) = await running(engine)
    answer = Cancelled(execution_id=claimed.execution_id, public_state=PublicState.CANCELLED)
    async with rival.holding(LOCK_ALL):
        calls = [cancel(engine, claimed.execution_id) for _ in range(CANCELLERS)]
        cancelling = await rival.queued(*calls)

    assert await asyncio.gather(*cancelling) == [answer] * CANCELLERS
    assert await rival.count(COMPLETIONS) == 1
    assert await rival.count(REVOCATIONS) == 1
    assert await rival.count("select lease_epoch from execution_now") == claimed.lease_epoch + 1


async def test_a_cancel_of_waiting_work_is_told_once_and_revokes_nothing(
    engine: Engine, rival: Rival
) -> None:
    execution_id = await create(engine)
    outcomes = await asyncio.gather(*(cancel(engine, execution_id) for _ in range(CANCELLERS)))

    assert {type(outcome) for outcome in outcomes} == {Cancelled}
    assert await rival.count(COMPLETIONS) == 1
    assert await rival.count(REVOCATIONS) == 0


async def test_a_complete_that_comes_first_stands(engine: Engine, rival: Rival) -> None:
    (claimed,) = await running(engine)
    async with rival.holding(LOCK_ALL):
        completing, cancelling = await rival.queued(
            complete(engine, claimed), cancel(engine, claimed.execution_id)
        )

    assert isinstance(await completing, Completed)
    assert isinstance(await cancelling, InvalidInput)
    assert await engine.read_execution_state(claimed.execution_id) is PublicState.COMPLETED
    assert await engine.get_execution_result(claimed.execution_id) == b"done"
    assert await rival.count(COMPLETIONS) == 1


async def test_a_cancel_that_comes_first_stands(engine: Engine, rival: Rival) -> None:
    (claimed,) = await running(engine)
    async with rival.holding(LOCK_ALL):
        cancelling, completing = await rival.queued(
            cancel(engine, claimed.execution_id), complete(engine, claimed)
        )

    assert isinstance(await cancelling, Cancelled)
    assert isinstance(await completing, ExecutionNotActive)
    assert await engine.read_execution_state(claimed.execution_id) is PublicState.CANCELLED
    assert await engine.get_execution_result(claimed.execution_id) is None
    assert await rival.count(COMPLETIONS) == 1


async def test_whoever_wins_there_is_one_end(engine: Engine, rival: Rival) -> None:
    """Complete, cancel, fail and give up, all at once, many times over."""
    held = await running(engine, ROUNDS)

    async def race(claimed: Claimed) -> list[bool]:
        handle, execution_id = claimed.handle, claimed.execution_id
        outcomes = await asyncio.gather(
            engine.complete(handle, b"done"),
            engine.cancel_execution(execution_id, reason="unwanted"),
            engine.fail(handle, "broken"),
            engine.cancel(handle, "no use"),
            return_exceptions=True,
        )
        unexpected = [
            outcome
            for outcome in outcomes
            if isinstance(outcome, BaseException)
            and not isinstance(outcome, ExecutionNotActive | InvalidInput)
        ]
        assert unexpected == []
        return [not isinstance(outcome, BaseException) for outcome in outcomes]

    won = await asyncio.gather(*(race(claimed) for claimed in held))
    # An operator may cancel what its worker has just given up.
    assert {tuple(each) for each in won} <= {
        (True, False, False, False),
        (False, True, False, False),
        (False, False, True, False),
        (False, True, False, True),
        (False, False, False, True),
    }
    assert await rival.count(COMPLETIONS) == ROUNDS
    assert await rival.count(REVOCATIONS) == ROUNDS
    twice = (
        "select count(*) from (select 1 from event_log group by execution_id having count(*) <> 3)"
    )
    assert await rival.count(f"{twice} as odd") == 0
    assert await rival.count(DEADLOCKS) == 0


@pytest.mark.parametrize("backwards", [False, True])
async def test_batches_in_opposite_order_do_not_block_each_other(
    engine: Engine, rival: Rival, backwards: bool
) -> None:
    held = await running(engine, ROUNDS)
    ids = [claimed.execution_id for claimed in held]
    there, back = (ids, ids[::-1]) if not backwards else (ids[::-1], ids)
    outcomes = await asyncio.gather(
        *(engine.cancel_executions(each, reason="unwanted") for each in (there, back) * 4)
    )
    assert {type(outcome) for batch in outcomes for outcome in batch} == {Cancelled}
    assert await rival.count(COMPLETIONS) == ROUNDS
    assert await rival.count(DEADLOCKS) == 0
