"""Limits beside a simple model of them, through invented histories.

Work is submitted, claimed, granted, completed, failed, paused, resumed, lost, cancelled, replayed
and forgotten in any order, while limits are set and lifted and slots are taken by hand. After each
step the engine counts the holders and the starts that the model counts; no claim passes a cap, no
window admits more starts than it may, and a claim leaves nothing behind that would fit. At the end
every slot is free.
"""

import itertools
import math
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric import FlowFabricError
from flowfabric.core.conditions import Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.gates import WINDOW_PARTS, Admitted, GateName, GateOwner
from flowfabric.core.ids import ExecutionId
from flowfabric.core.limits import policy_id_of
from flowfabric.core.results import Claimed, ClaimGrant, Created, ResumeGrant
from flowfabric.core.states import FailureClass, LifecyclePhase
from flowfabric.engine import gates
from flowfabric.engine.gates import COUNTED_EACH_TIME_MAX
from flowfabric.engine.limits import GateUse
from flowfabric.errors import ClaimGrantExpired
from flowfabric.reconcilers import run_due
from tests.conformance.given import WORKER
from tests.properties.test_differential import SHRINKING_TAKES_S, tuned
from tests.properties.test_limited_claims import resumes
from tests.properties.world import RETENTION_MS, Lives, World

WINDOW_MS = 6_400
PART_MS = WINDOW_MS // WINDOW_PARTS
TTLS_MS = (500, 5_000)
GRANT_TTLS_MS = (500, 2 * WINDOW_MS)
POLICY = {
    "max_worker_deaths": 1_000,
    "max_reclaim_count": 1_000,
    "retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 200}},
}
NUMBERS = itertools.count()
"""Limits outlive their examples: each has its own."""
ENDS = ("complete", "fail", "break", "cancel", "hand back", "revoke", "suspend", "delay", "renew")

ROUNDS_MAX = 60

whiches = st.integers(0, 5)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.tuples(st.sampled_from("xyz"), st.booleans())),
        st.tuples(st.just("submit"), st.tuples(st.sampled_from("xyz"), st.booleans())),
        st.tuples(
            st.just("claim"), st.tuples(st.sampled_from((1, 3, 50)), st.sampled_from(TTLS_MS))
        ),
        st.tuples(
            st.just("claim"), st.tuples(st.sampled_from((1, 3, 50)), st.sampled_from(TTLS_MS))
        ),
        st.tuples(st.just("work"), st.tuples(whiches, st.sampled_from(ENDS))),
        st.tuples(st.just("work"), st.tuples(whiches, st.sampled_from(ENDS))),
        st.tuples(st.just("resume"), whiches),
        st.tuples(st.just("replay"), whiches),
        st.tuples(st.just("cancel"), whiches),
        st.tuples(st.just("grant"), st.tuples(whiches, st.sampled_from(GRANT_TTLS_MS))),
        st.tuples(st.just("use grant"), whiches),
        st.tuples(st.just("admit"), st.booleans()),
        st.tuples(st.just("pass"), st.sampled_from((1, 99, 100, 500, 2_000, 8_000, RETENTION_MS))),
        st.tuples(st.just("wait"), st.sampled_from((1, 250, 500))),
        st.tuples(
            st.just("limit"),
            st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans(), st.booleans()),
        ),
    ),
    min_size=5,
    max_size=40,
)


@dataclass(eq=False)
class Start:
    """Something that a rate counted."""

    at_ms: int
    until_ms: float = math.inf
    """The last millisecond of the grant it was counted for, until that is used."""


