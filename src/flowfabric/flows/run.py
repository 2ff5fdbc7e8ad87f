"""A started flow, as its caller sees it."""

import asyncio
import math
import time
from typing import Final, Literal, TypeVar

from rich.console import Console

from flowfabric import errors
from flowfabric.core.diagnosis import Explanation, Gist, gist
from flowfabric.core.flow_endings import NoWait, WaitTimeout
from flowfabric.core.flow_records import FlowState
from flowfabric.core.ids import FlowId, uuid_of
from flowfabric.core.policies import Duration, duration_ms
from flowfabric.core.results import CancelFlowResult
from flowfabric.core.states import TERMINAL_STATES, PublicState
from flowfabric.core.views import FlowSummary
from flowfabric.engine.engine import Engine
from flowfabric.engine.topics import COMPLETION_TOPIC
from flowfabric.flows.graph import FlowGraph, print_graph, read_graph, why_skipped
from flowfabric.flows.nodes import Node
from flowfabric.outages import statements_within
from flowfabric.parts import check_flow_in
from flowfabric.run import (
    ASK_AGAIN_S,
    REASON_TIMEOUT_S,
    TELL_AFTER_S,
    Opened,
    Run,
    find_reason,
    tell_on_log,
)
from flowfabric.terminal import open_wide_console

R = TypeVar("R")

LOOK_AGAIN_S: Final = 1.0
READ_GAP_S: Final = 0.02
"""Between two reads of a flow: a burst of endings costs few reads."""
ASKED_ABOUT_MAX: Final = 5
"""How many nodes to ask about until one needs somebody."""
ENDED: Final = (FlowState.COMPLETED, FlowState.FAILED, FlowState.CANCELLED)

CancelPolicy = Literal["cancel_all", "cancel_pending", "flow_only"]


