"""From a task and its arguments to an execution.

Submissions of one process that happen at nearly the same time are committed
together. Each is checked before it joins the others, so that a bad one is
refused alone and before anything is written. One whose key or id is being decided
in somebody else's open transaction leaves the others and waits by itself, without
a connection.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from flowfabric.core.checks import check_priority
from flowfabric.core.creation import Checked, NewExecution, Terms
from flowfabric.core.ids import ExecutionId, solo_execution_id, uuid4_from
from flowfabric.core.limits import BATCH_MAX, KEY_WAIT_MS
from flowfabric.core.policies import ExecutionPolicy, TimeoutPolicy, optional_duration_ms
from flowfabric.core.results import CreateResult
from flowfabric.engine.engine import Engine
from flowfabric.errors import FlowFabricError, InvalidInput, KeyUndecided
from flowfabric.group_commit import GroupCommit
from flowfabric.patience import everything_within, statements_within
from flowfabric.task import JSON, OPTION_NAMES, Call, Task


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
    connection: object = None

    @property
    def has_terms(self) -> bool:
        """Whether something about the execution itself is said, beside its id and key."""
        said = (self.priority, self.lane, self.delay, self.deadline)
        return bool(self.tags) or any(each is not None for each in said)

    @property
    def names_one(self) -> bool:
        """Whether an id or a key is given."""
        return self.strict or not (self.idempotency_key is None and self.execution_id is None)


NO_OPTIONS: Final = Options()


def read_submission(
    what: object, args: Sequence[object], given: Mapping[str, object]
) -> tuple[Call[object], Options]:
    """Tell the task's own arguments from what is said about the submission."""
    if isinstance(what, Call):
        if args:
            raise InvalidInput("submit", "a call has its arguments already")
        return what, check_options(given)
    if not isinstance(what, Task):
        raise InvalidInput("submit", "takes what @app.task made, or a call of it", what)
    if not given:
        return Call(what, what.arguments.encode(args, given)), NO_OPTIONS
    options = {name: value for name, value in given.items() if name in OPTION_NAMES}
    both = sorted(options.keys() & set(what.arguments.names))
    if both:
        raise InvalidInput(
            both[0],
            f"is both an argument of {what.name} and an option of submit; write"
            f" submit({what.name}(…), …), with the argument inside and the option outside",
        )
    kwargs = {name: value for name, value in given.items() if name not in OPTION_NAMES}
    return Call(what, what.arguments.encode(args, kwargs)), check_options(options)


def check_options(given: Mapping[str, object]) -> Options:
    if not given:
        return NO_OPTIONS
    unknown = sorted(given.keys() - OPTION_NAMES)
    if unknown:
        known = ", ".join(sorted(OPTION_NAMES))
        raise InvalidInput(unknown[0], f"is not an option of submit; those are {known}")
    try:
        return msgspec.convert(dict(given), Options)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        raise InvalidInput(path.rstrip("`") or "options", problem) from None


def request_of(call: Call[object], options: Options, namespace: str) -> NewExecution:
    settings = call.task.settings
    return NewExecution(
        execution_kind=call.task.kind,
        lane_id=settings.lane if options.lane is None else options.lane,
        namespace=namespace,
        input_payload=call.payload,
        payload_encoding=JSON,
        priority=settings.priority
        if options.priority is None
        else check_priority(options.priority),
        idempotency_key=options.idempotency_key,
        strict=options.strict,
        tags=options.tags,
        policy=policy_of(call.task, options),
        delay_ms=optional_duration_ms("delay", options.delay),
        execution_id=options.execution_id,
        id_is_chosen=options.execution_id is not None,
    )


def policy_of(task: Task[..., object], options: Options) -> ExecutionPolicy | None:
    deadline_ms = optional_duration_ms("deadline", options.deadline)
    policy = task.settings.policy
    if deadline_ms is None:
        return policy
    own = policy or ExecutionPolicy()
    timeout = own.timeout_policy or TimeoutPolicy()
    return msgspec.structs.replace(
        own, timeout_policy=msgspec.structs.replace(timeout, execution_deadline_ms=deadline_ms)
    )


TERMS_KEPT: Final = 1_024
"""Of how many tasks it is remembered what their submissions have in common."""
SUBMIT_PATIENCE_S: Final = 10.0
"""How long a try to store submissions may take, the wait for a connection included."""
MANY_PATIENCE_S: Final = SUBMIT_PATIENCE_S + KEY_WAIT_MS / 1_000
"""How long a statement of `submit_many` may take, which may wait for keys as well."""
GROUP_KEY_WAIT_MS: Final = 100
"""How long the others of a group wait with one whose key is being decided elsewhere."""
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
        self._usual_terms = lru_cache(maxsize=TERMS_KEPT)(self._check_terms)

    def check(
        self,
        calls: Sequence[Call[object]],
        options: Options,
        namespace: str,
        parent: ExecutionId | None = None,
    ) -> list[Checked]:
        """What the calls ask for; what they have in common is checked once."""
        usual = self._usual_terms
        if options is NO_OPTIONS and parent is None:
            return self._engine.check_payloads(
                [(usual(each.task, namespace), each.payload) for each in calls]
            )
        terms = {
            task: self._check_terms(task, namespace, options)
            if options.has_terms
            else usual(task, namespace)
            for task in {call.task: None for call in calls}
        }
        if parent is None and not options.names_one:
            return self._engine.check_payloads([(terms[each.task], each.payload) for each in calls])
        request = NewExecution(
            execution_kind="",
            idempotency_key=options.idempotency_key,
            strict=options.strict,
            execution_id=options.execution_id,
            id_is_chosen=options.execution_id is not None,
            parent_execution_id=parent,
        )
        return [
            self._engine.check_request(
                msgspec.structs.replace(request, input_payload=each.payload), terms[each.task]
            )
            for each in calls
        ]

    def _check_terms(
        self, task: Task[..., object], namespace: str, options: Options = NO_OPTIONS
    ) -> Terms:
        return self._engine.check_terms(request_of(Call(task, b""), options, namespace))

    async def submit(self, checked: Checked) -> CreateResult:
        if self._undecided and _decided_by(checked) in self._undecided:
            return await self._wait_apart(checked)
        try:
            return await self._group.add(checked)
        except KeyUndecided:
            return await self._wait_apart(checked)

    async def _wait_apart(self, checked: Checked) -> CreateResult:
        """Ask again and again, for as long as a submission may wait for its key."""
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
                except KeyUndecided:
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
        """In order; up to a thousand at a time land in one transaction."""
        results: list[CreateResult] = []
        for start in range(0, len(checked), BATCH_MAX):
            with statements_within(MANY_PATIENCE_S):
                results += await self._engine.create_checked(checked[start : start + BATCH_MAX])
        return results

    async def close(self) -> None:
        await self._group.close()

    async def _create(self, checked: Sequence[Checked]) -> Sequence[CreateResult | FlowFabricError]:
        with everything_within(SUBMIT_PATIENCE_S):
            return await self._engine.create_checked(checked, key_wait_ms=GROUP_KEY_WAIT_MS)


def _decided_by(checked: Checked) -> tuple[str, str]:
    """What a submission may have in common with another."""
    return checked.terms.namespace, checked.idempotency_key or checked.execution_id


def child_id(engine: Engine, parent: ExecutionId, call: str) -> ExecutionId:
    """The id of what a handler submits by one of its calls: the same in every run."""
    digest = hashlib.sha256(f"{parent}\x00{call}".encode()).digest()
    return solo_execution_id(uuid4_from(digest[:16]), engine.deployment.partitions)
