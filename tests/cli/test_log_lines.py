"""Log lines as people read them at a terminal."""

import logging

from rich.text import Text

from flowfabric.cli.logs import readable

UUID = "550e8400-e29b-41d4-a716-446655440000"


def line_of(message: str) -> str:
    record = logging.LogRecord("flowfabric", logging.WARNING, "", 0, message, None, None)
    record.__dict__ |= {"task": "greet", "execution_id": f"{{fp:24}}:{UUID}", "attempt_index": 0}
    line = readable(record).renderables[0]
    assert isinstance(line, Text)
    return line.plain.partition("warning")[2].strip()


def test_task_and_run_are_added_to_a_message() -> None:
    assert line_of("it is slow") == "greet it is slow  446655440000 try 1"


def test_a_message_that_names_them_is_not_repeated() -> None:
    assert line_of(f"greet {UUID} failed: no") == f"greet {UUID} failed: no try 1"
