"""Rows to store, and ways to wait, for the tests of the stores."""

import itertools
import os
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import asyncpg
from msgspec import structs

from flowfabric.core.decisions import Changes
from flowfabric.core.events import Event, completion_event
from flowfabric.core.ids import ExecutionId, FlowId, LaneId, Namespace
from flowfabric.core.records import Execution, Lane
from flowfabric.core.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LaneState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.store.base import Key, Store, Transaction
from flowfabric.store.mapping import AFTER_THE_END

PARTITION = 7
NOW_MS = 1_700_000_000_000

_numbers = itertools.count(1)


class SetClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now_ms: int = NOW_MS) -> None:
        self.value_ms = now_ms

    def now_ms(self) -> int:
        return self.value_ms


def an_execution(**fields: object) -> Execution:
    """A claimable execution of the first route; its id is later than those made before."""
    number = next(_numbers)
    base = Execution(
        partition_key=PARTITION,
        execution_id=ExecutionId(f"{{fp:{PARTITION}}}:00000000-0000-7000-8000-{number:012x}"),
        namespace=Namespace("tests"),
        lane_id=LaneId("default"),
        execution_kind="work",
        route_id=1,
        priority=0,
        creator_identity="tests",
        flow_id=FlowId(str(uuid.uuid4())),
        lifecycle_phase=LifecyclePhase.RUNNABLE,
        ownership_state=OwnershipState.UNOWNED,
        eligibility_state=EligibilityState.ELIGIBLE_NOW,
        blocking_reason=BlockingReason.WAITING_FOR_WORKER,
        attempt_state=AttemptState.PENDING_FIRST_ATTEMPT,
        public_state=PublicState.WAITING,
        ready=True,
        created_at_ms=NOW_MS,
        last_transition_at_ms=NOW_MS,
        last_mutation_at_ms=NOW_MS,
        payload=b"\x00\xff",
    )
    return structs.replace(base, **fields)


ENDED: Mapping[str, object] = {
    **AFTER_THE_END,
    "attempt_state": AttemptState.ATTEMPT_TERMINAL,
    "terminal_outcome": TerminalOutcome.SUCCESS,
    "public_state": PublicState.COMPLETED,
    "completed_at_ms": NOW_MS,
}
"""Of an execution that has ended well."""


def an_event(execution: Execution, reason: str) -> Event:
    event = completion_event(execution, TerminalOutcome.SUCCESS, NOW_MS)
    return structs.replace(event, reason=reason)


def key(execution: Execution) -> Key:
    return execution.partition_key, execution.execution_id


def a_lane(name: str, state: LaneState = LaneState.ACTIVE) -> Lane:
    return Lane(lane_id=LaneId(name), state=state, registered_at_ms=1, registered_by="tests")


async def save(store: Store, changes: Changes) -> None:
    async def body(transaction: Transaction) -> None:
        await transaction.save(changes)

    await store.transact(body)


async def add_route(store: Store, execution: Execution) -> int:
    """The id of a route for it; the first one of a database has the id 1."""

    async def body(transaction: Transaction) -> int:
        (row,) = await transaction.select(
            "intern_routes",
            namespaces=[execution.namespace],
            lane_ids=[execution.lane_id],
            execution_kinds=[execution.execution_kind],
            capabilities=["[]"],
            gate_ids=["[]"],
            now_ms=NOW_MS,
            retain_until_ms=NOW_MS,
            count_max=10,
            gated_max=10,
        )
        return int(str(row["route_id"]))

    return await store.transact(body)


def start_python(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Another process that can import what this one can."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


async def change_postgres(url: str, statement: str) -> list[tuple[object, ...]]:
    """Run a statement behind the store's back."""
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(statement)]
    finally:
        await connection.close()


def change_sqlite(path: Path, statement: str) -> list[tuple[object, ...]]:
    """Run a statement behind the store's back."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement).fetchall()
