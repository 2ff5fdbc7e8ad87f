"""A process whose time and chance follow from a seed.

The event loop never waits: when nothing can run it moves its clock to the next
timer. Clocks, random numbers and ids of the whole process come from the loop and
the seed, so a run with the same seed takes the same course to the last detail.
"""

import asyncio
import itertools
import os
import random
import selectors
import time
import uuid
from collections.abc import Coroutine, Mapping
from typing import TypeVar

T = TypeVar("T")

START_MS = 1_700_000_000_000
NS_PER_S = 1_000_000_000


class VirtualClock:
    """The time of the simulated world. It moves when the loop has nothing to do."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now_ms(self) -> int:
        """What a store reads."""
        return START_MS + int(self.now_s * 1_000)


class Selector(selectors.DefaultSelector):
    """Moves the clock instead of waiting for it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # Without a timer there is only another thread to wait for, and that takes real time.
        events = super().select(timeout if timeout is None else 0)
        if not events and timeout is not None and timeout > 0:
            self._clock.now_s += timeout
        return events


class Numbered:
    """Hashed by number: sets of what has an address for a hash have another order each time."""

    _numbers = itertools.count()

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._number = next(Numbered._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class VirtualTask(Numbered, asyncio.Task[T]):
    """A task that knows its place in any set."""


class VirtualFuture(Numbered, asyncio.Future[T]):
    """A future that knows its place in any set."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(Selector(clock))
        self._virtual = clock
        self.set_task_factory(lambda loop, coro, **given: VirtualTask(coro, loop=loop, **given))

    def time(self) -> float:
        return self._virtual.now_s

    def create_future(self) -> asyncio.Future[object]:
        return VirtualFuture(loop=self)


def run(seed: int, clock: VirtualClock, main: Coroutine[object, object, T]) -> T:
    """Run `main` in a process that is virtual from here to its end, which is soon.

    What is still under way then is left as it is: it belongs to processes that died, and
    would wait for ever.
    """
    chance = random.Random(seed)
    random.seed(seed)

    def monotonic() -> float:
        return clock.now_s

    def clock_gettime(which: int) -> float:
        return clock.now_s + (START_MS / 1_000 if which == time.CLOCK_REALTIME else 0.0)

    def make_uuid() -> uuid.UUID:
        return uuid.UUID(bytes=chance.randbytes(16), version=4)

    _replace(
        time,
        {
            "monotonic": monotonic,
            "monotonic_ns": lambda: int(clock.now_s * NS_PER_S),
            "time": lambda: START_MS / 1_000 + clock.now_s,
            "time_ns": lambda: clock.now_ms() * 1_000_000,
            "clock_gettime": clock_gettime,
            "clock_gettime_ns": lambda which: int(clock_gettime(which) * NS_PER_S),
        },
    )
    _replace(os, {"urandom": chance.randbytes})
    _replace(uuid, {"uuid4": make_uuid})
    loop = VirtualLoop(clock)
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(main)


def _replace(module: object, names: Mapping[str, object]) -> None:
    for name, value in names.items():
        setattr(module, name, value)
