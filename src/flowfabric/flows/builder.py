"""Building a flow: tasks, and whose results they need.

    flow = app.flow("nightly")
    pages = [flow.add(fetch, url) for url in urls]
    report = flow.add(summarise, join=pages, when=Quorum(3, cancel_remaining=True))
    run = await flow.start()
    print(await run.result(report))

Nothing is stored before `start`.
"""

import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, ParamSpec, TypedDict, TypeVar, Unpack, overload

import msgspec
from msgspec import structs

from flowfabric.core.bounds import BATCH_MAX, FLOW_MEMBERS_MAX, JOIN_EDGES_MAX
from flowfabric.core.checks import JSON, check_depth, check_int, check_name, check_tags
from flowfabric.core.creation import Checked, NewExecution, check_terms
from flowfabric.core.flow_joins import Dependency, Join
from flowfabric.core.ids import PartitionConfig, named_flow_id, parse_namespace
from flowfabric.core.policies import Duration
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow_building import FlowTerms
from flowfabric.engine.shell import new_uuid
from flowfabric.errors import IdempotencyConflict, InvalidInput, Validation
from flowfabric.flows.nodes import NAME_TAG, AllOf, AnyOf, Node, NodeNames, Quorum, When
from flowfabric.flows.run import FlowRun
from flowfabric.inputs import Composed, compose
from flowfabric.outages import statements_within
from flowfabric.run import Opened
from flowfabric.store.caller_connections import of_this_thread
from flowfabric.submission import MANY_PATIENCE_S, check_options, request_of
from flowfabric.task import Call, Task, check_budgets

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
T = TypeVar("T")

PLAN_TAG: Final = "flow.plan"
"""Holds a digest of a flow whose id the program chose."""

NodeList = Sequence[Node[object]]


class NodeOptions(TypedDict, total=False):
    """Options of one node; the defaults are the task's own settings."""

    name: str
    """Its name in graphs; the task's name by default."""
    when: When
    """How many of the nodes it waits for must succeed; `AllOf()` by default."""
    priority: int
    lane: str
    tags: Mapping[str, str]
    delay: Duration
    """Do not start before this long from the flow's start."""
    deadline: Duration
    """Expire unless it has ended this long from the flow's start."""
    budget: str | Sequence[str]
    """Do not start while this budget, or one of these, is used up; added to the flow's own."""


SUBMIT_NAMES: Final = frozenset({"priority", "lane", "tags", "delay", "deadline", "budget"})
OWN_NAMES: Final = frozenset(NodeOptions.__annotations__) | {"join", "inputs"}


@dataclass(frozen=True)
class Planned:
    """A node with everything needed to create it."""

    node: Node[object]
    request: NewExecution
    """Still without an id, for which the engine's partitions have to be known."""
    waits_for: Mapping[Node[object], bool]
    """The nodes it waits for, each with whether its result is passed on."""
    when: When


