"""From a task and its arguments to an execution.

Submissions of one process that happen at nearly the same time are committed
together. Each is checked before it joins the others, so that a bad one is
refused alone and before anything is written. A submission whose key or id is being decided
in another open transaction leaves its group and waits alone, without holding a
connection.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.batching import GroupCommit
from flowfabric.core import ids
from flowfabric.core.bounds import BATCH_MAX, KEY_WAIT_MS
from flowfabric.core.checks import JSON, check_key, check_priority, closest, split_misfit
from flowfabric.core.creation import Checked, NewExecution, Terms, with_limits
from flowfabric.core.gates import LimitUse
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policies import ExecutionPolicy, TimeoutPolicy, optional_duration_ms
from flowfabric.core.results import CreateResult
from flowfabric.engine.engine import Engine
from flowfabric.limits import BoundArguments, Limit, check_limits
from flowfabric.outages import everything_within, statements_within
from flowfabric.task import Call, Task, check_budgets

R = TypeVar("R")


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`SubmitOptions` once they are checked; durations are checked where they are used."""

    priority: int | None = None
    lane: str | None = None
    idempotency_key: str | None = None
    strict: bool = False
    tags: dict[str, str] = {}
    delay: object = None
    deadline: object = None
    execution_id: str | None = None
    budget: object = ()
    connection: object = None
    limits: object = ()

    @property
    def has_terms(self) -> bool:
        """Whether an option changes the execution itself, not just its id or key."""
        said = (self.priority, self.lane, self.delay, self.deadline)
        return bool(self.tags or self.budget) or any(each is not None for each in said)

    @property
    def names_one(self) -> bool:
        """Whether an id or a key is given."""
        return self.strict or not (self.idempotency_key is None and self.execution_id is None)


OPTION_NAMES: Final = frozenset(Options.__struct_fields__)
NO_OPTIONS: Final = Options()
NO_ARGUMENTS: Final = BoundArguments({})


def read_submission(
    what: object, args: Sequence[object], keywords: Mapping[str, object]
) -> tuple[Call[object], Options]:
    """Separate the task's arguments from the options of the submission."""
    if isinstance(what, Call):
        if args:
            raise errors.InvalidInput("submit", "a call has its arguments already")
        return what, check_options(keywords)
    if not isinstance(what, Task):
        raise errors.InvalidInput(
            "submit", "takes a task (what @app.task returns) or a call of one", what
        )
    if not keywords:
        return Call(what, what.arguments.encode(args, keywords)), NO_OPTIONS
    options = {name: value for name, value in keywords.items() if name in OPTION_NAMES}
    both = sorted(options.keys() & set(what.arguments.names))
    if both:
        raise errors.InvalidInput(
            both[0],
            f"is both an argument of {what.name} and an option of submit; write"
            f" submit({what.name}(…), …), with the argument inside and the option outside",
        )
    kwargs = {name: value for name, value in keywords.items() if name not in OPTION_NAMES}
    if unknown := next((each for each in kwargs if not what.arguments.takes(each)), None):
        takes = ", ".join(what.arguments.names) or "nothing"
        meant = closest(unknown, sorted({*what.arguments.names, *OPTION_NAMES}))
        raise errors.InvalidInput(
            unknown,
            f"is neither an argument of {what.name}, which takes {takes}, nor an option of submit"
            + (f"; did you mean {meant}?" if meant else ""),
        )
    return Call(what, what.arguments.encode(args, kwargs)), check_options(options)


def check_task(field: str, value: object) -> None:
    if not isinstance(value, Task):
        raise errors.InvalidInput(field, "takes the task itself, as @app.task returns it", value)


def check_call(field: str, value: object) -> None:
    if isinstance(value, Task):
        raise errors.InvalidInput(
            field, f"is a task without arguments; call it, as in {value.name}(…)", value
        )
    if not isinstance(value, Call):
        raise errors.InvalidInput(field, "must be a call of a task, such as publish(42)", value)


def check_calls(calls: Iterable[Call[R]]) -> list[Call[R]]:
    value: object = calls
    if isinstance(value, Call | Task | str) or not isinstance(value, Iterable):
        raise errors.InvalidInput(
            "calls", "must be a list, such as [publish(1), publish(2)]", value
        )
    checked = list(calls)
    if {Call}.issuperset(map(type, checked)):
        return checked
    for number, each in enumerate(checked):
        check_call(f"calls[{number}]", each)
    return checked


def check_options(keywords: Mapping[str, object]) -> Options:
    if not keywords:
        return NO_OPTIONS
    unknown = sorted(keywords.keys() - OPTION_NAMES)
    if unknown:
        known, meant = ", ".join(sorted(OPTION_NAMES)), closest(unknown[0], sorted(OPTION_NAMES))
        hint = f"did you mean {meant}? Those" if meant else "those"
        raise errors.InvalidInput(unknown[0], f"is not an option of submit; {hint} are {known}")
    if "limits" in keywords:
        keywords = {**keywords, "limits": check_limits(keywords["limits"])}
    try:
        options = msgspec.convert(dict(keywords), Options)
    except msgspec.ValidationError as error:
        problem, place = split_misfit(str(error))
        raise errors.InvalidInput(place or "options", problem) from None
    check_key(options.idempotency_key)
    return options


