"""Routes: who may run what.

Each distinct (lane, kind, required capabilities) is one small row; executions
point at it. Claims pick routes first and rows second.
"""

import msgspec

from flowfabric.core.model import WorkerPresence
from flowfabric.store.base import Reader


async def required_capabilities(reader: Reader, route_id: int) -> tuple[str, ...]:
    (row,) = await reader.select("route_by_id", route_id=route_id)
    return tuple(msgspec.json.decode(str(row["capabilities"]), type=list[str]))


def serves(
    presence: WorkerPresence, lane_id: str, execution_kind: str, required: tuple[str, ...]
) -> bool:
    """Whether the worker would claim from this route."""
    kinds = None if presence.kinds is None else _names(presence.kinds)
    return (
        lane_id in _names(presence.lanes)
        and (kinds is None or execution_kind in kinds)
        and set(required) <= set(_names(presence.capabilities))
    )


def _names(text: str) -> list[str]:
    return msgspec.json.decode(text, type=list[str])
