"""What statements cost in a database that has been in use.

Cost is counted, not timed: pages touched on Postgres, steps of the virtual machine on
SQLite. A statement may look at the rows it is asked for and at the way to them; the
hundred thousand others must not show. So each limit is a small number per row asked
for, and a scan of any large table exceeds it many times over.
"""

import asyncio
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import asyncpg
import msgspec
import pytest

from flowfabric import connect
from flowfabric.store.base import Parameter, drive
from flowfabric.store.postgres.driver import Connection
from flowfabric.store.postgres.pool import SEARCH_PATH, Connections
from flowfabric.store.postgres.statements import EVENTS_PER_ROW
from flowfabric.store.postgres.transaction import STATEMENTS as POSTGRES_STATEMENTS
from flowfabric.store.sqlite.connection import STATEMENTS as SQLITE_STATEMENTS
from flowfabric.store.sqlite.connection import connect as connect_sqlite
from flowfabric.store.sqlite.transaction import SqliteTransaction
from flowfabric.store.statements import named, numbered
from flowfabric.testing import SettableClock
from tests import postgres
from tests.bulk import postgres_copies, sqlite_copies
from tests.store.grown import (
    BELONGINGS,
    EVENTS,
    GUARDS,
    NOW_MS,
    START_MS,
    Question,
    claim,
    creation,
    groups,
    questions,
)

POSTGRES_CROWD = 100_000
SQLITE_CROWD = 20_000

PAGES_PER_ROW = 50
PAGES_FOR_NOTHING = 120
ROWS_PER_ROW = 8
ROWS_FOR_NOTHING = 30
READ_STEPS_PER_ROW = 110
WRITE_STEPS_PER_ROW = 700
STEPS_FOR_NOTHING = 500

LARGE = {
    "execution", "live", "ending", "attempt", "event", "execution_tag", "idempotency_guard",
    "suspension", "waiter", "waitpoint", "stream", "frame",
}  # fmt: skip
QUESTIONS = [*questions(), creation()]
POSTGRES_QUESTIONS = [*questions(EVENTS_PER_ROW), creation()]

POSTGRES_EVENTS = """
    insert into event (occurred_at_ms, execution_id, partition_key, category, event_type, namespace)
    select {start} + n, array[gen_random_uuid()], array[n % 256], 'lease', 'acquired', 'default'
      from {rows}
    """
SQLITE_EVENTS = """
    insert into event (occurred_at_ms, execution_id, partition_key, category, event_type, namespace)
    select {start} + n, uuid_head(randomblob(16)) || '000000000000', n % 256, 'lease', 'acquired',
           'default'
      from {rows}
    """
MANY_GUARDS = """
    insert into idempotency_guard (namespace, idempotency_key, execution, fingerprint,
                                   expires_at_ms)
    select 'default', 'key-' || n, '', {empty}, {start} + n * 1000 from {rows}
    """


# Postgres -------------------------------------------------------------------


