"""Pausing executions, and the waitpoints they pause at.

Every change goes through the execution's row lock, then suspension and
waitpoints: a signal, a timeout, a cancellation and a suspend that meet are
decided one after the other.
"""

import hmac
import os
from collections.abc import Sequence
from typing import TypedDict, Unpack

from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core.bounds import (
    ROTATION_GRACE_MS,
    WAITPOINT_TTL_MS_MAX,
    WAITPOINTS_PER_SUSPENSION_MAX,
)
from flowfabric.core.checks import check_bool, check_int, check_name, check_text
from flowfabric.core.conditions import Condition
from flowfabric.core.executions import Timing
from flowfabric.core.handles import Handle, HandleKind, sign
from flowfabric.core.ids import (
    ExecutionId,
    WaitpointId,
    WaitpointKey,
    parse_uuid,
    partition_of,
    uuid_of,
)
from flowfabric.core.leases import OPERATOR_OVERRIDE, Fence, check_fence, compare_fence
from flowfabric.core.records import (
    Attempt,
    Execution,
    HmacKey,
    SuspendDedup,
    Suspension,
    TimeoutBehavior,
    Waitpoint,
    first_attempt,
)
from flowfabric.core.resumption import WaitpointsClosed, decide_close_waitpoint
from flowfabric.core.suspension import (
    Parked,
    SuspendFindings,
    decide_create_waitpoint,
    decide_repeat_waitpoint,
    decide_suspend,
    lease_ttl_of,
    may_repeat,
    with_pending,
)
from flowfabric.core.transitions import Changes, Decision, Subject
from flowfabric.core.waitpoints import (
    FIRST_KID,
    SECRET_BYTES,
    SECRET_BYTES_MAX,
    SECRET_BYTES_MIN,
    Binding,
    BoundWaitpoint,
    PendingWaitpoint,
    ResumePolicy,
    SuspendRequest,
    SuspensionDetails,
    accepted,
    check_grace,
    check_kid,
    check_secret,
    check_suspend,
    current_key,
    details_of,
    signing_key,
)
from flowfabric.engine import unit
from flowfabric.engine.reads import load_kept
from flowfabric.store.base import Joined, Reader, Transaction, Unlocked


class Seeded(Struct, frozen=True, kw_only=True, tag=True):
    kid: str


class AlreadySeeded(Struct, frozen=True, kw_only=True, tag=True):
    kid: str
    same_secret: bool


class Rotated(Struct, frozen=True, kw_only=True, tag=True):
    previous_kid: str | None
    new_kid: str
    gc_count: int
    """Old keys whose secret was wiped because their grace was over."""


class RotationNoop(Struct, frozen=True, kw_only=True, tag="Noop"):
    """The key is the current one already."""

    kid: str


class RotationEntry(Struct, frozen=True, kw_only=True):
    """What a rotation came to. There is one set of keys, hence one entry, for partition 0."""

    partition: int = 0
    outcome: Rotated | RotationNoop | None = None
    error: errors.FlowFabricError | None = None


class VerifyingKid(Struct, frozen=True, kw_only=True):
    kid: str
    expires_at_ms: int


class WaitpointKids(Struct, frozen=True, kw_only=True):
    current_kid: str | None
    verifying: tuple[VerifyingKid, ...]


async def load_keys(reader: Reader) -> Sequence[HmacKey]:
    return await reader.select_records(HmacKey, "list_hmac_keys")


async def lock_keys(tx: Transaction) -> Sequence[HmacKey]:
    """The keys, locked until the transaction ends."""
    await tx.select("lock_hmac_keys")
    return await load_keys(tx)


async def ensure_keys(tx: Transaction) -> Sequence[HmacKey]:
    """The keys; the first one is made when there is none yet."""
    keys = await load_keys(tx)
    if current_key(keys) is not None:
        return keys
    keys = await lock_keys(tx)
    if current_key(keys) is not None:
        return keys
    # Without a current key there never was one: rotating replaces it in one transaction.
    return [*keys, await _install(tx, FIRST_KID, os.urandom(SECRET_BYTES))]


async def _find(tx: Transaction, kid: str) -> HmacKey | None:
    """The key of this id, even if its secret was wiped."""
    return await tx.get_one(HmacKey, (kid,))


async def _install(tx: Transaction, kid: str, secret: bytes) -> HmacKey:
    key = HmacKey(kid=kid, secret=secret, activated_at_ms=await tx.now_ms())
    await tx.save(Changes(inserts=(key,)))
    return key


