"""Waitpoints: where signals reach a paused execution. Requests, tokens and creation."""

import hmac
import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Final, TypeAlias

from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import bounds, conditions, ids
from flowfabric.core.checks import check_bool, check_name
from flowfabric.core.decisions import NO_CHANGES, Changes, Decision, Subject, Timing, change
from flowfabric.core.leases import Fence, check_fence
from flowfabric.core.records import Execution, HmacKey, Suspension, Waitpoint, WaitpointState

# The waitpoints a suspension requests, checked before looking at the execution


class FreshWaitpoint(Struct, frozen=True, kw_only=True, tag=True):
    """A waitpoint made by the suspension itself. Omitted ids are generated."""

    waitpoint_key: str | None = None
    """`wpk:<waitpoint_id>` if omitted."""
    waitpoint_id: str | None = None
    own_name_only: bool = False
    """Refuse signals whose name is not the key."""


class UsePending(Struct, frozen=True, kw_only=True, tag=True):
    """A waitpoint made beforehand; its key and token stay."""

    waitpoint_id: str
    any_attempt: bool = False
    """Take over what an earlier attempt of the same execution made, too."""


Binding: TypeAlias = FreshWaitpoint | UsePending


class BoundWaitpoint(Struct, frozen=True, kw_only=True):
    """A fresh binding with its ids."""

    waitpoint_id: ids.WaitpointId
    waitpoint_key: ids.WaitpointKey
    own_name_only: bool = False


def check_bindings(
    waitpoints: object,
    condition: conditions.Condition,
    new_id: Callable[[], str],
    *,
    take_pending: bool,
) -> tuple[BoundWaitpoint | UsePending, ...]:
    """Fill in the ids, and refuse bindings that do not fit the condition.

    By default each key that the condition mentions gets one fresh waitpoint. The keys of waitpoints
    made beforehand are not known here; `check_keys` looks at all.
    """
    if waitpoints is None:
        keys = conditions.referenced_waitpoint_keys(condition)
        waitpoints = [FreshWaitpoint(waitpoint_key=key) for key in keys] or [FreshWaitpoint()]
    if not isinstance(waitpoints, list | tuple):
        raise errors.InvalidInput("waitpoints", "must be a list of bindings", waitpoints)
    if not waitpoints:
        raise errors.InvalidInput(
            "waitpoints", "waitpoints_empty: leave it out to get one for each key of the condition"
        )
    if len(waitpoints) > bounds.WAITPOINTS_PER_SUSPENSION_MAX:
        raise errors.InvalidInput(
            "waitpoints", f"must be at most {bounds.WAITPOINTS_PER_SUSPENSION_MAX}", len(waitpoints)
        )
    primary = waitpoints[0]
    if isinstance(primary, FreshWaitpoint) and isinstance(condition, conditions.Single):
        check_same_key(primary.waitpoint_key, condition)
    for index, extra in enumerate(waitpoints[1:], start=1):
        if isinstance(extra, FreshWaitpoint) and extra.waitpoint_key == "":
            problem = f"additional_waitpoint_binding_empty_key at waitpoints[{index}]: name it"
            raise errors.InvalidInput("waitpoints", problem)
    bound = tuple(_bind(binding, new_id) for binding in waitpoints)
    if len({each.waitpoint_id for each in bound}) != len(bound):
        raise errors.InvalidInput("waitpoints", "duplicate_waitpoint_id: each must occur once")
    fresh = [each.waitpoint_key for each in bound if isinstance(each, BoundWaitpoint)]
    if len(set(fresh)) != len(fresh):
        raise errors.InvalidInput(
            "waitpoints", "duplicate_waitpoint_key: only waitpoints made beforehand share a key"
        )
    if len(fresh) == len(bound) and not take_pending:
        check_keys(fresh, condition)
    return bound


def check_same_key(key: str | None, condition: conditions.Single) -> None:
    if key is not None and key != condition.waitpoint_key:
        waits_at = condition.waitpoint_key
        raise errors.InvalidInput(
            "waitpoints", f"waitpoint_key_mismatch: the condition waits at {waits_at!r}", key
        )


