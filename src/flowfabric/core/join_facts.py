"""What an execution with an open join waits for, in words and as data, at the time of reading."""

from msgspec import Struct

from flowfabric.core.flow_joins import needed_count, resolved_count
from flowfabric.core.flow_records import EdgeGroup
from flowfabric.core.ids import ExecutionId
from flowfabric.core.states import PublicState


class Upstream(Struct, frozen=True, kw_only=True):
    """An upstream whose ending has not been counted."""

    execution_id: ExecutionId
    name: str
    """What people call it: the name of its node, or of its task."""
    public_state: PublicState
    blocked: bool = False
    """Changed code has stopped it."""
    over: bool = False
    """It ended before its downstream was replayed: only a replay of its own can count."""


class JoinFacts(Struct, frozen=True, kw_only=True):
    group: EdgeGroup
    upstreams: tuple[Upstream, ...]
    """The first few of the unresolved ones."""

    @property
    def unresolved(self) -> int:
        return self.group.staged - resolved_count(self.group)

    def sentence(self) -> str:
        group, needed = self.group, needed_count(self.group)
        if group.staged < needed:
            return (
                f"It waits for {needed} dependencies to succeed and has only {group.staged}: add"
                f" {needed - group.staged} more, or cancel it."
            )
        some = f"{needed} of its {group.staged} dependencies"
        every = "its only dependency" if needed == 1 else f"all of its {needed} dependencies"
        what = every if needed == group.staged else some
        left = f"; {self.unresolved} not resolved: {self._named()}" if self.upstreams else ""
        return f"It waits for {what} to succeed, {group.succeeded} so far{left}."

    def detail(self) -> dict[str, str | int | None]:
        return {
            "dependencies": self.group.staged,
            "needed": needed_count(self.group),
            "succeeded": self.group.succeeded,
            "unresolved": self.unresolved,
            "upstreams": ",".join(each.execution_id for each in self.upstreams),
        }

    def remark(self) -> str:
        """For lists: who has not ended yet."""
        more = self.unresolved - len(self.upstreams)
        named = ", ".join(each.name for each in self.upstreams)
        rest = f" and {more} more" if more > 0 else ""
        return f"{self.group.succeeded} of {needed_count(self.group)}: still {named}{rest}"

    def _named(self) -> str:
        named = ", ".join(
            f"{each.name} {each.execution_id}"
            f" ({'blocked by changed code' if each.blocked else each.public_state}"
            f"{': replay it too' if each.over else ''})"
            for each in self.upstreams
        )
        more = self.unresolved - len(self.upstreams)
        return named + (f" and {more} more" if more > 0 else "")
