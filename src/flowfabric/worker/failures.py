"""How a step failed, stored so that later runs of the handler see the same.

An exception comes back as what it was: the class is looked up by module and name and
called with the arguments it had, if those were plain values; one whose constructor
wants something else is made without it, with its text. So `except ValueError` works
in every run. A class that cannot be found, because it was defined inside a function
or is gone, comes back as `StepFailed`.
"""

import importlib
import traceback
from typing import Final

import msgspec
from msgspec import Struct

from flowfabric.core.checks import shorten
from flowfabric.core.limits import NAME_BYTES_MAX
from flowfabric.errors import StepFailed

GIVEN_UP: Final = b'"given up"'
"""Stored for a call the handler cancelled: later runs wait there until they cancel it too."""
MESSAGE_BYTES_MAX: Final = 8 * 1024
TRACEBACK_BYTES_MAX: Final = 16 * 1024
ARGS_BYTES_MAX: Final = 8 * 1024

Plain = str | int | float | bool | None


class StoredFailure(Struct, frozen=True, kw_only=True):
    module: str
    name: str
    message: str
    args: list[Plain] | None
    """None if they were no plain values."""
    traceback: str


def encode_failure(error: Exception) -> bytes:
    kind = type(error)
    return msgspec.json.encode(
        StoredFailure(
            module=shorten(kind.__module__, NAME_BYTES_MAX),
            name=shorten(kind.__qualname__, NAME_BYTES_MAX),
            message=shorten(_text(error), MESSAGE_BYTES_MAX),
            args=_plain(error.args),
            traceback=shorten(_traceback(error), TRACEBACK_BYTES_MAX),
        )
    )


def decode_failure(data: bytes) -> StoredFailure:
    return msgspec.json.decode(data, type=StoredFailure)


def rebuilt(step_key: str, data: bytes) -> Exception:
    """The exception a stored failure stands for."""
    stored = decode_failure(data)
    kind = _find(stored.module, stored.name)
    if kind is None:
        return StepFailed(step_key, stored.name, stored.message)
    made = _make(kind, stored)
    made.add_note(f"stored by an earlier run, as the failure of step {step_key}")
    return made


def _make(kind: type[Exception], stored: StoredFailure) -> Exception:
    if stored.args is not None:
        try:
            made: object = kind(*stored.args)
        except Exception:
            made = None
        if type(made) is kind:
            assert isinstance(made, Exception)
            return made
    bare = kind.__new__(kind)
    bare.args = (stored.message,) if stored.args is None else tuple(stored.args)
    return bare


def _find(module: str, name: str) -> type[Exception] | None:
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:
        return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _plain(args: tuple[object, ...]) -> list[Plain] | None:
    plain = [each for each in args if each is None or isinstance(each, str | int | float | bool)]
    if len(plain) < len(args):
        return None
    try:
        data = msgspec.json.encode(plain)
        kept = msgspec.json.decode(data, type=list[Plain])
    except (msgspec.MsgspecError, UnicodeError, OverflowError):
        return None
    return kept if kept == plain and len(data) <= ARGS_BYTES_MAX else None


def _traceback(error: Exception) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as failure:
        return f"<its traceback cannot be had: {type(failure).__name__}>"


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"<its text cannot be had: {type(failure).__name__}>"
