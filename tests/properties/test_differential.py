"""The set-based statements do exactly what the core decides.

`claim_ready`, `complete_leased` and `renew_leased` stand in for decisions of the core,
in two dialects. Executions with random pasts go through each statement; every row and
event that comes out is compared with what the core makes of the rows that went in.
Ids that only the database can invent are taken from its answer and checked to be new.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs

from flowfabric import FlowFabricError
from flowfabric.core.decisions import Changes, Refusal, Subject, Timing
from flowfabric.core.events import Event
from flowfabric.core.executions import decide_complete
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId, LeaseId, WorkerId, WorkerInstanceId
from flowfabric.core.leases import (
    Granted,
    NewIds,
    WorkerIdentity,
    decide_renew,
    grant_lease,
    on_last_chance,
)
from flowfabric.core.results import Claimed
from flowfabric.engine.shell import fence_of, lease_columns
from flowfabric.engine.waitpoints import claimed_progress
from flowfabric.store.base import Parameter, Row
from tests.properties.pasts import LANES, Grown, Past, grow, pasts
from tests.properties.world import Life, Lives, World

KINDS = ("a", "b", "c", "d", "e")
WORKER = WorkerIdentity(worker_id=WorkerId("ann"), worker_instance_id=WorkerInstanceId("ann-1"))
SHRINKING_TAKES_S = 1_200


@dataclass(frozen=True)
class Question:
    """What a worker asks for."""

    lanes: tuple[str, ...]
    kinds: tuple[str, ...] | None
    offered: tuple[str, ...]
    limit: int
    ttl_ms: int
    renews_first: bool

    def served(self, past: Past) -> bool:
        return (
            past.lane in self.lanes
            and (self.kinds is None or past.kind in self.kinds)
            and set(past.needs) <= set(self.offered)
        )


questions = st.builds(
    Question,
    lanes=st.sampled_from((LANES, ("two",))),
    kinds=st.sampled_from((None, KINDS[:3])),
    offered=st.sampled_from((("cpu", "gpu"), ("gpu",), ())),
    limit=st.integers(1, len(KINDS)),
    ttl_ms=st.sampled_from((1, 1_000)),
    renews_first=st.booleans(),
)

BROKEN_FENCES: tuple[Callable[[Handle], Handle], ...] = (
    lambda handle: handle,
    lambda handle: handle,
    lambda handle: handle,
    lambda handle: structs.replace(handle, lease_id=LeaseId(str(uuid.UUID(int=1)))),
)


@dataclass(frozen=True)
class Grip:
    """Which handle of an execution is shown, how it is spoiled, and what comes with it."""

    back: int
    spoil: Callable[[Handle], Handle]
    result: bytes | None
    result_encoding: str | None
    ttl_ms: int


grips = st.builds(
    Grip,
    back=st.sampled_from((0, 0, 0, 1)),
    spoil=st.sampled_from(BROKEN_FENCES),
    result=st.sampled_from((None, b"", b"\x00\xff")),
    result_encoding=st.sampled_from((None, "json")),
    ttl_ms=st.sampled_from((1, 100, 1_000)),
)


def shown(grown: Sequence[Grown], held: Sequence[Grip]) -> list[tuple[Handle, Grip]]:
    """One handle for each execution that has given one out."""
    return [
        (grip.spoil(each.handles[-1 - grip.back % len(each.handles)]), grip)
        for each, grip in zip(grown, held, strict=False)
        if each.handles
    ]


def prepare(world: World, histories: Sequence[Past]) -> tuple[list[Grown], Lives]:
    world.begin()
    grown = [world.run(grow(world.engine, world.clock, past)) for past in histories]
    lives, _ = world.look([each.execution_id for each in grown])
    return grown, lives


def sorted_events(events: Sequence[Event]) -> list[Event]:
    """By execution; the order of the events of one execution counts, that of others does not."""
    return sorted(events, key=lambda event: event.execution_id)


def check_outcome(world: World, before: Lives, decided: dict[ExecutionId, Changes]) -> None:
    after, events = world.look(before)
    assert after == {
        execution_id: life.after(decided.get(execution_id, Changes()))
        for execution_id, life in before.items()
    }
    told = [event for changes in decided.values() for event in changes.events]
    assert sorted_events(events) == sorted_events(told)


# Claiming


def check_claim(world: World, histories: list[Past], question: Question) -> None:
    grown, before = prepare(world, histories)
    claimed = world.run(
        world.engine.claim_many(
            question.lanes,
            limit=question.limit,
            worker_id=WORKER.worker_id,
            worker_instance_id=WORKER.worker_instance_id,
            capabilities=question.offered,
            kinds=question.kinds,
            lease_ttl_ms=question.ttl_ms,
            renews_first=question.renews_first,
        )
    )
    served = [before[each.execution_id] for each in grown if question.served(each.past)]
    best = sorted((life for life in served if life.execution.ready), key=queue_order)
    chosen = best[: question.limit]
    assert [each.execution_id for each in claimed] == [e.execution.execution_id for e in chosen]
    check_fresh_ids(before, claimed)
    decided: dict[ExecutionId, Changes] = {}
    for life, claim in zip(chosen, claimed, strict=True):
        ids = NewIds(lease_id=claim.lease_id, attempt_id=claim.attempt_id)
        decision = grant_lease(
            life.subject,
            WORKER,
            question.ttl_ms,
            ids,
            world.now_ms,
            renews_first=question.renews_first,
        )
        decided[claim.execution_id] = decision.changes
        told = structs.replace(claim, progress=None, renew_first=False)
        assert claim.renew_first == (
            question.renews_first and decision.answer.execution.worker_deaths > 0
        )
        assert told == told_of(decision.answer, claim.handle.signature, question.ttl_ms, world)
        if claim.progress is not None:
            progress = world.run(world.engine.read_progress(claim.execution_id))
            assert claimed_progress(claim.progress) == progress
    check_outcome(world, before, decided)


def told_of(granted: Granted, signature: bytes, ttl_ms: int, world: World) -> Claimed:
    """What a worker must be told about what it was granted."""
    execution, attempt = granted.execution, granted.attempt
    assert execution.lease_id is not None
    assert execution.lease_expires_at_ms is not None
    return Claimed(
        handle=Handle(
            backend_tag=world.engine.store.backend_tag,
            kind=granted.kind,
            execution_id=execution.execution_id,
            attempt_index=attempt.attempt_index,
            attempt_id=attempt.attempt_id,
            lease_id=execution.lease_id,
            lease_epoch=execution.lease_epoch,
            lease_ttl_ms=ttl_ms,
            lane_id=execution.lane_id,
            worker_instance_id=WORKER.worker_instance_id,
            signature=signature,
        ),
        attempt_type=attempt.attempt_type,
        lease_expires_at_ms=execution.lease_expires_at_ms,
        namespace=execution.namespace,
        execution_kind=execution.execution_kind,
        priority=execution.priority,
        payload=execution.taken_payload[0],
        payload_encoding=execution.taken_payload[1],
        flow_id=execution.flow_id,
        retry_count=execution.retry_count,
        created_at_ms=execution.created_at_ms,
        deadline_at_ms=execution.deadline_at_ms,
        attempt_deadline_ms=execution.attempt_deadline_ms,
        last_chance=on_last_chance(execution),
    )


def queue_order(life: Life) -> tuple[int, int, str]:
    execution = life.execution
    return -execution.priority, execution.created_at_ms, execution.execution_id[-36:]


def check_fresh_ids(before: Lives, claimed: Sequence[Claimed]) -> None:
    used = {attempt.lease_id for life in before.values() for attempt in life.attempts}
    leases = [uuid.UUID(claim.lease_id) for claim in claimed]
    assert [each.version for each in leases] == [4] * len(claimed)
    assert len(set(leases)) == len(claimed)
    assert {claim.lease_id for claim in claimed} & used == set()
    for claim in claimed:
        attempts = before[claim.execution_id].attempts
        known = {attempt.attempt_id: attempt.attempt_index for attempt in attempts}
        assert known.get(claim.attempt_id, len(attempts)) == claim.attempt_index
        assert uuid.UUID(claim.attempt_id).version == 4


# Completing and renewing


def decide_each(
    world: World,
    before: Lives,
    handles: Sequence[Handle],
    decide: Callable[[int, Subject], Changes],
) -> tuple[list[int], dict[ExecutionId, Changes]]:
    """Which positions the core acts on, and how: the sure cases. All else it refuses or knows."""
    sure: list[int] = []
    decided: dict[ExecutionId, Changes] = {}
    for position, handle in enumerate(handles):
        try:
            changes = decide(position, before[handle.execution_id].subject)
        except (FlowFabricError, Refusal):
            continue
        if changes != Changes():
            sure.append(position)
            decided[handle.execution_id] = changes
    return sure, decided


def run_alone(world: World, name: str, **parameters: Parameter) -> Sequence[Row]:
    async def alone() -> Sequence[Row]:
        return await world.engine.store.execute_alone(name, **parameters)

    return world.run(alone())


def check_complete(world: World, histories: list[Past], held: list[Grip]) -> None:
    grown, before = prepare(world, histories)
    pairs = shown(grown, held)
    handles = [handle for handle, _ in pairs]
    timing = Timing(now_ms=world.now_ms)

    def decide(position: int, subject: Subject) -> Changes:
        handle, grip = pairs[position]
        fence = fence_of(handle)
        return decide_complete(
            subject, fence, grip.result or None, grip.result_encoding, timing
        ).changes

    (row,) = run_alone(
        world,
        "complete_leased",
        results=[grip.result or None for _, grip in pairs],
        result_encodings=[grip.result_encoding for _, grip in pairs],
        **lease_columns(handles),
    )
    sure, decided = decide_each(world, before, handles, decide)
    positions = str(row["positions"]).split(",") if row["completed"] else []
    assert (row["completed"], sorted(map(int, positions))) == (len(sure), sure)
    check_outcome(world, before, decided)


def check_renew(world: World, histories: list[Past], held: list[Grip]) -> None:
    grown, before = prepare(world, histories)
    pairs = shown(grown, held)
    handles = [handle for handle, _ in pairs]

    def decide(position: int, subject: Subject) -> Changes:
        handle, grip = pairs[position]
        fence = fence_of(handle)
        return decide_renew(subject, fence, grip.ttl_ms, world.now_ms).changes

    rows = run_alone(
        world,
        "renew_leased",
        lease_ttls_ms=[grip.ttl_ms for _, grip in pairs],
        **lease_columns(handles),
    )
    sure, decided = decide_each(world, before, handles, decide)
    assert sorted((row["position"], row["expires_at_ms"], row["lease_epoch"]) for row in rows) == [
        (p, world.now_ms + pairs[p][1].ttl_ms, handles[p].lease_epoch) for p in sure
    ]
    check_outcome(world, before, decided)


# Tests

histories = pasts(KINDS)
held = st.lists(grips, min_size=len(KINDS), max_size=len(KINDS))


def tuned(world: World, usual: int) -> settings:
    return settings(
        max_examples=world.examples(usual),
        deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_claiming_by_statement_is_what_the_core_decides(world: World) -> None:
    @tuned(world, 250)
    @given(histories=histories, question=questions)
    def check(histories: list[Past], question: Question) -> None:
        check_claim(world, histories, question)

    check()


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_completing_by_statement_is_what_the_core_decides(world: World) -> None:
    @tuned(world, 150)
    @given(histories=histories, held=held)
    def check(histories: list[Past], held: list[Grip]) -> None:
        check_complete(world, histories, held)

    check()


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_renewing_by_statement_is_what_the_core_decides(world: World) -> None:
    @tuned(world, 150)
    @given(histories=histories, held=held)
    def check(histories: list[Past], held: list[Grip]) -> None:
        check_renew(world, histories, held)

    check()