class FlowRun:
    """A flow in the database."""

    def __init__(
        self,
        opened: Opened,
        flow_id: FlowId,
        *,
        namespace: str | None = None,
        called: str | None = None,
    ) -> None:
        """With a `namespace`, flows of other namespaces do not exist here.

        `called` is the id that the caller used.
        """
        self.flow_id = flow_id
        self._called = called or flow_id
        self._namespace = namespace
        self._opened = opened

    def __repr__(self) -> str:
        return f"<run of flow {self._called}>"

    def run(self, node: Node[R]) -> Run[R]:
        """The execution of one node."""
        if not isinstance(node, Node):
            raise errors.InvalidInput("node", "must be what flow.add returned", node)
        if node.flow_id != self.flow_id:
            raise errors.InvalidInput("node", f"belongs to another flow than {self.flow_id}", node)
        execution_id = node.execution_id(self._opened.engine.deployment.partitions)
        return Run(self._opened, node.task, execution_id, namespace=self._namespace)

    async def result(self, node: Node[R], timeout: Duration | None = None) -> R:
        """Wait for a node's end and return what its task returned; see `Run.result`.

        A node that never ran, because of how others ended, raises `ExecutionSkipped`.
        """
        run = self.run(node)
        opened = await self._checked_app()
        try:
            return await run.result(timeout)
        except errors.ExecutionSkipped as error:
            reason = await why_skipped(opened.engine, self.flow_id, run.execution_id)
            raise errors.ExecutionSkipped(run.execution_id, reason or error.reason) from None

    async def wait(self, timeout: Duration | None = None) -> FlowState:
        """Wait until every node has ended; `completed`, `failed` or `cancelled`."""
        timeout_s = None if timeout is None else duration_ms("timeout", timeout) / 1_000
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._until_ended()
        except TimeoutError:
            elapsed_ms = round((time.monotonic() - started_s) * 1_000)
            why = await self._reason((await self._checked_app()).engine)
            about = "" if why is None else f"{why.own_id or uuid_of(why.execution_id)}: {why}"
            op = f"waiting for flow {self._called}"
            raise errors.OperationTimeout(op, elapsed_ms, about) from None

    async def _until_ended(self) -> FlowState:
        opened = await self._checked_app()
        ask_at_s = time.monotonic() + TELL_AFTER_S if opened.endings.happens else math.inf
        logged: Gist | None = None
        with opened.engine.store.hints([COMPLETION_TOPIC]) as hints:
            while True:
                state = await self.state()
                if state in ENDED:
                    return state
                if await opened.endings.is_idle():
                    raise errors.ExecutionNotTerminal(
                        f"flow {self.flow_id} is {state}, and nothing happens by itself here:"
                        " `await app.drain()` runs what is ready"
                    )
                if time.monotonic() >= ask_at_s:
                    ask_at_s = time.monotonic() + ASK_AGAIN_S
                    logged = await self._log_obstacle(opened.engine, logged)
                await hints.wait(LOOK_AGAIN_S)
                await asyncio.sleep(READ_GAP_S)

    async def _log_obstacle(self, engine: Engine, logged: Gist | None) -> Gist | None:
        """Log what only people can change, unless it was `logged` last; return what it is."""
        why = await self._reason(engine)
        if why is None or not why.needs_somebody:
            return None
        obstacle = gist(why)
        if obstacle != logged:
            tell_on_log(f"flow {self._called}", why)
        return obstacle

    async def _reason(self, engine: Engine) -> Explanation | None:
        """Why nodes have not ended: the first that needs somebody, or else the first there is.

        None if the database does not say so soon.
        """
        try:
            with statements_within(REASON_TIMEOUT_S):
                page = await engine.list_flow_members(self.flow_id)
        except errors.FlowFabricError:
            return None
        left = [each for each in page.members if each.public_state not in TERMINAL_STATES]
        # Those that wait for others only say which.
        left.sort(key=lambda each: each.public_state is PublicState.WAITING_CHILDREN)
        first: Explanation | None = None
        for each in left[:ASKED_ABOUT_MAX]:
            why = await find_reason(engine, each.execution_id)
            if why is not None and why.needs_somebody:
                return why
            first = first or why
        return first

    async def state(self) -> FlowState:
        return (await self.summary()).public_flow_state

    async def summary(self) -> FlowSummary:
        """How many nodes are in which state."""
        opened = await self._checked_app()
        summary = await opened.engine.read_flow_summary(self.flow_id)
        if summary is None:
            raise errors.NotFound("flow", self._called)
        return summary

    async def cancel(
        self,
        reason: str = "cancelled by its submitter",
        *,
        policy: CancelPolicy = "cancel_all",
        wait: Duration | None = None,
    ) -> CancelFlowResult:
        """Close the flow and cancel its nodes: all, those neither with a worker nor suspended, or
        none.

        With `wait`, return once they have ended; raises `OperationTimeout` otherwise.
        """
        opened = await self._checked_app()
        mode = NoWait() if wait is None else WaitTimeout(duration_ms("wait", wait))
        return await opened.engine.cancel_flow(
            self.flow_id, reason=reason, cancellation_policy=policy, wait=mode
        )

    async def view(self) -> FlowGraph:
        """Every node and edge, as they are now."""
        opened = await self._checked_app()
        graph = await read_graph(opened.engine, self.flow_id)
        if graph is None:
            raise errors.NotFound("flow", self._called)
        return graph

    async def graph(self, *, every_node: bool = False, console: Console | None = None) -> None:
        """Print the flow as a tree, with the state of each node.

        Nodes of a large flow that look alike share a line, unless `every_node`.
        """
        graph = await self.view()
        print_graph(console or open_wide_console(), graph, every_node=every_node)

    async def _checked_app(self) -> Opened:
        """The app, once the flow is known to be in its namespace; flows never move."""
        opened = self._opened = await self._opened.on_this_loop()
        if self._namespace is not None:
            await check_flow_in(self._namespace, opened.engine, self.flow_id, called=self._called)
            self._namespace = None
        return opened
