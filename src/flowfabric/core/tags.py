"""Tags: flat labels on executions and flows.

A key is any text people can read and type: `team`, `app.team`, `Kunde Nr.`. Nothing in it
separates anything; what tools write begins with a name of theirs and a dot.
"""

from collections.abc import Mapping
from typing import Final

from flowfabric.core.checks import UNSTORABLE, check_name
from flowfabric.errors import InvalidInput

INSTANCE_TAG_KEY: Final = "cairn.instance_id"
"""Events carry the value of this tag, so that subscribers can filter by it."""

TAGS_MAX: Final = 64
TAG_KEY_MAX_BYTES: Final = 256
TAG_VALUE_MAX_BYTES: Final = 4096


def check_tag_key(key: object) -> str:
    name = check_name("tag key", key, bytes_max=TAG_KEY_MAX_BYTES)
    if "=" in name or name != name.strip():
        raise InvalidInput("tag key", "must not contain =, nor begin or end with a space", key)
    return name


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
