"""The lease, kept inside the handler's own database transaction.

While that transaction lasts it has the execution's row locked: nobody can take the
lease, nor renew it. So the lease is extended in there, for as long as a fence may last;
and given its usual time again just before the commit, where a transaction that took
longer than that is refused. Whatever else would need the row waits for the commit. A
verb of the same branch would wait for itself, and is refused at once.
"""

from contextvars import ContextVar

from flowfabric.core.ids import LeaseId
from flowfabric.engine.creation import BrokenBy
from flowfabric.errors import InvalidInput
from flowfabric.worker.held import HeldLease, clock_s

_inside: ContextVar[LeaseId | None] = ContextVar("flowfabric_fence", default=None)


def check_outside(lease: HeldLease) -> None:
    """Refuse what would wait for the row that this branch itself keeps locked."""
    if _inside.get() == lease.handle.lease_id:
        raise InvalidInput(
            "ctx",
            "inside a fence none of its verbs can be used: they would wait for your transaction,"
            " and it for them. Leave `with ctx.fence(…)` first; what belongs into the"
            " transaction is submitted with app.submit(…, connection=…)",
        )


class Inside:
    """What a fence does to the branch it is in."""

    def __init__(self, lease: HeldLease) -> None:
        self._lease = lease
        self._asked_at_s = 0.0

    def approach(self) -> None:
        """Before the store is asked."""
        self._lease.require()
        if _inside.get() == self._lease.handle.lease_id:
            raise InvalidInput("fence", "is open already; one transaction at a time")
        self._asked_at_s = clock_s()

    def enter(self, broken_by: BrokenBy) -> None:
        self._lease.enter_fence(self._asked_at_s, broken_by)
        _inside.set(self._lease.handle.lease_id)

    def leave(self) -> None:
        _inside.set(None)
        self._lease.leave_fence()
