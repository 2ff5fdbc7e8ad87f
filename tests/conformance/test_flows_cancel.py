"""Cancelling flows: every policy, every way to wait, repeats, and what members become."""

import msgspec
import pytest

from flowfabric import Engine
from flowfabric.core.flow_endings import NoWait, WaitIndefinite, WaitTimeout
from flowfabric.core.flow_records import CancellationPolicy, FlowState
from flowfabric.core.results import (
    CancellationScheduled,
    FlowAlreadyEnded,
    FlowCancelled,
    PartiallyCancelled,
)
from flowfabric.core.states import AttemptLifecycle
from flowfabric.engine.shell import Swept
from flowfabric.errors import (
    ExecutionNotEligible,
    FlowAlreadyTerminal,
    InvalidGraceMs,
    InvalidInput,
    NotFound,
    OperationTimeout,
)
from flowfabric.testing import SettableClock
from tests.conformance.graphs import Graph, broken, new_graph, new_id, overwrite
from tests.conformance.observed import cursor_of, events_since, execution_of, unchanged

ALL = CancellationPolicy.CANCEL_ALL
MANY = 230


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


async def a_bit_of_everything(graph: Graph) -> None:
    """a has ended, b is running, c waits for a worker, d for b and c."""
    await graph.build({"d": "b c", "a": ""})
    await graph.run("a")
    await graph.claimed("b")
    await graph.settle()


async def many(graph: Graph) -> list[str]:
    """More members than are cancelled in one transaction."""
    names = [f"m{number}" for number in range(MANY)]
    await graph.build(dict.fromkeys(names, ""))
    return names


