"""What a worker does with handlers that behave."""

import asyncio
import contextvars
import itertools
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ParamSpec, TypedDict, TypeVar

import pytest

from flowfabric import App, Context, DoNotRetry, Retry, WorkerSettings
from flowfabric.core.diagnosis import Cause
from flowfabric.core.results import Completed
from flowfabric.core.states import PublicState
from flowfabric.engine.executions import Completion
from flowfabric.errors import ExecutionCancelled, ExecutionExpired, ExecutionFailed, FlowFabricError
from tests.apps import PATIENCE_S, reached, working
from tests.conformance.observed import execution_of

Call = Callable[[], Awaitable[object]]
P = ParamSpec("P")
T = TypeVar("T")

AT_ONCE = Retry(max_retries=3, delay=0)


@dataclass
class Draft:
    title: str
    written: datetime


async def test_an_async_handler_gets_decoded_arguments_and_returns_a_typed_result(
    app: App,
) -> None:
    @app.task
    async def revise(ctx: Context, draft: Draft, *, suffix: str = "!") -> Draft:
        return Draft(draft.title + suffix, draft.written)

    at = datetime(2026, 1, 2, tzinfo=UTC)
    async with working(app):
        run = await app.submit(revise, Draft("a", at), suffix="?")
        assert await run.result(timeout="20s") == Draft("a?", at)


async def test_a_plain_handler_runs_in_a_thread_with_the_context_variables_of_its_middleware(
    app: App,
) -> None:
    request_id = contextvars.ContextVar[str]("request_id")

    @app.middleware
    async def number(ctx: Context, call: Call) -> object:
        request_id.set(ctx.execution_id)
        return await call()

    @app.task
    def where(ctx: Context) -> tuple[bool, str]:
        on_main = threading.current_thread() is threading.main_thread()
        return on_main, request_id.get()

    async with working(app):
        run = await app.submit(where)
        assert await run.result(timeout="20s") == (False, run.execution_id)


async def test_no_handler_sees_the_context_variables_of_another(app: App) -> None:
    tenant = contextvars.ContextVar[str]("tenant", default="nobody")
    seen: list[str] = []

    @app.task
    async def work(name: str) -> None:
        seen.append(tenant.get())
        tenant.set(name)

    # One slot: who leaves it starts the next.
    async with working(app, concurrency=1, prefetch=2):
        runs = await app.submit_many([work("ada"), work("bob"), work("eve")])
        for run in runs:
            await run.result()
    assert seen == ["nobody"] * 3