async def _rotate(
    tx: Transaction, keys: Sequence[HmacKey], kid: str, secret: bytes, grace_ms: int
) -> Rotated:
    now_ms = await tx.now_ms()
    previous = current_key(keys)
    gone = tuple(structs.replace(key, secret=b"") for key in keys if not accepted(key, now_ms))
    if previous is not None:
        retired = structs.replace(previous, expires_at_ms=now_ms + grace_ms)
        # Written first, so that at no moment two keys are current.
        await tx.save(Changes(updates=(retired, *gone)))
    await _install(tx, kid, secret)
    return Rotated(
        previous_kid=None if previous is None else previous.kid,
        new_kid=kid,
        gc_count=len(gone) if previous is not None else 0,
    )


PROACTIVE_CLOSE = "proactive_close"


class Suspended(Struct, frozen=True, kw_only=True, tag=True):
    """The lease is released; the handle is good for `observe_signals` only."""

    details: SuspensionDetails
    handle: Handle


class SuspendSatisfied(Struct, frozen=True, kw_only=True, tag="AlreadySatisfied"):
    """Early signals meet the condition: the lease is kept, go on with the same handle."""

    details: SuspensionDetails


SuspendOutcome = Suspended | SuspendSatisfied


class Suspending(Struct, frozen=True, kw_only=True):
    """What a suspend is decided about."""

    subject: Subject
    request: SuspendRequest
    found: SuspendFindings


class _Repeat(Struct, frozen=True, kw_only=True):
    """The answer an earlier suspend with the same idempotency key got."""

    subject: Subject
    parked: Parked
    dedup: SuspendDedup


class SuspendOptions(TypedDict, total=False):
    """What may be said about a suspension beside its condition."""

    waitpoints: Sequence[Binding] | None
    """One per key that the condition mentions, generated if omitted."""
    suspension_id: str | None
    """Generated if omitted."""
    resume_policy: ResumePolicy
    reason_code: str
    requested_by: str
    timeout_at_ms: int | None
    """Without a timeout the execution's policy decides whether there is one."""
    timeout_in_ms: int | None
    timeout_behavior: str | TimeoutBehavior | None
    continuation_metadata_pointer: str | None
    idempotency_key: str | None
    take_pending: bool
    """Take over every pending waitpoint of the condition's names in place of fresh ones."""


