"""The verbs with which a handler speaks to whoever watches its run."""

from collections.abc import Mapping, Sequence

from flowfabric.core.policies import Duration
from flowfabric.core.streams import NewFrame
from flowfabric.worker.emitting import frames_of, patch_of
from flowfabric.worker.services import Verbs, on_loop


class StreamVerbs(Verbs):
    """The verbs of a context that speak to whoever watches the run."""

    @on_loop
    async def emit(
        self,
        content: object,
        *,
        kind: str = "",
        live: Duration | None = None,
        correlation_id: str | None = None,
    ) -> None:
        """Say something to whoever follows the run: text, bytes, or anything that is JSON.

        It is on its way when this returns, and stored before the attempt ends. `kind` is a
        label of yours. With `live="10s"` it is only for whoever watches, and soon forgotten.
        Emitted in a step, it counts as long as that step; outside of steps, as long as its
        attempt, and what was emitted before a pause is not emitted again.
        """
        self._services.check()
        await self._say(frames_of(content, kind, live, correlation_id))

    @on_loop
    async def summary(self, patch: Mapping[str, object]) -> None:
        """Change the run's summary: members replace those of their name, None deletes them.

        Objects are merged, lists replaced. Every attempt has a summary of its own.
        """
        self._services.check()
        await self._say([patch_of(patch)])

    async def _say(self, frames: Sequence[NewFrame]) -> None:
        emitter = self._services.emitter
        if emitter.is_new and not emitter.is_full:
            emitter.add(frames)
            return
        with self._services.parking.working():
            if emitter.is_new or not await emitter.repeats():
                emitter.add(frames)
                await emitter.room()


class BlockingStreamVerbs:
    """The same for plain functions."""

    def __init__(self, context: StreamVerbs) -> None:
        self._streaming = context

    def emit(
        self,
        content: object,
        *,
        kind: str = "",
        live: Duration | None = None,
        correlation_id: str | None = None,
    ) -> None:
        """Say something to whoever follows the run; see `Context.emit`."""
        verb = self._streaming.emit(content, kind=kind, live=live, correlation_id=correlation_id)
        self._streaming._services.wait(verb)

    def summary(self, patch: Mapping[str, object]) -> None:
        """Change the run's summary; see `Context.summary`."""
        self._streaming._services.wait(self._streaming.summary(patch))
