"""A server that is told to stop: what is under way is answered, what waits is sent elsewhere."""

import asyncio

import httpx
import msgspec

from flowfabric import connect, migrate
from tests.e2e.conftest import PATIENCE_S
from tests.e2e.test_server_killed import ServerProcess
from tests.server.test_streams import events_of

BODY = msgspec.json.encode({"execution_kind": "errand", "idempotency_key": "under way"})


async def test_a_server_that_is_told_to_stop_answers_what_is_under_way(store_url: str) -> None:
    await migrate(store_url)
    server = ServerProcess(store_url)
    async with (
        server.running(),
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http,
        asyncio.timeout(PATIENCE_S),
    ):
        created = await http.post("/v1/executions", json={"execution_kind": "errand"})
        waiting = created.json()["Created"]["execution_id"]
        polling = asyncio.create_task(http.get(f"/v1/executions/{waiting}/outcome?wait_ms=60000"))
        reader, writer = await begin(server.port)
        async with http.stream("GET", "/v1/events?after=start") as answer:
            server.terminate()
            told = [each.name async for each in events_of(answer)]
        polled = (await asyncio.gather(polling, return_exceptions=True))[0]
        writer.write(BODY[-1:])
        status = (await reader.readline()).split()[1]
        writer.close()
        ended = await server.ended()
        later = await asyncio.gather(http.get("/livez"), return_exceptions=True)

    assert told[-1:] == ["reconnect"]
    if isinstance(polled, httpx.Response):
        assert (polled.status_code, polled.json()["code"]) == (503, "unavailable")
        assert int(polled.headers["retry-after"]) > 0
    else:
        # It came too late to be taken, which tells a client the same.
        assert isinstance(polled, httpx.TransportError)
    assert status == b"201"
    assert ended == 0
    assert isinstance(later[0], httpx.TransportError)
    async with await connect(store_url) as engine:
        assert len((await engine.find_executions()).executions) == 2


async def begin(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request that lacks the last byte of its body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/executions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(BODY)}",
        "Expect: 100-continue",
    )
    writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + BODY[:-1])
    # Now it is under way.
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    return reader, writer
