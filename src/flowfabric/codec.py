"""A codec around payloads: encryption, compression, large values kept elsewhere.

    class Sealed:
        def encode(self, data: bytes) -> bytes: return fernet.encrypt(data)
        def decode(self, data: bytes) -> bytes: return fernet.decrypt(data)

    app = App(url, codec=Sealed())

Arguments, also of flows' nodes and of schedules, results, results of steps, payloads of signals,
what flows pass on, and what handlers emit go through it. What a codec has written is marked, so
that values stored before there was one are still read, and values are never encoded twice.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol, Self, TypeVar

from msgspec import Struct, structs

from flowfabric.config import EngineConfig
from flowfabric.core.checks import ENCODED, check_json
from flowfabric.core.handles import Handle
from flowfabric.core.leases import Granted, WorkerIdentity
from flowfabric.core.records import Step
from flowfabric.core.results import Claimed, Completed
from flowfabric.core.schedules import Schedule, ScheduleDefinition
from flowfabric.core.signals import SignalRequest
from flowfabric.core.steps import StepStored
from flowfabric.core.streams import Append, Appended, Coding
from flowfabric.core.tails import ExecutionFrames, StreamFrame, StreamFrames, SummaryDocument
from flowfabric.core.views import ExecutionContext, ExecutionDetails
from flowfabric.engine.details import Found
from flowfabric.engine.engine import Engine
from flowfabric.engine.leases import ClaimQuery
from flowfabric.engine.schedules import SchedulePage, Upserted
from flowfabric.engine.signals import SignalOptions
from flowfabric.engine.steps import StepReport
from flowfabric.engine.tails import Slice, TailPlace
from flowfabric.engine.waitpoints import ResumeSignal, SuspensionView
from flowfabric.engine.work import Completion
from flowfabric.errors import CodecFailed, FlowFabricError, InvalidInput
from flowfabric.store.base import Store

S = TypeVar("S", bound=Struct)

PLAIN_BYTES_MAX: Final = 1024 * 1024 * 1024
"""Largest value that is given to a codec; the engine's own limit is for what it makes of it."""


class Codec(Protocol):
    """What an app's payloads go through. Both may block and may be called from any thread.

    `decode(encode(data))` must be `data`, in every process that shares the database.
    """

    def encode(self, data: bytes, /) -> bytes: ...
    def decode(self, data: bytes, /) -> bytes: ...


