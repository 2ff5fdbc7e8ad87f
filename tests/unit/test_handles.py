"""Worker handles: byte form, signature, and every way they can be wrong."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.handles import (
    HANDLES_REMEMBERED,
    POSTGRES_TAG,
    SQLITE_TAG,
    Handle,
    HandleKind,
    Signer,
    decode_opaque,
    encode_opaque,
    from_wire,
    sign,
    to_wire,
    verify,
)
from flowfabric.core.ids import (
    AttemptId,
    ExecutionId,
    LaneId,
    LeaseId,
    WorkerInstanceId,
    make_execution_id,
)
from flowfabric.errors import HandleFromOtherBackend, InvalidHandle

KEY = b"k" * 32
HANDLE = Handle(
    backend_tag=2,
    kind=HandleKind.FRESH,
    execution_id=ExecutionId("{fp:7}:550e8400-e29b-41d4-a716-446655440000"),
    attempt_index=3,
    attempt_id=AttemptId("00000000-0000-0000-0000-000000000001"),
    lease_id=LeaseId("00000000-0000-0000-0000-000000000002"),
    lease_epoch=7,
    lease_ttl_ms=30_000,
    lane_id=LaneId("default"),
    worker_instance_id=WorkerInstanceId("worker-1"),
)
OURS = msgspec.structs.replace(HANDLE, backend_tag=SQLITE_TAG)
OPAQUE = encode_opaque(HANDLE)

uuids = st.uuids().map(str)
handles = st.builds(
    Handle,
    backend_tag=st.sampled_from([1, 2, 3, POSTGRES_TAG, SQLITE_TAG]),
    kind=st.sampled_from(HandleKind),
    execution_id=st.builds(make_execution_id, st.integers(0, 65_535), uuids),
    attempt_index=st.integers(0, 2**32 - 1),
    attempt_id=uuids.map(AttemptId),
    lease_id=uuids.map(LeaseId),
    lease_epoch=st.integers(0, 2**64 - 1),
    lease_ttl_ms=st.integers(0, 2**64 - 1),
    lane_id=st.text(st.characters(codec="utf-8"), max_size=30).map(LaneId),
    worker_instance_id=st.text(st.characters(codec="utf-8"), max_size=30).map(WorkerInstanceId),
    signature=st.just(b""),
)


def test_the_byte_form_is_the_published_one() -> None:
    assert len(OPAQUE) == 173
    assert OPAQUE.hex().startswith("0201022b0000007b66703a37")
    assert OPAQUE == (
        b"\x02\x01\x02"
        b"\x2b\0\0\0{fp:7}:550e8400-e29b-41d4-a716-446655440000"
        b"\x03\0\0\0"
        b"\x24\0\0\x0000000000-0000-0000-0000-000000000001"
        b"\x24\0\0\x0000000000-0000-0000-0000-000000000002"
        b"\x07\0\0\0\0\0\0\0"
        b"\x30\x75\0\0\0\0\0\0"
        b"\x07\0\0\0default"
        b"\x08\0\0\0worker-1"
    )


@given(handle=handles)
def test_a_handle_survives_its_byte_form(handle: Handle) -> None:
    assert decode_opaque(encode_opaque(handle), handle.kind) == handle


@given(handle=handles)
def test_a_signed_handle_survives_the_wire_and_verifies(handle: Handle) -> None:
    received = from_wire(to_wire(sign(handle, KEY)))
    assert received == sign(handle, KEY)
    verify(received, KEY, backend_tag=handle.backend_tag)


def test_the_first_version_is_read_with_the_tag_it_implied() -> None:
    decoded = decode_opaque(b"\x01" + OPAQUE[3:], HandleKind.RESUMED)
    assert decoded == msgspec.structs.replace(HANDLE, backend_tag=1, kind=HandleKind.RESUMED)


def patched(old: bytes, new: bytes) -> bytes:
    assert OPAQUE.count(old) == 1
    return OPAQUE.replace(old, new)


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        (b"", "Truncated(needed=1, at=0, have=0)"),
        (b"\x02", "Truncated(needed=1, at=1, have=0)"),
        (OPAQUE[:5], "Truncated(needed=4, at=3, have=2)"),
        (OPAQUE[:20], "Truncated(needed=43, at=7, have=13)"),
        (OPAQUE[:-1], "Truncated(needed=8, at=165, have=7)"),
        (
            patched(b"\x2b\0\0\0", b"\xff\xff\xff\xff"),
            "Truncated(needed=4294967295, at=7, have=166)",
        ),
        (b"\x02\x02" + OPAQUE[2:], "BadWireVersion(got=2)"),
        (b"\x02\x01\x09" + OPAQUE[3:], "BadBackendTag(got=9)"),
        (b"\x03" + OPAQUE[1:], "BadV1Version(got=3)"),
        (b"\0", "BadV1Version(got=0)"),
        (OPAQUE + b"\0", "TrailingBytes(pos=173, len=174)"),
        (patched(b"default", b"defaul\xff"), "InvalidUtf8(field=lane_id)"),
        (patched(b"worker-1", b"worker-\xff"), "InvalidUtf8(field=worker_instance_id)"),
        (
            patched(b"-0000-000000000001", b"-0000-00000000000X"),
            "ParseField(field=attempt_id, detail=must be a lower-case hyphenated uuid)",
        ),
        (
            patched(b"-0000-000000000002", b"-0000-00000000000X"),
            "ParseField(field=lease_id, detail=must be a lower-case hyphenated uuid)",
        ),
        (
            patched(b"{fp:7}", b"{fq:7}"),
            "ParseField(field=execution_id, detail=missing tag: must look like {fp:N}:<uuid>)",
        ),
    ],
)
def test_damaged_bytes_are_refused_with_what_and_where(data: bytes, failure: str) -> None:
    with pytest.raises(InvalidHandle) as caught:
        decode_opaque(data, HandleKind.FRESH)
    assert caught.value.detail == f"handle_codec: {failure}"


@given(data=st.binary(max_size=200))
def test_no_bytes_raise_anything_but_corruption(data: bytes) -> None:
    for prefix in (b"", b"\x01" * 17, b"\x01" * 17 + OPAQUE[:7]):
        with suppress(InvalidHandle):
            from_wire(prefix + data)


@given(size=st.integers(0, len(OPAQUE) - 1))
def test_every_prefix_of_a_handle_is_truncated(size: int) -> None:
    with pytest.raises(InvalidHandle, match="Truncated"):
        decode_opaque(OPAQUE[:size], HandleKind.FRESH)


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        (b"", "Truncated(needed=17, at=0, have=0)"),
        (bytes(16), "Truncated(needed=17, at=0, have=16)"),
        (b"\x09" + bytes(16) + OPAQUE, "BadKind(got=9)"),
    ],
)
def test_a_damaged_envelope_is_refused(data: bytes, failure: str) -> None:
    with pytest.raises(InvalidHandle) as caught:
        from_wire(data)
    assert caught.value.detail == f"handle_codec: {failure}"


def test_a_signature_is_stable_and_sixteen_bytes() -> None:
    assert sign(OURS, KEY) == sign(sign(OURS, KEY), KEY)
    assert len(sign(OURS, KEY).signature) == 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", HandleKind.SUSPENDED),
        ("execution_id", "{fp:8}:550e8400-e29b-41d4-a716-446655440000"),
        ("attempt_index", 4),
        ("attempt_id", "00000000-0000-0000-0000-000000000009"),
        ("lease_id", "00000000-0000-0000-0000-000000000009"),
        ("lease_epoch", 8),
        ("lease_ttl_ms", 30_001),
        ("lane_id", "other"),
        ("worker_instance_id", "worker-2"),
        ("signature", bytes(16)),
        ("signature", b""),
    ],
)
def test_changing_anything_breaks_the_signature(field: str, value: object) -> None:
    changes: dict[str, object] = {field: value}
    forged = msgspec.structs.replace(sign(OURS, KEY), **changes)
    with pytest.raises(InvalidHandle, match=r"^handle_codec: signature mismatch$"):
        verify(forged, KEY, backend_tag=SQLITE_TAG)


@pytest.mark.parametrize("field", ["lease_epoch", "attempt_index", "lease_ttl_ms"])
def test_a_signer_refuses_a_changed_copy_of_a_handle_it_remembers(field: str) -> None:
    signer = Signer(KEY, SQLITE_TAG)
    signed = signer.sign(OURS)
    signer.verify(signed)
    changes: dict[str, object] = {field: 99}
    with pytest.raises(InvalidHandle, match=r"^handle_codec: signature mismatch$"):
        signer.verify(msgspec.structs.replace(signed, **changes))


def test_a_signer_verifies_a_handle_that_comes_back_as_another_object() -> None:
    signed = Signer(KEY, SQLITE_TAG).sign(OURS)
    Signer(KEY, SQLITE_TAG).verify(from_wire(to_wire(signed)))
    with pytest.raises(InvalidHandle, match=r"^handle_codec: signature mismatch$"):
        Signer(b"x" * 32, SQLITE_TAG).verify(signed)


def test_a_signer_verifies_handles_it_has_forgotten() -> None:
    signer = Signer(KEY, SQLITE_TAG)
    handles = [
        signer.sign(msgspec.structs.replace(OURS, lease_epoch=epoch))
        for epoch in range(HANDLES_REMEMBERED + 1)
    ]
    for handle in handles:
        signer.verify(handle)


def test_moving_bytes_between_neighbouring_fields_breaks_the_signature() -> None:
    moved = msgspec.structs.replace(
        sign(OURS, KEY), lane_id=LaneId("defaultw"), worker_instance_id=WorkerInstanceId("orker-1")
    )
    with pytest.raises(InvalidHandle):
        verify(moved, KEY, backend_tag=SQLITE_TAG)


def test_a_handle_signed_with_another_key_is_refused() -> None:
    with pytest.raises(InvalidHandle, match="signature mismatch"):
        verify(sign(OURS, b"x" * 32), KEY, backend_tag=SQLITE_TAG)


def test_a_handle_of_another_backend_is_refused_before_its_signature_is_looked_at() -> None:
    with pytest.raises(HandleFromOtherBackend) as caught:
        verify(HANDLE, KEY, backend_tag=POSTGRES_TAG)
    assert caught.value.detail == "expected=0x12 actual=0x02"


def test_a_number_too_large_for_the_byte_form_is_corruption() -> None:
    oversized = msgspec.structs.replace(OURS, lease_epoch=2**64)
    with pytest.raises(InvalidHandle, match=r"^handle_codec: number out of range"):
        encode_opaque(oversized)
    with pytest.raises(InvalidHandle, match=r"^handle_codec: malformed field"):
        verify(oversized, KEY, backend_tag=SQLITE_TAG)


def test_the_signature_is_not_shown() -> None:
    signed = sign(OURS, KEY)
    assert (
        repr(signed)
        == str(signed)
        == (
            "Handle(fresh, {fp:7}:550e8400-e29b-41d4-a716-446655440000, attempt_index=3,"
            " lease_id=00000000-0000-0000-0000-000000000002, lease_epoch=7,"
            " worker_instance_id=worker-1)"
        )
    )


@pytest.mark.parametrize("field", sorted(set(Handle.__struct_fields__) - {"backend_tag"}))
@pytest.mark.parametrize("value", [None, 1.5, [], {}, b"bytes", "\ud800"], ids=repr)
def test_a_handle_made_up_of_other_types_is_refused(field: str, value: object) -> None:
    forged = msgspec.structs.replace(sign(OURS, KEY), **{field: value})

    with pytest.raises(InvalidHandle, match="handle_codec"):
        verify(forged, KEY, backend_tag=SQLITE_TAG)


@pytest.mark.parametrize("tag", [None, "19", 1.5, []])
def test_a_backend_tag_that_is_no_number_is_refused(tag: object) -> None:
    forged = msgspec.structs.replace(sign(OURS, KEY), backend_tag=tag)

    with pytest.raises(InvalidHandle, match="malformed field"):
        verify(forged, KEY, backend_tag=SQLITE_TAG)
