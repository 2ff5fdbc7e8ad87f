"""Any sequence of operations keeps the engine's promises.

Hypothesis invents the sequences: several workers, kinds and capabilities, operators,
reconcilers, a clock that moves, and workers that come back late with handles they
should have thrown away. After every step the stored rows are compared with what they
were before and with `reference.py`.
"""

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from flowfabric import Engine, FlowFabricError
from flowfabric.core.creation import NewExecution
from flowfabric.core.decisions import NO_CHANGES, Timing
from flowfabric.core.events import Event
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId
from flowfabric.core.leases import decide_expire_lease, note_expired
from flowfabric.core.results import Claimed, ClaimGrant, Created, ResumeGrant
from flowfabric.core.states import FailureClass, LifecyclePhase, OwnershipState, PublicState
from flowfabric.engine.executions import Completion
from flowfabric.errors import NotFound
from tests.conformance.given import NO_GRANT
from tests.properties.actions import (
    Action,
    Claim,
    ClaimGranted,
    Create,
    Operate,
    Pass,
    Work,
    WorkMany,
    actions,
    creations,
)
from tests.properties.invariants import check_rows, check_step, holds
from tests.properties.reference import Answer, Known, Reference, view_of
from tests.properties.world import RETENTION_MS, Lives, World

T = TypeVar("T")

EXECUTIONS_MAX = 6
GRANT_TTL_MS = 100
SHRINKING_TAKES_S = 1_200

Sweep = tuple[Callable[[Engine], Awaitable[object]], Callable[[Reference], None]]
SWEEPS: dict[str, Sweep] = {
    "attempts": (Engine.expire_due_attempts, Reference.expire_attempts),
    "deadlines": (Engine.expire_due_deadlines, Reference.expire_deadlines),
    "delays": (Engine.promote_due_delays, Reference.promote),
    "grants": (Engine.return_due_grants, Reference.return_grants),
    "leases": (Engine.expire_due_leases, Reference.expire_leases),
    "retention": (Engine.trim_retention, Reference.trim),
}

Expectation = Callable[[Known], Answer]


class HolderExpectation(Protocol):
    def __call__(self, known: Known, handle: Handle) -> Answer: ...


async def outcome_of(call: Awaitable[object]) -> object:
    """What the call answers, or what it raises."""
    try:
        return await call
    except FlowFabricError as error:
        return error


def kind_of(outcome: object) -> Answer:
    return type(outcome) if isinstance(outcome, FlowFabricError) else type(outcome).__name__


def parts_of(key: str) -> tuple[str, int]:
    """The id of a grant and its end."""
    _, grant_id, expires_at_ms, _ = key.split(":")
    return grant_id, int(expires_at_ms)


def back(items: Sequence[T], which: int) -> T:
    """Counted from the newest, and around again."""
    return items[-1 - which % len(items)]


