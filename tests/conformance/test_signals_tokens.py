"""Tokens and their keys: who may deliver, and what nobody finds out."""

import asyncio
import hashlib
import hmac
import logging
import string
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from flowfabric import Engine
from flowfabric.core.waitpoints import EXPIRED, INVALID, MISSING, WaitpointToken
from flowfabric.engine.waitpoint_keys import (
    AlreadySeeded,
    Rotated,
    RotationEntry,
    RotationNoop,
    Seeded,
    VerifyingKid,
    WaitpointKids,
)
from flowfabric.errors import (
    InvalidGraceMs,
    InvalidInput,
    InvalidKid,
    InvalidSecretHex,
    InvalidToken,
    RotationConflict,
    TargetNotSignalable,
)
from flowfabric.store.base import Reader
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, Given
from tests.conformance.observed import call, cursor_of, events_since, execution_of, state_of
from tests.conformance.pausing import APPROVED, Pause, create, new_id, pause, paused
from tests.mutations import mutations

SECRET = "ab" * 32
OTHER_SECRET = "cd" * 32


async def refusal(
    engine: Engine, execution_id: str, waitpoint_id: str, token: str | WaitpointToken
) -> str:
    """What a bearer of this token is told."""
    with pytest.raises(InvalidToken) as caught:
        await engine.deliver_signal(
            execution_id, waitpoint_id, waitpoint_token=token, signal_name="approved"
        )
    assert caught.value.http_status == 400
    return str(caught.value)


async def mine(engine: Engine, own: Pause, token: str | WaitpointToken) -> str:
    return await refusal(engine, own.execution_id, own.waitpoint_id, token)


# Tokens ---------------------------------------------------------------------------


async def test_a_token_signs_the_execution_and_the_waitpoint(engine: Engine, given: Given) -> None:
    await engine.seed_waitpoint_hmac_secret("kid-1", SECRET)
    claimed = await given.running()
    pending = await create(engine, claimed)
    taken = await pause(given, claimed)
    for waitpoint_id, token in (
        (pending.waitpoint_id, pending.waitpoint_token),
        (taken.waitpoint_id, taken.token),
    ):
        message = f"kid-1:{taken.execution_id}:{waitpoint_id}".encode()
        digest = hmac.new(bytes.fromhex(SECRET), message, hashlib.sha256).hexdigest()
        assert token.reveal() == f"kid-1:{digest}"


