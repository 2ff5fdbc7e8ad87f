"""The keys that sign waitpoint tokens: installing, rotating, listing.

There is one set of keys per database. The first token makes the first key, so
nothing has to be set up; a deployment that brings its own secret seeds it before
that. After a rotation the old key is accepted until its grace is over, every old
key for its own time; the next rotation wipes the secrets of those past it. An id is
never used for a second key. Secrets go into the store and into `core.waitpoints`,
nowhere else.
"""

import hmac
import os
from collections.abc import Sequence

from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import waitpoints
from flowfabric.core.bounds import ROTATION_GRACE_MS
from flowfabric.core.decisions import Changes
from flowfabric.core.records import HmacKey
from flowfabric.engine import shell
from flowfabric.store.base import Reader, Transaction


class Seeded(Struct, frozen=True, kw_only=True, tag=True):
    kid: str


class AlreadySeeded(Struct, frozen=True, kw_only=True, tag=True):
    kid: str
    same_secret: bool


class Rotated(Struct, frozen=True, kw_only=True, tag=True):
    previous_kid: str | None
    new_kid: str
    gc_count: int
    """Old keys whose secret was wiped because their grace was over."""


class RotationNoop(Struct, frozen=True, kw_only=True, tag="Noop"):
    """The key is the current one already."""

    kid: str


class RotationEntry(Struct, frozen=True, kw_only=True):
    """The outcome of a rotation. There is one set of keys, hence one entry, for partition 0."""

    partition: int = 0
    outcome: Rotated | RotationNoop | None = None
    error: errors.FlowFabricError | None = None


class VerifyingKid(Struct, frozen=True, kw_only=True):
    kid: str
    expires_at_ms: int


class WaitpointKids(Struct, frozen=True, kw_only=True):
    current_kid: str | None
    verifying: tuple[VerifyingKid, ...]


async def load_keys(reader: Reader) -> Sequence[HmacKey]:
    return await reader.select_records(HmacKey, "list_hmac_keys")


async def lock_keys(tx: Transaction) -> Sequence[HmacKey]:
    """The keys, locked until the transaction ends."""
    await tx.select("lock_hmac_keys")
    return await load_keys(tx)


async def ensure_keys(tx: Transaction) -> Sequence[HmacKey]:
    """The keys; the first one is made when there is none yet."""
    keys = await load_keys(tx)
    if waitpoints.current_key(keys) is not None:
        return keys
    keys = await lock_keys(tx)
    if waitpoints.current_key(keys) is not None:
        return keys
    # Without a current key there never was one: rotating replaces it in one transaction.
    return [*keys, await _install(tx, waitpoints.FIRST_KID, os.urandom(waitpoints.SECRET_BYTES))]


async def _find(tx: Transaction, kid: str) -> HmacKey | None:
    """The key of this id, even if its secret was wiped."""
    return await tx.get_one(HmacKey, (kid,))


async def _install(tx: Transaction, kid: str, secret: bytes) -> HmacKey:
    key = HmacKey(kid=kid, secret=secret, activated_at_ms=await tx.now_ms())
    await tx.save(Changes(inserts=(key,)))
    return key


async def _rotate(
    tx: Transaction, keys: Sequence[HmacKey], kid: str, secret: bytes, grace_ms: int
) -> Rotated:
    now_ms = await tx.now_ms()
    previous = waitpoints.current_key(keys)
    gone = tuple(
        structs.replace(key, secret=b"") for key in keys if not waitpoints.accepted(key, now_ms)
    )
    if previous is not None:
        retired = structs.replace(previous, expires_at_ms=now_ms + grace_ms)
        # Written first, so that at no moment two keys are current.
        await tx.save(Changes(updates=(retired, *gone)))
    await _install(tx, kid, secret)
    return Rotated(
        previous_kid=None if previous is None else previous.kid,
        new_kid=kid,
        gc_count=len(gone) if previous is not None else 0,
    )


class WaitpointKeys(shell.Group):
    async def seed_waitpoint_hmac_secret(self, kid: str, secret_hex: str) -> Seeded | AlreadySeeded:
        """Install the first key. Safe to call at every start."""
        secret = waitpoints.check_secret(
            secret_hex, bytes_min=waitpoints.SECRET_BYTES, bytes_max=waitpoints.SECRET_BYTES
        )
        named = waitpoints.check_kid(kid)

        async def body(tx: Transaction) -> Seeded | AlreadySeeded:
            keys = await lock_keys(tx)
            known = await _find(tx, named)
            if known is not None:
                same = hmac.compare_digest(known.secret, secret)
                return AlreadySeeded(kid=named, same_secret=same)
            current = waitpoints.current_key(keys)
            if current is not None:
                raise errors.InvalidInput(
                    "kid", f"another key is active ({current.kid}): rotate to this one instead", kid
                )
            await _install(tx, named, secret)
            return Seeded(kid=named)

        return await self.store.transact(body)

    async def rotate_waitpoint_hmac_secret_all(
        self, new_kid: str, new_secret_hex: str, *, grace_ms: int = ROTATION_GRACE_MS
    ) -> tuple[RotationEntry, ...]:
        """Sign with a new key from now on; tokens of the old one stay good for `grace_ms`."""
        named = waitpoints.check_kid(new_kid)
        secret = waitpoints.check_secret(
            new_secret_hex,
            bytes_min=waitpoints.SECRET_BYTES_MIN,
            bytes_max=waitpoints.SECRET_BYTES_MAX,
        )
        grace = waitpoints.check_grace(grace_ms)

        async def body(tx: Transaction) -> RotationEntry:
            keys = await lock_keys(tx)
            known = await _find(tx, named)
            if known is None:
                return RotationEntry(outcome=await _rotate(tx, keys, named, secret, grace))
            if known.expires_at_ms is None and hmac.compare_digest(known.secret, secret):
                return RotationEntry(outcome=RotationNoop(kid=named))
            why = "is retired" if known.expires_at_ms is not None else "has another secret"
            return RotationEntry(
                error=errors.RotationConflict(f"key id {named!r} {why}: choose another")
            )

        return (await self.store.transact(body),)

    async def list_waitpoint_hmac_kids(self) -> WaitpointKids:
        """Which keys there are, by name: the current one and those still accepted."""

        async def body(reader: Reader) -> WaitpointKids:
            keys = await load_keys(reader)
            now_ms = await reader.now_ms()
            current = waitpoints.current_key(keys)
            return WaitpointKids(
                current_kid=None if current is None else current.kid,
                verifying=tuple(
                    VerifyingKid(kid=key.kid, expires_at_ms=key.expires_at_ms)
                    for key in keys
                    if key.expires_at_ms is not None and waitpoints.accepted(key, now_ms)
                ),
            )

        return await self.store.read(body)
