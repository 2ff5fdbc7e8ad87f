"""Our loggers. What they record is safe to show, however it is formatted.

A failure's text comes from anyone who may submit work, the name of a database from its
URL. Control characters in both are escaped in the record itself, in its arguments and
traceback, since the program may print records with any formatter.
"""

import logging
from typing import Final

from flowfabric.core.checks import visible, visible_lines

_TRACEBACK: Final = logging.Formatter()


class Shown:
    """An argument of a message, escaped however it is formatted."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __str__(self) -> str:
        return visible(str(self.value))

    def __repr__(self) -> str:
        return visible(repr(self.value))


def open_log(name: str) -> logging.Logger:
    log = logging.getLogger(name)
    log.addFilter(make_visible)
    return log


def make_visible(record: logging.LogRecord) -> bool:
    """A filter that lets every record pass, with its control characters escaped."""
    if isinstance(record.args, tuple):
        record.args = tuple(map(_shown, record.args))
    if record.exc_info and not record.exc_text:
        # Formatters print this text if there is one. Indented, so that no line of an
        # exception's text looks like a record.
        lines = visible_lines(_TRACEBACK.formatException(record.exc_info))
        record.exc_text = "\n".join(f"  {line}" for line in lines)
    return True


def _shown(value: object) -> object:
    if isinstance(value, int | float):
        return value
    return visible(value) if type(value) is str else Shown(value)
