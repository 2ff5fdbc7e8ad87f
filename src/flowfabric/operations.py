"""Operations of the engine that can be called remotely: who may call them, and how they travel.

One table lists them; nothing else can be called. Arguments travel by name as JSON, decoded by the
annotations of the operation itself, and so do results: bytes in base64, structs of a union by
their tag. An error travels as its code and attributes, and the client raises it again.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from types import GenericAlias, UnionType
from typing import Final, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Struct, UnsetType

from flowfabric.core.api_tokens import Scope
from flowfabric.core.checks import check_text
from flowfabric.core.creation import Checked, NewExecution
from flowfabric.core.flow_joins import EdgeDependencyPolicy, Join
from flowfabric.core.schedules import ScheduleDefinition
from flowfabric.core.waitpoints import WaitpointToken, check_kid
from flowfabric.engine.engine import Engine
from flowfabric.errors import BackendErrorKind, ErrorClass, FlowFabricError

T = TypeVar("T")

PROTOCOL: Final = 1
"""Grows with a change after which older and newer packages cannot read each other's calls."""
BODY_BYTES_MAX: Final = 16 * 1_048_576
"""The size of one call."""
WAITS: Final = frozenset({"tail_stream", "tail_execution", "cancel_flow"})
"""Operations that may take long because they wait if asked to."""


class Reach(StrEnum):
    """What an operation concerns, for callers confined to a namespace."""

    OWN = "own"
    """Executions, flows or a namespace that its arguments name."""
    EVERYTHING = "everything"
    """More than one namespace: confined callers may not use it."""
    NOTHING = "nothing"
    """Nothing that belongs to a namespace."""


class DeploymentView(Struct, kw_only=True):
    """What clients need to check requests locally: how ids are built, how large payloads may be."""

    version: str
    protocol: int
    """How operations travel: clients of another one cannot call them."""
    backend: str
    num_flow_partitions: int
    num_budget_partitions: int
    num_quota_partitions: int
    payload_bytes_max: int
    plain_bytes_max: int
    coded: bool
    """Whether payloads go through a codec here."""
    namespace: str | None
    """The only one the token is for."""


# Errors -----------------------------------------------------------------------


class WireError(Struct, frozen=True, kw_only=True):
    """An error in a form that can be raised again."""

    code: str
    detail: str
    attributes: dict[str, object] = {}


def _classes(base: type[FlowFabricError]) -> dict[str, type[FlowFabricError]]:
    found = {base.code: base}
    for each in base.__subclasses__():
        found |= _classes(each)
    return found


_BY_CODE: Final = _classes(FlowFabricError)
_KINDS: Final[Mapping[str, Callable[[str], object]]] = {
    "error_class": ErrorClass,
    "kind": BackendErrorKind,
}


def send_error(error: FlowFabricError) -> WireError:
    """Only attributes with plain values travel; others are for the process that raised it."""
    attributes: dict[str, object] = {
        name: value
        for name, value in vars(error).items()
        if name != "detail" and isinstance(value, str | int | float | tuple | list | None)
    }
    return WireError(code=error.code, detail=str(error), attributes=attributes)


def raised_again(sent: WireError) -> FlowFabricError:
    kind = _BY_CODE.get(sent.code, FlowFabricError)
    error = kind.__new__(kind)
    error.args, error.detail = (sent.detail,), sent.detail
    for name, value in sent.attributes.items():
        if isinstance(value, str) and name in _KINDS:
            value = _KINDS[name](value)
        if name != "__notes__" and isinstance(value, list):
            value = tuple(value)
        setattr(error, name, value)
    return error


class Answer(Struct, Generic[T], frozen=True, omit_defaults=True):
    """One of many answers: what happened, or why it did not."""

    ok: T | UnsetType = UNSET
    error: WireError | None = None


# Types as they travel ---------------------------------------------------------


class SentExecution(NewExecution, frozen=True, kw_only=True):
    policy: dict[str, object] | str | None = None


class SentJoin(Join, frozen=True, kw_only=True):
    policy: EdgeDependencyPolicy | None = None


class SentSchedule(ScheduleDefinition, frozen=True, kw_only=True):
    policy: dict[str, object] | str | None = None


_SENT: Final[Mapping[object, object]] = {
    NewExecution: SentExecution,
    Join: SentJoin,
    ScheduleDefinition: SentSchedule,
}


