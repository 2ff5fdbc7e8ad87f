"""What must hold of the event log of any history."""

from collections import Counter
from collections.abc import AsyncIterator

from flowfabric import Engine
from flowfabric.core.events import START, EventCategory, LeaseEventType, StoredEvent

PAGE = 1_000


async def check_history(observer: Engine) -> list[str]:
    """Epochs only grow, and an execution ends once for each time it was begun."""
    epochs: dict[str, int] = {}
    endings: Counter[str] = Counter()
    replays: Counter[str] = Counter()
    violations: list[str] = []
    async for event in _events(observer):
        if event.category is EventCategory.LEASE and event.event_type == LeaseEventType.ACQUIRED:
            epoch = event.lease_epoch or 0
            if epoch <= epochs.get(event.execution_id, 0):
                violations.append(f"{event.execution_id}: epoch {epoch} was granted twice")
            epochs[event.execution_id] = epoch
        elif event.category is EventCategory.COMPLETION:
            endings[event.execution_id] += 1
        elif event.category is EventCategory.OPERATOR and event.event_type == "replayed":
            replays[event.execution_id] += 1
    for execution_id, count in endings.items():
        if count > 1 + replays[execution_id]:
            violations.append(
                f"{execution_id}: ended {count} times, replayed {replays[execution_id]} times"
            )
    return violations


async def _events(observer: Engine) -> AsyncIterator[StoredEvent]:
    after = START
    while True:
        page = await observer.read_events(after=after, limit=PAGE)
        for event in page.events:
            yield event
        if not page.events and page.cursor == after:
            return
        after = page.cursor
