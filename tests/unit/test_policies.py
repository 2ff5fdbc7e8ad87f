"""Policies: checked in every form, stored as the shortest canonical JSON."""

import json
from collections.abc import Mapping
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.bounds import TIME_MS_MAX
from flowfabric.core.policies import (
    ASKED_PRIORITY_MAX,
    ASKED_PRIORITY_MIN,
    COUNT_MAX,
    DEFAULT_POLICY,
    DURATION_MAX_MS,
    POLICY_MAX_BYTES,
    ExecutionPolicy,
    ExponentialBackoff,
    FallbackPolicy,
    FallbackTier,
    FixedBackoff,
    RetryPolicy,
    RoutingRequirements,
    StreamPolicy,
    SuspensionPolicy,
    TimeoutPolicy,
    encode_policy,
    parse_policy,
    reclaim_limit,
)
from flowfabric.core.records import TimeoutBehavior
from flowfabric.errors import InvalidCapabilities, InvalidPolicyJson, PayloadTooLarge, Validation

BUDGET = "550e8400-e29b-41d4-a716-446655440000"

counts = st.integers(0, COUNT_MAX)
durations = st.integers(0, DURATION_MAX_MS)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
capabilities = st.frozensets(st.sampled_from(["cuda", "gpu", "torch>=2.3"])).map(
    lambda found: tuple(sorted(found))
)
exponentials = st.builds(
    ExponentialBackoff,
    initial_delay_ms=durations,
    max_delay_ms=durations,
    multiplier=st.floats(1, 1000),
    jitter=st.booleans(),
)
retry_policies = st.builds(
    RetryPolicy,
    max_retries=counts,
    backoff=exponentials | st.builds(FixedBackoff, delay_ms=durations),
    retryable_categories=st.lists(texts, max_size=3).map(tuple),
)
policies = st.builds(
    ExecutionPolicy,
    priority=st.integers(ASKED_PRIORITY_MIN, ASKED_PRIORITY_MAX),
    delay_until=st.none() | st.integers(0, TIME_MS_MAX),
    retry_policy=st.none() | retry_policies,
    timeout_policy=st.none()
    | st.builds(TimeoutPolicy, attempt_timeout_ms=st.none() | durations, max_reclaim_count=counts),
    suspension_policy=st.none() | st.builds(SuspensionPolicy, default_timeout_ms=durations),
    fallback_policy=st.none()
    | st.builds(
        FallbackPolicy,
        tiers=st.lists(st.builds(FallbackTier, provider=texts, model=texts), max_size=2).map(tuple),
    ),
    max_replay_count=counts,
    budget_ids=st.lists(st.uuids().map(str), max_size=2).map(tuple),
    routing_requirements=st.none()
    | st.builds(RoutingRequirements, required_capabilities=capabilities),
    stream_policy=st.none() | st.builds(StreamPolicy, retention_maxlen=counts),
)


