"""Tasks: functions with a name, and how their arguments and results are stored.

A task's arguments are stored as a JSON object with one member per parameter and
decoded by the function's annotations; a parameter may have any type that msgspec can
decode. A mismatch names the argument, both when the task is submitted and when it runs.
"""

import inspect
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property, lru_cache
from inspect import Parameter
from typing import Final, Generic, Literal, NamedTuple, ParamSpec, TypedDict, TypeVar, get_args

import msgspec

from flowfabric.core import checks, policies
from flowfabric.core.bounds import WORKER_DEATHS_MAX
from flowfabric.core.ids import parse_execution_kind, parse_lane_id
from flowfabric.errors import InvalidInput
from flowfabric.json_values import UNREADABLE, check_storable, decoder_of, encode_value, typed
from flowfabric.limits import BoundArguments, KeySource, Limit, SlotFate, check_keys, limits_of

# Parameters that the worker fills in, with resources from `app.provide`
#
#     app.provide(Database, open_database)
#
#     @app.task
#     async def publish(ctx: Context, article_id: int, db: Database) -> None: ...
#
# A parameter is filled in when its annotation is exactly a class that was provided before the
# task was declared, or when its default is `provided(Class)`, which type checkers prefer:
# they see that callers may omit it. All other parameters are arguments.

T = TypeVar("T")


@dataclass(frozen=True)
class Provided:
    """A default that stands for a resource."""

    kind: type


@dataclass(frozen=True)
class _Untyped:
    value: object


def provided(kind: type[T]) -> T:
    """As a default, `db: Database = provided(Database)`: filled in by the worker."""
    # A marker, typed as the resource that replaces it.
    marker: T = getattr(_Untyped(Provided(kind)), "value")  # noqa: B009
    return marker


def resources_of(
    name: str,
    parameters: Sequence[Parameter],
    hints: Mapping[str, object],
    kinds: AbstractSet[type],
) -> dict[str, type]:
    """The parameters that the worker fills in, each with the class of its resource."""
    resources: dict[str, type] = {}
    for parameter in parameters:
        hint = hints.get(parameter.name)
        if isinstance(parameter.default, Provided):
            resources[parameter.name] = parameter.default.kind
        elif isinstance(hint, type) and hint in kinds:
            resources[parameter.name] = hint
        elif parameter.kind is Parameter.VAR_POSITIONAL and resources:
            raise InvalidInput(
                f"argument *{parameter.name} of {name}",
                f"must come before {next(iter(resources))}, which the worker fills in",
            )
    for each in parameters:
        if each.name in resources and each.kind is Parameter.POSITIONAL_ONLY:
            raise InvalidInput(
                f"argument {each.name} of {name}",
                "is filled in by the worker and cannot be positional-only; move it after the `/`",
            )
    return resources


# Retries, checked where the program declares them ----------------------------


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How often to retry after a failure, and how long to wait before each retry.

    The wait starts at `delay` and grows by `multiplier` up to `max_delay`; with
    `jitter` each wait is half to all of that. Exceptions of the class, or one of the
    classes, in `never_on` are not retried; neither is `DoNotRetry`.
    """

    max_retries: int = 3
    delay: policies.Duration = 1
    max_delay: policies.Duration = 60
    multiplier: float = 2.0
    jitter: bool = True
    never_on: type[BaseException] | Iterable[type[BaseException]] = ()

    def __post_init__(self) -> None:
        """Check now: an error raised while handling a failure would hide that failure."""
        checks.check_int("retry.max_retries", self.max_retries, 0, policies.COUNT_MAX)
        checks.check_bool("retry.jitter", self.jitter)
        multiplier: object = self.multiplier
        if not isinstance(multiplier, int | float) or isinstance(multiplier, bool):
            raise InvalidInput("retry.multiplier", "must be a number", multiplier)
        if not (math.isfinite(multiplier) and 1 <= multiplier <= policies.MULTIPLIER_MAX):
            problem = f"must be 1 to {policies.MULTIPLIER_MAX:.0f}"
            raise InvalidInput("retry.multiplier", problem, multiplier)
        _ = self.policy, self.final

    @cached_property
    def policy(self) -> policies.RetryPolicy:
        return policies.RetryPolicy(
            max_retries=self.max_retries,
            backoff=policies.ExponentialBackoff(
                initial_delay_ms=policies.duration_ms("retry.delay", self.delay),
                max_delay_ms=policies.duration_ms("retry.max_delay", self.max_delay),
                multiplier=self.multiplier,
                jitter=self.jitter,
            ),
        )

    @cached_property
    def final(self) -> tuple[type[BaseException], ...]:
        """The exceptions that are never retried."""
        value: object = self.never_on
        classes: list[object] = [value]
        if isinstance(value, Iterable) and not isinstance(value, type):
            classes = list(value)
        for each in classes:
            if not (isinstance(each, type) and issubclass(each, BaseException)):
                problem = "must be exception classes, such as ValueError"
                raise InvalidInput("retry.never_on", problem, value)
        return tuple(each for each in classes if isinstance(each, type))


P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

_BY_PLACE: Final = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE: Final = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
SOURCE_DEPTH_MAX: Final = 4
"""How deep in arguments to look for a misplaced node, to say what to do with it."""
Executor = Literal["thread", "process"]


class HandlerContext:
    """The base of `Context`: a first parameter of this type gets the handler's context."""


