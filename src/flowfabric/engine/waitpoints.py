"""Waitpoints: made, closed and read, with the pauses they belong to. No list shows a token."""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct, structs

from flowfabric.core import bounds, events, ids, leases, records, resumption, waitpoints
from flowfabric.core.checks import check_bool, check_int, check_name, check_text, optional
from flowfabric.core.decisions import Changes, Decision, Subject, Timing
from flowfabric.core.handles import Handle
from flowfabric.core.steps import in_order, recoded
from flowfabric.engine import paging, shell, waitpoint_keys
from flowfabric.engine.reads import condition_progress, find
from flowfabric.errors import CodecFailed, NotFound
from flowfabric.store.base import Joined, Reader, Transaction
from flowfabric.store.mapping import values_of

SIGNALS_SHOWN_MAX = 10_000


class ResumeSignal(Struct, frozen=True, kw_only=True):
    """A delivered signal as the worker sees it."""

    signal_id: ids.SignalId
    signal_name: str
    signal_category: str
    waitpoint_key: ids.WaitpointKey
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at_ms: int
    payload: bytes | None
    payload_encoding: str
    effect: records.SignalEffect
    matched: bool


class SuspensionView(Struct, frozen=True, kw_only=True):
    """One pause, open or over, with the signals that counted."""

    suspension_id: ids.SuspensionId
    attempt_index: int
    waitpoint_id: ids.WaitpointId
    reason_code: records.SuspensionReason
    timeout_at_ms: int | None
    timeout_behavior: records.TimeoutBehavior | None
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
        return self.close_reason in resumption.OBSERVABLE


class PastRuns(Struct, frozen=True, kw_only=True):
    """What earlier runs of an execution have stored."""

    steps: tuple[records.Step, ...] = ()
    """Finished, in the order they were made in."""
    pause: SuspensionView | None = None
    """The last one, open or over."""


def claimed_progress(progress: str) -> PastRuns:
    """What a claim returned about earlier runs."""
    past = msgspec.json.decode(progress, type=PastRuns)
    return structs.replace(past, steps=tuple(in_order(past.steps)))


class WaitpointView(Struct, frozen=True, kw_only=True):
    """An open waitpoint. Of its token, only enough to identify it."""

    execution_id: ids.ExecutionId
    waitpoint_id: ids.WaitpointId
    waitpoint_key: ids.WaitpointKey
    state: records.WaitpointState
    required_signal_names: tuple[str, ...]
    created_at_ms: int
    activated_at_ms: int | None
    expires_at_ms: int | None
    token_kid: str
    token_fingerprint: str


class WaitpointPage(Struct, frozen=True, kw_only=True):
    waitpoints: tuple[WaitpointView, ...]
    next_cursor: ids.WaitpointId | None


class SuspendedExecution(Struct, frozen=True, kw_only=True):
    execution_id: ids.ExecutionId
    suspension_id: ids.SuspensionId
    suspended_at_ms: int
    timeout_at_ms: int | None
    reason: records.SuspensionReason


class SuspendedPage(Struct, frozen=True, kw_only=True):
    executions: tuple[SuspendedExecution, ...]
    next_cursor: str | None


class InboxEntry(Struct, frozen=True, kw_only=True):
    """One thing an execution waits for. Its token is not here."""

    execution_id: ids.ExecutionId
    own_id: str | None = None
    execution_kind: str
    lane_id: str
    waitpoint_id: ids.WaitpointId
    name: ids.WaitpointKey
    required_signal_names: tuple[str, ...]
    suspended_at_ms: int
    timeout_at_ms: int | None


class InboxRow(Struct, frozen=True, kw_only=True):
    """An open waitpoint of a suspended execution, or one without any."""

    execution_id: ids.ExecutionId
    suspension_id: ids.SuspensionId
    own_id: str | None
    execution_kind: str
    lane_id: str
    waitpoint_id: ids.WaitpointId | None
    waitpoint_key: ids.WaitpointKey | None
    required_signal_names: str | None
    suspended_at_ms: int
    timeout_at_ms: int | None

    def entries(
        self, received: set[tuple[ids.ExecutionId, ids.WaitpointKey]]
    ) -> Iterator[InboxEntry]:
        """What it still waits for."""
        if self.waitpoint_id is None or self.waitpoint_key is None:
            return
        if (self.execution_id, self.waitpoint_key) in received:
            return
        names = msgspec.json.decode(self.required_signal_names or "[]", type=tuple[str, ...])
        yield records.view_of(
            InboxEntry, self, name=self.waitpoint_key, required_signal_names=names
        )


class Inbox(Struct, frozen=True, kw_only=True):
    entries: tuple[InboxEntry, ...]
    next_cursor: str | None


PROACTIVE_CLOSE = "proactive_close"


