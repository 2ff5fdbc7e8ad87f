"""What a program may ask for: the same with a database as through a server, or refused there."""

import asyncio
import inspect
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import TypeVar

import pytest
from rich.console import Console

from flowfabric import App, Context, Engine, Flow, FlowRun, Limit, Run, Task, connect, errors
from flowfabric.blocking import Blocking
from flowfabric.budgets import AppBudgets
from flowfabric.core.states import PublicState
from flowfabric.limits import AppLimits
from flowfabric.signals import Signals
from tests.apps import ASK_AGAIN_S, PATIENCE_S, reached, working
from tests.server.conftest import serving
from tests.server.test_remote import OPEN

T = TypeVar("T")
Verb = Callable[[App], Awaitable[object]]
InHandler = Callable[[Context], Awaitable[object]]


@pytest.fixture(params=["sqlite-file", "postgres"])
def store_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    """Both apps are on one database."""
    return new_database(request.param)


@pytest.fixture
async def apps(store_url: str) -> AsyncIterator[tuple[App, App]]:
    """One with the database and one without, each with a worker."""
    async with AsyncExitStack() as stack:
        engine: Engine = await stack.enter_async_context(await connect(store_url))
        url = await stack.enter_async_context(serving(engine, OPEN))
        apps = App(store_url, namespace="here"), App(url, namespace="there")
        for app in apps:
            program(app)
            await stack.enter_async_context(app)
            await app.budgets.create("team", hard={"tokens": 1_000})
            await stack.enter_async_context(working(app, worker_instance_id=app.namespace))
        yield apps


def program(app: App) -> None:
    """The same in both, each on a lane of its own: workers take what any namespace has."""

    @app.task(lane=app.namespace)
    async def double(number: int) -> int:
        return number * 2

    @app.task(lane=app.namespace, limits=[Limit("mail", concurrency=3)])
    async def wait(ctx: Context) -> object:
        await ctx.waitpoint("go")
        return (await ctx.wait_for_signal("go")).payload

    @app.task(lane=app.namespace)
    async def speak(ctx: Context) -> None:
        await ctx.step("first", str, 1)
        await ctx.emit("a word")
        await ctx.summary({"said": 1})

    @app.task(lane=app.namespace)
    async def act(ctx: Context, verb: str) -> object:
        return await outcome(IN_HANDLERS[verb], ctx)

    app.provide(Console, lambda: Console(file=io.StringIO(), width=33))
    app.add_schedule("daily", double(1), cron="0 6 * * *")


async def outcome(verb: Callable[..., Awaitable[object]], *given: object) -> object:
    """What it comes to, or the error by its code."""
    try:
        return await verb(*given)
    except errors.FlowFabricError as error:
        return f"{error.code}: {type(error).__name__}"


# With an app --------------------------------------------------------------------


async def doubled(app: App) -> Run[object]:
    run = await app.submit(app.tasks["double"], 2)
    await run.result(timeout=PATIENCE_S)
    return run


async def spoken(app: App) -> Run[object]:
    run = await app.submit(app.tasks["speak"])
    await run.result(timeout=PATIENCE_S)
    return run


async def waiting(app: App) -> Run[object]:
    run = await app.submit(app.tasks["wait"])
    await reached(run, PublicState.SUSPENDED)
    return run


async def started(app: App) -> tuple[FlowRun, Flow]:
    flow = app.flow("sums")
    flow.add(app.tasks["double"], flow.add(app.tasks["double"], 1))
    return await flow.start(), flow


async def submit(app: App) -> object:
    return await (await app.submit(app.tasks["double"], 3)).result(timeout=PATIENCE_S)


async def submit_many(app: App) -> object:
    runs = await app.submit_many([app.tasks["double"](each) for each in range(3)])
    return [await run.result(timeout=PATIENCE_S) for run in runs]


async def submit_on_a_connection(app: App) -> object:
    return await app.submit(app.tasks["double"], 3, connection=object())


