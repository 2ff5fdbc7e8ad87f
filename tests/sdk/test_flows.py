"""Flows as programs build them, on every store."""

import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec import Struct
from rich.console import Console

from flowfabric import AllOf, AnyOf, App, Context, EngineConfig, Quorum, testing
from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.flow_records import FlowState
from flowfabric.core.states import PublicState
from flowfabric.errors import (
    ExecutionCancelled,
    ExecutionFailed,
    ExecutionSkipped,
    FlowAlreadyTerminal,
    InvalidInput,
    LaneNotAccepting,
    NotFound,
    OperationTimeout,
)
from flowfabric.testing import LocalApp
from tests.apps import working

shop = App("sqlite:///never-opened.db")


class Page(Struct):
    url: str
    words: int


@shop.task
async def fetch(ctx: Context, url: str) -> Page:
    if "missing" in url:
        raise LookupError(url)
    return Page(url, len(url))


@shop.task
def words(page: Page) -> int:
    return page.words


@shop.task
async def total(ctx: Context, title: str, counts: list[int]) -> str:
    return f"{title}: {sum(counts)} in {len(counts)}"


@shop.task
async def compare(ctx: Context, left: int, right: int, *, note: str = "none") -> list[str | int]:
    return [left, right, note]


@shop.task
async def either(left: int | None, right: int = -1) -> list[int | None]:
    return [left, right]


@shop.task
async def longest(*pages: Page) -> str:
    return max(pages, key=lambda page: page.words).url


@shop.task(executor="process")
def in_process(page: Page) -> str:
    return page.url.upper()


@shop.task
async def done() -> str:
    return "done"


@pytest.fixture
async def app(store_url: str) -> AsyncIterator[App]:
    made = App(store_url)
    made.adopt(shop)
    async with made:
        yield made


@pytest.fixture
async def local() -> AsyncIterator[LocalApp]:
    async with testing.engine(app=shop) as opened:
        yield opened


# On a worker


async def test_results_become_arguments_and_are_decoded_by_their_types(app: App) -> None:
    flow = app.flow("nightly", tags={"cms.team": "sport"})
    counts = [flow.add(words, flow.add(fetch, url)) for url in ("a", "bb", "ccc")]
    report = flow.add(total, "all", join=counts)
    run = await flow.start()
    async with working(app):
        assert await run.result(report, timeout="20s") == "all: 6 in 3"
        assert await run.wait("20s") is FlowState.COMPLETED
    assert await run.result(counts[1]) == 2
    assert await app.engine.get_flow_tag(run.flow_id, "cms.team") == "sport"


async def test_a_quorum_passes_what_there_was_and_spares_the_rest(app: App) -> None:
    flow = app.flow("nightly")
    pages = [flow.add(words(Page(url, len(url)))) for url in ("a", "bb")]
    held = flow.add(words(Page("ccc", 3)), delay="1h")
    report = flow.add(total, "some", join=[*pages, held], when=Quorum(2, cancel_remaining=True))
    run = await flow.start()
    async with working(app):
        assert await run.result(report, "20s") == "some: 3 in 2"
        with pytest.raises(ExecutionCancelled):
            await run.result(held, "20s")
        assert await run.wait("20s") is FlowState.COMPLETED


async def test_a_flow_larger_than_one_transaction_is_stored_in_parts(app: App) -> None:
    flow = app.flow("wide")
    nodes = [flow.add(done) for _ in range(BATCH_MAX + 5)]
    last = flow.add(done, join=nodes)
    run = await flow.start()
    await flow.start()
    assert (await run.summary()).total_members == BATCH_MAX + 6
    assert await run.run(last).state() is PublicState.WAITING_CHILDREN
    view = await run.view()
    assert [each.name for each in view.nodes[:2]] == ["done", "done-2"]
    assert len(view.edges) == BATCH_MAX + 5


# Arguments


async def test_one_node_may_be_several_arguments(local: LocalApp) -> None:
    flow = local.flow("f")
    count = flow.add(words(Page("a", 7)))
    twice = flow.add(compare, count, count)
    run = await flow.start()
    await local.drain()
    assert await run.result(twice, 1) == [7, 7, "none"]


async def test_nodes_by_the_names_of_parameters(local: LocalApp) -> None:
    flow = local.flow("f")
    count = flow.add(words(Page("a", 7)))
    end = flow.add(done)
    named = flow.add(compare, 1, inputs={"right": count, "note": end})
    run = await flow.start()
    await local.drain()
    assert await run.result(named, 1) == [1, 7, "done"]


async def test_nodes_for_any_number_of_arguments_and_for_a_process(local: LocalApp) -> None:
    flow = local.flow("f")
    pages = [flow.add(fetch, url) for url in ("a", "ccc", "bb")]
    best = flow.add(longest, join=pages)
    two = flow.add(longest, pages[0], pages[2])
    loud = flow.add(in_process, pages[1])
    run = await flow.start()
    # Starting a process takes a while on a busy machine.
    await local.drain(patience="60s")
    assert await run.result(best, 1) == "ccc"
    assert await run.result(two, 1) == "bb"
    assert await run.result(loud, 1) == "CCC"


