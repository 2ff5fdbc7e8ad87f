"""API tokens: what their bearers may ask a server for.

A token reads `ff_<id>_<secret>`. The database holds a digest of the secret, which has too much
entropy to be guessed from it, so a plain hash is enough. A token has scopes, may be confined to
one namespace, and may expire; revoking one leaves its row, so that lists show who had access.
"""

import hashlib
import hmac
import re
from collections.abc import Collection
from enum import StrEnum
from typing import ClassVar, Final

from msgspec import Struct, structs

from flowfabric.core import checks
from flowfabric.core.ids import Namespace, parse_namespace
from flowfabric.core.records import Record
from flowfabric.errors import InvalidInput

ID_BYTES: Final = 8
SECRET_BYTES: Final = 32
EXPIRES_IN_MS_MAX: Final = 10 * 366 * 24 * 60 * 60 * 1_000
_ID: Final = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")
_TOKEN: Final = re.compile(rf"ff_({_ID.pattern})_([0-9a-f]{{{2 * SECRET_BYTES}}})")


class Scope(StrEnum):
    """What a token allows; `ADMIN` allows everything."""

    READ = "read"
    SUBMIT = "submit"
    SIGNAL = "signal"
    WORK = "work"
    OPERATE = "operate"
    ADMIN = "admin"


class ApiToken(Record, frozen=True, kw_only=True):
    """What is stored of a token."""

    table: ClassVar[str] = "api_token"
    key: ClassVar[tuple[str, ...]] = ("token_id",)

    token_id: str
    name: str
    """What its owner calls it: the machine or the person it was given to."""
    digest: bytes
    scopes: str
    """Names of scopes, separated by blanks."""
    namespace: Namespace | None = None
    """Null for a token of every namespace."""
    created_at_ms: int
    expires_at_ms: int | None = None
    revoked_at_ms: int | None = None

    def allowed(self) -> frozenset[Scope]:
        scopes = frozenset(Scope(name) for name in self.scopes.split())
        return frozenset(Scope) if Scope.ADMIN in scopes else scopes

    def is_live(self, now_ms: int) -> bool:
        if self.revoked_at_ms is not None:
            return False
        return self.expires_at_ms is None or now_ms < self.expires_at_ms


class NewToken(Struct, frozen=True, kw_only=True):
    """A request for a token, checked."""

    name: str
    scopes: tuple[Scope, ...]
    namespace: Namespace | None
    expires_in_ms: int | None


def check_new_token(
    name: str, scopes: Collection[str], namespace: str | None, expires_in_ms: int | None
) -> NewToken:
    if expires_in_ms is not None:
        checks.check_int("expires_in_ms", expires_in_ms, 1, EXPIRES_IN_MS_MAX)
    return NewToken(
        name=checks.check_name("name", name),
        scopes=check_scopes(scopes),
        namespace=checks.optional(parse_namespace, namespace),
        expires_in_ms=expires_in_ms,
    )


def check_scopes(scopes: Collection[str]) -> tuple[Scope, ...]:
    """Scopes in their own order, each once."""
    checks.check_names("scopes", scopes)
    known = {str(scope) for scope in Scope}
    for name in scopes:
        if name not in known:
            raise InvalidInput("scopes", f"must be among {', '.join(Scope)}", name)
    if not scopes:
        raise InvalidInput("scopes", f"must name at least one of {', '.join(Scope)}")
    return tuple(scope for scope in Scope if scope in scopes)


def make_token(request: NewToken, randomness: bytes, now_ms: int) -> tuple[ApiToken, str]:
    """The row to store, and the token itself, which cannot be read from the row."""
    token_id = randomness[:ID_BYTES].hex()
    secret = randomness[ID_BYTES : ID_BYTES + SECRET_BYTES].hex()
    until_ms = None if request.expires_in_ms is None else now_ms + request.expires_in_ms
    stored = ApiToken(
        token_id=token_id,
        name=request.name,
        digest=digest_of(secret),
        scopes=" ".join(request.scopes),
        namespace=request.namespace,
        created_at_ms=now_ms,
        expires_at_ms=until_ms,
    )
    return stored, f"ff_{token_id}_{secret}"


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def split_token(presented: str) -> tuple[str, str] | None:
    """The id and the secret of what looks like a token."""
    match = _TOKEN.fullmatch(presented)
    return None if match is None else (match[1], match[2])


def check_cursor(cursor: object) -> str:
    """Where a list of tokens continues: after the last id of the previous page."""
    text = checks.check_text("cursor", cursor)
    if _ID.fullmatch(text) is None:
        raise InvalidInput("cursor", "must be the next_cursor of an earlier page", text)
    return text


def proves(stored: ApiToken, secret: str) -> bool:
    """Whether the secret is that of the token, in the same time whatever it is."""
    return hmac.compare_digest(stored.digest, digest_of(secret))


def revoked(token: ApiToken, now_ms: int) -> ApiToken:
    """The token without its power; the first revocation counts."""
    if token.revoked_at_ms is not None:
        return token
    return structs.replace(token, revoked_at_ms=now_ms)
