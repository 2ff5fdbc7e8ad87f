"""Lanes: named queues that can be paused, resumed and drained.

A lane's state is looked at when work is created and when it is claimed; the
executions in it stay untouched, so pausing a million of them costs one row.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from flowfabric.core.checks import check_int, check_text
from flowfabric.core.ids import LaneId, parse_lane_id
from flowfabric.core.limits import PAGE_MAX
from flowfabric.core.records import Lane
from flowfabric.core.states import LaneState
from flowfabric.core.transitions import Changes
from flowfabric.core.views import stored_lane_id
from flowfabric.engine.unit import Operations, ready_topic, register_lanes
from flowfabric.errors import NotFound
from flowfabric.store.base import Reader, Transaction


class LanePage(Struct, frozen=True, kw_only=True):
    lanes: tuple[Lane, ...]
    next_cursor: LaneId | None


class Lanes(Operations):
    async def register_lane(self, lane_id: str, *, registered_by: str = "operator") -> Lane:
        """Make a lane known before its first execution. Safe to repeat."""
        parsed = parse_lane_id(lane_id)
        check_text("registered_by", registered_by)

        async def body(tx: Transaction) -> Lane:
            await register_lanes(tx, [parsed], registered_by)
            return (await tx.get(Lane, [(parsed,)]))[(parsed,)]

        return await self.store.transact(body)

    async def register_configured_lanes(self) -> None:
        """Make the lanes of the settings known."""
        if not self.config.lanes:
            return

        async def body(tx: Transaction) -> None:
            await register_lanes(tx, self.config.lanes, "configuration")

        await self.store.transact(body)

    async def list_lanes(self, *, cursor: str | None = None, limit: int = 100) -> LanePage:
        """Lanes by name, after `cursor`."""
        check_int("limit", limit, 0, PAGE_MAX)
        after = "" if cursor is None else parse_lane_id(cursor, "cursor")

        async def body(reader: Reader) -> Sequence[Lane]:
            return await reader.select_records(Lane, "list_lanes", after=after, limit=limit + 1)

        found = await self.store.read(body) if limit else []
        page = tuple(found[:limit])
        for lane in page:
            stored_lane_id(lane.lane_id)
        more = len(found) > limit
        return LanePage(lanes=page, next_cursor=page[-1].lane_id if more else None)

    async def pause_lane(self, lane_id: str) -> Lane:
        """Stop handing out its work; submissions are still taken, running work goes on."""
        return await self._set_state(lane_id, LaneState.PAUSED)

    async def resume_lane(self, lane_id: str) -> Lane:
        """Take and hand out work again."""
        return await self._set_state(lane_id, LaneState.ACTIVE)

    async def drain_lane(self, lane_id: str) -> Lane:
        """Refuse new submissions; what is there is worked off."""
        return await self._set_state(lane_id, LaneState.DRAINING)

    async def disable_lane(self, lane_id: str) -> Lane:
        """Refuse new submissions and hand out nothing."""
        return await self._set_state(lane_id, LaneState.DISABLED)

    async def _set_state(self, lane_id: str, state: LaneState) -> Lane:
        key = (parse_lane_id(lane_id),)

        async def body(tx: Transaction) -> Lane:
            lane = (await tx.lock(Lane, [key])).get(key)
            if lane is None:
                raise NotFound("lane", lane_id)
            if lane.state is state:
                return lane
            changed = structs.replace(lane, state=state, state_changed_at_ms=await tx.now_ms())
            await tx.save(Changes(updates=(changed,)))
            tx.hint(ready_topic(lane.lane_id))
            return changed

        return await self.store.transact(body)
