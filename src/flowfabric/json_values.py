"""Values as JSON: what arguments, results, steps and signals are stored as.

JSON has no NaN and no infinities, and the encoder writes null for them. Nothing
is stored as something else than it was, so they are refused, with their place.
"""

import math
from collections.abc import Mapping

import msgspec

from flowfabric.errors import InvalidInput


def encode_value(field: str, value: object) -> bytes:
    """Raises `InvalidInput` that names `field` and what in it cannot be stored."""
    try:
        data = msgspec.json.encode(value)
        # Only what was written as null can have been a number JSON lacks.
        built = msgspec.to_builtins(value, enc_hook=_skip_raw) if b"null" in data else None
        place = _not_finite(built)
    except Exception as error:
        raise InvalidInput(
            field, f"cannot be stored: {error}. Only what msgspec encodes as JSON can", value
        ) from error
    if place is not None:
        raise InvalidInput(
            f"{field}{place}",
            "is NaN or infinite, which JSON cannot hold; use None or text instead",
        )
    return data


def _skip_raw(value: object) -> None:
    """JSON that the caller has written is stored as it is; the encoder takes nothing else."""
    assert isinstance(value, msgspec.Raw)


def _not_finite(value: object) -> str | None:
    """Where in `value` there is such a number."""
    match value:
        case float():
            return None if math.isfinite(value) else ""
        case Mapping():
            places = ((f"[{key!r}]", each) for key, each in value.items())
        case list() | tuple():
            places = ((f"[{number}]", each) for number, each in enumerate(value))
        case _:
            return None
    for place, each in places:
        found = _not_finite(each)
        if found is not None:
            return place + found
    return None
