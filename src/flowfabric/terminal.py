"""The one way from us to a terminal.

Every text passes `Console.render`, whatever prints it and however deep in a table it lies,
and there it becomes visible: nothing a database holds can act on the terminal, and nobody
who prints has to think of it. A line stays a line as well, since text from outside could
forge another; what shall have several is printed line by line, or as a `block`.
"""

from collections.abc import Iterable

from rich import console
from rich.console import ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Span, Text

from flowfabric.core.visible import is_visible, visible, visible_lines


class Console(console.Console):
    """A console that shows text and obeys none."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if isinstance(renderable, str):
            renderable = self.render_str(renderable)
        if isinstance(renderable, Text):
            renderable = safe(renderable)
        return super().render(renderable, options)


def open_console(*, stderr: bool = False, width: int | None = None) -> Console:
    return Console(stderr=stderr, width=width, highlight=False, emoji=False, soft_wrap=False)


def safe(text: Text | str, style: str | Style = "") -> Text:
    """The same text, visible and on one line, in the same colours."""
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


def block(text: str, style: str | Style = "") -> Group:
    """Text from outside that may have several lines, such as a payload."""
    return Group(*(Text(line, style=style) for line in visible_lines(text)))
