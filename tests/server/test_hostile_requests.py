"""Requests that no library sends: what they are told, and that nobody else notices."""

import asyncio
import logging

import httpx
import pytest

from flowfabric import Engine
from flowfabric.server.api import HEADER_BYTES_MAX, ServerConfig
from tests.server.test_access import token

ENOUGH_S = 10
HEAD = "Host: localhost\r\nConnection: close\r\n"
JSON = "Content-Type: application/json\r\n"
CREATE = b'{"execution_kind": "x"}'


async def answer_to(live: httpx.AsyncClient, asked: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    port = live.base_url.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(asked)
        async with asyncio.timeout(ENOUGH_S):
            return await reader.read()
    finally:
        writer.close()


def post(body: bytes, headers: str = "") -> bytes:
    length = f"Content-Length: {len(body)}\r\n"
    return f"POST /v1/executions HTTP/1.1\r\n{HEAD}{JSON}{length}{headers}\r\n".encode() + body


CHUNKED = f"POST /v1/executions HTTP/1.1\r\n{HEAD}{JSON}Transfer-Encoding: chunked\r\n\r\n".encode()
HOSTILE: dict[str, tuple[bytes, int, str]] = {
    "no HTTP at all": (b"\x16\x03\x01\x00\xc8\x01\r\n\r\n", 400, "bad_http"),
    "no host": (b"GET /v1/executions HTTP/1.1\r\n\r\n", 400, "bad_http"),
    "a length below zero": (post(b"").replace(b"Length: 0", b"Length: -5"), 400, "bad_http"),
    "two lengths": (post(b"{}", "Content-Length: 3\r\n"), 400, "bad_http"),
    "a chunk without a size": (CHUNKED + b"zzz\r\n", 400, "bad_http"),
    "chunks beyond the limit": (
        CHUNKED + (b"10000\r\n" + b" " * 65_536 + b"\r\n") * 17,
        413,
        "payload_too_large",
    ),
    "a length beyond the limit": (
        post(b"").replace(b"Length: 0", b"Length: 99999999"),
        413,
        "payload_too_large",
    ),
    "headers beyond the limit": (
        post(CREATE, f"X-Large: {'a' * HEADER_BYTES_MAX}\r\n"),
        431,
        "headers_too_large",
    ),
    "many headers": (
        post(CREATE, "".join(f"X-{number}: a\r\n" for number in range(8_000))),
        431,
        "headers_too_large",
    ),
    "two tokens": (
        post(CREATE, "Authorization: Bearer a\r\nAuthorization: Bearer b\r\n"),
        400,
        "invalid_input",
    ),
    "a packed body": (post(CREATE, "Content-Encoding: gzip\r\n"), 415, "unsupported_media_type"),
    "a byte order mark": (post(b"\xef\xbb\xbf" + CREATE), 400, "invalid_json"),
    "not a number": (post(b'{"execution_kind": "x", "input_json": NaN}'), 400, "invalid_json"),
    "half a character": (post(b'{"execution_kind": "\\ud800"}'), 400, "invalid_json"),
    "another address": (
        f"GET http://evil.example/v1/executions HTTP/1.1\r\n{HEAD}\r\n".encode(),
        404,
        "no_such_route",
    ),
    "a path of kilobytes": (
        f"GET /{'a' * 20_000} HTTP/1.1\r\n{HEAD}\r\n".encode(),
        404,
        "no_such_route",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_what_is_hostile_is_refused_in_json(live: httpx.AsyncClient, case: str) -> None:
    asked, status, code = HOSTILE[case]

    head, _, body = (await answer_to(live, asked)).partition(b"\r\n\r\n")

    assert head.split()[1] == str(status).encode(), head
    assert b"content-type: application/json" in head.lower()
    assert f'"code":"{code}"'.encode() in body
    assert len(body) < 1_000
    assert (await live.get("/v1/executions")).json()["executions"] == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/executions?cursor=a%0Ab",
        "/v1/executions?cursor=%00",
        "/v1/flows?cursor=%00",
        "/v1/inbox?cursor=%00",
        "/v1/schedules?cursor=a%0Ab%00",
        "/v1/limits?cursor=a%0Ab%00",
        "/v1/budgets?cursor=a%0Ab%00",
        "/v1/workers?cursor=%00",
        "/v1/tokens?cursor=%00",
        "/v1/executions?lane=%00",
        "/v1/executions?kind=%00",
        "/v1/executions?tag=a%3D%00",
        "/v1/executions?namespace=%00",
        "/v1/executions/a%00b",
        "/v1/executions/%0d%0aSet-Cookie:a",
        "/v1/schedules/a%00b",
        "/v1/limits/a%00b",
        "/v1/budgets/a%00b",
        "/v1/workers/events?worker_instance_id=%00",
        "/v1/events?after=%00",
        "/v1/events?kind=%00",
        "/v1/executions?created_after_ms=99999999999999999999",
    ],
)
async def test_cursors_and_names_that_nobody_gave_are_wrong_values(
    http: httpx.AsyncClient, path: str
) -> None:
    async with asyncio.timeout(ENOUGH_S):
        answer = await http.get(path)

    assert answer.status_code == 400, answer.text
    assert answer.json()["field"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/livez"])
async def test_load_balancers_may_ask_by_head(live: httpx.AsyncClient, path: str) -> None:
    answer = await live.head(path)

    assert (answer.status_code, answer.content) == (200, b"")


async def test_pipelined_requests_are_answered_in_their_order(live: httpx.AsyncClient) -> None:
    asked = "".join(
        f"GET /v1/executions/own-{number} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for number in range(20)
    )
    last = f"GET /livez HTTP/1.1\r\n{HEAD}\r\n"

    answers = (await answer_to(live, (asked + last).encode())).split(b"HTTP/1.1 ")[1:]

    told = [f"own-{number}".encode() in each for number, each in enumerate(answers[:-1])]
    assert (told, answers[-1][:3]) == ([True] * 20, b"200")


@pytest.mark.parametrize("server_config", [ServerConfig()], ids=["closed"])
@pytest.mark.parametrize("name", ["token", "access_token", "authorization"])
async def test_a_token_in_a_query_lets_nobody_in(
    http: httpx.AsyncClient, engine: Engine, name: str
) -> None:
    presented = (await token(engine, "admin"))["Authorization"].removeprefix("Bearer ")

    answer = await http.get("/v1/executions", params={name: presented})

    assert answer.status_code == 401
    assert presented not in answer.text


SENT = ["app%2F1", "app%2f1", "%7Bfp:7%7D:x%2Fy", "a%0Ab%0D%00", "%EE%80%80", "caf%C3%A9%252F"]


@pytest.mark.parametrize("sent", SENT)
async def test_the_access_log_has_the_path_as_it_was_sent_and_no_query(
    live: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, sent: str
) -> None:
    caplog.set_level(logging.INFO, "flowfabric.access")
    path = f"/v1/executions/{sent}"

    await answer_to(live, f"GET {path}?secret=1 HTTP/1.1\r\n{HEAD}\r\n".encode())

    (line,) = [each.getMessage() for each in caplog.records if each.name == "flowfabric.access"]
    assert f" GET {path} 40" in line
    assert "secret" not in line


@pytest.mark.parametrize("sent", SENT)
async def test_a_route_that_there_is_not_is_told_as_it_was_sent(
    live: httpx.AsyncClient, sent: str
) -> None:
    path = f"/v1/executions/{sent}/odd"

    answer = await answer_to(live, f"GET {path} HTTP/1.1\r\n{HEAD}\r\n".encode())

    assert f'"there is no route GET {path}"'.encode() in answer
