"""Conditions of waits that tests often use."""

from collections.abc import Iterable

from flowfabric.core.conditions import AllConditions, Single


def all_of_waitpoints(keys: Iterable[str]) -> AllConditions:
    """Any signal on each of these waitpoints."""
    return AllConditions(tuple(Single(key) for key in keys))
