"""Flows of which a process holds one member at a time, as in a chain.

Such a member's end may be told to its dependents at once (see `completions`). If several members
end at about the same time, their transactions contend for the flow's row.
"""

from collections import Counter
from collections.abc import Iterable

from flowfabric.core.ids import FlowId, LeaseId
from flowfabric.engine.gated_claims import ClaimRow

MEMBERS_REMEMBERED = 10_000
"""Leases on members of flows, and flows, that a process remembers."""


class LoneMembers:
    """What a process remembers of the members it has in hand."""

    def __init__(self) -> None:
        self._flows: dict[LeaseId, FlowId] = {}
        self._counts: Counter[FlowId] = Counter()
        self._crowded: set[FlowId] = set()
        self._involved: set[FlowId] = set()

    @property
    def in_hand(self) -> bool:
        """Whether there are any."""
        return bool(self._flows)

    def note(self, leases: Iterable[ClaimRow]) -> None:
        for each in leases:
            if each.flow_id is not None:
                self._flows[each.lease_id] = each.flow_id
                self._counts[each.flow_id] += 1
        if len(self._flows) > MEMBERS_REMEMBERED:
            self._flows.clear()
            self._counts.clear()

    def end(self, lease_id: LeaseId) -> FlowId | None:
        """Forget a lease. Return its flow if it was the only one of that flow, uncontended."""
        flow_id = self._flows.pop(lease_id, None)
        if flow_id is None:
            return None
        in_hand = self._counts.pop(flow_id)
        if in_hand > 1:
            self._counts[flow_id] = in_hand - 1
        return None if in_hand > 1 or flow_id in self._crowded else flow_id

    def note_crowded(self, flow_id: FlowId) -> None:
        if len(self._crowded) > MEMBERS_REMEMBERED:
            self._crowded.clear()
        self._crowded.add(flow_id)

    def may_be_plain(self, flow_id: FlowId) -> bool:
        """Whether `complete_member` has been sure of all ends in the flow that it was tried on."""
        return flow_id not in self._involved

    def note_involved(self, flow_id: FlowId) -> None:
        if len(self._involved) > MEMBERS_REMEMBERED:
            self._involved.clear()
        self._involved.add(flow_id)