def check_names_one(calls: Sequence[Call[object]], options: Options) -> None:
    """Refuse one key or id for several calls: all but the first would never run."""
    if len(calls) <= 1:
        return
    for field, name in (
        ("idempotency_key", options.idempotency_key),
        ("execution_id", options.execution_id),
    ):
        if name is not None:
            raise errors.InvalidInput(
                field,
                f"belongs to one run, and there are {len(calls)} calls; submit each by itself,"
                " under a name of its own",
                name,
            )


def request_of(call: Call[object], options: Options, namespace: str) -> NewExecution:
    """The execution a call asks for."""
    shared = _shared_by_calls(call.task, options, namespace)
    return _own_of(shared, call, options, limits=limit_uses(call, options, namespace))


def _shared_by_calls(task: Task[..., object], options: Options, namespace: str) -> NewExecution:
    """What all calls of a task ask for: its terms, without limits."""
    _check_namespace(task, namespace)
    settings = task.settings
    return NewExecution(
        execution_kind=task.kind,
        lane_id=settings.lane if options.lane is None else options.lane,
        namespace=namespace,
        payload_encoding=JSON,
        priority=settings.priority
        if options.priority is None
        else check_priority(options.priority),
        tags=options.tags,
        policy=policy_of(task, options, namespace),
        delay_ms=optional_duration_ms("delay", options.delay),
    )


def _own_of(
    shared: NewExecution, call: Call[object], options: Options, **others: object
) -> NewExecution:
    """The request of one call, from what it shares with others."""
    return msgspec.structs.replace(
        shared,
        input_payload=call.payload,
        idempotency_key=options.idempotency_key,
        strict=options.strict,
        execution_id=options.execution_id,
        id_is_chosen=options.execution_id is not None,
        **others,
    )


def _check_namespace(task: Task[..., object], namespace: str) -> None:
    """Refuse a task of another namespace: workers here lack it, or have another of that name."""
    if task.namespaces and namespace not in task.namespaces:
        theirs = ", ".join(sorted(task.namespaces))
        raise errors.InvalidInput(
            "task",
            f"{task.name} is a task of namespace {theirs!r}, and this app is in {namespace!r};"
            " submit it through its own app, or let this one adopt that: app.adopt(other)",
        )


def limit_uses(call: Call[object], options: Options, namespace: str) -> tuple[LimitUse, ...]:
    """The limits of a submission, with the values of their keys."""
    limits = call.task.limits
    if options.limits:
        limits = check_limits([*limits, *check_limits(options.limits)])
    if not limits:
        return ()
    bound = _bound(call, limits)
    return tuple(each.use(namespace, bound) for each in limits)


def _bound(call: Call[object], limits: Sequence[Limit]) -> BoundArguments:
    """The arguments that limit keys are made from."""
    keys = [each.key for each in limits if each.key is not None]
    if not keys:
        return NO_ARGUMENTS
    return call.task.arguments.for_keys(call.payload, calls=any(map(callable, keys)))


def policy_of(task: Task[..., object], options: Options, namespace: str) -> ExecutionPolicy | None:
    deadline_ms = optional_duration_ms("deadline", options.deadline)
    policy = task.settings.policy
    budgets = {*task.settings.budgets, *check_budgets(options.budget)}
    if deadline_ms is None and not budgets:
        return policy
    own = msgspec.structs.replace(
        policy or ExecutionPolicy(),
        budget_ids=tuple(sorted(ids.named_budget_id(each, namespace) for each in budgets)),
    )
    if deadline_ms is None:
        return own
    timeout = own.timeout_policy or TimeoutPolicy()
    return msgspec.structs.replace(
        own, timeout_policy=msgspec.structs.replace(timeout, execution_deadline_ms=deadline_ms)
    )


TERMS_KEPT: Final = 1_024
"""How many tasks' checked terms are cached."""
LIMITED_TERMS_KEPT: Final = 16_384
"""The same, by the values of limit keys."""
SUBMIT_PATIENCE_S: Final = 10.0
"""How long one attempt to store submissions may take, including the wait for a connection."""
MANY_PATIENCE_S: Final = SUBMIT_PATIENCE_S + KEY_WAIT_MS / 1_000
"""How long a statement of `submit_many` may take; it may also have to wait for keys."""
GROUP_KEY_WAIT_MS: Final = 100
"""How long a group waits for a submission whose key is being decided elsewhere."""
ALONE_KEY_WAIT_MS: Final = 20
ASK_AGAIN_S: Final = 0.1
ASKING_MAX: Final = 2
"""How many such submissions may use a connection at once."""


