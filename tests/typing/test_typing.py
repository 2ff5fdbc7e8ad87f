"""Type checkers see through `submit`, `result` and `step`."""

import re
from pathlib import Path

import pytest
from mypy import api

PROGRAM = Path(__file__).with_name("program.txt")
"""Not a module of ours: half of it is wrong on purpose."""
ROOT = Path(__file__).parent.parent.parent


def expected() -> dict[int, str]:
    """Line numbers with what their comment promises."""
    found: dict[int, str] = {}
    for number, line in enumerate(PROGRAM.read_text().splitlines(), 1):
        _, mark, comment = line.partition("  # ")
        if mark:
            found[number] = comment
    return found


def inferred(program: Path) -> dict[int, str]:
    """Line numbers with the type mypy reveals there, or `error`."""
    report, problems, _ = api.run(
        [
            str(program),
            "--strict",
            f"--config-file={ROOT / 'pyproject.toml'}",
            "--no-error-summary",
            "--hide-error-context",
        ]
    )
    assert problems == ""
    found: dict[int, str] = {}
    for line in report.splitlines():
        number = int(line.split(":")[1])
        revealed = re.search(r'Revealed type is "(.*)"', line)
        if revealed:
            found[number] = re.sub(r"\b[a-z_]\w*\.(?=\w)", "", revealed[1])
        elif ": error:" in line:
            found[number] = "error"
    return found


def test_arguments_and_results_are_inferred_and_mistakes_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.read_text())
    monkeypatch.chdir(ROOT)
    assert inferred(program) == expected()
