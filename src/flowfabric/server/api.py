"""The application: routes, and what every request passes on its way to them."""

import asyncio
import inspect
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import unquote

from litestar import Litestar, types
from litestar.config.cors import CORSConfig
from litestar.di import Provide
from litestar.enums import HttpMethod, ScopeType
from litestar.exceptions import HTTPException
from litestar.middleware import ASGIMiddleware
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Components, SecurityScheme
from litestar.routes import HTTPRoute
from litestar.types import ASGIApp, Message, Receive, ReceiveMessage, Scope, Send
from msgspec import Struct

from flowfabric.core.checks import visible
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import CreateResult
from flowfabric.engine.engine import Engine
from flowfabric.errors import FlowFabricError, InvalidInput, Unavailable
from flowfabric.run import Endings
from flowfabric.server import (
    admin,
    budgets,
    executions,
    flows,
    limits,
    operations,
    schedules,
    signals,
    streams,
    workers,
)
from flowfabric.server.access import (
    ANYBODY,
    REQUESTS_MAX,
    Access,
    Anybody,
    InSession,
    Session,
)
from flowfabric.server.confinement import ConfinedEngine, Namespaces
from flowfabric.server.docs_page import PLACE, DocumentOfRoutes, PageOfRoutes
from flowfabric.server.draining import Waiting, stopping
from flowfabric.server.problems import (
    AnyRequest,
    JsonRequest,
    Problem,
    Refused,
    check_is_json,
    on_bug,
    on_engine_error,
    on_http_error,
    on_refusal,
    path_of,
    refuse,
)
from flowfabric.server.routing import QUERIES, SCOPE, Routes, check_queries, check_scope
from flowfabric.submission import Submissions
from flowfabric.version import __version__

access_log = logging.getLogger("flowfabric.access")

BODY_LIMIT: Final = 65_536
"""Bytes of a body, unless its route says otherwise."""
BODY_S: Final = 20.0
"""How long its body may take to arrive."""
HEADER_BYTES_MAX: Final = 32_768
"""Bytes of all headers of a request together."""
PROBED_BY_HEAD: Final = ("/healthz", "/livez", "/readyz")
"""Paths that load balancers probe with HEAD."""
HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    ),
)


class ServerConfig(Struct, frozen=True, kw_only=True):
    """How the server answers."""

    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may send requests from a browser; none by default."""
    anybody: Anybody = "never"
    """Whether callers without a token may do everything."""
    waiting_max: int = 1_000
    """Requests of one process that may wait for something to happen, at once."""
    streams_max: int = 10_000
    """Streams of server-sent events that one process may have open, in addition."""
    requests_max: int = REQUESTS_MAX
    """Requests that one token, or one address without any, may make in a minute."""


CLOSED: Final = ServerConfig()


async def add_headers(message: Message, scope: Scope) -> None:
    """Give every answer its request id and the security headers for browsers."""
    if message["type"] == "http.response.start":
        mark = (b"x-request-id", request_id(scope).encode())
        message["headers"] = [*message["headers"], mark, *HEADERS]
        if scope.get("method") == "OPTIONS":
            message["headers"] = _with_allow(message["headers"], scope)


def _with_allow(headers: Iterable[tuple[bytes, bytes]], scope: Scope) -> list[tuple[bytes, bytes]]:
    """List the methods of every handler of a path: Litestar names only those of the first."""
    allowed = sorted(
        {
            method
            for route in scope["litestar_app"].routes
            if isinstance(route, HTTPRoute) and route.path_format == scope.get("path_template")
            for method in route.methods
        }
    )
    others = [each for each in headers if each[0].lower() != b"allow"]
    return [*others, (b"allow", ", ".join(allowed).encode())] if allowed else others


def request_id(scope: Scope) -> str:
    """The id of the request in the log: its sender's, if that is safe to show."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and value.isalnum() and len(value) <= 64:
            return value.decode()
    made = scope["state"].setdefault("request_id", uuid.uuid4().hex)
    return str(made)


class AccessLog(ASGIMiddleware):
    """Logs a line for each request, without its query: people put secrets there."""

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        started_s = time.perf_counter()
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await next_app(scope, receive, sending)
        finally:
            # The caller, if known: token names are not secret.
            client, caller = scope.get("client"), scope["state"].get("caller", "-")
            access_log.info(
                "%s %s %s %d %.1f ms, %s at %s",
                request_id(scope),
                scope.get("method", ""),
                path_of(scope),
                status,
                (time.perf_counter() - started_s) * 1_000,
                visible(str(caller)),
                client[0] if client else "-",
            )


