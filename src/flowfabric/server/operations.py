"""Operations of the table by name, for clients without a database."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from litestar import Response
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIType, Operation, RequestBody, Schema
from litestar.params import FromPath, QueryParameter
from litestar.response import ServerSentEvent, ServerSentEventMessage
from msgspec import structs

from flowfabric.core.checks import split_misfit
from flowfabric.engine.engine import Engine
from flowfabric.errors import FlowFabricError
from flowfabric.operations import (
    BODY_BYTES_MAX,
    OPERATIONS,
    PROTOCOL,
    WAITS,
    DeploymentView,
    RemoteOperation,
    WireError,
    send_error,
)
from flowfabric.server.access import Caller, InSession
from flowfabric.server.confinement import ConfinedEngine
from flowfabric.server.problems import (
    UNREADABLE,
    AnyRequest,
    Problem,
    Refused,
    check_is_json,
    headers_of,
    misshapen,
    problem_of,
    refuse,
    shown,
    unreadable,
)
from flowfabric.server.routing import Routes
from flowfabric.server.streams import EVENT_STREAM, events_of
from flowfabric.store.base import HintListener
from flowfabric.version import __version__

routes = Routes("/v1", "operations")

TOPICS_MAX: Final = 200
HINT_GAP_S: Final = 0.005
LIVE_AGAIN_S: Final = 0.5
LISTEN_S: Final = 3_600.0


class RaisedProblem(Problem, kw_only=True, omit_defaults=True):
    """An error of the engine, with what is needed to raise it again."""

    raised: WireError


@dataclass(unsafe_hash=True)
class NamedOperation(Operation):
    """Describes a request whose body depends on the operation it names."""

    def __post_init__(self) -> None:
        schema = Schema(type=OpenAPIType.OBJECT, description="Arguments by name.")
        content = {"application/json": OpenAPIMediaType(schema=schema)}
        self.request_body = RequestBody(content=content, required=True)


@routes.post(
    "/operations/{name:str}",
    None,
    "Call an operation of the engine by its name",
    operation_class=NamedOperation,
    opt={"body_limit": BODY_BYTES_MAX},
)
async def call(name: FromPath[str], request: AnyRequest, session: InSession) -> Response[bytes]:
    """For clients in Python. Arguments are a JSON object, by name, bytes in base64."""
    operation = OPERATIONS.get(name)
    if operation is None:
        raise refuse(404, "no_such_operation", f"there is no operation {name!r}", field="name")
    check_scopes(session.caller, operation)
    check_is_json(request.scope["headers"])
    arguments = read_arguments(operation, await request.body())
    performing = getattr(session.engine, name)(**arguments)
    try:
        result = await (session.wait(performing) if name in WAITS else performing)
        return _json(200, operation.encode_result(result))
    except FlowFabricError as error:
        error = shown(error)
        status, problem = problem_of(error)
        raised = RaisedProblem(**structs.asdict(problem), raised=send_error(error))
        return _json(status, msgspec.json.encode(raised), headers_of(status, error))


def check_scopes(caller: Caller, operation: RemoteOperation) -> None:
    if not operation.scopes & caller.scopes:
        needed = " or ".join(sorted(operation.scopes))
        message = f"{operation.name} needs a token with the scope {needed}"
        raise refuse(403, "scope_missing", message)


def read_arguments(operation: RemoteOperation, body: bytes) -> dict[str, object]:
    try:
        return operation.decode_arguments(body)
    except msgspec.ValidationError as error:
        _check_readable(body)
        problem, place = split_misfit(str(error))
        raise Refused(422, misshapen(problem, place, operation.arguments)) from None
    except (msgspec.DecodeError, *UNREADABLE):
        _check_readable(body)
        raise


def _check_readable(body: bytes) -> None:
    """Refuse what is not JSON: a typed decoder may stop before it notices."""
    try:
        msgspec.json.decode(body)
    except msgspec.ValidationError:
        return  # A number too large to hold.
    except msgspec.DecodeError as error:
        raise refuse(400, "invalid_json", f"invalid JSON: {error}") from None
    except UNREADABLE as error:
        raise unreadable(error) from None


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response[bytes]:
    return Response(body, status_code=status, headers=headers, media_type="application/json")


# What a client has to know first, and when to look again ------------------------


@routes.get("/deployment", None, "Describe this deployment to clients")
async def deployment(session: InSession) -> DeploymentView:
    engine = session.engine
    partitions = engine.deployment.partitions
    return DeploymentView(
        version=__version__,
        protocol=PROTOCOL,
        backend=engine.backend_label(),
        num_flow_partitions=partitions.num_flow,
        num_budget_partitions=partitions.num_budget,
        num_quota_partitions=partitions.num_quota,
        payload_bytes_max=engine.config.payload_bytes_max,
        plain_bytes_max=engine.plain_bytes_max,
        coded=engine.shell.values.coded,
        namespace=session.caller.namespace,
    )


@routes.get(
    "/hints", None, "Hear when to look again, as server-sent events", media_type=EVENT_STREAM
)
async def hints(
    session: InSession,
    topics: Annotated[list[str], QueryParameter(name="topic", max_items=TOPICS_MAX)],
) -> ServerSentEvent:
    """`live` says whether hints arrive; each `hint` names a topic, and nothing of what happened."""
    heard = [each for each in topics if await _may_hear(session.engine, each)]
    return events_of(session, _hints(session.engine, heard))


async def _may_hear(engine: Engine, topic: str) -> bool:
    """Whether the caller may see what the topic is about; others stay silent."""
    kind, _, uuid = topic.partition(":")
    if kind != "stream" or not isinstance(engine, ConfinedEngine):
        return True
    with suppress(FlowFabricError):
        return bool(await engine.resolve_execution_id(uuid))
    return False


async def _hints(engine: Engine, topics: Sequence[str]) -> AsyncIterator[ServerSentEventMessage]:
    arrived: asyncio.Queue[str] = asyncio.Queue()
    listeners = {topic: engine.store.hints([topic]) for topic in topics}
    listening = [
        asyncio.create_task(_listen(topic, listener, arrived))
        for topic, listener in listeners.items()
    ]
    try:
        announced: bool | None = None
        while True:
            if announced is not (live := engine.store.hints_are_live):
                announced = live
                yield ServerSentEventMessage(event="live", data=str(live).lower())
            with suppress(TimeoutError):
                async with asyncio.timeout(LIVE_AGAIN_S):
                    topic = await arrived.get()
                yield ServerSentEventMessage(event="hint", data=topic)
    finally:
        for task in listening:
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)
        for listener in listeners.values():
            listener.close()


async def _listen(topic: str, listener: HintListener, arrived: "asyncio.Queue[str]") -> None:
    while True:
        if await listener.wait(LISTEN_S):
            arrived.put_nowait(topic)
            await asyncio.sleep(HINT_GAP_S)
