"""Ids that somebody chose: where they lie, and what an idempotency key beside them may say."""

import pytest

from flowfabric import Engine
from flowfabric.core.ids import partition_of, solo_execution_id, uuid_of
from flowfabric.core.results import Created, Duplicate
from flowfabric.errors import IdempotencyConflict, InvalidInput, NotFound
from tests.conformance.given import new
from tests.conformance.observed import unchanged

UUID = "550e8400-e29b-41d4-a716-4466554400aa"
STRAY = f"{{fp:3}}:{UUID}"


async def test_a_chosen_id_with_another_partition_than_its_uuid_is_refused_with_the_right_one(
    engine: Engine,
) -> None:
    right = solo_execution_id(UUID, engine.deployment.partitions)
    assert right != STRAY
    async with unchanged(engine):
        with pytest.raises(InvalidInput, match="give the uuid alone, or ") as caught:
            await engine.create_execution(new(execution_id=STRAY, id_is_chosen=True))
    assert right in caught.value.problem
    for text in (UUID, right):
        answer = await engine.create_execution(new(execution_id=text, id_is_chosen=True))
        assert answer.execution_id == right


async def test_the_engine_takes_any_partition_and_people_are_shown_which(engine: Engine) -> None:
    await engine.create_execution(new(execution_id=STRAY))
    assert await engine.resolve_execution_id(UUID) == STRAY
    other = (await engine.create_execution(new(execution_id=UUID))).execution_id
    with pytest.raises(InvalidInput) as caught:
        await engine.resolve_execution_id(UUID)
    assert STRAY in caught.value.problem
    assert other in caught.value.problem


async def test_people_find_an_execution_by_its_id_with_another_partition(engine: Engine) -> None:
    right = (await engine.create_execution(new(execution_id=UUID))).execution_id
    assert await engine.resolve_execution_id(STRAY) == right
    await engine.create_execution(new(execution_id=STRAY))
    assert await engine.resolve_execution_id(STRAY) == STRAY
    assert await engine.resolve_execution_id(right) == right


async def test_a_strict_search_finds_nothing_of_another_namespace(engine: Engine) -> None:
    other = UUID[:-1] + ("1" if UUID[-1] != "1" else "2")
    for namespace, uuid in (("a", UUID), ("b", other)):
        await engine.create_execution(new(execution_id=uuid, namespace=namespace))
    for text in (UUID[:8], UUID[-6:], UUID):
        found = await engine.resolve_execution_id(text, namespace="a", strictly=True)
        assert uuid_of(found) == UUID
        with pytest.raises(NotFound):
            await engine.resolve_execution_id(text, namespace="c", strictly=True)
    with pytest.raises(InvalidInput, match="fits several executions"):
        await engine.resolve_execution_id(UUID[:8], namespace="a")


@pytest.mark.parametrize("operation", ["create_execution", "describe_execution"])
async def test_a_uuid_in_capitals_is_refused_for_that(engine: Engine, operation: str) -> None:
    text = UUID.upper()
    asked = new(execution_id=text) if operation == "create_execution" else text
    with pytest.raises(InvalidInput, match="must be a lower-case hyphenated uuid"):
        await getattr(engine, operation)(asked)


async def test_a_partition_alone_is_where_it_is_created(engine: Engine) -> None:
    made = (await engine.create_execution(new(partition_id=7))).execution_id
    assert partition_of(made) == 7
    assert made == solo_execution_id(uuid_of(made), engine.deployment.partitions)
    with pytest.raises(InvalidInput, match="below this deployment's"):
        await engine.create_execution(new(partition_id=9_999))


async def test_a_key_that_created_something_else_than_the_chosen_id_is_a_conflict(
    engine: Engine,
) -> None:
    first = await engine.create_execution(new(idempotency_key="k"))
    for chosen in ({"execution_id": "other"}, {"execution_id": UUID, "id_is_chosen": True}):
        async with unchanged(engine):
            with pytest.raises(IdempotencyConflict) as caught:
                await engine.create_execution(new(idempotency_key="k", **chosen))
        for named in ("'k'", first.execution_id, chosen["execution_id"]):
            assert str(named) in str(caught.value)
    # Without a choice the key decides, as ever.
    assert await engine.create_execution(new(idempotency_key="k", execution_id=UUID)) == Duplicate(
        execution_id=first.execution_id
    )


async def test_a_chosen_id_that_another_key_created_is_a_conflict(engine: Engine) -> None:
    await engine.create_execution(new(execution_id="own"))
    await engine.create_execution(new(execution_id="keyed", idempotency_key="k"))
    for own_id, by in (("own", "by no key"), ("keyed", "by key 'k'")):
        async with unchanged(engine):
            with pytest.raises(IdempotencyConflict) as caught:
                await engine.create_execution(new(execution_id=own_id, idempotency_key="k2"))
        for named in (own_id, by, "'k2'"):
            assert named in str(caught.value)
    assert isinstance(await engine.create_execution(new(idempotency_key="k2")), Created)


async def test_a_chosen_id_and_its_own_key_can_be_repeated(engine: Engine) -> None:
    request = new(execution_id="own", idempotency_key="k")
    first = await engine.create_execution(request)
    assert isinstance(first, Created)
    for again in (request, new(execution_id="own"), new(idempotency_key="k")):
        assert await engine.create_execution(again) == Duplicate(execution_id=first.execution_id)


@pytest.mark.parametrize("own_id", ["order-17", UUID])
async def test_a_chosen_id_that_a_run_of_another_task_has_is_a_conflict(
    engine: Engine, own_id: str
) -> None:
    chosen = new(execution_kind="pay", execution_id=own_id, id_is_chosen=True)
    first = await engine.create_execution(chosen)
    other = new(execution_kind="ship", execution_id=own_id, id_is_chosen=True)
    for requests in ([other], [new(), other]):
        async with unchanged(engine):
            with pytest.raises(IdempotencyConflict) as caught:
                await engine.create_executions(requests)
        for named in (own_id, "'pay'", "'ship'"):
            assert named in str(caught.value)
    for kind in ("pay", "pay@2"):
        again = new(execution_kind=kind, execution_id=own_id, id_is_chosen=True)
        assert await engine.create_execution(again) == Duplicate(execution_id=first.execution_id)


async def test_one_batch_cannot_give_two_tasks_the_same_id(engine: Engine) -> None:
    requests = [new(execution_kind=kind, execution_id="order-17") for kind in ("pay", "ship")]
    async with unchanged(engine):
        with pytest.raises(IdempotencyConflict, match="'pay', not of 'ship'"):
            await engine.create_executions(requests)
