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
    """A payload some of whose arguments are still to come."""

    arguments: dict[str, msgspec.Raw]
    inputs: dict[str, str | list[str]]
    """By parameter: the name of a result, or those of several, which come as a list."""


class Composed(Struct, frozen=True):
    payload: bytes
    payload_encoding: str
    passed: tuple[Source, ...]
    """Whose results are passed on."""


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
    given = arguments.bind_some(args, kwargs)
    if join is not None:
        taker = _taker(arguments, given)
        if taker is not None:
            given[taker] = list(join)
    for name in arguments.required:
        if name not in given:
            raise InvalidInput(f"argument {name} of {task.name}", "is missing")
    sources = {name: found for name, value in given.items() if (found := _sources(name, value))}
    if not sources:
        return Composed(arguments.encode_some(given), JSON, ())
    if some_may_be_missing:
        _check_may_miss(task, sources)
    plain = arguments.encode_some({n: value for n, value in given.items() if n not in sources})
    payload = Incomplete(
        arguments=msgspec.json.decode(plain, type=dict[str, msgspec.Raw]),
        inputs={
            name: found.name if isinstance(found, Source) else [each.name for each in found]
            for name, found in sources.items()
        },
    )
    passed: dict[str, Source] = {}
    for found in sources.values():
        passed |= {each.name: each for each in ([found] if isinstance(found, Source) else found)}
    return Composed(msgspec.json.encode(payload), JSON_WITH_INPUTS, tuple(passed.values()))


def _taker(arguments: Arguments, given: Mapping[str, object]) -> str | None:
    for name in (*arguments.required, arguments.rest()):
        if name is not None and name not in given:
            return name
    return None


def _sources(name: str, value: object) -> Source | list[Source] | None:
    if isinstance(value, Source):
        return value
    if not isinstance(value, list | tuple):
        return None
    found = [each for each in value if isinstance(each, Source)]
    if found and len(found) < len(value):
        raise InvalidInput(
            f"argument {name}",
            "mixes nodes with other values; pass the other values as a separate argument",
        )
    return found or None


def _check_may_miss(task: Task[..., object], sources: Mapping[str, Source | list[Source]]) -> None:
    for name, found in sources.items():
        if isinstance(found, Source) and not task.arguments.takes_none(name):
            raise InvalidInput(
                f"argument {name} of {task.name}",
                f"may have no value, for the task may run without {found.name}; let it be"
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
