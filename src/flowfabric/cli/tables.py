"""Tables with one line per row that always fit the terminal.

Columns that hold what one copies or compares (states, ages) are never cut, and ids no
shorter than those we make; longer ones that people chose are cut in the middle.
When room is short, first the remark at the end gives way, then the widest of the
other columns down to what each needs, then the remark again, until it is left out.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct
from rich.console import Group
from rich.text import Text

from flowfabric.terminal import safe

GAP: Final = "  "
FLEXIBLE_MIN: Final = 5
REMARK_MIN: Final = 20
REMARK_LEAST: Final = 6
"""A remark with less room than this is left out."""


class ScreenColumn(Struct, frozen=True):
    title: str
    right: bool = False
    fixed: bool = False
    """Never cut."""
    remark: bool = False
    """The last column: dim, and the first to give way."""
    at_least: int = FLEXIBLE_MIN
    """How much room it needs if it has so much to show."""
    both_ends: bool = False
    """Cut in the middle, and never to less than it needs."""

    @property
    def least(self) -> int:
        return self.at_least if self.both_ends else min(self.at_least, FLEXIBLE_MIN)


def right(title: str) -> ScreenColumn:
    return ScreenColumn(title, right=True, fixed=True)


def fixed(title: str) -> ScreenColumn:
    return ScreenColumn(title, fixed=True)


def flexible(title: str, *, at_least: int = FLEXIBLE_MIN) -> ScreenColumn:
    return ScreenColumn(title, at_least=at_least)


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

    def excess() -> int:
        shown = [each for each in widths if each]
        return sum(shown) + len(GAP) * (len(shown) - 1) - width

    for i, column in enumerate(columns):
        if column.remark:
            widths[i] = min(widths[i], max(REMARK_MIN, widths[i] - excess()))
    flexible_columns = [i for i, c in enumerate(columns) if not c.fixed and not c.remark]
    while excess() > 0:
        longer = [i for i in flexible_columns if widths[i] > columns[i].at_least]
        if not longer:
            break
        widths[max(longer, key=lambda i: widths[i])] -= 1
    for i, column in enumerate(columns):
        if column.remark and excess() > 0:
            left = widths[i] - excess()
            widths[i] = left if left >= REMARK_LEAST else 0
    while excess() > 0:
        longer = [i for i in flexible_columns if widths[i] > columns[i].least]
        if not longer:
            break
        widths[max(longer, key=lambda i: widths[i])] -= 1
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
    """Both ends of a text that is too wide: the end is what tells one id from the next."""
    if cell.cell_len <= width:
        return cell.copy()
    head, tail = cell.copy(), cell.copy()
    head.truncate((width - 1) // 2)
    while head.cell_len + 1 + tail.cell_len > width:
        tail = tail[1:]
    return Text.assemble(head, "…", tail)