async def test_cancel_all_ends_what_has_not_ended(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await a_bit_of_everything(graph)
    cursor = await cursor_of(engine)
    clock.advance(seconds=1)

    answer = await engine.cancel_flow(graph.flow_id, reason="too late")

    cancelled = tuple(sorted(graph[name] for name in "bcd"))
    assert answer == FlowCancelled(
        cancellation_policy=ALL, member_execution_ids=cancelled, member_count=3
    )
    assert await graph.states() == {
        "a": "completed",
        "b": "cancelled",
        "c": "cancelled",
        "d": "cancelled",
    }
    flow = await graph.flow()
    assert (flow.public_flow_state, flow.cancel_reason) == (FlowState.CANCELLED, "too late")
    assert (flow.cancelled_at_ms, flow.cancellation_policy) == (clock.now_ms(), ALL)
    events = await events_since(engine, cursor)
    assert [e.event_type for e in events if e.category == "completion"] == ["cancelled"] * 3
    assert [e.event_type for e in events if e.category == "lease"] == ["revoked"]
    (told,) = [e for e in events if e.category == "operator"]
    assert (told.event_type, told.flow_id) == ("flow_cancel_requested", graph.flow_id)
    assert msgspec.json.decode(told.details or "") == {
        "flow_id": graph.flow_id,
        "cancellation_policy": "cancel_all",
        "reason": "too late",
        "member_count": 3,
    }


async def test_members_are_cancelled_like_any_execution(engine: Engine, graph: Graph) -> None:
    await a_bit_of_everything(graph)
    await engine.cancel_flow(graph.flow_id)
    running = await execution_of(engine, graph["b"])
    assert (running.cancellation_reason, running.cancelled_by) == (
        "flow_cancelled",
        "operator_override",
    )
    assert running.lease_id is None
    (attempt,) = await engine.list_attempts(graph["b"])
    assert attempt.attempt_state is AttemptLifecycle.ENDED_CANCELLED


async def test_flow_only_leaves_members_to_finish(engine: Engine, graph: Graph) -> None:
    await graph.build({"b": "a"})

    answer = await engine.cancel_flow(graph.flow_id, cancellation_policy="cancel_flow_only")

    assert answer == FlowCancelled(
        cancellation_policy=CancellationPolicy.FLOW_ONLY, member_execution_ids=(), member_count=0
    )
    await graph.run("a")
    await graph.settle()
    await graph.run("b")
    await graph.settle()
    assert await graph.states() == {"a": "completed", "b": "completed"}
    assert (await graph.flow()).state is FlowState.CANCELLED


async def test_cancel_pending_spares_what_a_worker_has(engine: Engine, graph: Graph) -> None:
    await graph.build({"d": "b c", "a": ""})
    claimed = await graph.claimed("b")

    answer = await engine.cancel_flow(graph.flow_id, cancellation_policy="cancel_pending")

    assert isinstance(answer, FlowCancelled)
    assert answer.member_execution_ids == tuple(sorted(graph[name] for name in "acd"))
    await engine.complete(claimed.handle)
    await graph.settle()
    assert await graph.states() == {
        "a": "cancelled",
        "b": "completed",
        "c": "cancelled",
        "d": "cancelled",
    }


async def test_a_large_flow_is_closed_to_workers_at_once_and_cancelled_in_batches(
    engine: Engine, graph: Graph
) -> None:
    names = await many(graph)
    claimed = await graph.claimed(names[0])

    answer = await engine.cancel_flow(graph.flow_id, reason="stop")

    assert isinstance(answer, CancellationScheduled)
    assert answer.member_count == MANY
    assert await graph.claim() == {}
    assert (await engine.next_due())["member_cancel"] <= 0
    # What a worker still holds may end before its cancellation comes.
    await engine.complete(claimed.handle)
    await graph.settle()
    assert "member_cancel" not in await engine.next_due()
    summary = await engine.read_flow_summary(graph.flow_id)
    assert summary is not None
    assert (summary.members_cancelled, summary.members_completed) == (MANY - 1, 1)
    assert summary.public_flow_state is FlowState.CANCELLED
    assert (await execution_of(engine, graph[names[1]])).cancellation_reason == "stop"


async def test_a_member_about_to_be_cancelled_cannot_be_claimed_by_id(
    engine: Engine, graph: Graph
) -> None:
    names = await many(graph)
    await engine.cancel_flow(graph.flow_id)
    with pytest.raises(ExecutionNotEligible):
        await graph.claimed(names[5])


async def test_a_lost_lease_in_a_cancelled_flow_is_not_taken_over(
    engine: Engine, graph: Graph
) -> None:
    names = await many(graph)
    await graph.claimed(names[0])
    await engine.cancel_flow(graph.flow_id)
    await engine.revoke_lease(graph[names[0]], reason="worker gone")
    assert await graph.claim() == {}


async def test_cancel_pending_of_a_large_flow_spares_what_is_claimed_before_its_turn(
    engine: Engine, graph: Graph
) -> None:
    names = await many(graph)
    claimed = await graph.claimed(names[0])
    answer = await engine.cancel_flow(graph.flow_id, cancellation_policy="cancel_pending")
    assert isinstance(answer, CancellationScheduled)
    assert answer.member_count == MANY - 1
    await graph.settle()
    assert await graph.state(names[0]) == "active"
    await engine.complete(claimed.handle)
    await graph.settle()
    assert (await graph.flow()).state is FlowState.CANCELLED


async def test_waiting_until_the_members_are_cancelled(engine: Engine, graph: Graph) -> None:
    await many(graph)

    answer = await engine.cancel_flow(graph.flow_id, wait=WaitIndefinite())

    assert isinstance(answer, FlowCancelled)
    assert answer.member_count == MANY
    assert set((await graph.states()).values()) == {"cancelled"}
    again = await engine.cancel_flow(graph.flow_id, wait=WaitTimeout(500))
    assert isinstance(again, FlowCancelled)


async def test_waiting_has_an_end(engine: Engine, graph: Graph) -> None:
    await many(graph)
    with pytest.raises(OperationTimeout) as caught:
        await engine.cancel_flow(graph.flow_id, wait=WaitTimeout(0))
    assert (caught.value.op, caught.value.elapsed_ms) == ("cancel_flow", 0)
    await graph.settle()
    assert set((await graph.states()).values()) == {"cancelled"}


async def test_waiting_on_an_empty_flow_returns(engine: Engine, graph: Graph) -> None:
    answer = await engine.cancel_flow(graph.flow_id, wait=WaitTimeout(500))
    assert answer == FlowCancelled(cancellation_policy=ALL, member_execution_ids=(), member_count=0)
    assert (await graph.flow()).state is FlowState.CANCELLED


async def test_members_that_cannot_be_cancelled_are_named_and_hold_up_no_other(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"d": "a b", "c": ""})
    await broken(graph, "b")

    answer = await engine.cancel_flow(graph.flow_id, wait=WaitTimeout(5_000))

    assert answer == PartiallyCancelled(
        cancellation_policy=ALL,
        member_execution_ids=tuple(sorted(graph[name] for name in "acd")),
        failed_member_execution_ids=(graph["b"],),
    )
    assert await graph.states() == {
        "a": "cancelled",
        "b": "suspended",
        "c": "cancelled",
        "d": "cancelled",
    }
    flow = await graph.flow()
    assert (flow.public_flow_state, flow.state) == (FlowState.CANCELLED, FlowState.BLOCKED)


