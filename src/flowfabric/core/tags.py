"""Tags: flat labels on executions and flows.

A key looks like `namespace.name`. The dot separates nothing: keys are plain
strings and are never nested.
"""

import re
from collections.abc import Mapping
from typing import Final

from flowfabric.core.checks import UNSTORABLE
from flowfabric.errors import InvalidInput

INSTANCE_TAG_KEY: Final = "cairn.instance_id"
"""Events carry the value of this tag, so that subscribers can filter by it."""

TAGS_MAX: Final = 64
TAG_KEY_MAX_BYTES: Final = 256
TAG_VALUE_MAX_BYTES: Final = 4096

_KEY: Final = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_][a-z0-9_.]*")


def check_tag_key(key: object) -> str:
    if not isinstance(key, str):
        raise InvalidInput("tag key", "must be a string", key)
    if len(key) > TAG_KEY_MAX_BYTES:
        raise InvalidInput("tag key", f"must be at most {TAG_KEY_MAX_BYTES} bytes", key)
    if _KEY.fullmatch(key) is None:
        raise InvalidInput("tag key", "must look like namespace.name, in lower case", key)
    return key


def check_tag_value(key: str, value: object) -> str:
    field = f"tags[{key}]"
    if not isinstance(value, str):
        raise InvalidInput(field, "must be a string", value)
    if UNSTORABLE.search(value):
        raise InvalidInput(field, "must not contain null characters or lone surrogates", value)
    if len(value.encode()) > TAG_VALUE_MAX_BYTES:
        raise InvalidInput(field, f"must be at most {TAG_VALUE_MAX_BYTES} bytes", value)
    return value


def check_tags(tags: object) -> dict[str, str]:
    """A copy of `tags`, every key and value checked; an empty mapping is fine."""
    if not isinstance(tags, Mapping):
        raise InvalidInput("tags", "must be a mapping of strings", tags)
    if len(tags) > TAGS_MAX:
        raise InvalidInput("tags", f"must be at most {TAGS_MAX}", len(tags))
    checked: dict[str, str] = {}
    for candidate, value in tags.items():
        key = check_tag_key(candidate)
        checked[key] = check_tag_value(key, value)
    return checked
