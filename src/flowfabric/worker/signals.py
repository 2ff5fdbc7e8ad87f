"""How a handler waits for signals.

A wait is identified by its place among the calls. Its pause in the database has an id
made from that place, so every run of the handler finds out how the pause ended,
whichever worker started it and however often workers died in between. The outcome is
also stored as a step, which later runs read together with all others; since the pause keeps
it anyway, the handler continues without waiting for that.
"""

import asyncio
import hashlib
import math
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from typing import Final, Literal, TypeVar, overload

import msgspec
from msgspec import Raw, Struct, structs

from flowfabric import errors
from flowfabric.core.bounds import OPEN_WAITPOINTS_MAX, WAITPOINTS_PER_SUSPENSION_MAX
from flowfabric.core.conditions import (
    TOO_FEW,
    Condition,
    counts_waitpoints,
    is_satisfied,
    ranks_of,
    referenced_waitpoint_keys,
    takes_own_name,
)
from flowfabric.core.ids import ExecutionId, WaitpointId, uuid4_from
from flowfabric.core.policies import Duration, duration_ms, optional_duration_ms
from flowfabric.core.records import SignalFacts, Step, StepKind, view_of
from flowfabric.core.suspension import SET_ASIDE
from flowfabric.core.waitpoints import ANNOUNCED_FOR_MS, FreshWaitpoint
from flowfabric.engine.waitpoints import ResumeSignal, SuspensionView
from flowfabric.json_values import read_as
from flowfabric.logs import open_log
from flowfabric.parts import waits
from flowfabric.signals import Signal, SignalToken, check_name, condition_of
from flowfabric.worker.blame import blame
from flowfabric.worker.branches import DurableCall
from flowfabric.worker.digests import known_by
from flowfabric.worker.leases import clock_s
from flowfabric.worker.parking import Pause, fitting, unfitting
from flowfabric.worker.services import (
    BlockingVerbs,
    Services,
    Verbs,
    called,
    on_loop,
)

log = open_log(__name__)

PAUSES_MAX: Final = 1_000
"""How many pauses one wait may have: each replay of the execution begins another, and so does
each signal that does not fit."""
RESUMED_BY: Final = "resumed_by_"
BESIDE_AFTER_S: Final = 0.05
"""If a handler is not unwound by then, another of its branches is working."""
LOOK_AGAIN_S: Final = 5.0
"""How often such a branch looks for signals that no hint announced."""
ANNOUNCE_AGAIN_S: Final = ANNOUNCED_FOR_MS / 3_000
"""How often it announces that it waits: before the waitpoints made for that expire."""


class StoredSignal(Struct, frozen=True, kw_only=True):
    signal_id: str
    name: str
    source: str
    source_type: str
    received_at_ms: int
    payload: Raw


class WaitOutcome(Struct, frozen=True, kw_only=True, rename={"ended_by": "ended"}):
    """How a wait ended, as its step holds it."""

    ended_by: Literal["signals", "timeout", "operator"]
    signals: tuple[StoredSignal, ...] = ()


class Wait(Struct, frozen=True, kw_only=True):
    """A wait that the code has asked for."""

    call: DurableCall
    condition: Condition
    timeout_ms: int | None


def named_id(execution_id: ExecutionId, *position: str) -> str:
    """The same id in every run of the handler."""
    text = "\x00".join((execution_id, *position))
    return uuid4_from(hashlib.sha256(text.encode()).digest()[:16])


async def make_waitpoint(
    services: Services, call: DurableCall, name: str, expires_in_ms: int
) -> SignalToken:
    execution_id = services.lease.claimed.execution_id
    async with call:
        stored = await services.journal.look_up(call)
        if stored is not None and stored.failure is not None:
            await services.journal.deliver(stored)
        services.check()
        with services.parking.working():
            # Asked for in every run, since the token itself is stored nowhere.
            waitpoint_id = _waitpoint_id(services, call, stored)
            made = await services.request(
                lambda: services.engine.create_waitpoint(
                    services.lease.handle,
                    name,
                    expires_in_ms=expires_in_ms,
                    waitpoint_id=waitpoint_id,
                    own_name_only=True,
                    expire_token=True,
                )
            )
            services.waitpoints_made += 1
            if stored is None:
                result = msgspec.json.encode(made.waitpoint_id)
                await services.journal.store_later(call, result=result)
            else:
                await services.journal.deliver(stored)
    return SignalToken(execution_id, made.waitpoint_id, made.waitpoint_token)