class Source:
    """Something whose result becomes an argument, under a name: a node of a flow."""

    def __init__(self, name: str) -> None:
        self.name = name


class SubmitOptions(TypedDict, total=False):
    """Options of one submission; the defaults are the task's own settings."""

    priority: int
    lane: str
    idempotency_key: str
    strict: bool
    """Refuse an idempotency key or id that was used with other arguments."""
    tags: Mapping[str, str]
    delay: policies.Duration
    """Start no sooner than this long from now."""
    deadline: policies.Duration
    """Expire unless it ends within this long from now."""
    execution_id: str
    budget: str | Sequence[str]
    """Do not start while this budget, or any of these, is used up; adds to the task's own."""
    connection: object
    """Take part in the transaction of this connection; see `App.submit`."""
    limits: Sequence[Limit]
    """Apply these limits in addition to the task's own."""


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The settings of a task's executions, unless a submission overrides them."""

    lane: str = "default"
    retry: Retry | None = None
    timeout: policies.Duration | None = None
    priority: int = 0
    capabilities: Sequence[str] = ()
    budget: str | Sequence[str] = ()
    executor: Executor = "thread"
    keep: policies.Duration | None = None
    keep_failed: policies.Duration | None = None
    max_worker_deaths: int | None = None
    rate_limit: str | None = None
    concurrency: int | None = None
    key: KeySource | None = None
    while_suspended: SlotFate = "release"
    limits: Sequence[Limit] = ()

    def __post_init__(self) -> None:
        """Check the settings that `policy` does not."""
        retry: object = self.retry
        if not isinstance(retry, Retry | None):
            raise InvalidInput("retry", "must be a Retry, such as Retry(max_retries=3)", retry)
        parse_lane_id(self.lane)
        checks.check_priority(self.priority)
        if self.executor not in get_args(Executor):
            raise InvalidInput("executor", "must be thread or process", self.executor)
        checks.check_names("capabilities", self.capabilities)
        _ = self.budgets

    @cached_property
    def budgets(self) -> tuple[str, ...]:
        """The names of the budgets its runs are attached to."""
        return check_budgets(self.budget)

    @cached_property
    def policy(self) -> policies.ExecutionPolicy | None:
        """None if every setting is the default."""
        timeout_ms = policies.optional_duration_ms("timeout", self.timeout)
        required = checks.check_required(list(self.capabilities))
        retention = policies.RetentionPolicy(
            completed_ms=policies.optional_duration_ms("keep", self.keep),
            failed_ms=policies.optional_duration_ms("keep_failed", self.keep_failed),
        )
        kept = retention != policies.RetentionPolicy()
        deaths = self.max_worker_deaths
        plain = self.retry is None and timeout_ms is None and not required and not kept
        if plain and deaths is None:
            return None
        return policies.parse_policy(
            policies.ExecutionPolicy(
                max_worker_deaths=WORKER_DEATHS_MAX if deaths is None else deaths,
                retry_policy=None if self.retry is None else self.retry.policy,
                timeout_policy=None
                if timeout_ms is None
                else policies.TimeoutPolicy(attempt_timeout_ms=timeout_ms),
                routing_requirements=policies.RoutingRequirements(required_capabilities=required)
                if required
                else None,
                retention_policy=retention if kept else None,
            )
        )


