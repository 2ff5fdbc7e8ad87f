"""Limits on what may run at once and what may start in a time: their terms, and who sets them.

A *quota policy* says how much: so many starts per window, so many at once. Programs declare
theirs by name each time they start; a value set at run time wins until it is reset. How work is
held to them is in `core.gates`.
"""

from enum import StrEnum
from functools import lru_cache
from typing import ClassVar, Final

import msgspec
from msgspec import Struct, structs

from flowfabric.core.bounds import AMOUNT_MAX
from flowfabric.core.checks import check_int, check_name
from flowfabric.core.ids import (
    Namespace,
    QuotaPolicyId,
    named_uuid,
    parse_namespace,
)
from flowfabric.core.records import Record
from flowfabric.errors import (
    Corruption,
    InvalidInput,
    InvalidQuotaSpec,
)


class LimitSource(StrEnum):
    """Who set the limit that applies."""

    CODE = "code"
    """Declared by the program; the next deploy may change it."""
    STORED = "stored"
    """Set at run time: it wins over the program."""


class WhileSuspended(StrEnum):
    """What happens to a slot while its execution is paused."""

    RELEASE = "release"
    """Others may take it; continuing needs one again."""
    KEEP = "keep"
    """It stays taken; resuming needs no other."""


class QuotaPolicy(Record, frozen=True, kw_only=True):
    """How much may start in a window and how much may run at once; 0 is no limit."""

    table: ClassVar[str] = "quota_policy"
    key: ClassVar[tuple[str, ...]] = ("quota_policy_id",)

    quota_policy_id: QuotaPolicyId
    namespace: Namespace
    name: str
    window_ms: int
    max_requests_per_window: int
    active_concurrency_cap: int
    jitter_ms: int
    while_suspended: WhileSuspended
    source: LimitSource
    declared: str | None = None
    """What the program last declared, as JSON."""
    created_at_ms: int
    updated_at_ms: int

    @property
    def spec(self) -> "QuotaSpec":
        return QuotaSpec(**{name: getattr(self, name) for name in QuotaSpec.__struct_fields__})


@lru_cache(maxsize=1_024)
def policy_id_of(namespace: str, name: str) -> QuotaPolicyId:
    """The id of a policy that people know by its name."""
    return QuotaPolicyId(named_uuid("quota_policy", namespace, name))


class Limits(Struct, frozen=True, kw_only=True):
    """What a gate lets through; 0 means no limit."""

    window_ms: int = 0
    rate: int = 0
    cap: int = 0
    keeps: bool = False
    """Whether an interrupted attempt holds its slot until it continues."""

    @property
    def remembers(self) -> bool:
        """Whether its gates remember what starts."""
        return self.rate > 0 or (self.cap > 0 and self.keeps)


WINDOW_MS_MAX: Final = 31 * 24 * 60 * 60 * 1_000
JITTER_MS_MAX: Final = 60 * 60 * 1_000


class QuotaSpec(Struct, frozen=True, kw_only=True):
    """The terms of a policy; 0 means no limit."""

    window_ms: int = 0
    max_requests_per_window: int = 0
    active_concurrency_cap: int = 0
    jitter_ms: int = 0
    while_suspended: WhileSuspended = WhileSuspended.RELEASE

    @property
    def limits(self) -> Limits:
        return Limits(
            window_ms=self.window_ms,
            rate=self.max_requests_per_window,
            cap=self.active_concurrency_cap,
            keeps=self.while_suspended is WhileSuspended.KEEP,
        )


def check_while_suspended(value: object) -> WhileSuspended:
    if value not in list(WhileSuspended):
        raise InvalidInput("while_suspended", 'must be "release" or "keep"', value)
    return WhileSuspended(str(value))


def check_spec(spec: QuotaSpec, *, may_be_empty: bool = False) -> QuotaSpec:
    """Raise unless the parts of a policy fit each other."""
    check_int("window_ms", spec.window_ms, 0, WINDOW_MS_MAX)
    check_int("max_requests_per_window", spec.max_requests_per_window, 0, AMOUNT_MAX)
    check_int("active_concurrency_cap", spec.active_concurrency_cap, 0, AMOUNT_MAX)
    check_int("jitter_ms", spec.jitter_ms, 0, JITTER_MS_MAX)
    check_while_suspended(spec.while_suspended)
    if spec.max_requests_per_window and not spec.window_ms:
        raise InvalidQuotaSpec(
            f"max_requests_per_window: {spec.max_requests_per_window} needs a window it counts in"
        )
    if not (may_be_empty or spec.max_requests_per_window or spec.active_concurrency_cap):
        raise InvalidQuotaSpec(
            "max_requests_per_window and active_concurrency_cap: at least one must be above 0"
        )
    return spec


class DeclaredLimit(Struct, frozen=True, kw_only=True):
    """A limit as a program declares it, by name within a namespace."""

    namespace: str
    name: str
    spec: QuotaSpec

    @property
    def quota_policy_id(self) -> QuotaPolicyId:
        return policy_id_of(self.namespace, self.name)

    def policy(self, now_ms: int) -> QuotaPolicy:
        """The policy, as if it were new."""
        namespace, source = parse_namespace(self.namespace), LimitSource.CODE
        return new_policy(self.quota_policy_id, namespace, self.name, self.spec, source, now_ms)


def check_declared(limit: object) -> DeclaredLimit:
    if not isinstance(limit, DeclaredLimit):
        raise InvalidInput("limits", "must be a list of DeclaredLimit", limit)
    parse_namespace(limit.namespace)
    check_name("name", limit.name)
    check_spec(limit.spec)
    return limit


def declared_policy(policy: QuotaPolicy | None, new: QuotaPolicy) -> QuotaPolicy:
    """The policy once the program has declared `new`: terms set at run time stay."""
    if policy is None:
        return new
    if policy.source is LimitSource.STORED:
        return structs.replace(policy, declared=new.declared)
    return structs.replace(
        new,
        created_at_ms=policy.created_at_ms,
        updated_at_ms=policy.updated_at_ms if policy.spec == new.spec else new.updated_at_ms,
    )


def declared_spec(policy: QuotaPolicy) -> QuotaSpec | None:
    """What the program last declared."""
    if policy.declared is None:
        return None
    try:
        return msgspec.json.decode(policy.declared, type=QuotaSpec)
    except msgspec.DecodeError as error:
        raise Corruption(f"limit {policy.name}: declared does not decode: {error}") from error


def changed_policy(
    policy: QuotaPolicy, spec: QuotaSpec, source: LimitSource, now_ms: int
) -> QuotaPolicy:
    return structs.replace(policy, **structs.asdict(spec), source=source, updated_at_ms=now_ms)


def new_policy(
    quota_policy_id: QuotaPolicyId,
    namespace: Namespace,
    name: str,
    spec: QuotaSpec,
    source: LimitSource,
    now_ms: int,
) -> QuotaPolicy:
    return QuotaPolicy(
        quota_policy_id=quota_policy_id,
        namespace=namespace,
        name=name,
        source=source,
        declared=msgspec.json.encode(spec).decode() if source is LimitSource.CODE else None,
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
        **structs.asdict(spec),
    )
