"""Numbered changes of the schema, and whether this package fits a database.

Each dialect has a folder of `NNNN_name.sql` files with the same numbers. The
first line of a file says whether a package that does not know the change can
still work on the changed schema. What was applied is kept in the database with a
checksum of the file, so an edited migration is noticed instead of trusted.
"""

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from flowfabric.errors import SchemaTooNew, SchemaTooOld, Unavailable

_FILE: Final = re.compile(r"(\d{4})_(\w+)\.sql")
_CREATED: Final = re.compile(r"^create (?:table|view) (?:if not exists )?(\w+)", re.MULTILINE)
_HEADER: Final = re.compile(r"-- backward-compatible: (yes|no)")


class Migration(NamedTuple):
    version: int
    name: str
    checksum: str
    backward_compatible: bool
    text: str


class AppliedMigration(NamedTuple):
    """A row of the ledger."""

    version: int
    name: str
    checksum: str
    backward_compatible: bool


@lru_cache(maxsize=8)
def load(folder: Path) -> tuple[Migration, ...]:
    """The migrations of a dialect, in order. Their numbers start at one and have no gaps."""
    migrations = tuple(_read(path) for path in sorted(folder.glob("*.sql")))
    versions = [migration.version for migration in migrations]
    assert versions == list(range(1, len(versions) + 1)), f"gaps in {folder}: {versions}"
    return migrations


@lru_cache(maxsize=8)
def created(migrations: Sequence[Migration]) -> frozenset[str]:
    """The tables and views that some migration creates."""
    return frozenset(name for each in migrations for name in _CREATED.findall(each.text))


def check(known: Sequence[Migration], applied: Sequence[AppliedMigration]) -> None:
    """Refuse a schema this package cannot work on."""
    pending(known, applied)
    expected = known[-1].version
    found = max((row.version for row in applied), default=0)
    if found < expected:
        raise SchemaTooOld(found, expected)
    if not all(row.backward_compatible for row in applied if row.version > expected):
        raise SchemaTooNew(found, expected)


def pending(known: Sequence[Migration], applied: Sequence[AppliedMigration]) -> list[Migration]:
    """What is still to be applied. Refuses a ledger that disagrees with the files."""
    done = {row.version: row for row in applied}
    for migration in known:
        row = done.get(migration.version)
        if row is not None and row.checksum != migration.checksum:
            raise Unavailable(
                "schema",
                f"migration {migration.name} was changed after it had been applied"
                f" (recorded {row.checksum[:12]}, found {migration.checksum[:12]});"
                " restore the original file and put the change into a new migration",
            )
    return [migration for migration in known if migration.version not in done]


def _read(path: Path) -> Migration:
    file = _FILE.fullmatch(path.name)
    text = path.read_text("utf-8")
    header = _HEADER.match(text)
    assert file is not None, f"{path.name}: must be named NNNN_name.sql"
    assert header is not None, f"{path.name}: must start with -- backward-compatible: yes|no"
    return Migration(
        version=int(file[1]),
        name=path.stem,
        checksum=hashlib.sha256(text.encode()).hexdigest(),
        backward_compatible=header[1] == "yes",
        text=text,
    )
