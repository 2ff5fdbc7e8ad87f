"""Reading executions: one by id, or lists page by page. Nothing here locks."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeVar

from msgspec import Struct, structs

from flowfabric.core import bounds, checks, diagnosis, ids, records, views, workers
from flowfabric.core.changed_code import blocked_by_code
from flowfabric.core.conditions import Progress, progress, stored_condition
from flowfabric.core.flow_records import JoinRecord
from flowfabric.core.states import AttemptState, LifecyclePhase, PublicState, TerminalOutcome
from flowfabric.core.suspension import set_aside_reason
from flowfabric.engine import gates, paging, shell
from flowfabric.engine.routes import required_capabilities
from flowfabric.engine.workers import present_workers
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.store.base import Parameter, Reader

# Which executions a list, a bulk cancel or a bulk replay is about -----------


class ExecutionFilter(Struct, frozen=True, kw_only=True):
    """Everything given must match; nothing given matches everything."""

    states: tuple[PublicState, ...] = ()
    lane_id: str | None = None
    execution_kind: str | None = None
    """A task's name, for all its versions, or one of them: `publish@1`, `publish@2`."""
    namespace: str | None = None
    tag: tuple[str, str] | None = None
    created_after_ms: int | None = None
    created_before_ms: int | None = None

    def with_states(self, states: tuple[PublicState, ...]) -> Self:
        return structs.replace(self, states=states)

    def _kinds(self) -> tuple[str | None, str | None]:
        """The kind that matches, and the prefix of others that match too."""
        given = self.execution_kind
        if given is None or checks.names_version(given):
            return None if given is None else checks.kind_of(*checks.split_kind(given)), None
        return given, f"{given}{checks.SEPARATOR}"

    def statement(self) -> tuple[str, Mapping[str, Parameter]]:
        """The statement whose index fits, and its parameters."""
        kind, versions_of = self._kinds()
        parameters: dict[str, Parameter] = {
            # Once each: a state named twice would list its executions twice.
            "states": tuple(dict.fromkeys(self.states or PublicState)),
            "namespace": self.namespace,
            "lane_id": self.lane_id,
            "execution_kind": kind,
            "versions_of": versions_of,
            "created_after_ms": -1 if self.created_after_ms is None else self.created_after_ms,
            "created_before_ms": bounds.TIME_MS_MAX
            if self.created_before_ms is None
            else self.created_before_ms,
        }
        if self.tag is not None:
            tag_key, tag_value = self.tag
            tag: dict[str, Parameter] = {"tag_key": tag_key, "tag_value": tag_value}
            return "list_by_tag", parameters | tag
        return "list_by_route", parameters


EVERYTHING = ExecutionFilter()


def check_filter(matching: object) -> ExecutionFilter:
    if not isinstance(matching, ExecutionFilter):
        raise InvalidInput("matching", "must be an ExecutionFilter", matching)
    if matching.lane_id is not None:
        ids.parse_lane_id(matching.lane_id)
    if matching.execution_kind is not None:
        ids.parse_execution_kind(matching.execution_kind)
    checks.optional(ids.parse_namespace, matching.namespace)
    if matching.tag is not None:
        key, value = checks.check_list("tag", matching.tag, 2, 2)
        checks.check_tag_value(checks.check_tag_key(key), value)
    for state in checks.check_list("states", matching.states, 0, len(PublicState)):
        if state not in list(PublicState):
            raise InvalidInput("states", f"must be among {', '.join(PublicState)}", state)
    checks.check_optional_time("created_after_ms", matching.created_after_ms)
    checks.check_optional_time("created_before_ms", matching.created_before_ms)
    return matching


class PageCursor(Struct, frozen=True):
    """The end of a page that is ordered by a time, and then by id."""

    time_ms: int
    execution_id: ids.ExecutionId

    @classmethod
    def parse(cls, text: str | None, start: Self) -> Self:
        if text is None:
            return start
        time_ms, execution_id = paging.split_time(text)
        return cls(time_ms, ids.parse_execution_id(execution_id, "cursor"))

    def text(self) -> str:
        return f"{self.time_ms}-{self.execution_id}"


