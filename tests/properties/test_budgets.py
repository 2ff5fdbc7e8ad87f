"""Budgets beside a simple model of them, through invented histories.

Reports of workers and of others, spends, reservations and settlements come in any order, alone
and in batches, with repeats of the same key and whole batches whose answer was lost; resets by
hand and on a schedule, changed limits, attempts that end in every way there is, dead workers,
replays, and days after which executions and keys are forgotten. After each of them the engine
tells what the model tells: every outcome, what is used and what is reserved, how often limits
were met. What is stored of reservations adds up, and no limit is passed. At the end nothing is
reserved any more.
"""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.budget_terms import BudgetDefinition, BudgetUpdate
from flowfabric.core.budgets import (
    KEPT_MS,
    RESERVATION_CHECK_MS,
    Amounts,
    Budget,
    BudgetReservation,
    HardBreach,
    OnHardLimit,
    Reserved,
    SoftBreach,
    UsageAlreadyApplied,
    UsageCounted,
    decode_amounts,
    plus,
)
from flowfabric.core.conditions import Single
from flowfabric.core.ids import named_budget_id, parse_namespace
from flowfabric.core.results import Claimed
from flowfabric.core.states import FailureClass
from flowfabric.engine.ledger import (
    BudgetOutcome,
    BudgetRequest,
    Reservation,
    Settlement,
    Spend,
    Usage,
)
from flowfabric.errors import FlowFabricError, LeaseExpired
from flowfabric.reconcilers import run_due
from flowfabric.store.base import Key, Reader
from tests.conformance.given import Given
from tests.properties.test_differential import SHRINKING_TAKES_S, tuned
from tests.properties.world import World

NUMBERS = itertools.count()
"""Budgets outlive their examples: each has its own."""
DIMENSIONS = ("a", "b")
HOLDERS = 3
ENDS = ("complete", "fail", "cancel", "suspend", "delay", "expire", "revoke", "dead", "replay")
RESETS_MS = 10 * 60 * 1_000
KEYS = 12

amounts = st.dictionaries(st.sampled_from(DIMENSIONS), st.integers(0, 9), max_size=2)
keys = st.integers(0, KEYS - 1)
holders = st.integers(0, HOLDERS - 1)
posts = st.one_of(
    st.tuples(st.just("report"), holders, st.none() | keys, amounts),
    st.tuples(st.just("used"), holders, st.none() | keys, amounts),
    st.tuples(st.just("spend"), holders, keys, amounts),
    st.tuples(st.just("reserve"), holders, keys, amounts),
    st.tuples(st.just("settle"), holders, keys, amounts),
)
Post = tuple[str, int, int | None, dict[str, int]]
batches = st.lists(posts, min_size=1, max_size=4)
VERBS: dict[str, tuple[int, st.SearchStrategy[object]]] = {
    "post": (8, batches),
    "post and lose the answer": (2, batches),
    "give back": (3, holders),
    "reset": (1, st.none()),
    "scheduled reset": (1, st.integers(0, RESETS_MS)),
    "limit": (1, st.integers(0, 30)),
    "end": (3, st.tuples(holders, st.sampled_from(ENDS))),
    "check": (1, st.none()),
    "day": (1, st.none()),
}
"""What may happen, how often beside the rest, and with what."""
steps = st.lists(
    st.sampled_from([verb for verb, (weight, _) in VERBS.items() for _ in range(weight)]).flatmap(
        lambda verb: st.tuples(st.just(verb), VERBS[verb][1])
    ),
    min_size=20,
    max_size=40,
)


@dataclass
class Kept:
    """What is remembered, and until when if its execution is gone."""

    execution_id: str | None
    until_ms: int


T = TypeVar("T")
K = TypeVar("K", bound=Kept)


@dataclass
class Spent(Kept):
    amounts: dict[str, int] = field(default_factory=dict)


