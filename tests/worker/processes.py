"""Tasks for other processes, which find them by importing this module."""

import os
import signal
import threading
from pathlib import Path

from flowfabric import App, DoNotRetry, Retry

app = App("sqlite:///:memory:")


@app.task(executor="process", retry=Retry(max_retries=1, delay=0))
def add_up(numbers: list[int]) -> tuple[int, int]:
    return sum(numbers), os.getpid()


@app.task(executor="process")
def die() -> None:
    os._exit(9)


@app.task(executor="process", retry=Retry(max_retries=5, delay=0))
def die_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Unpicklable(Exception):
    """Its arguments are not those of its constructor, so that it cannot be rebuilt."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{code}: {detail}")


@app.task(executor="process")
def raise_unpicklable() -> None:
    raise Unpicklable(7, detail="the sensor is off")


@app.task(executor="process")
def raise_plain() -> None:
    raise LookupError("nothing there")


@app.task(executor="process", retry=Retry(max_retries=5, delay=0))
def raise_for_good() -> None:
    raise DoNotRetry("never")


@app.task(executor="process")
def hang(path: str) -> None:
    """Write down the process, and never end."""
    Path(path).write_text(str(os.getpid()))
    threading.Event().wait()
