"""What people get wrong when they build flows: refused where it is written, saying what to do."""

import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from flowfabric import AllOf, AnyOf, App, EngineConfig, Quorum, testing
from flowfabric.core.flow_records import FlowState
from flowfabric.errors import (
    ExecutionSkipped,
    FlowAlreadyTerminal,
    FlowFabricError,
    IdempotencyConflict,
    InvalidInput,
    PayloadTooLarge,
)
from flowfabric.flows.builder import Flow
from flowfabric.flows.nodes import Node
from flowfabric.testing import LocalApp

shop = App("sqlite:///never-opened.db")
FLOW_ID = "01912345-6789-7abc-8def-0123456789ab"


@shop.task
async def fetch(url: str) -> str:
    if "missing" in url:
        raise LookupError(url)
    return url


@shop.task
async def both(left: str, right: str) -> str:
    return left + right


@shop.task
async def several(pages: list[str]) -> int:
    return len(pages)


@shop.task
async def by_name(pages: dict[str, str]) -> int:
    return len(pages)


@shop.task
async def nested(pages: dict[str, list[str]]) -> int:
    return len(pages)


@shop.task
async def greet(name: str) -> str:
    return name


@shop.task
async def large(size: int) -> str:
    return "x" * size


@shop.task
async def length(text: str) -> int:
    return len(text)


@pytest.fixture
async def local() -> AsyncIterator[LocalApp]:
    async with testing.engine(app=shop) as opened:
        yield opened


@dataclass
class Scene:
    flow: Flow
    a: Node[str]
    b: Node[str]
    foreign: Node[str]

    def add(self, *args: object, **given: object) -> object:
        """`flow.add` as somebody calls it who does not check types."""
        untyped: Callable[..., object] = self.flow.add
        return untyped(*args, **given)


@pytest.fixture
def scene(local: LocalApp) -> Scene:
    flow = local.flow("f")
    foreign = local.flow("g").add(fetch, "z")
    return Scene(flow, flow.add(fetch, "a"), flow.add(fetch, "b", name="second"), foreign)


Mistake = Callable[[Scene], object]


def call(task: Callable[..., object], *args: object) -> object:
    return task(*args)


