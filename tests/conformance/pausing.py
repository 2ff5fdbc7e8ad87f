"""Paused executions, and signals to them, in few words."""

import uuid
from typing import Unpack

from msgspec import Struct

from flowfabric import Engine
from flowfabric.core.conditions import ByName, Condition, Single
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId, WaitpointId
from flowfabric.core.records import SignalEffect, Suspension, Waitpoint
from flowfabric.core.results import Claimed
from flowfabric.core.signals import SignalAccepted, SignalDuplicate, SignalOptions, SignalResult
from flowfabric.core.waitpoints import PendingWaitpoint, SuspensionDetails, WaitpointToken
from flowfabric.engine.shell import execution_key
from flowfabric.engine.suspensions import Suspended, SuspendOptions
from flowfabric.store.base import Reader
from tests.conformance.given import Given

APPROVED = Single("gate", ByName("approved"))
"""The condition of a pause whose condition does not matter."""
SATISFIED = SignalEffect.SATISFIED
APPENDED = SignalEffect.APPENDED
DUPLICATE = SignalEffect.APPENDED_DUPLICATE
FAILED = SignalEffect.MATCHER_FAILED
TTL_MS = 10_000
"""How long a waitpoint made by `create` waits to be taken over."""


class Pause(Struct, frozen=True, kw_only=True):
    """A suspended execution, and all that is needed to reach it."""

    engine: Engine
    claimed: Claimed
    handle: Handle
    details: SuspensionDetails

    @property
    def execution_id(self) -> ExecutionId:
        return self.claimed.execution_id

    @property
    def waitpoint_id(self) -> WaitpointId:
        return self.details.waitpoint_id

    @property
    def token(self) -> WaitpointToken:
        return self.details.waitpoint_token

    def waitpoint(self, key: str) -> tuple[WaitpointId, WaitpointToken]:
        """Any waitpoint of the pause by its key."""
        known = {self.details.waitpoint_key: (self.waitpoint_id, self.token)} | {
            extra.waitpoint_key: (extra.waitpoint_id, extra.waitpoint_token)
            for extra in self.details.additional_waitpoints
        }
        return next(found for each, found in known.items() if each == key)

    async def deliver(
        self,
        signal_name: str = "approved",
        *,
        key: str | None = None,
        **options: Unpack[SignalOptions],
    ) -> SignalResult:
        """Deliver to the waitpoint of a key, or to the primary one, with its own token."""
        waitpoint_id, token = self.waitpoint(key or self.details.waitpoint_key)
        return await self.engine.deliver_signal(
            self.execution_id,
            waitpoint_id,
            waitpoint_token=token,
            signal_name=signal_name,
            **options,
        )

    async def signal(
        self, signal_name: str = "approved", key: str | None = None, source: str = "alice"
    ) -> SignalEffect:
        """Deliver a signal and tell what it did."""
        return effect_of(await self.deliver(signal_name, key=key, source_identity=source))


async def paused(
    given: Given,
    condition: Condition = APPROVED,
    *,
    fields: dict[str, object] | None = None,
    **options: Unpack[SuspendOptions],
) -> Pause:
    """A new execution, claimed and suspended. `fields` are those of `NewExecution`."""
    return await pause(given, await given.running(**(fields or {})), condition, **options)


async def pause(
    given: Given,
    claimed: Claimed,
    condition: Condition = APPROVED,
    **options: Unpack[SuspendOptions],
) -> Pause:
    outcome = await given.engine.suspend(claimed.handle, resume_condition=condition, **options)
    assert isinstance(outcome, Suspended), outcome
    return Pause(
        engine=given.engine, claimed=claimed, handle=outcome.handle, details=outcome.details
    )


async def suspension_of(engine: Engine, execution_id: str, suspension_id: str) -> Suspension:
    """The stored record, for tests that look at more of it than users see."""
    key = (*execution_key(engine.check_execution_id(execution_id)), suspension_id)

    async def body(reader: Reader) -> Suspension:
        return (await reader.get(Suspension, [key]))[key]

    return await engine.store.read(body)


async def waitpoint_of(engine: Engine, execution_id: str, waitpoint_id: str) -> Waitpoint:
    key = (*execution_key(engine.check_execution_id(execution_id)), waitpoint_id)

    async def body(reader: Reader) -> Waitpoint:
        return (await reader.get(Waitpoint, [key]))[key]

    return await engine.store.read(body)


def effect_of(answer: SignalResult) -> SignalEffect:
    assert isinstance(answer, SignalAccepted), answer
    return answer.effect


def duplicate_of(answer: SignalResult) -> str:
    assert isinstance(answer, SignalDuplicate), answer
    return answer.existing_signal_id


def new_id() -> str:
    return str(uuid.uuid4())


async def create(engine: Engine, claimed: Claimed, key: str = "gate") -> PendingWaitpoint:
    return await engine.create_waitpoint(claimed.handle, key, expires_in_ms=TTL_MS)
