"""Signals: messages from outside to an execution that waits for them.

    run = await app.submit(deploy, "v2")
    await run.signal("approved", {"tag": "v2.1"})       # with database access, no token is needed
    await app.signals.deliver(token, "approved", source="Ada")    # everybody else needs one

A token is good for one waitpoint of one execution. It is never stored and never
shown: `reveal` is the only way to its text.
"""

import base64
import binascii
import hmac
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Generic, Literal, Self, TypedDict, TypeVar, Unpack

from flowfabric.core import checks, conditions
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.ids import parse_execution_id, parse_uuid
from flowfabric.core.records import WaitpointState
from flowfabric.core.signals import SignalOptions, SignalResult, not_awaited
from flowfabric.core.waitpoints import INVALID, MISSING, WaitpointToken, check_token
from flowfabric.engine.engine import Engine
from flowfabric.engine.waitpoints import Inbox
from flowfabric.errors import (
    FlowFabricError,
    InvalidInput,
    InvalidToken,
    MissingToken,
    NotFound,
    WaitpointClosed,
)
from flowfabric.json_values import encode_value
from flowfabric.outages import everything_within
from flowfabric.parts import AppPart, check_execution_in

T_co = TypeVar("T_co", covariant=True)

SIGNAL_NAME_BYTES_MAX: Final = 200
TOKEN_PREFIX: Final = "fft_"
TOKEN_TEXT_MAX: Final = 1_024
SIGNAL_PATIENCE_S: Final = 10.0
"""How long sending a signal may take, including the wait for a connection."""
NO_TOKEN: Final = "; a token exists from when it waits, or from `ctx.waitpoint`, until it goes on"

EXTERNAL: Final = "external"
OPERATOR: Final = "operator"

Distinct = Literal["signals", "sources", "waitpoints"]

_KINDS: Final[dict[str, conditions.CountKind]] = {
    "signals": conditions.CountKind.DISTINCT_SIGNALS,
    "sources": conditions.CountKind.DISTINCT_SOURCES,
    "waitpoints": conditions.CountKind.DISTINCT_WAITPOINTS,
}


@dataclass(frozen=True)
class Signal(Generic[T_co]):
    """A signal, as a handler receives it."""

    name: str
    payload: T_co
    source: str
    """The sender's name, as the sender gave it."""
    source_type: str
    """`external` with a token, `operator` without one."""
    signal_id: str
    received_at: datetime


# What to wait for ------------------------------------------------------------------


def check_name(name: object) -> str:
    return checks.check_name("name", name, bytes_max=SIGNAL_NAME_BYTES_MAX)


def all_of(*members: str | conditions.Condition) -> conditions.AllConditions:
    """All of these: names of signals, or conditions."""
    if not members:
        raise InvalidInput("all_of", "needs at least one name or condition")
    return conditions.AllConditions(tuple(condition_of(member) for member in members))


def count(n: int, *names: str, distinct: Distinct = "signals") -> conditions.Count:
    """This many signals, under any of the names.

    `distinct` says which count separately: all signals, those from different sources, or those
    to different waitpoints.
    """
    if distinct not in _KINDS:
        raise InvalidInput("distinct", f"must be one of {', '.join(_KINDS)}", distinct)
    if not names:
        raise InvalidInput("count", "needs the name of at least one signal")
    checks.check_int("count", n, 1, conditions.SIGNAL_COUNT_MAX)
    checked = tuple(check_name(name) for name in names)
    matcher: conditions.Matcher = (
        conditions.ByName(checked[0]) if len(checked) == 1 else conditions.Wildcard()
    )
    return conditions.Count(n, _KINDS[distinct], checked, matcher)


def any_of(*names: str) -> conditions.Count:
    """The first signal that arrives under any of these names."""
    return count(1, *names)


