"""What a command's exit status tells a script.

| Status | Meaning |
|---|---|
| 0 | done |
| 1 | something else went wrong, or the awaited work failed |
| 2 | the command line, or a value on it, makes no sense |
| 3 | there is no such execution, lane, schedule … |
| 4 | refused: the state of things does not allow it, or others were quicker |
| 5 | the database cannot be reached, or its schema does not fit |
| 130 | interrupted |
"""

from typing import Final

from flowfabric.errors import (
    Conflict,
    Contention,
    FlowFabricError,
    NotFound,
    OperationTimeout,
    ResourceExhausted,
    StateConflict,
    Transport,
    Unavailable,
    Validation,
)

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NOT_FOUND: Final = 3
REFUSED: Final = 4
UNAVAILABLE: Final = 5
INTERRUPTED: Final = 130

_BY_CLASS: Final[tuple[tuple[type[FlowFabricError], int], ...]] = (
    (NotFound, NOT_FOUND),
    (Validation, USAGE),
    (Contention, REFUSED),
    (Conflict, REFUSED),
    (StateConflict, REFUSED),
    (Transport, UNAVAILABLE),
    (Unavailable, UNAVAILABLE),
    (ResourceExhausted, UNAVAILABLE),
    (OperationTimeout, UNAVAILABLE),
)


def status_of(error: FlowFabricError) -> int:
    return next((status for kind, status in _BY_CLASS if isinstance(error, kind)), FAILED)
