"""The shell around every decision: lock, decide, save, and wake what waits.

Every group of operations holds the `Shell`. Its `decide_many` is the
only way a single execution changes: it locks the executions with their
attempts, lets the core decide each in turn, and saves everything at once. What
the core refuses becomes that item's error; the others go on.
"""

import copy
import os
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar

from msgspec import Struct

from flowfabric.config import EngineConfig
from flowfabric.core import decisions, ids, leases, records
from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.checks import check_int
from flowfabric.core.events import ScannerFilter, check_scanner_filter
from flowfabric.core.handles import Handle, HandleKind, Signer, from_wire
from flowfabric.core.results import AlreadySatisfied
from flowfabric.engine.deaths import signs_of_life
from flowfabric.engine.routes import KnowsRoutes
from flowfabric.engine.topics import hint_about, hint_locked
from flowfabric.engine.values import Values
from flowfabric.errors import AlreadySuspended, FlowFabricError, InvalidInput, NotFound
from flowfabric.store import base
from flowfabric.store.caller_connections import OnConnection

T = TypeVar("T")
V = TypeVar("V")
F = TypeVar("F")
R = TypeVar("R", bound=records.Record)
G = TypeVar("G", bound="Group")
P = ParamSpec("P")

ReadRows = Callable[[base.Unlocked], Awaitable[V | None]]
LockRows = Callable[[base.Transaction], Awaitable[V]]
DecideOn = Callable[[V, decisions.Timing], decisions.Decision[T]]
DecideFenced = Callable[[decisions.Subject, F, decisions.Timing], decisions.Decision[T]]
"""A rule for the holder of a lease, or for a caller that names one."""


class Ask(Struct, Generic[T], frozen=True):
    """One decision to be made about one execution."""

    execution_id: ids.ExecutionId
    decide: DecideOn[decisions.Subject, T]


def held_ask(handle: Handle, decide: DecideFenced[leases.Fence, T]) -> Ask[T]:
    """A decision for the holder of a lease."""
    fence = fence_of(handle)
    return Ask(handle.execution_id, lambda subject, timing: decide(subject, fence, timing))


class Swept(Struct, frozen=True, kw_only=True):
    """What one sweep did."""

    acted: int
    """Executions that changed."""
    full: bool
    """Whether the batch was full: there may be more."""
    held: bool = False
    """Whether another process holds something that is due."""
    failures: tuple[str, ...] = ()
    """What could not be done, and why; it is tried again later."""
    executions: tuple[ids.ExecutionId, ...] = ()
    """Those that changed, where a sweep decides about single executions."""


def _has_acted(answer: object) -> bool:
    return not isinstance(answer, AlreadySatisfied)


class Deployment(Struct, frozen=True, kw_only=True):
    """What all processes on one database share."""

    partitions: ids.PartitionConfig
    handle_key: bytes


