"""`tail`: what a run says, as it says it."""

import sys
from typing import Final

import click
from rich.text import Text

from flowfabric.cli import screen
from flowfabric.cli.options import Target, namespace_option, target_options, with_engine
from flowfabric.core.checks import visible, visible_lines
from flowfabric.core.streams import Encoding
from flowfabric.engine.engine import Engine
from flowfabric.streams import Follower, Frame

BINARY: Final = "[{} bytes]"


class LiveDatabase:
    """A database in which things happen by themselves."""

    happens = True

    async def is_idle(self) -> bool:
        return False


@click.command("tail", short_help="See what an execution says, as it says it.")
@click.argument("execution_id", metavar="ID")
@click.option(
    "--after", default="start", metavar="CURSOR", help="Begin after this one; `now` is another."
)
@click.option("--all", "everything", is_flag=True, help="Show what no longer counts, too.")
@click.option(
    "--follow/--no-follow", default=True, help="Go on until the execution ends.  [default: follow]"
)
@namespace_option
@target_options
@with_engine
async def tail(
    engine: Engine,
    target: Target,
    execution_id: str,
    after: str,
    everything: bool,
    follow: bool,
) -> None:
    """Print what the execution ID emits: text as it is, all else a line each.

    Ends when the execution has ended. With --json: a frame per line, with its cursor.
    """
    found = await target.find(engine, execution_id)

    async def here() -> tuple[Engine, LiveDatabase]:
        return engine, LiveDatabase()

    follower = Follower(here, found, after=after, superseded=everything, live=True)
    printer = Printer(as_json=target.json)
    if not follow:
        printer.print_all(await follower.now())
    else:
        while (page := await follower.next_page()) is not None:
            printer.print_all(page)
    printer.end()


class Printer:
    """Writes frames to the standard output; a turn is told beside it."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._in_line = False

    def print_all(self, frames: list[Frame]) -> None:
        for frame in frames:
            self._print(frame)
        sys.stdout.flush()

    def end(self) -> None:
        """Whatever comes next begins a line."""
        if self._in_line:
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _print(self, frame: Frame) -> None:
        if self._as_json:
            screen.emit(_document(frame))
        elif frame.is_turn:
            self.end()
            self._in_line = False
            told = f"attempt {frame.attempt + 1} starts over; what came before no longer counts"
            screen.err().print(Text(told, style="yellow"))
        elif frame.encoding is Encoding.UTF8:
            shown = "\n".join(visible_lines(frame.text))
            sys.stdout.write(shown)
            self._in_line = not shown.endswith("\n") if shown else self._in_line
        else:
            self.end()
            self._in_line = False
            binary = frame.encoding is Encoding.BASE64
            line = BINARY.format(len(frame.data)) if binary else frame.text
            sys.stdout.write(f"{visible(line)}\n")


def _document(frame: Frame) -> dict[str, object]:
    said: object = frame.text if frame.encoding is Encoding.UTF8 else frame.data
    document: dict[str, object] = {
        "cursor": frame.cursor,
        "attempt": frame.attempt,
        "at_ms": frame.at_ms,
        "kind": frame.kind,
        "content": said if frame.data else None,
        "step": frame.step,
        "superseded": frame.superseded,
    }
    if frame.take_over is not None:
        document["kept_steps"] = sorted(frame.take_over.kept_steps)
    return document