@pytest.mark.parametrize("policy", ["cancel_pending", "flow_only"])
async def test_members_a_policy_spares_cannot_fail(
    engine: Engine, graph: Graph, policy: str
) -> None:
    await graph.build({"a": "", "b": ""})
    await broken(graph, "b")
    answer = await engine.cancel_flow(
        graph.flow_id, cancellation_policy=policy, wait=WaitTimeout(5_000)
    )
    assert isinstance(answer, FlowCancelled)


async def test_one_broken_member_of_many_is_told_apart(engine: Engine, graph: Graph) -> None:
    names = await many(graph)
    await broken(graph, names[3])
    await broken(graph, names[MANY - 1])

    answer = await engine.cancel_flow(graph.flow_id, wait=WaitIndefinite())

    assert isinstance(answer, PartiallyCancelled)
    assert answer.failed_member_execution_ids == tuple(
        sorted([graph[names[3]], graph[names[MANY - 1]]])
    )
    assert len(answer.member_execution_ids) == MANY - 2
    summary = await engine.read_flow_summary(graph.flow_id)
    assert summary is not None
    assert (summary.members_cancelled, summary.members_suspended) == (MANY - 2, 2)


async def test_a_member_that_could_not_be_cancelled_is_tried_again(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"a": "", "b": ""})
    good = await broken(graph, "b")

    answer = await engine.cancel_flow(graph.flow_id)
    assert isinstance(answer, CancellationScheduled)
    first = await engine.cancel_pending_members()
    assert (first.acted, len(first.failures)) == (1, 1)
    assert first.failures[0].startswith(f"{graph['b']} was not cancelled: a row of suspension")
    assert (await engine.next_due())["member_cancel"] == 1_000
    assert await engine.cancel_pending_members() == Swept(acted=0, full=False)
    clock.advance(seconds=1)
    assert (await engine.cancel_pending_members()).acted == 0
    assert (await engine.next_due())["member_cancel"] == 2_000

    await overwrite(graph, good)
    clock.advance(seconds=2)
    assert (await engine.cancel_pending_members()).acted == 1
    await graph.settle()

    assert await graph.states() == {"a": "cancelled", "b": "cancelled"}
    assert (await graph.flow()).state is FlowState.CANCELLED