def _waitpoint_id(services: Services, call: DurableCall, stored: Step | None) -> str:
    if stored is not None:
        return msgspec.json.decode(stored.result or b"null", type=str)
    return named_id(services.lease.claimed.execution_id, "waitpoint", call.identity)


async def signals_of(
    services: Services, wait: Wait, what: str, kind: object
) -> tuple[Signal[object], ...]:
    """The signals that ended a wait, with decoded payloads; raises if there are none.

    As long as the wait has not ended, the handler is unwound here.
    """
    call = wait.call
    async with call:
        stored = await services.journal.find(call)
        if stored is None:
            try:
                outcome = await _outcome_of(services, wait, kind)
            except errors.CodecFailed as error:
                # The codec cannot read it yet: the handler is parked.
                await services.parking.until_code_fits(unfitting(error))
                raise
            await services.journal.store_later(call, result=msgspec.json.encode(outcome))
        else:
            outcome = msgspec.json.decode(stored.result or b"null", type=WaitOutcome)
        try:
            _require_signals(outcome, what)
            return await fitting(
                services.parking, lambda: tuple(_decoded(each, kind) for each in outcome.signals)
            )
        except BaseException as error:
            blame(services.lease, call, error)
            raise


async def _outcome_of(services: Services, wait: Wait, kind: object) -> WaitOutcome:
    """How a wait ended, with signals that all fit. It continues after signals that do not."""
    began_s = clock_s()
    for number in range(PAUSES_MAX):
        view = await _ended_pause(services, wait, number)
        if view is None:
            return WaitOutcome(ended_by="timeout")
        outcome = _outcome_of_pause(view, wait.condition)
        unfit = {} if outcome is None else _unfit_signals(outcome, kind)
        met = outcome is not None and outcome.ended_by == "signals"
        more = met and _asks_for_more(services, wait, view)
        if outcome is not None and not unfit and not more:
            return outcome
        if unfit or more:
            await _set_aside(services, view, unfit)
        if unfit or more or (view.close_reason or "").startswith(SET_ASIDE):
            wait = structs.replace(wait, timeout_ms=_left_ms(services, wait, view, began_s))
    raise errors.MaxReplaysExhausted(f"{wait.call.key} was waited for {PAUSES_MAX} times")


async def _ended_pause(services: Services, wait: Wait, number: int) -> SuspensionView | None:
    """One pause of a wait, once it is over; None if it has timed out beside a working branch."""
    services.check()
    with services.parking.working():
        execution_id = services.lease.claimed.execution_id
        suspension_id = named_id(execution_id, "suspension", wait.call.identity, str(number))
        view = None
        if not services.lease.first_run:
            view = await services.describe_suspension(suspension_id)
        if view is not None:
            return view
        pause = _pause_of(services, wait, suspension_id)
        made = services.waitpoints_made + len(pause.fresh)
        if counts_waitpoints(wait.condition) or made > OPEN_WAITPOINTS_MAX:
            view = await _take_or_announce(services, pause)
    return view or await _until_signalled(services, pause)


def _asks_for_more(services: Services, wait: Wait, view: SuspensionView) -> bool:
    """Whether the code has changed since its wait began, and signals that met it do not any more.

    A waitpoint counts once, but it is not known here which signals came to the same one.
    """
    facts = [
        view_of(
            SignalFacts,
            each,
            partition_key=0,
            execution_id=services.lease.claimed.execution_id,
            sequence=number,
            waitpoint_id=WaitpointId(each.signal_id),
            suspension_id=view.suspension_id,
            observed_effect=each.effect,
            satisfier=True,
        )
        for number, each in enumerate(view.signals)
    ]
    return not is_satisfied(wait.condition, facts)


async def _set_aside(services: Services, view: SuspensionView, unfit: Mapping[str, str]) -> None:
    """Let the wait go on with what came for it, except for what does not fit."""
    reason = "; ".join(unfit.values())
    if unfit:
        log.warning(
            "set aside, and waiting for another: %s", reason, extra=services.lease.log_fields
        )
    else:
        log.info("its wait was met, and asks for more by now", extra=services.lease.log_fields)
    with services.parking.working():
        await services.set_aside_signals(view.suspension_id, list(unfit), reason)


