"""Apps over HTTP alone: the same programs, types and errors as with a database."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from flowfabric import App, Context, Engine, Retry, connect, errors, remote
from flowfabric.connection import migrate
from flowfabric.core.api_tokens import Scope
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import Completed
from flowfabric.core.states import PublicState
from flowfabric.engine.executions import Completion
from flowfabric.limits import Limit
from flowfabric.operations import BODY_BYTES_MAX, Reach, RemoteOperation
from flowfabric.reconcilers import Supervisor
from flowfabric.remote import HttpConnection
from flowfabric.run import Endings
from flowfabric.server.api import ServerConfig
from tests.apps import PATIENCE_S, reached, working
from tests.conformance.given import UNKNOWN_ID
from tests.proxy import CHUNK_BYTES, Proxy
from tests.server.conftest import serving
from tests.server.test_streams import events_of

OPEN = ServerConfig(anybody="without_tokens")


@pytest.fixture
async def database(store_url: str) -> AsyncIterator[Engine]:
    """The engine behind the server, by the clock on the wall."""
    async with await connect(store_url) as engine, Supervisor(engine):
        yield engine


@pytest.fixture
async def url(database: Engine) -> AsyncIterator[str]:
    async with serving(database, OPEN) as address:
        yield address


@pytest.fixture
async def app(url: str) -> AsyncIterator[App]:
    app = App(url)
    tasks_of(app)
    async with app:
        yield app


def tasks_of(app: App) -> None:
    @app.task
    async def double(number: int) -> int:
        return number * 2

    @app.task
    async def report(ctx: Context, numbers: list[int]) -> str:
        """Everything a handler can ask of its worker."""
        total = await ctx.step("sum", sum, numbers)
        await ctx.progress(50, "half")
        await ctx.emit("working")
        child = await ctx.submit(double, total)
        doubled = await child.result()
        await ctx.sleep(0.01)
        approval = await ctx.wait_for_signal("approval", type=str)
        return f"{doubled} {approval.payload}"

    @app.task
    async def broken() -> None:
        raise errors.DoNotRetry("it cannot be done")


async def test_a_program_runs_over_http_alone(app: App, database: Engine) -> None:
    report = app.tasks["report"]
    async with working(app):
        run = await app.submit(report, [1, 2, 3])
        await reached(run, PublicState.SUSPENDED)
        await run.signal("approval", "yes")

        assert await run.result(timeout=PATIENCE_S) == "12 yes"

    assert [frame.text async for frame in run.stream()] == ["working"]
    assert await database.read_execution_state(run.execution_id) is PublicState.COMPLETED
    assert [step.name for step in await run.steps()][:1] == ["sum"]


async def test_flows_run_over_http(app: App) -> None:
    double = app.tasks["double"]
    flow = app.flow("sums", flow_id="sums-1")
    first = flow.add(double, 1)
    second = flow.add(double, first)
    async with working(app):
        run = await flow.start()
        assert await run.result(second, timeout=PATIENCE_S) == 4


async def test_errors_are_those_of_a_database(app: App) -> None:
    async with working(app):
        run = await app.submit(app.tasks["broken"])
        with pytest.raises(errors.ExecutionFailed, match="it cannot be done"):
            await run.result(timeout=PATIENCE_S)
    with pytest.raises(errors.NotFound) as raised:
        await app.run(app.tasks["broken"], "nobody-knows-it").state()
    assert raised.value.entity == "execution"
    with pytest.raises(errors.InvalidInput, match="priority"):
        await app.submit(app.tasks["broken"], priority=10**9)
    await app.submit(app.tasks["double"], 1, idempotency_key="k", strict=True)
    with pytest.raises(errors.IdempotencyConflict):
        await app.submit(app.tasks["double"], 2, idempotency_key="k", strict=True)


async def test_many_are_submitted_at_once_and_found(app: App, database: Engine) -> None:
    double = app.tasks["double"]
    runs = await app.submit_many([double(number) for number in range(50)])
    async with working(app):
        results = await asyncio.gather(*(run.result(timeout=PATIENCE_S) for run in runs))

    assert results == [number * 2 for number in range(50)]


async def test_limits_hold_over_http(url: str, database: Engine) -> None:
    made = await database.create_token("x", scopes=["submit", "read", "work"], namespace="shop")
    app = App(url, namespace="shop", token=made.token)

    @app.task(limits=[Limit("mail", concurrency=1)])
    async def mail() -> str:
        return "sent"

    async with app, working(app):
        run = await app.submit(mail)
        assert await run.result(timeout=PATIENCE_S) == "sent"

    (limit,) = (await database.list_limits(namespace="shop")).limits
    assert (limit.name, limit.active_concurrency_cap) == ("mail", 1)


async def test_the_blocking_form_works(app: App) -> None:
    def submit() -> object:
        with App(app.url).blocking as blocking:
            return blocking.submit(app.tasks["double"], 4).result(timeout=PATIENCE_S)

    async with working(app):
        assert await asyncio.to_thread(submit) == 8


async def test_events_are_told(app: App) -> None:
    events = app.events(category="completion")
    coming = asyncio.ensure_future(anext(events))
    async with working(app):
        while not coming.done():
            run = await app.submit(app.tasks["double"], 1)
            await run.result(timeout=PATIENCE_S)
            await asyncio.sleep(0)

    assert (await coming).event.event_type


async def test_a_page_learns_which_attempts_words_of_a_step_to_keep(app: App) -> None:
    heard = asyncio.Event()

    async def write(ctx: Context) -> None:
        await ctx.emit("kept")

    @app.task(retry=Retry(max_retries=1, delay=0))
    async def speak(ctx: Context) -> None:
        await ctx.step("write", write, ctx)
        await ctx.emit("said")
        if not heard.is_set():
            await heard.wait()
            raise RuntimeError("once more")

    run = await app.submit(speak)
    told = []
    async with (
        working(app),
        httpx.AsyncClient(base_url=app.url, timeout=PATIENCE_S) as client,
        client.stream("GET", f"/v1/executions/{run.execution_id}/stream") as answer,
    ):
        async for event in events_of(answer):
            if event.name == "end":
                break
            told.append((event.name, event.data["text"], event.data.get("kept_steps")))
            if event.data["text"] == "said":
                heard.set()

    assert told == [
        ("message", "kept", None),
        ("message", "said", None),
        ("superseded", "", {"write": 0}),
        ("message", "said", None),
    ]


async def test_hints_arrive(app: App, database: Engine) -> None:
    with app.engine.store.hints(["ready:default"]) as hints:
        async with asyncio.timeout(PATIENCE_S):
            while not app.engine.store.hints_are_live:
                await hints.wait(0.01)
            hints.take()
            await database.create_execution(NewExecution(execution_kind="x"))
            assert await hints.wait(PATIENCE_S)


# What cannot be had from afar


async def test_a_server_that_is_not_there_is_an_outage() -> None:
    app = App("http://127.0.0.1:9")

    with pytest.raises(errors.Transport, match=r"127\.0\.0\.1:9 cannot be reached") as raised:
        await app.open()

    assert raised.value.retryable
    assert not raised.value.may_have_happened


async def test_what_needs_the_database_says_so(app: App) -> None:
    with pytest.raises(errors.Unavailable, match="needs the database"):
        await app.submit(app.tasks["double"], 1, connection=object())
    with pytest.raises(errors.Unavailable, match="needs the database"):
        await app.engine.prepare()
    with pytest.raises(errors.Unavailable, match="needs the database"):
        await app.engine.trim_retention()
    with pytest.raises(errors.Unavailable, match="needs the database"):
        await migrate(app.url)
    for given in ({"migrate": True}, {"listen_url": "postgresql://x/y"}):
        with pytest.raises(errors.InvalidInput, match="is a setting of the server"):
            App(app.url, **given)


async def test_tokens_decide_what_an_app_may(url: str, database: Engine) -> None:
    made = await database.create_token("ci", scopes=["submit", "read"], namespace="shop")
    app, elsewhere, nobody = (
        App(url, namespace="shop", token=made.token),
        App(url, token=made.token),
        App(url, token="ff_wrong"),
    )
    for each in (app, elsewhere, nobody):
        tasks_of(each)
    async with app, elsewhere:
        run = await app.submit(app.tasks["double"], 1)
        assert await run.state() is PublicState.WAITING
        with pytest.raises(errors.AccessDenied, match="needs a token with the scope operate") as no:
            await run.cancel()
        assert (type(no.value), no.value.reason) == (errors.AccessDenied, "scope_missing")
        assert not no.value.retryable
        with pytest.raises(errors.AccessDenied, match="namespace 'shop' alone"):
            await elsewhere.submit(elsewhere.tasks["double"], 1)
        with pytest.raises(errors.NotFound):
            await elsewhere.run(elsewhere.tasks["double"], run.execution_id).state()
    with pytest.raises(errors.Unauthorized, match="Authorization"):
        await nobody.open()


@pytest.mark.parametrize("token", [" ", "ff_secret\nff_other", "ff_sécret", "ff_ secret"])
async def test_what_cannot_be_a_token_is_refused_and_not_repeated(url: str, token: str) -> None:
    with pytest.raises(errors.InvalidInput, match=r"^token: must be a token that") as refused:
        await connect(url, token=token)

    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("http://u:s3cret@127.0.0.1:1", "must not contain a user: a server takes a token"),
        ("http://127.0.0.1:99999", "cannot be asked: Port out of range"),
    ],
)
async def test_an_address_that_cannot_be_is_refused_without_its_password(
    address: str, says: str
) -> None:
    with pytest.raises(errors.InvalidInput, match=f"^url: {says}") as refused:
        await connect(address, token="ff_x")

    assert "s3cret" not in str(refused.value)


async def test_a_server_that_is_asked_too_often_says_so_in_its_own_words(database: Engine) -> None:
    config = ServerConfig(anybody="without_tokens", requests_max=0)
    async with serving(database, config) as url:
        with pytest.raises(errors.ResourceExhausted, match="too many requests in a minute"):
            await connect(url)


async def test_a_token_from_a_file_may_end_with_its_line(url: str, database: Engine) -> None:
    made = await database.create_token("file", scopes=["read"])

    async with await connect(url, token=f"{made.token}\n") as engine:
        assert (await engine.list_flows()).flows == ()


async def test_tags_of_what_is_not_there_are_refused_to_confined_tokens(
    url: str, database: Engine
) -> None:
    made = await database.create_token("t", scopes=["admin"], namespace="shop")

    async with await connect(url, token=made.token) as engine:
        with pytest.raises(errors.NotFound):
            await engine.set_execution_tag(UNKNOWN_ID, "k.k", "v")


async def test_a_worker_needs_the_scope_for_work_alone(url: str, database: Engine) -> None:
    made = await database.create_token("machine", scopes=["work"], namespace="shop")
    app = App(url, namespace="shop", token=made.token)
    tasks_of(app)
    created = await database.create_execution(
        NewExecution(
            execution_kind="double",
            namespace="shop",
            input_payload=b'{"number":3}',
            payload_encoding="json",
        )
    )
    async with app, working(app):
        outcome = await Endings(database).wait(created.execution_id, PATIENCE_S)

    assert outcome.result == b"6"


# Networks and machines that fail


class Cutting(Proxy):
    """Cuts each connection after so many answers, before the last one arrives."""

    answers_max = 3

    async def connected(
        self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        server, to_server = await self.reach_server()
        self.start(_pass(client, to_server), self._answers(server, to_client, to_server))

    async def _answers(
        self,
        server: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        to_server: asyncio.StreamWriter,
    ) -> None:
        try:
            for _ in range(self.answers_max):
                data = await server.read(CHUNK_BYTES)
                if not data:
                    return
                to_client.write(data)
            await server.read(1)  # What was asked has been done, and nobody hears of it.
        finally:
            to_client.transport.abort()
            to_server.transport.abort()


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(CHUNK_BYTES):
            sink.write(data)


async def test_a_network_that_cuts_loses_no_submission(url: str, database: Engine) -> None:
    keys = [f"key-{number}" for number in range(60)]
    async with Cutting(url).open() as proxy:
        app = App(proxy.url.replace("@", ""))
        tasks_of(app)
        async with app:
            runs = [
                await app.submit(app.tasks["double"], number, idempotency_key=key)
                for number, key in enumerate(keys)
            ]

    accepted = {run.execution_id for run in runs}
    stored = (await database.find_executions(limit=1_000)).executions
    assert len(accepted) == len(keys)
    assert {each.execution_id for each in stored} == accepted


async def test_a_lost_answer_says_that_it_may_have_happened(url: str, database: Engine) -> None:
    class Deaf(Cutting):
        answers_max = 1

    async with Deaf(url).open() as proxy:
        app = App(proxy.url.replace("@", ""))
        async with app:
            with pytest.raises(errors.Transport, match="may have succeeded") as raised:
                await app.engine.register_lane("mail")

    assert raised.value.may_have_happened
    assert raised.value.retryable
    lanes = (await database.list_lanes()).lanes
    assert "mail" in {each.lane_id for each in lanes}


PROGRAM = """
import asyncio
from flowfabric import App, Context, WorkerSettings