async def test_cancelling_again_tries_the_failed_members_at_once(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"a": "", "b": ""})
    good = await broken(graph, "b")
    await engine.cancel_flow(graph.flow_id, wait=WaitTimeout(5_000))
    again = await engine.cancel_flow(graph.flow_id, wait=WaitTimeout(5_000))
    assert isinstance(again, PartiallyCancelled)
    assert again.failed_member_execution_ids == (graph["b"],)

    await overwrite(graph, good)

    last = await engine.cancel_flow(graph.flow_id, wait=WaitTimeout(5_000))
    assert isinstance(last, FlowCancelled)
    assert await graph.states() == {"a": "cancelled", "b": "cancelled"}


@pytest.mark.parametrize("again", ["cancel_pending", "flow_only"])
async def test_cancelling_again_answers_what_was_decided_and_cancelled(
    engine: Engine, graph: Graph, clock: SettableClock, again: str
) -> None:
    await a_bit_of_everything(graph)
    await engine.cancel_execution(graph["c"], reason="before the flow")
    clock.advance(seconds=1)
    first = await engine.cancel_flow(
        graph.flow_id, reason="first", cancellation_policy="cancel_pending"
    )

    async with unchanged(engine):
        answer = await engine.cancel_flow(
            graph.flow_id, reason="second", cancellation_policy=again, wait=NoWait()
        )
        header = await engine.cancel_flow_header(
            graph.flow_id, reason="third", cancellation_policy=again
        )

    assert answer == first
    assert header == FlowAlreadyEnded(
        stored_cancellation_policy=CancellationPolicy.CANCEL_PENDING,
        stored_cancel_reason="first",
        member_execution_ids=(graph["d"],),
        member_count=1,
    )
    assert (await graph.flow()).cancel_reason == "first"


async def test_cancelling_a_large_flow_again_names_those_that_are_still_queued(
    engine: Engine, graph: Graph
) -> None:
    await many(graph)
    first = await engine.cancel_flow(graph.flow_id)
    assert (await engine.cancel_pending_members(limit=3)).acted == 3
    assert await engine.cancel_flow(graph.flow_id) == first
    await engine.cancel_pending_members(limit=MANY)
    again = await engine.cancel_flow(graph.flow_id)
    assert isinstance(again, FlowCancelled)
    assert (again.member_count, len(again.member_execution_ids)) == (MANY, MANY)


@pytest.mark.parametrize(
    ("before", "taken"), [("flow_only", "bcd"), ("cancel_pending", "b")], ids=str
)
async def test_a_wider_policy_cancels_the_rest(
    engine: Engine, graph: Graph, clock: SettableClock, before: str, taken: str
) -> None:
    await a_bit_of_everything(graph)
    await engine.cancel_flow(graph.flow_id, reason="first", cancellation_policy=before)
    closed_at_ms = clock.now_ms()
    clock.advance(seconds=1)

    answer = await engine.cancel_flow(graph.flow_id, reason="all of it")

    assert answer == FlowCancelled(
        cancellation_policy=ALL,
        member_execution_ids=tuple(sorted(graph[name] for name in taken)),
        member_count=len(taken),
    )
    assert (await execution_of(engine, graph["b"])).cancellation_reason == "all of it"
    await graph.settle()
    flow = await graph.flow()
    assert (flow.state, flow.cancellation_policy) == (FlowState.CANCELLED, ALL)
    assert (flow.cancelled_at_ms, flow.cancel_reason) == (closed_at_ms, "all of it")
    everything = tuple(sorted(graph[name] for name in "bcd"))
    again = await engine.cancel_flow(graph.flow_id)
    assert isinstance(again, FlowCancelled)
    assert (again.member_execution_ids, again.member_count) == (everything, 3)


async def test_a_large_flow_is_cancelled_further_in_batches(engine: Engine, graph: Graph) -> None:
    await many(graph)
    await engine.cancel_flow(graph.flow_id, cancellation_policy="flow_only")
    answer = await engine.cancel_flow(graph.flow_id)
    assert isinstance(answer, CancellationScheduled)
    assert answer.member_count == MANY
    await graph.settle()
    assert set((await graph.states()).values()) == {"cancelled"}
    assert (await graph.flow()).state is FlowState.CANCELLED


