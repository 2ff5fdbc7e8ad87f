"""What a program declares: its tasks, and which of them are scheduled.

    @app.schedule("0 6 * * *", timezone="Europe/Rome")
    def morning_report(ctx: Context) -> None: ...

Declarations are checked at once, where the program makes them. A schedule is stored when a worker
starts; storing it again changes nothing unless its definition has changed, so every process may do
it.
"""

import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypedDict, TypeVar, overload
from zoneinfo import ZoneInfo

from msgspec import structs

from flowfabric.config import EngineConfig
from flowfabric.core import schedules
from flowfabric.core.bounds import PAYLOAD_BYTES_MAX
from flowfabric.core.checks import (
    JSON,
    check_bool,
    check_int,
    check_task_name,
    kind_of,
    names_version,
    split_kind,
)
from flowfabric.core.ids import parse_namespace
from flowfabric.core.policies import (
    Duration,
    ExecutionPolicy,
    QuotaUse,
    check_duration,
)
from flowfabric.cron import recurrence_of
from flowfabric.engine.engine import Engine
from flowfabric.errors import InvalidInput
from flowfabric.limits import KeySource, Limit, SlotFate
from flowfabric.store.urls import HTTP, POSTGRES, check_url
from flowfabric.submission import NO_OPTIONS, check_call, limit_uses, policy_of
from flowfabric.task import Call, Executor, Retry, Task, TaskSettings
from flowfabric.worker.context import Context
from flowfabric.worker.resources import Resources

R = TypeVar("R")

POOL_MAX: Final = 10_000


def check_app(
    *,
    url: object,
    config: object,
    clock: object,
    pool_max: object,
    migrate: object,
    listen_url: object,
    codec: object,
    token: object,
) -> None:
    """Check the arguments of `App`, except the namespace and the codec's methods."""
    remote = check_url(url).startswith(HTTP)
    if remote:
        _check_servers_own(
            config=config, clock=clock, migrate=migrate or None, listen_url=listen_url, codec=codec
        )
    elif token is not None:
        raise InvalidInput("token", "is for servers: http://…")
    if not isinstance(token, str | None):
        raise InvalidInput("token", "must be a string")
    if not isinstance(config, EngineConfig | None):
        raise InvalidInput("config", 'must be an EngineConfig, such as EngineConfig(keep="3d")')
    if clock is not None and not callable(getattr(clock, "now_ms", None)):
        raise InvalidInput("clock", "needs a method now_ms() -> int", clock)
    check_int("pool_max", pool_max, 1, POOL_MAX)
    check_bool("migrate", migrate)
    if listen_url is not None and not check_url(listen_url, "listen_url").startswith(POSTGRES):
        raise InvalidInput("listen_url", "is for Postgres: postgresql://…")


def _check_servers_own(**settings: object) -> None:
    for name, value in settings.items():
        if value is not None:
            problem = "is a setting of the server; set it where `flowfabric serve` runs"
            raise InvalidInput(name, problem)


def check_function(value: object) -> None:
    """Check the function passed to `@app.task` or `@app.schedule`."""
    if isinstance(value, str):
        problem = f"takes the function; to give it a name, write @app.task(name={value!r})"
        raise InvalidInput("task", problem)
    if isinstance(value, Task):
        raise InvalidInput(
            "task",
            f"{value.name} is a task already; app.add_schedule(…, {value.name}(…), …) runs it by"
            " the clock",
        )
    if inspect.isclass(value):
        problem = "takes a function, not a class; for data that a task takes, use no decorator"
        raise InvalidInput("task", problem, value.__name__)
    if not callable(value):
        raise InvalidInput("task", "takes a function", value)
    try:
        inspect.signature(value)
    except ValueError:
        problem = "has a signature Python cannot inspect; wrap it in a function of your own"
        raise InvalidInput("task", problem, value) from None


def check_cron(value: object) -> None:
    """Check a cron expression; a function in its place means `@app.schedule` without a call."""
    if callable(value):
        raise InvalidInput(
            "schedule",
            'needs to know when: write @app.schedule("0 6 * * *") or @app.schedule(every="10m")',
        )
    if not isinstance(value, str | None):
        raise InvalidInput("cron", 'must be text, such as "0 6 * * *"', value)


def check_middleware(around: object) -> None:
    if not callable(around):
        raise InvalidInput("middleware", "takes a coroutine function", around)
    try:
        inspect.signature(around).bind(None, None)
    except TypeError:
        problem = "must take a context and the call: async def traced(ctx, call)"
        raise InvalidInput("middleware", problem) from None
    except ValueError:
        # Python does not know the signature of every builtin.
        return


