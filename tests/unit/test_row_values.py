"""Rows of statements as typed values."""

import pytest
from msgspec import Struct

from flowfabric.core.ids import ExecutionId
from flowfabric.core.states import PublicState
from flowfabric.errors import Corruption
from flowfabric.store.base import Row
from flowfabric.store.mapping import values_of

UUID = "00000000-0000-4000-8000-000000000001"
FULL = f"{{fp:7}}:{UUID}"
SOUND: Row = {"partition_key": 7, "execution_id": UUID, "public_state": "failed", "awaited": 1}


class Ended(Struct, frozen=True):
    execution_id: ExecutionId
    public_state: PublicState
    awaited: bool
    parent_id: ExecutionId | None = None


def test_a_struct_takes_its_columns_and_leaves_others() -> None:
    assert values_of(Ended, [{**SOUND, "other": b"x"}]) == [
        Ended(ExecutionId(FULL), PublicState.FAILED, awaited=True)
    ]


def test_ids_take_the_partition_of_their_row_or_of_the_statement() -> None:
    row = {"execution_id": UUID, "parent_id": None, "public_state": "failed", "awaited": False}
    assert values_of(ExecutionId, [{"partition_key": 7, "execution_id": UUID}]) == [FULL]
    assert values_of(ExecutionId, [{"execution_id": UUID}], 7) == [FULL]
    assert values_of(Ended, [row], 7)[0] == Ended(ExecutionId(FULL), PublicState.FAILED, False)


def test_other_types_are_the_first_column() -> None:
    assert values_of(int, [{"trimmed": 3, "looked_at": 5}]) == [3]
    assert values_of(str, []) == []


@pytest.mark.parametrize("row", [{"public_state": "lost"}, {"awaited": "perhaps"}])
def test_a_row_that_does_not_fit_is_corruption(row: dict[str, str]) -> None:
    with pytest.raises(Corruption, match="Ended"):
        values_of(Ended, [{**SOUND, **row}])
