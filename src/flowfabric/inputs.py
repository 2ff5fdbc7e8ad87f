"""Results of other executions as arguments.

A task in a flow may have arguments that are not known when it is stored: results of other tasks.
Its payload then says which parameter gets the result of which task, and the worker fills them in
when it runs the task.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from flowfabric.core.checks import JSON
from flowfabric.errors import InvalidInput
from flowfabric.task import Arguments, Source, Task

JSON_WITH_INPUTS: Final = "json+inputs"
"""The encoding of a payload that has to be filled in."""


class Incomplete(Struct, frozen=True):
    """A payload that still lacks some arguments."""

    arguments: dict[str, msgspec.Raw]
    inputs: dict[str, str | list[str]]
    """For each parameter, the name of a result, or the names of several, which come as a list."""


class Composed(Struct, frozen=True):
    payload: bytes
    payload_encoding: str
    passed: tuple[Source, ...]
    """The executions whose results are passed on."""


_DECODER: Final = msgspec.json.Decoder(Incomplete)


def compose(
    task: Task[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    join: Sequence[Source] | None = None,
    *,
    some_may_be_missing: bool = False,
) -> Composed:
    """A payload of arguments some of which are sources.

    The results of `join` go as a list to the first required parameter that has no
    argument, or to `*args`; without such a parameter they are not passed on.
    """
    arguments = task.arguments
    bound = arguments.bind_some(args, kwargs)
    if join is not None:
        taker = _taker(arguments, bound)
        if taker is not None:
            bound[taker] = list(join)
    for name in arguments.required:
        if name not in bound:
            raise InvalidInput(f"argument {name} of {task.name}", "is missing")
    sources = {name: source for name, value in bound.items() if (source := _sources(name, value))}
    if not sources:
        return Composed(arguments.encode_some(bound), JSON, ())
    if some_may_be_missing:
        _check_may_miss(task, sources)
    plain = arguments.encode_some({n: value for n, value in bound.items() if n not in sources})
    payload = Incomplete(
        arguments=msgspec.json.decode(plain, type=dict[str, msgspec.Raw]),
        inputs={
            name: source.name if isinstance(source, Source) else [each.name for each in source]
            for name, source in sources.items()
        },
    )
    passed: dict[str, Source] = {}
    for source in sources.values():
        passed |= {each.name: each for each in ([source] if isinstance(source, Source) else source)}
    return Composed(msgspec.json.encode(payload), JSON_WITH_INPUTS, tuple(passed.values()))


def _taker(arguments: Arguments, bound: Mapping[str, object]) -> str | None:
    for name in (*arguments.required, arguments.rest()):
        if name is not None and name not in bound:
            return name
    return None


def _sources(name: str, value: object) -> Source | list[Source] | None:
    if isinstance(value, Source):
        return value
    if not isinstance(value, list | tuple):
        return None
    source = [each for each in value if isinstance(each, Source)]
    if source and len(source) < len(value):
        raise InvalidInput(
            f"argument {name}",
            "mixes nodes with other values; pass the other values as a separate argument",
        )
    return source or None


def _check_may_miss(task: Task[..., object], sources: Mapping[str, Source | list[Source]]) -> None:
    for name, source in sources.items():
        if isinstance(source, Source) and not task.arguments.takes_none(name):
            raise InvalidInput(
                f"argument {name} of {task.name}",
                f"may have no value, for the task may run without {source.name}; let it be"
                " None or have a default, or use `join`",
            )


def fill_in(task: Task[..., object], payload: bytes, results: Mapping[str, bytes | None]) -> bytes:
    """The payload with results put in. A missing one is omitted, or null."""
    try:
        incomplete = _DECODER.decode(payload)
    except msgspec.DecodeError as error:
        raise InvalidInput(
            f"payload of {task.name}", f"is not {JSON_WITH_INPUTS}: {error}"
        ) from None
    values = dict(incomplete.arguments)
    for parameter, source in incomplete.inputs.items():
        if isinstance(source, list):
            came = [results[name] or b"null" for name in source if name in results]
            values[parameter] = msgspec.Raw(b"[" + b",".join(came) + b"]")
        elif source in results or parameter in task.arguments.required:
            values[parameter] = msgspec.Raw(results.get(source) or b"null")
    return msgspec.json.encode(values)
