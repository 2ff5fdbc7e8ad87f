"""Administration over HTTP: tokens, and the keys that sign waitpoint tokens."""

from typing import Annotated

from litestar import Router
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.tokens import ApiToken, Scope
from flowfabric.server import wire
from flowfabric.server.access import InSession
from flowfabric.server.executions import NO_STORE
from flowfabric.server.problems import refuse
from flowfabric.server.routing import JsonAnswer, delete, get, post


@post("/admin/rotate-waitpoint-secret", status_code=200, summary="Sign with a new secret")
async def rotate(
    data: JSONBody[wire.RotateSecret],
    asked: InSession,
) -> JsonAnswer[wire.SecretRotated]:
    asked.allow(Scope.ADMIN)
    entries = await asked.engine.rotate_waitpoint_hmac_secret_all(data.new_kid, data.new_secret_hex)
    failed = [each for each in entries if each.error is not None]
    if failed and len(failed) == len(entries):
        raise refuse(400, "rotation_conflict", f"new_kid: {failed[0].error}", field="new_kid")
    return JsonAnswer(
        wire.SecretRotated(
            rotated=len(entries) - len(failed),
            failed=[each.partition for each in failed],
            new_kid=data.new_kid,
        )
    )


@post("/tokens", summary="Hand out a token")
async def create_token(
    data: JSONBody[wire.CreateToken],
    asked: InSession,
) -> JsonAnswer[wire.TokenView]:
    """The token is in the answer, and nowhere else: it cannot be read again."""
    asked.allow(Scope.ADMIN)
    created = await asked.engine.create_token(
        data.name,
        scopes=data.scopes,
        namespace=asked.caller.namespace_for(data.namespace),
        expires_in_ms=data.expires_in_ms,
    )
    shown = _shown(created.stored)
    shown.token = created.token
    return JsonAnswer(shown, status_code=201, headers=NO_STORE)


@get("/tokens", summary="List tokens")
async def list_tokens(
    asked: InSession,
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = 100,
) -> wire.TokenList:
    asked.allow(Scope.ADMIN)
    page = await asked.engine.list_tokens(cursor=cursor, limit=limit)
    return wire.TokenList(
        tokens=[_shown(each) for each in page.tokens], next_cursor=page.next_cursor
    )


@delete("/tokens/{token_id:str}", status_code=200, summary="Revoke a token")
async def revoke_token(
    token_id: FromPath[str],
    asked: InSession,
) -> wire.TokenView:
    asked.allow(Scope.ADMIN)
    return _shown(await asked.engine.revoke_token(token_id))


def _shown(token: ApiToken) -> wire.TokenView:
    return wire.TokenView(
        token_id=token.token_id,
        name=token.name,
        scopes=token.scopes.split(),
        namespace=token.namespace,
        created_at_ms=token.created_at_ms,
        expires_at_ms=token.expires_at_ms,
        revoked_at_ms=token.revoked_at_ms,
    )


routes = Router(
    path="/v1",
    tags=["administration"],
    route_handlers=[rotate, create_token, list_tokens, revoke_token],
)
