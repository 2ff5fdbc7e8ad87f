"""A page that shows an answer as it is written, by a worker that is killed in the middle of it."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from msgspec import Struct

from tests.e2e.conftest import PATIENCE_S
from tests.e2e.programs import ROOT

OUTLINE = [f"outline of sky-{number} " for number in range(3)]
ANSWER = [f"sky-{number} " for number in range(20)]
KILL_AFTER = 8


class Word(Struct):
    text: str
    attempt: int
    step: str | None


class Page:
    """What a browser does with the events it gets."""

    def __init__(self) -> None:
        self.shown: list[Word] = []
        self.last_id: str | None = None
        self.turns = 0
        self.ended = False

    async def read(self, client: httpx.AsyncClient, path: str, until: int | None = None) -> None:
        """Read on where it has stopped; to the end, or until so many words are shown."""
        headers = {} if self.last_id is None else {"Last-Event-ID": self.last_id}
        async with client.stream("GET", path, headers=headers, timeout=PATIENCE_S) as response:
            event: dict[str, str] = {}
            async for line in response.aiter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    event[name] = value
                    continue
                self._take(event)
                event = {}
                if self.ended or (until is not None and len(self.shown) >= until):
                    return

    def _take(self, event: dict[str, str]) -> None:
        self.last_id = event.get("id", self.last_id)
        if event["event"] == "end":
            self.ended = True
            return
        data = json.loads(event["data"])
        if event["event"] == "superseded":
            self.turns += 1
            kept = data["kept_steps"]
            self.shown = [
                word
                for word in self.shown
                if word.attempt >= data["attempt"] or kept.get(word.step) == word.attempt
            ]
            return
        self.shown.append(Word(data["text"], data["attempt"], data["step"]))


def a_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def process(
    url: str, folder: Path, *command: str, **variables: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'examples'}",
            "FLOWFABRIC_URL": url,
            "WORD_S": "0.05",
            **variables,
        },
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def test_the_page_shows_every_word_of_the_surviving_attempt_once(
    store_url: str, tmp_path: Path
) -> None:
    port = a_port()
    serve = ("-m", "uvicorn", "live:web", "--port", str(port), "--log-level", "error")
    worker = (str(ROOT / "examples" / "live.py"),)
    watching, reconnecting = Page(), Page()
    async with (
        process(store_url, tmp_path, *serve),
        # Tries again until somebody listens.
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", transport=httpx.AsyncHTTPTransport(retries=6)
        ) as client,
        asyncio.timeout(PATIENCE_S),
    ):
        run = (await client.post("/ask", json={"question": "sky"})).json()["run"]
        path = f"/runs/{run}/words"
        following = asyncio.create_task(watching.read(client, path))
        async with process(store_url, tmp_path, *worker) as first:
            await reconnecting.read(client, path, until=KILL_AFTER)
            first.kill()
            await first.wait()
        async with process(store_url, tmp_path, *worker):
            await reconnecting.read(client, path)
            await following
        late = Page()
        await late.read(client, path)
    for page in (watching, reconnecting, late):
        assert [word.text for word in page.shown] == OUTLINE + ANSWER
        assert {word.attempt for word in page.shown[3:]} == {1}
    assert (watching.turns, reconnecting.turns, late.turns) == (1, 1, 0)
