"""What is kept of a handler's exception beside its message: where in the program it happened."""

import concurrent.futures
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

from flowfabric.worker.describing import elsewhere

OURS: Final = (str(Path(__file__).parent.parent), str(Path(concurrent.futures.__file__).parent))
"""Files between the worker and a handler, of no interest to whoever wrote that one."""
CHAIN_MAX: Final = 20
"""Exceptions of a chain of causes that are told."""


def theirs(error: BaseException) -> TracebackType | None:
    """The traceback from the first line of the program on; None if it never came to one."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(OURS):
        frame = frame.tb_next
    return frame


def traceback_text(error: BaseException) -> str | None:
    """The traceback as Python prints it, without our own frames before the program's."""
    origin = elsewhere(error)
    if origin is not None:
        return origin.told.trace or None
    where = theirs(error)
    if where is None:
        return None
    told = traceback.TracebackException(type(error), error, where)
    each, count = told, 1
    while (cause := each.__cause__ or each.__context__) is not None:
        if count == CHAIN_MAX:
            each.__cause__ = each.__context__ = None
            break
        each, count = cause, count + 1
    return "".join(told.format()).rstrip()
