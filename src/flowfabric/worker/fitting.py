"""Reading what a run has stored by the types that the code has today.

It fitted the types of the code that stored it. Where it no longer does, a model has got another
field, or a function another annotation: the run is blocked like by any other changed code.
"""

from collections.abc import Callable
from typing import TypeVar

from flowfabric.errors import CodeMismatch, Unsuccessful
from flowfabric.worker.failures import text_of
from flowfabric.worker.parking import Parking

T = TypeVar("T")


async def fitting(parking: Parking, read: Callable[[], T]) -> T:
    """What `read` returns; if it cannot, the handler is parked here, inside of a call."""
    try:
        return read()
    except Unsuccessful:
        raise
    except Exception as error:
        # Whatever it raises: reading runs code of the program's own, which has changed.
        await parking.until_code_fits(CodeMismatch(None, text_of(error)))
        raise
