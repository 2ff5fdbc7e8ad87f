"""What a claim costs under a limit that keeps slots does not follow how many are kept."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flowfabric import Engine, connect
from flowfabric.core.creation import NewExecution
from flowfabric.core.gates import Gate, GateName, GateOwner
from flowfabric.core.ids import FIRST_UUID, make_execution_id
from flowfabric.core.limits import policy_id_of
from flowfabric.store.base import Parameter
from flowfabric.store.postgres.driver import Connection
from flowfabric.store.sqlite.connection import connect as connect_sqlite
from tests.bulk import postgres_copies, sqlite_copies
from tests.conformance.given import WORKER
from tests.store.grown import PARTITION, Question
from tests.store.test_plans import as_the_store_does, explain, steps_of

KEPT = 100_000
READY = 20
FULL, ROOMY = 10, 1_000_000
PAGES_MORE_MAX = 100
STEPS_MORE_MAX = 6_000
"""A hundred are counted where a key may be full."""
SUSPENDED = {
    "lifecycle_phase": "'suspended'",
    "eligibility_state": "'not_applicable'",
    "blocking_reason": "'waiting_for_signal'",
    "attempt_state": "'attempt_interrupted'",
    "public_state": "'suspended'",
    "ready": "false",
    "lease_epoch": "1",
    "total_attempt_count": "1",
}
TEMPLATE = f"0000abcd{FIRST_UUID[8:]}"
keys = pytest.mark.parametrize("key", ["", "acme"])


def gate(key: str) -> GateName:
    return GateName(GateOwner.QUOTA, policy_id_of("default", "deploys"), key)


async def submit(engine: Engine, key: str, cap: int) -> None:
    await engine.set_limit("deploys", active_concurrency_cap=cap, while_suspended="keep")
    template = make_execution_id(PARTITION, TEMPLATE)
    for execution_id in (template, *([None] * (READY - 1))):
        await engine.create_execution(
            NewExecution(execution_kind="deploy", execution_id=execution_id, gates=[gate(key)])
        )


def questions(key: str, cap: int, found: int) -> list[Question]:
    """What a claim asks."""
    search: dict[str, Parameter] = {
        "namespace": None,
        "lanes": ["default"],
        "kinds": ["deploy"],
        "capabilities": [],
        "after": 0,
        "limit": 16,
        "steps_max": 1_000,
        "clock": 1,
    }
    ids: dict[str, Parameter] = {
        "gate_ids": [gate(key).gate_id],
        "counts_all": False,
        "counted_max": cap,
        "clock": 1,
    }
    return [Question("find_gated_routes", search, 1, found), Question("count_gate_use", ids, 1, 1)]


async def looked_at(connection: Connection, key: str, cap: int) -> tuple[float, int]:
    """Rows of large tables that the statements of a claim look at, and pages."""
    plans = [await explain(connection, each) for each in questions(key, cap, 1)]
    assert [plan.scanned for plan in plans] == [[], []]
    return sum(plan.examined for plan in plans), sum(plan.pages for plan in plans)


async def suspend_many(connection: Connection) -> None:
    for text in postgres_copies(TEMPLATE, KEPT, 0xEE, SUSPENDED):
        await connection.execute(text)


@keys
async def test_a_full_limit_counts_no_more_than_it_has_slots_on_postgres(
    key: str, postgres_database: str
) -> None:
    async with await connect(postgres_database) as engine:
        await submit(engine, key, FULL)
        connection = await as_the_store_does(postgres_database)
        try:
            rows, pages = await looked_at(connection, key, FULL)
            await suspend_many(connection)
            unanalyzed = await looked_at(connection, key, FULL)
            await connection.execute("analyze")
            analyzed = await looked_at(connection, key, FULL)
        finally:
            await connection.close()
        for rows_after, pages_after in (unanalyzed, analyzed):
            assert rows_after <= rows + 2 * FULL
            assert pages_after <= pages + PAGES_MORE_MAX
        assert await engine.claim_many(["default"], limit=5, **WORKER) == []


@keys
async def test_a_limit_with_slots_to_spare_counts_none_on_postgres(
    key: str, postgres_database: str
) -> None:
    async with await connect(postgres_database) as engine:
        await submit(engine, key, ROOMY)
        connection = await as_the_store_does(postgres_database)
        try:
            rows, pages = await looked_at(connection, key, ROOMY)
            await suspend_many(connection)
            await connection.execute("analyze")
            assert len(await engine.claim_many(["default"], limit=5, **WORKER)) == 5
            rows_after, pages_after = await looked_at(connection, key, ROOMY)
        finally:
            await connection.close()
        assert rows_after <= rows + 10
        assert pages_after <= pages + PAGES_MORE_MAX
        assert await spare(engine, key) == ROOMY - KEPT - 5


async def spare(engine: Engine, key: str) -> int | None:
    gates = await engine.store.read(lambda reader: reader.get(Gate, [(gate(key).gate_id,)]))
    return gates[(gate(key).gate_id,)].spare


@keys
@pytest.mark.parametrize("cap", [FULL, ROOMY])
async def test_what_is_kept_costs_a_sqlite_claim_little(
    key: str, cap: int, tmp_path: Path, exercised_store: Callable[[str], None]
) -> None:
    exercised_store("sqlite file")
    path = tmp_path / "a.db"
    url = f"sqlite:///{path}"
    async with await connect(url) as engine:
        await submit(engine, key, cap)
    with closing(connect_sqlite(str(path), "off")) as connection:
        none = sum(steps_of(connection, each) for each in questions(key, cap, 2))
        for text in sqlite_copies(TEMPLATE, KEPT, 0xEE, SUSPENDED):
            connection.execute(text)
        async with await connect(url) as engine:
            claimed = await engine.claim_many(["default"], limit=5, **WORKER)
            assert (len(claimed), await spare(engine, key)) == (
                (5, ROOMY - KEPT - 5) if cap == ROOMY else (0, None)
            )
        found = 1 if cap == FULL and key else 2
        many = sum(steps_of(connection, each) for each in questions(key, cap, found))
    assert many <= none + STEPS_MORE_MAX
