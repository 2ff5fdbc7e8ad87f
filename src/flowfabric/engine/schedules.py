"""Schedules: executions created at due times, once each, by however many processes.

Any number of processes may fire schedules. The due row is locked while its
executions are created the way all others are, and moves on in the same
transaction: a process that dies in between leaves the due time as it was.
A schedule's lock comes before all others.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from msgspec import Struct, structs

from flowfabric.core import schedules as rules
from flowfabric.core.bounds import BATCH_MAX, PAGE_MAX
from flowfabric.core.checks import check_int, check_json, optional
from flowfabric.core.creation import Checked
from flowfabric.core.decisions import Changes
from flowfabric.core.ids import parse_namespace
from flowfabric.core.records import Lane
from flowfabric.core.results import CreateResult
from flowfabric.core.schedules import FiringPlan, Schedule, ScheduleDefinition
from flowfabric.cron import recurrence_of
from flowfabric.engine import paging
from flowfabric.engine.creation import ACCEPTING, CreateBody, Creation, RouteForgotten
from flowfabric.engine.routes import Route
from flowfabric.engine.shell import Group, Shell, Swept
from flowfabric.engine.topics import hint_if_soon
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound
from flowfabric.store.base import Key, Transaction

SCHEDULES_SWEEP = 10
"""Schedules one sweep acts on: each may create `FIRINGS_MAX` executions."""

LOOK_AGAIN_MS = 60_000
"""When to look again at a schedule whose time zone is not known here."""


class Upserted(Struct, frozen=True, kw_only=True):
    schedule: Schedule
    change: Literal["created", "changed", "unchanged"]


class SchedulePage(Struct, frozen=True, kw_only=True):
    schedules: tuple[Schedule, ...]
    next_cursor: str | None


class Due(Struct, frozen=True):
    """A schedule being fired: its plan, and the checked requests or what is wrong with them."""

    schedule: Schedule
    plan: FiringPlan
    requests: tuple[Checked, ...]
    error: str | None


class Schedules(Group):
    def __init__(self, shell: Shell, creation: Creation) -> None:
        super().__init__(shell)
        self.creation = creation

    async def upsert_schedule(self, definition: ScheduleDefinition) -> Upserted:
        """Have the schedule as defined. Safe to repeat: unchanged timing keeps its next due time.

        A paused schedule stays paused. Executions it has created stay as they are.
        """
        packed = await self._packed(definition)
        self._check_creatable(self._check_definition(packed, 0))

        async def body(tx: Transaction) -> Upserted:
            key = (parse_namespace(packed.namespace), packed.schedule_id)
            existing = await tx.lock_one(Schedule, key)
            now_ms = await tx.now_ms()
            stored = rules.merge(existing, self._check_definition(packed, now_ms))
            if stored is existing:
                return Upserted(schedule=stored, change="unchanged")
            hint_if_soon(tx, stored.next_due_at_ms, now_ms)
            if existing is not None:
                await tx.save(Changes(updates=(stored,)))
                return Upserted(schedule=stored, change="changed")
            if key in await tx.insert_new([stored]):
                return Upserted(schedule=stored, change="created")
            # Another process has just defined it; from here on it can be locked.
            return await body(tx)

        return await self.store.transact(body)

    async def remove_schedule(self, schedule_id: str, *, namespace: str = "default") -> Schedule:
        """Forget the schedule. Executions it has created stay as they are."""
        key = check_key(schedule_id, namespace)

        async def body(tx: Transaction) -> Schedule:
            schedule = await lock_schedule(tx, key)
            await tx.save(Changes(deletes=(schedule,)))
            return schedule

        return await self.store.transact(body)

    async def pause_schedule(self, schedule_id: str, *, namespace: str = "default") -> Schedule:
        """Let due times pass without effect until it is resumed. Safe to repeat."""
        return await self._change(schedule_id, namespace, rules.pause)

    async def resume_schedule(self, schedule_id: str, *, namespace: str = "default") -> Schedule:
        """Continue with the next due time; those that passed during the pause are dropped."""
        return await self._change(
            schedule_id,
            namespace,
            lambda schedule, now_ms: rules.resume(schedule, recurrence_of(schedule), now_ms),
        )

    async def _change(
        self, schedule_id: str, namespace: str, change: Callable[[Schedule, int], Schedule]
    ) -> Schedule:
        key = check_key(schedule_id, namespace)

        async def body(tx: Transaction) -> Schedule:
            schedule = await lock_schedule(tx, key)
            now_ms = await tx.now_ms()
            changed = change(schedule, now_ms)
            await tx.save(Changes(updates=(changed,)))
            hint_if_soon(tx, changed.next_due_at_ms, now_ms)
            return changed

        return await self.store.transact(body)

    async def trigger_schedule(
        self, schedule_id: str, *, namespace: str = "default"
    ) -> CreateResult:
        """Create its execution out of turn, as if it were due now; due times are not affected."""
        schedule = await self.describe_schedule(schedule_id, namespace=namespace)
        if schedule is None:
            raise NotFound("schedule", schedule_id)
        now_ms = await self.store.read(lambda reader: reader.now_ms())
        request = rules.firing_request(schedule, now_ms, out_of_turn=True)
        return await self.creation.create_execution(request)

    async def describe_schedule(
        self, schedule_id: str, *, namespace: str = "default"
    ) -> Schedule | None:
        found = await self._find(schedule_id, namespace)
        if found is None:
            return None
        return await self.shell.values.through(found, self._shown)

    async def _find(self, schedule_id: str, namespace: str) -> Schedule | None:
        return await self.get_one(Schedule, check_key(schedule_id, namespace))

    async def list_schedules(
        self,
        *,
        namespace: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> SchedulePage:
        """Schedules by namespace and name, after `cursor`."""
        check_int("limit", limit, 0, PAGE_MAX)
        wanted = optional(parse_namespace, namespace)
        found = await self.select_records(
            Schedule, "list_schedules", namespace=wanted, limit=limit + 1, **paging.by_name(cursor)
        )
        page, last = paging.cut_by_name(found, limit, lambda each: each.schedule_id)
        shown = await self.shell.values.through_all(page, self._shown)
        return SchedulePage(schedules=tuple(shown), next_cursor=last)

    async def fire_due_schedules(self, *, limit: int = SCHEDULES_SWEEP) -> Swept:
        """Create the executions of due times that have come, and move on to the next ones."""
        check_int("limit", limit, 1, BATCH_MAX // rules.FIRINGS_MAX)
        self.shell.forget_routes()
        if self.store.writes_beside:
            try:
                return await self._fire(limit, registers=False)
            except RouteForgotten as forgotten:
                # Apart: others who use the same route must not wait for this transaction.
                await self.shell.know_routes(forgotten.checked)
        return await self._fire(limit, registers=True)

    async def _fire(self, limit: int, *, registers: bool) -> Swept:
        interned: dict[Route, int] = {}

        async def body(tx: Transaction) -> Swept:
            found = await tx.select_records(
                Schedule, "due_schedules", now_ms=await tx.now_ms(), limit=limit
            )
            due = await self._plan(tx, found)
            checked = [request for each in due for request in each.requests]
            creating = CreateBody(checked, self.shell.routes, registers=registers)
            results = iter(await creating.run(tx) if checked else [])
            interned.update(creating.interned)
            now_ms = await tx.now_ms()
            moved = tuple(_moved(each, results, now_ms) for each in due)
            await tx.save(Changes(updates=moved))
            return Swept(acted=len(found), full=len(found) == limit or _behind(moved, now_ms))

        swept = await self.store.transact(body)
        self.shell.routes.update(interned)
        return swept

    async def _plan(self, tx: Transaction, found: Sequence[Schedule]) -> list[Due]:
        now_ms = await tx.now_ms()
        lane_keys = sorted({(schedule.lane_id,) for schedule in found})
        lanes = await tx.get(Lane, lane_keys)
        return [self._due(schedule, lanes.get((schedule.lane_id,)), now_ms) for schedule in found]

    def _due(self, schedule: Schedule, lane: Lane | None, now_ms: int) -> Due:
        """The executions to create. A schedule that cannot fire does not delay the others."""
        try:
            planned = rules.plan(schedule, recurrence_of(schedule), now_ms)
        except InvalidInput as error:
            # Stored by a process that knows time zones this machine does not.
            return Due(schedule, FiringPlan((), now_ms + LOOK_AGAIN_MS), (), str(error))
        if lane is not None and lane.state not in ACCEPTING:
            closed = f"lane {lane.lane_id!r} is {lane.state} and takes no new executions"
            return Due(schedule, planned, (), closed if planned.due_at_ms else None)
        try:
            requests = tuple(
                self.creation.check_request(rules.firing_request(schedule, due_ms))
                for due_ms in planned.due_at_ms
            )
        except FlowFabricError as error:
            return Due(schedule, planned, (), str(error))
        return Due(schedule, planned, requests, None)

    def _check_definition(self, definition: ScheduleDefinition, now_ms: int) -> Schedule:
        schedule = rules.check_definition(
            definition, payload_bytes_max=self.shell.config.payload_bytes_max, now_ms=now_ms
        )
        first_ms = recurrence_of(schedule).next_after(now_ms)
        if first_ms is None:
            raise InvalidInput("cron", "never comes due", schedule.expression)
        return structs.replace(schedule, next_due_at_ms=first_ms)

    async def _packed(self, definition: ScheduleDefinition) -> ScheduleDefinition:
        """Arguments that have not changed stay as they are stored, however a codec writes them."""
        values = self.shell.values
        if not values.coded:
            return definition
        known = await self._find(definition.schedule_id, definition.namespace)
        stored = b"" if known is None else known.payload

        def pack(given: ScheduleDefinition) -> ScheduleDefinition:
            plain = check_json(
                "input_payload",
                given.input_payload,
                values.plain_bytes_max,
                encoding=given.payload_encoding,
            )
            same = stored != (shown := values.show(stored)) and shown == plain
            return structs.replace(given, input_payload=stored if same else values.pack(plain))

        return await values.through(definition, pack)

    def _shown(self, schedule: Schedule) -> Schedule:
        return structs.replace(schedule, payload=self.shell.values.show(schedule.payload))

    def _check_creatable(self, schedule: Schedule) -> None:
        """Refuse now what every firing would refuse later."""
        self.creation.check_request(rules.firing_request(schedule, schedule.next_due_at_ms or 0))


def check_key(schedule_id: str, namespace: str) -> Key:
    return (parse_namespace(namespace), rules.check_schedule_id(schedule_id))


async def lock_schedule(tx: Transaction, key: Key) -> Schedule:
    schedule = await tx.lock_one(Schedule, key)
    if schedule is None:
        raise NotFound("schedule", str(key[1]))
    return schedule


def _behind(moved: Sequence[Schedule], now_ms: int) -> bool:
    """Whether a schedule has more due times that have come than one sweep handles."""
    return any(s.next_due_at_ms is not None and s.next_due_at_ms <= now_ms for s in moved)


def _moved(due: Due, results: Iterator[CreateResult], now_ms: int) -> Schedule:
    if due.error is not None:
        return rules.refused(due.schedule, due.plan, due.error)
    created = [next(results).execution_id for _ in due.plan.due_at_ms]
    return rules.fired(due.schedule, due.plan, created, now_ms)