app = App("{url}")


@app.task
async def slow(ctx: Context) -> str:
    await ctx.step("mark", print, "begun", flush=True)
    await asyncio.sleep(3_600)
    return "never"


asyncio.run(app.run_worker(settings=WorkerSettings(lease_ttl="2s")))
"""


@asynccontextmanager
async def remote_worker(url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM.replace("{url}", url)), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_remote_worker_that_is_killed_is_replaced(url: str, database: Engine) -> None:
    app = App(url)

    @app.task
    async def slow(ctx: Context) -> str:
        await ctx.step("mark", print, "begun", flush=True)
        return "done"

    async with app, asyncio.timeout(60):
        run = await app.submit(slow)
        async with remote_worker(url) as process:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"begun\n"
            process.send_signal(signal.SIGKILL)
            await process.wait()
        async with working(app, lease_ttl="2s"):
            assert await run.result() == "done"
    assert await database.read_total_attempt_count(run.execution_id) == 2


# What does not fit into one request, and servers of other versions


async def test_a_batch_that_is_too_large_for_one_request_goes_in_several(
    app: App, database: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BODY_BYTES_MAX", 2_000)
    texts = [f"{number}" * 300 for number in range(10)]
    requests = [
        NewExecution(execution_kind="x", input_payload=text.encode(), execution_id=f"own-{text[0]}")
        for text in texts
    ]
    created = await app.engine.create_executions(requests)
    claimed = await app.engine.claim_many(
        ["default"], limit=10, worker_id="w", worker_instance_id="w-1"
    )
    results = dict(zip([each.execution_id for each in created], texts, strict=True))
    answers = await app.engine.complete_many(
        [
            Completion(handle=each.handle, result=results[each.execution_id].encode())
            for each in claimed
        ]
    )

    assert [type(each) for each in answers] == [Completed] * 10
    assert [await database.get_execution_result(each.execution_id) for each in created] == [
        text.encode() for text in texts
    ]


async def test_one_thing_that_is_too_large_is_refused(app: App) -> None:
    payload = b"x" * BODY_BYTES_MAX

    with pytest.raises(errors.PayloadTooLarge):
        await app.engine.create_executions(
            [NewExecution(execution_kind="x", input_payload=payload)]
        )


async def test_a_server_of_another_protocol_says_so(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PROTOCOL", 99)

    with pytest.raises(errors.Unavailable, match="install the same version on both sides"):
        await App(url).open()


async def test_what_a_server_of_another_version_does_not_know_names_both(app: App) -> None:
    connection = HttpConnection(app.url, None)
    connection.server_version = "0.0.9"
    try:
        with pytest.raises(errors.Unavailable, match=r"the server is flowfabric 0\.0\.9, this is"):
            await connection.call(Newer("ping", frozenset(), Reach.NOTHING, repeatable=True), {})
    finally:
        await connection.close()


class Newer(RemoteOperation):
    """An operation that the server has not heard of."""

    def __init__(
        self, name: str, scopes: frozenset[Scope], reach: Reach, *, repeatable: bool
    ) -> None:
        super().__init__(name, scopes, reach, repeatable=repeatable)
        self.name = "newer"


HALF = "\ud800"
"""A lone surrogate: no encoding has it."""


async def test_text_that_is_no_unicode_is_refused_as_by_a_database(
    app: App, store_url: str
) -> None:
    await app.submit(app.tasks["double"], 1, execution_id="one", delay="1h")
    await app.budgets.create("team", hard={"tokens": 10})
    asks: dict[str, Callable[[App], Awaitable[object]]] = {
        "source": lambda its: its.signals.send("one", "go", source=HALF),
        "idempotency_key": lambda its: its.signals.send("one", "go", idempotency_key=HALF),
        "limit": lambda its: its.limits.set(HALF, rate="1/m"),
        "budget": lambda its: its.budgets.create(HALF, hard={"tokens": 1}),
        "dimension": lambda its: its.budgets.report("team", {HALF: 1}),
        "report": lambda its: its.budgets.report("team", {"tokens": 1}, key=HALF),
        "schedule": lambda its: its.engine.describe_schedule(HALF),
        "key": lambda its: its.engine.rotate_waitpoint_hmac_secret_all(HALF, "00" * 32),
    }
    told: dict[App, dict[str, object]] = {}
    async with App(store_url) as direct:
        for its in (app, direct):
            told[its] = {}
            for name, ask in asks.items():
                with pytest.raises(errors.Validation) as refused:
                    await ask(its)
                told[its][name] = type(refused.value)
    assert told[app] == told[direct]


async def test_text_that_is_no_unicode_refuses_no_other_report(app: App) -> None:
    await app.budgets.create("team", hard={"tokens": 10})
    report = app.budgets.report
    answers = await asyncio.gather(
        *(report("team", {"tokens": 1}, key=key) for key in ("a", HALF, "b", "c")),
        return_exceptions=True,
    )
    assert [type(each) for each in answers] == [
        type(None),
        errors.InvalidInput,
        type(None),
        type(None),
    ]
    assert (await app.budgets.status("team")).usage == {"tokens": 3}
