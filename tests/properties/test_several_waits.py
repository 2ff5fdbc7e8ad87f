"""Invented lives with several waits: every signal is used by one of them, or kept.

Each wait takes what it can use, in the order it came, and leaves the others for later
ones, whether they came before it or while it lasted, and however it ended. After every
word, what is kept is what no wait has used.
"""

import uuid
from collections.abc import Sequence
from typing import Literal, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from flowfabric import Engine
from flowfabric.core.conditions import AllConditions, Condition, Count, CountKind, Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import SignalId
from flowfabric.core.policies import ExecutionPolicy
from flowfabric.core.results import Claimed
from flowfabric.core.signals import SignalAccepted, SignalDuplicate
from flowfabric.core.waitpoints import PendingWaitpoint
from flowfabric.engine.suspensions import SuspendSatisfied
from flowfabric.errors import WaitpointClosed
from flowfabric.testing import SettableClock
from tests.properties.test_differential import SHRINKING_TAKES_S, tuned
from tests.properties.test_suspensions import KEYS, MATCHERS, NAMES, SOURCES, Sent, forward, is_met
from tests.properties.world import World

TIMEOUT_MS = 1_000
LEASE_MS = 10_000_000


class Tell(Struct, frozen=True):
    """Send a signal: by name, or with one of the tokens handed out so far."""

    key: str
    name: str
    source: str
    token: int | None


class Begin(Struct, frozen=True):
    """Wait, if the execution does not already."""

    condition: Condition


Turn: TypeAlias = Tell | Begin | Literal["hand out", "time out", "let go", "replay"]


def is_of_use(condition: Condition, used: Sequence[Sent], each: Sent) -> bool:
    return not is_met(condition, used) and forward(condition, [*used, each]) != list(used)


class Ledger:
    """What each signal is good for, by hand."""

    def __init__(self) -> None:
        self.kept: list[Sent] = []
        self.used: list[Sent] = []
        self.condition: Condition | None = None
        self.met: list[Sent] | None = None
        """What met the last wait."""

    def begin(self, condition: Condition) -> None:
        self.condition, self.met, waiting = condition, None, self.kept
        self.kept = []
        for each in waiting:
            self.tell(each)

    def tell(self, each: Sent) -> None:
        if self.condition is None or not is_of_use(self.condition, self.used, each):
            self.kept.append(each)
            return
        self.used.append(each)
        if is_met(self.condition, self.used):
            self.met, self.used, self.condition = self.used, [], None

    def end(self) -> None:
        """Unmet: what it used counts again, in its old place."""
        self.kept = sorted([*self.kept, *self.used], key=lambda each: each.number)
        self.used, self.condition = [], None


