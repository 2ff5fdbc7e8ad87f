"""Time where no database server says what it is."""

import pytest

from flowfabric.core.clock import JUMP_MS, Anchor, Anchored, decide_anchor

STARTED_MS = 1_800_000_000_000
KNOWN = Anchor(boot_id="this", started_at_ms=STARTED_MS)
UPTIME_MS = 90_000


@pytest.mark.parametrize(
    ("known", "set_by_ms", "expected"),
    [
        (None, 0, Anchored(anchor=KNOWN, moved_ms=0)),
        (KNOWN, 0, Anchored(anchor=KNOWN, moved_ms=0)),
        (KNOWN, JUMP_MS, Anchored(anchor=KNOWN, moved_ms=0)),
        (KNOWN, -JUMP_MS, Anchored(anchor=KNOWN, moved_ms=0)),
        (
            KNOWN,
            3_600_000,
            Anchored(
                anchor=Anchor(boot_id="this", started_at_ms=STARTED_MS + 3_600_000),
                moved_ms=3_600_000,
            ),
        ),
        (
            KNOWN,
            -3_600_000,
            Anchored(
                anchor=Anchor(boot_id="this", started_at_ms=STARTED_MS - 3_600_000),
                moved_ms=-3_600_000,
            ),
        ),
        (
            Anchor(boot_id="before", started_at_ms=0),
            0,
            Anchored(anchor=KNOWN, moved_ms=0),
        ),
    ],
)
def test_the_anchor_follows_a_clock_that_was_set_and_says_by_how_much(
    known: Anchor | None, set_by_ms: int, expected: Anchored
) -> None:
    decided = decide_anchor(
        known,
        boot_id="this",
        wall_ms=STARTED_MS + UPTIME_MS + set_by_ms,
        uptime_ms=UPTIME_MS,
    )
    assert decided == expected
