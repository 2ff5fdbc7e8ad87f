"""Namespaces share a database and see nothing of each other."""

import pytest

from flowfabric import Engine
from flowfabric.core.results import AlreadyMember, Duplicate
from flowfabric.core.states import PublicState
from flowfabric.engine.shell import new_uuid
from flowfabric.errors import IdempotencyConflict, InvalidInput, NotFound
from tests.conformance.given import NOBODY, OTHER_WORKER, WORKER, Given, new
from tests.conformance.observed import refused


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
    await engine.register_worker(["default"], namespace="bank", **WORKER, liveness_ttl_ms=60_000)
    assert (await engine.explain_execution(execution_id)).cause == "no_worker"

    await engine.register_worker(["default"], namespace="shop", **WORKER, liveness_ttl_ms=60_000)
    assert (await engine.explain_execution(execution_id)).cause == "queued"
    await engine.mark_worker_dead(WORKER["worker_instance_id"], namespace="shop")
    assert (await engine.explain_execution(execution_id)).cause == "no_worker"
    await engine.register_worker(["default"], **OTHER_WORKER, liveness_ttl_ms=60_000)
    assert (await engine.explain_execution(execution_id)).cause == "queued"


async def test_a_signal_for_another_namespace_finds_nothing(engine: Engine, given: Given) -> None:
    running = await given.running(namespace="shop")
    made = await engine.create_waitpoint(running.handle, "go", expires_in_ms=60_000)
    at = (running.execution_id, made.waitpoint_id)

    with pytest.raises(NotFound):
        await engine.deliver_operator_signal(
            running.execution_id, "go", signal_name="go", namespace="bank"
        )
    with pytest.raises(NotFound):
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


# Ids that another namespace has


@pytest.mark.parametrize("form", ["full", "uuid"])
async def test_an_id_of_another_namespace_is_taken_and_nothing_more(
    engine: Engine, given: Given, form: str
) -> None:
    theirs = await given.waiting(namespace="bank", input_payload=b"secret", lane_id="vault")
    await given.waiting(namespace="shop")
    asked = theirs if form == "full" else theirs[-36:]
    request = new(namespace="shop", execution_id=asked)
    for requests in ([request], [new(namespace="shop"), request]):
        async with refused(engine, IdempotencyConflict) as refusal:
            await engine.create_executions(requests)
        assert str(refusal.value) == f"execution id {theirs} is taken; give another, or none"
    own = new(namespace="bank", execution_id=asked)
    assert await engine.create_execution(own) == Duplicate(execution_id=theirs)


async def test_one_batch_cannot_have_an_id_in_two_namespaces(engine: Engine, given: Given) -> None:
    for namespace in ("shop", "bank"):
        await given.waiting(namespace=namespace)
    asked = [new(namespace=namespace, execution_id=NOBODY) for namespace in ("shop", "bank")]
    async with refused(engine, IdempotencyConflict):
        await engine.create_executions(asked)


async def test_a_parent_of_another_namespace_does_not_exist(engine: Engine, given: Given) -> None:
    await given.waiting(namespace="shop")
    theirs = await given.waiting(namespace="bank")
    async with refused(engine, NotFound):
        await engine.create_execution(new(namespace="shop", parent_execution_id=theirs))


async def test_nobody_waits_for_executions_of_another_namespace(
    engine: Engine, given: Given
) -> None:
    running = await given.running(namespace="shop")
    theirs = await given.waiting(namespace="bank")
    async with refused(engine, NotFound):
        await engine.await_executions(running.handle, [theirs])


async def test_a_flow_has_members_of_its_own_namespace_alone(engine: Engine, given: Given) -> None:
    flow_id = new_uuid()
    await engine.create_flow(flow_id, flow_kind="nightly", namespace="shop")
    theirs = engine.new_member_id(flow_id)
    ours = engine.new_member_id(flow_id)
    await engine.create_executions(
        [new(namespace="bank", execution_id=theirs), new(namespace="shop", execution_id=ours)]
    )
    async with refused(engine, NotFound):
        await engine.add_execution_to_flow(flow_id, theirs)
    async with refused(engine, NotFound):
        await engine.add_dependencies(flow_id, members=[theirs])
    fresh = engine.new_member_id(flow_id)
    async with refused(engine, InvalidInput):
        await engine.add_dependencies(flow_id, members=[new(namespace="bank", execution_id=fresh)])
    async with refused(engine, IdempotencyConflict):
        await engine.add_dependencies(flow_id, members=[new(namespace="shop", execution_id=theirs)])
    await engine.add_execution_to_flow(flow_id, ours)
    assert await engine.add_execution_to_flow(flow_id, ours) == AlreadyMember(
        execution_id=ours, node_count=1
    )


async def test_a_flow_of_another_namespace_is_taken(engine: Engine) -> None:
    flow_id = new_uuid()
    await engine.create_flow(flow_id, flow_kind="nightly", namespace="bank")
    with pytest.raises(IdempotencyConflict, match="is taken"):
        await engine.create_flow(flow_id, flow_kind="nightly", namespace="shop")
