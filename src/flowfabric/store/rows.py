"""Row verbs that every store builds from others, and what a transaction knows of rows."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from flowfabric.core.decisions import Place, place_of
from flowfabric.core.records import Record
from flowfabric.store import mapping
from flowfabric.store.base import Key, Parameter, Reader

R = TypeVar("R", bound=Record)
T = TypeVar("T")


class RowReader(Reader):
    """A reader that has to provide `get` and `select`, and has the short verbs from here."""

    async def get_one(self, record: type[R], key: Key) -> R | None:
        return (await self.get(record, [key])).get(key)

    async def select_as(self, kind: type[T], name: str, **parameters: Parameter) -> list[T]:
        rows = await self.select(name, **parameters)
        return mapping.values_of(kind, rows, parameters.get(mapping.PARTITION_KEY))

    def _remember(self, records: Iterable[Record]) -> None:
        """Note rows as they are in the database; only a transaction cares."""


class KnownRows(RowReader):
    """What a transaction knows of rows, as it found or wrote them, and what it is to hint."""

    def __init__(self) -> None:
        self.hinted: set[str] = set()
        self.announced: set[str] = set()
        """Hints that must be sent with the commit."""
        self._loaded: dict[Place, Record] = {}
        self._absent: set[Place] = set()

    async def lock(self, record: type[R], keys: Sequence[Key]) -> dict[Key, R]:
        raise NotImplementedError

    async def lock_one(self, record: type[R], key: Key) -> R | None:
        return (await self.lock(record, [key])).get(key)

    def hint(self, topic: str) -> None:
        self.hinted.add(topic)

    def announce(self, topic: str) -> None:
        self.hinted.add(topic)
        self.announced.add(topic)

    def note_absent(self, record: type[Record], keys: Sequence[Key]) -> None:
        self._absent.update((record, key) for key in keys)

    def _remember(self, records: Iterable[Record]) -> None:
        for record in records:
            place = place_of(record)
            self._loaded[place] = record
            self._absent.discard(place)
