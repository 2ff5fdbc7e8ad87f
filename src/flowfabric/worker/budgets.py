"""How a handler keeps within a budget.

A report is a durable step: it is counted once, whatever crashes. A reservation is an amount
held for this attempt; actual usage is counted when the block ends. If the attempt dies
in between, it holds nothing any more, and the next one reserves again, unless the usage was
counted already.
"""

from collections.abc import Coroutine, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from flowfabric.budgets import named_amounts, refuse_breach, warn_of_lookalikes
from flowfabric.core.budget_terms import check_amounts
from flowfabric.core.budgets import (
    HardBreach,
    Reserved,
    SoftBreach,
    UsageAlreadyApplied,
    UsageCounted,
    describe_breach,
    describe_soft,
    never_fits,
)
from flowfabric.core.checks import check_bool, check_name
from flowfabric.core.journal import STEP_NAME_BYTES_MAX
from flowfabric.core.records import StepKind
from flowfabric.engine.ledger import BudgetOutcome, BudgetRequest, Reservation, Settlement, Usage
from flowfabric.logs import open_log
from flowfabric.parts import waits
from flowfabric.worker.branches import DurableCall
from flowfabric.worker.services import BlockingVerbs, Services, Verbs, check_awaitable, on_loop

log = open_log(__name__)


class BudgetVerbs(Verbs):
    """The verbs for budgets."""

    @on_loop
    def report_usage(
        self, budget: str, amounts: Mapping[str, int] | None = None, /, **more: int
    ) -> Coroutine[object, object, None]:
        """Count what the run has used: `await ctx.report_usage("team", tokens=812)`.

        Counted once, whatever crashes. Raises `BudgetExceeded`, and counts nothing, if it
        would pass a hard limit.
        """
        asked = check_amounts("amounts", named_amounts(amounts, more))
        call = _ask(self._services, "usage", budget)
        return _report(self._services, call, budget, asked)

    def reserve(
        self,
        budget: str,
        amounts: Mapping[str, int] | None = None,
        /,
        *,
        wait: bool = False,
        **more: int,
    ) -> "BudgetHold":
        """Hold an amount during work whose cost is known only afterwards.

            async with ctx.reserve("team", tokens=4_000) as call:
                answer = await ctx.step("ask", ask, prompt)
                call.settle(tokens=answer.tokens)

        Raises `BudgetExceeded` if there is no room. With `wait=True` it releases the worker until
        there is; attach the run to the budget for that. At the end of the block the settled amount
        is counted, and the rest is free again. A block that ends without settling counts the whole
        amount; one that raises counts nothing unless it has settled.
        """
        check_awaitable(self, "reserve")
        asked = check_amounts("amounts", named_amounts(amounts, more))
        call = _ask(self._services, "reserve", budget)
        return BudgetHold(self._services, call, budget, asked, wait=check_bool("wait", wait))


class BudgetHold:
    """What a handler has reserved. Use it as an async context."""

    def __init__(
        self,
        services: Services,
        call: DurableCall,
        budget: str,
        amounts: Mapping[str, int],
        *,
        wait: bool,
    ) -> None:
        self._services = services
        self._call = call
        self._wait = wait
        self._budget = budget
        self._used: dict[str, int] | None = None
        self._settled: UsageAlreadyApplied | None = None
        self.amounts = amounts
        self.reservation_id = ""

    def settle(self, amounts: Mapping[str, int] | None = None, /, **more: int) -> None:
        """Say what was actually used; it is counted when the block ends."""
        self._used = check_amounts("used", named_amounts(amounts, more))

    async def __aenter__(self) -> Self:
        services, call = self._services, self._call
        async with call:
            stored = await services.journal.find(call)
            services.check()
            self.reservation_id = _key(services, call)
            request = Reservation(
                handle=services.lease.handle,
                budget_id=self._budget,
                amounts=self.amounts,
                reservation_id=self.reservation_id,
                namespace=services.lease.claimed.namespace,
                waits=self._wait,
            )
            outcome = await self._post(request)
            while self._wait and isinstance(outcome, HardBreach):
                if never_fits(outcome, self.amounts):
                    break
                # After a moment it waits for the budget, like runs that have not started yet.
                wake_at_ms = services.lease.store_now_ms() + WAIT_MS
                why = describe_breach(self._budget, outcome, self.amounts)
                await services.parking.until(wake_at_ms, WAIT_MS / 1_000, why=why)
                services.check()
                outcome = await self._post(request)
            if isinstance(outcome, UsageAlreadyApplied):
                self._settled = outcome
            else:
                refuse_breach(self._budget, outcome, self.amounts)
            _warn(services, self._budget, outcome)
            if stored is None:
                # Every later run reserves again, under the same name.
                with services.parking.working():
                    await services.journal.store_later(call, result=b"null")
        return self

    async def _post(self, request: BudgetRequest) -> BudgetOutcome:
        with self._services.parking.working():
            return await self._services.post(request)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._settled is not None:
            if error is None:
                # Every attempt gets the same answer as the first.
                refuse_breach(self._budget, self._settled, self._used or {})
            return
        if error is not None and not isinstance(error, Exception):
            # An attempt that is stopping, or is parked, no longer holds anything.
            return
        used = self._used
        if used is None:
            used = dict(self.amounts) if error is None else {}
        services = self._services
        request = Settlement(
            budget_id=self._budget,
            reservation_id=self.reservation_id,
            used=used,
            namespace=services.lease.claimed.namespace,
            handle=services.lease.handle,
        )
        outcome = await self._post(request)
        _warn(services, self._budget, outcome)
        if error is None:
            refuse_breach(self._budget, outcome, used)


