"""The one way from us to a terminal.

Every text passes `Console.render`, whatever prints it and however deep in a table it is, and
its control characters are escaped there: nothing in a database can control the terminal, and
callers need not think of it. A text also stays on one line, since a second line could
imitate our output. Text of several lines is printed as a `block` if nothing else is printed,
and as `Indented` otherwise.
"""

import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from rich import console
from rich.console import ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Span, Text

from flowfabric.core.checks import is_visible, visible, visible_lines

INDENT: Final = "  "
PIPED_COLUMNS: Final = 160
"""The width of what goes into a pipe or file, unless COLUMNS says otherwise."""


class Console(console.Console):
    """A console that escapes control characters."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if isinstance(renderable, str):
            renderable = self.render_str(renderable)
        if isinstance(renderable, Text):
            renderable = safe(renderable)
        return super().render(renderable, options)


def prepare() -> None:
    """Let commands print whatever they find, wherever it goes."""
    for stream in (sys.stdout, sys.stderr):
        # One that has only ASCII gets question marks instead of an error.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # A terminal that does not know its width says 0, in which no line fits.
    if os.environ.get("COLUMNS", "1").strip("0") == "":
        del os.environ["COLUMNS"]


def open_console(*, stderr: bool = False, width: int | None = None) -> Console:
    return Console(stderr=stderr, width=width, highlight=False, emoji=False, soft_wrap=False)


def open_wide_console(*, stderr: bool = False) -> Console:
    """One for tables and graphs: a pipe or file has room for their columns."""
    stream = sys.stderr if stderr else sys.stdout
    fits = stream.isatty() or "COLUMNS" in os.environ
    return open_console(stderr=stderr, width=None if fits else PIPED_COLUMNS)


def safe(text: Text | str, style: str | Style = "") -> Text:
    """The same text in the same colours, escaped and on one line."""
    if isinstance(text, str):
        return Text(visible(text), style=style)
    if is_visible(text.plain):
        return text
    shown = [visible(each) for each in text.plain]
    starts = [0]
    for each in shown:
        starts.append(starts[-1] + len(each))
    last = len(shown)
    shown_text = text.blank_copy("".join(shown))
    shown_text.spans = [
        Span(starts[min(start, last)], starts[min(end, last)], style)
        for start, end, style in text.spans
    ]
    return shown_text


class Indented:
    """Foreign text of several lines, such as a traceback, between our own lines.

    Every line is indented, wrapped ones too, so that none looks like ours.
    """

    def __init__(self, text: str, style: str | Style = "") -> None:
        self._lines = visible_lines(text)
        self._style = style

    def __rich_console__(self, console: console.Console, options: ConsoleOptions) -> Iterator[Text]:
        room = max(1, options.max_width - len(INDENT))
        for line in self._lines:
            whole = Text(line, style=self._style)
            parts = [whole] if options.no_wrap else whole.wrap(console, room)
            for part in parts:
                yield Text(INDENT, no_wrap=True, overflow="ignore").append_text(part)


def block(text: str, style: str | Style = "") -> Group:
    """Foreign text of several lines, such as the result that was asked for."""
    return Group(*(Text(line, style=style) for line in visible_lines(text)))
