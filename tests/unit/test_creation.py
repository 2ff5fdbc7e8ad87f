"""Checking a request to create, and what it becomes."""

import pytest
from msgspec import structs

from flowfabric.core.creation import (
    Checked,
    NewExecution,
    Terms,
    check_new,
    check_terms,
    fingerprint,
    like_new,
    new_execution,
    new_guard,
    new_tags,
    shares_terms,
)
from flowfabric.core.ids import ExecutionId, LaneId, Namespace, PartitionConfig
from flowfabric.core.records import ExecutionTag, IdempotencyGuard
from flowfabric.errors import InvalidInput
from tests.unit.lives import NOW_MS

DAY_MS = 24 * 60 * 60 * 1_000
UUID = "550e8400-e29b-41d4-a716-446655440000"


def checked(**fields: object) -> Checked:
    request = structs.replace(NewExecution(execution_kind="work"), **fields)
    return check_new(
        request,
        check_terms(request),
        request.input_payload,
        plain_payload=request.input_payload,
        new_uuid=UUID,
        partitions=PartitionConfig(),
    )


def test_everything_left_out_has_a_default() -> None:
    assert checked() == Checked(
        execution_id=ExecutionId(f"{{fp:24}}:{UUID}"),
        payload=b"",
        id_is_new=True,
        id_is_chosen=False,
        own_id=None,
        idempotency_key=None,
        strict=False,
        fingerprint=b"",
        parent_execution_id=None,
        terms=Terms(
            namespace=Namespace("default"),
            lane_id=LaneId("default"),
            execution_kind="work",
            required_capabilities=(),
            payload_encoding=None,
            priority=0,
            creator_identity="",
            idempotency_ttl_ms=None,
            tags={},
            policy="{}",
            attempt_timeout_ms=None,
            retention_ms=7 * DAY_MS,
            retention_failed_ms=30 * DAY_MS,
            delay_until_ms=None,
            delay_ms=None,
            deadline_at_ms=None,
            deadline_after_ms=None,
        ),
    )


def test_the_policy_supplies_what_the_request_leaves_out() -> None:
    policy = {
        "priority": 5,
        "delay_until": 7,
        "dedup_window_ms": 9,
        "timeout_policy": {"attempt_timeout_ms": 11, "execution_deadline_ms": 13},
        "stream_policy": {"retention_ttl_ms": 15},
        "routing_requirements": {"required_capabilities": ["b", "a", "b"]},
    }
    terms = checked(policy=policy, idempotency_key="k").terms
    assert (terms.priority, terms.delay_until_ms, terms.idempotency_ttl_ms) == (5, 7, 9)
    assert (terms.attempt_timeout_ms, terms.deadline_after_ms) == (11, 13)
    assert (terms.retention_ms, terms.required_capabilities) == (15, ("a", "b"))
    overruled = checked(policy=policy, priority=0, delay_until_ms=0).terms
    assert (overruled.priority, overruled.delay_until_ms) == (0, 0)


def test_a_fingerprint_is_of_lane_kind_and_payload() -> None:
    prints = {
        fingerprint(lane, kind, payload)
        for lane in ("a", "ab")
        for kind in ("c", "bc")
        for payload in (b"", b"d")
    }
    assert len(prints) == 8
    keyed = checked(idempotency_key="k", input_payload=b"x")
    assert keyed.fingerprint == fingerprint("default", "work", b"x")


def test_an_id_must_agree_with_its_partition() -> None:
    mine = f"{{fp:7}}:{UUID}"
    assert checked(execution_id=mine, partition_id=7).execution_id == mine
    for fields in (
        {"execution_id": mine, "partition_id": 8},
        {"execution_id": "own", "partition_id": 257},
        {"partition_id": 256},
        {"partition_id": "7"},
        {"execution_id": f"{{fp:256}}:{UUID}"},
    ):
        with pytest.raises(InvalidInput):
            checked(**fields)


@pytest.mark.parametrize("delay_until_ms", [None, NOW_MS + 1])
def test_what_shares_its_terms_is_what_it_would_be_by_itself(delay_until_ms: int | None) -> None:
    said: dict[str, object] = {"delay_until_ms": delay_until_ms, "priority": 3, "tags": {"a": "b"}}
    first = checked(**said, input_payload=b"1", execution_id="own", idempotency_key="key")
    other = structs.replace(
        checked(**said, input_payload=b"2", parent_execution_id=UUID), terms=first.terms
    )
    alike = new_execution(first, 3, NOW_MS)
    assert like_new(alike, first) == alike
    assert like_new(alike, other) == new_execution(other, 3, NOW_MS)


@pytest.mark.parametrize(
    ("delay_until_ms", "delayed"), [(None, False), (NOW_MS, False), (NOW_MS + 1, True)]
)
def test_only_a_time_to_come_delays(delay_until_ms: int | None, delayed: bool) -> None:
    execution = new_execution(checked(delay_until_ms=delay_until_ms), 3, NOW_MS)
    assert (execution.public_state, execution.ready) == (
        ("delayed", False) if delayed else ("waiting", True)
    )
    assert execution.delay_until_ms == (delay_until_ms if delayed else None)
    assert (execution.route_id, execution.created_at_ms) == (3, NOW_MS)


def test_tags_and_guards_belong_to_their_execution() -> None:
    request = checked(idempotency_key="k", tags={"a.b": "c", "cairn.instance_id": "i"})
    execution = new_execution(request, 1, NOW_MS)
    assert execution.instance_tag == "i"
    assert new_tags(execution, {"a.b": "c"}) == (
        ExecutionTag(
            partition_key=24,
            execution_id=execution.execution_id,
            tag_key="a.b",
            tag_value="c",
            created_at_ms=NOW_MS,
        ),
    )
    assert new_guard(request, NOW_MS) == IdempotencyGuard(
        namespace=Namespace("default"),
        idempotency_key="k",
        execution=execution.execution_id,
        fingerprint=request.fingerprint,
    )


@pytest.mark.parametrize(
    ("fields", "shared"),
    [
        ({}, True),
        ({"input_payload": b"1", "idempotency_key": "k", "execution_id": "own"}, True),
        ({"strict": True, "parent_execution_id": UUID, "partition_id": 1}, True),
        ({"execution_kind": "other"}, False),
        ({"lane_id": "other"}, False),
        ({"namespace": "other"}, False),
        ({"payload_encoding": "json"}, False),
        ({"priority": 1}, False),
        ({"priority": True}, False),
        ({"creator_identity": "ann"}, False),
        ({"tags": {"a": "b"}}, False),
        ({"tags": []}, False),
        ({"policy": {}}, False),
        ({"delay_until_ms": 1}, False),
        ({"delay_ms": 1}, False),
        ({"execution_deadline_at_ms": 1}, False),
    ],
)
def test_requests_that_differ_in_nothing_but_identity_and_payload_share_their_terms(
    fields: dict[str, object], shared: bool
) -> None:
    request = NewExecution(execution_kind="work", priority=0)
    other = structs.replace(request, **fields)
    assert shares_terms(other, request) is shared
    if shared:
        assert check_terms(other) == check_terms(request)


def test_every_field_of_a_request_is_of_its_terms_or_its_own() -> None:
    own = {"input_payload", "idempotency_key", "strict", "execution_id", "id_is_chosen"}
    own |= {"partition_id", "parent_execution_id"}
    names = {field.name for field in structs.fields(NewExecution)}
    request = NewExecution(execution_kind="work")
    changed = {
        name
        for name in names
        if not shares_terms(structs.replace(request, **{name: object()}), request)
    }
    assert changed == names - own
