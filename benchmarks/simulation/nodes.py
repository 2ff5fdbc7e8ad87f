"""The processes of the simulated system: workers that come and go, and a client."""

import asyncio
import random
from contextvars import copy_context

from benchmarks.simulation.ledger import HERE, Ledger
from benchmarks.simulation.link import Counter, Link
from benchmarks.simulation.program import Program, declare
from flowfabric import App, Engine, EngineConfig, WorkerSettings
from flowfabric.app import MEMORY_URL
from flowfabric.store.base import Store

LEASE_S = 2.0
CONCURRENCY = 8


class Linked(App):
    """An app that reaches the store over a link."""

    def __init__(self, link: Link, config: EngineConfig) -> None:
        super().__init__(MEMORY_URL, config=config)
        self._link = link
        self._engine_config = config

    async def _connect(self, pool_max: int | None = None) -> Engine:
        return await Engine.open(self._link, self._engine_config)


class Node:
    """One process: its link, its app, and its worker if it has one."""

    def __init__(
        self, store: Store, ledger: Ledger, config: EngineConfig, counter: Counter, seed: int
    ) -> None:
        self.link = Link(store, random.Random(seed), counter)
        self.app = Linked(self.link, config)
        self.program: Program = declare(self.app, ledger)
        self._seed = seed
        self._stop = asyncio.Event()
        self.working: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return not self.link.dead and self.working is not None and not self.working.done()

    def start(self) -> None:
        """Run a worker here. All that it starts knows where it is."""
        context = copy_context()
        context.run(HERE.set, self.link)
        settings = WorkerSettings(
            worker_id=f"node-{self._seed}",
            worker_instance_id=f"node-{self._seed}",
            concurrency=CONCURRENCY,
            lease_ttl=LEASE_S,
            drain_timeout="1s",
            cancel_grace="1s",
        )
        work = self.app.run_worker(settings=settings, stop=self._stop, signals=False)
        self.working = asyncio.get_running_loop().create_task(work, context=context)

    def drain(self) -> None:
        """Stop as a deploy stops it."""
        self._stop.set()

    def kill(self) -> None:
        """Never hear or say anything again."""
        self.link.dead = True

    def freeze(self, for_s: float) -> None:
        self.link.frozen_until_s = asyncio.get_running_loop().time() + for_s
