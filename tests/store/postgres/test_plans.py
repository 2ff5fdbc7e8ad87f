"""How Postgres finds rows: through an index, when a table is empty and when it has grown.

A plan made on an empty table stays in use while the table fills, so it must be
as good as the later one. Every statement file is checked, also those added
later, with the plans our connections make: once, without knowing the parameters.
"""

import re
from collections.abc import AsyncIterator

import pytest
from msgspec import Struct, json

from flowfabric.core.decisions import Changes
from flowfabric.core.events import Event
from flowfabric.core.flow_records import Edge, ExecutionInput, JoinRecord
from flowfabric.core.records import Attempt, Execution, Record, StoredGrant, Suspension, Waitpoint
from flowfabric.store.mapping import EndingRow, Live, RequestRow, table_of
from flowfabric.store.postgres.driver import Connection
from flowfabric.store.postgres.pool import Connections
from flowfabric.store.postgres.statements import Part, Seen, get_text, lock_text, save_text
from flowfabric.store.postgres.store import PostgresStore
from flowfabric.store.postgres.transaction import STATEMENTS
from flowfabric.store.statements import numbered
from tests.store.records import ENDED, an_event, an_execution, save

LARGE = {
    "execution", "live", "ending", "attempt", "event", "execution_tag", "idempotency_guard",
    "suspension", "waitpoint", "signal", "signal_dedup", "suspend_dedup",
    "edge", "edge_group", "execution_input", "gate", "gate_route",
}  # fmt: skip
COLUMN = re.compile(r"(\w+) (?:=|<|>|>=|<=) ")
ROWS = 2_000

BELONGINGS = """
insert into attempt (partition_key, execution_id, attempt_index, attempt_id, attempt_type,
                     attempt_state, created_at_ms, lease_epoch)
select partition_key, execution_id, 0, execution_id, 'initial', 'started', 1, 1 from execution;
insert into execution_tag
select execution_id, created_at_ms, partition_key, 'some.tag', 'some value' from execution;
insert into idempotency_guard
select 'tests', execution_id::text, execution_id::text, '', 1 from execution;
insert into suspension (partition_key, execution_id, suspension_id, waitpoint_id, created_at_ms,
                        attempt_index, reason_code, requested_by, resume_condition, resume_policy)
select partition_key, execution_id, execution_id, execution_id, created_at_ms, 0,
       'waiting_for_signal', 'worker', '"OperatorOnly"', '{}' from execution;
insert into waitpoint (partition_key, execution_id, waitpoint_id, suspension_id, created_at_ms,
                       attempt_index, ordinal, signal_count, matched_signal_count, own_name_only,
                       ended_with_execution, state, waitpoint_key, token_kid, token_fingerprint,
                       required_signal_names)
select partition_key, execution_id, execution_id, execution_id, created_at_ms, 0, 0, 0, 0, false,
       false, 'active', 'gate', 'k1', '', '[]' from execution;
insert into signal (partition_key, execution_id, signal_id, waitpoint_id, suspension_id, sequence,
                    created_at_ms, accepted_at_ms, matched, satisfier, waitpoint_key, signal_name,
                    signal_category, source_type, source_identity, correlation_id, target_scope,
                    observed_effect, payload_encoding)
select partition_key, execution_id, execution_id, execution_id, execution_id, 0, 1, 1, true, true,
       'gate', 'x', 'default', 'external', '', '', 'waitpoint', 'appended_to_waitpoint', 'json'
  from execution;
insert into signal_dedup (partition_key, execution_id, waitpoint_id, signal_id, expires_at_ms,
                          idempotency_key)
select partition_key, execution_id, execution_id, execution_id, 1, 'key' from execution;
insert into suspend_dedup (partition_key, execution_id, suspension_id, lease_id, attempt_id,
                           lease_epoch, lease_ttl_ms, expires_at_ms, attempt_index,
                           already_satisfied, idempotency_key, worker_instance_id)
select partition_key, execution_id, execution_id, execution_id, execution_id, 1, 1, 1, 0, false,
       'key', 'worker' from execution;
insert into edge (partition_key, flow_id, edge_id, upstream_id, downstream_id, created_at_ms,
                  counts_from_replay, replaces_payload, dependency_kind, data_passing_ref,
                  edge_state, dep_state)
select partition_key, flow_id, execution_id, execution_id, execution_id, 1, 0, true, 'success_only',
       '', 'applied', 'unsatisfied' from flow_member;
insert into edge_group (partition_key, flow_id, downstream_id, k, staged, applied, succeeded,
                        failed, skipped, named_inputs, policy_kind, on_satisfied, group_state)
select partition_key, flow_id, execution_id, 0, 1, 1, 0, 0, 0, 0, 'all_of', 'let_run', 'pending'
  from flow_member;
insert into execution_input (partition_key, execution_id, edge_id, resolved_at_ms, replaces_payload,
                             name)
select partition_key, execution_id, execution_id, 1, true, 'name' from execution;
insert into gate (gate_id, closed, owner_kind, owner_id, gate_key, starts)
select execution_id, false, 'quota', 'd7c1f8a4-0000-4000-8000-000000000000', execution_id::text,
       '[]' from execution;
insert into gate_route (gate_id, route_id)
select execution_id, 1000 + row_number() over () from execution;
"""


class Node(Struct, rename=lambda name: name.replace("_", " ").title()):
    """A step of a plan."""

    node_type: str
    relation_name: str = ""
    index_name: str = ""
    index_cond: str = ""
    plans: tuple["Node", ...] = ()


class Plan(Struct, rename={"root": "Plan"}):
    root: Node


