"""How things look on a terminal: tables that fit it, times people can read, states in colour."""

import base64
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Final

import msgspec
from msgspec import Struct
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flowfabric.app import DEFAULT_NAMESPACE
from flowfabric.core.checks import visible, visible_json
from flowfabric.core.ids import UUID_CHARS
from flowfabric.core.policies import span
from flowfabric.core.states import LaneState, PublicState
from flowfabric.terminal import Console, open_wide_console, safe

# Tables with one line per row that always fit the terminal ------------------
#
# Columns that people copy or compare (states, ages) are never cut, nor are generated ids; longer
# ids that people chose are cut in the middle. When room is short, first the remark at the end
# shrinks, then the widest of the other columns down to what each needs, then the remark again,
# until it is left out. Numbers that can be spared follow, the last first; only then are names cut.

GAP: Final = "  "
FLEXIBLE_MIN: Final = 5
REMARK_MIN: Final = 20
NAME_CHARS_MAX: Final = 1_000
"""No name has more characters."""
REMARK_LEAST: Final = 6
"""A remark with less room than this is omitted."""


class ScreenColumn(Struct, frozen=True):
    title: str
    right: bool = False
    fixed: bool = False
    """Never cut."""
    remark: bool = False
    """The last column: dim, and the first to give way."""
    at_least: int = FLEXIBLE_MIN
    """The width it keeps as long as there is room, if its content is that wide."""
    both_ends: bool = False
    """Cut in the middle, and never to less than it needs."""
    spare: bool = False
    """Shown whole, or left out when room is short."""

    @property
    def least(self) -> int:
        return self.at_least if self.both_ends else min(self.at_least, FLEXIBLE_MIN)


def right(title: str) -> ScreenColumn:
    return ScreenColumn(title, right=True, fixed=True)


def fixed(title: str) -> ScreenColumn:
    return ScreenColumn(title, fixed=True)


def flexible(title: str, *, at_least: int = FLEXIBLE_MIN) -> ScreenColumn:
    return ScreenColumn(title, at_least=at_least)


def whole(title: str) -> ScreenColumn:
    """What people call the row, in other commands too: cut only if nothing else gives way."""
    return ScreenColumn(title, at_least=NAME_CHARS_MAX)


def spare(title: str) -> ScreenColumn:
    return ScreenColumn(title, right=True, fixed=True, spare=True)


def both_ends(title: str, *, at_least: int) -> ScreenColumn:
    return ScreenColumn(title, at_least=at_least, both_ends=True)


REMARK: Final = ScreenColumn("", remark=True)


def fitted_table(
    columns: Sequence[ScreenColumn], rows: Iterable[Sequence[Text | str]], *, width: int
) -> Group:
    cells = [[_cell(cell, c) for cell, c in zip(row, columns, strict=True)] for row in rows]
    widths = fit(
        columns,
        [
            max([len(column.title), *(row[i].cell_len for row in cells)])
            for i, column in enumerate(columns)
        ],
        width,
    )
    header = [Text(column.title, style="dim") for column in columns]
    return Group(*(_line(row, columns, widths) for row in (header, *cells)))


def fit(columns: Sequence[ScreenColumn], natural: Sequence[int], width: int) -> list[int]:
    """The width of each column; 0 leaves it out."""
    widths = list(natural)
    flexible_columns = [i for i, c in enumerate(columns) if not c.fixed and not c.remark]

    def excess() -> int:
        shown = [each for each in widths if each]
        return sum(shown) + len(GAP) * (len(shown) - 1) - width

    def narrow(least: Callable[[ScreenColumn], int]) -> None:
        """Cut the widest flexible columns until the line fits or each is at its least."""
        while excess() > 0:
            longer = [i for i in flexible_columns if widths[i] > least(columns[i])]
            if not longer:
                break
            widths[max(longer, key=lambda i: widths[i])] -= 1

    for i, column in enumerate(columns):
        if column.remark:
            widths[i] = min(widths[i], max(REMARK_MIN, widths[i] - excess()))
    narrow(lambda column: column.at_least)
    for i, column in enumerate(columns):
        if column.remark and excess() > 0:
            left = widths[i] - excess()
            widths[i] = left if left >= REMARK_LEAST else 0
    for i in reversed([i for i, column in enumerate(columns) if column.spare]):
        if excess() > 0:
            widths[i] = 0
    narrow(lambda column: column.least)
    return widths


