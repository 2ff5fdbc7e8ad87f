"""Namespaces on the command line."""

from pathlib import Path

from flowfabric import Engine
from tests.cli.command import run

PROGRAM = """
from flowfabric import App

app = App("sqlite:///{path}", namespace="{namespace}")


@app.task
def greet(name: str) -> str:
    return name


app.add_schedule("nightly", greet("Ada"), cron="0 3 * * *")
"""


def write_program(folder: Path, namespace: str, url: str) -> str:
    path = url.removeprefix("sqlite:///")
    (folder / f"{namespace}.py").write_text(PROGRAM.format(path=path, namespace=namespace))
    return f"{namespace}:app"


async def test_a_command_stays_in_the_namespace_of_the_app(
    engine: Engine, url: str, tmp_path: Path
) -> None:
    shop, bank = (write_program(tmp_path, name, url) for name in ("shop", "bank"))

    def shown(*arguments: str) -> list[object]:
        ran = run(*arguments, "--json", cwd=tmp_path)
        return [each.get("execution_id") for each in ran.documents]

    (ours,) = shown("submit", "greet", '{"name": "Ada"}', "--app", shop)
    (theirs,) = shown("submit", "greet", '{"name": "Bob"}', "--app", bank)
    assert isinstance(theirs, str)
    assert await engine.get_execution_namespace(theirs) == "bank"
    assert shown("ls", "--app", shop) == [ours]
    assert shown("ls", "--app", shop, "--namespace", "bank") == [theirs]
    assert run("show", theirs, "--app", shop, cwd=tmp_path).status == 3
    assert run("why", theirs, "--app", shop, cwd=tmp_path).status == 3
    assert run("cancel", theirs, "--app", shop, cwd=tmp_path).status == 3
    assert run("why", theirs, "--url", url).status == 0
    assert set(shown("ls", "--url", url)) == {ours, theirs}
    bulk = run("cancel", "--namespace", "shop", "--yes", "--json", "--url", url)
    assert bulk.document["cancelled"] == 1


def test_an_app_that_is_typed_beats_a_url_that_is_set(url: str, tmp_path: Path) -> None:
    shop = write_program(tmp_path, "shop", url)
    other = f"sqlite:///{tmp_path}/other.db"
    for each in (url, other):
        assert run("migrate", "--url", each).status == 0

    submitted = run("submit", "greet", '{"name": "Ada"}', "--app", shop, cwd=tmp_path, url=other)
    assert (submitted.status, submitted.err) == (0, "")
    assert len(run("ls", "--json", "--url", url).documents) == 1
    assert run("ls", "--json", cwd=tmp_path, url=other, FLOWFABRIC_APP=shop).documents == []
    assert run("ls", "--json", "--app", shop, "--url", other, cwd=tmp_path).documents == []
