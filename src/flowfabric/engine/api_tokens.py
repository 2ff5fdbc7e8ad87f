"""API tokens: issued, listed, revoked, and checked when a caller presents one."""

import os
from collections.abc import Collection

from msgspec import Struct

from flowfabric.core import api_tokens as rules
from flowfabric.core.api_tokens import ApiToken
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.checks import check_int, check_text
from flowfabric.core.decisions import Changes
from flowfabric.engine import paging, shell
from flowfabric.errors import NotFound
from flowfabric.store.base import Reader, Transaction


class TokenCreated(Struct, frozen=True, kw_only=True):
    token: str
    """Shown once: the database does not know it."""
    stored: ApiToken


class TokenPage(Struct, frozen=True, kw_only=True):
    tokens: tuple[ApiToken, ...]
    next_cursor: str | None


class Tokens(shell.Group):
    async def create_token(
        self,
        name: str,
        *,
        scopes: Collection[str],
        namespace: str | None = None,
        expires_in_ms: int | None = None,
    ) -> TokenCreated:
        """Hand out a token; without a `namespace` it is good for every one."""
        request = rules.check_new_token(name, scopes, namespace, expires_in_ms)

        async def body(tx: Transaction) -> TokenCreated:
            randomness = os.urandom(rules.ID_BYTES + rules.SECRET_BYTES)
            stored, token = rules.make_token(request, randomness, await tx.now_ms())
            await tx.save(Changes(inserts=(stored,)))
            return TokenCreated(token=token, stored=stored)

        return await self.store.transact(body)

    async def list_tokens(self, *, cursor: str | None = None, limit: int = 100) -> TokenPage:
        """Every token ever handed out, by id, without its secret."""
        check_int("limit", limit, 1, PAGE_MAX)
        after = "" if cursor is None else rules.check_cursor(cursor)
        found = await self.select_records(ApiToken, "list_tokens", after=after, limit=limit + 1)
        page, last = paging.cut(found, limit, lambda token: token.token_id)
        return TokenPage(tokens=page, next_cursor=last)

    async def revoke_token(self, token_id: str) -> ApiToken:
        """Refuse it from now on. Safe to repeat."""
        key = (check_text("token_id", token_id),)

        async def body(tx: Transaction) -> ApiToken:
            stored = await tx.lock_one(ApiToken, key)
            if stored is None:
                raise NotFound("token", token_id)
            without = rules.revoked(stored, await tx.now_ms())
            await tx.save(Changes(updates=(without,)))
            return without

        return await self.store.transact(body)

    async def check_token(self, presented: str) -> ApiToken | None:
        """The token that was presented, if it is one and lets its bearer in now."""
        parts = rules.split_token(presented)
        if parts is None:
            return None
        token_id, secret = parts

        async def body(reader: Reader) -> ApiToken | None:
            stored = await reader.get_one(ApiToken, (token_id,))
            if stored is None or not rules.proves(stored, secret):
                return None
            return stored if stored.is_live(await reader.now_ms()) else None

        return await self.store.read(body)

    async def has_tokens(self) -> bool:
        """Whether there has ever been a token, even one that has ended."""
        return bool(await self.select_records(ApiToken, "list_tokens", after="", limit=1))