MISTAKES: dict[str, tuple[Mistake, str]] = {
    "a node of another flow": (
        lambda s: s.add(length, s.foreign),
        "argument: is a node of another flow; add its task to this flow, or submit this flow when"
        " the other has ended",
    ),
    "another flow's node in a join": (
        lambda s: s.add(several, join=[s.foreign]),
        "join: is a node of another flow",
    ),
    "one node as a join": (
        lambda s: s.add(several, join=s.a),
        r"join: must be a list of nodes; write \[node\] for one",
    ),
    "a join of something else": (
        lambda s: s.add(several, join=["a"]),
        "join: must hold nodes, as flow.add returns them",
    ),
    "text as a join": (lambda s: s.add(several, join="ab"), "join: must be a list of nodes"),
    "nodes and values in one list": (
        lambda s: s.add(several, [s.a, "b"]),
        "argument pages: mixes nodes with other values; pass the other values as a separate",
    ),
    "nodes in a dict": (
        lambda s: s.add(by_name, {"a": s.a}),
        "argument pages of by_name: has a node inside; a node can be a whole argument, one of"
        " `inputs`, or in a list of nodes",
    ),
    "nodes deep inside": (
        lambda s: s.add(nested, {"a": [s.a]}),
        "argument pages of nested: has a node inside",
    ),
    "nodes in a set": (lambda s: s.add(several, {s.a}), "pages of several: has a node inside"),
    "a node in a call": (
        lambda s: s.add(call(fetch, s.a)),
        r"argument url of fetch: is a node of a flow; write flow\.add\(fetch, node\)",
    ),
    "a node in text": (
        lambda s: s.add(fetch, f"https://{s.a}"),
        "node: has no value before the flow runs; give the node itself as an argument",
    ),
    "something that cannot be stored": (
        lambda s: s.add(fetch, threading.Lock()),
        "argument url of fetch: cannot be stored: .* What can: ",
    ),
    "a value of another type": (
        lambda s: s.add(fetch, 5),
        "argument url of fetch: expected `str`, got `int`",
    ),
    "a plain function": (
        lambda s: s.add(len, "x"),
        r"add: takes a task \(what @app.task returns\) or a call of one",
    ),
    "arguments beside a call": (
        lambda s: s.add(fetch("x"), "y"),
        "add: a call has its arguments already; give the task and all of them instead",
    ),
    "an argument too few": (lambda s: s.add(both, "x"), "argument right of both: is missing"),
    "a name nobody knows": (
        lambda s: s.add(fetch, "x", lanes="slow"),
        "lanes: is neither an argument of fetch, which takes url, nor an option of add; those are"
        " budget, deadline, delay, inputs, join, lane, name, priority, tags, when",
    ),
    "an argument that is also an option": (
        lambda s: s.add(greet, name="x"),
        "name: is both an argument of greet and an option of add; give the argument by its place",
    ),
    "a result that may not come": (
        lambda s: s.add(both, s.a, s.b, when=AnyOf()),
        "argument left of both: may have no value, for the task may run without fetch; let it be"
        " None or have a default, or use `join`",
    ),
    "more than there are": (
        lambda s: s.add(several, join=[s.a, s.b], when=Quorum(3)),
        "when.k: must be at most 2, the nodes waited for",
    ),
    "none at all": (lambda s: s.add(several, join=[s.a], when=Quorum(0)), r"when.k: must be 1 to"),
    "a class for a policy": (
        lambda s: s.add(several, join=[s.a], when=AnyOf),
        r"when: must be AllOf\(\), AnyOf\(\) or Quorum\(k\)",
    ),
    "a policy without others": (
        lambda s: s.add(fetch, "x", when=AnyOf()),
        "when: applies to nodes that wait for others; this one waits for none",
    ),
    "a name twice": (
        lambda s: s.add(fetch, "x", name="second"),
        "name: is the name of another node of this flow",
    ),
    "a malformed lane": (lambda s: s.add(fetch, "x", lane="\n"), "lane_id: non-printable byte"),
    "a malformed delay": (lambda s: s.add(fetch, "x", delay="soon"), "delay: must be a duration"),
    "malformed tags": (lambda s: s.add(fetch, "x", tags={"x=y": "z"}), "tag key: must not contain"),
    "a malformed priority": (lambda s: s.add(fetch, "x", priority="high"), "priority: Expected"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_mistake_is_refused_where_it_is_made(scene: Scene, mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises(InvalidInput, match=message):
        make(scene)
    # The flow is as if nothing had been said.
    run = await scene.flow.start()
    assert [each.name for each in (await run.view()).nodes] == ["fetch", "second"]


async def test_joins_take_any_series_of_nodes(scene: Scene, local: LocalApp) -> None:
    nodes = [scene.a, scene.b]
    joined = [
        scene.add(several, nodes),
        scene.flow.add(several, join=tuple(nodes)),
        scene.add(several, join=(each for each in nodes)),
        scene.flow.add(several, join=nodes, when=AllOf()),
    ]
    run = await scene.flow.start()
    await local.drain()
    assert [await run.result(each, 1) for each in joined if isinstance(each, Node)] == [2] * 4


async def test_what_only_the_engine_can_refuse_names_the_node_and_stores_nothing() -> None:
    app = App("sqlite:///:memory:", config=EngineConfig(payload_bytes_max=100))
    app.adopt(shop)
    async with app:
        flow = app.flow("f")
        flow.add(fetch, "a")
        flow.add(fetch, "x" * 200, name="front page")
        with pytest.raises(PayloadTooLarge) as caught:
            await flow.start()
        assert caught.value.__notes__ == ["This is about the node front page."]
        assert (await app.engine.list_flows()).flows == ()


async def test_a_run_knows_its_own_nodes(scene: Scene) -> None:
    run = await scene.flow.start()
    untyped: Callable[..., object] = run.run
    with pytest.raises(InvalidInput, match="belongs to another flow"):
        untyped(scene.foreign)
    with pytest.raises(InvalidInput, match=r"node: must be what flow\.add returned"):
        untyped("fetch")


async def test_one_id_stands_for_one_graph(local: LocalApp) -> None:
    async def start(*urls: str, join: bool = True) -> None:
        flow = local.flow("f", flow_id=FLOW_ID)
        pages = [flow.add(fetch, url) for url in urls]
        flow.add(several, join=pages if join else pages[:1])
        await flow.start()

    await start("a", "b")
    await start("a", "b")
    for urls, join in ((("a",), True), (("a", "c"), True), (("a", "b"), False)):
        with pytest.raises(IdempotencyConflict, match="started with other nodes or arguments"):
            await start(*urls, join=join)
    assert (await local.flow_run(FLOW_ID).summary()).total_members == 3


async def test_a_cancelled_flow_says_that_it_takes_nothing_new(scene: Scene) -> None:
    run = await scene.flow.start()
    await run.cancel("not today", wait="5s")
    with pytest.raises(FlowAlreadyTerminal, match="is cancelled and takes nothing new"):
        await scene.flow.start()


async def test_a_skipped_node_says_for_whom(local: LocalApp) -> None:
    flow = local.flow("f")
    first = flow.add(fetch, "missing", name="front page")
    middle = flow.add(length, first)
    last = flow.add(greet, inputs={"name": middle})
    run = await flow.start()
    await local.drain()
    for node in (middle, last):
        with pytest.raises(ExecutionSkipped) as caught:
            await run.result(node, 1)
        assert caught.value.reason.startswith(
            f"skipped, because front page ({run.run(first).execution_id}) failed: LookupError"
        )
    assert await run.wait(1) is FlowState.FAILED


async def test_a_skipped_node_names_the_other_as_the_graph_does(local: LocalApp) -> None:
    flow = local.flow("f")
    flow.add(fetch, "a")
    second = flow.add(fetch, "missing")
    skipped = flow.add(length, second)
    run = await flow.start()
    await local.drain()
    with pytest.raises(ExecutionSkipped, match=r"skipped, because fetch-2 \("):
        await run.result(skipped, 1)
    assert "fetch-2" in [node.name for node in (await run.view()).nodes]


async def test_a_flow_with_an_id_of_ones_own_is_refused_by_that_id(local: LocalApp) -> None:
    for url in ("a", "b"):
        flow = local.flow("f", flow_id="nightly")
        flow.add(fetch, url)
        if url == "a":
            await flow.start()
    with pytest.raises(IdempotencyConflict, match="flow nightly was started with other nodes"):
        await flow.start()


async def test_large_results_pass_and_too_large_ones_say_what_to_do(local: LocalApp) -> None:
    flow = local.flow("f")
    passed = flow.add(length, flow.add(large, 200_000))
    pages = [flow.add(large, 1_500_000) for _ in range(3)]
    together = flow.add(several, join=pages)
    alone = flow.add(large, 5_000_000)
    after = flow.add(length, alone)
    run = await flow.start()
    await local.drain()
    assert await run.result(passed, 1) == 200_000
    for node, message in (
        (together, "inputs_too_large: .* have them keep it elsewhere and return where"),
        (alone, "the result of large is 5000002 bytes, .* keep it elsewhere and return where"),
        (after, "skipped, because large-5 .* failed: the result of large is 5000002 bytes"),
    ):
        with pytest.raises(FlowFabricError, match=message):
            await run.result(node, 1)
