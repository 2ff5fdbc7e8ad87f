"""Outages and patience: one line when a database goes away, and how long a statement may take.

Claims, renewals, reports, reconcilers and readers all meet the same outage, again and
again. The stores say here what they see; code that waits out an outage logs nothing more.
A missing file is logged once as well, but is not an outage: nobody waits for it.

A full disk, or a file that another process keeps locked, still answers readers, so an outage
that a write ran into is over only when a write has succeeded again.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Final, Self, TypeVar

from msgspec import Struct

from flowfabric import errors
from flowfabric.logs import open_log

# Waiting for the first of several things ------------------------


async def first_of(*awaited: Awaitable[object], timeout_s: float | None = None) -> None:
    """Return when one of `awaited` is done or the time is over; the others are cancelled.

    What one of them returns or raises is dropped: the caller checks for itself.
    """
    waits = [asyncio.ensure_future(each) for each in awaited]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


log = open_log(__name__)

T = TypeVar("T")

PAUSE_FIRST_S: Final = 0.1
PAUSE_MAX_S: Final = 2.0
AFTER_ERROR_S: Final = 0.5
"""How long a reader that waits for something pauses after an error."""
LATELY_S: Final = 60.0
"""How long after an outage handlers may still report that they met it."""
CHAIN_MAX: Final = 20
"""Exceptions looked through for the one that the others follow from."""


NO_ANSWER: Final = (errors.Transport, errors.ResourceExhausted, errors.OperationTimeout)
"""Raised in place of an answer. They say nothing about the request; others fail the same way."""
ASK_AGAIN: Final = (*NO_ANSWER, errors.RetryExhausted)
"""After these, a request that is safe to repeat is repeated, and waiting callers keep waiting."""
NEVER: Final = (errors.Unavailable, errors.AccessDenied)
"""Neither an outage nor the request's fault: every later request fails the same way."""
FOR_NOBODY: Final = (errors.DatabaseGone, errors.AccessDenied)
"""A worker that gets one of these stops: nothing it did from then on could be reported."""


def is_outage(error: BaseException) -> bool:
    """Whether the database cannot be reached for now; it may well be back in a while."""
    if isinstance(error, errors.Transport):
        return error.kind.retryable
    return isinstance(error, errors.ResourceExhausted)


def outage_behind(
    error: BaseException, broken_by: Callable[[BaseException], bool] | None = None
) -> bool:
    """Whether an outage caused this error: cleaning up after an outage fails as well.

    A rejected token counts as one, since the next worker may have another token. `broken_by`
    recognises outages by the errors of a driver that the program uses; if it fails, which a
    connection in any state may cause, the error is what it looks like.
    """
    seen: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if seen is None:
            return False
        if isinstance(seen, errors.RetryExhausted | errors.Unauthorized) or is_outage(seen):
            return True
        if broken_by is not None:
            with suppress(Exception):
                if broken_by(seen):
                    return True
        seen = seen.__cause__ or seen.__context__
    return False


def level_of(error: BaseException) -> int:
    """How loudly to repeat an error: the log reports an outage, or a missing file, once.

    A rejected token is reported by the code that gives up because of it.
    """
    quiet = _logged_once(error) or isinstance(error, errors.AccessDenied)
    return logging.DEBUG if quiet else logging.WARNING


def _logged_once(error: BaseException) -> bool:
    return is_outage(error) or isinstance(error, errors.DatabaseGone)


async def waited_out(ask: Callable[[], Awaitable[T]], stop: asyncio.Event | None) -> T | None:
    """Ask until the database answers; None once `stop` is set."""
    stopped = asyncio.Event() if stop is None else stop
    pause_s = PAUSE_FIRST_S
    while not stopped.is_set():
        try:
            return await ask()
        except errors.FlowFabricError as error:
            if not is_outage(error):
                raise
        await first_of(stopped.wait(), timeout_s=pause_s * random.uniform(0.5, 1.0))
        pause_s = min(pause_s * 2, PAUSE_MAX_S)
    return None


class DatabaseHealth(Struct):
    """What this process knows of one database."""

    away_since_s: float | None = None
    answered_at_s: float = 0.0
    failed_at_s: float = 0.0
    met_in_writing: bool = False


