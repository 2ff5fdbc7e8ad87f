"""Lanes: named queues that can be paused, resumed and drained.

A lane's state is looked at when work is created and when it is claimed; the executions in
it stay untouched, so pausing a million of them costs one row.
"""

from typing import Final

from msgspec import Struct, structs

from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.checks import check_int, check_text
from flowfabric.core.decisions import Changes
from flowfabric.core.ids import LaneId, parse_lane_id
from flowfabric.core.records import Lane
from flowfabric.core.states import LaneState, PublicState
from flowfabric.core.views import stored_lane_id
from flowfabric.engine import paging, routes, shell, topics
from flowfabric.errors import NotFound
from flowfabric.store.base import Transaction


class LanePage(Struct, frozen=True, kw_only=True):
    lanes: tuple[Lane, ...]
    next_cursor: LaneId | None


class LaneCounts(Struct, frozen=True, kw_only=True):
    """How much work there is in a lane that has not ended."""

    lane_id: LaneId
    ready: int = 0
    """Only a worker is missing."""
    running: int = 0
    delayed: int = 0
    suspended: int = 0
    held: int = 0
    """It waits for other executions, a limit, a grant or an operator."""


COUNTED_AS: Final = {
    PublicState.ACTIVE: "running",
    PublicState.DELAYED: "delayed",
    PublicState.SUSPENDED: "suspended",
}


class LaneCount(Struct, frozen=True, kw_only=True):
    """A row of `count_by_lane`."""

    lane_id: LaneId
    public_state: PublicState
    ready: bool
    executions: int

    @property
    def counted_as(self) -> str:
        return "ready" if self.ready else COUNTED_AS.get(self.public_state, "held")


class Lanes(shell.Group):
    async def register_lane(self, lane_id: str, *, registered_by: str = "operator") -> Lane:
        """Make a lane known before its first execution. Safe to repeat."""
        parsed = parse_lane_id(lane_id)
        check_text("registered_by", registered_by)

        async def body(tx: Transaction) -> Lane:
            await routes.register_lanes(tx, [parsed], registered_by)
            return (await tx.get(Lane, [(parsed,)]))[(parsed,)]

        return await self.store.transact(body)

    async def register_configured_lanes(self) -> None:
        """Make the lanes of the settings known."""
        if not self.shell.config.lanes:
            return

        async def body(tx: Transaction) -> None:
            await routes.register_lanes(tx, self.shell.config.lanes, "configuration")

        await self.store.transact(body)

    async def list_lanes(self, *, cursor: str | None = None, limit: int = 100) -> LanePage:
        """Lanes by name, after `cursor`."""
        check_int("limit", limit, 0, PAGE_MAX)
        after = "" if cursor is None else parse_lane_id(cursor, "cursor")

        found = await self.select_records(Lane, "list_lanes", after=after, limit=limit + 1)
        page, last = paging.cut(found, limit, lambda lane: lane.lane_id)
        for lane in page:
            stored_lane_id(lane.lane_id)
        return LanePage(lanes=page, next_cursor=last)

    async def pause_lane(self, lane_id: str) -> Lane:
        """Stop handing out its work; submissions are still taken, running work goes on."""
        return await self._set_state(lane_id, LaneState.PAUSED)

    async def resume_lane(self, lane_id: str) -> Lane:
        """Take and hand out work again."""
        return await self._set_state(lane_id, LaneState.ACTIVE)

    async def drain_lane(self, lane_id: str) -> Lane:
        """Refuse new submissions; workers finish what is there."""
        return await self._set_state(lane_id, LaneState.DRAINING)

    async def disable_lane(self, lane_id: str) -> Lane:
        """Refuse new submissions and hand out nothing."""
        return await self._set_state(lane_id, LaneState.DISABLED)

    async def _set_state(self, lane_id: str, state: LaneState) -> Lane:
        key = (parse_lane_id(lane_id),)

        async def body(tx: Transaction) -> Lane:
            lane = await tx.lock_one(Lane, key)
            if lane is None and state is not LaneState.ACTIVE:
                # A lane may be closed before its first execution.
                await routes.register_lanes(tx, key, "operator")
                lane = await tx.lock_one(Lane, key)
            if lane is None:
                raise NotFound("lane", lane_id)
            if lane.state is state:
                return lane
            changed = structs.replace(lane, state=state, state_changed_at_ms=await tx.now_ms())
            await tx.save(Changes(updates=(changed,)))
            tx.hint(topics.ready_topic(lane.lane_id))
            return changed

        return await self.store.transact(body)

    async def count_lanes(self) -> tuple[LaneCounts, ...]:
        """How much work there is in each lane that has any."""
        counts: dict[LaneId, dict[str, int]] = {}
        for row in await self.select_as(LaneCount, "count_by_lane"):
            lane, what = counts.setdefault(row.lane_id, {}), row.counted_as
            lane[what] = lane.get(what, 0) + row.executions
        return tuple(LaneCounts(lane_id=lane, **each) for lane, each in sorted(counts.items()))