class Node(msgspec.Struct, rename=lambda name: name.replace("_", " ").title()):
    """A step of a plan that was carried out."""

    node_type: str
    relation_name: str = ""
    subplan_name: str = ""
    cte_name: str = msgspec.field(default="", name="CTE Name")
    actual_rows: float = 0
    actual_loops: float = 0
    rows_removed_by_filter: float = msgspec.field(default=0, name="Rows Removed by Filter")
    shared_hit_blocks: int = 0
    shared_read_blocks: int = 0
    plans: tuple["Node", ...] = ()

    @property
    def pages(self) -> int:
        """Pages this step touched, with those below it and those that nothing reads from."""
        own = self.shared_hit_blocks + self.shared_read_blocks
        read = {f"CTE {step.cte_name}" for step in self.steps()}
        apart = (plan for plan in self.plans if plan.subplan_name.startswith("CTE "))
        return own + sum(plan.pages for plan in apart if plan.subplan_name not in read)

    def steps(self) -> Iterator["Node"]:
        yield self
        for plan in self.plans:
            yield from plan.steps()

    @property
    def examined(self) -> float:
        """Rows of large tables that were looked at, by this step and those below it."""
        scans = self.relation_name in LARGE and self.node_type.endswith("Scan")
        return sum(plan.examined for plan in self.plans) + (self._own_rows if scans else 0)

    @property
    def scanned(self) -> list[str]:
        """Large tables that were read from end to end, not only up to their first row."""
        found = [table for plan in self.plans for table in plan.scanned]
        if self.node_type == "Seq Scan" and self.relation_name in LARGE and self._own_rows > 1:
            found.append(self.relation_name)
        return found

    @property
    def _own_rows(self) -> float:
        return (self.actual_rows + self.rows_removed_by_filter) * self.actual_loops

    @property
    def most_sorted(self) -> float:
        """The rows that went into the largest sort."""
        sorts = "Sort" in self.node_type
        own = sum(plan.actual_rows * plan.actual_loops for plan in self.plans) if sorts else 0
        return max([own, *(plan.most_sorted for plan in self.plans)])


class Plan(msgspec.Struct, rename={"root": "Plan"}):
    root: Node


async def fill_postgres(url: str) -> None:
    connection = await asyncpg.connect(url, server_settings={"search_path": SEARCH_PATH})
    try:
        # In the midst of the tests it would change both the plans and what they cost.
        tables = await connection.fetch(
            "select tablename from pg_tables where schemaname = current_schema()"
        )
        for (table,) in tables:
            await connection.execute(f'alter table "{table}" set (autovacuum_enabled = off)')
        async with await connect(url, clock=SettableClock(START_MS)) as engine:
            for group in groups(POSTGRES_CROWD):
                uuid = await group.template(engine)
                for text in postgres_copies(uuid, group.count, group.salt, group.changes):
                    await connection.execute(text)
        for text, count in ((POSTGRES_EVENTS, EVENTS), (MANY_GUARDS, GUARDS)):
            rows = f"generate_series(1, {count}) as numbers (n)"
            await connection.execute(text.format(rows=rows, empty="''::bytea", start=START_MS))
        for text in BELONGINGS:
            await connection.execute(text)
        await connection.execute(f"vacuum analyze {', '.join(sorted(LARGE))}")
    finally:
        await connection.close()


def literal(value: Parameter) -> str:
    """A parameter as an untyped literal."""
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return f"'\\x{value.hex()}'"
    if isinstance(value, str | int | float):
        return "'" + str(value).replace("'", "''") + "'"
    items = (f'"\\\\x{v.hex()}"' if isinstance(v, bytes) else _item(v) for v in value)
    return "'{" + ",".join(items) + "}'"


def _item(value: object) -> str:
    return "null" if value is None else f'"{value}"'


@pytest.fixture(scope="module")
def grown_postgres(postgres_server: str, postgres_template: str) -> Iterator[str]:
    async def prepare() -> str:
        url = await postgres.create_database(postgres_server, postgres_template)
        await fill_postgres(url)
        return url

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        url = runner.run(prepare())
        yield url
        runner.run(postgres.drop_database(postgres_server, url))


async def as_the_store_does(url: str) -> Connection:
    connections = Connections(url, pool_max=1, acquire_timeout_s=30, statement_cache_size=1)
    return await connections.connect()


async def explain(connection: Connection, question: Question) -> Node:
    """Carry the statement out with the plan that serves all parameters, and undo it.

    Twice: the first time, a connection reads catalogues, finds out where tables have room and
    notes which rows were undone before. That depends on what ran earlier; the second does not.
    """
    statement = numbered(question.statement, POSTGRES_STATEMENTS)
    given = {"hint": None, **question.parameters}
    arguments = ", ".join(literal(given[name]) for name in statement.parameters)
    await connection.execute(f"prepare question as {statement.text}")
    try:
        await _carried_out(connection, arguments)
        return await _carried_out(connection, arguments)
    finally:
        await connection.execute("deallocate question")


