"""What the package logs is safe to show, whatever formats it."""

import io
import logging
import time
from collections.abc import Iterator

import pytest

from flowfabric.errors import BackendErrorKind, Transport
from flowfabric.logs import open_log
from flowfabric.outages import Outages

HOSTILE = "\x1b[2J\u202e\x85\u115f\nforged"
SHOWN = "\\x1b[2J\\u202e\\x85\\u115f\\nforged"


@pytest.fixture
def printed() -> Iterator[io.StringIO]:
    """What the plainest handler prints of all our records."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    logger = logging.getLogger("flowfabric")
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


class Loud(Exception):
    def __repr__(self) -> str:
        return f"<{self}>"


@pytest.mark.parametrize(
    ("message", "argument", "shown"),
    [
        ("failed: %s", HOSTILE, f"failed: {SHOWN}"),
        ("failed: %s", ValueError(HOSTILE), f"failed: {SHOWN}"),
        ("failed: %r", Loud(HOSTILE), f"failed: <{SHOWN}>"),
        ("%d of them", 3, "3 of them"),
        ("%.1f s", 0.25, "0.2 s"),
    ],
)
def test_arguments_are_visible(
    printed: io.StringIO, message: str, argument: object, shown: str
) -> None:
    open_log("flowfabric.tried").warning(message, argument)

    assert printed.getvalue() == f"WARNING:flowfabric.tried:{shown}\n"


def test_no_line_of_a_traceback_looks_like_a_record(printed: io.StringIO) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        open_log("flowfabric.tried").exception("failed")

    first, *others = printed.getvalue().split("\n")[:-1]
    assert first == "ERROR:flowfabric.tried:failed"
    assert others[-2:] == ["  ValueError: \\x1b[2J\\u202e\\x85\\u115f", "  forged"]
    assert all(line.startswith("  ") for line in others)


def test_the_name_of_a_database_that_does_not_answer_is_visible(printed: io.StringIO) -> None:
    outages = Outages()
    error = Transport("postgres", HOSTILE, kind=BackendErrorKind.TRANSPORT)
    outages.failed(f"postgres {HOSTILE}", error, 1.0)
    outages.answered(f"postgres {HOSTILE}", time.monotonic())

    away, back = printed.getvalue().splitlines()
    assert f"postgres {SHOWN} does not answer" in away
    assert f"postgres {SHOWN} answers again" in back
