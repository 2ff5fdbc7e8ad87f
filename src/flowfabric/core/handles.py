"""The proof a worker shows that it may act on an execution.

A handle names the execution, the attempt and the lease, and is signed by the
engine that issued it, so a worker can present it over any transport but cannot
invent one. The signature covers the kind as well: a handle returned by a suspension
cannot be passed off as the one that owned the lease.

The byte form ("opaque") is little-endian, strings as a 32-bit length and UTF-8:

    v2: 0x02 | 0x01 | tag | fields          written and read
    v1: 0x01 | fields                       read only; tag is FOREIGN_FIRST_TAG
    fields: execution_id, attempt_index u32, attempt_id, lease_id,
            lease_epoch u64, lease_ttl_ms u64, lane_id, worker_instance_id
    wire:   kind | signature (16 bytes) | opaque
"""

import hashlib
import hmac
import struct
from enum import StrEnum
from functools import lru_cache
from typing import Final, TypeGuard

import msgspec

from flowfabric.core.ids import (
    AttemptId,
    ExecutionId,
    LaneId,
    LeaseId,
    WorkerInstanceId,
    parse_execution_id,
    parse_uuid,
)
from flowfabric.errors import HandleFromOtherBackend, InvalidHandle, InvalidInput

FOREIGN_FIRST_TAG: Final = 0x01
FOREIGN_POSTGRES_TAG: Final = 0x02
FOREIGN_SQLITE_TAG: Final = 0x03
POSTGRES_TAG: Final = 0x12
SQLITE_TAG: Final = 0x13
SIGNATURE_BYTES: Final = 16
HANDLES_REMEMBERED: Final = 2_048
"""Handles that an engine knows as its own without looking at their signature."""

_TAGS: Final = frozenset(
    {FOREIGN_FIRST_TAG, FOREIGN_POSTGRES_TAG, FOREIGN_SQLITE_TAG, POSTGRES_TAG, SQLITE_TAG}
)
_V1: Final = 0x01
_V2: Final = 0x02
_V2_WIRE_VERSION: Final = 0x01

_encode: Final = msgspec.msgpack.Encoder().encode
_HEAD: Final = struct.Struct("<BBB")
_U32: Final = struct.Struct("<I")
_U64_U64: Final = struct.Struct("<QQ")


class HandleKind(StrEnum):
    """How the worker came by its handle."""

    FRESH = "fresh"
    RESUMED = "resumed"
    SUSPENDED = "suspended"
    RECLAIMED = "reclaimed"


_KIND_BYTE: Final = {
    HandleKind.FRESH: b"\x01",
    HandleKind.RESUMED: b"\x02",
    HandleKind.SUSPENDED: b"\x03",
    HandleKind.RECLAIMED: b"\x04",
}
_KIND_OF_BYTE: Final = {byte[0]: kind for kind, byte in _KIND_BYTE.items()}


