"""How often the way to an execution and back goes over the network."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import asyncpg
import pytest
from msgspec import structs

from flowfabric import Engine, connect
from flowfabric.core.conditions import ByName, Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import Claimed, Created
from flowfabric.core.steps import NewStep
from flowfabric.core.waitpoints import FreshWaitpoint
from flowfabric.core.workers import Refreshed
from flowfabric.engine import gated_claims
from flowfabric.engine.steps import StepReport
from flowfabric.engine.suspensions import SuspendOutcome
from flowfabric.engine.topics import DISPATCH_TOPIC
from flowfabric.engine.waitpoints import claimed_progress
from tests.conformance.graphs import new_graph

SUSPENSION_ID = "00000000-0000-4000-8000-00000000000a"
WAITPOINT_ID = "00000000-0000-4000-8000-00000000000b"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements this process sends, but for hints, for which nobody waits."""
    seen: list[str] = []

    def noted(call: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def noting(connection: object, query: str, *args: object, **named: object) -> object:
            if not query.startswith("select set_config"):
                seen.append(query)
            return await call(connection, query, *args, **named)

        return noting

    for verb in ("fetch", "execute"):
        monkeypatch.setattr(asyncpg.Connection, verb, noted(getattr(asyncpg.Connection, verb)))
    return seen


@pytest.fixture
async def engine(postgres_database: str) -> AsyncIterator[Engine]:
    async with await connect(postgres_database) as opened:
        yield opened


@pytest.fixture
async def claimed(engine: Engine) -> Claimed:
    await engine.create_execution(NewExecution(execution_kind="work"))
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    # Whatever is made once per database has been made.
    await engine.create_waitpoint(claimed.handle, "other", expires_in_ms=60_000)
    return claimed


async def suspend(engine: Engine, claimed: Claimed) -> SuspendOutcome:
    """As a worker does it, which names everything itself."""
    return await engine.suspend(
        claimed.handle,
        resume_condition=Single("gate", ByName("approved")),
        waitpoints=[FreshWaitpoint(waitpoint_key="gate", waitpoint_id=WAITPOINT_ID)],
        suspension_id=SUSPENSION_ID,
        idempotency_key=SUSPENSION_ID,
    )


async def test_a_submission(engine: Engine, sent: list[str]) -> None:
    """Of kinds that are known; registering one takes more."""
    work = NewExecution(execution_kind="work")
    await engine.create_execution(work)
    sent.clear()
    await engine.create_executions([work, work])
    assert len(sent) == 1, sent


@pytest.mark.parametrize(
    "asked",
    [
        {"idempotency_key": "k"},
        {"execution_id": "own"},
        {"tags": {"some.tag": "v"}},
        {"delay_ms": 60_000},
        {"execution_deadline_at_ms": 4_000_000_000_000},
        {"idempotency_key": "k", "tags": {"some.tag": "v"}, "delay_ms": 60_000},
    ],
    ids=str,
)
async def test_a_submission_of_more_than_work(
    engine: Engine, sent: list[str], asked: dict[str, object]
) -> None:
    await engine.create_execution(NewExecution(execution_kind="work"))
    sent.clear()
    request = structs.replace(NewExecution(execution_kind="work"), **asked)
    assert isinstance(await engine.create_execution(request), Created)
    assert len(sent) == 1, sent


async def test_asking_what_is_due(engine: Engine, claimed: Claimed, sent: list[str]) -> None:
    """Every idle process does, every few seconds."""
    sent.clear()
    assert "lease_expiry" in await engine.next_due()
    assert len(sent) == 1, sent


async def test_a_worker_says_that_it_is_alive(engine: Engine, sent: list[str]) -> None:
    """Every idle worker does, and frees what was kept back for one like it."""
    await engine.register_worker(
        ["default"], worker_id="w", worker_instance_id="w-1", liveness_ttl_ms=60_000
    )
    sent.clear()
    assert isinstance(await engine.heartbeat_worker("w-1"), Refreshed)
    assert len(sent) == 2, sent


async def test_an_idle_worker_is_told_of_limits(
    engine: Engine, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While hints arrive it need not ask for the first; while they do not, it asks."""
    monkeypatch.setattr(gated_claims, "ASK_AGAIN_S", -1.0)

    async def asked() -> int:
        sent.clear()
        assert await engine.claim(worker_id="w", worker_instance_id="w-1") is None
        return len(sent)

    assert [await asked(), await asked()] == [2, 2]
    with engine.store.hints(["nothing"]) as hints:
        while not engine.store.hints_are_live:
            await hints.wait(1)
    # Whatever was hinted before may have been missed.
    assert [await asked(), await asked(), await asked()] == [2, 1, 1]


@pytest.mark.parametrize(
    ("shape", "passing", "trips"),
    [
        ({"b": "a"}, False, 2),
        ({"b": "a"}, True, 2),
        ({"b": "a", "c": "a", "d": "a"}, True, 2),
        # What others passed before has to be looked for.
        ({"c": "a b"}, True, 3),
    ],
)
async def test_a_hop_from_parent_to_child(
    engine: Engine, sent: list[str], shape: dict[str, str], passing: bool, trips: int
) -> None:
    graph = await new_graph(engine)
    await graph.build(shape, passing=passing)
    for parent in [name for name in graph.ids if name not in shape]:
        claimed = await graph.claimed(parent)
        sent.clear()
        await engine.complete(claimed.handle, b"1")
        assert len(sent) == 1, sent
        sent.clear()
        await engine.dispatch_completions()
    assert len(sent) == trips, sent
    assert len(await graph.claim()) == len(shape)


@pytest.mark.parametrize(
    ("shape", "passing", "trips"),
    [
        ({"b": "a", "c": "b"}, False, [1, 1, 3]),
        ({"b": "a", "c": "b"}, True, [1, 1, 3]),
        # The first end shows that the statement is not for this flow.
        ({"b": "a", "c": "a", "d": "b c"}, False, [3, 2, 2, 2]),
    ],
)
async def test_ends_of_members_where_this_process_dispatches(
    engine: Engine, sent: list[str], shape: dict[str, str], passing: bool, trips: list[int]
) -> None:
    graph = await new_graph(engine)
    await graph.build(shape, passing=passing)
    taken: list[int] = []
    with engine.store.hints([DISPATCH_TOPIC]):
        while claimed := await engine.claim(worker_id="w", worker_instance_id="w-1"):
            sent.clear()
            await engine.complete(claimed.handle, b"1")
            taken.append(len(sent))
    assert taken == trips
    assert set((await graph.states()).values()) == {"completed"}


async def test_whoever_tells_dependents_goes_before_the_next_claim(
    engine: Engine, sent: list[str]
) -> None:
    graph = await new_graph(engine)
    await graph.build({"b": "a"})
    claimed = await graph.claimed("a")
    listening = asyncio.Event()

    async def tell() -> None:
        with engine.store.hints([DISPATCH_TOPIC]) as hints:
            listening.set()
            while not await hints.wait(60):
                pass
        await engine.dispatch_completions()

    telling = asyncio.create_task(tell())
    await listening.wait()
    sent.clear()
    await engine.complete(claimed.handle)
    await engine.claim(worker_id="w", worker_instance_id="w-1")
    await telling
    assert [each.split(" ")[1] for each in sent[:2]] == ["Complete", "Endings"]


async def test_a_pause_and_a_signal_by_name(
    engine: Engine, claimed: Claimed, sent: list[str]
) -> None:
    await suspend(engine, claimed)
    assert len(sent) == 2, sent
    sent.clear()
    await engine.deliver_operator_signal(claimed.execution_id, "gate", signal_name="approved")
    assert len(sent) == 1, sent
    sent.clear()
    progress = await engine.read_progress(claimed.execution_id)
    assert len(sent) == 1, sent
    assert progress.pause is not None
    assert progress.pause.resumed
    sent.clear()
    resumed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert len(sent) == 1, sent
    assert resumed is not None
    assert resumed.progress is not None
    assert claimed_progress(resumed.progress) == progress


@pytest.mark.parametrize(
    ("results", "is_told"),
    [
        ([b"\xff" * 60] * 100, True),
        ([b"1"] * 101, False),
        ([b"1" * 10_000] * 2, False),
    ],
    ids=["little", "many steps", "large results"],
)
async def test_a_claim_tells_what_earlier_runs_have_left_if_that_is_little(
    engine: Engine, claimed: Claimed, results: list[bytes], is_told: bool
) -> None:
    steps = [NewStep(step_key=f"{n:03}", result=each) for n, each in enumerate(results)]
    await engine.record_steps([StepReport(handle=claimed.handle, step=step) for step in steps])
    await engine.hand_back_many([claimed.handle], reason="stopped")
    again = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert again is not None
    progress = await engine.read_progress(claimed.execution_id)
    assert [step.result for step in progress.steps] == results
    assert (again.progress is not None) is is_told
    assert again.progress is None or claimed_progress(again.progress) == progress


SLOW = """
alter table flowfabric.lane rename to quick_lane;
create function flowfabric.waited_for() returns boolean language plpgsql volatile as $$
begin
    if current_setting('test.slow', true) = 'on' then
        perform pg_advisory_xact_lock_shared(1);
    end if;
    return true;
end $$;
create view flowfabric.lane as select * from flowfabric.quick_lane where flowfabric.waited_for();
"""
"""Slow connections wait where a claim looks at lanes: it has its snapshot by then."""
WAITING = "select exists (select from pg_locks where locktype = 'advisory' and not granted)"


async def test_a_claim_leaves_alone_what_has_changed_since_it_looked(
    engine: Engine, claimed: Claimed, postgres_database: str
) -> None:
    """Another worker's whole turn passes before its lock: it would not see the steps of that."""
    await engine.hand_back_many([claimed.handle], reason="stopped")
    holding = await asyncpg.connect(postgres_database)
    await holding.execute(SLOW)
    await holding.execute("select pg_advisory_lock(1)")
    async with await connect(f"{postgres_database}?test.slow=on") as slow:
        claiming = asyncio.create_task(slow.claim(worker_id="w", worker_instance_id="w-1"))
        while not await holding.fetchval(WAITING):
            assert not claiming.done(), "it has to wait"
        other = await engine.claim(worker_id="w", worker_instance_id="w-1")
        assert other is not None
        await engine.record_steps(
            [StepReport(handle=other.handle, step=NewStep(step_key="one", result=b"1"))]
        )
        await engine.hand_back_many([other.handle], reason="stopped")
        await holding.close()
        assert await claiming is None
    again = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert again is not None
    assert again.progress is not None
    assert [step.step_key for step in claimed_progress(again.progress).steps] == ["one"]


async def test_a_second_pause_and_its_signal(
    engine: Engine, claimed: Claimed, sent: list[str]
) -> None:
    """Of an attempt that has a row by now."""
    await suspend(engine, claimed)
    await engine.deliver_operator_signal(claimed.execution_id, "gate", signal_name="approved")
    resumed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert resumed is not None
    sent.clear()
    await engine.suspend(resumed.handle, resume_condition=Single("gate", ByName("approved")))
    assert len(sent) == 2, sent
    sent.clear()
    await engine.deliver_operator_signal(claimed.execution_id, "gate", signal_name="approved")
    assert len(sent) == 1, sent


async def test_a_signal_with_a_token(engine: Engine, claimed: Claimed, sent: list[str]) -> None:
    paused = await suspend(engine, claimed)
    sent.clear()
    await engine.deliver_signal(
        claimed.execution_id,
        paused.details.waitpoint_id,
        waitpoint_token=paused.details.waitpoint_token,
        signal_name="approved",
    )
    assert len(sent) == 3, sent
