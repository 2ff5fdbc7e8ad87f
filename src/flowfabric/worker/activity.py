"""What a task of a handler is doing: in calls, waiting for branches of its own, or neither."""


class TaskActivity:
    """What a task of a handler is about."""

    __slots__ = (
        "branches",
        "calls",
        "ended",
        "held",
        "in_turn",
        "picks",
        "running",
        "starter",
        "stopped",
        "unseen",
    )

    def __init__(self, starter: "TaskActivity | None" = None) -> None:
        self.starter = starter
        self.running: object = None
        """The task itself, as long as it runs."""
        self.calls = 0
        """Durable calls of it that are awaited."""
        self.stopped = 0
        """Those that just wait, for a time, a child, a signal or other code."""
        self.held = 0
        """Those it awaits itself: it does nothing else meanwhile."""
        self.branches = 0
        """Tasks it has started that have not ended."""
        self.ended = 0
        """Tasks it has started that have ended since its last call."""
        self.unseen = 0
        """Those that have ended during its calls: it may not have gone on with them yet."""
        self.in_turn = False
        """It may go on as they end: one has failed, was cancelled, or has ended before others."""
        self.picks = False
        """It was seen to wait for a set of them: which it goes on with first is a matter of chance
        if several have ended."""
        if starter is not None:
            starter.branches += 1

    @property
    def is_outside_calls(self) -> bool:
        """Whether it waits neither in a durable call nor for branches of its own."""
        return self.calls == 0 and self.branches == 0

    @property
    def is_acting(self) -> bool:
        """Whether a durable call of it goes on by itself."""
        return self.calls > self.stopped

    def end(self, *, cut_off: bool = False) -> None:
        if self.starter is not None:
            self.starter.branches -= 1
            self.starter.ended += 1
            self.starter.unseen += self.starter.held > 0
            self.starter.in_turn |= cut_off or self.starter.branches > 0
        self.starter = self.running = None
