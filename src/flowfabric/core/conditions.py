"""What a suspended execution waits for.

A condition is a small tree: `Single` waits for one signal, `Count` for a number
of distinct ones, `AllConditions` for all of its members; `OperatorOnly` and `TimeoutOnly`
wait for no signal at all. There is no any-of: that is a `Count` of one.

`is_satisfied` is a pure function of the condition and the signals accepted so
far, evaluated bottom-up, each `Count` looking only at its own waitpoints through
its own matcher. `observe` tells what one more signal does. A wait uses a signal
that some part of its condition takes, still lacks and has not counted before; it
leaves every other for later waits. So `observe` needs only the signals used so far:
no part that still lacks one has seen another.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from flowfabric.core.bounds import NAME_BYTES_MAX
from flowfabric.core.checks import UNSTORABLE, check_int, is_visible
from flowfabric.core.ids import WaitpointKey
from flowfabric.core.records import SignalEffect, SignalFacts, Waitpoint
from flowfabric.errors import Corruption, InvalidInput

DEPTH_MAX: Final = 4
"""A composite at the root is at depth 1; each composite inside another is one deeper."""
NODES_MAX: Final = 256
SIGNAL_COUNT_MAX: Final = 10_000

OPERATOR_ONLY_NAME: Final = "__operator_only__"
TIMEOUT_ONLY_NAME: Final = "__timeout_only__"


class CountKind(StrEnum):
    """What makes two signals distinct."""

    DISTINCT_WAITPOINTS = "DistinctWaitpoints"
    DISTINCT_SIGNALS = "DistinctSignals"
    DISTINCT_SOURCES = "DistinctSources"


class ByName(Struct, frozen=True, tag=True):
    """Takes signals of exactly this name."""

    signal_name: str


class Wildcard(Struct, frozen=True, tag=True):
    """Takes every signal."""


Matcher: TypeAlias = ByName | Wildcard
WILDCARD: Final = Wildcard()


class Single(Struct, frozen=True, tag=True):
    waitpoint_key: str
    matcher: Matcher = WILDCARD


class Count(Struct, frozen=True, tag=True):
    n: int
    count_kind: CountKind
    waitpoints: tuple[str, ...]
    matcher: Matcher = WILDCARD


class AllConditions(Struct, frozen=True, tag=True):
    members: tuple["Condition", ...]


class OperatorOnly(Struct, frozen=True, tag=True):
    """Only an operator resumes it."""


class TimeoutOnly(Struct, frozen=True, tag=True):
    """Only its timeout resumes it."""


Condition: TypeAlias = Single | Count | AllConditions | OperatorOnly | TimeoutOnly
Leaf: TypeAlias = Single | Count


# Evaluating -------------------------------------------------------------------


class Observation(Struct, frozen=True, kw_only=True):
    """What one signal does to a condition."""

    effect: SignalEffect
    matched: bool
    """Some part of the condition takes it."""
    satisfier: bool
    """It brings the condition forward, so the wait uses it."""


def is_satisfied(condition: Condition, signals: Sequence[SignalFacts]) -> bool:
    match condition:
        case AllConditions(members):
            return bool(members) and all(is_satisfied(member, signals) for member in members)
        case Count(n=n):
            return len(_satisfiers(condition, signals)) >= n
        case Single():
            return bool(_satisfiers(condition, signals))
        case OperatorOnly() | TimeoutOnly():
            return False


class Progress(Struct, frozen=True, kw_only=True):
    """How much of a condition is met."""

    came: int
    wanted: int
    left: tuple[str, ...]
    """The names that still lack a signal."""


def progress(condition: Condition, signals: Sequence[SignalFacts]) -> Progress:
    """How many of the wanted signals have arrived, and which names still lack one."""
    came = wanted = 0
    left: dict[str, None] = {}
    for leaf in leaves(condition):
        needed = _needed(leaf)
        counted = len(_satisfiers(leaf, signals))
        came += min(needed, counted)
        wanted += needed
        if counted < needed:
            heard = {signal.waitpoint_key for signal in signals}
            missing = [key for key in keys_of(leaf) if key not in heard] or keys_of(leaf)
            left |= dict.fromkeys(missing)
    return Progress(came=came, wanted=wanted, left=tuple(left))


def observe(
    condition: Condition, earlier: Sequence[SignalFacts], signal: SignalFacts
) -> Observation:
    """What `signal` does after `earlier`, those used so far."""
    candidates = [leaf for leaf in leaves(condition) if signal.waitpoint_key in keys_of(leaf)]
    takers = [leaf for leaf in candidates if accepts(leaf.matcher, signal.signal_name)]
    if not takers:
        return Observation(effect=_ignored(condition, candidates), matched=False, satisfier=False)
    if not any(_lacks(leaf, earlier, signal) for leaf in takers):
        return Observation(effect=SignalEffect.APPENDED_DUPLICATE, matched=True, satisfier=False)
    met = is_satisfied(condition, (*earlier, signal))
    effect = SignalEffect.SATISFIED if met else SignalEffect.APPENDED
    return Observation(effect=effect, matched=True, satisfier=True)


def _lacks(leaf: Leaf, earlier: Sequence[SignalFacts], signal: SignalFacts) -> bool:
    counted = _satisfiers(leaf, earlier)
    return len(counted) < _needed(leaf) and _identity(leaf, signal) not in counted


def _needed(leaf: Leaf) -> int:
    return leaf.n if isinstance(leaf, Count) else 1


def _ignored(condition: Condition, candidates: Sequence[Leaf]) -> SignalEffect:
    """Outside composites a signal that does not match is simply appended."""
    if not isinstance(condition, AllConditions | Count):
        return SignalEffect.APPENDED
    return SignalEffect.MATCHER_FAILED if candidates else SignalEffect.NOT_IN_CONDITION


def _satisfiers(leaf: Leaf, signals: Sequence[SignalFacts]) -> set[tuple[str, ...]]:
    keys = keys_of(leaf)
    return {
        _identity(leaf, signal)
        for signal in signals
        if signal.waitpoint_key in keys and accepts(leaf.matcher, signal.signal_name)
    }


def _identity(leaf: Leaf, signal: SignalFacts) -> tuple[str, ...]:
    """What the leaf counts a signal as."""
    if isinstance(leaf, Single):
        return ()
    match leaf.count_kind:
        case CountKind.DISTINCT_WAITPOINTS:
            return (signal.waitpoint_id,)
        case CountKind.DISTINCT_SIGNALS:
            return (signal.signal_id,)
        case CountKind.DISTINCT_SOURCES:
            return (signal.source_type, signal.source_identity)


def accepts(matcher: Matcher, signal_name: str) -> bool:
    return isinstance(matcher, Wildcard) or matcher.signal_name == signal_name


# Walking ----------------------------------------------------------------------


def leaves(condition: Condition) -> Iterator[Leaf]:
    """Depth first, in the order they are written."""
    if isinstance(condition, AllConditions):
        for member in condition.members:
            yield from leaves(member)
    elif isinstance(condition, Single | Count):
        yield condition


def keys_of(leaf: Leaf) -> tuple[str, ...]:
    return (leaf.waitpoint_key,) if isinstance(leaf, Single) else leaf.waitpoints


def referenced_waitpoint_keys(condition: Condition) -> tuple[WaitpointKey, ...]:
    """Each key once, in the order of first mention."""
    mentioned = dict.fromkeys(key for leaf in leaves(condition) for key in keys_of(leaf))
    return tuple(WaitpointKey(key) for key in mentioned)


def ranks_of(condition: Condition) -> dict[str, int]:
    """The position of each signal name in the condition; a waitpoint that takes any name counts
    under its key."""
    names = (name for leaf in leaves(condition) for name in _names_of(leaf))
    return {name: rank for rank, name in enumerate(dict.fromkeys(names))}


def _names_of(leaf: Leaf) -> tuple[str, ...]:
    matcher = leaf.matcher
    return (matcher.signal_name,) if isinstance(matcher, ByName) else keys_of(leaf)


def required_signal_names(condition: Condition, waitpoint_key: str) -> tuple[str, ...]:
    """The names waited for at one waitpoint; none when every name will do."""
    if isinstance(condition, OperatorOnly):
        return (OPERATOR_ONLY_NAME,)
    if isinstance(condition, TimeoutOnly):
        return (TIMEOUT_ONLY_NAME,)
    names = dict.fromkeys(
        leaf.matcher.signal_name
        for leaf in leaves(condition)
        if waitpoint_key in keys_of(leaf) and isinstance(leaf.matcher, ByName)
    )
    return tuple(names)


def takes_own_name(condition: Condition, waitpoint_key: str) -> bool:
    """Whether signals that go by the waitpoint's own key are what is waited for there."""
    there = [leaf for leaf in leaves(condition) if waitpoint_key in keys_of(leaf)]
    return bool(there) and all(accepts(leaf.matcher, waitpoint_key) for leaf in there)