class Life:
    def __init__(self, engine: Engine, clock: SettableClock, claimed: Claimed) -> None:
        self.engine, self.clock, self.claimed = engine, clock, claimed
        self.ledger = Ledger()
        self.handed_out: list[PendingWaitpoint] = []
        self.ids: dict[SignalId, int] = {}
        self.told = 0

    async def take(self, turn: Turn) -> None:
        engine, ledger, execution_id = self.engine, self.ledger, self.claimed.execution_id
        waits = ledger.condition is not None
        match turn:
            case Tell():
                await self.tell(turn)
            case Begin() if not waits:
                ledger.begin(turn.condition)
                outcome = await engine.suspend(
                    self.claimed.handle,
                    resume_condition=turn.condition,
                    timeout_in_ms=TIMEOUT_MS,
                    timeout_behavior="auto_resume",
                    take_pending=True,
                )
                assert isinstance(outcome, SuspendSatisfied) is (ledger.met is not None)
                await self.check_met()
            case "hand out" if not waits:
                key = KEYS[len(self.handed_out) % len(KEYS)]
                made = await engine.create_waitpoint(
                    self.claimed.handle, key, expires_in_ms=1_000 * TIMEOUT_MS
                )
                self.handed_out.append(made)
            case "time out" if waits:
                self.clock.advance(ms=TIMEOUT_MS)
                await engine.expire_suspension(execution_id)
                ledger.end()
                await self.claim()
            case "let go" if waits:
                await engine.resume_execution(execution_id)
                ledger.end()
                await self.claim()
            case "replay":
                await engine.cancel_execution(execution_id, reason="test")
                await engine.replay_execution(execution_id)
                ledger.end()
                await self.claim()
            case _:
                pass

    async def tell(self, turn: Tell) -> None:
        number, self.told = self.told, self.told + 1
        try:
            answer, key = await self.deliver(turn)
        except WaitpointClosed:
            return
        assert isinstance(answer, SignalAccepted)
        self.ids[answer.signal_id] = number
        each = Sent(key, turn.name, turn.source, number, False)
        self.ledger.tell(each)
        assert answer.kept is (each in self.ledger.kept)
        if answer.resumed:
            await self.claim()
            await self.check_met()

    async def deliver(self, turn: Tell) -> tuple[SignalAccepted | SignalDuplicate, str]:
        execution_id = self.claimed.execution_id
        if turn.token is None or not self.handed_out:
            answer = await self.engine.deliver_operator_signal(
                execution_id, turn.key, signal_name=turn.name, source_identity=turn.source
            )
            return answer, turn.key
        made = self.handed_out[turn.token % len(self.handed_out)]
        answer = await self.engine.deliver_signal(
            execution_id,
            made.waitpoint_id,
            waitpoint_token=made.waitpoint_token,
            signal_name=turn.name,
            source_type="operator",
            source_identity=turn.source,
        )
        return answer, made.waitpoint_key

    async def claim(self) -> None:
        snapshot = await self.engine.describe_execution(self.claimed.execution_id)
        assert snapshot is not None
        claimed = await self.engine.claim(
            snapshot.lane_id, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=LEASE_MS
        )
        assert claimed is not None
        self.claimed = claimed

    async def check_met(self) -> None:
        if self.ledger.met is not None:
            seen = await self.engine.observe_signals(self.claimed.handle)
            numbers = [self.ids[each.signal_id] for each in seen]
            assert numbers == [each.number for each in self.ledger.met]

    async def check_kept(self) -> None:
        snapshot = await self.engine.describe_execution(self.claimed.execution_id)
        assert snapshot is not None
        numbers = [self.ids[each.signal_id] for each in snapshot.kept_signals]
        assert numbers == [each.number for each in self.ledger.kept]


WAITS = st.builds(Single, st.sampled_from(KEYS), MATCHERS) | st.builds(
    Count,
    st.integers(1, 2),
    st.sampled_from([CountKind.DISTINCT_SIGNALS, CountKind.DISTINCT_SOURCES]),
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True).map(tuple),
    MATCHERS,
)
TURNS: st.SearchStrategy[Turn] = st.one_of(
    st.builds(Tell, st.sampled_from(KEYS[:2]), NAMES, SOURCES, st.none() | st.integers(0, 3)),
    st.builds(
        Begin, WAITS | st.builds(AllConditions, st.lists(WAITS, min_size=2, max_size=3).map(tuple))
    ),
    st.sampled_from(["hand out", "time out", "let go", "replay"]),
)


async def live(engine: Engine, clock: SettableClock, turns: list[Turn]) -> None:
    await engine.create_execution(
        NewExecution(
            execution_kind="work",
            lane_id=(lane := f"lane-{uuid.uuid4()}"),
            policy=ExecutionPolicy(max_replay_count=100),
        )
    )
    claimed = await engine.claim(
        lane, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=LEASE_MS
    )
    assert claimed is not None
    life = Life(engine, clock, claimed)
    for turn in turns:
        await life.take(turn)
        await life.check_kept()


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_every_signal_is_used_by_one_wait_or_kept(world: World) -> None:
    @tuned(world, 200)
    @given(st.lists(TURNS, min_size=4, max_size=20))
    def check(turns: list[Turn]) -> None:
        world.begin()
        world.run(live(world.engine, world.clock, turns))

    check()
