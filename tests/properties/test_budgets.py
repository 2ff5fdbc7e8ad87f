"""Budgets beside a simple model of them, through invented histories.

Reports, spends, reservations and settlements come in any order, alone and in batches, with
repeats of the same key, resets, changed limits, attempts that end in every way there is and
replays. After each of them the engine tells what the model tells: every outcome, what is used
and what is reserved. At the end nothing is reserved any more.
"""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.budget_terms import BudgetDefinition, BudgetUpdate
from flowfabric.core.budgets import (
    RESERVATION_CHECK_MS,
    Amounts,
    HardBreach,
    Reserved,
    UsageAlreadyApplied,
    UsageCounted,
)
from flowfabric.core.conditions import Single
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
from tests.conformance.given import Given
from tests.properties.test_differential import SHRINKING_TAKES_S, tuned
from tests.properties.world import World

NUMBERS = itertools.count()
"""Budgets outlive their examples: each has its own."""
DIMENSIONS = ("a", "b")
HOLDERS = 3
ENDS = ("complete", "fail", "cancel", "suspend", "delay", "expire", "revoke", "replay")

amounts = st.dictionaries(st.sampled_from(DIMENSIONS), st.integers(0, 9), max_size=2)
keys = st.integers(0, 3)
holders = st.integers(0, HOLDERS - 1)
posts = st.one_of(
    st.tuples(st.just("report"), holders, st.none() | keys, amounts),
    st.tuples(st.just("spend"), holders, keys, amounts),
    st.tuples(st.just("reserve"), holders, keys, amounts),
    st.tuples(st.just("settle"), holders, keys, amounts),
)
Post = tuple[str, int, int | None, dict[str, int]]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("post"), st.lists(posts, min_size=1, max_size=4)),
        st.tuples(st.just("give back"), holders),
        st.tuples(st.just("reset"), st.just(0)),
        st.tuples(st.just("limit"), st.integers(0, 30)),
        st.tuples(st.just("end"), st.tuples(holders, st.sampled_from(ENDS))),
        st.tuples(st.just("check"), st.just(0)),
    ),
    min_size=5,
    max_size=30,
)


@dataclass
class Model:
    """What a budget is, as simply as it can be said. What ended attempts hold is nothing."""

    hard: dict[str, int]
    usage: dict[str, int] = field(default_factory=dict)
    spent: dict[str, dict[str, int]] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    settled: set[int] = field(default_factory=set)
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

    def count(self, asked: Amounts) -> None:
        for name, amount in asked.items():
            self.usage[name] = self.usage.get(name, 0) + amount


