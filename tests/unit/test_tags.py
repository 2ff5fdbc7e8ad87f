"""Tags: keys people can read and type, small text values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.checks import (
    INSTANCE_TAG_KEY,
    TAG_KEY_MAX_BYTES,
    TAG_VALUE_MAX_BYTES,
    TAGS_MAX,
    check_tag_key,
    check_tags,
)
from flowfabric.errors import InvalidInput


@pytest.mark.parametrize(
    "key",
    [
        "cairn.session_id",
        "a.b",
        "app.sub.field",
        "a1_.0",
        "a._",
        "a.b.",
        "a.b..c",
        INSTANCE_TAG_KEY,
        "team",
        "Team",
        "1cairn",
        ".cairn",
        "customer-id",
        "Kunde Nr. 7",
        "cairn.ü",
        "a/b:c",
    ],
)
def test_a_key_is_any_text_that_can_be_read_and_typed(key: str) -> None:
    assert check_tag_key(key) == key


@pytest.mark.parametrize(
    "key",
    [
        "",
        "team=sport",
        " cairn.x",
        "cairn.x ",
        "cairn.x\n",
        "a\0b",
        "\ud800",
        "a\x1b[2Jb",
        "a\u202eb",
        "ü" * (TAG_KEY_MAX_BYTES // 2 + 1),
        "a." + "b" * (TAG_KEY_MAX_BYTES - 1),
        7,
        None,
    ],
)
def test_any_other_key_is_refused_and_named(key: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_tag_key(key)
    assert caught.value.value == key


def test_checked_tags_are_a_copy() -> None:
    given_tags = {"app.a": "1", "app.b": ""}
    checked = check_tags(given_tags)
    assert checked == given_tags
    assert checked is not given_tags


@pytest.mark.parametrize(
    ("tags", "field"),
    [
        pytest.param(None, "tags", id="nothing"),
        pytest.param([("a.b", "c")], "tags", id="a list"),
        pytest.param({f"a.t{i}": "" for i in range(TAGS_MAX + 1)}, "tags", id="too many"),
        pytest.param({"a=b": "x"}, "tag key", id="bad key"),
        pytest.param({7: "x"}, "tag key", id="key is a number"),
        pytest.param({"a.b": 7}, "tags[a.b]", id="value is a number"),
        pytest.param({"a.b": None}, "tags[a.b]", id="value is nothing"),
        pytest.param({"a.b": "x" * (TAG_VALUE_MAX_BYTES + 1)}, "tags[a.b]", id="too long"),
        pytest.param(
            {"a.b": "ü" * (TAG_VALUE_MAX_BYTES // 2 + 1)}, "tags[a.b]", id="too many bytes"
        ),
        pytest.param({"a.b": "a\0b"}, "tags[a.b]", id="null character"),
        pytest.param({"a.b": "\ud800"}, "tags[a.b]", id="lone surrogate"),
    ],
)
def test_malformed_tags_are_refused_by_field(tags: object, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_tags(tags)
    assert caught.value.field == field


@given(
    value=st.text(
        st.characters(codec="utf-8", exclude_characters="\0"), max_size=TAG_VALUE_MAX_BYTES // 4
    )
)
def test_a_value_may_be_any_text(value: str) -> None:
    assert check_tags({"a.b": value}) == {"a.b": value}


def test_the_limits_themselves_are_allowed() -> None:
    tags = {f"a.t{number}": "x" * TAG_VALUE_MAX_BYTES for number in range(TAGS_MAX)}
    assert check_tags(tags) == tags
    assert check_tag_key("a." + "b" * (TAG_KEY_MAX_BYTES - 2))