async def run_of(app: App) -> object:
    found = app.run(app.tasks["double"], (await doubled(app)).execution_id)
    return await found.result(timeout=PATIENCE_S)


async def nobodys_run(app: App) -> object:
    return await app.run(app.tasks["double"], "nobody-knows-it").state()


async def events(app: App) -> object:
    run = await doubled(app)
    async for told in app.events(after="start", execution_id=run.execution_id):
        return told.event.event_type
    return None


async def flow_run(app: App) -> object:
    run, _ = await started(app)
    return (await app.flow_run(run.flow_id).wait(timeout=PATIENCE_S)).value


async def schedules(app: App) -> object:
    found = (await app.engine.list_schedules(namespace=app.namespace)).schedules
    return [each.schedule_id for each in found]


async def check_ready(app: App) -> object:
    await app.check_ready()
    return None


async def reopen(app: App) -> object:
    other = App(app.url, namespace=app.namespace)
    await other.open()
    was_open = other.is_open()
    await other.close()
    return was_open, other.is_open()


WITH_APP: dict[str, Verb] = {
    "submit": submit,
    "submit, on a connection": submit_on_a_connection,
    "submit_many": submit_many,
    "run": run_of,
    "run, of nobody": nobodys_run,
    "events": events,
    "flow": flow_run,
    "flow_run": flow_run,
    "add_schedule": schedules,
    "schedule": schedules,
    "store_schedules": schedules,
    "check_ready": check_ready,
    "open": reopen,
    "close": reopen,
    "is_open": reopen,
    "engine": reopen,
    "run_worker": submit,
    "work": submit,
}
DECLARING = {
    *("adopt", "check_adoptable", "declare_limits", "find_stand_in", "find_task", "keep_task"),
    *("lanes", "meet", "middleware", "new_task", "provide"),
    *("register_task", "replace_with", "restore_from", "task"),
}
"""These ask no engine, or are for the worker."""


async def run_cancel(app: App) -> object:
    run = await waiting(app)
    await run.cancel("enough")
    return await outcome(run.result)


async def run_signal(app: App) -> object:
    run = await waiting(app)
    accepted = await run.signal("go", {"a": 1})
    return type(accepted).__name__, await run.result(timeout=PATIENCE_S)


async def run_signal_on_a_connection(app: App) -> object:
    return await (await waiting(app)).signal("go", connection=object())


async def run_follow(app: App) -> object:
    follower = (await spoken(app)).follow("start", superseded=False, live=True)
    return [each.text for each in await follower.next_page() or ()]


async def run_stream(app: App) -> object:
    return [each.text async for each in (await spoken(app)).stream()]


async def run_frames(app: App) -> object:
    return [each.text for each in await (await spoken(app)).frames()]


async def run_steps(app: App) -> object:
    return [(each.name, each.result) for each in await (await spoken(app)).steps()]


async def run_snapshot(app: App) -> object:
    found = await (await spoken(app)).snapshot()
    return found.public_state, len(found.steps), len(found.attempts)


async def run_summary(app: App) -> object:
    return await (await spoken(app)).summary()


async def run_why(app: App) -> object:
    return (await (await doubled(app)).why()).cause


async def run_state(app: App) -> object:
    return await (await doubled(app)).state()


async def run_accept_changes(app: App) -> object:
    await (await doubled(app)).accept_changes()
    return None


async def run_result(app: App) -> object:
    return await (await waiting(app)).result(timeout=0.01)


WITH_RUN: dict[str, Verb] = {
    "cancel": run_cancel,
    "signal": run_signal,
    "signal, on a connection": run_signal_on_a_connection,
    "follow": run_follow,
    "stream": run_stream,
    "frames": run_frames,
    "steps": run_steps,
    "snapshot": run_snapshot,
    "summary": run_summary,
    "why": run_why,
    "state": run_state,
    "accept_changes": run_accept_changes,
    "result": run_result,
}


async def flow_results(app: App) -> object:
    flow = app.flow("sums")
    node = flow.add(app.tasks["double"], flow.add(app.tasks["double"], 1))
    run = await flow.start()
    return (
        await run.result(node, timeout=PATIENCE_S),
        await run.run(node).state(),
        await run.wait(timeout=PATIENCE_S),
        await run.state(),
    )


