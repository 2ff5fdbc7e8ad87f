"""Classes of exceptions that stand in for one that cannot be made again."""

import types
from collections.abc import Mapping
from typing import Final, NoReturn

STOOD_IN_FOR: Final = "__flowfabric_failure__"
"""What a stand-in is made from, should it be stored itself."""
_TEXT: Final = "__flowfabric_text__"


class StandIn:
    """What a stand-in has before all that its class has: no code of that runs."""

    __slots__ = ()

    def __init_subclass__(cls, **_: object) -> None:
        """The class may keep a list of those derived from it. This is none of them."""

    def __str__(self) -> str:
        return str(getattr(type(self), _TEXT))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __getattr__(self, name: str) -> NoReturn:
        """The class may look elsewhere for what it does not have: in what is not stored."""
        raise AttributeError(
            f"this {type(self).__name__} has no {name}: it comes from an earlier run, of which only"
            " plain values are stored. Use it inside the step, and raise what you need of it"
        )


class Lost:
    """Stands for an attribute that is not stored: the stand-in says so."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, error: object, kind: type) -> NoReturn:
        raise AttributeError(self._name)


def derived(
    kind: type[BaseException], text: str, attributes: Mapping[str, object]
) -> type[BaseException]:
    """A class of the same name, whose instances have this text and these attributes."""
    body = {
        **attributes,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        _TEXT: text,
    }
    made = types.new_class(kind.__name__, (StandIn, kind), exec_body=lambda own: own.update(body))
    assert issubclass(made, BaseException)
    return made
