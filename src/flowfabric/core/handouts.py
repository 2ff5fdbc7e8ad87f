"""What a suspender is given: waitpoints, and the tokens to hand out for them."""

from collections.abc import Sequence

from msgspec import Struct

from flowfabric.core import tokens
from flowfabric.core.ids import SuspensionId, WaitpointId, WaitpointKey
from flowfabric.core.records import HmacKey, Suspension, Waitpoint
from flowfabric.core.tokens import WaitpointToken


class WaitpointHandout(Struct, frozen=True, kw_only=True):
    """A waitpoint and the token that opens it."""

    waitpoint_id: WaitpointId
    waitpoint_key: WaitpointKey
    waitpoint_token: WaitpointToken


class SuspensionDetails(Struct, frozen=True, kw_only=True):
    suspension_id: SuspensionId
    waitpoint_id: WaitpointId
    waitpoint_key: WaitpointKey
    waitpoint_token: WaitpointToken
    additional_waitpoints: tuple[WaitpointHandout, ...] = ()
    """In the order they were bound."""


class PendingWaitpoint(Struct, frozen=True, kw_only=True):
    waitpoint_id: WaitpointId
    waitpoint_key: WaitpointKey
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
    key = tokens.usable_key(keys, waitpoint.token_kid, now_ms)
    return tokens.sign(key, waitpoint.execution_id, waitpoint.waitpoint_id)