async def flow_on_a_connection(app: App) -> object:
    flow = app.flow("sums")
    flow.add(app.tasks["double"], 1)
    return await flow.start(connection=object())


async def flow_cancel(app: App) -> object:
    flow = app.flow("waits")
    flow.add(app.tasks["wait"])
    run = await flow.start()
    return type(await run.cancel(wait="10s")).__name__, await run.state()


async def flow_reads(app: App) -> object:
    run, _ = await started(app)
    await run.wait(timeout=PATIENCE_S)
    view, summary = await run.view(), await run.summary()
    shown = io.StringIO()
    await run.graph(console=Console(file=shown))
    return len(view.nodes), len(view.edges), type(summary).__name__, bool(shown.getvalue())


WITH_FLOW: dict[str, Verb] = {
    **dict.fromkeys(("add", "start", "result", "run", "wait", "state"), flow_results),
    "start, on a connection": flow_on_a_connection,
    "cancel": flow_cancel,
    **dict.fromkeys(("view", "summary", "graph"), flow_reads),
}


async def signals_send(app: App) -> object:
    run = await waiting(app)
    sent = await app.signals.send(run.execution_id, "go", 1, idempotency_key="once")
    return type(sent).__name__, await run.result(timeout=PATIENCE_S)


async def signals_deliver(app: App) -> object:
    run = await waiting(app)
    token = await app.signals.token(run.execution_id, "go")
    return type(await app.signals.deliver(token, "go", 1)).__name__


async def signals_forged(app: App) -> object:
    return await app.signals.deliver("ff-wp-nonsense", "go", 1)


async def signals_pending(app: App) -> object:
    await waiting(app)
    return bool((await app.signals.pending()).entries)


WITH_SIGNALS: dict[str, Verb] = {
    "send": signals_send,
    "deliver": signals_deliver,
    "deliver, a forged token": signals_forged,
    "token": signals_deliver,
    "pending": signals_pending,
}


async def limits_set(app: App) -> object:
    found = await app.limits.set("mail", concurrency=2)
    again = await app.limits.reset("mail")
    return found.concurrency, again.concurrency


async def limits_list(app: App) -> object:
    return [each.name for each in await app.limits.list()]


async def limits_get(app: App) -> object:
    return (await app.limits.get("mail")).concurrency


async def limits_unknown(app: App) -> object:
    return await app.limits.get("nothing")


async def limits_use(app: App) -> object:
    await waiting(app)
    return len(await app.limits.use("mail"))


async def limits_removed(app: App) -> object:
    await app.limits.set("typo", concurrency=2)
    await app.limits.remove("typo")
    return [each.name for each in await app.limits.list()]


async def limits_declared(app: App) -> object:
    await app.limits.remove("mail")
    return None


WITH_LIMITS: dict[str, Verb] = {
    "set": limits_set,
    "reset": limits_set,
    "list": limits_list,
    "get": limits_get,
    "get, unknown": limits_unknown,
    "use": limits_use,
    "remove": limits_removed,
    "remove, declared": limits_declared,
}


async def budgets_all(app: App) -> object:
    await app.budgets.create("small", hard={"tokens": 10})
    await app.budgets.report("small", {"tokens": 3}, key="once")
    await app.budgets.report("small", {"tokens": 3}, key="once")
    used = (await app.budgets.status("small")).usage
    await app.budgets.change("small", hard={"tokens": 20})
    usage = (await app.budgets.reset("small")).usage
    await app.budgets.remove("small")
    return used, usage


async def budgets_exceeded(app: App) -> object:
    await app.budgets.report("team", {"tokens": 10_000})
    return None


async def budgets_unknown(app: App) -> object:
    return await app.budgets.status("nothing")


async def budgets_on_a_connection(app: App) -> object:
    await app.budgets.report("team", {"tokens": 1}, connection=object())
    return None


