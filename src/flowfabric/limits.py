"""Limits as programs declare and change them: how many runs start in a time, and run at once.

    @app.task(rate_limit="100/m", concurrency=10, key="{tenant}")
    async def sync(ctx: Context, tenant: str) -> None: ...

    provider = Limit("provider", rate="500/m", concurrency=50)

    @app.task(limits=[provider])
    async def ask(ctx: Context, prompt: str) -> str: ...

    await app.limits.set("provider", rate="200/m")  # at once, for every process

A limit has a name; tasks that name the same limit share it. With a `key`, each value of the key
is limited separately.
"""

import inspect
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, Protocol, TypeVar

from msgspec import Struct

from flowfabric.core import gates
from flowfabric.core.bounds import AMOUNT_MAX, PAGE_MAX
from flowfabric.core.checks import check_int, check_name
from flowfabric.core.gates import LimitUse
from flowfabric.core.limits import (
    WINDOW_MS_MAX,
    DeclaredLimit,
    LimitSource,
    QuotaPolicy,
    QuotaSpec,
    WhileSuspended,
    check_while_suspended,
    declared_spec,
)
from flowfabric.core.policies import duration_ms, span
from flowfabric.engine.limits import GateUse
from flowfabric.engine.paging import pages
from flowfabric.errors import InvalidInput
from flowfabric.parts import AppPart

T = TypeVar("T")
KeySource = str | Callable[..., object]
"""A template over the arguments, as in `"{tenant}"`, or a function of them."""
SlotFate = Literal["release", "keep"]
"""What happens to a run's slot while the run sleeps or waits."""

_RATE: Final = re.compile(r"\s*(\d+)\s*/\s*(.+?)\s*")
_EXPECTED: Final = 'must be a number per time, such as "100/m", "5/10s" or "1000/h"'


def rate_of(field: str, rate: object) -> tuple[int, int]:
    """How many starts in how many milliseconds: `"100/m"`, `"5/10s"`."""
    found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if found is None:
        raise InvalidInput(field, _EXPECTED, rate)
    count, per = int(found[1]), found[2]
    try:
        window_ms = duration_ms(field, f"1{per}" if per.isalpha() else per)
    except InvalidInput:
        raise InvalidInput(field, _EXPECTED, rate) from None
    check_int(field, count, 1, AMOUNT_MAX)
    if not 0 < window_ms <= WINDOW_MS_MAX:
        longest = span(WINDOW_MS_MAX)
        raise InvalidInput(field, f"the window must be at most {longest}", rate)
    return count, window_ms


def rate_text(spec: QuotaSpec) -> str | None:
    """The rate of a policy as people write it."""
    if not spec.max_requests_per_window:
        return None
    per = re.sub(r"\.0(?=s$)", "", span(spec.window_ms))
    return f"{spec.max_requests_per_window}/{per}".replace("/1m0s", "/m")


def spec_of(
    rate: object, concurrency: object, while_suspended: object = WhileSuspended.RELEASE
) -> QuotaSpec:
    """What a policy stores; None is no limit."""
    count, window_ms = (0, 0) if rate is None else rate_of("rate", rate)
    cap = 0
    if concurrency is not None:
        cap = check_int("concurrency", concurrency, 1, AMOUNT_MAX)
    return QuotaSpec(
        window_ms=window_ms,
        max_requests_per_window=count,
        active_concurrency_cap=cap,
        while_suspended=check_while_suspended(while_suspended),
    )


