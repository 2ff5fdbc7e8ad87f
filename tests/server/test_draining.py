"""A server that stops, and one that is full; and what neither writes into its log."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest

from flowfabric import Engine
from flowfabric.errors import ResourceExhausted
from flowfabric.server.api import ServerConfig
from flowfabric.server.draining import Waiting
from flowfabric.server.streams import PING
from flowfabric.testing import SettableClock
from tests.conformance.given import Given
from tests.server.conftest import app_of
from tests.server.test_access import token
from tests.server.test_streams import events_of, path_of, say

SMALL = ServerConfig(anybody="without_tokens", waiting_max=1, streams_max=2)
FEW = ServerConfig(anybody="without_tokens", requests_max=3)


async def test_a_server_that_stops_sends_everybody_to_another(
    live: httpx.AsyncClient, engine: Engine, given: Given, server_config: ServerConfig
) -> None:
    claimed = await given.running()
    await say(engine, claimed, "one")
    place = f"/v1/executions/{claimed.execution_id}"
    waiting = app_of(server_config).state.shared.waiting
    assert isinstance(waiting, Waiting)

    async with live.stream("GET", f"{place}/stream") as answer:
        following = events_of(answer)
        await anext(following)
        polling = asyncio.create_task(live.get(f"{place}/outcome?wait_ms=30000"))
        while not (polling.done() or waiting.polls):
            await asyncio.wait([polling], timeout=0.001)
        waiting.drain()
        last = [each async for each in following]
    polled = await polling
    ready = await live.get("/readyz")

    assert [each.name for each in last] == ["reconnect"]
    for each in (polled, ready):
        assert (each.status_code, each.json()["code"]) == (503, "unavailable"), each.text
        assert each.json()["retryable"]
        assert int(each.headers["retry-after"]) > 0
    assert (await live.get("/livez")).status_code == 200


@pytest.mark.parametrize("server_config", [ServerConfig()], ids=["closed"])
@pytest.mark.parametrize("way", ["revoked", "expired"])
async def test_a_token_that_ends_ends_what_it_has_opened(
    live: httpx.AsyncClient,
    engine: Engine,
    given: Given,
    clock: SettableClock,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    monkeypatch.setattr("flowfabric.server.access.TOKEN_CACHE_S", 0.0)
    monkeypatch.setattr("flowfabric.server.draining.CHECK_S", 0.01)
    claimed = await given.running()
    place = f"/v1/executions/{claimed.execution_id}"
    made = await engine.create_token("t", scopes=["read"], expires_in_ms=60_000)
    headers = {"Authorization": f"Bearer {made.token}"}
    paths = (f"{place}/stream", "/v1/events", "/v1/hints?topic=x")

    async with AsyncExitStack() as opened:
        streams = [
            await opened.enter_async_context(live.stream("GET", each, headers=headers))
            for each in paths
        ]
        statuses = [each.status_code for each in streams]
        polling = asyncio.create_task(live.get(f"{place}/outcome?wait_ms=30000", headers=headers))
        if way == "revoked":
            await engine.revoke_token(made.stored.token_id)
        else:
            clock.advance(ms=60_000)
        told = [(await stream.aread()).count(b"event:") for stream in streams]
        polled = await polling

    assert statuses == [200, 200, 200]
    assert told[:2] == [0, 0]
    assert (polled.status_code, polled.json()["code"]) == (401, "unauthorized")


def test_a_ping_is_no_message() -> None:
    # A line of data, even an empty one, would reach the page as a message.
    assert PING.encode().split() == [b":", b"ping"]


@pytest.mark.parametrize("server_config", [SMALL], ids=["small"])
async def test_open_streams_keep_nobody_from_waiting_and_are_bounded(
    live: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    async with AsyncExitStack() as open_streams:
        for _ in range(SMALL.streams_max):
            stream = await open_streams.enter_async_context(live.stream("GET", "/v1/events"))
            assert stream.status_code == 200
        polled = await live.get(f"{path_of(claimed)}/tail?block_ms=1")
        refused = await live.get("/v1/events")

    assert polled.status_code == 200
    assert (refused.status_code, refused.json()["code"]) == (429, "resource_exhausted")
    assert refused.json()["retryable"] is True
    assert int(refused.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    "server_config", [ServerConfig(waiting_max=3, streams_max=3)], ids=["three"]
)
async def test_one_token_takes_half_of_the_places_at_most(
    live: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    place = path_of(claimed)
    mine, other = await token(engine, "read"), await token(engine, "read")
    async with AsyncExitStack() as opened:
        for _ in range(2):
            stream = live.stream("GET", "/v1/events", headers=mine)
            assert (await opened.enter_async_context(stream)).status_code == 200
        tails = [
            asyncio.create_task(live.get(f"{place}/tail?block_ms=30000", headers=mine))
            for _ in range(2)
        ]
        while engine.waiting_tails < 2:
            await asyncio.wait(tails, timeout=0.001)

        refused = [
            await live.get("/v1/events", headers=mine),
            await live.get(f"{place}/tail?block_ms=1", headers=mine),
        ]
        stream = live.stream("GET", "/v1/events", headers=other)
        streamed = await opened.enter_async_context(stream)
        polled = await live.get(f"{place}/tail?block_ms=1", headers=other)
        await say(engine, claimed, "done")
        await asyncio.gather(*tails)

    assert [each.status_code for each in refused] == [429, 429]
    assert (streamed.status_code, polled.status_code) == (200, 200)


async def numbers() -> AsyncIterator[int]:
    for number in range(2):
        yield number


async def test_a_stream_has_its_place_before_it_is_read_and_until_it_is_let_go_of() -> None:
    waiting = Waiting(polls_max=1, streams_max=1)

    async def anybody() -> None: ...

    def stream() -> AsyncIterator[int]:
        return waiting.each(numbers(), anybody, None, idle_s=60, ping=-1, last=-2)

    first = stream()
    with pytest.raises(ResourceExhausted):
        stream()
    assert [each async for each in first] == [0, 1]
    second = stream()
    assert len(waiting.streams) == 1
    del second
    assert [each async for each in stream()] == [0, 1]
    assert len(waiting.streams) == 0


async def test_whoever_is_slow_to_ask_is_given_up(
    live: httpx.AsyncClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.server.serve.HEADERS_S", 0.01)
    monkeypatch.setattr("flowfabric.server.api.BODY_S", 0.01)
    head = b"POST /v1/executions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    begun = {
        "nothing": b"",
        "half a head": head,
        "half a body": head + b"Content-Length: 9\r\n\r\n{",
    }
    answers = {}

    for name, sent in begun.items():
        reader, writer = await asyncio.open_connection(live.base_url.host, live.base_url.port)
        writer.write(sent)
        answers[name] = (await reader.readline()).split()[1:2]
        writer.close()

    assert answers == {"nothing": [], "half a head": [], "half a body": [b"408"]}


@pytest.mark.parametrize("server_config", [FEW], ids=["few"])
async def test_each_token_has_a_rate_of_its_own(http: httpx.AsyncClient, engine: Engine) -> None:
    mine, other = await token(engine, "read"), await token(engine, "read")

    statuses = [(await http.get("/v1/flows", headers=mine)).status_code for _ in range(4)]
    answer = await http.get("/v1/flows", headers=mine)
    others = await http.get("/v1/flows", headers=other)

    assert statuses == [200, 200, 200, 429]
    assert answer.json()["code"] == "rate_limit_exceeded"
    assert 0 < int(answer.headers["retry-after"]) <= 60
    assert others.status_code == 200


async def test_nothing_secret_is_logged(
    http: httpx.AsyncClient, engine: Engine, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "sesame-payload"
    admin = await token(engine, "admin")
    suspended = (await given.suspended()).execution_id
    (waitpoint,) = (await engine.list_pending_waitpoints(suspended)).waitpoints
    place = f"/v1/executions/{suspended}"
    caplog.clear()

    minted = await http.post("/v1/tokens", json={"name": "n", "scopes": ["read"]}, headers=admin)
    shown = await http.get(f"{place}/waitpoints/{waitpoint.waitpoint_id}/token", headers=admin)
    signal = {
        "waitpoint_id": waitpoint.waitpoint_id,
        "waitpoint_token": shown.json()["token"],
        "signal_name": "approved",
        "payload_json": secret,
    }
    forged = signal | {"waitpoint_token": f"{shown.json()['token']}0"}
    body = {"execution_kind": "x", "input_json": secret}
    statuses = [
        (await http.post(f"{place}/signal", json=forged)).status_code,
        (await http.post(f"{place}/signal", json=signal)).status_code,
        (await http.post("/v1/executions", json=body, headers=admin)).status_code,
        (await http.post("/v1/executions", json=[secret], headers=admin)).status_code,
        (await http.get(f"/v1/executions?tag={secret}", headers=admin)).status_code,
        (await http.get("/v1/flows", headers={"Authorization": secret})).status_code,
    ]
    logged = "\n".join(
        record.getMessage() for record in caplog.records if record.name.startswith("flowfabric")
    )

    assert statuses == [400, 200, 201, 422, 400, 401]
    assert logged.count("POST /v1/executions ") == 2
    bearer = admin["Authorization"].removeprefix("Bearer ")
    for each in (secret, bearer, minted.json()["token"], shown.json()["token"]):
        assert each not in logged
