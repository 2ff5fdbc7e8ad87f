"""Budgets on the command line."""

from pathlib import Path

from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from tests.cli.command import run


def test_budgets_are_created_changed_reported_to_and_reset(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    assert run("migrate", url=url).status == 0
    created = run(
        *("budgets", "create", "team", "--hard", "tokens=1_000", "--soft", "tokens=800"),
        *("--hard", "cents=5", "--reset-every", "1d", "--json"),
        url=url,
    ).document
    assert created["hard_limits"] == {"tokens": 1_000, "cents": 5}
    assert created["reset_interval_ms"] == 86_400_000

    reported = run("budgets", "report", "team", "tokens=1000", "--key", "a", url=url)
    assert reported.status == 0
    refused = run("budgets", "report", "team", "tokens=1", url=url)
    assert refused.status == 4
    assert "budget team has no room for 1 tokens: 1000 of 1000 used" in refused.err

    listed = run("budgets", "list", url=url, COLUMNS="120").lines
    assert listed[0].split() == [
        "BUDGET",
        "DIMENSION",
        "USED",
        "RESERVED",
        "SOFT",
        "HARD",
        "STATE",
        "RESET",
    ]
    assert listed[1].split()[:4] == ["team", "cents", "0", "5"]
    assert listed[2].split() == ["tokens", "1,000", "800", "1,000", "used", "up"]

    raised = run("budgets", "set", "team", "--hard", "tokens=2000", "--json", url=url).document
    assert (raised["closed"], raised["usage"]) == (False, {"tokens": 1_000})
    reset = run("budgets", "reset", "team", "--json", url=url).document
    assert reset["usage"] == {"tokens": 0}
    assert run("budgets", "show", "team", "--json", url=url).document == reset
    assert run("budgets", "remove", "team", url=url).out == "team is removed\n"
    assert run("budgets", "remove", "team", url=url).status == 3


def test_budgets_that_are_not_there_and_mistakes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    assert run("migrate", url=url).status == 0
    assert run("budgets", "list", url=url).err.strip() == "No budgets."
    assert run("budgets", "show", "team", url=url).status == 3
    assert run("budgets", "create", "team", "--hard", "many", url=url).status == 2
    assert run("budgets", "create", "team", "--hard", "tokens=-1", url=url).status == 2
    assert run("budgets", "create", "team", "--lane", "a", "--task", "b", url=url).status == 2
    refused = run("budgets", "create", "team", "--hard", "tokens=0", url=url)
    assert refused.status == 2
    assert "tokens=none for no limit" in refused.err
    assert run("budgets", "create", "team", "--hard", "tokens=1", url=url).status == 0
    assert run("budgets", "create", "team", "--hard", "tokens=1", url=url).status == 0
    assert run("budgets", "create", "team", "--hard", "tokens=2", url=url).status == 4


def test_a_budget_above_its_soft_limit_is_shown_unless_that_is_allowed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    assert run("migrate", url=url).status == 0
    assert run("budgets", "create", "team", "--soft", "tokens=8", url=url).status == 0
    assert run("budgets", "report", "team", "tokens=9", url=url).status == 0
    shown = run("budgets", "show", "team", url=url, COLUMNS="120").lines[1]
    assert shown.split() == ["team", "tokens", "9", "8", "above", "soft"]

    assert run("budgets", "set", "team", "--on-soft-limit", "allow", url=url).status == 0
    assert run("budgets", "show", "team", url=url, COLUMNS="120").lines[1].split()[-1] == "open"


def test_a_dimension_that_looks_mistyped_is_told(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    assert run("migrate", url=url).status == 0
    assert run("budgets", "create", "team", "--hard", "tokens=9", url=url).status == 0
    ran = run("budgets", "report", "team", "tokns=1", "pages=1", url=url)
    assert ran.status == 0
    assert ran.err == "budget team counts tokns and has no limit on it; did you mean tokens?\n"


def test_terms_are_named_as_they_are_documented(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    assert run("migrate", url=url).status == 0
    terms = ("--mode", "warn", "--on-hard-limit", "cancel_pending", "--json")
    created = run("budgets", "create", "team", "--hard", "tokens=8", *terms, url=url).document
    assert (created["enforcement_mode"], created["on_hard_limit"]) == ("warn", "cancel_pending")


async def test_the_list_names_the_budget_for_which_a_run_was_put_aside(
    engine: Engine, url: str
) -> None:
    await engine.create_execution(NewExecution(execution_kind="ask"))
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    until_ms = await engine.server_time_ms() + 600_000
    await engine.delay(claimed.handle, until_ms, why="budget team has no room for 9 tokens")
    (_, listed) = run("ls", url=url, COLUMNS="160").lines
    assert listed.endswith("put aside: budget team has no room for 9 tokens")


def test_a_new_dimension_that_looks_like_another_is_pointed_out(url: str) -> None:
    run("budgets", "create", "bot", "--hard", "tokens=100", "--hard", "calls=5", url=url)
    run("budgets", "report", "bot", "tokens=100", url=url)
    ran = run("budgets", "set", "bot", "--hard", "token=50", url=url)
    assert "budget bot had no dimension token before; did you mean tokens?" in ran.err
    (used_up,) = [line for line in ran.lines if line.rstrip().endswith("used up")]
    assert used_up.split()[0] == "tokens"
