"""How executions ended, read for whoever waits for them."""

from collections.abc import Sequence

from msgspec import Struct

from flowfabric.core.checks import check_list
from flowfabric.core.ids import ExecutionId, partition_of, uuid_of
from flowfabric.core.limits import BATCH_MAX
from flowfabric.core.policies import in_words
from flowfabric.core.states import PublicState
from flowfabric.engine.unit import Operations, row_execution_id
from flowfabric.store.base import Reader, Row


class Outcome(Struct, frozen=True, kw_only=True):
    """The end of one execution."""

    execution_id: ExecutionId
    public_state: PublicState
    result: bytes | None
    reason: str
    """Why it failed, expired or was cancelled, in words; empty otherwise."""


class Found(Struct, frozen=True, kw_only=True):
    """What is known of the ends of some executions; the others have not ended."""

    ended: dict[ExecutionId, Outcome]
    missing: frozenset[ExecutionId]
    """There is no such execution, or no longer."""


class Outcomes(Operations):
    async def read_outcomes(self, execution_ids: Sequence[str]) -> dict[ExecutionId, Outcome]:
        """How the given executions ended; those that have not, or do not exist, are left out."""
        return (await self.find_outcomes(execution_ids)).ended

    async def find_outcomes(self, execution_ids: Sequence[str]) -> Found:
        """How the given executions ended, and which of them do not exist."""
        check_list("execution_ids", execution_ids, 0, BATCH_MAX)
        asked = [self.check_execution_id(each) for each in execution_ids]
        if not asked:
            return Found(ended={}, missing=frozenset())

        async def body(reader: Reader) -> Sequence[Row]:
            return await reader.select(
                "read_outcomes",
                partition_keys=[partition_of(each) for each in asked],
                execution_ids=[uuid_of(each) for each in asked],
            )

        rows = {row_execution_id(row): row for row in await self.store.read(body)}
        ended = {each: row for each, row in rows.items() if row["public_state"] is not None}
        return Found(
            ended={each: _outcome(row) for each, row in ended.items()},
            missing=frozenset(rows.keys() - ended.keys()),
        )


def _outcome(row: Row) -> Outcome:
    result = row["result"]
    assert result is None or isinstance(result, bytes)
    policy = row["expired_policy"]
    reason = str(row["cancellation_reason"] or row["failure_reason"] or "")
    return Outcome(
        execution_id=row_execution_id(row),
        public_state=PublicState(str(row["public_state"])),
        result=result,
        reason=reason if policy is None else in_words(reason, str(policy)),
    )
