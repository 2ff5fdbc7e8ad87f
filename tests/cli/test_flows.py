"""`flowfabric flow`, as scripts and people use it."""

import json

import pytest

from flowfabric import App, Context, FlowRun
from tests.cli.command import COMMAND, run, run_on_terminal

shop = App("sqlite:///never-opened.db")


@shop.task
async def fetch(ctx: Context, url: str) -> str:
    return url


@shop.task
async def collect(ctx: Context, pages: list[str]) -> int:
    return len(pages)


@pytest.fixture
async def flow(url: str) -> FlowRun:
    app = App(url)
    app.adopt(shop)
    async with app:
        building = app.flow("nightly")
        pages = [building.add(fetch, each, name=f"page {each}") for each in ("a", "b")]
        building.add(collect, join=pages)
        return await building.start()


async def test_flows_are_listed_newest_first(flow: FlowRun, url: str) -> None:
    async with App(url) as app:
        second = app.flow("weekly")
        second.add(fetch, "a")
        newer = await second.start()
    ran = run("flow", "ls", "--json", url=url)
    assert (ran.status, ran.err) == (0, "")
    assert [(each["flow_id"], each["flow_kind"], each["status"]) for each in ran.documents] == [
        (newer.flow_id, "weekly", "active"),
        (flow.flow_id, "nightly", "active"),
    ]
    assert run("flow", "ls", "--json", "--state", "failed", url=url) == (0, "", "")
    assert run("flow", "ls", "--json", "--state", "active", url=url).documents == ran.documents
    (listed,) = run("flow", "ls", "--json", "-n", "1", url=url).documents
    assert listed["flow_id"] == newer.flow_id


async def test_the_newest_flows_are_listed_whatever_their_ids(url: str) -> None:
    names = [f"night {number}" for number in range(8)]
    async with App(url) as app:
        for name in names:
            building = app.flow(name, flow_id=name)
            building.add(fetch, "a")
            await building.start()
    for count in (1, 3):
        ran = run("flow", "ls", "--json", "-n", str(count), url=url)
        assert [each["flow_kind"] for each in ran.documents] == names[: -count - 1 : -1]


async def test_a_flow_is_shown_as_a_graph(flow: FlowRun, url: str) -> None:
    ran = run("flow", "show", flow.flow_id[-12:], url=url)
    assert (ran.status, ran.err) == (0, "")
    assert ran.lines == [
        f"nightly  waiting  0 of 3 ended  {flow.flow_id}",
        "○ page a      waiting",
        "○ page b      waiting",
        "└─ · collect  waiting children  ← page a, page b",
    ]
    document = run("flow", "show", flow.flow_id, "--json", url=url).document
    nodes = json.loads(json.dumps(document["nodes"]))
    assert [(each["name"], each["public_state"]) for each in nodes] == [
        ("page a", "waiting"),
        ("page b", "waiting"),
        ("collect", "waiting_children"),
    ]
    assert nodes[2]["upstreams"] == [each["execution_id"] for each in nodes[:2]]
    assert document["edge_count"] == 2


async def test_a_flow_is_cancelled_with_its_members(flow: FlowRun, url: str) -> None:
    ran = run("flow", "cancel", flow.flow_id, "--wait", "5s", "--json", url=url)
    assert (ran.status, ran.err) == (0, "")
    assert ran.document == {
        "flow_id": flow.flow_id,
        "cancellation_policy": "cancel_all",
        "members": 3,
        "underway": False,
        "refused": [],
    }
    assert {each["public_state"] for each in run("ls", "--json", url=url).documents} == {
        "cancelled"
    }
    listed = run_on_terminal((*COMMAND, "flow", "ls", "--url", url))
    assert listed.lines[1].split()[1:3] == ["cancelled", "nightly"]


async def test_cancelling_only_the_flow_leaves_its_members(flow: FlowRun, url: str) -> None:
    ran = run("flow", "cancel", flow.flow_id, "--policy", "flow_only", url=url)
    assert (ran.status, ran.out) == (0, f"flow {flow.flow_id} closed, 0 members cancelled\n")
    states = [each["public_state"] for each in run("ls", "--json", url=url).documents]
    assert sorted(map(str, states)) == ["waiting", "waiting", "waiting_children"]


async def test_what_makes_no_sense_is_told_apart(flow: FlowRun, url: str) -> None:
    assert run("flow", "show", "ffffffff", url=url).status == 3
    assert run("flow", "show", "01912345-6789-7abc-8def-0123456789ab", url=url).status == 3
    assert run("flow", "cancel", flow.flow_id, "--policy", "some", url=url).status == 2
    assert run("flow", "cancel", flow.flow_id, "--wait", "soon", url=url).status == 2


@pytest.mark.parametrize("called", ["x", "zzz", "nightly-1"])
async def test_a_flow_nobody_built_is_not_found(flow: FlowRun, url: str, called: str) -> None:
    ran = run("flow", "show", called, url=url)
    assert (ran.status, ran.out) == (3, "")
    assert f"flow not found: {called}" in ran.err
