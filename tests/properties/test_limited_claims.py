"""Claims under limits do exactly what the core decides.

Executions with random pasts wait behind gates. What `claim_ready` takes of given allowances, what
`count_gate_use` counts, and what a whole claim takes through rounds of both, are compared with the
core's rules applied to the rows as they were.
"""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flowfabric.core import gates
from flowfabric.core.decisions import Changes
from flowfabric.core.gates import Allowance, Gate, GateName, GateOwner, GateState, WaitingRoute
from flowfabric.core.handles import HandleKind
from flowfabric.core.ids import (
    AttemptId,
    ExecutionId,
    GateId,
    make_execution_id,
    uuids_from,
)
from flowfabric.core.leases import NewIds, grant_lease
from flowfabric.core.limits import Limits, policy_id_of
from flowfabric.core.states import (
    AttemptState,
    LifecyclePhase,
    OwnershipState,
)
from flowfabric.engine.gated_claims import ROUNDS_MAX, ClaimRow
from flowfabric.engine.gates import gates_of, load
from flowfabric.store.base import Reader, Row, Transaction
from flowfabric.store.mapping import answers_of
from tests.properties.pasts import CHAPTERS, LONG_MS, SHORT_MS, Past, joined
from tests.properties.test_differential import (
    SHRINKING_TAKES_S,
    WORKER,
    check_outcome,
    prepare,
    queue_order,
    tuned,
)
from tests.properties.world import Life, Lives, World

POLICIES = ("shared", "keyed", "other")
IDS = {name: policy_id_of("default", name) for name in POLICIES}
CHOICES = (
    ("shared",),
    ("keyed:x",),
    ("shared", "keyed:x"),
    ("shared", "keyed:y"),
    ("keyed:y", "other"),
)
"""What an execution is under. The first of a pair are the names of limits."""
WINDOW_MS = 6_400
TTL_MS = 1_000


def gate_of(choice: str) -> GateName:
    name, _, key = choice.partition(":")
    return GateName(GateOwner.QUOTA, IDS[name], key)


def limited_pasts() -> st.SearchStrategy[list[Past]]:
    """Several of a kind and a key."""
    return st.lists(
        st.builds(
            Past,
            lane=st.just("one"),
            kind=st.sampled_from(("a", "b")),
            priority=st.sampled_from((0, 0, 7)),
            needs=st.just(()),
            attempt_timeout_ms=st.sampled_from((None, 150)),
            retention_ms=st.none(),
            instance_tag=st.none(),
            in_flow=st.booleans(),
            lease_ttl_ms=st.sampled_from((LONG_MS, SHORT_MS)),
            steps=st.lists(st.sampled_from((*CHAPTERS, ("grant",))), max_size=3).map(joined),
            gates=st.sampled_from(CHOICES).map(lambda names: tuple(map(gate_of, names))),
        ),
        min_size=1,
        max_size=8,
    )


@dataclass(frozen=True)
class Terms:
    """What a limit says, and what has started under it lately."""

    cap: int
    rate: int
    keeps: bool
    started: tuple[tuple[int, int], ...]
    """How long ago, and how many."""


terms = st.builds(
    Terms,
    cap=st.integers(0, 4),
    rate=st.integers(0, 4),
    keeps=st.booleans(),
    started=st.lists(
        st.tuples(st.integers(0, WINDOW_MS + 100), st.integers(1, 2)),
        max_size=3,
        unique_by=lambda pair: pair[0] // 100,
    ).map(lambda pairs: tuple(sorted(pairs, reverse=True))),
)


def resumes(life: Life) -> bool:
    execution = life.execution
    return (
        execution.attempt_state is AttemptState.ATTEMPT_INTERRUPTED
        and execution.lifecycle_phase is not LifecyclePhase.ACTIVE
    )


def queue(lives: Lives, route_id: int) -> list[Life]:
    """What can be claimed of a route, best first."""
    waiting = [
        life
        for life in lives.values()
        if life.execution.route_id == route_id and life.execution.ready
    ]
    return sorted(waiting, key=queue_order)


def routes_of(lives: Lives) -> list[int]:
    return sorted({life.execution.route_id for life in lives.values()})


def fitting(lives: Lives, allowed: Sequence[Allowance]) -> list[Life]:
    chosen: list[Life] = []
    for each in allowed:
        waiting = queue(lives, each.route_id)
        chosen += [waiting[place] for place in each.fitting([resumes(life) for life in waiting])]
    return chosen


