"""The page of concepts shows the table the core decides by."""

from tests.diagram import PAGE, drawn


def test_the_diagram_and_the_table_are_those_of_the_core() -> None:
    page = PAGE.read_text()
    assert page == drawn(page), "draw them again: python -m tests.diagram"
