"""Logs of a command: for people on a terminal, JSON lines otherwise.

Each line names its execution, attempt, worker and task, where it has them.
"""

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Final

import click
import msgspec
from rich.console import Group
from rich.text import Text

from flowfabric.core.checks import visible_json
from flowfabric.terminal import Indented, open_console

FIELDS: Final = ("execution_id", "attempt_index", "worker_instance_id", "task")
"""Attributes of a record that are logged with its message."""
_STYLES: Final = {
    logging.DEBUG: "dim",
    logging.INFO: "",
    logging.WARNING: "yellow",
    logging.ERROR: "bold red",
    logging.CRITICAL: "bold red",
}
_TRACEBACK: Final = logging.Formatter()


def configure(level: str, *, as_json: bool | None = None) -> None:
    """Send all logs to standard error, as JSON lines if asked for, or if it is not a terminal."""
    json_lines = not sys.stderr.isatty() if as_json is None else as_json
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if json_lines:
        handler.setFormatter(JsonLines())
    else:
        handler = Readable()
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # It logs every request; we log those that matter.
    logging.getLogger("httpx").setLevel(logging.WARNING)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        document: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        document |= fields_of(record)
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        try:
            return visible_json(msgspec.json.encode(document, enc_hook=str).decode())
        except UnicodeEncodeError:
            # Only the slower encoder can write half a surrogate pair.
            return json.dumps(document, default=str)


class Readable(logging.Handler):
    """One line per record, in colour; the traceback beneath it."""

    def __init__(self) -> None:
        super().__init__()
        self._console = open_console(stderr=True)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(readable(record), soft_wrap=True)
        except (OSError, ValueError):
            self.handleError(record)


def readable(record: logging.LogRecord) -> Group:
    style = _STYLES.get(record.levelno, "")
    line = Text.assemble(
        (time.strftime("%H:%M:%S", time.localtime(record.created)), "dim"),
        (f" {record.levelname.lower():<7} ", style),
    )
    fields = fields_of(record)
    message = record.getMessage()
    # Some messages name the task and the run themselves, for programs that show nothing else.
    if (task := fields.get("task")) and not message.startswith(f"{task} "):
        line.append(f"{task} ", style="cyan")
    line.append(message)
    if "execution_id" in fields:
        short = str(fields["execution_id"])[-12:]
        line.append("" if short in message else f"  {short}", style="dim")
        # People count from one, as `ls` does.
        if isinstance(index := fields.get("attempt_index"), int):
            line.append(f" try {index + 1}", style="dim")
    if not record.exc_info:
        return Group(line)
    return Group(line, Indented(_TRACEBACK.formatException(record.exc_info), style="dim"))


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}


LEVELS: Final = ("debug", "info", "warning", "error")
json_lines_option = click.option(
    "--json", "as_json", is_flag=True, help="Log JSON lines, even on a terminal."
)
log_level_option = click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(LEVELS),
    help="The least severe messages to log.",
)
