"""`ls`, `show`, `why`: looking at executions."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import click
from rich.text import Text

from flowfabric.cli import options, screen
from flowfabric.cli.screen import REMARK, ScreenColumn, fixed, flexible, right
from flowfabric.cli.workers import every_lane, every_worker
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.checks import split_kind
from flowfabric.core.ids import ExecutionId
from flowfabric.core.parking import PUT_ASIDE
from flowfabric.core.policies import in_words, span
from flowfabric.core.records import Attempt, StepKind
from flowfabric.core.states import TERMINAL_STATES, AttemptLifecycle, LaneState, PublicState
from flowfabric.core.views import ExecutionDetails, ExecutionSnapshot, StepView
from flowfabric.core.workers import Need, WorkerEntry, need_of, other_versions, serves
from flowfabric.engine.engine import Engine
from flowfabric.engine.paging import pages
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.errors import NotFound
from flowfabric.terminal import Indented

# What belongs to an execution, as `show` prints it: steps, children, tracebacks

STEP_CHARS_MAX: Final = 200
"""How much of a step's result the list shows; `--json` prints all of it."""
STEPS_SHOWN_MAX: Final = 200
"""How many steps and children are listed; `--json` prints all of them."""

STEP_COLUMNS: Final = (
    flexible("STEP"),
    flexible("BRANCH"),
    fixed("KIND"),
    right("ENDED"),
    right("TOOK"),
    REMARK,
)
CHILD_COLUMNS: Final[tuple[ScreenColumn, ...]] = (fixed("STATE"), flexible("KIND"), right("AGE"))


def print_section(columns: Sequence[ScreenColumn], rows: Sequence[Sequence[Text | str]]) -> None:
    if rows:
        screen.out().print()
        screen.out().print(screen.table(columns, rows))


def print_steps(execution: ExecutionDetails, now_ms: int) -> None:
    shown = execution.steps[-STEPS_SHOWN_MAX:]
    called = {each.execution_id: each.own_id for each in execution.children if each.own_id}
    rows = [
        (
            _called(called, step.name),
            step.branch,
            step.kind,
            screen.ago(ended_at_ms(step, now_ms), now_ms),
            "" if step.duration_ms is None else span(step.duration_ms),
            _outcome(step, now_ms, called),
        )
        for step in shown
    ]
    print_section(STEP_COLUMNS, rows)
    _print_left_out(len(execution.steps) - len(shown), "earlier steps")


def ended_at_ms(step: StepView, now_ms: int) -> int | None:
    """When it ended. A sleep is stored when it begins."""
    if step.wake_at_ms is None:
        return step.recorded_at_ms
    return step.wake_at_ms if step.wake_at_ms <= now_ms else None


def _called(own_ids: Mapping[ExecutionId, str], text: str) -> str:
    """A text that names at most one child, by the id that people gave it."""
    named = next((each for each in own_ids if each in text), None)
    return text if named is None else text.replace(named, own_ids[named])


def _outcome(step: StepView, now_ms: int, called: Mapping[ExecutionId, str]) -> Text | str:
    if step.error is not None:
        return Text(screen.one_line(step.error), style="red")
    if step.wake_at_ms is not None:
        return f"wakes {screen.ago(step.wake_at_ms, now_ms)}" if step.wake_at_ms > now_ms else ""
    result = screen.shown(step.result, STEP_CHARS_MAX)
    if result is not None and step.kind is StepKind.SUBMIT:
        result = _called(called, result)
    return screen.one_line(result)


def print_children(execution: ExecutionDetails, now_ms: int) -> None:
    shown = execution.children[:STEPS_SHOWN_MAX]
    rows = [
        (
            child.own_id or screen.short_id(child.execution_id),
            screen.state(child.public_state),
            child.execution_kind,
            span(now_ms - child.created_at_ms),
        )
        for child in shown
    ]
    print_section((screen.id_column("CHILD"), *CHILD_COLUMNS), rows)
    _print_left_out(len(execution.children) - len(shown), "later children")


def print_tracebacks(execution: ExecutionDetails) -> None:
    """Where each failed attempt failed."""
    for attempt in execution.attempts:
        if attempt.failure_traceback:
            screen.out().print()
            screen.out().print(Text(f"try {attempt.attempt_index + 1}", style="dim"))
            screen.out().print(Indented(attempt.failure_traceback.rstrip()))


def _print_left_out(count: int, what: str) -> None:
    if count > 0:
        screen.err().print(Text(f"{count} {what} left out: --json", style="dim"))


# `ls`, `show`, `why` --------------------------------------------------------

