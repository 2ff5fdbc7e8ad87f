"""`record_steps` stores exactly what the core decides, for executions with random pasts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flowfabric.core.decisions import Changes, Subject, Timing
from flowfabric.core.records import Step, StepKind
from flowfabric.core.steps import NewStep, decide_record
from flowfabric.engine.shell import fence_of, lease_columns
from flowfabric.store.base import Key
from flowfabric.store.mapping import key_of
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
from tests.properties.world import World

new_steps = st.lists(
    st.builds(
        NewStep,
        step_key=st.sampled_from(("a", "ü#2")),
        after_key=st.sampled_from((None, "before")),
        kind=st.sampled_from((StepKind.SLEEP, *StepKind)),
        line=st.sampled_from(("", "=ü", "0a:1:2b:p:fetch")),
        name=st.sampled_from(("a", "submit ü")),
        digest=st.sampled_from(("", "0a.1b")),
        number=st.sampled_from((1, 7)),
        parallel=st.booleans(),
        asked_after=st.sampled_from((None, -2, 0, 6)),
        position=st.sampled_from((None, 1, 7)),
        failure=st.sampled_from((None, None, b"", b"\xffwhy")),
        result=st.sampled_from((None, b"", b"\x00\xff", b"1")),
        sleep_ms=st.sampled_from((None, 0, 1_000)),
        duration_ms=st.sampled_from((None, 0, 70)),
    ),
    min_size=len(KINDS),
    max_size=len(KINDS),
)


def check_record(
    world: World, histories: list[Past], held: list[Grip], steps: list[NewStep]
) -> None:
    grown, before = prepare(world, histories)
    handles = [handle for handle, _ in shown(grown, held)]
    first = steps[: len(handles)]
    expected: dict[Key, Step] = {}
    # Everything comes again, later: as it was, and then with what it lacked, or as something else.
    given_up = [structs.replace(step, failure=b"given up") for step in first]
    later = [structs.replace(step, position=9) for step in given_up]
    for given_steps in (first, first, given_up, later):
        world.clock.advance(ms=1)
        timing = Timing(now_ms=world.now_ms)

        def decide(
            position: int,
            subject: Subject,
            given_steps: list[NewStep] = given_steps,
            timing: Timing = timing,
        ) -> Changes:
            fence = fence_of(handles[position])
            return decide_record(subject, fence, given_steps[position], None, timing).changes

        rows = run_alone(
            world,
            "record_steps",
            step_keys=[step.step_key for step in given_steps],
            after_keys=[step.after_key for step in given_steps],
            kinds=[step.kind.value for step in given_steps],
            lines=[step.line for step in given_steps],
            names=[step.name for step in given_steps],
            digests=[step.digest for step in given_steps],
            numbers=[step.number for step in given_steps],
            parallels=[step.parallel for step in given_steps],
            asked_afters=[step.asked_after for step in given_steps],
            positions=[step.position for step in given_steps],
            failures=[step.failure for step in given_steps],
            results=[step.result for step in given_steps],
            sleeps_ms=[step.sleep_ms for step in given_steps],
            durations_ms=[step.duration_ms for step in given_steps],
            **lease_columns(handles),
        )
        sure, decided = decide_each(world, before, handles, decide)
        told: dict[object, object] = {row["position"]: row["at_ms"] for row in rows}
        answers: dict[object, object] = {}
        stored: list[Step] = []
        for each in grown:
            stored += world.run(world.engine.list_steps(each.execution_id))
        for position, (made,) in zip(
            sure, (each.inserts for each in decided.values()), strict=True
        ):
            known = expected.get(key_of(made))
            if known is not None:
                subject = before[handles[position].execution_id].subject
                fence = fence_of(handles[position])
                decision = decide_record(subject, fence, given_steps[position], known, timing)
                answers[position] = decision.answer.at_ms
                (made,) = decision.changes.updates or (known,)
            assert isinstance(made, Step)
            answers.setdefault(position, made.recorded_at_ms)
            expected[key_of(made)] = made
        assert told == answers
        assert sorted(stored, key=str) == sorted(expected.values(), key=str)
        check_outcome(world, before, {})


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_storing_steps_by_statement_is_what_the_core_decides(world: World) -> None:
    @tuned(world, 100)
    @given(histories=histories, held=held, steps=new_steps)
    def check(histories: list[Past], held: list[Grip], steps: list[NewStep]) -> None:
        check_record(world, histories, held, steps)

    check()
