"""Reading flows: one by id, lists page by page, tags, and summaries."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from msgspec import Struct, structs

from flowfabric.core import flow_joins, ids, views
from flowfabric.core.bounds import FLOW_EDGES_MAX, FLOW_MEMBERS_MAX, PAGE_MAX
from flowfabric.core.changed_code import blocked_by_code
from flowfabric.core.checks import check_int, check_tag_key, check_tags
from flowfabric.core.flow_records import Edge, EdgeGroup, FlowRecord, FlowState, FlowTag
from flowfabric.core.records import Execution
from flowfabric.core.states import PublicState
from flowfabric.core.transitions import Changes
from flowfabric.engine.flows import FlowGroup, check_edge_id, inputs_of, member_counts
from flowfabric.engine.paging import cut
from flowfabric.engine.reads import tags_of_many
from flowfabric.engine.shell import execution_key
from flowfabric.errors import InvalidInput
from flowfabric.store.base import Reader, Transaction


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
        asked = self.check_flow_id(flow_id)

        async def body(reader: Reader) -> views.FlowSnapshot | None:
            flow = await self.find_flow(reader, asked)
            if flow is None:
                return None
            tags = await reader.select_records(
                FlowTag, "list_flow_tags", partition_key=flow.partition_key, flow_id=asked
            )
            return _snapshot(
                flow,
                await self._state(reader, flow),
                {tag.tag_key: tag.tag_value for tag in tags},
                await _all_groups(reader, asked),
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

        A `namespace` is looked for in all partitions.
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

        async def body(reader: Reader) -> list[views.FlowListItem]:
            name, among = _flow_list(namespace, index)
            found = await reader.select_records(
                FlowRecord,
                name,
                start=start,
                now_ms=await reader.now_ms(),
                limit=limit + 1,
                **among,
            )
            going = await _going(reader, [flow.flow_id for flow in found if views.closing(flow)])
            return [_list_item(flow, going=flow.flow_id in going) for flow in found]

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
        asked = self.check_flow_id(flow_id)
        start = _start_after_member(cursor)

        async def body(reader: Reader) -> tuple[views.FlowMember, ...]:
            rows = await reader.select_as(
                MemberRow, "list_flow_members", flow_id=asked, start=start, limit=limit + 1
            )
            found = [_member(row) for row in rows]
            tags = await tags_of_many(reader, [each.execution_id for each in found])
            return tuple(
                structs.replace(each, tags=tags.get(each.execution_id, {})) for each in found
            )

        found = await self.store.read(body) if start else ()
        page, last = cut(found, limit, lambda member: member.execution_id)
        return FlowMemberPage(members=page, next_cursor=last)

    async def list_edge_groups(
        self, flow_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[views.EdgeGroupSnapshot, ...]:
        """Joins by ascending downstream id, after the downstream `cursor`."""
        check_int("limit", limit, 0, PAGE_MAX)
        asked = self.check_flow_id(flow_id)
        start = _start_after_member(cursor)
        return tuple(
            views.group_snapshot(group)
            for group in await self.store.read(lambda reader: _groups(reader, asked, start, limit))
        )

    async def find_named_flows(
        self, own_id: str, *, namespace: str | None = None
    ) -> dict[str, ids.FlowId]:
        """The flows that were given this id, by namespace."""

        async def body(reader: Reader) -> dict[str, ids.FlowId]:
            places = [namespace]
            if namespace is None:
                places = await reader.select_as(str, "list_namespaces")
            named = {place: ids.named_flow_id(own_id, place) for place in places if place}
            found = [await self.find_flow(reader, each) for each in named.values()]
            there = {flow.flow_id for flow in found if flow is not None}
            return {place: each for place, each in named.items() if each in there}

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
        asked = self.check_flow_id(flow_id)
        after = None if cursor is None else ids.EdgeId(ids.parse_uuid("cursor", cursor))
        upstream, downstream = self._ends(direction)
        partition_key, _ = self.flow_key(asked)

        name, parameters = _edge_list(upstream, downstream)

        async def body(reader: Reader) -> list[Edge]:
            async def page(after: ids.EdgeId | None, limit: int) -> Sequence[Edge]:
                start = ids.start_after(after)
                if start is None:
                    return ()
                return await reader.select_records(
                    Edge,
                    name,
                    partition_key=partition_key,
                    flow_id=asked,
                    start=start,
                    limit=limit,
                    **parameters,
                )

            if limit is not None:
                return list(await page(after, limit))
            return await _all_edges(page, after)

        return tuple(views.edge_snapshot(edge) for edge in await self.store.read(body))

    def _ends(self, direction: object) -> tuple[ids.ExecutionId | None, ids.ExecutionId | None]:
        match direction:
            case None:
                return None, None
            case Outgoing(node):
                return self.shell.check_execution_id(node, "from_node"), None
            case Incoming(node):
                return None, self.shell.check_execution_id(node, "to_node")
            case _:
                raise InvalidInput("direction", "must be Outgoing or Incoming", direction)

    async def describe_edge(self, flow_id: str, edge_id: str) -> views.EdgeSnapshot | None:
        asked = self.check_flow_id(flow_id)
        key = (*self.flow_key(asked), check_edge_id(edge_id))

        async def body(reader: Reader) -> views.EdgeSnapshot | None:
            edge = await reader.get_one(Edge, key)
            return None if edge is None else views.edge_snapshot(edge)

        return await self.store.read(body)

    async def evaluate_flow_eligibility(self, execution_id: str) -> views.EligibilityStatus:
        """Whether dependencies let an execution run. Never raises for one that is missing."""
        asked = self.shell.check_execution_id(execution_id)
        key = execution_key(asked)

        async def body(reader: Reader) -> views.EligibilityStatus:
            execution = await reader.get_one(Execution, key)
            group = await reader.get_one(EdgeGroup, key)
            return views.eligibility(execution, group)

        return await self.store.read(body)

    # What a worker gets from upstreams

    async def read_execution_inputs(self, execution_id: str) -> dict[str, bytes | None]:
        """Results passed along edges, by name; None for an upstream that left none."""
        asked = self.shell.check_execution_id(execution_id)

        async def body(reader: Reader) -> dict[str, bytes | None]:
            inputs = (await inputs_of(reader, [asked])).get(asked, {})
            return {each.name: each.value for each in inputs.values()}

        unpack = self.shell.values.unpack
        return await self.shell.values.through(
            await self.store.read(body),
            lambda found: {name: unpack(value) for name, value in found.items()},
        )

    # Summaries

    async def read_flow_summary(self, flow_id: str) -> views.FlowSummary | None:
        """How many members are in which state, and what that makes of the flow."""
        asked = self.check_flow_id(flow_id)

        async def body(reader: Reader) -> views.FlowSummary | None:
            flow = await self.find_flow(reader, asked)
            if flow is None:
                return None
            return views.flow_summary(
                flow, await member_counts(reader, asked), await reader.now_ms()
            )

        return await self.store.read(body)

    async def project_flow_summary(self, flow_id: str) -> bool:
        """Count the flow's ended members again and store the result.

        The dispatcher keeps these counts right; this mends them. False, and nothing written, for a
        flow without members.
        """
        asked = self.check_flow_id(flow_id)

        async def body(tx: Transaction) -> bool:
            flow = await self.lock_flow(tx, asked)
            if flow.node_count == 0:
                return False
            counted = flow_joins.recounted(
                flow, await member_counts(tx, asked, "count_told_members")
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
        asked = self.check_flow_id(flow_id)
        checked = check_tags(tags)
        if not checked:
            raise InvalidInput("tags", "must not be empty")

        async def body(tx: Transaction) -> int:
            flow = await self.lock_flow(tx, asked)
            wanted = [
                FlowTag(partition_key=flow.partition_key, flow_id=asked, tag_key=k, tag_value=v)
                for k, v in sorted(checked.items())
            ]
            added = await tx.insert_new(wanted)
            kept = [tag for tag in wanted if (flow.partition_key, asked, tag.tag_key) not in added]
            touched = structs.replace(flow, last_mutation_at_ms=await tx.now_ms())
            await tx.save(Changes(updates=(touched, *kept)))
            return len(checked)

        return await self.store.transact(body)

    async def get_flow_namespace(self, flow_id: str) -> ids.Namespace | None:
        asked = self.check_flow_id(flow_id)

        async def body(reader: Reader) -> ids.Namespace | None:
            flow = await self.find_flow(reader, asked)
            return None if flow is None else flow.namespace

        return await self.store.read(body)

    async def get_flow_tag(self, flow_id: str, key: str) -> str | None:
        """The tag's value, or None when the tag or the flow is missing."""
        asked = self.check_flow_id(flow_id)
        tag_key = (*self.flow_key(asked), check_tag_key(key))

        async def body(reader: Reader) -> str | None:
            tag = await reader.get_one(FlowTag, tag_key)
            return None if tag is None else tag.tag_value

        return await self.store.read(body)