class TaskOptions(TypedDict, total=False):
    """What `@app.task` takes apart from a name and a version; `TaskSettings` has the defaults."""

    lane: str
    retry: Retry | None
    timeout: Duration | None
    """How long an attempt may take."""
    priority: int
    capabilities: Sequence[str]
    """What a worker must have to run it."""
    budget: str | Sequence[str]
    """Start no run while a hard limit of this budget, or of any of these, is used up."""
    executor: Executor
    """Where a plain function runs: in a thread, or in another process."""
    keep: Duration | None
    """How long completed runs are kept; the default is in `EngineConfig`."""
    keep_failed: Duration | None
    """How long all other ended runs are kept."""
    max_worker_deaths: int | None
    """Fail a run after this many (3) consecutive deaths of its worker. With 1, a worker that only
    lets its lease expire counts as dead."""
    rate_limit: str | None
    """How many of its runs may start per time, over all workers: `"100/m"`."""
    concurrency: int | None
    """How many of its runs may run at once, over all workers."""
    key: KeySource | None
    """Limit runs per value of this key: `"{tenant}"`, or a function of the arguments."""
    while_suspended: SlotFate
    """With `"keep"`, runs that sleep or wait count as running."""
    limits: Sequence[Limit]
    """Limits shared with other tasks."""


NAMING: Final = ("name", "version")
"""What `@app.task` takes apart from its `TaskOptions`."""


def check_settings(settings: TaskOptions) -> TaskSettings:
    known = TaskOptions.__annotations__
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise InvalidInput(
            unknown[0],
            f"is not an option of a task; those are {', '.join(sorted({*known, *NAMING}))}",
        )
    return TaskSettings(**settings)


CatchUpName = Literal["latest", "all", "none"]


class Registry:
    """The part of an app that knows its tasks and schedules."""

    def __init__(self, namespace: str) -> None:
        self.namespace = parse_namespace(namespace)
        """The namespace of its executions, schedules and flows."""
        self.tasks: dict[str, Task[..., object]] = {}
        """Tasks by kind: by name, from version 2 on by `name@version`."""
        self.schedules: list[schedules.ScheduleDefinition] = []
        """The declared schedules."""
        self.resources = Resources()
        """What the worker makes for handlers, and fills their parameters with."""

    def register_task(
        self,
        name: str | None,
        function: Callable[..., object],
        settings: TaskSettings,
        version: int = 1,
    ) -> Task[..., object]:
        """Add a task, under the function's own name unless another is given."""
        return self.keep_task(self.new_task(name, function, settings, version))

    def new_task(
        self,
        name: str | None,
        function: Callable[..., object],
        settings: TaskSettings,
        version: int = 1,
    ) -> Task[..., object]:
        """Make a task, if its name is free."""
        check_function(function)
        own = getattr(function, "__name__", None)
        if name is None and own is None:
            raise InvalidInput("name", "is missing: only functions have their own name")
        name = check_task_name(own if name is None else name)
        task: Task[..., object] = Task(name, function, settings, version, self.resources.kinds())
        self._check_limits(task)
        known = self.tasks.get(task.kind)
        if known is not None:
            raise InvalidInput(
                "task",
                f"{task.kind!r} is the name of {_place(known)} already; give one of them another"
                " `name=` or `version=`",
            )
        return task

    def _check_limits(self, task: Task[..., object]) -> None:
        """Refuse a limit that another task declares differently: they would undo each other."""
        known = {each.name: each for other in self.tasks.values() for each in other.limits}
        for limit in task.limits:
            if known.get(limit.name, limit).spec != limit.spec:
                raise InvalidInput(
                    "limits",
                    f"limit {limit.name!r} has other values in another task; declare it once, as"
                    " a Limit that both name",
                )

    def keep_task(self, task: Task[..., object]) -> Task[..., object]:
        task.owner = self
        task.namespaces.add(self.namespace)
        self.tasks[task.kind] = task
        return task

    def check_adoptable(self, other: "Registry") -> None:
        """Raise if a name of the other app is taken here by something else."""
        for kind, task in other.tasks.items():
            if self.tasks.get(kind, task) is not task:
                raise InvalidInput(
                    "adopt",
                    f"task {kind!r} is already that of {_place(self.tasks[kind])}; it would be"
                    f" replaced by that of {_place(task)}. Give one of them another `name=`",
                )
        own = {each.schedule_id for each in self.schedules}
        for each in other.schedules:
            if each.schedule_id in own:
                raise InvalidInput(
                    "adopt", "is the name of a schedule of both apps; rename one", each.schedule_id
                )

    def find_task(self, text: str) -> Task[..., object] | None:
        """The task of a name in its newest version, or in the one named: `publish@1`."""
        if names_version(text):
            return self.tasks.get(kind_of(*split_kind(text)))
        versions = [task for task in self.tasks.values() if task.name == text]
        return max(versions, key=lambda task: task.version, default=None)

    def schedule(
        self,
        cron: str | None = None,
        *,
        every: Duration | None = None,
        timezone: str | ZoneInfo = "UTC",
        catch_up: CatchUpName = "latest",
        name: str | None = None,
        lane: str = "default",
        retry: Retry | None = None,
        timeout: Duration | None = None,
        priority: int = 0,
        capabilities: Sequence[str] = (),
        keep: Duration | None = None,
        keep_failed: Duration | None = None,
        max_worker_deaths: int | None = None,
    ) -> "ScheduleDecorator":
        """Make a function a task that runs on a schedule: a cron expression, or `every="10m"`.

        `catch_up` says which runs that were missed while no worker ran are created afterwards:
        the latest, all, or none.
        """
        check_cron(cron)
        settings = TaskSettings(
            lane=lane,
            retry=retry,
            timeout=timeout,
            priority=priority,
            capabilities=capabilities,
            keep=keep,
            keep_failed=keep_failed,
            max_worker_deaths=max_worker_deaths,
        )
        add_schedule = partial(
            self.add_schedule, cron=cron, every=every, timezone=timezone, catch_up=catch_up
        )
        return ScheduleDecorator(self, name, settings, add_schedule)

    def add_schedule(
        self,
        name: str,
        call: Call[object],
        *,
        cron: str | None = None,
        every: Duration | None = None,
        timezone: str | ZoneInfo = "UTC",
        catch_up: CatchUpName = "latest",
    ) -> None:
        """Schedule a call: `app.add_schedule("nightly", publish(42), cron="0 3 * * *")`."""
        check_call("call", call)
        check_cron(cron)
        if any(known.schedule_id == name for known in self.schedules):
            raise InvalidInput("name", "is the name of another schedule of this app", name)
        if (cron is None) is (every is None):
            raise InvalidInput("schedule", 'give either cron, as in "0 6 * * *", or every="10m"')
        every_ms = (
            None
            if every is None
            else check_duration("every", every, schedules.EVERY_MS_MIN, schedules.EVERY_MS_MAX)
        )
        settings = call.task.settings
        definition = schedules.ScheduleDefinition(
            schedule_id=name,
            namespace=self.namespace,
            execution_kind=call.task.kind,
            cron=cron,
            every_ms=every_ms,
            timezone=_zone_name(timezone),
            catch_up=catch_up,
            lane_id=settings.lane,
            input_payload=call.payload,
            payload_encoding=JSON,
            policy=_limited_policy(call, self.namespace),
            priority=settings.priority,
        )
        recurrence_of(
            schedules.check_definition(definition, payload_bytes_max=PAYLOAD_BYTES_MAX, now_ms=0)
        )
        self.schedules.append(definition)

    async def declare_limits(self, engine: Engine) -> None:
        """Store the limits of all tasks. Values set at run time stay."""
        limits = {limit.name: limit for task in self.tasks.values() for limit in task.limits}
        if limits:
            await engine.declare_limits([each.declared(self.namespace) for each in limits.values()])

    async def store_schedules(self, engine: Engine) -> None:
        """Store all declared schedules."""
        for definition in self.schedules:
            await engine.upsert_schedule(definition)


