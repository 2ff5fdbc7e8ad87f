"""Administration over HTTP: tokens, and the keys that sign waitpoint tokens."""

from litestar.params import FromPath, JSONBody

from flowfabric.core.tokens import ApiToken, Scope
from flowfabric.server import lists, wire
from flowfabric.server.access import InSession
from flowfabric.server.executions import NO_STORE
from flowfabric.server.problems import refuse
from flowfabric.server.routing import JsonAnswer, Routes

routes = Routes("/v1", "administration")


@routes.post("/admin/rotate-waitpoint-secret", Scope.ADMIN, "Sign with a new secret")
async def rotate(
    data: JSONBody[wire.RotateSecret], session: InSession
) -> JsonAnswer[wire.SecretRotated]:
    entries = await session.engine.rotate_waitpoint_hmac_secret_all(
        data.new_kid, data.new_secret_hex
    )
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


@routes.post("/tokens", Scope.ADMIN, "Hand out a token", status_code=201)
async def create_token(
    data: JSONBody[wire.CreateToken], session: InSession
) -> JsonAnswer[wire.TokenView]:
    """The token is in the answer, and nowhere else: it cannot be read again."""
    created = await session.engine.create_token(
        data.name,
        scopes=data.scopes,
        namespace=session.caller.namespace_for(data.namespace),
        expires_in_ms=data.expires_in_ms,
    )
    shown = _shown(created.stored, created.token)
    return JsonAnswer(shown, status_code=201, headers=NO_STORE)


@routes.get("/tokens", Scope.ADMIN, "List tokens")
async def list_tokens(
    session: InSession, cursor: lists.AfterCursor = None, limit: lists.PageLimit = lists.PAGE
) -> wire.TokenList:
    page = await session.engine.list_tokens(cursor=cursor, limit=limit)
    return wire.TokenList(
        tokens=[_shown(each) for each in page.tokens], next_cursor=page.next_cursor
    )


@routes.delete("/tokens/{token_id:str}", Scope.ADMIN, "Revoke a token")
async def revoke_token(token_id: FromPath[str], session: InSession) -> wire.TokenView:
    return _shown(await session.engine.revoke_token(token_id))


def _shown(stored: ApiToken, token: str | None = None) -> wire.TokenView:
    return wire.view_of(wire.TokenView, stored, scopes=stored.scopes.split(), token=token)
