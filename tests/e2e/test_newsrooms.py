"""The newsrooms on FastAPI and Django, whose pages and workers are killed half-way."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from flowfabric import connect, migrate
from tests.e2e.conftest import PATIENCE_S
from tests.e2e.test_live_page import Page, a_port, process

DRAFT = [f"sky-{number} " for number in range(20)]
KILL_AFTER = 6
OPEN_MAX = 10
ASK_AGAIN_S = 0.05


class Newsroom:
    """One of the examples, and its processes."""

    def __init__(self, example: str, url: str, folder: Path) -> None:
        self._example, self._url, self._folder = example, url, folder
        self.port = a_port()

    async def set_up(self) -> None:
        await migrate(self._url)
        if self._example == "newsroom_django":
            async with self._process("-m", self._example) as making:
                assert await making.wait() == 0

    @asynccontextmanager
    async def pages(self) -> AsyncIterator[httpx.AsyncClient]:
        """The web, until it is killed at the end."""
        serve = ("-m", "uvicorn", f"{self._example}:web", "--port", str(self.port))
        base = f"http://127.0.0.1:{self.port}"
        async with (
            self._process(*serve, "--log-level", "error"),
            httpx.AsyncClient(base_url=base, timeout=PATIENCE_S) as client,
        ):
            await self._listens(client)
            yield client

    async def _listens(self, client: httpx.AsyncClient) -> None:
        while True:
            with suppress(httpx.TransportError):
                await client.get("/articles/1")
                return
            await asyncio.sleep(ASK_AGAIN_S)

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[asyncio.subprocess.Process]:
        # A short lease: the next one takes over soon after this one is killed.
        program = (
            f"import asyncio, flowfabric, {self._example} as newsroom\n"
            "settings = flowfabric.WorkerSettings(lease_ttl='2s')\n"
            "asyncio.run(newsroom.app.run_worker(settings=settings))"
        )
        async with self._process("-c", program) as started:
            yield started

    def _process(self, *command: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
        outbox = str(self._folder / "outbox")
        return process(self._url, self._folder, *command, OUTBOX=outbox)

    async def link(self) -> str:
        """The link in the mail, which comes once."""
        for _ in itertools.count():
            if mails := self._mails():
                (only,) = mails
                return only
            await asyncio.sleep(ASK_AGAIN_S)
        raise AssertionError("unreachable")

    def _mails(self) -> list[str]:
        outbox = self._folder / "outbox"
        return outbox.read_text().splitlines() if outbox.exists() else []


@pytest.fixture(params=["newsroom_fastapi", "newsroom_django"])
async def newsroom(request: pytest.FixtureRequest, store_url: str, tmp_path: Path) -> Newsroom:
    made = Newsroom(request.param, store_url, tmp_path)
    await made.set_up()
    return made


async def post(client: httpx.AsyncClient, topic: str) -> httpx.Response:
    return await client.post("/articles", data={"topic": topic})


async def test_an_article_survives_the_deaths_of_its_worker_and_its_pages(
    newsroom: Newsroom,
) -> None:
    page = Page()
    async with asyncio.timeout(PATIENCE_S):
        async with newsroom.pages() as client:
            article = (await post(client, "sky")).json()["article"]
            words = f"/articles/{article}/words"
            async with newsroom.worker():
                await page.read(client, words, until=KILL_AFTER)
        async with newsroom.worker(), newsroom.pages() as client:
            await page.read(client, words, until=len(DRAFT))
            link = await newsroom.link()
            assert "approved" in (await client.get(link)).text
            forged = await client.post(f"{link[:-4]}AAAA", data={"decision": "approved"})
            assert forged.status_code == 400
            assert (await client.get(f"/articles/{article}")).json()["state"] == "written"
            decided = [await client.post(link, data={"decision": "approved"}) for _ in range(2)]
            assert [each.status_code for each in decided] == [200, 200]
            assert [each.json()["counts"] for each in decided] == [True, False]
            await page.read(client, words)
            stored = (await client.get(f"/articles/{article}")).json()
    assert [word.text for word in page.shown] == DRAFT
    assert page.turns == 1
    assert stored == {"topic": "sky", "text": "".join(DRAFT), "state": "approved"}


async def test_a_request_that_fails_leaves_neither_an_article_nor_a_job(
    newsroom: Newsroom, store_url: str
) -> None:
    async with asyncio.timeout(PATIENCE_S), newsroom.pages() as client:
        answers = [await post(client, f"topic-{number}") for number in range(OPEN_MAX + 1)]
        *accepted, refused = [each.json() for each in answers]
        missing = await client.get(f"/articles/{OPEN_MAX + 1}")
    async with await connect(store_url) as engine:
        jobs = (await engine.find_executions()).executions
    assert {each.status_code for each in answers[:-1]} == {201}
    assert refused["detail"].startswith("10 articles are being written")
    assert missing.status_code == 404
    assert {each.own_id for each in jobs} == {f"article-{each['article']}" for each in accepted}
