"""`record_steps` stores exactly what the core decides, for executions with random pasts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.decision import Changes
from flowfabric.core.execution import Timing
from flowfabric.core.step_model import Step, StepKind
from flowfabric.core.steps import NewStep, decide_record
from flowfabric.core.transition import Subject
from flowfabric.engine.unit import fence_of, lease_columns
from tests.properties.pasts import Past
from tests.properties.test_differential import (
    KINDS,
    SHRINKING_TAKES_S,
    Grip,
    check_outcome,
    decide_each,
    held,
    histories,
    prepare,
    run_alone,
    shown,
    tuned,
)
from tests.properties.world import RETENTION_MS, World

new_steps = st.lists(
    st.builds(
        NewStep,
        step_key=st.sampled_from(("a", "ü#2")),
        after_key=st.sampled_from((None, "before")),
        kind=st.sampled_from(tuple(StepKind)),
        result=st.sampled_from((None, b"", b"\x00\xff", b"1")),
        sleep_ms=st.sampled_from((None, 0, 1_000)),
    ),
    min_size=len(KINDS),
    max_size=len(KINDS),
)


def check_record(
    world: World, histories: list[Past], held: list[Grip], steps: list[NewStep]
) -> None:
    grown, before = prepare(world, histories)
    handles = [handle for handle, _ in shown(grown, held)]
    given_steps = steps[: len(handles)]
    timing = Timing(now_ms=world.now_ms, retention_ms=RETENTION_MS)

    def decide(position: int, subject: Subject) -> Changes:
        fence = fence_of(handles[position])
        return decide_record(subject, fence, given_steps[position], None, timing).changes

    for _ in range(2):
        # The second time everything is stored already, and nothing changes any more.
        rows = run_alone(
            world,
            "record_steps",
            step_keys=[step.step_key for step in given_steps],
            after_keys=[step.after_key for step in given_steps],
            kinds=[step.kind.value for step in given_steps],
            results=[step.result for step in given_steps],
            sleeps_ms=[step.sleep_ms for step in given_steps],
            **lease_columns(handles),
        )
        sure, decided = decide_each(world, before, handles, decide)
        assert sorted((row["position"], row["now_ms"]) for row in rows) == [
            (position, world.now_ms) for position in sure
        ]
        stored: list[Step] = []
        for each in grown:
            stored += world.run(world.engine.list_steps(each.execution_id))
        expected = [record for changes in decided.values() for record in changes.inserts]
        assert sorted(stored, key=str) == sorted(expected, key=str)
        check_outcome(world, before, {})


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_storing_steps_by_statement_is_what_the_core_decides(world: World) -> None:
    @tuned(world, 100)
    @given(histories=histories, held=held, steps=new_steps)
    def check(histories: list[Past], held: list[Grip], steps: list[NewStep]) -> None:
        check_record(world, histories, held, steps)

    check()
