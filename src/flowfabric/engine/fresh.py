"""Requests whose ids and keys are all new, as rows of one statement. Most submissions are."""

from collections.abc import Mapping, Sequence
from typing import Final, Self

import msgspec
from msgspec import Struct, structs

from flowfabric.core import creation
from flowfabric.core.events import tag_rows
from flowfabric.engine import routes, unit
from flowfabric.store.base import Parameter

TERMS_MAX: Final = 10
"""How many different terms the requests of one statement may have: each is known by a digit."""
LOCK_WAIT_MS: Final = 200
"""How long that statement waits for another transaction that decides the same key or id."""


class FreshRows(Struct, frozen=True):
    """Requests as `create_new.sql` takes them, all of whose ids and keys are new.

    Most submissions ask for nothing else. What they share travels once, as a JSON document.
    """

    parameters: dict[str, Parameter]
    topics: set[str]
    """Topics to hint after the insert."""

    @classmethod
    def of(
        cls, checked: Sequence[creation.Checked], route_ids: Mapping[routes.Route, int]
    ) -> Self | None:
        """None unless it can take all of them."""
        terms = {id(each.terms): each.terms for each in checked}
        if len(terms) > TERMS_MAX or not all(
            routes.route_of(each) in route_ids for each in terms.values()
        ):
            return None
        keys = _column([each.idempotency_key for each in checked])
        parents = _column([each.parent_execution_id for each in checked])
        ids_are_new = all(each.id_is_new for each in checked)
        if _repeated([each.execution_id for each in checked if not each.id_is_new]) or _repeated(
            [
                (each.terms.namespace, each.idempotency_key)
                for each in checked
                if each.idempotency_key
            ]
        ):
            return None
        places = {key: str(place) for place, key in enumerate(terms)}
        parameters: dict[str, Parameter] = {
            "terms": msgspec.json.encode(
                [
                    _shared(place, each, route_ids[routes.route_of(each)])
                    for place, each in enumerate(terms.values())
                ]
            ).decode(),
            "places": "".join([places[id(each.terms)] for each in checked]).encode(),
            "ids_are_new": ids_are_new,
            "has_keys": bool(keys),
            "has_parents": bool(parents),
            "lock_wait_ms": None if ids_are_new and not keys else LOCK_WAIT_MS,
            "execution_ids": [each.execution_id for each in checked],
            "payloads": [each.payload for each in checked],
            "own_ids": _column([each.own_id for each in checked]),
            "idempotency_keys": keys,
            "fingerprints": [each.fingerprint for each in checked] if keys else [],
            "parents": parents,
        }
        topics: set[str] = set()
        for each in terms.values():
            topics |= _topics(each)
        return cls(parameters, topics)


def _repeated(names: Sequence[object]) -> bool:
    return len(set(names)) < len(names)


def _column(values: Sequence[str | None]) -> Sequence[str | None]:
    """The values, or an empty list if all are None, which costs nothing to send."""
    return () if values.count(None) == len(values) else values


def _shared(place: int, terms: creation.Terms, route_id: int) -> dict[str, object]:
    return {
        "place": place,
        "route_id": route_id,
        "instance_tag": terms.instance_tag,
        "tag_rows": tag_rows(terms.tags),
        **structs.asdict(terms),
    }


def _topics(terms: creation.Terms) -> set[str]:
    """Whom to wake for executions with these terms, whatever the time is in the database."""
    spans = [each for each in (terms.delay_ms, terms.deadline_after_ms) if each is not None]
    if (terms.delay_until_ms, terms.deadline_at_ms) != (None, None):
        # It may have come already.
        spans.append(0)
    topics = unit.topics_after(due_in_ms=min(spans, default=None))
    if topics or (terms.delay_until_ms is None and not terms.delay_ms):
        topics |= unit.topics_after(lanes=[terms.lane_id])
    return topics | {unit.EVENT_TOPIC} if terms.tags else topics
