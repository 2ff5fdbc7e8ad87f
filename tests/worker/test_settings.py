"""Lanes with weights, and settings that make no sense."""

from collections import Counter
from typing import TypedDict, Unpack

import pytest

from flowfabric import WorkerSettings
from flowfabric.core.policies import Duration
from flowfabric.core.workers import LaneShares, LaneWeights
from flowfabric.errors import FlowFabricError


def test_every_few_turns_each_lane_gets_its_share() -> None:
    shares = LaneShares({"urgent": 3, "default": 1})
    turns = [shares.next() for _ in range(400)]
    assert Counter(turns) == {"urgent": 300, "default": 100}
    assert all(Counter(turns[at : at + 4])["default"] == 1 for at in range(0, 400, 4))


def test_lanes_without_weights_are_alike() -> None:
    assert LaneShares(["a", "b"]).alike
    assert not LaneShares({"a": 2, "b": 1}).alike


class Given(TypedDict, total=False):
    lanes: LaneWeights
    concurrency: int
    prefetch: int
    lease_ttl: Duration
    worker_id: str
    drain_timeout: Duration


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (Given(lanes=[]), "lanes"),
        (Given(lanes={"a": 0}), "lanes['a']"),
        (Given(lanes=["\n"]), "lane_id"),
        (Given(concurrency=0), "concurrency"),
        (Given(prefetch=-1), "prefetch"),
        (Given(lease_ttl="1ms"), "lease_ttl"),
        (Given(worker_id="a b"), "worker_id"),
        (Given(drain_timeout="soon"), "drain_timeout"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(given: Given, field: str) -> None:
    with pytest.raises(FlowFabricError) as refusal:
        made(**given)
    assert str(refusal.value).startswith(field)


def made(**given: Unpack[Given]) -> WorkerSettings:
    return WorkerSettings(**given)


def test_a_worker_that_is_told_nothing_has_a_name_of_its_own() -> None:
    one, other = WorkerSettings(), WorkerSettings()
    assert one.worker_id == other.worker_id
    assert one.worker_instance_id != other.worker_instance_id


@pytest.mark.parametrize(
    ("given", "average_s", "ahead"),
    [
        (Given(concurrency=100), 0.5, 0),
        (Given(concurrency=100), 0.49, 25),
        (Given(concurrency=1_000), 0.05, 50),
        (Given(concurrency=100), 0.049, 100),
        (Given(concurrency=1), 0.0, 1),
        (Given(concurrency=100, prefetch=7), 0.5, 0),
        (Given(concurrency=100, prefetch=7), 0.49, 7),
        (Given(concurrency=100, prefetch=7), 0.0, 7),
        (Given(concurrency=100, prefetch=0), 0.0, 0),
    ],
)
def test_the_quicker_handlers_are_the_more_is_claimed_ahead(
    given: Given, average_s: float, ahead: int
) -> None:
    assert made(**given).ahead(average_s) == ahead