def document(*path: str, value: object) -> dict[str, object]:
    """`{"a": {"b": value}}` for the path a, b."""
    for name in reversed(path):
        value = {name: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("nothing", [None, "", b"", "{}", b"{}", " {} ", {}, ExecutionPolicy()])
def test_saying_nothing_gives_the_default_policy(
    nothing: ExecutionPolicy | str | bytes | Mapping[str, object] | None,
) -> None:
    assert parse_policy(nothing) == DEFAULT_POLICY
    assert encode_policy(parse_policy(nothing)) == "{}"


def test_the_defaults_are() -> None:
    assert msgspec.structs.asdict(DEFAULT_POLICY) == {
        "priority": 0,
        "delay_until": None,
        "retry_policy": None,
        "timeout_policy": None,
        "max_reclaim_count": 100,
        "max_worker_deaths": 3,
        "suspension_policy": None,
        "fallback_policy": None,
        "max_replay_count": 10,
        "budget_ids": (),
        "quota_policies": (),
        "routing_requirements": None,
        "dedup_window_ms": None,
        "stream_policy": None,
        "retention_policy": None,
        "max_signals_per_execution": 10_000,
    }
    assert RetryPolicy() == RetryPolicy(
        max_retries=3,
        backoff=ExponentialBackoff(
            initial_delay_ms=1000, max_delay_ms=60_000, multiplier=2.0, jitter=False
        ),
        retryable_categories=(),
    )
    assert TimeoutPolicy() == TimeoutPolicy(
        attempt_timeout_ms=None, execution_deadline_ms=None, max_reclaim_count=None
    )
    assert SuspensionPolicy() == SuspensionPolicy(
        default_timeout_ms=None, timeout_behavior=TimeoutBehavior.FAIL
    )
    assert StreamPolicy() == StreamPolicy(
        durability_mode="buffered", retention_maxlen=10_000, retention_ttl_ms=None
    )


def test_a_retry_policy_gets_the_exponential_backoff_unless_it_names_another() -> None:
    assert parse_policy('{"retry_policy":{"max_retries":5}}') == ExecutionPolicy(
        retry_policy=RetryPolicy(max_retries=5, backoff=ExponentialBackoff())
    )
    fixed = '{"retry_policy":{"backoff":{"type":"fixed","delay_ms":10}}}'
    assert parse_policy(fixed) == ExecutionPolicy(
        retry_policy=RetryPolicy(backoff=FixedBackoff(delay_ms=10))
    )


def test_all_forms_of_a_policy_are_read_alike() -> None:
    policy = ExecutionPolicy(
        priority=5,
        budget_ids=(BUDGET,),
        routing_requirements=RoutingRequirements(required_capabilities=("cuda", "gpu")),
    )
    mapping: dict[str, object] = {
        "priority": 5,
        "budget_ids": [BUDGET],
        "routing_requirements": {"required_capabilities": ["gpu", "cuda", "gpu"]},
    }
    text = json.dumps(mapping)
    assert [parse_policy(form) for form in (policy, mapping, text, text.encode())] == [policy] * 4


def test_a_mapping_may_contain_policy_objects() -> None:
    retry = RetryPolicy(max_retries=1)
    assert parse_policy({"retry_policy": retry}) == ExecutionPolicy(retry_policy=retry)


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ("not json", "malformed"),
        ("[]", "malformed"),
        ("null", "malformed"),
        ("{", "malformed"),
        (b"\xff", "malformed"),
        ("\ud800", "malformed"),
        ("[" * 10_000, "malformed"),
        ({"priority": object()}, "malformed"),
        ({7: 1}, "malformed"),
        ('{"routing_requirements":[]}', "routing_requirements:not_object"),
        ('{"routing_requirements":"gpu"}', "routing_requirements:not_object"),
        ('{"routing_requirements":null}', "routing_requirements:not_object"),
        (
            '{"priorty":1}',
            "policy: object contains unknown field `priorty`; did you mean `priority`? There are "
            + ", ".join(ExecutionPolicy.__struct_fields__),
        ),
        (
            '{"retry_policy":{"max_retry":1}}',
            "retry_policy: object contains unknown field `max_retry`; did you mean `max_retries`? "
            "There are max_retries, backoff, retryable_categories",
        ),
        (
            '{"retry_policy":{"backoff":{"type":"linear"}}}',
            "retry_policy.backoff.type: invalid value 'linear'",
        ),
        (
            '{"retry_policy":{"backoff":{"type":"fixed"}}}',
            "retry_policy.backoff: object missing required field `delay_ms`",
        ),
        (
            '{"fallback_policy":{"tiers":[{"provider":"a","model":""}]}}',
            "fallback_policy.tiers[0].model: expected `str` of length >= 1",
        ),
        (
            '{"suspension_policy":{"timeout_behavior":"explode"}}',
            "suspension_policy.timeout_behavior: invalid enum value 'explode'",
        ),
        (
            f'{{"budget_ids":["{BUDGET}","nope"]}}',
            "budget_ids[1]: must be a lower-case hyphenated uuid (got 'nope')",
        ),
    ],
)
def test_a_malformed_policy_is_refused_with_this_detail(value: str | bytes, detail: str) -> None:
    with pytest.raises(InvalidPolicyJson) as caught:
        parse_policy(value)
    assert caught.value.detail == detail


@pytest.mark.parametrize(
    ("capabilities", "detail"),
    [
        ("null", "required:not_array"),
        ("{}", "required:not_array"),
        ('"gpu"', "required:not_array"),
        ("[1]", "required:non_string_token"),
        ('[""]', "required:empty_token"),
        ('["a,b"]', "required:comma_in_token"),
        ('["a b"]', "required:control_or_whitespace"),
        (json.dumps(["x"] * 257), "required:too_many_tokens"),
        (json.dumps(["x" * 4097]), "required:too_many_bytes"),
    ],
)
def test_malformed_capabilities_are_refused_with_this_detail(
    capabilities: str, detail: str
) -> None:
    with pytest.raises(InvalidCapabilities) as caught:
        parse_policy(f'{{"routing_requirements":{{"required_capabilities":{capabilities}}}}}')
    assert caught.value.detail == detail


