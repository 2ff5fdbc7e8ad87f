"""Waitpoint tokens: who holds one may deliver to exactly one waitpoint.

A token is `<kid>:<hex>`, where hex is HMAC-SHA256 over `kid:execution:waitpoint`
with the secret that `kid` names. Nothing about a token is stored; it is computed
again from its key, so whoever reads the database without the key table learns
nothing. Verification looks at the token, the ids it is presented for, and the
keys; not at whether such a waitpoint exists. So nobody can find out which ids
exist by presenting tokens. Only an empty token, and one that a key of ours did
sign, are told apart from all the others.

A key id is used once. A key past its grace loses its secret and keeps its id, so
that no later key can be mistaken for it.
"""

import hmac
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

from flowfabric.core.ids import ExecutionId, WaitpointId, redact_token
from flowfabric.core.records import HmacKey
from flowfabric.errors import (
    InvalidGraceMs,
    InvalidInput,
    InvalidKid,
    InvalidSecretHex,
    InvalidToken,
    MissingToken,
    TokenExpired,
)

DIGEST_CHARS: Final = 64
FINGERPRINT_CHARS: Final = 16
KID_CHARS_MAX: Final = 64
TOKEN_CHARS_MAX: Final = KID_CHARS_MAX + 1 + DIGEST_CHARS
SECRET_BYTES: Final = 32
SECRET_BYTES_MIN: Final = 16
SECRET_BYTES_MAX: Final = 1_024
GRACE_MS_MAX: Final = 2**53 - 1
FIRST_KID: Final = "k1"

MISSING: Final = "missing_token: this needs a waitpoint token"
INVALID: Final = "invalid_token: the token does not fit this waitpoint"
EXPIRED: Final = "token_expired: the key that signed the token is no longer accepted"

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_HEX: Final = re.compile(r"(?:[0-9a-fA-F]{2})+")


class WaitpointToken:
    """A token on its way to whoever may use it. `reveal` is the only way to its text."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return redact_token(self._text)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WaitpointToken):
            return NotImplemented
        return hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a waitpoint token is not pickled; reveal it where it is needed")


def digest(kid: str, secret: bytes, execution_id: str, waitpoint_id: str) -> str:
    message = f"{kid}:{execution_id}:{waitpoint_id}".encode()
    return hmac.new(secret, message, sha256).hexdigest()


def sign(key: HmacKey, execution_id: ExecutionId, waitpoint_id: WaitpointId) -> WaitpointToken:
    return WaitpointToken(f"{key.kid}:{digest(key.kid, key.secret, execution_id, waitpoint_id)}")


def fingerprint(token: WaitpointToken) -> str:
    """What may be shown of a token: enough to tell two apart, useless to deliver with."""
    return token.reveal().rpartition(":")[2][:FINGERPRINT_CHARS]


def matching_key(
    token: WaitpointToken,
    execution_id: ExecutionId,
    waitpoint_id: WaitpointId,
    keys: Iterable[HmacKey],
) -> HmacKey:
    """The key that made `token` for this waitpoint; raise `InvalidToken` when none did.

    Every token but an empty one is compared with one digest, whatever is wrong with it.
    """
    if not token.reveal():
        raise MissingToken(MISSING)
    kid, _, _ = token.reveal().partition(":")
    key = next((each for each in keys if each.kid == kid), _NO_KEY)
    if _made(key, token, execution_id, waitpoint_id) and key is not _NO_KEY:
        return key
    raise InvalidToken(INVALID)


_NO_KEY: Final = HmacKey(kid="", secret=b"\0" * SECRET_BYTES, activated_at_ms=0)
"""What the tokens of unknown keys are compared with."""
_NO_DIGEST: Final = "-" * DIGEST_CHARS


def _made(
    key: HmacKey, token: WaitpointToken, execution_id: ExecutionId, waitpoint_id: WaitpointId
) -> bool:
    """Whether `key` made `token` for this waitpoint.

    Apart from whoever raises: an error keeps the variables of the frames it went
    through, and the right digest must not be among them.
    """
    _, _, given = token.reveal().partition(":")
    compared = given if _DIGEST.fullmatch(given) else _NO_DIGEST
    return hmac.compare_digest(digest(key.kid, key.secret, execution_id, waitpoint_id), compared)


def check_accepted(key: HmacKey, now_ms: int) -> None:
    """Raise `TokenExpired` when the key's time is over."""
    if not accepted(key, now_ms):
        raise TokenExpired(EXPIRED)


def accepted(key: HmacKey, now_ms: int) -> bool:
    """Whether tokens signed with the key are still taken."""
    return key.expires_at_ms is None or key.expires_at_ms >= now_ms


def current_key(keys: Iterable[HmacKey]) -> HmacKey | None:
    return next((key for key in keys if key.expires_at_ms is None), None)


def signing_key(keys: Iterable[HmacKey]) -> HmacKey:
    current = current_key(keys)
    assert current is not None, "a key is made before the first token"
    return current


def usable_key(keys: Sequence[HmacKey], kid: str, now_ms: int) -> HmacKey:
    """The named key, or the current one when that is no longer accepted."""
    named = next((key for key in keys if key.kid == kid and accepted(key, now_ms)), None)
    return named or signing_key(keys)


# Input: no refusal repeats what was presented. -----------------------------------


def check_token(token: object) -> WaitpointToken:
    """A token as a caller presents it. One that cannot be a token is refused as invalid."""
    if isinstance(token, WaitpointToken):
        return token
    if not isinstance(token, str):
        raise InvalidInput("waitpoint_token", "must be a string")
    if len(token) > TOKEN_CHARS_MAX or not token.isascii():
        raise InvalidToken(INVALID)
    return WaitpointToken(token)


def check_kid(kid: object) -> str:
    if not isinstance(kid, str) or not kid:
        raise InvalidKid("kid: must be a non-empty string")
    if ":" in kid or not kid.isascii() or not kid.isprintable() or len(kid) > KID_CHARS_MAX:
        raise InvalidKid(
            f"kid: must be at most {KID_CHARS_MAX} printable ASCII characters without a colon"
        )
    return kid


def check_secret(secret_hex: object, *, bytes_min: int, bytes_max: int) -> bytes:
    if not isinstance(secret_hex, str) or _HEX.fullmatch(secret_hex) is None:
        raise InvalidSecretHex()
    secret = bytes.fromhex(secret_hex)
    if not bytes_min <= len(secret) <= bytes_max:
        allowed = f"{bytes_min}" if bytes_min == bytes_max else f"{bytes_min} to {bytes_max}"
        raise InvalidSecretHex(f"secret: must be {allowed} bytes, is {len(secret)}")
    return secret


def check_grace(grace_ms: object) -> int:
    if not isinstance(grace_ms, int) or isinstance(grace_ms, bool):
        raise InvalidGraceMs()
    if not 0 <= grace_ms <= GRACE_MS_MAX:
        raise InvalidGraceMs(f"grace_ms: must be 0 to {GRACE_MS_MAX}, is {grace_ms}")
    return grace_ms
