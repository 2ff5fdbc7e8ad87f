"""Kill -9 in the middle of an execution: somebody else finishes it, and the dead stay dead."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flowfabric import Engine, connect
from flowfabric.core.creation import NewExecution
from flowfabric.core.handles import from_wire
from flowfabric.core.results import Created
from flowfabric.core.states import AttemptLifecycle, AttemptType, PublicState
from flowfabric.errors import ExecutionNotActive, LeaseConflict, StateConflict
from tests.e2e.conftest import PATIENCE_S, python
from tests.e2e.programs import Program

SHORT_MS = 700
LONG_MS = 60_000


class Hands:
    """A process of `tests.e2e.hands`."""

    def __init__(self, process: Program) -> None:
        self._process = process

    async def next_line(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return (await self._process.stdout.readline()).decode().strip()

    async def die(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def finish(self) -> None:
        self._process.stdin.write(b"\n")
        assert await self.next_line() == "completed"


@asynccontextmanager
async def hands(url: str, name: str, lease_ttl_ms: int) -> AsyncIterator[Hands]:
    async with python("tests.e2e.hands", url, name, str(lease_ttl_ms)) as process:
        started = Hands(process)
        assert await started.next_line() == "ready"
        yield started


async def history(engine: Engine, execution_id: str) -> list[tuple[str | None, str, str]]:
    """Who tried, why, and how it ended."""
    return [
        (attempt.worker_id, attempt.attempt_type, attempt.attempt_state)
        for attempt in await engine.list_attempts(execution_id)
    ]


async def refusal(engine: Engine, handle: bytes) -> type[Exception]:
    try:
        await engine.complete(handle, b"too late")
    except (LeaseConflict, ExecutionNotActive, StateConflict) as error:
        return type(error)
    raise AssertionError("the dead worker completed its execution")


async def test_another_process_finishes_what_a_killed_worker_held(store_url: str) -> None:
    async with await connect(store_url) as engine:
        created = await engine.create_execution(NewExecution(execution_kind="work"))
        assert isinstance(created, Created)
        execution_id = created.execution_id

        async with hands(store_url, "victim", SHORT_MS) as victim:
            dead_handle = bytes.fromhex(await victim.next_line())
            await victim.die()
        async with hands(store_url, "heir", LONG_MS) as heir:
            heirs_handle = from_wire(bytes.fromhex(await heir.next_line()))
            assert await refusal(engine, dead_handle) is LeaseConflict
            await heir.finish()
        assert await refusal(engine, dead_handle) is ExecutionNotActive

        assert heirs_handle.lease_epoch == from_wire(dead_handle).lease_epoch + 1
        assert await engine.read_execution_state(execution_id) is PublicState.COMPLETED
        assert await engine.get_execution_result(execution_id) == b"heir"
        assert await history(engine, execution_id) == [
            ("victim", AttemptType.INITIAL, AttemptLifecycle.INTERRUPTED_RECLAIMED),
            ("heir", AttemptType.RECLAIM, AttemptLifecycle.ENDED_SUCCESS),
        ]
        events = (await engine.read_events()).events
        assert [(event.category, event.event_type, event.lease_epoch) for event in events] == [
            ("lease", "acquired", 1),
            ("lease", "expired", 1),
            ("lease", "reclaimed", 2),
            ("lease", "revoked", 2),
            ("completion", "success", 2),
        ]
