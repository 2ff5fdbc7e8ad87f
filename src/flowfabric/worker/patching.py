"""The verb by which a handler asks whether a change of its code is on; see docs/deploys.md."""

from collections.abc import Coroutine
from typing import Final

from flowfabric.core.checks import check_text
from flowfabric.worker.journal import Patch
from flowfabric.worker.services import Services, Verbs, on_loop
from flowfabric.worker.signals import SignalVerbs

PATCH_NAME_BYTES_MAX: Final = 100


class PatchVerbs(Verbs):
    """What a context can do about code that changes on purpose."""

    @on_loop
    def patched(self, name: str) -> Coroutine[object, object, bool]:
        """Whether a change of the code is on for this run: `if await ctx.patched("…"):`.

        True for a run that comes here for the first time, and from then on; false for one
        that passed this place with the old code. Each place in the code decides for itself.
        """
        return answer(self._services, ask(self._services, name))


class BlockingPatchVerbs:
    """The same for plain functions, which run in a thread."""

    _verbs: SignalVerbs

    def patched(self, name: str) -> bool:
        """Whether a change of the code is on for this run; see `Context.patched`."""
        services = self._verbs._services
        return services.wait(answer(services, ask(services, name)))


def ask(services: Services, name: str) -> Patch:
    check_text("name", name, bytes_max=PATCH_NAME_BYTES_MAX, empty=False)
    return services.steps.ask_patch(name)


async def answer(services: Services, patch: Patch) -> bool:
    services.check()
    with services.parking.working():
        return await services.steps.patched(patch)
