"""Statements that follow from a record type, for one row at a time."""

from functools import lru_cache

from msgspec import Struct

from flowfabric.store.mapping import Table, table_of


@lru_cache(maxsize=256)
def get_text(record: type[Struct]) -> str:
    table = table_of(record)
    return f"select {', '.join(table.names)} from {table.name} where {_same_key(table)}"


@lru_cache(maxsize=256)
def insert_text(record: type[Struct]) -> str:
    table = table_of(record)
    places = ", ".join("?" * len(table.names))
    return f"insert into {table.name} ({', '.join(table.names)}) values ({places})"


@lru_cache(maxsize=256)
def insert_new_text(record: type[Struct]) -> str:
    key = ", ".join(table_of(record).key)
    return f"{insert_text(record)} on conflict ({key}) do nothing"


@lru_cache(maxsize=1024)
def update_text(record: type[Struct], columns: tuple[str, ...]) -> str:
    table = table_of(record)
    changes = ", ".join(f"{name} = ?" for name in columns)
    return f"update {table.name} set {changes} where {_same_key(table)}"


@lru_cache(maxsize=256)
def delete_text(record: type[Struct]) -> str:
    table = table_of(record)
    return f"delete from {table.name} where {_same_key(table)}"


def _same_key(table: Table) -> str:
    return " and ".join(f"{name} = ?" for name in table.key)
