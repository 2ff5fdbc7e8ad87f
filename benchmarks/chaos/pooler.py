"""PgBouncer in transaction mode, where it is installed."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from benchmarks.chaos.ports import free_port, until_open

PROGRAM: Final = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")

_SETTINGS: Final = """\
[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
max_client_conn = 500
default_pool_size = 40
"""


class Pooler:
    """One that can be killed and started again at the same address."""

    def __init__(self, settings: Path, url: str, port: int) -> None:
        self._settings = settings
        self._port = port
        self._process: asyncio.subprocess.Process | None = None
        self.url = url

    async def start(self) -> None:
        assert PROGRAM is not None
        as_nobody = ("-u", "nobody") if os.geteuid() == 0 else ()
        self._process = await asyncio.create_subprocess_exec(
            *(PROGRAM, *as_nobody, str(self._settings)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await until_open(self._port)

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def pooled(url: str) -> AsyncIterator[Pooler]:
    server, port = urlsplit(url), free_port()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        settings = Path(folder) / "pgbouncer.ini"
        settings.write_text(
            _SETTINGS.format(
                host=server.hostname, port=server.port, user=server.username, listen_port=port
            )
        )
        netloc = f"{server.username}@127.0.0.1:{port}"
        pooler = Pooler(settings, urlunsplit(server._replace(netloc=netloc)), port)
        await pooler.start()
        try:
            yield pooler
        finally:
            await pooler.kill()