class Waitpoints(shell.Group):
    async def create_waitpoint(
        self,
        handle: Handle | bytes,
        waitpoint_key: str | None = None,
        *,
        expires_in_ms: int,
        waitpoint_id: str | None = None,
        own_name_only: bool = False,
        expire_token: bool = False,
    ) -> waitpoints.PendingWaitpoint:
        """A waitpoint whose token can be handed out before the execution suspends.

        Signals that arrive before the suspension are kept for it; a waitpoint that no
        suspension takes over in time is closed. Each call makes another one, unless it
        names a `waitpoint_id`: a repeat gets the one there is, in whatever state it is,
        and opens it again if the end of an execution that was replayed has closed it.
        With `own_name_only` it refuses signals whose name is not its key. With `expire_token`
        the token stops working after that time, even while a suspension waits there: from then
        on only operators reach it.
        """
        opened = self.shell.open_handle(handle)
        check_int("expires_in_ms", expires_in_ms, 1, bounds.WAITPOINT_TTL_MS_MAX)
        check_bool("expire_token", expire_token)
        named = (
            shell.new_uuid()
            if waitpoint_id is None
            else ids.parse_uuid("waitpoint_id", waitpoint_id)
        )
        key = f"wpk:{named}" if waitpoint_key is None else waitpoint_key
        bound = waitpoints.BoundWaitpoint(
            waitpoint_id=ids.WaitpointId(named),
            waitpoint_key=ids.WaitpointKey(check_name("waitpoint_key", key)),
            own_name_only=check_bool("own_name_only", own_name_only),
        )

        async def lock(
            tx: Transaction,
        ) -> tuple[Subject, Sequence[records.HmacKey], records.Waitpoint | None]:
            subject = await shell.lock_subject(tx, opened.execution_id)
            keys = await waitpoint_keys.ensure_keys(tx)
            if waitpoint_id is None:
                return subject, keys, None
            return subject, keys, await find_waitpoint(tx, subject, bound.waitpoint_id)

        def decide(
            found: tuple[Subject, Sequence[records.HmacKey], records.Waitpoint | None],
            timing: Timing,
        ) -> Decision[waitpoints.PendingWaitpoint]:
            subject, keys, made = found
            return waitpoints.decide_create_waitpoint(
                subject,
                shell.fence_of(opened),
                bound,
                made,
                expires_in_ms,
                keys,
                timing,
                expire_token=expire_token,
            )

        return await self.shell.decide_loaded(lock, decide)

    async def close_waitpoint(
        self,
        execution_id: str,
        waitpoint_id: str,
        *,
        reason: str = PROACTIVE_CLOSE,
        fence: leases.Fence | None = None,
        source: str = "worker",
    ) -> resumption.WaitpointsClosed:
        """Close one waitpoint to further signals. This never wakes the execution.

        A worker shows its fence and closes pending waitpoints; an operator
        (`source="operator_override"`) also those of an open suspension.
        """
        target_id = self.shell.check_execution_id(execution_id)
        named = ids.WaitpointId(ids.parse_uuid("waitpoint_id", waitpoint_id))
        check_text("reason", reason, empty=False)
        given = leases.check_fence_given(fence, source)

        async def lock(tx: Transaction) -> tuple[Subject, records.Waitpoint | None]:
            subject = await shell.lock_subject(tx, target_id)
            return subject, await find_waitpoint(tx, subject, named)

        def decide(
            found: tuple[Subject, records.Waitpoint | None], timing: Timing
        ) -> Decision[resumption.WaitpointsClosed]:
            subject, waitpoint = found
            if given is not None:
                leases.check_fence(subject, given, timing.now_ms)
            administrative = source == leases.OPERATOR_OVERRIDE
            return resumption.decide_close_waitpoint(
                subject, waitpoint, reason, administrative, timing.now_ms
            )

        return await self.shell.decide_loaded(lock, decide)

    async def expire_due_waitpoints(
        self, *, limit: int = bounds.SWEEP_BATCH, only: events.ScannerFilter = events.EVERYBODY
    ) -> shell.Swept:
        """Close pending waitpoints that no suspension took over in time."""
        return await self.shell.sweep(
            "due_waitpoints",
            resumption.decide_expire_waitpoints,
            limit,
            only,
            count=lambda answer: answer.closed,
        )

    async def observe_signals(
        self, handle: Handle | bytes, *, include_unmatched: bool = False
    ) -> tuple[ResumeSignal, ...]:
        """The signals that resumed this attempt, in the order they were accepted.

        Empty for an attempt that was never suspended, and when an operator, a
        cancellation or another timeout ended the pause. With `include_unmatched`: also
        while the pause lasts, and with what its waitpoints got and no wait has used so far.
        """
        opened = self.shell.verify_handle(handle)
        at = shell.columns_of(opened.execution_id)

        async def body(reader: Reader) -> tuple[ResumeSignal, ...]:
            last = await reader.select_records(
                records.Suspension, "latest_suspension", **at, attempt_index=opened.attempt_index
            )
            if not last or not (include_unmatched or last[0].close_reason in resumption.OBSERVABLE):
                return ()
            signals = await reader.select_records(
                records.SignalRecord,
                "list_suspension_signals",
                **at,
                suspension_id=last[0].suspension_id,
                every=include_unmatched,
                limit=SIGNALS_SHOWN_MAX,
            )
            return tuple(map(_signal_view, signals))

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

        A worker that names its pauses learns here, after a crash, how each of them ended.
        """
        at = shell.columns_of(self.shell.check_execution_id(execution_id))
        at["suspension_id"] = ids.parse_uuid("suspension_id", suspension_id)
        rows = await self.store.read(
            lambda reader: reader.select("read_suspension", **at, limit=SIGNALS_SHOWN_MAX)
        )
        if not rows:
            return None
        signals = values_of(ResumeSignal, [row for row in rows if row["signal_id"] is not None])
        unpacked = await self._unpacked(signals)
        return msgspec.convert({**rows[0], "signals": unpacked}, SuspensionView)

    async def read_progress(self, execution_id: str) -> PastRuns:
        """Where the next run of a handler continues: its steps, and how the last pause ended."""
        at = shell.columns_of(self.shell.check_execution_id(execution_id))
        rows = await self.store.read(
            lambda reader: reader.select_joined(
                (records.Step, records.Suspension, records.SignalRecord), "read_progress", **at
            )
        )
        values = self.shell.values
        found = [step for row in rows if (step := row.get(records.Step)) is not None]
        steps = await values.through_all(
            tuple(in_order(found)),
            lambda each: recoded(each, values.unpack),
        )
        return PastRuns(steps=tuple(steps), pause=await self._last_pause(rows))

    async def _last_pause(self, rows: Sequence[Joined]) -> SuspensionView | None:
        """None if there was no pause, or a codec cannot decode it: the wait reports that error."""
        pauses = [pause for row in rows if (pause := row.get(records.Suspension)) is not None]
        if not pauses:
            return None
        found = [signal for row in rows if (signal := row.get(records.SignalRecord)) is not None]
        signals = [_signal_view(signal) for signal in found[:SIGNALS_SHOWN_MAX]]
        try:
            unpacked = await self._unpacked(signals)
            return records.view_of(SuspensionView, pauses[0], signals=unpacked)
        except CodecFailed:
            return None

    async def list_pending_waitpoints(
        self, execution_id: str, *, after: str | None = None, limit: int = 100
    ) -> WaitpointPage:
        """The open waitpoints of one execution, pending and active, by id."""
        found_id = self.shell.check_execution_id(execution_id)
        check_int("limit", limit, 1, bounds.PAGE_MAX)
        start = ids.FIRST_UUID if after is None else ids.parse_uuid("after", after)

        async def body(reader: Reader) -> WaitpointPage:
            if await find(reader, found_id) is None:
                raise NotFound("execution", found_id)
            rows = await reader.select_records(
                records.Waitpoint,
                "list_open_waitpoints",
                **shell.columns_of(found_id),
                after=start,
                limit=limit + 1,
            )
            page, last = paging.cut(rows, limit, lambda row: row.waitpoint_id)
            return WaitpointPage(
                waitpoints=tuple(_waitpoint_view(row) for row in page), next_cursor=last
            )

        return await self.store.read(body)

    async def list_suspended(
        self, *, partition: int | None = None, cursor: str | None = None, limit: int = 100
    ) -> SuspendedPage:
        """Suspended executions of one partition or of all, longest suspended first."""
        check_int("limit", limit, 0, bounds.PAGE_MAX)
        if partition is not None:
            check_int("partition", partition, 0, 65_535)
            ids.check_partition(partition, self.shell.deployment.partitions)
        found = await self.select_as(
            SuspendedExecution,
            "list_suspended",
            partition_key=partition,
            limit=limit + 1,
            **paging.by_time(cursor),
        )
        page, last = paging.cut(
            found, limit, lambda each: paging.time_cursor(each.suspended_at_ms, each.execution_id)
        )
        return SuspendedPage(executions=page, next_cursor=last)

    async def list_inbox(
        self, *, namespace: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> Inbox:
        """What suspended executions wait for, longest first; `limit` counts executions."""
        check_int("limit", limit, 1, bounds.PAGE_MAX)
        after = paging.by_time(cursor)
        optional(ids.parse_namespace, namespace)

        async def body(
            reader: Reader,
        ) -> tuple[list[InboxRow], set[tuple[ids.ExecutionId, ids.WaitpointKey]]]:
            found = await reader.select_as(
                InboxRow,
                "list_inbox",
                namespace=namespace,
                limit=limit + 1,
                **after,
            )
            return found, await _received(reader, found)

        rows, received = await self.store.read(body)
        listed = list(dict.fromkeys(row.execution_id for row in rows))
        shown = set(listed[:limit])
        page = [row for row in rows if row.execution_id in shown]
        cursor = None
        if len(listed) > limit:
            cursor = paging.time_cursor(page[-1].suspended_at_ms, listed[limit - 1])
        entries = tuple(entry for row in page for entry in row.entries(received))
        return Inbox(entries=entries, next_cursor=cursor)

    async def read_waitpoint_token(
        self, execution_id: str, waitpoint_id: str
    ) -> waitpoints.WaitpointToken | None:
        """The token of an open waitpoint of this execution; None for any other, or if it expired.

        When the key that signed it is no longer accepted, a token of the current key.
        """
        target_id = self.shell.check_execution_id(execution_id)
        named = ids.WaitpointId(ids.parse_uuid("waitpoint_id", waitpoint_id))

        async def body(
            reader: Reader,
        ) -> tuple[records.Waitpoint | None, Sequence[records.HmacKey], int]:
            key = (*shell.execution_key(target_id), named)
            waitpoint = await reader.get_one(records.Waitpoint, key)
            return waitpoint, await waitpoint_keys.load_keys(reader), await reader.now_ms()

        waitpoint, keys, now_ms = await self.store.read(body)
        if waitpoint is None or waitpoint.state is records.WaitpointState.CLOSED:
            return None
        if waitpoints.token_expired(waitpoint, now_ms):
            return None
        if waitpoints.usable_key(keys, waitpoint.token_kid, now_ms).kid != waitpoint.token_kid:
            return await self._sign_again(target_id, named)
        return waitpoints.token_of(waitpoint, keys, now_ms)

    async def _sign_again(
        self, execution_id: ids.ExecutionId, waitpoint_id: ids.WaitpointId
    ) -> waitpoints.WaitpointToken | None:
        async def body(tx: Transaction) -> waitpoints.WaitpointToken | None:
            subject = (await shell.lock_subjects(tx, [execution_id])).get(execution_id)
            if subject is None:
                return None
            waitpoint = await find_waitpoint(tx, subject, waitpoint_id)
            if waitpoint is None or waitpoint.state is records.WaitpointState.CLOSED:
                return None
            keys = await waitpoint_keys.load_keys(tx)
            now_ms = await tx.now_ms()
            token = waitpoints.token_of(waitpoint, keys, now_ms)
            signed = structs.replace(
                waitpoint,
                token_kid=waitpoints.usable_key(keys, waitpoint.token_kid, now_ms).kid,
                token_fingerprint=waitpoints.fingerprint(token),
            )
            await tx.save(Changes(updates=(signed,)))
            return token

        return await self.store.transact(body)


async def find_waitpoint(
    tx: Reader, subject: Subject, waitpoint_id: ids.WaitpointId
) -> records.Waitpoint | None:
    """A waitpoint of the locked execution, open or closed."""
    for waitpoint in subject.waitpoints:
        if waitpoint.waitpoint_id == waitpoint_id:
            return waitpoint
    execution = subject.execution
    key = (execution.partition_key, execution.execution_id, waitpoint_id)
    return await tx.get_one(records.Waitpoint, key)


def _signal_view(signal: records.SignalRecord) -> ResumeSignal:
    return records.view_of(ResumeSignal, signal, effect=signal.observed_effect)


def _waitpoint_view(waitpoint: records.Waitpoint) -> WaitpointView:
    names = msgspec.json.decode(waitpoint.required_signal_names, type=tuple[str, ...])
    return records.view_of(WaitpointView, waitpoint, required_signal_names=names)


async def _received(
    reader: Reader, rows: Sequence[InboxRow]
) -> set[tuple[ids.ExecutionId, ids.WaitpointKey]]:
    """The names whose signal has arrived, of executions that wait for several."""
    waiting: dict[ids.ExecutionId, list[InboxRow]] = {}
    for row in rows:
        waiting.setdefault(row.execution_id, []).append(row)
    received: set[tuple[ids.ExecutionId, ids.WaitpointKey]] = set()
    for execution_id, several in waiting.items():
        if len(several) == 1:
            continue
        at = await condition_progress(reader, execution_id, several[0].suspension_id)
        if at is not None and at.came:
            names = {row.waitpoint_key for row in several if row.waitpoint_key is not None}
            received |= {(execution_id, name) for name in names.difference(at.left)}
    return received
