"""Flows over HTTP: built member by member or at once, read, cancelled."""

from typing import TypeVar

from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import Struct, structs

from flowfabric.core import ids
from flowfabric.core.api_tokens import Scope
from flowfabric.core.creation import NewExecution
from flowfabric.core.flow_endings import NoWait, WaitIndefinite
from flowfabric.core.flow_joins import EdgeDependencyPolicy, Join
from flowfabric.core.results import Added, DependenciesAdded, FlowCreated
from flowfabric.core.views import FlowSnapshot
from flowfabric.engine.flow_reads import FlowMemberPage, FlowPage
from flowfabric.server import lists, wire
from flowfabric.server.access import InSession, Session, existing
from flowfabric.server.executions import CreateExecution, OneOfMany, new_execution
from flowfabric.server.routing import BATCH_BODY, CREATES, JsonAnswer, Routes, answer

routes = Routes("/v1/flows", "flows")


class NewFlow(Struct, kw_only=True):
    flow_id: str
    flow_kind: str
    namespace: str | None = None


class NewMember(Struct, kw_only=True):
    execution_id: str
    flow_id: str | None = None


class EdgeBody(Struct, kw_only=True):
    edge_id: str
    upstream_execution_id: str
    downstream_execution_id: str
    flow_id: str | None = None
    dependency_kind: str = "success_only"
    data_passing_ref: str | None = None


E = TypeVar("E", bound=EdgeBody)


class StageEdge(EdgeBody, kw_only=True):
    expected_graph_revision: int | None = None


class ApplyEdge(EdgeBody, kw_only=True):
    graph_revision: int | None = None


class CancelFlow(Struct, kw_only=True):
    reason: str
    cancellation_policy: str
    flow_id: str | None = None


class NewJoin(Join, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one member waits for, and when it has waited enough."""

    policy: EdgeDependencyPolicy | None = None


class NewGraph(wire.StrictBody, kw_only=True):
    """Members and what each of them waits for, added together or not at all."""

    members: tuple[OneOfMany | str, ...] = ()
    """New executions, and ids of existing ones."""
    joins: tuple[NewJoin, ...] = ()


class GraphAdded(DependenciesAdded, frozen=True, kw_only=True, tag="DependenciesAdded"):
    members: list[str]
    """Their ids, in the order of the request."""


@routes.post("/", Scope.SUBMIT, "Create a flow", **CREATES)
async def create(data: JSONBody[NewFlow], session: InSession) -> JsonAnswer[wire.Tagged]:
    namespace = session.caller.own_namespace(data.namespace)
    made = await session.engine.create_flow(
        data.flow_id, flow_kind=data.flow_kind, namespace=namespace
    )
    return answer(made, new=isinstance(made, FlowCreated))


@routes.get("/", Scope.READ, "List flows")
async def list_flows(
    session: InSession,
    partition: FromQuery[int | None] = None,
    namespace: lists.InNamespace = None,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> FlowPage:
    namespace = session.caller.namespace_for(namespace)
    return await session.engine.list_flows(
        partition, namespace=namespace, cursor=cursor, limit=limit
    )


@routes.get("/{id:str}", Scope.READ, "Read a flow")
async def read(id: FromPath[str], session: InSession) -> FlowSnapshot:
    return existing(await session.engine.describe_flow(id), "flow", id)


@routes.get("/{id:str}/members", Scope.READ, "List the members of a flow")
async def members(
    id: FromPath[str],
    session: InSession,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> FlowMemberPage:
    existing(await session.engine.describe_flow(id), "flow", id)
    return await session.engine.list_flow_members(id, cursor=cursor, limit=limit)


@routes.post("/{id:str}/members", Scope.SUBMIT, "Add an execution to a flow", **CREATES)
async def add_member(
    id: FromPath[str], data: JSONBody[NewMember], session: InSession
) -> JsonAnswer[wire.Tagged]:
    wire.check_same("flow_id", id, data.flow_id)
    execution_id = await session.find(data.execution_id)
    added = await session.engine.add_execution_to_flow(id, execution_id)
    return answer(added, new=isinstance(added, Added))


@routes.post("/{id:str}/graph", Scope.SUBMIT, "Add members and dependencies", opt=BATCH_BODY)
async def add_graph(id: FromPath[str], data: JSONBody[NewGraph], session: InSession) -> GraphAdded:
    """Members are named by a full id, a uuid, or any name within the flow; one without an id gets
    one. The answer has their ids, in the order of the request."""
    members = [_member(session, id, each) for each in data.members]
    added = await session.engine.add_dependencies(
        id, [_join(session, id, each) for each in data.joins], members=members
    )
    member_ids = [each if isinstance(each, str) else str(each.execution_id) for each in members]
    return GraphAdded(**structs.asdict(added), members=member_ids)


def _member(session: Session, flow_id: str, member: CreateExecution | str) -> NewExecution | str:
    if isinstance(member, str):
        return _member_id(session, flow_id, member)
    new = new_execution(member, session.caller)
    if new.execution_id is None:
        return structs.replace(new, execution_id=session.engine.new_member_id(flow_id))
    return structs.replace(new, execution_id=_member_id(session, flow_id, new.execution_id))


def _member_id(session: Session, flow_id: str, text: str) -> str:
    flow = ids.FlowId(ids.parse_uuid("flow_id", flow_id))
    return ids.named_member_id(flow, text, session.engine.deployment.partitions)


def _join(session: Session, flow_id: str, join: NewJoin) -> Join:
    return structs.replace(
        join,
        downstream_execution_id=_member_id(session, flow_id, join.downstream_execution_id),
        dependencies=[
            structs.replace(
                each, upstream_execution_id=_member_id(session, flow_id, each.upstream_execution_id)
            )
            for each in join.dependencies
        ],
    )


@routes.post("/{id:str}/edges", Scope.SUBMIT, "Stage a dependency", status_code=201)
async def stage(
    id: FromPath[str], data: JSONBody[StageEdge], session: InSession
) -> JsonAnswer[wire.Tagged]:
    edge = _edge(session, id, data)
    return answer(await session.engine.stage_dependency_edge(**structs.asdict(edge)), new=True)


@routes.post("/{id:str}/edges/apply", Scope.SUBMIT, "Apply a dependency")
async def apply(
    id: FromPath[str], data: JSONBody[ApplyEdge], session: InSession
) -> JsonAnswer[wire.Tagged]:
    edge = _edge(session, id, data)
    return answer(await session.engine.apply_dependency_to_child(**structs.asdict(edge)))


def _edge(session: Session, flow_id: str, data: E) -> E:
    """The request with full ids of the flow and of both members."""
    wire.check_same("flow_id", flow_id, data.flow_id)
    return structs.replace(
        data,
        flow_id=flow_id,
        upstream_execution_id=_member_id(session, flow_id, data.upstream_execution_id),
        downstream_execution_id=_member_id(session, flow_id, data.downstream_execution_id),
    )


@routes.post("/{id:str}/cancel", Scope.OPERATE, "Cancel a flow")
async def cancel(
    id: FromPath[str], data: JSONBody[CancelFlow], session: InSession, wait: FromQuery[str] = ""
) -> JsonAnswer[wire.Tagged]:
    """With `wait=true` the answer comes when the members are cancelled."""
    wire.check_same("flow_id", id, data.flow_id)
    cancelled = await session.engine.cancel_flow(
        id,
        reason=data.reason,
        cancellation_policy=data.cancellation_policy,
        wait=WaitIndefinite() if wait in ("true", "1") else NoWait(),
    )
    return answer(cancelled)