WITH_BUDGETS: dict[str, Verb] = {
    **dict.fromkeys(("create", "report", "status", "change", "reset", "remove"), budgets_all),
    "report, too much": budgets_exceeded,
    "report, on a connection": budgets_on_a_connection,
    "status, unknown": budgets_unknown,
}


# From plain functions -----------------------------------------------------------


def in_thread(function: Callable[[App, Blocking], object]) -> Verb:
    def call(app: App) -> object:
        with app.blocking as blocking:
            return function(app, blocking)

    async def verb(app: App) -> object:
        return await asyncio.to_thread(call, app)

    return verb


def blocking_runs(app: App, blocking: Blocking) -> object:
    run = blocking.submit(app.tasks["speak"])
    run.result(timeout=PATIENCE_S)
    found = blocking.run(app.tasks["speak"], run.execution_id)
    (many,) = blocking.submit_many([app.tasks["double"](1)])
    return (
        found.state(),
        [each.name for each in found.steps()],
        [each.text for each in found.stream()],
        [each.text for each in found.frames()],
        found.summary(),
        found.why().cause,
        found.snapshot().public_state,
        many.result(timeout=PATIENCE_S),
        next(iter(blocking.events(after="start", execution_id=run.execution_id))).event.event_type,
    )


def blocking_signals(app: App, blocking: Blocking) -> object:
    runs = blocking.submit_many([app.tasks["wait"]() for _ in range(3)])
    for run in runs:
        while run.state() is not PublicState.SUSPENDED:
            time.sleep(ASK_AGAIN_S)
    first, second, third = runs
    inbox = bool(blocking.signals.pending().entries)
    first.signal("go", 1)
    blocking.signals.send(second.execution_id, "go", 2)
    blocking.signals.deliver(blocking.signals.token(third.execution_id, "go"), "go", 3)
    return inbox, [run.result(timeout=PATIENCE_S) for run in runs]


def blocking_cancel(app: App, blocking: Blocking) -> object:
    run = blocking.submit(app.tasks["wait"])
    run.cancel()
    return run.result(timeout=PATIENCE_S)


def blocking_accept_changes(app: App, blocking: Blocking) -> object:
    blocking.submit(app.tasks["wait"]).accept_changes()
    return None


def blocking_budgets(app: App, blocking: Blocking) -> object:
    blocking.budgets.report("team", {"tokens": 2})
    return blocking.budgets.status("team").usage, blocking.budgets.reset("team").usage


IN_THREADS: dict[str, Verb] = {
    "runs": in_thread(blocking_runs),
    "signals": in_thread(blocking_signals),
    "cancel": in_thread(blocking_cancel),
    "accept_changes": in_thread(blocking_accept_changes),
    "budgets": in_thread(blocking_budgets),
}


# In handlers --------------------------------------------------------------------


async def ctx_branch(ctx: Context) -> object:
    with ctx.branch("left"):
        return await ctx.step("one", int, "1")


async def ctx_fence(ctx: Context) -> object:
    async with ctx.fence(object()):
        return "entered"


async def ctx_reserve(ctx: Context) -> object:
    async with ctx.reserve("team", tokens=2) as hold:
        hold.settle(tokens=1)
    return "settled"


async def ctx_report_too_much(ctx: Context) -> object:
    await ctx.report_usage("team", tokens=5_000)
    return None


async def ctx_submit(ctx: Context) -> object:
    child = await ctx.submit(CHILDREN[(await ctx.tags())["app.where"]], 4)
    return await child.result()


async def ctx_wait_for(ctx: Context) -> object:
    return await ctx.wait_for("never", timeout=0.05)


async def ctx_waitpoint(ctx: Context) -> object:
    return type(await ctx.waitpoint("later")).__name__


async def ctx_facts(ctx: Context) -> object:
    return (
        type(ctx.attempt_id).__name__,
        ctx.cancelled,
        ctx.stop_reason,
        type(ctx.lease_remaining).__name__,
        type(ctx.blocking).__name__,
        ctx.get(Console).width,
        await ctx.scheduled_for(),
        list(await ctx.tags()),
    )


