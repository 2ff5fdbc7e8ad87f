"""When a worker stops: an event or a signal of the operating system says so.

A signal is borrowed from whoever had it before. All workers of the process hear it, and once the
last of them has stopped it can be handed on, as if it had only been late.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, Self

from flowfabric.stop_signals import heeded
from flowfabric.worker.worker import Worker

TOLD_TO_STOP: Final[list["Stopping"]] = []
"""The workers of the main thread that signals stop."""

Previous = Callable[[int, FrameType | None], object] | int | None


class Stopping:
    """Tells a worker to stop when an event is set or a signal arrives. Use as a context."""

    def __init__(
        self, worker: Worker, stop: asyncio.Event | None, signals: Sequence[signal.Signals]
    ) -> None:
        self._worker = worker
        self._stop = stop
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._signals = signals if in_main_thread else ()
        self._previous: dict[signal.Signals, Previous] = {}
        self._watching: asyncio.Task[None] | None = None
        self.heard: signal.Signals | None = None
        """The first signal that arrived, once whoever had it before has it again."""

    def __enter__(self) -> Self:
        if self._signals:
            self._listen()
        if self._stop is not None:
            self._watching = asyncio.create_task(self._watch(self._stop))
        return self

    def _listen(self) -> None:
        TOLD_TO_STOP.append(self)
        loop = asyncio.get_running_loop()

        def arrived(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self._tell_all, signal.Signals(number))

        for number in heeded(self._signals):
            self._previous[number] = signal.signal(number, arrived)

    def _tell_all(self, number: signal.Signals) -> None:
        for each in TOLD_TO_STOP:
            each.heard = each.heard or number
            each._worker.stop()

    async def _watch(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._worker.drain()

    def __exit__(self, *exc_info: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self in TOLD_TO_STOP:
            self._hush()

    def _hush(self) -> None:
        """Give the signals back, or leave that to the workers that go on."""
        position = TOLD_TO_STOP.index(self)
        del TOLD_TO_STOP[position]
        if position < len(TOLD_TO_STOP):
            # The next one has found this one's handlers: it gives back those before them.
            following = TOLD_TO_STOP[position]
            following._previous = following._previous | self._previous
        else:
            for number, previous in self._previous.items():
                signal.signal(number, previous)
        if TOLD_TO_STOP:
            self.heard = None
