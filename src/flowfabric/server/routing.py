"""Routes as this server declares them: each names its scope, and may answer with any problem.

Our own routes refuse parameters that they do not have: a mistyped filter would list everything.
Those of the reference ignore them, as the reference does, and so does its list of one partition.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, TypedDict, TypeVar, Unpack, get_args

import litestar
import msgspec
from litestar import Response, Router
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import ResponseSpec
from litestar.openapi.spec import Operation
from litestar.params import QueryParameter
from litestar.types import Serializer
from msgspec import Struct

from flowfabric.core.api_tokens import Scope
from flowfabric.core.checks import visible
from flowfabric.server import wire
from flowfabric.server.access import Caller
from flowfabric.server.problems import Problem, refuse

T = TypeVar("T")

QUERIES: Final = "queries"
"""The option of a route that names its parameters; without it, others are ignored."""
SCOPE: Final = "needs"
"""The option of a route that says which scope its callers need; checked before its body."""
_EXECUTION: Final = "/v1/executions/{}"
_FLOW: Final = "/v1/flows/{}"
_BUDGET: Final = "/v1/budgets/{}"
REFERENCE: Final = frozenset(
    {
        "post /v1/executions",
        *(
            f"get {_EXECUTION}{rest}"
            for rest in (
                "",
                "/state",
                "/pending-waitpoints",
                "/waitpoints/{}/token",
                "/result",
                "/attempts/{}/stream",
                "/attempts/{}/stream/tail",
            )
        ),
        *(
            f"post {_EXECUTION}/{verb}"
            for verb in ("cancel", "signal", "replay", "revoke-lease", "reclaim")
        ),
        f"put {_EXECUTION}/priority",
        "post /v1/workers/{}/claim",
        "post /v1/flows",
        *(f"post {_FLOW}/{rest}" for rest in ("members", "cancel", "edges", "edges/apply")),
        "post /v1/budgets",
        f"get {_BUDGET}",
        *(f"post {_BUDGET}/{rest}" for rest in ("usage", "reset")),
        "post /v1/quotas",
        "post /v1/admin/rotate-waitpoint-secret",
    }
)
"""The routes that the reference has, too."""


MIXED: Final = {"get /v1/executions": "partition"}
"""Our own routes that follow the reference once a request has this parameter."""


class Queries(Struct, frozen=True):
    """The parameters that one of our own routes takes."""

    names: tuple[str, ...]
    reference: str | None = None
    """A request with this one follows the reference, which ignores unknown parameters."""


def check_queries(known: object, given: Collection[str]) -> None:
    """Refuse parameters that one of our own routes does not take."""
    if not isinstance(known, Queries) or known.reference in given:
        return
    for name in given:
        if name not in known.names:
            there_are = f"there are {', '.join(known.names)}" if known.names else "there are none"
            message = f"{visible(name)}: is not a parameter; {there_are}"
            raise refuse(400, "invalid_input", message, field=visible(name))


def check_scope(needed: object, caller: Caller) -> None:
    """Refuse callers without the scope that a route needs, if it needs one."""
    if isinstance(needed, Scope):
        caller.check(needed)


def _queries(handler: Callable[..., object]) -> tuple[str, ...]:
    """The names of a handler's parameters in the query."""
    parameters = inspect.signature(handler, eval_str=True).parameters
    return tuple(
        each.name or name
        for name, parameter in parameters.items()
        for each in get_args(parameter.annotation)[1:]
        if isinstance(each, QueryParameter)
    )


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


def created_or_not(new: bool, **ids: object) -> JsonAnswer[wire.Tagged]:
    """What a request to create something answers, whether or not it existed before."""
    result: wire.Tagged = {"Created" if new else "AlreadySatisfied": ids}
    return JsonAnswer(result, status_code=201 if new else 200)


MEDIUM_BODY: Final = {"body_limit": 262_144}
LARGE_BODY: Final = {"body_limit": 1_048_576}
BATCH_BODY: Final = {"body_limit": 16 * 1_048_576}
NO_STORE: Final = {"Cache-Control": "no-store"}
PROBLEMS: Final = {
    status: ResponseSpec(Problem, description=description, generate_examples=False)
    for status, description in {
        400: "The request is wrong.",
        401: "No token, or an invalid token.",
        403: "The token does not allow this.",
        404: "What it names does not exist.",
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
    """Another successful status, and all problems."""
    spec = ResponseSpec(kind, description=description, generate_examples=False)
    return {**PROBLEMS, status: spec}


class Successes(TypedDict, total=False):
    status_code: int
    """200 unless given, whatever the method."""
    responses: Mapping[int, ResponseSpec]


class RouteOptions(Successes, total=False):
    """Options that few routes need."""

    media_type: str
    opt: Mapping[str, object]
    security: Sequence[dict[str, list[str]]]
    operation_class: type[Operation]


CREATES: Final[Successes] = {
    "status_code": 201,
    "responses": also(200, "It existed already.", dict),
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
            opt = {**options.pop("opt", {}), SCOPE: scope}
            label = self._label(method, path)
            if label not in REFERENCE:
                opt[QUERIES] = Queries(_queries(handler), MIXED.get(label))
            declared = method(path, summary=summary, opt=opt, **{**usual, **options})
            self._handlers.append(declared(handler))
            return self._handlers[-1]

        return declare

    def _label(self, method: Method, path: str | list[str]) -> str:
        paths = [path] if isinstance(path, str) else path
        template = re.sub(r"\{[^}]*\}", "{}", f"{self._path}{paths[0]}").rstrip("/")
        return f"{method.__name__} {template}"
