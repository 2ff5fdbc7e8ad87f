"""What the verbs of a context have in common, and what they refuse before they do anything."""

import inspect
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

import msgspec

from flowfabric.core.checks import check_text
from flowfabric.core.journal import STEP_NAME_BYTES_MAX
from flowfabric.errors import InvalidInput
from flowfabric.json_values import encode_value
from flowfabric.retrying import Retry
from flowfabric.task import Call, HandlerContext, Task
from flowfabric.worker.lines import inside_step
from flowfabric.worker.services import Services

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V", bound="Verbs")

IN_STEPS: Final = ("progress", "emit", "summary")
"""What the function of a step may call; everything else is refused there for that reason."""


class Verbs(HandlerContext):
    """Some of the verbs of a context."""

    _services: Services
    _waits: bool = False
    """Whether somebody waits in a thread for what the verbs return: `ctx.blocking` does."""


def on_loop(
    verb: Callable[Concatenate[V, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[V, P], Coroutine[object, object, T]]:
    """Refuse a verb at once where nobody can await it, in a plain function, say; and see to it
    that somebody does."""

    @wraps(verb)
    def checked(self: V, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[object, object, T]:
        check_awaitable(self, verb.__name__)
        return promised(self, verb.__name__, args, verb(self, *args, **kwargs))

    return checked


def promised(
    verbs: Verbs, name: str, args: Sequence[object], made: Coroutine[object, object, T]
) -> Coroutine[object, object, T]:
    """What a verb returns: the handler has to await it."""
    if not verbs._waits:
        verbs._services.promises.add(_shown(name, args), made)
    return made


def _shown(verb: str, args: Sequence[object]) -> str:
    """A call as the code has it, about."""
    about = args[0] if args else ""
    if isinstance(about, Task | Call):
        about = about.name if isinstance(about, Task) else about.task.name
        return f"ctx.{verb}({about}, …)"
    return f"ctx.{verb}({about!r}, …)" if isinstance(about, str) and about else f"ctx.{verb}(…)"


def check_awaitable(verbs: Verbs, name: str) -> None:
    if verbs._waits or verbs._services.is_here():
        return
    if inside_step.get() is None or name in IN_STEPS:
        raise InvalidInput(
            f"ctx.{name}",
            "has to be awaited on the event loop of the worker; a plain function, which runs in a"
            f" thread, writes ctx.blocking.{name}(…)",
        )


def check_step(name: object, function: object, retry: object) -> None:
    """What `ctx.step` is called with."""
    if callable(name) and not isinstance(name, str):
        raise InvalidInput("name", 'comes first, as in ctx.step("fetch", fetch, url)', name)
    check_text("name", name, bytes_max=STEP_NAME_BYTES_MAX, empty=False)
    if not isinstance(retry, Retry | None):
        raise InvalidInput("retry", "must be a Retry", retry)
    step = f"the function of step {name}"
    if isinstance(function, Task | Call):
        task = function if isinstance(function, Task) else function.task
        raise InvalidInput(
            step,
            f"is a task; `await ctx.submit({task.name}, …)` runs it as an execution of its own, and"
            f" {task.name}.function is its function",
        )
    if callable(function):
        return
    if inspect.iscoroutine(function):
        function.close()
    raise InvalidInput(
        step,
        f"has been called already; pass it and its arguments, as in ctx.step({name!r}, fetch, url)",
        function,
    )


def encode_step(key: str, value: object) -> bytes:
    return encode_value(f"the result of step {key}", value)


def decode_step(key: str, decode: Callable[[bytes], object], data: bytes) -> object:
    try:
        return decode(data)
    except msgspec.DecodeError as error:
        raise InvalidInput(
            f"the result of step {key}", f"does not fit its return annotation: {error}"
        ) from error
