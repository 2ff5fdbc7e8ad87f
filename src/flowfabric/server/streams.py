"""Streams and events over HTTP: page by page, by long poll, and as server-sent events.

A stream of server-sent events can be resumed where it broke off: the id of each event is a cursor,
which browsers send back as `Last-Event-ID`. A slow reader holds one page in memory and delays
no other reader.
"""

from collections.abc import AsyncIterator
from typing import Annotated, Final

import msgspec
from litestar.params import FromPath, FromQuery, HeaderParameter, QueryParameter
from litestar.response import ServerSentEvent, ServerSentEventMessage
from msgspec import Struct

from flowfabric.core import tails
from flowfabric.core.api_tokens import Scope
from flowfabric.core.records import view_of
from flowfabric.core.streams import BLOCK_MS_MAX, Encoding, Visibility
from flowfabric.engine.engine import Engine
from flowfabric.engine.events import Told
from flowfabric.errors import FlowFabricError
from flowfabric.run import Endings
from flowfabric.server import lists
from flowfabric.server.access import InSession, Session, existing
from flowfabric.server.problems import problem_of, refuse
from flowfabric.server.routing import JsonAnswer, Routes
from flowfabric.streams import NOW, Follower, Frame, position_of

routes = Routes("/v1/executions", "streams")
log = Routes("/v1", "events")
EVENT_STREAM: Final = "text/event-stream"
READ_LIMIT: Final = 100
TAIL_LIMIT: Final = 50
LIMIT_MAX: Final = 1_000
RECONNECT_MS: Final = 1_000
PING_S: Final = 15.0
"""How often an idle stream shows that it is alive."""
PING: Final = ServerSentEventMessage(data=None, comment="ping")
RECONNECT: Final = ServerSentEventMessage(event="reconnect", data="{}", retry=RECONNECT_MS)
"""The last event of a server that stops. Browsers reconnect on their own, to another one."""


class WireFrame(Struct, kw_only=True):
    id: str
    fields: dict[str, str]


class WireFrames(Struct, kw_only=True, omit_defaults=True):
    frames: list[WireFrame]
    count: int
    closed_at: int | None = None
    closed_reason: str | None = None


class WireSummary(Struct, frozen=True, kw_only=True):
    summary: msgspec.Raw
    version: int
    """The number of patches applied."""
    first_applied_ms: int
    last_updated_ms: int


LastEventId = Annotated[str | None, HeaderParameter(name="Last-Event-ID")]


def check_limit(limit: int, how: str) -> None:
    if limit < 1:
        raise refuse(400, "invalid_input", "limit must be >= 1", field="limit")
    if limit > LIMIT_MAX:
        message = f"limit exceeds REST ceiling {LIMIT_MAX}; paginate via {how} for larger spans"
        raise refuse(400, "invalid_input", message, field="limit")


@routes.get(
    "/{id:str}/attempts/{attempt:str}/stream", Scope.READ, "Read what an attempt has emitted"
)
async def read(
    id: FromPath[str],
    attempt: FromPath[int],
    session: InSession,
    from_cursor: Annotated[str, QueryParameter(name="from")] = "start",
    to_cursor: Annotated[str, QueryParameter(name="to")] = "end",
    limit: FromQuery[int] = READ_LIMIT,
    visibility: FromQuery[str] = Visibility.ALL,
) -> JsonAnswer[WireFrames]:
    check_limit(limit, "from/to")
    page = await session.engine.read_stream(
        await session.find(id),
        attempt,
        from_cursor=from_cursor,
        to_cursor=to_cursor,
        count_limit=limit,
        visibility=visibility,
    )
    return JsonAnswer(_shown(page))


@routes.get(
    "/{id:str}/attempts/{attempt:str}/summary", Scope.READ, "Read the summary of an attempt"
)
async def read_summary(
    id: FromPath[str], attempt: FromPath[int], session: InSession
) -> JsonAnswer[WireSummary]:
    summary = await session.engine.read_summary(await session.find(id), attempt)
    found = existing(summary, "summary", f"{id}, attempt {attempt}")
    return JsonAnswer(view_of(WireSummary, found, summary=msgspec.Raw(found.document)))


@routes.get(
    "/{id:str}/attempts/{attempt:str}/stream/tail", Scope.READ, "Wait for what an attempt emits"
)
async def tail(
    id: FromPath[str],
    attempt: FromPath[int],
    session: InSession,
    after: FromQuery[str] = "0-0",
    block_ms: FromQuery[int] = 0,
    limit: FromQuery[int] = TAIL_LIMIT,
    visibility: FromQuery[str] = Visibility.ALL,
) -> JsonAnswer[WireFrames]:
    check_limit(limit, "after")
    if not 0 <= block_ms <= BLOCK_MS_MAX:
        message = f"block_ms exceeds {BLOCK_MS_MAX}ms ceiling"
        raise refuse(400, "invalid_input", message, field="block_ms")
    execution_id = await session.find(id)
    page = await session.wait(
        session.engine.tail_stream(
            execution_id,
            attempt,
            after=after,
            block_ms=block_ms,
            count_limit=limit,
            visibility=visibility,
        )
    )
    return JsonAnswer(_shown(page))