@pytest.mark.parametrize(
    ("path", "least", "most"),
    [
        (("priority",), ASKED_PRIORITY_MIN, ASKED_PRIORITY_MAX),
        (("delay_until",), 0, TIME_MS_MAX),
        (("max_reclaim_count",), 0, COUNT_MAX),
        (("max_worker_deaths",), 0, COUNT_MAX),
        (("max_replay_count",), 0, COUNT_MAX),
        (("max_signals_per_execution",), 0, COUNT_MAX),
        (("dedup_window_ms",), 0, DURATION_MAX_MS),
        (("retry_policy", "max_retries"), 0, COUNT_MAX),
        (("timeout_policy", "attempt_timeout_ms"), 0, DURATION_MAX_MS),
        (("timeout_policy", "execution_deadline_ms"), 0, DURATION_MAX_MS),
        (("suspension_policy", "default_timeout_ms"), 0, DURATION_MAX_MS),
        (("stream_policy", "retention_maxlen"), 0, COUNT_MAX),
        (("stream_policy", "retention_ttl_ms"), 0, DURATION_MAX_MS),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else None,
)
def test_numbers_have_a_range(path: tuple[str, ...], least: int, most: int) -> None:
    for allowed in (least, most):
        policy = parse_policy(document(*path, value=allowed))
        assert parse_policy(encode_policy(policy)) == policy
    for refused in (least - 1, most + 1, 1.5, True, "1", 2**70):
        with pytest.raises(InvalidPolicyJson) as caught:
            parse_policy(document(*path, value=refused))
        assert caught.value.detail.startswith(".".join(path) + ": expected `int")


@pytest.mark.parametrize("multiplier", [0.99, -1, float("nan"), float("inf"), 1e300, "2", None])
def test_a_multiplier_is_finite_and_at_least_one(multiplier: object) -> None:
    backoff = {"type": "exponential", "multiplier": multiplier}
    with pytest.raises(InvalidPolicyJson, match=r"^retry_policy\.backoff\.multiplier: expected"):
        parse_policy({"retry_policy": {"backoff": backoff}})


def test_an_object_built_in_python_is_checked_as_well() -> None:
    with pytest.raises(InvalidPolicyJson, match=r"^retry_policy\.max_retries: expected `int` >= 0"):
        parse_policy(ExecutionPolicy(retry_policy=RetryPolicy(max_retries=-1)))
    with pytest.raises(InvalidCapabilities, match="comma_in_token"):
        parse_policy(
            ExecutionPolicy(
                routing_requirements=RoutingRequirements(required_capabilities=("a,b",))
            )
        )


def test_a_policy_text_has_a_limit() -> None:
    with pytest.raises(PayloadTooLarge, match=r"^policy: "):
        parse_policy(" " * (POLICY_MAX_BYTES + 1))


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (ExecutionPolicy(priority=7), '{"priority":7}'),
        (ExecutionPolicy(retry_policy=RetryPolicy()), '{"retry_policy":{}}'),
        (
            ExecutionPolicy(retry_policy=RetryPolicy(backoff=ExponentialBackoff(jitter=True))),
            '{"retry_policy":{"backoff":{"type":"exponential","jitter":true}}}',
        ),
        (
            ExecutionPolicy(
                fallback_policy=FallbackPolicy(tiers=(FallbackTier(provider="p", model="m"),))
            ),
            '{"fallback_policy":{"tiers":[{"provider":"p","model":"m"}]}}',
        ),
    ],
)
def test_a_policy_is_written_without_its_defaults(policy: ExecutionPolicy, text: str) -> None:
    assert encode_policy(policy) == text


@given(policy=policies)
def test_a_policy_survives_encoding_and_never_contains_null(policy: ExecutionPolicy) -> None:
    text = encode_policy(policy)
    assert parse_policy(text) == parse_policy(policy) == policy
    assert None not in leaves(json.loads(text))


@given(policy=policies)
def test_spelling_out_the_defaults_changes_nothing_about_the_text(policy: ExecutionPolicy) -> None:
    spelled_out = {
        name: value for name, value in msgspec.structs.asdict(policy).items() if value is not None
    }
    if policy.retry_policy is not None:
        spelled_out["retry_policy"] = msgspec.structs.asdict(policy.retry_policy)
    assert encode_policy(parse_policy(spelled_out)) == encode_policy(policy)


@given(text=st.text() | st.binary())
def test_no_text_raises_anything_but_our_own_errors(text: str | bytes) -> None:
    with suppress(Validation):
        parse_policy(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "backoff", "max_retries", "required_capabilities", "tiers"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(
    value=st.dictionaries(
        st.sampled_from(["retry_policy", "routing_requirements", "budget_ids", "priority", "x"]),
        json_values,
    )
)
def test_no_mapping_raises_anything_but_our_own_errors(value: dict[str, object]) -> None:
    with suppress(Validation):
        policy = parse_policy(value)
        assert parse_policy(encode_policy(policy)) == policy


def leaves(value: object) -> list[object]:
    match value:
        case dict():
            return [leaf for item in value.values() for leaf in leaves(item)]
        case list():
            return [leaf for item in value for leaf in leaves(item)]
        case _:
            return [value]


@pytest.mark.parametrize(
    ("policy", "limit"),
    [
        ({}, 100),
        ({"max_reclaim_count": 3}, 3),
        ({"timeout_policy": {"max_reclaim_count": 2}}, 2),
        ({"timeout_policy": {"attempt_timeout_ms": 5}, "max_reclaim_count": 3}, 3),
        ({"timeout_policy": {"max_reclaim_count": 0}, "max_reclaim_count": 3}, 0),
    ],
)
def test_one_limit_says_how_often_a_lost_lease_is_made_up_for(
    policy: dict[str, object], limit: int
) -> None:
    assert reclaim_limit(parse_policy(policy)) == limit