async def _carried_out(connection: Connection, arguments: str) -> Node:
    await connection.execute("begin")
    try:
        (row,) = await connection.fetch(
            f"explain (analyze, buffers, format json) execute question({arguments})"
        )
    finally:
        await connection.execute("rollback")
    (plan,) = msgspec.json.decode(str(row[0]), type=tuple[Plan])
    return plan.root


def check_cost(plan: Node, question: Question) -> None:
    assert plan.actual_rows == question.returns
    assert plan.scanned == []
    assert plan.examined <= ROWS_PER_ROW * question.rows + ROWS_FOR_NOTHING
    assert plan.pages <= PAGES_PER_ROW * question.rows + PAGES_FOR_NOTHING


@pytest.mark.parametrize("question", POSTGRES_QUESTIONS, ids=str)
async def test_postgres_looks_at_little_more_than_it_is_asked_for(
    question: Question, grown_postgres: str
) -> None:
    connection = await as_the_store_does(grown_postgres)
    try:
        plan = await explain(connection, question)
    finally:
        await connection.close()
    check_cost(plan, question)
    assert plan.most_sorted <= ROWS_PER_ROW * question.rows


@pytest.mark.parametrize("question", [q for q in POSTGRES_QUESTIONS if not q.writes], ids=str)
async def test_postgres_reads_by_the_same_ways_when_it_is_free_to_scan(
    question: Question, grown_postgres: str
) -> None:
    """Our connections forbid scans, for the sake of statements that write. Reads need not."""
    settings = {"search_path": SEARCH_PATH, "plan_cache_mode": "force_generic_plan", "jit": "off"}
    connection = await asyncpg.connect(grown_postgres, server_settings=settings)
    try:
        plan = await explain(connection, question)
    finally:
        await connection.close()
    check_cost(plan, question)


@pytest.mark.parametrize("limit", [1, 10])
async def test_crowds_at_the_head_of_a_lane_do_not_slow_a_postgres_worker_they_are_not_for(
    limit: int, grown_postgres: str
) -> None:
    connection = await as_the_store_does(grown_postgres)
    try:
        quiet = await explain(connection, claim("quiet", limit))
        crowded = await explain(connection, claim("main", limit))
    finally:
        await connection.close()
    assert (crowded.actual_rows, quiet.actual_rows) == (limit, limit)
    assert crowded.examined <= 2 * quiet.examined
    assert crowded.pages <= 2 * quiet.pages


async def test_a_postgres_worker_gets_its_next_execution_past_the_crowds_in_one_call(
    grown_postgres: str,
) -> None:
    async with await connect(grown_postgres, clock=SettableClock(NOW_MS)) as engine:
        claimed = await engine.claim(
            "main", kinds=["mail"], worker_id="bob", worker_instance_id="bob-1"
        )
    assert claimed is not None
    assert (claimed.execution_kind, claimed.priority, claimed.lane_id) == ("mail", 0, "main")


# SQLite ----------------------------------------------------------------------


async def fill_sqlite(path: Path) -> None:
    url = f"sqlite:///{path}"
    async with await connect(url, clock=SettableClock(START_MS)) as engine:
        uuids = {group: await group.template(engine) for group in groups(SQLITE_CROWD)}
    with closing(connect_sqlite(str(path), "off")) as connection:
        connection.execute("begin")
        for group, uuid in uuids.items():
            for text in sqlite_copies(uuid, group.count, group.salt, group.changes):
                connection.execute(text)
        for text, count in ((SQLITE_EVENTS, EVENTS), (MANY_GUARDS, GUARDS)):
            counting = f"select 1 union all select n + 1 from numbers where n < {count}"
            rows = f"(with recursive numbers (n) as ({counting}) select n from numbers)"
            connection.execute(text.format(rows=rows, empty="x''", start=START_MS))
        for text in BELONGINGS:
            connection.execute(text)
        connection.execute("commit")


