"""Reading one execution closely: its steps, attempts and children, its end, its tags."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec import Struct, structs

from flowfabric.core import checks, ids
from flowfabric.core.bounds import BATCH_MAX, JOIN_EDGES_MAX, PAGE_MAX
from flowfabric.core.creation import new_tags
from flowfabric.core.decisions import Changes, change
from flowfabric.core.events import check_category, tag_events
from flowfabric.core.policies import in_words
from flowfabric.core.records import Execution, ExecutionTag, Step
from flowfabric.core.states import PublicState
from flowfabric.core.views import ChildView, ExecutionDetails, details, step_view
from flowfabric.engine import paging
from flowfabric.engine.creation import namespaces_of
from flowfabric.engine.gates import held_up
from flowfabric.engine.reads import attempts_of, find, tags_of, with_kept_signals
from flowfabric.engine.routes import required_capabilities
from flowfabric.engine.shell import Group, execution_key, id_columns
from flowfabric.engine.steps import steps_of
from flowfabric.engine.topics import hint_about
from flowfabric.engine.values import Values
from flowfabric.errors import CodecFailed, InvalidInput, NotFound
from flowfabric.store.base import Reader, Transaction


async def children_of(
    reader: Reader,
    execution_id: ids.ExecutionId,
    cursor: str | None = None,
    limit: int = PAGE_MAX,
) -> tuple[ChildView, ...]:
    """The executions it submitted, after `cursor`."""
    after = paging.by_time(cursor)
    found = await reader.select_as(
        ChildView, "list_children", parent=execution_id, limit=limit, **after
    )
    return tuple(found)


UUID_PART_CHARS_MIN: Final = 4
UUID_PART_HINT: Final = f"of a uuid, give at least {UUID_PART_CHARS_MIN} characters"
MATCHES_SHOWN_MAX: Final = 5
EVENTS_BACK_MAX: Final = 1_000_000

_HEXADECIMAL: Final = re.compile(r"[0-9a-f-]+")


class Outcome(Struct, frozen=True, kw_only=True):
    """The end of one execution."""

    execution_id: ids.ExecutionId
    public_state: PublicState
    result: bytes | None
    reason: str
    """Why it failed, expired or was cancelled, in words; empty otherwise."""
    unread: str = ""
    """Why the codec could not decode the result, which is then as it is stored."""


class ChildPage(Struct, frozen=True, kw_only=True):
    children: tuple[ChildView, ...]
    next_cursor: str | None


class Found(Struct, frozen=True, kw_only=True):
    """What is known of the ends of some executions; the others have not ended."""

    ended: dict[ids.ExecutionId, Outcome]
    missing: frozenset[ids.ExecutionId]
    """There is no such execution, or no longer."""


class OutcomeRow(Struct, frozen=True, kw_only=True):
    execution_id: ids.ExecutionId
    public_state: PublicState | None
    """None: there is no such execution."""
    result: bytes | None
    failure_reason: str | None
    cancellation_reason: str | None
    expired_policy: str | None

    def outcome(self, state: PublicState) -> Outcome:
        reason = self.cancellation_reason or self.failure_reason or ""
        if self.expired_policy is not None:
            reason = in_words(reason, self.expired_policy)
        return Outcome(
            execution_id=self.execution_id, public_state=state, result=self.result, reason=reason
        )


def _decoded(values: Values, outcome: Outcome) -> Outcome:
    result, unread = values.read(outcome.result)
    return structs.replace(outcome, result=result, unread=unread)


def _legible(values: Values, step: Step) -> Step:
    """The step decoded. One that cannot be decoded looks as if that had been its failure."""
    (result, unread), (failure, lost) = values.read(step.result), values.read(step.failure)
    if why := unread or lost:
        told = CodecFailed(why, decoding=True, what="its result" if unread else "its error")
        result, failure = None, msgspec.json.encode({"name": "CodecFailed", "message": str(told)})
    return structs.replace(step, result=result, failure=failure)


class Details(Group):
    # Reading one execution with its steps, attempts and children ------------

    async def inspect_execution(self, execution_id: str) -> ExecutionDetails | None:
        """An execution with its steps, attempts and children; None if there is none."""
        full_id = self.shell.check_execution_id(execution_id)

        async def body(reader: Reader) -> tuple[ExecutionDetails, tuple[Step, ...]] | None:
            found = await find(reader, full_id)
            if found is None:
                return None
            (execution,) = await held_up(reader, [found])
            steps = await steps_of(reader, full_id)
            seen = details(
                execution,
                await tags_of(reader, full_id),
                steps=steps,
                attempts=await attempts_of(reader, execution),
                children=await children_of(reader, full_id),
            )
            return await with_kept_signals(reader, execution, seen), steps

        found = await self.store.read(body)
        if found is None:
            return None
        (seen, steps), values = found, self.shell.values
        change = partial(_legible, values)
        legible = await values.through_all(steps, change) if values.coded else map(change, steps)
        shown = {each.step_key: step_view(each) for each in legible}
        return structs.replace(
            seen, steps=tuple(shown.get(each.step_key, each) for each in seen.steps)
        )

    async def list_children(
        self, execution_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> ChildPage:
        """What an execution submitted and is still stored, oldest first, after `cursor`."""
        checks.check_int("limit", limit, 1, PAGE_MAX)
        full_id = self.shell.check_execution_id(execution_id)
        found = await self.store.read(
            lambda reader: children_of(reader, full_id, cursor, limit + 1)
        )
        page, last = paging.cut(
            found, limit, lambda each: paging.time_cursor(each.created_at_ms, each.execution_id)
        )
        return ChildPage(children=page, next_cursor=last)

    # What people at a terminal need: ids by a part of them, and a look at the whole

    async def resolve_execution_id(
        self, text: str, *, namespace: str | None = "default", strictly: bool = False
    ) -> ids.ExecutionId:
        """The execution that text stands for.

        A full id, even with a wrong partition; an id that its submitter chose, in `namespace` or,
        with None, in the only one that has it; a uuid; or the beginning or end of a uuid, which
        must fit one execution alone. With `strictly`, uuids too are those of `namespace`.
        Parts are looked for in the index of all ids: for people, not for programs.
        """
        checks.optional(ids.parse_namespace, namespace)
        within = namespace if checks.check_bool("strictly", strictly) else None
        if checks.check_text("execution_id", text).startswith("{"):
            full_id = self.shell.check_execution_id(text)
            found = await self._find_by_uuid(ids.uuid_of(full_id), within)
            # With the partition of another it is found as well.
            return full_id if full_id in found or len(found) != 1 else found[0]
        if ids.parse_own_id(text) is not None:
            named = await self._find_named(text, namespace)
            if len(named) > 1:
                places = ", ".join(named)
                problem = f"is used in several namespaces: {places}; say which (--namespace)"
                raise InvalidInput("execution_id", problem, text)
            if named:
                return next(iter(named.values()))
        part = text.lower()
        if _HEXADECIMAL.fullmatch(part) is None:
            raise NotFound("execution", text)
        if len(part) < UUID_PART_CHARS_MIN:
            raise NotFound("execution", f"{text} ({UUID_PART_HINT})")
        found = await self._find_by_uuid(part, within)
        if not found:
            raise NotFound("execution", text)
        if len(found) > 1:
            # Two may differ in their partition alone.
            alike = len({each[-36:] for each in found}) < len(found)
            shown = ", ".join(e if alike else e[-36:] for e in found[:MATCHES_SHOWN_MAX])
            more = " and more" if len(found) > MATCHES_SHOWN_MAX else ""
            raise InvalidInput("execution_id", f"fits several executions: {shown}{more}", text)
        return found[0]

    async def last_event_id(self) -> int:
        """The latest event there is; 0 when there is none."""
        (event_id,) = await self.select_as(int, "last_event")
        return event_id

    async def before_latest_events(
        self, count: int, *, namespace: str | None = None, category: str | None = None
    ) -> int:
        """The `after` that reads the latest `count` events; 0 when there are no events."""
        checks.check_int("count", count, 1, EVENTS_BACK_MAX)
        checks.optional(ids.parse_namespace, namespace)
        wanted = check_category(category)

        (event_id,) = await self.select_as(
            int, "before_latest_events", namespace=namespace, category=wanted, limit=count
        )
        return event_id

    async def own_ids(self, execution_ids: Sequence[str]) -> dict[ids.ExecutionId, str]:
        """The ids that callers chose for these executions, where they did."""
        checks.check_list("execution_ids", execution_ids, 0, EVENTS_BACK_MAX)
        keys = [execution_key(self.shell.check_execution_id(each)) for each in execution_ids]
        found = await self.store.read(lambda reader: reader.get(Execution, keys))
        return {each.execution_id: each.own_id for each in found.values() if each.own_id}

    async def required_capabilities(
        self, execution_ids: Sequence[str]
    ) -> dict[ids.ExecutionId, tuple[str, ...]]:
        """The capabilities a worker needs to run each of these executions that exist."""
        checks.check_list("execution_ids", execution_ids, 0, PAGE_MAX)
        keys = [execution_key(self.shell.check_execution_id(each)) for each in execution_ids]

        async def body(reader: Reader) -> dict[ids.ExecutionId, tuple[str, ...]]:
            found = (await reader.get(Execution, keys)).values()
            required = {
                route_id: await required_capabilities(reader, route_id)
                for route_id in {each.route_id for each in found}
            }
            return {each.execution_id: required[each.route_id] for each in found}

        return await self.store.read(body)

    async def called(self, execution_id: str) -> str:
        """What people call an execution: the id they chose, else its uuid."""
        full_id = self.shell.check_execution_id(execution_id)
        return (await self.own_ids([full_id])).get(full_id) or ids.uuid_of(full_id)

    async def _find_named(self, own_id: str, namespace: str | None) -> dict[str, ids.ExecutionId]:
        """The executions that were given this id, by namespace."""

        async def body(reader: Reader) -> dict[str, ids.ExecutionId]:
            places = [namespace]
            if namespace is None:
                places = await reader.select_as(str, "list_namespaces")
            named = {each: self.shell.named_execution_id(own_id, each) for each in places if each}
            found = await reader.get(Execution, [execution_key(each) for each in named.values()])
            return {place: each for place, each in named.items() if execution_key(each) in found}

        return await self.store.read(body)

    async def _find_by_uuid(self, part: str, namespace: str | None) -> list[ids.ExecutionId]:
        async def body(reader: Reader) -> list[ids.ExecutionId]:
            found: list[ids.ExecutionId] = []
            begins = ids.FIRST_UUID.startswith(re.sub("[0-9a-f]", "0", part))
            low, high = part + ids.FIRST_UUID[len(part) :], part + ids.LAST_UUID[len(part) :]
            ways = [(low, high, f"{part}%")] if begins else []
            for low, high, pattern in [*ways, (ids.FIRST_UUID, ids.LAST_UUID, f"%{part}")]:
                found = found or await reader.select_as(
                    ids.ExecutionId,
                    "find_by_uuid",
                    low=low,
                    high=high,
                    pattern=pattern,
                    namespace=namespace,
                    limit=MATCHES_SHOWN_MAX + 1,
                )
            return found

        return await self.store.read(body)

    # How executions ended, read for those that wait for them ----------------

    async def read_outcomes(self, execution_ids: Sequence[str]) -> dict[ids.ExecutionId, Outcome]:
        """How the given executions ended; those that have not, or do not exist, are omitted."""
        return (await self.find_outcomes(execution_ids)).ended

    async def find_outcomes(self, execution_ids: Sequence[str]) -> Found:
        """How the given executions ended, and which of them do not exist."""
        checks.check_list("execution_ids", execution_ids, 0, BATCH_MAX)
        full_ids = [self.shell.check_execution_id(each) for each in execution_ids]
        if not full_ids:
            return Found(ended={}, missing=frozenset())
        rows = await self.select_as(OutcomeRow, "read_outcomes", **id_columns(full_ids))
        outcomes = await self.shell.values.through_all(
            [row.outcome(row.public_state) for row in rows if row.public_state is not None],
            partial(_decoded, self.shell.values),
        )
        return Found(
            ended={each.execution_id: each for each in outcomes},
            missing=frozenset(row.execution_id for row in rows if row.public_state is None),
        )

    # Tags and namespace of an execution -------------------------------------

    async def set_execution_tag(self, execution_id: str, key: str, value: str) -> None:
        """Set one tag, replacing its value."""
        await self.set_execution_tags(execution_id, {checks.check_tag_key(key): value})

    async def set_execution_tags(self, execution_id: str, tags: Mapping[str, str]) -> int:
        """Set several tags, all or none; return how many."""
        checked = checks.check_tags(tags)
        if not checked:
            raise InvalidInput("tags", "must not be empty")
        full_id = self.shell.check_execution_id(execution_id)

        async def body(tx: Transaction) -> int:
            key = execution_key(full_id)
            execution = await tx.lock_one(Execution, key)
            if execution is None:
                raise NotFound("execution", full_id)
            now_ms = await tx.now_ms()
            wanted = new_tags(execution, checked)
            known = await tx.lock(ExecutionTag, [(*key, tag_key) for tag_key in sorted(checked)])
            before = {tag.tag_key: tag.tag_value for tag in known.values()}
            changed = {name: value for name, value in checked.items() if before.get(name) != value}
            after = change(
                execution,
                now_ms,
                instance_tag=checked.get(checks.INSTANCE_TAG_KEY, execution.instance_tag),
            )
            changes = Changes(updates=(after, *wanted), events=tag_events(after, changed, now_ms))
            await tx.save(changes)
            hint_about(tx, changes, now_ms)
            return len(checked)

        return await self.store.transact(body)

    async def get_execution_tag(self, execution_id: str, key: str) -> str | None:
        """The tag's value, or None when the tag or the execution is missing."""
        checks.check_tag_key(key)
        full_id = self.shell.check_execution_id(execution_id)
        tag = await self.get_one(ExecutionTag, (*execution_key(full_id), key))
        return None if tag is None else tag.tag_value

    async def find_namespaces(
        self, execution_ids: Sequence[str]
    ) -> dict[ids.ExecutionId, ids.Namespace]:
        """The namespaces of those of these executions that exist."""
        checks.check_list("execution_ids", execution_ids, 0, JOIN_EDGES_MAX)
        full_ids = sorted(set(map(self.shell.check_execution_id, execution_ids)))
        return await self.store.read(lambda reader: namespaces_of(reader, full_ids))

    async def get_execution_namespace(self, execution_id: str) -> ids.Namespace | None:
        full_id = self.shell.check_execution_id(execution_id)
        execution = await self.get_one(Execution, execution_key(full_id))
        return None if execution is None else execution.namespace