class Shell(KnowsRoutes):
    """What every group of operations works with."""

    def __init__(
        self, store: base.Store, config: EngineConfig, deployment: Deployment, values: Values
    ) -> None:
        super().__init__()
        self.store = store
        self.config = config
        self.deployment = deployment
        self.signer = Signer(deployment.handle_key, store.backend_tag)
        self.values = values
        self.stamps = ids.Stamps()
        self.commits = True
        """Whether operations commit what they write, or their caller does."""

    def on(self, connection: object, *, sync: bool) -> Self:
        """The same shell over the open transaction of a caller; never waits if it is `sync`."""
        joined = copy.copy(self)
        joined.store = OnConnection(self.store, connection, sync=sync)
        joined.commits = False
        if sync:
            joined.values = self.values.on_this_thread()
        # Routes that are registered in there may be rolled back.
        joined.routes = dict(self.routes)
        return joined

    # Deciding

    async def decide(self, ask: Ask[T]) -> T:
        """One decision; a refusal is raised."""
        (outcome,) = await self.decide_many([ask])
        return answered(outcome)

    async def decide_about(self, execution_id: object, decide: DecideOn[decisions.Subject, T]) -> T:
        """The same about an execution that the caller names."""
        return await self.decide(Ask(self.check_execution_id(execution_id), decide))

    async def decide_held(self, handle: Handle, decide: DecideFenced[leases.Fence, T]) -> T:
        """The same for the holder of a lease, whose handle has been opened."""
        return await self.decide(held_ask(handle, decide))

    async def decide_fenced(
        self,
        execution_id: str,
        decide: DecideFenced[leases.Fence | None, T],
        *,
        fence: leases.Fence | None,
        attempt_index: int | None,
        source: str,
    ) -> T:
        """The same for a caller that names the execution and its fence instead of a handle.

        An operator may act for the worker without a fence, and then names the attempt that is
        meant, so as not to hit the one that came after it.
        """
        given = leases.check_fence_given(fence, source)
        leases.check_attempt_index(attempt_index)

        def decide_meant(
            subject: decisions.Subject, timing: decisions.Timing
        ) -> decisions.Decision[T]:
            leases.check_attempt_meant(subject.execution, attempt_index)
            return decide(subject, given, timing)

        return await self.decide_about(execution_id, decide_meant)

    async def decide_many(
        self, asks: Sequence[Ask[T]], *, lock_wait_ms: int | None = None
    ) -> list[T | FlowFabricError]:
        """Decide each in order, in one transaction; refusals take the place of answers."""
        if not asks:
            return []

        async def body(tx: base.Transaction) -> list[T | FlowFabricError]:
            return await self.decide_in(tx, asks)

        return await self.store.transact(body, lock_wait_ms=lock_wait_ms)

    async def decide_in(
        self, tx: base.Transaction, asks: Sequence[Ask[T]]
    ) -> list[T | FlowFabricError]:
        """The same inside a transaction that does other things too."""
        if not asks:
            return []
        subjects = await lock_subjects(tx, {ask.execution_id for ask in asks})
        now_ms = await tx.now_ms()
        outcomes: list[T | FlowFabricError] = []
        parts: list[decisions.Changes] = []
        for ask in asks:
            subject = subjects.get(ask.execution_id)
            if subject is None:
                outcomes.append(NotFound("execution", ask.execution_id))
                continue
            made = decided(ask.decide, subject, self.timing(now_ms))
            outcomes.append(made.outcome)
            if made.changes is not decisions.NO_CHANGES:
                parts.append(made.changes)
                subjects[ask.execution_id] = decisions.advance(subject, made.changes)
        changes = decisions.combine(parts)
        await tx.save(changes)
        hint_about(tx, changes, now_ms)
        return outcomes

    async def decide_opened(
        self,
        opened: Sequence[V | FlowFabricError],
        ask: Callable[[V], Ask[T]],
        *,
        sure: Mapping[int, T] | None = None,
        lock_wait_ms: int | None = None,
    ) -> list[T | FlowFabricError]:
        """Decide a batch whose items were checked, all that is not sure in one transaction."""
        return await answers_in_order(
            opened,
            sure or {},
            lambda rest: self.decide_many([ask(each) for each in rest], lock_wait_ms=lock_wait_ms),
        )

    async def decide_loaded(self, lock: LockRows[V], decide: DecideOn[V, T]) -> T:
        """Decide about more than one execution's own rows: those that `lock` loads."""

        async def body(tx: base.Transaction) -> T | FlowFabricError:
            loaded = await lock(tx)
            timing = self.timing(await tx.now_ms())
            made = decided(decide, loaded, timing)
            if made.changes is not decisions.NO_CHANGES:
                await tx.save(made.changes)
                hint_about(tx, made.changes, timing.now_ms)
            # A refusal is returned, not raised: what it leaves to write must be committed.
            return made.outcome

        return answered(await self.store.transact(body))

    async def decide_unlocked_first(
        self, read: ReadRows[V], lock: LockRows[V], decide: DecideOn[V, T]
    ) -> T:
        """The same, without locks where that is enough.

        Decides about what `read` finds, and writes if none of it has changed since. What
        `read` gives up on (None), what is refused and what has changed is decided again under lock.
        """

        async def body(tx: base.Unlocked) -> T | None:
            found = await read(tx)
            if found is None:
                return None
            timing = self.timing(await tx.now_ms())
            made = decided(decide, found, timing)
            if isinstance(made.outcome, FlowFabricError):
                return None
            hint_about(tx, made.changes, timing.now_ms)
            await tx.save(made.changes)
            return made.outcome

        answer = await self.store.try_unlocked(body)
        return await self.decide_loaded(lock, decide) if answer is None else answer

    def timing(self, now_ms: int) -> decisions.Timing:
        return decisions.Timing(now_ms=now_ms, chance=random.random())

    # Sweeping

    async def sweep(
        self,
        due: str,
        decide: DecideOn[decisions.Subject, T],
        limit: int,
        only: ScannerFilter,
        *,
        count: Callable[[T], int] = _has_acted,
    ) -> Swept:
        """Find due rows that no other process is handling, and decide each again under its lock.

        `count` says how many changes an answer stands for.
        """
        check_int("limit", limit, 1, BATCH_MAX)
        whose = check_scanner_filter(only).parameters

        async def body(tx: base.Transaction) -> Swept:
            found = await tx.select_as(
                ids.ExecutionId, due, now_ms=await tx.now_ms(), limit=limit, **whose
            )
            asks = [Ask(execution_id, decide) for execution_id in dict.fromkeys(found)]
            outcomes = await self.decide_in(tx, asks)
            acted = {
                ask.execution_id: count(each)
                for ask, each in zip(asks, outcomes, strict=True)
                if not isinstance(each, FlowFabricError)
            }
            changed = tuple(each for each, times in acted.items() if times)
            full = len(found) == limit
            return Swept(acted=sum(acted.values()), full=full, executions=changed)

        return await self.store.transact(body)

    # Input

    def check_execution_id(
        self, execution_id: object, field: str = "execution_id"
    ) -> ids.ExecutionId:
        """An id in full, or a bare uuid."""
        parsed = ids.parse_any_id(execution_id, self.deployment.partitions, field)
        ids.check_partition(ids.partition_of(parsed), self.deployment.partitions)
        return parsed

    def named_execution_id(self, text: str, namespace: str) -> ids.ExecutionId:
        """The id of what was submitted, in full or as a bare uuid; or the one that its
        submitter chose for it in a namespace."""
        own_id = ids.parse_own_id(text)
        if own_id is None:
            partitions = self.deployment.partitions
            return ids.check_own_partition(ids.parse_any_id(text, partitions), partitions)
        return ids.own_execution_id(
            ids.parse_namespace(namespace), own_id, self.deployment.partitions
        )

    def verify_handle(self, handle: Handle | bytes) -> Handle:
        """Check that the handle is ours and unchanged."""
        if isinstance(handle, bytes):
            handle = from_wire(handle)
        if not isinstance(handle, Handle):
            raise InvalidInput("handle", "must be a Handle or its bytes", handle)
        self.signer.verify(handle)
        return handle

    def open_handle(self, handle: Handle | bytes) -> Handle:
        """The same; raises if its lease ended with a suspension."""
        if not self.signer.has_issued(handle):
            handle = self.verify_handle(handle)
        if handle.kind is HandleKind.SUSPENDED:
            raise AlreadySuspended(
                f"the handle of {handle.execution_id} ended with its suspension; claim it again"
            )
        return handle


