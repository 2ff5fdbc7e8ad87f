"""What can happen to executions, as values: small enough to print, easy to draw at random.

Executions and handles are chosen by `which`, counted back from the newest, so that a
sequence stays meaningful when parts of it are left out.
"""

from dataclasses import dataclass

from hypothesis import strategies as st

from tests.properties.reference import Rules
from tests.properties.world import RETENTION_MS

LANES = ("one", "two")
KINDS = ("mail", "video")
SWEEPS = ("attempts", "deadlines", "delays", "grants", "leases", "retention")


@dataclass(frozen=True)
class Create:
    lane: str
    kind: str
    priority: int
    rules: Rules
    delay_ms: int | None
    deadline_ms: int | None


@dataclass(frozen=True)
class Claim:
    worker: str
    lanes: tuple[str, ...]
    kinds: tuple[str, ...] | None
    offered: tuple[str, ...]
    ttl_ms: int
    limit: int


@dataclass(frozen=True)
class ClaimGranted:
    which: int
    worker: str
    ttl_ms: int
    asks_first: bool
    """Whether the worker asks for its grant right before."""


@dataclass(frozen=True)
class Work:
    verb: str
    which: int
    wait_ms: int
    late: bool
    """Done by one whose lease is gone while the execution still runs, if there is one."""


@dataclass(frozen=True)
class WorkMany:
    verb: str
    which: tuple[int, ...]
    late: bool


@dataclass(frozen=True)
class Operate:
    verb: str
    which: int
    worker: str
    offered: tuple[str, ...]
    on_ended: bool
    """Done to one that has ended, if there is one."""


@dataclass(frozen=True)
class Pass:
    step_ms: int
    sweeps: tuple[str, ...]


Action = Create | Claim | ClaimGranted | Work | WorkMany | Operate | Pass

nothing = frozenset[str]()
gpu = frozenset({"gpu"})

rules = st.builds(
    Rules,
    retries=st.sampled_from((0, 1, 2)),
    backoff_ms=st.sampled_from((0, 100)),
    reclaims=st.sampled_from((100, 100, 0, 1)),
    replays=st.sampled_from((10, 10, 0, 1)),
    attempt_timeout_ms=st.sampled_from((None, None, 0, 150)),
    deadline_after_ms=st.sampled_from((None, None, None, 2_000)),
    needs=st.sampled_from((nothing, nothing, gpu)),
)
workers = st.sampled_from(("ann", "bob", "eve"))
offers = st.sampled_from((("gpu",), ("cpu", "gpu"), ()))
ttls_ms = st.sampled_from((1_000, 100))
whiches = st.sampled_from((0, 1, 0, 2, 1, 3, 4))

creations = st.builds(
    Create,
    lane=st.sampled_from(LANES),
    kind=st.sampled_from(KINDS),
    priority=st.sampled_from((0, 5, 9_001)),
    rules=rules,
    delay_ms=st.sampled_from((None, None, 0, 50)),
    deadline_ms=st.sampled_from((None, None, 500)),
)
claims = st.builds(
    Claim,
    worker=workers,
    lanes=st.sampled_from((LANES, LANES, LANES, ("two",))),
    kinds=st.sampled_from((None, None, KINDS, ("mail",))),
    offered=offers,
    ttl_ms=ttls_ms,
    limit=st.integers(1, 3),
)
grant_claims = st.builds(
    ClaimGranted, which=whiches, worker=workers, ttl_ms=ttls_ms, asks_first=st.booleans()
)
works = st.builds(
    Work,
    verb=st.sampled_from(
        (
            "renew",
            "delay",
            "fail",
            "complete",
            "delay",
            "complete",
            "break",
            "progress",
            "fail",
            "wait_children",
            "give_up",
        )
    ),
    which=whiches,
    wait_ms=st.sampled_from((0, 0, 50, 1_000)),
    late=st.booleans(),
)
batches = st.builds(
    WorkMany,
    verb=st.sampled_from(("renew", "complete")),
    which=st.lists(whiches, min_size=2, max_size=4).map(tuple),
    late=st.booleans(),
)
operations = st.builds(
    Operate,
    verb=st.sampled_from(
        (
            "revoke",
            "replay",
            "grant",
            "reprioritise",
            "revoke",
            "replay",
            "cancel",
            "look_at_lease",
            "look_at_attempt",
            "look_at_deadline",
            "look_at_delay",
            "create_again",
        )
    ),
    which=whiches,
    worker=workers,
    offered=offers,
    on_ended=st.sampled_from((False, False, True)),
)
passings = st.builds(
    Pass,
    step_ms=st.sampled_from((0, 1, 49, 50, 50, 100, 100, 100, 900, RETENTION_MS)),
    sweeps=st.sampled_from((SWEEPS, SWEEPS[::-1], ("delays",), ("leases",), (), ())),
)

# Often enough a worker gets something and does something with it.
actions: st.SearchStrategy[Action] = st.one_of(
    works,
    claims,
    works,
    passings,
    operations,
    claims,
    works,
    passings,
    creations,
    batches,
    grant_claims,
)
