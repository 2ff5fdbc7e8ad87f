"""What people at a terminal need: ids by a part of them, and a look at the whole."""

import re
from collections.abc import Sequence
from typing import Final

from flowfabric.core.checks import check_int, check_list, check_text
from flowfabric.core.events import check_category
from flowfabric.core.ids import (
    FIRST_UUID,
    LAST_UUID,
    ExecutionId,
    parse_namespace,
    parse_own_id,
    uuid_of,
)
from flowfabric.core.records import Execution, WorkerPresence
from flowfabric.engine.reads import PRESENCE_MS
from flowfabric.engine.unit import Operations, execution_key, row_execution_id
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.store.base import Reader, Row

UUID_PART_CHARS_MIN: Final = 4
MATCHES_SHOWN_MAX: Final = 5
EVENTS_BACK_MAX: Final = 1_000_000

_HEXADECIMAL: Final = re.compile(r"[0-9a-f-]+")


class Lookup(Operations):
    async def resolve_execution_id(
        self, text: str, *, namespace: str | None = "default"
    ) -> ExecutionId:
        """The execution that text stands for.

        A full id, somebody's own id in `namespace` or, with None, in the only one that has
        it, a uuid, or the beginning or end of a uuid, which must fit one execution alone.
        Parts are looked for in the index of all ids: for people, not for programs.
        """
        if namespace is not None:
            parse_namespace(namespace)
        if check_text("execution_id", text).startswith("{"):
            return self.check_execution_id(text)
        if parse_own_id(text) is not None:
            named = await self._find_named(text, namespace)
            if len(named) > 1:
                places = ", ".join(named)
                problem = f"is used in several namespaces: {places}; say which (--namespace)"
                raise InvalidInput("execution_id", problem, text)
            if named:
                return next(iter(named.values()))
        part = text.lower()
        if len(part) < UUID_PART_CHARS_MIN or _HEXADECIMAL.fullmatch(part) is None:
            raise NotFound("execution", text)
        found = await self._find_by_uuid(part)
        if not found:
            raise NotFound("execution", text)
        if len(found) > 1:
            # Two may differ in their partition alone.
            alike = len({each[-36:] for each in found}) < len(found)
            shown = ", ".join(e if alike else e[-36:] for e in found[:MATCHES_SHOWN_MAX])
            more = " and more" if len(found) > MATCHES_SHOWN_MAX else ""
            raise InvalidInput("execution_id", f"fits several executions: {shown}{more}", text)
        return found[0]

    async def list_presences(self) -> tuple[WorkerPresence, ...]:
        """Workers that have asked for work within the last minute."""

        async def body(reader: Reader) -> tuple[WorkerPresence, ...]:
            seen_after_ms = await reader.now_ms() - PRESENCE_MS
            found = await reader.select_records(
                WorkerPresence, "list_presences", seen_after_ms=seen_after_ms
            )
            return tuple(sorted(found, key=lambda each: each.worker_instance_id))

        return await self.store.read(body)

    async def last_event_id(self) -> int:
        """The latest event there is; 0 when there is none."""

        async def body(reader: Reader) -> int:
            (row,) = await reader.select("last_event")
            return int(str(row["event_id"] or 0))

        return await self.store.read(body)

    async def before_latest_events(
        self, count: int, *, namespace: str | None = None, category: str | None = None
    ) -> int:
        """The `after` that reads the latest `count` events; 0 when there are no events."""
        check_int("count", count, 1, EVENTS_BACK_MAX)
        if namespace is not None:
            parse_namespace(namespace)
        wanted = check_category(category)

        async def body(reader: Reader) -> int:
            rows = await reader.select(
                "before_latest_events", namespace=namespace, category=wanted, limit=count
            )
            return int(str(rows[0]["event_id"] or 0)) if rows else 0

        return await self.store.read(body)

    async def own_ids(self, execution_ids: Sequence[str]) -> dict[ExecutionId, str]:
        """What people call those of these executions that have an id of somebody's own."""
        given = check_list("execution_ids", execution_ids, 0, EVENTS_BACK_MAX)
        asked = [execution_key(each) for each in dict.fromkeys(map(self.check_execution_id, given))]

        async def body(reader: Reader) -> dict[ExecutionId, str]:
            found = await reader.get(Execution, asked) if asked else {}
            return {each.execution_id: each.own_id for each in found.values() if each.own_id}

        return await self.store.read(body)

    async def called(self, execution_id: str) -> str:
        """What people call an execution: the id they chose, else its uuid."""
        asked = self.check_execution_id(execution_id)
        return (await self.own_ids([asked])).get(asked) or uuid_of(asked)

    async def _find_named(self, own_id: str, namespace: str | None) -> dict[str, ExecutionId]:
        """By namespace, the executions that somebody gave this id."""

        async def body(reader: Reader) -> dict[str, ExecutionId]:
            places = [namespace]
            if namespace is None:
                places = [str(row["namespace"]) for row in await reader.select("list_namespaces")]
            named = {each: self.named_execution_id(own_id, each) for each in places if each}
            found = await reader.get(Execution, [execution_key(each) for each in named.values()])
            return {place: each for place, each in named.items() if execution_key(each) in found}

        return await self.store.read(body)

    async def _find_by_uuid(self, part: str) -> list[ExecutionId]:
        async def body(reader: Reader) -> Sequence[Row]:
            rows: Sequence[Row] = []
            if FIRST_UUID.startswith(re.sub("[0-9a-f]", "0", part)):
                rows = await reader.select(
                    "find_by_uuid",
                    low=part + FIRST_UUID[len(part) :],
                    high=part + LAST_UUID[len(part) :],
                    pattern=f"{part}%",
                    limit=MATCHES_SHOWN_MAX + 1,
                )
            if not rows:
                rows = await reader.select(
                    "find_by_uuid",
                    low=FIRST_UUID,
                    high=LAST_UUID,
                    pattern=f"%{part}",
                    limit=MATCHES_SHOWN_MAX + 1,
                )
            return rows

        return [row_execution_id(row) for row in await self.store.read(body)]
