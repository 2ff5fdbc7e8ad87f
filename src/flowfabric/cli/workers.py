"""`workers` and `lanes`: who serves what, and the queues they serve."""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final

import click
from msgspec import structs
from rich.text import Text

from flowfabric.app import App
from flowfabric.cli import options, screen
from flowfabric.cli.screen import fixed, flexible, right, spare, whole
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.diagnosis import WORKER_COMMAND
from flowfabric.core.records import Lane
from flowfabric.core.states import PublicState
from flowfabric.core.workers import WorkerDead, WorkerEntry, WorkerEvent
from flowfabric.engine.engine import Engine
from flowfabric.engine.lanes import LaneCounts
from flowfabric.engine.paging import pages
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.errors import NotFound
from flowfabric.task import Task

# Workers --------------------------------------------------------------------


@click.group("workers")
def workers() -> None:
    """List workers, see what happened to them, and declare one dead."""


@workers.command("list")
@click.option(
    "--all", "everybody", is_flag=True, help="Include workers that have been silent for too long."
)
@options.on_engine("any")
async def list_workers(engine: Engine, target: options.Target, everybody: bool) -> None:
    """List workers: what each serves and how much it runs. With --json: one per line.

    A worker has the code of its tasks, but does not run those whose capabilities it lacks. If
    --app names the program, these come first, with what is lacking; with --json, as `lacks`.
    """
    program = None if target.app is None else options.find_app(target.app)
    found = await every_worker(engine, target.scope(), include_expired=everybody)
    now_ms = await engine.server_time_ms()
    # Show capabilities only if some worker has them, and namespaces only if they differ.
    offers = any(worker.capabilities for worker in found)
    apart = len({worker.namespace for worker in found}) > 1
    columns = [
        whole("WORKER"),
        flexible("LANES"),
        flexible("TASKS"),
        *([flexible("CAPABILITIES")] if offers else []),
        *([flexible("NAMESPACE")] if apart else []),
        right("RUNNING"),
        right("SEEN"),
    ]
    rows: list[tuple[str, ...]] = [
        (
            worker.worker_instance_id,
            ", ".join(worker.lanes),
            _tasks(worker, _lacks(worker, program)),
            *([", ".join(worker.capabilities)] if offers else []),
            *([worker.namespace or "all"] if apart else []),
            str(worker.held_leases),
            screen.ago(worker.last_heartbeat_ms, now_ms),
        )
        for worker in found
    ]
    absent = {} if target.json else await _absent_holders(engine, target, found)
    at_work = "" if not absent else f"No worker takes up new runs. {_at_work(absent)} Start one: "
    nothing = target.naming_program((at_work or "No worker is there. Start one: ") + WORKER_COMMAND)
    documents = [
        structs.asdict(worker) | ({} if program is None else {"lacks": _lacks(worker, program)})
        for worker in found
    ]
    screen.show(documents, columns, rows, as_json=target.json, nothing=nothing)
    if found and absent:
        screen.err().print(Text(_at_work(absent), style="dim"))


async def _absent_holders(
    engine: Engine, target: options.Target, present: Sequence[WorkerEntry]
) -> Counter[str]:
    """How many runs are held by workers that are not present: a draining worker has withdrawn."""
    active = ExecutionFilter(states=(PublicState.ACTIVE,), namespace=target.scope())
    page = await engine.find_executions(active, limit=PAGE_MAX)
    leases = [each.current_lease for each in page.executions if each.current_lease is not None]
    known = {worker.worker_instance_id for worker in present}
    holders = (lease.worker_instance_id for lease in leases)
    return Counter(each for each in holders if each not in known)


def _at_work(absent: Mapping[str, int]) -> str:
    each = ", ".join(f"{name} ({count})" for name, count in sorted(absent.items()))
    return f"Stopping or gone quiet, with runs in hand: {each}."


def _tasks(worker: WorkerEntry, lacks: Mapping[str, Sequence[str]]) -> str:
    """The tasks whose code it has; those it lacks capabilities for come first."""
    if worker.kinds is None:
        return "all"
    missing: dict[str, list[str]] = {}
    for kind, names in lacks.items():
        missing.setdefault(f"lacks {', '.join(names)}: ", []).append(kind)
    served = [kind for kind in worker.kinds if kind not in lacks]
    parts = [f"{what}{', '.join(kinds)}" for what, kinds in missing.items()]
    return "; ".join([*parts, *([", ".join(served)] if served else [])])


def _lacks(worker: WorkerEntry, program: App | None) -> dict[str, list[str]]:
    """The capabilities that its tasks need and it does not offer, as far as the program tells."""
    tasks = {} if program is None else program.tasks
    known = {kind: tasks[kind] for kind in worker.kinds or () if kind in tasks}
    found = {kind: lacking(task, worker.capabilities) for kind, task in known.items()}
    return {kind: names for kind, names in found.items() if names}


def lacking(task: Task[..., object], offered: Collection[str]) -> list[str]:
    """The capabilities of a task that a worker does not offer."""
    return sorted(set(task.settings.capabilities) - set(offered))


