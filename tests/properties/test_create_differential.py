"""`create_ready` creates exactly what the core makes of the same requests.

Random requests that share terms go through the statement; every row that comes out is
compared with what the core makes of them. Where a route or a lane is not what it has to be,
nothing comes out.
"""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from flowfabric.core.creation import Checked, NewExecution, Terms, new_execution
from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import Execution, Lane
from flowfabric.core.states import LaneState
from flowfabric.core.transitions import Changes
from flowfabric.engine.creation import TERMS_MAX, ReadyRows
from flowfabric.engine.routes import Route, route_of
from flowfabric.store.base import Transaction
from tests.properties.world import World

LANES = ("one", "two")
POLICIES: tuple[dict[str, object] | None, ...] = (
    None,
    {"retry_policy": {"max_retries": 5}, "timeout_policy": {"attempt_timeout_ms": 7}},
    {"retention_policy": {"completed_ms": 1, "failed_ms": 2}, "priority": 3},
    {"routing_requirements": {"required_capabilities": ["b", "a"]}},
    {"routing_requirements": {"required_capabilities": ['ä"]'], "preferred_locality": "\x00"}},
)

asked = st.builds(
    NewExecution,
    execution_kind=st.sampled_from(("a", 'b "quoted" \\', "ü {}")),
    lane_id=st.sampled_from(LANES),
    namespace=st.sampled_from(("default", "shop")),
    payload_encoding=st.sampled_from((None, "json", "raw")),
    priority=st.sampled_from((None, 0, 7, 10_000)),
    creator_identity=st.sampled_from(("", "ann", "'; --")),
    policy=st.sampled_from(POLICIES),
)
batches = st.lists(asked, min_size=1, max_size=3).flatmap(
    lambda requests: st.lists(
        st.tuples(st.sampled_from(requests), st.sampled_from((b"", b"{}", b"\x00\xff", b"1" * 99))),
        min_size=1,
        max_size=6,
    )
)
Batch = list[tuple[NewExecution, bytes]]


def check_all(world: World, batch: Batch) -> list[Checked]:
    terms: dict[int, Terms] = {}
    for request, _ in batch:
        if id(request) not in terms:
            terms[id(request)] = world.engine.check_terms(request)
    return world.engine.check_payloads([(terms[id(each)], payload) for each, payload in batch])


def create(world: World, checked: Sequence[Checked], routes: dict[Route, int]) -> bool:
    rows = ReadyRows.of(checked, routes)
    assert rows is not None

    async def alone() -> bool:
        (row,) = await world.engine.store.execute_alone("create_ready", **rows.parameters)
        return bool(row["made"])

    return world.run(alone())


def found(world: World, checked: Sequence[Checked]) -> dict[ExecutionId, Execution]:
    lives, events = world.look([each.execution_id for each in checked])
    assert events == []
    assert all(life.attempts == () and life.grant is None for life in lives.values())
    return {execution_id: life.execution for execution_id, life in lives.items()}


def tuned(world: World, usual: int) -> settings:
    return settings(
        max_examples=world.examples(usual),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_creating_by_statement_is_what_the_core_makes_of_the_requests(world: World) -> None:
    @tuned(world, 150)
    @given(batch=batches)
    def check(batch: Batch) -> None:
        world.begin()
        checked = check_all(world, batch)
        world.run(world.engine.know_routes(checked))
        routes = world.engine.routes
        assert create(world, checked, routes)
        assert found(world, checked) == {
            each.execution_id: new_execution(each, routes[route_of(each.terms)], world.now_ms)
            for each in checked
        }

    check()


def test_nothing_is_created_unless_every_route_is_there_under_its_id(world: World) -> None:
    @tuned(world, 60)
    @given(batch=batches, changed=st.sampled_from(("gone", "of another kind")), data=st.data())
    def check(batch: Batch, changed: str, data: st.DataObject) -> None:
        world.begin()
        checked = check_all(world, batch)
        stranger = world.engine.check_request(NewExecution(execution_kind="other"))
        world.run(world.engine.know_routes([*checked, stranger]))
        routes = dict(world.engine.routes)
        wrong = data.draw(st.sampled_from([route_of(each.terms) for each in checked]))
        routes[wrong] = -1 if changed == "gone" else routes[route_of(stranger.terms)]
        assert not create(world, checked, routes)
        assert found(world, checked) == {}

    check()


@pytest.mark.parametrize("state", LaneState)
def test_nothing_is_created_unless_every_lane_takes_new_work(
    world: World, state: LaneState
) -> None:
    world.begin()
    requests = [NewExecution(execution_kind="a", lane_id=lane_id) for lane_id in LANES]
    checked = check_all(world, [(each, b"") for each in requests])
    world.run(world.engine.know_routes(checked))

    async def change(tx: Transaction) -> None:
        (lane,) = (await tx.lock(Lane, [("two",)])).values()
        await tx.save(Changes(updates=(structs.replace(lane, state=state),)))

    world.run(world.engine.store.transact(change))
    made = state in (LaneState.ACTIVE, LaneState.PAUSED)
    assert create(world, checked, world.engine.routes) is made
    assert len(found(world, checked)) == (2 if made else 0)


@pytest.mark.parametrize(
    "other",
    [
        {"idempotency_key": "k"},
        {"execution_id": "own"},
        {"parent_execution_id": "00000000-0000-4000-8000-000000000000"},
        {"tags": {"a": "b"}},
        {"delay_ms": 1},
        {"delay_until_ms": 1},
        {"execution_deadline_at_ms": 1},
        {"policy": {"timeout_policy": {"execution_deadline_ms": 1}}},
        {"policy": {"delay_until": 1}},
    ],
)
def test_what_is_more_than_a_ready_row_is_left_to_the_core(
    world: World, other: dict[str, object]
) -> None:
    world.begin()
    plain = NewExecution(execution_kind="a")
    requests = [plain, structs.replace(plain, **other)]
    checked = [world.engine.check_request(each) for each in requests]
    world.run(world.engine.know_routes(checked))
    assert ReadyRows.of(checked[:1], world.engine.routes) is not None
    assert ReadyRows.of(checked, world.engine.routes) is None


def test_so_are_requests_with_more_terms_than_fit_and_routes_that_are_not_known(
    world: World,
) -> None:
    world.begin()
    checked = [
        world.engine.check_request(NewExecution(execution_kind="a")) for _ in range(TERMS_MAX + 1)
    ]
    world.run(world.engine.know_routes(checked))
    assert ReadyRows.of(checked[:-1], world.engine.routes) is not None
    assert ReadyRows.of(checked, world.engine.routes) is None
    assert ReadyRows.of(checked[:-1], {}) is None