class Suspensions(unit.Group):
    # The keys that sign waitpoint tokens: installing, rotating, listing
    #
    # There is one set of keys per database. The first token makes the first key, so
    # nothing has to be set up; a deployment that brings its own secret seeds it before
    # that. After a rotation the old key is accepted until its grace is over, every old
    # key for its own time; the next rotation wipes the secrets of those past it. An id is
    # never used for a second key. Secrets go into the store and into `core.waitpoints`,
    # nowhere else.

    async def seed_waitpoint_hmac_secret(self, kid: str, secret_hex: str) -> Seeded | AlreadySeeded:
        """Install the first key. Safe to call at every start."""
        secret = check_secret(secret_hex, bytes_min=SECRET_BYTES, bytes_max=SECRET_BYTES)
        named = check_kid(kid)

        async def body(tx: Transaction) -> Seeded | AlreadySeeded:
            keys = await lock_keys(tx)
            known = await _find(tx, named)
            if known is not None:
                same = hmac.compare_digest(known.secret, secret)
                return AlreadySeeded(kid=named, same_secret=same)
            current = current_key(keys)
            if current is not None:
                raise errors.InvalidInput(
                    "kid", f"another key is active ({current.kid}): rotate to this one instead", kid
                )
            await _install(tx, named, secret)
            return Seeded(kid=named)

        return await self.store.transact(body)

    async def rotate_waitpoint_hmac_secret_all(
        self, new_kid: str, new_secret_hex: str, *, grace_ms: int = ROTATION_GRACE_MS
    ) -> tuple[RotationEntry, ...]:
        """Sign with a new key from now on; tokens of the old one stay good for `grace_ms`."""
        named = check_kid(new_kid)
        secret = check_secret(
            new_secret_hex, bytes_min=SECRET_BYTES_MIN, bytes_max=SECRET_BYTES_MAX
        )
        grace = check_grace(grace_ms)

        async def body(tx: Transaction) -> RotationEntry:
            keys = await lock_keys(tx)
            known = await _find(tx, named)
            if known is None:
                return RotationEntry(outcome=await _rotate(tx, keys, named, secret, grace))
            if known.expires_at_ms is None and hmac.compare_digest(known.secret, secret):
                return RotationEntry(outcome=RotationNoop(kid=named))
            why = "is retired" if known.expires_at_ms is not None else "has another secret"
            return RotationEntry(
                error=errors.RotationConflict(f"key id {named!r} {why}: choose another")
            )

        return (await self.store.transact(body),)

    async def list_waitpoint_hmac_kids(self) -> WaitpointKids:
        """Which keys there are, by name: the current one and those still accepted."""

        async def body(reader: Reader) -> WaitpointKids:
            keys = await load_keys(reader)
            now_ms = await reader.now_ms()
            current = current_key(keys)
            return WaitpointKids(
                current_kid=None if current is None else current.kid,
                verifying=tuple(
                    VerifyingKid(kid=key.kid, expires_at_ms=key.expires_at_ms)
                    for key in keys
                    if key.expires_at_ms is not None and accepted(key, now_ms)
                ),
            )

        return await self.store.read(body)

    async def suspend(
        self,
        handle: Handle | bytes,
        *,
        resume_condition: Condition,
        **options: Unpack[SuspendOptions],
    ) -> SuspendOutcome:
        """Release the worker until signals meet the condition; the same attempt continues then.

        A repeat with the same `idempotency_key` gets the first answer, whatever else it
        asks for.
        """
        # Refuse a handle that ended with its suspension first, before other arguments.
        given = unit.value_or_error(self.shell.open_handle, handle)
        if isinstance(given, errors.AlreadySuspended):
            raise given
        request = checked_request(resume_condition, options)
        opened = unit.answered(given)
        parked, _ = await self._suspend(opened.execution_id, unit.fence_of(opened), request)
        return self._outcome(parked, opened)

    async def suspend_by_triple(
        self,
        execution_id: str,
        *,
        fence: Fence,
        resume_condition: Condition,
        **options: Unpack[SuspendOptions],
    ) -> SuspendOutcome:
        """The same for who knows the lease but has no handle."""
        request = checked_request(resume_condition, options)
        given = unit.check_fence_given(fence, source="worker")
        assert given is not None
        parked, handle = await self._suspend(
            self.shell.check_execution_id(execution_id), given, request
        )
        return self._outcome(parked, handle)

    async def create_waitpoint(
        self,
        handle: Handle | bytes,
        waitpoint_key: str | None = None,
        *,
        expires_in_ms: int,
        waitpoint_id: str | None = None,
        own_name_only: bool = False,
    ) -> PendingWaitpoint:
        """A waitpoint whose token can be handed out before the execution suspends.

        Signals that arrive before the suspension are kept for it; a waitpoint that no
        suspension takes over in time is closed. Each call makes another one, unless it
        names a `waitpoint_id`: a repeat gets the one there is, in whatever state it is,
        and opens it again if the end of an execution that was replayed has closed it.
        With `own_name_only` it refuses signals whose name is not its key.
        """
        opened = self.shell.open_handle(handle)
        check_int("expires_in_ms", expires_in_ms, 1, WAITPOINT_TTL_MS_MAX)
        named = (
            unit.new_uuid() if waitpoint_id is None else parse_uuid("waitpoint_id", waitpoint_id)
        )
        key = f"wpk:{named}" if waitpoint_key is None else waitpoint_key
        bound = BoundWaitpoint(
            waitpoint_id=WaitpointId(named),
            waitpoint_key=WaitpointKey(check_name("waitpoint_key", key)),
            own_name_only=check_bool("own_name_only", own_name_only),
        )

        async def lock(tx: Transaction) -> tuple[Subject, Sequence[HmacKey], Waitpoint | None]:
            subject = await lock_subject(tx, opened.execution_id)
            keys = await ensure_keys(tx)
            if waitpoint_id is None:
                return subject, keys, None
            return subject, keys, await find_waitpoint(tx, subject, bound.waitpoint_id)

        def decide(
            found: tuple[Subject, Sequence[HmacKey], Waitpoint | None], timing: Timing
        ) -> Decision[PendingWaitpoint]:
            subject, keys, made = found
            fence = unit.fence_of(opened)
            if made is not None:
                return decide_repeat_waitpoint(
                    subject, fence, bound, made, expires_in_ms, keys, timing
                )
            return decide_create_waitpoint(
                subject, fence, bound, expires_in_ms, signing_key(keys), timing
            )

        return await self.shell.decide_loaded(lock, decide)

    async def close_waitpoint(
        self,
        execution_id: str,
        waitpoint_id: str,
        *,
        reason: str = PROACTIVE_CLOSE,
        fence: Fence | None = None,
        source: str = "worker",
    ) -> WaitpointsClosed:
        """Take no more signals at one waitpoint. This never wakes the execution.

        A worker shows its fence and closes pending waitpoints; an operator
        (`source="operator_override"`) also those of an open suspension.
        """
        asked = self.shell.check_execution_id(execution_id)
        named = WaitpointId(parse_uuid("waitpoint_id", waitpoint_id))
        check_text("reason", reason, empty=False)
        given = unit.check_fence_given(fence, source)

        async def lock(tx: Transaction) -> tuple[Subject, Waitpoint | None]:
            subject = await lock_subject(tx, asked)
            return subject, await find_waitpoint(tx, subject, named)

        def decide(
            found: tuple[Subject, Waitpoint | None], timing: Timing
        ) -> Decision[WaitpointsClosed]:
            subject, waitpoint = found
            if given is not None:
                check_fence(subject, given, timing.now_ms)
            administrative = source == OPERATOR_OVERRIDE
            return decide_close_waitpoint(subject, waitpoint, reason, administrative, timing.now_ms)

        return await self.shell.decide_loaded(lock, decide)

    # Shared

    async def _suspend(
        self, execution_id: ExecutionId, fence: Fence, request: SuspendRequest
    ) -> tuple[Parked, Handle]:
        async def read(tx: Unlocked) -> Suspending | None:
            """The holder of the lease, if this is no repeat and takes over nothing."""
            return await _read_holder(tx, execution_id, request)

        async def lock(tx: Transaction) -> Suspending | _Repeat:
            subject = await lock_subject(tx, execution_id)
            repeat = await self._lock_repeat(tx, subject, request)
            if isinstance(repeat, _Repeat):
                return repeat
            return await lock_suspending(tx, subject, request, repeat)

        def decide(what: Suspending | _Repeat, timing: Timing) -> Decision[tuple[Parked, Handle]]:
            execution = what.subject.execution
            if isinstance(what, _Repeat):
                if not may_repeat(execution, what.dedup, fence):
                    compare_fence(execution, fence)
                return Decision(answer=(what.parked, self._handle_of(execution, what.dedup)))
            made = decide_suspend(what.subject, fence, what.request, what.found, timing)
            answer = (made.answer, self._handle_of(execution, None))
            return Decision(answer=answer, changes=made.changes)

        if request.pending:
            return await self.shell.decide_loaded(lock, decide)
        return await self.shell.decide_unlocked_first(read, lock, decide)

    async def _lock_repeat(
        self, tx: Transaction, subject: Subject, request: SuspendRequest
    ) -> _Repeat | SuspendDedup | None:
        """The remembered answer, or what is left of one that is no longer valid."""
        if request.idempotency_key is None:
            return None
        execution = subject.execution
        at = (execution.partition_key, execution.execution_id)
        key = (*at, request.idempotency_key)
        dedup = await tx.lock_one(SuspendDedup, key)
        now_ms = await tx.now_ms()
        if dedup is None or dedup.expires_at_ms <= now_ms:
            return dedup
        keys = await ensure_keys(tx)
        suspension = await tx.get_one(Suspension, (*at, dedup.suspension_id))
        assert suspension is not None, "a suspension is kept as long as its execution"
        waitpoints = await tx.select_records(
            Waitpoint,
            "list_suspension_waitpoints",
            partition_key=execution.partition_key,
            execution_id=uuid_of(execution.execution_id),
            suspension_id=dedup.suspension_id,
        )
        if suspension.waitpoint_id not in [each.waitpoint_id for each in waitpoints]:
            # It is open for another suspension, since a replay: the old answer is void.
            return dedup
        details = details_of(suspension, waitpoints, keys, now_ms)
        parked = Parked(details=details, already_satisfied=dedup.already_satisfied)
        return _Repeat(subject=subject, parked=parked, dedup=dedup)

    def _handle_of(self, execution: Execution, dedup: SuspendDedup | None) -> Handle:
        """The handle of the lease that was held when the execution was suspended."""
        if dedup is None:
            assert execution.lease_id is not None
            assert execution.current_attempt_id is not None
            assert execution.worker_instance_id is not None
            held = (execution.lease_id, execution.current_attempt_id, execution.worker_instance_id)
            epoch, index = execution.lease_epoch, execution.current_attempt_index
            ttl_ms = lease_ttl_of(execution)
        else:
            held = (dedup.lease_id, dedup.attempt_id, dedup.worker_instance_id)
            epoch, index, ttl_ms = dedup.lease_epoch, dedup.attempt_index, dedup.lease_ttl_ms
        lease_id, attempt_id, worker_instance_id = held
        return Handle(
            backend_tag=self.store.backend_tag,
            kind=HandleKind.SUSPENDED,
            execution_id=execution.execution_id,
            attempt_index=index,
            attempt_id=attempt_id,
            lease_id=lease_id,
            lease_epoch=epoch,
            lease_ttl_ms=ttl_ms,
            lane_id=execution.lane_id,
            worker_instance_id=worker_instance_id,
        )

    def _outcome(self, parked: Parked, handle: Handle) -> SuspendOutcome:
        if parked.already_satisfied:
            return SuspendSatisfied(details=parked.details)
        released = structs.replace(handle, kind=HandleKind.SUSPENDED, signature=b"")
        return Suspended(
            details=parked.details, handle=sign(released, self.shell.deployment.handle_key)
        )


