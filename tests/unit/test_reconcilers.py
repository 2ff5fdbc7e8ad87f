"""What a process that asks for expired leases remembers of an outage."""

import pytest

from flowfabric.core.bounds import OUTAGE_MS_MIN
from flowfabric.reconcilers import Silence

OUTAGE_S = OUTAGE_MS_MIN / 1_000


@pytest.mark.parametrize("answers", [0, 3], ids=["the first answer", "and those after it"])
def test_an_outage_is_remembered_once_it_is_over(answers: int) -> None:
    silence = Silence()
    silence.ask(10.0)
    silence.ask(12.0)
    assert silence.seen(17.0) == (7_000, 0)
    silence.end(17.0)
    for number in range(answers):
        silence.ask(17.0 + number)
        silence.end(17.0 + number + OUTAGE_S / 2)
    assert silence.seen(21.5) == (7_000, 4_500)


def test_the_outage_that_lasts_is_told_of_before_the_last_one() -> None:
    silence = Silence()
    silence.ask(10.0)
    silence.end(17.0)
    silence.ask(20.0)
    assert silence.seen(20.5) == (7_000, 3_500)
    assert silence.seen(23.0) == (3_000, 0)


def test_a_short_wait_is_no_outage() -> None:
    silence = Silence()
    assert silence.seen(5.0) == (0, 0)
    silence.ask(10.0)
    silence.end(10.0 + OUTAGE_S * 0.9)
    assert silence.seen(12.0) == (0, 0)
