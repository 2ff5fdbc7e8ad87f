"""The real command, about code that changes: blocked runs, versions, and all there is to see."""

from pathlib import Path

from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from flowfabric.core.records import FailedStep
from flowfabric.core.states import FailureClass, PublicState
from flowfabric.core.steps import NewStep
from flowfabric.engine.steps import StepReport
from tests.cli.command import run


async def create(engine: Engine, kind: str = "work") -> str:
    return (await engine.create_execution(NewExecution(execution_kind=kind))).execution_id


# Blocked by changed code


async def blocked(engine: Engine) -> str:
    execution_id = await create(engine, kind="publish")
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1", kinds=["publish"])
    assert claimed is not None
    await engine.block_on_code(claimed.handle, "notify", "the code asks for step 'notify'")
    return execution_id


async def test_a_blocked_execution_says_so_everywhere_and_is_accepted(
    engine: Engine, url: str
) -> None:
    execution_id = await blocked(engine)
    (line,) = run("ls", url=url).lines[1:]
    assert "blocked" in line.split()
    assert "the code asks for step 'notify'; deploy code that fits" in line
    document = run("show", execution_id, "--json", url=url).document
    assert run("ls", "--json", url=url).document["blocked"] is document["blocked"] is True
    assert document["public_state"] == "delayed"
    attempt = run("show", execution_id, url=url).lines[-1].split()
    assert attempt[:3] == ["1", "initial", "blocked"]
    why = run("why", execution_id, url=url).out
    assert f"flowfabric accept {execution_id[-36:]}" in " ".join(why.split())
    assert run("accept", execution_id[-36:], url=url).out == "1 accepted\n"
    assert await engine.read_execution_state(execution_id) is PublicState.WAITING
    assert run("ls", "--json", url=url).document["blocked"] is False


async def test_accept_with_a_filter_means_what_is_blocked(engine: Engine, url: str) -> None:
    ids = [await blocked(engine) for _ in range(2)]
    delayed = NewExecution(execution_kind="publish", delay_until_ms=2**45)
    await engine.create_execution(delayed)
    ran = run("accept", "--kind", "publish", "--yes", "--json", url=url)
    assert (ran.status, ran.document) == (0, {"accepted": 2, "refused": {}})
    for execution_id in ids:
        assert await engine.read_execution_state(execution_id) is PublicState.WAITING


async def test_what_is_not_blocked_has_nothing_to_accept(engine: Engine, url: str) -> None:
    ran = run("accept", await create(engine), url=url)
    assert (ran.status, ran.out) == (4, "0 accepted\n")
    assert "only an execution that changed code has blocked" in " ".join(ran.err.split())


async def test_ls_finds_what_is_blocked_as_it_shows_it(engine: Engine, url: str) -> None:
    stopped = await blocked(engine)
    await engine.create_execution(NewExecution(execution_kind="publish", delay_until_ms=2**45))

    listed = run("ls", "--state", "blocked", "--json", url=url).documents
    assert [each["execution_id"] for each in listed] == [stopped]
    assert len(run("ls", "--state", "blocked", "--state", "delayed", url=url).lines) == 3
    ran = run("cancel", "--state", "blocked", "--yes", url=url)
    assert ran.out == "1 cancelled\n"


async def test_the_way_out_names_the_id_people_chose(engine: Engine, url: str) -> None:
    await engine.create_execution(NewExecution(execution_kind="publish", execution_id="order 1"))
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1", kinds=["publish"])
    assert claimed is not None
    await engine.block_on_code(claimed.handle, "notify", "the code asks for step 'notify'")

    why = " ".join(run("why", "order 1", url=url).out.split())
    assert "flowfabric accept 'order 1'" in why


async def test_a_parent_names_what_it_waits_for(engine: Engine, url: str) -> None:
    await create(engine, kind="order")
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1", kinds=["order"])
    assert claimed is not None
    child = await create(engine, kind="charge")
    await engine.await_executions(claimed.handle, [child])

    out = run("ls", "--kind", "order", url=url).out
    assert f"waiting for charge {child[-36:]}" in out


# Versions of a task