def reads_everything(node: Node) -> list[str]:
    """The large tables a plan reads from end to end. What a limit stops is none of them."""
    if node.node_type == "Limit":
        return []
    found = [table for plan in node.plans for table in reads_everything(plan)]
    # A partial index that looks empty may hold every running execution by the time it is read.
    whole_index = bool(node.index_name) and not node.index_cond
    if node.relation_name in LARGE and (node.node_type == "Seq Scan" or whole_index):
        found.append(f"{node.node_type} on {node.index_name or node.relation_name}")
    # All members and edges of a flow are in one partition.
    if node.index_cond and set(COLUMN.findall(node.index_cond)) == {"partition_key"}:
        found.append(f"{node.node_type} of {node.index_name} by the partition alone")
    return found


def statements() -> dict[str, str]:
    """Every statement there is: those in files, and the ones that follow from records."""
    shared = STATEMENTS.parents[1] / "sql"
    files = [
        path.relative_to(folder).with_suffix("").as_posix()
        for folder in (STATEMENTS, shared)
        for path in folder.rglob("*.sql")
    ]
    texts = {name: numbered(name, STATEMENTS).text for name in files}
    generated = {
        f"{verb} {record.__name__}": text(record)
        for record in (Execution, Edge, JoinRecord, ExecutionInput)
        for verb, text in (("get", get_text), ("lock", lock_text))
    }
    for name, alone in (("save one", True), ("save many", False)):
        changes = (
            Part("insert", RequestRow, table_of(RequestRow).names, alone),
            Part("update", Live, table_of(Live).names, alone),
            Part("update", EndingRow, table_of(EndingRow).names, alone),
            Part("delete", Live, table_of(Live).key, alone),
            Part("insert", Attempt, table_of(Attempt).names, alone),
            Part("delete", StoredGrant, table_of(StoredGrant).key, alone),
            Part("update", Edge, table_of(Edge).names, alone),
            Part("update", JoinRecord, table_of(JoinRecord).names, alone),
            Part("append", Event, table_of(Event).names, alone),
        )
        generated[name] = save_text(changes)
        seen = tuple(Seen(kind, alone) for kind in (Live, EndingRow, Suspension, Waitpoint))
        generated[f"{name} if unchanged"] = save_text(changes, seen)
    return texts | generated


COUNTING = {("count_by_lane", "Seq Scan on live")}
"""For people who list lanes: counting is reading."""


async def scanning_statements(connection: Connection) -> dict[str, list[str]]:
    """Statements that read a large table from end to end, and which."""
    found: dict[str, list[str]] = {}
    for name, text in statements().items():
        await connection.execute(f'prepare "{name}" as {text}')
        (taken,) = await connection.fetch(
            "select cardinality(parameter_types) from pg_prepared_statements where name = $1", name
        )
        nulls = ", ".join(["null"] * int(str(taken[0])))
        arguments = f"({nulls})" if nulls else ""
        (row,) = await connection.fetch(f'explain (format json) execute "{name}"{arguments}')
        (plan,) = json.decode(str(row[0]), type=tuple[Plan])
        if scans := [each for each in reads_everything(plan.root) if (name, each) not in COUNTING]:
            found[name] = scans
    return found


@pytest.fixture
async def connection(postgres_database: str) -> AsyncIterator[Connection]:
    """A connection as the store makes them."""
    connections = Connections(
        postgres_database, pool_max=1, acquire_timeout_s=30, statement_cache_size=1
    )
    opened = await connections.connect()
    yield opened
    await opened.close()


async def test_no_statement_is_planned_as_a_scan_while_tables_are_empty(
    connection: Connection,
) -> None:
    assert await scanning_statements(connection) == {}


async def test_no_statement_is_planned_as_a_scan_when_tables_have_grown(
    connection: Connection, postgres_store: PostgresStore
) -> None:
    executions = tuple(an_execution(**fields) for fields in ({}, ENDED) for _ in range(ROWS // 2))
    events = tuple(an_event(execution, "grown") for execution in executions)
    await save(postgres_store, Changes(inserts=executions, events=events))
    await connection.execute(BELONGINGS)
    await connection.execute("analyze")
    assert await scanning_statements(connection) == {}


async def test_many_rows_are_written_by_key_though_their_tables_looked_empty(
    connection: Connection, postgres_store: PostgresStore
) -> None:
    """A plan that was made then stays in use while a table grows."""
    await save(postgres_store, Changes(inserts=(an_execution(), an_execution(**ENDED))))
    await connection.execute(BELONGINGS)
    await connection.execute("vacuum analyze")
    scanning = await scanning_statements(connection)
    assert [name for name in scanning if name.startswith("save")] == []


def every(node: Node) -> list[Node]:
    return [node, *(step for plan in node.plans for step in every(plan))]


@pytest.mark.parametrize("record", [Execution, Live, Suspension])
async def test_sorted_keys_are_locked_one_by_one(
    connection: Connection, record: type[Record]
) -> None:
    keys: list[list[object]] = [[] for _ in record.key]
    (row,) = await connection.fetch(f"explain (format json) {lock_text(record)}", *keys)
    (plan,) = json.decode(str(row[0]), type=tuple[Plan])
    sorted_keys, rows = plan.root.plans
    assert (plan.root.node_type, sorted_keys.node_type) == ("Nested Loop", "Sort")
    locking = [step for step in every(rows) if step.node_type == "LockRows"]
    read = [step.node_type for step in every(rows) if step.relation_name]
    assert len(locking) == (2 if record is Execution else 1)
    assert set(read) == {"Index Scan"}
