"""What happens to an app's executions, as it happens."""

from collections.abc import AsyncIterator

from flowfabric.connection import Opened
from flowfabric.core.events import read_cursor
from flowfabric.core.ids import Namespace
from flowfabric.engine.events import Subscription, Told
from flowfabric.errors import InvalidInput
from flowfabric.task import Task

START = "start"
NOW = "now"


class Feed:
    """The events of an app."""

    namespace: Namespace

    async def open(self) -> Opened:
        raise NotImplementedError

    async def events(
        self,
        *,
        after: str = NOW,
        execution_id: str | None = None,
        task: Task[..., object] | str | None = None,
        category: str | None = None,
        tag: tuple[str, str] | None = None,
    ) -> AsyncIterator[Told]:
        """Events of this app's namespace, in order, none missing; it never ends by itself.

        From `now` on, from the `start` of the log, or after the cursor of an event: whoever
        keeps that goes on there, in any process. `category` is `completion`, `lease`, `signal`,
        `operator` or `tag`; `task` is one, or its name.
        """
        if after not in (NOW, START):
            _check_after(after)
        opened = await self.open()
        subscription = await opened.engine.subscribe_events(
            after={NOW: "", START: "0"}.get(after, after),
            namespace=self.namespace,
            execution_id=execution_id,
            kind=_kind(task),
            category=category,
            tag=tag,
        )
        if opened.endings.happens:
            async for told in subscription:
                yield told
        else:
            async for told in so_far(subscription):
                yield told


async def so_far(subscription: Subscription[Told]) -> AsyncIterator[Told]:
    """What there is, without waiting."""
    while (told := await subscription.next_if_any()) is not None:
        yield told


def _check_after(after: object) -> None:
    try:
        read_cursor(after)
    except InvalidInput:
        problem = f"must be {NOW!r}, {START!r}, or the cursor of an event (told.cursor)"
        raise InvalidInput("after", problem, after) from None


def _kind(task: object) -> str | None:
    if task is None or isinstance(task, str):
        return task
    if isinstance(task, Task):
        return task.name
    raise InvalidInput("task", "must be a task, or the name of one", task)
