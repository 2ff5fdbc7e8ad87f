"""The HTTP server: requests beside bare calls of the engine, many streams, and a remote worker.

The server is a process of its own, as `flowfabric serve` starts it. The clients here write and
read HTTP by hand: a library would cost more than the server it asks.
"""

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self

from benchmarks.bench import Bench
from benchmarks.costs import Jobs
from benchmarks.meter import TICK_US, Meter, process_ticks
from benchmarks.report import costs, figures, median, percentile
from benchmarks.sdk import CONCURRENCY, resident_bytes
from flowfabric import Engine, connect
from flowfabric.core.creation import NewExecution

CLIENTS = 200
REQUESTS = 4_000
WARM_UPS = 400
TURNS = 2
STREAMS = 1_000
EVENTS = 20
"""Completions that every stream is told of."""
DRAINED = 5_000
PATH = "/v1/events?category=completion"
READY_S = 30.0
LOOK_S = 0.05


async def measure(bench: Bench) -> None:
    await requests(bench)
    await streams(bench)
    await drains(bench)


class ServerProcess:
    """`flowfabric serve`, and what it has used."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid

    @classmethod
    @asynccontextmanager
    async def started(cls, database: str) -> AsyncIterator[Self]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flowfabric.cli", "serve", "--port", str(port)),
            *("--log-level", "error", "--url", database),
        )
        try:
            async with asyncio.timeout(READY_S):
                while True:
                    try:
                        async with HttpClient.opened(port) as client:
                            await client.get("/readyz")
                        break
                    except OSError:
                        await asyncio.sleep(LOOK_S)
            yield cls(f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.terminate()
            await process.wait()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def cpu_us(self) -> float:
        return process_ticks(self.pid) * TICK_US

    @property
    def memory_bytes(self) -> int:
        return resident_bytes(str(self.pid))


class HttpClient:
    """One connection that is kept, and asks one thing at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @asynccontextmanager
    async def opened(cls, port: int) -> AsyncIterator[Self]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    async def get(self, path: str) -> bytes:
        self._writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        return await self._answer()

    async def post(self, path: str, body: bytes) -> bytes:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        return await self._answer()

    async def follow(self, path: str) -> None:
        """Ask for an answer that goes on; it has begun when this returns."""
        self._writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.split()[1] == b"200", head

    async def hear(self, events: int) -> None:
        """Read on until so many events have been told."""
        heard = 0
        while heard < events:
            line = await self._reader.readline()
            assert line, f"the stream ended after {heard} events"
            heard += line.startswith(b"event:")

    async def _answer(self) -> bytes:
        head = await self._reader.readuntil(b"\r\n\r\n")
        status, *headers = head.split(b"\r\n")
        assert status.split()[1][:1] == b"2", head
        for line in headers:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                return await self._reader.readexactly(int(value))
        return b""


# Requests -----------------------------------------------------------------------


@dataclass
class Taken:
    """What so many calls of many callers took."""

    calls: int = 0
    seconds: float = 0.0
    server_us: float = 0.0

    def __post_init__(self) -> None:
        self.each_ms: list[float] = []

    @property
    def rate(self) -> float:
        return self.calls / self.seconds


Call = Callable[[], Awaitable[object]]