class Bodies(ASGIMiddleware):
    """Refuses bodies that are not JSON or larger than their route accepts, even if its handler
    reads none."""

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        for name, value in scope["path_params"].items():
            if isinstance(value, str):
                scope["path_params"][name] = value.replace(SLASH, "/")
        limit = int(scope["route_handler"].opt.get("body_limit", BODY_LIMIT))
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES_MAX:
            message = f"the headers are larger than {HEADER_BYTES_MAX:,} bytes together"
            raise refuse(431, "headers_too_large", message)
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(scope, limit)
        if "data" in scope["route_handler"].parsed_fn_signature.parameters:
            check_is_json(scope["headers"])
        taken, complete, until_s = 0, False, asyncio.get_running_loop().time() + BODY_S

        async def receiving() -> ReceiveMessage:
            nonlocal taken, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(until_s):
                    message = await receive()
            except TimeoutError:
                reason = f"the body did not come within {BODY_S:.0f} s"
                raise refuse(408, "request_timeout", reason) from None
            if message["type"] == "http.request":
                taken += len(message["body"])
                complete = not message["more_body"]
                if taken > limit:
                    raise _too_large(scope, limit)
            return message

        await next_app(scope, receiving, send)


def _too_large(scope: Scope, limit: int) -> Refused:
    problem = Problem(
        error="payload_too_large",
        code="payload_too_large",
        limit_bytes=limit,
        route=scope["path_template"],
    )
    return Refused(413, problem)


SLASH: Final = "\ue000"
"""Stands for a slash within an id while the path is split; no id contains it."""


class Application(Litestar):
    """Splits paths at real slashes, not at those sent as %2F, and answers load balancers that
    probe with HEAD."""

    async def __call__(
        self,
        scope: Scope | types.LifeSpanScope,
        receive: Receive | types.LifeSpanReceive,
        send: Send | types.LifeSpanSend,
    ) -> None:
        if scope["type"] == "lifespan":
            return await super().__call__(scope, receive, send)
        by_head = scope["path"].endswith(PROBED_BY_HEAD)
        if scope["type"] == ScopeType.HTTP and scope["method"] == HttpMethod.HEAD and by_head:
            # Change a copy: the server must still see HEAD in the original to omit the body.
            scope = scope.copy()
            scope["method"] = HttpMethod.GET
        if b"%2f" in scope["raw_path"].lower():
            marked = re.sub("%2f", SLASH, scope["raw_path"].decode("latin-1"), flags=re.IGNORECASE)
            whole, path = unquote(marked), scope["path"]
            # If another application has removed a prefix, the path is the end of it.
            if whole.replace(SLASH, "/").endswith(path):
                scope["path"] = whole[len(whole) - len(path) :]
        return await super().__call__(scope, receive, send)


health = Routes("/", "health")


class Health(Struct):
    status: str


@health.get(
    ["/healthz", "/readyz"],
    None,
    "Whether requests can be served",
    opt={"open": True},
    security=[{}],
)
async def ready(session: InSession) -> Health:
    if session.waiting.is_draining:
        raise stopping()
    await session.engine.ping()
    return Health(status="ok")


@health.get("/livez", None, "Whether the process is alive", security=[{}])
async def alive() -> Health:
    return Health(status="ok")


class GroupingEngine(Engine):
    """Commits executions that many callers create at the same time together."""

    def __init__(self, engine: Engine) -> None:
        vars(self).update(vars(engine))
        self._submissions = Submissions(engine)

    async def create_execution(self, request: NewExecution) -> CreateResult:
        """Each caller gets the answer they would get alone."""
        return await self._submissions.submit(self.check_request(request))

    async def settle(self) -> None:
        """Wait until every caller has been answered."""
        await self._submissions.close()


@dataclass(frozen=True)
class ServerState:
    """What all requests share, from the start of the application to its end."""

    engine: Engine
    endings: Endings
    waiting: Waiting
    namespaces: Namespaces
    access: Access