NEWEST_FIRST = PageCursor(bounds.TIME_MS_MAX, ids.make_execution_id(ids.INDEX_MAX, ids.LAST_UUID))
OLDEST_FIRST = PageCursor(-1, ids.make_execution_id(0, ids.FIRST_UUID))


def page_end(execution: records.Execution) -> PageCursor:
    """Where a newest-first page ends with this one."""
    return PageCursor(execution.created_at_ms, execution.execution_id)


# Reading what an execution with an open join waits for ----------------------

UPSTREAMS_SHOWN_MAX = 3


async def read_join_facts(
    reader: Reader, execution: records.Execution
) -> diagnosis.JoinFacts | None:
    """None for an execution that no join holds back."""
    key = shell.execution_key(execution.execution_id)
    group = await reader.get_one(JoinRecord, key) if execution.join_pending else None
    if group is None:
        return None
    rows = await reader.select_as(
        UpstreamRow,
        "unresolved_upstreams",
        partition_key=execution.partition_key,
        downstream_id=ids.uuid_of(execution.execution_id),
        limit=UPSTREAMS_SHOWN_MAX,
    )
    return diagnosis.JoinFacts(
        group=group,
        upstreams=tuple(
            diagnosis.Upstream(
                execution_id=row.execution_id,
                name=row.node_name or row.execution_kind,
                public_state=row.public_state,
                blocked=blocked_by_code(row.lifecycle_phase, row.blocking_reason),
                over=row.terminal_outcome is not TerminalOutcome.NONE
                and row.replay_count < row.counts_from_replay,
            )
            for row in rows
        ),
    )


class UpstreamRow(Struct, frozen=True, kw_only=True):
    execution_id: ids.ExecutionId
    execution_kind: str
    node_name: str | None
    public_state: PublicState
    lifecycle_phase: str
    blocking_reason: str
    terminal_outcome: TerminalOutcome
    replay_count: int
    counts_from_replay: int


T = TypeVar("T")

QUEUE_COUNT_MAX = 1_000
"""How far `explain_execution` counts the queue before it says "many"."""
LOOKED_AT_MAX = 8
"""How many of those that an execution waits for it asks about."""
FAILED_ATTEMPTS = (AttemptState.PENDING_RETRY_ATTEMPT, AttemptState.ATTEMPT_TERMINAL)
"""Where the last attempt of an execution may have failed."""


class ExecutionPage(Struct, frozen=True, kw_only=True):
    executions: tuple[ids.ExecutionId, ...]
    next_cursor: ids.ExecutionId | None


class SnapshotPage(Struct, frozen=True, kw_only=True):
    executions: tuple[views.ExecutionSnapshot, ...]
    next_cursor: str | None


class ExpiredLease(Struct, frozen=True, kw_only=True):
    execution_id: ids.ExecutionId
    namespace: ids.Namespace
    lane_id: ids.LaneId
    lease_id: ids.LeaseId
    lease_epoch: int
    attempt_index: int
    worker_instance_id: ids.WorkerInstanceId
    expires_at_ms: int


class ExpiredLeasePage(Struct, frozen=True, kw_only=True):
    leases: tuple[ExpiredLease, ...]
    next_cursor: str | None


Snapshot = TypeVar("Snapshot", bound=views.ExecutionSnapshot)


