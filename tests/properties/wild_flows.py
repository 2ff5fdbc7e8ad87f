"""Flows to which anything happens in any order, with a look at everything after each step.

Members are added and joined in bulk and edge by edge, also onto members that run; they
fail, retry, pause, lose their workers, wait for each other, are cancelled and replayed;
the clock jumps past leases, delays and keep times; flows are cancelled, audited and
trimmed; and any step may lose the process before or after one of its commits.

After every step each execution has one thing that moves it, no ready one has an open
join, the counts are right, and whoever is claimed has what its join passed on. At the
end everything is brought to its end, except what waits for somebody's decision by name,
and once its keep time is over nothing is left.
"""

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from flowfabric import Engine
from flowfabric.config import EngineConfig
from flowfabric.core.audit import Complaint
from flowfabric.core.conditions import Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.flow_joins import (
    Dependency,
    EdgeDependencyPolicy,
    Join,
    JoinAll,
    JoinAny,
    JoinQuorum,
)
from flowfabric.core.flow_records import Edge, EdgeState, GroupState, JoinRecord, OnSatisfied
from flowfabric.core.handles import HandleKind
from flowfabric.core.ids import (
    FIRST_UUID,
    ExecutionId,
    FlowId,
    flow_execution_id,
    uuid4_from,
    uuid_of,
)
from flowfabric.core.records import Execution
from flowfabric.core.results import Claimed
from flowfabric.core.states import FailureClass, LifecyclePhase, TerminalOutcome
from flowfabric.engine.flows import inputs_of
from flowfabric.engine.shell import execution_key
from flowfabric.engine.topics import DISPATCH_TOPIC
from flowfabric.errors import Bug, Corruption, FlowFabricError, NotFound
from flowfabric.reconcilers import run_due
from flowfabric.store.base import Reader, Store
from flowfabric.testing import SettableClock
from tests.properties.crashes import Crash, Crashes

LEASE_MS = 60_000
HOUR_MS = 3_600_000
CONFIG = EngineConfig(keep="1h", keep_failed="2h", keep_events="1h")
POLICY = {
    "retry_policy": {"max_retries": 2, "backoff": {"type": "fixed", "delay_ms": 5_000}},
    "max_replay_count": 100,
    "max_reclaim_count": 100,
    "max_worker_deaths": 100,
}
MEMBERS_MAX = 9
ROUNDS_MAX = 60

Step = Callable[[], Awaitable[object]]


class Stuck(AssertionError):
    """Something is as it must not be."""


