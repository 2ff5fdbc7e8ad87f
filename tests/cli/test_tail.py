"""`flowfabric tail`: what a run says."""

import asyncio
import signal
from collections.abc import Callable

import pytest

from flowfabric import Engine, connect
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import Claimed
from flowfabric.core.streams import Encoding, NewFrame
from tests.cli.command import COMMAND, environment, heed_interrupts, run


async def running(engine: Engine) -> Claimed:
    await engine.create_execution(NewExecution(execution_kind="work"))
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    return claimed


async def say(engine: Engine, claimed: Claimed, *texts: str) -> None:
    for text in texts:
        await engine.append_frame(claimed.handle, NewFrame(payload=text.encode()))


async def test_text_is_printed_as_it_came_and_all_else_a_line_each(
    engine: Engine, url: str
) -> None:
    claimed = await running(engine)
    await say(engine, claimed, "Dear ", "Ada,\nhow are", " you?")
    await engine.append_frame(claimed.handle, NewFrame(payload=b'{"n":1}', encoding=Encoding.JSON))
    await engine.append_frame(claimed.handle, NewFrame(payload=b"\xff\x00"))
    await say(engine, claimed, "\x1b[2Jbye")
    await engine.complete(claimed.handle)
    ran = run("tail", claimed.execution_id, url=url)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == 'Dear Ada,\nhow are you?\n{"n":1}\n[2 bytes]\n\\x1b[2Jbye\n'


async def test_frames_are_documents_with_cursors(engine: Engine, url: str) -> None:
    claimed = await running(engine)
    await say(engine, claimed, "a", "b")
    first, second = run("tail", claimed.execution_id, "--no-follow", "--json", url=url).documents
    assert (first["content"], first["kind"], first["attempt"]) == ("a", "event", 0)
    after = run(
        "tail", claimed.execution_id, "--no-follow", "--json", "--after", str(first["cursor"]),
        url=url,
    )  # fmt: skip
    assert after.documents == [second]


async def test_an_attempt_that_starts_over_is_told_beside_the_text(
    engine: Engine, url: str
) -> None:
    claimed = await running(engine)
    await say(engine, claimed, "first try")
    await engine.hand_back(claimed.handle, reason="stop")
    again = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert again is not None
    await say(engine, again, "second try")
    await engine.complete(again.handle)
    ran = run("tail", claimed.execution_id, url=url)
    assert (ran.out, ran.err) == ("second try\n", "")
    everything = run("tail", claimed.execution_id, "--all", "--json", url=url).documents
    assert [(each["content"], each["superseded"]) for each in everything] == [
        ("first try", True),
        ("second try", False),
    ]


@pytest.fixture(params=["sqlite-file", "postgres"])
def each_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    return new_database(request.param)


async def test_it_follows_until_the_execution_ends(each_url: str) -> None:
    async with await connect(each_url) as engine:
        claimed = await running(engine)
        await say(engine, claimed, "one ")
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "tail", claimed.execution_id,
            env=environment({"FLOWFABRIC_URL": each_url}), stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.timeout(30):
            assert await process.stdout.read(4) == b"one "
            await say(engine, claimed, "two ")
            assert await process.stdout.read(4) == b"two "
            await engine.hand_back(claimed.handle, reason="stop")
            again = await engine.claim(worker_id="w", worker_instance_id="w-1")
            assert again is not None
            assert b"attempt 2 starts over" in await process.stderr.readline()
            await say(engine, again, "three")
            await engine.complete(again.handle)
            assert await process.stdout.read() == b"\nthree\n"
            assert await process.wait() == 0


async def test_an_interrupt_ends_it(engine: Engine, url: str) -> None:
    claimed = await running(engine)
    await say(engine, claimed, "one\n")
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "tail", claimed.execution_id,
        env=environment({"FLOWFABRIC_URL": url}), stdout=asyncio.subprocess.PIPE,
        preexec_fn=heed_interrupts,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(30):
        assert await process.stdout.readline() == b"one\n"
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130


def test_what_does_not_exist_is_not_found(url: str, engine: Engine) -> None:
    ran = run("tail", "00000000-0000-4000-8000-000000000000", url=url)
    assert ran.status == 3


async def test_a_run_that_did_not_complete_is_told_and_ends_it_with_status_1(
    engine: Engine, url: str
) -> None:
    claimed = await running(engine)
    await say(engine, claimed, "almost")
    await engine.cancel_execution(claimed.execution_id, reason="changed my mind")
    ran = run("tail", claimed.execution_id, url=url)
    assert (ran.status, ran.out) == (1, "almost\n")
    assert "is cancelled: changed my mind" in " ".join(ran.err.split())
    assert run("tail", claimed.execution_id, "--no-follow", url=url).status == 0
