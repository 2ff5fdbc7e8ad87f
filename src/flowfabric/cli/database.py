"""`migrate`, `doctor` and `bench`: the database itself."""

import asyncio
import platform
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

import click
from msgspec import Struct, structs
from rich.text import Text

from flowfabric.cli import options, screen
from flowfabric.cli.executions import waiting_unserved
from flowfabric.cli.options import Target, check_file, target_options
from flowfabric.cli.screen import fixed, right
from flowfabric.cli.workers import every_lane, every_worker
from flowfabric.connection import connect, migrate
from flowfabric.core.audit import Complaint, Wrong
from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.creation import NewExecution
from flowfabric.core.diagnosis import WORKER_COMMAND, Cause
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policies import span
from flowfabric.core.results import Claimed
from flowfabric.core.states import LaneState
from flowfabric.core.workers import Need
from flowfabric.engine.engine import Engine
from flowfabric.engine.executions import Completion
from flowfabric.errors import AccessDenied, FlowFabricError, NotFound, SchemaTooOld
from flowfabric.outages import statements_within
from flowfabric.store.urls import redact
from flowfabric.version import __version__

UP_TO_DATE: Final = "The schema is up to date."
ROUND_TRIPS: Final = 5
SLOW_MS: Final = 20.0
SKEW_MAX_MS: Final = 1_000
OVERDUE_MAX_MS: Final = 5_000
"""How late timers may be while there is a worker; without one, not at all."""
NOBODY_WAITS_FOR: Final = frozenset({"flow_audit"})
"""A sweep for leftovers, which is due as soon as there is anything to look at."""
HINTS_WAIT_S: Final = 3.0
AUDIT_S: Final = 20.0
"""How long the audit may take."""
PAGE_PATIENCE_S: Final = 30.0
"""How long one page of it may take: it reads all rows of several partitions."""
COMPLAINTS_SHOWN: Final = 5
UNSERVED_S: Final = 10.0
"""How long to search for runs that no worker serves."""


@click.command("migrate")
@click.option(
    "--check", is_flag=True, help="Change nothing; exit with 4 if there is something to do."
)
@target_options
def migrate_command(target: Target, check: bool) -> int:
    """Bring the database's schema up to date. Safe to repeat, even by many processes at once."""
    target.check_is_database("a server cannot change or compare its schema")
    url = target.database()
    if check:
        return asyncio.run(_check(target, url))
    applied = asyncio.run(migrate(url))
    if target.json:
        screen.emit({"applied": applied})
    elif applied:
        for name in applied:
            screen.out().print(Text.assemble(("applied ", "green"), name))
    else:
        screen.out().print(UP_TO_DATE)
    return options.OK


async def _check(target: Target, url: str) -> int:
    check_file(url)
    try:
        await (await connect(url, set_up=False)).close()
    except SchemaTooOld as error:
        document = {"found": error.found, "expected": error.expected}
        screen.answer(document, str(error), as_json=target.json)
        return options.REFUSED
    screen.answer({"up_to_date": True}, UP_TO_DATE, as_json=target.json)
    return options.OK


class Verdict(StrEnum):
    FINE = "fine"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(Struct, frozen=True):
    check: str
    verdict: Verdict
    says: str
    advice: str = ""


_MARKS: Final = {
    Verdict.FINE: ("✓", "green"),
    Verdict.WARNING: ("!", "yellow"),
    Verdict.PROBLEM: ("✗", "bold red"),
}


@click.command("doctor", short_help="Check the database and who works on it.")
@target_options
def doctor(target: Target) -> int:
    """Check that the database can be used and that its work is being done.

    Exits with 5 if the database cannot be used, with 1 if there is another problem.
    """
    findings = asyncio.run(_examine(target))
    if target.json:
        screen.emit({"version": __version__, "findings": findings})
    problems = [finding for finding in findings if finding.verdict is Verdict.PROBLEM]
    if any(finding.check == "database" for finding in problems):
        return options.UNAVAILABLE
    return options.FAILED if problems else options.OK


async def _examine(target: Target) -> list[Finding]:
    findings: list[Finding] = []
    async for finding in _findings(target):
        findings.append(finding)
        if not target.json:
            _print(finding)
    return findings


def _print(finding: Finding) -> None:
    mark, style = _MARKS[finding.verdict]
    line = Text.assemble((f"{mark} ", style), (f"{finding.check:<12}", "bold"), finding.says)
    screen.out().print(line)
    if finding.advice:
        screen.out().print(Text(f"  {'':<12}{finding.advice}", style="dim"))


async def _findings(target: Target) -> AsyncIterator[Finding]:
    says = f"flowfabric {__version__} on Python {platform.python_version()}"
    yield Finding("package", Verdict.FINE, says)
    url = redact(target.database())
    try:
        engine = await target.open()
    except AccessDenied:
        raise
    except FlowFabricError as error:
        yield Finding("database", Verdict.PROBLEM, f"{url}: {error}")
        return
    async with engine:
        yield Finding("database", Verdict.FINE, f"{url} answers, and its schema is up to date")
        for check, look in _LOOKS.items():
            for finding in await _looked(check, look(engine)):
                advice = target.naming_program(finding.advice)
                yield structs.replace(finding, advice=advice)


