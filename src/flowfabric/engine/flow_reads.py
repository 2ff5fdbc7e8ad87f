"""Reading flows: one by id, lists page by page, tags, and summaries."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct, structs

from flowfabric.core import flow_joins, ids, views
from flowfabric.core.bounds import FLOW_EDGES_MAX, PAGE_MAX
from flowfabric.core.changed_code import blocked_by_code
from flowfabric.core.checks import check_int, check_tag_key, check_tags
from flowfabric.core.decisions import Changes
from flowfabric.core.flow_records import Edge, FlowRecord, FlowState, FlowTag, JoinRecord
from flowfabric.core.records import Execution
from flowfabric.core.states import PublicState
from flowfabric.engine.flows import FlowGroup, check_edge_id, inputs_of, member_counts
from flowfabric.engine.paging import cut
from flowfabric.engine.reads import tags_of_many
from flowfabric.engine.shell import execution_key
from flowfabric.errors import InvalidInput
from flowfabric.store.base import Reader, Transaction

R = TypeVar("R")


class Outgoing(Struct, frozen=True, tag=True):
    """Edges out of one execution."""

    from_node: str


class Incoming(Struct, frozen=True, tag=True):
    """Edges into one execution."""

    to_node: str


class FlowPage(Struct, frozen=True, kw_only=True):
    flows: tuple[views.FlowListItem, ...]
    next_cursor: ids.FlowId | None


class FlowMemberPage(Struct, frozen=True, kw_only=True):
    members: tuple[views.FlowMember, ...]
    next_cursor: ids.ExecutionId | None


class FlowReads(FlowGroup):
    async def describe_flow(self, flow_id: str) -> views.FlowSnapshot | None:
        flow_id = self.check_flow_id(flow_id)

        async def body(reader: Reader) -> views.FlowSnapshot | None:
            flow = await self.find_flow(reader, flow_id)
            if flow is None:
                return None
            tags = await reader.select_records(
                FlowTag, "list_flow_tags", partition_key=flow.partition_key, flow_id=flow_id
            )
            return _snapshot(
                flow,
                await self._state(reader, flow),
                {tag.tag_key: tag.tag_value for tag in tags},
                await _groups(reader, flow_id, ids.start_after(None), None),
            )

        return await self.store.read(body)

    async def _state(self, reader: Reader, flow: FlowRecord) -> FlowState:
        """Stored once every member has ended; until then what the members are doing now."""
        if flow.derived_state is not FlowState.OPEN:
            return flow.derived_state
        return flow_joins.derive_flow_state(
            await member_counts(reader, flow.flow_id),
            cancelled=flow.public_flow_state is FlowState.CANCELLED,
        )

    async def list_flows(
        self,
        partition: str | int | None = None,
        *,
        namespace: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> FlowPage:
        """Flows by ascending id, of one partition or of all, after `cursor`.

        With a `namespace`, those of all partitions.
        """
        check_int("limit", limit, 0, PAGE_MAX)
        start = ids.start_after(None if cursor is None else ids.parse_uuid("cursor", cursor))
        index = self._check_partition(partition)
        if namespace is not None:
            ids.parse_namespace(namespace)
            if index is not None:
                raise InvalidInput("namespace", "cannot be combined with a partition", namespace)
        if start is None:
            return FlowPage(flows=(), next_cursor=None)

        name, among = "list_flows", dict[str, str | int | None](namespace=namespace)
        if index is not None:
            name, among = "list_partition_flows", {"partition_key": index}

        async def body(reader: Reader) -> list[views.FlowListItem]:
            now_ms = await reader.now_ms()
            flows = await reader.select_records(
                FlowRecord, name, start=start, now_ms=now_ms, limit=limit + 1, **among
            )
            closing = [flow.flow_id for flow in flows if views.closing(flow)]
            going = set[ids.FlowId]()
            if closing:
                going |= {*await reader.select_as(ids.FlowId, "going_flows", flow_ids=closing)}
            return [_list_item(flow, going=flow.flow_id in going) for flow in flows]

        page, last = cut(await self.store.read(body), limit, lambda flow: flow.flow_id)
        return FlowPage(flows=page, next_cursor=last)

    def _check_partition(self, partition: object) -> int | None:
        if partition is None:
            return None
        if isinstance(partition, str):
            named = ids.PartitionKey.parse(partition)
            if named.family is not ids.PartitionFamily.FLOW:
                raise InvalidInput("partition", "must be one of flows, {fp:N}", partition)
            partition = named.index
        index = check_int("partition", partition, 0, 65_535)
        return ids.check_partition(index, self.shell.deployment.partitions)

    async def list_flow_members(
        self, flow_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> FlowMemberPage:
        """Members by ascending id, with their states and tags."""
        check_int("limit", limit, 0, PAGE_MAX)
        flow_id = self.check_flow_id(flow_id)
        start = _start_after_member(cursor)

        async def body(reader: Reader) -> list[views.FlowMember]:
            rows = await reader.select_as(
                MemberRow, "list_flow_members", flow_id=flow_id, start=start, limit=limit + 1
            )
            tags = await tags_of_many(reader, [row.execution_id for row in rows])
            return [
                views.FlowMember(
                    execution_id=row.execution_id,
                    execution_kind=row.execution_kind,
                    public_state=row.public_state,
                    blocked=blocked_by_code(row.lifecycle_phase, row.blocking_reason),
                    tags=tags.get(row.execution_id, {}),
                )
                for row in rows
            ]

        members = await self.store.read(body) if start else ()
        page, last = cut(members, limit, lambda member: member.execution_id)
        return FlowMemberPage(members=page, next_cursor=last)

    async def list_edge_groups(
        self, flow_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[views.EdgeGroupSnapshot, ...]:
        """Joins by ascending downstream id, after the downstream `cursor`."""
        check_int("limit", limit, 0, PAGE_MAX)
        flow_id = self.check_flow_id(flow_id)
        start = _start_after_member(cursor)
        return await self.store.read(lambda reader: _groups(reader, flow_id, start, limit))

    async def find_named_flows(
        self, own_id: str, *, namespace: str | None = None
    ) -> dict[str, ids.FlowId]:
        """The flows of this id, by namespace."""

        async def body(reader: Reader) -> dict[str, ids.FlowId]:
            places = [namespace]
            if namespace is None:
                places = await reader.select_as(str, "list_namespaces")
            named = {place: ids.named_flow_id(own_id, place) for place in places if place}
            flows = [await self.find_flow(reader, each) for each in named.values()]
            existing = {flow.flow_id for flow in flows if flow is not None}
            return {place: each for place, each in named.items() if each in existing}

        return await self.store.read(body)

    # Edges

    async def list_edges(
        self,
        flow_id: str,
        direction: Outgoing | Incoming | None = None,
        *,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> tuple[views.EdgeSnapshot, ...]:
        """Edges of a flow, or of one of its members, by ascending id after `cursor`.

        All of them, or a page of at most `limit`.
        """
        if limit is not None:
            check_int("limit", limit, 0, PAGE_MAX)
        flow_id = self.check_flow_id(flow_id)
        after = None if cursor is None else ids.EdgeId(ids.parse_uuid("cursor", cursor))
        partition_key, _ = self.flow_key(flow_id)
        name, end = self._edges_along(direction)

        async def body(reader: Reader) -> list[Edge]:
            return await _read_on(
                lambda start, size: reader.select_records(
                    Edge,
                    name,
                    partition_key=partition_key,
                    flow_id=flow_id,
                    start=start,
                    limit=size,
                    **end,
                ),
                ids.start_after(after),
                lambda edge: ids.start_after(edge.edge_id),
                limit,
            )

        return tuple(views.edge_snapshot(edge) for edge in await self.store.read(body))

    def _edges_along(self, direction: object) -> tuple[str, dict[str, str]]:
        """The statement that lists edges in a direction, by an index of its own."""
        match direction:
            case None:
                return "list_edges", {}
            case Outgoing(node):
                upstream = self.shell.check_execution_id(node, "from_node")
                return "list_edges_from", {"execution_id": ids.uuid_of(upstream)}
            case Incoming(node):
                downstream = self.shell.check_execution_id(node, "to_node")
                return "list_edges_into", {"execution_id": ids.uuid_of(downstream)}
            case _:
                raise InvalidInput("direction", "must be Outgoing or Incoming", direction)

    async def describe_edge(self, flow_id: str, edge_id: str) -> views.EdgeSnapshot | None:
        flow_id = self.check_flow_id(flow_id)
        edge = await self.get_one(Edge, (*self.flow_key(flow_id), check_edge_id(edge_id)))
        return None if edge is None else views.edge_snapshot(edge)

    async def evaluate_flow_eligibility(self, execution_id: str) -> views.EligibilityStatus:
        """Whether dependencies let an execution run. Never raises for one that is missing."""
        execution_id = self.shell.check_execution_id(execution_id)
        key = execution_key(execution_id)

        async def body(reader: Reader) -> views.EligibilityStatus:
            execution = await reader.get_one(Execution, key)
            group = await reader.get_one(JoinRecord, key)
            return views.eligibility(execution, group)

        return await self.store.read(body)

    # What a worker gets from upstreams

    async def read_execution_inputs(self, execution_id: str) -> dict[str, bytes | None]:
        """Results passed along edges, by name; None for an upstream that left none."""
        execution_id = self.shell.check_execution_id(execution_id)

        unpack = self.shell.values.unpack
        inputs = await self.store.read(lambda reader: inputs_of(reader, [execution_id]))
        stored = {each.name: each.value for each in inputs.get(execution_id, {}).values()}
        return await self.shell.values.through(
            stored, lambda values: {name: unpack(value) for name, value in values.items()}
        )

    # Summaries

    async def read_flow_summary(self, flow_id: str) -> views.FlowSummary | None:
        """How many members are in which state, and what that makes of the flow."""
        flow_id = self.check_flow_id(flow_id)

        async def body(reader: Reader) -> views.FlowSummary | None:
            flow = await self.find_flow(reader, flow_id)
            if flow is None:
                return None
            return views.flow_summary(
                flow, await member_counts(reader, flow_id), await reader.now_ms()
            )

        return await self.store.read(body)

    async def project_flow_summary(self, flow_id: str) -> bool:
        """Count the flow's ended members again and store the result.

        The dispatcher keeps these counts right; this mends them. False, and nothing written, for a
        flow without members.
        """
        flow_id = self.check_flow_id(flow_id)

        async def body(tx: Transaction) -> bool:
            flow = await self.lock_flow(tx, flow_id)
            if flow.node_count == 0:
                return False
            counted = flow_joins.recounted(
                flow, await member_counts(tx, flow_id, "count_told_members")
            )
            await tx.save(Changes(updates=(self.with_derived_state(counted, await tx.now_ms()),)))
            return True

        return await self.store.transact(body)

    # Tags

    async def set_flow_tag(self, flow_id: str, key: str, value: str) -> None:
        """Set one tag, replacing its value; on a cancelled flow, too."""
        await self.set_flow_tags(flow_id, {check_tag_key(key): value})

    async def set_flow_tags(self, flow_id: str, tags: Mapping[str, str]) -> int:
        """Set several tags, all or none; return how many."""
        flow_id = self.check_flow_id(flow_id)
        checked = check_tags(tags)
        if not checked:
            raise InvalidInput("tags", "must not be empty")

        async def body(tx: Transaction) -> int:
            flow = await self.lock_flow(tx, flow_id)
            rows = [
                FlowTag(partition_key=flow.partition_key, flow_id=flow_id, tag_key=k, tag_value=v)
                for k, v in sorted(checked.items())
            ]
            added = await tx.insert_new(rows)
            kept = [tag for tag in rows if (flow.partition_key, flow_id, tag.tag_key) not in added]
            touched = structs.replace(flow, last_mutation_at_ms=await tx.now_ms())
            await tx.save(Changes(updates=(touched, *kept)))
            return len(checked)

        return await self.store.transact(body)

    async def get_flow_namespace(self, flow_id: str) -> ids.Namespace | None:
        flow_id = self.check_flow_id(flow_id)

        flow = await self.store.read(lambda reader: self.find_flow(reader, flow_id))
        return None if flow is None else flow.namespace

    async def get_flow_tag(self, flow_id: str, key: str) -> str | None:
        """The tag's value, or None when the tag or the flow is missing."""
        flow_id = self.check_flow_id(flow_id)
        tag = await self.get_one(FlowTag, (*self.flow_key(flow_id), check_tag_key(key)))
        return None if tag is None else tag.tag_value


