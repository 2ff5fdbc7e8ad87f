"""Payloads, results and frames on their way into the database and back.

They pass as they are here; `flowfabric.codec` puts an app's codec in between.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from msgspec import Struct

from flowfabric.core.checks import ENCODED

NO_CODEC: Final = "there is none; pass App(codec=…) the one it was written with"

T = TypeVar("T")
Data = TypeVar("Data", bytes, bytes | None)
Item = TypeVar("Item", bound=Struct)


class Values:
    """How payloads, results and frames are stored: as they are, unless an app has a codec."""

    coded = False

    def __init__(self, plain_bytes_max: int) -> None:
        self.plain_bytes_max = plain_bytes_max
        """Largest payload or result that callers may pass."""

    def on_this_thread(self) -> "Values":
        """The same, whose coroutines never wait."""
        return self

    def pack(self, data: Data) -> Data:
        """Data as it is stored. Safe to repeat."""
        return data

    def seal(self, data: bytes) -> bytes:
        """Data as it is stored where another column says that it is coded."""
        return data

    def unpack(self, data: Data) -> Data:
        return data

    def show(self, data: Data) -> Data:
        """Unpacked; as it is stored if it cannot be read, so that others still can."""
        return data

    def read(self, data: Data) -> tuple[Data, str]:
        """Unpacked; as it is stored if it cannot be read, and what kept it from being read."""
        return data, NO_CODEC if data and data.startswith(ENCODED) else ""

    async def through(self, value: T, change: Callable[[T], T]) -> T:
        """Change a value by one of the above, if there is anything to change."""
        return value

    async def through_all(
        self, records: Sequence[Item], change: Callable[[Item], Item]
    ) -> Sequence[Item]:
        return records