WAIT_MS: Final = 1_000
"""How long a run that found no room stays off its worker before it waits for the budget."""


class BlockingHold(AbstractContextManager["BlockingHold"]):
    """The same for plain functions."""

    def __init__(self, services: Services, hold: BudgetHold) -> None:
        self._services = services
        self._hold = hold

    def settle(self, amounts: Mapping[str, int] | None = None, /, **more: int) -> None:
        """Say what was actually used; see `BudgetHold.settle`."""
        self._hold.settle(amounts, **more)

    def __enter__(self) -> "BlockingHold":
        self._services.wait(self._hold.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._services.wait(self._hold.__aexit__(kind, error, traceback))


B_co = TypeVar("B_co", bound=BudgetVerbs, covariant=True)


class BlockingBudgetVerbs(BlockingVerbs[B_co]):
    """The same for plain functions, which run in a thread."""

    report_usage = waits(BudgetVerbs.report_usage)

    def reserve(
        self,
        budget: str,
        amounts: Mapping[str, int] | None = None,
        /,
        *,
        wait: bool = False,
        **more: int,
    ) -> BlockingHold:
        """Hold an amount inside a `with` block; see `Context.reserve`."""
        verbs = self._context
        return BlockingHold(verbs._services, verbs.reserve(budget, amounts, wait=wait, **more))


def _ask(services: Services, verb: str, budget: object) -> DurableCall:
    """Register the call. Amounts do not identify it: another run may have used others."""
    name = f"{verb} {check_name('budget', budget, bytes_max=STEP_NAME_BYTES_MAX - 20)}"
    return services.journal.ask(StepKind.USAGE, name)


async def _report(
    services: Services, call: DurableCall, budget: str, amounts: Mapping[str, int]
) -> None:
    async with call:
        if await services.journal.find(call) is not None:
            return
        services.check()
        request = Usage(
            budget_id=budget,
            amounts=amounts,
            namespace=services.lease.claimed.namespace,
            dedup_key=_key(services, call),
            handle=services.lease.handle,
        )
        with services.parking.working():
            outcome = await services.post(request)
            _warn(services, budget, outcome)
            refuse_breach(budget, outcome, amounts)
            # Its key identifies a repeat, so the handler need not wait.
            await services.journal.store_later(call, result=msgspec.json.encode(amounts))


def _warn(services: Services, budget: str, outcome: BudgetOutcome) -> None:
    """Log that a budget is above its soft limit or was never created, or that a dimension may be
    mistyped."""
    if isinstance(outcome, SoftBreach):
        log.warning("%s", describe_soft(budget, outcome), extra=services.lease.log_fields)
    if isinstance(outcome, UsageCounted | SoftBreach | Reserved) and outcome.undeclared:
        _warn_of_undeclared(services.lease.claimed.namespace, budget)
    warn_of_lookalikes(services.lease.claimed.namespace, budget, outcome)


@lru_cache(maxsize=1_000)
def _warn_of_undeclared(namespace: str, budget: str) -> None:
    """Once per budget and process."""
    log.warning(
        "budget %s was never created in namespace %s: it counts and limits nothing",
        budget,
        namespace,
    )


def _key(services: Services, call: DurableCall) -> str:
    """The key of a call for its budget: the same in every run."""
    return services.key_of(call.identity)
