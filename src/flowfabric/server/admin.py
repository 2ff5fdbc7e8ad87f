"""Administration over HTTP: tokens, and the keys that sign waitpoint tokens."""

from litestar.params import FromPath, JSONBody
from msgspec import Struct

from flowfabric.core.api_tokens import ApiToken, Scope
from flowfabric.core.records import view_of
from flowfabric.server import lists, wire
from flowfabric.server.access import InSession
from flowfabric.server.problems import refuse
from flowfabric.server.routing import NO_STORE, JsonAnswer, Routes

routes = Routes("/v1", "administration")


class RotateSecret(Struct, kw_only=True):
    new_kid: str
    new_secret_hex: str


class SecretRotated(Struct, kw_only=True):
    rotated: int
    failed: list[int]
    new_kid: str


class CreateToken(wire.StrictBody, kw_only=True):
    name: str
    scopes: list[str]
    namespace: str | None = None
    expires_in_ms: int | None = None


class TokenView(Struct, kw_only=True, omit_defaults=True):
    """A token without its secret."""

    token_id: str
    name: str
    scopes: list[str]
    namespace: str | None
    created_at_ms: int
    expires_at_ms: int | None
    revoked_at_ms: int | None
    token: str | None = None
    """The token itself: shown once, to the caller that asked for it."""


class TokenList(lists.Page, kw_only=True):
    tokens: list[TokenView]


@routes.post(
    "/admin/rotate-waitpoint-secret", Scope.ADMIN, "Rotate the secret that signs waitpoint tokens"
)
async def rotate(data: JSONBody[RotateSecret], session: InSession) -> JsonAnswer[SecretRotated]:
    entries = await session.engine.rotate_waitpoint_hmac_secret_all(
        data.new_kid, data.new_secret_hex
    )
    failed = [each for each in entries if each.error is not None]
    if failed and len(failed) == len(entries):
        raise refuse(400, "rotation_conflict", f"new_kid: {failed[0].error}", field="new_kid")
    return JsonAnswer(
        SecretRotated(
            rotated=len(entries) - len(failed),
            failed=[each.partition for each in failed],
            new_kid=data.new_kid,
        )
    )


@routes.post("/tokens", Scope.ADMIN, "Hand out a token", status_code=201)
async def create_token(data: JSONBody[CreateToken], session: InSession) -> JsonAnswer[TokenView]:
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
) -> TokenList:
    page = await session.engine.list_tokens(cursor=cursor, limit=limit)
    return TokenList(tokens=[_shown(each) for each in page.tokens], next_cursor=page.next_cursor)


@routes.delete("/tokens/{token_id:str}", Scope.ADMIN, "Revoke a token")
async def revoke_token(token_id: FromPath[str], session: InSession) -> TokenView:
    return _shown(await session.engine.revoke_token(token_id))


def _shown(stored: ApiToken, token: str | None = None) -> TokenView:
    return view_of(TokenView, stored, scopes=stored.scopes.split(), token=token)
