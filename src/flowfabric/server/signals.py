"""Signals over HTTP, and the waitpoints they reach.

The holder of a waitpoint's token may signal it: that is what the token is for, so these
requests need no other. Anybody else is told the same, whether the execution exists or not.
"""

from typing import Annotated

from litestar import Router
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.ids import ExecutionId
from flowfabric.core.tokens import Scope
from flowfabric.engine.waitpoints import Inbox, WaitpointView
from flowfabric.errors import InvalidToken, NotFound
from flowfabric.server import wire
from flowfabric.server.access import InSession, Session
from flowfabric.server.executions import MEDIUM_BODY, NO_STORE, check_same
from flowfabric.server.problems import refuse
from flowfabric.server.routing import JsonAnswer, answer, get, post
from flowfabric.signals import TOKEN_PREFIX, SignalToken

PAGE = 100


@post(
    "/{id:str}/signal",
    opt={**MEDIUM_BODY, "open": True},
    status_code=200,
    security=[{}],
    summary="Deliver a signal",
)
async def deliver(
    id: FromPath[str],  # noqa: A002
    data: JSONBody[wire.DeliverSignal],
    asked: InSession,
) -> JsonAnswer[wire.Tagged]:
    check_same("execution_id", id, data.execution_id)
    return await _deliver(asked, id, data)


@post(
    "/v1/signals",
    opt={**MEDIUM_BODY, "open": True},
    status_code=200,
    security=[{}],
    tags=["signals"],
    summary="Deliver a signal with the text of a link",
)
async def deliver_by_link(
    data: JSONBody[wire.DeliverSignal],
    asked: InSession,
) -> JsonAnswer[wire.Tagged]:
    """`waitpoint_token` is all that has to be known: it names the execution and the waitpoint."""
    return await _deliver(asked, SignalToken.parse(data.waitpoint_token).execution_id, data)


@post(
    "/{id:str}/signals",
    opt=MEDIUM_BODY,
    status_code=200,
    summary="Deliver a signal by its name, without the token of a waitpoint",
)
async def deliver_by_name(
    id: FromPath[str],  # noqa: A002
    data: JSONBody[wire.SignalBody],
    asked: InSession,
) -> JsonAnswer[wire.Tagged]:
    asked.allow(Scope.SIGNAL)
    payload, encoding = wire.read_bytes("payload", None, data.payload_base64, data.payload_json)
    delivered = await asked.engine.deliver_operator_signal(
        await asked.find(id),
        data.signal_name,
        signal_name=data.signal_name,
        keep=data.keep,
        payload=payload,
        payload_encoding=encoding or "json",
        source_identity=asked.caller.name,
        idempotency_key=data.idempotency_key,
    )
    return answer(delivered)


async def _deliver(asked: Session, text: str, data: wire.DeliverSignal) -> JsonAnswer[wire.Tagged]:
    payload, encoding = wire.read_bytes(
        "payload", data.payload, data.payload_base64, data.payload_json
    )
    try:
        execution_id = await asked.find(text)
        waitpoint_id, token = _permission(execution_id, data)
        delivered = await asked.engine.deliver_signal(
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
        # Guessing does not tell which executions exist.
        raise InvalidToken from None
    return answer(delivered)


def _permission(execution_id: ExecutionId, data: wire.DeliverSignal) -> tuple[str, str]:
    """The waitpoint and its token, from whichever form the token has."""
    if data.waitpoint_token.startswith(TOKEN_PREFIX):
        link = SignalToken.parse(data.waitpoint_token)
        if link.execution_id == execution_id and data.waitpoint_id in (None, link.waitpoint_id):
            return link.waitpoint_id, link.secret.reveal()
        raise InvalidToken
    if data.waitpoint_id is None:
        told = "invalid JSON: waitpoint_id: must be given with such a token"
        raise refuse(422, "invalid_json", told, field="waitpoint_id")
    return data.waitpoint_id, data.waitpoint_token


@get("/{id:str}/pending-waitpoints", summary="What an execution waits for")
async def pending(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    after: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = PAGE,
) -> list[wire.OpenWaitpoint]:
    """Page by page: pass the last `waitpoint_id` as `after`."""
    asked.allow(Scope.READ)
    execution_id = await asked.find(id)
    if await asked.engine.read_execution_state(execution_id) is None:
        raise NotFound("execution", id)
    page = await asked.engine.list_pending_waitpoints(execution_id, after=after, limit=limit)
    return [_shown(each) for each in page.waitpoints]


@get("/{id:str}/waitpoints/{waitpoint_id:str}/token", summary="The token of a waitpoint")
async def token(
    id: FromPath[str],  # noqa: A002
    waitpoint_id: FromPath[str],
    asked: InSession,
) -> JsonAnswer[wire.Secret]:
    asked.allow(Scope.SIGNAL)
    found = await asked.engine.read_waitpoint_token(await asked.find(id), waitpoint_id)
    if found is None:
        raise NotFound("waitpoint token", f"{waitpoint_id} is unknown, used or expired")
    return JsonAnswer(wire.Secret(token=found.reveal()), headers=NO_STORE)


@get("/v1/inbox", tags=["signals"], summary="Everything that waits for a signal")
async def inbox(
    asked: InSession,
    namespace: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = PAGE,
) -> Inbox:
    asked.allow(Scope.READ)
    wanted = asked.caller.namespace_for(namespace)
    return await asked.engine.list_inbox(namespace=wanted, cursor=cursor, limit=limit)


def _shown(view: WaitpointView) -> wire.OpenWaitpoint:
    return wire.OpenWaitpoint(
        waitpoint_id=view.waitpoint_id,
        waitpoint_key=view.waitpoint_key,
        state=view.state,
        required_signal_names=view.required_signal_names,
        created_at=view.created_at_ms,
        activated_at=view.activated_at_ms,
        expires_at=view.expires_at_ms,
        execution_id=view.execution_id,
        token_kid=view.token_kid,
        token_fingerprint=view.token_fingerprint,
    )


routes = Router(
    path="/v1/executions",
    tags=["signals"],
    route_handlers=[deliver, deliver_by_name, pending, token],
)