def _cell(cell: Text | str, column: ScreenColumn) -> Text:
    return safe(cell, style="dim" if column.remark else "")


def _line(row: Sequence[Text], columns: Sequence[ScreenColumn], widths: Sequence[int]) -> Text:
    line = Text(no_wrap=True, overflow="crop")
    for cell, column, width in zip(row, columns, widths, strict=True):
        if not width:
            continue
        shown = _without_middle(cell, width) if column.both_ends else cell.copy()
        shown.truncate(width, overflow="ellipsis")
        shown.align("right" if column.right else "left", width)
        line.append(GAP if line else "")
        line.append_text(shown)
    line.rstrip()
    return line


def _without_middle(cell: Text, width: int) -> Text:
    """Both ends of a text that is too wide: ids often differ only at the end."""
    if cell.cell_len <= width:
        return cell.copy()
    head, tail = cell.copy(), cell.copy()
    head.truncate((width - 1) // 2)
    while head.cell_len + 1 + tail.cell_len > width:
        tail = tail[1:]
    return Text.assemble(head, "…", tail)


WIDE_COLUMNS: Final = 132
"""The least width at which there is room for whole uuids."""
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
    return open_wide_console()


@cache
def err() -> Console:
    """Messages, questions and progress: never mixed into what a command prints."""
    return open_wide_console(stderr=True)


def table(columns: Sequence[ScreenColumn], rows: Iterable[Sequence[Text | str]]) -> Group:
    """One line per row, as wide as the output."""
    return fitted_table(columns, rows, width=out().width)


def show(
    documents: Sequence[object],
    columns: Sequence[ScreenColumn],
    rows: Iterable[Sequence[Text | str]],
    *,
    as_json: bool,
    nothing: str,
) -> None:
    """Print a list: a line of JSON for each document, or a table, or that there is nothing."""
    if as_json:
        for document in documents:
            emit(document)
    elif documents:
        out().print(table(columns, rows))
    else:
        err().print(Text(nothing, style="dim"))


def answer(document: object, sentence: str, *, as_json: bool) -> None:
    """Print what a command has done: as JSON, or as a sentence."""
    if as_json:
        emit(document)
    else:
        out().print(Text(sentence))


def facts(pairs: Iterable[tuple[str, Text | str | None]]) -> Table:
    """A line for each name and value; pairs without a value are omitted."""
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


def named(namespace: str, name: str) -> str:
    """A name, preceded by its namespace unless that is the default."""
    return name if namespace == DEFAULT_NAMESPACE else f"{namespace}/{name}"


def short_id(execution_id: str) -> str:
    """The whole uuid if there is room, else its last group, which commands accept as well."""
    uuid = execution_id[-UUID_CHARS:]
    return uuid if out().width >= WIDE_COLUMNS else uuid[-SHORT_ID_CHARS:]


def id_column(name: str = "ID") -> ScreenColumn:
    """A column for ids from `short_id` and for ids that people chose."""
    at_least = UUID_CHARS if out().width >= WIDE_COLUMNS else SHORT_ID_CHARS
    return both_ends(name, at_least=at_least)


def one_line(text: str | None) -> str:
    """Text for a cell or the end of a line, with line breaks made visible."""
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


# What `--json` prints: one document per line, keys as in the engine's own records

_ENCODER: Final = msgspec.json.Encoder(enc_hook=str)


def emit(document: object) -> None:
    """Print one line of JSON."""
    sys.stdout.write(visible_json(_ENCODER.encode(plain(document)).decode()) + "\n")


def plain(value: object) -> object:
    """A value that JSON can hold; bytes that contain JSON are decoded."""
    if isinstance(value, Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return readable(value)
    return value


def readable(data: bytes) -> object:
    """Stored bytes: as JSON, else as text, else in base64 under that name."""
    if not data:
        return None
    try:
        meaning: object = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            return data.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(data).decode()}
    return meaning


def shown(data: bytes | None, chars_max: int) -> str | None:
    """Stored bytes for people, shortened."""
    if not data:
        return None
    meaning = readable(data)
    text = meaning if isinstance(meaning, str) else _ENCODER.encode(meaning).decode()
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"
