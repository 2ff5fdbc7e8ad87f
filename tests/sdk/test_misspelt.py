"""A misspelt name is answered with the name that was meant."""

import re

import pytest

from flowfabric import App
from flowfabric.errors import InvalidInput
from flowfabric.submission import read_submission


@pytest.fixture
def greeting() -> App:
    app = App("sqlite:///:memory:")

    @app.task
    async def greet(name: str, times: int = 1) -> None: ...

    return app


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        (
            {"nme": "Ada"},
            "nme: is neither an argument of greet, which takes name, times, nor an option of"
            " submit; did you mean name?",
        ),
        ({"name": "Ada", "prioritty": 1}, "nor an option of submit; did you mean priority?"),
        ({"name": "Ada", "colour": 1}, "nor an option of submit"),
    ],
)
def test_of_an_argument_or_an_option(
    greeting: App, keywords: dict[str, object], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=re.escape(problem) + "$"):
        read_submission(greeting.tasks["greet"], [], keywords)


def test_of_an_argument_of_a_call(greeting: App) -> None:
    problem = "'nme' is none of them: it takes name, times; did you mean 'name'?"
    with pytest.raises(InvalidInput, match=re.escape(f"arguments of greet: {problem}")):
        greeting.tasks["greet"](nme="Ada")