@dataclass(frozen=True)
class Limit:
    """How many runs may start in a time, and how many may run at once.

    Tasks and submissions that name the same limit share it, with the values the program gives it;
    `app.limits` changes them at run time. With a `key`, each value of it is limited separately.
    """

    name: str
    rate: str | None = None
    """Starts per time: `"100/m"`, `"5/10s"`."""
    concurrency: int | None = None
    """Runs at once."""
    key: KeySource | None = None
    """A template over the task's arguments, as in `"{tenant}"`, or a function of them."""
    while_suspended: SlotFate = "release"
    """`"keep"`: a run that sleeps or waits for a signal or a child counts as well."""

    def __post_init__(self) -> None:
        check_name("limit.name", self.name)
        key: object = self.key
        if not (key is None or isinstance(key, str) or callable(key)):
            raise InvalidInput("key", 'must be text such as "{tenant}", or a function', key)
        if inspect.iscoroutinefunction(key):
            raise InvalidInput(
                "key", "must be a plain function: it is called when a run is submitted", key
            )
        if isinstance(key, str) and not self.fields:
            raise InvalidInput("key", 'must name an argument, such as "{tenant}"', key)
        if self.rate is None and self.concurrency is None:
            raise InvalidInput(
                "limit", f'{self.name} needs a rate, such as "100/m", or a concurrency'
            )
        if self.concurrency is None and self.spec.limits.keeps:
            raise InvalidInput("while_suspended", "goes with concurrency=10", self.while_suspended)

    @cached_property
    def spec(self) -> QuotaSpec:
        return spec_of(self.rate, self.concurrency, self.while_suspended)

    def declared(self, namespace: str) -> DeclaredLimit:
        return DeclaredLimit(namespace=namespace, name=self.name, spec=self.spec)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The arguments its template names."""
        if not isinstance(self.key, str):
            return ()
        try:
            parsed = list(string.Formatter().parse(self.key))
        except ValueError as error:
            raise InvalidInput("key", f"is not a template: {error}", self.key) from None
        return tuple(
            re.split(r"[.\[]", field, maxsplit=1)[0]
            for _, field, _, _ in parsed
            if field is not None
        )

    def use(self, namespace: str, bound: "BoundArguments") -> LimitUse:
        """The limit, with the value its key has for these arguments."""
        return LimitUse(limit=self.declared(namespace), key=self.key_for(bound))

    def key_for(self, bound: "BoundArguments") -> str:
        if self.key is None:
            return ""
        where = f"key of limit {self.name}"
        for name in self.fields:
            if name not in bound.by_name:
                raise InvalidInput(
                    where, f"needs {name}, which is not known when the run is submitted"
                )
        if callable(self.key) and not bound.all_known:
            raise InvalidInput(
                where, "needs all arguments, which are not known when the run is submitted"
            )
        try:
            value = (
                self.key.format_map(bound.by_name)
                if isinstance(self.key, str)
                else self.key(*bound.args, **bound.kwargs)
            )
        except Exception as error:
            raise InvalidInput(
                where, f"could not be computed from the arguments: {error!r}"
            ) from error
        text = str(value)
        if value is None or text == "":
            raise InvalidInput(where, "must not be empty", value)
        if not (isinstance(value, str | int | float) or type(value).__str__ is not object.__str__):
            raise InvalidInput(where, "must be text or a number", value)
        for name in self.fields if "None" in text else ():
            if bound.by_name[name] is None:
                raise InvalidInput(where, f"must not be empty: {name} is None")
        return gates.check_gate_key(text)


class BoundArguments(Struct, frozen=True):
    """The arguments of a call, for keys."""

    by_name: Mapping[str, object]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = {}
    all_known: bool = True
    """Whether a function can be called with them."""


def check_limits(given: object) -> tuple[Limit, ...]:
    if isinstance(given, Limit) or not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidInput("limits", 'must be a list, such as [Limit("provider", rate="500/m")]')
    for each in given:
        if not isinstance(each, Limit):
            raise InvalidInput("limits", 'must be Limits, such as Limit("mail", rate="9/s")', each)
    names = [each.name for each in given]
    for name in names:
        if names.count(name) > 1:
            raise InvalidInput("limits", "names a limit twice", name)
    return tuple(given)


def limits_of(
    name: str,
    rate: str | None,
    concurrency: int | None,
    key: KeySource | None,
    while_suspended: SlotFate,
    others: Sequence[Limit],
) -> tuple[Limit, ...]:
    """The limits of a task: its own, named after it, and the others it lists."""
    if rate is None and concurrency is None:
        if key is not None:
            raise InvalidInput("key", 'goes with rate_limit="100/m" or concurrency=10', key)
        if check_while_suspended(while_suspended) is WhileSuspended.KEEP:
            raise InvalidInput("while_suspended", "goes with concurrency=10", while_suspended)
        return check_limits(others)
    spec_of(rate, concurrency)
    own = Limit(name, rate, concurrency, key, while_suspended)
    return check_limits([own, *check_limits(others)])


class TakesArguments(Protocol):
    @property
    def names(self) -> Sequence[str]: ...

    @property
    def positional(self) -> Sequence[str]:
        """The parameters, if all can be passed by position."""
        ...

    def takes(self, name: str) -> bool: ...


def check_keys(name: str, limits: Sequence[Limit], arguments: TakesArguments) -> None:
    """Refuse a key that names an unknown argument, or a function that cannot take the task's."""
    for limit in limits:
        if callable(limit.key):
            _check_takes(name, limit.key, arguments)
        for field in limit.fields:
            if not arguments.takes(field):
                takes = ", ".join(arguments.names) or "no arguments"
                raise InvalidInput("key", f"names {field!r}; {name} takes {takes}", limit.key)