class CodedEngine(Engine):
    """An engine whose payloads go through a codec on their way in and out."""

    codec: Codec

    @classmethod
    async def opened_with(cls, store: Store, config: EngineConfig | None, codec: Codec) -> Self:
        engine = await cls.open(store, config)
        engine.codec = codec
        return engine

    @property
    def plain_bytes_max(self) -> int:
        return PLAIN_BYTES_MAX

    # Bytes

    def pack(self, data: bytes | None) -> bytes | None:
        if not data or data.startswith(ENCODED):
            return data
        with _telling(decoding=False):
            return ENCODED + self.codec.encode(data)

    def unpack(self, data: bytes | None) -> bytes | None:
        if not data or not data.startswith(ENCODED):
            return data
        with _telling(decoding=True):
            return self.codec.decode(data.removeprefix(ENCODED))

    def _readable(self, data: bytes | None) -> bytes | None:
        """As it is stored when it cannot be read: of many, one must not spoil the others."""
        try:
            return self.unpack(data)
        except CodecFailed:
            return data

    # In

    def plain(self, payload: bytes) -> bytes:
        return self.unpack(payload) or b""

    def check_payload(self, payload: object, encoding: str | None) -> bytes:
        # How deep a value is nested shows only before the codec.
        plain = check_json("input_payload", payload, PLAIN_BYTES_MAX, encoding=encoding)
        return super().check_payload(self.pack(plain), encoding)

    def asked(self, payload: bytes) -> bytes:
        # A codec may write the same differently each time.
        return self._readable(payload) or b""

    async def upsert_schedule(self, definition: ScheduleDefinition) -> Upserted:
        """Arguments that have not changed stay as they are stored, however a codec writes them."""
        known = await super().describe_schedule(
            definition.schedule_id, namespace=definition.namespace
        )
        packed = await asyncio.to_thread(self._pack_arguments, definition, known)
        return await super().upsert_schedule(packed)

    def _pack_arguments(
        self, definition: ScheduleDefinition, known: Schedule | None
    ) -> ScheduleDefinition:
        plain = check_json(
            "input_payload",
            definition.input_payload,
            PLAIN_BYTES_MAX,
            encoding=definition.payload_encoding,
        )
        stored = b"" if known is None else known.payload
        same = stored.startswith(ENCODED) and self._readable(stored) == plain
        return structs.replace(definition, input_payload=stored if same else self.pack(plain))

    async def complete_many(
        self, completions: Sequence[Completion]
    ) -> list[Completed | FlowFabricError]:
        return await super().complete_many(await self._all(completions, self._pack_completion))

    def _pack_completion(self, completion: Completion) -> Completion:
        return structs.replace(completion, result=self.pack(completion.result))

    async def to_store(self, result: bytes) -> bytes:
        return await asyncio.to_thread(self.pack, result) or b""

    async def from_store(self, data: bytes) -> bytes:
        return await asyncio.to_thread(self.unpack, data) or b""

    async def record_steps(
        self, reports: Sequence[StepReport]
    ) -> list[StepStored | FlowFabricError]:
        return await super().record_steps(await self._all(reports, self._pack_report))

    def _pack_report(self, report: StepReport) -> StepReport:
        step = structs.replace(report.step, result=self.pack(report.step.result))
        return structs.replace(report, step=step)

    @property
    def coding(self) -> Coding:
        """Summaries are merged where they lie."""
        return Coding(lambda data: self.pack(data) or b"", lambda data: self.unpack(data) or b"")

    async def _append(
        self, appends: Sequence[Append]
    ) -> list[tuple[Appended, ...] | FlowFabricError]:
        return await super()._append(await self._all(appends, self._pack_append))

    def _pack_append(self, append: Append) -> Append:
        packed = tuple(self.pack(payload) or b"" for payload in append.stored)
        return structs.replace(append, stored=packed)

    def _signal_request(self, signal_name: str, options: SignalOptions) -> SignalRequest:
        return super()._signal_request(signal_name, self._pack_signal(options))

    async def _signal_asked_for(self, signal_name: str, options: SignalOptions) -> SignalRequest:
        # What is encoded already stays as it is.
        packed = await asyncio.to_thread(self._pack_signal, options)
        return await super()._signal_asked_for(signal_name, packed)

    def _pack_signal(self, options: SignalOptions) -> SignalOptions:
        payload = options.get("payload")
        return options if payload is None else {**options, "payload": self.pack(payload)}

    # Out

    async def describe_schedule(
        self, schedule_id: str, *, namespace: str = "default"
    ) -> Schedule | None:
        found = await super().describe_schedule(schedule_id, namespace=namespace)
        if found is None:
            return None
        return (await self._all([found], self._unpack_arguments))[0]

    async def list_schedules(
        self,
        *,
        namespace: str | None = None,
        cursor: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> SchedulePage:
        page = await super().list_schedules(namespace=namespace, cursor=cursor, limit=limit)
        plain = await self._all(page.schedules, self._unpack_arguments)
        return structs.replace(page, schedules=tuple(plain))

    def _unpack_arguments(self, schedule: Schedule) -> Schedule:
        return structs.replace(schedule, payload=self._readable(schedule.payload))

    async def _claim(
        self, query: ClaimQuery, worker: WorkerIdentity, lease_ttl_ms: int, limit: int
    ) -> list[Claimed]:
        claimed = await super()._claim(query, worker, lease_ttl_ms, limit)
        return await self._all(claimed, self._unpack_claim)

    async def _claimed(self, granted: Granted, lease_ttl_ms: int) -> Claimed:
        claimed = await super()._claimed(granted, lease_ttl_ms)
        return await asyncio.to_thread(self._unpack_claim, claimed)

    def _unpack_claim(self, claimed: Claimed) -> Claimed:
        return structs.replace(claimed, payload=self._readable(claimed.payload))

    async def find_outcomes(self, execution_ids: Sequence[str]) -> Found:
        found = await super().find_outcomes(execution_ids)
        plain = await self._all(
            list(found.ended.values()),
            lambda each: structs.replace(each, result=self._readable(each.result)),
        )
        return structs.replace(found, ended={each.execution_id: each for each in plain})

    async def read_execution_inputs(self, execution_id: str) -> dict[str, bytes | None]:
        found = await super().read_execution_inputs(execution_id)
        return await asyncio.to_thread(
            lambda: {name: self.unpack(value) for name, value in found.items()}
        )

    async def list_steps(self, execution_id: str) -> tuple[Step, ...]:
        found = await super().list_steps(execution_id)
        plain = await self._all(
            found, lambda each: structs.replace(each, result=self.unpack(each.result))
        )
        return tuple(plain)

    async def inspect_execution(self, execution_id: str) -> ExecutionDetails | None:
        found = await super().inspect_execution(execution_id)
        if found is None:
            return None
        steps = await self._all(
            found.steps, lambda each: structs.replace(each, result=self._readable(each.result))
        )
        return structs.replace(found, steps=tuple(steps))

    async def get_execution_result(self, execution_id: str) -> bytes | None:
        result = await super().get_execution_result(execution_id)
        return await asyncio.to_thread(self._readable, result)

    async def read_execution_context(self, execution_id: str) -> ExecutionContext:
        found = await super().read_execution_context(execution_id)
        payload = await asyncio.to_thread(self._readable, found.input_payload)
        return structs.replace(found, input_payload=payload)

    async def _read_slice(self, asked: Slice) -> StreamFrames:
        page = await super()._read_slice(asked)
        return structs.replace(page, frames=tuple(await self._all(page.frames, self._unpack_frame)))

    async def _read_on(self, place: TailPlace) -> ExecutionFrames:
        page = await super()._read_on(place)
        return structs.replace(page, frames=tuple(await self._all(page.frames, self._unpack_frame)))

    def _unpack_frame(self, frame: StreamFrame) -> StreamFrame:
        return structs.replace(frame, payload=self._readable(frame.payload))

    async def read_summary(self, execution_id: str, attempt_index: int) -> SummaryDocument | None:
        found = await super().read_summary(execution_id, attempt_index)
        if found is None:
            return None
        return structs.replace(found, document=await asyncio.to_thread(self.unpack, found.document))

    async def observe_signals(
        self, handle: Handle | bytes, *, include_unmatched: bool = False
    ) -> tuple[ResumeSignal, ...]:
        found = await super().observe_signals(handle, include_unmatched=include_unmatched)
        return tuple(await self._all(found, self._unpack_signal))

    async def describe_suspension(
        self, execution_id: str, suspension_id: str
    ) -> SuspensionView | None:
        found = await super().describe_suspension(execution_id, suspension_id)
        if found is None:
            return None
        signals = await self._all(found.signals, self._unpack_signal)
        return structs.replace(found, signals=tuple(signals))

    def _unpack_signal(self, signal: ResumeSignal) -> ResumeSignal:
        return structs.replace(signal, payload=self.unpack(signal.payload))

    async def _all(self, records: Sequence[S], change: Callable[[S], S]) -> list[S]:
        """Off the event loop: a codec may take its time."""
        if not records:
            return []
        return await asyncio.to_thread(lambda: [change(each) for each in records])


@contextmanager
def _telling(*, decoding: bool) -> Iterator[None]:
    """Whatever a codec raises becomes an error of ours that says so."""
    try:
        yield
    except Exception as error:
        raise CodecFailed(f"{type(error).__name__}: {error}", decoding=decoding) from error


def check_codec(codec: object) -> None:
    for name in ("encode", "decode"):
        if not callable(getattr(codec, name, None)):
            raise InvalidInput("codec", f"needs a method {name}(data: bytes) -> bytes", codec)
