"""API tokens: what is stored lets nobody in, what was handed out does, until it ends."""

import pytest

from flowfabric import Engine
from flowfabric.core.api_tokens import Scope
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound
from flowfabric.testing import SettableClock
from tests.conformance.observed import call

HOUR_MS = 3_600_000


async def test_a_token_lets_its_bearer_in(engine: Engine, clock: SettableClock) -> None:
    created = await engine.create_token("ci", scopes=["submit", "read"], namespace="shop")

    checked = await engine.check_token(created.token)

    assert checked == created.stored
    assert checked is not None
    assert checked.allowed() == {Scope.READ, Scope.SUBMIT}
    assert (checked.name, checked.namespace, checked.scopes) == ("ci", "shop", "read submit")
    assert checked.created_at_ms == clock.now_ms()
    assert checked.expires_at_ms is None


async def test_an_admin_may_do_everything(engine: Engine) -> None:
    created = await engine.create_token("ops", scopes=["admin"])

    assert created.stored.allowed() == frozenset(Scope)


async def test_nothing_stored_or_shown_lets_anybody_in(engine: Engine) -> None:
    created = await engine.create_token("ci", scopes=["read"])
    (listed,) = (await engine.list_tokens()).tokens
    secret = created.token.rpartition("_")[2]

    assert secret not in repr(listed)
    assert await engine.check_token(f"ff_{listed.token_id}_{listed.digest.hex()}") is None


@pytest.mark.parametrize(
    "tamper",
    [
        lambda token: token[:-1] + ("0" if token[-1] != "0" else "1"),
        lambda token: "ff_" + "0" * 16 + token[19:],
        lambda token: token.upper(),
        lambda token: token + "0",
        lambda token: token + "\n",
        lambda token: token[3:],
        lambda _token: "",
        lambda _token: "ff__",
        lambda _token: "ä" * 100,
    ],
    ids=["secret", "id", "case", "longer", "newline", "prefix", "empty", "bare", "letters"],
)
async def test_what_was_tampered_with_lets_nobody_in(engine: Engine, tamper: object) -> None:
    created = await engine.create_token("ci", scopes=["read"])
    assert callable(tamper)

    assert await engine.check_token(tamper(created.token)) is None


async def test_a_token_ends_when_it_expires(engine: Engine, clock: SettableClock) -> None:
    created = await engine.create_token("visit", scopes=["read"], expires_in_ms=HOUR_MS)

    clock.advance(ms=HOUR_MS - 1)
    assert await engine.check_token(created.token) is not None
    assert await engine.has_tokens()
    clock.advance(ms=1)
    assert await engine.check_token(created.token) is None
    assert await engine.has_tokens(), "a server that asked for tokens does not open to everybody"


async def test_a_revoked_token_lets_nobody_in_and_stays_listed(
    engine: Engine, clock: SettableClock
) -> None:
    created = await engine.create_token("ci", scopes=["read"])
    revoked_at_ms = clock.now_ms()
    await engine.revoke_token(created.stored.token_id)
    clock.advance(ms=5)

    again = await engine.revoke_token(created.stored.token_id)

    assert again.revoked_at_ms == revoked_at_ms
    assert await engine.check_token(created.token) is None
    assert (await engine.list_tokens()).tokens == (again,)
    assert await engine.has_tokens()


async def test_tokens_are_listed_page_by_page(engine: Engine) -> None:
    made = {(await engine.create_token(f"t{n}", scopes=["read"])).stored.token_id for n in range(5)}

    first = await engine.list_tokens(limit=2)
    second = await engine.list_tokens(limit=3, cursor=first.next_cursor)

    assert second.next_cursor is None
    assert [each.token_id for each in (*first.tokens, *second.tokens)] == sorted(made)


@pytest.mark.parametrize("cursor", ["", "zz", "0123", "0" * 17, "0123456789abcdeF", 5])
async def test_what_no_page_gave_is_no_cursor(engine: Engine, cursor: object) -> None:
    with pytest.raises(InvalidInput, match=r"^cursor: "):
        await call(engine, "list_tokens", cursor=cursor)


async def test_an_unknown_token_cannot_be_revoked(engine: Engine) -> None:
    with pytest.raises(NotFound, match="token not found: 0123"):
        await engine.revoke_token("0123")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"name": "", "scopes": ["read"]}, "name: "),
        ({"name": "a\x00b", "scopes": ["read"]}, "name: "),
        ({"name": "n", "scopes": []}, "scopes: must name at least one of read, submit"),
        ({"name": "n", "scopes": ["root"]}, r"scopes: must be among .* \(got 'root'\)"),
        ({"name": "n", "scopes": "read"}, "scopes: must be a list"),
        ({"name": "n", "scopes": ["read"], "namespace": ""}, "namespace: "),
        ({"name": "n", "scopes": ["read"], "expires_in_ms": 0}, "expires_in_ms: must be 1 to"),
        ({"name": "n", "scopes": ["read"], "expires_in_ms": "1h"}, "expires_in_ms: must be an"),
    ],
)
async def test_bad_requests_hand_out_nothing(
    engine: Engine, arguments: dict[str, object], problem: str
) -> None:
    with pytest.raises(FlowFabricError, match=problem) as caught:
        await call(engine, "create_token", **arguments)

    assert isinstance(caught.value, InvalidInput)
    assert (await engine.list_tokens()).tokens == ()
