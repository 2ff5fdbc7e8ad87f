"""Flows built by name, for tests that care about shapes and not about ids."""

import uuid
from collections.abc import Iterable

from msgspec import structs

from flowfabric import Engine
from flowfabric.core.conditions import Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.decisions import Changes
from flowfabric.core.flow_joins import Dependency, EdgeDependencyPolicy, Join
from flowfabric.core.flow_records import JoinRecord
from flowfabric.core.ids import ExecutionId, FlowId
from flowfabric.core.records import Record, Suspension
from flowfabric.core.results import Claimed, Created
from flowfabric.core.states import FailureClass
from flowfabric.core.views import EdgeGroupSnapshot, FlowSnapshot
from flowfabric.engine.shell import execution_key
from flowfabric.store.base import Reader, Transaction

LEASE_MS = 600_000


class Graph:
    """A flow whose members have names."""

    def __init__(self, engine: Engine, flow_id: FlowId) -> None:
        self.engine = engine
        self.flow_id = flow_id
        self.ids: dict[str, ExecutionId] = {}

    def __getitem__(self, name: str) -> ExecutionId:
        return self.ids[name]

    def name(self, execution_id: str) -> str:
        return next(name for name, each in self.ids.items() if each == execution_id)

    # Building

    async def outsider(self, name: str, **fields: object) -> ExecutionId:
        """An execution that could join the flow and has not."""
        self.ids[name] = self.engine.new_member_id(self.flow_id)
        created = await self.engine.create_execution(self.request(name, **fields))
        assert isinstance(created, Created), created
        return self.ids[name]

    async def member(self, name: str, **fields: object) -> ExecutionId:
        """An execution that joins the flow on its own, waiting for nothing."""
        execution_id = await self.outsider(name, **fields)
        await self.engine.add_execution_to_flow(self.flow_id, execution_id)
        return execution_id

    def request(self, name: str, **fields: object) -> NewExecution:
        new = NewExecution(
            execution_kind="work", execution_id=self.ids[name], input_payload=name.encode()
        )
        return structs.replace(new, **fields)

    def new(self, *names: str, **fields: object) -> list[NewExecution]:
        """Requests for members to be created in bulk."""
        for name in names:
            self.ids[name] = self.engine.new_member_id(self.flow_id)
        return [self.request(name, **fields) for name in names]

    def join(
        self,
        downstream: str,
        upstreams: Iterable[str],
        policy: EdgeDependencyPolicy | None = None,
        *,
        passing: bool = False,
        replaces_payload: bool = True,
    ) -> Join:
        return Join(
            downstream_execution_id=self.ids[downstream],
            dependencies=[
                Dependency(
                    upstream_execution_id=self.ids[each],
                    data_passing_ref=each if passing else None,
                    replaces_payload=replaces_payload,
                )
                for each in upstreams
            ],
            policy=policy,
        )

    async def build(
        self,
        shape: dict[str, str],
        when: EdgeDependencyPolicy | None = None,
        *,
        passing: bool = False,
        replaces_payload: bool = True,
        **fields: object,
    ) -> None:
        """`{"d": "b c"}`: d waits for b and c. Every name becomes a member."""
        named = dict.fromkeys(shape)
        for upstreams in shape.values():
            named |= dict.fromkeys(upstreams.split())
        members = self.new(*named, **fields)
        joins = [
            self.join(
                downstream,
                upstreams.split(),
                when,
                passing=passing,
                replaces_payload=replaces_payload,
            )
            for downstream, upstreams in shape.items()
            if upstreams
        ]
        await self.engine.add_dependencies(self.flow_id, joins, members=members)

    async def stage(self, upstream: str, downstream: str, **fields: object) -> str:
        """A staged edge; its id."""
        edge_id = new_id()
        await self.engine.stage_dependency_edge(
            self.flow_id,
            edge_id,
            upstream_execution_id=self.ids[upstream],
            downstream_execution_id=self.ids[downstream],
            data_passing_ref=optional_text(fields.get("data_passing_ref")),
        )
        return edge_id

    async def edge(self, upstream: str, downstream: str, **fields: object) -> str:
        """A staged and applied edge; its id."""
        edge_id = await self.stage(upstream, downstream, **fields)
        await self.engine.apply_dependency_to_child(
            self.flow_id,
            edge_id,
            upstream_execution_id=self.ids[upstream],
            downstream_execution_id=self.ids[downstream],
        )
        return edge_id

    # Running

    async def claim(self) -> dict[str, Claimed]:
        """Everything that is ready now, by name."""
        claimed = await self.engine.claim_many(
            ["default"],
            limit=1_000,
            worker_id="w",
            worker_instance_id="w-1",
            lease_ttl_ms=LEASE_MS,
        )
        return {self.name(each.execution_id): each for each in claimed}

    async def run(self, name: str, *, result: bytes | None = b"done") -> None:
        """Claim exactly this member and complete it; dependents are not told yet."""
        await self.engine.complete((await self.claimed(name)).handle, result)

    async def fail(self, name: str) -> None:
        handle = (await self.claimed(name)).handle
        await self.engine.fail(handle, "broken", failure_class=FailureClass.PERMANENT)

    async def claimed(self, name: str) -> Claimed:
        execution_id = self.ids[name]
        grant = await self.engine.issue_claim_grant(
            execution_id, worker_id="w", worker_instance_id="w-1"
        )
        return await self.engine.claim_execution(
            execution_id,
            worker_id="w",
            worker_instance_id="w-1",
            grant_key=grant.grant_key,
            lease_ttl_ms=LEASE_MS,
        )

    async def settle(self) -> None:
        """Tell dependents and cancel what is given up, until nothing is left to do."""
        while True:
            told = await self.engine.dispatch_completions()
            cancelled = await self.engine.cancel_pending_members()
            if told.acted + cancelled.acted == 0:
                return

    # Looking

    async def state(self, name: str) -> str:
        state = await self.engine.read_execution_state(self.ids[name])
        assert state is not None
        return state.value

    async def states(self) -> dict[str, str]:
        return {name: await self.state(name) for name in self.ids}

    async def flow(self) -> FlowSnapshot:
        found = await self.engine.describe_flow(self.flow_id)
        assert found is not None
        return found

    async def group(self, name: str) -> EdgeGroupSnapshot:
        groups = {g.downstream_execution_id: g for g in (await self.flow()).edge_groups}
        return groups[self.ids[name]]

    async def stored_group(self, name: str) -> JoinRecord | None:
        key = execution_key(self.ids[name])

        async def body(reader: Reader) -> JoinRecord | None:
            return (await reader.get(JoinRecord, [key])).get(key)

        return await self.engine.store.read(body)


