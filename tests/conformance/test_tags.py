"""Tags and namespaces."""

from msgspec import structs

from flowfabric import Engine
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.errors import NotFound
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, Given
from tests.conformance.observed import events_since, execution_of, refused, refuses, unchanged

BAD_KEYS: tuple[object, ...] = ("", "a=b", " a", "a\n", "a\x1bb", "a." + "b" * 255, 5, None)


async def tags_of(engine: Engine, execution_id: str) -> dict[str, str]:
    snapshot = await engine.describe_execution(execution_id)
    assert snapshot is not None
    return snapshot.tags


async def test_a_tag_is_set_replaced_and_read(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting(tags={"app.kept": "1"})
    before = await execution_of(engine, execution_id)
    now_ms = clock.advance("1s")
    await engine.set_execution_tag(execution_id, "cairn.session_id", "ü \n x")
    assert await engine.get_execution_tag(execution_id, "cairn.session_id") == "ü \n x"
    assert await execution_of(engine, execution_id) == structs.replace(
        before, last_mutation_at_ms=now_ms
    )
    await engine.set_execution_tag(execution_id, "cairn.session_id", "")
    assert await engine.get_execution_tag(execution_id, "cairn.session_id") == ""
    assert await tags_of(engine, execution_id) == {"app.kept": "1", "cairn.session_id": ""}


async def test_keys_are_flat(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    tags = {"a.b": "1", "app.sub": "2", "app.sub.field": "3", "app._x9": "4"}
    assert await engine.set_execution_tags(execution_id, tags) == 4
    assert await tags_of(engine, execution_id) == dict(sorted(tags.items()))
    assert await engine.get_execution_tag(execution_id, "app.sub") == "2"
    assert await engine.get_execution_tag(execution_id, "app.none") is None


async def test_a_key_is_whatever_people_call_it(engine: Engine, given: Given) -> None:
    tags = {"Customer": "acme", "order id": "42", "größe/cm": "7", "x": ""}
    created = await given.waiting(tags=tags)
    tagged = await given.waiting()
    await engine.set_execution_tags(tagged, tags)
    await engine.set_execution_tag(tagged, "Priorität", "hoch")
    assert await tags_of(engine, created) == dict(sorted(tags.items()))
    assert await engine.get_execution_tag(tagged, "Priorität") == "hoch"
    by_key = ExecutionFilter(tag=("order id", "42"))
    found = (await engine.find_executions(by_key)).executions
    assert {each.execution_id for each in found} == {created, tagged}


async def test_several_tags_are_set_together(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting(tags={"a.old": "1", "a.kept": "1"})
    assert await engine.set_execution_tags(execution_id, {"a.old": "2", "a.new": "2"}) == 2
    assert await tags_of(engine, execution_id) == {"a.kept": "1", "a.new": "2", "a.old": "2"}
    async with unchanged(engine):
        await refuses(
            engine, "tag key", "set_execution_tags", execution_id, {"a.new": "3", "b=d": ""}
        )
        await refuses(engine, "tags", "set_execution_tags", execution_id, {})
        await refuses(engine, "tags", "set_execution_tags", execution_id, ["a.b"])
        many = {f"a.k{n}": "" for n in range(65)}
        await refuses(engine, "tags", "set_execution_tags", execution_id, many)


async def test_an_ended_execution_can_still_be_tagged(engine: Engine, given: Given) -> None:
    claimed = await given.completed()
    await engine.set_execution_tag(claimed.execution_id, "a.b", "c")
    assert await engine.get_execution_tag(claimed.execution_id, "a.b") == "c"


async def test_events_carry_the_instance_of_their_time(engine: Engine, given: Given) -> None:
    running = await given.running(tags={"cairn.instance_id": "first"})
    await engine.set_execution_tag(running.execution_id, "cairn.instance_id", "second")
    await engine.set_execution_tag(running.execution_id, "app.other", "x")
    await engine.renew(running.handle)
    told = [(event.category, event.instance_tag) for event in await events_since(engine)]
    assert told == [
        ("tag", "first"),
        ("lease", "first"),
        ("tag", "second"),
        ("tag", "second"),
        ("lease", "second"),
    ]


async def test_a_missing_execution_has_no_tags_and_takes_none(engine: Engine) -> None:
    async with unchanged(engine):
        assert await engine.get_execution_tag(UNKNOWN_ID, "a.b") is None
        assert await engine.get_execution_namespace(UNKNOWN_ID) is None
    async with refused(engine, NotFound) as caught:
        await engine.set_execution_tag(UNKNOWN_ID, "a.b", "c")
    assert (caught.value.entity, caught.value.id) == ("execution", UNKNOWN_ID)


async def test_bad_tags_are_refused(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    async with unchanged(engine):
        for key in BAD_KEYS:
            await refuses(engine, "tag key", "set_execution_tag", execution_id, key, "v")
            await refuses(engine, "tag key", "get_execution_tag", execution_id, key)
            await refuses(engine, "tag key", "get_execution_tag", UNKNOWN_ID, key)
        values: list[object] = [5, None, "v" * 4_097, "a\x00b", "\ud800"]
        for value in values:
            await refuses(engine, "tags[a.b]", "set_execution_tag", execution_id, "a.b", value)
    await engine.set_execution_tag(execution_id, "a." + "b" * 254, "v" * 4_096)
