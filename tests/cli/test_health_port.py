"""`flowfabric worker --health-port`: what those who restart a worker are told of it."""

import asyncio
import signal
import socket
from asyncio.subprocess import Process
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from flowfabric import App
from flowfabric.errors import Unavailable
from flowfabric.worker.health import AT_ONCE_MAX, REQUEST_BYTES_MAX, HealthPort
from tests.cli.command import run
from tests.cli.test_worker import WAIT_S, folder, processes, start
from tests.silence import Network

__all__ = ["folder", "processes"]

PROGRAM = """
import asyncio
from pathlib import Path

from flowfabric import App, Context

app = App("URL", migrate=True)

@app.task
async def linger(ctx: Context) -> str:
    ctx.log.info("lingering")
    while not Path("go").exists():
        await asyncio.sleep(0.01)
    return "done"
"""


def free_port(count: int = 1) -> int:
    """The first of so many ports, one after the other, that nobody listens on."""
    while True:
        with ExitStack() as listening, suppress(OSError):
            first = listening.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = int(first.getsockname()[1])
            for more in range(1, count):
                listening.enter_context(socket.create_server(("127.0.0.1", port + more)))
            return port


async def asked(port: int, path: str) -> int:
    """The status of the answer; 0 while nobody listens."""
    try:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"http://127.0.0.1:{port}{path}")).status_code
    except httpx.ConnectError:
        return 0


async def until(port: int, path: str, status: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while await asked(port, path) != status:
            pass


async def test_a_worker_is_ready_while_it_reaches_its_database_and_takes_work(
    folder: Path, processes: list[Process], empty_postgres_database: str
) -> None:
    port = free_port()
    async with Network(empty_postgres_database).open() as network:
        (folder / "shop.py").write_text(PROGRAM.replace("URL", network.url))
        network.go_down()
        worker = await start(processes, folder, "worker", "shop:app", "--health-port", str(port))
        await until(port, "/livez", 200)
        assert await asked(port, "/readyz") == 503
        network.heal()
        await until(port, "/readyz", 200)
        network.go_down()
        await until(port, "/readyz", 503)
        assert await asked(port, "/livez") == 200
        network.heal()
        await until(port, "/readyz", 200)

        submitted = await asyncio.to_thread(
            run, "submit", "linger", "--app", "shop:app", cwd=folder
        )
        assert submitted.status == 0
        await worker.line("lingering")
        worker.process.send_signal(signal.SIGTERM)
        await until(port, "/readyz", 503)
        assert await asked(port, "/livez") == 200
        (folder / "go").touch()
        await worker.line("has stopped")
        assert await worker.process.wait() == 0


async def test_each_of_several_processes_has_a_port(folder: Path, processes: list[Process]) -> None:
    port = free_port(2)
    (folder / "shop.py").write_text(PROGRAM.replace("URL", "sqlite:///shop.db"))
    arguments = ("--processes", "2", f"--health-port={port}")
    worker = await start(processes, folder, "worker", "shop:app", *arguments)
    await until(port, "/readyz", 200)
    await until(port + 1, "/readyz", 200)
    assert await worker.end(signal.SIGTERM) == 0


def test_a_port_that_is_taken_is_told(folder: Path) -> None:
    (folder / "shop.py").write_text(PROGRAM.replace("URL", "sqlite:///shop.db"))
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = run("worker", "shop:app", "--health-port", port, cwd=folder)
    too_many = run("worker", "shop:app", "--health-port=65535", "--processes=2", cwd=folder)

    assert (refused.status, too_many.status) == (2, 2)
    assert "--health-port: cannot be listened on" in refused.err
    assert "--health-port: 2 processes need as many ports" in too_many.err


@pytest.mark.parametrize(
    ("request_line", "answer"),
    [
        (b"GET /livez HTTP/1.1", b"HTTP/1.1 200 OK"),
        (b"GET /readyz?verbose HTTP/1.1", b"HTTP/1.1 503 Service Unavailable"),
        (b"HEAD /healthz HTTP/1.1", b"HTTP/1.1 503 Service Unavailable"),
        (b"POST /livez HTTP/1.1", b"HTTP/1.1 405 Method Not Allowed"),
        (b"GET /metrics HTTP/1.1", b"HTTP/1.1 404 Not Found"),
        (b"\xff\x00", b"HTTP/1.1 404 Not Found"),
        (b"x" * (REQUEST_BYTES_MAX + 1), b""),
    ],
)
async def test_whatever_is_asked_gets_a_word_or_nothing(request_line: bytes, answer: bytes) -> None:
    app, port = App("sqlite:///:memory:"), free_port()
    async with HealthPort(app.check_ready).listen(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_line + b"\r\n\r\n")
        try:
            told = await reader.read()
        except ConnectionResetError:
            told = b""
        writer.close()

    assert told.partition(b"\r\n")[0] == answer


async def test_callers_who_say_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.worker.health.REQUEST_S", 0.2)

    async def ready() -> None: ...

    port = free_port()
    async with HealthPort(ready).listen(port):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(AT_ONCE_MAX + 1)]
        async with asyncio.timeout(WAIT_S):
            assert await silent[-1][0].read() == b""
            assert [await reader.read() for reader, _ in silent] == [b""] * len(silent)
            assert await asked(port, "/readyz") == 200
        for _, writer in silent:
            writer.close()


async def test_an_app_without_a_worker_is_not_ready() -> None:
    async with App("sqlite:///:memory:") as app:
        with pytest.raises(Unavailable, match="none has started"):
            await app.check_ready()
