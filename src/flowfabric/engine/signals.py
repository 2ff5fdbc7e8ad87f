"""Delivering signals: from outside with a token, or by an operator without one.

A token is compared before anything else is looked at. The response to a wrong token,
and the work until then, depends on the token and the keys alone, never on whether
the execution or the waitpoint exists. Nothing is written for it: a refusal that
wrote would take longer where there is something to write to.
"""

import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Unpack

from msgspec import Struct, structs

from flowfabric.core import conditions, ids, signals
from flowfabric.core.checks import check_bool, check_name, check_text, optional
from flowfabric.core.decisions import Decision, Subject, Timing
from flowfabric.core.handles import Handle
from flowfabric.core.records import (
    Execution,
    HmacKey,
    SignalDedup,
    SignalEffect,
    SignalFacts,
    Suspension,
    Waitpoint,
)
from flowfabric.core.resumption import RESUMED
from flowfabric.core.signals import KeptSize, Mailbox, mailbox_id
from flowfabric.core.states import OwnershipState
from flowfabric.core.suspension import (
    MetWait,
    SetAside,
    SuspendRequest,
    decide_set_aside,
    decide_take,
)
from flowfabric.core.waitpoints import (
    BoundWaitpoint,
    WaitpointToken,
    check_accepted,
    check_token,
    matching_key,
)
from flowfabric.engine import shell, suspensions, topics
from flowfabric.engine.waitpoint_keys import load_keys
from flowfabric.engine.waitpoints import SuspensionView, Waitpoints, find_waitpoint
from flowfabric.errors import BackendErrorKind, InvalidInput, InvalidToken, NotFound, Transport
from flowfabric.logs import open_log
from flowfabric.store.base import Reader, Saving, Transaction, Unlocked

log = open_log(__name__)

REFUSALS_LOGGED_EVERY_S = 1.0
"""How often at most a process writes a line about wrong tokens."""


class Refusals:
    """Leaves a trace of wrong tokens in the log, in few lines however many come."""

    def __init__(self) -> None:
        self._since = 0
        self._last_s: float | None = None

    def note(self, execution_id: ids.ExecutionId, code: str) -> None:
        self._since += 1
        now_s = time.monotonic()
        if self._last_s is not None and now_s - self._last_s < REFUSALS_LOGGED_EVERY_S:
            return
        if self._since == 1:
            log.warning("a signal was refused: %s, for %s", code, execution_id)
        else:
            log.warning("%d signals refused: %s, the last for %s", self._since, code, execution_id)
        self._last_s, self._since = now_s, 0


REFUSALS = Refusals()
"""Of this process."""


def kept_topic(worker_instance_id: str) -> str:
    """Hinted when a signal reaches an execution that this worker runs."""
    return f"kept:{worker_instance_id}"


_PARTITION = re.compile(r"^\{fp:([0-9]+)\}:")
_NOBODY = ids.ExecutionId(f"{{fp:{ids.INDEX_MAX}}}:{ids.FIRST_UUID}")
"""An id that no execution has."""


class WaitpointName(Struct, frozen=True):
    """The waitpoint that the execution has open under a name."""

    waitpoint_key: ids.WaitpointKey
    keep: bool = True
    """Keep the signal for the next wait of that name when nothing waits for it."""


class Delivery(Struct, frozen=True, kw_only=True):
    """One signal to one execution, and by what right."""

    execution_id: ids.ExecutionId
    address: ids.WaitpointId | WaitpointName
    request: signals.SignalRequest
    token: WaitpointToken | None = None
    """None: an operator delivers."""
    lane_id: str | None = None


Receiver = tuple[Subject, signals.SignalFindings]
"""What a delivery is decided about."""


