"""Which lane gets the next slots when a worker serves several with different weights."""

from collections.abc import Mapping, Sequence

from flowfabric.core.checks import check_int
from flowfabric.core.ids import parse_lane_id
from flowfabric.errors import InvalidInput
from flowfabric.task import Task

WEIGHT_MAX = 1_000

LaneWeights = Sequence[str] | Mapping[str, int]


def lanes_of(tasks: Mapping[str, Task[..., object]]) -> list[str]:
    """The lanes that tasks are submitted to."""
    return sorted({task.settings.lane for task in tasks.values()}) or ["default"]


class LaneShares:
    """Smooth weighted round robin: of any few turns in a row each lane gets its share."""

    def __init__(self, lanes: LaneWeights) -> None:
        if isinstance(lanes, str) or not lanes:
            raise InvalidInput("lanes", "must be a non-empty list of lanes", lanes)
        weights = lanes if isinstance(lanes, Mapping) else dict.fromkeys(lanes, 1)
        self.weights = {
            parse_lane_id(lane): check_int(f"lanes[{lane!r}]", weight, 1, WEIGHT_MAX)
            for lane, weight in weights.items()
        }
        self.names = tuple(self.weights)
        self.alike = len(set(self.weights.values())) == 1
        self._credit = dict.fromkeys(self.names, 0)

    def next(self) -> str:
        """The lane whose turn it is."""
        for lane, weight in self.weights.items():
            self._credit[lane] += weight
        chosen = max(self.names, key=lambda lane: self._credit[lane])
        self._credit[chosen] -= sum(self.weights.values())
        return chosen
