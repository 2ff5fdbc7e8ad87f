"""A file for SQLite."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path, exercised_store: Callable[[str], None]) -> Path:
    exercised_store("sqlite file")
    return tmp_path / "a.db"
