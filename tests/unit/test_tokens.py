"""Waitpoint tokens."""

import pickle

import pytest

from flowfabric.core.ids import WaitpointId, parse_execution_id
from flowfabric.core.records import HmacKey
from flowfabric.core.waitpoints import (
    EXPIRED,
    INVALID,
    MISSING,
    WaitpointToken,
    accepted,
    check_accepted,
    check_grace,
    check_kid,
    check_secret,
    check_token,
    current_key,
    fingerprint,
    matching_key,
    sign,
    usable_key,
)
from flowfabric.errors import (
    InvalidGraceMs,
    InvalidInput,
    InvalidKid,
    InvalidSecretHex,
    InvalidToken,
)

NOW_MS = 1_000
EXECUTION = parse_execution_id("{fp:7}:11111111-1111-4111-8111-111111111111")
WAITPOINT = WaitpointId("22222222-2222-4222-8222-222222222222")
KEY = HmacKey(kid="kid-suspend-1", secret=b"\xab" * 32, activated_at_ms=0)
OLD = HmacKey(kid="old", secret=b"\xcd" * 32, activated_at_ms=0, expires_at_ms=NOW_MS)
DIGEST = "f43137a3aaad8202ca4900a5c95255ec59cab866e0a2adfcfc1f3e15cb2ec958"


def test_the_published_vector() -> None:
    assert sign(KEY, EXECUTION, WAITPOINT).reveal() == f"kid-suspend-1:{DIGEST}"
    assert fingerprint(sign(KEY, EXECUTION, WAITPOINT)) == "f43137a3aaad8202"


def test_a_token_matches_the_key_that_made_it() -> None:
    for key in (KEY, OLD):
        assert (
            matching_key(sign(key, EXECUTION, WAITPOINT), EXECUTION, WAITPOINT, [KEY, OLD]) is key
        )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", MISSING),
        ("kid-suspend-1", INVALID),
        (":" + DIGEST, INVALID),
        ("kid-suspend-1:", INVALID),
        ("kid-suspend-1:" + DIGEST[:-1], INVALID),
        ("kid-suspend-1:" + DIGEST.upper(), INVALID),
        ("kid-suspend-1:" + DIGEST[:-1] + "x", INVALID),
        ("kid-suspend-1:" + "0" * 64, INVALID),
        ("old:" + DIGEST, INVALID),
        ("unknown:" + DIGEST, INVALID),
    ],
)
def test_any_other_token_is_refused(text: str, told: str) -> None:
    with pytest.raises(InvalidToken) as caught:
        matching_key(WaitpointToken(text), EXECUTION, WAITPOINT, [KEY, OLD])
    assert str(caught.value) == told


def test_without_keys_every_token_is_refused() -> None:
    with pytest.raises(InvalidToken):
        matching_key(sign(KEY, EXECUTION, WAITPOINT), EXECUTION, WAITPOINT, [])


def test_a_retired_key_is_accepted_to_the_last_millisecond() -> None:
    check_accepted(OLD, NOW_MS)
    check_accepted(KEY, 2**62)
    with pytest.raises(InvalidToken) as caught:
        check_accepted(OLD, NOW_MS + 1)
    assert str(caught.value) == EXPIRED
    assert (accepted(OLD, NOW_MS), accepted(OLD, NOW_MS + 1)) == (True, False)


def test_the_current_key_stands_in_for_one_that_is_gone() -> None:
    assert current_key([OLD, KEY]) is KEY
    assert current_key([OLD]) is None
    assert usable_key([OLD, KEY], "old", NOW_MS) is OLD
    assert usable_key([OLD, KEY], "old", NOW_MS + 1) is KEY
    assert usable_key([OLD, KEY], "never", NOW_MS) is KEY


def test_tokens_and_keys_hide_their_secrets() -> None:
    token = sign(KEY, EXECUTION, WAITPOINT)
    for shown in (repr(token), str(token), f"{token:>80}", f"{[token]}"):
        assert DIGEST not in shown
        assert "kid-suspend-1:<REDACTED:len=64>" in shown
    assert repr(WaitpointToken("nonsense")) == "<REDACTED:malformed>"
    assert (repr(KEY), str(OLD)) == (
        "HmacKey('kid-suspend-1', expires_at_ms=None)",
        "HmacKey('old', expires_at_ms=1000)",
    )
    with pytest.raises(TypeError):
        pickle.dumps(token)


def test_tokens_are_equal_by_their_text() -> None:
    one, same = sign(KEY, EXECUTION, WAITPOINT), sign(KEY, EXECUTION, WAITPOINT)
    assert one == same
    assert hash(one) == hash(same)
    assert one != sign(OLD, EXECUTION, WAITPOINT)
    assert one != one.reveal()


def test_what_is_presented_is_checked_without_being_repeated() -> None:
    secret = "super-secret"
    assert check_token(WaitpointToken(secret)).reveal() == secret
    assert check_token(secret).reveal() == secret
    for bad in (None, 7, secret.encode()):
        with pytest.raises(InvalidInput) as caught:
            check_token(bad)
        assert secret not in str(caught.value)
    for too_odd in ("x" * 130, "é"):
        with pytest.raises(InvalidToken):
            check_token(too_odd)


def test_keys_are_checked() -> None:
    assert check_kid("k-1") == "k-1"
    for kid in ("", "a:b", None, "é", "x" * 65, "a\tb"):
        with pytest.raises(InvalidKid):
            check_kid(kid)
    assert check_secret("AB" * 16, bytes_min=16, bytes_max=32) == b"\xab" * 16
    for secret in ("", "a", "zz" * 16, "ab" * 15, "ab" * 33, 7, "ab " * 16):
        with pytest.raises(InvalidSecretHex):
            check_secret(secret, bytes_min=16, bytes_max=32)
    assert check_grace(0) == 0
    for grace in (-1, 2**53, True, 1.0, None):
        with pytest.raises(InvalidGraceMs):
            check_grace(grace)
