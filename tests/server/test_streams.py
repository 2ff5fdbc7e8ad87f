"""Streams and events over HTTP: by page, by long poll, and as they come."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from flowfabric import Engine
from flowfabric.core.results import Claimed
from flowfabric.core.streams import BestEffortLive, DurableSummary, Encoding, NewFrame
from flowfabric.engine.events import Subscription
from flowfabric.errors import HistoryChanged
from flowfabric.server.api import ServerConfig
from tests.conformance.given import UNKNOWN_ID, Given


async def say(engine: Engine, claimed: Claimed, *texts: str) -> None:
    for text in texts:
        await engine.append_frame(
            claimed.handle, NewFrame(frame_type="token", payload=text.encode())
        )


async def parked(tail: "asyncio.Task[httpx.Response]", engine: Engine) -> None:
    """Until the tail waits."""
    while not tail.done() and not engine.waiting_tails:
        await asyncio.wait([tail], timeout=0.001)


def path_of(claimed: Claimed) -> str:
    return f"/v1/executions/{claimed.execution_id}/attempts/0/stream"


def texts(body: dict[str, list[dict[str, dict[str, str]]]]) -> list[str]:
    return [each["fields"]["payload"] for each in body["frames"]]


class Event:
    def __init__(self, lines: list[str]) -> None:
        fields = dict(line.split(": ", 1) for line in lines if ": " in line)
        self.id = fields.get("id")
        self.name = fields.get("event")
        self.data = msgspec.json.decode(fields.get("data") or "null")


async def events_of(answer: httpx.Response) -> AsyncIterator[Event]:
    lines: list[str] = []
    async for line in answer.aiter_lines():
        if line:
            lines.append(line)
        elif lines:
            event = Event(lines)
            lines = []
            if event.id or event.name:
                yield event


async def test_frames_are_read_as_the_reference_shows_them(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    assert (await http.get(path_of(claimed))).json() == {"frames": [], "count": 0}
    await say(engine, claimed, "hello", "world")

    page = (await http.get(path_of(claimed))).json()
    first = (await http.get(f"{path_of(claimed)}?limit=1")).json()
    rest = (await http.get(f"{path_of(claimed)}/tail?after={first['frames'][0]['id']}")).json()

    assert (page["count"], texts(page)) == (2, ["hello", "world"])
    fields = page["frames"][0]["fields"]
    assert (fields["frame_type"], fields["encoding"], fields["mode"]) == (
        "token",
        "utf8",
        "durable",
    )
    assert fields["ts"].isdigit()
    assert texts(rest) == ["world"]
    assert "closed_at" not in page
    await engine.complete(claimed.handle)
    closed = (await http.get(path_of(claimed))).json()
    assert closed["closed_reason"] == "attempt_success"
    assert isinstance(closed["closed_at"], int)


async def test_a_tail_answers_as_soon_as_something_is_said(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    waiting = asyncio.create_task(http.get(f"{path_of(claimed)}/tail?block_ms=30000"))
    await parked(waiting, engine)

    await say(engine, claimed, "late")

    assert texts((await waiting).json()) == ["late"]


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("?limit=0", "limit must be >= 1"),
        ("?limit=1001", "limit exceeds REST ceiling 1000"),
        ("?from=-", "from"),
        ("/tail?limit=0", "limit must be >= 1"),
        ("/tail?block_ms=30001", "block_ms exceeds 30000ms ceiling"),
        ("/tail?after=start", "after"),
    ],
)
async def test_bad_queries_are_told(
    http: httpx.AsyncClient, given: Given, query: str, problem: str
) -> None:
    claimed = await given.running()

    answer = await http.get(f"{path_of(claimed)}{query}")

    assert answer.status_code == 400, answer.text
    assert problem in answer.json()["error"]


@pytest.mark.parametrize("server_config", [ServerConfig(anybody="without_tokens", waiting_max=1)])
async def test_as_many_tails_wait_as_there_is_room_for(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    waiting = asyncio.create_task(http.get(f"{path_of(claimed)}/tail?block_ms=30000"))
    await parked(waiting, engine)

    refused = await http.get(f"{path_of(claimed)}/tail?block_ms=30000")

    assert refused.status_code == 429
    assert refused.json()["kind"] == "resource_exhausted"
    assert refused.json()["retryable"] is True
    await say(engine, claimed, "done")
    assert (await waiting).status_code == 200


async def test_a_run_is_followed_to_its_end_and_from_a_cursor(
    live: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    await say(engine, claimed, "one", "two")
    url = f"/v1/executions/{claimed.execution_id}/stream"

    async with live.stream("GET", url) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        following = events_of(answer)
        first = await anext(following)
        second = await anext(following)
        await say(engine, claimed, "three")
        third = await anext(following)
        await engine.complete(claimed.handle)
        end = await anext(following)
        assert await anext(following, None) is None
    headers = {"Last-Event-ID": first.id or ""}
    async with live.stream("GET", url, headers=headers) as answer:
        again = [event.data["text"] async for event in events_of(answer) if event.id]

    assert [event.data["text"] for event in (first, second, third)] == ["one", "two", "three"]
    assert end.name == "end"
    assert again == ["two", "three"]


async def test_bytes_and_summaries_are_followed_as_what_they_are(
    live: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    patch = NewFrame(payload=b'{"a":1}', encoding=Encoding.JSON, mode=DurableSummary())
    picture = NewFrame(payload=b"\x00\xff", encoding=Encoding.BASE64)
    for frame in (patch, picture):
        await engine.append_frame(claimed.handle, frame)
    await engine.complete(claimed.handle)
    async with live.stream("GET", f"/v1/executions/{claimed.execution_id}/stream") as answer:
        summary, shown, _ = [event.data async for event in events_of(answer)]
    assert (summary["text"], summary["summary"]) == ("", {"a": 1})
    assert shown["base64"] == "AP8="


async def test_the_summary_of_an_attempt_is_read(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    url = f"/v1/executions/{claimed.execution_id}/attempts/0/summary"
    assert (await http.get(url)).status_code == 404
    patch = NewFrame(payload=b'{"a":1}', encoding=Encoding.JSON, mode=DurableSummary())
    await engine.append_frame(claimed.handle, patch)
    body = (await http.get(url)).json()
    assert (body["summary"], body["version"]) == ({"a": 1}, 1)


async def test_live_frames_are_left_out_on_request(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    live = NewFrame(payload=b"soon gone", mode=BestEffortLive(ttl_ms=60_000))
    await engine.append_frame(claimed.handle, live)
    await say(engine, claimed, "kept")
    for path in (path_of(claimed), f"{path_of(claimed)}/tail"):
        assert texts((await http.get(path)).json()) == ["soon gone", "kept"]
        kept = await http.get(path, params={"visibility": "exclude_best_effort"})
        assert texts(kept.json()) == ["kept"]
        refused = await http.get(path, params={"visibility": "bogus"})
        assert (refused.status_code, refused.json()["field"]) == (400, "visibility")


async def test_what_does_not_exist_has_no_stream(http: httpx.AsyncClient) -> None:
    assert (await http.get(f"/v1/executions/{UNKNOWN_ID}/stream")).status_code == 404


async def test_events_are_told_as_they_come_to_whom_they_concern(
    live: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    start = (await engine.read_events(limit=1)).cursor
    made = await engine.create_token("test", scopes=["read"], namespace="shop")
    headers = {"Authorization": f"Bearer {made.token}"}

    async with live.stream("GET", f"/v1/events?after={start}", headers=headers) as answer:
        following = events_of(answer)
        await given.completed(namespace="other")
        mine = await given.completed(namespace="shop")
        seen = [await anext(following), await anext(following)]

    assert {event.data["execution_id"] for event in seen} == {mine.execution_id}
    headers["Last-Event-ID"] = seen[0].id or ""
    async with live.stream("GET", "/v1/events", headers=headers) as answer:
        assert (await anext(events_of(answer))).id == seen[1].id
    denied = await live.get("/v1/events?namespace=other", headers=headers)
    assert denied.status_code == 403


async def test_a_cursor_that_the_log_has_lost_is_told_where_to_go_on(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    await given.completed()
    known = (await engine.read_events()).cursor
    event_id, at_ms, _ = known.split("-")
    lost = [f"{event_id}-{at_ms}-000000000000", f"{int(event_id) + 9}-{at_ms}-000000000000"]

    for cursor in lost:
        answer = await http.get("/v1/events", headers={"Last-Event-ID": cursor})

        assert (answer.status_code, answer.json()["code"]) == (409, "history_changed")
        assert answer.json()["resume_after"] == "0", answer.text


async def test_a_stream_that_cannot_go_on_says_why(
    live: httpx.AsyncClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object, **__: object) -> None:
        raise HistoryChanged("the log was exchanged", resume_after="7")

    monkeypatch.setattr(Subscription, "__anext__", lost)

    async with live.stream("GET", "/v1/events") as answer:
        told = [each async for each in events_of(answer)]

    assert [(each.name, each.data["code"]) for each in told] == [("problem", "history_changed")]
    assert told[0].data["resume_after"] == "7"
