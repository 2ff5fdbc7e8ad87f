"""Tasks for other processes, which find them by importing this module."""

import os

from flowfabric import App, Retry

app = App("sqlite:///:memory:")


@app.task(executor="process", retry=Retry(max_retries=1, delay=0))
def add_up(numbers: list[int]) -> tuple[int, int]:
    return sum(numbers), os.getpid()


@app.task(executor="process")
def die() -> None:
    os._exit(9)
