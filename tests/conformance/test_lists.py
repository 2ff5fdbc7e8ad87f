"""Lists of executions and leases, page by page."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import EXPIRED_LEASES_PAGE_MAX, PAGE_MAX
from flowfabric.core.checks import TAG_KEY_MAX_BYTES
from flowfabric.core.ids import ExecutionId, LaneId, LeaseId, Namespace, WorkerInstanceId, uuid_of
from flowfabric.core.results import Claimed
from flowfabric.core.states import PublicState
from flowfabric.engine.reads import (
    EVERYTHING,
    ExecutionFilter,
    ExecutionPage,
    ExpiredLease,
    ExpiredLeasePage,
    SnapshotPage,
)
from flowfabric.testing import SettableClock
from tests.conformance.given import Given, new
from tests.conformance.observed import refuses, unchanged

FIRST = "00000000-0000-0000-0000-000000000000"
LAST = "ffffffff-ffff-ffff-ffff-ffffffffffff"


async def create(engine: Engine, *ids: str) -> None:
    await engine.create_executions([new(execution_id=each) for each in ids])


# By partition


async def test_a_partition_is_listed_in_order_of_ids(engine: Engine) -> None:
    ids = [ExecutionId(f"{{fp:7}}:550e8400-e29b-41d4-a716-{n:012x}") for n in range(15)]
    await create(engine, *reversed(ids), "{fp:8}:550e8400-e29b-41d4-a716-000000000000")
    pages = []
    cursor = None
    while True:
        page = await engine.list_executions(7, cursor=cursor, limit=5)
        pages.append(page)
        cursor = page.next_cursor
        if cursor is None:
            break
    assert pages == [
        ExecutionPage(executions=tuple(ids[0:5]), next_cursor=ids[4]),
        ExecutionPage(executions=tuple(ids[5:10]), next_cursor=ids[9]),
        ExecutionPage(executions=tuple(ids[10:15]), next_cursor=None),
    ]


async def test_a_partition_is_listed_of_one_namespace(engine: Engine) -> None:
    ids = [ExecutionId(f"{{fp:7}}:550e8400-e29b-41d4-a716-{n:012x}") for n in range(6)]
    for number, each in enumerate(ids):
        await engine.create_execution(
            new(execution_id=each, namespace="shop" if number % 2 else "other")
        )
    page = await engine.list_executions(7, namespace="shop", limit=2)
    rest = await engine.list_executions(7, namespace="shop", cursor=page.next_cursor)
    assert page == ExecutionPage(executions=(ids[1], ids[3]), next_cursor=ids[3])
    assert rest == ExecutionPage(executions=(ids[5],), next_cursor=None)
    assert (await engine.list_executions(7, namespace="nobody")).executions == ()


async def test_the_first_and_the_last_possible_ids_are_listed_too(engine: Engine) -> None:
    first, last = ExecutionId(f"{{fp:7}}:{FIRST}"), ExecutionId(f"{{fp:7}}:{LAST}")
    await create(engine, first, last)
    assert await engine.list_executions(7, limit=1) == ExecutionPage(
        executions=(first,), next_cursor=first
    )
    assert await engine.list_executions(7, cursor=first) == ExecutionPage(
        executions=(last,), next_cursor=None
    )
    nothing = ExecutionPage(executions=(), next_cursor=None)
    assert await engine.list_executions(7, cursor=last) == nothing
    assert await engine.list_executions(7, limit=0) == nothing
    assert await engine.list_executions(255) == nothing


async def test_a_partition_may_be_written_as_in_ids_and_a_page_has_its_limit(
    engine: Engine, given: Given
) -> None:
    await given.waiting(execution_id=f"{{fp:7}}:{FIRST}")
    listed = await engine.list_executions("{fp:7}", limit=PAGE_MAX * 5)
    assert listed == await engine.list_executions(7)
    assert listed.executions == (f"{{fp:7}}:{FIRST}",)


async def test_bad_lists_of_a_partition_are_refused(engine: Engine) -> None:
    bad: list[tuple[str, object, dict[str, object]]] = [
        ("partition", -1, {}),
        ("partition", 256, {}),
        ("partition_key", "7", {}),
        ("partition", "{b:7}", {}),
        ("partition", "{fp:256}", {}),
        ("limit", 7, {"limit": -1}),
        ("limit", 7, {"limit": None}),
        ("cursor", 7, {"cursor": "next"}),
        ("cursor", 7, {"cursor": 5}),
        ("cursor", 7, {"cursor": f"{{fp:8}}:{FIRST}"}),
    ]
    async with unchanged(engine):
        for field, partition, named in bad:
            await refuses(engine, field, "list_executions", partition, **named)


# By filter


async def found(engine: Engine, **fields: object) -> list[ExecutionId]:
    page = await engine.find_executions(structs.replace(ExecutionFilter(), **fields))
    assert page.next_cursor is None
    return [snapshot.execution_id for snapshot in page.executions]


async def test_executions_are_found_by_everything_they_are(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    times, ids = [], []
    for fields in (
        {"lane_id": "a", "execution_kind": "x", "tags": {"app.t": "1", "app.u": "1"}},
        {"lane_id": "a", "execution_kind": "y", "namespace": "n", "tags": {"app.t": "1"}},
        {"lane_id": "b", "execution_kind": "x", "namespace": "n", "tags": {"app.t": "2"}},
        {"lane_id": "b", "execution_kind": "y", "policy": {"priority": 1}},
    ):
        times.append(clock.advance("1s"))
        ids.append(await given.waiting(**fields))
    one, two, three, four = ids
    await engine.cancel_execution(two, reason="x")
    await given.claimed(three)
    both = (PublicState.CANCELLED, PublicState.ACTIVE)
    cases: list[tuple[dict[str, object], list[ExecutionId]]] = [
        ({}, [four, three, two, one]),
        ({"states": (PublicState.WAITING,)}, [four, one]),
        ({"states": both}, [three, two]),
        ({"states": ["waiting"]}, [four, one]),
        ({"states": (PublicState.FAILED,)}, []),
        ({"lane_id": "a"}, [two, one]),
        ({"lane_id": "nowhere"}, []),
        ({"execution_kind": "x"}, [three, one]),
        ({"lane_id": "b", "execution_kind": "x"}, [three]),
        ({"namespace": "n"}, [three, two]),
        ({"namespace": "n", "lane_id": "a"}, [two]),
        ({"namespace": "n", "execution_kind": "x"}, [three]),
        ({"namespace": "n", "states": both}, [three, two]),
        ({"namespace": "n", "states": (PublicState.WAITING,)}, []),
        ({"tag": ("app.t", "1")}, [two, one]),
        ({"tag": ["app.t", "2"]}, [three]),
        ({"tag": ("app.t", "")}, []),
        ({"tag": ("app.t", "1"), "namespace": "n"}, [two]),
        ({"tag": ("app.t", "1"), "lane_id": "a", "execution_kind": "x"}, [one]),
        ({"tag": ("app.t", "1"), "states": (PublicState.CANCELLED,)}, [two]),
        ({"created_after_ms": times[1]}, [four, three]),
        ({"created_before_ms": times[1]}, [one]),
        ({"created_after_ms": times[0], "created_before_ms": times[3]}, [three, two]),
        ({"namespace": "n", "created_after_ms": times[1]}, [three]),
        ({"namespace": "n", "created_before_ms": times[2]}, [two]),
        ({"tag": ("app.t", "1"), "created_after_ms": times[0]}, [two]),
        ({"tag": ("app.t", "1"), "created_before_ms": times[1]}, [one]),
    ]
    for wanted, expected in cases:
        assert await found(engine, **wanted) == expected, wanted


@pytest.mark.parametrize(
    "matching",
    [
        ExecutionFilter(),
        ExecutionFilter(namespace="n"),
        ExecutionFilter(tag=("a.b", "c")),
        ExecutionFilter(lane_id="default", states=(PublicState.WAITING,)),
    ],
    ids=["all", "namespace", "tag", "lane"],
)
async def test_what_is_found_comes_in_pages_newest_first(
    engine: Engine, given: Given, clock: SettableClock, matching: ExecutionFilter
) -> None:
    ids = []
    for number in range(7):
        # Several of one millisecond: the id decides between them.
        clock.advance(ms=1 if number % 3 == 0 else 0)
        created = await given.waiting(
            namespace="n", tags={"a.b": "c"}, execution_kind=f"kind-{number % 2}"
        )
        ids.append((clock.now_ms(), uuid_of(created), created))
    expected = [execution_id for _, _, execution_id in sorted(ids, reverse=True)]
    seen: list[ExecutionId] = []
    cursor = None
    for size in (3, 3, 1):
        page = await engine.find_executions(matching, cursor=cursor, limit=3)
        assert len(page.executions) == size
        assert all(each.tags == {"a.b": "c"} for each in page.executions)
        seen += [each.execution_id for each in page.executions]
        cursor = page.next_cursor
    assert (seen, cursor) == (expected, None)
    everything = await engine.find_executions(matching, limit=7)
    assert (len(everything.executions), everything.next_cursor) == (7, None)
    assert await engine.find_executions(matching, limit=0) == SnapshotPage(
        executions=(), next_cursor=None
    )


@pytest.mark.parametrize(
    "matching",
    [EVERYTHING, ExecutionFilter(namespace="n"), ExecutionFilter(tag=("a.b", "c"))],
    ids=["by route", "by namespace", "by tag"],
)
async def test_of_one_millisecond_and_one_uuid_the_partition_decides(
    engine: Engine, given: Given, matching: ExecutionFilter
) -> None:
    for partition in (3, 20, 1):
        await given.waiting(
            execution_id=f"{{fp:{partition}}}:{FIRST}", namespace="n", tags={"a.b": "c"}
        )
    seen: list[ExecutionId] = []
    cursor = None
    for _ in range(3):
        page = await engine.find_executions(matching, cursor=cursor, limit=1)
        seen += [each.execution_id for each in page.executions]
        cursor = page.next_cursor
    assert (seen, cursor) == ([f"{{fp:{each}}}:{FIRST}" for each in (20, 3, 1)], None)


async def test_a_state_named_twice_lists_its_executions_once(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    found = await engine.find_executions(ExecutionFilter(states=(PublicState.WAITING,) * 2))
    assert [each.execution_id for each in found.executions] == [execution_id]


async def test_what_is_found_is_described(engine: Engine, given: Given) -> None:
    running = await given.running(tags={"a.b": "c"})
    page = await engine.find_executions()
    assert page.executions == (await engine.describe_execution(running.execution_id),)


async def test_bad_filters_are_refused(engine: Engine) -> None:
    bad: list[tuple[str, dict[str, object]]] = [
        ("states", {"states": ("sleeping",)}),
        ("states", {"states": "waiting"}),
        ("states", {"states": 5}),
        ("states", {"states": (PublicState.WAITING,) * 13}),
        ("lane_id", {"lane_id": ""}),
        ("execution_kind", {"execution_kind": 5}),
        ("namespace", {"namespace": "n" * 257}),
        ("tag", {"tag": ("a.b",)}),
        ("tag", {"tag": "a.b"}),
        ("tag key", {"tag": ("", "c")}),
        ("tag key", {"tag": ("a=b", "c")}),
        ("tag key", {"tag": (" a", "c")}),
        ("tag key", {"tag": ("a" * (TAG_KEY_MAX_BYTES + 1), "c")}),
        ("tag key", {"tag": (5, "c")}),
        ("tags[a.b]", {"tag": ("a.b", 5)}),
        ("created_after_ms", {"created_after_ms": -1}),
        ("created_before_ms", {"created_before_ms": "now"}),
    ]
    async with unchanged(engine):
        for field, fields in bad:
            matching = structs.replace(ExecutionFilter(), **fields)
            await refuses(engine, field, "find_executions", matching)
            await refuses(engine, field, "cancel_matching", matching, reason="x")
            if field != "states":
                ended = structs.replace(matching, states=(PublicState.FAILED,))
                await refuses(engine, field, "replay_matching", ended)
        nothing: list[object] = [None, {"lane_id": "a"}, "default"]
        for given_filter in nothing:
            await refuses(engine, "matching", "find_executions", given_filter)
            await refuses(engine, "matching", "cancel_matching", given_filter, reason="x")
            await refuses(engine, "matching", "replay_matching", given_filter)
        for limit in (-1, PAGE_MAX + 1, "5"):
            await refuses(engine, "limit", "find_executions", limit=limit)
        last = f"{{fp:7}}:{LAST}"
        cursors: list[object] = ["", "next", "5", "5-x", f"5-{LAST}", f"-{last}"]
        cursors += [f"{'9' * 16}-{last}", f"٥-{last}", f"5-{last} ", 5]
        for cursor in cursors:
            await refuses(engine, "cursor", "find_executions", cursor=cursor)


# Expired leases


LEASES = ((10, "default"), (10, "workers-a"), (10, "default"), (20, "default"), (5, "default"))
"""Times to live and lanes; the lane decides the partition."""


def expired(claimed: Claimed) -> ExpiredLease:
    return ExpiredLease(
        execution_id=claimed.execution_id,
        namespace=claimed.namespace,
        lane_id=LaneId(claimed.lane_id),
        lease_id=LeaseId(claimed.lease_id),
        lease_epoch=claimed.lease_epoch,
        attempt_index=claimed.attempt_index,
        worker_instance_id=WorkerInstanceId(claimed.handle.worker_instance_id),
        expires_at_ms=claimed.lease_expires_at_ms,
    )


async def test_expired_leases_are_listed_noticed_or_not(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    noticed = await given.running(ttl_ms=20, namespace="n")
    overdue = await given.running(ttl_ms=10, lane_id="mail")
    live = await given.running(ttl_ms=30)
    await given.revoked()
    await given.completed()
    clock.advance(ms=20)
    await engine.mark_lease_expired_if_due(noticed.execution_id)
    leases = (expired(overdue), expired(noticed))
    async with unchanged(engine):
        assert await engine.list_expired_leases() == ExpiredLeasePage(
            leases=leases, next_cursor=None
        )
        by_namespace = await engine.list_expired_leases(namespace="n")
        assert by_namespace.leases == leases[1:]
        later = await engine.list_expired_leases(as_of_ms=clock.now_ms() + 10)
        assert later.leases == (*leases, expired(live))
        earlier = await engine.list_expired_leases(as_of_ms=clock.now_ms() - 10)
        assert earlier.leases == leases[:1]
    taken = await given.taken()
    assert taken.execution_id == noticed.execution_id
    assert (await engine.list_expired_leases()).leases == leases[:1]


async def test_expired_leases_come_in_pages(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    held = [await given.running(ttl_ms=ttl_ms, lane_id=lane) for ttl_ms, lane in LEASES]
    clock.advance(ms=20)
    order = sorted(
        held,
        key=lambda each: (
            each.lease_expires_at_ms,
            int(each.execution_id[4:-38]),
            each.execution_id,
        ),
    )
    seen: list[ExpiredLease] = []
    cursor = None
    for size in (2, 2, 1):
        page = await engine.list_expired_leases(cursor=cursor, limit=2)
        assert len(page.leases) == size
        seen += page.leases
        cursor = page.next_cursor
    assert (seen, cursor) == ([expired(each) for each in order], None)
    assert await engine.list_expired_leases(limit=0) == ExpiredLeasePage(
        leases=(), next_cursor=None
    )


async def test_bad_lists_of_leases_are_refused(engine: Engine) -> None:
    bad: list[tuple[str, object]] = [
        ("limit", -1),
        ("limit", EXPIRED_LEASES_PAGE_MAX + 1),
        ("as_of_ms", -1),
        ("as_of_ms", "now"),
        ("namespace", ""),
        ("cursor", "next"),
        ("cursor", f"5-{FIRST}"),
        ("cursor", 5),
    ]
    async with unchanged(engine):
        for field, value in bad:
            await refuses(engine, field, "list_expired_leases", **{field: value})


async def test_namespaces_are_read_by_id(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting(namespace="shop")
    assert await engine.get_execution_namespace(execution_id) == Namespace("shop")
    assert await engine.get_execution_namespace(f"{{fp:1}}:{FIRST}") is None
