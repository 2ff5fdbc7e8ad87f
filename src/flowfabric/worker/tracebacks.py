"""What is kept of a handler's exception beside its message: where in the program it happened."""

import asyncio
import concurrent.futures
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from flowfabric.worker.describing import elsewhere

OURS: Final = (str(Path(__file__).parent.parent), str(Path(concurrent.futures.__file__).parent))
"""Files between the worker and a handler, of no interest to whoever wrote that one."""
LOOP: Final = str(Path(asyncio.__file__).parent)
FRAMES_MAX: Final = 5
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


def place_of(frame: FrameType) -> str:
    """What the program is doing on an event loop: its own calls, in one line, and the last one's.

    What runs the loop, and what is ours, is left out.
    """
    stack = traceback.extract_stack(frame)
    begin = max((n for n, each in enumerate(stack) if each.filename.startswith(LOOP)), default=-1)
    own = [each for each in stack[begin + 1 :] if not each.filename.startswith(OURS)] or stack[-1:]
    shown = [f"{each.name}, {each.filename}:{each.lineno}" for each in own]
    if len(shown) > FRAMES_MAX:
        shown = [*shown[:2], "…", *shown[2 - FRAMES_MAX :]]
    return " → ".join(shown) + (f": {own[-1].line}" if own[-1].line else "")