def check_budgets(value: object) -> tuple[str, ...]:
    """The names of one or several budgets, without duplicates."""
    names = [value] if isinstance(value, str) else value
    checks.check_names("budget", names)
    assert isinstance(names, Iterable)
    return tuple(sorted({checks.check_name("budget", each) for each in names}))


class Call(Generic[R_co]):
    """A task with its arguments: something to submit."""

    __slots__ = ("payload", "task")

    def __init__(self, task: "Task[..., R_co]", payload: bytes) -> None:
        self.task = task
        self.payload = payload

    def __repr__(self) -> str:
        return f"<call of {self.task.kind}>"

    # Type checkers, which do not see this method, refuse to await a call.
    if not typing.TYPE_CHECKING:

        def __await__(self) -> typing.Never:
            name = self.task.name
            raise TypeError(
                f"{name}(…) is a call to submit, and runs nothing when it is awaited. Write"
                f" `run = await app.submit({name}, …)`, or `ctx.submit` within a task, and"
                f" `await run.result()`; {name}.function is the function itself"
            )


class Task(Generic[P, R_co]):
    """A named function that can be submitted. Calling it returns a `Call` and runs nothing.

    The function itself is `task.function`.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., object],
        settings: TaskSettings,
        version: int = 1,
        kinds: AbstractSet[type] = frozenset(),
    ) -> None:
        self._kinds = kinds
        self.name = parse_execution_kind(name)
        self.version = checks.check_version(version)
        self.kind = parse_execution_kind(checks.kind_of(name, version))
        """The kind of its executions."""
        self.owner: object = None
        """The app it was declared on."""
        self.namespaces: set[str] = set()
        """The namespaces of the apps that have it."""
        self.function = function
        self.settings = settings
        self.is_async = inspect.iscoroutinefunction(function)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidInput("task", f"{name} is a generator; return a list of what it yields")
        if settings.executor == "process" and self.is_async:
            raise InvalidInput("executor", "a process runs plain functions, not async ones")
        if settings.executor == "process" and _asks_for_context(function):
            raise InvalidInput(
                "executor", f"{name} takes a context, which cannot reach another process"
            )
        _ = settings.policy
        self.limits = limits_of(
            self.name,
            settings.rate_limit,
            settings.concurrency,
            settings.key,
            settings.while_suspended,
            settings.limits,
        )
        """The limits of its runs, its own first."""
        if _names_exist(function):
            check_keys(self.name, self.limits, self.arguments)
            if self.arguments.resources and settings.executor == "process":
                raise InvalidInput("executor", "resources cannot be passed to another process")
            _ = self._result_codec

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Call[R_co]:
        return Call(self, self.arguments.encode(args, kwargs))

    def __repr__(self) -> str:
        return f"<task {self.kind}>"

    @cached_property
    def arguments(self) -> "Arguments":
        return Arguments(self.name, self.function, self._kinds)

    @cached_property
    def _result_codec(self) -> "ResultCodec":
        return result_codec(self.function)

    def encode_result(self, value: object) -> bytes:
        """The result as it is stored. Raises `InvalidInput` unless it fits the annotation."""
        data = encode_value(f"the result of {self.name}", value)
        self.decode_result(data)
        return data

    def decode_result(self, data: bytes | None) -> R_co:
        try:
            result: R_co = self._result_codec.decoder.decode(data or b"null")
        except msgspec.DecodeError as error:
            raise InvalidInput(
                f"the result of {self.name}", f"does not fit its return annotation: {error}"
            ) from error
        return result


class Bound(NamedTuple):
    """Decoded arguments, ready for the function."""

    args: tuple[object, ...]
    kwargs: dict[str, object]


def _asks_for_context(function: Callable[..., object]) -> bool:
    """Judge by the annotation's text: names in it may not be defined yet."""
    parameters = list(inspect.signature(function).parameters.values())
    first: object = parameters[0].annotation if parameters else None
    if isinstance(first, str):
        return first.rpartition(".")[2] == "Context"
    return _is_context(first)


