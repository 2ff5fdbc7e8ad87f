"""Every operation of the table by its name, for clients that have no database.

A caller that is confined to a namespace names nothing else. Whatever the arguments carry, however
deep, under a name that stands for an execution, a handle, a flow or a namespace is looked at
before the operation is. What lies elsewhere, or nowhere, is not found.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Final, TypeVar

import msgspec
from litestar import Response
from litestar.params import FromPath, QueryParameter
from litestar.response import ServerSentEvent, ServerSentEventMessage
from msgspec import Struct, structs

from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.creation import NewExecution
from flowfabric.core.handles import Handle, from_wire
from flowfabric.core.ids import ExecutionId, Namespace, parse_own_id
from flowfabric.core.policies import parse_policy
from flowfabric.engine.details import Found
from flowfabric.engine.engine import Engine
from flowfabric.engine.reads import EVERYTHING
from flowfabric.errors import FlowFabricError, NotFound
from flowfabric.operations import (
    BODY_BYTES_MAX,
    OPERATIONS,
    WAITS,
    Reach,
    RemoteOperation,
    WireError,
    send_error,
)
from flowfabric.server.access import Caller, InSession, Session
from flowfabric.server.problems import AnyRequest, Problem, check_is_json, problem_of, refuse
from flowfabric.server.routing import get, post
from flowfabric.server.streams import PING, PING_S
from flowfabric.store.base import HintListener
from flowfabric.version import __version__

T = TypeVar("T")

TOPICS_MAX: Final = 200
HINT_GAP_S: Final = 0.005
LIVE_AGAIN_S: Final = 0.5
LISTEN_S: Final = 3_600.0
_SOME_MAY_MISS: Final = frozenset(
    {
        "find_outcomes",
        "read_outcomes",
        "own_ids",
        "required_capabilities",
        "cancel_executions",
        "replay_executions",
    }
)
"""Those that answer for each execution by itself."""


class Named:
    """What the arguments of a confined caller name."""

    def __init__(self, engine: Engine, owner: Namespace) -> None:
        self._engine = engine
        self._owner = owner
        self.executions: dict[str, ExecutionId] = {}
        """By what they were called."""
        self.handled: set[ExecutionId] = set()
        self.created: set[ExecutionId] = set()
        self.flows: set[str] = set()
        self.limits: set[str] = set()
        self.budgets: set[str] = set()

    def confined(self, name: str, value: object) -> object:
        """The value, with the caller's namespace wherever one belongs."""
        if name == "namespace":
            return self._namespace(value)
        if isinstance(value, Handle):
            self.handled.add(value.execution_id)
        elif isinstance(value, NewExecution):
            return self._new(value)
        elif isinstance(value, Struct):
            return structs.replace(
                value, **{each: self.confined(each, getattr(value, each)) for each in _names(value)}
            )
        elif isinstance(value, list | tuple):
            return type(value)(self.confined(name, each) for each in value)
        elif isinstance(value, bytes) and name in ("handle", "handles"):
            self.handled.add(from_wire(value).execution_id)
        elif isinstance(value, str):
            self._note(name, value)
        return value

    def _namespace(self, value: object) -> Namespace:
        if value not in (None, self._owner):
            told = f"the token is for the namespace {self._owner!r} alone"
            raise refuse(403, "namespace_denied", told, field="namespace")
        return self._owner

    def _new(self, request: NewExecution) -> NewExecution:
        if request.execution_id is not None and parse_own_id(request.execution_id) is None:
            self.created.add(self._engine.check_execution_id(request.execution_id))
        if request.parent_execution_id is not None:
            self._note("parent_execution_id", request.parent_execution_id)
        policy = parse_policy(request.policy)
        self.limits.update(each.owner_id for each in request.gates)
        self.budgets.update(policy.budget_ids)
        self.limits.update(each.quota_policy_id for each in policy.quota_policies)
        for each in request.limits:
            self._namespace(each.limit.namespace)
        return structs.replace(request, namespace=self._namespace(request.namespace))

    def _note(self, name: str, value: str) -> None:
        if name.endswith(("execution_id", "execution_ids")) or name == "members":
            self.executions[value] = self._engine.check_execution_id(value)
        elif name == "flow_id":
            self.flows.add(value)
        elif name == "budget_id":
            self.budgets.add(value)


