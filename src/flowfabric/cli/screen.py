"""How things look on a terminal: tables that fit it, times people can read, states in colour."""

import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from flowfabric.cli import tables
from flowfabric.cli.tables import ScreenColumn
from flowfabric.core.checks import visible
from flowfabric.core.ids import UUID_CHARS
from flowfabric.core.policies import span
from flowfabric.core.states import LaneState, PublicState
from flowfabric.terminal import Console, open_console, safe

PIPED_COLUMNS: Final = 160
"""The width of a table that goes into a pipe or file, unless COLUMNS says otherwise."""
WIDE_COLUMNS: Final = 132
"""From here on there is room for whole uuids."""
SHORT_ID_CHARS: Final = 12

_STATE_STYLES: Final = {
    PublicState.WAITING: "yellow",
    PublicState.DELAYED: "blue",
    PublicState.RATE_LIMITED: "yellow",
    PublicState.WAITING_CHILDREN: "blue",
    PublicState.ACTIVE: "bold cyan",
    PublicState.SUSPENDED: "magenta",
    PublicState.RESUMABLE: "yellow",
    PublicState.COMPLETED: "green",
    PublicState.FAILED: "bold red",
    PublicState.CANCELLED: "dim",
    PublicState.EXPIRED: "red",
    PublicState.SKIPPED: "dim",
}
_LANE_STYLES: Final = {
    LaneState.ACTIVE: "green",
    LaneState.PAUSED: "yellow",
    LaneState.DRAINING: "blue",
    LaneState.DISABLED: "dim",
}


@cache
def out() -> Console:
    return _console(stderr=False)


@cache
def err() -> Console:
    """Messages, questions and progress: never mixed into what a command prints."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_COLUMNS
    return open_console(stderr=stderr, width=width)


def table(columns: Sequence[ScreenColumn], rows: Iterable[Sequence[Text | str]]) -> Group:
    """One line per row, as wide as the output."""
    return tables.fitted_table(columns, rows, width=out().width)


def facts(pairs: Iterable[tuple[str, Text | str | None]]) -> Table:
    """Names and values under each other; pairs without a value are left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None and value != "":
            grid.add_row(name, safe(value))
    return grid


def state(value: PublicState) -> Text:
    return Text(value.replace("_", " "), style=_STATE_STYLES[value])


def lane_state(value: LaneState) -> Text:
    return Text(value, style=_LANE_STYLES[value])


def short_id(execution_id: str) -> str:
    """The whole uuid where there is room, else its last group, which commands accept as well."""
    uuid = execution_id[-UUID_CHARS:]
    return uuid if out().width >= WIDE_COLUMNS else uuid[-SHORT_ID_CHARS:]


def id_column() -> ScreenColumn:
    """For ids as `short_id` shows them, and for those that people chose."""
    at_least = UUID_CHARS if out().width >= WIDE_COLUMNS else SHORT_ID_CHARS
    return tables.both_ends("ID", at_least=at_least)


def one_line(text: str | None) -> str:
    """Text for a cell of a table or the end of a line: a line break in it is seen as such."""
    return visible((text or "").strip())


def ago(at_ms: int | None, now_ms: int) -> str:
    if at_ms is None:
        return ""
    return f"in {span(at_ms - now_ms)}" if at_ms > now_ms else f"{span(now_ms - at_ms)} ago"


def timestamp(at_ms: int) -> str:
    """Local time, to the second."""
    return datetime.fromtimestamp(at_ms / 1_000, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def moment(at_ms: int | None, now_ms: int | None = None) -> str | None:
    """Local time, to the millisecond, and how long ago."""
    if at_ms is None:
        return None
    at = datetime.fromtimestamp(at_ms / 1_000, UTC).astimezone()
    text = at.isoformat(sep=" ", timespec="milliseconds")
    return text if now_ms is None else f"{text}  ({ago(at_ms, now_ms)})"
