"""The server answers as the reference's does, request by request."""

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Final

import httpx
import msgspec
import pytest
from msgspec import Struct

from flowfabric import Engine
from flowfabric.core import conditions, ids, streams
from flowfabric.server.api import ServerConfig
from tests.conformance.given import NOBODY, UNKNOWN_ID, Given
from tests.server import golden
from tests.server.test_access import token
from tests.server.test_streams import texts

Declared = Mapping[str, Mapping[str, object]]
Described = Mapping[str, Mapping[str, Mapping[str, Declared]]]
STATES: Final = {
    *("lifecycle_phase", "ownership_state", "eligibility_state", "blocking_reason"),
    *("terminal_outcome", "attempt_state", "public_state"),
}
FLOW_ID: Final = "11111111-1111-4111-8111-111111111111"
LARGE: Final = b" " * 1_048_577
NAME: Final = re.compile(r"\$\{?([a-z]+\d*)\}?")


class Case(Struct, frozen=True):
    """A request, and what was answered."""

    name: str
    request: str
    answer: str


def read_bodies(text: str) -> dict[str, dict[str, object]]:
    """Bodies by the words that stand for them."""
    words = re.findall(r"^([A-Z]+) (.*(?:\n .*)*)", text, re.MULTILINE)
    return {word: msgspec.json.decode(body) for word, body in words}


def read_stories(text: str) -> dict[str, list[Case]]:
    """The stories by the route they are about."""
    return {
        title: list(_cases(lines.splitlines()))
        for title, _, lines in (each.partition("\n") for each in text.split("### ")[1:])
    }


def _cases(lines: list[str]) -> Iterator[Case]:
    for case in re.split(r"\n(?=\S)", "\n".join(lines).strip()):
        name, *rest = re.sub(r"\n {5,}", " ", case).split("\n")
        request, answer = rest
        yield Case(name, request.strip(), answer.strip())


class Cast:
    """What the names of a story stand for."""

    def __init__(self, engine: Engine, given: Given) -> None:
        self._engine, self._given = engine, given
        self._known: dict[str, str] = {"ghost": UNKNOWN_ID, "nobody": NOBODY}

    async def fill(self, text: str) -> str:
        """The text with ids in place of names, and bodies in place of words."""
        for name, body in BODIES.items():
            text = text.replace(f'"{name}"', msgspec.json.encode(body).decode())
        if found := re.search(r"\b([A-Z]{3,}) (\{.*)", text):
            whole = BODIES.get(found[1], {}) | msgspec.json.decode(found[2])
            text = text[: found.start()] + msgspec.json.encode(whole).decode()
        for each in NAME.finditer(text):
            await self._meet(each[1])
        return NAME.sub(lambda each: self._known[each[1]], text)

    async def _meet(self, name: str) -> str:
        if name not in self._known:
            self._known[name] = await self._make(name)
        return self._known[name]

    async def _make(self, name: str) -> str:
        match name.rstrip("0123456789"):
            case "id":
                return f"00000000-0000-4000-8000-{int(name[2:]):012}"
            case "new":
                return f"{{fp:7}}:00000000-0000-4000-8000-{int(name[3:]):012}"
            case "here":
                return str(ids.partition_of(ids.parse_execution_id(await self._meet("waiting"))))
            case "elsewhere":
                return str((int(await self._meet("here")) + 1) % 256)
            case "flow":
                await self._engine.create_flow(FLOW_ID, flow_kind="k", namespace="default")
                return FLOW_ID
            case "missing":
                return self._engine.new_member_id(FLOW_ID)
            case "part":
                new_id = self._engine.new_member_id(FLOW_ID)
                return await self._given.waiting(execution_id=new_id)
            case "outside":
                inside = ids.partition_of(self._engine.new_member_id(FLOW_ID))
                return await self._given.waiting(partition_id=(inside + 1) % 256)
            case "member":
                await self._meet("flow")
                part = await self._meet(f"part{name[6:]}")
                await self._engine.add_execution_to_flow(FLOW_ID, part)
                return part
            case "suspended" | "waitpoint" | "token":
                await self._suspend()
            case "speaking" | "frame":
                await self._speak()
            case "answered":
                return (await self._given.completed(b'{"answer": 42}')).execution_id
            case state:
                return await self._given.state(state)
        return self._known[name]

    async def _suspend(self) -> None:
        claimed = await self._given.running()
        approved = conditions.Single("gate", conditions.ByName("approved"))
        await self._engine.suspend(
            claimed.handle,
            resume_condition=approved,
            timeout_at_ms=self._given.clock.now_ms() + 60_000,
        )
        (shown,) = (await self._engine.list_pending_waitpoints(claimed.execution_id)).waitpoints
        token = await self._engine.read_waitpoint_token(claimed.execution_id, shown.waitpoint_id)
        assert token is not None
        self._known |= {
            "suspended": claimed.execution_id,
            "waitpoint": shown.waitpoint_id,
            "token": token.reveal(),
        }

    async def _speak(self) -> None:
        claimed = await self._given.running()
        for payload, about in ((b"hello", None), (b"world", "c-1"), (b"world", "c-1")):
            said = await self._engine.append_frame(
                claimed.handle,
                streams.NewFrame(frame_type="token", payload=payload, correlation_id=about),
            )
            self._known.setdefault("frame", str(said.stream_id))
        self._known["speaking"] = claimed.execution_id


