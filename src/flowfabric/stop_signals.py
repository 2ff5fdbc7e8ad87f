"""The signals that tell a process to stop, and handing one on to whoever else has it."""

import asyncio
import signal
from collections.abc import Sequence
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def heeded(signals: Sequence[signal.Signals] = STOP_SIGNALS) -> list[signal.Signals]:
    """Those of the signals that stop this process: `nohup` has it ignore that its terminal goes."""
    stays = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [each for each in signals if not (stays and each is signal.SIGHUP)]


def is_main_task() -> bool:
    """Whether the running task is the one that `asyncio.run` was given."""
    # The handler that `asyncio.run` has for Ctrl-C is bound to it.
    bound: dict[str, object] = getattr(signal.getsignal(signal.SIGINT), "keywords", {})
    return bound.get("main_task") is asyncio.current_task()


def hand_on(number: signal.Signals) -> None:
    """Let whoever has a signal now have it as if it arrived only now.

    A handler of the event loop has heard it before: the loop learns of every signal by itself.
    """
    handler = signal.getsignal(number)
    if getattr(handler, "__module__", "") != "asyncio.unix_events":
        signal.raise_signal(number)
