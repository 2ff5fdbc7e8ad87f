"""Documents changed by patches."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.streams import DEPTH_MAX, DOCUMENT_BYTES_MAX, NULL, apply_patch, merge_patch
from flowfabric.errors import Corruption, InvalidInput, RetentionLimitExceeded

APPENDIX = [
    ('{"a":"b"}', '{"a":"c"}', '{"a":"c"}'),
    ('{"a":"b"}', '{"b":"c"}', '{"a":"b","b":"c"}'),
    ('{"a":"b"}', '{"a":null}', "{}"),
    ('{"a":"b","b":"c"}', '{"a":null}', '{"b":"c"}'),
    ('{"a":["b"]}', '{"a":"c"}', '{"a":"c"}'),
    ('{"a":"c"}', '{"a":["b"]}', '{"a":["b"]}'),
    ('{"a":{"b":"c"}}', '{"a":{"b":"d","c":null}}', '{"a":{"b":"d"}}'),
    ('{"a":[{"b":"c"}]}', '{"a":[1]}', '{"a":[1]}'),
    ('["a","b"]', '["c","d"]', '["c","d"]'),
    ('{"a":"b"}', '["c"]', '["c"]'),
    ('{"a":"foo"}', "null", "null"),
    ('{"a":"foo"}', '"bar"', '"bar"'),
    ('{"e":null}', '{"a":1}', '{"e":null,"a":1}'),
    ("[1,2]", '{"a":"b","c":null}', '{"a":"b"}'),
    ("{}", '{"a":{"bb":{"ccc":null}}}', '{"a":{"bb":{}}}'),
]
"""The examples of the standard, in its order."""


@pytest.mark.parametrize(("target", "patch", "result"), APPENDIX)
def test_the_examples_of_the_standard(target: str, patch: str, result: str) -> None:
    assert merge_patch(json.loads(target), json.loads(patch)) == json.loads(result)


@pytest.mark.parametrize(
    ("document", "patch", "result"),
    [
        pytest.param({"a": 1}, {"a": NULL}, {"a": None}, id="a member"),
        pytest.param({}, {"a": {"b": NULL}}, {"a": {"b": None}}, id="a nested member"),
        pytest.param({}, {"a": [NULL, [NULL]]}, {"a": [None, [None]]}, id="in lists"),
        pytest.param({}, {"a": [{"b": NULL}]}, {"a": [{"b": None}]}, id="in objects of lists"),
        pytest.param({"a": {"b": 1}}, {"a": {}}, {"a": {"b": 1}}, id="an empty object: nothing"),
        pytest.param({}, {"n": 2**63 + 1}, {"n": 2**63 + 1}, id="large numbers stay exact"),
        pytest.param({}, {"a": "\ud800 ü\x00"}, {"a": "\ud800 ü\x00"}, id="any text"),
    ],
)
def test_what_stands_for_null_is_null_and_nothing_is_lost(
    document: object, patch: object, result: object
) -> None:
    merged = apply_patch(json.dumps(document).encode(), json.dumps(patch).encode())
    assert json.loads(merged) == result
    merged.decode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just(NULL),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=2), JSON, max_size=4)


@given(OBJECTS, OBJECTS)
def test_a_patch_applied_twice_is_applied_once(document: object, patch: object) -> None:
    once = merge_patch(document, patch)
    assert merge_patch(once, patch) == once


@given(OBJECTS)
def test_what_was_patched_never_contains_what_stands_for_null(patch: dict[str, object]) -> None:
    assert NULL not in json.dumps(merge_patch({}, patch))


def nested(levels: int) -> bytes:
    """A patch of so many objects inside each other, its own included."""
    return b'{"a":' * (levels - 1) + b"{}" + b"}" * (levels - 1)


def test_a_patch_may_be_nested_so_deep_and_no_deeper() -> None:
    assert apply_patch(b"{}", nested(DEPTH_MAX + 1)) == nested(DEPTH_MAX + 1)
    for levels in (DEPTH_MAX + 2, 10_000):
        with pytest.raises(InvalidInput, match="patch_depth_exceeded"):
            apply_patch(b"{}", nested(levels))


@pytest.mark.parametrize(
    ("patch", "problem"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": [1e400]}', "1e400 is too large"),
        (b'{"a": -1e400}', "-1e400 is too large"),
        (b"\xff", "not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
    ],
)
def test_what_is_no_patch_is_refused(patch: bytes, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        apply_patch(b"{}", patch)


def test_a_damaged_document_is_reported_before_the_depth_of_the_patch() -> None:
    with pytest.raises(Corruption):
        apply_patch(b"{", nested(DEPTH_MAX + 2))
    with pytest.raises(InvalidInput, match="not valid JSON"):
        apply_patch(b"{", b"{")


def test_a_document_does_not_grow_without_end() -> None:
    nearly = json.dumps({"a": "x" * (DOCUMENT_BYTES_MAX - 20)}).encode()
    with pytest.raises(RetentionLimitExceeded):
        apply_patch(nearly, b'{"b": "another twenty bytes"}')
