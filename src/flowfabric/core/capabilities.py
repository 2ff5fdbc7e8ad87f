"""What work requires and what workers offer.

A capability is an opaque token: `torch>=2.3` is compared letter by letter, nothing
is parsed out of it. A worker may run an execution when it offers every token the
execution requires. Both sides are checked when they enter the system, before
anything is written, so that matching itself is a plain subset test.
"""

import re
from collections.abc import Iterable, Set
from typing import Final

from flowfabric.errors import InvalidCapabilities

TOKENS_MAX: Final = 256
CSV_MAX_BYTES: Final = 4096

# Lone surrogates cannot be stored as UTF-8, so both sides refuse them too.
_FORBIDDEN_IN_REQUIRED: Final = re.compile("[\x00-\x20\x7f\ud800-\udfff]")
_FORBIDDEN_IN_OFFERED: Final = re.compile(r"[\x00-\x20\x7f-\x9f\s\ud800-\udfff]")


def check_required(tokens: object) -> tuple[str, ...]:
    """The capabilities an execution requires, sorted and without repeats."""
    return _check(tokens, side="required", forbidden=_FORBIDDEN_IN_REQUIRED)


def check_offered(tokens: object) -> frozenset[str]:
    """The capabilities a worker offers."""
    return frozenset(_check(tokens, side="worker", forbidden=_FORBIDDEN_IN_OFFERED))


def missing(required: Iterable[str], offered: Set[str]) -> tuple[str, ...]:
    """The required tokens nobody offers, sorted; empty when the worker may run the work."""
    return tuple(sorted(set(required) - offered))


def _check(tokens: object, *, side: str, forbidden: re.Pattern[str]) -> tuple[str, ...]:
    if not isinstance(tokens, list | tuple | set | frozenset):
        raise InvalidCapabilities(f"{side}:not_array")
    if len(tokens) > TOKENS_MAX:
        raise InvalidCapabilities(f"{side}:too_many_tokens")
    unique: set[str] = set()
    for token in tokens:
        if not isinstance(token, str):
            raise InvalidCapabilities(f"{side}:non_string_token")
        if not token:
            raise InvalidCapabilities(f"{side}:empty_token")
        if "," in token:
            raise InvalidCapabilities(f"{side}:comma_in_token")
        if forbidden.search(token):
            raise InvalidCapabilities(f"{side}:control_or_whitespace")
        unique.add(token)
    in_order = tuple(sorted(unique))
    if len(",".join(in_order).encode()) > CSV_MAX_BYTES:
        raise InvalidCapabilities(f"{side}:too_many_bytes")
    return in_order
