"""Taking part in the caller's own database transaction.

The same units of work run over the caller's connection. Nothing is committed
here: what was written exists if and when the caller commits.
"""

from collections.abc import Callable, Sequence

from flowfabric.core.checks import check_list
from flowfabric.core.creation import Checked, NewExecution
from flowfabric.core.handles import Handle
from flowfabric.core.leases import decide_hold
from flowfabric.core.limits import BATCH_MAX, FENCE_MS_MAX, FENCE_WAIT_MS_MIN, KEY_WAIT_MS
from flowfabric.core.records import Execution
from flowfabric.core.results import CreateResult
from flowfabric.engine.creation import CreateBody, Creation, RouteForgotten, saying_who_decides
from flowfabric.engine.unit import Registration, execution_key, fence_of
from flowfabric.errors import NotFound
from flowfabric.store.base import Body, Transaction

BrokenBy = Callable[[BaseException], bool]
"""Whether an error means that the database went away before a transaction could commit."""


class Joining(Creation):
    async def create_executions_on(
        self, connection: object, requests: Sequence[NewExecution]
    ) -> list[CreateResult]:
        """Create executions inside the transaction of `connection`.

        An asyncpg or psycopg connection, a SQLAlchemy connection or session (sync or
        async) on Postgres; a `sqlite3.Connection` to the same file on SQLite.
        """
        return await self.create_checked_on(connection, self._check_all(requests))

    async def create_checked_on(
        self, connection: object, checked: Sequence[Checked]
    ) -> list[CreateResult]:
        """The same for requests that `check_request` has passed."""
        check_list("requests", checked, 0, BATCH_MAX)
        if not self.store.writes_beside:
            return await self._create_on(connection, checked, registers=True)
        await self.know_routes(checked)
        try:
            return await self._create_on(connection, checked, registers=False)
        except RouteForgotten:
            await self.know_routes(checked)
            return await self._create_on(connection, checked, registers=True)

    async def _create_on(
        self, connection: object, checked: Sequence[Checked], *, registers: bool
    ) -> list[CreateResult]:
        body = CreateBody(checked, self.routes, registers=registers, plain=self.plain)
        with saying_who_decides(checked):
            return await self.store.transact_on(
                connection, body.run, lock_wait_ms=_patience(checked)
            )

    def create_executions_on_sync(
        self, connection: object, requests: Sequence[NewExecution]
    ) -> list[CreateResult]:
        """The same for a connection that is not async, on the calling thread."""
        return self.create_checked_on_sync(connection, self._check_all(requests))

    def create_checked_on_sync(
        self, connection: object, checked: Sequence[Checked]
    ) -> list[CreateResult]:
        check_list("requests", checked, 0, BATCH_MAX)
        if not self.store.writes_beside:
            self.forget_routes()
            return self._create_on_sync(connection, checked, registers=True)
        self._know_routes_sync(checked)
        try:
            return self._create_on_sync(connection, checked, registers=False)
        except RouteForgotten:
            self._know_routes_sync(checked)
            return self._create_on_sync(connection, checked, registers=True)

    def _know_routes_sync(self, checked: Sequence[Checked]) -> None:
        self.forget_routes()
        registration = Registration(checked, self.routes)
        if registration.unknown:
            self.routes.update(self.store.transact_apart(registration.run))

    def _create_on_sync(
        self, connection: object, checked: Sequence[Checked], *, registers: bool
    ) -> list[CreateResult]:
        body = CreateBody(checked, self.routes, registers=registers, plain=self.plain)
        with saying_who_decides(checked):
            return self.store.transact_on_sync(
                connection, body.run, lock_wait_ms=_patience(checked)
            )

    def _check_all(self, requests: Sequence[NewExecution]) -> list[Checked]:
        check_list("requests", requests, 0, BATCH_MAX)
        return self.check_requests(requests)

    async def enter_fence_on(self, connection: object, handle: Handle) -> BrokenBy:
        """Raise unless the handle's lease is live, and keep it so until `connection` commits.

        Its row stays locked until then, and the lease lasts for `FENCE_MS_MAX` in there;
        `leave_fence_on`, just before the commit, gives it its usual time again. Raises
        `LockTimeout`, with their transaction still sound, when others keep the row locked for
        longer than a sixth of the lease; ask again then.

        Returns what tells of an error whether it means that the database went away before
        that commit.
        """
        body = self._holding(handle, FENCE_MS_MAX)
        return await self.store.transact_on(connection, body, lock_wait_ms=_fence_wait_ms(handle))

    async def leave_fence_on(self, connection: object, handle: Handle) -> None:
        """Raise if the transaction has taken longer than a fence may last."""
        body = self._holding(handle, handle.lease_ttl_ms)
        await self.store.transact_on(connection, body, lock_wait_ms=_fence_wait_ms(handle))

    def enter_fence_on_sync(self, connection: object, handle: Handle) -> BrokenBy:
        """`enter_fence_on` for a connection that is not async, on the calling thread."""
        body = self._holding(handle, FENCE_MS_MAX)
        return self.store.transact_on_sync(connection, body, lock_wait_ms=_fence_wait_ms(handle))

    def leave_fence_on_sync(self, connection: object, handle: Handle) -> None:
        """`leave_fence_on` for a connection that is not async, on the calling thread."""
        body = self._holding(handle, handle.lease_ttl_ms)
        self.store.transact_on_sync(connection, body, lock_wait_ms=_fence_wait_ms(handle))

    def _holding(self, handle: Handle, lease_ttl_ms: int) -> Body[BrokenBy]:
        opened = self.open_handle(handle)
        key = execution_key(opened.execution_id)
        lasts_ms = max(lease_ttl_ms, opened.lease_ttl_ms)

        async def body(tx: Transaction) -> BrokenBy:
            execution = (await tx.lock(Execution, [key])).get(key)
            if execution is None:
                raise NotFound("execution", opened.execution_id)
            decision = decide_hold(execution, fence_of(opened), lasts_ms, await tx.now_ms())
            await tx.save(decision.changes)
            return tx.broken_by

        return body


def _patience(checked: Sequence[Checked]) -> int | None:
    """How long to wait for others, if there may be others who decide the same."""
    return KEY_WAIT_MS if any(each.idempotency_key or each.own_id for each in checked) else None


def _fence_wait_ms(handle: Handle) -> int:
    return max(handle.lease_ttl_ms // 6, FENCE_WAIT_MS_MIN)
