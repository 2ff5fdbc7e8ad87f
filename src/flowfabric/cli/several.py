"""Several processes of one worker, for machines with several cores.

They know nothing of each other: the database hands each of them its own work. The process that
starts them passes on every signal that tells it to stop. One that is killed is replaced; one that
ends by itself has said why, and the others would end the same way. They hold the reading end of a
pipe, so that they stop when whoever started them is gone, however that ended.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from typing import Final

from flowfabric.cli import options
from flowfabric.logs import open_log

log = open_log(__name__)

REPLACE_AFTER_S: Final = 1.0
PROCESSES_MAX: Final = 256


def run_several(command: Sequence[str], count: int) -> int:
    """Run a command in so many processes until they are told to stop; return its status."""
    return asyncio.run(_Several(command).run(count))


class _Several:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._running: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()

    async def run(self, count: int) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        statuses = await asyncio.gather(*(self._keep_one() for _ in range(count)))
        return next((status for status in statuses if status != options.OK), options.OK)

    async def _keep_one(self) -> int:
        """A process, and another whenever it is killed; the status of the last."""
        while True:
            # A group of its own: a terminal would send Ctrl-C to all, and it would count twice.
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, process_group=0
            )
            self._running.add(process)
            status = await process.wait()
            self._running.discard(process)
            if self._stopping.is_set():
                return options.OK if status == -signal.SIGTERM else abs(status)
            if status >= 0:
                self._stop()
                return status
            log.error("process %d was killed by signal %d; starting another", process.pid, -status)
            try:
                async with asyncio.timeout(REPLACE_AFTER_S):
                    await self._stopping.wait()
                return options.OK
            except TimeoutError:
                continue

    def _stop(self) -> None:
        self._stopping.set()
        for process in self._running:
            process.send_signal(signal.SIGTERM)


def stop_with_starter() -> None:
    """Stop this process as soon as the one that started it is gone."""

    def wait() -> None:
        # Not through `sys.stdin`, which a thread must not be reading when the interpreter ends.
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="flowfabric-starter", daemon=True).start()
