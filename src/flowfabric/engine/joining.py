"""Taking part in the caller's own database transaction.

The same units of work run over the caller's connection. Nothing is committed
here: what was written exists if and when the caller commits.
"""

from collections.abc import Sequence

from flowfabric.core.checks import check_list
from flowfabric.core.creation import Checked, NewExecution
from flowfabric.core.decision import Refusal
from flowfabric.core.handles import Handle
from flowfabric.core.ids import partition_of, uuid_of
from flowfabric.core.lease import check_fence
from flowfabric.core.limits import BATCH_MAX, KEY_WAIT_MS
from flowfabric.core.model import Execution
from flowfabric.core.results import CreateResult
from flowfabric.core.transition import Subject
from flowfabric.engine.creation import CreateBody, Creation, saying_who_decides
from flowfabric.engine.routes import Registration
from flowfabric.engine.unit import fence_of
from flowfabric.errors import NotFound
from flowfabric.store.base import Body, Transaction


class Joining(Creation):
    async def create_executions_on(
        self, connection: object, requests: Sequence[NewExecution]
    ) -> list[CreateResult]:
        """Create executions inside the transaction of `connection`.

        An asyncpg or psycopg connection, a SQLAlchemy connection or session (sync or
        async) on Postgres; a `sqlite3.Connection` to the same file on SQLite.
        """
        checked = self._check_all(requests)
        if self.store.writes_beside:
            await self.know_routes(checked)
        with saying_who_decides(checked):
            return await self.store.transact_on(
                connection, CreateBody(checked, self.routes).run, lock_wait_ms=_patience(checked)
            )

    def create_executions_on_sync(
        self, connection: object, requests: Sequence[NewExecution]
    ) -> list[CreateResult]:
        """The same for a connection that is not async, on the calling thread."""
        checked = self._check_all(requests)
        registration = Registration(checked, self.routes)
        if registration.unknown and self.store.writes_beside:
            self.routes.update(self.store.transact_apart(registration.run))
        with saying_who_decides(checked):
            return self.store.transact_on_sync(
                connection, CreateBody(checked, self.routes).run, lock_wait_ms=_patience(checked)
            )

    def _check_all(self, requests: Sequence[NewExecution]) -> list[Checked]:
        check_list("requests", requests, 0, BATCH_MAX)
        return [self.check_request(each) for each in requests]

    async def check_fence_on(self, connection: object, handle: Handle) -> None:
        """Raise unless the handle's lease is live, and keep it so until `connection` commits."""
        await self.store.transact_on(connection, self._fencing(handle))

    def check_fence_on_sync(self, connection: object, handle: Handle) -> None:
        """The same for a connection that is not async, on the calling thread."""
        self.store.transact_on_sync(connection, self._fencing(handle))

    def _fencing(self, handle: Handle) -> Body[None]:
        opened = self.open_handle(handle)
        partition, own_uuid = partition_of(opened.execution_id), uuid_of(opened.execution_id)

        async def body(tx: Transaction) -> None:
            found = await tx.select_records(
                Execution, "share_execution", partition_key=partition, execution_id=own_uuid
            )
            if not found:
                raise NotFound("execution", opened.execution_id)
            subject = Subject(execution=found[0], attempt=None)
            now_ms = await tx.now_ms()
            try:
                check_fence(subject, fence_of(opened), now_ms, self.config.retention_ms)
            except Refusal as refusal:
                raise refusal.error from None

        return body


def _patience(checked: Sequence[Checked]) -> int | None:
    """How long to wait for others, if there may be others who decide the same."""
    return KEY_WAIT_MS if any(each.idempotency_key for each in checked) else None