class Played:
    """One history, on the engine and in the model."""

    def __init__(self, world: World, hard: dict[str, int]) -> None:
        self.world, self.engine = world, world.engine
        self.given = Given(world.engine, world.clock)
        self.model = Model(hard)
        self.claimed: list[Claimed] = []
        self.live: set[str] = set()
        self.budget = f"team-{next(NUMBERS)}"

    async def begin(self) -> None:
        await self.engine.create_budget(
            BudgetDefinition(budget_id=self.budget, hard_limits=self.model.hard)
        )
        for _ in range(HOLDERS):
            self.claimed.append(await self.claim())

    async def claim(self) -> Claimed:
        claimed = await self.given.running(ttl_ms=10 * RESERVATION_CHECK_MS)
        self.live.add(claimed.lease_id)
        return claimed

    # Requests

    def request(self, post: Post) -> BudgetRequest:
        verb, holder, key, asked = post
        claimed = self.claimed[holder]
        match verb:
            case "report":
                named = None if key is None else f"k{key}"
                return Usage(budget_id=self.budget, amounts=asked, dedup_key=named)
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
        if verb in ("report", "spend"):
            if key is not None and key in model.reported:
                assert isinstance(told, UsageAlreadyApplied)
            elif not model.fits(asked, live):
                assert isinstance(told, HardBreach), told
            else:
                assert told == UsageCounted()
                model.count(asked)
                if key is not None:
                    model.reported.add(key)
                if verb == "spend":
                    spent = model.spent.setdefault(self.claimed[holder].execution_id, {})
                    for name, amount in asked.items():
                        spent[name] = spent.get(name, 0) + amount
            return
        assert key is not None
        if verb == "reserve":
            self.expect_reserve(holder, key, asked, told)
        else:
            self.expect_settle(key, asked, told)

    def expect_reserve(self, holder: int, key: int, asked: dict[str, int], told: object) -> None:
        model, lease = self.model, self.claimed[holder].lease_id
        if lease not in self.live:
            assert isinstance(told, LeaseExpired)
        elif key in model.settled:
            assert isinstance(told, UsageAlreadyApplied)
        elif model.fits(asked, list(self.live), but=key):
            assert told == Reserved()
            model.held[key] = (lease, asked)
        else:
            assert isinstance(told, HardBreach), told

    def expect_settle(self, key: int, used: dict[str, int], told: object) -> None:
        model = self.model
        if key in model.settled:
            assert isinstance(told, UsageAlreadyApplied)
            return
        lease, held = model.held.pop(key, ("", {}))
        beyond = {name: n for name, n in used.items() if n > held.get(name, 0)}
        if model.fits(beyond, list(self.live)):
            assert told == UsageCounted(), told
            model.count(used)
            model.settled.add(key)
            return
        assert isinstance(told, HardBreach), told
        if lease:
            model.count({name: min(n, held[name]) for name, n in used.items() if name in held})
            model.settled.add(key)

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
            self.live.add(again.lease_id)
            self.claimed[holder] = again
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
            case _:
                # All leases run out, whoever notices.
                self.world.clock.advance(ms=11 * RESERVATION_CHECK_MS)
                self.live.clear()

    async def play(self, verb: str, given: object) -> None:
        model = self.model
        match verb, given:
            case "post", list():
                await self.post(given)
            case "give back", int():
                execution_id = self.claimed[given].execution_id
                await self.engine.release_budget(self.budget, execution_id)
                for name, amount in model.spent.pop(execution_id, {}).items():
                    model.usage[name] = max(0, model.usage[name] - amount)
            case "reset", _:
                await self.engine.reset_budget(self.budget)
                model.usage = dict.fromkeys(model.usage, 0)
                model.spent.clear()
            case "limit", int():
                await self.engine.update_budget(self.budget, BudgetUpdate(hard_limits={"a": given}))
                model.hard["a"] = given
            case "end", (int() as holder, str() as how):
                await self.end(holder, how)
            case _:
                self.world.clock.advance(ms=RESERVATION_CHECK_MS)
                self.forget_expired()
                await self.engine.check_reservations()

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
        assert status.closed == any(
            0 < limit <= self.model.usage.get(name, 0) for name, limit in self.model.hard.items()
        )

    async def finish(self) -> None:
        """Once every attempt has ended nothing is reserved, whoever looks."""
        for claimed in self.claimed:
            with suppress(FlowFabricError):
                await self.engine.complete(claimed.handle)
        self.live.clear()
        await self.compare()
        self.world.clock.advance(ms=RESERVATION_CHECK_MS)
        await run_due(self.engine)
        assert "budget_reservations" not in await self.engine.next_due()
        await self.compare()


async def check_history(played: Played, history: list[tuple[str, object]]) -> None:
    await played.begin()
    for verb, given_to in history:
        await played.play(verb, given_to)
        await played.compare()
    await played.finish()


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_budgets_are_what_a_simple_model_of_them_is(world: World) -> None:
    @tuned(world, 150)
    @given(hard=st.dictionaries(st.sampled_from(DIMENSIONS), st.integers(0, 25)), history=steps)
    def check(hard: dict[str, int], history: list[tuple[str, object]]) -> None:
        world.begin()
        world.run(check_history(Played(world, dict(hard)), history))

    check()
