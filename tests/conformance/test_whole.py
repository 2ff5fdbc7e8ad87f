"""The suite is about the whole engine."""

from pathlib import Path

from flowfabric import Engine
from flowfabric.engine.unit import Operations

HERE = Path(__file__).parent
NOT_OPERATIONS = {"open", "check_request"} | vars(Operations).keys()


def test_every_operation_is_exercised_here() -> None:
    operations = {
        name for name in dir(Engine) if not name.startswith("_") and name not in NOT_OPERATIONS
    }
    text = "".join(path.read_text() for path in HERE.glob("*.py"))
    assert sorted(name for name in operations if name not in text) == []
