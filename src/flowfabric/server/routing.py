"""Routes as this server declares them: each may answer with any of the problems below."""

from functools import partial
from typing import Final, TypeVar

import litestar
import msgspec
from litestar import Response
from litestar.openapi import ResponseSpec
from litestar.types import Serializer
from msgspec import Struct

from flowfabric.server import wire
from flowfabric.server.problems import Problem

T = TypeVar("T")


class JsonAnswer(Response[T]):
    """An answer in JSON, also where it is text alone."""

    def __init__(
        self, content: T, *, status_code: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(
            content, status_code=status_code, headers=headers, media_type="application/json"
        )

    def render(self, content: object, media_type: object, enc_hook: Serializer = str) -> bytes:
        return msgspec.json.encode(content)


def answer(result: Struct, *, new: bool = False) -> JsonAnswer[wire.Tagged]:
    """What an operation has answered, under its name; 201 if it was created."""
    return JsonAnswer(wire.tagged(result), status_code=201 if new else 200)


PROBLEMS: Final = {
    status: ResponseSpec(Problem, description=told, generate_examples=False)
    for status, told in {
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


def also(status: int, told: str, kind: type | None = None) -> dict[int, ResponseSpec]:
    """Another success beside the usual one, and all problems."""
    spec = ResponseSpec(kind, description=told, generate_examples=False)
    return {**PROBLEMS, status: spec}


EXISTED: Final = also(200, "It was there already.", dict)

get = partial(litestar.get, responses=PROBLEMS)
post = partial(litestar.post, responses=PROBLEMS)
put = partial(litestar.put, responses=PROBLEMS)
patch = partial(litestar.patch, responses=PROBLEMS)
delete = partial(litestar.delete, responses=PROBLEMS)