class Group:
    """Operations about one noun. Groups that use others take them in their constructor."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.store = shell.store

    def on(self, connection: object, *, sync: bool) -> Self:
        """The same operations inside the open transaction of a caller."""
        return type(self)(self.shell.on(connection, sync=sync))

    async def select_as(self, kind: type[T], name: str, **parameters: base.Parameter) -> list[T]:
        """What one statement finds, in a read of its own."""
        return await self.store.read(lambda reader: reader.select_as(kind, name, **parameters))

    async def select_records(
        self, kind: type[R], name: str, **parameters: base.Parameter
    ) -> Sequence[R]:
        return await self.store.read(lambda reader: reader.select_records(kind, name, **parameters))

    async def get_one(self, kind: type[R], key: base.Key) -> R | None:
        """The row with this key, if it exists, in a read of its own."""
        return await self.store.read(lambda reader: reader.get_one(kind, key))


def joined(
    operation: Callable[Concatenate[G, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[G, object, P], Coroutine[object, object, T]]:
    """The operation inside the transaction of a connection, which is its first argument."""

    async def call(group: G, connection: object, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await operation(group.on(connection, sync=False), *args, **kwargs)

    call.__name__ = f"{operation.__name__}_on"
    call.__doc__ = "The same inside the caller's own transaction: see `create_executions_on`."
    return call


def joined_sync(
    operation: Callable[Concatenate[G, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[G, object, P], T]:
    """The same for a connection that is not async, on the calling thread."""

    def call(group: G, connection: object, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return base.drive(operation(group.on(connection, sync=True), *args, **kwargs))

    call.__name__ = f"{operation.__name__}_on_sync"
    call.__doc__ = "The same for a connection that is not async, on the calling thread."
    return call


def value_or_error(check: Callable[[V], T], value: V) -> T | FlowFabricError:
    """The checked value, or the refusal: one bad item does not fail its batch."""
    try:
        return check(value)
    except FlowFabricError as error:
        return error


async def answers_in_order(
    opened: Sequence[V | FlowFabricError],
    sure: Mapping[int, T],
    decide: Callable[[Sequence[V]], Awaitable[Sequence[T | FlowFabricError]]],
) -> list[T | FlowFabricError]:
    """The answers to a batch: refused when checked, sure already by position, or decided here.

    A set-based statement handles the sure cases of a batch; what it left is
    decided one by one, so that everything else about a decision lives in the core.
    """
    if len(sure) == len(opened):
        return [sure[position] for position in range(len(opened))]
    rest = {
        position: each
        for position, each in enumerate(opened)
        if position not in sure and not isinstance(each, FlowFabricError)
    }
    decided = await decide(list(rest.values())) if rest else ()
    answers: dict[int, T | FlowFabricError] = {**sure, **dict(zip(rest, decided, strict=True))}
    return [
        each if isinstance(each, FlowFabricError) else answers[position]
        for position, each in enumerate(opened)
    ]


def fence_of(handle: Handle) -> leases.Fence:
    return leases.Fence(
        lease_id=handle.lease_id,
        lease_epoch=handle.lease_epoch,
        attempt_id=handle.attempt_id,
        attempt_index=handle.attempt_index,
        by_handle=True,
    )


def lease_columns(handles: Sequence[Handle]) -> dict[str, base.Parameter]:
    """The handles' leases as the parameters of a set-based statement.

    A lease id is never used twice and the handle is signed: epoch and attempt follow from it.
    """
    columns = id_columns([handle.execution_id for handle in handles])
    return {**columns, "lease_ids": [handle.lease_id for handle in handles]}


class Decided(Struct, Generic[T], frozen=True):
    outcome: T | FlowFabricError
    changes: decisions.Changes = decisions.NO_CHANGES


def decided(
    decide: Callable[P, decisions.Decision[T]], *args: P.args, **kwargs: P.kwargs
) -> Decided[T]:
    """The outcome of a decision about these rows, or its refusal."""
    try:
        decision = decide(*args, **kwargs)
    except decisions.Refusal as refusal:
        return Decided(refusal.error, refusal.changes)
    except FlowFabricError as error:
        return Decided(error)
    return Decided(decision.answer, decision.changes)


def answered(outcome: T | FlowFabricError) -> T:
    """The answer; a refusal is raised."""
    if isinstance(outcome, FlowFabricError):
        raise outcome
    return outcome


# Rows -----------------------------------------------------------------------


def execution_key(execution_id: ids.ExecutionId) -> base.Key:
    return (ids.partition_of(execution_id), execution_id)


def columns_of(execution_id: ids.ExecutionId) -> dict[str, base.Parameter]:
    """One execution as the parameters of a statement."""
    return {
        "partition_key": ids.partition_of(execution_id),
        "execution_id": ids.uuid_of(execution_id),
    }


def id_columns(execution_ids: Collection[ids.ExecutionId]) -> dict[str, base.Parameter]:
    """Executions as the parameters of a set-based statement."""
    partitions, uuids = ids.split_ids(execution_ids)
    return {"partition_keys": partitions, "execution_ids": uuids}


async def lock_subjects(
    tx: base.Transaction, execution_ids: Iterable[ids.ExecutionId]
) -> dict[ids.ExecutionId, decisions.Subject]:
    """Lock executions with their current attempts; ids without a row are omitted."""
    executions = await tx.lock(records.Execution, [execution_key(i) for i in sorted(execution_ids)])
    hint_locked(tx, executions.values())
    attempts = await _lock_attempts(tx, executions.values())
    signs = await signs_of_life(tx, executions.values())
    granted = [key for key, each in executions.items() if each.granted_until_ms is not None]
    grants = await tx.get(records.StoredGrant, granted)
    opened = await lock_open(tx, executions.values())
    return {
        execution.execution_id: decisions.Subject(
            execution=execution,
            attempt=attempts.get(execution.execution_id) or records.first_attempt(execution),
            signs=signs.get(execution.execution_id, decisions.NO_SIGNS),
            grant=grants.get(key),
            suspension=opened.suspensions.get(execution.execution_id),
            waitpoints=opened.waitpoints.get(execution.execution_id, ()),
        )
        for key, execution in executions.items()
    }


async def lock_subject(tx: base.Transaction, execution_id: ids.ExecutionId) -> decisions.Subject:
    subject = (await lock_subjects(tx, [execution_id])).get(execution_id)
    if subject is None:
        raise NotFound("execution", execution_id)
    return subject


async def lock_free(
    tx: base.Transaction, execution_ids: Sequence[ids.ExecutionId]
) -> dict[ids.ExecutionId, records.Execution]:
    """Lock those that no other transaction holds; return the others as they are, unlocked."""
    locked = await tx.select_as(
        ids.ExecutionId, "lock_free_executions", **id_columns(execution_ids)
    )
    left = [execution_key(each) for each in execution_ids if each not in set(locked)]
    return {each.execution_id: each for each in (await tx.get(records.Execution, left)).values()}


async def _lock_attempts(
    tx: base.Transaction, executions: Iterable[records.Execution]
) -> dict[ids.ExecutionId, records.Attempt]:
    """Lock the current attempts that have a row."""
    stored: list[base.Key] = []
    unstored: list[base.Key] = []
    for execution in executions:
        if execution.total_attempt_count > 0:
            keys = unstored if records.runs_first_attempt(execution) else stored
            keys.append((*execution_key(execution.execution_id), execution.current_attempt_index))
    tx.note_absent(records.Attempt, unstored)
    found = await tx.lock(records.Attempt, stored)
    return {attempt.execution_id: attempt for attempt in found.values()}


class OpenPauses(Struct, frozen=True, kw_only=True):
    """What is open of suspensions and waitpoints."""

    suspensions: dict[ids.ExecutionId, records.Suspension] = {}
    waitpoints: dict[ids.ExecutionId, tuple[records.Waitpoint, ...]] = {}


async def lock_open(tx: base.Transaction, executions: Iterable[records.Execution]) -> OpenPauses:
    """Lock what is open. Most executions have nothing open, and cost nothing here."""
    waiting = [e for e in executions if e.current_suspension_id or e.open_waitpoint_count]
    if not waiting:
        return OpenPauses()
    suspensions = await tx.lock(
        records.Suspension,
        [
            (e.partition_key, e.execution_id, e.current_suspension_id)
            for e in waiting
            if e.current_suspension_id is not None
        ],
    )
    waitpoints: dict[ids.ExecutionId, tuple[records.Waitpoint, ...]] = {}
    for waitpoint in await tx.select_records(
        records.Waitpoint, "lock_open_waitpoints", **id_columns([e.execution_id for e in waiting])
    ):
        others = waitpoints.get(waitpoint.execution_id, ())
        waitpoints[waitpoint.execution_id] = (*others, waitpoint)
    return OpenPauses(
        suspensions={each.execution_id: each for each in suspensions.values()},
        waitpoints=waitpoints,
    )


# Fresh ids --------------------------------------------------------------------


def new_uuid() -> str:
    """Time-ordered, so that inserts stay local in the index, and what happened last sorts last."""
    return ids.uuid7(time.time_ns(), os.urandom(8))


def new_random_uuid() -> str:
    return ids.uuid4_from(os.urandom(16))


def new_lease_ids() -> leases.NewIds:
    """An attempt has the id of the lease it begins under."""
    made = new_random_uuid()
    return leases.NewIds(lease_id=ids.LeaseId(made), attempt_id=ids.AttemptId(made))