class WildFlow:
    """One flow in an engine that has no other executions."""

    def __init__(
        self, chance: random.Random, store: Store, crashes: Crashes, clock: SettableClock
    ) -> None:
        self.chance = chance
        self.store = store
        self.crashes = crashes
        self.clock = clock
        self.flow_id = FlowId(self.new_uuid())
        self.members: list[ExecutionId] = []
        self.held: dict[ExecutionId, Claimed] = {}
        self.began_with: dict[str, bytes] = {}
        """The payloads of attempts."""
        self.told: list[str] = []

    async def open(self, engine: Engine) -> None:
        self.engine = engine
        if self.chance.random() < 0.5:
            # A process that dispatches tells dependents with the completion itself.
            self.dispatcher = engine.store.hints([DISPATCH_TOPIC])
        await engine.create_flow(self.flow_id, flow_kind="wild")

    def new_uuid(self) -> str:
        return uuid4_from(self.chance.randbytes(16))

    def some(self) -> ExecutionId:
        return self.chance.choice(self.members)

    # Growing

    def new_member(self) -> NewExecution:
        execution_id = flow_execution_id(
            self.flow_id, self.new_uuid(), self.engine.deployment.partitions
        )
        return NewExecution(
            execution_kind="wild", execution_id=execution_id, input_payload=b"own", policy=POLICY
        )

    def policy(self, width: int) -> EdgeDependencyPolicy:
        then = self.chance.choice(list(OnSatisfied))
        choices: list[EdgeDependencyPolicy] = [
            JoinAll(),
            JoinAny(then),
            JoinQuorum(self.chance.randint(1, width), then),
        ]
        return self.chance.choice(choices)

    async def grow(self) -> None:
        # All members may have ended long ago, and the flow with them.
        await self.engine.create_flow(self.flow_id, flow_kind="wild")
        members = [self.new_member() for _ in range(self.chance.randint(1, 3))]
        joins = []
        known = list(self.members)
        for member in members:
            assert member.execution_id is not None
            upstreams = self.chance.sample(
                known, min(len(known), self.chance.choice([0, 0, 1, 2, 3]))
            )
            if upstreams:
                joins.append(self.join(ExecutionId(member.execution_id), upstreams))
            known.append(ExecutionId(member.execution_id))
        await self.engine.add_dependencies(self.flow_id, joins, members=members)

    def join(self, downstream: ExecutionId, upstreams: list[ExecutionId]) -> Join:
        return Join(
            downstream_execution_id=downstream,
            dependencies=[
                Dependency(
                    upstream_execution_id=each,
                    data_passing_ref=uuid_of(each) if self.chance.random() < 0.6 else None,
                )
                for each in upstreams
            ],
            policy=self.policy(len(upstreams)) if self.chance.random() < 0.7 else None,
        )

    async def add_join(self) -> None:
        """Onto whatever the downstream is doing."""
        downstream, *upstreams = self.chance.sample(self.members, min(3, len(self.members)))
        await self.engine.add_dependencies(self.flow_id, [self.join(downstream, upstreams)])

    async def stage(self) -> None:
        upstream, downstream = self.chance.sample(self.members, 2)
        await self.engine.stage_dependency_edge(
            self.flow_id,
            self.new_uuid(),
            upstream_execution_id=upstream,
            downstream_execution_id=downstream,
            data_passing_ref=uuid_of(upstream),
        )

    async def stage_onto_running(self) -> None:
        downstream = self.chance.choice(sorted(self.held))
        others = [each for each in self.members if each != downstream] or [downstream]
        await self.engine.stage_dependency_edge(
            self.flow_id,
            self.new_uuid(),
            upstream_execution_id=self.chance.choice(others),
            downstream_execution_id=downstream,
            data_passing_ref="late",
        )

    async def apply(self) -> None:
        edges = [
            each
            for each in await self.engine.list_edges(self.flow_id)
            if each.edge_state is EdgeState.PENDING
        ]
        if edges:
            edge = self.chance.choice(edges)
            await self.engine.apply_dependency_to_child(
                self.flow_id,
                edge.edge_id,
                upstream_execution_id=edge.upstream_execution_id,
                downstream_execution_id=edge.downstream_execution_id,
            )

    async def set_policy(self) -> None:
        await self.engine.set_edge_group_policy(
            self.flow_id, self.some(), JoinQuorum(self.chance.randint(1, 3))
        )

    # Running

    async def claim(self) -> None:
        claimed = await self.engine.claim_many(
            ["default"],
            limit=self.chance.choice([1, 2, 100]),
            worker_id="w",
            worker_instance_id="w-1",
            lease_ttl_ms=LEASE_MS,
        )
        for each in claimed:
            self.held[each.execution_id] = each
            await self.check_payload(each)

    async def check_payload(self, claimed: Claimed) -> None:
        """What its join passed on is what an attempt begins with, and goes on with."""
        key = execution_key(claimed.execution_id)

        async def body(reader: Reader) -> tuple[JoinRecord | None, list[bytes]]:
            group = (await reader.get(JoinRecord, [key])).get(key)
            inputs = (await inputs_of(reader, [claimed.execution_id])).get(claimed.execution_id, {})
            passed = [each for each in inputs.values() if each.value is not None]
            newest = sorted(passed, key=lambda each: (each.resolved_at_ms, each.edge_id))
            return group, [each.value for each in newest[-1:] if each.value is not None]

        group, newest = await self.store.read(body)
        if group is not None and group.staged and group.group_state is not GroupState.SATISFIED:
            raise Stuck(f"{claimed.execution_id} was claimed while its join is {group}")
        # One that is resumed began before its join passed this on, if a crash hid that from us.
        begins = claimed.handle.kind is not HandleKind.RESUMED
        passed_on = newest[0] if group is not None and newest and begins else claimed.payload
        expected = self.began_with.setdefault(claimed.attempt_id, passed_on)
        if claimed.payload != expected:
            raise Stuck(f"{claimed.execution_id} runs with {claimed.payload!r}, not {expected!r}")

    async def work(self) -> None:
        execution_id = self.chance.choice(sorted(self.held))
        handle = self.held[execution_id].handle
        engine, now_ms = self.engine, self.clock.now_ms()
        awaited = [self.some() for _ in range(2)]
        verbs: list[Step] = [
            lambda: engine.complete(handle, uuid_of(execution_id).encode()),
            lambda: engine.complete(handle, uuid_of(execution_id).encode()),
            lambda: engine.complete(handle),
            lambda: engine.fail(handle, "again"),
            lambda: engine.fail(handle, "no", failure_class=FailureClass.PERMANENT),
            lambda: engine.delay(handle, now_ms + 3_000),
            lambda: engine.suspend(handle, resume_condition=Single("gate")),
            lambda: engine.hand_back(handle, reason="stopping"),
            lambda: engine.wait_children(handle),
            lambda: engine.await_executions(handle, awaited),
            lambda: engine.await_executions(handle, awaited[:1], until_ms=now_ms + 9_000),
            lambda: engine.cancel(handle, "enough"),
            lambda: engine.revoke_lease(execution_id, reason="moved"),
        ]
        del self.held[execution_id]
        await self.chance.choice(verbs)()

    async def resume(self) -> None:
        for each in await self.open_ones():
            if each.lifecycle_phase is LifecyclePhase.SUSPENDED and self.chance.random() < 0.5:
                await self.engine.resume_execution(each.execution_id, trigger_type="operator")

    # Operators and reconcilers

    async def cancel(self) -> None:
        await self.engine.cancel_execution(self.some(), reason="enough")

    async def replay(self) -> None:
        await self.engine.replay_executions([self.some() for _ in range(2)])

    async def close(self) -> None:
        policy = self.chance.choice(["cancel_all", "cancel_pending", "flow_only"])
        await self.engine.cancel_flow(self.flow_id, cancellation_policy=policy)

    async def acknowledge(self) -> None:
        await self.engine.ack_cancel_member(self.flow_id, self.some())

    async def tell(self) -> None:
        await self.engine.dispatch_completions(limit=self.chance.choice([1, 3, 500]))

    async def cascade(self) -> None:
        await self.engine.cascade_completion(self.some())

    async def resolve(self) -> None:
        edges = await self.engine.list_edges(self.flow_id)
        if edges:
            edge = self.chance.choice(edges)
            await self.engine.resolve_dependency(
                self.flow_id,
                edge.edge_id,
                upstream_execution_id=edge.upstream_execution_id,
                downstream_execution_id=edge.downstream_execution_id,
            )

    async def sweep(self) -> None:
        await run_due(self.engine)

    async def sweep_part(self) -> None:
        engine = self.engine
        sweeps: list[Step] = [
            lambda: engine.cancel_pending_members(limit=1),
            engine.apply_due_edges,
            engine.audit_flows,
            engine.expire_due_leases,
            engine.promote_due_delays,
            engine.wake_awaiting,
            lambda: engine.trim_flows(limit=1),
            lambda: engine.trim_retention(limit=1),
            lambda: engine.create_flow(self.flow_id, flow_kind="wild"),
        ]
        await self.chance.choice(sweeps)()

    async def pass_time(self) -> None:
        jumps = [1, 1_000, 6_000, LEASE_MS + 1, LEASE_MS + 1, 2 * HOUR_MS + 1]
        self.clock.advance(ms=self.chance.choice(jumps))

    # One step

    def steps(self) -> list[Step]:
        steps: list[Step] = [self.claim, self.claim, self.claim, self.tell, self.tell]
        steps += [self.sweep, self.pass_time]
        if len(self.members) < MEMBERS_MAX:
            steps += [self.grow] * (6 if len(self.members) < 3 else 2)
        if self.members:
            rare = self.chance.choice([self.acknowledge, self.set_policy, self.cascade])
            steps += [self.cancel, self.replay, self.resume, self.sweep_part, self.apply, rare]
        if len(self.members) > 1:
            steps += [self.chance.choice([self.stage, self.add_join, self.resolve])]
        if self.held:
            steps += [self.work] * 6 + [self.stage_onto_running] * 3
        if self.chance.random() < 0.03 and self.members:
            steps.append(self.close)
        return steps

    async def step(self) -> None:
        step = self.chance.choice(self.steps())
        self.told.append(step.__name__)
        if self.chance.random() < 0.2:
            self.crashes.next = (self.chance.choice([0, 0, 1, 2]), self.chance.random() < 0.5)
        try:
            await step()
        except Crash:
            self.told.append("crash")
            self.engine = Engine(self.store, self.engine.config, self.engine.deployment)
        except (Bug, Corruption):
            raise
        except FlowFabricError as error:
            self.told.append(type(error).__name__)
        self.crashes.next = None
        await self.look()
        await self.check()

    async def look(self) -> None:
        """Who is a member after all: a lost process may or may not have added some."""
        page = await self.engine.list_flow_members(self.flow_id)
        self.members = [each.execution_id for each in page.members]
        self.held = {name: each for name, each in self.held.items() if name in self.members}

    async def check(self, *, strays: bool = False) -> None:
        """Only with `strays` the rows of everything are looked at, which takes longest."""
        page = await self.engine.audit()
        complaints: list[Complaint] = list(page.complaints)
        while page.cursor is not None and (strays or page.cursor.startswith("flows")):
            page = await self.engine.audit(cursor=page.cursor)
            complaints += page.complaints
        if complaints:
            raise Stuck(complaints)

    # The end

    async def finish(self) -> None:
        """Bring everything to its end, and then to its deletion."""
        if not self.members:
            # Without members it would stay open for some to be added.
            with suppress(NotFound):
                await self.engine.cancel_flow(self.flow_id)
        left = await self.bring_to_an_end()
        await self.check_named(left)
        for execution_id in left:
            with suppress(FlowFabricError):
                await self.engine.cancel_execution(execution_id, reason="nobody decided")
        if await self.bring_to_an_end():
            raise Stuck("cancelled and yet not ended")
        # Longer and longer: what somebody waited for is looked at again after a while.
        for _ in range(20):
            self.clock.advance(hours=3)
            await run_due(self.engine)
        if await self.engine.describe_flow(self.flow_id) is not None or await self.open_ones():
            raise Stuck("its keep time is over and it is not gone")
        await self.check(strays=True)

    async def bring_to_an_end(self) -> list[ExecutionId]:
        """Work, resume and sweep until nothing changes any more; who has not ended then."""
        before: list[Execution] = []
        for _ in range(ROUNDS_MAX):
            await run_due(self.engine)
            for claimed in await self.engine.claim_many(
                ["default"], limit=100, worker_id="w", worker_instance_id="w-2"
            ):
                await self.check_payload(claimed)
                await self.engine.complete(claimed.handle, b"at last")
            await run_due(self.engine)
            open_ones = await self.open_ones()
            for each in open_ones:
                if each.lifecycle_phase is LifecyclePhase.SUSPENDED:
                    await self.engine.resume_execution(each.execution_id, trigger_type="operator")
            await self.check()
            if open_ones == before:
                return [each.execution_id for each in open_ones]
            before = open_ones
            self.clock.advance(ms=LEASE_MS + 1)
        raise Stuck("it never comes to rest")

    async def open_ones(self) -> list[Execution]:
        keys = [execution_key(each) for each in self.members]

        async def body(reader: Reader) -> list[Execution]:
            found = await reader.get(Execution, keys)
            return [e for e in found.values() if e.terminal_outcome is TerminalOutcome.NONE]

        return sorted(await self.store.read(body), key=lambda each: each.execution_id)

    async def check_named(self, left: list[ExecutionId]) -> None:
        """Whoever is left waits for edges to be added, or for a failed upstream's replay."""
        for execution_id in left:
            group, edges, upstreams = await self.read_join(execution_id)
            if group is None:
                if (await self.open_one(execution_id)).awaits_child:
                    continue
                raise Stuck(f"{await self.open_one(execution_id)} waits for nothing")
            asked = group.k > group.staged or any(
                edge.counts_from_replay > upstreams[edge.upstream_id].replay_count
                or edge.upstream_id in left
                for edge in edges
            )
            if not asked and not (await self.open_one(execution_id)).awaits_child:
                raise Stuck(f"{execution_id} waits for {group}")

    async def open_one(self, execution_id: ExecutionId) -> Execution:
        return next(e for e in await self.open_ones() if e.execution_id == execution_id)

    async def read_join(
        self, execution_id: ExecutionId
    ) -> tuple[JoinRecord | None, list[Edge], dict[ExecutionId, Execution]]:
        key = partition_key, _ = execution_key(execution_id)

        async def body(
            reader: Reader,
        ) -> tuple[JoinRecord | None, list[Edge], dict[ExecutionId, Execution]]:
            edges = await reader.select_records(
                Edge,
                "list_edges_into",
                partition_key=partition_key,
                flow_id=self.flow_id,
                execution_id=uuid_of(execution_id),
                start=FIRST_UUID,
                limit=100,
            )
            found = await reader.get(Execution, [execution_key(e.upstream_id) for e in edges])
            return (
                (await reader.get(JoinRecord, [key])).get(key),
                list(edges),
                {each.execution_id: each for each in found.values()},
            )

        return await self.store.read(body)


async def play(flow: WildFlow, engine: Engine, steps: int) -> None:
    """The whole life of one flow. Tells what happened if it goes wrong."""
    try:
        # As a process that starts now: days may have passed since the last flow.
        await flow.open(Engine(flow.store, engine.config, engine.deployment))
        for _ in range(steps):
            await flow.step()
        await flow.finish()
    except Exception as error:
        error.add_note("after " + ", ".join(flow.told))
        raise