def condition_of(*members: object) -> conditions.Condition:
    """Combine names of signals and conditions into one condition."""
    if len(members) == 1:
        (only,) = members
        if isinstance(only, str):
            return conditions.Single(check_name(only), conditions.ByName(only))
        if not isinstance(only, conditions.Condition):
            raise InvalidInput("wait_for", "takes signal names and conditions", only)
        return conditions.check_condition(only)
    return conditions.check_condition(
        conditions.AllConditions(tuple(condition_of(member) for member in members))
    )


# Tokens ----------------------------------------------------------------------------


class SignalToken:
    """The right to send signals to one waitpoint. Hand out what `reveal` returns."""

    __slots__ = ("_token", "execution_id", "waitpoint_id")

    def __init__(self, execution_id: str, waitpoint_id: str, token: WaitpointToken) -> None:
        self.execution_id = execution_id
        self.waitpoint_id = waitpoint_id
        self._token = token

    @classmethod
    def parse(cls, value: object) -> Self:
        """Read a token's text. The refusal of an invalid token does not repeat it."""
        if isinstance(value, cls):
            return value
        if value is None or value == "":
            raise MissingToken(MISSING)
        if not (
            isinstance(value, str)
            and value.startswith(TOKEN_PREFIX)
            and len(value) <= TOKEN_TEXT_MAX
        ):
            raise InvalidToken(INVALID)
        try:
            encoded = value.removeprefix(TOKEN_PREFIX)
            padding = "=" * (-len(encoded) % 4)
            text = base64.b64decode(encoded + padding, altchars=b"-_", validate=True).decode()
            execution_id, waitpoint_id, token = text.split(" ", 2)
            parsed = cls(
                parse_execution_id(execution_id),
                parse_uuid("waitpoint_id", waitpoint_id),
                check_token(token),
            )
            # Base64 and ids can be spelled in several ways; a token has one spelling.
            if hmac.compare_digest(parsed.reveal().encode(), value.encode()):
                return parsed
            raise InvalidToken(INVALID)
        except (binascii.Error, ValueError, FlowFabricError):
            raise InvalidToken(INVALID) from None

    @property
    def secret(self) -> WaitpointToken:
        return self._token

    def reveal(self) -> str:
        """The token as text, safe in links. Anyone who has it can send the signal."""
        text = f"{self.execution_id} {self.waitpoint_id} {self._token.reveal()}"
        return TOKEN_PREFIX + base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    def __repr__(self) -> str:
        return f"<signal token for waitpoint {self.waitpoint_id}>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SignalToken):
            return NotImplemented
        return (
            self.execution_id == other.execution_id
            and self.waitpoint_id == other.waitpoint_id
            and self._token == other._token
        )

    def __hash__(self) -> int:
        return hash((self.execution_id, self.waitpoint_id))

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a signal token is not pickled; reveal it where it is needed")


# Sending ---------------------------------------------------------------------------


class Sending(TypedDict, total=False):
    """What a signal may say beside its name and payload."""

    source: str
    idempotency_key: str | None
    namespace: str | None


async def deliver(
    engine: Engine,
    token: SignalToken | str,
    name: str,
    payload: object = None,
    *,
    execution_id: str | None = None,
    **sending: Unpack[Sending],
) -> SignalResult:
    """Send with a token; if `execution_id` is given, only to that execution."""
    parsed = SignalToken.parse(token)
    check_name(name)
    if execution_id not in (None, parsed.execution_id):
        raise InvalidToken(INVALID)
    with everything_within(SIGNAL_PATIENCE_S):
        return await engine.deliver_signal(
            parsed.execution_id,
            parsed.waitpoint_id,
            waitpoint_token=parsed.secret,
            signal_name=name,
            **_options(EXTERNAL, payload, sending),
        )