def _is_context(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, HandlerContext)


class Arguments:
    """The parameters of a function as a JSON object."""

    def __init__(
        self, name: str, function: Callable[..., object], kinds: AbstractSet[type] = frozenset()
    ) -> None:
        """`kinds` are the classes of the resources that were provided."""
        self._name, empty = name, Parameter.empty
        parameters = list(inspect.signature(function).parameters.values())
        hints = resolve_hints(function)
        first = hints.get(parameters[0].name) if parameters else None
        self.takes_context = _is_context(first)
        if self.takes_context:
            parameters = parameters[1:]
        elif parameters and parameters[0].name == "ctx" and parameters[0].annotation is empty:
            raise InvalidInput(
                f"argument ctx of {name}",
                "has no annotation, so it would be an argument; for the context write"
                " `ctx: Context`",
            )
        for each in parameters:
            if _is_context(hints.get(each.name)):
                raise InvalidInput(
                    f"argument {each.name} of {name}",
                    f"is the context, which must come first: def {name}({each.name}: Context, …)",
                )
        self.resources = resources_of(name, parameters, hints, kinds)
        """Parameters the worker fills in, each with the class of its resource."""
        order = [parameter.name for parameter in parameters]
        places = [order.index(each) for each in self.resources]
        self._by_name = frozenset(order[min(places) :] if places else ())
        parameters = [each for each in parameters if each.name not in self.resources]
        self._signature = inspect.Signature(parameters)
        self._defaults = {p.name: p.default for p in parameters if p.default is not empty}
        self.names = tuple(parameter.name for parameter in parameters)
        self.required = tuple(
            each.name for each in parameters if each.default is empty and each.kind not in _VARIABLE
        )
        self._all_by_place = all(each.kind in _BY_PLACE for each in parameters)
        self._hints = hints
        for parameter in parameters:
            kind = hints.get(parameter.name, object)
            check_storable(f"argument {parameter.name} of {name}", kind)
        self._decoder = _decoder(name, parameters, hints)
        self._all_by_position = (
            self._all_by_place and not self._by_name and len(self.required) == len(self.names)
        )
        self._decoders: dict[frozenset[str], msgspec.json.Decoder[msgspec.Struct]] = {}

    def encode(self, args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
        names = self.names
        if self._all_by_place and not kwargs and len(self.required) <= len(args) <= len(names):
            # Python's own binding is general, and slow.
            return self._encode(dict(zip(names, args, strict=False)), self._decoder)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise self._misfit(kwargs, error) from None
        return self._encode(bound.arguments, self._decoder)

    def _misfit(self, kwargs: Mapping[str, object], error: TypeError) -> InvalidInput:
        """That arguments do not fit: rather which one is unknown than which one is missing."""
        problem = str(error)
        if unknown := next((each for each in kwargs if not self.takes(each)), None):
            takes, meant = ", ".join(self.names) or "nothing", checks.closest(unknown, self.names)
            hint = f"; did you mean {meant!r}?" if meant else ""
            problem = f"{unknown!r} is none of them: it takes {takes}{hint}"
        return InvalidInput(f"arguments of {self._name}", problem)

    def bind_some(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Arguments by parameter; others may follow."""
        try:
            return dict(self._signature.bind_partial(*args, **kwargs).arguments)
        except TypeError as error:
            raise InvalidInput(f"arguments of {self._name}", str(error)) from None

    def encode_some(self, values: Mapping[str, object]) -> bytes:
        """Encode the arguments known so far, each checked alone."""
        names = frozenset(values)
        if names not in self._decoders:
            parameters = [
                each for each in self._signature.parameters.values() if each.name in names
            ]
            self._decoders[names] = _decoder(self._name, parameters, self._hints)
        return self._encode(values, self._decoders[names])

    def _encode(
        self, values: Mapping[str, object], decoder: "msgspec.json.Decoder[msgspec.Struct]"
    ) -> bytes:
        """The arguments as they are stored. An error names the argument that cannot be stored."""
        try:
            payload = encode_value(f"arguments of {self._name}", values)
            decoder.decode(payload)
        except InvalidInput:
            for name, value in values.items():
                self._check_storable(f"argument {name} of {self._name}", value)
            raise
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._refusal(str(error)) from None
        return payload

    def _check_storable(self, field_name: str, value: object) -> None:
        node = _source_in(value)
        if node is None:
            encode_value(field_name, value)
        elif node is value:
            problem = f"is a node of a flow; write flow.add({self._name}, node)"
            raise InvalidInput(field_name, problem, node)
        else:
            problem = "has a node inside; a node can be a whole argument, one of `inputs`, or in a"
            raise InvalidInput(field_name, f"{problem} list of nodes", node)

    def rest(self) -> str | None:
        """The parameter that takes any number of arguments, as in `*pages`."""
        parameters = self._signature.parameters.values()
        variable = (each.name for each in parameters if each.kind is Parameter.VAR_POSITIONAL)
        return next(variable, None)

    @property
    def positional(self) -> tuple[str, ...]:
        """The parameters if all can be passed by position and their number is fixed, else none."""
        return self.names if self._all_by_place else ()

    def takes(self, name: str) -> bool:
        """Whether there is a parameter of this name, or one for any name."""
        kinds = (each.kind for each in self._signature.parameters.values())
        return name in self.names or Parameter.VAR_KEYWORD in kinds

    def takes_none(self, name: str) -> bool:
        """Whether a parameter may be omitted or be None."""
        if name not in self.required:
            return True
        try:
            decoder_of(_as_type(self._hints.get(name, object))).decode(b"null")
        except msgspec.ValidationError:
            return False
        return True

    def decode(self, payload: bytes) -> Bound:
        """Raises `InvalidInput` that names the argument."""
        if payload.startswith(checks.ENCODED):
            raise InvalidInput(f"payload of {self._name}", UNREADABLE)
        try:
            values = self._decoder.decode(payload or b"{}")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._refusal(str(error)) from None
        if self._all_by_position:
            return Bound(msgspec.structs.astuple(values), {})
        return self._bind(values)

    def _bind(self, values: msgspec.Struct) -> Bound:
        """By position as far as that goes: what follows a gap has to be named."""
        bound, positional, gap = Bound((), {}), list[object](), False
        for parameter in self._signature.parameters.values():
            value = getattr(values, parameter.name)
            gap = gap or parameter.name in self._by_name
            if value is msgspec.UNSET:
                gap = True
                continue
            match parameter.kind:
                case Parameter.VAR_POSITIONAL:
                    positional.extend(value)
                case Parameter.VAR_KEYWORD:
                    bound.kwargs.update(value)
                case kind if gap or kind is Parameter.KEYWORD_ONLY:
                    bound.kwargs[parameter.name] = value
                case _:
                    positional.append(value)
        return Bound(tuple(positional), bound.kwargs)

    def for_keys(self, payload: bytes, *, calls: bool) -> BoundArguments:
        """The arguments that are known, and the defaults of others; as a call if a key `calls`."""
        try:
            document = msgspec.json.decode(payload or b"{}", type=dict[str, object])
        except msgspec.DecodeError as error:
            raise self._refusal(str(error)) from None
        inputs = {"arguments", "inputs"}
        if document.keys() == inputs and not inputs & set(self.names):
            # The others are results of other nodes of a flow.
            document = msgspec.convert(document["arguments"], dict[str, object])
        by_name = self._defaults | document
        if not calls:
            return BoundArguments(by_name)
        try:
            bound = self._complete(self.decode(payload))
        except InvalidInput:
            return BoundArguments(by_name, all_known=False)
        return BoundArguments(by_name, bound.args, bound.kwargs)

    def _complete(self, bound: Bound) -> Bound:
        """With the defaults of omitted arguments, and by position as far as the function allows."""
        call = self._signature.bind(*bound.args, **bound.kwargs)
        call.apply_defaults()
        return Bound(call.args, call.kwargs)

    def _refusal(self, problem: str) -> InvalidInput:
        """Turn what msgspec says about the object into words about the function's arguments."""
        problem, where = checks.split_misfit(problem)
        field = f"argument {problem.partition('`')[2].rstrip('`')} of {self._name}"
        if "missing required field" in problem:
            return InvalidInput(field, "is missing")
        if "unknown field" in problem:
            takes = ", ".join(self.names) or "no arguments"
            return InvalidInput(field, f"is unknown; it takes {takes}")
        field = f"argument {where} of {self._name}" if where else f"payload of {self._name}"
        return InvalidInput(field, checks.uncapitalized(problem))


def _source_in(value: object, depth: int = SOURCE_DEPTH_MAX) -> Source | None:
    """The first node in a value, also inside its lists, sets and dicts."""
    if isinstance(value, Source):
        return value
    if depth == 0 or not isinstance(value, list | tuple | set | frozenset | dict):
        return None
    parts = value.values() if isinstance(value, dict) else value
    found = (_source_in(part, depth - 1) for part in parts)
    return next((each for each in found if each is not None), None)


def _decoder(
    name: str, parameters: Sequence[Parameter], hints: Mapping[str, object]
) -> "msgspec.json.Decoder[msgspec.Struct]":
    fields = [_field(parameter, hints.get(parameter.name, object)) for parameter in parameters]
    try:
        struct = msgspec.defstruct(
            f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True
        )
        return decoder_of(struct)
    except TypeError as error:
        raise InvalidInput(f"arguments of {name}", f"cannot be decoded: {error}") from error


def _field(
    parameter: Parameter, kind: object
) -> tuple[str, type] | tuple[str, type, msgspec.UnsetType]:
    """A member of the object; unset if the caller omitted the argument."""
    if parameter.kind is Parameter.VAR_POSITIONAL:
        kind = types.GenericAlias(list, (kind,))
    elif parameter.kind is Parameter.VAR_KEYWORD:
        kind = types.GenericAlias(dict, (str, kind))
    elif parameter.default is Parameter.empty:
        return (parameter.name, _as_type(kind))
    return (parameter.name, _as_type(operator.or_(kind, msgspec.UnsetType)), msgspec.UNSET)


def _as_type(kind: object) -> type:
    """Annotations as msgspec takes them: it accepts only types, Python accepts more."""
    annotation: type = getattr(_Untyped(kind), "value")  # noqa: B009
    return annotation


def _names_exist(function: Callable[..., object]) -> bool:
    """Whether every name in its annotations exists yet; its module may still be loading."""
    try:
        resolve_hints(function)
    except InvalidInput:
        return False
    return True


def resolve_hints(function: Callable[..., object]) -> dict[str, object]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise InvalidInput(
            f"annotations of {getattr(function, '__name__', function)}",
            f"{error}; move what they name to the top of the module",
        ) from error
    except TypeError:
        # Partial objects and builtins have no annotations.
        return {}


class ResultCodec:
    """Decodes what a function returned, by its annotation; without one, plain JSON."""

    def __init__(self, kind: object) -> None:
        self.decoder = msgspec.json.Decoder(kind, dec_hook=typed)


_PLAIN: Final = ResultCodec(object)


def result_codec(function: Callable[..., object]) -> ResultCodec:
    if "return" not in getattr(function, "__annotations__", ()):
        return _PLAIN
    kind = resolve_hints(function).get("return", object)
    name: str = getattr(function, "__name__", str(function))
    try:
        return _codec_of(kind, name)
    except TypeError:
        # The metadata of `Annotated` may not be hashable.
        return _codec_of.__wrapped__(kind, name)


# Cached by return type: a function defined inside a handler is a new object in every run.
@lru_cache(maxsize=1024)
def _codec_of(kind: object, function: str) -> ResultCodec:
    check_storable(f"the result of {function}", kind)
    return ResultCodec(kind)
