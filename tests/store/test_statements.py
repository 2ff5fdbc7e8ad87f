"""Statement files: which parameters they take, and how each database sees them."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from flowfabric.store.base import Store
from flowfabric.store.sqlite.connection import PROGRAMS, STATEMENTS
from flowfabric.store.statements import named, numbered, ordered, program, taking

SHARED = STATEMENTS.parents[1] / "sql"

TEXT = """
-- a comment with :not_this
select ':nor_this', ":or_this", $body$ :neither $body$,  -- :again
       :first::text, :second, :first
/* :nothing */
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sample.sql").write_text(TEXT)
    (tmp_path / "steps.sql").write_text("delete from a where x = :x\n-- next\nselect :y\n")
    return tmp_path


def test_parameters_are_numbered_in_order_and_nothing_else_is_touched(folder: Path) -> None:
    statement = numbered("sample", folder)
    assert statement.parameters == ("first", "second")
    assert statement.text == TEXT.strip().replace(":first", "$1").replace(":second", "$2")


def test_a_filter_of_executions_is_written_once(tmp_path: Path) -> None:
    (tmp_path / "due.sql").write_text("select 1 from live\n where due\n-- within live\n limit :n")
    statement = numbered("due", tmp_path)
    assert statement.parameters == ("namespace", "tag_key", "tag_value", "n")
    assert "x.execution_id = live.execution_id" in statement.text


def test_a_statement_may_be_another_one_without_a_part_of_it(tmp_path: Path) -> None:
    whole = "select :a\n-- limits\nunion all\nselect :b\n-- end of limits\nunion all\nselect :c\n"
    (tmp_path / "claim.sql").write_text(whole)
    (tmp_path / "free.sql").write_text("-- Half of it.\n-- claim without limits\n")
    (tmp_path / "odd.sql").write_text("-- claim without limit\n")
    statement = numbered("free", tmp_path)
    assert statement.parameters == ("a", "c")
    assert statement.text == "-- Half of it.\nselect $1\nunion all\nselect $2"
    assert numbered("claim", tmp_path).parameters == ("a", "b", "c")
    with pytest.raises(LookupError, match=r"claim\.sql has no part called limit$"):
        numbered("odd", tmp_path)


def test_parameters_stay_named_and_a_file_may_hold_several_statements(folder: Path) -> None:
    first, second = named("steps", folder)
    assert (first.text, first.parameters) == ("delete from a where x = :x", ("x",))
    assert (second.text, second.parameters) == ("select :y", ("y",))


def test_a_statement_may_take_the_values_of_a_list_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "rows.sql").write_text(
        "delete from a\n-- next\ninsert into a values (given('names', 0), ':no', :clock)"
    )
    first, second = named("rows", tmp_path)
    assert (first.lists, second.lists) == (frozenset(), frozenset({"names"}))
    assert second.parameters == ("clock",)
    assert taking("rows", tmp_path).lists == frozenset({"names"})
    with pytest.raises(TypeError, match="missing"):
        taking("rows", tmp_path).check({})


def test_a_list_with_one_value_throughout_is_a_parameter(tmp_path: Path) -> None:
    (tmp_path / "rows.sql").write_text("select given('names', k.key), given('sizes', k.key)")
    (statement,) = named("rows", tmp_path, frozenset({"names"}))
    assert statement.text == "select :names, given('sizes', k.key)"
    assert (statement.parameters, statement.lists) == (("names",), frozenset({"sizes"}))


def test_a_statement_may_be_for_rows_that_the_one_before_it_wrote(tmp_path: Path) -> None:
    (tmp_path / "rows.sql").write_text("insert\n-- next, if any\nupdate\n-- next\nselect :x")
    parts = [(part.text, part.if_any) for part in named("rows", tmp_path)]
    assert parts == [("insert", False), ("update", True), ("select :x", False)]


