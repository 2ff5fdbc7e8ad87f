"""Who may call the server: tokens, scopes, and limits on wrong tokens and on requests.

Each request comes from a `Caller`: the bearer of a token, or anyone if the server is open.
A caller confined to a namespace does not learn that anything else exists: what lies elsewhere
is "not found".
"""

import ipaddress
import re
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar
from urllib.parse import urlsplit

from litestar.di import NamedDependency
from msgspec import Struct

from flowfabric.batching import SharedReads
from flowfabric.core.api_tokens import ApiToken, Scope, split_token
from flowfabric.core.ids import ExecutionId, Namespace
from flowfabric.engine.engine import Engine
from flowfabric.errors import NotFound
from flowfabric.run import Endings
from flowfabric.server.confinement import Namespaces
from flowfabric.server.draining import Check, Waiting
from flowfabric.server.problems import Problem, Refused, refuse

T = TypeVar("T")
_UUID: Final = re.compile("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
TOKEN_CACHE_S: Final = 2.0
"""How long a process that has just seen a token may accept it after it is revoked. Streams it has
opened are checked as often."""
CACHED_MAX: Final = 10_000
FAILURES_MAX: Final = 20
"""Wrong tokens one address may present in a minute before it has to wait. After as many wrong
secrets of one token, that token is refused from there even with the right secret."""
GUESSING: Final = "too many wrong tokens from this address"
REQUESTS_MAX: Final = 60_000
"""Requests one token, or one address without any, may make in a minute."""
WINDOW_S: Final = 60.0


class Caller(Struct, frozen=True, kw_only=True):
    """Who makes a request, and what they may do."""

    name: str
    scopes: frozenset[Scope]
    namespace: Namespace | None = None
    token_id: str | None = None

    def check(self, scope: Scope) -> None:
        if scope not in self.scopes:
            raise refuse(
                403,
                "scope_missing",
                f"the token lacks the scope {scope}; ask for one that has it",
            )

    def namespace_for(self, named: str | None) -> str | None:
        """The namespace a request is about: the one it names, or the only one it may name."""
        if self.namespace is None:
            return named
        if named is not None and named != self.namespace:
            raise refuse(
                403, "namespace_denied", "the token is for another namespace", field="namespace"
            )
        return self.namespace

    def own_namespace(self, named: str | None) -> str:
        """The namespace of something whose name is unique only within one."""
        return self.namespace_for(named) or "default"


@dataclass(frozen=True)
class Session:
    """One request: its caller, and all that is needed to answer it."""

    caller: Caller
    engine: Engine
    """Confined to what the caller may see."""
    endings: Endings
    waiting: Waiting
    namespaces: Namespaces
    check: Check
    """Raises `Refused` once the caller's token is no longer good."""

    async def wait(self, work: Coroutine[object, object, T]) -> T:
        """Wait for `work`, until the server stops or the caller's token is no longer good."""
        return await self.waiting.run(work, self.check, self.caller.token_id)

    async def find(self, text: str) -> ExecutionId:
        """Resolve an id in any form; `NotFound` if the caller may not see that execution."""
        owner = self.caller.namespace
        namespace = owner or "default"
        if text.startswith("{"):
            # Unchanged: the reference's clients choose partitions themselves.
            execution_id = self.engine.check_execution_id(text)
        elif _UUID.fullmatch(text):
            # Members of flows lie where their flow does: the uuid alone does not say where.
            execution_id = await self.engine.resolve_execution_id(text, namespace=namespace)
        else:
            execution_id = self.engine.named_execution_id(text, namespace)
        if owner is None or (await self.namespaces.of([execution_id])).get(execution_id) == owner:
            return execution_id
        raise NotFound("execution", text)

    async def find_existing(self, text: str) -> ExecutionId:
        """The same for operations that would also answer if there is no such execution."""
        execution_id = await self.find(text)
        existing(await self.engine.read_execution_state(execution_id), "execution", text)
        return execution_id


def existing(found: T | None, kind: str, text: str) -> T:
    """What was found, or `NotFound`."""
    if found is None:
        raise NotFound(kind, text)
    return found


InSession = NamedDependency[Session]
"""How handlers get it."""

Anybody = Literal["never", "without_tokens", "always"]
"""When callers without a token may do everything."""
ANYBODY: Final = Caller(name="anybody", scopes=frozenset(Scope))
"""The caller of a server that has no tokens."""


class Tally:
    """Counts per name within a minute, for a limited number of names."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def count(self, name: str, now_s: float) -> None:
        since_s, count = self._current(name, now_s)
        self._counts[name] = (since_s, count + 1)
        self._counts.move_to_end(name)
        while len(self._counts) > CACHED_MAX:
            self._counts.popitem(last=False)

    def retry_after_s(self, name: str, now_s: float) -> int | None:
        """How long to wait if the limit is reached; None if it is not."""
        since_s, count = self._current(name, now_s)
        return None if count < self._limit else max(1, round(since_s + WINDOW_S - now_s))

    def _current(self, name: str, now_s: float) -> tuple[float, int]:
        since_s, count = self._counts.get(name, (now_s, 0))
        return (now_s, 0) if now_s - since_s >= WINDOW_S else (since_s, count)


class Access:
    """Checks the tokens that callers present."""

    def __init__(
        self,
        engine: Engine,
        *,
        anybody: Anybody,
        requests_max: int = REQUESTS_MAX,
        origins: Sequence[str] = (),
    ) -> None:
        self._engine = engine
        self._anybody = anybody
        self._origins = frozenset(origins)
        self._open_until_s = 0.0
        # Concurrent requests that find the cache out of date share one lookup.
        self._lookups = SharedReads(engine.check_token)
        self._any_tokens = SharedReads(self._has_tokens)
        self._checked: OrderedDict[str, tuple[float, ApiToken]] = OrderedDict()
        self._failures = Tally(FAILURES_MAX)
        self._requests = Tally(requests_max)

    async def caller(self, authorization: str | None, address: str) -> Caller:
        """Who presents this header, from this address."""
        now_s = time.monotonic()
        if authorization is None and await self._takes_anybody(now_s):
            self._count(address, now_s)
            return ANYBODY
        presented = _presented(authorization) or ""
        token_id, _ = split_token(presented) or ("", "")
        # Count per token too, so that guessing locks out no one else.
        guessed = f"{address} {token_id}"
        _refuse_beyond(self._failures, guessed, now_s, GUESSING)
        token = await self._token(presented, now_s) if token_id else None
        if token is None:
            _refuse_beyond(self._failures, address, now_s, GUESSING)
            self._failures.count(guessed, now_s)
            self._failures.count(address, now_s)
            raise unauthorized()
        self._count(token.token_id, now_s)
        return Caller(
            name=token.name,
            scopes=token.allowed(),
            namespace=token.namespace,
            token_id=token.token_id,
        )

    async def check(self, authorization: str | None) -> None:
        """Raise unless what was presented is still good."""
        now_s = time.monotonic()
        presented = _presented(authorization)
        if presented is None:
            known = await self._takes_anybody(now_s)
        else:
            known = await self._token(presented, now_s) is not None
        if not known:
            raise unauthorized()

    def check_page(self, host: str, origin: str | None) -> None:
        """Raise if a caller without a token may be a web page of another origin.

        A page cannot send a token it does not have. Where none is needed, it could make a browser
        on this machine send requests, and read the answers by pointing a host name of its own here.
        """
        if origin is not None and not self._origins & {origin, "*"}:
            _, _, asks = origin.partition("://")
            if asks != host:
                message = f"web pages of {origin} may not ask; see --cors-origin"
                raise refuse(403, "origin_denied", message, field="Origin")
        if host and self._anybody == "without_tokens" and not is_local(host):
            message = f"without tokens it answers for this machine alone, not for {host}; make one"
            raise refuse(403, "host_denied", message, field="Host")

    async def _takes_anybody(self, now_s: float) -> bool:
        if self._anybody != "without_tokens":
            return self._anybody == "always"
        if now_s >= self._open_until_s and not await self._any_tokens.share(None):
            self._open_until_s = now_s + TOKEN_CACHE_S
        return now_s < self._open_until_s

    async def _has_tokens(self, _every: None) -> bool:
        return await self._engine.has_tokens()

    def _count(self, name: str, now_s: float) -> None:
        _refuse_beyond(self._requests, name, now_s, "too many requests in a minute")
        self._requests.count(name, now_s)

    async def _token(self, presented: str, now_s: float) -> ApiToken | None:
        until_s, known = self._checked.get(presented, (0.0, None))
        if now_s < until_s:
            return known
        token = await self._lookups.share(presented)
        if token is not None:
            self._checked[presented] = (now_s + TOKEN_CACHE_S, token)
            while len(self._checked) > CACHED_MAX:
                self._checked.popitem(last=False)
        return token


def is_local(host: str) -> bool:
    """Whether a host name or address, with or without a port, is reachable from here only."""
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _presented(authorization: str | None) -> str | None:
    if authorization is None or not authorization.startswith("Bearer "):
        return None
    return authorization.removeprefix("Bearer ")


def unauthorized() -> Refused:
    why = "the token is missing, wrong, revoked or expired; send 'Bearer <token>'"
    message = f"missing or invalid Authorization header: {why}"
    problem = Problem(error=message, code="unauthorized")
    return Refused(401, problem, {"WWW-Authenticate": "Bearer"})


def _refuse_beyond(window: Tally, name: str, now_s: float, what: str) -> None:
    wait_s = window.retry_after_s(name, now_s)
    if wait_s is not None:
        problem = Problem(
            error=f"{what}; retry after {wait_s} s",
            code="rate_limit_exceeded",
            kind="rate_limit_exceeded",
            retryable=True,
        )
        raise Refused(429, problem, {"Retry-After": str(wait_s)})