class Reads(shell.Group):
    # One execution

    async def describe_execution(self, execution_id: str) -> views.ExecutionSnapshot | None:
        full_id = self.shell.check_execution_id(execution_id)

        async def body(reader: Reader) -> views.ExecutionSnapshot | None:
            execution = await find(reader, full_id)
            if execution is None:
                return None
            (execution,) = await gates.held_up(reader, [execution])
            seen = views.snapshot(execution, await tags_of(reader, full_id))
            return await with_kept_signals(reader, execution, seen)

        return await self.store.read(body)

    async def read_execution_context(self, execution_id: str) -> views.ExecutionContext:
        """Payload, kind and tags, for a worker that claimed by id."""
        full_id = self.shell.check_execution_id(execution_id)

        async def body(reader: Reader) -> views.ExecutionContext:
            execution = await find_or_refuse(reader, full_id)
            payload, encoding = execution.taken_payload
            return views.ExecutionContext(
                input_payload=payload,
                payload_encoding=encoding,
                execution_kind=execution.execution_kind,
                tags=await tags_of(reader, full_id),
            )

        found = await self.store.read(body)
        payload = await self.shell.values.through(found.input_payload, self.shell.values.show)
        return structs.replace(found, input_payload=payload)

    async def read_execution_state(self, execution_id: str) -> PublicState | None:
        return await self._read(execution_id, lambda execution: execution.public_state)

    async def read_execution_info(self, execution_id: str) -> views.ExecutionInfo | None:
        full_id = self.shell.check_execution_id(execution_id)

        async def body(reader: Reader) -> views.ExecutionInfo | None:
            execution = await find(reader, full_id)
            if execution is None:
                return None
            (shown,) = await gates.held_up(reader, [execution])
            return views.info(shown)

        return await self.store.read(body)

    async def get_execution_result(self, execution_id: str) -> bytes | None:
        """The stored result, byte for byte; None until there is one."""
        result = await self._read(execution_id, lambda execution: execution.result)
        return await self.shell.values.through(result, self.shell.values.show)

    async def resolve_execution_flow_id(self, execution_id: str) -> ids.FlowId | None:
        return await self._read(execution_id, views.stored_flow_id)

    async def read_current_attempt_index(self, execution_id: str) -> int:
        """The attempt that exists now; 0 before the first claim."""
        return await self._read_existing(execution_id, lambda e: e.current_attempt_index)

    async def read_total_attempt_count(self, execution_id: str) -> int:
        """Attempts so far, which is the index the next one gets."""
        return await self._read_existing(execution_id, lambda e: e.total_attempt_count)

    async def list_attempts(self, execution_id: str) -> tuple[records.Attempt, ...]:
        """Every attempt, oldest first."""
        full_id = self.shell.check_execution_id(execution_id)

        async def body(reader: Reader) -> tuple[records.Attempt, ...]:
            execution = await find(reader, full_id)
            return () if execution is None else await attempts_of(reader, execution)

        return await self.store.read(body)

    async def read_exec_core_fields(
        self, execution_id: str, names: Sequence[str], *, partition: int | None = None
    ) -> dict[str, str | None]:
        """Named fields as text; unknown names and a missing execution give None."""
        full_id = self.shell.check_execution_id(execution_id)
        checks.check_optional_int("partition", partition, 0, ids.INDEX_MAX)
        if partition not in (None, ids.partition_of(full_id)):
            raise InvalidInput("partition", f"differs from that of {full_id}", partition)
        wanted = tuple(
            checks.check_text("names", name)
            for name in checks.check_list("names", names, 0, bounds.PAGE_MAX)
        )

        async def body(reader: Reader) -> dict[str, str | None]:
            execution = await find(reader, full_id)
            required: tuple[str, ...] = ()
            if execution is not None and "required_capabilities" in wanted:
                required = await required_capabilities(reader, execution.route_id)
            return views.core_fields(execution, wanted, required)

        return await self.store.read(body)

    async def explain_execution(self, execution_id: str) -> diagnosis.Explanation:
        """Why the execution is not running: one sentence, and the same as data."""
        full_id = self.shell.check_execution_id(execution_id)

        async def body(reader: Reader) -> diagnosis.Explanation:
            execution = await find(reader, full_id)
            if execution is None:
                raise NotFound("execution", full_id)
            why = diagnosis.explain(execution, await surroundings(reader, execution))
            if why.needs_somebody:
                return why
            other = await find_held_up(reader, execution)
            return why if other is None else diagnosis.held_up_by(why, other)

        return await self.store.read(body)

    # Lists

    async def list_executions(
        self,
        partition: int | str,
        *,
        namespace: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> ExecutionPage:
        """Ids of one partition, `7` or `{fp:7}`, in ascending order, after `cursor`.

        Of one `namespace`, or of all. A page holds at most a thousand, however large `limit` is.
        """
        limit = min(checks.check_int("limit", limit, 0, 2**31), bounds.PAGE_MAX)
        if isinstance(partition, str):
            partition = ids.parse_flow_partition(partition)
        checks.check_int("partition", partition, 0, 65_535)
        ids.check_partition(partition, self.shell.deployment.partitions)
        start = (
            ids.FIRST_UUID if cursor is None else ids.uuid_after(check_cursor(cursor, partition))
        )
        wanted = checks.optional(ids.parse_namespace, namespace)
        if start is None:
            return ExecutionPage(executions=(), next_cursor=None)
        found = await self.select_as(
            ids.ExecutionId,
            "list_partition",
            partition_key=partition,
            start=start,
            namespace=wanted,
            limit=limit + 1,
        )
        page, last = paging.cut(found, limit, lambda each: each)
        return ExecutionPage(executions=page, next_cursor=last)

    async def find_executions(
        self,
        matching: ExecutionFilter = EVERYTHING,
        *,
        cursor: str | None = None,
        limit: int = 50,
    ) -> SnapshotPage:
        """Executions that match, newest first, with their tags."""
        checks.check_int("limit", limit, 0, bounds.PAGE_MAX)
        checked = check_filter(matching)
        after = PageCursor.parse(cursor, NEWEST_FIRST)

        async def body(reader: Reader) -> SnapshotPage:
            found = await select_matching(reader, checked, after, limit + 1)
            page, last = paging.cut(found, limit, page_end)
            page = tuple(await gates.held_up(reader, page))
            tags = await tags_of_many(reader, [e.execution_id for e in page])
            shown = tuple(views.snapshot(e, tags.get(e.execution_id, {})) for e in page)
            return SnapshotPage(executions=shown, next_cursor=None if last is None else last.text())

        return await self.store.read(body)

    async def list_expired_leases(
        self,
        *,
        as_of_ms: int | None = None,
        namespace: str | None = None,
        cursor: str | None = None,
        limit: int = 1_000,
    ) -> ExpiredLeasePage:
        """Leases past their end, recorded or not, longest overdue first."""
        checks.check_int("limit", limit, 0, bounds.EXPIRED_LEASES_PAGE_MAX)
        checks.check_optional_time("as_of_ms", as_of_ms)
        checks.optional(ids.parse_namespace, namespace)
        after = PageCursor.parse(cursor, OLDEST_FIRST)

        async def body(reader: Reader) -> list[ExpiredLease]:
            return await reader.select_as(
                ExpiredLease,
                "list_expired_leases",
                as_of_ms=await reader.now_ms() if as_of_ms is None else as_of_ms,
                namespace=namespace,
                after_ms=after.time_ms,
                after_partition=ids.partition_of(after.execution_id),
                after_id=ids.uuid_of(after.execution_id),
                limit=limit + 1,
            )

        page, last = paging.cut(
            await self.store.read(body),
            limit,
            lambda lease: PageCursor(lease.expires_at_ms, lease.execution_id).text(),
        )
        return ExpiredLeasePage(leases=page, next_cursor=last)

    # Shared

    async def _read(
        self, execution_id: str, view: Callable[[records.Execution], T | None]
    ) -> T | None:
        full_id = self.shell.check_execution_id(execution_id)
        execution = await self.get_one(records.Execution, shell.execution_key(full_id))
        return None if execution is None else view(execution)

    async def _read_existing(self, execution_id: str, view: Callable[[records.Execution], T]) -> T:
        full_id = self.shell.check_execution_id(execution_id)
        return view(await self.store.read(lambda reader: find_or_refuse(reader, full_id)))


async def find(reader: Reader, execution_id: ids.ExecutionId) -> records.Execution | None:
    key = shell.execution_key(execution_id)
    return await reader.get_one(records.Execution, key)


async def find_or_refuse(reader: Reader, execution_id: ids.ExecutionId) -> records.Execution:
    execution = await find(reader, execution_id)
    if execution is None:
        raise InvalidInput("execution_id", "execution not found", execution_id)
    return execution


async def attempts_of(reader: Reader, execution: records.Execution) -> tuple[records.Attempt, ...]:
    """Every attempt, oldest first.

    Read the execution first: if its first attempt is no longer implicit, its row exists.
    """
    found = await reader.select_records(
        records.Attempt,
        "list_attempts",
        **shell.columns_of(execution.execution_id),
    )
    if found:
        return tuple(found)
    first = records.first_attempt(execution)
    return () if first is None else (first,)


async def tags_of(reader: Reader, execution_id: ids.ExecutionId) -> dict[str, str]:
    return (await tags_of_many(reader, [execution_id])).get(execution_id, {})


async def tags_of_many(
    reader: Reader, execution_ids: Sequence[ids.ExecutionId]
) -> dict[ids.ExecutionId, dict[str, str]]:
    if not execution_ids:
        return {}
    rows = await reader.select_as(TagRow, "tags_of_executions", **shell.id_columns(execution_ids))
    tags: dict[ids.ExecutionId, dict[str, str]] = {}
    for row in rows:
        tags.setdefault(row.execution_id, {})[row.tag_key] = row.tag_value
    return tags


class TagRow(Struct, frozen=True):
    execution_id: ids.ExecutionId
    tag_key: str
    tag_value: str


async def select_matching(
    reader: Reader, matching: ExecutionFilter, after: PageCursor, limit: int
) -> Sequence[records.Execution]:
    """One indexed statement per kind of filter: by tag, by namespace, else by route and state."""
    name, parameters = matching.statement()
    return await reader.select_records(
        records.Execution,
        name,
        before_ms=after.time_ms,
        before_id=ids.uuid_of(after.execution_id),
        before_partition=ids.partition_of(after.execution_id),
        limit=limit,
        **parameters,
    )


async def find_held_up(
    reader: Reader, execution: records.Execution
) -> diagnosis.Explanation | None:
    """Follow what an execution waits for to the first one that a person has to unblock."""
    waiting = deque(await waited_for(reader, execution))
    for _ in range(LOOKED_AT_MAX):
        if not waiting:
            return None
        each = waiting.popleft()
        why = diagnosis.explain(each, await surroundings(reader, each))
        if why.needs_somebody:
            return why
        waiting.extend(await waited_for(reader, each))
    return None


async def waited_for(reader: Reader, execution: records.Execution) -> list[records.Execution]:
    """A few of the unfinished executions this one waits for."""
    if diagnosis.awaits_others(execution):
        rows = await reader.select_records(
            records.Waiter, "awaited_by", waiting=execution.execution_id, limit=LOOKED_AT_MAX
        )
        awaited = [each.execution_id for each in rows]
    else:
        join = await read_join_facts(reader, execution)
        awaited = [] if join is None else [each.execution_id for each in join.upstreams]
    found = await reader.get(records.Execution, [shell.execution_key(each) for each in awaited])
    return [each for each in found.values() if each.lifecycle_phase is not LifecyclePhase.TERMINAL]


async def surroundings(reader: Reader, execution: records.Execution) -> diagnosis.Surroundings:
    lane_key = (execution.lane_id,)
    facts = await gates.gate_facts(reader, [execution.route_id]) if execution.ready else {}
    now_ms = await reader.now_ms()
    required = await required_capabilities(reader, execution.route_id)
    (ahead,) = await reader.select_as(
        int,
        "count_ahead",
        route_id=execution.route_id,
        priority=execution.priority,
        created_at_ms=execution.created_at_ms,
        execution_id=ids.uuid_of(execution.execution_id),
        limit=QUEUE_COUNT_MAX + 1,
    )
    suspension = await find_suspension(
        reader, execution.execution_id, execution.current_suspension_id
    )
    present = await present_workers(reader)
    need = workers.need_of(execution, required)
    return diagnosis.Surroundings(
        lane=await reader.get_one(records.Lane, lane_key),
        required=required,
        ahead=ahead if ahead <= QUEUE_COUNT_MAX else None,
        served=any(workers.serves(each, need) for each in present),
        attended=bool(present),
        other_versions=workers.other_versions(present, execution),
        other_kinds=workers.other_kinds(present, execution),
        now_ms=now_ms,
        waits_for=await waits_for(reader, execution),
        progress=await progress_of(reader, suspension),
        times_out_at_ms=suspension.timeout_at_ms
        if suspension is not None and suspension.timeout_behavior is not None
        else None,
        set_aside=await set_aside_before(reader, execution),
        failed_step=await failed_step_of(reader, execution),
        granted_to=await granted_to(reader, execution),
        join=await read_join_facts(reader, execution),
        gates=facts.get(execution.route_id, ()),
        kept=Counter(each.signal_name for each in await load_kept(reader, execution)),
    )


async def load_kept(reader: Reader, execution: records.Execution) -> Sequence[records.SignalFacts]:
    """The signals no wait has taken, in order."""
    if not execution.keeps_signals:
        return ()
    return await reader.select_records(
        records.SignalFacts,
        "list_kept_signals",
        **shell.columns_of(execution.execution_id),
        limit=bounds.KEPT_SIGNALS_READ_MAX,
    )


async def with_kept_signals(
    reader: Reader, execution: records.Execution, seen: Snapshot
) -> Snapshot:
    """The view, with the first of the signals that no wait has taken, and their number."""
    if not execution.keeps_signals:
        return seen
    found = await load_kept(reader, execution)
    shown = found[: bounds.KEPT_SIGNALS_SHOWN_MAX]
    keys = [(each.partition_key, each.execution_id, each.signal_id) for each in shown]
    signals = await reader.get(records.SignalRecord, keys)
    kept = tuple(views.kept_signal(signals[key]) for key in keys)
    return structs.replace(seen, kept_signals=kept, kept_signal_count=len(found))


async def waits_for(reader: Reader, execution: records.Execution) -> tuple[str, ...]:
    """The names of its open waitpoints."""
    if not execution.open_waitpoint_count:
        return ()
    found = await reader.select_records(
        records.Waitpoint,
        "list_open_waitpoints",
        **shell.columns_of(execution.execution_id),
        after=ids.FIRST_UUID,
        limit=bounds.PAGE_MAX,
    )
    return tuple(dict.fromkeys(str(each.waitpoint_key) for each in found))


async def set_aside_before(reader: Reader, execution: records.Execution) -> str:
    """Why signals did not count that met the same wait before it was taken up again."""
    if execution.current_suspension_id is None:
        return ""
    last = await reader.select_records(
        records.Suspension,
        "last_closed_suspension",
        **shell.columns_of(execution.execution_id),
    )
    return set_aside_reason(last[0] if last else None)


async def failed_step_of(reader: Reader, execution: records.Execution) -> records.FailedStep | None:
    """The step whose failure ended its last attempt."""
    if execution.attempt_state not in FAILED_ATTEMPTS:
        return None
    key = (*shell.execution_key(execution.execution_id), execution.current_attempt_index)
    last = await reader.get_one(records.Attempt, key)
    return None if last is None else records.failed_step(last)


async def granted_to(reader: Reader, execution: records.Execution) -> str | None:
    """The worker it is kept for."""
    if execution.granted_until_ms is None:
        return None
    key = shell.execution_key(execution.execution_id)
    grant = await reader.get_one(records.StoredGrant, key)
    return None if grant is None else grant.worker_id


async def find_suspension(
    reader: Reader, execution_id: ids.ExecutionId, suspension_id: str | None
) -> records.Suspension | None:
    if suspension_id is None:
        return None
    key = (*shell.execution_key(execution_id), suspension_id)
    return await reader.get_one(records.Suspension, key)


async def condition_progress(
    reader: Reader, execution_id: ids.ExecutionId, suspension_id: str | None
) -> Progress | None:
    """How far the condition is that the execution is suspended on."""
    return await progress_of(reader, await find_suspension(reader, execution_id, suspension_id))


async def progress_of(reader: Reader, suspension: records.Suspension | None) -> Progress | None:
    if suspension is None:
        return None
    came = await reader.select_records(
        records.SignalFacts,
        "list_satisfiers",
        suspension_id=suspension.suspension_id,
        **shell.columns_of(suspension.execution_id),
    )
    return progress(stored_condition(suspension.resume_condition), came)


def check_cursor(cursor: object, partition: int) -> ids.ExecutionId:
    parsed = ids.parse_execution_id(cursor, "cursor")
    if ids.partition_of(parsed) != partition:
        raise InvalidInput("cursor", f"must be an id of partition {partition}", cursor)
    return parsed
