"""What callers confined to a namespace may name, whichever route or operation they use.

A `ConfinedEngine` answers their requests. It has only the operations of the table, and first
searches the arguments, however deep, for names of executions, handles, flows, budgets, limits and
namespaces. What lies in another namespace is not found, as if it did not exist.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Final

from msgspec import Struct, structs

from flowfabric.core import budget_terms, creation, gates, handles, ids, policies, schedules
from flowfabric.core.budgets import BudgetScope
from flowfabric.core.ids import ExecutionId, Namespace
from flowfabric.engine import details, events, reads
from flowfabric.engine.engine import Engine
from flowfabric.errors import FlowFabricError, NotFound
from flowfabric.operations import OPERATIONS, Reach, RemoteOperation
from flowfabric.server.problems import refuse

KNOWN_MAX: Final = 100_000
"""Executions whose namespace a process remembers; it never changes."""
_SOME_MAY_MISS: Final = frozenset(
    {
        "find_outcomes",
        "read_outcomes",
        "own_ids",
        "required_capabilities",
        "cancel_executions",
        "replay_executions",
    }
)
"""Operations that answer for each execution separately."""
_EXECUTIONS: Final = ("execution_id", "execution_ids", "members", "from_node", "to_node")
"""How the names of arguments end that hold ids of executions."""
_HANDLES: Final = ("handle", "handles")


class Namespaces:
    """Remembers the namespaces of executions."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: OrderedDict[ExecutionId, Namespace] = OrderedDict()

    def remember(self, execution_ids: Iterable[ExecutionId], namespace: Namespace) -> None:
        for each in execution_ids:
            self._known[each] = namespace
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    async def of(self, execution_ids: Iterable[ExecutionId]) -> dict[ExecutionId, Namespace]:
        wanted = set(execution_ids)
        unknown = sorted(wanted - self._known.keys())
        for each, namespace in (await self._engine.find_namespaces(unknown)).items():
            self.remember([each], namespace)
        return {each: self._known[each] for each in wanted if each in self._known}


class Named:
    """What the arguments of a confined caller name."""

    def __init__(self, engine: Engine, owner: Namespace) -> None:
        self._engine = engine
        self._owner = owner
        self.executions: dict[str, ExecutionId] = {}
        """By what they were called."""
        self.handled: set[ExecutionId] = set()
        self.created: set[ExecutionId] = set()
        self.marks = {ids.mark_of("namespace", owner)}
        """Marks in uuids derived from names that the caller may choose."""
        self.flows: set[str] = set()
        self.limits: set[str] = set()
        self.budgets: set[str] = set()

    def confined(self, name: str, value: object) -> object:
        """The value, with the caller's namespace filled in wherever it has one."""
        if name == "namespace":
            return self._namespace(value)
        if isinstance(value, handles.Handle) or (isinstance(value, bytes) and name in _HANDLES):
            self._note_handle(value)
        elif isinstance(value, creation.NewExecution):
            return self._new(value)
        elif isinstance(value, Struct):
            self._note_terms(value)
            fields = value.__struct_fields__
            return structs.replace(
                value, **{each: self.confined(each, getattr(value, each)) for each in fields}
            )
        elif isinstance(value, list | tuple):
            return type(value)(self.confined(name, each) for each in value)
        elif isinstance(value, str):
            self._note(name, value)
        return value

    def _namespace(self, value: object, field: str = "namespace") -> Namespace:
        if value not in (None, self._owner):
            message = f"the token is for the namespace {self._owner!r} alone"
            raise refuse(403, "namespace_denied", message, field=field)
        return self._owner

    def _note_handle(self, handle: handles.Handle | bytes) -> None:
        # The engine refuses a forged handle whatever it names, so it reveals nothing.
        with suppress(FlowFabricError):
            self.handled.add(self._engine.shell.verify_handle(handle).execution_id)

    def _new(self, request: creation.NewExecution) -> creation.NewExecution:
        if request.execution_id is not None and ids.parse_own_id(request.execution_id) is None:
            self.created.add(self._engine.check_execution_id(request.execution_id))
        if request.parent_execution_id is not None:
            parent = self._note_execution(request.parent_execution_id)
            self.marks.add(ids.mark_in(ids.uuid_of(parent)) or "")
        self._note_policy(policies.parse_policy(request.policy))
        for each in request.gates:
            owners = self.budgets if each.owner_kind is gates.GateOwner.BUDGET else self.limits
            owners.add(each.owner_id)
        for use in request.limits:
            self._namespace(use.limit.namespace)
        return structs.replace(request, namespace=self._namespace(request.namespace))

    def _note_terms(self, value: Struct) -> None:
        """What a definition names in other ways than by the name of a field."""
        if isinstance(value, schedules.ScheduleDefinition):
            self._note_policy(policies.parse_policy(value.policy))
        elif (
            isinstance(value, budget_terms.BudgetDefinition)
            and value.scope_type == BudgetScope.NAMESPACE
        ):
            self._namespace(value.scope_id, "scope_id")

    def _note_policy(self, policy: policies.ExecutionPolicy) -> None:
        self.budgets.update(policy.budget_ids)
        self.limits.update(each.quota_policy_id for each in policy.quota_policies)

    def _note(self, name: str, value: str) -> None:
        if name.endswith(_EXECUTIONS):
            self._note_execution(value)
        elif name == "flow_id":
            self.flows.add(value)
            self.marks.add(ids.mark_of("flow", value))
        elif name == "budget_id":
            self.budgets.add(value)
        elif name == "quota_policy_id":
            self.limits.add(value)

    def _note_execution(self, text: str) -> ExecutionId:
        self.executions[text] = self._engine.check_execution_id(text)
        return self.executions[text]

    def may_create(self, uuid: str) -> bool:
        """Whether a uuid is derived from no name, or from one that the caller may choose."""
        mark = ids.mark_in(uuid)
        return mark is None or mark in self.marks


