"""`signal_waiting` delivers as the core decides, and leaves alone what it is not sure of."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, structs

from flowfabric.core.checks import INSTANCE_TAG_KEY
from flowfabric.core.conditions import (
    AllConditions,
    ByName,
    Condition,
    Count,
    CountKind,
    Single,
    Wildcard,
    referenced_waitpoint_keys,
)
from flowfabric.core.creation import NewExecution
from flowfabric.core.decisions import Changes, Subject, Timing, change
from flowfabric.core.handles import Handle
from flowfabric.core.ids import (
    ExecutionId,
    SignalId,
    WaitpointKey,
    partition_of,
    uuid_of,
)
from flowfabric.core.records import Execution, Record, SignalRecord, Suspension, Waitpoint, view_of
from flowfabric.core.resumption import ResumePolicy
from flowfabric.core.signals import (
    Mailbox,
    SignalAccepted,
    SignalFindings,
    SignalRequest,
    decide_deliver,
    sure_signal,
)
from flowfabric.core.waitpoints import Binding, FreshWaitpoint, UsePending
from flowfabric.engine import shell, topics
from flowfabric.store.base import Parameter, Transaction
from flowfabric.store.mapping import key_of
from tests.properties.test_differential import SHRINKING_TAKES_S, tuned
from tests.properties.world import World

MINE, THEIRS = "gate", "other"
CONDITIONS: Sequence[Condition] = (
    Single(MINE, ByName("go")),
    Single(MINE, Wildcard()),
    Single(MINE, ByName("stop")),
    Single(THEIRS, ByName("go")),
    Count(1, CountKind.DISTINCT_SIGNALS, waitpoints=(MINE,)),
    AllConditions((Single(MINE, ByName("go")),)),
    AllConditions((Single(MINE, ByName("go")), Single(THEIRS, ByName("go")))),
)


@dataclass(frozen=True)
class Story:
    """An execution, how it waits, and what befalls it before the signal."""

    condition: Condition
    lives: int
    in_flow: bool
    tag: str | None
    signals_max: int | None
    delay_ms: int | None
    made: tuple[str, ...]
    """Waitpoints made beforehand."""
    taken: bool
    """Whether the pause takes over two of one name, made beforehand too."""
    then: str


stories = st.builds(
    Story,
    condition=st.sampled_from((*CONDITIONS[:2], *CONDITIONS)),
    lives=st.sampled_from((1, 2)),
    in_flow=st.booleans(),
    tag=st.sampled_from((None, "blue")),
    signals_max=st.sampled_from((None, None, 0, 1)),
    delay_ms=st.sampled_from((None, None, 0, 50)),
    made=st.sampled_from(((), (), (THEIRS,), (MINE, THEIRS))),
    taken=st.sampled_from((False, False, False, True)),
    then=st.sampled_from(
        ("", "", "", "moment", "kept", "held", "resumed", "cancelled", "running", "many")
    ),
)
requests = st.builds(
    SignalRequest,
    signal_name=st.sampled_from(("go", "go", "stop", MINE)),
    new_id=st.builds(lambda: SignalId(shell.new_uuid())),
    source_type=st.sampled_from(("operator", "external")),
    source_identity=st.sampled_from(("", 'a "quoted" ü')),
    signal_category=st.sampled_from(("default", "approval")),
    payload=st.sampled_from((None, b"", b'{"by":"ada"}')),
    correlation_id=st.sampled_from(("", "c")),
    target_scope=st.sampled_from(("waitpoint", "execution")),
    created_at_ms=st.sampled_from((None, 7)),
    namespace=st.sampled_from((None, None, "mine", "another")),
)


class Rows(Struct, frozen=True, kw_only=True):
    """All that a signal can change."""

    subject: Subject
    signals: tuple[SignalRecord, ...]

    def after(self, changes: Changes) -> dict[object, Record]:
        found = self.by_key
        for record in (*changes.inserts, *changes.updates):
            found[type(record), key_of(record)] = record
        return found

    @property
    def by_key(self) -> dict[object, Record]:
        subject = self.subject
        rows: list[Record] = [subject.execution, *subject.waitpoints, *self.signals]
        if subject.suspension is not None:
            rows.append(subject.suspension)
        return {(type(each), key_of(each)): each for each in rows}


async def lived(world: World, story: Story) -> ExecutionId:
    engine = world.engine
    flow_id = str(uuid.uuid4())
    lane = f"lane-{flow_id}"
    most = story.signals_max
    request = NewExecution(
        execution_kind="work",
        lane_id=lane,
        namespace="mine",
        policy={} if most is None else {"max_signals_per_execution": most},
        tags={} if story.tag is None else {INSTANCE_TAG_KEY: story.tag},
    )
    if story.in_flow:
        request = structs.replace(request, execution_id=engine.new_member_id(flow_id))
    execution_id = (await engine.create_execution(request)).execution_id
    if story.in_flow:
        await engine.create_flow(flow_id, flow_kind="story", namespace="mine")
        await engine.add_execution_to_flow(flow_id, execution_id)
    handle = await claimed(world, lane)
    for _ in range(1, story.lives):
        await engine.revoke_lease(execution_id, reason="again")
        handle = await claimed(world, lane)
    for name in story.made:
        await engine.create_waitpoint(handle, name, expires_in_ms=1_000)
    if story.then != "running":
        await paused(world, story, handle)
    await befall(world, story, execution_id)
    return execution_id


async def claimed(world: World, lane: str) -> Handle:
    found = await world.engine.claim(lane, worker_id="w", worker_instance_id="w-1")
    assert found is not None
    return found.handle


async def paused(world: World, story: Story, handle: Handle) -> None:
    names = referenced_waitpoint_keys(story.condition)
    bound: list[Binding] = [FreshWaitpoint(waitpoint_key=name) for name in names]
    if story.taken:
        for name in (names[0], names[0]):
            made = await world.engine.create_waitpoint(handle, name, expires_in_ms=1_000)
            bound.append(UsePending(waitpoint_id=made.waitpoint_id))
        del bound[0]
    await world.engine.suspend(
        handle,
        resume_condition=story.condition,
        waitpoints=bound,
        resume_policy=ResumePolicy(resume_delay_ms=story.delay_ms),
    )


async def befall(world: World, story: Story, execution_id: ExecutionId) -> None:
    engine = world.engine
    match story.then:
        case "moment":
            world.clock.advance(ms=7)
        case "kept":
            await engine.deliver_operator_signal(execution_id, "later", signal_name="later")
        case "held":
            await altered(world, execution_id, {"join_pending": True, "next_input": b"later"})
        case "many":
            await altered(world, execution_id, {"signal_count": 10_000})
        case "resumed":
            await engine.resume_execution(execution_id)
        case "cancelled":
            await engine.cancel_execution(execution_id, reason="unwanted")
        case _:
            pass


async def altered(
    world: World, execution_id: ExecutionId, fields: dict[str, bool | int | bytes]
) -> None:
    key = shell.execution_key(execution_id)

    async def body(tx: Transaction) -> None:
        execution = (await tx.lock(Execution, [key]))[key]
        await tx.save(Changes(updates=(change(execution, world.now_ms, **fields),)))

    await world.engine.store.transact(body)


async def rows_of(
    world: World, execution_id: ExecutionId, known: Rows | None, request: SignalRequest
) -> Rows:
    at = shell.execution_key(execution_id)

    async def body(tx: Transaction) -> Rows:
        subject = (await shell.lock_subjects(tx, [execution_id]))[execution_id]
        if known is not None:
            # What it had open may be closed now.
            pauses = [known.subject.suspension] if known.subject.suspension else []
            found = await tx.get(Suspension, [key_of(each) for each in pauses])
            waitpoints = await tx.get(
                Waitpoint, [key_of(each) for each in known.subject.waitpoints]
            )
            subject = structs.replace(
                subject,
                suspension=next(iter(found.values()), None),
                waitpoints=tuple(waitpoints.values()),
            )
        signals = await tx.get(SignalRecord, [(*at, request.new_id)])
        return Rows(subject=subject, signals=tuple(signals.values()))

    return await world.engine.store.transact(body)


def check(world: World, story: Story, request: SignalRequest) -> None:
    world.begin()
    execution_id = world.run(lived(world, story))
    before = world.run(rows_of(world, execution_id, None, request))
    world.look([])
    sure = sure_signal(request, WaitpointKey(MINE))
    parameters: dict[str, Parameter] = {
        **sure,
        "partition_key": partition_of(execution_id),
        "execution_id": uuid_of(execution_id),
    }
    rows = world.run(world.engine.store.execute_alone("signal_waiting", **parameters))
    after = world.run(rows_of(world, execution_id, before, request))
    _, events = world.look([])
    decided = Changes()
    if rows:
        assert [each["topic"] for each in rows] == [
            topics.ready_topic(before.subject.execution.lane_id)
        ]
        decided = by_the_core(world, before, request)
    assert after.by_key == before.after(decided)
    assert events == list(decided.events)
    if is_plain(story, request):
        assert rows


def by_the_core(world: World, before: Rows, request: SignalRequest) -> Changes:
    (waitpoint,) = [
        each
        for each in before.subject.waitpoints
        if each.waitpoint_key == MINE and each.suspension_id is not None
    ]
    assert request.namespace in (None, before.subject.execution.namespace)
    decision = decide_deliver(
        before.subject,
        request,
        SignalFindings(mailbox=view_of(Mailbox, waitpoint), waitpoint=waitpoint),
        Timing(now_ms=world.now_ms),
    )
    assert isinstance(decision.answer, SignalAccepted)
    assert decision.answer.resumed
    return decision.changes


def is_plain(story: Story, request: SignalRequest) -> bool:
    """Whether it is what the statement is for."""
    return (
        story.condition in CONDITIONS[:2]
        and request.signal_name == "go"
        and request.namespace in (None, "mine")
        and story.then in ("", "moment", "kept")
        and (story.signals_max, story.delay_ms, story.taken) == (None, None, False)
    )


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_a_signal_by_statement_is_what_the_core_decides(world: World) -> None:
    @tuned(world, 400)
    @given(story=stories, request=requests)
    def agrees(story: Story, request: SignalRequest) -> None:
        check(world, story, request)

    agrees()