class Lifted:
    """The limits of all examples, lifted while executions get their pasts."""

    def __init__(self, world: World) -> None:
        self.world, self.engine = world, world.engine

    async def lift(self) -> None:
        for name in POLICIES:
            await self.engine.set_limit(name)

    async def set(self, name: str, said: Terms) -> None:
        await self.engine.set_limit(
            name,
            window_ms=WINDOW_MS if said.rate else 0,
            max_requests_per_window=said.rate,
            active_concurrency_cap=said.cap,
            while_suspended="keep" if said.keeps else "release",
        )

        async def body(tx: Transaction) -> None:
            found = await tx.select_records(
                Gate, "gates_of_owner", owner_id=IDS[name], after=None, limit=10
            )
            window = tuple((self.world.now_ms - ago, count) for ago, count in said.started)
            limits = Limits(window_ms=WINDOW_MS, rate=said.rate, cap=said.cap)
            changed = [
                structs.replace(
                    each,
                    starts=gates.written(window),
                    opens_at_ms=gates.opens_at_ms(limits, window, self.world.now_ms),
                )
                for each in found
            ]
            await tx.save(Changes(updates=tuple(changed)))

        await self.engine.store.transact(body)

    async def look(self) -> tuple[dict[GateId, GateState], dict[int, tuple[GateId, ...]]]:
        """Every gate as the statement sees it, and the gates of every route."""

        async def body(
            reader: Reader,
        ) -> tuple[dict[GateId, GateState], dict[int, tuple[GateId, ...]]]:
            found: list[Gate] = []
            for policy_id in IDS.values():
                found += await reader.select_records(
                    Gate, "gates_of_owner", owner_id=policy_id, after=None, limit=10
                )
            rows = await load(reader, [each.gate_id for each in found], always=True)
            passed = {route_id: tuple(await gates_of(reader, route_id)) for route_id in self.routes}
            return {row.gate_id: row.state for row in rows}, passed

        return await self.engine.store.read(body)

    routes: Sequence[int] = ()


def in_use(lives: Lives, routes: Sequence[int], now_ms: int, *, keeps: bool) -> int:
    """Who holds a slot: live leases, live grants and, where told, who goes on later."""
    return sum(
        life.execution.route_id in routes
        and (
            (
                life.execution.ownership_state is OwnershipState.LEASED
                and (life.execution.lease_expires_at_ms or 0) > now_ms
            )
            or (life.execution.granted_until_ms or 0) >= now_ms
            or (keeps and resumes(life))
        )
        for life in lives.values()
    )


# Given allowances


async def claim_allowed(world: World, allowed: Sequence[Allowance]) -> list[ClaimRow]:
    limit = max(1, sum(each.slots for each in allowed))

    async def body(tx: Transaction) -> Sequence[Row]:
        return await tx.select(
            "claim_ready",
            namespace=None,
            lanes=("one",),
            kinds=(),
            capabilities=(),
            worker_id=WORKER.worker_id,
            worker_instance_id=WORKER.worker_instance_id,
            lease_ttl_ms=TTL_MS,
            renews_first=False,
            limit=limit,
            uuids=uuids_from(os.urandom(16 * limit)),
            allowed=msgspec.json.encode(list(allowed)).decode(),
        )

    return answers_of(ClaimRow, await world.engine.store.transact(body))


def id_of(row: ClaimRow) -> ExecutionId:
    return make_execution_id(row.partition_key, row.execution_id)


def ids_of(row: ClaimRow) -> NewIds:
    return NewIds(lease_id=row.lease_id, attempt_id=row.attempt_id or AttemptId(row.lease_id))


def check_rows(
    world: World, before: Lives, chosen: Sequence[Life], ids: dict[ExecutionId, NewIds]
) -> None:
    assert sorted(ids) == sorted(life.execution.execution_id for life in chosen)
    decided = {
        execution_id: grant_lease(
            before[execution_id].subject, WORKER, TTL_MS, each, world.now_ms
        ).changes
        for execution_id, each in ids.items()
    }
    check_outcome(world, before, decided)


