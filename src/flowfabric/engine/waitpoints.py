"""Reading suspensions, waitpoints and signals. No list shows a token."""

from collections.abc import Iterator, Sequence
from typing import Self

import msgspec
from msgspec import Struct, structs

from flowfabric.core import waitpoints
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.checks import check_bool, check_int
from flowfabric.core.conditions import Condition, referenced_waitpoint_keys, takes_own_name
from flowfabric.core.executions import Timing
from flowfabric.core.handles import Handle
from flowfabric.core.ids import (
    ExecutionId,
    SignalId,
    SuspensionId,
    WaitpointId,
    WaitpointKey,
    check_partition,
    parse_namespace,
    parse_uuid,
    uuid_of,
)
from flowfabric.core.records import (
    Execution,
    HmacKey,
    SignalEffect,
    SignalRecord,
    Suspension,
    SuspensionReason,
    TimeoutBehavior,
    Waitpoint,
    WaitpointState,
)
from flowfabric.core.resumption import OBSERVABLE
from flowfabric.core.suspension import RESUMED, decide_take
from flowfabric.core.transitions import Changes, Decision, Subject
from flowfabric.core.waitpoints import BoundWaitpoint, SuspendRequest, WaitpointToken, token_of
from flowfabric.engine import suspensions, unit
from flowfabric.engine.reads import condition_progress, find
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.store.base import Reader, Row, Transaction

SIGNALS_SHOWN_MAX = 10_000


class ResumeSignal(Struct, frozen=True, kw_only=True):
    """A delivered signal as the worker sees it."""

    signal_id: SignalId
    signal_name: str
    signal_category: str
    waitpoint_key: WaitpointKey
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at_ms: int
    payload: bytes | None
    payload_encoding: str
    effect: SignalEffect
    matched: bool


class SuspensionView(Struct, frozen=True, kw_only=True):
    """One pause, open or over, with the signals that counted."""

    suspension_id: SuspensionId
    attempt_index: int
    waitpoint_id: WaitpointId
    reason_code: SuspensionReason
    timeout_at_ms: int | None
    timeout_behavior: TimeoutBehavior | None
    continuation_metadata_pointer: str | None
    created_at_ms: int
    satisfied_at_ms: int | None
    closed_at_ms: int | None
    close_reason: str | None
    signals: tuple[ResumeSignal, ...]

    @property
    def is_open(self) -> bool:
        return self.closed_at_ms is None

    @property
    def resumed(self) -> bool:
        """Whether its signals, or the timeout's, brought the execution back."""
        return self.close_reason in OBSERVABLE


class WaitpointView(Struct, frozen=True, kw_only=True):
    """An open waitpoint. Of its token only what tells it from others."""

    execution_id: ExecutionId
    waitpoint_id: WaitpointId
    waitpoint_key: WaitpointKey
    state: WaitpointState
    required_signal_names: tuple[str, ...]
    created_at_ms: int
    activated_at_ms: int | None
    expires_at_ms: int | None
    token_kid: str
    token_fingerprint: str


class WaitpointPage(Struct, frozen=True, kw_only=True):
    waitpoints: tuple[WaitpointView, ...]
    next_cursor: WaitpointId | None


