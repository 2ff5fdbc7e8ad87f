"""Executions on their last chance: a worker has one of them in hand, and the others in a row."""

from uuid import uuid4

import pytest

from flowfabric.core.handles import Handle, HandleKind
from flowfabric.core.ids import (
    AttemptId,
    ExecutionId,
    LaneId,
    LeaseId,
    Namespace,
    WorkerInstanceId,
)
from flowfabric.core.results import Claimed
from flowfabric.core.states import AttemptType
from flowfabric.worker import leases
from flowfabric.worker.leases import (
    ALONE_S,
    SUSPECTS_APART_MS,
    SUSPECTS_BACK_MS_MAX,
    HeldLease,
    LastChances,
)


def do_nothing() -> None:
    """Whoever waits for its turn looks again by itself."""


def suspect() -> HeldLease:
    handle = Handle(
        backend_tag=2,
        kind=HandleKind.RECLAIMED,
        execution_id=ExecutionId(f"{{fp:7}}:{uuid4()}"),
        attempt_index=2,
        attempt_id=AttemptId(str(uuid4())),
        lease_id=LeaseId(str(uuid4())),
        lease_epoch=3,
        lease_ttl_ms=30_000,
        lane_id=LaneId("default"),
        worker_instance_id=WorkerInstanceId("worker-1"),
    )
    claimed = Claimed(
        handle=handle,
        attempt_type=AttemptType.RECLAIM,
        lease_expires_at_ms=30_000,
        namespace=Namespace("default"),
        execution_kind="work",
        priority=0,
        payload=b"",
        payload_encoding=None,
        flow_id=None,
        retry_count=0,
        created_at_ms=0,
        deadline_at_ms=None,
        attempt_deadline_ms=None,
        last_chance=True,
    )
    return HeldLease(claimed, 0.0)


def test_one_is_begun_and_the_next_once_it_has_ended() -> None:
    suspects, first, second = LastChances(do_nothing), suspect(), suspect()
    assert suspects.choose([first, second]) is first
    assert suspects.choose([second]) is None
    suspects.let_go(second)
    assert suspects.choose([second]) is None
    suspects.let_go(first)
    assert suspects.choose([second]) is second


def test_one_that_stores_a_step_makes_room_for_the_next() -> None:
    suspects, first, second = LastChances(do_nothing), suspect(), suspect()
    suspects.choose([first])
    stored = first.on_step
    assert stored is not None
    stored()
    assert suspects.choose([second]) is second


def test_nothing_begins_beside_it_until_it_has_got_on_or_a_while_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed: list[str] = []
    suspects, first = LastChances(lambda: freed.append("others may begin")), suspect()
    assert suspects.alone_s == 0
    suspects.choose([first])
    assert 0 < suspects.alone_s <= ALONE_S
    suspects.let_go(suspect())
    assert (freed, suspects.alone_s > 0) == ([], True)
    suspects.let_go(first)
    assert (freed, suspects.alone_s) == (["others may begin"], 0)
    monkeypatch.setattr(leases, "ALONE_S", 0.0)
    suspects.choose([first])
    assert suspects.alone_s == 0


def test_those_put_aside_come_back_one_after_the_other_and_soon() -> None:
    suspects = LastChances(do_nothing)
    back_ms = [suspects.back_in_ms() for _ in range(200)]
    assert back_ms[0] == SUSPECTS_APART_MS
    assert back_ms[:60] == sorted(back_ms[:60])
    assert max(back_ms) == SUSPECTS_BACK_MS_MAX