class Flow:
    """A flow that is being built."""

    def __init__(
        self,
        open_app: Callable[[], Awaitable[Opened]],
        kind: str,
        *,
        namespace: str,
        tags: Mapping[str, str] | None = None,
        flow_id: str | None = None,
        budget: str | Sequence[str] = (),
        meet: Callable[[Task[..., object]], None] | None = None,
    ) -> None:
        """`meet` is called with every task that becomes a node."""
        self.kind = check_name("flow", kind)
        self.namespace = parse_namespace(namespace)
        self.tags = check_tags(tags or {})
        self.budgets = check_budgets(budget)
        self._id_given = flow_id is not None
        self._called = named = new_uuid() if flow_id is None else flow_id
        self.flow_id = named_flow_id(named, self.namespace)
        self._open_app = open_app
        self._meet = meet
        self._plan: list[Planned] = []
        self._names = NodeNames()
        self._started = False

    def __repr__(self) -> str:
        return f"<flow {self.kind}, {len(self._plan)} nodes>"

    # One overload for each number of arguments: this lets each argument be a value or a node
    # that returns one.

    @overload
    def add(
        self, call: Call[R], /, *, join: NodeList = ..., **options: Unpack[NodeOptions]
    ) -> Node[R]: ...
    @overload
    def add(self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Node[R]: ...
    @overload
    def add(
        self,
        task: Callable[[], Call[R]],
        /,
        *,
        join: NodeList = ...,
        **options: Unpack[NodeOptions],
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: Callable[[list[T]], Call[R]],
        /,
        *,
        join: Sequence[Node[T]],
        **options: Unpack[NodeOptions],
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: Callable[[A], Call[R]],
        first: A | Node[A],
        /,
        *,
        join: NodeList = ...,
        **options: Unpack[NodeOptions],
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: Callable[[A, list[T]], Call[R]],
        first: A | Node[A],
        /,
        *,
        join: Sequence[Node[T]],
        **options: Unpack[NodeOptions],
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: Callable[[A, B], Call[R]],
        first: A | Node[A],
        second: B | Node[B],
        /,
        *,
        join: NodeList = ...,
        **options: Unpack[NodeOptions],
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: Callable[[A, B, list[T]], Call[R]],
        first: A | Node[A],
        second: B | Node[B],
        /,
        *,
        join: Sequence[Node[T]],
        **options: Unpack[NodeOptions],
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: Callable[[A, B, C], Call[R]],
        first: A | Node[A],
        second: B | Node[B],
        third: C | Node[C],
        /,
        *,
        join: NodeList = ...,
        **options: Unpack[NodeOptions],
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: Callable[[A, B, C, D], Call[R]],
        first: A | Node[A],
        second: B | Node[B],
        third: C | Node[C],
        fourth: D | Node[D],
        /,
        *,
        join: NodeList = ...,
        **options: Unpack[NodeOptions],
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: Task[..., R],
        /,
        *args: object,
        inputs: Mapping[str, Node[object]],
        join: NodeList = ...,
        **options: Unpack[NodeOptions],
    ) -> Node[R]: ...
    def add(self, what: object, /, *args: object, **named: object) -> Node[object]:
        """Add a task with its arguments, or a call of it; see `NodeOptions`.

        A node as an argument is waited for, and its result is the argument.
        `inputs` does the same by the names of parameters. The nodes of `join` are
        waited for, too; their results go as a list to the first required parameter
        without an argument, if there is one.
        """
        if self._started:
            raise InvalidInput("flow", "has been started; nodes are added before that")
        if len(self._plan) >= FLOW_MEMBERS_MAX:
            raise InvalidInput("flow", f"a flow has at most {FLOW_MEMBERS_MAX} nodes")
        task = _task_of(what, args, named)
        own = {name: value for name, value in named.items() if name in OWN_NAMES}
        when = _check_when(own.get("when"))
        join = None if "join" not in own else self._check_nodes("join", own["join"])
        composed = _compose(what, task, args, named, join, when)
        waits_for = dict.fromkeys(self._check_nodes("argument", composed.passed), True)
        for each in join or ():
            waits_for.setdefault(each, False)
        _check_join(when, "when" in own, len(waits_for))
        options = check_options({n: value for n, value in own.items() if n in SUBMIT_NAMES})
        if self.budgets:
            budgets = (*self.budgets, *check_budgets(options.budget))
            options = structs.replace(options, budget=budgets)
        name = self._name(own.get("name"), task)
        node = Node(self.flow_id, task, name, len(self._plan))
        if "name" in own:
            options = structs.replace(options, tags=options.tags | {NAME_TAG: name})
        request = request_of(Call(task, composed.payload), options, self.namespace)
        # Refuse now what can be refused without a database.
        check_terms(request)
        check_depth("input_payload", composed.payload)
        request = structs.replace(request, payload_encoding=composed.payload_encoding)
        self._plan.append(Planned(node, request, waits_for, when))
        if self._meet is not None:
            self._meet(task)
        return node

    def start(self, *, connection: object = None) -> Coroutine[object, object, FlowRun]:
        """Store the flow and let it run.

        All of it appears at once, up to a thousand nodes and ten thousand edges. A larger
        one appears part by part, each node after those it waits for. Starting again,
        after an error say, adds what is missing. With `connection=` all of it appears if and
        when that connection's transaction commits; without an event loop, call
        `asyncio.run(flow.start(connection=connection))`.
        """
        return self._start(of_this_thread(connection))

    async def _start(self, connection: object) -> FlowRun:
        if not self._plan:
            raise InvalidInput("flow", "has no nodes; add some first")
        opened = await self._open_app()
        engine = opened.engine
        partitions = engine.deployment.partitions
        checked: list[Checked] = []
        for planned in self._plan:
            try:
                member_id = planned.node.execution_id(partitions)
                request = structs.replace(planned.request, execution_id=member_id)
                checked.append(engine.check_request(request))
            except Validation as error:
                error.add_note(f"This is about the node {planned.node.name}.")
                raise
        self._started = True
        if connection is not None:
            if engine.store.writes_beside:
                # Submissions of the same kinds must not wait for this transaction.
                await engine.know_routes(checked)
            engine = engine.on(connection)
        with statements_within(MANY_PATIENCE_S):
            opens = FlowTerms(self.kind, self.namespace)
            if self._id_given or self.tags:
                # Tags, that of the plan too, are there before the first member runs.
                await engine.create_flow(
                    self.flow_id, flow_kind=self.kind, namespace=self.namespace
                )
                await self._tag(engine)
            for part in self._parts():
                joins = [_join(each, partitions) for each in part if each.waits_for]
                members = [checked[each.node.index] for each in part]
                await engine.add_dependencies(self.flow_id, joins, members=members, opens=opens)
        return FlowRun(opened, self.flow_id, called=self._called)

    async def _tag(self, engine: Engine) -> None:
        if self._id_given:
            plan = _digest(self._plan)
            known = await engine.get_flow_tag(self.flow_id, PLAN_TAG)
            if known is not None and known != plan:
                raise IdempotencyConflict(
                    f"flow {self._called} was started with other nodes or arguments; build it as it"
                    " was, or give it another flow_id"
                )
            if known is None:
                await engine.set_flow_tag(self.flow_id, PLAN_TAG, plan)
        for key, value in self.tags.items():
            await engine.set_flow_tag(self.flow_id, key, value)

    def _parts(self) -> Iterator[list[Planned]]:
        part: list[Planned] = []
        edges = 0
        for each in self._plan:
            edges += len(each.waits_for)
            if len(part) == BATCH_MAX or edges > JOIN_EDGES_MAX:
                yield part
                part, edges = [], len(each.waits_for)
            part.append(each)
        yield part

    def _check_nodes(self, field: str, nodes: object) -> list[Node[object]]:
        if isinstance(nodes, Node):
            raise InvalidInput(field, "must be a list of nodes; write [node] for one", nodes)
        if not isinstance(nodes, Sequence | Iterator) or isinstance(nodes, str):
            raise InvalidInput(field, "must be a list of nodes", nodes)
        checked: list[Node[object]] = []
        for each in nodes:
            if not isinstance(each, Node):
                raise InvalidInput(field, "must hold nodes, as flow.add returns them", each)
            if each.flow_id != self.flow_id:
                raise InvalidInput(
                    field,
                    "is a node of another flow; add its task to this flow, or submit this flow"
                    " when the other has ended",
                    each,
                )
            checked.append(each)
        return checked

    def _name(self, chosen: object, task: Task[..., object]) -> str:
        if chosen is None:
            return self._names.next_for(task.kind)
        name = check_name("name", chosen)
        if name in self._names.taken:
            raise InvalidInput("name", "is the name of another node of this flow", name)
        self._names.taken.add(name)
        return name


def _task_of(
    what: object, args: Sequence[object], named: Mapping[str, object]
) -> Task[..., object]:
    if isinstance(what, Call):
        unknown = sorted(named.keys() - OWN_NAMES)
        if args or unknown or "inputs" in named:
            raise InvalidInput(
                "add", "a call has its arguments already; give the task and all of them instead"
            )
        return what.task
    if not isinstance(what, Task):
        raise InvalidInput("add", "takes a task (what @app.task returns) or a call of one", what)
    unknown = sorted(n for n in named.keys() - OWN_NAMES if not what.arguments.takes(n))
    if unknown:
        takes = ", ".join(what.arguments.names) or "no arguments"
        raise InvalidInput(
            unknown[0],
            f"is neither an argument of {what.name}, which takes {takes}, nor an option of add;"
            f" those are {', '.join(sorted(OWN_NAMES))}",
        )
    both = sorted(named.keys() & OWN_NAMES & set(what.arguments.names))
    if both:
        raise InvalidInput(
            both[0],
            f"is both an argument of {what.name} and an option of add; give the argument"
            " by its place, or by `inputs`, or write add(task(…), …)",
        )
    return what


def _compose(
    what: object,
    task: Task[..., object],
    args: Sequence[object],
    named: Mapping[str, object],
    join: Sequence[Node[object]] | None,
    when: When,
) -> Composed:
    if isinstance(what, Call):
        return Composed(what.payload, JSON, ())
    kwargs = {name: value for name, value in named.items() if name not in OWN_NAMES}
    inputs = named.get("inputs", {})
    if not isinstance(inputs, Mapping):
        raise InvalidInput("inputs", "must map parameters to nodes", inputs)
    return compose(
        task, args, kwargs | dict(inputs), join, some_may_be_missing=not isinstance(when, AllOf)
    )


def _check_when(when: object) -> When:
    if when is None:
        return AllOf()
    if not isinstance(when, AllOf | AnyOf | Quorum):
        raise InvalidInput("when", "must be AllOf(), AnyOf() or Quorum(k)", when)
    return when


def _check_join(when: When, chosen: bool, count: int) -> None:
    if chosen and not isinstance(when, AllOf) and count == 0:
        raise InvalidInput(
            "when", "applies to nodes that wait for others; this one waits for none", when
        )
    if isinstance(when, Quorum) and check_int("when.k", when.k, 1, JOIN_EDGES_MAX) > count:
        raise InvalidInput("when.k", f"must be at most {count}, the nodes waited for", when.k)
    if count > JOIN_EDGES_MAX:
        raise InvalidInput("join", f"a node waits for at most {JOIN_EDGES_MAX} others", count)


def _digest(plan: Sequence[Planned]) -> str:
    """A digest of the flow's nodes, arguments and edges."""
    digest = hashlib.sha256()
    for each in plan:
        waits_for = [[node.index, passed] for node, passed in each.waits_for.items()]
        request = each.request
        parts = (request.execution_kind, request.input_payload, waits_for, each.when.policy)
        digest.update(msgspec.json.encode(parts))
    return digest.hexdigest()


def _join(planned: Planned, partitions: PartitionConfig) -> Join:
    return Join(
        downstream_execution_id=planned.node.execution_id(partitions),
        dependencies=[
            Dependency(
                upstream_execution_id=node.execution_id(partitions),
                data_passing_ref=node.name if passed else None,
                replaces_payload=False,
            )
            for node, passed in planned.waits_for.items()
        ],
        policy=planned.when.policy,
    )
