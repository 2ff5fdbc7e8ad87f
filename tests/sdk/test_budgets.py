"""Budgets in programs: reported to by handlers and beside them, reserved and settled."""

import asyncio
import sqlite3
import uuid

import asyncpg
import psycopg
import pytest

from flowfabric import App, Context, Retry, testing
from flowfabric.errors import BudgetExceeded, ExecutionCancelled, ExecutionFailed, InvalidInput
from tests.apps import working


async def books(app: App, name: str = "team") -> tuple[int, int]:
    """What is used of a budget, and what is reserved."""
    status = await app.budgets.status(name)
    return status.usage.get("tokens", 0), status.reserved.get("tokens", 0)


async def test_a_program_creates_changes_and_resets_a_budget(waiting_app: App) -> None:
    budgets = waiting_app.budgets
    created = await budgets.create(
        "team", hard={"tokens": 10}, soft={"tokens": 8}, reset_every="1d"
    )
    assert (created.hard_limits, created.soft_limits) == ({"tokens": 10}, {"tokens": 8})
    assert created.reset_interval_ms == 86_400_000

    await budgets.report("team", {"tokens": 9})
    with pytest.raises(BudgetExceeded, match="no room for 2 tokens: 9 of 10 used") as refused:
        await budgets.report("team", {"tokens": 2})
    assert (refused.value.budget, refused.value.dimension) == ("team", "tokens")
    assert (refused.value.used, refused.value.limit) == (9, 10)
    changed = await budgets.change("team", hard={"tokens": 20}, reset_every=0)
    assert (changed.hard_limits, changed.next_reset_at_ms) == ({"tokens": 20}, None)
    await budgets.report("team", {"tokens": 2}, key="once")
    await budgets.report("team", {"tokens": 2}, key="once")
    assert await books(waiting_app) == (11, 0)

    assert (await budgets.reset("team")).usage == {"tokens": 0}


async def test_reports_made_at_once_are_all_counted(waiting_app: App) -> None:
    await waiting_app.budgets.create("team", hard={"tokens": 70})

    answers = await asyncio.gather(
        *(waiting_app.budgets.report("team", {"tokens": 1}) for _ in range(100)),
        return_exceptions=True,
    )

    assert sum(isinstance(each, BudgetExceeded) for each in answers) == 30
    assert await books(waiting_app) == (70, 0)


async def test_a_report_counts_if_and_when_the_caller_s_transaction_commits(
    waiting_app: App, store_url: str
) -> None:
    await waiting_app.budgets.create("team", hard={"tokens": 10})

    async def report(how: str) -> None:
        if store_url.startswith("sqlite"):
            connection = sqlite3.connect(store_url.removeprefix("sqlite:///"), isolation_level=None)
            connection.execute("begin immediate")
            await waiting_app.budgets.report("team", {"tokens": 3}, connection=connection)
            connection.execute(how)
            connection.close()
        else:
            joined = await asyncpg.connect(store_url)
            await joined.execute("begin")
            await waiting_app.budgets.report("team", {"tokens": 3}, connection=joined)
            await joined.execute(how)
            await joined.close()

    await report("rollback")
    assert await books(waiting_app) == (0, 0)
    await report("commit")
    assert await books(waiting_app) == (3, 0)


async def test_a_handler_is_counted_once_whatever_crashes(waiting_app: App) -> None:
    @waiting_app.task(retry=Retry(max_retries=3, delay=0.01))
    async def spend(ctx: Context) -> int:
        await ctx.report_usage("team", tokens=3)
        await ctx.report_usage("team", {"tokens": 4})
        async with ctx.reserve("team", tokens=50) as call:
            call.settle(tokens=5)
        if ctx.retry_count < 2:
            raise ConnectionError("the network is down")
        return ctx.retry_count

    async with working(waiting_app):
        assert await (await waiting_app.submit(spend)).result(timeout="20s") == 2

    assert await books(waiting_app) == (12, 0)