async def _looked(check: str, looking: Awaitable[Sequence[Finding]]) -> Sequence[Finding]:
    """The findings of a check; a warning if the token does not allow it."""
    try:
        return await looking
    except AccessDenied as error:
        says = f"not checked: {error}"
        advice = "Ask with a token for every namespace that has the scopes read and operate."
        return [Finding(check, Verdict.WARNING, says, advice)]


async def _round_trip(engine: Engine) -> Sequence[Finding]:
    times_ms: list[float] = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        await engine.ping()
        times_ms.append((time.perf_counter() - start) * 1_000)
    best_ms = min(times_ms)
    says = f"a round trip takes {best_ms:.1f} ms"
    if best_ms > SLOW_MS:
        return [Finding("latency", Verdict.WARNING, says, "Run workers closer to the database.")]
    return [Finding("latency", Verdict.FINE, says)]


async def _clock(engine: Engine) -> Sequence[Finding]:
    skew_ms = await engine.server_time_ms() - time.time_ns() // 1_000_000
    says = f"differs from this machine's by {abs(skew_ms)} ms"
    if abs(skew_ms) > SKEW_MAX_MS:
        advice = "Harmless: every decision goes by the database's clock. Times here look shifted."
        return [Finding("clock", Verdict.WARNING, says, advice)]
    return [Finding("clock", Verdict.FINE, says)]


async def _hints(engine: Engine) -> Sequence[Finding]:
    deadline = time.monotonic() + HINTS_WAIT_S
    with engine.store.hints(["doctor"]) as hints:
        while not engine.store.hints_are_live and time.monotonic() < deadline:
            await hints.wait(0.1)
    if engine.store.hints_are_live:
        return [Finding("wake-ups", Verdict.FINE, "notifications between processes arrive")]
    advice = "A pooler in transaction mode? Everything works, by polling, with a little more delay."
    return [Finding("wake-ups", Verdict.WARNING, "notifications do not arrive", advice)]


async def _workers(engine: Engine) -> Sequence[Finding]:
    count = len(await every_worker(engine))
    if count:
        return [Finding("workers", Verdict.FINE, f"{count} running")]
    advice = f"Start one: {WORKER_COMMAND}"
    return [Finding("workers", Verdict.WARNING, "none running", advice)]


async def _unserved(engine: Engine) -> Sequence[Finding]:
    """Find runs that wait for a lane, a task or capabilities that no worker serves."""
    present = await every_worker(engine)
    if not present:
        # The check of workers has said so.
        return []
    counts: Counter[Need] = Counter()
    examples: dict[Need, ExecutionId] = {}
    async for need, execution_id in waiting_unserved(engine, present, UNSERVED_S):
        counts[need] += 1
        examples[need] = execution_id
    findings = []
    for need, count in counts.most_common(COMPLAINTS_SHOWN):
        with suppress(NotFound):
            explanation = await engine.explain_execution(examples[need])
            if explanation.cause is Cause.NO_WORKER:
                runs = "1 run waits" if count == 1 else f"{count} runs wait"
                says = f"{runs} for a worker: {need.execution_kind} in lane {need.lane_id}"
                findings.append(Finding("waiting", Verdict.WARNING, says, explanation.sentence))
    return findings or [Finding("waiting", Verdict.FINE, "no run waits for want of a worker")]


async def _overdue(engine: Engine) -> Sequence[Finding]:
    at_most_ms = OVERDUE_MAX_MS if (await engine.list_workers(limit=1)).workers else 0
    waits = await engine.next_due()
    late = {
        name: -wait_ms
        for name, wait_ms in waits.items()
        if -wait_ms > at_most_ms and name not in NOBODY_WAITS_FOR
    }
    if not late:
        return [Finding("timers", Verdict.FINE, "nothing is overdue")]
    worst = max(late, key=lambda name: late[name])
    most = "" if len(late) == 1 else f", {worst} most,"
    says = f"{', '.join(sorted(late))} overdue{most} by {span(late[worst])}"
    advice = "No process runs the reconcilers: start a worker, `serve` or `reconcile`."
    return [Finding("timers", Verdict.PROBLEM, says, advice)]


async def _lanes(engine: Engine) -> Sequence[Finding]:
    lanes = await every_lane(engine)
    closed = [lane for lane in lanes if lane.state is not LaneState.ACTIVE]
    if closed:
        says = ", ".join(f"{lane.lane_id} is {lane.state}" for lane in closed)
        return [Finding("lanes", Verdict.WARNING, says, "flowfabric lanes resume LANE")]
    return [Finding("lanes", Verdict.FINE, f"{len(lanes)} known, all active")]


