"""Namespaces share a database and see nothing of each other."""

import pytest

from flowfabric import Engine
from flowfabric.core.states import PublicState
from flowfabric.engine.unit import new_uuid
from flowfabric.errors import InvalidInput, InvalidToken, NotFound
from tests.conformance.given import OTHER_WORKER, WORKER, Given


async def test_a_claim_takes_what_is_in_its_namespace_and_no_more(
    engine: Engine, given: Given
) -> None:
    """The same lane, kind and capabilities: only the namespace tells them apart."""
    ours = await given.waiting(namespace="shop")
    theirs = await given.waiting(namespace="bank", priority=5)

    claimed = await engine.claim_many(["default"], limit=5, namespace="shop", **WORKER)
    assert [each.execution_id for each in claimed] == [ours]
    assert await engine.claim(namespace="cinema", **WORKER) is None
    assert await engine.read_execution_state(theirs) is PublicState.WAITING


async def test_a_claim_without_a_namespace_takes_from_all(engine: Engine, given: Given) -> None:
    both = {await given.waiting(namespace="shop"), await given.waiting(namespace="bank")}

    claimed = await engine.claim_many(["default"], limit=5, **WORKER)
    assert {each.execution_id for each in claimed} == both


async def test_a_worker_of_another_namespace_serves_nothing_here(
    engine: Engine, given: Given
) -> None:
    execution_id = await given.waiting(namespace="shop")
    await engine.report_presence(["default"], namespace="bank", **WORKER)
    assert (await engine.explain_execution(execution_id)).cause == "no_worker"

    await engine.report_presence(["default"], namespace="shop", **WORKER)
    assert (await engine.explain_execution(execution_id)).cause == "queued"
    await engine.report_presence(["default"], namespace="bank", **WORKER)
    await engine.report_presence(["default"], **OTHER_WORKER)
    assert (await engine.explain_execution(execution_id)).cause == "queued"


async def test_a_signal_for_another_namespace_finds_nothing(engine: Engine, given: Given) -> None:
    running = await given.running(namespace="shop")
    made = await engine.create_waitpoint(running.handle, "go", expires_in_ms=60_000)
    at = (running.execution_id, made.waitpoint_id)

    with pytest.raises(NotFound):
        await engine.deliver_operator_signal(
            running.execution_id, "go", signal_name="go", namespace="bank"
        )
    with pytest.raises(InvalidToken):
        await engine.deliver_signal(
            *at, waitpoint_token=made.waitpoint_token, signal_name="go", namespace="bank"
        )
    await engine.deliver_signal(
        *at, waitpoint_token=made.waitpoint_token, signal_name="go", namespace="shop"
    )


async def test_the_inbox_can_be_that_of_one_namespace(engine: Engine, given: Given) -> None:
    waiting: dict[str, list[str]] = {}
    for namespace in ("shop", "bank", "shop"):
        suspended = await given.suspended(namespace=namespace)
        waiting.setdefault(namespace, []).append(suspended.execution_id)

    async def inbox(namespace: str | None) -> list[str]:
        found: list[str] = []
        cursor: str | None = None
        while True:
            page = await engine.list_inbox(namespace=namespace, cursor=cursor, limit=1)
            found += [each.execution_id for each in page.entries]
            cursor = page.next_cursor
            if cursor is None:
                return found

    assert await inbox("shop") == waiting["shop"]
    assert await inbox("bank") == waiting["bank"]
    assert len(await inbox(None)) == 3


async def test_flows_are_listed_by_namespace(engine: Engine) -> None:
    flows = {name: new_uuid() for name in ("shop", "bank")}
    for name, flow_id in flows.items():
        await engine.create_flow(flow_id, flow_kind="nightly", namespace=name)

    page = await engine.list_flows(namespace="shop")
    assert [each.flow_id for each in page.flows] == [flows["shop"]]
    assert await engine.get_flow_namespace(flows["bank"]) == "bank"
    assert await engine.get_flow_namespace(new_uuid()) is None
    with pytest.raises(InvalidInput, match="namespace"):
        await engine.list_flows(0, namespace="shop")
