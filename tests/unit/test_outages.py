"""What came in place of an answer: an outage, a reason to ask again, or the end."""

import time

import pytest

from flowfabric import errors
from flowfabric.batching import NO_ITEMS_FAULT
from flowfabric.outages import ASK_AGAIN, LATELY_S, Outages, is_outage, outage_behind

KINDS = errors.BackendErrorKind


@pytest.mark.parametrize(
    ("error", "outage", "asked_again", "fails_its_batch"),
    [
        pytest.param(errors.Transport("x", "", kind=KINDS.TIMEOUT), True, True, True, id="silence"),
        pytest.param(errors.Transport("x", "", kind=KINDS.AUTH), False, True, True, id="password"),
        pytest.param(errors.ResourceExhausted("pool", 1), True, True, True, id="full pool"),
        pytest.param(errors.OperationTimeout("x", 1), False, True, True, id="out of time"),
        pytest.param(errors.RetryExhausted("x"), False, True, False, id="collisions"),
        pytest.param(errors.LockTimeout("x"), False, True, False, id="a locked row"),
        pytest.param(errors.FileLocked("x"), True, True, True, id="a locked file"),
        pytest.param(errors.Unavailable("x"), False, False, True, id="closed"),
        pytest.param(errors.DatabaseGone("x"), False, False, True, id="deleted file"),
        pytest.param(errors.NotFound("x", "y"), False, False, False, id="refusal"),
    ],
)
def test_what_follows_from(
    error: errors.FlowFabricError, outage: bool, asked_again: bool, fails_its_batch: bool
) -> None:
    assert is_outage(error) is outage
    assert isinstance(error, ASK_AGAIN) is asked_again
    assert isinstance(error, NO_ITEMS_FAULT) is fails_its_batch


def test_the_log_of_an_outage_does_not_advise_callers(caplog: pytest.LogCaptureFixture) -> None:
    lost = errors.Transport("x", "no answer", kind=KINDS.TIMEOUT, may_have_happened=True)
    Outages().failed("it", lost, time.monotonic())
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == "it does not answer: transport (x): no answer"


AWAY = errors.Transport("x", "", kind=KINDS.TIMEOUT)
GONE = errors.DatabaseGone("x")


def test_an_answer_to_what_was_asked_before_it_failed_ends_no_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outages = Outages()
    early_s = time.monotonic()
    for error in (AWAY, GONE):
        outages.failed("it", error, time.monotonic())
        outages.answered("it", early_s)
    assert [each.getMessage() for each in caplog.records] == [f"it does not answer: {AWAY}"]

    outages.answered("it", time.monotonic())
    assert [each.getMessage()[:17] for each in caplog.records[1:]] == ["it answers again,"]


def test_what_was_asked_before_it_answered_others_begins_no_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outages = Outages()
    outages.failed("it", AWAY, time.monotonic())
    early_s = time.monotonic()
    outages.answered("it", time.monotonic())
    outages.failed("it", AWAY, early_s)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("cause", [None, AWAY])
def test_a_connection_that_cannot_be_asked_hides_no_outage_and_makes_none(
    cause: Exception | None,
) -> None:
    def fails(error: BaseException) -> bool:
        raise AttributeError("a terminated connection")

    error = ValueError("mine")
    error.__cause__ = cause
    assert outage_behind(error, fails) is (cause is AWAY)


def test_what_the_log_has_told_need_not_be_said_again_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outages, asked_at_s = Outages(), time.monotonic()
    assert not outages.told_lately()
    outages.failed("it", errors.Transport("x", "", kind=KINDS.TRANSPORT), asked_at_s)
    assert outages.told_lately()
    outages.answered("it", time.monotonic())
    assert outages.told_lately()
    monkeypatch.setattr(time, "monotonic", lambda: asked_at_s + LATELY_S + 1)
    assert not outages.told_lately()
