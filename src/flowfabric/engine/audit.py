"""Looking for what must not be; see `core.audit`. Reads only, a page at a time.

The executions come first, in the order of their ids, then the counts of flows, then the
rows that belong to executions and flows, a few partitions at a time, and at last the keys
and waits that name an execution.
"""

from collections.abc import Sequence

import msgspec

from flowfabric.core.audit import AuditPage, Circumstances, Complaint, Wrong, mover, wrongs
from flowfabric.core.checks import check_int, check_optional_text
from flowfabric.core.ids import (
    FIRST_UUID,
    ExecutionId,
    make_execution_id,
    parse_execution_id,
    parse_uuid,
)
from flowfabric.core.limits import PAGE_MAX
from flowfabric.core.partitions import parse_index
from flowfabric.engine.unit import Operations, row_execution_id
from flowfabric.errors import InvalidInput
from flowfabric.store.base import Reader, Row

PARTITIONS_PER_PAGE = 16
"""Of how many partitions one page looks at all rows."""
_EXECUTIONS = "executions"
_FLOWS = "flows"
_STRAYS = "strays"
_REFERENCES = "references"
_FLAGS = (
    "ready",
    "cancel_requested",
    "in_flow",
    "flow_exists",
    "route_exists",
    "suspended",
    "awaits_child",
    "cancel_queued",
    "join_pending",
    "join_moves",
)
FLOWS_PER_PAGE = 100


class Audits(Operations):
    async def audit(self, *, cursor: str | None = None, limit: int = PAGE_MAX) -> AuditPage:
        """Complaints about a page of everything there is; go on until there is no cursor.

        Each page is one look at the database. What changes between two pages may be missed,
        or be seen half-way: look again before you act on it.
        """
        check_int("limit", limit, 1, PAGE_MAX)
        phase, partition_key, uuid = _parse(cursor)
        if phase == _EXECUTIONS:
            return await self._audit_executions(partition_key, uuid, limit)
        if phase == _FLOWS:
            return await self._audit_flows(uuid, min(limit, FLOWS_PER_PAGE))
        if phase == _STRAYS:
            return await self._audit_rows(partition_key, limit)
        return await self._audit_references(limit)

    async def _audit_executions(self, partition_key: int, uuid: str, limit: int) -> AuditPage:
        async def body(reader: Reader) -> Sequence[Row]:
            return await reader.select(
                "audit_executions",
                after_partition_key=partition_key,
                after_execution_id=uuid,
                limit=limit,
            )

        rows = await self.store.read(body)
        last = rows[-1] if rows and int(str(rows[-1]["place"])) == limit else None
        return AuditPage(
            complaints=tuple(complaint for row in rows for complaint in _complaints(row)),
            cursor=f"{_FLOWS}/0/{FIRST_UUID}"
            if last is None
            else f"{_EXECUTIONS}/{last['partition_key']!s}/{last['execution_id']!s}",
        )

    async def _audit_flows(self, after: str, limit: int) -> AuditPage:
        async def body(reader: Reader) -> tuple[Sequence[Row], Sequence[Row]]:
            flows = await reader.select("audit_flow_counts", after_flow_id=after, limit=limit)
            joins = await reader.select("audit_join_counts", after_flow_id=after, limit=limit)
            return flows, joins

        flows, joins = await self.store.read(body)
        last = flows[-1] if flows and int(str(flows[-1]["place"])) == limit else None
        found = [_flow_complaint(row) for row in flows if row["miscounted"]]
        found += [
            Complaint(
                wrong=Wrong.MISCOUNTED,
                execution_id=row_execution_id(row),
                detail="its join counts other edges than it has",
            )
            for row in joins
        ]
        return AuditPage(
            complaints=tuple(found),
            cursor=f"{_STRAYS}/0" if last is None else f"{_FLOWS}/0/{last['flow_id']!s}",
        )

    async def _audit_rows(self, first: int, limit: int) -> AuditPage:
        last = first + PARTITIONS_PER_PAGE - 1

        async def body(reader: Reader) -> Sequence[Row]:
            return await reader.select(
                "audit_strays", first_partition=first, last_partition=last, limit=limit
            )

        found = {_stray(row_execution_id(row), row) for row in await self.store.read(body)}
        more = last + 1 < self.deployment.partitions.num_flow
        return AuditPage(
            complaints=_sorted(found),
            cursor=f"{_STRAYS}/{last + 1}" if more else f"{_REFERENCES}/0",
        )

    async def _audit_references(self, limit: int) -> AuditPage:
        async def body(reader: Reader) -> Sequence[Row]:
            return await reader.select("audit_references", limit=limit)

        rows = await self.store.read(body)
        found = {_stray(parse_execution_id(str(row["gone"])), row) for row in rows}
        return AuditPage(complaints=_sorted(found), cursor=None)


def _stray(execution_id: ExecutionId, row: Row) -> Complaint:
    return Complaint(
        wrong=Wrong.STRAY,
        execution_id=execution_id,
        detail=f"a row of {row['belongings']!s} is left of it",
    )


def _sorted(found: set[Complaint]) -> tuple[Complaint, ...]:
    return tuple(sorted(found, key=lambda each: (each.execution_id, each.detail)))


def _flow_complaint(row: Row) -> Complaint:
    """About a whole flow: it carries the flow's uuid as its subject."""
    counts, found = (
        ", ".join(str(row[name]) for name in names)
        for names in (("node_count", "edge_count", "ended_count"), ("members", "edges", "told"))
    )
    return Complaint(
        wrong=Wrong.MISCOUNTED,
        execution_id=make_execution_id(int(str(row["partition_key"])), str(row["flow_id"])),
        detail=f"a flow that counts {counts} members, edges and endings, and has {found}",
    )


def _complaints(row: Row) -> list[Complaint]:
    columns = {name: value for name, value in row.items() if value is not None}
    flags = {name: bool(columns[name]) for name in _FLAGS}
    about = msgspec.convert(columns | flags, Circumstances, strict=False)
    by = "" if wrongs(about) == [Wrong.UNOWNED] else f", moved by {mover(about)}"
    return [
        Complaint(
            wrong=wrong,
            execution_id=row_execution_id(row),
            detail=f"{about.lifecycle_phase}, {about.eligibility_state}{by}",
        )
        for wrong in wrongs(about)
    ]


def _parse(cursor: object) -> tuple[str, int, str]:
    text = check_optional_text("cursor", cursor)
    if not text:
        return _EXECUTIONS, -1, FIRST_UUID
    phase, _, rest = text.partition("/")
    partition, _, uuid = rest.partition("/")
    index = parse_index(partition)
    if phase not in (_EXECUTIONS, _FLOWS, _STRAYS, _REFERENCES) or index is None:
        raise InvalidInput("cursor", "must be one that an earlier page ended with", cursor)
    by_uuid = phase in (_EXECUTIONS, _FLOWS)
    return phase, index, parse_uuid("cursor", uuid) if by_uuid else FIRST_UUID
