"""Fixtures for tests of code that uses FlowFabric; pytest finds them by itself.

Loaded into every test session where the package is installed, so nothing of
the package is imported before a fixture is asked for. The app needs an event loop
and is offered where pytest-asyncio provides one.
"""

import importlib.util
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from flowfabric.testing import LocalApp, SettableClock


@pytest.fixture
def flowfabric_clock() -> "SettableClock":
    """A clock that stands still until it is moved."""
    from flowfabric.testing import SettableClock

    return SettableClock()


if importlib.util.find_spec("pytest_asyncio") is not None:
    import pytest_asyncio

    @pytest_asyncio.fixture
    async def flowfabric_app(flowfabric_clock: "SettableClock") -> "AsyncIterator[LocalApp]":
        """An app in memory that adopts the app of whatever is submitted through it."""
        from flowfabric.testing import LocalApp

        async with LocalApp(clock=flowfabric_clock) as app:
            yield app
