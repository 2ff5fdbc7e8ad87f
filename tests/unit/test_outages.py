"""What came in place of an answer: an outage, a reason to ask again, or the end."""

import pytest

from flowfabric import errors
from flowfabric.outages import ASK_AGAIN, is_outage
from flowfabric.submission import NO_ITEMS_FAULT

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