def _left_ms(services: Services, wait: Wait, view: SuspensionView, began_s: float) -> int | None:
    """The rest of the timeout of a wait that continues after a pause."""
    if wait.timeout_ms is None:
        return None
    if view.timeout_at_ms is None:
        # Its signals were taken while another branch worked.
        return max(0, wait.timeout_ms - round((clock_s() - began_s) * 1_000))
    return max(0, view.timeout_at_ms - services.lease.store_now_ms())


async def _take_or_announce(services: Services, pause: Pause) -> SuspensionView | None:
    """How the pause would end at once; a refusal is raised in the handler, which is not unwound.

    Only the engine knows how many waitpoints there are.
    """
    try:
        return await services.take_signals(pause, announce=True)
    except errors.InvalidInput as error:
        raise errors.InvalidInput("wait_for", error.problem.removeprefix(TOO_FEW)) from None


async def _until_signalled(services: Services, pause: Pause) -> SuspensionView | None:
    """Wait for signals while another branch works; once none does, the handler is unwound here.

    None if they did not arrive in time.
    """
    parking = services.parking
    ends_s = math.inf if pause.timeout_in_ms is None else clock_s() + pause.timeout_in_ms / 1_000
    parked = asyncio.create_task(parking.until_signalled(pause))
    try:
        await asyncio.wait([parked], timeout=BESIDE_AFTER_S)
        with services.kept_hints() as hints:
            announced_s = -math.inf
            while not parked.done():
                announce = clock_s() >= announced_s + ANNOUNCE_AGAIN_S
                announced_s = clock_s() if announce else announced_s
                # Counts as busy: a pause must not begin while its signals are being taken.
                with parking.working():
                    view = await services.take_signals(pause, announce=announce)
                    if view is not None:
                        parking.waits.pause = None
                        return view
                if clock_s() >= ends_s:
                    services.check()
                    parking.waits.pause = None
                    return None
                await hints.wait(min(LOOK_AGAIN_S, max(0.0, ends_s - clock_s())))
        parked.result()
        raise AssertionError("a suspended handler is unwound")
    finally:
        parked.cancel()
        await asyncio.wait([parked])


def _pause_of(services: Services, wait: Wait, suspension_id: str) -> Pause:
    execution_id = services.lease.claimed.execution_id
    keys = referenced_waitpoint_keys(wait.condition)
    return Pause(
        suspension_id=suspension_id,
        condition=wait.condition,
        timeout_in_ms=wait.timeout_ms,
        fresh=tuple(
            FreshWaitpoint(
                waitpoint_key=key,
                waitpoint_id=named_id(execution_id, suspension_id, key),
                own_name_only=takes_own_name(wait.condition, key),
            )
            for key in keys
        ),
    )


def _outcome_of_pause(view: SuspensionView, condition: Condition) -> WaitOutcome | None:
    """How a pause ended; None if the wait begins another, as after a replay."""
    if not view.resumed:
        by_operator = (view.close_reason or "").startswith(RESUMED_BY)
        return WaitOutcome(ended_by="operator") if by_operator else None
    if view.satisfied_at_ms is None:
        return WaitOutcome(ended_by="timeout")
    ranks = ranks_of(condition)
    # In the order the condition names them; signals of one name, and others, as they arrived.
    ordered = sorted(view.signals, key=lambda each: ranks.get(each.signal_name, len(ranks)))
    return WaitOutcome(ended_by="signals", signals=tuple(_as_stored(each) for each in ordered))


def _as_stored(signal: ResumeSignal) -> StoredSignal:
    return StoredSignal(
        signal_id=signal.signal_id,
        name=signal.signal_name,
        source=signal.source_identity,
        source_type=signal.source_type,
        received_at_ms=signal.accepted_at_ms,
        payload=_as_json(signal),
    )


