"""Reading one execution with its steps, attempts and children."""

from collections.abc import Sequence

import msgspec
from msgspec import structs

from flowfabric.core.ids import ExecutionId, partition_of, uuid_of
from flowfabric.core.limits import PAGE_MAX
from flowfabric.core.records import Step
from flowfabric.core.steps import in_order
from flowfabric.core.views import ChildView, ExecutionDetails, details
from flowfabric.engine.reads import attempts_of, find, kept_signals, tags_of
from flowfabric.engine.unit import Operations, row_execution_id
from flowfabric.store.base import Reader, Row


class Details(Operations):
    async def inspect_execution(self, execution_id: str) -> ExecutionDetails | None:
        """An execution with its steps, attempts and children; None if there is none."""
        asked = self.check_execution_id(execution_id)

        async def body(reader: Reader) -> ExecutionDetails | None:
            execution = await find(reader, asked)
            if execution is None:
                return None
            seen = details(
                execution,
                await tags_of(reader, asked),
                steps=await steps_of(reader, asked),
                attempts=await attempts_of(reader, execution),
                children=await children_of(reader, asked),
            )
            return structs.replace(seen, kept_signals=await kept_signals(reader, execution))

        return await self.store.read(body)


async def steps_of(reader: Reader, execution_id: ExecutionId) -> tuple[Step, ...]:
    found = await reader.select_records(
        Step,
        "list_steps",
        partition_key=partition_of(execution_id),
        execution_id=uuid_of(execution_id),
    )
    return tuple(in_order(found))


async def children_of(reader: Reader, execution_id: ExecutionId) -> tuple[ChildView, ...]:
    """At most `PAGE_MAX` of them."""
    rows: Sequence[Row] = await reader.select("list_children", parent=execution_id, limit=PAGE_MAX)
    return tuple(
        msgspec.convert({**row, "execution_id": row_execution_id(row)}, ChildView) for row in rows
    )