class SignalOperations(Waitpoints):
    async def deliver_signal(
        self,
        execution_id: str,
        waitpoint_id: str,
        *,
        waitpoint_token: str | WaitpointToken,
        signal_name: str,
        **options: Unpack[signals.SignalOptions],
    ) -> signals.SignalResult:
        """Deliver to one waitpoint; the token must be the one made for it.

        A pending waitpoint keeps the signal for the suspension to come. Repeats, by
        `idempotency_key` or by `signal_id`, get the signal that was accepted first.
        """
        request = await self._request(signal_name, options)
        delivery = Delivery(
            # Reveal nothing about which partitions exist: the token decides.
            execution_id=_bearers_execution_id(execution_id),
            address=ids.WaitpointId(ids.parse_uuid("waitpoint_id", waitpoint_id)),
            request=request,
            token=check_token(waitpoint_token),
        )
        try:
            return await self._deliver(delivery)
        except InvalidToken as error:
            REFUSALS.note(delivery.execution_id, error.code)
            raise

    deliver_signal_on = shell.joined(deliver_signal)
    deliver_signal_on_sync = shell.joined_sync(deliver_signal)

    async def deliver_approval_signal(
        self,
        execution_id: str,
        waitpoint_id: str,
        *,
        signal_name: str,
        idempotency_suffix: str,
        lane_id: str | None = None,
        operator_identity: str = "",
        signal_dedup_ttl_ms: int | None = None,
    ) -> signals.SignalResult:
        """Deliver an operator's decision, by convention `approved` or `rejected`.

        No token is needed, so this works however often the keys were rotated. Name the
        operator when distinct approvers count.
        """
        check_name("signal_name", signal_name)
        check_text("idempotency_suffix", idempotency_suffix)
        request = signals.SignalRequest(
            signal_name=signal_name,
            new_id=ids.SignalId(shell.new_uuid()),
            signal_category="approval",
            source_type="operator",
            source_identity=operator_identity,
            idempotency_key=f"approval:{signal_name}:{idempotency_suffix}",
            target_scope="execution",
            dedup_ttl_ms=signal_dedup_ttl_ms,
        )
        delivery = Delivery(
            execution_id=self.shell.check_execution_id(execution_id),
            address=ids.WaitpointId(ids.parse_uuid("waitpoint_id", waitpoint_id)),
            request=request,
            lane_id=optional(ids.parse_lane_id, lane_id),
        )
        return await self._deliver(delivery)

    async def deliver_operator_signal(
        self,
        execution_id: str,
        waitpoint_key: str,
        *,
        signal_name: str,
        keep: bool = True,
        **options: Unpack[signals.SignalOptions],
    ) -> signals.SignalResult:
        """Deliver, as an operator, to whatever the execution waits at under a name.

        No token is needed or read. Where several waitpoints have the name, the one that
        is waited at comes first. When nothing waits under the name, the signal is kept for
        the next wait that does; with `keep=False` it is refused. An idempotency key holds
        for the name, not for one waitpoint: a repeat never counts for the next wait of the
        same name.
        """
        key = check_name("waitpoint_key", waitpoint_key)
        delivery = Delivery(
            execution_id=self.shell.check_execution_id(execution_id),
            address=WaitpointName(ids.WaitpointKey(key), check_bool("keep", keep)),
            request=await self._request(signal_name, {"source_type": "operator", **options}),
        )
        return await self._deliver(delivery)

    async def _deliver(self, delivery: Delivery) -> signals.SignalResult:
        request = delivery.request
        lock = partial(_lock_receiver, delivery)

        def decide(receiver: Receiver, timing: Timing) -> Decision[signals.SignalResult]:
            subject, found = receiver
            return signals.decide_deliver(subject, request, found, timing)

        if request.idempotency_key is not None or request.signal_id is not None:
            return await self.shell.decide_loaded(lock, decide)
        sure = await self._deliver_sure(delivery)
        if sure is not None:
            return sure
        read = partial(_read_receiver, delivery)
        return await self.shell.decide_unlocked_first(read, lock, decide)

    async def _deliver_sure(self, delivery: Delivery) -> signals.SignalResult | None:
        """Deliver in one round trip if the execution waits for nothing else; None if it does."""
        address, request = delivery.address, delivery.request
        if not isinstance(address, WaitpointName) or not self.shell.commits:
            return None
        accepted = signals.SignalAccepted(signal_id=request.new_id, effect=SignalEffect.SATISFIED)
        try:
            rows = await self.store.execute_alone(
                "signal_waiting",
                (topics.EVENT_TOPIC,),
                **shell.columns_of(delivery.execution_id),
                **signals.sure_signal(request, address.waitpoint_key),
            )
        except Transport as lost:
            if lost.kind is not BackendErrorKind.TRANSPORT:
                raise
            # Its id identifies a repeat, as if the caller had chosen it.
            again = structs.replace(
                delivery, request=structs.replace(request, signal_id=request.new_id)
            )
            try:
                answer = await self._deliver(again)
            except Transport as lost_again:
                raise (lost_again if lost_again.may_have_happened else lost) from None
            return accepted if isinstance(answer, signals.SignalDuplicate) else answer
        return accepted if rows else None

    async def _request(
        self, signal_name: str, options: signals.SignalOptions
    ) -> signals.SignalRequest:
        values, payload = self.shell.values, options.get("payload")
        if payload is not None:
            options = {**options, "payload": await values.through(payload, values.pack)}
        new_id = ids.SignalId(shell.new_uuid())
        return signals.SignalRequest(signal_name=signal_name, new_id=new_id, **options)

    # Signals that no wait has taken yet: taking them while working
    #
    # A handler that waits in one branch while another works keeps its lease. It asks here
    # whether what has come meanwhile meets its condition; `kept_topic` tells it when to ask.

    async def take_signals(
        self,
        handle: Handle | bytes,
        *,
        suspension_id: str,
        resume_condition: conditions.Condition,
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
        named = ids.SuspensionId(ids.parse_uuid("suspension_id", suspension_id))
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
            subject = await shell.lock_subject(tx, opened.execution_id)
            if await _is_met(tx, subject, named):
                return None
            return await suspensions.lock_suspending(tx, subject, request)

        def decide(what: suspensions.Suspending | None, timing: Timing) -> Decision[bool]:
            if what is None:
                return Decision(answer=True)
            return decide_take(
                what.subject,
                shell.fence_of(opened),
                what.request,
                what.found,
                timing,
                announced=announced,
            )

        if not await self.shell.decide_loaded(lock, decide):
            return None
        return await self.describe_suspension(opened.execution_id, named)

    async def set_aside_signals(
        self,
        handle: Handle | bytes,
        *,
        suspension_id: str,
        signal_ids: Sequence[str],
        reason: str,
    ) -> bool:
        """Set aside signals that met a wait and that its worker cannot use; false for a repeat.

        The other signals of the wait are kept again, and tokens that its end closed work again:
        the next wait takes up both, with another `suspension_id`. Without `signal_ids` all are
        kept: the wait goes on for code that asks for more by now. `why` shows the `reason`, if
        there is one, so that senders know what to correct.
        """
        opened = self.shell.open_handle(handle)
        request = SetAside(
            suspension_id=ids.SuspensionId(ids.parse_uuid("suspension_id", suspension_id)),
            signal_ids=frozenset(
                ids.SignalId(ids.parse_uuid("signal_ids", each)) for each in signal_ids
            ),
            reason=check_text("reason", reason),
        )

        async def lock(tx: Transaction) -> tuple[Subject, MetWait | None]:
            subject = await shell.lock_subject(tx, opened.execution_id)
            return subject, await _lock_met(tx, subject.execution, request.suspension_id)

        def decide(what: tuple[Subject, MetWait | None], timing: Timing) -> Decision[bool]:
            subject, wait = what
            return decide_set_aside(subject, shell.fence_of(opened), request, wait, timing)

        return await self.shell.decide_loaded(lock, decide)

    async def _may_keep(self, handle: Handle) -> bool:
        """Check without locks first: usually there is nothing to take."""
        key = shell.execution_key(handle.execution_id)

        async def body(reader: Reader) -> bool:
            execution = await reader.get_one(Execution, key)
            # One that is gone, or held by another worker, is refused under lock.
            return (
                execution is None
                or execution.keeps_signals
                or execution.lease_id != handle.lease_id
            )

        return await self.store.read(body)


def _waitpoints_of(request: SuspendRequest) -> list[BoundWaitpoint]:
    condition = request.condition
    names = conditions.referenced_waitpoint_keys(condition)
    return [
        structs.replace(
            bound, own_name_only=conditions.takes_own_name(condition, bound.waitpoint_key)
        )
        for bound in request.fresh
        if bound.waitpoint_key in names
    ]


async def _is_met(tx: Transaction, subject: Subject, suspension_id: ids.SuspensionId) -> bool:
    """Whether the wait was met since it was looked at without locks."""
    execution = subject.execution
    key = (execution.partition_key, execution.execution_id, suspension_id)
    suspension = await tx.get_one(Suspension, key)
    return suspension is not None and suspension.close_reason == RESUMED


async def _lock_met(
    tx: Transaction, execution: Execution, suspension_id: ids.SuspensionId
) -> MetWait | None:
    at = (execution.partition_key, execution.execution_id)
    suspension = await tx.lock_one(Suspension, (*at, suspension_id))
    if suspension is None:
        return None
    of_it = {**shell.columns_of(execution.execution_id), "suspension_id": suspension_id}
    waitpoints = await tx.select_records(Waitpoint, "list_suspension_waitpoints", **of_it)
    locked = await tx.lock(Waitpoint, [(*at, each.waitpoint_id) for each in waitpoints])
    return MetWait(
        suspension=suspension,
        waitpoints=tuple(locked.values()),
        signals=await tx.select_records(SignalFacts, "list_satisfiers", **of_it),
        dedups=await tx.select_records(SignalDedup, "list_satisfier_dedups", **of_it),
    )


def _bearers_execution_id(text: object) -> ids.ExecutionId:
    """Give the same answer for an impossible partition as for one this deployment does not have."""
    if isinstance(text, str) and (found := _PARTITION.match(text)):
        ids.parse_execution_id(_PARTITION.sub("{fp:0}:", text))
        if ids.parse_index(found[1]) is None:
            return _NOBODY
    return ids.parse_execution_id(text)


async def _key_of(reader: Reader, delivery: Delivery) -> HmacKey | None:
    """The key that made the token; none for an operator."""
    if delivery.token is None:
        return None
    assert isinstance(delivery.address, str), "a token names its waitpoint"
    keys = await load_keys(reader)
    return matching_key(delivery.token, delivery.execution_id, delivery.address, keys)


async def _read_receiver(delivery: Delivery, tx: Unlocked) -> Receiver | None:
    """Without locks, for a signal that is no repeat."""
    key = await _key_of(tx, delivery)
    rows = await tx.select_joined(
        (Execution, Suspension, Waitpoint),
        "read_for_signal",
        **shell.columns_of(delivery.execution_id),
    )
    execution = rows[0].get(Execution) if rows else None
    if execution is None:
        return None
    waitpoints = (row.get(Waitpoint) for row in rows)
    subject = Subject(
        execution=execution,
        attempt=None,
        suspension=rows[0].get(Suspension),
        waitpoints=tuple(each for each in waitpoints if each is not None),
    )
    return await _receive(tx, delivery, key, subject)


async def _lock_receiver(delivery: Delivery, tx: Transaction) -> Receiver:
    """Lock what a signal can change: the attempt stays as it is until the next claim."""
    key = await _key_of(tx, delivery)
    execution = await tx.lock_one(Execution, shell.execution_key(delivery.execution_id))
    if execution is None:
        return await _receive(tx, delivery, key, None)
    opened = await shell.lock_open(tx, [execution])
    subject = Subject(
        execution=execution,
        attempt=None,
        suspension=opened.suspensions.get(delivery.execution_id),
        waitpoints=opened.waitpoints.get(delivery.execution_id, ()),
    )
    return await _receive(tx, delivery, key, subject, await _lock_earlier(tx, execution, delivery))


async def _receive(
    tx: Saving,
    delivery: Delivery,
    key: HmacKey | None,
    subject: Subject | None,
    earlier: Sequence[SignalDedup] = (),
) -> Receiver:
    """The receiver, with everything the decision needs; raises if it may not get the signal."""
    now_ms = await tx.now_ms()
    if key is not None:
        check_accepted(key, now_ms)
    execution = None if subject is None else subject.execution
    namespace = delivery.request.namespace
    if subject is None or execution is None or namespace not in (None, execution.namespace):
        raise NotFound("execution", delivery.execution_id)
    lane_id = execution.lane_id
    if delivery.lane_id not in (None, lane_id):
        raise InvalidInput("lane_id", f"lane_mismatch: the execution is in lane {lane_id!r}")
    found = await _find_for(tx, subject, delivery, earlier, now_ms)
    if execution.ownership_state is OwnershipState.LEASED and execution.worker_instance_id:
        tx.hint(kept_topic(execution.worker_instance_id))
    topics.hint_locked(tx, [execution])
    return subject, found


async def _find_for(
    reader: Reader,
    subject: Subject,
    delivery: Delivery,
    earlier: Sequence[SignalDedup],
    now_ms: int,
) -> signals.SignalFindings:
    """Which waitpoint the signal goes to, and what else the decision needs."""
    request, address = delivery.request, delivery.address
    if isinstance(address, WaitpointName):
        keep, mailbox_key = address.keep, address.waitpoint_key
        waitpoint_id = signals.addressed(subject, mailbox_key, earlier, now_ms, keep=keep)
    else:
        keep, mailbox_key, waitpoint_id = True, None, address
    waitpoint = await find_waitpoint(reader, subject, waitpoint_id)
    key = mailbox_key if waitpoint is None else waitpoint.waitpoint_key
    if key is None:
        raise NotFound("waitpoint", waitpoint_id)
    at = (subject.execution.partition_key, subject.execution.execution_id)
    chosen = [] if request.signal_id is None else [(*at, request.signal_id)]
    return signals.SignalFindings(
        mailbox=Mailbox(waitpoint_id=waitpoint_id, waitpoint_key=key),
        waitpoint=waitpoint,
        by_token=delivery.token is not None,
        dedup=next((each for each in earlier if each.waitpoint_id == waitpoint_id), None),
        recorded=bool(await reader.get(SignalFacts, chosen)),
        keep=keep,
        satisfiers=await _satisfiers(reader, subject),
        kept=await _kept_size(reader, subject.execution),
    )


async def _kept_size(reader: Reader, execution: Execution) -> KeptSize:
    """What is kept already, since one more may have to be."""
    if not execution.keeps_signals:
        return KeptSize()
    (size,) = await reader.select_as(
        KeptSize, "size_kept_signals", **shell.columns_of(execution.execution_id)
    )
    return size


async def _lock_earlier(
    tx: Transaction, execution: Execution, delivery: Delivery
) -> Sequence[SignalDedup]:
    """Earlier deliveries there with the signal's idempotency key."""
    address = delivery.address
    idempotency_key = delivery.request.idempotency_key
    if idempotency_key is None:
        return ()
    if isinstance(address, str):
        at = (execution.partition_key, execution.execution_id)
        return tuple((await tx.lock(SignalDedup, [(*at, address, idempotency_key)])).values())
    return await tx.select_records(
        SignalDedup,
        "list_signal_dedups",
        **shell.columns_of(execution.execution_id),
        waitpoint_key=address.waitpoint_key,
        mailbox_id=mailbox_id(execution.execution_id, address.waitpoint_key),
        idempotency_key=idempotency_key,
    )


async def _satisfiers(reader: Reader, subject: Subject) -> tuple[SignalFacts, ...]:
    """What has counted so far; a condition on a single signal has no past."""
    execution, suspension = subject.execution, subject.suspension
    if suspension is None or not isinstance(
        conditions.stored_condition(suspension.resume_condition),
        conditions.AllConditions | conditions.Count,
    ):
        return ()
    return tuple(
        await reader.select_records(
            SignalFacts,
            "list_satisfiers",
            **shell.columns_of(execution.execution_id),
            suspension_id=suspension.suspension_id,
        )
    )
