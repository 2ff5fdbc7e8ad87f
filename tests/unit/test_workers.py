"""Who counts as there, and who serves what."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flowfabric.core.ids import LaneId, Namespace, WorkerId, WorkerInstanceId
from flowfabric.core.leases import WorkerIdentity
from flowfabric.core.workers import (
    EVERYWHERE,
    STOPPED,
    LaneShares,
    LaneWeights,
    Need,
    NotRegistered,
    Offer,
    Refreshed,
    Registered,
    RegisteredWorker,
    WorkerEvent,
    WorkerEventKind,
    check_dead_reason,
    check_liveness,
    decide_heartbeat,
    decide_register,
    entry,
    outlived,
    serves,
)
from flowfabric.errors import InvalidInput

NOW_MS = 1_000_000
OFFER = Offer(
    worker=WorkerIdentity(worker_id=WorkerId("w"), worker_instance_id=WorkerInstanceId("w-1")),
    namespace=None,
    lanes=(LaneId("a"), LaneId("b")),
    kinds=("send", "render"),
    capabilities=("cuda", "gpu"),
    liveness_ttl_ms=500,
)


def registered(offer: Offer = OFFER, before: RegisteredWorker | None = None) -> RegisteredWorker:
    changes = decide_register(before, offer, NOW_MS).changes
    (worker,) = changes.inserts or changes.updates
    assert isinstance(worker, RegisteredWorker)
    return worker


@pytest.mark.parametrize(
    ("before_ms", "answer"),
    [
        (None, Registered(expires_at_ms=NOW_MS + 500)),
        (NOW_MS + 1, Refreshed(expires_at_ms=NOW_MS + 500)),
        (NOW_MS, Registered(expires_at_ms=NOW_MS + 500)),
    ],
)
def test_a_worker_is_new_unless_it_is_known_and_alive(
    before_ms: int | None, answer: Registered | Refreshed
) -> None:
    known = structs.replace(registered(), registered_at_ms=5)
    before = None if before_ms is None else structs.replace(known, expires_at_ms=before_ms)
    decision = decide_register(before, OFFER, NOW_MS)
    assert decision.answer == answer
    kept = isinstance(answer, Refreshed)
    assert registered(before=before).registered_at_ms == (5 if kept else NOW_MS)


@pytest.mark.parametrize(("left_ms", "alive"), [(1, True), (0, False), (-1, False)])
def test_only_the_living_keep_their_place(left_ms: int, alive: bool) -> None:
    before = structs.replace(registered(), expires_at_ms=NOW_MS + left_ms)
    beat = decide_heartbeat(before, NOW_MS)
    assert isinstance(beat.answer, Refreshed if alive else NotRegistered)
    assert bool(beat.changes.updates) == alive
    other = structs.replace(OFFER.worker, worker_id=WorkerId("other"))
    if alive:
        with pytest.raises(InvalidInput, match="instance_id reassigned: it belongs to w"):
            decide_register(before, structs.replace(OFFER, worker=other), NOW_MS)
    else:
        decide_register(before, structs.replace(OFFER, worker=other), NOW_MS)


NEED = Need(
    namespace=Namespace("shop"),
    lane_id=LaneId("a"),
    execution_kind="send",
    required=("gpu",),
)


@pytest.mark.parametrize(
    ("offered", "needed", "fits"),
    [
        ({}, {}, True),
        ({}, {"required": ()}, True),
        ({}, {"required": ("cuda", "gpu")}, True),
        ({}, {"required": ("gpu", "ssd")}, False),
        ({}, {"required": ("GPU",)}, False),
        ({"capabilities": ()}, {}, False),
        ({"capabilities": ()}, {"required": ()}, True),
        ({"namespace": Namespace("shop")}, {}, True),
        ({"namespace": Namespace("bank")}, {}, False),
        ({}, {"lane_id": LaneId("c")}, False),
        ({}, {"execution_kind": "sing"}, False),
        ({"kinds": None}, {"execution_kind": "sing"}, True),
        ({"kinds": ()}, {}, False),
    ],
)
def test_a_worker_serves_what_it_offers_everything_for(
    offered: dict[str, object], needed: dict[str, object], fits: bool
) -> None:
    worker = registered(structs.replace(OFFER, **offered))
    assert serves(entry(worker), structs.replace(NEED, **needed)) is fits


def test_times_and_reasons_have_bounds() -> None:
    assert [check_liveness(each) for each in (1_000, 3_600_000)] == [1_000, 3_600_000]
    for bad in (999, 3_600_001, "5", True):
        with pytest.raises(InvalidInput, match="liveness_ttl_ms"):
            check_liveness(bad)
    assert check_dead_reason("") == ""
    assert check_dead_reason("host lost") == "host lost"
    for reason in ("r" * 257, "a\nb", 5, None):
        with pytest.raises(InvalidInput, match="reason"):
            check_dead_reason(reason)


# Turns --------------------------------------------------------------------------


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 20), min_size=1),
    st.lists(st.integers(1, 30), max_size=30),
)
def test_lanes_get_their_shares_however_many_turns_are_asked_for_at_once(
    weights: dict[str, int], asked: list[int]
) -> None:
    shares = LaneShares(weights)
    got: Counter[str] = Counter()
    for count in asked:
        turns = shares.turns(count, shares.names)
        assert sum(turns.values()) == count
        got.update(turns)
        total = sum(got.values())
        for lane, weight in weights.items():
            due = total * weight / sum(weights.values())
            assert abs(got[lane] - due) < len(weights)


def test_a_lane_that_takes_no_part_gets_no_turn_and_none_later_for_that() -> None:
    shares = LaneShares({"a": 5, "b": 3, "c": 1})
    without = Counter(shares.next({"b", "c"}) for _ in range(400))
    assert without == {"b": 300, "c": 100}
    everybody = Counter(shares.next() for _ in range(900))
    assert everybody == {"a": 500, "b": 300, "c": 100}


@pytest.mark.parametrize(
    ("lanes", "problem"),
    [
        ([], "^lanes"),
        ({}, "^lanes"),
        ("a", "^lanes"),
        (5, "^lanes"),
        ({"a": 0}, r"lanes\['a'\]: must be 1 to 1000"),
        ({"a": 1_001}, r"lanes\['a'\]: must be 1 to 1000"),
        ({"a": 1.5}, r"lanes\['a'\]"),
        ({"": 1}, "lane_id"),
        ([str(number) for number in range(1_001)], "^lanes"),
    ],
)
def test_weights_that_make_no_sense_are_refused(lanes: LaneWeights, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        LaneShares(lanes)


@pytest.mark.parametrize(
    ("since_ms", "heard_ms", "lives"),
    [
        (10, 31, True),
        (10, 30, False),  # Not since the lease was over.
        (20, 31, True),
        (21, 31, False),  # Another process with the same name.
    ],
)
def test_a_process_outlives_a_lease_if_it_is_heard_of_afterwards(
    since_ms: int, heard_ms: int, *, lives: bool
) -> None:
    worker = structs.replace(registered(), running_since_ms=since_ms, last_heartbeat_ms=heard_ms)
    assert outlived(worker, 20, 30) is lives


@pytest.mark.parametrize(
    ("kind", "reason", "words"),
    [
        (WorkerEventKind.REGISTERED, "", ("registered", "")),
        (WorkerEventKind.MARKED_DEAD, "host lost", ("marked dead", "host lost")),
        (WorkerEventKind.MARKED_DEAD, STOPPED, ("stopped", "")),
        (WorkerEventKind.TTL_SWEPT, "", ("went quiet", "")),
    ],
)
def test_events_say_in_words_what_happened_to_a_worker(
    kind: WorkerEventKind, reason: str, words: tuple[str, str]
) -> None:
    event = WorkerEvent(
        event_id="1",
        namespace=EVERYWHERE,
        worker_instance_id=WorkerInstanceId("w-1"),
        worker_id=WorkerId("w"),
        event_kind=kind,
        event_at_ms=1,
        reason=reason,
    )
    assert event.words == words