def create_app(
    connect: Callable[[], AbstractAsyncContextManager[Engine]],
    config: ServerConfig = CLOSED,
) -> Litestar:
    """The server as an ASGI application; `connect` opens its engine when it starts.

    `connect` is a function without arguments that returns an async context manager of the engine,
    `config` says whom it answers, and how much at once. If it is mounted in another application,
    that application has to enter its `lifespan()`.
    """
    _check_opens(connect)

    @asynccontextmanager
    async def opened(app: Litestar) -> AsyncIterator[None]:
        async with _engine_of(connect) as connected:
            engine, endings = GroupingEngine(connected), Endings(connected)
            access = Access(
                engine,
                anybody=config.anybody,
                requests_max=config.requests_max,
                origins=config.cors_origins,
            )
            waiting = Waiting(config.waiting_max, config.streams_max)
            app.state.shared = ServerState(engine, endings, waiting, Namespaces(engine), access)
            try:
                yield
            finally:
                await engine.settle()
                await endings.close()

    return Application(
        route_handlers=[
            each.router()
            for each in (
                executions.routes,
                signals.routes,
                flows.routes,
                streams.routes,
                streams.log,
                admin.routes,
                budgets.routes,
                limits.routes,
                workers.routes,
                schedules.routes,
                operations.routes,
                health,
            )
        ],
        lifespan=[opened],
        middleware=[AccessLog(), Bodies()],
        before_send=[add_headers],
        dependencies={"session": Provide(provide_session)},
        exception_handlers={
            FlowFabricError: on_engine_error,
            Refused: on_refusal,
            HTTPException: on_http_error,
            Exception: on_bug,
        },
        cors_config=_cors(config),
        openapi_config=_description(),
        request_class=JsonRequest,
        request_max_body_size=None,
        logging_config=None,
    )


def _description() -> OpenAPIConfig:
    tokens = SecurityScheme(type="http", scheme="bearer")
    return OpenAPIConfig(
        title="FlowFabric",
        version=__version__,
        path=PLACE,
        render_plugins=[PageOfRoutes(), DocumentOfRoutes()],
        components=Components(security_schemes={"token": tokens}),
        security=[{"token": []}],
    )


def _check_opens(connect: Callable[..., object]) -> None:
    try:
        inspect.signature(connect).bind()
    except TypeError:
        raise _not_opening(connect) from None


@asynccontextmanager
async def _engine_of(connect: Callable[[], object]) -> AsyncIterator[Engine]:
    opening = connect()
    if not isinstance(opening, AbstractAsyncContextManager):
        raise _not_opening(opening)
    async with opening as connected:
        if not isinstance(connected, Engine):
            raise _not_opening(connected)
        yield connected


def _not_opening(found: object) -> InvalidInput:
    if isinstance(found, Coroutine):
        found.close()
    # Show only its type: a URL may contain a password.
    message = (
        "must be a function without arguments that returns an async context manager of an engine"
    )
    return InvalidInput("connect", f"{message}, not {type(found).__name__}; see docs/server.md")


def _cors(config: ServerConfig) -> CORSConfig | None:
    if not config.cors_origins:
        return None
    return CORSConfig(
        allow_origins=list(config.cors_origins),
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["content-type", "authorization", "last-event-id"],
    )


async def provide_session(request: AnyRequest) -> Session:
    """Identify the caller, and refuse those without a valid token."""
    shared = request.app.state.get("shared")
    if not isinstance(shared, ServerState):
        # Frameworks do not run the lifespan of mounted applications.
        raise Unavailable(
            "server", "it was not started; enter `server.lifespan()` of what you mount"
        )
    caller, access = ANYBODY, shared.access
    presented = request.headers.get("authorization")
    if len(request.headers.getall("authorization", [])) > 1:
        # A proxy in between may have read the other one.
        raise refuse(400, "invalid_input", "there are several", field="Authorization")
    if not request.route_handler.opt.get("open"):
        address = request.client.host if request.client else "unknown"
        caller = await access.caller(presented, address)
        if caller is ANYBODY:
            access.check_page(request.headers.get("host", ""), request.headers.get("origin"))
    request.scope["state"]["caller"] = caller.name
    check_scope(request.route_handler.opt.get(SCOPE), caller)
    check_queries(request.route_handler.opt.get(QUERIES), request.query_params)
    engine = shared.engine
    if caller.namespace is not None:
        engine = ConfinedEngine(engine, caller.namespace, shared.namespaces)
    return Session(
        caller,
        engine,
        shared.endings,
        shared.waiting,
        shared.namespaces,
        partial(access.check, presented),
    )