WAITING_FOR_OTHERS: Final = (PublicState.SUSPENDED, PublicState.WAITING_CHILDREN)
EXPLAINED_MAX: Final = 200
"""How many executions `ls` looks up to say what they wait for."""
DATA_CHARS_MAX: Final = 2_000
"""How much of a payload or result `show` prints; `--json` prints all of it."""

ATTEMPT_COLUMNS: Final = (
    right("TRY"),
    fixed("TYPE"),
    fixed("STATE"),
    right("STARTED"),
    right("TOOK"),
    flexible("WORKER"),
    REMARK,
)


@click.command("ls")
@options.filter_options
@options.limit_option
@options.on_engine("any")
async def ls(engine: Engine, target: options.Target, chosen: options.Chosen, limit: int) -> None:
    """List executions, newest first.

    With --json: one execution per line.
    """
    matching = await chosen.resolve(engine, target)
    found: list[ExecutionSnapshot] = []
    cursor: str | None = None
    while len(found) < limit:
        page = await engine.find_executions(
            matching, cursor=cursor, limit=min(PAGE_MAX, limit - len(found))
        )
        fitting = [each for each in page.executions if chosen.fits(each)]
        if target.json:
            for execution in fitting:
                screen.emit(execution)
        found.extend(fitting)
        cursor = page.next_cursor
        if cursor is None:
            break
    if not target.json:
        now_ms = await engine.server_time_ms()
        said = await _explained(engine, found) | await _unserved(engine, found, now_ms)
        _print_list(found, said, now_ms)
        for line in on_old_versions(found):
            screen.err().print(Text(line, style="dim"))
        if cursor is not None:
            screen.err().print(f"[dim]Showing the newest {limit}; --limit shows more.[/]")


async def _explained(engine: Engine, found: Sequence[ExecutionSnapshot]) -> dict[str, str]:
    """What executions wait for if their own row does not say: signals, members."""
    waiting = [each.execution_id for each in found if each.public_state in WAITING_FOR_OTHERS]
    said: dict[str, str] = {}
    for execution_id in waiting[:EXPLAINED_MAX]:
        with suppress(NotFound):
            said[execution_id] = (await engine.explain_execution(execution_id)).remark
    return said


async def _unserved(
    engine: Engine, found: Sequence[ExecutionSnapshot], now_ms: int
) -> dict[str, str]:
    """What waits for a worker that does not exist, or for its lane."""
    due = [each for each in found if wants_worker(each, now_ms)]
    present = await every_worker(engine) if due else []
    required = await _required(engine, due) if present else {}
    closed = {
        lane.lane_id: f"lane {lane.state}"
        for lane in (await every_lane(engine) if due else [])
        if lane.state in (LaneState.PAUSED, LaneState.DISABLED)
    }
    said = {
        each.execution_id: closed.get(each.lane_id)
        or unserved(each, required.get(each.execution_id, ()), present, now_ms)
        for each in due
    }
    return {execution_id: text for execution_id, text in said.items() if text is not None}


async def _required(
    engine: Engine, found: Sequence[ExecutionSnapshot]
) -> dict[ExecutionId, tuple[str, ...]]:
    """The capabilities that executions need."""
    required: dict[ExecutionId, tuple[str, ...]] = {}
    for start in range(0, len(found), PAGE_MAX):
        page = [each.execution_id for each in found[start : start + PAGE_MAX]]
        required |= await engine.required_capabilities(page)
    return required


async def waiting_unserved(
    engine: Engine, present: Sequence[WorkerEntry], within_s: float
) -> AsyncIterator[tuple[Need, ExecutionId]]:
    """Executions that none of the workers would run, and what they need; newest first."""
    deadline = time.monotonic() + within_s
    waiting = ExecutionFilter(states=(PublicState.WAITING, PublicState.DELAYED))
    now_ms = await engine.server_time_ms()
    found = pages(lambda at: engine.find_executions(waiting, cursor=at, limit=PAGE_MAX))
    async for page in found:
        due = [each for each in page.executions if wants_worker(each, now_ms)]
        required = await _required(engine, due)
        for each in due:
            need = need_of(each, required.get(each.execution_id, ()))
            if not any(serves(worker, need) for worker in present):
                yield need, each.execution_id
        if time.monotonic() > deadline:
            return


def _print_list(found: list[ExecutionSnapshot], said: Mapping[str, str], now_ms: int) -> None:
    columns = (
        flexible("KIND", at_least=20),
        screen.id_column(),
        fixed("STATE"),
        flexible("LANE"),
        right("TRY"),
        right("AGE"),
        REMARK,
    )
    rows = [
        (
            each.execution_kind,
            each.own_id or screen.short_id(each.execution_id),
            shown_state(each),
            each.lane_id,
            str(each.total_attempt_count),
            span(now_ms - each.created_at_ms),
            screen.one_line(said.get(each.execution_id) or remark(each, now_ms)),
        )
        for each in found
    ]
    screen.show(found, columns, rows, as_json=False, nothing="No executions match.")