# Checking ---------------------------------------------------------------------

FIELD: Final = "resume_condition"
TOO_FEW: Final = "count_exceeds_waitpoint_set: "
"""Begins the refusal of a count that nothing could meet."""


def check_condition(condition: object) -> Condition:
    """Refuse conditions that are malformed or that no signal could ever meet."""
    if not isinstance(condition, Single | Count | AllConditions | OperatorOnly | TimeoutOnly):
        raise InvalidInput(FIELD, "must be a condition", condition)
    if isinstance(condition, Single) and condition.matcher == ByName(""):
        raise InvalidInput(FIELD, "empty signal name (use Wildcard instead)")
    left = [NODES_MAX]
    _check_node(condition, "", 0, left)
    return condition


def _check_node(node: object, path: str, depth: int, left: list[int]) -> None:
    left[0] -= 1
    if left[0] < 0:
        raise InvalidInput(FIELD, f"has more than {NODES_MAX} nodes")
    place = path or "<root>"
    match node:
        case AllConditions(members):
            _check_depth(depth + 1, place)
            if not isinstance(members, tuple):
                raise InvalidInput(FIELD, f"members must be a tuple at path {place}")
            if not members:
                raise InvalidInput(FIELD, f"allof_empty_members at path {place}: give at least one")
            for index, member in enumerate(members):
                inner = f"{path}.members[{index}]" if path else f"members[{index}]"
                _check_node(member, inner, depth + 1, left)
        case Count():
            _check_depth(depth + 1, place)
            _check_count(node, place)
        case Single(waitpoint_key, matcher):
            _check_key(waitpoint_key, place)
            _check_matcher(matcher, place)
        case OperatorOnly() | TimeoutOnly() if depth == 0:
            pass
        case OperatorOnly() | TimeoutOnly():
            raise InvalidInput(
                FIELD, f"unsatisfiable: no signal can meet the member at path {place}"
            )
        case _:
            raise InvalidInput(FIELD, f"must be a condition at path {place}", node)


