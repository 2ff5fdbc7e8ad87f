"""What an execution waits for through others, and when whoever waits is told of it again."""

from msgspec import structs

from flowfabric.core.diagnosis import Explanation
from flowfabric.core.ids import uuid_of
from flowfabric.core.records import Execution
from flowfabric.core.states import LifecyclePhase

Gist = tuple[str, ...]


def awaits_others(execution: Execution) -> bool:
    """Whether the end of an execution that it has asked for would move it."""
    return (
        execution.awaits_child
        and not execution.ready
        and execution.lifecycle_phase is LifecyclePhase.RUNNABLE
    )


def held_up_by(why: Explanation, other: Explanation) -> Explanation:
    """Why an execution waits, if that is until somebody acts on another one."""
    called = other.own_id or uuid_of(other.execution_id)
    return structs.replace(
        why,
        sentence=f"{why.sentence} About {called}: {other.sentence}",
        detail=why.detail | {"held_up_by": other.execution_id, "held_up_cause": other.cause},
        needs_somebody=True,
    )


def gist(why: Explanation) -> Gist:
    """What of an explanation is news when it changes: not the time that passes, nor the queue."""
    lasting = {
        name: value
        for name, value in why.detail.items()
        if name != "ahead" and not name.endswith("_ms")
    }
    return (why.cause, *(f"{name}={value}" for name, value in sorted(lasting.items())))
