"""Grants under limits: finding a limited execution that fits, and checking that under lock.

A grant holds a slot as a lease does, from the moment it is issued. It also counts as a start
where nothing is resumed, since claiming with it asks no limit again. One that is not used in time
gives that start back.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import gates, grants, situations
from flowfabric.core.gates import Gate
from flowfabric.core.ids import ExecutionId, GateId
from flowfabric.core.records import Execution
from flowfabric.core.transitions import Changes, Subject
from flowfabric.engine.gates import (
    GATES_TOPIC,
    ROUTES_MIN,
    ClaimQuery,
    count_starts,
    find_routes,
    gates_of,
    load,
    routes_gates,
)
from flowfabric.store.base import Transaction

CANDIDATES = 64
"""How many of the best executions are looked at for one that no other claim is taking."""


class Pick(Struct, frozen=True, kw_only=True):
    """What was found, and where the next search begins."""

    execution_id: ExecutionId | None
    after: int


async def best_ready(
    tx: Transaction, query: ClaimQuery, route_id: int | None = None
) -> ExecutionId | None:
    """Lock the best ready execution: of a route under limits, or of those without."""
    found = await tx.select_as(
        ExecutionId,
        "best_ready",
        **query.parameters,
        kinds=query.kinds,
        route_id=route_id,
        candidates=CANDIDATES,
    )
    return found[0] if found else None


async def best_limited(tx: Transaction, query: ClaimQuery, after: int) -> Pick:
    """Lock the best ready execution of the next route whose limits leave room for one."""
    for start in (after, 0) if after else (0,):
        *found, last = await find_routes(tx, query, start, ROUTES_MIN)
        loaded = await load(tx, _ids(last.gate_ids), counted_max=last.cap_max)
        states = {each.gate_id: each.state for each in loaded}
        routes = [each.route for each in found]
        for allowed in gates.allot(routes, states, 1, await tx.now_ms()):
            execution_id = await _best_fitting(tx, query, allowed)
            if execution_id is not None:
                return Pick(execution_id=execution_id, after=allowed.route_id)
    return Pick(execution_id=None, after=0)


async def _best_fitting(
    tx: Transaction, query: ClaimQuery, allowed: gates.Allowance
) -> ExecutionId | None:
    if allowed.starts:
        return await best_ready(tx, query, allowed.route_id)
    found = await tx.select_as(ExecutionId, "best_resuming", route_id=allowed.route_id)
    return found[0] if found else None


async def admit(tx: Transaction, execution: Execution) -> None:
    """Take a slot of each gate the execution passes, and count its start. Raise if one is full."""
    gate_ids = await gates_of(tx, execution.route_id)
    if not gate_ids:
        return
    await tx.lock(Gate, [(gate_id,) for gate_id in sorted(gate_ids)])
    now_ms = await tx.now_ms()
    states = {each.gate_id: each.state for each in await load(tx, gate_ids)}
    resumes = situations.resumes(execution)
    for state in states.values():
        _check_room(state, execution, now_ms, resumes=resumes)
    await count_starts(tx, states, {} if resumes else dict.fromkeys(states, 1), now_ms)


async def pass_by(tx: Transaction, execution: Execution) -> None:
    """Have the gates of an execution counted again: a claim by hand asks none of them."""
    gate_ids = await gates_of(tx, execution.route_id)
    locked = await tx.lock(Gate, [(gate_id,) for gate_id in sorted(gate_ids)])
    known = [each for each in locked.values() if each.spare is not None]
    await tx.save(Changes(updates=tuple(structs.replace(each, spare=None) for each in known)))


async def give_back_starts(tx: Transaction, subjects: Sequence[Subject]) -> None:
    """Take back the starts that were counted for grants which were not used in time."""
    now_ms = await tx.now_ms()
    counted = [
        (each.execution.route_id, grants.counted_start_ms(each, now_ms)) for each in subjects
    ]
    times = [(route_id, at_ms) for route_id, at_ms in counted if at_ms is not None]
    passed = await routes_gates(tx, {route_id for route_id, _ in times})
    await tx.lock(Gate, sorted({(each.gate_id,) for each in passed}))
    states = await load(tx, sorted({each.gate_id for each in passed}))
    given_back = [
        row.state.without(
            [
                at_ms
                for each in passed
                for route_id, at_ms in times
                if each.gate_id == row.gate_id and each.route_id == route_id
            ],
            now_ms,
        )
        for row in states
        if row.rate
    ]
    if given_back:
        await tx.save(Changes(updates=tuple(given_back)))
        tx.hint(GATES_TOPIC)


def _check_room(
    state: gates.GateState, execution: Execution, now_ms: int, *, resumes: bool
) -> None:
    if state.gate.closed:
        raise errors.BudgetExceeded(f"a budget of {execution.called} is used up")
    room = state.room(now_ms)
    if not room.has_slot(resumes=resumes):
        raise errors.ConcurrencyLimitExceeded(
            f"{execution.called}: {state.in_use} of {state.limits.cap} are in use"
        )
    if room.starts == 0 and not resumes:
        raise errors.RateLimitExceeded(
            f"{execution.called}: {state.limits.rate} have started in the last"
            f" {state.limits.window_ms} ms"
        )


def _ids(text: str | None) -> tuple[GateId, ...]:
    return () if text is None else tuple(msgspec.json.decode(text, type=list[GateId]))