def steps_of(connection: sqlite3.Connection, question: Question) -> int:
    """How many steps of the virtual machine the answer takes."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    transaction = SqliteTransaction(connection, SettableClock(NOW_MS))
    connection.execute("begin immediate")
    connection.set_progress_handler(count, 1)
    try:
        rows = drive(transaction.select(question.statement, **question.parameters))
    finally:
        connection.set_progress_handler(None, 0)
        connection.execute("rollback")
    assert len(rows) == question.returns
    return steps


@pytest.fixture(scope="module")
def grown_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    path = tmp_path_factory.mktemp("grown") / "grown.db"
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(fill_sqlite(path))
    with closing(connect_sqlite(str(path), "off")) as connection:
        yield connection


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_sqlite_takes_few_steps_for_each_row_it_is_asked_for(
    question: Question, grown_sqlite: sqlite3.Connection
) -> None:
    per_row = WRITE_STEPS_PER_ROW if question.writes else READ_STEPS_PER_ROW
    assert steps_of(grown_sqlite, question) <= per_row * question.rows + STEPS_FOR_NOTHING


@pytest.mark.parametrize("limit", [1, 10])
def test_crowds_at_the_head_of_a_lane_do_not_slow_a_sqlite_worker_they_are_not_for(
    limit: int, grown_sqlite: sqlite3.Connection
) -> None:
    quiet = steps_of(grown_sqlite, claim("quiet", limit))
    assert steps_of(grown_sqlite, claim("main", limit)) <= 2 * quiet


NO_ALIAS = r"(?!(?:cross|group|indexed|join|left|limit|on|order|set|where)\b)"
SOURCE = re.compile(
    rf"(?:from|join|update)\s+(\w+)(?:\s+indexed by \w+)?(?:\s+(?:as\s+)?{NO_ALIAS}(\w+))?"
)
SCAN = re.compile(r"SCAN (\w+)")

SCANS_ON_PURPOSE = {
    # The oldest events come first without any search, and the limit ends the scan.
    ("next_due", "event"),
    ("trim_events", "event"),
    # Whether there is one at all.
    ("next_due", "waiter"),
    # Its index holds nothing but what is due.
    ("ended_and_awaited", "ending"),
    # From its end, back to the time at which what a reader has seen was lost.
    ("event_before", "event"),
    # From its end, for people who look at the latest; the limit ends the scan.
    ("before_latest_events", "event"),
    # For people who list lanes: counting is reading.
    ("count_by_lane", "live"),
    # Its index holds nothing but what is in hand.
    ("leases_of_worker", "live"),
    # For people who type part of an id.
    ("find_by_uuid", "execution"),
}


def statement_names() -> list[str]:
    shared = SQLITE_STATEMENTS.parents[1] / "sql"
    return sorted(
        path.relative_to(folder).with_suffix("").as_posix()
        for folder in (SQLITE_STATEMENTS, shared)
        for path in folder.rglob("*.sql")
    )


@pytest.mark.parametrize("name", statement_names())
def test_sqlite_never_reads_a_large_table_from_end_to_end(
    name: str, grown_sqlite: sqlite3.Connection
) -> None:
    scanned: set[tuple[str, str]] = set()
    for statement in named(name, SQLITE_STATEMENTS):
        tables = {alias or table: table for table, alias in SOURCE.findall(statement.text)}
        nothing = dict.fromkeys(statement.parameters)
        for row in grown_sqlite.execute(f"explain query plan {statement.text}", nothing):
            if found := SCAN.match(str(row[3])):
                scanned.add((name, tables.get(found[1], "")))
    assert {place for place in scanned if place[1] in LARGE} - SCANS_ON_PURPOSE == set()
