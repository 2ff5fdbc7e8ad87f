"""`create_new` creates exactly what the core makes of the same requests.

Random requests, some of which share terms, go through the statement; every row that comes out is
compared with what the core makes of them. Where a route or a lane is not what it has to be,
or somebody has a key or an id, nothing comes out.
"""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs

from flowfabric.core.checks import INSTANCE_TAG_KEY
from flowfabric.core.creation import Checked, NewExecution, Terms, new_execution, new_guard
from flowfabric.core.decisions import Changes
from flowfabric.core.events import Event, tag_events
from flowfabric.core.ids import ExecutionId, partition_of, uuid_of
from flowfabric.core.records import Execution, IdempotencyGuard, Lane
from flowfabric.core.states import LaneState
from flowfabric.engine.creation import TERMS_MAX, FreshRows
from flowfabric.engine.routes import Route, route_of
from flowfabric.store.base import Key, Reader, Transaction
from tests.properties.world import World

LANES = ("one", "two")
TIMES: tuple[dict[str, object], ...] = (
    {},
    {"delay_ms": 0},
    {"delay_ms": 500},
    {"delay_until_ms": 1},
    {"delay_until_ms": 4_000_000_000_000},
    {"execution_deadline_at_ms": 4_000_000_000_000},
    {"policy": {"timeout_policy": {"execution_deadline_ms": 70}, "dedup_window_ms": 9}},
    {"policy": {"delay_until": 4_000_000_000_000}},
)
TAGS: tuple[dict[str, str], ...] = (
    {},
    {"z.last": "1", "a.first": "ü \\", "empty": ""},
    {INSTANCE_TAG_KEY: "i-1"},
)
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
several = st.builds(
    lambda request, times, tags: structs.replace(request, tags=tags, **times),
    asked,
    st.sampled_from(TIMES),
    st.sampled_from(TAGS),
)
wholes = st.lists(
    st.tuples(
        several,
        st.sampled_from((None, "key", "ünïcode 'key'")),
        st.sampled_from((None, "own", "other own")),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
    unique_by=(
        lambda each: (each[0].namespace, each[1]) if each[1] else object(),
        lambda each: (each[0].namespace, each[2]) if each[2] else object(),
    ),
)
Whole = list[tuple[NewExecution, str | None, str | None, bool]]
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
    rows = FreshRows.of(checked, routes)
    assert rows is not None

    async def alone() -> bool:
        (row,) = await world.engine.store.execute_alone("create_new", **rows.parameters)
        return bool(row["made"])

    return world.run(alone())


def found(world: World, checked: Sequence[Checked]) -> dict[ExecutionId, Execution]:
    lives, events = world.look([each.execution_id for each in checked])
    assert events == []
    assert all(life.attempts == () and life.grant is None for life in lives.values())
    return {execution_id: life.execution for execution_id, life in lives.items()}


_examples = itertools.count()


def of_its_own(whole: Whole) -> Whole:
    """The same with names that no other example has."""
    number = next(_examples)
    return [
        (
            request,
            None if key is None else f"{key} {number}",
            None if own_id is None else f"{own_id} {number}",
            has_parent,
        )
        for request, key, own_id, has_parent in whole
    ]


def asked_by(world: World, whole: Whole, parents: dict[str, ExecutionId]) -> list[Checked]:
    """Requests with keys, ids and parents of their own."""
    return [
        world.engine.check_request(
            structs.replace(
                request,
                idempotency_key=key,
                execution_id=own_id,
                parent_execution_id=parents[request.namespace] if has_parent else None,
            )
        )
        for request, key, own_id, has_parent in whole
    ]


class Belongings(Struct, frozen=True):
    """What was written beside executions."""

    tags: list[tuple[str, str, str]]
    guards: dict[Key, IdempotencyGuard]


def belongings(world: World, checked: Sequence[Checked]) -> Belongings:
    async def body(reader: Reader) -> Belongings:
        rows = await reader.select(
            "tags_of_executions",
            partition_keys=[partition_of(each.execution_id) for each in checked],
            execution_ids=[uuid_of(each.execution_id) for each in checked],
        )
        keys = [
            (each.terms.namespace, each.idempotency_key) for each in checked if each.idempotency_key
        ]
        return Belongings(
            tags=sorted(
                (str(row["execution_id"]), str(row["tag_key"]), str(row["tag_value"]))
                for row in rows
            ),
            guards=await reader.get(IdempotencyGuard, keys) if keys else {},
        )

    return world.run(world.engine.store.read(body))


def expected_belongings(checked: Sequence[Checked], now_ms: int) -> Belongings:
    guards = [new_guard(each, now_ms) for each in checked if each.idempotency_key]
    return Belongings(
        tags=sorted(
            (uuid_of(each.execution_id), key, value)
            for each in checked
            for key, value in each.terms.tags.items()
        ),
        guards={(each.namespace, each.idempotency_key): each for each in guards},
    )


def by_execution(events: Sequence[Event]) -> dict[ExecutionId, list[Event]]:
    told: dict[ExecutionId, list[Event]] = {}
    for event in events:
        told.setdefault(event.execution_id, []).append(event)
    return told


def new_parents(world: World) -> dict[str, ExecutionId]:
    return {
        namespace: world.run(
            world.engine.create_execution(NewExecution(execution_kind="p", namespace=namespace))
        ).execution_id
        for namespace in ("default", "shop")
    }


def test_keys_ids_parents_tags_and_times_are_what_the_core_makes_of_them(world: World) -> None:
    @tuned(world, 150)
    @given(whole=wholes)
    def check(whole: Whole) -> None:
        world.begin()
        checked = asked_by(world, of_its_own(whole), new_parents(world))
        world.run(world.engine.know_routes(checked))
        world.look([])
        assert create(world, checked, world.engine.routes)
        lives, events = world.look([each.execution_id for each in checked])
        wanted = {
            each.execution_id: new_execution(
                each, world.engine.routes[route_of(each.terms)], world.now_ms
            )
            for each in checked
        }
        assert {key: life.execution for key, life in lives.items()} == wanted
        assert belongings(world, checked) == expected_belongings(checked, world.now_ms)
        assert by_execution(events) == by_execution(
            [
                event
                for each in checked
                for event in tag_events(wanted[each.execution_id], each.terms.tags, world.now_ms)
            ]
        )

    check()


def test_nothing_is_created_where_somebody_has_a_key_or_an_id_or_the_parent_is_elsewhere(
    world: World,
) -> None:
    @tuned(world, 60)
    @given(whole=wholes, data=st.data())
    def check(whole: Whole, data: st.DataObject) -> None:
        world.begin()
        parents, whole = new_parents(world), of_its_own(whole)
        place = data.draw(st.integers(0, len(whole) - 1))
        request, key, own_id, _ = whole[place]
        what = data.draw(
            st.sampled_from(("parent", *(["key"] * bool(key)), *(["id"] * bool(own_id))))
        )
        if what == "parent":
            other = {"default": parents["shop"], "shop": parents["default"]}
            whole = [(*each[:3], at == place) for at, each in enumerate(whole)]
            checked = asked_by(world, whole, other)
        else:
            checked = asked_by(world, whole, parents)
            before = NewExecution(
                execution_kind="before",
                namespace=request.namespace,
                idempotency_key=key if what == "key" else None,
                execution_id=own_id if what == "id" else None,
            )
            world.run(world.engine.create_execution(before))
        world.run(world.engine.know_routes(checked))
        lives, _ = world.look([each.execution_id for each in checked])
        kept = belongings(world, checked)
        assert not create(world, checked, world.engine.routes)
        after, events = world.look([each.execution_id for each in checked])
        assert (after, belongings(world, checked), events) == (lives, kept, [])

    check()


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


@pytest.mark.parametrize("named", [{"idempotency_key": "k"}, {"execution_id": "own"}])
def test_a_key_or_an_id_that_comes_twice_is_left_to_the_core(
    world: World, named: dict[str, object]
) -> None:
    world.begin()
    request = structs.replace(NewExecution(execution_kind="a"), **named)
    plain = NewExecution(execution_kind="a")
    checked = [world.engine.check_request(each) for each in (plain, plain, request, request)]
    world.run(world.engine.know_routes(checked))
    assert FreshRows.of(checked[:-1], world.engine.routes) is not None
    assert FreshRows.of(checked, world.engine.routes) is None


def test_so_are_requests_with_more_terms_than_fit_and_routes_that_are_not_known(
    world: World,
) -> None:
    world.begin()
    checked = [
        world.engine.check_request(NewExecution(execution_kind="a")) for _ in range(TERMS_MAX + 1)
    ]
    world.run(world.engine.know_routes(checked))
    assert FreshRows.of(checked[:-1], world.engine.routes) is not None
    assert FreshRows.of(checked, world.engine.routes) is None
    assert FreshRows.of(checked[:-1], {}) is None