async def test_a_result_on_its_way_holds_neither_a_slot_nor_a_task(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, second = asyncio.Event(), asyncio.Event()

    @app.task
    async def work(number: int) -> None:
        if number == 2:
            second.set()

    await app.open()
    complete_many = app.engine.complete_many

    async def later(completions: Sequence[Completion]) -> Sequence[Completed | FlowFabricError]:
        await gate.wait()
        return await complete_many(completions)

    monkeypatch.setattr(app.engine, "complete_many", later)
    async with working(app, concurrency=1):
        runs = await app.submit_many([work(1), work(2)])
        await second.wait()
        await asyncio.sleep(0)
        tasks = {task.get_name() for task in asyncio.all_tasks()}
        assert tasks.isdisjoint({run.execution_id for run in runs})
        assert [await run.state() for run in runs] == [PublicState.ACTIVE] * 2
        gate.set()
        for run in runs:
            await run.result()


async def test_a_failing_handler_is_retried_and_its_last_error_is_the_reason(app: App) -> None:
    tries: list[int] = []

    @app.task(retry=AT_ONCE)
    async def flaky(ctx: Context, succeed_at: int) -> int:
        tries.append(ctx.retry_count)
        if ctx.retry_count < succeed_at:
            raise ValueError(f"try {ctx.retry_count}")
        return ctx.retry_count

    async with working(app):
        assert await (await app.submit(flaky, 2)).result(timeout="20s") == 2
        assert tries == [0, 1, 2]
        with pytest.raises(ExecutionFailed, match="ValueError: try 3"):
            await (await app.submit(flaky, 9)).result(timeout="20s")


async def test_some_failures_are_final_whatever_the_retries(app: App) -> None:
    tries: list[str] = []

    @app.task(retry=Retry(max_retries=3, delay=0, never_on=(KeyError,)))
    async def fatal(how: str) -> None:
        tries.append(how)
        if how == "key":
            raise KeyError("k")
        raise DoNotRetry("no use")

    async with working(app):
        for how, reason in (("key", "KeyError"), ("own", "no use")):
            with pytest.raises(ExecutionFailed, match=reason):
                await (await app.submit(fatal, how)).result(timeout="20s")
    assert tries == ["key", "own"]


class Untellable(type):
    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("whether it is one cannot be told")


class Odd(Exception, metaclass=Untellable):
    pass


async def test_what_goes_wrong_in_the_worker_itself_fails_the_run(app: App) -> None:
    ran: list[int] = []

    @app.task(retry=Retry(max_retries=0, never_on=Odd))
    async def unlucky(ctx: Context) -> None:
        ran.append(ctx.attempt_index)
        raise ValueError("no luck")

    async with working(app):
        with pytest.raises(
            ExecutionFailed,
            match=r"RuntimeError: whether it is one cannot be told .*ValueError: no luck",
        ):
            await (await app.submit(unlucky)).result(timeout="20s")
    assert ran == [0]


async def test_a_handler_that_takes_too_long_is_stopped_and_expires(app: App) -> None:
    stopped = asyncio.Event()

    @app.task(timeout="200ms")
    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with working(app):
        run = await app.submit(slow)
        with pytest.raises(ExecutionExpired) as raised:
            await run.result(timeout="20s")
        await asyncio.wait_for(stopped.wait(), timeout=20)
        why = await run.why()
    assert raised.value.reason == "an attempt took longer than its timeout of 200ms"
    assert why.sentence == f"It expired: {raised.value.reason}."


async def test_a_deadline_that_passes_is_told_with_its_length(app: App) -> None:
    stop_reasons: list[str | None] = []

    @app.task
    async def slow(ctx: Context) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stop_reasons.append(ctx.stop_reason)

    async with working(app):
        with pytest.raises(ExecutionExpired) as raised:
            await (await app.submit(slow, deadline="500ms")).result(timeout="20s")
    assert raised.value.reason == "it did not end within its deadline of 500ms"
    assert stop_reasons == [f"expired: {raised.value.reason}"]


async def test_cancelling_reaches_the_handler_as_an_exception_it_can_clean_up_on(
    app: App,
) -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    @app.task
    async def endless(ctx: Context) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert (ctx.cancelled, ctx.stop_reason) == (True, "cancelled: changed my mind")
            cleaned.set()
            raise

    async with working(app):
        run = await app.submit(endless)
        await started.wait()
        await run.cancel("changed my mind")
        async with asyncio.timeout(20):
            await cleaned.wait()
        with pytest.raises(ExecutionCancelled, match="changed my mind"):
            await run.result(timeout="20s")


async def test_cancelling_reaches_a_plain_handler_at_its_next_word_to_the_context(
    app: App,
) -> None:
    started = threading.Event()
    ended: list[str] = []

    @app.task
    def endless(ctx: Context) -> None:
        started.set()
        try:
            while True:
                ctx.blocking.sleep(0.01)
        except asyncio.CancelledError:
            ended.append(str(ctx.stop_reason))
            raise

    async with working(app):
        run = await app.submit(endless)
        await asyncio.to_thread(started.wait)
        await run.cancel("stop it")
        with pytest.raises(ExecutionCancelled):
            await run.result(timeout="20s")
    assert ended == ["cancelled: stop it"]


async def test_progress_is_visible_while_it_runs(app: App) -> None:
    told, finish = asyncio.Event(), asyncio.Event()

    @app.task
    async def long(ctx: Context) -> None:
        await ctx.progress(40, "almost half")
        told.set()
        await finish.wait()

    async with working(app):
        run = await app.submit(long)
        await told.wait()
        seen = await run.snapshot()
        assert (seen.public_state, seen.progress_pct, seen.progress_message) == (
            PublicState.ACTIVE,
            40,
            "almost half",
        )
        finish.set()
        await run.result(timeout="20s")


async def test_middleware_sees_results_and_errors_from_the_outside_in(app: App) -> None:
    seen: list[str] = []

    @app.middleware
    async def outer(ctx: Context, call: Call) -> object:
        seen.append("outer")
        try:
            return await call()
        except ValueError:
            seen.append("error")
            raise

    @app.middleware
    async def inner(ctx: Context, call: Call) -> object:
        seen.append("inner")
        result = await call()
        seen.append(f"result {result}")
        return result

    @app.task
    async def half(number: int) -> int:
        if number % 2:
            raise ValueError("odd")
        return number // 2

    async with working(app):
        assert await (await app.submit(half, 4)).result(timeout="20s") == 2
        with pytest.raises(ExecutionFailed):
            await (await app.submit(half, 3)).result(timeout="20s")
    assert seen == ["outer", "inner", "result 2", "outer", "inner", "error"]


async def test_resources_are_opened_with_the_worker_found_by_type_and_closed_after_it(
    app: App,
) -> None:
    class Database:
        open = False

        async def __aenter__(self) -> "Database":
            self.open = True
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            self.open = False

    database = Database()
    app.provide(Database, lambda: database)

    @app.task
    async def use(ctx: Context) -> bool:
        return ctx.get(Database) is database and database.open

    async with working(app):
        assert await (await app.submit(use)).result(timeout="20s")
        assert database.open
    assert not database.open


async def test_lanes_and_capabilities_decide_who_runs_what(app: App) -> None:
    ran: list[str] = []

    @app.task(lane="gpu", capabilities=["gpu"])
    async def train(name: str) -> None:
        ran.append(name)

    @app.task
    async def tidy(name: str) -> None:
        ran.append(name)

    async with app:
        waiting = await app.submit(train, "train")
        done = await app.submit(tidy, "tidy")
        async with working(app, lanes=["default", "gpu"]):
            await done.result(timeout="20s")
            assert (await waiting.why()).cause == "no_worker"
        async with working(app, lanes={"gpu": 3, "default": 1}, capabilities=("gpu",)):
            await waiting.result(timeout="20s")
    assert ran == ["tidy", "train"]


class Given(TypedDict, total=False):
    lanes: list[str]
    concurrency: int
    settings: WorkerSettings


@pytest.mark.parametrize(
    "given",
    [
        Given(),
        Given(lanes=["mail"]),
        Given(settings=WorkerSettings(lease_ttl="10s")),
        Given(settings=WorkerSettings(lease_ttl="10s"), lanes=["mail"], concurrency=1),
        Given(settings=WorkerSettings(lanes=["other"]), lanes=["mail"]),
    ],
    ids=["nothing", "lanes", "settings", "settings and lanes", "other lanes"],
)
async def test_settings_leave_the_lanes_of_the_tasks_to_the_worker(app: App, given: Given) -> None:
    @app.task(lane="mail")
    async def post() -> str:
        return "posted"

    stop = asyncio.Event()
    async with app, asyncio.TaskGroup() as group:
        run = await app.submit(post)
        group.create_task(app.run_worker(stop=stop, signals=False, **given))
        assert await run.result(timeout="20s") == "posted"
        stop.set()


async def test_a_few_free_slots_are_used_while_long_handlers_hold_the_others(app: App) -> None:
    holding, finish = asyncio.Semaphore(0), asyncio.Event()

    @app.task
    async def hold() -> None:
        holding.release()
        await finish.wait()

    @app.task
    async def quick() -> str:
        return "done"

    async with working(app, concurrency=20):
        held = await app.submit_many([hold() for _ in range(18)])
        for _ in held:
            await holding.acquire()
        for _ in range(5):
            assert await (await app.submit(quick)).result(timeout="20s") == "done"
        finish.set()
        for run in held:
            await run.result(timeout="20s")


async def test_what_was_claimed_ahead_goes_to_others_when_no_slot_comes_free(app: App) -> None:
    finish = asyncio.Event()

    @app.task
    async def quick() -> None: ...

    @app.task
    async def hold() -> None:
        await finish.wait()

    async with working(app, concurrency=1, prefetch=2, worker_instance_id="w-1"):
        # From now on it takes them all for quick.
        for run in await app.submit_many([quick() for _ in range(10)]):
            await run.result(timeout="20s")
        held = await app.submit(hold)
        await reached(held, PublicState.ACTIVE)
        behind = await app.submit_many([quick(), quick()])
        for run in behind:
            await reached(run, PublicState.ACTIVE)
        async with working(app, concurrency=1, worker_instance_id="w-2"):
            for run in behind:
                await run.result(timeout="20s")
        finish.set()
        await held.result(timeout="20s")


def preceded(
    call: Callable[P, Awaitable[T]], before: Callable[[], Awaitable[None]]
) -> Callable[P, Awaitable[T]]:
    async def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        await before()
        return await call(*args, **kwargs)

    return inside


async def test_the_next_claim_leaves_before_what_the_last_one_brought_starts(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def quick() -> None: ...

    await app.open()
    runs = await app.submit_many([quick() for _ in range(12)])
    ids = {run.execution_id for run in runs}
    claim_many, started = app.engine.claim_many, list[int]()

    async def note_started() -> None:
        started.append(len(ids & {task.get_name() for task in asyncio.all_tasks()}))

    monkeypatch.setattr(app.engine, "claim_many", preceded(claim_many, note_started))
    async with working(app, concurrency=4, prefetch=4):
        for run in runs:
            await run.result(timeout="20s")
    assert len(started) >= 3
    assert set(started) == {0}
    # They waited for a claim to leave, not for a slot: none was handed back.
    stored = [await execution_of(app.engine, run.execution_id) for run in runs]
    assert [each.lease_epoch for each in stored] == [1] * 12


async def test_many_submissions_and_results_go_through_together(app: App) -> None:
    @app.task
    async def double(number: int) -> int:
        return 2 * number

    async with working(app, concurrency=50):
        runs = await app.submit_many([double(number) for number in range(300)])
        runs += await asyncio.gather(*(app.submit(double, number) for number in range(100)))
        results = await asyncio.gather(*(run.result(timeout="30s") for run in runs))
    assert results == [2 * n for n in range(300)] + [2 * n for n in range(100)]


async def until_present(app: App, wanted: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for _ in itertools.count():
            if bool((await app.engine.list_workers()).workers) is wanted:
                return
            await asyncio.sleep(0)


async def test_a_worker_that_was_told_to_stop_is_no_longer_there_for_new_work(app: App) -> None:
    begun, go_on, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> str:
        begun.set()
        await go_on.wait()
        return "done"

    async with app:
        worker = asyncio.create_task(app.run_worker(stop=stop, signals=False))
        run = await app.submit(work)
        await begun.wait()
        await until_present(app, True)
        stop.set()
        # While it still finishes what it has begun.
        await until_present(app, False)
        waiting = await app.submit(work)
        assert (await waiting.why()).cause is Cause.NO_WORKER
        go_on.set()
        await worker
        assert await run.result(timeout="20s") == "done"


async def test_a_worker_that_has_stopped_serves_nothing_any_more(app: App) -> None:
    """Not a minute later, when nobody has seen it for long enough."""

    @app.task
    async def idle() -> None: ...

    async with working(app):
        run = await app.submit(idle)
        await run.result(timeout="20s")
        await until_present(app, True)
    assert (await app.engine.list_workers()).workers == ()
    waiting = await app.submit(idle)
    assert (await waiting.why()).cause is Cause.NO_WORKER


async def test_cancelling_a_worker_hands_back_what_it_runs(app: App) -> None:
    """As a program does that runs one among its own tasks, and ends."""
    begun: asyncio.Queue[None] = asyncio.Queue()
    ended = asyncio.Event()

    @app.task(concurrency=1)
    async def work(ctx: Context) -> int:
        begun.put_nowait(None)
        if ctx.attempt_index == 0 and not ended.is_set():
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
        return ctx.attempt_index

    async with app:
        run = await app.submit(work)
        worker = asyncio.create_task(app.run_worker(signals=False))
        await begun.get()
        worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await worker
        assert ended.is_set()
        assert (await app.engine.list_workers()).workers == ()
        async with working(app):
            # Sooner than its lease would have run out.
            assert await run.result(timeout="20s") == 1
