"""What errors are told apart by, and how a refused value is shown in a message."""

from enum import StrEnum
from typing import Final

VALUE_SHOWN_MAX_CHARS: Final = 80


class ErrorClass(StrEnum):
    """What the caller should do about an error."""

    TERMINAL = "terminal"
    RETRYABLE = "retryable"
    COOPERATIVE = "cooperative"
    INFORMATIONAL = "informational"
    ADVISORY = "advisory"
    BUG = "bug"
    EXPECTED = "expected"
    SOFT_ERROR = "soft_error"


class BackendErrorKind(StrEnum):
    """What kind of fault a backend reported."""

    TRANSPORT = "transport"
    PROTOCOL = "protocol"
    TIMEOUT = "timeout"
    AUTH = "auth"
    CLUSTER = "cluster"
    BUSY_LOADING = "busy_loading"
    SCRIPT_NOT_LOADED = "script_not_loaded"
    OTHER = "other"

    @property
    def retryable(self) -> bool:
        return self in (
            BackendErrorKind.TRANSPORT,
            BackendErrorKind.TIMEOUT,
            BackendErrorKind.CLUSTER,
            BackendErrorKind.BUSY_LOADING,
        )


def abbreviated(value: object) -> str:
    """`value` as it may appear in a message: at most `VALUE_SHOWN_MAX_CHARS` long."""
    if isinstance(value, str | bytes):
        value = value[: VALUE_SHOWN_MAX_CHARS + 1]
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= VALUE_SHOWN_MAX_CHARS else text[: VALUE_SHOWN_MAX_CHARS - 1] + "…"
