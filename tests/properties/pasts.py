"""Executions with a past: random histories that end in any state an execution can be in."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st
from msgspec import structs

from flowfabric import Engine, FlowFabricError
from flowfabric.core.checks import INSTANCE_TAG_KEY
from flowfabric.core.creation import NewExecution
from flowfabric.core.decisions import Changes, change
from flowfabric.core.gates import GateName
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import Execution
from flowfabric.core.results import Created
from flowfabric.engine.shell import execution_key
from flowfabric.store.base import Transaction
from flowfabric.testing import SettableClock

LANES = ("one", "two")
SHORT_MS = 1_000
LONG_MS = 1_000_000

# Chapters of a life. Steps that do not apply when their time comes are passed over.
CHAPTERS = (
    ("claim",),
    ("claim", "moment", "delay", "promote"),
    ("claim", "fail", "promote"),
    ("claim", "revoke"),
    ("claim", "expire"),
    ("claim", "renew"),
    ("claim", "overdue"),
    ("claim", "progress"),
    ("claim", "complete"),
    ("claim", "complete", "replay"),
    ("cancel", "replay"),
    ("claim", "wait_children"),
    ("claim", "hold", "fail", "promote"),
    ("claim", "hold", "expire"),
    ("claim", "hold"),
    ("hold",),
    ("claim",),
    ("reprioritise",),
    ("moment",),
    ("cancel",),
)


@dataclass(frozen=True)
class Past:
    """How an execution is created and what happens to it."""

    lane: str
    kind: str
    priority: int
    needs: tuple[str, ...]
    attempt_timeout_ms: int | None
    retention_ms: int | None
    instance_tag: str | None
    in_flow: bool
    lease_ttl_ms: int
    steps: tuple[str, ...]
    gates: tuple[GateName, ...] = ()

    def request(self) -> NewExecution:
        timeout_ms, retention_ms = self.attempt_timeout_ms, self.retention_ms
        policy: dict[str, object] = {
            "retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 0}},
            "routing_requirements": {"required_capabilities": list(self.needs)},
            "timeout_policy": {} if timeout_ms is None else {"attempt_timeout_ms": timeout_ms},
            "stream_policy": {} if retention_ms is None else {"retention_ttl_ms": retention_ms},
        }
        return NewExecution(
            execution_kind=self.kind,
            lane_id=self.lane,
            namespace=f"of-{self.lane}",
            priority=self.priority,
            input_payload=self.kind.encode(),
            policy=policy,
            gates=self.gates,
            tags={} if self.instance_tag is None else {INSTANCE_TAG_KEY: self.instance_tag},
        )


@dataclass
class Grown:
    """An execution that has its past behind it, and the handles it gave out on the way."""

    execution_id: ExecutionId
    past: Past
    handles: list[Handle] = field(default_factory=list)


def joined(chapters: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(step for chapter in chapters for step in chapter)


def pasts(kinds: tuple[str, ...]) -> st.SearchStrategy[list[Past]]:
    """Histories of up to one execution of each kind."""
    return st.lists(
        st.builds(
            Past,
            lane=st.sampled_from(LANES),
            kind=st.sampled_from(kinds),
            priority=st.sampled_from((0, 7)),
            needs=st.sampled_from(((), (), ("gpu",), ("cpu", "gpu"))),
            attempt_timeout_ms=st.sampled_from((None, 0, 150)),
            retention_ms=st.sampled_from((None, 0, 70)),
            instance_tag=st.sampled_from((None, "blue")),
            in_flow=st.booleans(),
            lease_ttl_ms=st.sampled_from((LONG_MS, SHORT_MS)),
            steps=st.lists(st.sampled_from(CHAPTERS), max_size=4).map(joined),
        ),
        unique_by=lambda past: past.kind,
        min_size=1,
        max_size=len(kinds),
    )


async def grow(engine: Engine, clock: SettableClock, past: Past) -> Grown:
    request = past.request()
    flow_id = str(uuid.uuid4())
    if past.in_flow:
        request = structs.replace(request, execution_id=engine.new_member_id(flow_id))
    created = await engine.create_execution(request)
    assert isinstance(created, Created)
    grown = Grown(created.execution_id, past)
    if past.in_flow:
        await engine.create_flow(flow_id, flow_kind="past", namespace=request.namespace)
        await engine.add_execution_to_flow(flow_id, grown.execution_id)
    for step in past.steps:
        try:
            await _take(step, engine, clock, grown)
        except FlowFabricError:
            continue
    return grown


async def _take(step: str, engine: Engine, clock: SettableClock, grown: Grown) -> None:
    execution_id = grown.execution_id
    match step:
        case "claim":
            await _claim(engine, grown)
        case "promote":
            await engine.promote_delayed(execution_id)
        case "revoke":
            await engine.revoke_lease(execution_id, reason="needed elsewhere")
        case "overdue":
            clock.advance(ms=SHORT_MS)
        case "expire":
            clock.advance(ms=SHORT_MS)
            await engine.mark_lease_expired_if_due(execution_id)
        case "replay":
            await engine.replay_execution(execution_id, reason="again", requested_by="ann")
        case "cancel":
            await engine.cancel_execution(execution_id, reason="unwanted")
        case "reprioritise":
            await engine.change_priority(execution_id, 3)
        case "moment":
            clock.advance(ms=7)
        case "grant":
            await engine.issue_claim_grant(
                execution_id, worker_id="past", worker_instance_id="past-1", grant_ttl_ms=SHORT_MS
            )
        case "hold":
            await _hold(engine, clock, execution_id)
        case _:
            if grown.handles:
                await _work(step, engine, clock, grown.handles[-1])


async def _hold(engine: Engine, clock: SettableClock, execution_id: ExecutionId) -> None:
    """An edge into it, as far as its own row tells, that passes something on later."""
    key = execution_key(execution_id)

    async def body(tx: Transaction) -> None:
        execution = (await tx.lock(Execution, [key]))[key]
        held = change(execution, clock.now_ms(), join_pending=True, next_input=b"later")
        await tx.save(Changes(updates=(held,)))

    await engine.store.transact(body)


async def _claim(engine: Engine, grown: Grown) -> None:
    claimed = await engine.claim(
        grown.past.lane,
        worker_id="past",
        worker_instance_id="past-1",
        capabilities=("cpu", "gpu"),
        kinds=[grown.past.kind],
        lease_ttl_ms=grown.past.lease_ttl_ms,
    )
    if claimed is not None:
        grown.handles.append(claimed.handle)


async def _work(step: str, engine: Engine, clock: SettableClock, handle: Handle) -> None:
    match step:
        case "fail":
            await engine.fail(handle, "broken")
        case "delay":
            await engine.delay(handle, clock.now_ms())
        case "wait_children":
            await engine.wait_children(handle)
        case "complete":
            await engine.complete(handle, b"done")
        case "progress":
            await engine.progress(handle, percent=50, message="halfway")
        case "renew":
            await engine.renew(handle)
        case _:
            raise AssertionError(step)
