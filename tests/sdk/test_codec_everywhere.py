"""However a payload is stored, it goes through the codec; whoever reads it gets it plain."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import asyncpg
import psycopg
import pytest

from flowfabric import App, Context
from flowfabric.core.creation import NewExecution
from flowfabric.core.records import StepKind
from flowfabric.core.schedules import ScheduleDefinition
from flowfabric.core.states import PublicState
from flowfabric.errors import CodecFailed, InvalidInput
from flowfabric.signals import condition_of
from tests.apps import reached, working
from tests.conformance.given import WORKER
from tests.transactions import in_transaction

SECRET = "the butler did it"


class Shifted:
    """Never writes the same twice, and writes what looks like JSON nested too deep."""

    def __init__(self) -> None:
        self.count = 0

    def encode(self, data: bytes) -> bytes:
        self.count += 1
        return b"[" * 200 + b"]" * 200 + b"%06d" % self.count + bytes(b ^ 0x5A for b in data)

    def decode(self, data: bytes) -> bytes:
        return bytes(b ^ 0x5A for b in data[406:])


async def stored_bytes(url: str) -> bytes:
    """Everything the database holds."""
    if url.startswith("sqlite"):
        folder = Path(url.removeprefix("sqlite:///")).parent
        return b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())
    connection = await asyncpg.connect(url)
    try:
        tables = await connection.fetch(
            "select quote_ident(schemaname) || '.' || quote_ident(tablename) from pg_tables"
            " where schemaname not in ('pg_catalog', 'information_schema')"
        )
        found = b""
        for (table,) in tables:
            for row in await connection.fetch(f"select * from {table}"):
                found += b"\n".join(v if isinstance(v, bytes) else str(v).encode() for v in row)
        return found
    finally:
        await connection.close()


def tasks_of(app: App) -> None:
    @app.task
    async def leaf(words: str) -> str:
        return words

    @app.task
    async def join(words: str, others: list[str]) -> str:
        return words + "".join(others)

    @app.task
    async def hear(ctx: Context) -> str:
        await ctx.step("say", lambda: SECRET)
        return (await ctx.wait_for_signal("heard", type=str)).payload


async def test_no_way_of_storing_arguments_goes_past_the_codec(store_url: str) -> None:
    async with App(store_url, codec=Shifted(), migrate=True) as app:
        tasks_of(app)
        leaf, join = app.tasks["leaf"], app.tasks["join"]
        app.add_schedule("daily", leaf(SECRET), every="1d")
        async with working(app):
            flow = app.flow("f")
            end = flow.add(join, SECRET, join=[flow.add(leaf, SECRET), flow.add(leaf(SECRET))])
            run = await flow.start()
            assert await run.result(end, "20s") == SECRET * 3
            async with in_transaction(store_url) as connection:
                flow = app.flow("g")
                end = flow.add(join, SECRET, join=[flow.add(leaf, SECRET)])
                run = await flow.start(connection=connection)
                one = await app.submit(leaf, SECRET, connection=connection)
                many = await app.submit_many([leaf(SECRET)], connection=connection)
            assert await run.result(end, "20s") == SECRET * 2
            assert [await each.result("20s") for each in (one, *many)] == [SECRET] * 2
            fired = await app.engine.trigger_schedule("daily")
            assert await app.run(leaf, fired.execution_id).result("20s") == SECRET
    assert SECRET.encode() not in await stored_bytes(store_url)


async def test_a_schedule_that_has_not_changed_is_not_written_again(store_url: str) -> None:
    definition = ScheduleDefinition(
        schedule_id="daily",
        execution_kind="leaf",
        every_ms=60_000,
        input_payload=json.dumps({"words": SECRET}).encode(),
        payload_encoding="json",
    )
    async with App(store_url, migrate=True) as plain:
        await plain.engine.upsert_schedule(definition)
    async with App(store_url, codec=Shifted()) as app:
        changes = [(await app.engine.upsert_schedule(definition)).change for _ in range(3)]
        assert changes == ["changed", "unchanged", "unchanged"]
        found = await app.engine.describe_schedule("daily")
        assert found is not None
        assert found.payload == definition.input_payload
        assert (await app.engine.list_schedules()).schedules == (found,)


async def test_steps_and_signals_are_read_plain(store_url: str) -> None:
    async with App(store_url, codec=Shifted(), migrate=True) as app:
        tasks_of(app)
        async with working(app):
            run = await app.submit(app.tasks["hear"]())
            await reached(run, PublicState.SUSPENDED)
            await run.signal("heard", SECRET)
            assert await run.result("20s") == SECRET
        steps = {step.kind: step.result or b"" for step in await run.steps()}
        assert json.loads(steps[StepKind.CALL]) == SECRET
        assert SECRET.encode() in steps[StepKind.SIGNAL]


async def test_a_failed_step_is_stored_by_the_codec_and_raised_again_plain(store_url: str) -> None:
    async with App(store_url, codec=Shifted(), migrate=True) as app:

        @app.task
        async def ask(ctx: Context) -> str:
            def fail(secret: str) -> None:
                raise LookupError("nobody saw it", secret)

            try:
                await ctx.step("ask", fail, SECRET)
            except LookupError as error:
                await ctx.wait_for_signal("go")
                return str(error.args[1])
            return ""

        async with working(app):
            run = await app.submit(ask)
            await reached(run, PublicState.SUSPENDED)
            (asked, *_) = await run.steps()
            assert asked.error is not None
            assert SECRET in asked.error
            stored = await stored_bytes(store_url)
            await run.signal("go")
            assert await run.result("20s") == SECRET
    assert SECRET.encode() not in stored
    async with App(store_url) as plain:
        (asked, *_) = await plain.run(ask, run.execution_id).steps()
        assert asked.error == (
            "CodecFailed: the app's codec could not decode its error: there is none; pass"
            " App(codec=…) the one it was written with"
        )


async def test_what_is_emitted_is_stored_by_the_codec_and_read_plain(store_url: str) -> None:
    async with App(store_url, codec=Shifted(), migrate=True) as app:

        @app.task
        async def tell(ctx: Context) -> None:
            await ctx.emit(SECRET)
            await ctx.emit({"told": SECRET})
            await ctx.summary({"who": SECRET})
            await ctx.summary({"how": "with a candlestick"})

        async with working(app):
            run = await app.submit(tell)
            await run.result("20s")
            text, document, *patches = [frame async for frame in run.stream()]
        assert (text.text, document.json()) == (SECRET, {"told": SECRET})
        assert patches[0].json() == {"who": SECRET}
        assert await run.summary() == {"who": SECRET, "how": "with a candlestick"}
    assert SECRET.encode() not in await stored_bytes(store_url)
    async with App(store_url) as plain:
        page = await plain.engine.read_stream(run.execution_id, 0)
        assert SECRET not in "".join(frame.text for frame in page.frames)


class Locked(Shifted):
    """Cannot read what it has written while its key is away."""

    away = False

    def decode(self, data: bytes) -> bytes:
        if self.away:
            raise ConnectionError("the key is away")
        return super().decode(data)


async def test_what_cannot_be_decoded_is_never_shown_as_if_it_had_been_said(
    store_url: str,
) -> None:
    codec = Locked()
    async with App(store_url, codec=codec, migrate=True) as app:

        @app.task
        async def tell(ctx: Context) -> None:
            await ctx.emit("begins")
            await ctx.emit(SECRET)
            await ctx.summary({"who": SECRET})

        async with working(app):
            run = await app.submit(tell)
            await run.result("20s")
        first = await anext(run.stream())
        rest = run.stream(after=first.cursor)
        codec.away = True
        for ask in (run.frames, run.summary, rest.__anext__):
            with pytest.raises(CodecFailed, match="the key is away"):
                await ask()
        follower = run.follow(first.cursor, superseded=False, live=True)
        with pytest.raises(CodecFailed):
            await follower.next_page()
        codec.away = False
        assert next(frame.text for frame in await follower.next_page() or ()) == SECRET
    async with App(store_url) as plain:
        same = plain.run(plain.task(tell.function), run.execution_id)
        for ask in (same.frames, same.summary, same.stream().__anext__):
            with pytest.raises(CodecFailed, match="pass App"):
                await ask()


@pytest.mark.parametrize("codec", [None, Shifted()])
async def test_what_begins_like_an_encoded_value_is_read_as_it_was_said(
    store_url: str, codec: Shifted | None
) -> None:
    async with App(store_url, codec=codec, migrate=True) as app:

        @app.task
        async def tell(ctx: Context) -> None:
            await ctx.emit("\x01prompt\x02")
            await ctx.emit(b"\x01\xff")

        async with working(app):
            run = await app.submit(tell)
            await run.result("20s")
        assert [frame.data for frame in await run.frames()] == [b"\x01prompt\x02", b"\x01\xff"]


async def test_however_an_execution_is_claimed_its_arguments_are_read_plain(
    store_url: str,
) -> None:
    async with App(store_url, codec=Shifted(), migrate=True) as app:
        engine = app.engine
        asked = NewExecution(
            execution_kind="leaf", input_payload=b'"plain"', payload_encoding="json"
        )
        created = [(await engine.create_execution(asked)).execution_id for _ in range(2)]
        grant = await engine.issue_claim_grant(created[0], **WORKER)
        by_id = await engine.claim_execution(created[0], **WORKER, grant_key=grant.grant_key)
        next_one = await engine.claim(**WORKER)
        assert next_one is not None
        assert [by_id.payload, next_one.payload] == [b'"plain"'] * 2
        await engine.suspend(by_id.handle, resume_condition=condition_of("go"))
        await engine.deliver_operator_signal(created[0], "go", signal_name="go")
        grant = await engine.issue_claim_grant(created[0], **WORKER)
        resumed = await engine.claim_resumed_execution(
            created[0], **WORKER, grant_key=grant.grant_key
        )
        assert resumed.payload == b'"plain"'


async def test_arguments_nested_too_deep_are_refused_whatever_the_codec(store_url: str) -> None:
    async with App(store_url, codec=Shifted(), migrate=True) as app:

        @app.task
        async def keep(value: list[object]) -> None: ...

        value: list[object] = [1]
        for _ in range(200):
            value = [value]
        with pytest.raises(InvalidInput, match="nested at most 128"):
            await app.submit(keep(value))


async def test_blocking_code_on_a_loop_signals_in_its_transaction(store_url: str) -> None:
    """Nothing may wait there: the loop is blocked by the very call."""
    async with App(store_url, codec=Shifted(), migrate=True) as app:
        tasks_of(app)
        run = await app.submit(app.tasks["hear"]())
        with closing(
            sqlite3.connect(store_url.removeprefix("sqlite:///"))
            if store_url.startswith("sqlite")
            else psycopg.connect(store_url)
        ) as connection:
            signals = app.blocking.signals
            assert signals.send(run.execution_id, "heard", SECRET, connection=connection).kept
            connection.commit()
        app.blocking.close()
        assert SECRET.encode() not in await stored_bytes(store_url)
        async with working(app):
            assert await run.result(timeout="20s") == SECRET