class Submissions:
    """The submissions of one process, grouped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group = GroupCommit[Checked, CreateResult](self._create, patience_s=SUBMIT_PATIENCE_S)
        self._undecided: Counter[tuple[str, str]] = Counter()
        self._asking = asyncio.Semaphore(ASKING_MAX)
        self._limited_terms: dict[tuple[int, tuple[str, ...]], tuple[Terms, Terms]] = {}
        self._usual = lru_cache(maxsize=TERMS_KEPT)(self._check_shared)

    def check(
        self,
        calls: Sequence[Call[object]],
        options: Options,
        namespace: str,
        parent: ExecutionId | None = None,
    ) -> list[Checked]:
        """Check the calls; what they have in common is checked once."""
        check_names_one(calls, options)
        shared = {
            task: self._check_shared(task, namespace, options)
            if options.has_terms
            else self._usual(task, namespace)
            for task in {call.task: None for call in calls}
        }
        terms = [
            self._under_limits(shared[each.task][1], each, options, namespace)
            if each.task.limits or options.limits
            else shared[each.task][1]
            for each in calls
        ]
        if parent is None and not options.names_one:
            payloads = [each.payload for each in calls]
            return self._engine.check_payloads(list(zip(terms, payloads, strict=True)))
        return [
            self._engine.check_request(
                _own_of(shared[each.task][0], each, options, parent_execution_id=parent), own
            )
            for each, own in zip(calls, terms, strict=True)
        ]

    def _check_shared(
        self, task: Task[..., object], namespace: str, options: Options = NO_OPTIONS
    ) -> tuple[NewExecution, Terms]:
        """What calls of a task share, as a request and checked."""
        request = _shared_by_calls(task, options, namespace)
        return request, self._engine.check_terms(request)

    def _under_limits(
        self, terms: Terms, call: Call[object], options: Options, namespace: str
    ) -> Terms:
        """The terms of one call, shared by calls of a task that have the same limit keys."""
        if options.limits or options.has_terms:
            return with_limits(terms, limit_uses(call, options, namespace))
        limits = call.task.limits
        bound = _bound(call, limits)
        place = (id(terms), tuple([each.key_for(bound) for each in limits]))
        known = self._limited_terms.get(place)
        if known is None or known[0] is not terms:
            if len(self._limited_terms) >= LIMITED_TERMS_KEPT:
                self._limited_terms.clear()
            limited = with_limits(terms, [each.use(namespace, bound) for each in limits])
            known = self._limited_terms[place] = (terms, limited)
        return known[1]

    async def submit(self, checked: Checked) -> CreateResult:
        if self._undecided and _decided_by(checked) in self._undecided:
            return await self._wait_apart(checked)
        try:
            return await self._group.add(checked)
        except errors.KeyUndecided:
            return await self._wait_apart(checked)

    async def _wait_apart(self, checked: Checked) -> CreateResult:
        """Retry for as long as a submission may wait for its key."""
        deadline_s = time.monotonic() + KEY_WAIT_MS / 1_000
        key = _decided_by(checked)
        self._undecided[key] += 1
        try:
            while True:
                try:
                    async with self._asking:
                        with everything_within(SUBMIT_PATIENCE_S):
                            (result,) = await self._engine.create_checked(
                                [checked], key_wait_ms=ALONE_KEY_WAIT_MS
                            )
                except errors.KeyUndecided:
                    if time.monotonic() >= deadline_s:
                        raise
                    await asyncio.sleep(ASK_AGAIN_S)
                else:
                    return result
        finally:
            self._undecided[key] -= 1
            if not self._undecided[key]:
                del self._undecided[key]

    async def submit_many(self, checked: Sequence[Checked]) -> list[CreateResult]:
        """Store submissions in order, up to a thousand in one transaction."""
        results: list[CreateResult] = []
        for start in range(0, len(checked), BATCH_MAX):
            with statements_within(MANY_PATIENCE_S):
                results += await self._engine.create_checked(checked[start : start + BATCH_MAX])
        return results

    async def close(self) -> None:
        await self._group.close()

    async def _create(
        self, checked: Sequence[Checked]
    ) -> Sequence[CreateResult | errors.FlowFabricError]:
        with everything_within(SUBMIT_PATIENCE_S):
            return await self._engine.create_checked(checked, key_wait_ms=GROUP_KEY_WAIT_MS)


def _decided_by(checked: Checked) -> tuple[str, str]:
    """The key or id by which another submission may be the same."""
    return checked.terms.namespace, checked.idempotency_key or checked.execution_id


def child_id(engine: Engine, parent: ExecutionId, call: str) -> ExecutionId:
    """The id of the execution that one call of a handler submits: the same in every run.

    If the parent's id follows from a name, so does this one, and for the same owner.
    """
    digest = hashlib.sha256(f"{parent}\x00{call}".encode())
    mark = ids.mark_in(ids.uuid_of(parent))
    uuid = (
        ids.uuid4_from(digest.digest()[:16])
        if mark is None
        else ids.marked_uuid(mark, digest.hexdigest())
    )
    return ids.solo_execution_id(uuid, engine.deployment.partitions)