async def _audit(engine: Engine) -> Sequence[Finding]:
    """Whether every execution has something that moves it, and every row an execution."""
    deadline = time.monotonic() + AUDIT_S
    found, whole = await _complaints(engine, deadline)
    if found:
        # Keep only complaints that a second look confirms: rows change meanwhile.
        again, _ = await _complaints(engine, deadline + AUDIT_S)
        found = [each for each in found if each in again]
    seen = "everything" if whole else f"as much as was seen in {AUDIT_S:.0f} s"
    if not found:
        return [Finding("audit", Verdict.FINE, f"{seen} is in order")]
    findings = []
    for wrong in Wrong:
        matching = [each for each in found if each.wrong is wrong]
        if matching:
            shown = ", ".join(f"{e.execution_id} ({e.detail})" for e in matching[:COMPLAINTS_SHOWN])
            more = f" and {len(matching) - COMPLAINTS_SHOWN} more"
            says = shown + (more if len(matching) > COMPLAINTS_SHOWN else "")
            findings.append(Finding("audit", Verdict.PROBLEM, says, matching[0].advice))
    return findings


async def _complaints(engine: Engine, deadline: float) -> tuple[list[Complaint], bool]:
    """The complaints of the audit, and whether it finished in time."""
    found: list[Complaint] = []
    with statements_within(PAGE_PATIENCE_S):
        page = await engine.audit()
        found += page.complaints
        while page.cursor is not None and time.monotonic() < deadline:
            page = await engine.audit(cursor=page.cursor)
            found += page.complaints
    return found, page.cursor is None


_LOOKS: Final[Mapping[str, Callable[[Engine], Awaitable[Sequence[Finding]]]]] = {
    "latency": _round_trip,
    "clock": _clock,
    "wake-ups": _hints,
    "workers": _workers,
    "waiting": _unserved,
    "timers": _overdue,
    "lanes": _lanes,
    "audit": _audit,
}


# Measuring ------------------------------------------------------------------

BENCH: Final = "flowfabric.bench"
"""The lane and the kind of what is measured."""
SINGLES: Final = 200


class Measured(Struct, frozen=True):
    what: str
    count: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.count / self.seconds


@click.command("bench", short_help="Measure the engine for a few seconds.")
@click.option(
    "--count",
    default=5_000,
    show_default=True,
    type=click.IntRange(100, 1_000_000),
    help="Executions to create.",
)
@click.option(
    "--batch",
    default=100,
    show_default=True,
    type=click.IntRange(1, BATCH_MAX),
    help="Executions in a batch.",
)
@target_options
def bench(target: Target, count: int, batch: int) -> None:
    """Measure the engine for a few seconds: create, claim and complete, in batches and singly.

    Uses a SQLite file of its own unless a database is named. There it uses a lane of its own,
    and what it leaves behind is removed as all ended executions are.
    """
    measured = asyncio.run(_measure(target, count, batch))
    if target.json:
        rows = [structs.asdict(each) | {"per_second": each.per_second} for each in measured]
        screen.emit({"batch": batch, "measured": rows})
        return
    columns = [fixed(""), right("COUNT"), right("TOOK"), right("RATE")]
    rows_shown = [
        (each.what, f"{each.count}", f"{each.seconds:.2f}s", f"{each.per_second:,.0f}/s")
        for each in measured
    ]
    screen.out().print(screen.table(columns, rows_shown))


@asynccontextmanager
async def _engine(target: Target) -> AsyncIterator[Engine]:
    if target.url is not None or target.app is not None:
        async with await target.open() as engine:
            yield engine
        return
    with tempfile.TemporaryDirectory(prefix="flowfabric-bench-") as folder:
        async with await connect(f"sqlite:///{Path(folder) / 'bench.db'}") as engine:
            yield engine


async def _measure(target: Target, count: int, batch: int) -> list[Measured]:
    async with _engine(target) as engine:
        if not target.json:
            screen.err().print(Text(f"{engine.backend_label()}, batches of {batch}", style="dim"))
        with screen.err().status("Measuring …"):
            return [
                await _create(engine, count, batch),
                await _drain(engine, count, batch),
                await _one_by_one(engine),
            ]


async def _create(engine: Engine, count: int, batch: int) -> Measured:
    start = time.perf_counter()
    for done in range(0, count, batch):
        size = min(batch, count - done)
        await engine.create_executions([_new() for _ in range(size)])
    return Measured("create", count, time.perf_counter() - start)


async def _drain(engine: Engine, count: int, batch: int) -> Measured:
    start = time.perf_counter()
    done = 0
    while done < count:
        claimed = await _claim(engine, batch)
        if not claimed:
            break
        await engine.complete_many(
            [Completion(handle=each.handle, result=b"{}") for each in claimed]
        )
        done += len(claimed)
    return Measured("claim and complete", done, time.perf_counter() - start)


async def _one_by_one(engine: Engine) -> Measured:
    start = time.perf_counter()
    for _ in range(SINGLES):
        await engine.create_execution(_new())
        (claimed,) = await _claim(engine, 1)
        await engine.complete(claimed.handle, b"{}")
    return Measured("whole lives, one by one", SINGLES, time.perf_counter() - start)


async def _claim(engine: Engine, limit: int) -> Sequence[Claimed]:
    return await engine.claim_many(
        [BENCH], limit=limit, kinds=[BENCH], worker_id="bench", worker_instance_id="bench"
    )


def _new() -> NewExecution:
    return NewExecution(execution_kind=BENCH, lane_id=BENCH, input_payload=b"{}")
