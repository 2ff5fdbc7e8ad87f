"""What happens to an app's executions, as it happens."""

from collections.abc import AsyncIterator

from flowfabric.connection import Opened
from flowfabric.core.events import read_cursor
from flowfabric.core.ids import Namespace
from flowfabric.engine.engine import Engine
from flowfabric.engine.events import FROM_NOW, Subscription, Told
from flowfabric.errors import InvalidInput
from flowfabric.task import Task

START = "start"
NOW = "now"


class Feed:
    """The events of an app."""

    namespace: Namespace

    async def _open_unless_closed(self) -> Opened:
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
        """Events of this app's namespace, in order and without gaps; it never ends.

        It begins `now`, at the `start` of the log, or after the cursor of an event: keep the
        cursor to continue there, in any process. `category` is `completion`, `lease`, `signal`,
        `operator`, `tag` or `budget`; `task` is a task or its name; `execution_id` is any id
        that `App.run` takes.
        """
        opened = await self._open_unless_closed()
        subscription = await subscribe(
            opened.engine,
            self.namespace,
            after=after,
            execution_id=execution_id,
            task=task,
            category=category,
            tag=tag,
        )
        while (told := await next_told(opened, subscription)) is not None:
            yield told


async def subscribe(
    engine: Engine,
    namespace: str,
    *,
    after: str,
    execution_id: str | None,
    task: Task[..., object] | str | None,
    category: str | None,
    tag: tuple[str, str] | None,
) -> Subscription[Told]:
    """Subscribe as `Feed.events` does."""
    return await engine.subscribe_events(
        after=position_of(after),
        namespace=namespace,
        execution_id=None
        if execution_id is None
        else engine.named_execution_id(execution_id, namespace),
        kind=_kind(task),
        category=category,
        tag=tag,
    )


async def next_told(opened: Opened, subscription: Subscription[Told]) -> Told | None:
    """Wait for the next event; in tests, where nothing happens unasked, None if there is none."""
    if opened.endings.happens:
        return await anext(subscription)
    return await subscription.next_if_any()


def position_of(after: str) -> str:
    """The position that `now`, `start` or a cursor stands for."""
    if after in (NOW, START):
        return FROM_NOW if after == NOW else "0"
    try:
        read_cursor(after)
    except InvalidInput:
        problem = f"must be {NOW!r}, {START!r}, or the cursor of an event"
        raise InvalidInput("after", problem, after) from None
    return after


def _kind(task: object) -> str | None:
    if task is None or isinstance(task, str):
        return task
    if isinstance(task, Task):
        return task.name
    raise InvalidInput("task", "must be a task, or the name of one", task)