def _as_json(signal: ResumeSignal) -> Raw:
    """The payload as JSON; other payloads as base64 text, which `type=bytes` reads."""
    if not signal.payload:
        return Raw(b"null")
    if signal.payload_encoding == "json":
        try:
            msgspec.json.decode(signal.payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        else:
            return Raw(signal.payload)
    return Raw(msgspec.json.encode(signal.payload))


def _unfit_signals(outcome: WaitOutcome, kind: object) -> dict[str, str]:
    """The signals whose payloads do not fit, by id, and why not."""
    found: dict[str, str] = {}
    for each in outcome.signals:
        try:
            _payload(each, kind)
        except errors.InvalidInput as error:
            sender = f" from {each.source}" if each.source else ""
            found[each.signal_id] = f"{error.field}{sender}: {error.problem}"
    return found


def _require_signals(outcome: WaitOutcome, what: str) -> None:
    """Raise if the wait ended without signals that the handler can use."""
    if outcome.ended_by == "timeout":
        raise errors.SignalTimeout(f"{what}: nothing met it in time")
    if outcome.ended_by == "operator":
        raise errors.SignalTimeout(f"{what}: an operator ended the wait without it")


def _decoded(stored: StoredSignal, kind: object) -> Signal[object]:
    return Signal(
        name=stored.name,
        payload=_payload(stored, kind),
        source=stored.source,
        source_type=stored.source_type,
        signal_id=stored.signal_id,
        received_at=datetime.fromtimestamp(stored.received_at_ms / 1_000, UTC),
    )


def _payload(stored: StoredSignal, kind: object) -> object:
    try:
        return read_as(stored.payload, kind)
    except Exception as error:
        # Models run the program's code, which may raise anything.
        raise errors.InvalidInput(
            f"payload of signal {stored.name}", f"does not fit the type asked for: {error}"
        ) from error


# How a handler waits for signals --------------------------------------------

T = TypeVar("T")
D = TypeVar("D")
S_co = TypeVar("S_co", bound="SignalVerbs", covariant=True)

WAITPOINT_TTL: Final = "30d"
_NO_DEFAULT: Final = object()


class SignalVerbs(Verbs):
    """The verbs that wait for signals."""

    @overload
    def wait_for_signal(
        self, name: str, *, timeout: Duration | None = None
    ) -> Coroutine[object, object, Signal[object]]: ...
    @overload
    def wait_for_signal(
        self, name: str, *, timeout: Duration | None = None, type: type[T]
    ) -> Coroutine[object, object, Signal[T]]: ...
    @overload
    def wait_for_signal(
        self, name: str, *, timeout: Duration | None = None, default: D
    ) -> Coroutine[object, object, Signal[object] | D]: ...
    @overload
    def wait_for_signal(
        self, name: str, *, timeout: Duration | None = None, default: D, type: type[T]
    ) -> Coroutine[object, object, Signal[T] | D]: ...
    def wait_for_signal(
        self,
        name: str,
        *,
        timeout: Duration | None = None,
        default: object = _NO_DEFAULT,
        type: object = object,  # noqa: A002
    ) -> Coroutine[object, object, object]:
        """Wait for a signal without holding a worker; return it where the function left off.

        Its payload is decoded to `type`; signals that do not fit are set aside, and the wait goes
        on. If the signal does not arrive in time, this returns `default` if given, and raises
        `SignalTimeout` otherwise.
        """

        def begin() -> Coroutine[object, object, object]:
            wait = self._wait(f"signal {check_name(name)}", condition_of(name), timeout)
            return self._signals_or_default(wait, f"signal {name!r}", default, type, one=True)

        return called(self, "wait_for_signal", (name,), begin)

    @overload
    def wait_for(
        self, *conditions: str | Condition, timeout: Duration | None = None
    ) -> Coroutine[object, object, tuple[Signal[object], ...]]: ...
    @overload
    def wait_for(
        self, *conditions: str | Condition, timeout: Duration | None = None, type: type[T]
    ) -> Coroutine[object, object, tuple[Signal[T], ...]]: ...
    @overload
    def wait_for(
        self, *conditions: str | Condition, timeout: Duration | None = None, default: D
    ) -> Coroutine[object, object, tuple[Signal[object], ...] | D]: ...
    @overload
    def wait_for(
        self,
        *conditions: str | Condition,
        timeout: Duration | None = None,
        default: D,
        type: type[T],
    ) -> Coroutine[object, object, tuple[Signal[T], ...] | D]: ...
    def wait_for(
        self,
        *conditions: str | Condition,
        timeout: Duration | None = None,
        default: object = _NO_DEFAULT,
        type: object = object,  # noqa: A002
    ) -> Coroutine[object, object, object]:
        """Wait until all conditions are met: names, `all_of`, `any_of`, `count`.

        Returns the signals that counted, in the order the conditions name them; signals of one
        name in the order they arrived.
        """

        def begin() -> Coroutine[object, object, object]:
            wait, what = self._wait_for(conditions, timeout)
            return self._signals_or_default(wait, what, default, type)

        return called(self, "wait_for", conditions, begin)

    @on_loop
    def waitpoint(
        self, name: str, *, expires: Duration = WAITPOINT_TTL
    ) -> Coroutine[object, object, SignalToken]:
        """A token to hand out before waiting; the next wait for `name` takes signals sent early.

        Call this several times to hand out one token to each sender. A token is refused once it
        `expires` or the wait is over; signals sent until then are kept for the next wait for
        `name`.
        """
        expires_in_ms = duration_ms("expires", expires)
        call = self._services.journal.ask(
            StepKind.WAITPOINT, f"waitpoint {check_name(name)}", known_by(expires_in_ms)
        )
        return make_waitpoint(self._services, call, name, expires_in_ms)

    # Shared

    def _wait(self, step_name: str, condition: Condition, timeout: Duration | None) -> Wait:
        # Runs when the verb is called, so that calls take their places in the order of the code.
        timeout_ms = optional_duration_ms("timeout", timeout)
        known = known_by(repr(condition), timeout_ms)
        call = self._services.journal.ask(StepKind.SIGNAL, step_name, known)
        return Wait(call=call, condition=condition, timeout_ms=timeout_ms)

    def _wait_for(
        self, conditions: tuple[str | Condition, ...], timeout: Duration | None
    ) -> tuple[Wait, str]:
        if not conditions:
            raise errors.InvalidInput("wait_for", "needs a name or a condition")
        condition = condition_of(*conditions)
        names = referenced_waitpoint_keys(condition)
        if len(names) > WAITPOINTS_PER_SUSPENSION_MAX:
            most = f"may name at most {WAITPOINTS_PER_SUSPENSION_MAX} signals"
            raise errors.InvalidInput("wait_for", most, len(names))
        return self._wait("signals", condition, timeout), f"signals {', '.join(names)}"

    async def _signals_or_default(
        self, wait: Wait, what: str, default: object, kind: object, *, one: bool = False
    ) -> object:
        try:
            signals = await signals_of(self._services, wait, what, kind)
        except errors.SignalTimeout:
            if default is _NO_DEFAULT:
                raise
            return default
        return signals[0] if one else signals


class BlockingSignalVerbs(BlockingVerbs[S_co]):
    """The same for plain functions, which run in a thread."""

    waitpoint = waits(SignalVerbs.waitpoint)

    @overload
    def wait_for_signal(self, name: str, *, timeout: Duration | None = None) -> Signal[object]: ...
    @overload
    def wait_for_signal(
        self, name: str, *, timeout: Duration | None = None, type: type[T]
    ) -> Signal[T]: ...
    @overload
    def wait_for_signal(
        self, name: str, *, timeout: Duration | None = None, default: D
    ) -> Signal[object] | D: ...
    @overload
    def wait_for_signal(
        self, name: str, *, timeout: Duration | None = None, default: D, type: type[T]
    ) -> Signal[T] | D: ...
    def wait_for_signal(
        self,
        name: str,
        *,
        timeout: Duration | None = None,
        default: object = _NO_DEFAULT,
        type: object = object,  # noqa: A002
    ) -> object:
        """Wait for a signal without holding a worker; see `Context.wait_for_signal`."""
        verbs = self._context
        wait = verbs._wait(f"signal {check_name(name)}", condition_of(name), timeout)
        made = verbs._signals_or_default(wait, f"signal {name!r}", default, type, one=True)
        return verbs._services.wait(made)

    @overload
    def wait_for(
        self, *conditions: str | Condition, timeout: Duration | None = None
    ) -> tuple[Signal[object], ...]: ...
    @overload
    def wait_for(
        self, *conditions: str | Condition, timeout: Duration | None = None, type: type[T]
    ) -> tuple[Signal[T], ...]: ...
    @overload
    def wait_for(
        self, *conditions: str | Condition, timeout: Duration | None = None, default: D
    ) -> tuple[Signal[object], ...] | D: ...
    @overload
    def wait_for(
        self,
        *conditions: str | Condition,
        timeout: Duration | None = None,
        default: D,
        type: type[T],
    ) -> tuple[Signal[T], ...] | D: ...
    def wait_for(
        self,
        *conditions: str | Condition,
        timeout: Duration | None = None,
        default: object = _NO_DEFAULT,
        type: object = object,  # noqa: A002
    ) -> object:
        """Wait until all conditions are met; see `Context.wait_for`."""
        verbs = self._context
        wait, what = verbs._wait_for(conditions, timeout)
        return verbs._services.wait(verbs._signals_or_default(wait, what, default, type))
