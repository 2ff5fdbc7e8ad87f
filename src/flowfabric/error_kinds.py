"""The error all others are, what errors are told apart by, and how a refused value is shown."""

import re
from enum import StrEnum
from typing import ClassVar, Final

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


_WORD_START: Final = re.compile(r"(?<!^)(?=[A-Z])")


class FlowFabricError(Exception):
    """Something FlowFabric refused or could not do."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    error_class: ErrorClass = ErrorClass.TERMINAL
    detail: str

    def __init_subclass__(
        cls,
        *,
        code: str | None = None,
        error_class: ErrorClass | None = None,
        http_status: int | None = None,
    ) -> None:
        super().__init_subclass__()
        cls.code = code or _WORD_START.sub("_", cls.__name__).lower()
        if error_class is not None:
            cls.error_class = error_class
        if http_status is not None:
            cls.http_status = http_status

    def __init__(self, detail: str = "") -> None:
        self.detail = detail or (self.__doc__ or self.code).partition("\n")[0]
        super().__init__(self.detail)

    @property
    def retryable(self) -> bool:
        """Whether repeating the same call may succeed."""
        return self.error_class is ErrorClass.RETRYABLE
