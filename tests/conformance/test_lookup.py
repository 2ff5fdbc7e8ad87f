"""Finding executions by a part of their id, and who is there."""

import pytest

from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from flowfabric.errors import InvalidInput, NotFound

FIRST = "{fp:7}:550e8400-e29b-41d4-a716-4466554400aa"
SECOND = "{fp:9}:550e8400-e29b-41d4-a716-4466554400bb"


@pytest.fixture
async def two(engine: Engine) -> None:
    await engine.create_executions(
        [NewExecution(execution_kind="work", execution_id=each) for each in (FIRST, SECOND)]
    )


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    "text",
    [
        FIRST,
        FIRST[7:],
        FIRST[7:].upper(),
        "550e8400-e29b-41d4-a716-4466554400a",
        "4466554400aa",
        "00aa",
        "a716-4466554400aa",
    ],
)
async def test_a_part_that_fits_one_execution_is_enough(engine: Engine, text: str) -> None:
    assert await engine.resolve_execution_id(text) == FIRST


@pytest.mark.usefixtures("two")
async def test_a_part_that_fits_several_names_them(engine: Engine) -> None:
    with pytest.raises(InvalidInput) as caught:
        await engine.resolve_execution_id("550e")
    assert caught.value.problem == (
        "fits several executions:"
        " 550e8400-e29b-41d4-a716-4466554400bb, 550e8400-e29b-41d4-a716-4466554400aa"
    )


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("text", ["dead", "e29b-41d4", "550e8400-e29b-41d4-a716-4466554400cc"])
async def test_a_part_that_fits_none_is_not_found(engine: Engine, text: str) -> None:
    with pytest.raises(NotFound):
        await engine.resolve_execution_id(text)


@pytest.mark.parametrize("text", ["", "a\nb", "{fp:7}:"])
async def test_what_cannot_be_an_id_is_refused(engine: Engine, text: str) -> None:
    with pytest.raises(InvalidInput):
        await engine.resolve_execution_id(text)


async def test_a_short_part_of_an_id_asks_for_more(engine: Engine) -> None:
    with pytest.raises(
        NotFound, match="not found: abc \\(of a uuid, give at least 4 characters\\)"
    ):
        await engine.resolve_execution_id("abc")


@pytest.mark.parametrize("text", ["abc", "wxyz", "%%%%", "____"])
async def test_what_cannot_be_a_part_is_nobodys_own_id_either(engine: Engine, text: str) -> None:
    with pytest.raises(NotFound):
        await engine.resolve_execution_id(text)


async def test_the_last_event_is_known(engine: Engine) -> None:
    assert await engine.last_event_id() == 0
    created = await engine.create_execution(NewExecution(execution_kind="work"))
    await engine.cancel_execution(created.execution_id, reason="no")
    page = await engine.read_events()
    assert await engine.last_event_id() == page.events[-1].event_id