async def send(
    engine: Engine,
    execution_id: str,
    name: str,
    payload: object = None,
    *,
    token: SignalToken | str | None = None,
    keep: bool = True,
    called: str | None = None,
    **sending: Unpack[Sending],
) -> SignalResult:
    """Send to an execution: with a token, or without one as an operator.

    `NotFound` names a missing execution by the id it was `called` by.
    """
    if token is not None:
        return await deliver(engine, token, name, payload, execution_id=execution_id, **sending)
    check_name(name)
    options = _options(OPERATOR, payload, sending)
    with everything_within(SIGNAL_PATIENCE_S):
        try:
            return await engine.deliver_operator_signal(
                execution_id, name, signal_name=name, keep=keep, **options
            )
        except NotFound as error:
            raise NotFound(error.entity, called or execution_id) from None


def _options(source_type: str, payload: object, sending: Sending) -> SignalOptions:
    return {
        "payload": None if payload is None else encode_value("payload", payload),
        "source_type": source_type,
        "source_identity": sending.get("source", ""),
        "idempotency_key": checks.check_key(sending.get("idempotency_key")),
        "namespace": sending.get("namespace"),
    }


class Signals(AppPart):
    """Sends signals to an app's executions, and lists what they wait for."""

    async def deliver(
        self,
        token: SignalToken | str,
        name: str,
        payload: object = None,
        *,
        source: str = "",
        idempotency_key: str | None = None,
        connection: object = None,
    ) -> SignalResult:
        """Send a signal to the waitpoint that the token was made for.

        For code that faces the outside: the token alone decides what the sender may reach.
        A repeat with the same `idempotency_key` returns the signal that was accepted first. With
        `connection=` the signal is sent if and when that connection's transaction commits.
        """
        engine = await self._engine_on(connection)
        return await deliver(
            engine,
            token,
            name,
            payload,
            source=source,
            idempotency_key=idempotency_key,
            namespace=self._namespace(),
        )

    async def send(
        self,
        execution_id: str,
        name: str,
        payload: object = None,
        *,
        source: str = "",
        idempotency_key: str | None = None,
        keep: bool = True,
        connection: object = None,
    ) -> SignalResult:
        """Send a signal as an operator, without a token; see `Run.signal`.

        `execution_id` is the full id, the uuid or your own id, as for `App.run`.
        """
        engine, namespace = await self._engine_on(connection), self._namespace()
        return await send(
            engine,
            engine.named_execution_id(execution_id, namespace),
            name,
            payload,
            source=source,
            idempotency_key=idempotency_key,
            namespace=namespace,
            keep=keep,
            called=execution_id,
        )

    async def token(self, execution_id: str, name: str) -> SignalToken:
        """The token of an execution's open waitpoint `name`, to hand out."""
        engine, namespace = await self._engine(), self._namespace()
        check_name(name)
        found_id = engine.named_execution_id(execution_id, namespace)
        await check_execution_in(namespace, engine, found_id, called=execution_id)
        # More than a page is impossible: an execution has fewer waitpoints than that.
        page = await engine.list_pending_waitpoints(found_id, limit=PAGE_MAX)
        fitting = [each for each in page.waitpoints if each.waitpoint_key == name]
        # Waitpoints of the current wait come before those made for later.
        fitting.sort(key=lambda each: (each.state is not WaitpointState.ACTIVE, each.created_at_ms))
        for each in fitting:
            token = await engine.read_waitpoint_token(found_id, each.waitpoint_id)
            if token is not None:
                return SignalToken(each.execution_id, each.waitpoint_id, token)
        if fitting:
            raise WaitpointClosed(
                f"{await engine.called(found_id)}: the token for {name!r} has expired; whoever may"
                " send the signal without a token still can"
            )
        keys = [each.waitpoint_key for each in page.waitpoints]
        raise not_awaited(await engine.called(found_id), name, keys, NO_TOKEN)

    async def pending(self, *, cursor: str | None = None, limit: int = 100) -> Inbox:
        """The inbox: what suspended executions wait for, longest first, without tokens.

        `limit` counts executions; `next_cursor` continues.
        """
        engine = await self._engine()
        return await engine.list_inbox(namespace=self._namespace(), cursor=cursor, limit=limit)
