"""When a node of a flow may run, by how those it waits for ended."""

from dataclasses import dataclass

from flowfabric.core import flow_joins
from flowfabric.core.flow_records import OnSatisfied


@dataclass(frozen=True)
class AllOf:
    """Every one must succeed."""

    @property
    def policy(self) -> flow_joins.EdgeDependencyPolicy:
        return flow_joins.JoinAll()


@dataclass(frozen=True)
class AnyOf:
    """One must succeed. The others run on unless `cancel_remaining`."""

    cancel_remaining: bool = False

    @property
    def policy(self) -> flow_joins.EdgeDependencyPolicy:
        return flow_joins.JoinAny(_on_satisfied(self.cancel_remaining))


@dataclass(frozen=True)
class Quorum:
    """`k` must succeed. The others run on unless `cancel_remaining`."""

    k: int
    cancel_remaining: bool = False

    @property
    def policy(self) -> flow_joins.EdgeDependencyPolicy:
        return flow_joins.JoinQuorum(self.k, _on_satisfied(self.cancel_remaining))


When = AllOf | AnyOf | Quorum


def _on_satisfied(cancel_remaining: bool) -> OnSatisfied:
    return OnSatisfied.CANCEL_REMAINING if cancel_remaining else OnSatisfied.LET_RUN