def _names(value: Struct) -> Sequence[str]:
    return value.__struct_fields__


class Missing(Exception):
    """What was asked about is not there, as far as the caller can tell."""

    def __init__(self, error: NotFound) -> None:
        super().__init__(str(error))
        self.error = error


async def check_named(
    asked: Session, operation: RemoteOperation, named: Named, owner: Namespace
) -> set[str]:
    """Raise unless the caller may know of all that is named; those that are left out."""
    found = await asked.namespaces.of({*named.executions.values(), *named.handled, *named.created})
    foreign = {each for each, namespace in found.items() if namespace != owner}
    for each in sorted(foreign & (named.handled | named.created)):
        raise NotFound("execution", each)
    missing = {
        text
        for text, each in named.executions.items()
        if each in foreign or not (each in found or each in named.created)
    }
    if operation.name not in _SOME_MAY_MISS:
        for text in sorted(missing):
            raise Missing(NotFound("execution", text))
    for flow_id in sorted(named.flows):
        namespace = await asked.engine.get_flow_namespace(flow_id)
        if namespace is None and operation.name == "create_flow":
            continue
        if namespace != owner:
            raise Missing(NotFound("flow", flow_id))
    for budget_id in sorted(named.budgets):
        await asked.budget_namespace(budget_id, owner)
    for limit_id in sorted(named.limits and named.limits - await _limits_of(asked.engine, owner)):
        raise NotFound("limit", limit_id)
    return missing


async def _limits_of(engine: Engine, owner: Namespace) -> set[str]:
    """Ids of the limits of a namespace: one page, which is more than any has."""
    found = await engine.list_limits(namespace=owner, limit=PAGE_MAX)
    return {str(each.quota_policy_id) for each in found.limits}


class Performance:
    """One call of an operation by a caller."""

    def __init__(self, operation: RemoteOperation, asked: Session) -> None:
        self._operation = operation
        self._asked = asked
        self._engine = asked.engine

    async def perform(self, arguments: Mapping[str, object]) -> object:
        owner = self._asked.caller.namespace
        if owner is None or self._operation.reach is Reach.NOTHING:
            return await self._call(arguments)
        if self._operation.reach is Reach.EVERYTHING:
            told = f"{self._operation.name} is about every namespace, and the token for one"
            raise refuse(403, "namespace_denied", told)
        named = Named(self._engine, owner)
        given = dict(arguments)
        if "namespace" in self._operation.names:
            given.setdefault("namespace", None)
        if self._operation.name == "find_executions":
            given.setdefault("matching", EVERYTHING)
        confined = {name: named.confined(name, value) for name, value in given.items()}
        try:
            missing = await check_named(self._asked, self._operation, named, owner)
        except Missing as missed:
            if self._operation.may_be_none:
                return None
            raise missed.error from None
        result = await self._without(missing, confined)
        self._remember(result, owner)
        return result

    async def _without(self, missing: set[str], arguments: dict[str, object]) -> object:
        """Ask about those that are there, and answer for the others as for what is not there."""
        asked = arguments.get("execution_ids")
        if not missing or not isinstance(asked, list):
            return await self._call(arguments)
        there = [each for each in asked if each not in missing]
        result = await self._call({**arguments, "execution_ids": there})
        if isinstance(result, Found):
            gone = {self._engine.check_execution_id(each) for each in missing}
            return structs.replace(result, missing=result.missing | gone)
        if isinstance(result, list):
            answers = iter(result)
            return [
                NotFound("execution", each) if each in missing else next(answers) for each in asked
            ]
        return result

    async def _call(self, arguments: Mapping[str, object]) -> object:
        method = getattr(self._engine, self._operation.name)
        return await method(**arguments)

    def _remember(self, result: object, owner: Namespace) -> None:
        if self._operation.name in ("claim_many", "create_executions") and isinstance(result, list):
            self._asked.namespaces.remember([each.execution_id for each in result], owner)


