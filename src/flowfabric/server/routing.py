"""Routes as this server declares them: each names its scope, and may answer with any problem."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Final, TypedDict, TypeVar, Unpack

import litestar
import msgspec
from litestar import Response, Router
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import ResponseSpec
from litestar.openapi.spec import Operation
from litestar.types import Serializer
from msgspec import Struct

from flowfabric.core.tokens import Scope
from flowfabric.server import wire
from flowfabric.server.access import Session
from flowfabric.server.problems import Problem

T = TypeVar("T")


class JsonAnswer(Response[T]):
    """An answer in JSON, even if it is only a string."""

    def __init__(
        self, content: T, *, status_code: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(
            content, status_code=status_code, headers=headers, media_type="application/json"
        )

    def render(self, content: object, media_type: object, enc_hook: Serializer = str) -> bytes:
        return msgspec.json.encode(content)


def answer(result: Struct, *, new: bool = False) -> JsonAnswer[wire.Tagged]:
    """The result of an operation under its name; 201 if it has created something."""
    return JsonAnswer(wire.tagged(result), status_code=201 if new else 200)


PROBLEMS: Final = {
    status: ResponseSpec(Problem, description=description, generate_examples=False)
    for status, description in {
        400: "The request is wrong.",
        401: "No token, or an invalid token.",
        403: "The token does not allow this.",
        404: "There is no such thing.",
        408: "The body took too long.",
        409: "The state does not allow this, or another caller was first.",
        413: "The body is too large.",
        415: "The body is not JSON.",
        422: "The JSON has another shape.",
        431: "The headers are too large.",
        429: "Too much at once; see `Retry-After`.",
        500: "Something broke here.",
        503: "The database is away; see `Retry-After`.",
        504: "It took too long.",
    }.items()
}


def also(status: int, description: str, kind: type | None = None) -> dict[int, ResponseSpec]:
    """Another success beside the usual one, and all problems."""
    spec = ResponseSpec(kind, description=description, generate_examples=False)
    return {**PROBLEMS, status: spec}


class Successes(TypedDict, total=False):
    status_code: int
    """200 unless given, whatever the method."""
    responses: Mapping[int, ResponseSpec]


class RouteOptions(Successes, total=False):
    """What few routes need beside path, scope and summary."""

    media_type: str
    opt: Mapping[str, object]
    security: Sequence[dict[str, list[str]]]
    operation_class: type[Operation]


CREATES: Final[Successes] = {
    "status_code": 201,
    "responses": also(200, "It was there already.", dict),
}
Method = Callable[..., HTTPRouteHandler]
Handler = Callable[..., Awaitable[object]]


class Routes:
    """The routes of a noun. Decorating a handler adds it.

    Every route says which scope its callers need; `None` leaves that to the handler.
    """

    def __init__(self, path: str, tag: str) -> None:
        self._path, self._tag = path, tag
        self._handlers: list[HTTPRouteHandler] = []
        self.get = partial(self._add, litestar.get)
        self.post = partial(self._add, litestar.post)
        self.put = partial(self._add, litestar.put)
        self.patch = partial(self._add, litestar.patch)
        self.delete = partial(self._add, litestar.delete)

    def router(self) -> Router:
        return Router(self._path, tags=[self._tag], route_handlers=self._handlers)

    def _add(
        self,
        method: Method,
        path: str | list[str],
        scope: Scope | None,
        summary: str,
        **options: Unpack[RouteOptions],
    ) -> Callable[[Handler], HTTPRouteHandler]:
        def declare(handler: Handler) -> HTTPRouteHandler:
            usual: Successes = {"status_code": 200, "responses": PROBLEMS}
            declared = method(path, summary=summary, **{**usual, **options})
            self._handlers.append(declared(handler if scope is None else _scoped(handler, scope)))
            return self._handlers[-1]

        return declare


def _scoped(handler: Handler, scope: Scope) -> Handler:
    """The handler for callers that have the scope. Bodies are read before it is checked."""

    @wraps(handler)
    async def checked(*, session: Session, **given: object) -> object:
        session.caller.check(scope)
        return await handler(session=session, **given)

    return checked