class Executions(RuleBasedStateMachine):
    def __init__(self, world: World) -> None:
        super().__init__()
        world.begin()
        self.world = world
        self.engine = world.engine
        self.reference = Reference(RETENTION_MS)
        self.reference.now_ms = world.now_ms
        self.ids: list[ExecutionId] = []
        self.handles: list[Handle] = []
        self.keys: dict[tuple[ExecutionId, str], str] = {}
        """The last key each worker was given, by execution."""
        self.lives: Lives = {}
        self.told: dict[ExecutionId, list[Event]] = {}

    @initialize(first=creations, second=creations)
    def begin(self, first: Create, second: Create) -> None:
        self.create(first)
        self.create(second)

    @rule(action=actions)
    def step(self, action: Action) -> None:
        match action:
            case Create() if len(self.ids) < EXECUTIONS_MAX:
                self.create(action)
            case Claim():
                self.claim(action)
            case ClaimGranted() if self.ids:
                self.claim_granted(action, back(self.ids, action.which))
            case Work() if self.handles:
                self.work(action, back(self.holders(late=action.late), action.which))
            case WorkMany() if self.handles:
                holders = self.holders(late=action.late)
                self.work_many(action, [back(holders, which) for which in action.which])
            case Operate() if self.ids:
                self.operate(action, back(self.targets(ended=action.on_ended), action.which))
            case Pass():
                self.pass_time(action)
            case _:
                pass

    @invariant()
    def at_most_one_worker_holds_each_execution(self) -> None:
        live = Counter(handle.execution_id for handle in self.handles if self.is_live(handle))
        held = [
            execution_id
            for execution_id, life in self.lives.items()
            if life.execution.ownership_state is OwnershipState.LEASED
            and (life.execution.lease_expires_at_ms or 0) > self.world.now_ms
        ]
        assert live == Counter(held)

    @invariant()
    def every_execution_has_something_that_moves_it(self) -> None:
        assert self.world.run(self.engine.audit()).complaints == ()

    def is_live(self, handle: Handle) -> bool:
        life = self.lives.get(handle.execution_id)
        return life is not None and holds(life, handle, self.world.now_ms)

    def holders(self, *, late: bool) -> list[Handle]:
        """Everybody who ever held a lease, or those without who may not know it yet."""
        running = {
            execution_id
            for execution_id, life in self.lives.items()
            if life.execution.lifecycle_phase is LifecyclePhase.ACTIVE
        }
        gone = [h for h in self.handles if h.execution_id in running and not self.is_live(h)]
        return gone if late and gone else self.handles

    def targets(self, *, ended: bool) -> list[ExecutionId]:
        """Every execution there ever was, or those that have ended."""
        over = [
            execution_id
            for execution_id, life in self.lives.items()
            if life.execution.lifecycle_phase is LifecyclePhase.TERMINAL
        ]
        return over if ended and over else self.ids

    # Doing something and looking at what it did

    def perform(self, call: Awaitable[object]) -> object:
        return self.world.run(outcome_of(call))

    def observe(self, *, replayed: ExecutionId | None = None) -> None:
        """Compare every row with its last version and with the reference."""
        before = self.lives
        self.lives, events = self.world.look(self.ids)
        self.told = defaultdict(list)
        for event in events:
            self.told[event.execution_id].append(event)
        for execution_id, life in self.lives.items():
            check_rows(life)
            old = before.get(execution_id)
            if old is None:
                continue
            check_step(old, life, self.told[execution_id], self.world.now_ms)
            if old.execution.lifecycle_phase is LifecyclePhase.TERMINAL:
                assert life == old or execution_id == replayed, "what has ended stays ended"
        views = {each: view_of(life) for each, life in self.lives.items()}
        assert views == {each: known.view for each, known in self.reference.known.items()}

    def expect(
        self, execution_id: ExecutionId, expectation: Expectation, missing: Answer = NotFound
    ) -> Answer:
        known = self.reference.known.get(execution_id)
        return missing if known is None else expectation(known)

    def about(
        self,
        execution_id: ExecutionId,
        call: Awaitable[object],
        expectation: Expectation,
        *,
        missing: Answer = NotFound,
        replay: bool = False,
    ) -> object:
        """Somebody does something to an execution."""
        expected = self.expect(execution_id, expectation, missing)
        outcome = self.perform(call)
        assert kind_of(outcome) == expected, outcome
        self.observe(replayed=execution_id if replay else None)
        return outcome

    def by_holder(
        self,
        handle: Handle,
        call: Awaitable[object],
        expectation: HolderExpectation,
        *,
        only_reports: bool = False,
    ) -> None:
        """A worker does. If its lease is gone, that is all that may be written down.

        Who only reports writes not even that.
        """
        before, live = self.lives.get(handle.execution_id), self.is_live(handle)
        self.about(handle.execution_id, call, partial(expectation, handle=handle))
        if before is None or live:
            return
        now_ms, held = self.world.now_ms, before.subject.execution.lease_id
        noticed = decide_expire_lease(before.subject, Timing(now_ms=now_ms)).changes
        if only_reports:
            noticed = NO_CHANGES
        elif noticed != NO_CHANGES and handle.lease_id == held:
            noticed = note_expired(before.subject, now_ms, died=False)
        assert self.lives[handle.execution_id] == before.after(noticed)
        assert self.told[handle.execution_id] == list(noticed.events)

    # Creating and claiming

    def create(self, action: Create) -> None:
        now_ms = self.world.now_ms
        delay_ms, deadline_ms = action.delay_ms, action.deadline_ms
        request = NewExecution(
            execution_kind=action.kind,
            lane_id=action.lane,
            priority=action.priority,
            policy=action.rules.policy(),
            delay_until_ms=None if delay_ms is None else now_ms + delay_ms,
            execution_deadline_at_ms=None if deadline_ms is None else now_ms + deadline_ms,
        )
        created = self.perform(self.engine.create_execution(request))
        assert isinstance(created, Created)
        self.ids.append(created.execution_id)
        lasts_ms = action.rules.deadline_after_ms if deadline_ms is None else deadline_ms
        self.reference.known[created.execution_id] = Known(
            execution_id=created.execution_id,
            lane=action.lane,
            kind=action.kind,
            rules=action.rules,
            priority=min(action.priority, 9_000),
            created_at_ms=now_ms,
            state=PublicState.DELAYED if delay_ms else PublicState.WAITING,
            delay_until_ms=now_ms + delay_ms if delay_ms else None,
            deadline_at_ms=None if lasts_ms is None else now_ms + lasts_ms,
        )
        self.observe()

    def claim(self, action: Claim) -> None:
        expected = self.reference.best(action.lanes, action.kinds, action.offered)[: action.limit]
        claimed = self.world.run(
            self.engine.claim_many(
                action.lanes,
                limit=action.limit,
                worker_id=action.worker,
                worker_instance_id=f"{action.worker}-1",
                capabilities=action.offered,
                kinds=action.kinds,
                lease_ttl_ms=action.ttl_ms,
            )
        )
        assert [each.execution_id for each in claimed] == expected
        for each in claimed:
            self.take(each, action.ttl_ms)
        self.observe()

    def claim_granted(self, action: ClaimGranted, execution_id: ExecutionId) -> None:
        if action.asks_first:
            self.grant(action.worker, ("cpu", "gpu"), execution_id)
        key = self.keys.get((execution_id, action.worker))
        granted = partial(self.reference.claim_granted, key=None if key is None else parts_of(key))
        known = self.reference.known.get(execution_id)
        held_before = None if known is None else known.lease
        expected = self.expect(execution_id, granted)
        outcome = self.perform(
            self.engine.claim_execution(
                execution_id,
                worker_id=action.worker,
                worker_instance_id=f"{action.worker}-1",
                grant_key=key or NO_GRANT,
                lease_ttl_ms=action.ttl_ms,
            )
        )
        assert kind_of(outcome) == expected, outcome
        if isinstance(outcome, Claimed) and outcome.lease_id != held_before:
            self.take(outcome, action.ttl_ms)
        self.observe()

    def take(self, claimed: Claimed, ttl_ms: int) -> None:
        self.reference.take(claimed, ttl_ms)
        self.handles.append(claimed.handle)

    # Working, with any handle ever given out

    def work(self, action: Work, handle: Handle) -> None:
        engine, reference = self.engine, self.reference
        until_ms = self.world.now_ms + action.wait_ms
        call: Awaitable[object]
        match action.verb:
            case "renew":
                self.by_holder(handle, engine.renew(handle), reference.renew)
            case "progress":
                call = engine.progress(handle, percent=50)
                self.by_holder(handle, call, reference.progress, only_reports=True)
            case "complete":
                self.by_holder(handle, engine.complete(handle, b"done"), reference.complete)
            case "fail":
                self.by_holder(handle, engine.fail(handle, "broken"), reference.fail)
            case "break":
                call = engine.fail(handle, "hopeless", failure_class=FailureClass.PERMANENT)
                self.by_holder(handle, call, partial(reference.fail, hopeless=True))
            case "delay":
                call = engine.delay(handle, until_ms)
                self.by_holder(handle, call, partial(reference.delay, until_ms=until_ms))
            case "wait_children":
                self.by_holder(handle, engine.wait_children(handle), reference.wait_children)
            case "give_up":
                self.by_holder(handle, engine.cancel(handle, "no use"), reference.give_up)
            case _:
                raise AssertionError(action)

    def work_many(self, action: WorkMany, handles: list[Handle]) -> None:
        call: Awaitable[object]
        if action.verb == "renew":
            expected = self.expect_each(handles, self.reference.renew)
            call = self.engine.renew_many(handles)
        else:
            expected = self.expect_each(handles, self.reference.complete)
            completions = [Completion(handle=handle, result=b"all") for handle in handles]
            call = self.engine.complete_many(completions)
        outcomes = self.perform(call)
        assert isinstance(outcomes, list)
        assert [kind_of(outcome) for outcome in outcomes] == expected
        self.observe()

    def expect_each(
        self, handles: Sequence[Handle], expectation: HolderExpectation
    ) -> list[Answer]:
        """Of a batch, those whose lease is live go first."""
        answers: dict[int, Answer] = {}
        for place in sorted(range(len(handles)), key=lambda p: not self.is_live(handles[p])):
            handle = handles[place]
            answers[place] = self.expect(handle.execution_id, partial(expectation, handle=handle))
        return [answers[place] for place in range(len(handles))]

    # People and time

    def operate(self, action: Operate, execution_id: ExecutionId) -> None:
        engine, reference = self.engine, self.reference
        call: Awaitable[object]
        match action.verb:
            case "cancel":
                call = engine.cancel_execution(execution_id, reason="unwanted")
                self.about(execution_id, call, reference.cancel)
            case "revoke":
                call = engine.revoke_lease(execution_id, reason="needed elsewhere")
                self.about(execution_id, call, reference.revoke)
            case "reprioritise":
                call = engine.change_priority(execution_id, 9_001)
                self.about(execution_id, call, partial(reference.change_priority, priority=9_001))
            case "replay":
                call = engine.replay_execution(execution_id, reason="again")
                self.about(execution_id, call, reference.replay, replay=True)
            case "look_at_lease":
                call = engine.mark_lease_expired_if_due(execution_id)
                self.about(execution_id, call, reference.look_at_lease, missing="AlreadySatisfied")
            case "look_at_attempt":
                call = engine.expire_execution(execution_id, "attempt_timeout")
                self.about(execution_id, call, reference.look_at_attempt)
            case "look_at_deadline":
                call = engine.expire_execution(execution_id, "execution_deadline")
                self.about(execution_id, call, reference.look_at_deadline)
            case "look_at_delay":
                self.about(
                    execution_id, engine.promote_delayed(execution_id), reference.look_at_delay
                )
            case "create_again":
                if execution_id in reference.known:
                    again = NewExecution(execution_kind="other", execution_id=execution_id)
                    call = engine.create_execution(again)
                    self.about(execution_id, call, lambda known: "Duplicate")
            case "grant":
                self.grant(action.worker, action.offered, execution_id)
            case _:
                raise AssertionError(action)

    def grant(self, worker: str, offered: tuple[str, ...], execution_id: ExecutionId) -> None:
        call = self.engine.issue_claim_grant(
            execution_id,
            worker_id=worker,
            worker_instance_id=f"{worker}-1",
            capabilities=offered,
            grant_ttl_ms=GRANT_TTL_MS,
        )
        expectation = partial(
            self.reference.issue_grant,
            worker=worker,
            offered=offered,
            ttl_ms=GRANT_TTL_MS,
        )
        outcome = self.about(execution_id, call, expectation)
        if isinstance(outcome, ClaimGrant | ResumeGrant):
            self.keys[execution_id, worker] = outcome.grant_key
            self.reference.known[execution_id].grant_id, _ = parts_of(outcome.grant_key)

    def pass_time(self, action: Pass) -> None:
        self.reference.now_ms = self.world.clock.advance(ms=action.step_ms)
        for name in action.sweeps:
            sweep, expected = SWEEPS[name]
            expected(self.reference)
            self.perform(sweep(self.engine))
            self.observe()


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_any_sequence_of_operations_keeps_the_promises(world: World) -> None:
    class InThisWorld(Executions):
        def __init__(self) -> None:
            super().__init__(world)

    run_state_machine_as_test(
        InThisWorld,
        settings=settings(
            max_examples=world.examples(120),
            stateful_step_count=50,
            deadline=None,
            phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