async def test_a_breach_reaches_the_handler_as_an_exception_it_can_catch(waiting_app: App) -> None:
    await waiting_app.budgets.create("team", hard={"tokens": 10})

    @waiting_app.task
    async def careful(ctx: Context) -> str:
        try:
            await ctx.report_usage("team", tokens=11)
        except BudgetExceeded as refused:
            return f"{refused.used} of {refused.limit}"
        return "fine"

    @waiting_app.task
    async def careless(ctx: Context) -> None:
        async with ctx.reserve("team", tokens=11):
            pass

    async with working(waiting_app):
        assert await (await waiting_app.submit(careful)).result(timeout="20s") == "0 of 10"
        with pytest.raises(ExecutionFailed, match="budget team has no room for 11 tokens: 0 of 10"):
            await (await waiting_app.submit(careless)).result(timeout="20s")

    assert await books(waiting_app) == (0, 0)


async def test_a_handler_is_warned_of_a_soft_limit_unless_that_is_allowed(
    waiting_app: App, caplog: pytest.LogCaptureFixture
) -> None:
    await waiting_app.budgets.create("team", soft={"tokens": 8})

    @waiting_app.task
    async def spend(ctx: Context) -> None:
        await ctx.report_usage("team", tokens=9)
        async with ctx.reserve("team", tokens=1):
            pass

    warnings = [
        "budget team is above its soft limit of 8 tokens: 9 used",
        "budget team is above its soft limit of 8 tokens: 10 used",
    ]
    async with working(waiting_app):
        await (await waiting_app.submit(spend)).result(timeout="20s")
        assert [each for each in caplog.messages if "budget" in each] == warnings
        await waiting_app.budgets.change("team", on_soft_limit="allow")
        await (await waiting_app.submit(spend)).result(timeout="20s")
    assert [each for each in caplog.messages if "budget" in each] == warnings


async def test_a_budget_may_fail_the_run_that_asks_too_much(waiting_app: App) -> None:
    await waiting_app.budgets.create("team", hard={"tokens": 10}, on_hard_limit="fail")
    caught: list[str] = []

    @waiting_app.task(retry=Retry(max_retries=3, delay=0.01))
    async def greedy(ctx: Context) -> None:
        try:
            await ctx.report_usage("team", tokens=11)
        except BudgetExceeded as refused:
            caught.append(refused.budget)
        await ctx.report_usage("team", tokens=1)

    async with working(waiting_app):
        run = await waiting_app.submit(greedy)
        with pytest.raises(ExecutionFailed, match="budget team has no room for 11 tokens"):
            await run.result(timeout="20s")

    # It learns of the refusal, or that it has failed, whichever comes first; once, not per retry.
    assert caught in (["team"], [])
    assert (await books(waiting_app))[1] == 0


async def test_a_block_counts_what_it_settles_or_all_it_held_or_nothing_if_it_raises(
    waiting_app: App,
) -> None:
    await waiting_app.budgets.create("team", hard={"tokens": 1_000})
    seen: list[tuple[int, int]] = []

    @waiting_app.task
    async def call(ctx: Context) -> None:
        async with ctx.reserve("team", tokens=100) as made:
            seen.append(await books(waiting_app))
            made.settle(tokens=42)
        async with ctx.reserve("team", tokens=100):
            pass
        try:
            async with ctx.reserve("team", tokens=100):
                raise ValueError
        except ValueError:
            seen.append(await books(waiting_app))

    async with working(waiting_app):
        await (await waiting_app.submit(call)).result(timeout="20s")

    assert seen == [(0, 100), (142, 0)]
    assert await books(waiting_app) == (142, 0)