async def test_a_flow_that_had_completed_ends_anew_as_cancelled(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"a": ""})
    await graph.run("a")
    await graph.settle()
    assert (await graph.flow()).state is FlowState.COMPLETED
    await engine.cancel_flow(graph.flow_id)
    assert (await graph.flow()).state is FlowState.CANCELLED
    assert await graph.state("a") == "completed"


async def test_the_cascade_leaves_members_alone_that_are_being_cancelled(
    engine: Engine, graph: Graph
) -> None:
    names = [f"m{number}" for number in range(MANY)]
    await graph.build({"last": " ".join(names)})
    await engine.cancel_flow(graph.flow_id)
    assert (await engine.cancel_pending_members(limit=3)).acted == 3

    await engine.dispatch_completions()

    assert await graph.state("last") != "skipped"
    await graph.settle()
    assert await graph.state("last") == "cancelled"


async def test_acknowledging_takes_ended_members_off_the_queue(
    engine: Engine, graph: Graph
) -> None:
    names = await many(graph)
    await engine.cancel_flow(graph.flow_id)
    queued = (await engine.cancel_pending_members(limit=1)).acted
    states = await graph.states()
    member = graph[next(name for name in names if states[name] != "cancelled")]
    await engine.cancel_execution(member, reason="sooner")

    await engine.ack_cancel_member(new_id(), member)
    await engine.ack_cancel_member(graph.flow_id, member)
    await engine.ack_cancel_member(graph.flow_id, member)

    assert queued == 1
    left = (await engine.cancel_pending_members(limit=1_000)).acted
    assert left == len(names) - 2


async def test_acknowledging_does_not_keep_a_member_from_being_cancelled(
    engine: Engine, graph: Graph
) -> None:
    names = await many(graph)
    await engine.cancel_flow(graph.flow_id)
    for name in names:
        await engine.ack_cancel_member(graph.flow_id, graph[name])

    await graph.settle()

    assert set((await graph.states()).values()) == {"cancelled"}


async def test_members_of_a_cancelled_flow_are_not_replayed(engine: Engine, graph: Graph) -> None:
    await graph.build({"a": ""})
    await graph.run("a")
    await graph.settle()
    await engine.cancel_flow(graph.flow_id)
    async with unchanged(engine):
        with pytest.raises(FlowAlreadyTerminal):
            await engine.replay_execution(graph["a"])


@pytest.mark.parametrize(
    ("field", "policy", "wait"),
    [
        ("cancellation_policy", "cancel_some", NoWait()),
        ("wait", "cancel_all", "long"),
        ("wait.timeout_ms", "cancel_all", WaitTimeout(-1)),
        ("wait.timeout_ms", "cancel_all", WaitTimeout(300_001)),
    ],
)
async def test_a_malformed_cancellation_changes_nothing(
    engine: Engine, graph: Graph, field: str, policy: str, wait: NoWait
) -> None:
    await graph.build({"a": ""})
    async with unchanged(engine):
        with pytest.raises(InvalidInput) as caught:
            await engine.cancel_flow(graph.flow_id, cancellation_policy=policy, wait=wait)
    assert caught.value.field == field
    assert (await graph.flow()).public_flow_state is FlowState.OPEN


@pytest.mark.parametrize("grace_ms", [-1, 2**53, 1.5, "abc"])
async def test_a_malformed_grace_is_refused(engine: Engine, graph: Graph, grace_ms: int) -> None:
    with pytest.raises(InvalidGraceMs):
        await engine.cancel_flow_header(graph.flow_id, grace_ms=grace_ms)
    assert (await graph.flow()).public_flow_state is FlowState.OPEN


async def test_a_missing_flow_cannot_be_cancelled(engine: Engine) -> None:
    with pytest.raises(NotFound):
        await engine.cancel_flow(new_id())
    with pytest.raises(NotFound):
        await engine.cancel_flow_header(new_id())
