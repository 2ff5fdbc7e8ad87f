"""What the audit says, and rows as no operation would write them."""

from collections.abc import Sequence

from msgspec import structs

from flowfabric import Engine
from flowfabric.core.audit import Complaint
from flowfabric.core.decisions import Changes
from flowfabric.core.ids import parse_execution_id
from flowfabric.core.records import Execution, Record
from flowfabric.engine.shell import execution_key
from flowfabric.store.base import Key, Transaction


async def complaints_of(engine: Engine, limit: int = 1_000) -> list[Complaint]:
    page = await engine.audit(limit=limit)
    found = list(page.complaints)
    while page.cursor is not None:
        page = await engine.audit(cursor=page.cursor, limit=limit)
        found += page.complaints
    return found


async def spoil(engine: Engine, execution_id: str, **fields: object) -> None:
    """Write what no operation would."""

    async def body(tx: Transaction) -> None:
        key = execution_key(parse_execution_id(execution_id))
        (execution,) = (await tx.lock(Execution, [key])).values()
        await tx.save(Changes(updates=(structs.replace(execution, **fields),)))

    await engine.store.transact(body)


async def delete(engine: Engine, record: type[Record], keys: Sequence[Key]) -> None:
    async def body(tx: Transaction) -> None:
        found = await tx.lock(record, list(keys))
        assert len(found) == len(keys)
        await tx.save(Changes(deletes=tuple(found.values())))

    await engine.store.transact(body)