def _check_depth(depth: int, place: str) -> None:
    if depth > DEPTH_MAX:
        raise InvalidInput(FIELD, f"depth {depth} exceeds cap {DEPTH_MAX} at path {place}")


def _check_count(node: Count, place: str) -> None:
    keys = node.waitpoints
    if check_int(f"{FIELD}.n", node.n, 0, SIGNAL_COUNT_MAX) == 0:
        raise InvalidInput(FIELD, f"count_n_zero at path {place}: must be at least 1")
    if not isinstance(keys, tuple):
        raise InvalidInput(FIELD, f"waitpoints must be a tuple at path {place}")
    if not keys:
        raise InvalidInput(FIELD, f"count_waitpoints_empty at path {place}: name at least one")
    if len(keys) > NODES_MAX:
        raise InvalidInput(FIELD, f"more than {NODES_MAX} waitpoints at path {place}")
    if node.count_kind not in list(CountKind):
        kinds = ", ".join(CountKind)
        raise InvalidInput(FIELD, f"count_kind must be one of {kinds} at path {place}")
    for key in keys:
        _check_key(key, place)
    if node.count_kind is CountKind.DISTINCT_WAITPOINTS and len(set(keys)) != len(keys):
        raise InvalidInput(FIELD, f"count_duplicate_waitpoints at path {place}: name each once")
    _check_matcher(node.matcher, place)


def check_countable(
    condition: Condition, bound: Sequence[Waitpoint], kept: Sequence[SignalFacts]
) -> None:
    """Refuse to wait for more distinct waitpoints than there are, which nothing could meet.

    The waitpoints of kept signals count, whatever has become of them.
    """
    for leaf in _counts_of_waitpoints(condition):
        open_ = {(w.waitpoint_id,) for w in bound if w.waitpoint_key in leaf.waitpoints}
        there = len(_satisfiers(leaf, kept) | open_)
        if leaf.n > there:
            names = ", ".join(map(repr, leaf.waitpoints))
            exist = "1 exists" if there == 1 else f"{there} exist"
            raise InvalidInput(
                FIELD,
                f"{TOO_FEW}needs signals at {leaf.n} different waitpoints of {names}, and only"
                f" {exist}; create the others first",
            )


def counts_waitpoints(condition: Condition) -> bool:
    """Whether it depends on the number of waitpoints if the condition can be met."""
    return any(_counts_of_waitpoints(condition))


def _counts_of_waitpoints(condition: Condition) -> Iterator[Count]:
    for leaf in leaves(condition):
        if isinstance(leaf, Count) and leaf.count_kind is CountKind.DISTINCT_WAITPOINTS:
            yield leaf


