"""What `ls` and `why` say about executions that wait for people and for each other."""

from flowfabric import Engine
from flowfabric.core.conditions import all_of_waitpoints
from flowfabric.core.creation import NewExecution
from flowfabric.core.flow_build import Dependency, Join
from flowfabric.engine.unit import new_uuid
from tests.cli.command import run


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