@pytest.mark.parametrize("fails_in", ["block", "step", "replay"])
async def test_a_block_that_raised_is_held_and_counted_by_the_next_attempt(
    waiting_app: App, fails_in: str
) -> None:
    app, held = waiting_app, list[dict[str, int]]()

    async def ask(attempt: int) -> int:
        if attempt == 0:
            raise ConnectionError("the provider is down")
        return 40

    @app.task(retry=Retry(max_retries=0 if fails_in == "replay" else 1, delay="10ms"))
    async def call_model(ctx: Context) -> str:
        async with ctx.reserve("team", tokens=50) as call:
            held.append(dict((await app.budgets.status("team")).reserved))
            if fails_in == "block" and ctx.attempt_index == 0:
                raise ConnectionError("the provider is down")
            call.settle(tokens=await ctx.step("ask", ask, ctx.attempt_index))
        return "ok"

    async with app:
        await app.budgets.create("team", hard={"tokens": 100})
        async with working(app):
            run = await app.submit(call_model)
            if fails_in == "replay":
                with pytest.raises(ExecutionFailed):
                    await run.result(timeout="20s")
                await app.engine.replay_execution(run.execution_id)
            assert await run.result(timeout="20s") == "ok"
        assert held == [{"tokens": 50}, {"tokens": 50}]
        status = await app.budgets.status("team")
        assert (status.usage, status.reserved) == ({"tokens": 40}, {})


async def test_using_more_than_there_is_room_for_uses_the_budget_up_and_raises_each_time(
    waiting_app: App,
) -> None:
    app, told = waiting_app, list[str]()

    @app.task(retry=Retry(max_retries=2, delay="10ms"))
    async def call_model(ctx: Context) -> None:
        try:
            async with ctx.reserve("team", tokens=100) as call:
                call.settle(tokens=await ctx.step("ask", lambda: 900))
        except BudgetExceeded as error:
            told.append(str(error))
            raise

    async with app:
        await app.budgets.create("team", hard={"tokens": 500})
        async with working(app):
            run = await app.submit(call_model)
            with pytest.raises(ExecutionFailed):
                await run.result(timeout="20s")
        assert told == ["budget team has no room for 900 tokens: 500 of 500 used"] * 3
        status = await app.budgets.status("team")
        assert (status.usage, status.closed) == ({"tokens": 500}, True)


async def test_a_worker_says_once_that_a_budget_was_never_created(
    waiting_app: App, caplog: pytest.LogCaptureFixture
) -> None:
    app, name = waiting_app, f"taem-{uuid.uuid4()}"

    @app.task
    async def call_model(ctx: Context) -> None:
        async with ctx.reserve(name, tokens=10):
            pass
        await ctx.report_usage(name, tokens=1)

    async with app, working(app):
        for _ in range(2):
            await (await app.submit(call_model)).result(timeout="20s")
    said = [each.getMessage() for each in caplog.records if name in each.getMessage()]
    assert said == [
        f"budget {name} was never created in namespace default: it counts and limits nothing"
    ]


async def test_a_dimension_that_looks_mistyped_is_told_once(
    waiting_app: App, caplog: pytest.LogCaptureFixture
) -> None:
    app, name = waiting_app, f"team-{uuid.uuid4()}"

    @app.task
    async def call_model(ctx: Context) -> None:
        async with ctx.reserve(name, tokns=10, pages=1):
            pass
        await ctx.report_usage(name, tokens=1, pages=1)

    async with app, working(app):
        await app.budgets.create(name, hard={"tokens": 100})
        for _ in range(2):
            await (await app.submit(call_model)).result(timeout="20s")
        for _ in range(2):
            await app.budgets.report(name, {"tokenss": 1})
        app.blocking.budgets.report(name, {"toekns": 1})
    said = [each.getMessage() for each in caplog.records if name in each.getMessage()]
    assert said == [
        f"budget {name} counts {strange} and has no limit on it; did you mean tokens?"
        " (namespace default)"
        for strange in ("tokns", "tokenss", "toekns")
    ]