async def ctx_values(ctx: Context) -> object:
    values = (await ctx.now(), await ctx.random(), await ctx.uuid())
    return [type(each).__name__ for each in values]


async def ctx_says(ctx: Context) -> object:
    await ctx.emit("x", kind="token")
    await ctx.progress(50, "half")
    await ctx.summary({"a": 1})
    return await ctx.step("one", int, "1")


IN_HANDLERS: dict[str, InHandler] = {
    "branch": ctx_branch,
    "fence": ctx_fence,
    "reserve": ctx_reserve,
    "report_usage": ctx_report_too_much,
    "submit": ctx_submit,
    "wait_for": ctx_wait_for,
    "waitpoint": ctx_waitpoint,
    "wait_for_signal": lambda ctx: ctx.wait_for_signal("never", timeout=0.05, default="none"),
    "sleep": lambda ctx: ctx.sleep(0.01),
    "patched": lambda ctx: ctx.patched("anew"),
    **dict.fromkeys(("now", "random", "uuid"), ctx_values),
    **dict.fromkeys(("emit", "progress", "summary", "step"), ctx_says),
    **dict.fromkeys(
        (
            *("attempt_id", "cancelled", "stop_reason", "lease_remaining", "blocking"),
            *("get", "scheduled_for", "tags"),
        ),
        ctx_facts,
    ),
}
CHILDREN: dict[str, Task[..., object]] = {}


def handled(verb: str) -> Verb:
    async def call(app: App) -> object:
        run = await app.submit(app.tasks["act"], verb, tags={"app.where": app.namespace})
        return await run.result(timeout=PATIENCE_S)

    return call


# All of them --------------------------------------------------------------------


def distinct(table: Mapping[str, T]) -> list[tuple[str, T]]:
    """Each once, though it may use several verbs."""
    return [(name, verb) for verb, name in {verb: name for name, verb in table.items()}.items()]


TABLES: dict[str, Mapping[str, Verb]] = {
    "app": WITH_APP,
    "run": WITH_RUN,
    "flow": WITH_FLOW,
    "signals": WITH_SIGNALS,
    "limits": WITH_LIMITS,
    "budgets": WITH_BUDGETS,
    "blocking": IN_THREADS,
    "ctx": {name: handled(name) for name in dict(distinct(IN_HANDLERS))},
}
REFUSED = {"fence"}
"""What needs the database itself, beside everything on a connection; see docs/server.md."""


@pytest.mark.parametrize("table", TABLES)
async def test_a_server_changes_nothing_of_what_verbs_come_to(
    apps: tuple[App, App], table: str
) -> None:
    with_database, without = apps
    CHILDREN.update({app.namespace: app.tasks["double"] for app in apps})
    verbs = dict(distinct(TABLES[table]))
    refused = {each for each in verbs if each in REFUSED or each.endswith("on a connection")}

    async with asyncio.timeout(60):
        here = {name: await outcome(verb, with_database) for name, verb in verbs.items()}
        there = {name: await outcome(verb, without) for name, verb in verbs.items()}

    for name in refused:
        assert here.pop(name) != there[name]
        assert there.pop(name) == "unavailable: Unavailable"
    assert there == here


@pytest.mark.parametrize(
    ("kinds", "known"),
    [
        ([App], {*WITH_APP, *DECLARING}),
        ([Run], WITH_RUN),
        ([Flow, FlowRun], WITH_FLOW),
        ([Signals], WITH_SIGNALS),
        ([AppLimits], WITH_LIMITS),
        ([AppBudgets], WITH_BUDGETS),
        ([Context], IN_HANDLERS),
    ],
    ids=["app", "run", "flow", "signals", "limits", "budgets", "ctx"],
)
def test_every_verb_is_in_a_table(kinds: list[type], known: Mapping[str, object]) -> None:
    verbs = {
        name
        for kind in kinds
        for name, value in inspect.getmembers_static(kind)
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }

    assert verbs <= set(known)
