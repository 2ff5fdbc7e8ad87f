"""How versions of a task are spelled and found."""

import pytest

from flowfabric import App
from flowfabric.core.checks import VERSION_MAX, kind_of, names_version, split_kind
from flowfabric.errors import InvalidInput


@pytest.mark.parametrize(
    ("name", "version", "kind"),
    [("publish", 1, "publish"), ("publish", 2, "publish@2"), ("p", VERSION_MAX, "p@1000000")],
)
def test_a_version_is_part_of_the_kind(name: str, version: int, kind: str) -> None:
    assert kind_of(name, version) == kind
    assert split_kind(kind) == (name, version)


@pytest.mark.parametrize(
    ("kind", "parts", "named"),
    [
        ("publish@1", ("publish", 1), True),
        ("a@b", ("a@b", 1), False),
        ("publish@", ("publish@", 1), False),
        ("publish@02", ("publish@02", 1), False),
        ("@2", ("@2", 1), False),
        ("a@b@2", ("a@b", 2), True),
    ],
)
def test_only_a_number_is_a_version(kind: str, parts: tuple[str, int], named: bool) -> None:
    assert split_kind(kind) == parts
    assert names_version(kind) is named


def test_versions_of_one_task_stand_beside_each_other() -> None:
    app = App("sqlite:///:memory:")

    @app.task
    async def publish(article: int) -> int:
        return article

    @app.task(name="publish", version=3)
    async def publish_3(article: int, draft: bool = False) -> int:
        return article

    assert app.tasks == {"publish": publish, "publish@3": publish_3}
    assert (publish_3.name, publish_3.version, publish_3.kind) == ("publish", 3, "publish@3")
    assert app.find_task("publish") is publish_3
    assert app.find_task("publish@1") is publish
    assert app.find_task("publish@2") is None
    assert app.find_task("print") is None


def test_a_version_is_registered_once() -> None:
    app = App("sqlite:///:memory:")
    app.task(name="publish", version=2)(lambda: None)
    with pytest.raises(InvalidInput, match="another `name=` or `version=`"):
        app.task(name="publish", version=2)(lambda: None)


def test_a_name_with_an_at_sign_is_refused() -> None:
    app = App("sqlite:///:memory:")
    with pytest.raises(InvalidInput, match="must not contain @"):
        app.task(name="publish@2")(lambda: None)


@pytest.mark.parametrize("version", [0, -1, VERSION_MAX + 1])
def test_a_version_out_of_range_is_refused(version: int) -> None:
    app = App("sqlite:///:memory:")
    with pytest.raises(InvalidInput, match="version"):
        app.task(name="publish", version=version)(lambda: None)