def _check_takes(name: str, key: Callable[..., object], arguments: TakesArguments) -> None:
    if not arguments.positional:
        return
    try:
        inspect.signature(key).bind(*arguments.positional)
    except TypeError as error:
        takes = ", ".join(arguments.positional)
        raise InvalidInput(
            "key", f"must take all arguments of {name} by position, {takes}: {error}", key
        ) from None
    except ValueError:
        # Some functions written in C have no signature.
        return


class LimitStatus(Struct, frozen=True, kw_only=True):
    """A limit as it applies now."""

    name: str
    rate: str | None
    concurrency: int | None
    source: LimitSource
    """`stored` if it was set at run time, which wins over the program."""
    while_suspended: WhileSuspended
    declared_rate: str | None
    declared_concurrency: int | None
    """What the program last declared."""


def status_of(policy: QuotaPolicy) -> LimitStatus:
    declared = declared_spec(policy)
    return LimitStatus(
        name=policy.name,
        rate=rate_text(policy.spec),
        concurrency=policy.active_concurrency_cap or None,
        source=policy.source,
        while_suspended=policy.while_suspended,
        declared_rate=None if declared is None else rate_text(declared),
        declared_concurrency=None if declared is None else declared.active_concurrency_cap or None,
    )


class AppLimits(AppPart):
    """The limits of an app's namespace: read them, and change them at run time."""

    async def set(
        self,
        name: str,
        *,
        rate: str | None = None,
        concurrency: int | None = None,
        while_suspended: SlotFate | None = None,
    ) -> LimitStatus:
        """Apply these values from now on, in every process, whatever programs declare.

        An omitted value means no limit; `set("mail")` lifts the limit altogether. Only
        `while_suspended` stays as it is unless given.
        """
        spec = spec_of(rate, concurrency)
        policy = await (await self._engine()).set_limit(
            name,
            namespace=self._namespace(),
            window_ms=spec.window_ms,
            max_requests_per_window=spec.max_requests_per_window,
            active_concurrency_cap=spec.active_concurrency_cap,
            while_suspended=while_suspended,
        )
        return status_of(policy)

    async def reset(self, name: str) -> LimitStatus:
        """Apply what the program declares again."""
        engine = await self._engine()
        return status_of(await engine.reset_limit(name, namespace=self._namespace()))

    async def remove(self, name: str) -> None:
        """Forget a limit; a program that declares it brings it back when it starts or submits.

        Raises `Conflict` while runs that were under it are kept; `set` without values lifts it.
        """
        await (await self._engine()).remove_limit(name, namespace=self._namespace())

    async def get(self, name: str) -> LimitStatus:
        engine = await self._engine()
        return status_of(await engine.read_limit(name, namespace=self._namespace()))

    async def list(self) -> list[LimitStatus]:
        """All limits of the namespace, by name."""
        engine, namespace = await self._engine(), self._namespace()
        found = pages(lambda at: engine.list_limits(namespace=namespace, cursor=at, limit=PAGE_MAX))
        return [status_of(each) async for page in found for each in page.limits]

    async def use(self, name: str, *, after: str | None = None) -> Sequence[GateUse]:
        """What each value of its key uses now: up to a thousand, sorted by key, after `after`."""
        engine = await self._engine()
        policy = await engine.read_limit(name, namespace=self._namespace())
        page = await engine.list_limit_use(policy.quota_policy_id, cursor=after, limit=PAGE_MAX)
        return page.gates