async def test_a_limit_of_nothing_is_refused_and_none_takes_it_away(waiting_app: App) -> None:
    async with waiting_app as app:
        refused = r"\[tokens\]: must be 1 or more, or None for no limit"
        with pytest.raises(InvalidInput, match=f"hard{refused}"):
            await app.budgets.create("team", hard={"tokens": 0})
        await app.budgets.create("team", hard={"tokens": 2}, soft={"tokens": 1})
        with pytest.raises(InvalidInput, match=f"hard{refused}"):
            await app.budgets.change("team", hard={"tokens": 0})
        with pytest.raises(InvalidInput, match=f"soft{refused}"):
            await app.budgets.change("team", soft={"tokens": 0})
        status = await app.budgets.change("team", hard={"tokens": None}, soft={"tokens": None})
        assert (status.hard_limits, status.soft_limits) == ({"tokens": 0}, {"tokens": 0})


async def test_a_budget_that_cancels_a_flow_names_it(waiting_app: App) -> None:
    async with waiting_app as app:
        with pytest.raises(InvalidInput, match="cancel_flow goes with the flow= to cancel"):
            await app.budgets.create("team", hard={"tokens": 1}, on_hard_limit="cancel_flow")


async def test_plain_functions_report_and_reserve_too(waiting_app: App) -> None:
    @waiting_app.task
    def call(ctx: Context) -> None:
        ctx.blocking.report_usage("team", tokens=1)
        with ctx.blocking.reserve("team", tokens=100) as made:
            made.settle(tokens=42)

    async with working(waiting_app):
        await (await waiting_app.submit(call)).result(timeout="20s")

    assert await books(waiting_app) == (43, 0)


async def test_a_reservation_that_a_pause_ended_is_made_again() -> None:
    app = App()

    @app.task
    async def call(ctx: Context) -> str:
        async with ctx.reserve("team", tokens=100) as made:
            said = await ctx.wait_for_signal("go", type=str)
            made.settle(tokens=42)
        await ctx.sleep("1h")
        return said.payload

    async with testing.engine(app=app) as local:
        await local.budgets.create("team", hard={"tokens": 100})
        run = await local.submit(call)
        await local.drain()
        assert await books(local) == (0, 0)
        await run.signal("go", "well")
        await local.drain()
        assert await books(local) == (42, 0)
        local.clock.advance("2h")
        await local.drain()
        assert await run.result() == "well"
        assert await books(local) == (42, 0)


async def test_budgets_of_two_namespaces_have_nothing_in_common(store_url: str) -> None:
    async with App(store_url, namespace="a") as one, App(store_url, namespace="b") as other:
        await one.budgets.report("team", {"tokens": 1})
        await other.budgets.report("team", {"tokens": 2})

        assert (await books(one), await books(other)) == ((1, 0), (2, 0))


async def test_mistakes_are_refused_where_they_are_made(waiting_app: App) -> None:
    seen: list[str] = []

    @waiting_app.task
    async def wrong(ctx: Context) -> None:
        for verb in (ctx.report_usage, ctx.reserve):
            for given in ({"tokens": -1}, {"_x": 1}):
                try:
                    verb("team", given)
                except InvalidInput as refused:
                    seen.append(refused.field)

    async with working(waiting_app):
        await (await waiting_app.submit(wrong)).result(timeout="20s")
    with pytest.raises(InvalidInput, match="give one of lane, task, whole_namespace and flow"):
        await waiting_app.budgets.create("team", lane="a", whole_namespace=True)

    assert seen == ["amounts[tokens]", "amounts"] * 2


async def test_runs_wait_while_a_budget_they_are_attached_to_is_used_up(waiting_app: App) -> None:
    @waiting_app.task(budget="team")
    async def attached(ctx: Context) -> str:
        return "done"

    @waiting_app.task
    async def plain(ctx: Context) -> str:
        return "done"

    await waiting_app.budgets.create("team", hard={"tokens": 10})
    await waiting_app.budgets.create("lab", hard={"tokens": 10})
    await waiting_app.budgets.report("team", {"tokens": 10})
    held = await waiting_app.submit(attached)
    twice = await waiting_app.submit(plain(), budget=["team", "lab"])
    free = await waiting_app.submit(plain(), budget="lab")
    async with working(waiting_app):
        assert await free.result(timeout="20s") == "done"
        assert [str(await each.state()) for each in (held, twice)] == ["waiting"] * 2
        await waiting_app.budgets.reset("team")
        assert await held.result(timeout="20s") == "done"
        assert await twice.result(timeout="20s") == "done"
    with pytest.raises(InvalidInput, match="budget"):
        waiting_app.task(budget=[""])(lambda: None)


