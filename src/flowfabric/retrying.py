"""What a program says about trying again, checked where it is written."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from flowfabric.core.checks import check_bool, check_int
from flowfabric.core.policies import (
    COUNT_MAX,
    MULTIPLIER_MAX,
    Duration,
    ExponentialBackoff,
    RetryPolicy,
    duration_ms,
)
from flowfabric.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How often to try again after a failure, and how long to wait before.

    The wait starts at `delay` and grows by `multiplier` up to `max_delay`; with
    `jitter` each wait is half to all of that. Exceptions of the class, or one of the
    classes, in `never_on` fail for good, as does `DoNotRetry`.
    """

    max_retries: int = 3
    delay: Duration = 1
    max_delay: Duration = 60
    multiplier: float = 2.0
    jitter: bool = True
    never_on: type[BaseException] | Iterable[type[BaseException]] = ()

    def __post_init__(self) -> None:
        """A mistake that only a failure brings to light would hide that failure."""
        check_int("retry.max_retries", self.max_retries, 0, COUNT_MAX)
        check_bool("retry.jitter", self.jitter)
        multiplier: object = self.multiplier
        if not isinstance(multiplier, int | float) or isinstance(multiplier, bool):
            raise InvalidInput("retry.multiplier", "must be a number", multiplier)
        if not (math.isfinite(multiplier) and 1 <= multiplier <= MULTIPLIER_MAX):
            problem = f"must be 1 to {MULTIPLIER_MAX:.0f}"
            raise InvalidInput("retry.multiplier", problem, multiplier)
        _ = self.policy, self.final

    @cached_property
    def policy(self) -> RetryPolicy:
        return RetryPolicy(
            max_retries=self.max_retries,
            backoff=ExponentialBackoff(
                initial_delay_ms=duration_ms("retry.delay", self.delay),
                max_delay_ms=duration_ms("retry.max_delay", self.max_delay),
                multiplier=self.multiplier,
                jitter=self.jitter,
            ),
        )

    @cached_property
    def final(self) -> tuple[type[BaseException], ...]:
        """The exceptions after which nothing is tried again."""
        given: object = self.never_on
        classes: list[object] = [given]
        if isinstance(given, Iterable) and not isinstance(given, type):
            classes = list(given)
        for each in classes:
            if not (isinstance(each, type) and issubclass(each, BaseException)):
                raise InvalidInput(
                    "retry.never_on", "must be exception classes, such as ValueError", given
                )
        return tuple(each for each in classes if isinstance(each, type))
