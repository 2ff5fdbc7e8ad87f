"""Versions of a task, as they are stored: kind `publish` is version 1, `publish@2` version 2."""

import re
from typing import Final

from flowfabric.core.checks import check_int, check_text
from flowfabric.errors import InvalidInput

SEPARATOR: Final = "@"
VERSION_MAX: Final = 1_000_000
_VERSIONED: Final = re.compile(r"(.+)@([1-9][0-9]{0,6})")


def check_task_name(given: object) -> str:
    """A task's own name; what follows an @ would be taken for a version."""
    name = check_text("name", given, empty=False)
    if SEPARATOR in name:
        raise InvalidInput("name", "must not contain @, which separates a task's version", name)
    return name


def check_version(version: object) -> int:
    return check_int("version", version, 1, VERSION_MAX)


def kind_of(name: str, version: int) -> str:
    """The kind of executions of a task's version."""
    return name if version == 1 else f"{name}{SEPARATOR}{version}"


def split_kind(kind: str) -> tuple[str, int]:
    """The task's name and version; `publish@1` is another spelling of `publish`."""
    found = _VERSIONED.fullmatch(kind)
    return (kind, 1) if found is None else (found[1], int(found[2]))


def names_version(kind: str) -> bool:
    """Whether a kind, as people write it, says which version it means."""
    return _VERSIONED.fullmatch(kind) is not None