async def test_the_nodes_of_a_flow_wait_for_its_budget_and_a_breach_may_cancel_it(
    waiting_app: App,
) -> None:
    @waiting_app.task
    async def page(ctx: Context, number: int) -> int:
        return number

    create = waiting_app.budgets.create
    await create("team", hard={"tokens": 10}, flow="nightly", on_hard_limit="cancel_flow")
    await waiting_app.budgets.report("team", {"tokens": 10})
    flow = waiting_app.flow("nightly", flow_id="nightly", budget="team")
    held = flow.add(page, 1)
    flow.add(page(2), budget="lab")
    run = await flow.start()
    async with working(waiting_app):
        free = await waiting_app.submit(page, 3)
        assert await free.result(timeout="20s") == 3
        with pytest.raises(BudgetExceeded):
            await waiting_app.budgets.report("team", {"tokens": 1})
        with pytest.raises(ExecutionCancelled):
            await run.result(held, timeout="20s")


async def test_a_run_may_wait_for_room_without_holding_its_worker(waiting_app: App) -> None:
    leave = asyncio.Event()

    @waiting_app.task(budget="team")
    async def first(ctx: Context) -> None:
        async with ctx.reserve("team", tokens=8) as call:
            await leave.wait()
            call.settle(tokens=1)

    @waiting_app.task(budget="team")
    async def second(ctx: Context) -> str:
        async with ctx.reserve("team", tokens=9, wait=True):
            return "done"

    await waiting_app.budgets.create("team", hard={"tokens": 10})
    async with working(waiting_app):
        holding = await waiting_app.submit(first)
        while await books(waiting_app) != (0, 8):
            pass
        run = await waiting_app.submit(second)
        while not (await waiting_app.budgets.status("team")).closed:
            pass
        leave.set()
        await holding.result(timeout="20s")
        assert await run.result(timeout="20s") == "done"

    assert await books(waiting_app) == (10, 0)


async def test_a_run_that_has_found_no_room_names_the_budget_from_the_first_moment() -> None:
    async with testing.engine() as app:

        @app.task
        async def work(ctx: Context) -> str:
            async with ctx.reserve("team", tokens=9, wait=True):
                return "done"

        await app.budgets.create("team", hard={"tokens": 10})
        await app.budgets.report("team", {"tokens": 8})
        run = await app.submit(work)
        await app.drain()
        assert (await run.why()).sentence.endswith(
            "It was put aside: budget team has no room for 9 tokens: 8 of 10 used."
        )


def test_code_without_an_event_loop_reports_too(store_url: str) -> None:
    app = App(store_url)
    blocking = app.blocking
    blocking.budgets.report("team", {"tokens": 3}, key="a")
    blocking.budgets.report("team", {"tokens": 3}, key="a")
    assert blocking.budgets.status("team").usage == {"tokens": 3}
    connection: sqlite3.Connection | psycopg.Connection
    if store_url.startswith("sqlite"):
        connection = sqlite3.connect(store_url.removeprefix("sqlite:///"), isolation_level=None)
        connection.execute("begin immediate")
    else:
        connection = psycopg.connect(store_url)
    blocking.budgets.report("team", {"tokens": 4}, connection=connection)
    connection.commit()
    connection.close()
    assert blocking.budgets.status("team").usage == {"tokens": 7}
    assert blocking.budgets.reset("team").usage == {"tokens": 0}
    asyncio.run(_limit(app))
    with pytest.raises(BudgetExceeded):
        blocking.budgets.report("team", {"tokens": 2})
    blocking.close()


async def _limit(app: App) -> None:
    async with app:
        await app.budgets.create("team", hard={"tokens": 1})
