"""Any sequence of operations keeps the engine's promises.

Hypothesis invents the sequences: several workers, kinds and capabilities, operators,
reconcilers, a clock that moves, and workers that come back late with handles they
should have thrown away. After every step the stored rows are compared with what they
were before and with `reference.py`.
"""

from collections.abc import Callable, Coroutine

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)

from flowfabric import Engine, FlowFabricError
from flowfabric.core.creation import NewExecution
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId
from flowfabric.core.results import Claimed, Created
from flowfabric.core.states import FailureClass, PublicState
from flowfabric.errors import NotFound
from tests.properties.invariants import check_final, check_rows, check_step
from tests.properties.reference import Answer, Known, Reference, Rules
from tests.properties.world import RETENTION_MS, Life, Lives, World, examples

LANES = ("one", "two")
KINDS = ("mail", "video")
WORKERS = ("ann", "bob", "eve")
TTL_MS = (100, 1_000)

rules = st.builds(
    Rules,
    retries=st.sampled_from((0, 1, 2)),
    backoff_ms=st.sampled_from((0, 100)),
    reclaims=st.sampled_from((0, 1, 100)),
    replays=st.sampled_from((0, 1, 10)),
    attempt_timeout_ms=st.sampled_from((None, 0, 150)),
    deadline_after_ms=st.sampled_from((None, None, 2_000)),
    needs=st.sampled_from((frozenset[str](), frozenset({"gpu"}))),
)
steps_ms = st.sampled_from((1, 49, 50, 100, 101, 999, 1_000, RETENTION_MS))
offers = st.sampled_from(((), ("gpu",), ("cpu", "gpu")))

SWEEPS: dict[str, tuple[Callable[[Engine], Coroutine[object, object, object]], Sweep]] = {}
