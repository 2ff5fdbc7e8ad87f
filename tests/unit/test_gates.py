"""Windows of starts, and what fits through gates."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from flowfabric.core import gates
from flowfabric.core.gates import Allowance, GateName, GateOwner, GateState, WaitingRoute
from flowfabric.core.ids import GateId
from flowfabric.core.limits import Limits

UUID = "6f0c3a52-3d6e-4a0f-9d55-0d9f0d0f5a11"
WINDOW_MS = 6_400
PART_MS = 100


def state(
    key: str = "",
    *,
    rate: int = 0,
    cap: int = 0,
    in_use: int = 0,
    window: gates.Window = (),
    closed: bool = False,
    keeps: bool = False,
) -> GateState:
    gate = GateName(GateOwner.QUOTA, UUID, key).new()
    return GateState(
        gate=structs.replace(gate, starts=gates.written(window), closed=closed),
        limits=Limits(window_ms=WINDOW_MS if rate else 0, rate=rate, cap=cap, keeps=keeps),
        in_use=in_use,
    )


def route(
    route_id: int, *states: GateState, priority: int = 0, resumes: bool = False
) -> WaitingRoute:
    return WaitingRoute(
        route_id=route_id,
        gate_ids=tuple(each.gate.gate_id for each in states),
        priority=priority,
        resumes=resumes,
    )


def by_id(*states: GateState) -> dict[GateId, GateState]:
    return {each.gate.gate_id: each for each in states}


def test_a_gate_is_known_by_its_owner_and_key() -> None:
    names = [GateName(GateOwner.QUOTA, UUID, key) for key in ("", "a", "b")]
    assert len({name.gate_id for name in names}) == len(names)
    assert names[1].gate_id == GateName(GateOwner.QUOTA, UUID, "a").gate_id


@pytest.mark.parametrize(
    ("window", "now_ms", "after"),
    [
        ((), 1_000, ((1_000, 2),)),
        (((1_000, 3),), 1_099, ((1_099, 5),)),  # The same part, at its latest time.
        (((1_000, 3),), 1_100, ((1_000, 3), (1_100, 2))),
        (((1_000, 3),), 1_000 + WINDOW_MS - 1, ((1_000, 3), (7_399, 2))),
        (((1_000, 3),), 1_000 + WINDOW_MS, ((7_400, 2),)),  # Out of the window to the millisecond.
        (((1_050, 3),), 900, ((1_050, 5),)),  # The clock was set back.
        (((7_400, 3),), 1_000, ((7_400, 5),)),
        (((7_401, 3),), 1_000, ((1_000, 2),)),  # By more than the window.
    ],
)
def test_starts_are_counted_by_parts_of_the_window(
    window: gates.Window, now_ms: int, after: gates.Window
) -> None:
    assert gates.pushed(window, 2, WINDOW_MS, now_ms) == after


@pytest.mark.parametrize(
    ("at_ms", "left"),
    [
        (5, ((10, 1), (20, 1))),
        (10, ((10, 1), (20, 1))),
        (11, ((10, 2),)),
        (21, ((10, 2), (20, 1))),
        (10 - PART_MS, ((10, 2), (20, 1))),  # It has left the window: these are others.
    ],
)
def test_a_start_that_never_began_is_taken_out_of_where_it_was_counted(
    at_ms: int, left: gates.Window
) -> None:
    assert gates.withdrawn(((10, 2), (20, 1)), at_ms, WINDOW_MS) == left
    assert gates.withdrawn((), at_ms, WINDOW_MS) == ()


def test_a_start_that_has_left_the_window_is_not_taken_from_another() -> None:
    gate = GateName(GateOwner.QUOTA, UUID).new()
    limits = Limits(window_ms=1_000, rate=1)
    state = GateState(gate=structs.replace(gate, starts="[[5000,1]]"), limits=limits)
    assert gates.read_window(state.without([1_000], 6_000 - 1).starts) == ((5_000, 1),)
    assert gates.read_window(state.without([5_000], 6_000 - 1).starts) == ()


def test_a_full_window_opens_when_the_oldest_starts_leave_it() -> None:
    limits = Limits(window_ms=WINDOW_MS, rate=3)
    window = ((1_000, 1), (2_000, 2))
    assert gates.starts_left(limits, window, 2_000) == 0
    assert gates.opens_at_ms(limits, window, 2_000) == 1_000 + WINDOW_MS
    assert gates.starts_left(limits, window, 1_000 + WINDOW_MS) == 1
    assert gates.opens_at_ms(limits, window, 1_000 + WINDOW_MS) is None


def test_a_window_whose_limit_was_lowered_opens_when_enough_have_left() -> None:
    window = ((1_000, 2), (2_000, 2), (3_000, 1))
    limits = Limits(window_ms=WINDOW_MS, rate=3)
    assert gates.opens_at_ms(limits, window, 3_000) == 2_000 + WINDOW_MS


@settings(max_examples=300)
@given(
    rate=st.integers(1, 20),
    window_ms=st.sampled_from([1, 63, 1_000, WINDOW_MS, 60_000]),
    asked=st.lists(st.tuples(st.integers(0, 4_000), st.integers(1, 8)), max_size=60),
)
def test_no_window_admits_too_many_and_none_opens_late(
    rate: int, window_ms: int, asked: list[tuple[int, int]]
) -> None:
    limits = Limits(window_ms=window_ms, rate=rate)
    part_ms = -(-window_ms // gates.WINDOW_PARTS)
    window: gates.Window = ()
    started: list[int] = []
    now_ms = 1_000_000
    for pause_ms, count in asked:
        now_ms += pause_ms
        left = gates.starts_left(limits, window, now_ms)
        assert left is not None
        exact = rate - sum(at_ms > now_ms - window_ms for at_ms in started)
        late = rate - sum(at_ms > now_ms - window_ms - part_ms for at_ms in started)
        assert late <= left <= exact
        window = gates.pushed(window, min(left, count), window_ms, now_ms)
        started += [now_ms] * min(left, count)
        assert len(window) <= gates.WINDOW_PARTS + 1
        assert all(a < b for (a, _), (b, _) in pairwise(window))
        assert gates.read_window(gates.written(window)) == window
        opens_at_ms = gates.opens_at_ms(limits, window, now_ms)
        if opens_at_ms is not None:
            assert gates.starts_left(limits, window, opens_at_ms - 1) == 0
            assert gates.starts_left(limits, window, opens_at_ms) != 0


def test_routes_take_turns_whatever_gate_they_share() -> None:
    shared, one, two = state(cap=5, in_use=1), state("one", cap=3), state("two", cap=1)
    routes = [route(1, shared, one), route(2, shared, two)]
    assert gates.allot(routes, by_id(shared, one, two), 100, 0) == [
        Allowance(route_id=1, slots=3, starts=3),
        Allowance(route_id=2, slots=1, starts=1),
    ]


def test_the_highest_priority_comes_first_when_little_fits() -> None:
    shared = state(cap=2)
    routes = [route(1, shared), route(2, shared, priority=5), route(3, shared, priority=9)]
    assert gates.allot(routes, by_id(shared), 100, 0) == [
        Allowance(route_id=3, slots=1, starts=1),
        Allowance(route_id=2, slots=1, starts=1),
    ]


@pytest.mark.parametrize(
    ("queue", "slots", "starts", "taken"),
    [
        ("sssss", 3, 3, [0, 1, 2]),
        ("sssss", 3, 1, [0]),
        ("ssrsr", 3, 1, [0, 2, 4]),
        ("ssrsr", 1, 0, [2]),
        ("rrrss", 2, 2, [0, 1]),
        ("rsrs", 3, 1, [0, 1, 2]),
        ("ss", 3, 0, []),
        ("", 3, 3, []),
    ],
)
def test_what_resumes_passes_those_that_may_not_start(
    queue: str, slots: int, starts: int, taken: list[int]
) -> None:
    allowed = Allowance(route_id=1, slots=slots, starts=starts)
    assert allowed.fitting([each == "r" for each in queue]) == taken


@pytest.mark.parametrize(
    ("gate", "resumes", "fits"),
    [
        (state(), False, (10, 10)),
        (state(cap=4, in_use=1), False, (3, 3)),
        (state(cap=4, in_use=9), False, None),
        (state(rate=4, window=((1, 1),)), False, (3, 3)),
        (state(rate=4, window=((1, 4),)), False, None),
        (state(rate=4, window=((1, 4),)), True, (10, 0)),
        (state(rate=4, cap=2, window=((1, 3),)), True, (2, 1)),
        (state(closed=True), True, None),
        (state(cap=4, in_use=4, keeps=True), False, None),
        (state(cap=4, in_use=4, keeps=True), True, (10, 0)),
        (state(cap=4, in_use=3, keeps=True), True, (10, 1)),
        (state(cap=4, in_use=4, keeps=True, closed=True), True, None),
    ],
)
def test_what_fits(gate: GateState, resumes: bool, fits: tuple[int, int] | None) -> None:
    given = gates.allot([route(7, gate, resumes=resumes)], by_id(gate), 10, 2)
    expected = [] if fits is None else [Allowance(route_id=7, slots=fits[0], starts=fits[1])]
    assert given == expected


def test_what_kept_its_slot_at_one_gate_needs_one_at_the_others() -> None:
    kept, other = state("kept", cap=1, in_use=1, keeps=True), state("other", cap=2, in_use=1)
    passing = [route(1, kept, other, resumes=True)]
    assert gates.allot(passing, by_id(kept, other), 10, 0) == [
        Allowance(route_id=1, slots=1, starts=0)
    ]


def test_a_route_whose_gate_somebody_else_is_at_gets_nothing() -> None:
    free, taken = state("free", cap=1), state("taken", cap=1)
    routes = [route(1, taken), route(2, free)]
    assert gates.allot(routes, by_id(free), 10, 0) == [Allowance(route_id=2, slots=1, starts=1)]


GATES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 5), st.integers(0, 5)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300)
@given(
    sizes=GATES,
    passed=st.lists(st.sets(st.integers(0, 3), max_size=3), min_size=1, max_size=6),
    limit=st.integers(0, 12),
)
def test_what_is_shared_out_fits_every_gate_and_leaves_nothing_that_fits(
    sizes: list[tuple[int, int, int, int]], passed: list[set[int]], limit: int
) -> None:
    states = [
        state(str(place), rate=rate, cap=cap, in_use=in_use, window=((1, used),) if used else ())
        for place, (rate, cap, in_use, used) in enumerate(sizes)
    ]
    routes = [
        route(place, *(states[each] for each in sorted(chosen) if each < len(states)))
        for place, chosen in enumerate(passed)
    ]
    given = {each.route_id: each for each in gates.allot(routes, by_id(*states), limit, 2)}
    assert sum(each.slots for each in given.values()) <= limit
    spent = {
        each.gate.gate_id: sum(
            given[one.route_id].slots
            for one in routes
            if one.route_id in given and each.gate.gate_id in one.gate_ids
        )
        for each in states
    }
    rooms = {each.gate.gate_id: each.room(2) for each in states}
    for gate_id, room in rooms.items():
        for most in (room.slots, room.starts):
            assert most is None or spent[gate_id] <= most
    if sum(each.slots for each in given.values()) < limit:
        for one in routes:
            full = [
                gate_id
                for gate_id in one.gate_ids
                if spent[gate_id] in (rooms[gate_id].slots, rooms[gate_id].starts)
            ]
            assert full, "something still fits"
