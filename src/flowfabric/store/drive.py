"""Running a unit of work that never really waits."""

import inspect
from collections.abc import Awaitable
from typing import TypeVar

from flowfabric.errors import Bug

T = TypeVar("T")


def drive(unit: Awaitable[T]) -> T:
    """Run to its end a coroutine that never really waits."""
    steps = unit.__await__()
    try:
        next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
    if inspect.iscoroutine(unit):
        unit.close()
    raise Bug("a unit of work awaited something other than its transaction")