class Missing(Exception):
    """Something the request names does not exist, as far as the caller may know."""

    def __init__(self, error: NotFound) -> None:
        super().__init__(str(error))
        self.error = error


class ConfinedEngine(Engine):
    """The engine as callers of one namespace see it."""

    def __init__(self, engine: Engine, owner: Namespace, namespaces: Namespaces) -> None:
        vars(self).update(vars(engine))
        self._engine = engine
        self._owner = owner
        self._namespaces = namespaces

    async def perform(self, operation: RemoteOperation, arguments: Mapping[str, object]) -> object:
        """Call an operation of the table if it concerns only the caller's namespace."""
        if operation.reach is Reach.NOTHING:
            return await self._call(operation, arguments)
        if operation.reach is Reach.EVERYTHING:
            message = f"{operation.name} is about every namespace, and the token for one"
            raise refuse(403, "namespace_denied", message)
        named = Named(self._engine, self._owner)
        given = dict(arguments)
        if "namespace" in operation.names:
            given.setdefault("namespace", None)
        if operation.name == "find_executions":
            given.setdefault("matching", reads.EVERYTHING)
        if operation.name == "resolve_execution_id":
            given["strictly"] = True
        confined = {name: named.confined(name, value) for name, value in given.items()}
        try:
            missing = await self._check(operation, named)
        except Missing as missed:
            if operation.may_be_none:
                return None
            raise missed.error from None
        result = await self._without(operation, missing, confined)
        self._remember(operation, result)
        return result

    async def subscribe_events(
        self,
        *,
        after: str | int = events.FROM_NOW,
        namespace: str | None = None,
        category: str | None = None,
        execution_id: str | None = None,
        kind: str | None = None,
        tag: tuple[str, str] | None = None,
    ) -> events.Subscription[events.Told]:
        """Events of the caller's namespace."""
        named = Named(self._engine, self._owner)
        named.confined("namespace", namespace)
        named.confined("execution_id", execution_id)
        await self._check_executions(named, may_miss=False)
        return await self._engine.subscribe_events(
            after=after,
            namespace=self._owner,
            category=category,
            execution_id=execution_id,
            kind=kind,
            tag=tag,
        )

    # Whatever is named must exist in the caller's namespace

    async def _check(self, operation: RemoteOperation, named: Named) -> set[str]:
        """Raise unless the caller may see everything named; return executions to leave out."""
        for flow_id in sorted(named.flows):
            namespace = await self._engine.get_flow_namespace(flow_id)
            creates = operation.name == "create_flow" and named.may_create(flow_id)
            if namespace != self._owner and not (creates and namespace is None):
                raise Missing(NotFound("flow", flow_id))
        missing = await self._check_executions(named, may_miss=operation.name in _SOME_MAY_MISS)
        creates = operation.name == "create_budget"
        for budget_id in sorted(named.budgets):
            await self._check_budget(named, budget_id, creates=creates)
        await self._check_limits(named, creates=operation.name == "create_quota_policy")
        return missing

    async def _check_executions(self, named: Named, *, may_miss: bool) -> set[str]:
        asked = {*named.executions.values(), *named.handled, *named.created}
        found = await self._namespaces.of(asked)
        foreign = {each for each, namespace in found.items() if namespace != self._owner}
        new = named.created - found.keys()
        denied = {each for each in new if not named.may_create(ids.uuid_of(each))}
        for each in sorted(denied | foreign & (named.handled | named.created)):
            raise NotFound("execution", each)
        missing = {
            text
            for text, each in named.executions.items()
            if each in foreign or not (each in found or each in named.created)
        }
        if not may_miss:
            for text in sorted(missing):
                raise Missing(NotFound("execution", text))
        return missing

    async def _check_budget(self, named: Named, budget_id: str, *, creates: bool) -> None:
        """A budget may be named before it is created, but not by an arbitrary uuid."""
        uuid = ids.named_budget_id(budget_id, self._owner)
        try:
            found = await self._engine.get_budget_status(uuid, namespace=self._owner)
            known = found.namespace == self._owner
        except NotFound:
            known = (creates or ids.mark_in(uuid) is not None) and named.may_create(uuid)
        if not known:
            raise Missing(NotFound("budget", budget_id))

    async def _check_limits(self, named: Named, *, creates: bool) -> None:
        found = await self._engine.find_limit_namespaces(sorted(named.limits))
        for limit_id in sorted(named.limits):
            namespace = found.get(limit_id)
            new = creates and namespace is None and named.may_create(limit_id)
            if namespace != self._owner and not new:
                raise Missing(NotFound("limit", limit_id))

    # Calls

    async def _without(
        self, operation: RemoteOperation, missing: set[str], arguments: dict[str, object]
    ) -> object:
        """Ask about the executions that exist, and answer 'not found' for the others."""
        wanted = arguments.get("execution_ids")
        if not missing or not isinstance(wanted, list):
            return await self._call(operation, arguments)
        existing = [each for each in wanted if each not in missing]
        result = await self._call(operation, {**arguments, "execution_ids": existing})
        if isinstance(result, details.Found):
            gone = {self._engine.check_execution_id(each) for each in missing}
            return structs.replace(result, missing=result.missing | gone)
        if isinstance(result, list):
            answers = iter(result)
            return [
                NotFound("execution", each) if each in missing else next(answers) for each in wanted
            ]
        return result

    async def _call(self, operation: RemoteOperation, arguments: Mapping[str, object]) -> object:
        method = getattr(self._engine, operation.name)
        return await method(**arguments)

    def _remember(self, operation: RemoteOperation, result: object) -> None:
        if operation.name in ("claim_many", "find_claimed", "create_executions") and isinstance(
            result, list
        ):
            self._namespaces.remember([each.execution_id for each in result], self._owner)


def _confined(operation: RemoteOperation) -> Callable[..., Coroutine[object, object, object]]:
    async def call(self: ConfinedEngine, *args: object, **given: object) -> object:
        return await self.perform(operation, operation.bind(args, given))

    return call


def _denied(name: str) -> Callable[..., Coroutine[object, object, object]]:
    async def call(self: ConfinedEngine, *_args: object, **_given: object) -> object:
        raise refuse(403, "namespace_denied", f"{name} is about every namespace")

    return call


def _is_operation(name: str, method: object) -> bool:
    if name.startswith("_") or not callable(method):
        return False
    return inspect.iscoroutinefunction(inspect.unwrap(method))


for _name, _method in vars(Engine).items():
    if _name in OPERATIONS:
        setattr(ConfinedEngine, _name, _confined(OPERATIONS[_name]))
    elif _name not in vars(ConfinedEngine) and _is_operation(_name, _method):
        setattr(ConfinedEngine, _name, _denied(_name))
