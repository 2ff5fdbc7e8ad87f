"""Checks of plain values."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, recursive, text

from flowfabric.core.bounds import PAYLOAD_DEPTH_MAX
from flowfabric.core.checks import check_depth, split_misfit
from flowfabric.errors import InvalidInput
from flowfabric.json_values import encode_value


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * depth + closing * depth).encode()


@pytest.mark.parametrize("depth", [1, PAYLOAD_DEPTH_MAX])
def test_json_may_be_nested_up_to_the_limit(depth: int) -> None:
    check_depth("payload", nested(depth))
    check_depth("payload", nested(depth, '{"a":', "}").replace(b":}", b":1}"))


@pytest.mark.parametrize(
    "document",
    [
        nested(PAYLOAD_DEPTH_MAX + 1),
        nested(100_000),
        nested(PAYLOAD_DEPTH_MAX, '{"a":[1,{}],"b":', "}").replace(b":}", b":1}"),
        b"[" + nested(PAYLOAD_DEPTH_MAX) * 3 + b"]",
    ],
    ids=["one more", "absurd", "objects with lists", "beside others"],
)
def test_json_nested_deeper_is_refused_by_the_name_of_its_field(document: bytes) -> None:
    with pytest.raises(InvalidInput, match="nested at most 128 deep") as refusal:
        check_depth("payload", document)

    assert refusal.value.field == "payload"


def test_width_is_no_depth() -> None:
    check_depth("payload", json.dumps([[[]] * 10_000, {"a": {}}]).encode())


def test_brackets_in_text_do_not_count() -> None:
    check_depth("payload", json.dumps("[" * 1_000 + '\\"' + "]" * 1_000).encode())


def test_a_value_is_refused_before_it_is_stored() -> None:
    value: object = 1
    for _ in range(PAYLOAD_DEPTH_MAX + 1):
        value = [value]

    with pytest.raises(InvalidInput, match="nested at most"):
        encode_value("the result of work", value)


@given(recursive(integers() | text(), lambda inner: lists(inner, max_size=3), max_leaves=400))
def test_the_depth_is_that_of_the_document(value: object) -> None:
    def depth(of: object) -> int:
        return 1 + max(map(depth, of), default=0) if isinstance(of, list) else 0

    wrapped, count = value, PAYLOAD_DEPTH_MAX - depth(value)
    for _ in range(count):
        wrapped = [wrapped]
    check_depth("payload", json.dumps(wrapped).encode())
    if count >= 0:
        with pytest.raises(InvalidInput):
            check_depth("payload", json.dumps([wrapped]).encode())


class Box(msgspec.Struct):
    sizes: dict[int, int] = {}


@pytest.mark.parametrize(
    ("kind", "document", "split"),
    [
        (int, b'"x"', ("Expected `int`, got `str`", "")),
        (Box, b'{"sizes":3}', ("Expected `object`, got `int`", "sizes")),
        (Box, b'{"sizes":{"1":"x"}}', ("Expected `int`, got `str`", "sizes[...]")),
        (
            Box,
            b'{"sizes":{"x":1}}',
            ("has a key that does not fit: expected `int`, got `str`", "sizes"),
        ),
        (
            dict[int, int],
            b'{"x":1}',
            ("has a key that does not fit: expected `int`, got `str`", ""),
        ),
        (list[int], b'["x"]', ("Expected `int`, got `str`", "[0]")),
    ],
)
def test_what_does_not_fit_a_type_is_split_into_problem_and_place(
    kind: type, document: bytes, split: tuple[str, str]
) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(document, type=kind)
    assert split_misfit(str(caught.value)) == split