class Outages:
    """The health of every database that the stores of this process use, on any thread."""

    def __init__(self) -> None:
        self._seen: dict[str, DatabaseHealth] = {}
        self._away = 0
        self._lock = threading.Lock()

    def failed(
        self, database: str, error: BaseException, asked_at_s: float, *, writing: bool = False
    ) -> None:
        """Note that a request made at `asked_at_s`, by the monotonic clock, got no answer."""
        if not _logged_once(error):
            return
        gone = isinstance(error, errors.DatabaseGone)
        with self._lock:
            seen = self._seen.setdefault(database, DatabaseHealth())
            # A request older than the last answer says nothing new, unless the file is gone.
            if asked_at_s < seen.answered_at_s and not gone:
                return
            seen.met_in_writing |= writing
            seen.failed_at_s = time.monotonic()
            if seen.away_since_s is not None:
                return
            seen.away_since_s = asked_at_s
            self._away += 1
        if gone:
            log.error("%s is gone: %s", database, error)
        else:
            # What callers may do about a lost answer is of no use to those who read a log.
            why = str(error).removesuffix(errors.REPEAT_TO_BE_SURE)
            log.warning("%s does not answer: %s", database, why)

    def answered(self, database: str, asked_at_s: float, *, wrote: bool = True) -> None:
        """Note that a request made at `asked_at_s`, by the monotonic clock, was answered."""
        if not self._away:
            return
        with self._lock:
            seen = self._seen.setdefault(database, DatabaseHealth())
            # A request older than the last failure says nothing new.
            if asked_at_s < seen.failed_at_s or (seen.met_in_writing and not wrote):
                return
            seen.met_in_writing = False
            since_s, seen.away_since_s = seen.away_since_s, None
            seen.answered_at_s = time.monotonic()
            if since_s is None:
                return
            self._away -= 1
        log.warning("%s answers again, after %.1f s", database, seen.answered_at_s - since_s)

    def told_lately(self) -> bool:
        """Whether the log tells of an outage that lasts, or was over a moment ago."""
        now_s = time.monotonic()
        with self._lock:
            return self._away > 0 or any(
                0 < seen.failed_at_s > now_s - LATELY_S for seen in self._seen.values()
            )


OUTAGES: Final = Outages()


class OutageWatch:
    """Notes whether a database answers the requests of a block. Use as a context."""

    def __init__(self, database: str, *, writing: bool = False, wrote: bool = True) -> None:
        """For a database that may answer readers only: whether the block writes, and whether an
        answer proves that it has written."""
        self.wrote = wrote
        self._database = database
        self._writing = writing
        self._asked_at_s = 0.0

    def __enter__(self) -> Self:
        self._asked_at_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: object
    ) -> None:
        if error is None:
            OUTAGES.answered(self._database, self._asked_at_s, wrote=self.wrote)
        else:
            OUTAGES.failed(self._database, error, self._asked_at_s, writing=self._writing)


# How long a statement may take, as its caller says --------------------------
#
# A network can silently drop a statement or its answer. A caller that must know in time, as a
# worker must about its leases, says how long it can wait; other callers wait for as long as
# the store allows. A statement that takes longer times out, and its connection is dropped.

LEFT_MIN_S: Final = 0.001


class _Whole:
    """How long all statements of a block may take together.

    Tasks that outlive the block are exempt.
    """

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._until_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float | None:
        return None if self.is_over else max(self._until_s - time.monotonic(), LEFT_MIN_S)


_patience_s: ContextVar[float | None] = ContextVar("flowfabric_patience_s", default=None)
_whole: ContextVar[_Whole | None] = ContextVar("flowfabric_whole_patience", default=None)


def patience_s(at_most_s: float | None = None) -> float | None:
    """How long a statement may take here; None leaves it to the store."""
    whole = _whole.get()
    left_s = None if whole is None else whole.left_s
    said = [each for each in (_patience_s.get(), left_s, at_most_s) if each is not None]
    return min(said, default=None)


def statements_within(seconds: float) -> "_Each":
    """Give each statement of this block, and each connection made for it, this long."""
    return _Each(seconds)


class _Each:
    __slots__ = ("_before", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._before = _patience_s.set(self._seconds)

    def __exit__(self, *exc_info: object) -> None:
        _patience_s.reset(self._before)


@contextmanager
def everything_within(seconds: float) -> Iterator[None]:
    """Give all statements of this block, and the wait for their connection, this long together."""
    whole = _Whole(seconds)
    before = _whole.set(whole)
    try:
        yield
    finally:
        whole.is_over = True
        _whole.reset(before)