def _bind(binding: object, new_id: Callable[[], str]) -> BoundWaitpoint | UsePending:
    if isinstance(binding, UsePending):
        ids.parse_uuid("waitpoint_id", binding.waitpoint_id)
        check_bool("any_attempt", binding.any_attempt)
        return binding
    if not isinstance(binding, FreshWaitpoint):
        raise errors.InvalidInput("waitpoints", "must be FreshWaitpoint or UsePending", binding)
    waitpoint_id = new_id() if binding.waitpoint_id is None else binding.waitpoint_id
    key = binding.waitpoint_key
    return BoundWaitpoint(
        waitpoint_id=ids.WaitpointId(ids.parse_uuid("waitpoint_id", waitpoint_id)),
        waitpoint_key=ids.WaitpointKey(
            f"wpk:{waitpoint_id}" if key is None else check_name("waitpoint_key", key)
        ),
        own_name_only=check_bool("own_name_only", binding.own_name_only),
    )


def check_keys(bound: Sequence[str], condition: conditions.Condition) -> None:
    """Refuse unless the bound keys are exactly those that the condition mentions."""
    mentioned = conditions.referenced_waitpoint_keys(condition)
    for missing in mentioned:
        if missing not in bound:
            raise errors.InvalidInput(
                "waitpoints", f"referenced_waitpoint_key_missing_binding: {missing}"
            )
    # A condition that no signal meets mentions nothing, and has a waitpoint all the same.
    spare = bound if mentioned else bound[1:]
    for extra in spare:
        if extra not in mentioned:
            raise errors.InvalidInput(
                "waitpoints", f"extra_binding_not_referenced_by_condition: {extra}"
            )


# Waitpoint tokens: who holds one may deliver to exactly one waitpoint -------
#
# A token is `<kid>:<hex>`, where hex is HMAC-SHA256 over `kid:execution:waitpoint`
# with the secret that `kid` names. Nothing about a token is stored; it is computed
# again from its key, so reading the database without the key table reveals
# nothing. Verification looks at the token, the ids it is presented for, and the
# keys; not at whether such a waitpoint exists. So nobody can find out which ids
# exist by presenting tokens. Only an empty token, and one that a key of ours did
# sign, are told apart from all the others.
#
# A key id is used once. A key past its grace loses its secret and keeps its id, so
# that no later key can be mistaken for it.

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
    """A token that does not print itself; `reveal` returns its text."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return ids.redact_token(self._text)

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


def sign(
    key: HmacKey, execution_id: ids.ExecutionId, waitpoint_id: ids.WaitpointId
) -> WaitpointToken:
    return WaitpointToken(f"{key.kid}:{digest(key.kid, key.secret, execution_id, waitpoint_id)}")


def fingerprint(token: WaitpointToken) -> str:
    """The part of a token that may be shown: identifies it, and is useless for delivering."""
    return token.reveal().rpartition(":")[2][:FINGERPRINT_CHARS]


def matching_key(
    token: WaitpointToken,
    execution_id: ids.ExecutionId,
    waitpoint_id: ids.WaitpointId,
    keys: Iterable[HmacKey],
) -> HmacKey:
    """The key that made `token` for this waitpoint; raise `InvalidToken` when none did.

    Every token but an empty one is compared with one digest, whatever is wrong with it.
    """
    if not token.reveal():
        raise errors.MissingToken(MISSING)
    kid, _, _ = token.reveal().partition(":")
    key = next((each for each in keys if each.kid == kid), _NO_KEY)
    if _made(key, token, execution_id, waitpoint_id) and key is not _NO_KEY:
        return key
    raise errors.InvalidToken(INVALID)


_NO_KEY: Final = HmacKey(kid="", secret=b"\0" * SECRET_BYTES, activated_at_ms=0)
"""What the tokens of unknown keys are compared with."""
_NO_DIGEST: Final = "-" * DIGEST_CHARS


def _made(
    key: HmacKey,
    token: WaitpointToken,
    execution_id: ids.ExecutionId,
    waitpoint_id: ids.WaitpointId,
) -> bool:
    """Whether `key` made `token` for this waitpoint.

    Apart from the function that raises: an error keeps the variables of the frames it went
    through, and the right digest must not be among them.
    """
    _, _, given = token.reveal().partition(":")
    compared = given if _DIGEST.fullmatch(given) else _NO_DIGEST
    return hmac.compare_digest(digest(key.kid, key.secret, execution_id, waitpoint_id), compared)


def check_accepted(key: HmacKey, now_ms: int) -> None:
    """Raise `TokenExpired` when the key's time is over."""
    if not accepted(key, now_ms):
        raise errors.TokenExpired(EXPIRED)


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
        raise errors.InvalidInput("waitpoint_token", "must be a string")
    if len(token) > TOKEN_CHARS_MAX or not token.isascii():
        raise errors.InvalidToken(INVALID)
    return WaitpointToken(token)


