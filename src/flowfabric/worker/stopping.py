"""When a worker stops: an event or a signal of the operating system says so."""

import asyncio
import signal
import threading

from flowfabric.worker.worker import Worker


class Stopping:
    """Tells a worker to stop when an event is set or a signal arrives. Use as a context."""

    def __init__(self, worker: Worker, stop: asyncio.Event | None, signals: bool) -> None:
        self._worker = worker
        self._stop = stop
        self._signals = signals and threading.current_thread() is threading.main_thread()
        self._watching: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        if self._signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._worker.stop)
        if self._stop is not None:
            self._watching = asyncio.create_task(self._watch(self._stop))

    async def _watch(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._worker.stop()

    def __exit__(self, *exc_info: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().remove_signal_handler(number)