def shown_state(execution: ExecutionSnapshot) -> Text:
    """Its state; 'blocked' rather than 'delayed' if changed code has stopped it."""
    if execution.blocked:
        return Text("blocked", style="bold red")
    return screen.state(execution.public_state)


def queued(execution: ExecutionSnapshot) -> bool:
    """Whether it only waits for a worker."""
    return (
        execution.public_state is PublicState.WAITING
        and execution.blocking_reason == "waiting_for_worker"
    )


def overdue(execution: ExecutionSnapshot, now_ms: int) -> bool:
    """Whether its delay is over and no worker has taken it up."""
    until_ms = execution.delay_until_ms
    delayed = execution.public_state is PublicState.DELAYED
    return delayed and until_ms is not None and until_ms <= now_ms and not execution.blocked


def wants_worker(execution: ExecutionSnapshot, now_ms: int) -> bool:
    return queued(execution) or overdue(execution, now_ms)


def unserved(
    execution: ExecutionSnapshot,
    required: tuple[str, ...],
    present: Sequence[WorkerEntry],
    now_ms: int,
) -> str | None:
    """A remark if no present worker can run it, with what they lack."""
    if any(serves(each, need_of(execution, required)) for each in present):
        return None
    kind = execution.execution_kind
    due = f", {_due(execution, now_ms)}" if overdue(execution, now_ms) else ""
    if any(serves(each, need_of(execution, ())) for each in present):
        return f"no worker with {', '.join(required)}{due}"
    if other_versions(present, execution):
        return f"no worker for version {split_kind(kind)[1]} any more{due}"
    return f"no worker for {kind}{due}" if present else f"no worker{due}"


def _due(execution: ExecutionSnapshot, now_ms: int) -> str:
    when = screen.ago(execution.delay_until_ms, now_ms)
    return f"due {when}" if overdue(execution, now_ms) else when


def on_old_versions(found: Sequence[ExecutionSnapshot]) -> list[str]:
    """A line for each task that has unfinished executions of an older version."""
    newest: dict[str, int] = {}
    for each in found:
        name, version = split_kind(each.execution_kind)
        newest[name] = max(version, newest.get(name, 1))
    left: Counter[tuple[str, int]] = Counter(
        split_kind(each.execution_kind)
        for each in found
        if each.public_state not in TERMINAL_STATES
    )
    return [
        f"{name}: {count} on version {version} not ended, the newest is {newest[name]}"
        for (name, version), count in sorted(left.items())
        if version < newest[name]
    ]


def remark(execution: ExecutionSnapshot, now_ms: int) -> str | None:
    """The one thing worth knowing about an execution in a list."""
    match execution.public_state:
        case PublicState.FAILED | PublicState.EXPIRED:
            return in_words(execution.failure_reason or "", None)
        case PublicState.CANCELLED:
            return execution.cancellation_reason
        case PublicState.COMPLETED if execution.started_at_ms and execution.completed_at_ms:
            return f"took {span(execution.completed_at_ms - execution.started_at_ms)}"
        case PublicState.ACTIVE:
            done = "" if execution.progress_pct is None else f"{execution.progress_pct}% "
            lease = execution.current_lease
            worker = "" if lease is None else f"on {lease.worker_instance_id}"
            return f"{done}{execution.progress_message or worker}"
        case PublicState.DELAYED if execution.blocked:
            return execution.blocking_detail
        case PublicState.DELAYED if execution.delay_until_ms is not None:
            why = in_words(execution.failure_reason or "", None)
            last = f" after: {why}" if why else ""
            if (execution.blocking_detail or "").startswith(PUT_ASIDE):
                last = f", {execution.blocking_detail}"
            return f"{_due(execution, now_ms)}{last}"
        case PublicState.WAITING if queued(execution):
            return None
        case _:
            return execution.blocking_detail or execution.blocking_reason