@dataclass
class Model:
    """What a budget is, as simply as it can be said. What ended attempts hold is nothing."""

    hard: dict[str, int]
    soft: dict[str, int]
    fails: bool
    """Whether who is refused is failed."""
    next_reset_ms: int
    usage: dict[str, int] = field(default_factory=dict)
    spent: dict[str, Spent] = field(default_factory=dict)
    reported: dict[int, Kept] = field(default_factory=dict)
    settled: dict[int, Kept] = field(default_factory=dict)
    breaches: int = 0
    soft_breaches: int = 0
    held: dict[int, tuple[str, dict[str, int]]] = field(default_factory=dict)
    """By key: the lease it counts with, and what is held."""

    def reserved(self, leases: Sequence[str], but: int | None = None) -> dict[str, int]:
        total = dict.fromkeys(DIMENSIONS, 0)
        for key, (lease, held) in self.held.items():
            if lease in leases and key != but:
                for name, amount in held.items():
                    total[name] += amount
        return total

    def fits(self, asked: Amounts, leases: Sequence[str], but: int | None = None) -> bool:
        reserved = self.reserved(leases, but)
        return all(
            self.hard.get(name, 0) == 0
            or self.usage.get(name, 0) + reserved[name] + amount <= self.hard[name]
            for name, amount in asked.items()
        )

    def fitting(self, used: Amounts, held: Amounts, leases: Sequence[str]) -> dict[str, int]:
        """What counts of more than there is room for: it is used up."""
        reserved = self.reserved(leases)
        return {
            name: amount
            if self.hard.get(name, 0) == 0
            else min(
                amount,
                max(
                    held.get(name, 0),
                    self.hard[name] - self.usage.get(name, 0) - reserved[name],
                ),
            )
            for name, amount in used.items()
        }

    def count(self, asked: Amounts) -> None:
        self.usage = plus(self.usage, asked)

    def judge(self, asked: Amounts) -> UsageCounted | SoftBreach:
        """What is told of amounts that were counted."""
        for name in sorted(asked):
            if 0 < self.soft.get(name, 0) < self.usage[name]:
                self.soft_breaches += 1
                return SoftBreach(
                    dimension=name, current_usage=self.usage[name], soft_limit=self.soft[name]
                )
        return UsageCounted()

    def reset(self) -> None:
        self.usage = dict.fromkeys(self.usage, 0)
        for spent in self.spent.values():
            spent.amounts = {}

    def forget(self, now_ms: int, existing: set[str]) -> None:
        """What is due is forgotten, unless its execution exists."""
        self.reported = still_kept(self.reported, now_ms, existing)
        self.settled = still_kept(self.settled, now_ms, existing)
        self.spent = still_kept(self.spent, now_ms, existing)


def still_kept(rows: dict[T, K], now_ms: int, existing: set[str]) -> dict[T, K]:
    for kept in rows.values():
        if kept.until_ms <= now_ms and kept.execution_id in existing:
            kept.until_ms = now_ms + KEPT_MS
    return {key: kept for key, kept in rows.items() if kept.until_ms > now_ms}


