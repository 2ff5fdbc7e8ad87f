"""What the lines of a durable function tell its journal, and ask of it."""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Protocol

from flowfabric.core.journal import Asked
from flowfabric.core.records import Step
from flowfabric.core.shared_items import Pool
from flowfabric.core.shelf import Shelf

if TYPE_CHECKING:
    from flowfabric.worker.branches import DurableCall, Line, SeenFailure


class Watched(Protocol):
    """What lines tell the journal, and ask of it."""

    def tick(self) -> int:
        """The next number of all: whatever happens later gets a higher one."""

    def reached(self) -> int | None:
        """The position of the last outcome that has reached the handler, if it reacts to that."""

    def steps_of(self, line: str) -> Shelf:
        """What is stored of a line."""

    def lines_at(self, group: str) -> Shelf:
        """The lines that are stored as started at one place."""

    def stored_at(self, line: str, key: str) -> Shelf: ...

    def lines_beside(self, group: str) -> Iterable[Shelf]:
        """Those that are stored as started at any place of the same line."""

    def lines_in(self, line: str) -> Iterable[Shelf]:
        """Those that are stored as started in a line, at any place."""

    def pool_at(self, group: str, label: str) -> Pool | None:
        """What is stored of the lines of one coroutine function that were started at one place."""

    def step(self, key: str) -> Step: ...

    def is_beside_work(self, line: "Line") -> bool:
        """Whether a branch like this one, or one it has started, works outside of calls."""

    @property
    def by_arrival(self) -> bool:
        """Whether the handler may go on in the order in which branches have ended."""

    def taker_of(self, line: str, asked: Asked) -> "DurableCall | None":
        """The call of another branch that has taken over what was stored of a call in a line."""

    def new_line_id(self, parent: str, group: str, asked: Asked) -> str: ...

    def ordered_at(self, line: str, asked: Asked) -> Asked:
        """A new call with its ordinal among those like it in a line, whoever has made them."""

    def new_step_key(self, line: str, asked: Asked) -> tuple[str, Asked]: ...

    has_accepted: bool
    """Whether a person has accepted anything."""

    def accepted(self, key: str) -> Collection[str] | None:
        """What was stored when a person allowed a call that does not fit it; None if nobody has."""

    @property
    def seen(self) -> "list[SeenFailure]":
        """Failures the handler has seen that are not stored yet."""

    def asked(self) -> None:
        """A call is made."""

    def began(self) -> None:
        """A call is awaited."""

    def ended(self) -> None:
        """A call has ended."""

    async def failed(self, call: "DurableCall", error: BaseException) -> None:
        """A call ends without a result."""

    def task_began(self, line: "Line") -> None:
        """A task of the handler began, with a line of its own."""

    def task_ended(self, line: "Line", *, cut_off: bool) -> None:
        """A task of the handler has ended; `cut_off` if it was cancelled or has failed."""

    def is_uncertain(self) -> None:
        """The same code may make other calls than before, after the same outcomes."""

    def forgive(self, keys: Collection[str]) -> None:
        """A person has accepted that nobody asks for these where they are stored."""

    @property
    def closed(self) -> bool: ...