@dataclass
class Model:
    """Who holds a slot until when, and what has started while a rate counted it."""

    held: dict[ExecutionId, int] = field(default_factory=dict)
    granted: dict[ExecutionId, int] = field(default_factory=dict)
    """The last millisecond of each grant."""
    admitted: set[ExecutionId] = field(default_factory=set)
    interrupted: set[ExecutionId] = field(default_factory=set)
    """Who goes on with an attempt later."""
    starts: list[Start] = field(default_factory=list)
    """Those that were not given back."""
    unused: dict[ExecutionId, Start] = field(default_factory=dict)
    """Those that were counted for grants which nobody has used yet."""
    cap: int = 2
    rate: int = 3
    own_keeps: bool = False
    all_keeps: bool = False
    keys: dict[ExecutionId, str] = field(default_factory=dict)

    def holders(self, now_ms: int) -> list[ExecutionId]:
        return [each for each, until_ms in self.held.items() if until_ms > now_ms] + [
            each for each, until_ms in self.granted.items() if until_ms >= now_ms
        ]

    def running(self, key: str, now_ms: int) -> int:
        """With a key, of its own limit; without, of the one over all."""
        holders = set(self.holders(now_ms))
        if self.own_keeps if key else self.all_keeps:
            holders |= self.interrupted
        found = [each for each in holders if key in ("", self.keys[each])]
        return len(found) + (0 if key else len(self.admitted))

    def holds_up(self, key: str, now_ms: int, *, goes_on: bool) -> bool:
        """Whether a cap does: that of a key, or the one over all."""
        own_full = self.running(key, now_ms) >= self.cap and not (goes_on and self.own_keeps)
        all_full = self.running("", now_ms) >= 2 * self.cap and not (goes_on and self.all_keeps)
        return self.cap > 0 and (own_full or all_full)

    def started(self, now_ms: int) -> int:
        """What has begun, or still may with its grant: never more than the rate."""
        return sum(
            each.at_ms > now_ms - WINDOW_MS and each.until_ms >= now_ms for each in self.starts
        )

    def counted(self, now_ms: int) -> int:
        """What may stand in the way of others: all that was not given back."""
        return sum(each.at_ms > now_ms - WINDOW_MS - PART_MS for each in self.starts)

    def begin(self, execution_id: ExecutionId) -> None:
        """The grant of an execution is used."""
        self.granted.pop(execution_id, None)
        start = self.unused.pop(execution_id, None)
        if start is not None:
            start.until_ms = math.inf

    def give_back(self, execution_id: ExecutionId, now_ms: int) -> None:
        """A grant goes: if it was not used in time its start does too, unless no rate is set."""
        start = self.unused.get(execution_id)
        if start is not None and start.until_ms < now_ms:
            del self.unused[execution_id]
            if self.rate:
                self.starts.remove(start)

    def let_go(self, execution_id: ExecutionId) -> None:
        self.held.pop(execution_id, None)
        self.granted.pop(execution_id, None)
        self.admitted.discard(execution_id)
        start = self.unused.pop(execution_id, None)
        if start is not None:
            start.until_ms = -math.inf


