"""Capabilities: checked on entry, matched as plain sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.checks import CSV_MAX_BYTES, TOKENS_MAX, check_offered, check_required, missing
from flowfabric.errors import InvalidCapabilities

tokens = st.text(
    st.characters(codec="ascii", exclude_characters=",", min_codepoint=0x21), min_size=1
)
printable_tokens = tokens.filter(lambda token: "\x7f" not in token)
token_sets = st.frozensets(printable_tokens, max_size=20).filter(
    lambda found: len(",".join(found)) <= CSV_MAX_BYTES
)


def numbered(count: int) -> list[str]:
    return [f"t{number}" for number in range(count)]


def csv_of_bytes(size_bytes: int) -> list[str]:
    """Two tokens whose comma-separated form takes `size_bytes`."""
    return ["a" * 1000, "b" * (size_bytes - 1001)]


def test_required_capabilities_are_sorted_and_unique() -> None:
    assert check_required(["gpu", "cuda", "gpu"]) == ("cuda", "gpu")
    assert check_required([]) == ()


@pytest.mark.parametrize("token", ["torch>=2.3", "größe", "a;b", "{}", "\u2003"])
def test_tokens_are_opaque(token: str) -> None:
    assert check_required([token]) == (token,)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "not_array"),
        ("gpu", "not_array"),
        ({}, "not_array"),
        ({"gpu": True}, "not_array"),
        (7, "not_array"),
        (["gpu", 7], "non_string_token"),
        ([None], "non_string_token"),
        ([["gpu"]], "non_string_token"),
        (["gpu", ""], "empty_token"),
        (["a,b"], "comma_in_token"),
        (["a b"], "control_or_whitespace"),
        (["a\n"], "control_or_whitespace"),
        (["\0"], "control_or_whitespace"),
        (["a\x7f"], "control_or_whitespace"),
        (["a\ud800"], "control_or_whitespace"),
        (numbered(TOKENS_MAX + 1), "too_many_tokens"),
        (["same"] * (TOKENS_MAX + 1), "too_many_tokens"),
        (csv_of_bytes(CSV_MAX_BYTES + 1), "too_many_bytes"),
        (["ü" * 2049], "too_many_bytes"),
    ],
)
def test_malformed_lists_are_refused_on_both_sides(value: object, problem: str) -> None:
    with pytest.raises(InvalidCapabilities) as required:
        check_required(value)
    with pytest.raises(InvalidCapabilities) as offered:
        check_offered(value)
    assert required.value.detail == f"required:{problem}"
    assert offered.value.detail == f"worker:{problem}"


@pytest.mark.parametrize("token", ["a\u2003b", "a\xa0b", "a\x85b", "a\x9fb"])
def test_workers_may_not_offer_unicode_whitespace_or_control_characters(token: str) -> None:
    with pytest.raises(InvalidCapabilities, match=r"^worker:control_or_whitespace$"):
        check_offered([token])


@pytest.mark.parametrize("value", [numbered(TOKENS_MAX), csv_of_bytes(CSV_MAX_BYTES)])
def test_the_limits_themselves_are_allowed(value: list[str]) -> None:
    assert set(check_required(value)) == check_offered(value) == set(value)


@pytest.mark.parametrize(
    ("required", "offered", "lacking"),
    [
        pytest.param((), (), (), id="nothing is required of nobody"),
        pytest.param((), ("gpu",), (), id="nothing is required"),
        pytest.param(("gpu",), ("gpu",), (), id="exact"),
        pytest.param(("gpu",), ("cuda", "gpu"), (), id="superset"),
        pytest.param(("cuda", "gpu"), ("gpu",), ("cuda",), id="one is lacking"),
        pytest.param(("b", "a"), ("c",), ("a", "b"), id="no overlap"),
        pytest.param(("GPU",), ("gpu",), ("GPU",), id="case matters"),
        pytest.param(("gpu",), (), ("gpu",), id="an empty worker"),
    ],
)
def test_missing_capabilities_are_listed_in_order(
    required: tuple[str, ...], offered: tuple[str, ...], lacking: tuple[str, ...]
) -> None:
    assert missing(required, frozenset(offered)) == lacking


@given(required=token_sets, offered=token_sets)
def test_nothing_is_missing_exactly_when_required_is_a_subset(
    required: frozenset[str], offered: frozenset[str]
) -> None:
    lacking = missing(required, offered)
    assert (lacking == ()) is (required <= offered)
    assert lacking == tuple(sorted(lacking))