def wired(hint: object) -> object:
    """The type that travels instead of this one where JSON alone would be ambiguous.

    Checked requests travel unchecked: the server checks them itself.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None:
        return _SENT.get(hint, hint)
    if origin in (Union, UnionType):
        kept = [
            each for each in inner if not (each is Checked or (str in inner and _is_text(each)))
        ]
        return Union[tuple(wired(each) for each in kept)]  # noqa: UP007
    if origin is Literal:
        return hint
    if origin is list and FlowFabricError in get_args(inner[0]):
        rest = [each for each in get_args(inner[0]) if each is not FlowFabricError]
        return GenericAlias(list, (GenericAlias(Answer, (Union[tuple(rest)],)),))  # noqa: UP007
    return GenericAlias(origin, tuple(each if each is ... else wired(each) for each in inner))


def _is_text(kind: object) -> bool:
    """Whether plain text can stand for it where both are accepted."""
    return kind is WaitpointToken or (isinstance(kind, type) and issubclass(kind, StrEnum))


def _to_wire(value: object) -> object:
    if isinstance(value, WaitpointToken):
        return value.reveal()
    if isinstance(value, FlowFabricError):
        return send_error(value)
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _from_wire(kind: type, value: object) -> object:
    if kind is WaitpointToken and isinstance(value, str):
        return WaitpointToken(value)
    if kind is FlowFabricError:
        return raised_again(msgspec.convert(value, WireError))
    if kind is object:
        return value
    raise NotImplementedError(f"{kind.__name__} does not travel")


encode: Final = msgspec.json.Encoder(enc_hook=_to_wire).encode


def encode_arguments(arguments: Mapping[str, object]) -> bytes:
    """Arguments as they travel; raises what the operation raises for text that is no Unicode."""
    try:
        return encode(arguments)
    except UnicodeEncodeError:
        for field, text in _texts("arguments", msgspec.to_builtins(arguments, enc_hook=_to_wire)):
            if field.endswith("kid"):
                check_kid(text)
            check_text(field, text, bytes_max=BODY_BYTES_MAX)
        raise


def _texts(field: str, value: object) -> Iterator[tuple[str, str]]:
    """Every text in a value, with the innermost name that leads to it."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield field, name
            yield from _texts(name, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(field, inner)


def _optional(name: str, hint: object) -> tuple[str, object, object]:
    return name, Union[wired(hint), UnsetType], UNSET  # noqa: UP007


class RemoteOperation:
    """An operation that can be called remotely."""

    def __init__(
        self, name: str, scopes: frozenset[Scope], reach: Reach, *, repeatable: bool
    ) -> None:
        function = inspect.unwrap(getattr(Engine, name))
        hints = get_type_hints(function)
        self.name, self.scopes, self.reach, self.repeatable = name, scopes, reach, repeatable
        self._signature = inspect.signature(function)
        fields: list[tuple[str, object] | tuple[str, object, object]] = []
        for parameter in list(self._signature.parameters.values())[1:]:
            hint = hints[parameter.name]
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                (options,) = get_args(hint)
                fields += [_optional(key, kind) for key, kind in get_type_hints(options).items()]
            elif parameter.default is inspect.Parameter.empty:
                fields.append((parameter.name, wired(hint)))
            else:
                fields.append(_optional(parameter.name, hint))
        self.arguments = msgspec.defstruct(
            f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True
        )
        """Its arguments as a record, as they travel."""
        self._decoder = msgspec.json.Decoder(self.arguments, dec_hook=_from_wire)
        result = wired(hints["return"])
        self.may_be_none = type(None) in get_args(hints["return"])
        lists = get_origin(result) is list
        self.answers_each = lists and get_origin(get_args(result)[0]) is Answer
        first, kind = fields[0][:2] if fields else ("", None)
        self.batch = first if lists and get_origin(kind) in (list, Sequence) else None
        """The list argument whose items the returned list answers, if there is one."""
        self._results = msgspec.json.Decoder(result, dec_hook=_from_wire)

    @property
    def names(self) -> Sequence[str]:
        """The names of its arguments."""
        return self.arguments.__struct_fields__

    def bind(self, args: Sequence[object], given: Mapping[str, object]) -> dict[str, object]:
        """Arguments by name."""
        _, *bound = self._signature.bind(None, *args, **given).arguments.items()
        named = dict(bound)
        options = named.pop("options", {})
        return {**named, **options}

    def decode_arguments(self, body: bytes) -> dict[str, object]:
        """The arguments given; raises msgspec's errors."""
        decoded = self._decoder.decode(body or b"{}")
        given = {name: getattr(decoded, name) for name in self.names}
        return {name: value for name, value in given.items() if value is not UNSET}

    def encode_result(self, result: object) -> bytes:
        if self.answers_each and isinstance(result, list):
            return encode(
                [
                    {"error": each} if isinstance(each, FlowFabricError) else {"ok": each}
                    for each in result
                ]
            )
        return encode(result)

    def decode_result(self, body: bytes) -> object:
        result = self._results.decode(body)
        if self.answers_each and isinstance(result, list):
            return [each.ok if each.error is None else raised_again(each.error) for each in result]
        return result


# The table --------------------------------------------------------------------

_READ: Final = frozenset({Scope.READ})
_READ_OR_WORK: Final = frozenset({Scope.READ, Scope.WORK})
_SUBMIT: Final = frozenset({Scope.SUBMIT})
_SIGNAL: Final = frozenset({Scope.SIGNAL})
_WORK: Final = frozenset({Scope.WORK})
_OPERATE: Final = frozenset({Scope.OPERATE})
_ADMIN: Final = frozenset({Scope.ADMIN})
_ANY: Final = frozenset(Scope)

_TABLE: Final[Sequence[tuple[frozenset[Scope], Reach, bool, str]]] = (
    # Scopes, any of which is enough; what it concerns; whether it is safe to repeat; names.
    (_ANY, Reach.NOTHING, True, "ping server_time_ms end_of_log"),
    (_WORK, Reach.NOTHING, True, "to_store from_store"),
    (
        _READ_OR_WORK,
        Reach.OWN,
        True,
        """list_steps find_outcomes describe_suspension read_progress read_execution_context own_ids
        read_execution_inputs last_frame_at get_execution_namespace""",
    ),
    (
        _READ,
        Reach.OWN,
        True,
        """describe_execution read_execution_state read_execution_info get_execution_result
        resolve_execution_flow_id read_current_attempt_index read_total_attempt_count list_attempts
        read_exec_core_fields explain_execution find_executions inspect_execution
        resolve_execution_id before_latest_events required_capabilities called read_outcomes
        get_execution_tag list_expired_leases describe_flow list_flows list_flow_members
        list_edge_groups find_named_flows list_edges describe_edge evaluate_flow_eligibility
        read_flow_summary get_flow_namespace get_flow_tag list_pending_waitpoints list_inbox
        read_stream tail_stream tail_execution read_summary next_events describe_schedule
        list_schedules get_budget_status read_budget_usage_and_limits list_budgets read_limit
        list_limits list_workers list_worker_events read_quota_policy_limits list_limit_use
        list_children list_executions""",
    ),
    (
        _READ,
        Reach.EVERYTHING,
        True,
        "list_lanes count_lanes list_suspended last_event_id read_events next_due",
    ),
    (
        _SUBMIT,
        Reach.OWN,
        True,
        """create_flow add_execution_to_flow add_dependencies stage_dependency_edge
        apply_dependency_to_child set_edge_group_policy set_flow_tag set_flow_tags
        set_execution_tag set_execution_tags upsert_schedule remove_schedule""",
    ),
    (_SUBMIT, Reach.OWN, False, "create_execution create_executions trigger_schedule"),
    (_SIGNAL, Reach.OWN, True, "read_waitpoint_token"),
    (
        _SIGNAL,
        Reach.OWN,
        False,
        "deliver_signal deliver_operator_signal deliver_approval_signal",
    ),
    (
        _WORK,
        Reach.OWN,
        True,
        """find_claimed renew renew_many renew_lease find_lost_leases register_worker
        heartbeat_worker record_steps await_executions hand_back hand_back_many complete
        complete_many progress
        update_progress release_blocked create_waitpoint close_waitpoint observe_signals
        take_signals set_aside_signals expire_execution""",
    ),
    (
        _WORK,
        Reach.OWN,
        False,
        """claim claim_many claim_for_worker issue_claim_grant issue_reclaim_grant claim_execution
        claim_resumed_execution claim_from_resume_grant reclaim_execution complete_execution fail
        fail_many fail_execution delay delay_execution wait_children move_to_waiting_children
        cancel block_on_code suspend suspend_by_triple append_frame append_frames report_usage
        reserve_budget settle_reservation post_to_budgets record_spend release_budget""",
    ),
    (frozenset({Scope.WORK, Scope.OPERATE}), Reach.OWN, True, "mark_worker_dead"),
    (frozenset({Scope.SUBMIT, Scope.WORK, Scope.OPERATE}), Reach.OWN, True, "declare_limits"),
    (
        _OPERATE,
        Reach.OWN,
        False,
        """cancel_execution cancel_executions cancel_matching cancel_flow cancel_flow_header
        replay_execution replay_executions replay_matching revoke_lease change_priority
        accept_changes resume_execution block_execution_for_admission unblock_execution
        issue_grant_and_claim pause_schedule resume_schedule create_budget update_budget
        reset_budget remove_budget report_usage_admin create_quota_policy set_limit reset_limit
        remove_limit check_admission release_admission""",
    ),
    (
        _OPERATE,
        Reach.EVERYTHING,
        False,
        "register_lane pause_lane resume_lane drain_lane disable_lane audit",
    ),
    (_ADMIN, Reach.OWN, False, "create_token"),
    (
        _ADMIN,
        Reach.EVERYTHING,
        False,
        """list_tokens revoke_token list_waitpoint_hmac_kids
        seed_waitpoint_hmac_secret rotate_waitpoint_hmac_secret_all""",
    ),
)

OPERATIONS: Final[Mapping[str, RemoteOperation]] = {
    name: RemoteOperation(name, scopes, reach, repeatable=repeatable)
    for scopes, reach, repeatable, names in _TABLE
    for name in names.split()
}
