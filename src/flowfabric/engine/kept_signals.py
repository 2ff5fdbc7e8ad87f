"""Signals that no wait has taken yet: listing them, and taking them while working.

A handler that waits in one branch while another works keeps its lease. It asks here
whether what has come meanwhile meets its condition; `kept_topic` tells it when to ask.
"""

from msgspec import structs

from flowfabric.core.checks import check_bool
from flowfabric.core.conditions import Condition, referenced_waitpoint_keys, takes_own_name
from flowfabric.core.handles import Handle
from flowfabric.core.ids import SuspensionId, parse_uuid
from flowfabric.core.records import Execution, Suspension
from flowfabric.core.suspension import RESUMED, decide_take, with_pending
from flowfabric.core.transitions import Decision, Subject
from flowfabric.core.waitpoints import BoundWaitpoint, SuspendRequest
from flowfabric.engine.suspension_reads import SuspensionView, Waitpoints
from flowfabric.engine.suspensions import (
    SuspendOptions,
    answered,
    checked_request,
    find_for,
    load_subject,
)
from flowfabric.engine.unit import execution_key, fence_of, settle_in
from flowfabric.errors import FlowFabricError
from flowfabric.store.base import Reader, Transaction


def kept_topic(worker_instance_id: str) -> str:
    """Hinted when a signal reaches an execution that this worker runs."""
    return f"kept:{worker_instance_id}"


class KeptSignals(Waitpoints):
    async def take_signals(
        self,
        handle: Handle | bytes,
        *,
        suspension_id: str,
        resume_condition: Condition,
        announce: bool = False,
    ) -> SuspensionView | None:
        """Take the kept signals that meet the condition, and go on; None while they do not.

        The lease is kept. What is taken counts for no other wait, and the waitpoints made
        for it are closed, as by a pause that ends at once. `suspension_id` names the wait: a
        repeat, of whichever attempt, gets what was taken first, and so does a suspend with
        this id as its idempotency key. To `announce` the wait makes waitpoints for its names,
        for ten minutes, so that senders and people see it while it is not met.
        """
        opened = self.open_handle(handle)
        named = SuspensionId(parse_uuid("suspension_id", suspension_id))
        options: SuspendOptions = {
            "suspension_id": named,
            "idempotency_key": named,
            "take_pending": True,
        }
        request = checked_request(resume_condition, options)
        announced = _waitpoints_of(request) if check_bool("announce", announce) else ()
        taken = await self.describe_suspension(opened.execution_id, named)
        if taken is not None and taken.resumed:
            return taken
        if not announce and not await self._may_keep(opened):
            return None

        async def body(tx: Transaction) -> bool | FlowFabricError:
            subject = await load_subject(tx, opened.execution_id)
            timing = self.timing(await tx.now_ms())
            wanted = with_pending(request, subject.waitpoints, timing.now_ms)
            if await _is_met(tx, subject, named):
                return True
            found = await find_for(tx, subject, wanted, None)

            def decide() -> Decision[bool]:
                return decide_take(
                    subject, fence_of(opened), wanted, found, timing, announced=announced
                )

            return await settle_in(tx, decide, timing.now_ms)

        if not answered(await self.store.transact(body)):
            return None
        return await self.describe_suspension(opened.execution_id, named)

    async def _may_keep(self, handle: Handle) -> bool:
        """A look without locks: most of the time there is nothing to take."""
        key = execution_key(handle.execution_id)

        async def body(reader: Reader) -> bool:
            execution = (await reader.get(Execution, [key])).get(key)
            # One that is gone, or somebody else's, is refused under lock.
            return execution is None or execution.keeps_signals or _not_held(execution, handle)

        return await self.store.read(body)


def _waitpoints_of(request: SuspendRequest) -> list[BoundWaitpoint]:
    condition = request.condition
    names = referenced_waitpoint_keys(condition)
    return [
        structs.replace(bound, own_name_only=takes_own_name(condition, bound.waitpoint_key))
        for bound in request.fresh
        if bound.waitpoint_key in names
    ]


async def _is_met(tx: Transaction, subject: Subject, suspension_id: SuspensionId) -> bool:
    """Whether the wait was met since it was looked at without locks."""
    execution = subject.execution
    key = (execution.partition_key, execution.execution_id, suspension_id)
    suspension = (await tx.get(Suspension, [key])).get(key)
    return suspension is not None and suspension.close_reason == RESUMED


def _not_held(execution: Execution, handle: Handle) -> bool:
    return execution.lease_id != handle.lease_id
