"""`flowfabric events`: the log, through filters, and as it grows."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest
from msgspec import structs

from flowfabric import Engine, connect
from flowfabric.core.budget_terms import BudgetDefinition
from flowfabric.core.creation import NewExecution
from tests.cli.command import COMMAND, environment, run


@pytest.fixture(params=["sqlite-file", "postgres"])
def url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    return new_database(request.param)


@pytest.fixture
async def engine(url: str) -> AsyncIterator[Engine]:
    async with await connect(url) as opened:
        yield opened


async def cancelled(engine: Engine, **fields: object) -> str:
    request = structs.replace(NewExecution(execution_kind="work"), **fields)
    execution_id = (await engine.create_execution(request)).execution_id
    await engine.cancel_execution(execution_id, reason="no")
    return execution_id


def ids(*arguments: str, url: str) -> list[object]:
    ran = run("events", "--json", *arguments, url=url)
    assert (ran.status, ran.err) == (0, "")
    return [each["execution_id"] for each in ran.documents]


async def test_the_latest_are_as_many_as_asked_for(engine: Engine, url: str) -> None:
    made = [await cancelled(engine) for _ in range(60)]
    assert ids("-n", "50", url=url) == made[-50:]
    assert ids("-n", "1", url=url) == made[-1:]
    assert ids("-n", "1000", url=url) == made


async def test_filters_by_execution_kind_tag_category_and_namespace(
    engine: Engine, url: str
) -> None:
    plain = await cancelled(engine)
    mail = await cancelled(engine, execution_kind="mail@2")
    tagged = await cancelled(engine, tags={"team": "sport"})
    shop = await cancelled(engine, namespace="shop")
    assert ids("--id", plain, url=url) == [plain]
    assert ids("--kind", "mail", url=url) == [mail]
    assert ids("--tag", "team=sport", url=url) == [tagged, tagged]
    assert ids("--category", "tag", url=url) == [tagged]
    assert ids("--namespace", "shop", url=url) == [shop]
    assert ids("--category", "completion", "-n", "2", url=url) == [tagged, shop]
    assert ids("--category", "lease", url=url) == []
    assert run("events", "--tag", "team", url=url).status == 2


async def test_every_line_has_the_cursor_to_go_on_from(engine: Engine, url: str) -> None:
    made = [await cancelled(engine) for _ in range(3)]
    told = run("events", "--json", url=url).documents
    for place, each in enumerate(told, start=1):
        assert ids("--after", str(each["cursor"]), url=url) == made[place:]
        resumed = await engine.subscribe_events(after=str(each["cursor"]))
        assert resumed.cursor == each["cursor"]
    assert len({each["cursor"] for each in told}) == 3
    assert "-" in str(told[0]["cursor"]), "more than a number: it tells a history from another"


async def test_the_log_is_read_from_its_start_or_from_now(engine: Engine, url: str) -> None:
    made = [await cancelled(engine) for _ in range(2)]
    assert ids("--after", "start", url=url) == made
    assert ids("--after", "now", url=url) == []
    refused = run("events", "--after", "noon", url=url)
    assert refused.status == 2
    assert "must be 'now', 'start', or the cursor of an event" in " ".join(refused.err.split())


async def test_a_cursor_that_the_log_does_not_know_is_told_and_followed_past(
    engine: Engine, url: str
) -> None:
    made = await cancelled(engine)
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "events", "--json", "--follow", "--after", "99999999-1-aaaaaaaaaaaa",
        env=environment({"FLOWFABRIC_URL": url}),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            seen = json.loads(await process.stdout.readline())["execution_id"]
            told = await process.stderr.readline()
    finally:
        process.terminate()
        await process.wait()
    assert seen == made
    assert told.startswith(b"the event log does not hold")


async def test_following_goes_on_with_what_passes_the_filter(engine: Engine, url: str) -> None:
    first = await cancelled(engine, execution_kind="mail")
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "events", "--json", "--follow", "--kind", "mail",
        env=environment({"FLOWFABRIC_URL": url}), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            seen = [json.loads(await process.stdout.readline())["execution_id"]]
            await cancelled(engine)
            second = await cancelled(engine, execution_kind="mail")
            seen.append(json.loads(await process.stdout.readline())["execution_id"])
    finally:
        process.terminate()
        await process.wait()
    assert seen == [first, second]


async def test_events_of_budgets_go_by_their_names(engine: Engine, url: str) -> None:
    await engine.create_budget(BudgetDefinition(budget_id="team", hard_limits={"tokens": 100}))
    await engine.report_usage_admin("team", ["tokens"], [60])
    await engine.report_usage_admin("team", ["tokens"], [60])
    ran = run("events", "--category", "budget", url=url)
    assert (ran.status, ran.err) == (0, "")
    assert [line.split()[3:] for line in ran.out.splitlines()] == [
        ["budget", "created", "team", "0", "of", "100", "tokens", "used"],
        ["budget", "breached", "team", "60", "of", "100", "tokens", "used"],
    ]
