"""The code's own shape: rules a reviewer should not have to repeat."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "flowfabric"
STORE = PACKAGE / "store"
DIALECTS = ("postgres", "sqlite")

MODULE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70
IMPORTS_MAX_SHARE = 0.06

HISTORY = re.compile(
    r"\b(RFC-?\d|wave \d|stage [A-F]\b|phase \d|PR ?#?\d|issue ?#?\d)", re.IGNORECASE
)
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
SILENCED = re.compile(r"#\s*type:\s*ignore")
IMPURE = {"asyncio", "datetime", "logging", "os", "random", "socket", "sqlite3", "time", "uuid"}
# Where packages come from and where a checkout lies differ from machine to machine.
MACHINE = re.compile(
    r"pypi\.(?:org|python)|python" + r"hosted|--(?:extra-)?" + r"index-url|--find" + r"-links"
    r"|(?<![\w.:/-])/(?:root|work|Users/\w+|home/\w+)/"
)
UNTRACKED = {".git", ".venv", "__pycache__", "build", "dist"}


def tracked_files() -> list[Path]:
    """What a commit of the working tree would hold, with or without git at hand."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0:
        paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*") if not ignored(path.relative_to(ROOT))]
    return sorted(path for path in paths if path.is_file())


def ignored(path: Path) -> bool:
    return any(part in UNTRACKED or part.endswith(("_cache", ".egg-info")) for part in path.parts)


TRACKED = tracked_files()
MODULES = [path for path in TRACKED if path.suffix == ".py"]
STATEMENTS = [path for path in TRACKED if path.suffix == ".sql"]
CORE = [path for path in MODULES if path.is_relative_to(PACKAGE / "core")]
ENGINE = [path for path in MODULES if path.is_relative_to(PACKAGE / "engine")]
TESTS = [path for path in MODULES if path.is_relative_to(ROOT / "tests")]
SCREENS = [
    path
    for path in MODULES
    if path.is_relative_to(PACKAGE / "cli") or path.is_relative_to(PACKAGE / "demo")
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def comments(path: Path, pattern: re.Pattern[str]) -> list[str]:
    """Comments that match."""
    text = path.read_text()
    if not pattern.search(text):
        return []  # Found out sooner than by taking every file apart.
    if path.suffix == ".sql":
        found = [line.partition("--")[2] for line in text.splitlines() if "--" in line]
    else:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return [comment for comment in found if pattern.search(comment)]


def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "flowfabric":
            found |= {f"flowfabric.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            assert node.module is not None
            found.add(node.module)
    return found


def calls(path: Path, name: str) -> list[ast.Call]:
    """Calls of `name`, bare or as an attribute of a module."""
    if name not in path.read_text():
        return []
    return [
        node
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id == name)
            or (
                isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in {"asyncio", "time", "typing"}
                and node.func.attr == name
            )
        )
    ]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_and_functions_fit_in_the_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MODULE_LINES_MAX
    too_long = [
        node.name
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert too_long == []


@pytest.mark.parametrize("path", MODULES + STATEMENTS, ids=name_of)
def test_comments_describe_the_present_and_leave_nothing_for_later(path: Path) -> None:
    assert comments(path, HISTORY) + comments(path, UNFINISHED) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_type_checker_is_never_overruled(path: Path) -> None:
    assert comments(path, SILENCED) == []
    assert [node.lineno for node in calls(path, "cast")] == []


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_the_core_touches_nothing_outside_itself(path: Path) -> None:
    modules = imported_modules(path)
    assert {module.partition(".")[0] for module in modules} & IMPURE == set()
    own = {module for module in modules if module.partition(".")[0] == "flowfabric"}
    assert {
        module for module in own if module.split(".")[1:2] not in (["core"], ["errors"])
    } == set()


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_no_test_waits_by_sleeping(path: Path) -> None:
    sleeps = [
        node.lineno
        for node in calls(path, "sleep")
        if node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, int | float)
        and node.args[0].value > 0
    ]
    assert sleeps == []