class Handle(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker's claim to one attempt of one execution. Its repr leaves the signature out."""

    backend_tag: int
    kind: HandleKind
    execution_id: ExecutionId
    attempt_index: int
    attempt_id: AttemptId
    lease_id: LeaseId
    lease_epoch: int
    lease_ttl_ms: int
    lane_id: LaneId
    worker_instance_id: WorkerInstanceId
    signature: bytes = b""

    def __repr__(self) -> str:
        return (
            f"Handle({self.kind}, {self.execution_id}, attempt_index={self.attempt_index},"
            f" lease_id={self.lease_id}, lease_epoch={self.lease_epoch},"
            f" worker_instance_id={self.worker_instance_id})"
        )


def sign(handle: Handle, key: bytes) -> Handle:
    return msgspec.structs.replace(handle, signature=_signature(handle, key))


def verify(handle: Handle, key: bytes, *, backend_tag: int) -> None:
    """Raise unless the handle was issued by this backend, with this key, and is unaltered."""
    try:
        if handle.backend_tag != backend_tag:
            raise HandleFromOtherBackend(
                f"expected={backend_tag:#04x} actual={handle.backend_tag:#04x}"
            )
        genuine = hmac.compare_digest(_signature(handle, key), handle.signature)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
        # Made by hand: the engine issues no handle with fields of other types.
        raise _failure("malformed field") from None
    if not genuine:
        raise _failure("signature mismatch")


class Signer:
    """Signs and verifies handles with one key, for one backend.

    A handle cannot be changed, so one that comes back as the object it was issued as is genuine:
    that is how a worker in the same process brings it.
    """

    def __init__(self, key: bytes, backend_tag: int) -> None:
        self._key = key
        self._backend_tag = backend_tag
        self._issued: dict[int, Handle] = {}
        """By identity, which no other object has as long as they are kept here."""

    def sign(self, handle: Handle) -> Handle:
        if len(self._issued) >= HANDLES_REMEMBERED:
            self._issued.clear()
        signed = sign(handle, self._key)
        self._issued[id(signed)] = signed
        return signed

    def has_issued(self, handle: object) -> TypeGuard[Handle]:
        """Whether this is the very object that was issued; others may be genuine, too."""
        return handle is not None and self._issued.get(id(handle)) is handle

    def verify(self, handle: Handle) -> None:
        """Raise unless the handle was issued by this backend, with this key, and is unaltered."""
        if not self.has_issued(handle):
            verify(handle, self._key, backend_tag=self._backend_tag)


def encode_opaque(handle: Handle) -> bytes:
    try:
        return b"".join(
            (
                _HEAD.pack(_V2, _V2_WIRE_VERSION, handle.backend_tag),
                _text(handle.execution_id),
                _U32.pack(handle.attempt_index),
                _text(handle.attempt_id),
                _text(handle.lease_id),
                _U64_U64.pack(handle.lease_epoch, handle.lease_ttl_ms),
                _text(handle.lane_id),
                _text(handle.worker_instance_id),
            )
        )
    except struct.error as error:
        raise InvalidHandle(f"handle_codec: number out of range ({error})") from None


def _text(value: str) -> bytes:
    data = value.encode()
    return _U32.pack(len(data)) + data


def decode_opaque(data: bytes, kind: HandleKind) -> Handle:
    """Read a handle, unsigned. Raises `InvalidHandle` saying what is wrong and where."""
    reader = _Reader(data)
    backend_tag = _decode_tag(reader)
    execution_id = reader.text("execution_id")
    attempt_index = reader.u32()
    attempt_id = reader.text("attempt_id")
    lease_id = reader.text("lease_id")
    lease_epoch, lease_ttl_ms = reader.u64_pair()
    lane_id = reader.text("lane_id")
    worker_instance_id = reader.text("worker_instance_id")
    reader.finish()
    try:
        return Handle(
            backend_tag=backend_tag,
            kind=kind,
            execution_id=parse_execution_id(execution_id),
            attempt_index=attempt_index,
            attempt_id=AttemptId(parse_uuid("attempt_id", attempt_id)),
            lease_id=LeaseId(parse_uuid("lease_id", lease_id)),
            lease_epoch=lease_epoch,
            lease_ttl_ms=lease_ttl_ms,
            lane_id=LaneId(lane_id),
            worker_instance_id=WorkerInstanceId(worker_instance_id),
        )
    except InvalidInput as error:
        raise _failure(f"ParseField(field={error.field}, detail={error.problem})") from None


def to_wire(handle: Handle) -> bytes:
    assert len(handle.signature) == SIGNATURE_BYTES, "only signed handles leave the engine"
    return _KIND_BYTE[handle.kind] + handle.signature + encode_opaque(handle)


def from_wire(data: bytes) -> Handle:
    """Read what `to_wire` wrote. The signature is carried over, not checked."""
    if len(data) <= SIGNATURE_BYTES:
        raise _failure(f"Truncated(needed={SIGNATURE_BYTES + 1}, at=0, have={len(data)})")
    kind = _KIND_OF_BYTE.get(data[0])
    if kind is None:
        raise _failure(f"BadKind(got={data[0]})")
    handle = decode_opaque(data[1 + SIGNATURE_BYTES :], kind)
    return msgspec.structs.replace(handle, signature=data[1 : 1 + SIGNATURE_BYTES])


def _signature(handle: Handle, key: bytes) -> bytes:
    attempt_id: str = handle.attempt_id
    lease_id: str = handle.lease_id
    message = _encode(
        (
            handle.kind,
            handle.backend_tag,
            handle.execution_id,
            handle.attempt_index,
            # Nearly always that of the lease; without it one block of the hash holds most handles.
            None if attempt_id == lease_id else attempt_id,
            lease_id,
            handle.lease_epoch,
            handle.lease_ttl_ms,
            handle.lane_id,
            handle.worker_instance_id,
        )
    )
    hashed = _keyed(key).copy()
    hashed.update(message)
    return hashed.digest()


@lru_cache(maxsize=16)
def _keyed(key: bytes) -> "hashlib.blake2b":
    """A hash that has taken in the key: an engine signs with the same one again and again.

    Keyed BLAKE2 is a message authentication code by itself and a sixth of HMAC's price.
    """
    return hashlib.blake2b(key=key, digest_size=SIGNATURE_BYTES)


def _decode_tag(reader: "_Reader") -> int:
    magic = reader.u8()
    if magic == _V1:
        return FOREIGN_FIRST_TAG
    if magic != _V2:
        raise _failure(f"BadV1Version(got={magic})")
    version = reader.u8()
    if version != _V2_WIRE_VERSION:
        raise _failure(f"BadWireVersion(got={version})")
    tag = reader.u8()
    if tag not in _TAGS:
        raise _failure(f"BadBackendTag(got={tag})")
    return tag


class _Reader:
    """Takes fields off the front of a buffer and knows where it is."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def u8(self) -> int:
        return self._take(1)[0]

    def u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def u64_pair(self) -> tuple[int, int]:
        epoch, ttl_ms = _U64_U64.unpack(self._take(_U64_U64.size))
        return int(epoch), int(ttl_ms)

    def text(self, field: str) -> str:
        try:
            return self._take(self.u32()).decode()
        except UnicodeDecodeError:
            raise _failure(f"InvalidUtf8(field={field})") from None

    def finish(self) -> None:
        if self._at != len(self._data):
            raise _failure(f"TrailingBytes(pos={self._at}, len={len(self._data)})")

    def _take(self, size: int) -> bytes:
        have = len(self._data) - self._at
        if size > have:
            raise _failure(f"Truncated(needed={size}, at={self._at}, have={have})")
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken


def _failure(what: str) -> InvalidHandle:
    return InvalidHandle(f"handle_codec: {what}")
