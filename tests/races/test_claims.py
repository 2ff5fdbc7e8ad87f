"""Many workers ask at once: each execution goes to one of them, and nobody is let down."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from flowfabric import Engine
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.engine.executions import Completion
from tests.bulk import postgres_copies
from tests.races.given import claim, create
from tests.races.rival import DEADLOCKS, Rival

CLAIMERS = 16
EXECUTIONS = 5_000


async def work_until_empty(engine: Engine, worker: str, limit: int) -> list[ExecutionId]:
    """Claim, and complete every other batch, until there is nothing left."""
    mine: list[ExecutionId] = []
    for completes in (True, False) * EXECUTIONS:
        claimed = await claim(engine, worker, limit=limit)
        if not claimed:
            return mine
        mine += [each.execution_id for each in claimed]
        if completes:
            outcomes = await engine.complete_many([Completion(handle=c.handle) for c in claimed])
            assert {type(outcome).__name__ for outcome in outcomes} == {"Completed"}
    raise AssertionError("more claims than executions")


async def test_each_of_5000_executions_goes_to_one_of_16_claimers(
    engine: Engine, rival: Rival
) -> None:
    first = await create(engine)
    changes = {"created_at_ms": "t.created_at_ms + n / 10", "priority": "n % 3"}
    for copying in postgres_copies(uuid_of(first), EXECUTIONS - 1, 1, changes):
        await rival.execute(copying)

    shares = await asyncio.gather(
        *(work_until_empty(engine, f"worker-{i}", 1 + i) for i in range(CLAIMERS))
    )

    claimed = Counter(execution_id for share in shares for execution_id in share)
    assert len(claimed) == EXECUTIONS
    assert set(claimed.values()) == {1}
    assert (
        await rival.count("select count(*) from execution_now where lease_epoch = 1") == EXECUTIONS
    )
    once = "select count(*) from execution_now where total_attempt_count = 1"
    assert await rival.count(once) == EXECUTIONS
    assert await rival.count("select count(*) from attempt") == 0
    acquired = "select count(*) from event_log where event_type = 'acquired'"
    assert await rival.count(acquired) == EXECUTIONS
    completed = await rival.count(
        "select count(*) from execution_now where public_state = 'completed'"
    )
    assert await rival.count("select count(*) from event_log where category = 'completion'") == (
        completed
    )
    assert await rival.count("select count(*) from execution_now where ready") == 0
    assert await rival.count(DEADLOCKS) == 0


GATE = "4711"
TICKET = "4712"

# Of those who read lanes while somebody holds the gate, the first waits for it, in the
# middle of its statement. The others pass.
GATED_LANES = f"""
alter table lane rename to lane_behind_gate;
create function may_pass() returns boolean volatile language plpgsql as $$
begin
    if pg_try_advisory_xact_lock({TICKET}) then
        perform pg_advisory_xact_lock_shared({GATE});
    end if;
    return true;
end $$;
create view lane as select * from lane_behind_gate where may_pass();
"""


async def resume_elsewhere(engine: Engine, handle: Handle) -> None:
    """Another worker's turn with the execution: it sets the attempt aside, and time passes."""
    await engine.delay(handle, 0)
    await engine.promote_delayed(handle.execution_id)


async def revoke_elsewhere(engine: Engine, handle: Handle) -> None:
    await engine.revoke_lease(handle.execution_id, reason="needed elsewhere")


@pytest.mark.parametrize("elsewhere", [resume_elsewhere, revoke_elsewhere])
async def test_a_claim_that_began_before_another_workers_turn_leaves_no_attempt_behind(
    engine: Engine, rival: Rival, elsewhere: Callable[[Engine, Handle], Awaitable[None]]
) -> None:
    """The slow claim must not act on an attempt it cannot see yet."""
    execution_id = await create(engine)
    await rival.execute(GATED_LANES)
    async with rival.holding(f"select pg_advisory_xact_lock({GATE})"):
        (slow,) = await rival.queued(claim(engine, "slow"))
        (quick,) = await claim(engine, "quick")
        await elsewhere(engine, quick.handle)

    late = await slow or await claim(engine, "later")

    attempts = await engine.list_attempts(execution_id)
    open_attempts = [a for a in attempts if not a.attempt_state.is_terminal]
    assert [each.attempt_id for each in late] == [a.attempt_id for a in open_attempts]
    assert [each.lease_id for each in late] == [a.lease_id for a in open_attempts]