@pytest.mark.parametrize("path", TRACKED, ids=name_of)
def test_nothing_depends_on_one_machine(path: Path) -> None:
    text = path.read_bytes().decode(errors="replace")
    assert [match.group() for match in MACHINE.finditer(text)] == []


def statement_names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.sql")}


@pytest.mark.parametrize("path", SCREENS, ids=name_of)
def test_whatever_is_printed_passes_the_console_that_obeys_no_text(path: Path) -> None:
    text = path.read_text()
    assert "import Console" not in text.replace("flowfabric.terminal import Console", "")
    assert re.findall(r"(?<![\w.])print\(", text) == []


def test_no_two_types_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for name in type_names(ast.parse(path.read_text())):
            places.setdefault(name, []).append(name_of(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def type_names(module: ast.Module) -> Iterator[str]:
    """Classes and aliases. Type variables are none: each module has its own."""
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not is_variable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and re.fullmatch("_?[A-Z][a-z].*", target.id):
                    yield target.id


def is_variable(value: ast.expr | None) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in ("TypeVar", "TypeVarTuple", "ParamSpec")
    )


def test_imports_take_little_of_the_package() -> None:
    lines = imports = 0
    for path in PACKAGE.rglob("*.py"):
        lines += len(path.read_text().splitlines())
        imports += sum(
            node.end_lineno - node.lineno + 1
            for node in nodes(path)
            if isinstance(node, ast.Import | ast.ImportFrom) and node.end_lineno is not None
        )
    assert imports <= IMPORTS_MAX_SHARE * lines


def test_every_module_has_its_room_in_the_map() -> None:
    named = set(re.findall(r"`(?:flowfabric\.)?(\w+)`", (ROOT / "ARCHITECTURE.md").read_text()))
    modules = {path for path in PACKAGE.rglob("*.py") if path.parent.name != "demo"}
    rooms = {path.stem for path in modules} - {"__init__", "__main__"}
    assert sorted(rooms - named) == []


def test_every_error_is_raised_somewhere() -> None:
    names = {
        node.id if isinstance(node, ast.Name) else node.attr
        for path in PACKAGE.rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Name | ast.Attribute)
    }
    page = ast.parse((PACKAGE / "errors.py").read_text())
    errors = {node.name for node in page.body if isinstance(node, ast.ClassDef)}
    assert sorted(errors - names) == []


def test_every_statement_exists_in_both_dialects_or_is_shared() -> None:
    postgres, sqlite = (statement_names(STORE / dialect / "sql") for dialect in DIALECTS)
    shared = statement_names(STORE / "sql")

    assert postgres ^ sqlite == set(), "missing in one of the dialects"
    assert shared & postgres == set(), "shared, and yet written for a dialect"


def test_every_statement_is_asked_for() -> None:
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    names = {
        Path(name).stem
        for folder in (STORE / "sql", *(STORE / dialect / "sql" for dialect in DIALECTS))
        for name in statement_names(folder)
    }
    assert sorted(name for name in names if f'"{name}"' not in code) == []


def test_migrations_have_the_same_numbers_without_gaps_in_both_dialects() -> None:
    postgres, sqlite = (
        sorted(int(path.name.partition("_")[0]) for path in folder.glob("*.sql"))
        for folder in (STORE / dialect / "migrations" for dialect in DIALECTS)
    )
    assert postgres == sqlite == list(range(1, len(postgres) + 1))


LOOKS = re.compile(r"_?(load|find|read|get|list|look)(_|$)")
LOCKS = re.compile(r"_?lock(_|$)")


def called_names(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


@pytest.mark.parametrize("path", ENGINE, ids=name_of)
def test_what_locks_does_not_say_that_it_looks(path: Path) -> None:
    locking = [
        node.name
        for node in nodes(path)
        if isinstance(node, ast.AsyncFunctionDef)
        and LOOKS.match(node.name)
        and any(LOCKS.match(name) for name in called_names(node))
    ]
    assert locking == []