async def test_a_waitpoint_made_beforehand_takes_its_own_token_only(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    pending, other = await create(engine, claimed), await create(engine, claimed)
    for bad in ("", "garbage", other.waitpoint_token):
        await refusal(engine, claimed.execution_id, pending.waitpoint_id, bad)
    execution = await execution_of(engine, claimed.execution_id)
    assert execution.signal_count == 0


async def test_a_forged_or_mangled_token_is_refused(engine: Engine, given: Given) -> None:
    taken = await paused(given)
    good = taken.token.reveal()
    kid, _, digest = good.partition(":")
    flipped = ("0" if digest[0] != "0" else "1") + digest[1:]
    for bad in (
        f"{kid}:{flipped}",
        good[:-1],
        good + "0",
        good.upper(),
        f"{kid}:{digest[:63]}g",
        f"{kid}:",
        f":{digest}",
        digest,
        f"{kid} :{digest}",
        f"k9:{digest}",
        f" {good}",
        f"{good}\n",
        f"{kid}::{digest}",
        "x" * 10_000,
        "é" * 64,
    ):
        assert await mine(engine, taken, bad) == INVALID
    assert await mine(engine, taken, "") == MISSING
    assert (await execution_of(engine, taken.execution_id)).signal_count == 0


async def test_a_token_fits_one_waitpoint_of_one_execution(engine: Engine, given: Given) -> None:
    one, other = await paused(given), await paused(given)
    assert await mine(engine, one, other.token) == INVALID
    assert await refusal(engine, other.execution_id, one.waitpoint_id, one.token) == INVALID
    assert await refusal(engine, one.execution_id, other.waitpoint_id, one.token) == INVALID


async def test_a_token_of_an_earlier_pause_does_not_open_a_later_one(
    engine: Engine, given: Given
) -> None:
    one = await paused(given)
    await one.signal()
    later = await engine.suspend((await given.taken()).handle, resume_condition=APPROVED)
    assert await refusal(engine, one.execution_id, later.details.waitpoint_id, one.token) == INVALID


async def test_nobody_finds_out_which_ids_exist(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await paused(given)
    await engine.rotate_waitpoint_hmac_secret_all("k2", SECRET, grace_ms=0)
    clock.advance(ms=1)
    forged = "k2:" + "0" * 64
    stale = "k1:" + "0" * 64
    nowhere = f"{{fp:99999}}:{new_id()}"
    for presented in ("", "garbage", forged, stale, "k9:" + "0" * 64):
        told = {
            await refusal(engine, execution_id, waitpoint_id, presented)
            for execution_id in (taken.execution_id, UNKNOWN_ID, nowhere)
            for waitpoint_id in (taken.waitpoint_id, new_id())
        }
        assert len(told) == 1


async def test_refusals_do_the_same_work_whether_or_not_the_execution_exists(
    engine: Engine, given: Given
) -> None:
    taken = await paused(given)
    forged = "k1:" + "0" * 64
    elsewhere = taken.execution_id.replace("{fp:", "{fp:1", 1)
    work: set[tuple[str, ...]] = set()
    for execution_id in (taken.execution_id, UNKNOWN_ID, elsewhere, f"{{fp:65535}}:{new_id()}"):
        for token in (forged, "k9:" + "0" * 64, "k1:short", "garbage", taken.token.reveal()[:-1]):
            with recorded(engine) as done:
                assert await refusal(engine, execution_id, taken.waitpoint_id, token) == INVALID
            work.add(tuple(done))
    with recorded(engine) as done:
        assert await refusal(engine, elsewhere, taken.waitpoint_id, taken.token) == INVALID
    work.add(tuple(done))
    assert len(work) == 1
    assert all("list_hmac_keys" in call for call in work.pop())


@pytest.mark.parametrize("waitpoint_id", ["taken", "unknown"])
async def test_each_kind_of_bad_token_has_its_code(
    engine: Engine, given: Given, clock: SettableClock, waitpoint_id: str
) -> None:
    taken = await paused(given)
    at = taken.waitpoint_id if waitpoint_id == "taken" else new_id()

    async def code(token: str | WaitpointToken, waitpoint_id: str = at) -> str:
        with pytest.raises(InvalidToken) as caught:
            await engine.deliver_signal(
                taken.execution_id, waitpoint_id, waitpoint_token=token, signal_name="approved"
            )
        return caught.value.code

    assert await code("") == "missing_token"
    assert await code("k1:" + "0" * 64) == "invalid_token"
    await engine.rotate_waitpoint_hmac_secret_all("k2", SECRET, grace_ms=0)
    clock.advance(ms=1)
    # Only who holds what a key of ours has signed is told that its time is over.
    assert await code("k1:" + "0" * 64) == "invalid_token"
    assert await code(taken.token, taken.waitpoint_id) == "token_expired"


async def test_wrong_tokens_leave_few_lines_in_the_log(
    engine: Engine, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    taken = await paused(given)
    for _ in range(20):
        await mine(engine, taken, "garbage")
    lines = [each.getMessage() for each in caplog.records if "refused: " in each.message]
    assert len(lines) <= 2
    assert (await execution_of(engine, taken.execution_id)).signal_count == 0


async def test_ten_thousand_mutations_of_a_token_are_refused(engine: Engine, given: Given) -> None:
    taken = await paused(given)
    good = taken.token.reveal()
    # What the check looks up is the same everywhere; where each look travels, fewer will do.
    count = 2_000 if engine.store.label == "postgres" else 10_000
    bad = mutations(good, count, string.hexdigits + ":kK \x00-é")

    async def present(token: str) -> None:
        with pytest.raises(InvalidToken):
            await engine.deliver_signal(
                taken.execution_id,
                taken.waitpoint_id,
                waitpoint_token=token,
                signal_name="approved",
            )

    async with nothing_written(engine, taken):
        # In one go: a store that commits many together has few commits to make.
        for start in range(0, len(bad), 500):
            await asyncio.gather(*map(present, bad[start : start + 500]))
    assert (await taken.signal()).value == "resume_condition_satisfied"


@asynccontextmanager
async def nothing_written(engine: Engine, own: Pause) -> AsyncIterator[None]:
    before = await execution_of(engine, own.execution_id)
    cursor = await cursor_of(engine)
    yield
    assert await execution_of(engine, own.execution_id) == before
    assert await events_since(engine, cursor) == []
    assert await engine.observe_signals(own.handle, include_unmatched=True) == ()


@contextmanager
def recorded(engine: Engine) -> Iterator[list[str]]:
    """What is asked of the store inside, without the values."""
    done: list[str] = []
    store, patch = engine.store, pytest.MonkeyPatch()

    def watched(run: Callable[..., Awaitable[object]]) -> object:
        async def running(body: Callable[..., Awaitable[object]]) -> object:
            async def watching(tx: Reader) -> object:
                return await body(Watch(tx, done))

            return await run(watching)

        return running

    for verb in ("transact", "try_unlocked", "read"):
        patch.setattr(store, verb, watched(getattr(store, verb)))
    try:
        yield done
    finally:
        patch.undo()


class Watch:
    """A transaction that tells what it is asked."""

    def __init__(self, tx: Reader, done: list[str]) -> None:
        self._tx = tx
        self._done = done

    def __getattr__(self, verb: str) -> Callable[..., object]:
        run: Callable[..., object] = getattr(self._tx, verb)

        def asked(*args: object, **values: object) -> object:
            self._done.append(f"{verb} {args}")
            return run(*args, **values)

        return asked


async def test_tokens_and_secrets_show_up_nowhere(
    engine: Engine, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await engine.seed_waitpoint_hmac_secret("kid-1", SECRET)
    taken = await paused(given)
    digest = taken.token.reveal().partition(":")[2]
    told = [
        await mine(engine, taken, f"kid-1:{digest[:-1]}"),
        await mine(engine, taken, f"kid-2:{digest}"),
    ]
    entries = await engine.rotate_waitpoint_hmac_secret_all("kid-1", OTHER_SECRET)
    pages = (
        await engine.list_pending_waitpoints(taken.execution_id),
        await engine.list_suspended(),
    )
    await taken.signal()
    state = await state_of(engine)
    shown = " ".join(
        [*told, repr(entries), repr(pages), repr(state), caplog.text, repr(taken.details)]
    )
    for secret in (digest, digest[:-1], SECRET, OTHER_SECRET):
        assert secret not in shown


async def test_no_refusal_carries_the_right_token_in_its_frames(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    """Whoever collects errors collects the variables of every frame they went through."""
    await engine.seed_waitpoint_hmac_secret("kid-1", SECRET)
    taken = await paused(given)
    digest = taken.token.reveal().partition(":")[2]
    forged = WaitpointToken("kid-1:" + "0" * 64)

    async def deliver(token: WaitpointToken, name: str = "approved") -> None:
        await engine.deliver_signal(
            taken.execution_id, taken.waitpoint_id, waitpoint_token=token, signal_name=name
        )

    with pytest.raises(InvalidToken) as wrong:
        await deliver(forged)
    with pytest.raises(InvalidInput) as bad:
        await deliver(taken.token, "")
    await engine.rotate_waitpoint_hmac_secret_all("kid-2", OTHER_SECRET, grace_ms=0)
    clock.advance(ms=1)
    with pytest.raises(InvalidToken) as expired:
        await deliver(taken.token)
    await engine.cancel_execution(taken.execution_id, reason="enough")
    signed = hmac.new(
        bytes.fromhex(OTHER_SECRET),
        f"kid-2:{taken.execution_id}:{taken.waitpoint_id}".encode(),
        hashlib.sha256,
    ).hexdigest()
    with pytest.raises(TargetNotSignalable) as late:
        await deliver(WaitpointToken(f"kid-2:{signed}"))
    for caught in (wrong, bad, expired, late):
        frames = traceback.walk_tb(caught.value.__traceback__)
        ours = (frame for frame, _ in frames if "/src/flowfabric/" in frame.f_code.co_filename)
        shown = " ".join(repr(frame.f_locals) for frame in ours)
        assert "waitpoint_id" in shown
        for secret in (digest, signed, SECRET, repr(bytes.fromhex(SECRET))):
            assert secret not in shown


# Keys -----------------------------------------------------------------------------


async def test_the_first_token_makes_the_first_key(engine: Engine, given: Given) -> None:
    assert await engine.list_waitpoint_hmac_kids() == WaitpointKids(current_kid=None, verifying=())
    taken = await paused(given)
    assert taken.token.reveal().startswith("k1:")
    assert (await engine.list_waitpoint_hmac_kids()).current_kid == "k1"


async def test_a_key_is_seeded_once(engine: Engine) -> None:
    assert await engine.seed_waitpoint_hmac_secret("main", SECRET) == Seeded(kid="main")
    assert await engine.seed_waitpoint_hmac_secret("main", SECRET.upper()) == AlreadySeeded(
        kid="main", same_secret=True
    )
    assert await engine.seed_waitpoint_hmac_secret("main", OTHER_SECRET) == AlreadySeeded(
        kid="main", same_secret=False
    )
    with pytest.raises(InvalidInput) as caught:
        await engine.seed_waitpoint_hmac_secret("other", OTHER_SECRET)
    assert "rotate" in caught.value.problem


async def test_rotating_promotes_a_new_key(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    assert await engine.rotate_waitpoint_hmac_secret_all("a", SECRET, grace_ms=50) == (
        RotationEntry(outcome=Rotated(previous_kid=None, new_kid="a", gc_count=0)),
    )
    assert await engine.rotate_waitpoint_hmac_secret_all("b", OTHER_SECRET, grace_ms=50) == (
        RotationEntry(outcome=Rotated(previous_kid="a", new_kid="b", gc_count=0)),
    )
    assert await engine.list_waitpoint_hmac_kids() == WaitpointKids(
        current_kid="b",
        verifying=(VerifyingKid(kid="a", expires_at_ms=clock.now_ms() + 50),),
    )
    assert (await paused(given)).token.reveal().startswith("b:")


async def test_a_repeated_rotation_changes_nothing(engine: Engine, clock: SettableClock) -> None:
    await engine.rotate_waitpoint_hmac_secret_all("a", SECRET)
    before = await engine.list_waitpoint_hmac_kids()
    clock.advance(ms=5)
    assert await engine.rotate_waitpoint_hmac_secret_all("a", SECRET) == (
        RotationEntry(outcome=RotationNoop(kid="a")),
    )
    assert await engine.list_waitpoint_hmac_kids() == before


async def test_a_key_id_is_never_used_for_another_secret_or_again(engine: Engine) -> None:
    await engine.rotate_waitpoint_hmac_secret_all("a", SECRET)
    (entry,) = await engine.rotate_waitpoint_hmac_secret_all("a", OTHER_SECRET)
    assert isinstance(entry.error, RotationConflict)
    await engine.rotate_waitpoint_hmac_secret_all("b", OTHER_SECRET)
    for secret in (SECRET, OTHER_SECRET):
        (entry,) = await engine.rotate_waitpoint_hmac_secret_all("a", secret)
        assert isinstance(entry.error, RotationConflict)
        assert entry.outcome is None
    assert (await engine.list_waitpoint_hmac_kids()).current_kid == "b"
    assert await engine.seed_waitpoint_hmac_secret("a", SECRET) == AlreadySeeded(
        kid="a", same_secret=True
    )


async def test_an_old_key_is_accepted_until_its_grace_is_over(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await engine.seed_waitpoint_hmac_secret("a", SECRET)
    one, other = await paused(given), await paused(given)
    await engine.rotate_waitpoint_hmac_secret_all("b", OTHER_SECRET, grace_ms=100)
    await engine.rotate_waitpoint_hmac_secret_all("c", "ef" * 32, grace_ms=1_000)
    clock.advance(ms=100)
    assert (await one.signal()).value == "resume_condition_satisfied"
    clock.advance(ms=1)
    assert await mine(engine, other, other.token) == EXPIRED
    forged = "a:" + "0" * 64
    assert await mine(engine, other, forged) == INVALID


async def test_the_secrets_of_keys_past_their_grace_are_wiped_by_the_next_rotation(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await engine.seed_waitpoint_hmac_secret("a", SECRET)
    taken = await paused(given)
    await engine.rotate_waitpoint_hmac_secret_all("b", OTHER_SECRET, grace_ms=100)
    clock.advance(ms=101)
    assert await mine(engine, taken, taken.token) == EXPIRED
    assert await engine.rotate_waitpoint_hmac_secret_all("c", "ef" * 16, grace_ms=100) == (
        RotationEntry(outcome=Rotated(previous_kid="b", new_kid="c", gc_count=1)),
    )
    assert await mine(engine, taken, taken.token) == INVALID
    kids = await engine.list_waitpoint_hmac_kids()
    assert [each.kid for each in kids.verifying] == ["b"]


@pytest.mark.parametrize("secret", [SECRET, OTHER_SECRET, "ef" * 32])
async def test_a_key_id_past_its_grace_is_never_used_again(
    engine: Engine, given: Given, clock: SettableClock, secret: str
) -> None:
    await engine.seed_waitpoint_hmac_secret("a", SECRET)
    taken = await paused(given)
    for kid in ("b", "c"):
        await engine.rotate_waitpoint_hmac_secret_all(kid, OTHER_SECRET, grace_ms=0)
        clock.advance(ms=1)
    (entry,) = await engine.rotate_waitpoint_hmac_secret_all("a", secret)
    assert isinstance(entry.error, RotationConflict)
    assert await engine.seed_waitpoint_hmac_secret("a", secret) == AlreadySeeded(
        kid="a", same_secret=False
    )
    assert await mine(engine, taken, taken.token) == INVALID
    assert (await engine.list_waitpoint_hmac_kids()).current_kid == "c"


async def test_bad_keys_are_refused(engine: Engine) -> None:
    bad: list[tuple[type[Exception], dict[str, object]]] = [
        (InvalidKid, {"new_kid": ""}),
        (InvalidKid, {"new_kid": "kid:with:colon"}),
        (InvalidKid, {"new_kid": 7}),
        (InvalidKid, {"new_kid": "x" * 65}),
        (InvalidKid, {"new_kid": "a\n"}),
        (InvalidSecretHex, {"new_secret_hex": ""}),
        (InvalidSecretHex, {"new_secret_hex": "abc"}),
        (InvalidSecretHex, {"new_secret_hex": "zz11"}),
        (InvalidSecretHex, {"new_secret_hex": "1234567"}),
        (InvalidSecretHex, {"new_secret_hex": "ab" * 15}),
        (InvalidSecretHex, {"new_secret_hex": b"ab" * 32}),
        (InvalidGraceMs, {"grace_ms": -1}),
        (InvalidGraceMs, {"grace_ms": 2**53}),
        (InvalidGraceMs, {"grace_ms": 1.5}),
    ]
    for error, arguments in bad:
        named: dict[str, object] = {
            "new_kid": "a",
            "new_secret_hex": SECRET,
            "grace_ms": 0,
            **arguments,
        }
        with pytest.raises(error):
            await call(engine, "rotate_waitpoint_hmac_secret_all", **named)
    for error, kid, secret in (
        (InvalidKid, "a:b", SECRET),
        (InvalidKid, "", SECRET),
        (InvalidSecretHex, "a", "ab" * 31),
        (InvalidSecretHex, "a", "ab" * 33),
        (InvalidSecretHex, "a", "zz" * 32),
    ):
        with pytest.raises(error) as caught:
            await engine.seed_waitpoint_hmac_secret(kid, secret)
        assert secret not in str(caught.value)
    assert (await engine.list_waitpoint_hmac_kids()).current_kid is None


async def test_the_largest_grace_is_accepted(engine: Engine) -> None:
    await engine.rotate_waitpoint_hmac_secret_all("a", SECRET)
    (entry,) = await engine.rotate_waitpoint_hmac_secret_all("b", OTHER_SECRET, grace_ms=2**53 - 1)
    assert isinstance(entry.outcome, Rotated)
