"""What time does to the system.

Each reconciler is one bounded sweep: find due rows with an index, let the engine
decide each again under lock, repeat while the batch was full. The supervisor runs
them all, then sleeps until the next due time the database reports, or until
another process makes something due sooner and hints at it. Any number of processes may run
one: rows that another process is handling are skipped.

Work that others wait for right now (dependents of an execution that has ended) does
not stand in line: a hint on its topic runs its sweeps at once, beside the others.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, Self

from msgspec import structs

from flowfabric.core.bounds import OUTAGE_MS_MIN
from flowfabric.core.events import EVERYBODY, ScannerFilter, check_scanner_filter
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.engine import topics
from flowfabric.engine.engine import Engine
from flowfabric.engine.shell import Swept
from flowfabric.logs import open_log
from flowfabric.outages import level_of, statements_within

log = open_log(__name__)

ROUNDS_MAX = 1_000
"""Full batches one reconciler handles before the others get their turn."""
LONGEST_SLEEP_S = topics.DUE_HINT_WITHIN_MS / 1_000
AFTER_ERROR_S = 1.0
SWEEPS_MAX = 10
"""How often one round sweeps again what became due during it."""
URGENT_SLEEP_S = 600.0
"""How long an urgent sweep waits for a hint: if one is lost, the regular round finds the work."""
AFTER_HELD_S = 0.02
"""How soon to look again at urgent work that another process was holding."""

PATIENCE_MIN_S = 2.0
PATIENCE_MAX_S = 10.0
SLOW_PATIENCE_S = 30.0

Sweep = Callable[[Engine], Awaitable[Swept]]

LEASE_EXPIRY: Final = "lease_expiry"
REPORTED: Final[Mapping[str, str]] = {
    LEASE_EXPIRY: "its worker went quiet and has lost the lease; another takes over",
    "attempt_timeout": "the attempt took longer than its timeout",
    "deadline": "it did not end within its deadline",
}
"""What to log of the executions that a reconciler has changed."""
REPORTED_MAX: Final = 20
"""How many of them have their own line."""


SWEEPS: Mapping[str, Sweep] = {
    "dispatch": Engine.dispatch_completions,
    "member_cancel": Engine.cancel_pending_members,
    "edge_apply": Engine.apply_due_edges,
    "flow_audit": Engine.audit_flows,
    LEASE_EXPIRY: Engine.expire_due_leases,
    "grant_expiry": Engine.return_due_grants,
    "worker_expiry": Engine.expire_workers,
    "schedules": Engine.fire_due_schedules,
    "delayed": Engine.promote_due_delays,
    "attempt_timeout": Engine.expire_due_attempts,
    "deadline": Engine.expire_due_deadlines,
    "suspension_timeout": Engine.expire_due_suspensions,
    "waitpoint_expiry": Engine.expire_due_waitpoints,
    "awaited": Engine.wake_awaiting,
    "budget_reset": Engine.reset_due_budgets,
    "budget_reservations": Engine.check_reservations,
    "budget_action": Engine.act_on_breaches,
    "retention": Engine.trim_retention,
    "flow_retention": Engine.trim_flows,
    "event_retention": Engine.trim_events,
    "guard_retention": Engine.trim_guards,
    "route_retention": Engine.trim_routes,
    "stream_retention": Engine.trim_streams,
    "budget_retention": Engine.trim_budgets,
}
"""Every reconciler by name, in the order they run. `next_due.sql` has a column for each."""

SLOW: Final = tuple(name for name in SWEEPS if name.endswith("retention"))
"""The reconcilers that delete old rows. They may take long, since nothing waits for them."""

URGENT: Mapping[str, str] = {
    topics.DISPATCH_TOPIC: "dispatch",
    topics.MEMBER_CANCEL_TOPIC: "member_cancel",
}
"""The reconcilers that hints also run at once, by the topics of those hints."""


SCOPED: Final[Mapping[str, Callable[[ScannerFilter], Sweep]]] = {
    LEASE_EXPIRY: lambda only: partial(Engine.expire_due_leases, only=only),
    "delayed": lambda only: partial(Engine.promote_due_delays, only=only),
    "attempt_timeout": lambda only: partial(Engine.expire_due_attempts, only=only),
    "deadline": lambda only: partial(Engine.expire_due_deadlines, only=only),
    "suspension_timeout": lambda only: partial(Engine.expire_due_suspensions, only=only),
    "waitpoint_expiry": lambda only: partial(Engine.expire_due_waitpoints, only=only),
    "retention": lambda only: partial(Engine.trim_retention, only=only),
}
"""The reconcilers that act on single executions, for a process that handles only some."""


async def run_due(engine: Engine, *, only: ScannerFilter = EVERYBODY) -> dict[str, int]:
    """Do everything that is due now; return how much each reconciler did."""
    acted: dict[str, int] = {}
    for name in due_among(await engine.next_due()):
        acted[name] = (await _run_one(engine, sweep_of(name, only))).acted
    return acted


def sweep_of(name: str, only: ScannerFilter) -> Sweep:
    return SCOPED[name](only) if name in SCOPED and only != EVERYBODY else SWEEPS[name]


def due_among(waits: Mapping[str, int]) -> list[str]:
    """The reconcilers that have something to do, in the order they run."""
    return [name for name in SWEEPS if waits.get(name, 1) <= 0]


async def _run_one(engine: Engine, sweep: Sweep) -> Swept:
    acted = 0
    failures: tuple[str, ...] = ()
    changed: tuple[ExecutionId, ...] = ()
    for _ in range(ROUNDS_MAX):
        swept = await sweep(engine)
        acted += swept.acted
        failures += swept.failures
        changed = (*changed, *swept.executions)[: REPORTED_MAX + 1]
        if not swept.full or swept.acted == 0:
            break
    return structs.replace(swept, acted=acted, failures=failures, executions=changed)


class Silence:
    """How long the database has kept waiting a process that asks for expired leases.

    Times are those of one clock, in seconds.
    """

    def __init__(self) -> None:
        self._asking_since_s: float | None = None
        self._outage_s: tuple[float, float] | None = None
        """When the last wait that was long enough for an outage began and ended."""

    def ask(self, now_s: float) -> None:
        if self._asking_since_s is None:
            self._asking_since_s = now_s

    def end(self, now_s: float) -> None:
        """Note an answer."""
        since_s, self._asking_since_s = self._asking_since_s, None
        if since_s is not None and _ms(now_s - since_s) >= OUTAGE_MS_MIN:
            self._outage_s = since_s, now_s

    def seen(self, now_s: float) -> tuple[int, int]:
        """How long the current wait, or the last outage, has lasted, and how long ago it was."""
        waited_ms = 0 if self._asking_since_s is None else _ms(now_s - self._asking_since_s)
        if self._outage_s is None or waited_ms >= OUTAGE_MS_MIN:
            return waited_ms, 0
        began_s, ended_s = self._outage_s
        return _ms(ended_s - began_s), max(1, _ms(now_s - ended_s))


def _ms(seconds: float) -> int:
    return min(round(seconds * 1_000), DURATION_MAX_MS)


class Supervisor:
    """Runs the reconcilers in the background of one process. Use as an async context."""

    def __init__(
        self,
        engine: Engine,
        *,
        patience_s: float = PATIENCE_MAX_S,
        only: ScannerFilter = EVERYBODY,
    ) -> None:
        """`patience_s` is how long a statement that others wait for may take.

        With `only` it leaves all other executions to other processes. It still handles flows,
        schedules and shared rows.
        """
        self._engine = engine
        self._only = check_scanner_filter(only)
        self._patience_s = min(max(patience_s, PATIENCE_MIN_S), PATIENCE_MAX_S)
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._wakes: list[Callable[[], None]] = []
        self._silence = Silence()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def start(self) -> None:
        assert not self._tasks, "a supervisor starts once"
        self._tasks = [
            asyncio.create_task(
                self._repeat(topics.DUE_TOPIC, self._round), name="flowfabric-reconcilers"
            ),
            *(
                asyncio.create_task(
                    self._repeat(topic, partial(self._sweep, name)), name=f"flowfabric-{name}"
                )
                for topic, name in URGENT.items()
            ),
        ]

    async def drain(self) -> None:
        """Finish the sweep under way, start no other, and end."""
        self._stopping.set()
        for wake in self._wakes:
            wake()
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """End now; an unfinished sweep is rolled back and left to the next process."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _repeat(self, topic: str, work: Callable[[], Awaitable[float]]) -> None:
        """Repeat on every hint, or after the time that `work` returns."""
        with self._engine.store.hints([topic]) as hints:
            self._wakes.append(hints.wake)
            while not self._stopping.is_set():
                await hints.wait(await work())

    async def _round(self) -> float:
        """Run what is due and return how long to sleep. Nothing that fails here ends the loop."""
        self._silence.ask(asyncio.get_running_loop().time())
        try:
            waits, acted = await self._next_due(), True
            for _ in range(SWEEPS_MAX):
                due = due_among(waits)
                if LEASE_EXPIRY not in due:
                    self._silence.end(asyncio.get_running_loop().time())
                if not due or not acted or self._stopping.is_set():
                    break
                acted = await self._sweep_all(due)
                # More may have become due since.
                waits = await self._next_due()
        except Exception as error:
            _log_failure(error, f"could not ask what is due; asking again in {AFTER_ERROR_S} s")
            return AFTER_ERROR_S
        soonest_s = min((waits[name] for name in SWEEPS if name in waits), default=0) / 1_000
        if not waits:
            return LONGEST_SLEEP_S
        if soonest_s <= 0:
            # What is still due after its sweep is held by another process, or failed.
            return AFTER_ERROR_S
        # Processes that wait for the same row spread out a little.
        return min(soonest_s + random.uniform(0.001, 0.01), LONGEST_SLEEP_S)

    async def _next_due(self) -> Mapping[str, int]:
        with statements_within(self._patience_s):
            return await self._engine.next_due()

    async def _sweep_all(self, names: Sequence[str]) -> bool:
        """Run reconcilers one after the other; return whether any of them did something."""
        acted = False
        for name in names:
            if self._stopping.is_set():
                break
            swept = await self._swept(name)
            acted = acted or (swept is not None and swept.acted > 0)
        return acted

    async def _sweep(self, name: str) -> float:
        """Run one reconciler; return how soon to look again if no hint comes first."""
        swept = await self._swept(name)
        if swept is None:
            return AFTER_ERROR_S
        return AFTER_HELD_S if swept.held else URGENT_SLEEP_S

    async def _swept(self, name: str) -> Swept | None:
        """Run one reconciler; None if it failed."""
        try:
            with statements_within(SLOW_PATIENCE_S if name in SLOW else self._patience_s):
                swept = await _run_one(self._engine, self._sweep_of(name))
        except Exception as error:
            _log_failure(error, f"reconciler {name} failed; it tries again in {AFTER_ERROR_S} s")
            return None
        if name == LEASE_EXPIRY:
            self._silence.end(asyncio.get_running_loop().time())
        for failure in swept.failures:
            log.error("reconciler %s: %s", name, failure)
        if name in REPORTED:
            _log_attempts(REPORTED[name], swept)
        return swept

    def _sweep_of(self, name: str) -> Sweep:
        if name != LEASE_EXPIRY:
            return sweep_of(name, self._only)
        waited_ms, calm_ms = self._silence.seen(asyncio.get_running_loop().time())
        return partial(
            Engine.expire_due_leases, waited_ms=waited_ms, calm_ms=calm_ms, only=self._only
        )


def _log_attempts(what: str, swept: Swept) -> None:
    """A line for each attempt that failed without its worker saying so, up to a few."""
    for execution_id in swept.executions[:REPORTED_MAX]:
        log.warning("%s: %s", execution_id, what, extra={"execution_id": execution_id})
    if swept.acted > REPORTED_MAX:
        log.warning("%d more: %s", swept.acted - REPORTED_MAX, what)


def _log_failure(error: Exception, what: str) -> None:
    # The store has logged an outage already.
    level = level_of(error)
    log.log(level if level == logging.DEBUG else logging.ERROR, what, exc_info=error)