def _start_after_member(cursor: str | None) -> str | None:
    return ids.start_after(
        None if cursor is None else ids.uuid_of(ids.parse_execution_id(cursor, "cursor"))
    )


async def _groups(
    reader: Reader, flow_id: ids.FlowId, start: str | None, limit: int
) -> Sequence[EdgeGroup]:
    if start is None:
        return ()
    return await reader.select_records(
        EdgeGroup, "list_edge_groups", flow_id=flow_id, start=start, limit=limit
    )


async def _all_groups(reader: Reader, flow_id: ids.FlowId) -> tuple[views.EdgeGroupSnapshot, ...]:
    """Every join, page by page: a flow has at most one for each member."""
    groups: list[EdgeGroup] = []
    for _ in range(FLOW_MEMBERS_MAX // PAGE_MAX + 1):
        last = ids.uuid_of(groups[-1].downstream_id) if groups else None
        found = await _groups(reader, flow_id, ids.start_after(last), PAGE_MAX)
        groups += found
        if len(found) < PAGE_MAX:
            break
    return tuple(views.group_snapshot(group) for group in groups)


async def _all_edges(
    page: Callable[[ids.EdgeId | None, int], Awaitable[Sequence[Edge]]], after: ids.EdgeId | None
) -> list[Edge]:
    edges: list[Edge] = []
    for _ in range(FLOW_EDGES_MAX // PAGE_MAX + 1):
        found = await page(edges[-1].edge_id if edges else after, PAGE_MAX)
        edges += found
        if len(found) < PAGE_MAX:
            break
    return edges


def _flow_list(
    namespace: str | None, partition_key: int | None
) -> tuple[str, dict[str, str | int | None]]:
    if partition_key is None:
        return "list_flows", {"namespace": namespace}
    return "list_partition_flows", {"partition_key": partition_key}


async def _going(reader: Reader, flow_ids: Sequence[ids.FlowId]) -> set[ids.FlowId]:
    """The flows that have members which have not ended."""
    if not flow_ids:
        return set()
    return set(await reader.select_as(ids.FlowId, "going_flows", flow_ids=list(flow_ids)))


def _edge_list(
    upstream: ids.ExecutionId | None, downstream: ids.ExecutionId | None
) -> tuple[str, dict[str, str]]:
    """One indexed statement per direction."""
    if upstream is not None:
        return "list_edges_from", {"execution_id": ids.uuid_of(upstream)}
    if downstream is not None:
        return "list_edges_into", {"execution_id": ids.uuid_of(downstream)}
    return "list_edges", {}


class MemberRow(Struct, frozen=True, kw_only=True):
    execution_id: ids.ExecutionId
    execution_kind: str
    public_state: PublicState
    lifecycle_phase: str
    blocking_reason: str


def _member(row: MemberRow) -> views.FlowMember:
    return views.FlowMember(
        execution_id=row.execution_id,
        execution_kind=row.execution_kind,
        public_state=row.public_state,
        blocked=blocked_by_code(row.lifecycle_phase, row.blocking_reason),
    )


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