async def ask(http: httpx.AsyncClient, request: str) -> httpx.Response:
    method, url, *body = request.split(" ", 2)
    if not body:
        return await http.request(method, url)
    content = LARGE if body == ["<large>"] else body[0].encode()
    headers = {"Content-Type": "application/json"}
    return await http.request(method, url, content=content, headers=headers)


def differences(answer: httpx.Response, expected: str) -> Iterator[str]:
    status, _, text = expected.partition(" ")
    if answer.status_code != int(status):
        yield f"{answer.status_code} is not {status}: {answer.text}"
    elif answer.is_success:
        if text:
            yield from unlike(answer.json(), msgspec.json.decode(text))
        elif answer.content:
            yield f"{answer.text} is not empty"
    else:
        problem = answer.json()
        wanted = {"kind": None, "retryable": None} | msgspec.json.decode(text or "{}")
        yield from unlike({name: problem.get(name) for name in wanted}, wanted)
        if not (problem["error"] and problem["code"]):
            yield f"{problem} tells nothing"


def undeclared(answer: httpx.Response, described: Mapping[str, Described]) -> Iterator[str]:
    """What the server's description of itself does not say of an answer."""
    path, method = answer.request.url.path, answer.request.method.lower()
    for template, requests in described.items():
        if re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template)), path):
            declared = requests[method]["responses"].get(str(answer.status_code))
            kind = answer.headers.get("content-type", "").partition(";")[0]
            if declared is None or kind not in declared.get("content", {"": None}):
                yield f"{answer.status_code} {kind} is not declared: {declared}"
            return


def unlike(found: object, expected: object, where: str = "$") -> Iterator[str]:
    """Where a value is not as it should be."""
    match found, expected:
        case dict(), dict() if found.keys() == expected.keys():
            for key in expected:
                yield from unlike(found[key], expected[key], f"{where}.{key}")
        case list(), list() if sorted(map(str, found)) == sorted(map(str, expected)):
            pass
        case list(), list() if len(found) == len(expected):
            for number, pair in enumerate(zip(found, expected, strict=True)):
                yield from unlike(*pair, f"{where}[{number}]")
        case (int(), "<int>") | (str(), "<text>") | (_, "<any>"):
            pass
        case str(), "<digits>" if found.isdecimal():
            pass
        case str(), "<partition>" if re.fullmatch(r"\{fp:\d+\}", found):
            pass
        case dict(), "<states>" if found.keys() == STATES:
            pass
        case _ if found != expected:
            yield f"{where}: {found!r} is not {expected!r}"


STORIES: Final = read_stories(golden.STORIES)
BODIES: Final = read_bodies(golden.BODIES)


@pytest.mark.parametrize("route", STORIES)
async def test_requests_are_answered_as_the_reference_does(
    http: httpx.AsyncClient, engine: Engine, given: Given, route: str
) -> None:
    cast = Cast(engine, given)
    described = (await http.get("/docs/openapi.json")).json()["paths"]
    wrong: list[str] = []

    for case in STORIES[route]:
        request, expected = await cast.fill(case.request), await cast.fill(case.answer)
        answer = await ask(http, request)
        wrong += [f"{case.name}: {each}" for each in differences(answer, expected)]
        wrong += [f"{case.name}: {each}" for each in undeclared(answer, described)]

    assert wrong == []


@pytest.mark.parametrize("server_config", [ServerConfig(cors_origins=("https://a.example",))])
async def test_callers_are_let_in_as_the_reference_does(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    right = await token(engine, "read")
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    answers = [
        await http.get("/healthz"),
        await http.get("/v1/executions?partition=1"),
        await http.get("/v1/executions?partition=1", headers={"Authorization": "Bearer wrong"}),
        await http.get("/v1/executions?partition=1", headers={"Authorization": "Basic eDp5"}),
        await http.get("/v1/executions?partition=1", headers=right),
        await http.get("/nope"),
        await http.request("DELETE", "/v1/executions"),
        await http.options("/v1/executions", headers=preflight),
    ]

    assert [each.status_code for each in answers] == [200, 401, 401, 401, 200, 404, 405, 204]
    assert answers[4].json() == {"executions": [], "next_cursor": None}
    for refused in answers[1:4]:
        assert not refused.json().keys() & {"kind", "retryable"}


@pytest.mark.parametrize("server_config", [ServerConfig(anybody="always", waiting_max=2)])
async def test_tails_beyond_the_limit_are_refused_and_the_others_get_what_comes(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    path = f"/v1/executions/{claimed.execution_id}/attempts/0/stream/tail?block_ms=30000"
    tails = [asyncio.create_task(http.get(path)) for _ in range(2)]
    while engine.waiting_tails < 2:
        await asyncio.wait(tails, timeout=0.001)

    refused = await http.get(path)
    late = streams.NewFrame(frame_type="token", payload=b"late")
    await engine.append_frame(claimed.handle, late)
    told = [(await each).json() for each in tails]

    assert list(differences(refused, '429 {"kind": "resource_exhausted", "retryable": true}')) == []
    assert [texts(each) for each in told] == [["late"], ["late"]]
