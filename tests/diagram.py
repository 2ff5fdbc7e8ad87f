"""The state diagram of the documentation, drawn from the core's table of situations.

`python -m tests.diagram` writes it into `docs/concepts.md`; a test compares the two.
"""

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

from flowfabric.core.situations import (
    ENDED,
    HELD_BY_WORKER,
    READY,
    RULES,
    SET_ASIDE,
    UNFINISHED,
    Operation,
    Situation,
)

PAGE: Final = Path(__file__).parent.parent / "docs" / "concepts.md"
CREATED: Final = (Situation.WAITING, Situation.DELAYED, Situation.HELD)
"""What a submission makes: ready, for later, or behind others in a flow."""
GROUPS: Final[Mapping[str, tuple[Situation, ...]]] = {
    "ready": READY,
    "aside": SET_ASIDE,
    "worker": HELD_BY_WORKER,
    "ended": ENDED,
}
TITLES: Final = {
    "ready": "ready",
    "aside": "set aside",
    "worker": "with a worker",
    "ended": "ended",
    "unfinished": "unfinished",
}
ALL: Final[Mapping[frozenset[Situation], str]] = {
    frozenset(situations): name
    for name, situations in (*GROUPS.items(), ("unfinished", UNFINISHED))
}


def edges() -> dict[tuple[str, str], list[Operation]]:
    """Which operations lead from where to where; a whole group stands for all in it."""
    found: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    for operation, rule in RULES.items():
        sources: dict[Situation, set[Situation]] = defaultdict(set)
        for before, afters in rule.leads.items():
            for after in afters:
                if after is not before:
                    sources[after].add(before)
        for after, befores in sources.items():
            whole = ALL.get(frozenset(befores))
            for before_name in [whole] if whole else sorted(befores, key=list(Situation).index):
                found[before_name, after].append(operation)
    return found


def diagram() -> Iterator[str]:
    yield "```mermaid"
    yield "flowchart TB"
    yield '    submit(("submit"))'
    yield '    subgraph unfinished ["unfinished"]'
    for name, situations in GROUPS.items():
        indent = "    " if name == "ended" else "        "
        if name == "ended":
            yield "    end"
        yield f'{indent}subgraph {name} ["{TITLES[name]}"]'
        for each in situations:
            yield f"{indent}    {each}"
        yield f"{indent}end"
    for each in CREATED:
        yield f"    submit --> {each}"
    yield "    running -.->|time passes| overdue_lease"
    for (before, after), operations in edges().items():
        yield f"    {before} -->|{', '.join(operations)}| {after}"
    yield "```"


def meanings() -> dict[str, str]:
    """What stands under each situation where it is defined."""
    (definition,) = ast.parse(inspect.getsource(Situation)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for named, text in pairwise(definition.body):
        if (
            isinstance(named, ast.Assign)
            and isinstance(named.value, ast.Constant)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[str(named.value.value)] = str(text.value.value).removesuffix(".")
    return found


def table() -> Iterator[str]:
    means = meanings()
    yield "| Situation | Meaning | What moves it on |"
    yield "|---|---|---|"
    for situation in Situation:
        moves = []
        for operation, rule in RULES.items():
            afters = [each for each in rule.leads.get(situation, ()) if each is not situation]
            # The diagram shows once, for the frame, what happens to whatever has not ended.
            anywhere = set.intersection(*(set(rule.leads.get(each, ())) for each in UNFINISHED))
            if set(afters) - anywhere:
                moves.append(f"{operation} → {' or '.join(f'*{each}*' for each in afters)}")
        yield f"| **{situation}** | {means[situation]} | {'; '.join(moves)} |"


def drawn(text: str) -> str:
    """The page with what is drawn from the table brought up to date."""
    for name, lines in (("diagram", diagram()), ("table", table())):
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = before + start + "\n".join(lines) + end + after
    return text


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
