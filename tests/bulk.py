"""Many executions at once, for tests of what a large database costs.

One execution is created through the engine and then copied inside the database, which
takes a second where a hundred thousand creations take minutes. Each copy gets a uuid of
its own and stays in the partition of the first; columns named in `changes` get an
expression in which `n` counts the copies. Copies in the phase `terminal` have ended.
"""

from collections.abc import Mapping

from flowfabric.core.states import LifecyclePhase
from flowfabric.store.mapping import EndingRow, Live, RequestRow, table_of
from flowfabric.store.postgres.statements import written

POSTGRES_ID = (
    "(lpad(to_hex({salt}), 8, '0') || '-0000-4000-8000-' || lpad(to_hex(n), 12, '0'))::uuid"
)
SQLITE_ID = "printf('%08x-0000-4000-8000-%012x', {salt}, n)"


def postgres_copies(uuid: str, count: int, salt: int, changes: Mapping[str, str]) -> list[str]:
    """Statements that copy the execution with this uuid; `salt` sets its copies apart."""
    rows = f"generate_series(1, {count}) as copies (n)"
    identity = {"execution_id": POSTGRES_ID.format(salt=salt)}
    return _inserts("flowfabric.", uuid, rows, identity | dict(changes))


def sqlite_copies(uuid: str, count: int, salt: int, changes: Mapping[str, str]) -> list[str]:
    """The same for SQLite."""
    counting = f"select 1 union all select n + 1 from copies where n < {count}"
    rows = f"(with recursive copies (n) as ({counting}) select n from copies)"
    identity = {"execution_id": SQLITE_ID.format(salt=salt)}
    return _inserts("", uuid, rows, identity | dict(changes))


def _inserts(schema: str, uuid: str, rows: str, changes: Mapping[str, str]) -> list[str]:
    ended = changes.get("lifecycle_phase") == f"'{LifecyclePhase.TERMINAL}'"
    statements: list[str] = []
    for part in (RequestRow, EndingRow if ended else Live):
        table = table_of(part)
        values = {name: changes.get(name, f"t.{name}") for name in table.names}
        stored = [written(table, name, values) if schema else values[name] for name in values]
        if not schema and part is not RequestRow:
            values["execution_rowid"] = (
                "(select k.execution_rowid from execution as k where"
                f" k.partition_key = t.partition_key and k.execution_id = {values['execution_id']})"
            )
            stored.append(values["execution_rowid"])
        statements.append(
            f"insert into {schema}{table.name} ({', '.join(values)}) select {', '.join(stored)}"
            f" from {schema}execution_now as t cross join {rows} where t.execution_id = '{uuid}'"
        )
    return statements
