"""What every test may use: a Postgres server, databases on it, and a tally of stores."""

import asyncio
import gc
import os
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from flowfabric import migrate
from tests import postgres

# How long examples take to make says more about the machine than about the tests.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

SERVER = pytest.StashKey[postgres.Server]()
WORKER_INPUT = "flowfabric_postgres_url"
STORE = "flowfabric_store"
KINDS = ("sqlite-memory", "sqlite-file", "postgres")
WAITING = "tests/e2e/"
LONG = ("tests/properties/", "tests/races/")

T = TypeVar("T")


class WorkerNode(Protocol):
    """What is needed here of xdist's view of a worker process."""

    config: pytest.Config
    workerinput: dict[str, object]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests, so that no process is left with one of them in the end.

    Tests of `WAITING` wait more than they compute: one process does all of them, beside others
    that compute. Those of `LONG` are spread over the other processes.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    waiting = [item for item in items if item.nodeid.startswith(WAITING)]
    long = [item for item in items if item.nodeid.startswith(LONG)]
    short = iter([item for item in items if not item.nodeid.startswith((WAITING, *LONG))])
    ordered = list[pytest.Item]()
    for place in range(processes):
        # As large as what `--dist worksteal` hands to this process at first.
        share = (len(items) - len(ordered)) // (processes - place)
        first = long[place - 1 :: processes - 1] if place else waiting
        ordered += [*first, *islice(short, max(0, share - len(first)))]
    items[:] = [*ordered, *(long if processes == 1 else ()), *short]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector thousands of tests each time it looks for what one has left."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure() -> None:
    """Keep files in memory if there is room: a disk makes each commit to one wait."""
    if memory := postgres.memory():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerNode) -> None:
    """Give each xdist worker the one server, which this process starts and stops."""
    node.workerinput[WORKER_INPUT] = _server(node.config).url


def pytest_unconfigure(config: pytest.Config) -> None:
    if server := config.stash.get(SERVER, None):
        server.stop()


def _server(config: pytest.Config) -> postgres.Server:
    if SERVER not in config.stash:
        handed_over = getattr(config, "workerinput", {}).get(WORKER_INPUT)
        config.stash[SERVER] = (
            postgres.Server(handed_over) if handed_over else postgres.start_server()
        )
    return config.stash[SERVER]


def _wait_for(work: Coroutine[object, object, T]) -> T:
    # A loop of its own, never installed as the current one, so that session fixtures
    # do not depend on the loop of whichever test happens to ask first.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> str:
    """URL of a real server, from which databases can be created."""
    return _server(request.config).url


@pytest.fixture(scope="session")
def postgres_version(postgres_server: str) -> str:
    return _wait_for(postgres.server_version(postgres_server))


@pytest.fixture(scope="session")
def postgres_template(postgres_server: str) -> Iterator[str]:
    """URL of a database that has the current schema. Copy it; do not connect to it."""
    url = _wait_for(postgres.create_database(postgres_server))
    _wait_for(postgres.prepare_template(url))
    yield url
    _wait_for(postgres.drop_database(postgres_server, url))


@pytest.fixture(scope="session")
def postgres_administrator(postgres_server: str) -> Iterator[postgres.Administrator]:
    """Who creates and drops the databases of this process."""
    with postgres.administering(postgres_server) as administrator:
        yield administrator


@pytest.fixture
def postgres_database(
    postgres_administrator: postgres.Administrator,
    postgres_template: str,
    postgres_version: str,
    exercised_store: Callable[[str], None],
) -> Iterator[str]:
    """URL of a fresh database with the current schema, for this test alone."""
    exercised_store(f"postgres {postgres_version}")
    url = postgres_administrator.create_database(postgres_template)
    yield url
    postgres_administrator.drop_database(url)


@pytest.fixture
def empty_postgres_database(
    postgres_administrator: postgres.Administrator,
    postgres_version: str,
    exercised_store: Callable[[str], None],
) -> Iterator[str]:
    """URL of a fresh database without any schema, for tests of migrations."""
    exercised_store(f"postgres {postgres_version}")
    url = postgres_administrator.create_database()
    yield url
    postgres_administrator.drop_database(url)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that has the current schema. Copy it; do not open it."""
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    _wait_for(migrate(f"sqlite:///{path}"))
    return path


@pytest.fixture
def new_database(
    request: pytest.FixtureRequest, exercised_store: Callable[[str], None]
) -> Callable[[str], str]:
    """Call with the kind for the URL of a database for this test alone."""

    # Each kind asks only for what it needs: making and removing a folder takes its time, too.
    def make(kind: str) -> str:
        if kind == "postgres":
            return str(request.getfixturevalue("postgres_database"))
        exercised_store(kind.replace("-", " "))
        if kind == "sqlite-memory":
            return "sqlite:///:memory:"
        path = request.getfixturevalue("tmp_path") / "flowfabric.db"
        shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
        return f"sqlite:///{path}"

    return make


@pytest.fixture(params=KINDS)
def store_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    """A database of each kind in turn."""
    return new_database(request.param)


@pytest.fixture
def exercised_store(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Call with `sqlite memory` or `sqlite file` to have this test counted for it."""

    def record(store: str) -> None:
        # User properties travel with the report from an xdist worker to the summary.
        request.node.user_properties.append((STORE, store))

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tally: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                tally.update({str(value) for key, value in report.user_properties if key == STORE})
    if tally:
        # SQLite before Postgres, memory before file.
        names = sorted(tally, key=lambda name: (name.startswith("postgres"), name == "sqlite file"))
        counts = ", ".join(f"{name} ({tally[name]} tests)" for name in names)
        terminalreporter.write_line(f"stores exercised: {counts}")