async def lock_subject(tx: Transaction, execution_id: ExecutionId) -> Subject:
    subject = (await unit.lock_subjects(tx, [execution_id])).get(execution_id)
    if subject is None:
        raise errors.NotFound("execution", execution_id)
    return subject


async def _read_holder(
    tx: Unlocked, execution_id: ExecutionId, request: SuspendRequest
) -> Suspending | None:
    rows = await tx.select_joined(
        (Execution, Attempt, HmacKey),
        "read_holder",
        partition_key=partition_of(execution_id),
        execution_id=uuid_of(execution_id),
    )
    execution = rows[0].get(Execution) if rows else None
    key = rows[0].get(HmacKey) if rows else None
    if execution is None or key is None or _has_kept(execution, request):
        return None
    return Suspending(
        subject=Subject(execution=execution, attempt=_attempt_of(tx, execution, rows[0])),
        request=request,
        found=SuspendFindings(keys=[key]),
    )


def _attempt_of(tx: Unlocked, execution: Execution, row: Joined) -> Attempt | None:
    """The current attempt, whether it has a row or not."""
    stored = row.get(Attempt)
    if stored is not None:
        return stored
    tx.note_absent(
        Attempt, [(*unit.execution_key(execution.execution_id), execution.current_attempt_index)]
    )
    return first_attempt(execution)


