"""One simulated system from its first job to its verdict.

For a number of words to the store, clients submit, signal, cancel and replay while
faults strike. Then the weather clears, and whatever was asked for must come to its
end by itself: with the right result, once, and with a history that adds up.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from benchmarks.simulation.history import check_history
from benchmarks.simulation.ledger import Ledger
from benchmarks.simulation.link import Counter, Weather
from benchmarks.simulation.nodes import LEASE_S, Node
from benchmarks.simulation.virtual import VirtualClock
from flowfabric import Engine, EngineConfig, FlowFabricError, Run
from flowfabric.core.ids import ExecutionId
from flowfabric.core.states import PublicState
from flowfabric.errors import NotFound, Transport, Unsuccessful
from flowfabric.store.sqlite.store import SqliteStore

T = TypeVar("T")

WORKERS: Final = 3
PATIENCE_S: Final = 900.0
"""How long the system may take to settle once the weather is clear."""
LOOK_S: Final = 5.0
AUDIT_S: Final = 10.0
OVER: Final = frozenset(
    {
        None,
        PublicState.COMPLETED,
        PublicState.FAILED,
        PublicState.CANCELLED,
        PublicState.EXPIRED,
        PublicState.SKIPPED,
    }
)
"""Of what nothing more is to be expected; None is gone already."""
KEPT: Final = ("7d", "7d", "1m", "20s")
"""How long ended executions may be kept: in some worlds they are gone before anybody asks."""


@dataclass(frozen=True)
class Verdict:
    """How a world ended."""

    seed: int
    operations: int
    jobs: int
    effects: int
    virtual_s: float
    violations: tuple[str, ...]


@dataclass
class Asked:
    """One job, and what is known of it."""

    kind: str
    number: int
    execution_id: ExecutionId
    result: int | None = None
    """What the client was told it returned."""


class World:
    """A store, the processes around it, and what was asked of them."""

    def __init__(
        self, seed: int, clock: VirtualClock, store: SqliteStore, observer: Engine
    ) -> None:
        self.seed = seed
        self.clock = clock
        self.store = store
        self.observer = observer
        self.config = observer.config
        self.chance = random.Random(seed)
        self.counter = Counter()
        self.ledger = Ledger(clock, observer)
        self.nodes: list[Node] = []
        self.client = self._node()
        self.asked: list[Asked] = []
        self._errands: set[asyncio.Task[None]] = set()

    @property
    def keeps_long(self) -> bool:
        """Whether everything that was asked for is still there when it is looked for."""
        return self.config.keep == KEPT[0]

    # Processes

    def _node(self) -> Node:
        seed = self.chance.getrandbits(32)
        return Node(self.store, self.ledger, self.config, self.counter, seed)

    def start_worker(self) -> None:
        node = self._node()
        node.start()
        self.nodes.append(node)

    @property
    def workers(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    # Living

    async def live(self, operations: int) -> Verdict:
        for _ in range(WORKERS):
            self.start_worker()
        audit_at_s = AUDIT_S
        while self.counter.operations < operations:
            await asyncio.sleep(self.chance.expovariate(4))
            self._happen()
            if self.clock.now_s >= audit_at_s:
                await self._audit()
                audit_at_s = self.clock.now_s + AUDIT_S
        await self._settle()
        await self._audit()
        self.ledger.violations += await check_history(self.observer)
        return Verdict(
            seed=self.seed,
            operations=self.counter.operations,
            jobs=len(self.asked),
            effects=self.ledger.effects,
            virtual_s=self.clock.now_s,
            violations=tuple(self.ledger.violations),
        )

    def _happen(self) -> None:
        """Something new, chosen by the seed."""
        happening = self.chance.choices(
            (
                self._submit,
                self._submit_again,
                self._submit_flow,
                self._cancel,
                self._replay,
                self._strike,
            ),
            weights=(60, 6, 6, 4, 4, 12),
        )[0]
        happening()

    def _errand(self, errand: Awaitable[None]) -> None:
        task = asyncio.ensure_future(errand)
        assert isinstance(task, asyncio.Task)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def _insist(self, what: Callable[[], Awaitable[T]]) -> T:
        """Say it again until it is answered."""
        while True:
            try:
                return await what()
            except Transport:
                await asyncio.sleep(self.chance.uniform(0.05, 0.5))

    # What clients do

    def _submit(self) -> None:
        kind = self.chance.choice(list(self.client.program.tasks))
        self._errand(self._submit_one(kind, self.chance.randrange(1_000_000)))

    async def _submit_one(self, kind: str, number: int) -> None:
        task = self.client.program.tasks[kind]
        key = f"{kind}-{number}"
        run = await self._insist(lambda: self.client.app.submit(task, number, idempotency_key=key))
        asked = Asked(kind, number, run.execution_id)
        self.asked.append(asked)
        self._errand(self._watch(asked, run))
        if kind == "approval":
            await asyncio.sleep(self.chance.uniform(0, 20))
            await self._approve(run.execution_id, number)

    async def _watch(self, asked: Asked, run: Run[int]) -> None:
        try:
            asked.result = await self._insist(run.result)
        except (Unsuccessful, NotFound):
            return

    def _submit_again(self) -> None:
        """A repeat under the same key finds the same execution, for as long as there is one."""
        if self.asked:
            self._errand(self._repeat(self.chance.choice(self.asked)))

    async def _repeat(self, asked: Asked) -> None:
        if asked.kind == "total" or await self._state(asked.execution_id) is None:
            return
        task, key = self.client.program.tasks[asked.kind], f"{asked.kind}-{asked.number}"
        run = await self._insist(
            lambda: self.client.app.submit(task, asked.number, idempotency_key=key)
        )
        if run.execution_id == asked.execution_id:
            return
        if self.keeps_long:
            self.ledger.report(f"{asked.execution_id}: its key was given to {run.execution_id}")
        self.asked.append(Asked(asked.kind, asked.number, run.execution_id))
        if asked.kind == "approval":
            await self._approve(run.execution_id, asked.number)

    async def _approve(self, execution_id: str, number: int) -> None:
        """Send the decision until it is taken, as a person would who sees nothing happen."""
        run = self.client.app.run(self.client.program.tasks["approval"], execution_id)
        key = self._uuid()
        while await self._state(execution_id) not in OVER:
            try:
                await run.signal("decided", number, idempotency_key=key)
            except FlowFabricError:
                await asyncio.sleep(self.chance.uniform(0.5, 2))
            else:
                await asyncio.sleep(60)

    def _submit_flow(self) -> None:
        flow_id = self._uuid()
        self._errand(self._start_flow(flow_id, self.chance.randrange(1_000_000)))

    async def _start_flow(self, flow_id: str, number: int) -> None:
        program = self.client.program

        async def start() -> ExecutionId:
            flow = self.client.app.flow("fan", flow_id=flow_id)
            parts = [flow.add(program.tasks["stepped"], number + each) for each in range(3)]
            end = flow.add(program.total, join=parts)
            run = await flow.start()
            return run.run(end).execution_id

        self.asked.append(Asked("total", number, await self._insist(start)))

    def _cancel(self) -> None:
        if self.asked:
            asked = self.chance.choice(self.asked)
            self.ledger.touched.add(asked.execution_id)
            self._errand(
                self._steer(
                    lambda: self.client.app.engine.cancel_execution(
                        asked.execution_id, reason="an operator said so"
                    )
                )
            )

    def _replay(self) -> None:
        touched = [each for each in self.asked if each.execution_id in self.ledger.touched]
        if touched:
            self._errand(self._replay_one(self.chance.choice(touched)))

    async def _replay_one(self, asked: Asked) -> None:
        await self._steer(lambda: self.client.app.engine.replay_execution(asked.execution_id))
        if asked.kind == "approval":
            await self._approve(asked.execution_id, asked.number)

    async def _steer(self, what: Callable[[], Awaitable[object]]) -> None:
        try:
            await what()
        except FlowFabricError:
            return

    def _uuid(self) -> str:
        bits = self.chance.getrandbits(128)
        text = f"{bits:032x}"
        return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-8{text[17:20]}-{text[20:]}"

    # What goes wrong

    def _strike(self) -> None:
        workers = self.workers
        if not workers:
            self.start_worker()
            return
        node = self.chance.choice(workers)
        strike = self.chance.randrange(6)
        if strike == 0:
            node.kill()
            self.start_worker()
        elif strike == 1:
            node.drain()
            self.start_worker()
        elif strike == 2:
            node.freeze(self.chance.uniform(0.2, 3) * LEASE_S)
        else:
            victim = self.chance.choice([*workers, self.client])
            weather = Weather(
                refused=self.chance.choice((0.0, 0.2, 1.0)),
                answer_lost=self.chance.choice((0.0, 0.3)),
                silent=self.chance.random() < 0.3,
            )
            self._errand(self._storm(victim, weather, self.chance.uniform(0.1, 3) * LEASE_S))

    async def _storm(self, victim: Node, weather: Weather, for_s: float) -> None:
        victim.link.weather = weather
        await asyncio.sleep(for_s)
        victim.link.weather = Weather()

    # The end

    async def _settle(self) -> None:
        """Clear the weather, and wait until everything has ended."""
        for node in (*self.nodes, self.client):
            node.link.weather = Weather()
            node.link.frozen_until_s = 0.0
        while len(self.workers) < 2:
            self.start_worker()
        deadline_s = self.clock.now_s + PATIENCE_S
        open_ones: list[Asked] = self.asked
        while (self._errands or open_ones) and self.clock.now_s < deadline_s:
            await asyncio.sleep(LOOK_S)
            open_ones = [
                each
                for each in (open_ones or self.asked)
                if await self._state(each.execution_id) not in OVER
            ]
        for asked in self.asked:
            await self._judge(asked)
        if self._errands:
            self.ledger.report(f"{len(self._errands)} clients still wait for an answer")

    async def _state(self, execution_id: str) -> PublicState | None:
        found = await self.observer.describe_execution(execution_id)
        return None if found is None else found.public_state

    async def _audit(self) -> None:
        """Everything has something that moves it, at every moment."""
        cursor: str | None = None
        while True:
            page = await self.observer.audit(cursor=cursor)
            for complaint in page.complaints:
                self.ledger.report(f"{complaint.execution_id}: {complaint.detail}")
            cursor = page.cursor
            if cursor is None:
                return

    async def _judge(self, asked: Asked) -> None:
        """The job has ended, well unless an operator cancelled it, and with its result."""
        state = await self._state(asked.execution_id)
        name = f"{asked.execution_id} ({asked.kind} {asked.number})"
        expected = self._expected(asked)
        if asked.result not in (None, expected):
            self.ledger.report(f"{name}: the client got {asked.result} instead of {expected}")
        if state is None:
            if self.keeps_long:
                self.ledger.report(f"{name}: is gone")
        elif state not in OVER:
            why = await self.observer.explain_execution(asked.execution_id)
            self.ledger.report(f"{name}: never ended, it is {state}: {why}")
        else:
            outcomes = await self.observer.read_outcomes([asked.execution_id])
            outcome = outcomes[asked.execution_id]
            if state is PublicState.COMPLETED:
                if outcome.result != str(expected).encode():
                    self.ledger.report(f"{name}: returned {outcome.result!r} for {expected}")
            elif asked.execution_id not in self.ledger.touched:
                self.ledger.report(f"{name}: ended as {state}: {outcome.reason}")

    def _expected(self, asked: Asked) -> int:
        if asked.kind == "total":
            return 3 * asked.number + 3 + 6
        return self.client.program.expected[asked.kind](asked.number)


async def simulate(seed: int, operations: int, clock: VirtualClock) -> Verdict:
    """Run one world."""
    store = SqliteStore(":memory:", clock=clock)
    keep = random.Random(seed).choice(KEPT)
    observer = await Engine.open(store, EngineConfig(keep=keep, keep_failed=keep))
    world = World(seed, clock, store, observer)
    return await world.live(operations)
