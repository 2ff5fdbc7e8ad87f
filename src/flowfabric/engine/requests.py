"""Requests for executions: checked before anything is written, and as rows of a statement."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Final, Self

import msgspec
from msgspec import Struct, structs

from flowfabric.core.checks import check_json
from flowfabric.core.creation import (
    Checked,
    NewExecution,
    Terms,
    check_new,
    check_terms,
    shares_terms,
)
from flowfabric.core.ids import ExecutionId, new_execution_ids, uuid_of
from flowfabric.engine.unit import Operations, Route, ready_topic, route_of
from flowfabric.errors import InvalidInput
from flowfabric.store.base import Parameter

TERMS_MAX: Final = 10
"""How many different terms the requests of one statement may have: each is known by a digit."""


class Requests(Operations):
    def check_request(self, request: object, terms: Terms | None = None) -> Checked:
        """Check a request; `terms` are those that have been checked for it before."""
        return self._check(request, terms, *self._new_ids(1))

    def check_requests(self, requests: Sequence[object]) -> list[Checked]:
        """Check each. What requests in a row share is checked once."""
        checked: list[Checked] = []
        before: object = None
        for request, made in zip(requests, self._new_ids(len(requests)), strict=True):
            terms = checked[-1].terms if shares_terms(request, before) else None
            checked.append(self._check(request, terms, made))
            before = request
        return checked

    def _check(self, request: object, terms: Terms | None, made: ExecutionId) -> Checked:
        if not isinstance(request, NewExecution):
            raise InvalidInput("request", "must be a NewExecution", request)
        shared = self.check_terms(request) if terms is None else terms
        return check_new(
            request,
            shared,
            self.check_payload(request.input_payload, shared.payload_encoding),
            asked=self.asked(request.input_payload),
            new_uuid=uuid_of(made),
            partitions=self.deployment.partitions,
        )

    def check_terms(self, request: NewExecution) -> Terms:
        return check_terms(request, self.config.kept)

    def check_payloads(self, asked: Sequence[tuple[Terms, bytes]]) -> list[Checked]:
        """Requests that name neither id nor key."""
        return [
            Checked(
                terms=terms,
                execution_id=made,
                id_is_new=True,
                payload=self.check_payload(payload, terms.payload_encoding),
            )
            for (terms, payload), made in zip(asked, self._new_ids(len(asked)), strict=True)
        ]

    def _new_ids(self, count: int) -> list[ExecutionId]:
        now_ms = time.time_ns() // 1_000_000
        return new_execution_ids(now_ms, os.urandom(8 * count), self.deployment.partitions)

    def check_payload(self, payload: object, encoding: str | None) -> bytes:
        """A payload as it is stored."""
        limit = self.config.payload_bytes_max
        return check_json("input_payload", payload, limit, encoding=encoding)

    def asked(self, payload: bytes) -> bytes:
        """What a payload is compared by, of the one in a request."""
        return payload

    def plain(self, payload: bytes) -> bytes:
        """The same, of a payload as it is stored."""
        return payload


class ReadyRows(Struct, frozen=True):
    """Requests as `create_ready.sql` takes them: for executions that are ready at once.

    Most submissions ask for nothing else. What they share travels once, as a JSON document.
    """

    parameters: dict[str, Parameter]
    topics: set[str]
    """Whom to wake for them."""

    @classmethod
    def of(cls, checked: Sequence[Checked], routes: Mapping[Route, int]) -> Self | None:
        """None unless it can take all of them."""
        terms = {id(each.terms): each.terms for each in checked}
        if len(terms) > TERMS_MAX or not all(
            each.is_ready and route_of(each) in routes for each in terms.values()
        ):
            return None
        for each in checked:
            if not each.id_is_new or each.idempotency_key or each.parent_execution_id:
                return None
        places = {key: str(place) for place, key in enumerate(terms)}
        shared = [
            {"place": place, "route_id": routes[route_of(each)], **structs.asdict(each)}
            for place, each in enumerate(terms.values())
        ]
        parameters: dict[str, Parameter] = {
            "terms": msgspec.json.encode(shared).decode(),
            "places": "".join([places[id(each.terms)] for each in checked]).encode(),
            "execution_ids": [each.execution_id for each in checked],
            "payloads": [each.payload for each in checked],
        }
        return cls(parameters, {ready_topic(each.lane_id) for each in terms.values()})
