"""A codec around payloads: encryption, compression, large values kept elsewhere.

    class Sealed:
        def encode(self, data: bytes) -> bytes: return fernet.encrypt(data)
        def decode(self, data: bytes) -> bytes: return fernet.decrypt(data)

    app = App(url, codec=Sealed())

It encodes arguments (also those of flow nodes and schedules), results of runs and steps, failures
of steps that later runs raise again, payloads of signals, values passed within flows, and what
handlers emit. Encoded values are marked, so that values stored before the app had a codec remain
readable, and no value is encoded twice.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from flowfabric.core.checks import ENCODED
from flowfabric.engine.values import Data, Item, T, Values
from flowfabric.errors import CodecFailed, InvalidInput

PLAIN_BYTES_MAX: Final = 1024 * 1024 * 1024
"""Largest value given to a codec; the engine's own limit applies to the encoded value."""


class Codec(Protocol):
    """Encodes and decodes payloads. Both methods may block and may be called from any thread.

    `decode(encode(data))` must be `data`, in every process that shares the database.
    """

    def encode(self, data: bytes, /) -> bytes: ...
    def decode(self, data: bytes, /) -> bytes: ...


class CodedValues(Values):
    """Payloads go through a codec on their way in and out, off the event loop."""

    coded = True

    def __init__(self, codec: Codec, *, waits: bool = True) -> None:
        super().__init__(PLAIN_BYTES_MAX)
        self._codec = codec
        self._waits = waits

    def on_this_thread(self) -> "CodedValues":
        return CodedValues(self._codec, waits=False)

    def pack(self, data: Data) -> Data:
        if not data or data.startswith(ENCODED):
            return data
        return self.seal(data)

    def seal(self, data: bytes) -> bytes:
        if not data:
            return data
        with _telling(decoding=False):
            return ENCODED + _as_bytes(self._codec.encode(data))

    def unpack(self, data: Data) -> Data:
        if not data or not data.startswith(ENCODED):
            return data
        with _telling(decoding=True):
            plain = _as_bytes(self._codec.decode(data.removeprefix(ENCODED)))
            if not plain:
                raise ValueError("it returned no data, and nothing empty is ever encoded")
            return plain

    def show(self, data: Data) -> Data:
        return self.read(data)[0]

    def read(self, data: Data) -> tuple[Data, str]:
        try:
            return self.unpack(data), ""
        except CodecFailed as error:
            return data, error.told

    async def through(self, value: T, change: Callable[[T], T]) -> T:
        if value is None:
            return value
        return await asyncio.to_thread(change, value) if self._waits else change(value)

    async def through_all(
        self, records: Sequence[Item], change: Callable[[Item], Item]
    ) -> Sequence[Item]:
        def change_all() -> list[Item]:
            return [change(each) for each in records]

        if not records:
            return records
        return await asyncio.to_thread(change_all) if self._waits else change_all()


@contextmanager
def _telling(*, decoding: bool) -> Iterator[None]:
    """Turn whatever a codec raises into `CodecFailed`."""
    try:
        yield
    except Exception as error:
        raise CodecFailed(f"{type(error).__name__}: {error}", decoding=decoding) from error


def _as_bytes(returned: object) -> bytes:
    """What a codec returned; drivers and caches like to return a view of bytes, or None."""
    if isinstance(returned, bytes):
        return returned
    if isinstance(returned, bytearray | memoryview):
        return bytes(returned)
    raise TypeError(f"it returned {type(returned).__name__}, not bytes")


def check_codec(codec: object) -> None:
    for name in ("encode", "decode"):
        if not callable(getattr(codec, name, None)):
            raise InvalidInput("codec", f"needs a method {name}(data: bytes) -> bytes", codec)
