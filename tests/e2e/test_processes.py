"""Workers that die, and workers that are asked to go."""

from pathlib import Path

import pytest

from flowfabric import App
from flowfabric.core.states import PublicState
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.errors import ExecutionFailed
from flowfabric.task import Task, TaskSettings
from tests.e2e.conftest import python, steps_run, worker_process
from tests.worker import processes


def remote(name: str) -> Task[..., object]:
    """A task whose code lives in the worker's process."""

    def anything(hold_after: int = 0, number: int = 0, seconds: float = 0) -> object: ...

    return Task(name, anything, TaskSettings())


BLOCKED = (
    "a handler blocks the event loop for more than 5.0 s; its leases are kept, but nothing else"
    " runs meanwhile. Make it a plain function, which runs in a thread. It is here: "
)


async def test_finished_steps_run_once_although_kill_9_strikes_between_them(
    store_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "steps.log"
    async with App(store_url) as app:
        run = await app.submit(remote("pipeline")(hold_after=2))
        async with worker_process(store_url, log) as victim:
            await victim.says("holding")
            victim.kill()
        assert steps_run(log) == {"step 1": 1, "step 2": 1}
        async with worker_process(store_url, log):
            assert await run.result(timeout="60s") == ["step 1", "step 2", "step 3"]
        snapshot = await run.snapshot()
    assert steps_run(log) == {"step 1": 1, "step 2": 1, "step 3": 1}
    assert (snapshot.total_attempt_count, snapshot.lease_reclaim_count) == (2, 1)


async def test_a_worker_asked_to_go_under_load_leaves_no_lease_behind(
    store_url: str, tmp_path: Path
) -> None:
    async with App(store_url) as app:
        await app.submit_many([remote("short")(number=n) for n in range(2_000)])
        async with worker_process(store_url, tmp_path / "log", lease_ttl="10m") as worker:
            for _ in range(100):
                await worker.says("done")
            worker.terminate()
            assert await worker.ended() == 0
        active = ExecutionFilter(states=(PublicState.ACTIVE,))
        assert (await app.engine.find_executions(active)).executions == ()
        done = ExecutionFilter(states=(PublicState.COMPLETED,))
        assert len((await app.engine.find_executions(done, limit=1_000)).executions) >= 100


async def test_a_worker_asked_to_go_hands_back_what_it_is_in_the_middle_of(
    store_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "steps.log"
    async with App(store_url) as app:
        run = await app.submit(remote("pipeline")(hold_after=1))
        async with worker_process(store_url, log, lease_ttl="10m") as worker:
            await worker.says("holding")
            worker.terminate()
            assert await worker.ended() == 0
        assert await run.state() is PublicState.WAITING
        async with worker_process(store_url, log, lease_ttl="10m"):
            await run.result(timeout="60s")
    assert steps_run(log) == {"step 1": 1, "step 2": 1, "step 3": 1}


async def test_a_handler_that_blocks_the_loop_for_half_a_minute_keeps_its_lease_and_is_named(
    store_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    async with App(store_url) as app:
        blocking = await app.submit(remote("block")(seconds=30))
        async with worker_process(store_url, log, lease_ttl="5s") as worker:
            await worker.says("blocking")
            async with worker_process(store_url, log, lease_ttl="5s") as other:
                await other.says("started")
                await (await app.submit(remote("short")(number=1))).result(timeout="20s")
                await worker.says(BLOCKED, more=True)
                assert await blocking.result(timeout="60s") == "done"
            await (await app.submit(remote("short")(number=2))).result(timeout="20s")
            worker.terminate()
            assert await worker.ended() == 0
        snapshot = await blocking.snapshot()
    assert (snapshot.total_attempt_count, snapshot.lease_reclaim_count) == (1, 0)


async def test_a_task_in_a_process_fails_if_importing_its_program_starts_a_worker(
    store_url: str,
) -> None:
    async with App(store_url) as app:
        run = await app.submit(processes.die)
        async with python("tests.e2e.unguarded", store_url):
            with pytest.raises(ExecutionFailed, match=r"before it could run anything; .*__main__"):
                await run.result(timeout="60s")
