"""Nodes: tasks with arguments inside a flow, before and while it runs."""

import hashlib
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from flowfabric.core import flow_joins, ids
from flowfabric.core.flow_records import OnSatisfied
from flowfabric.core.ids import ExecutionId, FlowId, PartitionConfig, member_execution_id
from flowfabric.errors import InvalidInput
from flowfabric.task import Source, Task

R_co = TypeVar("R_co", covariant=True)

NAME_TAG: Final = "flow.node"
"""Holds the name that the program chose for a node."""


class Node(Source, Generic[R_co]):
    """A task in a flow. As an argument of another node it stands for its result."""

    def __init__(self, flow_id: FlowId, task: Task[..., R_co], name: str, index: int) -> None:
        super().__init__(name)
        self.flow_id = flow_id
        self.task = task
        self.index = index

    def __repr__(self) -> str:
        return f"<node {self.name} of flow {self.flow_id}>"

    def __format__(self, format_spec: str) -> str:
        """Refused: the text of the node would be stored in place of its result."""
        raise InvalidInput(
            "node",
            "has no value before the flow runs; give the node itself as an argument"
            " (for messages there is node.name)",
            self,
        )

    def execution_id(self, partitions: PartitionConfig) -> ExecutionId:
        return member_execution_id(self.flow_id, member_uuid(self.flow_id, self.index), partitions)


def member_uuid(flow_id: FlowId, index: int) -> str:
    """The same uuid for the same node, so that starting a flow again adds nothing.

    The uuids of a flow's nodes sort in the order the nodes were added, and differ at
    the end, which narrow lists show.
    """
    own = hashlib.sha256(f"{flow_id}\x00{index}".encode()).hexdigest()[:12]
    return ids.marked_uuid(ids.mark_of("flow", flow_id), f"{index:06x}{own}")


class NodeNames:
    """Names of nodes: the chosen name, or the task's, numbered from the second on."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self._counts: dict[str, int] = {}

    def next_for(self, kind: str) -> str:
        while True:
            count = self._counts[kind] = self._counts.get(kind, 0) + 1
            name = kind if count == 1 else f"{kind}-{count}"
            if name not in self.taken:
                self.taken.add(name)
                return name


# When a node may run, depending on how the nodes it waits for ended ---------


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
