"""Which executions a list, a bulk cancel or a bulk replay is about."""

from collections.abc import Mapping
from typing import Self

from msgspec import Struct, structs

from flowfabric.core.checks import (
    SEPARATOR,
    check_list,
    check_optional_time,
    check_tag_key,
    check_tag_value,
    kind_of,
    names_version,
    split_kind,
)
from flowfabric.core.ids import (
    FIRST_UUID,
    INDEX_MAX,
    LAST_UUID,
    ExecutionId,
    make_execution_id,
    parse_execution_id,
    parse_execution_kind,
    parse_lane_id,
    parse_namespace,
)
from flowfabric.core.limits import TIME_MS_MAX
from flowfabric.core.records import Execution
from flowfabric.core.states import PublicState
from flowfabric.errors import InvalidInput
from flowfabric.store.base import Parameter

TIME_DIGITS_MAX = 15
"""A time of the year 9999 has no more."""


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
        """The kind that matches, and how those begin that match besides."""
        given = self.execution_kind
        if given is None or names_version(given):
            return None if given is None else kind_of(*split_kind(given)), None
        return given, f"{given}{SEPARATOR}"

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
            "created_before_ms": TIME_MS_MAX
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
        parse_lane_id(matching.lane_id)
    if matching.execution_kind is not None:
        parse_execution_kind(matching.execution_kind)
    if matching.namespace is not None:
        parse_namespace(matching.namespace)
    if matching.tag is not None:
        key, value = check_list("tag", matching.tag, 2, 2)
        check_tag_value(check_tag_key(key), value)
    for state in check_list("states", matching.states, 0, len(PublicState)):
        if state not in list(PublicState):
            raise InvalidInput("states", f"must be among {', '.join(PublicState)}", state)
    check_optional_time("created_after_ms", matching.created_after_ms)
    check_optional_time("created_before_ms", matching.created_before_ms)
    return matching


class ListCursor(Struct, frozen=True):
    """Where a newest-first page ended."""

    created_at_ms: int = TIME_MS_MAX
    execution_id: ExecutionId = make_execution_id(INDEX_MAX, LAST_UUID)

    @classmethod
    def parse(cls, text: str | None) -> Self:
        if text is None:
            return cls()
        time_ms, execution_id = split_cursor(text)
        return cls(time_ms, parse_execution_id(execution_id, "cursor"))

    @classmethod
    def after(cls, execution: Execution) -> Self:
        return cls(execution.created_at_ms, execution.execution_id)

    def text(self) -> str:
        return f"{self.created_at_ms}-{self.execution_id}"


class LeaseCursor(Struct, frozen=True):
    """Where a page of expired leases ended."""

    expires_at_ms: int = -1
    execution_id: ExecutionId = make_execution_id(0, FIRST_UUID)

    @classmethod
    def parse(cls, text: str | None) -> Self:
        if text is None:
            return cls()
        time_ms, execution_id = split_cursor(text)
        return cls(time_ms, parse_execution_id(execution_id, "cursor"))

    def text(self) -> str:
        return f"{self.expires_at_ms}-{self.execution_id}"


def split_cursor(text: object) -> tuple[int, str]:
    """The time and the rest of a cursor."""
    time, _, rest = text.partition("-") if isinstance(text, str) else ("", "", "")
    if not (time.isascii() and time.isdigit()) or len(time) > TIME_DIGITS_MAX:
        raise InvalidInput("cursor", "must be a next_cursor of an earlier page", text)
    return int(time), rest
