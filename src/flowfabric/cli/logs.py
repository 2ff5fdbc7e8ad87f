"""Logs: for people on a terminal, JSON lines otherwise; each with execution, attempt, worker."""

import json
import logging
import sys
import time
from typing import Final

import msgspec
from rich.console import Group
from rich.text import Text

from flowfabric.core.checks import visible_json
from flowfabric.terminal import Console, Indented, open_console

FIELDS: Final = ("execution_id", "attempt_index", "worker_instance_id", "task")
"""What records may carry besides their message, under these names."""

_STYLES: Final = {
    logging.DEBUG: "dim",
    logging.INFO: "",
    logging.WARNING: "yellow",
    logging.ERROR: "bold red",
    logging.CRITICAL: "bold red",
}
_TRACEBACK: Final = logging.Formatter()


def configure(level: str, *, as_json: bool | None = None) -> None:
    """Send all logs to standard error; as JSON lines if told so or if it is no terminal."""
    json_lines = not sys.stderr.isatty() if as_json is None else as_json
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if json_lines:
        handler.setFormatter(JsonLines())
    else:
        handler = Readable()
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, object] = {
            "time": _utc(record.created),
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
            # Half a surrogate pair, which only the slower encoder can write.
            return json.dumps(document, default=str)


class Readable(logging.Handler):
    """One line per record, in colour; the traceback beneath it."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or open_console(stderr=True)

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
    if task := fields.get("task"):
        line.append(f"{task} ", style="cyan")
    line.append(record.getMessage())
    if "execution_id" in fields:
        line.append(f"  {str(fields['execution_id'])[-12:]}", style="dim")
        # People count from one, as `ls` does.
        if isinstance(index := fields.get("attempt_index"), int):
            line.append(f" try {index + 1}", style="dim")
    if not record.exc_info:
        return Group(line)
    return Group(line, Indented(_TRACEBACK.formatException(record.exc_info), style="dim"))


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}


def _utc(at_s: float) -> str:
    return (
        f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at_s))}.{int(at_s * 1_000) % 1_000:03}Z"
    )
