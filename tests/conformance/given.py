"""Executions brought into a state through the operations that lead there."""

import itertools
from typing import Protocol, TypedDict

from msgspec import structs

from flowfabric import Engine
from flowfabric.core import situations
from flowfabric.core.conditions import Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import ExecutionId
from flowfabric.core.leases import Fence
from flowfabric.core.results import Claimed, Created, Marked, Revoked
from flowfabric.core.situations import Situation
from flowfabric.core.states import FailureClass
from flowfabric.testing import SettableClock

TTL_MS = 30_000
BACKOFF_MS = 5_000
DAY_MS = 24 * 60 * 60 * 1_000
RETRYING = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 5_000}}}
TAGGED = {"namespace": "shop", "tags": {"cairn.instance_id": "i-1"}}
"""Fields of an execution that its events repeat."""
UNKNOWN_ID = "{fp:86}:00000000-0000-4000-8000-000000000000"
NOBODY = "00000000-0000-4000-8000-00000000dead"
"""A well-formed id that nothing has."""


NO_GRANT = f"claim:{NOBODY}:5:{'00' * 16}"
"""A well-formed key to nothing."""


class WorkerNames(TypedDict):
    worker_id: str
    worker_instance_id: str


WORKER = WorkerNames(worker_id="worker", worker_instance_id="worker-instance")
OTHER_WORKER = WorkerNames(worker_id="other", worker_instance_id="other-instance")


def new(**fields: object) -> NewExecution:
    """A request with any fields replaced, also by values of a wrong type."""
    return structs.replace(NewExecution(execution_kind="work"), **fields)


def fence_of(claimed: Claimed, **fields: object) -> Fence:
    fence = Fence(
        lease_id=claimed.lease_id,
        lease_epoch=claimed.lease_epoch,
        attempt_id=claimed.attempt_id,
    )
    return structs.replace(fence, **fields)


class HasExecutionId(Protocol):
    @property
    def execution_id(self) -> ExecutionId: ...


