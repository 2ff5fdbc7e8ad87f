"""Looking for what must not be; see `core.audit`. Reads only, a page at a time.

The executions come first, in the order of their ids, then the counts of flows, then the
rows that belong to executions and flows, a few partitions at a time, and at last the
idempotency keys, and those who wait, which name an execution: they may wait for each other.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from flowfabric.core import audit as rules
from flowfabric.core import ids
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.checks import check_int, check_optional_text
from flowfabric.engine.paging import FROM_A_PAGE
from flowfabric.engine.shell import Group, id_columns
from flowfabric.errors import InvalidInput
from flowfabric.store.base import Reader

PARTITIONS_PER_PAGE = 16
"""Partitions whose rows one page looks at."""
RING_MAX = 100
"""How many executions a ring may have to be found."""
RING_WAITS_MAX = 10_000
"""How many waits one page follows."""
_EXECUTIONS = "executions"
_FLOWS = "flows"
_STRAYS = "strays"
_GUARDS = "guards"
_WAITING = "waiting"
CURSOR_BYTES_MAX = 8 * 1024
FLOWS_PER_PAGE = 100


class Audits(Group):
    async def audit(self, *, cursor: str | None = None, limit: int = PAGE_MAX) -> rules.AuditPage:
        """Check one page of all rows for inconsistencies; repeat until the cursor is None.

        Each page is one look at the database. A change between two pages may be missed or
        seen half-way: look again before you act on a complaint.
        """
        check_int("limit", limit, 1, PAGE_MAX)
        phase, partition_key, place = _parse(cursor)
        if phase == _EXECUTIONS:
            return await self._audit_executions(partition_key, place, limit)
        if phase == _FLOWS:
            return await self._audit_flows(place, min(limit, FLOWS_PER_PAGE))
        if phase == _STRAYS:
            return await self._audit_rows(partition_key, limit)
        if phase == _GUARDS:
            return await self._audit_guards(place, limit)
        return await self._audit_waiting(place, limit)

    async def _audit_executions(self, partition_key: int, uuid: str, limit: int) -> rules.AuditPage:
        rows = await self.select_as(
            AuditRow,
            "audit_executions",
            after_partition_key=partition_key,
            after_execution_id=uuid,
            limit=limit,
        )
        cursor = f"{_FLOWS}/0/{ids.FIRST_UUID}"
        if rows and rows[-1].place == limit:
            last_id = rows[-1].execution_id
            cursor = f"{_EXECUTIONS}/{ids.partition_of(last_id)}/{ids.uuid_of(last_id)}"
        return rules.AuditPage(
            complaints=tuple(complaint for row in rows for complaint in _complaints(row)),
            cursor=cursor,
        )

    async def _audit_flows(self, start: str, limit: int) -> rules.AuditPage:
        async def body(reader: Reader) -> tuple[list[FlowCounts], list[ids.ExecutionId]]:
            flows = await reader.select_as(
                FlowCounts, "audit_flow_counts", start=start, limit=limit
            )
            joins = await reader.select_as(
                ids.ExecutionId, "audit_join_counts", start=start, limit=limit
            )
            return flows, joins

        flows, joins = await self.store.read(body)
        full = bool(flows) and flows[-1].place == limit
        following = ids.next_uuid(flows[-1].flow_id) if full else None
        found = [_flow_complaint(row) for row in flows if row.miscounted]
        found += [
            rules.Complaint(
                wrong=rules.Wrong.MISCOUNTED,
                execution_id=execution_id,
                detail="its join counts other edges than it has",
            )
            for execution_id in joins
        ]
        return rules.AuditPage(
            complaints=tuple(found),
            cursor=f"{_STRAYS}/0" if following is None else f"{_FLOWS}/0/{following}",
        )

    async def _audit_rows(self, first: int, limit: int) -> rules.AuditPage:
        last = first + PARTITIONS_PER_PAGE - 1
        found = {
            _stray(row.execution_id, row.belongings)
            for row in await self.select_as(
                StrayRow,
                "audit_strays",
                first_partition=first,
                last_partition=last,
                limit=limit,
            )
        }
        more = last + 1 < self.shell.deployment.partitions.num_flow
        return rules.AuditPage(
            complaints=_sorted(found),
            cursor=f"{_STRAYS}/{last + 1}" if more else f"{_GUARDS}/0/",
        )

    async def _audit_guards(self, after: str, limit: int) -> rules.AuditPage:
        namespace, key = _parse_key(after)

        async def body(reader: Reader) -> tuple[list[GuardRow], set[ids.ExecutionId]]:
            rows = await reader.select_as(
                GuardRow, "list_guards", after_namespace=namespace, after_key=key, limit=limit
            )
            return rows, await _gone(reader, [row.execution for row in rows])

        rows, gone = await self.store.read(body)
        following = None
        if len(rows) == limit:
            last = (rows[-1].namespace, rows[-1].idempotency_key)
            following = msgspec.json.encode(last).decode()
        return rules.AuditPage(
            complaints=_sorted({_stray(each, "idempotency_guard") for each in gone}),
            cursor=f"{_WAITING}/0/" if following is None else f"{_GUARDS}/0/{following}",
        )

    async def _audit_waiting(self, after: str, limit: int) -> rules.AuditPage:
        async def body(reader: Reader) -> tuple[list[str], set[ids.ExecutionId], rules.Waits]:
            waiting = await reader.select_as(str, "list_waiting", after=after, limit=limit)
            return waiting, await _gone(reader, waiting), await _waits(reader, waiting)

        listed, gone, waits = await self.store.read(body)
        ringed = {
            rules.ring_complaint(each, way)
            for each, way in rules.rings(waits).items()
            if each in listed
        }
        return rules.AuditPage(
            complaints=_sorted({_stray(each, "waiter") for each in gone} | ringed),
            cursor=f"{_WAITING}/0/{listed[-1]}" if len(listed) == limit else None,
        )


async def _gone(reader: Reader, named: Sequence[str]) -> set[ids.ExecutionId]:
    """The named executions that do not exist."""
    full_ids = {ids.parse_execution_id(each) for each in named}
    there = await reader.select_as(ids.ExecutionId, "namespaces_of", **id_columns(full_ids))
    return full_ids.difference(there)


async def _waits(reader: Reader, waiting: Sequence[str]) -> rules.Waits:
    """What these wait for, transitively, unless something else will move it."""
    waits: dict[ids.ExecutionId, set[ids.ExecutionId]] = {}
    full_ids = [ids.parse_execution_id(each) for each in waiting]
    for _ in range(RING_MAX):
        if not full_ids or len(waits) > RING_WAITS_MAX:
            break
        rows = await reader.select_as(
            IdleWait, "list_idle_waits", **id_columns(full_ids), limit=RING_WAITS_MAX
        )
        found: dict[ids.ExecutionId, set[ids.ExecutionId]] = {}
        for row in rows:
            found.setdefault(row.execution_id, set()).add(row.awaited)
        if len(rows) == RING_WAITS_MAX:
            # It may wait for more than is seen here.
            found.pop(rows[-1].execution_id)
        waits |= found
        full_ids = sorted({other for each in found.values() for other in each} - waits.keys())
    return waits


class AuditRow(rules.Circumstances, frozen=True, kw_only=True):
    execution_id: ids.ExecutionId
    place: int
    """Its place on the page."""


class IdleWait(Struct, frozen=True):
    execution_id: ids.ExecutionId
    awaited_partition_key: int
    awaited_execution_id: str

    @property
    def awaited(self) -> ids.ExecutionId:
        return ids.make_execution_id(self.awaited_partition_key, self.awaited_execution_id)


class StrayRow(Struct, frozen=True):
    execution_id: ids.ExecutionId
    belongings: str


class GuardRow(Struct, frozen=True):
    namespace: str
    idempotency_key: str
    execution: str


class FlowCounts(Struct, frozen=True, kw_only=True):
    """What a flow counts, and what it has."""

    partition_key: int
    flow_id: str
    place: int
    miscounted: bool
    node_count: int
    edge_count: int
    ended_count: int
    members: int
    edges: int
    told: int


def _stray(execution_id: ids.ExecutionId, belongings: str) -> rules.Complaint:
    return rules.Complaint(
        wrong=rules.Wrong.STRAY,
        execution_id=execution_id,
        detail=f"a row of {belongings} is left of it",
    )


def _sorted(found: set[rules.Complaint]) -> tuple[rules.Complaint, ...]:
    return tuple(sorted(found, key=lambda each: (each.execution_id, each.detail)))


def _flow_complaint(row: FlowCounts) -> rules.Complaint:
    """About a whole flow: it carries the flow's uuid as its subject."""
    counts = f"{row.node_count}, {row.edge_count}, {row.ended_count}"
    found = f"{row.members}, {row.edges}, {row.told}"
    return rules.Complaint(
        wrong=rules.Wrong.MISCOUNTED,
        execution_id=ids.make_execution_id(row.partition_key, row.flow_id),
        detail=f"a flow that counts {counts} members, edges and endings, and has {found}",
    )