def check_kid(kid: object) -> str:
    if not isinstance(kid, str) or not kid:
        raise errors.InvalidKid("kid: must be a non-empty string")
    if ":" in kid or not kid.isascii() or not kid.isprintable() or len(kid) > KID_CHARS_MAX:
        raise errors.InvalidKid(
            f"kid: must be at most {KID_CHARS_MAX} printable ASCII characters without a colon"
        )
    return kid


def check_secret(secret_hex: object, *, bytes_min: int, bytes_max: int) -> bytes:
    if not isinstance(secret_hex, str) or _HEX.fullmatch(secret_hex) is None:
        raise errors.InvalidSecretHex()
    secret = bytes.fromhex(secret_hex)
    if not bytes_min <= len(secret) <= bytes_max:
        allowed = f"{bytes_min}" if bytes_min == bytes_max else f"{bytes_min} to {bytes_max}"
        raise errors.InvalidSecretHex(f"secret: must be {allowed} bytes, is {len(secret)}")
    return secret


def check_grace(grace_ms: object) -> int:
    if not isinstance(grace_ms, int) or isinstance(grace_ms, bool):
        raise errors.InvalidGraceMs()
    if not 0 <= grace_ms <= GRACE_MS_MAX:
        raise errors.InvalidGraceMs(f"grace_ms: must be 0 to {GRACE_MS_MAX}, is {grace_ms}")
    return grace_ms


# Creating waitpoints: for a suspension, ahead of one, or to announce a wait beside other work

ANNOUNCED_FOR_MS: Final = 600_000
"""How long a wait beside work is announced; its worker repeats that in half the time."""


def new_waitpoint(
    execution: Execution, bound: BoundWaitpoint, key: HmacKey, now_ms: int
) -> Waitpoint:
    token = sign(key, execution.execution_id, bound.waitpoint_id)
    return Waitpoint(
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        waitpoint_id=bound.waitpoint_id,
        waitpoint_key=bound.waitpoint_key,
        suspension_id=None,
        attempt_index=execution.current_attempt_index,
        state=WaitpointState.PENDING,
        token_kid=key.kid,
        token_fingerprint=fingerprint(token),
        own_name_only=bound.own_name_only,
        created_at_ms=now_ms,
    )


def check_waitpoint_room(execution: Execution, more: int) -> None:
    if execution.open_waitpoint_count + more > bounds.OPEN_WAITPOINTS_MAX:
        raise errors.SignalLimitExceeded(
            f"{execution.called} has {execution.open_waitpoint_count} open waitpoints;"
            f" at most {bounds.OPEN_WAITPOINTS_MAX} may be open at a time: wait for some of them"
            " first, or make them expire sooner"
        )


def announce(
    subject: Subject, missing: Sequence[BoundWaitpoint], key: HmacKey, now_ms: int
) -> Changes:
    """Make waitpoints for a wait beside work, which expire after a while."""
    execution = subject.execution
    if not missing:
        return Changes()
    check_waitpoint_room(execution, len(missing))
    made = tuple(
        structs.replace(
            new_waitpoint(execution, bound, key, now_ms),
            expires_at_ms=min(now_ms + ANNOUNCED_FOR_MS, bounds.TIME_MS_MAX),
        )
        for bound in missing
    )
    count = execution.open_waitpoint_count + len(made)
    return Changes(inserts=made, updates=(change(execution, now_ms, open_waitpoint_count=count),))


