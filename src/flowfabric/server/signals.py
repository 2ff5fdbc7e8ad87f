"""Signals over HTTP, and the waitpoints they reach.

The holder of a waitpoint's token may signal it, so these requests need no other token. Any other
caller gets the same refusal, whether or not the execution exists.
"""

from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import UNSET, Struct

from flowfabric.core.api_tokens import Scope
from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import view_of
from flowfabric.engine.waitpoints import Inbox, WaitpointView
from flowfabric.errors import InvalidToken, NotFound
from flowfabric.server import lists, wire
from flowfabric.server.access import InSession, Session, existing
from flowfabric.server.problems import refuse
from flowfabric.server.routing import MEDIUM_BODY, NO_STORE, JsonAnswer, Routes, answer
from flowfabric.signals import TOKEN_PREFIX, SignalToken

routes = Routes("/v1", "signals")


class DeliverSignal(Struct, kw_only=True):
    """A signal, and the token that allows it."""

    waitpoint_token: str
    """That of the waitpoint, or the text of a link, which names execution and waitpoint."""
    signal_name: str
    waitpoint_id: str | None = None
    execution_id: str | None = None
    signal_id: str | None = None
    signal_category: str = ""
    source_type: str = ""
    source_identity: str = ""
    target_scope: str = ""
    payload: wire.Octets | None = None
    payload_base64: str | None = None
    payload_json: object = UNSET
    payload_encoding: str | None = None
    correlation_id: str | None = None
    idempotency_key: str | None = None
    created_at: int | None = None
    dedup_ttl_ms: int | None = None


class DeliverByLink(DeliverSignal, kw_only=True, forbid_unknown_fields=True):
    """A signal, and the text of the link that allows it."""


class SignalBody(wire.StrictBody, kw_only=True):
    """A signal for whatever an execution waits at under a name."""

    signal_name: str
    payload_base64: str | None = None
    payload_json: object = UNSET
    keep: bool = True
    """Whether it is kept for the next wait of that name if nothing waits now."""
    idempotency_key: str | None = None


class OpenWaitpoint(Struct, kw_only=True, omit_defaults=True):
    """An open waitpoint without its token."""

    waitpoint_id: str
    waitpoint_key: str
    state: str
    required_signal_names: tuple[str, ...]
    created_at: int
    execution_id: str
    token_kid: str
    token_fingerprint: str
    activated_at: int | None = None
    expires_at: int | None = None


class Secret(Struct):
    token: str


@routes.post(
    "/executions/{id:str}/signal",
    None,
    "Deliver a signal",
    opt={**MEDIUM_BODY, "open": True},
    security=[{}],
)
async def deliver(
    id: FromPath[str], data: JSONBody[DeliverSignal], session: InSession
) -> JsonAnswer[wire.Tagged]:
    wire.check_same("execution_id", id, data.execution_id)
    return await _deliver(session, id, data)


@routes.post(
    "/signals",
    None,
    "Deliver a signal with the text of a link",
    opt={**MEDIUM_BODY, "open": True},
    security=[{}],
)
async def deliver_by_link(
    data: JSONBody[DeliverByLink], session: InSession
) -> JsonAnswer[wire.Tagged]:
    """`waitpoint_token` is all that has to be known: it names the execution and the waitpoint."""
    return await _deliver(session, SignalToken.parse(data.waitpoint_token).execution_id, data)


@routes.post(
    "/executions/{id:str}/signals",
    Scope.SIGNAL,
    "Deliver a signal by its name, without the token of a waitpoint",
    opt=MEDIUM_BODY,
)
async def deliver_by_name(
    id: FromPath[str], data: JSONBody[SignalBody], session: InSession
) -> JsonAnswer[wire.Tagged]:
    payload, encoding = wire.read_bytes("payload", None, data.payload_base64, data.payload_json)
    delivered = await session.engine.deliver_operator_signal(
        await session.find(id),
        data.signal_name,
        signal_name=data.signal_name,
        keep=data.keep,
        payload=payload,
        payload_encoding=encoding or "json",
        source_identity=session.caller.name,
        idempotency_key=data.idempotency_key,
    )
    return answer(delivered)


async def _deliver(session: Session, text: str, data: DeliverSignal) -> JsonAnswer[wire.Tagged]:
    payload, encoding = wire.read_bytes(
        "payload", data.payload, data.payload_base64, data.payload_json
    )
    try:
        execution_id = await session.find(text)
        waitpoint_id, token = _permission(execution_id, data)
        delivered = await session.engine.deliver_signal(
            execution_id,
            waitpoint_id,
            waitpoint_token=token,
            signal_name=data.signal_name,
            signal_id=data.signal_id,
            signal_category=data.signal_category,
            source_type=data.source_type,
            source_identity=data.source_identity,
            target_scope=data.target_scope or "waitpoint",
            payload=payload,
            payload_encoding=data.payload_encoding or encoding or "json",
            correlation_id=data.correlation_id or "",
            idempotency_key=data.idempotency_key,
            created_at_ms=data.created_at,
            dedup_ttl_ms=data.dedup_ttl_ms,
        )
    except NotFound:
        # Guessing must not reveal which executions exist.
        raise InvalidToken from None
    return answer(delivered)


def _permission(execution_id: ExecutionId, data: DeliverSignal) -> tuple[str, str]:
    """The waitpoint and its token, from either form of token."""
    if data.waitpoint_token.startswith(TOKEN_PREFIX):
        link = SignalToken.parse(data.waitpoint_token)
        if link.execution_id == execution_id and data.waitpoint_id in (None, link.waitpoint_id):
            return link.waitpoint_id, link.secret.reveal()
        raise InvalidToken
    if data.waitpoint_id is None:
        message = "invalid JSON: waitpoint_id: must be given with such a token"
        raise refuse(422, "invalid_json", message, field="waitpoint_id")
    return data.waitpoint_id, data.waitpoint_token


@routes.get("/executions/{id:str}/pending-waitpoints", Scope.READ, "What an execution waits for")
async def pending(
    id: FromPath[str],
    session: InSession,
    after: FromQuery[str | None] = None,
    limit: lists.PageLimit = lists.PAGE,
) -> list[OpenWaitpoint]:
    """Page by page: pass the last `waitpoint_id` as `after`."""
    execution_id = await session.find_existing(id)
    page = await session.engine.list_pending_waitpoints(execution_id, after=after, limit=limit)
    return [_shown(each) for each in page.waitpoints]


@routes.get(
    "/executions/{id:str}/waitpoints/{waitpoint_id:str}/token",
    Scope.SIGNAL,
    "The token of a waitpoint",
)
async def token(
    id: FromPath[str], waitpoint_id: FromPath[str], session: InSession
) -> JsonAnswer[Secret]:
    found = await session.engine.read_waitpoint_token(await session.find(id), waitpoint_id)
    token = existing(found, "waitpoint token", f"{waitpoint_id} is unknown, used or expired")
    return JsonAnswer(Secret(token=token.reveal()), headers=NO_STORE)


@routes.get("/inbox", Scope.READ, "Everything that waits for a signal")
async def inbox(
    session: InSession,
    namespace: lists.InNamespace = None,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> Inbox:
    wanted = session.caller.namespace_for(namespace)
    return await session.engine.list_inbox(namespace=wanted, cursor=cursor, limit=limit)


def _shown(view: WaitpointView) -> OpenWaitpoint:
    return view_of(
        OpenWaitpoint,
        view,
        created_at=view.created_at_ms,
        activated_at=view.activated_at_ms,
        expires_at=view.expires_at_ms,
    )
