"""What `ls` and `why` say about executions that wait for people and for each other."""

import re
from pathlib import Path

import pytest

from flowfabric import Engine, connect
from flowfabric.core.creation import NewExecution
from flowfabric.core.flow_joins import Dependency, Join
from flowfabric.core.policies import ExecutionPolicy, RoutingRequirements, TimeoutPolicy
from flowfabric.engine.shell import new_uuid
from flowfabric.testing import SettableClock
from tests.cli.command import run
from tests.conditions import all_of_waitpoints


async def test_signals_are_counted_and_named(engine: Engine, url: str) -> None:
    created = await engine.create_execution(NewExecution(execution_kind="contract"))
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    await engine.suspend(claimed.handle, resume_condition=all_of_waitpoints(["legal", "finance"]))
    (line,) = run("ls", url=url).lines[1:]
    assert line.split()[0] == "contract"
    assert line.endswith("0 of 2: still legal, finance")

    await engine.deliver_operator_signal(created.execution_id, "finance", signal_name="finance")
    (line,) = run("ls", url=url).lines[1:]
    assert line.endswith("1 of 2: still legal")
    why = run("why", created.execution_id, url=url).out
    assert why == "It is suspended, with 1 of 2 signals: still 'legal'.\n"


async def test_what_is_due_without_a_worker_says_so_everywhere(engine: Engine, url: str) -> None:
    now_ms = await engine.server_time_ms()
    async with await connect(url, clock=SettableClock(now_ms - 448_000)) as earlier:
        delayed = NewExecution(execution_kind="remind", delay_until_ms=now_ms - 440_000)
        execution_id = (await earlier.create_execution(delayed)).execution_id
    (line,) = run("ls", url=url).lines[1:]
    assert "delayed" in line.split()
    assert re.search(r"no worker, due 7m\d+s ago$", line)
    why = run("why", execution_id, url=url).out
    assert re.match(r"It should have started 7m\d+s ago\. No running worker has a task ", why)
    ran = run("doctor", url=url)
    assert ran.status == 1
    assert re.search(r"delayed overdue by 7m\d+s", ran.out)

    await engine.register_worker(
        ["default"],
        worker_id="w",
        worker_instance_id="w-1",
        kinds=["other"],
        liveness_ttl_ms=60_000,
    )
    assert "no worker for remind, due " in run("ls", url=url).lines[1]


async def test_what_no_worker_has_the_capabilities_for_says_so(engine: Engine, url: str) -> None:
    policy = ExecutionPolicy(
        routing_requirements=RoutingRequirements(required_capabilities=("cuda", "gpu"))
    )
    await engine.create_execution(NewExecution(execution_kind="render", policy=policy))
    await engine.create_execution(NewExecution(execution_kind="send"))
    await engine.register_worker(
        ["default"],
        worker_id="w",
        worker_instance_id="w-1",
        capabilities=["gpu"],
        liveness_ttl_ms=60_000,
    )
    lines = {line.split()[0]: line for line in run("ls", url=url).lines[1:]}
    assert lines["render"].endswith("no worker with cuda, gpu")
    assert "no worker" not in lines["send"]


async def test_doctor_warns_of_what_no_worker_serves(engine: Engine, url: str) -> None:
    policy = ExecutionPolicy(
        routing_requirements=RoutingRequirements(required_capabilities=("cuda",))
    )
    render = NewExecution(execution_kind="render", lane_id="gpu", policy=policy)
    for request in (render, render, NewExecution(execution_kind="send")):
        await engine.create_execution(request)
    alone = run("doctor", url=url, FLOWFABRIC_APP="shop:app").out
    assert "Start one: flowfabric worker shop:app\n" in alone
    assert "waiting" not in alone

    async def register(lanes: list[str], capabilities: list[str]) -> None:
        await engine.register_worker(
            lanes,
            worker_id="w",
            worker_instance_id="w-1",
            capabilities=capabilities,
            liveness_ttl_ms=60_000,
        )

    await register(["default"], [])
    ran = run("doctor", url=url, FLOWFABRIC_APP="shop:app")
    assert ran.status == 0
    assert "! waiting     2 runs wait for a worker: render in lane gpu\n" in ran.out
    assert "flowfabric worker shop:app --lane gpu --capability cuda" in " ".join(ran.out.split())
    await register(["default", "gpu"], ["cuda"])
    assert "✓ waiting     no run waits for want of a worker\n" in run("doctor", url=url).out


