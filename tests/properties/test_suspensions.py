"""Invented conditions and signals: on every store the engine agrees with a count by hand.

Some signals come before the pause, to waitpoints made beforehand, some after it.
Some are sent twice, under the same id or idempotency key. Whatever comes, the
execution resumes with the first signal that completes the condition, the worker
sees exactly the signals that brought it forward, and none is lost.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs

from flowfabric import Engine, connect
from flowfabric.core.conditions import (
    AllConditions,
    ByName,
    Condition,
    Count,
    CountKind,
    Single,
    Wildcard,
    referenced_waitpoint_keys,
)
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import WaitpointId
from flowfabric.core.results import Claimed
from flowfabric.core.signals import SignalAccepted, SignalDuplicate
from flowfabric.core.states import PublicState
from flowfabric.core.waitpoints import FreshWaitpoint, UsePending, WaitpointToken
from flowfabric.engine.suspensions import SuspendSatisfied
from flowfabric.errors import WaitpointClosed
from flowfabric.testing import SettableClock

NAMES = st.sampled_from("xyz")
SOURCES = st.sampled_from(["alice", "bob", "carol"])


class Sent(Struct, frozen=True):
    """One signal; two with the same number are the same signal sent twice."""

    key: str
    name: str
    source: str
    number: int
    by_idempotency_key: bool

    @property
    def signal_id(self) -> str:
        return f"00000000-0000-4000-8000-{self.number:012x}"


# By hand ----------------------------------------------------------------------------


def tally(node: Single | Count, heard: Sequence[Sent]) -> set[tuple[str, ...]]:
    """What one part of a condition has counted."""
    keys = (node.waitpoint_key,) if isinstance(node, Single) else node.waitpoints
    wanted = None if isinstance(node.matcher, Wildcard) else node.matcher.signal_name
    fitting = [each for each in heard if each.key in keys and wanted in (None, each.name)]
    if isinstance(node, Single):
        return {() for _ in fitting}
    if node.count_kind is CountKind.DISTINCT_SIGNALS:
        return {(each.signal_id,) for each in fitting}
    if node.count_kind is CountKind.DISTINCT_WAITPOINTS:
        return {(each.key,) for each in fitting}
    return {(each.source,) for each in fitting}


def parts(condition: Condition) -> list[Single | Count]:
    if isinstance(condition, AllConditions):
        return [part for member in condition.members for part in parts(member)]
    assert isinstance(condition, Single | Count)
    return [condition]


def is_met(condition: Condition, heard: Sequence[Sent]) -> bool:
    """An all-of holds when all its parts hold, however they are nested."""
    return all(
        len(tally(part, heard)) >= (part.n if isinstance(part, Count) else 1)
        for part in parts(condition)
    )


def forward(condition: Condition, heard: Sequence[Sent]) -> list[Sent]:
    """Those that added to a tally which was not full, up to the one that completed them all."""
    kept: list[Sent] = []
    for position, each in enumerate(heard):
        lacking = [part for part in parts(condition) if not is_met(part, heard[:position])]
        before = [tally(part, heard[:position]) for part in lacking]
        if before != [tally(part, heard[: position + 1]) for part in lacking]:
            kept.append(each)
        if is_met(condition, heard[: position + 1]):
            break
    return kept


def first_deliveries(sent: Sequence[Sent]) -> list[Sent]:
    """What remains when repeats are dropped."""
    first: dict[int, Sent] = {}
    for each in sent:
        first.setdefault(each.number, each)
    return list(first.values())


# Through the engine -----------------------------------------------------------------


class Mailbox(Struct, frozen=True, kw_only=True):
    engine: Engine
    claimed: Claimed
    addresses: dict[str, tuple[WaitpointId, WaitpointToken]]

    async def send(self, each: Sent) -> str:
        """What became of it: its effect, `duplicate` or `closed`."""
        waitpoint_id, token = self.addresses[each.key]
        try:
            answer = await self.engine.deliver_signal(
                self.claimed.execution_id,
                waitpoint_id,
                waitpoint_token=token,
                signal_name=each.name,
                source_identity=each.source,
                signal_id=None if each.by_idempotency_key else each.signal_id,
                idempotency_key=f"{each.number}" if each.by_idempotency_key else None,
            )
        except WaitpointClosed:
            return "closed"
        if isinstance(answer, SignalDuplicate):
            return "duplicate"
        assert isinstance(answer, SignalAccepted)
        return answer.effect.value


async def claimed_on(engine: Engine) -> Claimed:
    # A lane of its own: what earlier examples have resumed is ready on theirs.
    lane = f"lane-{uuid.uuid4()}"
    await engine.create_execution(NewExecution(execution_kind="work", lane_id=lane))
    claimed = await engine.claim(lane, worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    return claimed


async def compare(
    engine: Engine, condition: Condition, made: set[str], early: list[Sent], late: list[Sent]
) -> None:
    """`made` are the waitpoints made beforehand, which alone can hear what comes early."""
    claimed = await claimed_on(engine)
    pending = {
        key: await engine.create_waitpoint(claimed.handle, key, expires_in_ms=1_000)
        for key in referenced_waitpoint_keys(condition)
        if key in made
    }
    box = Mailbox(
        engine=engine,
        claimed=claimed,
        addresses={
            str(key): (each.waitpoint_id, each.waitpoint_token) for key, each in pending.items()
        },
    )
    early = [each for each in early if each.key in pending]
    effects = [await box.send(each) for each in early]
    assert set(effects) <= {"buffered_for_pending_waitpoint", "duplicate"}
    outcome = await engine.suspend(
        claimed.handle,
        resume_condition=condition,
        waitpoints=[
            UsePending(waitpoint_id=pending[key].waitpoint_id)
            if key in pending
            else FreshWaitpoint(waitpoint_key=key)
            for key in referenced_waitpoint_keys(condition)
        ],
    )
    at_once = is_met(condition, first_deliveries(early))
    assert isinstance(outcome, SuspendSatisfied) is at_once
    details = outcome.details
    opened = {str(details.waitpoint_key): (details.waitpoint_id, details.waitpoint_token)} | {
        str(extra.waitpoint_key): (extra.waitpoint_id, extra.waitpoint_token)
        for extra in details.additional_waitpoints
    }
    assert opened.items() >= box.addresses.items()
    reachable = [each for each in late if each.key in opened]
    await follow(structs.replace(box, addresses=opened), condition, early, reachable, met=at_once)


async def follow(
    box: Mailbox, condition: Condition, early: list[Sent], late: list[Sent], met: bool
) -> None:
    """Send what comes late, and compare after each signal."""
    engine, execution_id = box.engine, box.claimed.execution_id
    heard = list(early)
    for each in late:
        known = {other.number for other in heard}
        effect = await box.send(each)
        if each.number in known:
            assert effect == "duplicate"
            continue
        assert (effect == "closed") is met
        if met:
            continue
        heard.append(each)
        met = is_met(condition, first_deliveries(heard))
        assert (effect == "resume_condition_satisfied") is met
        state = await engine.read_execution_state(execution_id)
        assert state is (PublicState.WAITING if met else PublicState.SUSPENDED)
    if met:
        seen = await engine.observe_signals(box.claimed.handle)
        counted = forward(condition, first_deliveries(heard))
        assert [(signal.signal_name, signal.source_identity) for signal in seen] == [
            (each.name, each.source) for each in counted
        ]


KEYS = ("a", "b", "c")
MATCHERS = st.one_of(st.just(Wildcard()), st.builds(ByName, NAMES))


def leaves(keys: tuple[str, ...]) -> st.SearchStrategy[Condition]:
    kinds = [CountKind.DISTINCT_SIGNALS, CountKind.DISTINCT_SOURCES]
    return st.one_of(
        st.builds(Single, st.sampled_from(keys), MATCHERS),
        st.builds(
            Count,
            st.integers(1, 3),
            st.sampled_from(kinds),
            st.just(keys),
            MATCHERS,
        ),
        st.builds(
            Count,
            st.integers(1, len(keys)),
            st.just(CountKind.DISTINCT_WAITPOINTS),
            st.just(keys),
            MATCHERS,
        ),
    )


def nested(keys: tuple[str, ...], depth: int) -> st.SearchStrategy[Condition]:
    if depth == 0:
        return leaves(keys)
    members = st.lists(nested(keys, depth - 1), min_size=1, max_size=3).map(tuple)
    return st.one_of(leaves(keys), st.builds(AllConditions, members))


def beforehand(keys: tuple[str, ...]) -> st.SearchStrategy[set[str]]:
    """Which waitpoints are made beforehand; often all, so that signals to several come early."""
    return st.one_of(st.just(set(keys)), st.sets(st.sampled_from(keys)))


def signals(keys: tuple[str, ...]) -> st.SearchStrategy[list[Sent]]:
    # A number stands for everything else about a signal, so that a repeat is one.
    kinds = st.tuples(st.sampled_from(keys), NAMES, SOURCES, st.booleans())
    every = st.lists(kinds, min_size=1, max_size=8)
    order = st.lists(st.integers(0, 7), min_size=2, max_size=12)
    return st.builds(spelled_out, every, order)


def spelled_out(kinds: list[tuple[str, str, str, bool]], numbers: list[int]) -> list[Sent]:
    found = []
    for number in numbers:
        key, name, source, by_idempotency_key = kinds[number % len(kinds)]
        found.append(Sent(key, name, source, number, by_idempotency_key))
    return found


STORES = {"sqlite-memory": 300, "sqlite-file": 60, "postgres": 60}
"""How many examples each store gets."""
Opened = tuple[asyncio.Runner, Engine, int]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    name = str(request.param)
    if name == "postgres":
        url = str(request.getfixturevalue("postgres_database"))
    else:
        record: Callable[[str], None] = request.getfixturevalue("exercised_store")
        record(name.replace("-", " "))
        url = f"sqlite:///{':memory:' if name == 'sqlite-memory' else tmp_path / 'signals.db'}"
    with asyncio.Runner() as runner:
        engine = runner.run(connect(url, clock=SettableClock()))
        yield runner, engine, STORES[name]
        runner.run(engine.close())


@pytest.mark.parametrize("keys", [("a",), KEYS], ids=["one waitpoint", "several waitpoints"])
def test_conditions_agree_with_a_count_by_hand(store: Opened, keys: tuple[str, ...]) -> None:
    runner, engine, examples = store

    @settings(max_examples=examples, deadline=None)
    @given(nested(keys, 3), beforehand(keys), signals(keys), st.integers(0, 12))
    def agrees(condition: Condition, made: set[str], sent: list[Sent], split: int) -> None:
        runner.run(compare(engine, condition, made, sent[:split], sent[split:]))

    agrees()
