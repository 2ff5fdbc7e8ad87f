"""Flows over HTTP: built member by member or at once, read, cancelled."""

from typing import Annotated

from litestar import Router
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from msgspec import structs

from flowfabric.core import ids
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.creation import NewExecution
from flowfabric.core.flow_endings import NoWait, WaitIndefinite
from flowfabric.core.flow_joins import Join
from flowfabric.core.results import Added, DependenciesAdded, FlowCreated
from flowfabric.core.tokens import Scope
from flowfabric.core.views import FlowSnapshot
from flowfabric.engine.flow_reads import FlowMemberPage, FlowPage
from flowfabric.errors import NotFound
from flowfabric.server import wire
from flowfabric.server.access import InSession, Session
from flowfabric.server.executions import BATCH_BODY, check_same, new_execution
from flowfabric.server.routing import EXISTED, JsonAnswer, answer, get, post

PAGE = 100


class GraphAdded(DependenciesAdded, frozen=True, kw_only=True, tag="DependenciesAdded"):
    members: list[str]
    """Their ids, in the order they were asked for."""


@post("/", responses=EXISTED, summary="Create a flow")
async def create(
    data: JSONBody[wire.NewFlow],
    asked: InSession,
) -> JsonAnswer[wire.Tagged]:
    asked.allow(Scope.SUBMIT)
    namespace = asked.caller.namespace_for(data.namespace) or "default"
    made = await asked.engine.create_flow(
        data.flow_id, flow_kind=data.flow_kind, namespace=namespace
    )
    return answer(made, new=isinstance(made, FlowCreated))


@get("/", summary="List flows")
async def list_flows(
    asked: InSession,
    partition: FromQuery[int | None] = None,
    namespace: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = PAGE,
) -> FlowPage:
    asked.allow(Scope.READ)
    wanted = asked.caller.namespace_for(namespace)
    return await asked.engine.list_flows(partition, namespace=wanted, cursor=cursor, limit=limit)


@get("/{id:str}", summary="Read a flow")
async def read(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
) -> FlowSnapshot:
    asked.allow(Scope.READ)
    found = await asked.engine.describe_flow(id)
    if found is None:
        raise NotFound("flow", id)
    return found


@get("/{id:str}/members", summary="List the members of a flow")
async def members(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = PAGE,
) -> FlowMemberPage:
    asked.allow(Scope.READ)
    if await asked.engine.describe_flow(id) is None:
        raise NotFound("flow", id)
    return await asked.engine.list_flow_members(id, cursor=cursor, limit=limit)


@post("/{id:str}/members", responses=EXISTED, summary="Add an execution to a flow")
async def add_member(
    id: FromPath[str],  # noqa: A002
    data: JSONBody[wire.NewMember],
    asked: InSession,
) -> JsonAnswer[wire.Tagged]:
    asked.allow(Scope.SUBMIT)
    check_same("flow_id", id, data.flow_id)
    execution_id = await asked.find(data.execution_id)
    added = await asked.engine.add_execution_to_flow(id, execution_id)
    return answer(added, new=isinstance(added, Added))


@post("/{id:str}/graph", opt=BATCH_BODY, status_code=200, summary="Add members and dependencies")
async def add_graph(
    id: FromPath[str],  # noqa: A002
    data: JSONBody[wire.NewGraph],
    asked: InSession,
) -> GraphAdded:
    """Members are named by a full id, a uuid, or any name within the flow; one without an id gets
    one. The answer has their ids, in the order of the request."""
    asked.allow(Scope.SUBMIT)
    members = [_member(asked, id, each) for each in data.members]
    added = await asked.engine.add_dependencies(
        id, [_join(asked, id, each) for each in data.joins], members=members
    )
    told = [each if isinstance(each, str) else str(each.execution_id) for each in members]
    return GraphAdded(**structs.asdict(added), members=told)


def _member(asked: Session, flow_id: str, given: wire.CreateExecution | str) -> NewExecution | str:
    if isinstance(given, str):
        return _member_id(asked, flow_id, given)
    new = new_execution(given, asked.caller)
    if new.execution_id is None:
        return structs.replace(new, execution_id=asked.engine.new_member_id(flow_id))
    return structs.replace(new, execution_id=_member_id(asked, flow_id, new.execution_id))


def _member_id(asked: Session, flow_id: str, text: str) -> str:
    flow = ids.FlowId(ids.parse_uuid("flow_id", flow_id))
    return ids.named_member_id(flow, text, asked.engine.deployment.partitions)


def _join(asked: Session, flow_id: str, given: wire.NewJoin) -> Join:
    return Join(
        downstream_execution_id=_member_id(asked, flow_id, given.downstream_execution_id),
        dependencies=[
            structs.replace(
                each,
                upstream_execution_id=_member_id(asked, flow_id, each.upstream_execution_id),
            )
            for each in given.dependencies
        ],
        policy=given.policy,
    )


@post("/{id:str}/edges", summary="Stage a dependency")
async def stage(
    id: FromPath[str],  # noqa: A002
    data: JSONBody[wire.StageEdge],
    asked: InSession,
) -> JsonAnswer[wire.Tagged]:
    asked.allow(Scope.SUBMIT)
    check_same("flow_id", id, data.flow_id)
    staged = await asked.engine.stage_dependency_edge(
        id,
        data.edge_id,
        upstream_execution_id=_member_id(asked, id, data.upstream_execution_id),
        downstream_execution_id=_member_id(asked, id, data.downstream_execution_id),
        dependency_kind=data.dependency_kind,
        data_passing_ref=data.data_passing_ref,
        expected_graph_revision=data.expected_graph_revision,
    )
    return answer(staged, new=True)


@post("/{id:str}/edges/apply", status_code=200, summary="Let a dependency take effect")
async def apply(
    id: FromPath[str],  # noqa: A002
    data: JSONBody[wire.ApplyEdge],
    asked: InSession,
) -> JsonAnswer[wire.Tagged]:
    asked.allow(Scope.SUBMIT)
    check_same("flow_id", id, data.flow_id)
    applied = await asked.engine.apply_dependency_to_child(
        id,
        data.edge_id,
        upstream_execution_id=_member_id(asked, id, data.upstream_execution_id),
        downstream_execution_id=_member_id(asked, id, data.downstream_execution_id),
        graph_revision=data.graph_revision,
        dependency_kind=data.dependency_kind,
        data_passing_ref=data.data_passing_ref,
    )
    return answer(applied)


@post("/{id:str}/cancel", status_code=200, summary="Cancel a flow")
async def cancel(
    id: FromPath[str],  # noqa: A002
    data: JSONBody[wire.CancelFlow],
    asked: InSession,
    wait: FromQuery[str] = "",
) -> JsonAnswer[wire.Tagged]:
    """With `wait=true` the answer comes when the members are cancelled."""
    asked.allow(Scope.OPERATE)
    check_same("flow_id", id, data.flow_id)
    cancelled = await asked.engine.cancel_flow(
        id,
        reason=data.reason,
        cancellation_policy=data.cancellation_policy,
        wait=WaitIndefinite() if wait in ("true", "1") else NoWait(),
    )
    return answer(cancelled)


routes = Router(
    path="/v1/flows",
    tags=["flows"],
    route_handlers=[
        create,
        list_flows,
        read,
        members,
        add_member,
        add_graph,
        stage,
        apply,
        cancel,
    ],
)