async def broken(graph: Graph, name: str) -> Suspension:
    """A member whose suspension does not decode, so that nothing can end it. The good one."""
    claimed = await graph.claimed(name)
    suspended = await graph.engine.suspend(claimed.handle, resume_condition=Single("gate"))
    key = (*execution_key(graph[name]), suspended.details.suspension_id)

    async def read(reader: Reader) -> Suspension:
        return (await reader.get(Suspension, [key]))[key]

    good = await graph.engine.store.read(read)
    await overwrite(graph, structs.replace(good, reason_code="nonsense"))
    return good


async def overwrite(graph: Graph, *records: Record) -> None:
    async def body(tx: Transaction) -> None:
        await tx.save(Changes(updates=records))

    await graph.engine.store.transact(body)


async def new_graph(engine: Engine, uuid: str | None = None, **fields: str) -> Graph:
    flow_id = FlowId(uuid or new_id())
    await engine.create_flow(flow_id, **{"flow_kind": "tests"} | fields)
    return Graph(engine, flow_id)


async def neighbour(graph: Graph) -> Graph:
    """Another flow in the same partition."""
    return await _graph_where(graph, same_partition=True)


async def graph_elsewhere(graph: Graph) -> Graph:
    """A flow in another partition."""
    return await _graph_where(graph, same_partition=False)


async def _graph_where(graph: Graph, *, same_partition: bool) -> Graph:
    engine = graph.engine
    here, _ = engine.flow_key(graph.flow_id)
    while True:
        flow_id = FlowId(new_id())
        if (engine.flow_key(flow_id)[0] == here) is same_partition:
            break
    await engine.create_flow(flow_id, flow_kind="tests")
    return Graph(engine, flow_id)


def new_id() -> str:
    return str(uuid.uuid4())


def optional_text(value: object) -> str | None:
    assert value is None or isinstance(value, str)
    return value