async def test_a_join_without_a_parameter_only_orders(local: LocalApp) -> None:
    flow = local.flow("f")
    first = flow.add(fetch, "a")
    called = flow.add(words(Page("b", 2)), join=[first])
    last = flow.add(done, join=[first, called], when=AllOf())
    empty = flow.add(total, "nothing", join=[])
    run = await flow.start()
    assert await run.run(last).state() is PublicState.WAITING_CHILDREN
    await local.drain()
    assert await run.result(last, 1) == "done"
    assert await run.result(empty, 1) == "nothing: 0 in 0"
    assert await local.engine.read_execution_inputs(run.run(last).execution_id) == {}


async def test_what_did_not_come_is_none_or_the_default(local: LocalApp) -> None:
    flow = local.flow("f")
    left, right = (flow.add(words, flow.add(fetch, url)) for url in ("missing", "missing"))
    count = flow.add(words(Page("a", 7)))
    ran = [
        flow.add(either, left, count, when=AnyOf()),
        flow.add(either, count, right, when=AnyOf()),
    ]
    run = await flow.start()
    await local.drain()
    assert [await run.result(each, 1) for each in ran] == [[None, 7], [7, -1]]


async def test_a_result_of_another_type_than_the_parameter_names_the_argument(
    local: LocalApp,
) -> None:
    flow = local.flow("f")
    wrong = flow.add(words, inputs={"page": flow.add(done)})
    run = await flow.start()
    await local.drain()
    with pytest.raises(ExecutionFailed, match="argument page of words"):
        await run.result(wrong, 1)


async def test_results_too_large_together_fail_the_node_that_would_get_them() -> None:
    app = App("sqlite:///:memory:", config=EngineConfig(payload_bytes_max=200))
    app.adopt(shop)
    async with app, working(app):
        flow = app.flow("f")
        pages = [flow.add(words, flow.add(fetch, "x" * 40)) for _ in range(3)]
        nodes = [flow.add(fetch, "x" * 60) for _ in range(3)]
        best = flow.add(longest, join=nodes)
        run = await flow.start()
        with pytest.raises(ExecutionFailed, match=r"inputs_too_large: .* at most 200"):
            await run.result(best, "20s")
        assert [await run.result(each, "20s") for each in pages] == [40] * 3


async def test_nodes_come_before_the_start(local: LocalApp) -> None:
    flow = local.flow("f")
    with pytest.raises(InvalidInput, match="no nodes; add some first"):
        await flow.start()
    flow.add(words(Page("a", 1)))
    flow.add(fetch, "a", name="front")
    run = await flow.start()
    with pytest.raises(InvalidInput, match="has been started"):
        flow.add(done)
    assert [each.name for each in (await run.view()).nodes] == ["words", "front"]


# Watching and cancelling


async def test_failures_skip_what_depends_on_them(local: LocalApp) -> None:
    flow = local.flow("f")
    broken = flow.add(fetch, "missing")
    chain = [flow.add(words, broken)]
    for _ in range(3):
        chain.append(flow.add(words, inputs={"page": chain[-1]}))
    run = await flow.start()
    await local.drain()
    with pytest.raises(ExecutionFailed):
        await run.result(broken, 1)
    with pytest.raises(ExecutionSkipped):
        await run.result(chain[-1], 1)
    assert await run.wait(1) is FlowState.FAILED


async def test_waiting_ends_in_time() -> None:
    async with App("sqlite:///:memory:") as app:
        flow = app.flow("f")
        flow.add(done)
        run = await flow.start()
        with pytest.raises(OperationTimeout):
            await run.wait("10ms")


async def test_cancelling_ends_the_flow(local: LocalApp) -> None:
    flow = local.flow("f")
    first = flow.add(done)
    flow.add(done, join=[first])
    run = await flow.start()
    await run.cancel("not today", wait="5s")
    assert await run.wait(1) is FlowState.CANCELLED
    assert await local.drain() == 0
    with pytest.raises(FlowAlreadyTerminal):
        await flow.start()


async def test_the_same_flow_built_again_adds_nothing(local: LocalApp) -> None:
    flow_id = "01912345-6789-7abc-8def-0123456789ab"
    for _ in range(2):
        flow = local.flow("f", flow_id=flow_id)
        last = flow.add(words, flow.add(fetch, "abc"))
        run = await flow.start()
        await local.drain()
        assert await run.result(last, 1) == 3
    again = local.flow_run(flow_id)
    assert await again.state() is FlowState.COMPLETED
    assert (await again.summary()).total_members == 2
    with pytest.raises(NotFound):
        await local.flow_run(flow_id.replace("9ab", "9ac")).state()
    nope = local.flow_run("nope")
    for ask in (nope.state, nope.view, nope.cancel):
        with pytest.raises(NotFound, match=r"^flow not found: nope$"):
            await ask()


def recorder(width: int = 100) -> Console:
    return Console(width=width, record=True, file=io.StringIO(), highlight=False)