async def test_a_run_that_took_too_long_says_so_in_words(engine: Engine, url: str) -> None:
    now_ms = await engine.server_time_ms()
    async with await connect(url, clock=SettableClock(now_ms - 60_000)) as earlier:
        slow = NewExecution(
            execution_kind="slow",
            execution_id="slow-1",
            policy=ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout_ms=2_000)),
        )
        execution_id = (await earlier.create_execution(slow)).execution_id
        await earlier.claim(worker_id="w", worker_instance_id="w-1")
    await engine.expire_execution(execution_id, "attempt_timeout")
    ran = run("submit", "slow", "--id", "slow-1", "--wait", "5s", url=url)
    assert (ran.status, ran.err.splitlines()[-1]) == (
        1,
        "slow-1 is expired: an attempt took longer than its timeout of 2.0s",
    )
    (line,) = run("ls", url=url).lines[1:]
    assert line.endswith("an attempt took longer than its timeout")
    assert run("ls", "--json", url=url).document["failure_reason"] == "attempt_timeout"


async def test_the_first_look_for_what_was_left_behind_is_not_overdue(
    engine: Engine, url: str
) -> None:
    await engine.create_flow(new_uuid(), flow_kind="nightly", namespace="default")
    assert (await engine.next_due())["flow_audit"] < 0
    ran = run("doctor", url=url)
    assert (ran.status, "nothing is overdue" in ran.out) == (0, True)


async def test_unfinished_upstreams_are_named(engine: Engine, url: str) -> None:
    flow_id = new_uuid()
    await engine.create_flow(flow_id, flow_kind="nightly", namespace="default")
    ids = {name: engine.new_member_id(flow_id) for name in ("fetch", "parse", "report")}
    await engine.add_dependencies(
        flow_id,
        [
            Join(
                downstream_execution_id=ids["report"],
                dependencies=[
                    Dependency(upstream_execution_id=ids[name]) for name in ("fetch", "parse")
                ],
            )
        ],
        members=[
            NewExecution(
                execution_kind=name,
                execution_id=execution_id,
                tags={"flow.node": "parse the pages"} if name == "parse" else {},
            )
            for name, execution_id in ids.items()
        ],
    )
    lines = {line.split()[0]: line for line in run("ls", url=url).lines[1:]}
    assert "0 of 2: still " in lines["report"]
    assert {"fetch", "parse the pages"} <= {
        name.strip() for name in lines["report"].partition("still ")[2].split(",")
    }
    why = " ".join(run("why", ids["report"], url=url).out.split())
    assert f"fetch {ids['fetch']} (waiting)" in why


async def test_whoever_waits_for_a_submission_is_told_what_it_waits_for(
    engine: Engine, url: str
) -> None:
    ran = run("submit", "greet", "--wait", "6s", url=url)
    nobody = (
        "No running worker has a task 'greet' in lane 'default': start one that does"
        " (flowfabric worker module:app)."
    )
    # Once while it waits, and with the error at the end.
    assert " ".join(ran.err.split()).count(nobody) == 2


PROGRAM = """
from flowfabric import App

app = App()

@app.task
def greet() -> None: ...
"""


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("greet", "start one that does (flowfabric worker shop:app)."),
        ("gret", "shop:app has no task 'gret'; did you mean 'greet'?"),
    ],
)
async def test_why_names_the_program_it_was_given(
    engine: Engine, url: str, tmp_path: Path, kind: str, advice: str
) -> None:
    (tmp_path / "shop.py").write_text(PROGRAM.replace("App()", f"App({url!r})"))
    created = await engine.create_execution(NewExecution(execution_kind=kind))
    found = run("why", created.execution_id, "--app", "shop:app", cwd=tmp_path)
    assert found.out.rstrip().endswith(advice)
    waited = run("submit", "greet", "--app", "shop:app", "--wait", "1ms", cwd=tmp_path)
    assert "(flowfabric worker shop:app)" in " ".join(waited.err.split())


async def test_a_task_that_workers_do_not_have_is_named_by_why(engine: Engine, url: str) -> None:
    await engine.register_worker(
        ["default"],
        worker_id="w",
        worker_instance_id="w-1",
        kinds=["greet"],
        liveness_ttl_ms=60_000,
    )
    created = await engine.create_execution(NewExecution(execution_kind="gret"))
    assert run("why", created.execution_id, url=url).out == (
        "No running worker has a task 'gret' in lane 'default'; did you mean 'greet'?\n"
    )


async def test_the_list_says_that_a_lane_is_paused(engine: Engine, url: str) -> None:
    await engine.create_execution(NewExecution(execution_kind="greet"))
    await engine.pause_lane("default")
    assert run("ls", url=url).lines[1].endswith("lane paused")