def check_imported_once(task: Task[..., object], app: Registry) -> None:
    """Refuse a task of the app that the running program is, when it has been imported as well:
    there are two App objects then, and the worker of this one does not have the task."""
    if task.owner is app or task.owner is None or app.tasks.get(task.kind) is task:
        return
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or app not in vars(main).values():
        return
    for name, module in list(sys.modules.items()):
        if (
            module is not main
            and getattr(module, "__file__", None) == file
            and task.owner in vars(module).values()
        ):
            raise InvalidInput(
                "task",
                f"{task.name} belongs to the App object of {name!r}, and this is that of the same"
                " file run as a program: Python has loaded it twice. Put the App and its tasks"
                " into a module of their own, and import that",
            )


def _zone_name(zone: str | ZoneInfo) -> str:
    """The key by which every process finds the zone."""
    if not isinstance(zone, ZoneInfo):
        return zone
    if zone.key is None:
        raise InvalidInput("timezone", 'has no name; write one, such as "Europe/Rome"')
    return zone.key


def _limited_policy(call: Call[object], namespace: str) -> ExecutionPolicy | None:
    """The policy of scheduled runs of a task, including their limits."""
    policy = policy_of(call.task, NO_OPTIONS, namespace)
    uses = limit_uses(call, NO_OPTIONS, namespace)
    if not uses:
        return policy
    return structs.replace(
        policy or ExecutionPolicy(),
        quota_policies=tuple(
            QuotaUse(quota_policy_id=each.limit.quota_policy_id, key=each.key) for each in uses
        ),
    )


def _place(task: Task[..., object]) -> str:
    return f"{task.function.__module__}.{task.function.__qualname__}"


@dataclass(frozen=True)
class ScheduleDecorator:
    """What `@app.schedule(…)` returns: makes a function a scheduled task."""

    _owner: Registry
    _name: str | None
    _settings: TaskSettings
    _add_schedule: Callable[[str, Call[object]], None]

    @overload
    def __call__(self, function: Callable[[Context], Awaitable[R]], /) -> Task[[], R]: ...
    @overload
    def __call__(self, function: Callable[[Context], R], /) -> Task[[], R]: ...
    @overload
    def __call__(self, function: Callable[[], Awaitable[R]], /) -> Task[[], R]: ...
    @overload
    def __call__(self, function: Callable[[], R], /) -> Task[[], R]: ...
    def __call__(self, function: Callable[..., object], /) -> Task[..., object]:
        # Keep the task only if its schedule was accepted.
        task = self._owner.new_task(self._name, function, self._settings)
        self._add_schedule(task.name, task())
        return self._owner.keep_task(task)