class RaisedProblem(Problem, kw_only=True, omit_defaults=True):
    """An error of the engine, with what is needed to raise it again."""

    raised: WireError


@post(
    "/v1/operations/{name:str}",
    opt={"body_limit": BODY_BYTES_MAX},
    status_code=200,
    tags=["operations"],
    summary="Call an operation of the engine by its name",
)
async def call(name: FromPath[str], request: AnyRequest, asked: InSession) -> Response[bytes]:
    """For clients in Python. Arguments are a JSON object, by name, bytes in base64."""
    operation = OPERATIONS.get(name)
    if operation is None:
        raise refuse(404, "no_such_operation", f"there is no operation {name!r}", field="name")
    check_scopes(asked.caller, operation)
    check_is_json(request.headers.get("content-type", ""))
    arguments = read_arguments(operation, await request.body())
    performing = Performance(operation, asked).perform(arguments)
    try:
        result = await (asked.waiting.run(performing) if name in WAITS else performing)
        return _json(200, operation.encode_result(result))
    except FlowFabricError as error:
        status, problem = problem_of(error)
        raised = RaisedProblem(**structs.asdict(problem), raised=send_error(error))
        return _json(status, msgspec.json.encode(raised))


def check_scopes(caller: Caller, operation: RemoteOperation) -> None:
    if not operation.scopes & caller.scopes:
        needed = " or ".join(sorted(operation.scopes))
        told = f"{operation.name} needs a token with the scope {needed}"
        raise refuse(403, "scope_missing", told)


def read_arguments(operation: RemoteOperation, body: bytes) -> dict[str, object]:
    try:
        return operation.decode_arguments(body)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").removeprefix(".") or None
        told = f"invalid JSON: {field}: {text}" if field else f"invalid JSON: {text}"
        raise refuse(422, "invalid_json", told, field=field) from None
    except msgspec.DecodeError as error:
        raise refuse(400, "invalid_json", f"invalid JSON: {error}") from None


def _json(status: int, body: bytes) -> Response[bytes]:
    return Response(body, status_code=status, media_type="application/json")


# What a client has to know beforehand, and when to look again -------------------


class DeploymentView(Struct, kw_only=True):
    """What clients decide by themselves with: how ids are made, how large payloads may be."""

    version: str
    backend: str
    num_flow_partitions: int
    num_budget_partitions: int
    num_quota_partitions: int
    payload_bytes_max: int
    plain_bytes_max: int
    coded: bool
    """Whether payloads go through a codec here."""
    namespace: str | None
    """The only one the token is for."""


@get("/v1/deployment", tags=["operations"], summary="What clients have to know of this deployment")
async def deployment(asked: InSession) -> DeploymentView:
    engine = asked.engine
    partitions = engine.deployment.partitions
    return DeploymentView(
        version=__version__,
        backend=engine.backend_label(),
        num_flow_partitions=partitions.num_flow,
        num_budget_partitions=partitions.num_budget,
        num_quota_partitions=partitions.num_quota,
        payload_bytes_max=engine.config.payload_bytes_max,
        plain_bytes_max=engine.plain_bytes_max,
        coded=engine.shell.values.coded,
        namespace=asked.caller.namespace,
    )


@get("/v1/hints", tags=["operations"], summary="Hear when to look again, as server-sent events")
async def hints(
    asked: InSession,
    topics: Annotated[list[str], QueryParameter(name="topic", max_items=TOPICS_MAX)],
) -> ServerSentEvent:
    """`live` says whether hints arrive; each `hint` names a topic, and nothing of what happened."""
    return ServerSentEvent(asked.waiting.each(_hints(asked.engine, topics), PING_S, PING))


async def _hints(engine: Engine, topics: Sequence[str]) -> AsyncIterator[ServerSentEventMessage]:
    arrived: asyncio.Queue[str] = asyncio.Queue()
    listeners = {topic: engine.store.hints([topic]) for topic in topics}
    listening = [
        asyncio.create_task(_listen(topic, listener, arrived))
        for topic, listener in listeners.items()
    ]
    try:
        told: bool | None = None
        while True:
            if told is not (live := engine.store.hints_are_live):
                told = live
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
