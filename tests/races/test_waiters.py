"""Executions that wait for others are woken although somebody holds one of them."""

from flowfabric import Engine
from flowfabric.core.ids import uuid_of
from flowfabric.core.states import PublicState
from flowfabric.engine.shell import Swept
from tests.races.given import running
from tests.races.rival import Rival


async def test_a_waiting_execution_that_is_locked_holds_up_no_other(
    engine: Engine, rival: Rival
) -> None:
    locked, free, first, second = await running(engine, 4)
    await engine.await_executions(locked.handle, [first.execution_id, second.execution_id])
    await engine.await_executions(free.handle, [second.execution_id])
    await engine.complete(first.handle)
    await engine.complete(second.handle)
    lock = f"where execution_id = '{uuid_of(locked.execution_id)}' for update"
    async with rival.holding(f"select from live {lock}"):
        assert await engine.wake_awaiting() == Swept(acted=0, full=False, held=True)
        assert await engine.read_execution_state(free.execution_id) is PublicState.WAITING
    state = await engine.read_execution_state(locked.execution_id)
    assert state is PublicState.WAITING_CHILDREN
    assert await engine.wake_awaiting() == Swept(acted=2, full=False)
    assert await engine.read_execution_state(locked.execution_id) is PublicState.WAITING
    assert await engine.wake_awaiting() == Swept(acted=0, full=False)