async def requests(bench: Bench) -> None:
    """Through the server and through the engine, in turns, with as many callers."""
    taken = {name: Taken() for name in ("read", "read, bare", "submit", "submit, bare")}
    async with (
        bench.database() as database,
        ServerProcess.started(database) as server,
        await connect(database) as engine,
        AsyncExitStack() as stack,
    ):
        clients = [
            await stack.enter_async_context(HttpClient.opened(server.port)) for _ in range(CLIENTS)
        ]
        made = await engine.create_execution(NewExecution(execution_kind="nothing", lane_id="idle"))
        path = f"/v1/executions/{made.execution_id}"
        body = json.dumps({"execution_kind": "nothing", "input_json": {"number": 1}}).encode()
        calls: dict[str, list[Call]] = {
            "read": [partial(each.get, path) for each in clients],
            "read, bare": [lambda: engine.read_execution_info(made.execution_id)] * CLIENTS,
            "submit": [partial(each.post, "/v1/executions", body) for each in clients],
            "submit, bare": [lambda: create(engine)] * CLIENTS,
        }
        for each in calls.values():
            await ask(each, WARM_UPS, Taken(), server)
        for _ in range(TURNS):
            for name, each in calls.items():
                await ask(each, REQUESTS // TURNS, taken[name], server)
    shown(taken)
    for name in ("read", "submit"):
        ratio = taken[name].rate / taken[f"{name}, bare"].rate
        bench.at_least(0.25, ratio, f"{name}s over HTTP, of the bare engine's rate")


async def create(engine: Engine) -> object:
    return await engine.create_execution(
        NewExecution(
            execution_kind="nothing", input_payload=b'{"number":1}', payload_encoding="json"
        )
    )


async def ask(calls: list[Call], count: int, taken: Taken, server: ServerProcess) -> None:
    """All callers together, each one call after the other."""
    left = count

    async def caller(call: Call) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            began_s = time.perf_counter()
            await call()
            taken.each_ms.append((time.perf_counter() - began_s) * 1_000)

    before_us, began_s = server.cpu_us, time.perf_counter()
    await asyncio.gather(*(caller(each) for each in calls))
    taken.seconds += time.perf_counter() - began_s
    taken.server_us += server.cpu_us - before_us
    taken.calls += count


def shown(taken: dict[str, Taken]) -> None:
    rows = []
    for name, each in taken.items():
        text = (
            f"{each.rate:,.0f} /s, p50 {median(each.each_ms):.0f} ms,"
            f" p99 {percentile(each.each_ms, 0.99):.0f} ms"
        )
        if not name.endswith("bare"):
            text += f", {each.server_us / each.calls:.0f} µs of the server"
            text += f", {each.rate / taken[f'{name}, bare'].rate:.2f} of the bare engine"
        rows.append((name, text))
    figures(f"{CLIENTS} callers at once on Postgres, over HTTP and of the engine itself", rows)


# Streams ------------------------------------------------------------------------


async def streams(bench: Bench) -> None:
    """A thousand that follow all events of one server, until the last has heard the last."""
    async with bench.database() as database, ServerProcess.started(database) as server:
        jobs = Jobs(database)
        async with jobs.app, AsyncExitStack() as stack:
            before = server.memory_bytes
            began_s = time.perf_counter()
            clients = [
                await stack.enter_async_context(HttpClient.opened(server.port))
                for _ in range(STREAMS)
            ]
            await asyncio.gather(*(each.follow(PATH) for each in clients))
            opened_s = time.perf_counter() - began_s
            opened, cpu_us = server.memory_bytes, server.cpu_us
            listening = asyncio.gather(*(each.hear(EVENTS) for each in clients))
            await jobs.submit(EVENTS)
            began_s = time.perf_counter()
            await jobs.drain()
            await listening
            heard_s = time.perf_counter() - began_s
            after = server.memory_bytes
            spent_us = server.cpu_us - cpu_us
    figures(
        f"{STREAMS:,} streams of events on one server, {EVENTS} completions",
        [
            ("until all of them are open", f"{opened_s:.2f} s"),
            ("memory before", mebibytes(before)),
            ("with all of them open", mebibytes(opened)),
            ("after the last has heard the last", mebibytes(after)),
            ("for each of them", f"{(after - before) / STREAMS / 1024:.0f} KiB"),
            ("until the last has heard the last", f"{heard_s:.2f} s"),
            ("CPU of the server for an event told", f"{spent_us / STREAMS / EVENTS:.0f} µs"),
        ],
    )
    bench.at_most(100, (after - before) / STREAMS / 1024, "an event stream, KiB of the server")


def mebibytes(size: int) -> str:
    return f"{size / 1024**2:.0f} MiB"


# A worker without a database ----------------------------------------------------


async def drains(bench: Bench) -> None:
    """Jobs that do nothing, by a worker with the database and by one with a server."""
    rates: dict[str, list[float]] = {"local": [], "remote": []}
    spent = {}
    async with (
        bench.database() as database,
        ServerProcess.started(database) as server,
        Meter.opened(database) as meter,
    ):
        for where in TURNS * list(rates):
            jobs = Jobs(server.url if where == "remote" else database)
            async with jobs.app:
                await jobs.submit(DRAINED)
                before_us = server.cpu_us
                async with meter.measuring(DRAINED) as cost:
                    await jobs.drain(CONCURRENCY)
                server_us = (server.cpu_us - before_us) / DRAINED
            rates[where].append(cost.rate)
            spent[where] = (cost, server_us)
    ratio = max(rates["remote"]) / max(rates["local"])
    (local, _), (remote, server_us) = spent["local"], spent["remote"]
    costs(
        f"Drains of no-op jobs on Postgres, {CONCURRENCY} in hand",
        [("with the database", local, None), ("through the server", remote, ratio)],
        "of local",
    )
    figures("The server of the remote worker", [("CPU for a job", f"{server_us:.0f} µs")])
    bench.at_least(0.3, ratio, "a remote worker's drain, of a local one's rate")
