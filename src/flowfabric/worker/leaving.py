"""How an execution leaves its worker before it has ended: parked, blocked, expired, or to rest.

Each of these is safe to repeat.
"""

import asyncio
from typing import Final

from flowfabric.core.checks import shorten
from flowfabric.core.limits import TEXT_BYTES_MAX
from flowfabric.core.policies import ATTEMPT_TIMEOUT
from flowfabric.core.records import TimeoutBehavior
from flowfabric.core.results import AlreadySatisfied
from flowfabric.engine.engine import Engine
from flowfabric.engine.suspensions import SuspendSatisfied
from flowfabric.errors import CodeMismatch, NotFound
from flowfabric.logs import open_log
from flowfabric.worker.held import HeldLease
from flowfabric.worker.parking import Parking, Pause

log = open_log(__name__)

TIMEOUT_GRACE_S: Final = 0.05
"""Waited after the deadline: the store, whose clock decides, should agree that it has passed."""
TIMEOUT_TRIES: Final = 20
OUTAGE_PAUSE_MS: Final = 1_000
"""How long a handler rests that met an outage where no verb of its context waits it out."""


async def park(engine: Engine, lease: HeldLease, parking: Parking) -> None:
    """Release the worker until what the branches of the handler wait for has come."""
    handle, until_ms = lease.handle, min(parking.until_ms, default=None)
    if parking.mismatch is not None:
        await block(engine, lease, parking.mismatch)
    elif parking.pause is not None:
        await _suspend(engine, lease, parking.pause)
    elif parking.executions:
        try:
            awaited = sorted(set(parking.executions))
            await engine.await_executions(handle, awaited, until_ms=until_ms)
        except NotFound as error:
            if error.id == handle.execution_id:
                raise
            # The handler runs again at once, and is told where it asks for the result.
            await engine.delay(handle, lease.store_now_ms())
    else:
        assert until_ms is not None
        await engine.delay(handle, until_ms)


async def _suspend(engine: Engine, lease: HeldLease, pause: Pause) -> None:
    outcome = await engine.suspend(
        lease.handle,
        resume_condition=pause.condition,
        waitpoints=pause.fresh,
        # An earlier attempt may have made some: their tokens are handed out already.
        take_pending=True,
        suspension_id=pause.suspension_id,
        timeout_in_ms=pause.timeout_in_ms,
        timeout_behavior=None if pause.timeout_in_ms is None else TimeoutBehavior.AUTO_RESUME,
        idempotency_key=pause.suspension_id,
    )
    if isinstance(outcome, SuspendSatisfied):
        # The handler is unwound already: it runs again at once, and finds the signals.
        await engine.delay(lease.handle, 0)


async def block(engine: Engine, lease: HeldLease, mismatch: CodeMismatch) -> None:
    """Wait for other code: a deploy brings it, or a person accepts this one."""
    detail = shorten(str(mismatch), TEXT_BYTES_MAX)
    log.warning("blocked by changed code: %s", detail, extra=lease.log_fields)
    await engine.block_on_code(lease.handle, mismatch.step_key, detail)


async def expire(engine: Engine, lease: HeldLease) -> None:
    """Let the store decide about the timeout, by its clock."""
    for _ in range(TIMEOUT_TRIES):
        answer = await engine.expire_execution(lease.handle.execution_id, ATTEMPT_TIMEOUT)
        if not (isinstance(answer, AlreadySatisfied) and answer.reason == "not_yet_due"):
            return
        await asyncio.sleep(TIMEOUT_GRACE_S)


async def rest(engine: Engine, lease: HeldLease) -> None:
    """Run again in a moment: no trouble of the database counts against a run."""
    await engine.delay(lease.handle, lease.store_now_ms() + OUTAGE_PAUSE_MS)
