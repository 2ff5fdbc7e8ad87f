"""Versions of a task beside each other: each run stays with the one it began with."""

import pytest

from flowfabric import App, Context
from flowfabric.core.states import PublicState
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.errors import Terminal
from tests.apps import reached, working


def old_program(url: str) -> App:
    app = App(url)

    @app.task
    async def publish(ctx: Context, article: int) -> str:
        await ctx.wait_for_signal("approved")
        return f"{article} as version 1"

    return app


def new_program(url: str, *, keeps_old: bool) -> App:
    app = old_program(url) if keeps_old else App(url)

    @app.task(name="publish", version=2)
    async def publish_2(ctx: Context, article: int, channel: str) -> str:
        await ctx.wait_for_signal("sent")
        return f"{article} to {channel} as version 2"

    return app


async def test_runs_stay_with_their_version_and_new_ones_get_the_one_submitted(
    store_url: str,
) -> None:
    old, new = old_program(store_url), new_program(store_url, keeps_old=True)
    async with old, working(old):
        first = await old.submit(old.tasks["publish"](1))
        await reached(first, PublicState.SUSPENDED)
        first_id = first.execution_id
    async with new, working(new):
        second = await new.submit(new.tasks["publish@2"](2, channel="web"))
        await reached(second, PublicState.SUSPENDED)
        first = new.run(new.tasks["publish"], first_id)
        await first.signal("approved")
        await second.signal("sent")
        assert await first.result(timeout="20s") == "1 as version 1"
        assert await second.result(timeout="20s") == "2 to web as version 2"


async def test_a_name_finds_all_versions_and_a_version_one(store_url: str) -> None:
    app = new_program(store_url, keeps_old=True)

    @app.task
    async def publisher() -> None: ...

    async with app:
        await app.submit(publisher)
        first = (await app.submit(app.tasks["publish"](1))).execution_id
        second = (await app.submit(app.tasks["publish@2"](2, channel="web"))).execution_id
        for namespace in (None, "default"):
            for kind, expected in (
                ("publish", {first, second}),
                ("publish@1", {first}),
                ("publish@2", {second}),
                ("publish@3", set[str]()),
            ):
                page = await app.engine.find_executions(
                    ExecutionFilter(execution_kind=kind, namespace=namespace)
                )
                assert {each.execution_id for each in page.executions} == expected, kind


async def test_a_version_that_no_worker_serves_any_more_says_so(store_url: str) -> None:
    old, new = old_program(store_url), new_program(store_url, keeps_old=False)
    async with old:
        first_id = (await old.submit(old.tasks["publish"](1))).execution_id
    async with new, working(new):
        second = await new.submit(new.tasks["publish@2"](2, channel="web"))
        await reached(second, PublicState.SUSPENDED)
        explanation = await new.engine.explain_execution(first_id)
    assert explanation.sentence == (
        "No worker serves version 1 of 'publish' any more, though some serve version 2: keep"
        " version 1 in the program until its runs have ended."
    )


async def test_a_handler_knows_its_task_and_its_version_apart(store_url: str) -> None:
    async with App(store_url) as app:

        @app.task
        async def publish(ctx: Context) -> tuple[str, int]:
            return ctx.task_name, ctx.task_version

        @app.task(name="publish", version=2)
        async def publish_2(ctx: Context) -> tuple[str, int]:
            return ctx.task_name, ctx.task_version

        async with working(app):
            runs = [await app.submit(publish()), await app.submit(publish_2())]
            answers = [await run.result(timeout="20s") for run in runs]
            assert answers == [("publish", 1), ("publish", 2)]
            for run in runs:
                with pytest.raises(Terminal, match="already terminal in state completed"):
                    await run.cancel()