def _start_after_member(cursor: str | None) -> str | None:
    return ids.start_after(
        None if cursor is None else ids.uuid_of(ids.parse_execution_id(cursor, "cursor"))
    )


async def _read_on(
    fetch: Callable[[str, int], Awaitable[Sequence[R]]],
    start: str | None,
    next_start: Callable[[R], str | None],
    limit: int | None,
) -> list[R]:
    """One page, or without a limit every row from `start`, page by page in the same read."""
    rows: list[R] = []
    for _ in range(FLOW_EDGES_MAX // PAGE_MAX + 1):
        if start is None:
            break
        page = await fetch(start, PAGE_MAX if limit is None else limit)
        rows += page
        if limit is not None or len(page) < PAGE_MAX:
            break
        start = next_start(page[-1])
    return rows


async def _groups(
    reader: Reader, flow_id: ids.FlowId, start: str | None, limit: int | None
) -> tuple[views.EdgeGroupSnapshot, ...]:
    groups = await _read_on(
        lambda start, size: reader.select_records(
            JoinRecord, "list_edge_groups", flow_id=flow_id, start=start, limit=size
        ),
        start,
        lambda group: ids.start_after(ids.uuid_of(group.downstream_id)),
        limit,
    )
    return tuple(map(views.group_snapshot, groups))


class MemberRow(Struct, frozen=True, kw_only=True):
    execution_id: ids.ExecutionId
    execution_kind: str
    public_state: PublicState
    lifecycle_phase: str
    blocking_reason: str


def _list_item(flow: FlowRecord, *, going: bool) -> views.FlowListItem:
    return views.FlowListItem(
        flow_id=flow.flow_id,
        flow_kind=flow.flow_kind,
        namespace=flow.namespace,
        created_at_ms=flow.created_at_ms,
        status=views.status_of(flow, going=going),
    )


def _snapshot(
    flow: FlowRecord,
    state: FlowState,
    tags: dict[str, str],
    groups: tuple[views.EdgeGroupSnapshot, ...],
) -> views.FlowSnapshot:
    shared = {
        name: getattr(flow, name)
        for name in views.FlowSnapshot.__struct_fields__
        if name in FlowRecord.__struct_fields__
    }
    return views.FlowSnapshot(**shared, state=state, tags=tags, edge_groups=groups)