def test_names_of_parameters_have_numbers_too(tmp_path: Path) -> None:
    (tmp_path / "rows.sql").write_text(
        "select :b, ':a', :a, given('c', :b) -- :d\n-- next\nselect :a"
    )
    parts = [(part.by_number, part.parameters) for part in named("rows", tmp_path)]
    assert parts == [
        ("select ?1, ':a', ?2, given('c', ?1) -- :d", ("b", "a")),
        ("select ?1", ("a",)),
    ]


@pytest.mark.parametrize("given", [{"first": 1}, {"first": 1, "second": 2, "third": 3}, {}])
def test_missing_and_extra_parameters_are_refused(folder: Path, given: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="sample takes"):
        ordered(numbered("sample", folder), given, lambda: None)


def test_statements_run_in_one_step_as_the_trigger_of_a_view(tmp_path: Path) -> None:
    (tmp_path / "rows.sql").write_text(
        "delete from a;\n-- and\n-- :no, new\ninsert into a select given('names', 0), :limit;\n"
        "-- next\nselect :x"
    )
    made = program("rows", tmp_path)
    assert made is not None
    assert (made.parameters, made.lists) == (("limit", "x"), ("names",))
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.create_function("given", 2, lambda name, place: f"{name} {place}")
        connection.execute("create table a (name, size)")
        for part in made.creation:
            connection.execute(part)
        connection.execute(made.call, (1, None, True, None))
        one_by_one = connection.execute("select * from a").fetchall()
        connection.execute(made.call, (2, None, False, "same"))
        assert (one_by_one, connection.execute("select * from a").fetchall()) == (
            [("names 0", 1)],
            [("same", 2)],
        )


def test_statements_that_nothing_joins_are_no_program(folder: Path) -> None:
    assert program("steps", folder) is None


def test_programs_are_all_made() -> None:
    joined = {path.stem for path in STATEMENTS.glob("*.sql") if program(path.stem, STATEMENTS)}
    shared = {path.stem for path in SHARED.glob("*.sql") if program(path.stem, STATEMENTS)}
    assert joined | shared == set(PROGRAMS)


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(LookupError, match=r"nowhere\.sql"):
        numbered("nowhere", folder)


def test_the_clock_is_filled_in_unless_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "timed.sql").write_text("select :clock, :other")
    statement = numbered("timed", tmp_path)
    assert ordered(statement, {"other": 1}, lambda: 9) == [9, 1]
    assert ordered(statement, {"other": 1, "clock": 5}, lambda: 9) == [5, 1]


def test_a_statement_that_could_send_a_message_need_not_be_given_one(tmp_path: Path) -> None:
    (tmp_path / "telling.sql").write_text("select :hint, :other")
    statement = numbered("telling", tmp_path)
    assert ordered(statement, {"other": 1}, lambda: 9) == [None, 1]
    assert ordered(statement, {"other": 1, "hint": "ready"}, lambda: 9) == ["ready", 1]


@pytest.mark.parametrize("wording", ["select 1 for update", "select 1\n  FOR NO KEY UPDATE of t"])
def test_a_locking_statement_is_recognised(tmp_path: Path, wording: str) -> None:
    (tmp_path / "locking.sql").write_text(wording)
    assert numbered("locking", tmp_path).locks


@pytest.mark.parametrize("lock", ["for update", "for update skip locked"])
def test_a_lock_at_the_end_of_a_statement_is_left_out_where_writers_are_alone(
    tmp_path: Path, lock: str
) -> None:
    (tmp_path / "due.sql").write_text(f"select 1\n limit :limit\n   {lock};\n")
    (statement,) = named("due", tmp_path)
    assert statement.text == "select 1\n limit :limit"
    assert numbered("due", tmp_path).text == f"select 1\n limit $1\n   {lock};"


async def test_a_wrong_parameter_is_refused_by_every_store(store: Store) -> None:
    with pytest.raises(TypeError, match="event_window takes"):
        await store.execute_alone("event_window", after=1)