def lines(console: Console) -> list[str]:
    return [line.rstrip() for line in console.export_text().splitlines()]


async def test_a_small_graph_shows_every_node(local: LocalApp) -> None:
    flow = local.flow("nightly")
    front, back = (
        flow.add(words, flow.add(fetch, url, name=f"get {url}")) for url in ("a", "missing")
    )
    flow.add(total, "t", join=[front, back], when=AnyOf())
    run = await flow.start()
    await local.drain()
    console = recorder()
    await run.graph(console=console)
    assert lines(console) == [
        f"nightly  failed  5 of 5 ended  {run.flow_id}",
        "✓ get a        completed",
        "└─ ✓ words     completed",
        "✗ get missing  failed",
        "└─ ↷ words-2   skipped",
        "   └─ ✓ total  completed  ← 1 of words, words-2",
    ]


async def test_a_large_graph_shows_what_is_alike_together(local: LocalApp) -> None:
    flow = local.flow("nightly")
    counts = [
        flow.add(words, flow.add(fetch, f"{'missing' if n == 3 else 'page'} {n}"))
        for n in range(99)
    ]
    middle = flow.add(total, "t", join=counts, when=Quorum(90))
    flow.add(done, join=[middle])
    run = await flow.start()
    await local.drain()
    console = recorder()
    await run.graph(console=console)
    assert lines(console) == [
        f"nightly  failed  200 of 200 ended  {run.flow_id}",
        "✗ fetch ×99      98 completed, 1 failed",
        "└─ ✓ words ×99   98 completed, 1 skipped",
        "   └─ ✓ total    completed  ← 90 of words ×99",
        "      └─ ✓ done  completed",
    ]
    await run.graph(console=console, every_node=True)
    assert len(lines(console)) == 201


async def test_a_narrow_terminal_is_told_less_and_nothing_wrong(local: LocalApp) -> None:
    flow = local.flow("the nightly report")
    pages = [flow.add(fetch, url, name=f"page about {url}") for url in ("art", "music", "film")]
    report = flow.add(longest, join=pages, when=Quorum(2, cancel_remaining=True))
    flow.add(done, join=[*pages, report], name="a name that is much longer than those of others")
    run = await flow.start()
    expected = {
        100: [
            f"the nightly report  waiting  0 of 5 ended  {run.flow_id}",
            "○ page about art    waiting",
            "○ page about music  waiting",
            "○ page about film   waiting",
            "└─ · longest        waiting children"
            "  ← 2 of 3: page about art and 2 more; cancels the rest",
            "   └─ · a name that is much longer than those of others  waiting children  ← all 4",
        ],
        60: [
            "the nightly report  waiting  0 of 5 ended",
            run.flow_id,
            "○ page about art    waiting",
            "○ page about music  waiting",
            "○ page about film   waiting",
            "└─ · longest        waiting children  ← 2 of 3",
            "   └─ · a name that is much longer than those of others  wa…",
        ],
    }
    for width, shown in expected.items():
        console = recorder(width)
        await run.graph(console=console)
        assert lines(console) == shown


async def test_a_chain_too_long_to_be_indented_stands_straight(local: LocalApp) -> None:
    flow = local.flow("steps")
    node = flow.add(done)
    for _ in range(12):
        node = flow.add(done, join=[node])
    flow.add(done, join=[node], name="left")
    flow.add(done, join=[node], name="right")
    console = recorder(width=80)
    run = await flow.start()
    await run.graph(console=console)
    shown = lines(console)
    assert shown[1:4] == [
        "○ done       waiting",
        "↓ · done-2   waiting children",
        "↓ · done-3   waiting children",
    ]
    assert shown[-2:] == ["├─ · left    waiting children", "└─ · right   waiting children"]
    wide = recorder(width=200)
    await run.graph(console=wide)
    assert lines(wide)[3] == "   └─ · done-3" + " " * 34 + "waiting children"


async def test_where_there_are_only_plain_characters_only_those_are_used(
    local: LocalApp, tmp_path: Path
) -> None:
    flow = local.flow("steps")
    node = flow.add(fetch, "a", name="größe")
    flow.add(words, node)
    run = await flow.start()
    await local.drain()
    with (tmp_path / "graph.txt").open("w", encoding="ascii") as file:
        await run.graph(console=Console(width=80, file=file, highlight=False))
    assert (tmp_path / "graph.txt").read_text().splitlines() == [
        f"steps  completed  2 of 2 ended  {run.flow_id}",
        "+ gr??e     completed",
        "`- + words  completed",
    ]


async def test_a_flow_that_is_refused_leaves_nothing_behind(app: App) -> None:
    engine = app.engine
    await engine.drain_lane("default")
    flow = app.flow("refused")
    flow.add(done)
    with pytest.raises(LaneNotAccepting):
        await flow.start()
    assert not (await engine.list_flows()).flows
    await engine.resume_lane("default")
    run = await flow.start()
    assert [each.flow_id for each in (await engine.list_flows()).flows] == [run.flow_id]
