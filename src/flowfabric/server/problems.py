"""Errors as HTTP answers.

Every error is a JSON object. `error` is for people and `code` for programs: it names the exact
error, the one a program in Python would have caught. `kind` and `retryable` are there for
clients of the reference's server, which has fewer kinds, and none for requests that are wrong.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final, TypeVar

import msgspec
from litestar import Request, Response
from litestar.datastructures import State
from litestar.exceptions import HTTPException, SerializationException
from litestar.types import Scope
from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core.checks import explained, misspelt, split_misfit, visible
from flowfabric.core.states import PublicState
from flowfabric.errors import FlowFabricError
from flowfabric.outages import level_of

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 1
"""How long clients should wait if nothing better is known."""
_OWN_KINDS: Final = frozenset(
    {"execution_not_terminal", "max_replays_exhausted", "terminal", "flow_already_terminal"}
)
_SATISFIED: Final = (errors.LeaseExpired, errors.LeaseRevoked, errors.StreamClosed)
_BY_STATUS: Final = {
    404: "no_such_route",
    405: "method_not_allowed",
    413: "payload_too_large",
    415: "unsupported_media_type",
}
_CHOICES: Final[Mapping[str, Iterable[str]]] = {"state": tuple(PublicState)}
"""The values of parameters that are names of ours."""
_ALIASES: Final = {
    "states": "state",
    "from_cursor": "from",
    "to_cursor": "to",
    "last_event_id": "Last-Event-ID",
    "topics": "topic",
}
"""Parameters whose name on the wire cannot be used in Python or Litestar."""
OF_THE_REFERENCE: Final = frozenset(
    {
        "now",
        "partition_id",
        "resume_delay_ms",
        "max_signals_per_execution",
        "signal_maxlen",
        "grace_ms",
    }
)
"""Members that clients of the reference send and this server does not need."""
PATH_SHOWN_MAX: Final = 200
_MEMBER: Final = re.compile("field `([^`]+)`")
AnyRequest = Request[object, object, State]


class JsonRequest(AnyRequest):
    """A request whose unreadable body is refused as invalid JSON, whatever the cause."""

    async def json(self) -> object:
        body = await self._read_json()
        kind = _body_of(self)
        if isinstance(body, dict) and kind and not kind.__struct_config__.forbid_unknown_fields:
            _check_spelling(body, kind)
        return body

    async def _read_json(self) -> object:
        try:
            return await super().json()
        except UNREADABLE as error:
            raise unreadable(error) from None
        except SerializationException as error:
            if isinstance(error.__cause__, msgspec.ValidationError):
                raise _out_of_range(await self.body(), error.__cause__) from None
            raise


def _body_of(request: AnyRequest) -> type[Struct] | None:
    """What the route of a request reads its body as."""
    declared = request.route_handler.parsed_data_field
    kind = declared and declared.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Struct) else None


def _check_spelling(given: dict[str, object], kind: type[Struct]) -> None:
    """Refuse a misspelt member, which a lenient body would ignore."""
    others = {name: value for name, value in given.items() if name not in OF_THE_REFERENCE}
    found = misspelt(others, kind.__struct_encode_fields__)
    if found is not None:
        name, instead = found
        raise Refused(422, misshapen(f"Object contains unknown field `{name}`; {instead}", ""))


HUNG_UP: Final = "client disconnected prematurely"
"""Litestar calls this a server error, though the client has left."""
R = TypeVar("R")


class Problem(Struct, omit_defaults=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: str
    code: str
    kind: str | None = None
    retryable: bool | None = None
    field: str | None = None
    """The field of the request that is wrong."""
    limit_bytes: int | None = None
    route: str | None = None
    resume_after: str | None = None
    """The cursor to continue from if the log no longer has the one given."""


class Refused(Exception):
    """A refusal by the server itself, before it asks the engine."""

    def __init__(
        self, status: int, problem: Problem, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(problem.error)
        self.status, self.problem, self.headers = status, problem, headers or {}


def refuse(status: int, code: str, error: str, *, field: str | None = None) -> Refused:
    return Refused(status, Problem(error=error, code=code, field=field))


UNREADABLE: Final = (UnicodeDecodeError, RecursionError)
"""What reading JSON raises apart from msgspec's own errors."""