class Played:
    """One history, on the engine and in the model."""

    def __init__(self, world: World) -> None:
        self.world, self.engine, self.model = world, world.engine, Model()
        number = next(NUMBERS)
        self.all, self.own = f"all-{number}", f"own-{number}"
        self.kind = f"work-{number}"
        self.ids: list[ExecutionId] = []
        self.claims: dict[ExecutionId, Claimed] = {}
        self.grants: dict[ExecutionId, ClaimGrant | ResumeGrant] = {}
        self.by_hand: list[ExecutionId] = []

    @property
    def now_ms(self) -> int:
        return self.world.now_ms

    def gate(self, name: str, key: str = "") -> GateName:
        return GateName(GateOwner.QUOTA, policy_id_of("default", name), key)

    async def begin(self) -> None:
        await self.set_limit(self.model.cap, self.model.rate, own_keeps=False, all_keeps=False)

    async def set_limit(self, cap: int, rate: int, *, own_keeps: bool, all_keeps: bool) -> None:
        """A cap for each key, and a rate and twice the cap over all."""
        await self.engine.set_limit(
            self.own,
            active_concurrency_cap=cap,
            while_suspended="keep" if own_keeps else "release",
        )
        await self.engine.set_limit(
            self.all,
            window_ms=WINDOW_MS if rate else 0,
            max_requests_per_window=rate,
            active_concurrency_cap=2 * cap,
            while_suspended="keep" if all_keeps else "release",
        )
        self.model.cap, self.model.rate = cap, rate
        self.model.own_keeps, self.model.all_keeps = own_keeps, all_keeps

    async def lives(self) -> Lives:
        lives = await self.world.lives(self.ids)
        self.model.interrupted = {each for each, life in lives.items() if resumes(life)}
        return lives

    # Steps

    async def submit(self, key: str, *, by_hand: bool) -> None:
        passed = [] if by_hand else [self.gate(self.all), self.gate(self.own, key)]
        made = await self.engine.create_execution(
            NewExecution(
                execution_kind=f"{self.kind}-by-hand" if by_hand else self.kind,
                policy=POLICY,
                gates=passed,
            )
        )
        assert isinstance(made, Created)
        if by_hand:
            self.by_hand.append(made.execution_id)
        else:
            self.ids.append(made.execution_id)
            self.model.keys[made.execution_id] = key

    def take(self, claimed: Claimed) -> None:
        self.claims[claimed.execution_id] = claimed
        self.model.held[claimed.execution_id] = claimed.lease_expires_at_ms

    async def claim(self, limit: int, ttl_ms: int) -> None:
        before = await self.lives()
        claimed = await self.engine.claim_many(
            ["default"], limit=limit, kinds=[self.kind], lease_ttl_ms=ttl_ms, **WORKER
        )
        for each in claimed:
            assert before[each.execution_id].execution.ready
            self.take(each)
            if not resumes(before[each.execution_id]):
                self.count_start()
        await self.lives()
        self.check_room(
            {each.execution_id for each in claimed if not resumes(before[each.execution_id])}
        )
        if len(claimed) < limit:
            await self.check_nothing_fits()

    def count_start(self) -> Start | None:
        if not self.model.rate:
            return None
        start = Start(self.now_ms)
        self.model.starts.append(start)
        assert self.model.started(self.now_ms) <= self.model.rate
        return start

    def check_room(self, taken: set[ExecutionId]) -> None:
        """Whoever started has passed no cap."""
        model, now_ms = self.model, self.now_ms
        for key in {model.keys[each] for each in taken} if model.cap else ():
            assert model.running(key, now_ms) <= model.cap
            assert model.running("", now_ms) <= 2 * model.cap

    async def check_nothing_fits(self) -> None:
        model, now_ms = self.model, self.now_ms
        rate_full = model.rate and model.counted(now_ms) >= model.rate
        for execution_id, life in (await self.lives()).items():
            if life.execution.ready and not (rate_full and not resumes(life)):
                key = model.keys[execution_id]
                assert model.holds_up(key, now_ms, goes_on=resumes(life))

    async def work(self, which: int, how: str) -> None:
        """Somebody who was given a lease does something with it, whether or not it holds."""
        if not self.claims:
            return
        execution_id = list(self.claims)[which % len(self.claims)]
        handle, engine = self.claims[execution_id].handle, self.engine
        call: Awaitable[object]
        match how:
            case "complete":
                call = engine.complete(handle)
            case "fail":
                call = engine.fail(handle, "again")
            case "break":
                call = engine.fail(handle, "no", failure_class=FailureClass.PERMANENT)
            case "cancel":
                call = engine.cancel(handle, "no")
            case "hand back":
                call = engine.hand_back(handle, reason="later")
            case "revoke":
                call = engine.revoke_lease(execution_id, reason="needed")
            case "suspend":
                call = engine.suspend(handle, resume_condition=Single("gate"))
            case "delay":
                call = engine.delay(handle, self.now_ms + 300)
            case _:
                with suppress(FlowFabricError):
                    renewed = await engine.renew(handle)
                    self.model.held[execution_id] = renewed.expires_at_ms
                return
        with suppress(FlowFabricError):
            await call
            self.model.held.pop(execution_id, None)

    async def grant(self, which: int, ttl_ms: int) -> None:
        if not self.ids:
            return
        execution_id = self.ids[which % len(self.ids)]
        before = (await self.lives()).get(execution_id)
        with suppress(FlowFabricError):
            grant = await self.engine.issue_claim_grant(execution_id, grant_ttl_ms=ttl_ms, **WORKER)
            if self.grants.get(execution_id) == grant:
                return
            self.grants[execution_id] = grant
            self.model.give_back(execution_id, self.now_ms)
            self.model.granted[execution_id] = grant.expires_at_ms
            assert before is not None
            if resumes(before):
                return
            self.check_room({execution_id})
            start = self.count_start()
            if start is not None:
                start.until_ms = grant.expires_at_ms
                self.model.unused[execution_id] = start

    async def use_grant(self, which: int) -> None:
        if not self.grants:
            return
        execution_id, grant = list(self.grants.items())[which % len(self.grants)]
        claim = (
            self.engine.claim_execution
            if isinstance(grant, ClaimGrant)
            else self.engine.claim_resumed_execution
        )
        with suppress(FlowFabricError):
            try:
                claimed = await claim(
                    execution_id, grant_key=grant.grant_key, lease_ttl_ms=TTLS_MS[0], **WORKER
                )
            except ClaimGrantExpired:
                self.model.give_back(execution_id, self.now_ms)
                raise
            self.model.begin(execution_id)
            self.take(claimed)

    async def run_due(self) -> None:
        await run_due(self.engine)
        for execution_id in list(self.model.unused):
            self.model.give_back(execution_id, self.now_ms)

    async def cancel(self, which: int) -> None:
        everybody = [*self.ids, *self.by_hand]
        if everybody:
            execution_id = everybody[which % len(everybody)]
            with suppress(FlowFabricError):
                await self.engine.cancel_execution(execution_id, reason="no")
                self.model.let_go(execution_id)

    async def admit(self, *, takes: bool) -> None:
        policy_id = policy_id_of("default", self.all)
        for execution_id in self.by_hand if takes else list(self.model.admitted):
            with suppress(FlowFabricError):
                if takes:
                    new = execution_id not in self.model.admitted
                    outcome = await self.engine.check_admission(policy_id, execution_id)
                    if new and isinstance(outcome, Admitted):
                        self.model.admitted.add(execution_id)
                        self.count_start()
                else:
                    await self.engine.release_admission(policy_id, execution_id)
                    self.model.admitted.discard(execution_id)

    async def play(self, verb: str, given_to: object) -> None:
        match verb, given_to:
            case "submit", (str() as key, bool() as flag):
                await self.submit(key, by_hand=flag and key == "x")
            case "claim", (int() as limit, int() as ttl_ms):
                await self.claim(limit, ttl_ms)
            case "work", (int() as which, str() as how):
                await self.work(which, how)
            case "resume" | "replay", int() as which if self.ids:
                execution_id = self.ids[which % len(self.ids)]
                with suppress(FlowFabricError):
                    if verb == "resume":
                        await self.engine.resume_execution(execution_id)
                    else:
                        await self.engine.replay_execution(execution_id)
            case "cancel", int() as which:
                await self.cancel(which)
            case "grant", (int() as which, int() as ttl_ms):
                await self.grant(which, ttl_ms)
            case "use grant", int() as which:
                await self.use_grant(which)
            case "admit", bool() as takes:
                await self.admit(takes=takes)
            case "pass" | "wait", int() as step_ms:
                self.world.clock.advance(ms=step_ms)
                if verb == "pass":
                    await self.run_due()
            case "limit", (int() as cap, int() as rate, bool() as own, bool() as over_all):
                await self.set_limit(cap, rate, own_keeps=own, all_keeps=over_all)
            case _:
                pass

    # Comparing

    async def compare(self) -> None:
        await self.lives()
        model, now_ms = self.model, self.now_ms
        unused = GateUse(key="", running=0, started=0, opens_at_ms=None)
        (over_all,) = await self.use(self.all) or [unused]
        assert (over_all.key, over_all.running) == ("", model.running("", now_ms))
        if model.rate:
            assert model.started(now_ms) <= over_all.started <= model.counted(now_ms)
        for each in await self.use(self.own):
            assert (each.key, each.running) == (each.key, model.running(each.key, now_ms))

    async def use(self, name: str) -> tuple[GateUse, ...]:
        return (await self.engine.list_limit_use(policy_id_of("default", name))).gates

    async def finish(self) -> None:
        """Everything comes to its end, and then every slot is free."""
        # Slots taken by hand may be all that a lowered limit has.
        await self.admit(takes=False)
        for _ in range(ROUNDS_MAX):
            self.world.clock.advance(ms=WINDOW_MS + PART_MS)
            await self.run_due()
            going = [
                life.execution
                for life in (await self.lives()).values()
                if life.execution.lifecycle_phase is not LifecyclePhase.TERMINAL
            ]
            if not going:
                break
            for execution in going:
                if execution.lifecycle_phase is LifecyclePhase.SUSPENDED:
                    await self.engine.resume_execution(execution.execution_id)
            await self.claim(50, TTLS_MS[-1])
            await self.compare()
            for execution_id, until_ms in list(self.model.held.items()):
                if until_ms > self.now_ms:
                    await self.engine.complete(self.claims[execution_id].handle)
                    self.model.let_go(execution_id)
        assert going == []
        for execution_id in self.by_hand:
            with suppress(FlowFabricError):
                await self.engine.cancel_execution(execution_id, reason="over")
        self.model.admitted.clear()
        await self.compare()
        assert self.model.running("", self.now_ms) == 0


async def check_history(played: Played, history: list[tuple[str, object]]) -> None:
    await played.begin()
    for verb, given_to in history:
        await played.play(verb, given_to)
        await played.compare()
    await played.finish()


@pytest.mark.timeout(SHRINKING_TAKES_S)
@pytest.mark.parametrize("counted_each_time_max", [COUNTED_EACH_TIME_MAX, -1])
def test_limits_are_what_a_simple_model_of_them_is(
    world: World, counted_each_time_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether what is held is counted for each claim, or remembered."""
    monkeypatch.setattr(gates, "COUNTED_EACH_TIME_MAX", counted_each_time_max)

    @tuned(world, 150)
    @given(history=steps)
    def check(history: list[tuple[str, object]]) -> None:
        world.begin()
        world.run(check_history(Played(world), history))

    check()
