"""Hand-written statements: one per file, found by name, with `:name` parameters.

A file is looked for in the dialect's own `sql/` folder first, then in the shared
one. Which parameters a statement takes is read from its text, so passing too few
or too many is an error before the database sees anything.

A line `-- within live`, or with another table of executions, stands for the filter of
processes that look after some of them only.

A last line `for update`, with or without `skip locked`, is left out on SQLite, where a transaction
that writes is alone.

Lines `-- and` are between statements that SQLite runs in one step; see `program`.

A line `-- claim_ready without limits` stands for the text of another statement, but for what
is there between the lines `-- limits` and `-- end of limits`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Final, NamedTuple

from flowfabric.store.base import Parameter

CLOCK: Final = "clock"
"""The parameter that a store fills in: the injected time, or null to ask the database."""
HINT: Final = "hint"
"""A message to other processes that a store may have the statement send; null if it has none."""

WITHIN: Final = """   and (cast(:namespace as text) is null
        or :namespace = (
            select r.namespace from execution x
             cross join route r
             where r.route_id = x.route_id
               and x.partition_key = each.partition_key and x.execution_id = each.execution_id))
   and (cast(:tag_key as text) is null
        or :tag_value = (
            select t.tag_value from execution_tag t
             where t.partition_key = each.partition_key and t.execution_id = each.execution_id
               and t.tag_key = :tag_key))"""
"""Of executions called `each`, those in a namespace and with a tag; null asks for neither."""

_WITHIN: Final = re.compile(r"^-- within (\w+)$", re.MULTILINE)
_WITHOUT: Final = re.compile(r"^-- (\w+) without (\w+)$", re.MULTILINE)
_SHARED: Final = Path(__file__).parent / "sql"
_NEXT: Final = re.compile(r"^-- (?:next(, if any)?|and)\s*$", re.MULTILINE)
_AND: Final = re.compile(r"^-- and\s*$", re.MULTILINE)
_GIVEN: Final = re.compile(r"\bgiven\('(\w+)', [\w.]+\)")
_LOCKING: Final = re.compile(r"\bfor\s+(no\s+key\s+)?update\b")
_LOCK_LINE: Final = re.compile(r"^\s*for update( skip locked)?;?\s*\Z", re.MULTILINE)
_TOKEN: Final = re.compile(
    r"""
    --[^\n]*                        # a comment
  | /\*.*?\*/
  | \bgiven\('(?P<list>\w+)'        # one value of a list
  | '(?:[^']|'')*'                  # quoted text
  | "(?:[^"]|"")*"                  # a quoted name
  | (?P<sign>\$\w*\$).*?(?P=sign)   # a dollar-quoted body
  | ::                              # a cast
  | :(?P<name>[a-z_][a-z0-9_]*)     # a parameter
    """,
    re.VERBOSE | re.DOTALL,
)


class Statement(NamedTuple):
    name: str
    text: str
    parameters: tuple[str, ...]
    """In the order of their first use, which is their number on Postgres."""
    locks: bool
    """Whether the rows it returns are locked."""
    lists: frozenset[str] = frozenset()
    """Parameters it takes one value at a time."""
    if_any: bool = False
    """Whether it is for the rows that the statement before it wrote, and needless without any."""
    by_number: str = ""
    """A text with names once more, with `?1` for the first of its parameters: Python looks up each
    name when it binds values, for half a microsecond."""
    wanted: frozenset[str] = frozenset()
    """What callers pass to a numbered statement: all but what a store has of its own."""

    def check(self, given: Collection[str]) -> None:
        """Refuse missing and unknown parameters; the store has some of its own."""
        wanted = {*self.parameters, *self.lists}
        missing = wanted - set(given) - {CLOCK, HINT}
        extra = set(given) - wanted
        if missing or extra:
            raise TypeError(
                f"statement {self.name} takes {sorted(wanted)};"
                f" missing {sorted(missing)}, not asked for {sorted(extra)}"
            )


def load(name: str, folder: Path) -> str:
    """The text of a statement file."""
    for place in (folder, _SHARED):
        path = place / f"{name}.sql"
        if path.is_file():
            text = _WITHOUT.sub(partial(_without, folder), path.read_text("utf-8"))
            return _WITHIN.sub(_within, text)
    raise LookupError(f"there is no statement {name}.sql in {folder} or {_SHARED}")


def _without(folder: Path, place: re.Match[str]) -> str:
    """The other statement that has this part; a misspelt name is an error."""
    before, _, rest = load(place[1], folder).partition(f"-- {place[2]}\n")
    _, end, after = rest.partition(f"-- end of {place[2]}\n")
    if not end:
        raise LookupError(f"{place[1]}.sql has no part called {place[2]}")
    return before + after


def _within(place: re.Match[str]) -> str:
    return WITHIN.replace("each.", f"{place[1]}.")


@lru_cache(maxsize=1024)
def numbered(name: str, folder: Path) -> Statement:
    """A statement with its parameters as `$1`, `$2`, …"""
    names: list[str] = []

    def place(token: re.Match[str]) -> str:
        parameter = token["name"]
        if parameter is None:
            return token[0]
        if parameter not in names:
            names.append(parameter)
        return f"${names.index(parameter) + 1}"

    text = _TOKEN.sub(place, load(name, folder)).strip()
    locks = bool(_LOCKING.search(text.lower()))
    wanted = frozenset(names) - {CLOCK, HINT}
    return Statement(name, text, tuple(names), locks, wanted=wanted)


@lru_cache(maxsize=1024)
def named(name: str, folder: Path, same: frozenset[str] = frozenset()) -> tuple[Statement, ...]:
    """The statements of a file, which a line `-- next` separates, as they are written.

    `-- next, if any` stands before those that are needless unless the last one without these words
    has written a row.

    `given('results', 3)` is the fourth value of a list, as it was passed. A list in `same` has
    one value throughout, and is a parameter instead.
    """
    text = _GIVEN.sub(
        lambda found: f":{found[1]}" if found[1] in same else found[0],
        _LOCK_LINE.sub("", load(name, folder)),
    )
    first, *rest = _NEXT.split(text)
    others = [
        _named(name, part, if_any=bool(mark))
        for mark, part in zip(rest[::2], rest[1::2], strict=True)
    ]
    return (_named(name, first), *others)


class Program(NamedTuple):
    """Statements that SQLite runs in one step, as the trigger of a view that is written to."""

    creation: tuple[str, ...]
    call: str
    """The statement that runs them."""
    parameters: tuple[str, ...]
    lists: tuple[str, ...]
    """For each of these it takes two values more: whether it is to ask for them one by one, or
    else the one value throughout."""


@lru_cache(maxsize=64)
def program(name: str, folder: Path) -> Program | None:
    """All statements of a file but the last, if lines `-- and` are between them.

    Between two steps a thread needs Python, and waits for another that has it. One long step takes
    place beside what the other does.
    """
    together, *_ = re.split(r"^-- next\s*$", load(name, folder), maxsplit=1, flags=re.MULTILINE)
    if not _AND.search(together):
        return None
    wanted = taking(name, folder)
    lists = tuple(sorted(wanted.lists))
    columns = [*wanted.parameters, *(f"{kind} {each}" for each in lists for kind in ("ask", "all"))]

    def place(token: re.Match[str]) -> str:
        return f'new."{token["name"]}"' if token["name"] else token[0]

    body = _GIVEN.sub(r"""case when new."ask \1" then \g<0> else new."all \1" end""", together)
    view = f'"run {name}"'
    nothing = ", ".join(f'null as "{column}"' for column in columns)
    return Program(
        creation=(
            f"create temp view {view} as select {nothing}",
            f"create temp trigger {view} instead of insert on {view} begin"
            f" {_TOKEN.sub(place, body)} end",
        ),
        call=f"insert into {view} values ({', '.join('?' * len(columns))})",
        parameters=wanted.parameters,
        lists=lists,
    )


@lru_cache(maxsize=1024)
def taking(name: str, folder: Path) -> Statement:
    """What the statements of a file take together."""
    parts = named(name, folder)
    wanted = dict.fromkeys(part for each in parts for part in each.parameters)
    lists = frozenset(part for each in parts for part in each.lists)
    return Statement(name, "", tuple(wanted), locks=False, lists=lists)


def ordered(
    statement: Statement, given: Mapping[str, Parameter], clock: Callable[[], int | None]
) -> list[Parameter]:
    """The values of a numbered statement's parameters."""
    if given.keys() != statement.wanted:
        statement.check(given)
    values = list(map(given.get, statement.parameters))
    if CLOCK in statement.parameters and CLOCK not in given:
        values[statement.parameters.index(CLOCK)] = clock()
    return values


def _named(name: str, text: str, *, if_any: bool = False) -> Statement:
    text = text.strip()
    tokens = list(_TOKEN.finditer(text))
    names = tuple(dict.fromkeys(token["name"] for token in tokens if token["name"]))
    lists = frozenset(token["list"] for token in tokens if token["list"])
    by_number = _TOKEN.sub(
        lambda token: f"?{names.index(token['name']) + 1}" if token["name"] else token[0], text
    )
    return Statement(name, text, names, locks=True, lists=lists, if_any=if_any, by_number=by_number)
