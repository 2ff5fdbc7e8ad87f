"""What can be stored, and how what cannot is named."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date

import msgspec
import pytest
from msgspec import Raw, Struct

from flowfabric.errors import InvalidInput
from flowfabric.json_values import encode_value


class Reading(Struct):
    sensor: str
    values: list[float | None]


@dataclass
class Report:
    readings: Mapping[str, Reading]


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (None, b"null"),
        ("null", b'"null"'),
        ([1.5, None], b"[1.5,null]"),
        ({"a": {"b": [0.0, -1e308]}}, b'{"a":{"b":[0.0,-1e308]}}'),
        (Reading("null", [None, 2.0]), b'{"sensor":"null","values":[null,2.0]}'),
        (Raw(b'{"a": null}'), b'{"a": null}'),
        ([Raw(b"[1]"), None], b"[[1],null]"),
    ],
)
def test_what_json_can_hold_is_stored_as_it_is(value: object, stored: bytes) -> None:
    assert encode_value("it", value) == stored


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (math.nan, "it"),
        (math.inf, "it"),
        ([1.0, -math.inf], "it[1]"),
        ({"a": {"b": (None, math.nan)}}, "it['a']['b'][1]"),
        (Reading("s", [None, math.nan]), "it['values'][1]"),
        ([Raw(b"null"), math.nan], "it[1]"),
        (Report({"r": Reading("s", [math.inf])}), "it['readings']['r']['values'][0]"),
    ],
)
def test_a_number_json_lacks_is_refused_with_its_place(value: object, place: str) -> None:
    with pytest.raises(InvalidInput, match="is NaN or infinite") as refused:
        encode_value("it", value)
    assert refused.value.field == place


def test_what_has_no_form_in_json_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    for value in (object(), endless, "\ud800"):
        with pytest.raises(InvalidInput, match="it: cannot be stored"):
            encode_value("it", value)


@dataclass
class Prices:
    by_size: dict[object, int]


@pytest.mark.parametrize(
    ("value", "field", "keys"),
    [
        ({"1": "a", 1: "b"}, "payload", "'1' and 1"),
        ([{"a": {1: 1, "1": 2}}], "payload[0]['a']", "1 and '1'"),
        ((Prices({2: 1, "2": 2}),), "payload[0].by_size", "2 and '2'"),
        ({1.5: 1, "1.5": 2}, "payload", "1.5 and '1.5'"),
        (
            {"2026-11-18": 1, date(2026, 11, 18): 2},
            "payload",
            "'2026-11-18' and datetime.date(2026, 11, 18)",
        ),
    ],
)
def test_keys_that_are_the_same_text_in_json_are_refused_by_name(
    value: object, field: str, keys: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode_value("payload", value)
    assert str(caught.value) == (
        f"{field}: the keys {keys} are the same text in JSON, which would keep only one of them"
    )


class Thing:
    def __repr__(self) -> str:
        return "<thing>"


@pytest.mark.parametrize(
    ("value", "field", "key"),
    [
        ({None: 1}, "payload", "None"),
        ({True: 1}, "payload", "True"),
        ({"a": [{(1, 2): 3}]}, "payload['a'][0]", "(1, 2)"),
        (Prices({Thing(): 1}), "payload.by_size", "<thing>"),
    ],
)
def test_a_key_that_has_no_text_in_json_is_refused_by_name(
    value: object, field: str, key: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode_value("payload", value)
    assert str(caught.value) == (
        f"{field}: cannot be stored: JSON has no key like {key}; use text instead"
    )


def test_a_value_without_a_form_in_json_that_contains_itself_is_refused() -> None:
    endless: list[object] = [object()]
    endless.append(endless)
    with pytest.raises(InvalidInput, match="payload: cannot be stored"):
        encode_value("payload", endless)


def test_a_value_that_never_ends_is_refused_with_the_reason() -> None:
    shared = [1]
    endless: list[object] = [shared, shared]
    endless.append({"again": endless})
    deep: object = shared
    for _ in range(100_000):
        deep = [deep]
    for value, problem in ((endless, "it holds itself"), (deep, "it nests too deeply")):
        with pytest.raises(InvalidInput, match=f"^payload: cannot be stored: {problem}"):
            encode_value("payload", value)


@pytest.mark.parametrize("value", [{1: 2, 2: 3}, {"a": 1, 1: 2}, {1: {"1": 2}, 2: [{"1": 3}]}])
def test_keys_that_differ_in_json_are_stored(value: object) -> None:
    assert encode_value("payload", value) == msgspec.json.encode(value)