def _complaints(row: AuditRow) -> list[rules.Complaint]:
    wrongs = rules.wrongs(row)
    by = "" if wrongs == [rules.Wrong.UNOWNED] else f", moved by {rules.mover(row)}"
    detail = f"{row.lifecycle_phase}, {row.eligibility_state}{by}"
    return [
        rules.Complaint(wrong=wrong, execution_id=row.execution_id, detail=detail)
        for wrong in wrongs
    ]


def _parse(cursor: object) -> tuple[str, int, str]:
    """The phase, a partition, and the place where its next page begins."""
    text = check_optional_text("cursor", cursor, bytes_max=CURSOR_BYTES_MAX)
    if not text:
        return _EXECUTIONS, -1, ids.FIRST_UUID
    phase, _, rest = text.partition("/")
    partition, _, place = rest.partition("/")
    index = ids.parse_index(partition)
    if phase not in (_EXECUTIONS, _FLOWS, _STRAYS, _GUARDS, _WAITING) or index is None:
        raise InvalidInput("cursor", FROM_A_PAGE, cursor)
    by_uuid = phase in (_EXECUTIONS, _FLOWS)
    return phase, index, ids.parse_uuid("cursor", place) if by_uuid else place


def _parse_key(place: str) -> tuple[str, str]:
    """The namespace and key after which the next page of keys begins."""
    if not place:
        return "", ""
    try:
        return msgspec.json.decode(place, type=tuple[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput("cursor", FROM_A_PAGE, place) from error
