"""Options that say which executions a command is about."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

import click
from msgspec import structs

from flowfabric.cli.target import Target
from flowfabric.core.policies import duration_ms
from flowfabric.core.states import TERMINAL_STATES, PublicState
from flowfabric.core.views import ExecutionSnapshot
from flowfabric.engine.engine import Engine
from flowfabric.engine.reads import EVERYTHING, ExecutionFilter
from flowfabric.errors import InvalidInput

P = ParamSpec("P")
T = TypeVar("T")


UNFINISHED: Final = "unfinished"
"""Every state in which an execution has not ended."""
BLOCKED: Final = "blocked"
"""Delayed because its code has changed, as lists show it."""


class Chosen:
    """The filter as given; times are still relative to the database's clock."""

    def __init__(
        self,
        states: tuple[str, ...],
        lane: str | None,
        kind: str | None,
        tag: str | None,
        since: str | None,
        before: str | None,
    ) -> None:
        self._filter = ExecutionFilter(
            states=tuple(found for each in states for found in _states(each)),
            lane_id=lane,
            execution_kind=kind,
            tag=None if tag is None else _pair(tag),
        )
        self._blocked_only = BLOCKED in states and not {UNFINISHED, PublicState.DELAYED} & {*states}
        self._since = since
        self._before = before

    @property
    def states(self) -> tuple[PublicState, ...]:
        return self._filter.states

    def fits(self, execution: ExecutionSnapshot) -> bool:
        """Whether an execution that the filter matches is meant: those blocked are delayed, too."""
        return (
            not self._blocked_only
            or execution.public_state is not PublicState.DELAYED
            or execution.blocked
        )

    @property
    def empty(self) -> bool:
        return self._filter == EVERYTHING and self._since is None and self._before is None

    async def resolve(self, engine: Engine, target: Target) -> ExecutionFilter:
        now_ms = await engine.server_time_ms()
        return structs.replace(
            self._filter,
            namespace=target.scope(),
            created_after_ms=_time("since", self._since, now_ms),
            created_before_ms=_time("before", self._before, now_ms),
        )


def filter_options(command: Callable[Concatenate[Chosen, P], T]) -> Callable[P, T]:
    """Adds the filter options; the command gets them as its first argument."""

    @click.option(
        "--state",
        "states",
        multiple=True,
        metavar="STATE",
        type=click.Choice([*(state.value for state in PublicState), BLOCKED, UNFINISHED]),
        help="In this state, such as waiting, active or failed, or any that is unfinished;"
        " may be given several times.",
    )
    @click.option("--lane", help="In this lane.")
    @click.option("--kind", help="Of this kind: the name of the task.")
    @click.option("--tag", metavar="KEY=VALUE", help="With this tag.")
    @click.option("--since", metavar="WHEN", help="Created after: 2h (ago), or 2026-03-29T06:00.")
    @click.option("--before", metavar="WHEN", help="Created before, in the same way.")
    @click.pass_context
    @wraps(command)
    def wrapped(context: click.Context, /, *args: P.args, **kwargs: P.kwargs) -> T:
        given = dict(kwargs)
        texts = {
            name: _filter_text(given.pop(name, None))
            for name in ("lane", "kind", "tag", "since", "before")
        }
        states = given.pop("states", ())
        assert isinstance(states, tuple)
        chosen = Chosen(tuple(str(each) for each in states), **texts)
        return context.invoke(command, chosen, *args, **given)

    return wrapped


def _states(text: str) -> list[PublicState]:
    if text == UNFINISHED:
        return [state for state in PublicState if state not in TERMINAL_STATES]
    return [PublicState.DELAYED if text == BLOCKED else PublicState(text)]


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter("must look like KEY=VALUE", param_hint="--tag")
    return key, value


def _time(option: str, text: str | None, now_ms: int) -> int | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        try:
            return max(0, now_ms - duration_ms(option, text))
        except InvalidInput:
            raise click.BadParameter(
                f"{text!r} is neither a duration such as 2h nor a time such as 2026-03-29T06:00",
                param_hint=f"--{option}",
            ) from None
    # A time without a zone is local time, as on the clock of whoever typed it.
    return max(0, round(at.astimezone(UTC).timestamp() * 1_000))


def _filter_text(value: object) -> str | None:
    return None if value is None else str(value)