def unannounced(
    subject: Subject, announced: Sequence[BoundWaitpoint], now_ms: int
) -> list[BoundWaitpoint]:
    """The waitpoints whose name has none that lasts until the next announcement."""
    lasting = {
        each.waitpoint_key
        for each in subject.waitpoints
        if each.state is WaitpointState.PENDING
        and (each.expires_at_ms is None or each.expires_at_ms > now_ms + ANNOUNCED_FOR_MS // 2)
    }
    return [each for each in announced if each.waitpoint_key not in lasting]


# What a suspend returns: its waitpoints, and the tokens to hand out for them


class WaitpointHandout(Struct, frozen=True, kw_only=True):
    """A waitpoint and the token that opens it."""

    waitpoint_id: ids.WaitpointId
    waitpoint_key: ids.WaitpointKey
    waitpoint_token: WaitpointToken


class SuspensionDetails(Struct, frozen=True, kw_only=True):
    suspension_id: ids.SuspensionId
    waitpoint_id: ids.WaitpointId
    waitpoint_key: ids.WaitpointKey
    waitpoint_token: WaitpointToken
    additional_waitpoints: tuple[WaitpointHandout, ...] = ()
    """In the order they were bound."""


class PendingWaitpoint(Struct, frozen=True, kw_only=True):
    waitpoint_id: ids.WaitpointId
    waitpoint_key: ids.WaitpointKey
    waitpoint_token: WaitpointToken
    expires_at_ms: int


def details_of(
    suspension: Suspension, waitpoints: Sequence[Waitpoint], keys: Sequence[HmacKey], now_ms: int
) -> SuspensionDetails:
    """The suspension's waitpoints with their tokens."""
    handouts = [
        WaitpointHandout(
            waitpoint_id=each.waitpoint_id,
            waitpoint_key=each.waitpoint_key,
            waitpoint_token=token_of(each, keys, now_ms),
        )
        for each in waitpoints
    ]
    primary = handouts[0]
    return SuspensionDetails(
        suspension_id=suspension.suspension_id,
        waitpoint_id=primary.waitpoint_id,
        waitpoint_key=primary.waitpoint_key,
        waitpoint_token=primary.waitpoint_token,
        additional_waitpoints=tuple(handouts[1:]),
    )


def token_of(waitpoint: Waitpoint, keys: Sequence[HmacKey], now_ms: int) -> WaitpointToken:
    """The waitpoint's token; of the current key, when its own is no longer accepted."""
    key = usable_key(keys, waitpoint.token_kid, now_ms)
    return sign(key, waitpoint.execution_id, waitpoint.waitpoint_id)


# Creating a waitpoint before suspending, so that its token can be handed out


def decide_create_waitpoint(
    subject: Subject,
    fence: Fence,
    bound: BoundWaitpoint,
    made: Waitpoint | None,
    expires_in_ms: int,
    keys: Sequence[HmacKey],
    timing: Timing,
    *,
    expire_token: bool = False,
) -> Decision[PendingWaitpoint]:
    """Make a waitpoint whose token can be handed out before the execution suspends.

    A repeat gets the waitpoint that was `made` before, open or closed. One that the execution's
    end has closed is opened again: after a replay its token is as good as before, for the next
    wait of its name. With `expire_token` its token stops working even if a wait has taken it over.
    """
    execution, now_ms = subject.execution, timing.now_ms
    check_fence(subject, fence, now_ms)
    if made is not None and made.waitpoint_key != bound.waitpoint_key:
        raise errors.InvalidWaitpointKey(
            f"waitpoint {made.waitpoint_id} was made as {made.waitpoint_key!r}"
        )
    changes, waitpoint = NO_CHANGES, made
    if waitpoint is None or waitpoint.ended_with_execution:
        check_waitpoint_room(execution, 1)
        until_ms = min(now_ms + expires_in_ms, bounds.TIME_MS_MAX)
        waitpoint = structs.replace(
            new_waitpoint(execution, bound, signing_key(keys), now_ms)
            if made is None
            else pending_again(made),
            attempt_index=execution.current_attempt_index,
            ended_with_execution=False,
            expires_at_ms=until_ms,
            token_expires_at_ms=until_ms if expire_token else None,
        )
        count = execution.open_waitpoint_count + 1
        after = change(execution, now_ms, open_waitpoint_count=count)
        if made is None:
            changes = Changes(inserts=(waitpoint,), updates=(after,))
        else:
            changes = Changes(updates=(after, waitpoint))
    expires_at_ms = waitpoint.token_expires_at_ms or waitpoint.expires_at_ms
    answer = PendingWaitpoint(
        waitpoint_id=waitpoint.waitpoint_id,
        waitpoint_key=waitpoint.waitpoint_key,
        waitpoint_token=token_of(waitpoint, keys, now_ms),
        expires_at_ms=bounds.TIME_MS_MAX if expires_at_ms is None else expires_at_ms,
    )
    return Decision(answer=answer, changes=changes)


def pending_again(waitpoint: Waitpoint) -> Waitpoint:
    """A closed waitpoint, opened for a later suspension."""
    return structs.replace(
        waitpoint,
        state=WaitpointState.PENDING,
        suspension_id=None,
        activated_at_ms=None,
        satisfied_at_ms=None,
        closed_at_ms=None,
        close_reason=None,
    )


def is_expired(waitpoint: Waitpoint, now_ms: int) -> bool:
    """Whether a pending waitpoint was not used in time."""
    return (
        waitpoint.state is WaitpointState.PENDING
        and waitpoint.expires_at_ms is not None
        and waitpoint.expires_at_ms <= now_ms
    )


def token_expired(waitpoint: Waitpoint, now_ms: int) -> bool:
    """Whether its token is refused, though the waitpoint may still be waited at."""
    until_ms = waitpoint.token_expires_at_ms
    return until_ms is not None and until_ms <= now_ms
