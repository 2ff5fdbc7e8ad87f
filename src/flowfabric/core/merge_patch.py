"""JSON Merge Patch: a document changed by another one of the same shape.

A member replaces the one of its name, an object is merged into it, and null deletes it. So a
patch cannot set a member to null; the text `__ff_null__` stands for that.
"""

import json
from collections.abc import Mapping
from typing import Final, NoReturn

from flowfabric.errors import Corruption, InvalidInput, RetentionLimitExceeded

NULL: Final = "__ff_null__"
DEPTH_MAX: Final = 16
"""Objects and lists inside the patch's own object."""
DOCUMENT_BYTES_MAX: Final = 1024 * 1024


def merge_patch(target: object, patch: object) -> object:
    """The target with the patch applied; neither is changed."""
    if not isinstance(patch, Mapping):
        return _with_nulls(patch)
    merged = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


def _with_nulls(value: object) -> object:
    """Lists replace what was there; what stands for null is null from here on."""
    if isinstance(value, list):
        return [_with_nulls(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _with_nulls(each) for name, each in value.items()}
    return None if value == NULL else value


def apply_patch(document: bytes, patch: bytes) -> bytes:
    """A stored document after a patch that somebody sent."""
    asked = read_patch(patch)
    try:
        stored = _decode(document)
    except ValueError as error:
        raise Corruption(f"a stored summary does not decode: {error}") from error
    _check_depth(asked, DEPTH_MAX)
    merged = _encode(merge_patch(stored, asked))
    if len(merged) > DOCUMENT_BYTES_MAX:
        raise RetentionLimitExceeded(
            f"the summary would be {len(merged)} bytes, at most {DOCUMENT_BYTES_MAX} are kept"
        )
    return merged


def read_patch(patch: bytes) -> Mapping[str, object]:
    try:
        asked = _decode(patch)
    except RecursionError:
        raise InvalidInput("payload", "patch_depth_exceeded") from None
    except ValueError as error:
        raise InvalidInput("payload", f"patch payload is not valid JSON: {error}") from None
    if not isinstance(asked, dict):
        raise InvalidInput("payload", "patch must be a JSON object", asked)
    return asked


def _check_depth(value: Mapping[str, object] | list[object], left: int) -> None:
    if left < 0:
        raise InvalidInput("payload", f"patch_depth_exceeded: at most {DEPTH_MAX}")
    for child in value.values() if isinstance(value, Mapping) else value:
        if isinstance(child, Mapping | list):
            _check_depth(child, left - 1)


def _decode(data: bytes) -> object:
    decoded: object = json.loads(data.decode(), parse_constant=_refuse)
    return decoded


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _encode(document: object) -> bytes:
    try:
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair: only its escaped form is UTF-8.
        return json.dumps(document, separators=(",", ":")).encode()