@click.command("show", short_help="Show one execution: steps, attempts, payload, result.")
@click.argument("execution_id", metavar="ID")
@options.on_engine("any")
async def show(engine: Engine, target: options.Target, execution_id: str) -> None:
    """Show one execution with its steps, children, attempts and their tracebacks, payload and
    result.

    ID may be shortened to the beginning or end of the uuid.
    """
    found = await target.find(engine, execution_id)
    execution = await engine.inspect_execution(found)
    if execution is None:
        raise NotFound("execution", execution_id)
    context = await engine.read_execution_context(found)
    result = await engine.get_execution_result(found)
    explanation = await engine.explain_execution(found)
    if target.json:
        document = screen.plain(execution)
        assert isinstance(document, dict)
        screen.emit(
            document
            | {
                "explanation": explanation.sentence,
                "payload": context.input_payload,
                "result": result,
            }
        )
        return
    now_ms = await engine.server_time_ms()
    console = screen.out()
    heading = Text.assemble((execution.execution_kind, "bold"), "  ", shown_state(execution))
    console.print(heading)
    console.print(Text(explanation.sentence, style="italic"))
    console.print()
    parent = execution.parent_execution_id
    own_ids = {} if parent is None else await engine.own_ids([parent])
    called = "  ".join((*own_ids.values(), parent or ""))
    console.print(screen.facts(_facts(execution, now_ms, parent=called)))
    for name, data in (("payload", context.input_payload), ("result", result)):
        if text := screen.shown(data, DATA_CHARS_MAX):
            console.print()
            console.print(Text(name, style="dim"))
            console.print(Indented(text))
    print_steps(execution, now_ms)
    print_children(execution, now_ms)
    _print_attempts(execution, now_ms)
    print_tracebacks(execution)


def _facts(
    execution: ExecutionSnapshot, now_ms: int, *, parent: str
) -> list[tuple[str, str | None]]:
    lease = execution.current_lease
    ended = execution.public_state in TERMINAL_STATES
    counts = {
        "retries": execution.retry_count,
        "reclaims": execution.lease_reclaim_count,
        "replays": execution.replay_count,
    }
    return [
        ("id", execution.execution_id),
        ("own id", execution.own_id),
        ("lane", f"{execution.lane_id}  priority {execution.priority}"),
        ("namespace", None if execution.namespace == "default" else execution.namespace),
        ("flow", execution.flow_id),
        ("parent", parent),
        ("created", screen.moment(execution.created_at_ms, now_ms)),
        ("started", screen.moment(execution.started_at_ms, now_ms)),
        ("ended", screen.moment(execution.completed_at_ms, now_ms)),
        ("not before", screen.moment(execution.delay_until_ms, now_ms)),
        ("deadline", screen.moment(execution.deadline_at_ms, now_ms)),
        ("counts", "  ".join(f"{count} {name}" for name, count in counts.items() if count)),
        ("progress", _progress(execution)),
        (
            "lease",
            None
            if lease is None
            else f"{lease.worker_instance_id}  epoch {lease.lease_epoch}"
            f"  ends {screen.ago(lease.expires_at_ms, now_ms)}",
        ),
        ("last failure", None if ended else execution.failure_reason),
        ("cancelled by", execution.cancelled_by),
        ("tags", "  ".join(f"{key}={value}" for key, value in execution.tags.items())),
    ]


def _progress(execution: ExecutionSnapshot) -> str:
    percent = "" if execution.progress_pct is None else f"{execution.progress_pct}%"
    return "  ".join(filter(None, (percent, execution.progress_message)))


def _print_attempts(execution: ExecutionDetails, now_ms: int) -> None:
    rows = [
        (
            str(attempt.attempt_index + 1),
            attempt.attempt_type,
            _attempt_state(attempt, execution),
            screen.ago(attempt.started_at_ms, now_ms),
            ""
            if attempt.started_at_ms is None
            else span((attempt.ended_at_ms or now_ms) - attempt.started_at_ms),
            attempt.worker_instance_id or "",
            screen.one_line(what_ended(attempt)),
        )
        for attempt in execution.attempts
    ]
    print_section(ATTEMPT_COLUMNS, rows)


def _attempt_state(attempt: Attempt, execution: ExecutionDetails) -> str:
    """'blocked' rather than 'suspended', as of the execution, if changed code has stopped it."""
    if execution.blocked and attempt.attempt_state is AttemptLifecycle.SUSPENDED:
        return "blocked"
    return attempt.attempt_state.replace("_", " ")


def what_ended(attempt: Attempt) -> str | None:
    if attempt.failed_step_name is None:
        return attempt.failure_reason or attempt.reclaim_reason
    return f"step {attempt.failed_step_name}: {attempt.failure_reason}"


@click.command("why", short_help="Say why an execution is not running.")
@click.argument("execution_id", metavar="ID")
@options.on_engine("any")
async def why(engine: Engine, target: options.Target, execution_id: str) -> None:
    """Say in one sentence why an execution is not running."""
    found = await target.find(engine, execution_id)
    explanation = await engine.explain_execution(found)
    screen.answer(explanation, target.sentence(explanation), as_json=target.json)