async def test_ls_tells_what_still_runs_on_an_old_version(engine: Engine, url: str) -> None:
    for kind in ("publish", "publish", "publish@2", "other"):
        await create(engine, kind=kind)
    ran = run("ls", "--kind", "publish", url=url)
    assert len(ran.lines) == 4
    assert any("publish@2" in line.split() for line in ran.lines)
    assert "publish: 2 on version 1 not ended, the newest is 2" in ran.err
    assert len(run("ls", "--kind", "publish@1", url=url).lines) == 3


async def test_ls_finds_what_has_not_ended(engine: Engine, url: str) -> None:
    left = [await create(engine), await blocked(engine)]
    await engine.cancel_execution(await create(engine), reason="not needed")
    listed = run("ls", "--state", "unfinished", "--json", url=url).documents
    assert {str(each["execution_id"]) for each in listed} == set(left)


def test_submitting_by_name_takes_the_newest_version(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from flowfabric import App\n"
        f"app = App('sqlite:///{tmp_path}/shop.db')\n"
        "@app.task\n"
        "async def publish(article: int) -> None: ...\n"
        "@app.task(name='publish', version=2)\n"
        "async def publish_2(article: int, channel: str) -> None: ...\n"
    )
    target = ("--app", "shop:app")
    assert run("migrate", *target, cwd=tmp_path).status == 0
    assert run("submit", "publish", '{"article": 1}', *target, cwd=tmp_path).status == 2
    both = '{"article": 1, "channel": "web"}'
    assert run("submit", "publish", both, *target, cwd=tmp_path).status == 0
    assert run("submit", "publish@1", '{"article": 1}', *target, cwd=tmp_path).status == 0
    listed = run("ls", "--json", *target, cwd=tmp_path).documents
    assert [each["execution_kind"] for each in listed] == ["publish", "publish@2"]


# All that belongs to an execution


async def test_show_lists_steps_children_parent_and_tracebacks(engine: Engine, url: str) -> None:
    parent = await create(engine, kind="order")
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1", kinds=["order"])
    assert claimed is not None
    step = NewStep(step_key="charge", result=b'{"receipt": 7}')
    await engine.record_steps([StepReport(handle=claimed.handle, step=step)])
    child = await engine.create_execution(
        NewExecution(execution_kind="mail", parent_execution_id=parent)
    )
    hostile = "Traceback:\n  File shop.py\n\x1b[2Jboom"
    await engine.fail(
        claimed.handle, "boom", failure_class=FailureClass.PERMANENT, traceback=hostile
    )
    shown = run("show", parent, url=url)
    for expected in ("charge", '{"receipt":7}', child.execution_id[-36:], "mail", "  File shop.py"):
        assert expected in shown.out
    assert "\\x1b[2Jboom" in shown.out
    assert "\x1b" not in shown.out
    document = run("show", parent, "--json", url=url).document
    steps, attempts, children = document["steps"], document["attempts"], document["children"]
    assert isinstance(steps, list)
    assert (steps[0]["name"], steps[0]["result"]) == ("charge", {"receipt": 7})
    assert isinstance(attempts, list)
    assert attempts[0]["failure_traceback"] == hostile
    assert isinstance(children, list)
    assert [each["execution_id"] for each in children] == [child.execution_id]
    assert parent in run("show", child.execution_id, url=url).out


async def test_show_and_why_name_the_step_that_failed(engine: Engine, url: str) -> None:
    order = await create(engine, kind="order")
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1", kinds=["order"])
    assert claimed is not None
    failed = FailedStep(step_key="charge#2", name="charge", error="ValueError: \x1b[2Jno")
    await engine.fail(claimed.handle, "no order", failure_class=FailureClass.PERMANENT, step=failed)
    shown = run("show", order, url=url)
    assert "It failed at step 'charge': no order." in shown.out
    steps, attempts = (
        next(line for line in shown.out.splitlines() if name in line)
        for name in ("ValueError", "ended failure")
    )
    assert steps.split()[0] == "charge"
    assert "\\x1b[2Jno" in steps
    assert attempts.endswith("step charge: no order")
    assert run("why", order, url=url).out.strip() == ("It failed at step 'charge': no order.")
    document = run("show", order, "--json", url=url).document
    assert isinstance(document["attempts"], list)
    assert document["attempts"][0]["failed_step_key"] == "charge#2"
