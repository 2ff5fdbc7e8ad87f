"""Bodies of requests, and the engine's answers in JSON.

The result of an operation is an object under its name, `{"Created": {…}}`, or only the name if it
has no fields, as clients of the reference's server expect. They send bytes as arrays of numbers;
this server also accepts JSON and base64. It ignores what those clients have to send although the
server knows it (`now`, `partition_id`).
"""

import base64
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, structs

from flowfabric.core.checks import JSON
from flowfabric.core.flow_joins import EdgeDependencyPolicy, Join
from flowfabric.server.problems import refuse, unreadable

Octet = Annotated[int, Meta(ge=0, le=255)]
Octets = list[Octet]
Tagged = dict[str, dict[str, object]] | str
"""The name of what happened, with its fields."""
S = TypeVar("S", bound=Struct)


def tagged(result: Struct) -> Tagged:
    """A result under its name."""
    name = str(result.__struct_config__.tag)
    fields = structs.asdict(result)
    return {name: fields} if fields else name


def view_of(kind: type[S], source: Struct, /, **others: object) -> S:
    """A view with the fields of its source, except for `others`, which it shows differently."""
    names = [name for name in kind.__struct_fields__ if name not in others]
    return kind(**{name: getattr(source, name) for name in names}, **others)


def read_bytes(
    field: str,
    octets: Octets | None,
    as_base64: str | None,
    as_json: object,
) -> tuple[bytes | None, str | None]:
    """Bytes that a request carries in one of three forms, and their encoding if that implies it."""
    if (octets is not None) + (as_base64 is not None) + (as_json is not UNSET) > 1:
        raise refuse(
            400, "invalid_input", f"{field}: send it in one form, not several", field=field
        )
    if as_json is not UNSET:
        try:
            return msgspec.json.encode(as_json), JSON
        except RecursionError as error:
            raise unreadable(error) from None
    if as_base64 is not None:
        try:
            return base64.b64decode(as_base64, validate=True), None
        except ValueError as error:
            name = f"{field}_base64"
            raise refuse(400, "invalid_input", f"{name}: {error}", field=name) from None
    return None if octets is None else bytes(octets), None


class StrictBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of one of our own requests. Unknown members are refused, because a typo in
    `expires_in_ms` would go unnoticed. Requests of the reference are lenient: its clients send
    extra members."""


class CreateExecution(Struct, kw_only=True):
    """A submission. Only `execution_kind` is required."""

    execution_kind: str
    execution_id: str | None = None
    namespace: str | None = None
    lane_id: str = "default"
    input_payload: Octets | None = None
    input_base64: str | None = None
    input_json: object = UNSET
    payload_encoding: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    creator_identity: str = ""
    idempotency_key: str | None = None
    tags: dict[str, str] = {}
    policy: dict[str, object] | None = None
    delay_until: int | None = None
    delay_ms: int | None = None
    execution_deadline_at: int | None = None


class CreateExecutions(StrictBody, kw_only=True):
    """Many submissions, created together or not at all."""

    executions: Annotated[list[CreateExecution], Meta(max_length=1_000)]


class CancelExecution(Struct, kw_only=True):
    reason: str
    execution_id: str | None = None
    source: str = "operator_override"
    lease_id: str | None = None
    lease_epoch: int | None = None
    attempt_id: str | None = None


class DeliverSignal(Struct, kw_only=True):
    """A signal, and the token that allows it."""

    waitpoint_token: str
    """That of the waitpoint, or the text of a link, which names execution and waitpoint."""
    signal_name: str
    waitpoint_id: str | None = None
    execution_id: str | None = None
    signal_id: str | None = None
    signal_category: str = ""
    source_type: str = ""
    source_identity: str = ""
    target_scope: str = ""
    payload: Octets | None = None
    payload_base64: str | None = None
    payload_json: object = UNSET
    payload_encoding: str | None = None
    correlation_id: str | None = None
    idempotency_key: str | None = None
    created_at: int | None = None
    dedup_ttl_ms: int | None = None


class SignalBody(StrictBody, kw_only=True):
    """A signal for whatever an execution waits at under a name."""

    signal_name: str
    payload_base64: str | None = None
    payload_json: object = UNSET
    keep: bool = True
    """Whether it is kept for the next wait of that name if nothing waits now."""
    idempotency_key: str | None = None


class ChangePriority(Struct, kw_only=True):
    new_priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)]


class NewFlow(Struct, kw_only=True):
    flow_id: str
    flow_kind: str
    namespace: str | None = None


class NewMember(Struct, kw_only=True):
    execution_id: str
    flow_id: str | None = None


class EdgeBody(Struct, kw_only=True):
    edge_id: str
    upstream_execution_id: str
    downstream_execution_id: str
    flow_id: str | None = None
    dependency_kind: str = "success_only"
    data_passing_ref: str | None = None


class StageEdge(EdgeBody, kw_only=True):
    expected_graph_revision: int | None = None


class ApplyEdge(EdgeBody, kw_only=True):
    graph_revision: int | None = None


class CancelFlow(Struct, kw_only=True):
    reason: str
    cancellation_policy: str
    flow_id: str | None = None


class RotateSecret(Struct, kw_only=True):
    new_kid: str
    new_secret_hex: str


class SecretRotated(Struct, kw_only=True):
    rotated: int
    failed: list[int]
    new_kid: str


class CreateToken(StrictBody, kw_only=True):
    name: str
    scopes: list[str]
    namespace: str | None = None
    expires_in_ms: int | None = None


class TokenView(Struct, kw_only=True, omit_defaults=True):
    """A token without its secret."""

    token_id: str
    name: str
    scopes: list[str]
    namespace: str | None
    created_at_ms: int
    expires_at_ms: int | None
    revoked_at_ms: int | None
    token: str | None = None
    """The token itself: shown once, to the caller that asked for it."""


class TokenList(Struct, kw_only=True):
    tokens: list[TokenView]
    next_cursor: str | None


class OpenWaitpoint(Struct, kw_only=True, omit_defaults=True):
    """An open waitpoint without its token."""

    waitpoint_id: str
    waitpoint_key: str
    state: str
    required_signal_names: tuple[str, ...]
    created_at: int
    execution_id: str
    token_kid: str
    token_fingerprint: str
    activated_at: int | None = None
    expires_at: int | None = None


class Secret(Struct):
    token: str


class WireFrame(Struct, kw_only=True):
    id: str
    fields: dict[str, str]


class WireFrames(Struct, kw_only=True, omit_defaults=True):
    frames: list[WireFrame]
    count: int
    closed_at: int | None = None
    closed_reason: str | None = None


class NewJoin(Join, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one member waits for, and when it has waited enough."""

    policy: EdgeDependencyPolicy | None = None


class NewGraph(StrictBody, kw_only=True):
    """Members and what each of them waits for, added together or not at all."""

    members: tuple[CreateExecution | str, ...] = ()
    """New executions, and ids of existing ones."""
    joins: tuple[NewJoin, ...] = ()
