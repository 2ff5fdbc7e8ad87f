"""Answers that travel to a remote app arrive as what they were, down to the type of each value."""

from collections.abc import Mapping

import pytest
from msgspec import Struct, structs

from flowfabric import Engine
from flowfabric.operations import OPERATIONS
from tests.conformance.calls import valid_calls
from tests.conformance.given import Given

PARTS = 4


def shape(value: object) -> object:
    """The types of everything in a value."""
    match value:
        case Struct():
            fields = {each.name: getattr(value, each.name) for each in structs.fields(value)}
            return type(value), {name: shape(inner) for name, inner in fields.items()}
        case Mapping():
            return {name: shape(inner) for name, inner in value.items()}
        case list() | tuple() | frozenset() | set():
            return type(value), [shape(inner) for inner in value]
        case _:
            return type(value)


@pytest.mark.parametrize("part", range(PARTS))
async def test_answers_keep_their_types(engine: Engine, given: Given, part: int) -> None:
    names = [each for each in await valid_calls(given) if each in OPERATIONS]
    sent, arrived = {}, {}
    for name in names[part::PARTS]:
        operation = OPERATIONS[name]
        answer = await getattr(engine, name)(**(await valid_calls(given))[name])
        sent[name] = shape(answer)
        arrived[name] = shape(operation.decode_result(operation.encode_result(answer)))
        await engine.resume_lane("default")
    assert arrived == sent