async def find_waitpoint(
    tx: Reader, subject: Subject, waitpoint_id: WaitpointId
) -> Waitpoint | None:
    """A waitpoint of the locked execution, open or closed."""
    for waitpoint in subject.waitpoints:
        if waitpoint.waitpoint_id == waitpoint_id:
            return waitpoint
    execution = subject.execution
    key = (execution.partition_key, execution.execution_id, waitpoint_id)
    return await tx.get_one(Waitpoint, key)


async def lock_suspending(
    tx: Transaction,
    subject: Subject,
    request: SuspendRequest,
    expired: SuspendDedup | None = None,
) -> Suspending:
    """Lock the waitpoints that a request names, and read what else its decision needs."""
    execution = subject.execution
    wanted = with_pending(request, subject.waitpoints, await tx.now_ms())
    at = (execution.partition_key, execution.execution_id)
    pending = (WaitpointId(each.waitpoint_id) for each in wanted.pending)
    named = [*pending, *(bound.waitpoint_id for bound in wanted.fresh)]
    rows = await tx.lock(Waitpoint, [(*at, waitpoint_id) for waitpoint_id in named])
    taken = await tx.get(Suspension, [(*at, wanted.suspension_id)])
    found = SuspendFindings(
        keys=await ensure_keys(tx),
        bound={waitpoint.waitpoint_id: waitpoint for waitpoint in rows.values()},
        kept=await load_kept(tx, execution),
        suspension_id_taken=bool(taken),
        expired_dedup=expired,
    )
    return Suspending(subject=subject, request=wanted, found=found)


def _has_kept(execution: Execution, request: SuspendRequest) -> bool:
    """Whether there may be something for the suspension to take over."""
    return execution.keeps_signals or (request.take_pending and execution.open_waitpoint_count > 0)


def checked_request(resume_condition: Condition, options: SuspendOptions) -> SuspendRequest:
    return check_suspend(
        new_ids=new_ids_for(options.get("waitpoints")), resume_condition=resume_condition, **options
    )


def new_ids_for(waitpoints: object) -> list[str]:
    """As many as a request may need: one for the suspension, one for each waitpoint."""
    count = (
        len(waitpoints) if isinstance(waitpoints, list | tuple) else WAITPOINTS_PER_SUSPENSION_MAX
    )
    return [unit.new_uuid() for _ in range(1 + min(count, WAITPOINTS_PER_SUSPENSION_MAX))]