def unreadable(error: Exception) -> Refused:
    reason = "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        reason = f"it is not UTF-8 at byte {error.start}"
    return refuse(400, "invalid_json", f"invalid JSON: {reason}")


def _out_of_range(body: bytes, error: msgspec.ValidationError) -> Refused:
    """Refuses a number too large to hold; names its field, which the error does not."""
    message, _, _ = str(error).partition(" - at `")
    field = _holding(body)
    shown = f"{field}: {message}" if field else message
    return refuse(400, "invalid_json", f"invalid JSON: {shown}", field=field)


def _holding(body: bytes) -> str | None:
    with suppress(msgspec.DecodeError):
        for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
            try:
                msgspec.json.decode(value)
            except msgspec.ValidationError:
                return name
    return None


def check_is_json(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse a body whose headers say that it is not JSON, or compressed."""
    given = {name: value.decode("latin-1").strip().lower() for name, value in headers}
    if given.get(b"content-type", "").partition(";")[0].strip() != "application/json":
        message = "Content-Type: must be application/json"
        raise refuse(415, "unsupported_media_type", message, field="content-type")
    if given.get(b"content-encoding", "identity") != "identity":
        message = "Content-Encoding: must be left out; the body is taken as it is"
        raise refuse(415, "unsupported_media_type", message, field="content-encoding")


def problem_of(error: FlowFabricError) -> tuple[int, Problem]:
    """The status and the body for an error of the engine."""
    status = _status_of(error)
    coded = isinstance(error, errors.NotFound) or str(error).startswith(f"{error.code}: ")
    problem = Problem(
        error=str(error) if coded else f"{error.code}: {error}",
        code=error.code,
        field=getattr(error, "field", None),
        resume_after=getattr(error, "resume_after", None),
    )
    if status not in (400, 404):
        problem.kind = _kind_of(error)
        problem.retryable = error.retryable
    return status, problem


def _status_of(error: FlowFabricError) -> int:
    if isinstance(error, errors.Transport) and error.retryable:
        return 503
    return error.http_status


def _kind_of(error: FlowFabricError) -> str:
    if isinstance(error, errors.Contention) and not isinstance(error, errors.RetryExhausted):
        return "contention"
    if isinstance(error, errors.StateConflict) and error.code not in _OWN_KINDS:
        return "already_satisfied" if isinstance(error, _SATISFIED) else "state_conflict"
    if isinstance(error, errors.Unavailable):
        return "unavailable"
    return error.kind if isinstance(error, errors.Transport) else error.code


def headers_of(status: int, error: Exception | None = None) -> dict[str, str]:
    """When to retry, for statuses that say so."""
    if status not in (429, 503):
        return {}
    after_s = RETRY_AFTER_S
    if isinstance(error, errors.ResourceExhausted) and error.retry_after_ms is not None:
        after_s = -(-error.retry_after_ms // 1_000)
    return {"Retry-After": str(after_s)}


def shown(error: FlowFabricError) -> FlowFabricError:
    """The error as callers may see it: only the log says where the database is."""
    if not isinstance(error, errors.Transport):
        return error
    logger.log(level_of(error), "the database failed: %s", error)
    message = "it failed or cannot be reached; the server's log says more"
    return errors.Transport(
        error.backend, message, kind=error.kind, may_have_happened=error.may_have_happened
    )


def respond(
    status: int, problem: Problem, headers: dict[str, str] | None = None
) -> Response[Problem]:
    given = headers_of(status) | (headers or {})
    return Response(problem, status_code=status, headers=given, media_type="application/json")


# What Litestar calls when a handler has raised ------------------------------


def on_engine_error(_request: AnyRequest, error: FlowFabricError) -> Response[Problem]:
    status, problem = problem_of(shown(error))
    return respond(status, problem, headers_of(status, error))


def on_refusal(_request: AnyRequest, error: Refused) -> Response[Problem]:
    return respond(error.status, error.problem, error.headers)


def on_http_error(request: AnyRequest, error: HTTPException) -> Response[Problem]:
    """Refusals by Litestar itself: routes, methods, bodies, parameters."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SerializationException | msgspec.MsgspecError):
            return _unreadable(cause, _body_of(request))
        cause = cause.__cause__
    if error.detail == HUNG_UP:
        return respond(400, Problem(error=HUNG_UP, code="invalid_json"))
    status = error.status_code
    code = _BY_STATUS.get(status, "invalid_input" if status < 500 else "internal_error")
    if status >= 500:
        return on_bug(request, error)
    message, field = _explained(error)
    if status in (404, 405):
        message = _no_route(request, error)
    problem = Problem(error=message, code=code, field=field)
    return respond(status, problem, error.headers)


def _no_route(request: AnyRequest, error: HTTPException) -> str:
    route = f"{request.method} {path_of(request.scope)[:PATH_SHOWN_MAX]}"
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    allowed = ", ".join(sorted(headers.get("allow", "").split(", ")))
    return f"there is no route {route}" + (f"; the path takes {allowed}" if allowed else "")


def path_of(scope: Scope) -> str:
    """The path as the client has sent it, without the query, on one line."""
    return visible(scope["raw_path"].partition(b"?")[0].decode("latin-1"))


def on_bug(request: AnyRequest, error: Exception) -> Response[Problem]:
    logger.error("%s %s failed", request.method, path_of(request.scope), exc_info=error)
    problem = Problem(error="internal error; see the server's log", code="internal_error")
    problem.retryable = False
    return respond(500, problem)


_NO_BODY: Final = "Object missing required field `data`"
"""What the framework says of a request without a body."""


def _unreadable(error: BaseException, kind: type[Struct] | None) -> Response[Problem]:
    """Unreadable JSON, JSON of the wrong shape, or a bad value in path or query."""
    if not isinstance(error, msgspec.ValidationError):
        if not isinstance(error.__cause__, msgspec.ValidationError):
            return respond(400, Problem(error=f"invalid JSON: {error}", code="invalid_json"))
        error = error.__cause__
    text, path = split_misfit(str(error))
    place, _, within = path.partition(".")
    if text == _NO_BODY:
        needed = [each.name for each in structs.fields(kind) if each.required] if kind else []
        fields = f" with {', '.join(f'`{each}`' for each in needed)}" if needed else ""
        return respond(
            422, Problem(error=f"the body is missing: send JSON{fields}", code="invalid_json")
        )
    if place in ("", "data"):
        return respond(422, misshapen(text, within, kind))
    name = place.partition("[")[0]
    name = _ALIASES.get(name, name)
    if name in _CHOICES and "enum" in text:
        text = f"{text}; must be among {', '.join(_CHOICES[name])}"
    return respond(400, Problem(error=f"{name}: {text}", code="invalid_input", field=name))


def misshapen(text: str, within: str, kind: object = None) -> Problem:
    """JSON of the wrong shape; names the member that is wrong, missing or unknown, and those that
    a body of its kind may have instead."""
    explanation = explained(text, within, kind)
    message = f"{within}: {explanation}" if within else explanation
    named = _MEMBER.search(text)
    field = ".".join(each for each in (within, named and named[1]) if each)
    return Problem(error=f"invalid JSON: {message}", code="invalid_json", field=field or None)


def _explained(error: HTTPException) -> tuple[str, str | None]:
    """What is wrong with a request, and the field that is."""
    extra = error.extra
    if not (isinstance(extra, list) and extra and isinstance(extra[0], dict)):
        return str(error.detail), None
    reasons = (f"{each.get('key', 'request')}: {each.get('message')}" for each in extra)
    return "; ".join(reasons), str(extra[0].get("key") or "") or None