def _check_key(key: object, place: str) -> None:
    if not isinstance(key, str) or not key:
        raise InvalidInput(FIELD, f"waitpoint_key must be a non-empty string at path {place}", key)
    if len(key.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        raise InvalidInput(FIELD, f"waitpoint_key over {NAME_BYTES_MAX} bytes at path {place}", key)
    _check_storable(key, place)


def _check_matcher(matcher: object, place: str) -> None:
    match matcher:
        case Wildcard():
            return
        case ByName(str() as name) if name:
            if len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
                raise InvalidInput(
                    FIELD, f"signal name over {NAME_BYTES_MAX} bytes at path {place}"
                )
            _check_storable(name, place)
        case ByName(str()):
            raise InvalidInput(FIELD, f"empty signal name (use Wildcard instead) at path {place}")
        case _:
            raise InvalidInput(FIELD, f"must be ByName or Wildcard at path {place}", matcher)


def _check_storable(text: str, place: str) -> None:
    if UNSTORABLE.search(text):
        raise InvalidInput(FIELD, f"NUL character or lone surrogate at path {place}", text)
    if not is_visible(text):
        raise InvalidInput(FIELD, f"control or invisible character at path {place}", text)


# JSON -------------------------------------------------------------------------

Json: TypeAlias = "str | int | list[Json] | dict[str, Json]"


def encode_condition(condition: Condition) -> str:
    """The wire form: each variant under its own name."""
    return msgspec.json.encode(_to_json(condition)).decode()


def parse_condition(text: str | bytes) -> Condition:
    """Read the wire form; `check_condition` tells whether it makes sense."""
    try:
        return _from_json(msgspec.json.decode(text), 0)
    except msgspec.DecodeError as error:
        raise InvalidInput(FIELD, f"is not JSON: {error}") from None


def stored_condition(text: str) -> Condition:
    """Read a condition that we stored: one that does not decode is corrupt."""
    try:
        return parse_condition(text)
    except InvalidInput as error:
        raise Corruption(f"a stored condition does not decode: {error}") from error


def _to_json(condition: Condition) -> Json:
    match condition:
        case Single(waitpoint_key, matcher):
            return {
                "Single": {"waitpoint_key": waitpoint_key, "matcher": _matcher_to_json(matcher)}
            }
        case AllConditions(members):
            inner: list[Json] = [_to_json(member) for member in members]
            return {"Composite": {"kind": "AllOf", "members": inner}}
        case Count(n, count_kind, waitpoints, matcher):
            keys: list[Json] = list(waitpoints)
            fields: dict[str, Json] = {"kind": "Count", "n": n, "count_kind": count_kind.value}
            if isinstance(matcher, ByName):
                fields["matcher"] = _matcher_to_json(matcher)
            return {"Composite": fields | {"waitpoints": keys}}
        case OperatorOnly():
            return "OperatorOnly"
        case TimeoutOnly():
            return "TimeoutOnly"


def _matcher_to_json(matcher: Matcher) -> Json:
    return {"ByName": matcher.signal_name} if isinstance(matcher, ByName) else "Wildcard"


def _from_json(document: object, depth: int) -> Condition:
    if depth > DEPTH_MAX:
        raise InvalidInput(FIELD, f"depth {depth + 1} exceeds cap {DEPTH_MAX}")
    match document:
        case "OperatorOnly":
            return OperatorOnly()
        case "TimeoutOnly":
            return TimeoutOnly()
        case {"Single": {"waitpoint_key": str() as key, **rest}}:
            return Single(key, _matcher_from_json(rest.get("matcher", "Wildcard")))
        case {"Composite": {"kind": "AllOf", "members": [*members]}}:
            return AllConditions(tuple(_from_json(member, depth + 1) for member in members))
        case {
            "Composite": {
                "kind": "Count",
                "n": int() as n,
                "count_kind": str() as kind,
                "waitpoints": [*keys],
                **rest,
            }
        } if kind in list(CountKind):
            matcher = _matcher_from_json(rest.get("matcher", "Wildcard"))
            return Count(n, CountKind(kind), tuple(str(key) for key in keys), matcher)
        case _:
            raise InvalidInput(FIELD, "unknown condition", document)


def _matcher_from_json(document: object) -> Matcher:
    match document:
        case "Wildcard" | None:
            return WILDCARD
        case {"ByName": str() as name}:
            return ByName(name)
        case _:
            raise InvalidInput(FIELD, "unknown matcher", document)