@routes.get(
    "/{id:str}/stream",
    Scope.READ,
    "Follow what an execution emits, as server-sent events",
    media_type=EVENT_STREAM,
)
async def follow(
    id: FromPath[str],
    session: InSession,
    after: FromQuery[str] = "start",
    last_event_id: LastEventId = None,
) -> ServerSentEvent:
    """Ends with an event `end` when the execution has ended. `superseded` takes back."""
    execution_id = await session.find_existing(id)

    async def here() -> tuple[Engine, Endings]:
        return session.engine, session.endings

    follower = Follower(
        here, execution_id, after=last_event_id or after, superseded=False, live=True
    )
    return events_of(session, _frames(follower))


@log.get(
    "/events", Scope.READ, "Follow what happens, as server-sent events", media_type=EVENT_STREAM
)
async def events(
    session: InSession,
    after: FromQuery[str] = "",
    last_event_id: LastEventId = None,
    namespace: lists.InNamespace = None,
    category: FromQuery[str | None] = None,
    execution_id: FromQuery[str | None] = None,
    kind: FromQuery[str | None] = None,
    tag: FromQuery[str | None] = None,
) -> ServerSentEvent:
    """From `now` on, from the `start`, or after a cursor. It never ends.

    A cursor that the log does not know is 409, with the cursor to continue from as `resume_after`.
    """
    subscription = await session.engine.subscribe_events(
        after=position_of(last_event_id or after or NOW),
        namespace=session.caller.namespace_for(namespace),
        category=category,
        execution_id=None if execution_id is None else await session.find(execution_id),
        kind=kind,
        tag=None if tag is None else lists.read_tag(tag),
    )

    await subscription.check()

    async def messages() -> AsyncIterator[ServerSentEventMessage]:
        async for each in subscription:
            yield _event(each)

    return events_of(session, messages())


def events_of(session: Session, messages: AsyncIterator[ServerSentEventMessage]) -> ServerSentEvent:
    """Messages as server-sent events, until the server stops or the caller's token is revoked."""
    stream = session.waiting.each(
        _with_problems(messages),
        session.check,
        session.caller.token_id,
        idle_s=PING_S,
        ping=PING,
        last=RECONNECT,
    )
    return ServerSentEvent(stream)


async def _with_problems(
    messages: AsyncIterator[ServerSentEventMessage],
) -> AsyncIterator[ServerSentEventMessage]:
    """The messages; an error after the answer has begun becomes the last one."""
    try:
        async for each in messages:
            yield each
    except FlowFabricError as error:
        _, problem = problem_of(error)
        yield ServerSentEventMessage(event="problem", data=msgspec.json.encode(problem).decode())


def _event(entry: Told) -> ServerSentEventMessage:
    return ServerSentEventMessage(
        id=entry.cursor,
        event=entry.event.event_type,
        data=msgspec.json.encode(entry.event).decode(),
    )


async def _frames(follower: Follower) -> AsyncIterator[ServerSentEventMessage]:
    while (page := await follower.next_page()) is not None:
        for frame in page:
            yield _frame(frame)
    yield ServerSentEventMessage(event="end", data="{}")


def _frame(frame: Frame) -> ServerSentEventMessage:
    data: dict[str, object] = {
        "text": frame.text,
        "kind": frame.kind,
        "attempt": frame.attempt,
        "step": frame.step,
        "at_ms": frame.at_ms,
    }
    name = "message"
    if frame.is_summary:
        data["summary"] = frame.json()
    elif frame.encoding is Encoding.BASE64:
        data["base64"] = frame.data
    if frame.take_over is not None:
        name = frame.kind
        data["kept_steps"] = dict(frame.take_over.kept_steps)
    return ServerSentEventMessage(
        id=frame.cursor, event=name, data=msgspec.json.encode(data).decode()
    )


def _shown(page: tails.StreamFrames) -> WireFrames:
    return WireFrames(
        frames=[WireFrame(id=each.id, fields=_fields(each)) for each in page.frames],
        count=len(page.frames),
        closed_at=page.closed_at_ms,
        closed_reason=page.closed_reason,
    )


def _fields(frame: tails.StreamFrame) -> dict[str, str]:
    return {name: text for name, text in frame.fields.items() if name != "step_key"}
