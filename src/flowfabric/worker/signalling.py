"""The verbs by which a handler waits for signals."""

from collections.abc import Coroutine
from typing import Final, TypeVar, overload

from flowfabric.core.conditions import Condition, referenced_waitpoint_keys
from flowfabric.core.policies import Duration, duration_ms, optional_duration_ms
from flowfabric.core.records import StepKind
from flowfabric.errors import InvalidInput, SignalTimeout
from flowfabric.signals import Signal, SignalToken, check_name, condition_of
from flowfabric.worker.functions import digest_of
from flowfabric.worker.services import Verbs, check_awaitable, on_loop, promised
from flowfabric.worker.waiting import Wait, make_waitpoint, received

T = TypeVar("T")
D = TypeVar("D")

WAITPOINT_TTL: Final = "30d"
_NONE_GIVEN: Final = object()


class SignalVerbs(Verbs):
    """What a context can do about signals."""

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
        default: object = _NONE_GIVEN,
        type: object = object,  # noqa: A002
    ) -> Coroutine[object, object, object]:
        """Wait for a signal without holding a worker; return it where the function left off.

        `type` is what its payload is decoded to. When it does not come in time:
        `default`, if there is one, else `SignalTimeout`.
        """
        check_awaitable(self, "wait_for_signal")
        wait = self._wait(f"signal {check_name(name)}", condition_of(name), timeout)
        made = self._one(wait, f"signal {name!r}", default, type)
        return promised(self, "wait_for_signal", (name,), made)

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
        default: object = _NONE_GIVEN,
        type: object = object,  # noqa: A002
    ) -> Coroutine[object, object, object]:
        """Wait until all conditions are met: names, `all_of`, `any_of`, `count`.

        Returns the signals that counted, in the order in which the conditions name them; those
        of one name in the order they came.
        """
        check_awaitable(self, "wait_for")
        wait, what = self._wait_for(conditions, timeout)
        return promised(self, "wait_for", conditions, self._many(wait, what, default, type))

    @on_loop
    def waitpoint(
        self, name: str, *, expires: Duration = WAITPOINT_TTL
    ) -> Coroutine[object, object, SignalToken]:
        """A token to hand out before waiting; the next wait for `name` takes what came early.

        Ask for several to hand out one to each sender. A token is refused once it `expires`,
        or the wait is over; what it has sent until then is kept for the next wait of `name`.
        """
        expires_in_ms = duration_ms("expires", expires)
        call = self._services.steps.ask(
            StepKind.WAITPOINT, f"waitpoint {check_name(name)}", digest_of(expires_in_ms)
        )
        return make_waitpoint(self._services, call, name, expires_in_ms)

    # Shared

    def _wait(self, step_name: str, condition: Condition, timeout: Duration | None) -> Wait:
        # All of this happens when the verb is called: places are taken in the order of the code.
        timeout_ms = optional_duration_ms("timeout", timeout)
        digest = digest_of(repr(condition), timeout_ms)
        call = self._services.steps.ask(StepKind.SIGNAL, step_name, digest)
        return Wait(call=call, condition=condition, timeout_ms=timeout_ms)

    def _wait_for(
        self, conditions: tuple[str | Condition, ...], timeout: Duration | None
    ) -> tuple[Wait, str]:
        if not conditions:
            raise InvalidInput("wait_for", "needs a name or a condition")
        wait = self._wait("signals", condition_of(*conditions), timeout)
        return wait, f"signals {', '.join(referenced_waitpoint_keys(wait.condition))}"

    async def _one(self, wait: Wait, what: str, default: object, kind: object) -> object:
        found = await self._found(wait, what, default, kind)
        return default if found is None else found[0]

    async def _many(self, wait: Wait, what: str, default: object, kind: object) -> object:
        found = await self._found(wait, what, default, kind)
        return default if found is None else found

    async def _found(
        self, wait: Wait, what: str, default: object, kind: object
    ) -> tuple[Signal[object], ...] | None:
        try:
            return await received(self._services, wait, what, kind)
        except SignalTimeout:
            if default is _NONE_GIVEN:
                raise
            return None


class BlockingSignalVerbs:
    """The same for plain functions, which run in a thread."""

    def __init__(self, verbs: SignalVerbs) -> None:
        self._verbs = verbs

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
        default: object = _NONE_GIVEN,
        type: object = object,  # noqa: A002
    ) -> object:
        """Wait for a signal without holding a worker; see `Context.wait_for_signal`."""
        verbs = self._verbs
        wait = verbs._wait(f"signal {check_name(name)}", condition_of(name), timeout)
        return verbs._services.wait(verbs._one(wait, f"signal {name!r}", default, type))

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
        default: object = _NONE_GIVEN,
        type: object = object,  # noqa: A002
    ) -> object:
        """Wait until all conditions are met; see `Context.wait_for`."""
        verbs = self._verbs
        wait, what = verbs._wait_for(conditions, timeout)
        return verbs._services.wait(verbs._many(wait, what, default, type))

    def waitpoint(self, name: str, *, expires: Duration = WAITPOINT_TTL) -> SignalToken:
        """A token to hand out before waiting; see `Context.waitpoint`."""
        verbs = self._verbs
        return verbs._services.wait(verbs.waitpoint(name, expires=expires))