class Played:
    """One history, on the engine and in the model."""

    def __init__(self, world: World, hard: dict[str, int], *, fails: bool) -> None:
        self.world, self.engine = world, world.engine
        self.given = Given(world.engine, world.clock)
        soft = {name: limit // 2 for name, limit in hard.items()}
        self.model = Model(hard, soft, fails, world.now_ms + RESETS_MS)
        self.claimed: list[Claimed] = []
        self.live: set[str] = set()
        self.owners: dict[str, str] = {}
        """The executions of leases."""
        self.budget = f"team-{next(NUMBERS)}"

    async def begin(self) -> None:
        await self.engine.create_budget(
            BudgetDefinition(
                budget_id=self.budget,
                hard_limits=self.model.hard,
                soft_limits=self.model.soft,
                on_hard_limit=OnHardLimit.FAIL if self.model.fails else OnHardLimit.REJECT,
                reset_interval_ms=RESETS_MS,
            )
        )
        for _ in range(HOLDERS):
            self.claimed.append(await self.claim())

    async def claim(self) -> Claimed:
        return self.began(await self.given.running(ttl_ms=10 * RESERVATION_CHECK_MS))

    def began(self, claimed: Claimed) -> Claimed:
        self.live.add(claimed.lease_id)
        self.owners[claimed.lease_id] = claimed.execution_id
        return claimed

    # Requests

    def request(self, post: Post) -> BudgetRequest:
        verb, holder, key, asked = post
        claimed = self.claimed[holder]
        match verb:
            case "report":
                named = None if key is None else f"k{key}"
                return Usage(budget_id=self.budget, amounts=asked, dedup_key=named)
            case "used":
                named = None if key is None else f"k{key}"
                return Usage(
                    budget_id=self.budget, amounts=asked, dedup_key=named, handle=claimed.handle
                )
            case "spend":
                return Spend(
                    budget_id=self.budget,
                    execution_id=claimed.execution_id,
                    deltas=asked,
                    idempotency_key=f"k{key}",
                )
            case "reserve":
                return Reservation(
                    handle=claimed.handle,
                    budget_id=self.budget,
                    amounts=asked,
                    reservation_id=f"r{key}",
                )
            case _:
                return Settlement(budget_id=self.budget, reservation_id=f"r{key}", used=asked)

    def expect(self, post: Post, told: BudgetOutcome | FlowFabricError) -> None:
        """Do the same in the model, and compare what is told."""
        verb, holder, key, asked = post
        model, live = self.model, list(self.live)
        if isinstance(told, HardBreach):
            model.breaches += 1
        if verb in ("report", "used", "spend"):
            if key is not None and self.is_remembered(model.reported.get(key)):
                assert isinstance(told, UsageAlreadyApplied)
            elif not model.fits(asked, live):
                assert isinstance(told, HardBreach), told
            else:
                model.count(asked)
                assert told == model.judge(asked)
                reporter = None if verb == "report" else self.claimed[holder].execution_id
                if key is not None:
                    model.reported[key] = self.kept(reporter)
                if verb == "spend":
                    self.expect_spent(self.claimed[holder].execution_id, asked)
            return
        assert key is not None
        if verb == "reserve":
            self.expect_reserve(holder, key, asked, told)
        else:
            self.expect_settle(key, asked, told)

    def kept(self, execution_id: str | None) -> Kept:
        return Kept(execution_id, self.world.now_ms + KEPT_MS)

    def is_remembered(self, kept: Kept | None) -> bool:
        """A key that belongs to an execution holds until somebody looks whether that exists."""
        if kept is None:
            return False
        return kept.execution_id is not None or kept.until_ms > self.world.now_ms

    def expect_spent(self, execution_id: str, asked: Amounts) -> None:
        before = self.model.spent.get(execution_id)
        amounts = plus({} if before is None else before.amounts, asked)
        self.model.spent[execution_id] = Spent(
            execution_id, self.world.now_ms + KEPT_MS, amounts=amounts
        )

    def expect_reserve(self, holder: int, key: int, asked: dict[str, int], told: object) -> None:
        model, lease = self.model, self.claimed[holder].lease_id
        if lease not in self.live:
            assert isinstance(told, LeaseExpired)
        elif self.is_remembered(model.settled.get(key)):
            assert isinstance(told, UsageAlreadyApplied)
        elif model.fits(asked, list(self.live), but=key):
            assert told == Reserved()
            model.held[key] = (lease, asked)
        else:
            assert isinstance(told, HardBreach), told

    def expect_settle(self, key: int, used: dict[str, int], told: object) -> None:
        model = self.model
        if self.is_remembered(model.settled.get(key)):
            assert isinstance(told, UsageAlreadyApplied)
            return
        lease, held = model.held.pop(key, ("", {}))
        holder = self.owners.get(lease)
        beyond = {name: n for name, n in used.items() if n > held.get(name, 0)}
        if model.fits(beyond, list(self.live)):
            model.count(used)
            assert told == model.judge(used), told
            if used:
                model.settled[key] = self.kept(holder)
            return
        assert isinstance(told, HardBreach), told
        if lease:
            model.count(model.fitting(used, held, list(self.live)) if held else {})
            model.settled[key] = self.kept(holder)

    # Steps

    async def post(self, batch: list[Post]) -> None:
        # What was lost may be settled as if it were not: that is played alone.
        for post in batch:
            if post[0] == "settle" and self.is_lost(post[2]):
                await self.settle_lost(post)
                return
        told = await self.engine.post_to_budgets([self.request(each) for each in batch])
        for post, outcome in zip(batch, told, strict=True):
            self.expect(post, outcome)
        for post, outcome in zip(batch, told, strict=True):
            refused = post[0] in ("used", "reserve") and isinstance(outcome, HardBreach)
            if self.model.fails and refused:
                self.live.discard(self.claimed[post[1]].lease_id)

    def is_lost(self, key: int | None) -> bool:
        lease, _ = self.model.held.get(key or 0, ("", {}))
        return lease != "" and lease not in self.live

    async def settle_lost(self, post: Post) -> None:
        """The reservation of an ended attempt: cleared away, it is a report like any other."""
        self.world.clock.advance(ms=RESERVATION_CHECK_MS)
        await self.engine.check_reservations()
        self.model.held.pop(post[2] or 0)
        (told,) = await self.engine.post_to_budgets([self.request(post)])
        self.expect(post, told)

    async def end(self, holder: int, how: str) -> None:
        """An attempt ends, and its holder begins another execution, or the same again."""
        claimed = self.claimed[holder]
        self.live.discard(claimed.lease_id)
        try:
            await self._end(claimed, how)
            replays = how == "replay"
        except FlowFabricError:
            # Its lease had run out.
            replays = False
        if replays:
            await self.engine.replay_execution(claimed.execution_id)
            again = await self.given.claimed(claimed.execution_id, 10 * RESERVATION_CHECK_MS)
            self.claimed[holder] = self.began(again)
        else:
            self.claimed[holder] = await self.claim()

    async def _end(self, claimed: Claimed, how: str) -> None:
        engine = self.engine
        match how:
            case "complete":
                await engine.complete(claimed.handle)
            case "fail" | "replay":
                await engine.fail(claimed.handle, "x", failure_class=FailureClass.PERMANENT)
            case "cancel":
                await engine.cancel_execution(claimed.execution_id, reason="x")
            case "suspend":
                await engine.suspend(claimed.handle, resume_condition=Single("gate"))
            case "delay":
                await engine.delay(claimed.handle, self.world.clock.now_ms() + 10**9)
            case "revoke":
                await engine.revoke_lease(claimed.execution_id, reason="x")
            case "dead":
                worker = claimed.handle.worker_instance_id
                await engine.mark_worker_dead(worker)
            case _:
                # All leases run out, whoever notices.
                self.world.clock.advance(ms=11 * RESERVATION_CHECK_MS)
                self.live.clear()

    async def play(self, verb: str, given: object) -> None:
        model = self.model
        match verb, given:
            case "post", list():
                await self.post(given)
            case "post and lose the answer", list():
                keyed = [each for each in given if each[2] is not None]
                await self.post(keyed)
                await self.post(keyed)
            case "give back", int():
                execution_id = self.claimed[given].execution_id
                await self.engine.release_budget(self.budget, execution_id)
                spent = model.spent.pop(execution_id, None)
                for name, amount in (spent.amounts if spent else {}).items():
                    model.usage[name] -= amount
            case "reset", _:
                await self.engine.reset_budget(self.budget)
                model.reset()
                self.reschedule()
            case "scheduled reset", int():
                self.world.clock.advance(ms=given)
                await self.reset_if_due()
            case "day", _:
                await self.pass_a_day()
            case "limit", int():
                limits = {"a": given}, {"a": given // 2}
                await self.engine.update_budget(
                    self.budget, BudgetUpdate(hard_limits=limits[0], soft_limits=limits[1])
                )
                model.hard |= limits[0]
                model.soft |= limits[1]
            case "end", (int() as holder, str() as how):
                await self.end(holder, how)
            case _:
                self.world.clock.advance(ms=RESERVATION_CHECK_MS)
                self.forget_expired()
                await self.engine.check_reservations()

    def reschedule(self) -> None:
        while self.model.next_reset_ms <= self.world.now_ms:
            self.model.next_reset_ms += RESETS_MS

    async def reset_if_due(self) -> None:
        while (await self.engine.reset_due_budgets()).full:
            continue
        if self.model.next_reset_ms <= self.world.now_ms:
            self.model.reset()
            self.reschedule()

    async def pass_a_day(self) -> None:
        """What has ended is deleted, and what nobody can repeat any more is forgotten."""
        self.world.clock.advance(ms=KEPT_MS)
        self.forget_expired()
        while (await self.engine.trim_retention()).full:
            continue
        while (await self.engine.trim_budgets()).full:
            continue
        rows = [*self.model.reported.values(), *self.model.settled.values()]
        named = {each.execution_id for each in (*rows, *self.model.spent.values())}
        existing = {each for each in named if each is not None and await self.exists(each)}
        self.model.forget(self.world.now_ms, existing)
        self.claimed = [await self.claim() for _ in range(HOLDERS)]

    async def exists(self, execution_id: str) -> bool:
        return await self.engine.read_execution_state(execution_id) is not None

    def forget_expired(self) -> None:
        now_ms = self.world.clock.now_ms()
        for claimed in self.claimed:
            if claimed.lease_expires_at_ms <= now_ms:
                self.live.discard(claimed.lease_id)

    async def compare(self) -> None:
        self.forget_expired()
        status = await self.engine.get_budget_status(self.budget)
        reserved = {
            n: amount for n, amount in self.model.reserved(list(self.live)).items() if amount
        }
        assert (status.usage, status.reserved) == (self.model.usage, reserved)
        assert (status.breach_count, status.soft_breach_count) == (
            self.model.breaches,
            self.model.soft_breaches,
        )
        assert status.next_reset_at_ms == self.model.next_reset_ms
        assert status.closed == any(
            0 < limit <= self.model.usage.get(name, 0) for name, limit in self.model.hard.items()
        )

    async def add_up(self) -> None:
        """The sum of the reservations that are stored is that of the budget's row."""
        budget_id = named_budget_id(self.budget, parse_namespace("default"))
        wanted: list[Key] = [(budget_id, f"r{key}") for key in range(KEYS)]

        async def body(reader: Reader) -> tuple[Budget, list[BudgetReservation]]:
            (budget,) = (await reader.get(Budget, [(budget_id,)])).values()
            return budget, list((await reader.get(BudgetReservation, wanted)).values())

        budget, stored = await self.engine.store.read(body)
        total: dict[str, int] = {}
        for each in stored:
            total = plus(total, decode_amounts(each.amounts))
        assert decode_amounts(budget.reserved) == {name: n for name, n in total.items() if n}

    async def finish(self) -> None:
        """Once every attempt has ended nothing is reserved, whoever looks."""
        for claimed in self.claimed:
            with suppress(FlowFabricError):
                await self.engine.complete(claimed.handle)
        self.live.clear()
        await self.compare()
        self.world.clock.advance(ms=RESERVATION_CHECK_MS)
        await run_due(self.engine)
        await self.reset_if_due()
        assert "budget_reservations" not in await self.engine.next_due()
        await self.compare()
        await self.engine.update_budget(self.budget, BudgetUpdate(reset_interval_ms=0))


async def check_history(played: Played, history: list[tuple[str, object]]) -> None:
    await played.begin()
    for verb, given_to in history:
        await played.play(verb, given_to)
        await played.compare()
        await played.add_up()
    await played.finish()


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_budgets_are_what_a_simple_model_of_them_is(world: World) -> None:
    @tuned(world, 100)
    @given(
        hard=st.dictionaries(st.sampled_from(DIMENSIONS), st.integers(0, 25)),
        fails=st.booleans(),
        history=steps,
    )
    def check(hard: dict[str, int], fails: bool, history: list[tuple[str, object]]) -> None:
        world.begin()
        world.run(check_history(Played(world, dict(hard), fails=fails), history))

    check()