async def every_worker(
    engine: Engine, namespace: str | None = None, *, include_expired: bool = False
) -> list[WorkerEntry]:
    found = pages(
        lambda cursor: engine.list_workers(
            namespace=namespace, cursor=cursor, limit=PAGE_MAX, include_expired=include_expired
        )
    )
    return [worker async for page in found for worker in page.workers]


@workers.command("events")
@options.limit_option
@options.on_engine("any")
async def worker_events(engine: Engine, target: options.Target, limit: int) -> None:
    """List what happened to workers, newest first. With --json: one per line."""
    found = await engine.list_worker_events(namespace=target.scope(), limit=min(limit, PAGE_MAX))
    if target.json:
        for event in found:
            screen.emit(event)
        return
    now_ms = await engine.server_time_ms()
    columns = [right("WHEN"), whole("WORKER"), fixed("WHAT"), flexible("WHY")]
    screen.out().print(screen.table(columns, [_event_row(event, now_ms) for event in found]))


def _event_row(event: WorkerEvent, now_ms: int) -> tuple[str, ...]:
    what, why = event.words
    return screen.ago(event.event_at_ms, now_ms), event.worker_instance_id, what, why


@workers.command("dead")
@click.argument("worker")
@click.option("--reason", default="", help="Why; shown with the executions it held.")
@click.option("--keep-leases", is_flag=True, help="Do not revoke its leases.")
@options.on_engine("any")
async def mark_dead(
    engine: Engine, target: options.Target, worker: str, reason: str, keep_leases: bool
) -> None:
    """Declare WORKER dead: other workers get its executions at once.

    If it is alive after all, it registers again and continues with other work.
    """
    namespaces = await _namespaces_of(engine, worker, target.scope())
    taken, known = 0, False
    for namespace in namespaces:
        answer = await engine.mark_worker_dead(
            worker, reason=reason, namespace=namespace, revoke_leases=not keep_leases
        )
        taken += answer.revoked_leases
        known = known or isinstance(answer, WorkerDead)
    if not known and not taken:
        raise NotFound("worker", worker)
    sentence = f"{worker} is dead; {taken} execution{'' if taken == 1 else 's'} handed to others"
    document = {"worker_instance_id": worker, "revoked_leases": taken}
    screen.answer(document, sentence, as_json=target.json)


async def _namespaces_of(engine: Engine, instance_id: str, scope: str | None) -> list[str | None]:
    """The namespaces it is registered in, or `scope` if it is not registered."""
    present = await every_worker(engine, scope, include_expired=True)
    found = [each.namespace for each in present if each.worker_instance_id == instance_id]
    return [*found] if found else [scope]


# Lanes ----------------------------------------------------------------------

COUNTED: Final = ("ready", "running", "delayed", "suspended", "held")
LANE_COLUMNS: Final = (
    whole("LANE"),
    fixed("STATE"),
    spare("SINCE"),
    *(right(name.upper()) for name in COUNTED[:2]),
    *(spare(name.upper()) for name in COUNTED[2:]),
)


@click.group("lanes")
def lanes() -> None:
    """See and steer lanes, the named queues executions wait in."""


@lanes.command("list")
@options.on_engine()
async def list_lanes(engine: Engine, target: options.Target) -> None:
    """List lanes, and how much work there is in each. With --json: one per line."""
    lanes = await every_lane(engine)
    counts = {each.lane_id: each for each in await engine.count_lanes()}
    counted = [(lane, counts.get(lane.lane_id, LaneCounts(lane_id=lane.lane_id))) for lane in lanes]
    now_ms = await engine.server_time_ms()
    screen.show(
        [structs.asdict(lane) | structs.asdict(count) for lane, count in counted],
        LANE_COLUMNS,
        [_lane_row(lane, count, now_ms) for lane, count in counted],
        as_json=target.json,
        nothing="No lanes yet: the first execution in a lane creates it.",
    )


async def every_lane(engine: Engine) -> list[Lane]:
    found = pages(lambda cursor: engine.list_lanes(cursor=cursor, limit=PAGE_MAX))
    return [lane async for page in found for lane in page.lanes]


def _lane_row(lane: Lane, count: LaneCounts, now_ms: int) -> tuple[Text | str, ...]:
    since_ms = lane.state_changed_at_ms
    since = screen.ago(lane.registered_at_ms if since_ms is None else since_ms, now_ms)
    numbers = (str(getattr(count, name)) for name in COUNTED)
    return lane.lane_id, screen.lane_state(lane.state), since, *numbers


def _steer(name: str, operation: Callable[[Engine, str], Awaitable[Lane]], help_text: str) -> None:
    @lanes.command(name, help=help_text)
    @click.argument("lane")
    @options.on_engine()
    async def command(engine: Engine, target: options.Target, lane: str) -> None:
        changed = await operation(engine, lane)
        sentence = f"lane {changed.lane_id} is {changed.state}"
        screen.answer(changed, sentence, as_json=target.json)


_steer(
    "pause",
    lambda engine, lane: engine.pause_lane(lane),
    "Hand out no work from LANE; it still takes submissions.",
)
_steer(
    "resume",
    lambda engine, lane: engine.resume_lane(lane),
    "Take work into LANE and hand it out again.",
)
_steer(
    "drain",
    lambda engine, lane: engine.drain_lane(lane),
    "Take no new executions into LANE; workers finish what is there.",
)