class SuspendedExecution(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    suspension_id: SuspensionId
    suspended_at_ms: int
    timeout_at_ms: int | None
    reason: SuspensionReason


class SuspendedPage(Struct, frozen=True, kw_only=True):
    executions: tuple[SuspendedExecution, ...]
    next_cursor: str | None


class InboxEntry(Struct, frozen=True, kw_only=True):
    """One thing an execution waits for. Its token is not here."""

    execution_id: ExecutionId
    own_id: str | None = None
    execution_kind: str
    lane_id: str
    waitpoint_id: WaitpointId
    name: WaitpointKey
    required_signal_names: tuple[str, ...]
    suspended_at_ms: int
    timeout_at_ms: int | None


class InboxRow(Struct, frozen=True, kw_only=True):
    """An open waitpoint of a suspended execution, or one without any."""

    execution_id: ExecutionId
    suspension_id: SuspensionId
    own_id: str | None
    execution_kind: str
    lane_id: str
    waitpoint_id: WaitpointId | None
    waitpoint_key: WaitpointKey | None
    required_signal_names: str | None
    suspended_at_ms: int
    timeout_at_ms: int | None

    def entries(self, received: set[tuple[ExecutionId, WaitpointKey]]) -> Iterator[InboxEntry]:
        """What it still waits for."""
        if self.waitpoint_id is None or self.waitpoint_key is None:
            return
        if (self.execution_id, self.waitpoint_key) in received:
            return
        yield InboxEntry(
            execution_id=self.execution_id,
            own_id=self.own_id,
            execution_kind=self.execution_kind,
            lane_id=self.lane_id,
            waitpoint_id=self.waitpoint_id,
            name=self.waitpoint_key,
            required_signal_names=msgspec.json.decode(
                self.required_signal_names or "[]", type=tuple[str, ...]
            ),
            suspended_at_ms=self.suspended_at_ms,
            timeout_at_ms=self.timeout_at_ms,
        )


class Inbox(Struct, frozen=True, kw_only=True):
    entries: tuple[InboxEntry, ...]
    next_cursor: str | None


class SuspendedCursor(Struct, frozen=True):
    """Where a page of suspended executions ended."""

    suspended_at_ms: int = -1
    execution_uuid: str = "00000000-0000-0000-0000-000000000000"

    @classmethod
    def parse(cls, text: str | None) -> Self:
        if text is None:
            return cls()
        suspended_at, _, uuid = str(text).partition("-")
        if not (suspended_at.isascii() and suspended_at.isdigit()):
            raise InvalidInput("cursor", "must be a next_cursor of an earlier page", text)
        return cls(
            check_int("cursor", int(suspended_at[:19]), 0, 2**62), parse_uuid("cursor", uuid)
        )

    @staticmethod
    def after(last: SuspendedExecution) -> str:
        return f"{last.suspended_at_ms}-{uuid_of(last.execution_id)}"


class Waitpoints(unit.Group):
    async def observe_signals(
        self, handle: Handle | bytes, *, include_unmatched: bool = False
    ) -> tuple[ResumeSignal, ...]:
        """The signals that resumed this attempt, in the order they were accepted.

        Empty for an attempt that was never suspended, and when an operator, a
        cancellation or another timeout ended the pause. With `include_unmatched`: also
        while the pause lasts, and with what its waitpoints got and no wait has used so far.
        """
        opened = self.shell.verify_handle(handle)
        partition_key, _ = unit.execution_key(opened.execution_id)

        async def body(reader: Reader) -> tuple[ResumeSignal, ...]:
            last = await reader.select_records(
                Suspension,
                "latest_suspension",
                partition_key=partition_key,
                execution_id=uuid_of(opened.execution_id),
                attempt_index=opened.attempt_index,
            )
            if not last or not (include_unmatched or last[0].close_reason in OBSERVABLE):
                return ()
            return await _signals_of(reader, last[0], every=include_unmatched)

        return await self._unpacked(await self.store.read(body))

    async def _unpacked(self, found: Sequence[ResumeSignal]) -> tuple[ResumeSignal, ...]:
        unpack = self.shell.values.unpack
        return tuple(
            await self.shell.values.through_all(
                found, lambda each: structs.replace(each, payload=unpack(each.payload))
            )
        )

    async def describe_suspension(
        self, execution_id: str, suspension_id: str
    ) -> SuspensionView | None:
        """One pause by its id, whichever attempt made it, with the signals that counted.

        A worker that names its pauses by itself finds out here, after a crash, how
        each of them ended.
        """
        asked = self.shell.check_execution_id(execution_id)
        named = SuspensionId(parse_uuid("suspension_id", suspension_id))
        partition_key, _ = unit.execution_key(asked)

        async def body(reader: Reader) -> Sequence[Row]:
            return await reader.select(
                "read_suspension",
                partition_key=partition_key,
                execution_id=uuid_of(asked),
                suspension_id=named,
                limit=SIGNALS_SHOWN_MAX,
            )

        rows = await self.store.read(body)
        if not rows:
            return None
        view = _view(rows)
        return structs.replace(view, signals=await self._unpacked(view.signals))

    async def list_pending_waitpoints(
        self, execution_id: str, *, after: str | None = None, limit: int = 100
    ) -> WaitpointPage:
        """The open waitpoints of one execution, pending and active, by id."""
        asked = self.shell.check_execution_id(execution_id)
        check_int("limit", limit, 1, PAGE_MAX)
        start = (
            "00000000-0000-0000-0000-000000000000" if after is None else parse_uuid("after", after)
        )
        partition_key, _ = unit.execution_key(asked)

        async def body(reader: Reader) -> WaitpointPage:
            if await find(reader, asked) is None:
                raise NotFound("execution", asked)
            rows = await reader.select_records(
                Waitpoint,
                "list_open_waitpoints",
                partition_key=partition_key,
                execution_id=uuid_of(asked),
                after=start,
                limit=limit + 1,
            )
            page = tuple(_waitpoint_view(row) for row in rows[:limit])
            more = len(rows) > limit
            return WaitpointPage(
                waitpoints=page, next_cursor=page[-1].waitpoint_id if more else None
            )

        return await self.store.read(body)

    async def list_suspended(
        self, *, partition: int | None = None, cursor: str | None = None, limit: int = 100
    ) -> SuspendedPage:
        """Suspended executions of one partition or of all, longest suspended first."""
        check_int("limit", limit, 0, PAGE_MAX)
        if partition is not None:
            check_int("partition", partition, 0, 65_535)
            check_partition(partition, self.shell.deployment.partitions)
        start = SuspendedCursor.parse(cursor)

        async def body(reader: Reader) -> list[SuspendedExecution]:
            return await reader.select_as(
                SuspendedExecution,
                "list_suspended",
                partition_key=partition,
                after_ms=start.suspended_at_ms,
                after_id=start.execution_uuid,
                limit=limit + 1,
            )

        found = await self.store.read(body) if limit else []
        page = tuple(found[:limit])
        more = len(found) > limit
        return SuspendedPage(
            executions=page, next_cursor=SuspendedCursor.after(page[-1]) if more else None
        )

    async def list_inbox(
        self, *, namespace: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> Inbox:
        """What suspended executions wait for, longest first; `limit` counts executions."""
        check_int("limit", limit, 1, PAGE_MAX)
        start = SuspendedCursor.parse(cursor)
        if namespace is not None:
            parse_namespace(namespace)

        async def body(
            reader: Reader,
        ) -> tuple[list[InboxRow], set[tuple[ExecutionId, WaitpointKey]]]:
            found = await reader.select_as(
                InboxRow,
                "list_inbox",
                namespace=namespace,
                after_ms=start.suspended_at_ms,
                after_id=start.execution_uuid,
                limit=limit + 1,
            )
            return found, await _received(reader, found)

        rows, received = await self.store.read(body)
        listed = list(dict.fromkeys(row.execution_id for row in rows))
        shown = set(listed[:limit])
        page = [row for row in rows if row.execution_id in shown]
        cursor = None
        if len(listed) > limit:
            cursor = f"{page[-1].suspended_at_ms}-{uuid_of(listed[limit - 1])}"
        entries = tuple(entry for row in page for entry in row.entries(received))
        return Inbox(entries=entries, next_cursor=cursor)

    async def read_waitpoint_token(
        self, execution_id: str, waitpoint_id: str
    ) -> WaitpointToken | None:
        """The token of an open waitpoint of this execution; None for any other.

        When the key that signed it is no longer accepted, a token of the current key.
        """
        asked = self.shell.check_execution_id(execution_id)
        named = WaitpointId(parse_uuid("waitpoint_id", waitpoint_id))

        async def body(reader: Reader) -> tuple[Waitpoint | None, Sequence[HmacKey], int]:
            key = (*unit.execution_key(asked), named)
            waitpoint = await reader.get_one(Waitpoint, key)
            return waitpoint, await suspensions.load_keys(reader), await reader.now_ms()

        waitpoint, keys, now_ms = await self.store.read(body)
        if waitpoint is None or waitpoint.state is WaitpointState.CLOSED:
            return None
        if waitpoints.usable_key(keys, waitpoint.token_kid, now_ms).kid != waitpoint.token_kid:
            return await self._sign_again(asked, named)
        return token_of(waitpoint, keys, now_ms)

    async def _sign_again(
        self, execution_id: ExecutionId, waitpoint_id: WaitpointId
    ) -> WaitpointToken | None:
        async def body(tx: Transaction) -> WaitpointToken | None:
            subject = (await unit.lock_subjects(tx, [execution_id])).get(execution_id)
            if subject is None:
                return None
            waitpoint = await suspensions.find_waitpoint(tx, subject, waitpoint_id)
            if waitpoint is None or waitpoint.state is WaitpointState.CLOSED:
                return None
            keys = await suspensions.load_keys(tx)
            now_ms = await tx.now_ms()
            token = token_of(waitpoint, keys, now_ms)
            signed = structs.replace(
                waitpoint,
                token_kid=waitpoints.usable_key(keys, waitpoint.token_kid, now_ms).kid,
                token_fingerprint=waitpoints.fingerprint(token),
            )
            await tx.save(Changes(updates=(signed,)))
            return token

        return await self.store.transact(body)


async def _signals_of(
    reader: Reader, suspension: Suspension, *, every: bool
) -> tuple[ResumeSignal, ...]:
    found = await reader.select_records(
        SignalRecord,
        "list_suspension_signals",
        partition_key=suspension.partition_key,
        execution_id=uuid_of(suspension.execution_id),
        suspension_id=suspension.suspension_id,
        every=every,
        limit=SIGNALS_SHOWN_MAX,
    )
    return tuple(_signal_view(signal) for signal in found)


def _signal_view(signal: SignalRecord) -> ResumeSignal:
    fields = structs.asdict(signal) | {"effect": signal.observed_effect}
    return ResumeSignal(**{name: fields[name] for name in ResumeSignal.__struct_fields__})


def _view(rows: Sequence[Row]) -> SuspensionView:
    # Not strict: one database has booleans, the other zero and one.
    signals = msgspec.convert(
        [row for row in rows if row["signal_id"] is not None],
        tuple[ResumeSignal, ...],
        strict=False,
    )
    return msgspec.convert({**rows[0], "signals": signals}, SuspensionView)


def _waitpoint_view(waitpoint: Waitpoint) -> WaitpointView:
    names = msgspec.json.decode(waitpoint.required_signal_names, type=tuple[str, ...])
    fields = structs.asdict(waitpoint) | {"required_signal_names": names}
    return WaitpointView(**{name: fields[name] for name in WaitpointView.__struct_fields__})


async def _received(
    reader: Reader, rows: Sequence[InboxRow]
) -> set[tuple[ExecutionId, WaitpointKey]]:
    """What has come already where an execution waits for several things."""
    waiting: dict[ExecutionId, list[InboxRow]] = {}
    for row in rows:
        waiting.setdefault(row.execution_id, []).append(row)
    received: set[tuple[ExecutionId, WaitpointKey]] = set()
    for execution_id, several in waiting.items():
        if len(several) == 1:
            continue
        at = await condition_progress(reader, execution_id, several[0].suspension_id)
        if at is not None and at.came:
            names = {row.waitpoint_key for row in several if row.waitpoint_key is not None}
            received |= {(execution_id, name) for name in names.difference(at.left)}
    return received


# Signals that no wait has taken yet: listing them, and taking them while working
#
# A handler that waits in one branch while another works keeps its lease. It asks here
# whether what has come meanwhile meets its condition; `kept_topic` tells it when to ask.


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
        opened = self.shell.open_handle(handle)
        named = SuspensionId(parse_uuid("suspension_id", suspension_id))
        options: suspensions.SuspendOptions = {
            "suspension_id": named,
            "idempotency_key": named,
            "take_pending": True,
        }
        request = suspensions.checked_request(resume_condition, options)
        announced = _waitpoints_of(request) if check_bool("announce", announce) else ()
        taken = await self.describe_suspension(opened.execution_id, named)
        if taken is not None and taken.resumed:
            return taken
        if not announce and not await self._may_keep(opened):
            return None

        async def lock(tx: Transaction) -> suspensions.Suspending | None:
            """None once the wait is met."""
            subject = await suspensions.lock_subject(tx, opened.execution_id)
            if await _is_met(tx, subject, named):
                return None
            return await suspensions.lock_suspending(tx, subject, request)

        def decide(what: suspensions.Suspending | None, timing: Timing) -> Decision[bool]:
            if what is None:
                return Decision(answer=True)
            return decide_take(
                what.subject,
                unit.fence_of(opened),
                what.request,
                what.found,
                timing,
                announced=announced,
            )

        if not await self.shell.decide_loaded(lock, decide):
            return None
        return await self.describe_suspension(opened.execution_id, named)

    async def _may_keep(self, handle: Handle) -> bool:
        """A look without locks: most of the time there is nothing to take."""
        key = unit.execution_key(handle.execution_id)

        async def body(reader: Reader) -> bool:
            execution = await reader.get_one(Execution, key)
            # One that is gone, or held by another worker, is refused under lock.
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
    suspension = await tx.get_one(Suspension, key)
    return suspension is not None and suspension.close_reason == RESUMED


def _not_held(execution: Execution, handle: Handle) -> bool:
    return execution.lease_id != handle.lease_id
