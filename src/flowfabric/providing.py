"""Parameters that the worker fills in: what `app.provide` has been told to make.

    app.provide(Database, open_database)

    @app.task
    async def publish(ctx: Context, article_id: int, db: Database) -> None: ...

A parameter is filled in when its annotation is exactly a class that was provided before the task
was declared, or when its default is `provided(Class)`, which type checkers like better: to them
such a parameter may be left out. All others are arguments.
"""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeVar

from flowfabric.errors import InvalidInput

T = TypeVar("T")


@dataclass(frozen=True)
class Provided:
    """A default that stands for a resource."""

    kind: type


@dataclass(frozen=True)
class _ResourceHolder:
    value: object


def provided(kind: type[T]) -> T:
    """As a default, `db: Database = provided(Database)`: filled in by the worker."""
    # A marker that is typed as what will be in its place.
    marker: T = getattr(_ResourceHolder(Provided(kind)), "value")  # noqa: B009
    return marker


def resources_of(
    name: str,
    parameters: Sequence[inspect.Parameter],
    hints: Mapping[str, object],
    kinds: AbstractSet[type],
) -> dict[str, type]:
    """The parameters that are filled in, with what by."""
    found: dict[str, type] = {}
    for parameter in parameters:
        hint = hints.get(parameter.name)
        if isinstance(parameter.default, Provided):
            found[parameter.name] = parameter.default.kind
        elif isinstance(hint, type) and hint in kinds:
            found[parameter.name] = hint
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and found:
            raise InvalidInput(
                f"argument *{parameter.name} of {name}",
                f"comes after {next(iter(found))}, which is filled in; put that behind it",
            )
    for each in parameters:
        if each.name in found and each.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise InvalidInput(
                f"argument {each.name} of {name}", "is filled in by name; put it behind the `/`"
            )
    return found


def names_are_known(function: Callable[..., object]) -> bool:
    """Whether all that its annotations name exists already; the module may be half-way through."""
    try:
        typing.get_type_hints(function)
    except NameError:
        return False
    except TypeError:
        return True
    return True