def check_allowed(
    world: World, histories: list[Past], numbers: list[tuple[int, int]], turned: bool
) -> None:
    world.begin()
    world.run(Lifted(world).lift())
    _, before = prepare(world, histories)
    routes = routes_of(before)
    allowed = [
        Allowance(route_id=route_id, slots=slots, starts=min(slots, starts))
        for route_id, (slots, starts) in zip(
            routes[::-1] if turned else routes, itertools.cycle(numbers), strict=False
        )
    ]
    rows = world.run(claim_allowed(world, allowed))
    chosen = fitting(before, allowed)
    kinds = {id_of(row): row.kind is HandleKind.RESUMED for row in rows}
    assert kinds == {life.execution.execution_id: resumes(life) for life in chosen}
    check_rows(world, before, chosen, {id_of(row): ids_of(row) for row in rows})


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_claiming_what_is_allowed_by_statement_is_what_the_core_decides(world: World) -> None:
    @tuned(world, 200)
    @given(
        histories=limited_pasts(),
        numbers=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5),
        turned=st.booleans(),
    )
    def check(histories: list[Past], numbers: list[tuple[int, int]], *, turned: bool) -> None:
        check_allowed(world, histories, numbers, turned)

    check()


# A whole claim


class Expected:
    """What the core makes of the rows and gates there are, round after round."""

    def __init__(
        self,
        lives: Lives,
        states: dict[GateId, GateState],
        passed: dict[int, tuple[GateId, ...]],
        now_ms: int,
    ) -> None:
        self.lives, self.states, self.passed, self.now_ms = dict(lives), states, passed, now_ms
        self.chosen: list[Life] = []

    def waiting(self) -> list[WaitingRoute]:
        return [
            WaitingRoute(
                route_id=route_id,
                gate_ids=self.passed[route_id],
                priority=waiting[0].execution.priority,
                resumes=any(resumes(life) for life in waiting),
            )
            for route_id in routes_of(self.lives)
            if (waiting := queue(self.lives, route_id))
        ]

    def claim(self, limit: int) -> None:
        for _ in range(ROUNDS_MAX):
            allowed = gates.allot(
                self.waiting(), self.states, limit - len(self.chosen), self.now_ms
            )
            taken = fitting(self.lives, allowed)
            for life in taken:
                self.take(life)
            if not taken or len(self.chosen) >= limit:
                break

    def take(self, life: Life) -> None:
        self.chosen.append(life)
        del self.lives[life.execution.execution_id]
        for gate_id in self.passed[life.execution.route_id]:
            state = self.states[gate_id]
            if state.limits.rate and not resumes(life):
                state = structs.replace(state, gate=state.after(1, self.now_ms))
            if not (state.limits.keeps and resumes(life)):
                state = structs.replace(state, in_use=state.in_use + 1)
            self.states[gate_id] = state


def check_claim(world: World, histories: list[Past], said: dict[str, Terms], limit: int) -> None:
    world.begin()
    limits = Lifted(world)
    world.run(limits.lift())
    _, before = prepare(world, histories)
    limits.routes = routes_of(before)
    for name in POLICIES:
        world.run(limits.set(name, said[name]))
    states, passed = world.run(limits.look())
    for gate_id, state in states.items():
        routes = [route_id for route_id, of_route in passed.items() if gate_id in of_route]
        assert state.in_use == in_use(before, routes, world.now_ms, keeps=state.limits.keeps)
    expected = Expected(before, states, passed, world.now_ms)
    expected.claim(limit)
    claimed = world.run(
        world.engine.claim_many(
            ["one"],
            limit=limit,
            worker_id=WORKER.worker_id,
            worker_instance_id=WORKER.worker_instance_id,
            lease_ttl_ms=TTL_MS,
        )
    )
    ids = {
        each.execution_id: NewIds(lease_id=each.lease_id, attempt_id=each.attempt_id)
        for each in claimed
    }
    check_rows(world, before, expected.chosen, ids)
    after, _ = world.run(limits.look())
    assert after == expected.states


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_a_claim_under_limits_takes_what_the_core_allots(world: World) -> None:
    @tuned(world, 200)
    @given(
        histories=limited_pasts(),
        said=st.fixed_dictionaries(dict.fromkeys(POLICIES, terms)),
        limit=st.sampled_from((1, 2, 3, 100)),
    )
    def check(histories: list[Past], said: dict[str, Terms], limit: int) -> None:
        check_claim(world, histories, said, limit)

    check()
