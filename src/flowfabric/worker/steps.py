"""What a handler has done so far, and whether it still does it in the same order.

Each step has a key: its name, numbered from the second use on. It also remembers
the step before it *in the same line of execution*: branches started with
`asyncio.gather` or a task group each continue from the step at which they were
started, so parallel branches may finish in any order without being mistaken for
a changed one. Asking for a stored step after another predecessor, or as another
kind, means that the code has changed under the execution: `StepsChanged`.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, ContextVar
from dataclasses import dataclass

from flowfabric.core.step_model import Step, StepKind
from flowfabric.core.steps import NewStep, StepStored
from flowfabric.errors import StepsChanged

Load = Callable[[], Awaitable[Sequence[Step]]]
Store = Callable[[NewStep], Awaitable[StepStored]]
StoreLater = Callable[[NewStep], None]

_last_step: ContextVar[str | None] = ContextVar("flowfabric_last_step", default=None)


@dataclass(frozen=True)
class Place:
    """Where a step stands: its key, and the key before it."""

    key: str
    after: str | None
    kind: StepKind


class StepLog:
    """The stored steps of one execution, as one run of its handler meets them."""

    def __init__(self, store: Store, store_later: StoreLater, load: Load | None) -> None:
        """Without `load` the execution is known to have no steps yet."""
        self._store = store
        self._store_later = store_later
        self._load = load
        self._stored: dict[str, Step] | None = {} if load is None else None
        self._uses: dict[str, int] = {}
        self._asked: set[str] = set()
        _last_step.set(None)

    def take(self, name: str, kind: StepKind) -> Place:
        """The place of the next step of this name. Call it in the order of the code."""
        number = self._uses[name] = self._uses.get(name, 0) + 1
        key = name if number == 1 else f"{name}#{number}"
        self._asked.add(key)
        return Place(key, _last_step.get(), kind)

    async def find(self, place: Place) -> Step | None:
        """The stored step at a place, if there is one."""
        if self._stored is None:
            assert self._load is not None
            self._stored = {step.step_key: step for step in await self._load()}
        step = self._stored.get(place.key)
        if step is not None:
            _check_order(step, place)
            _last_step.set(place.key)
        return step

    async def store(
        self, place: Place, *, result: bytes | None = None, sleep_ms: int | None = None
    ) -> StepStored:
        stored = await self._store(_new_step(place, result, sleep_ms))
        _last_step.set(place.key)
        return stored

    def store_later(self, place: Place, *, result: bytes) -> None:
        """Store a step while the handler goes on: for what every later run would find out anew."""
        self._store_later(_new_step(place, result))
        _last_step.set(place.key)

    def never_asked_for(self) -> list[str]:
        """Stored steps this run did not come by: a sign that the code has changed."""
        return sorted((self._stored or {}).keys() - self._asked)


def _new_step(place: Place, result: bytes | None, sleep_ms: int | None = None) -> NewStep:
    return NewStep(
        step_key=place.key,
        after_key=place.after,
        kind=place.kind,
        result=result,
        sleep_ms=sleep_ms,
    )


def _check_order(step: Step, place: Place) -> None:
    if step.kind is not place.kind:
        raise StepsChanged(
            f"step {place.key!r} was stored as a {step.kind} and is now a {place.kind};"
            " the code has changed while the execution was under way"
        )
    if step.after_key != place.after:
        raise StepsChanged(
            f"step {place.key!r} was stored {_after(step.after_key)} and is now asked for"
            f" {_after(place.after)}; the code has changed while the execution was under way."
            " Restore the order of its steps, or submit the work anew"
        )


def _after(key: str | None) -> str:
    return "as the first" if key is None else f"after {key!r}"


def adopt_last_step(context: Context) -> None:
    """Continue after the step that was last in `context`: work done for a thread ran in it."""
    _last_step.set(context.get(_last_step))
