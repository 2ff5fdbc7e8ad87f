"""Summaries: documents that attempts patch while they run."""

import json

import pytest

from flowfabric import Engine
from flowfabric.core.streams import NULL, DurableSummary, NewFrame, Visibility
from flowfabric.engine.streams import FrameAppend
from flowfabric.errors import InvalidInput
from flowfabric.testing import SettableClock
from tests.conformance.given import Given
from tests.conformance.test_streams import LIVE, frames_of, patch, said, stream_of, text


async def test_a_summary_is_what_its_patches_come_to(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    began_ms = clock.now_ms()
    assert await engine.read_summary(claimed.execution_id, 0) is None
    patches: list[dict[str, object]] = [
        {"a": {"b": 1}, "c": 2},
        {"a": {"d": NULL}, "c": None},
        {"e": [NULL]},
    ]
    for version, members in enumerate(patches, 1):
        answer = await engine.append_frame(claimed.handle, patch(**members))
        assert answer.summary_version == version
        clock.advance(ms=5)
    await engine.append_frame(claimed.handle, text("a"))
    summary = await engine.read_summary(claimed.execution_id, 0)
    assert summary is not None
    assert json.loads(summary.document) == {"a": {"b": 1, "d": None}, "e": [None]}
    assert (summary.version, summary.patch_kind) == (3, "json-merge-patch")
    assert (summary.first_applied_ms, summary.last_updated_ms) == (began_ms, began_ms + 10)
    await engine.complete(claimed.handle)
    assert await engine.read_summary(claimed.execution_id, 0) == summary
    assert await engine.read_summary(claimed.execution_id, 1) is None


@pytest.mark.parametrize("wrong", [b"{", b'{"a":1e400}'])
async def test_a_refused_patch_leaves_everything_as_it_was(
    engine: Engine, given: Given, wrong: bytes
) -> None:
    claimed = await given.running()
    await engine.append_frame(claimed.handle, patch(a=1))
    before = await stream_of(engine, claimed.execution_id)
    (answer,) = await engine.append_frames(
        [
            FrameAppend(
                handle=claimed.handle,
                frames=(text("x"), patch(b=2), NewFrame(payload=wrong, mode=DurableSummary())),
            )
        ]
    )
    assert isinstance(answer, InvalidInput)
    assert await stream_of(engine, claimed.execution_id) == before
    summary = await engine.read_summary(claimed.execution_id, 0)
    assert summary is not None
    assert (summary.document, summary.version) == (b'{"a":1}', 1)


async def test_modes_may_be_mixed_and_best_effort_frames_left_out(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    for frame in (text("a"), text("b", LIVE), patch(c=1), text("d", LIVE)):
        await engine.append_frame(claimed.handle, frame)
    assert await said(engine, claimed.execution_id) == ["a", "b", '{"c": 1}', "d"]
    durable = await engine.read_stream(
        claimed.execution_id, 0, visibility=Visibility.EXCLUDE_BEST_EFFORT
    )
    assert [frame.text for frame in durable.frames] == ["a", '{"c": 1}']
    live = await frames_of(engine, claimed.execution_id)
    assert [(frame.mode, frame.ttl_ms, frame.summary_version) for frame in live] == [
        ("durable", None, None),
        ("best_effort", 5_000, None),
        ("summary", None, 1),
        ("best_effort", 5_000, None),
    ]