class Given:
    """Each method makes one execution. `**fields` are those of `NewExecution`."""

    def __init__(self, engine: Engine, clock: SettableClock) -> None:
        self.engine = engine
        self.clock = clock
        self.worker_numbers = itertools.count(1)

    # Ready or waiting

    async def waiting(self, **fields: object) -> ExecutionId:
        created = await self.engine.create_execution(new(**fields))
        assert isinstance(created, Created), created
        return created.execution_id

    async def delayed(self, by_ms: int = 60_000, **fields: object) -> ExecutionId:
        return await self.waiting(delay_until_ms=self.clock.now_ms() + by_ms, **fields)

    # Held by a worker

    async def running(self, **fields: object) -> Claimed:
        """Takes `ttl_ms` too: how long the lease lasts."""
        ttl_ms = fields.pop("ttl_ms", TTL_MS)
        assert isinstance(ttl_ms, int)
        return await self.claimed(await self.waiting(**fields), ttl_ms)

    async def claimed(self, execution_id: str, ttl_ms: int = TTL_MS) -> Claimed:
        """Hand exactly this waiting execution to the next worker."""
        worker_id = f"worker-{next(self.worker_numbers)}"
        instance_id = f"{worker_id}-instance"
        required = (
            await self.engine.read_exec_core_fields(execution_id, ["required_capabilities"])
        )["required_capabilities"]
        grant = await self.engine.issue_claim_grant(
            execution_id,
            worker_id=worker_id,
            worker_instance_id=instance_id,
            capabilities=required.split(",") if required else (),
        )
        return await self.engine.claim_execution(
            execution_id,
            worker_id=worker_id,
            worker_instance_id=instance_id,
            grant_key=grant.grant_key,
            lease_ttl_ms=ttl_ms,
        )

    async def taken(self, lane_id: str = "default", ttl_ms: int = TTL_MS) -> Claimed:
        """Whatever is best in the lane, handed to the next worker; a lost lease counts too."""
        worker_id = f"worker-{next(self.worker_numbers)}"
        claimed = await self.engine.claim(
            lane_id,
            worker_id=worker_id,
            worker_instance_id=f"{worker_id}-instance",
            lease_ttl_ms=ttl_ms,
        )
        assert claimed is not None, f"lane {lane_id} has nothing ready"
        return claimed

    async def expired_lease(self, **fields: object) -> Claimed:
        """Its lease has ended, and the engine has noticed."""
        claimed = await self.overdue_lease(**fields)
        marked = await self.engine.mark_lease_expired_if_due(claimed.execution_id)
        assert isinstance(marked, Marked), marked
        return claimed

    async def overdue_lease(self, **fields: object) -> Claimed:
        """Its lease has ended, and nobody has noticed. Moves the clock."""
        claimed = await self.running(**fields)
        self.clock.set_ms(claimed.lease_expires_at_ms)
        return claimed

    async def revoked(self, reason: str = "drained", **fields: object) -> Claimed:
        claimed = await self.running(**fields)
        answer = await self.engine.revoke_lease(claimed.execution_id, reason=reason)
        assert isinstance(answer, Revoked), answer
        return claimed

    # Set aside

    async def retrying(self, reason: str = "try again", **fields: object) -> Claimed:
        """Its attempt failed and another follows after `BACKOFF_MS`."""
        claimed = await self.running(**{"policy": RETRYING} | fields)
        await self.engine.fail(claimed.handle, reason)
        return claimed

    async def parked(self, by_ms: int = 60_000, **fields: object) -> Claimed:
        """Delayed by its worker; the same attempt continues."""
        claimed = await self.running(**fields)
        await self.engine.delay(claimed.handle, self.clock.now_ms() + by_ms)
        return claimed

    async def blocked(self, **fields: object) -> Claimed:
        """Changed code stopped it; the same attempt continues when the code fits."""
        claimed = await self.running(**fields)
        await self.engine.block_on_code(claimed.handle, "charge", "the code has changed")
        return claimed

    async def waiting_children(self, **fields: object) -> Claimed:
        """Its attempt waits for the end of another execution, in a lane of its own."""
        claimed = await self.running(**fields)
        namespace = fields.get("namespace", "default")
        child = await self.delayed(DAY_MS, lane_id="children", namespace=namespace)
        await self.engine.await_executions(claimed.handle, [child])
        return claimed

    async def suspended(self, **fields: object) -> Claimed:
        """Its attempt waits for a signal that has not come."""
        claimed = await self.running(**fields)
        await self.engine.suspend(claimed.handle, resume_condition=Single("gate"))
        return claimed

    async def gated(self, reason: str = "waiting_for_budget", **fields: object) -> ExecutionId:
        """Kept back from every worker."""
        execution_id = await self.waiting(**fields)
        await self.engine.block_execution_for_admission(execution_id, reason=reason)
        return execution_id

    async def resumable(self, **fields: object) -> Claimed:
        """Parked, due and promoted: ready to continue its attempt."""
        claimed = await self.parked(by_ms=0, **fields)
        await self.engine.promote_delayed(claimed.execution_id)
        return claimed

    # Ended

    async def completed(self, result: bytes | None = b"done", **fields: object) -> Claimed:
        claimed = await self.running(**fields)
        await self.engine.complete(claimed.handle, result)
        return claimed

    async def failed(self, reason: str = "broken", **fields: object) -> Claimed:
        claimed = await self.running(**fields)
        await self.engine.fail(claimed.handle, reason, failure_class=FailureClass.PERMANENT)
        return claimed

    async def cancelled(self, reason: str = "not needed", **fields: object) -> ExecutionId:
        execution_id = await self.waiting(**fields)
        await self.engine.cancel_execution(execution_id, reason=reason)
        return execution_id

    async def expired(self, **fields: object) -> ExecutionId:
        """Its deadline passed before a worker came."""
        deadline_ms = self.clock.now_ms()
        execution_id = await self.waiting(execution_deadline_at_ms=deadline_ms, **fields)
        await self.engine.expire_execution(execution_id, "execution_deadline")
        return execution_id

    # Any

    async def state(self, name: str, **fields: object) -> ExecutionId:
        """The state made by the method `name`, for tables of states."""
        made: HasExecutionId | ExecutionId = await getattr(self, name)(**fields)
        return made if isinstance(made, str) else made.execution_id


WAITING: tuple[str, ...] = (Situation.WAITING, Situation.RESUMABLE)
IN_FLOWS = (Situation.HELD, Situation.SKIPPED)
SET_ASIDE: tuple[str, ...] = tuple(each for each in situations.SET_ASIDE if each not in IN_FLOWS)
LOST: tuple[str, ...] = (Situation.EXPIRED_LEASE, Situation.REVOKED)
ENDED: tuple[str, ...] = tuple(each for each in situations.ENDED if each not in IN_FLOWS)
EVERY_STATE: tuple[str, ...] = (*WAITING, *SET_ASIDE, *situations.HELD_BY_WORKER, *LOST, *ENDED)
"""Every situation outside flows. `Given` has a method of that name for each."""
