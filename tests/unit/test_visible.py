"""Text from outside never acts on who reads it."""

import json

import pytest
from hypothesis import given
from hypothesis.strategies import text
from rich.text import Text

from flowfabric.core.checks import is_visible, visible, visible_json, visible_lines
from flowfabric.terminal import Console, Indented, block, safe

HOSTILE = {
    "escape sequence": ("\x1b[2J", "\\x1b[2J"),
    "title": ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
    "second control set": ("\x9b31m", "\\x9b31m"),
    "line break": ("a\nb\r\n", "a\\nb\\r\\n"),
    "line separator": ("a\u2028b\u2029", "a\\u2028b\\u2029"),
    "override": ("\u202egnp.exe", "\\u202egnp.exe"),
    "isolate": ("\u2066x\u2069", "\\u2066x\\u2069"),
    "zero width": ("a\u200bb\ufeff", "a\\u200bb\\ufeff"),
    "next line": ("a\x85b", "a\\x85b"),
    "tag": ("\U000e0041", "\\U000e0041"),
    "filler that counts as a letter": (
        "a\u115f\u1160\u3164\uffa0",
        "a\\u115f\\u1160\\u3164\\uffa0",
    ),
    "mark without a glyph": ("a\u034f\u17b4\ufe0f", "a\\u034f\\u17b4\\ufe0f"),
    "half a pair": ("\ud800", "\\ud800"),
    "NUL and DEL": ("\x00\x7f", "\\x00\\x7f"),
}


@pytest.mark.parametrize(("raw", "shown"), HOSTILE.values(), ids=HOSTILE.keys())
def test_what_acts_is_shown_as_an_escape(raw: str, shown: str) -> None:
    assert visible(raw) == shown
    assert not is_visible(raw)


@pytest.mark.parametrize("plain", ["", "plain [bold] \\x1b", "Grüße, 日本語 🎉", "a\u00a0b\u3000c"])
def test_what_is_seen_stays_as_it_is(plain: str) -> None:
    assert visible(plain) == plain
    assert is_visible(plain)


@given(text())
def test_visible_text_is_visible_and_stays_the_same(raw: str) -> None:
    assert is_visible(visible(raw))
    assert visible(visible(raw)) == visible(raw)
    assert all(map(is_visible, visible_lines(raw)))


def test_only_a_line_feed_begins_a_line() -> None:
    assert visible_lines("a\r\nb\nc") == ["a", "b", "c"]
    for other in "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029":
        assert len(visible_lines(f"a{other}b")) == 1


@pytest.mark.parametrize("wrapped", ["one\nforged", "x" * 29 + " forged", "x" * 30 + "forged"])
def test_no_line_of_an_indented_text_looks_like_one_of_ours(wrapped: str) -> None:
    console = Console(width=32, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(Indented(wrapped))

    lines = captured.get().splitlines()
    assert lines[-1] == "  forged"
    assert all(line.startswith("  ") and len(line) <= 32 for line in lines)


@given(text())
def test_json_means_the_same_and_is_visible(raw: str) -> None:
    document = visible_json(json.dumps(raw, ensure_ascii=False))
    assert json.loads(document) == raw
    assert is_visible(document)


def test_colours_stay_where_they_were() -> None:
    shown = safe(Text.assemble(("a\x1b", "red"), ("\nb", "blue")))

    assert shown.plain == "a\\x1b\\nb"
    assert [(span.start, span.end, span.style) for span in shown.spans] == [
        (0, 5, "red"),
        (5, 8, "blue"),
    ]


@pytest.mark.parametrize("wrap", [str, Text, block], ids=["text", "rich", "block"])
def test_nothing_a_console_prints_reaches_the_terminal_unseen(wrap: type[str]) -> None:
    console = Console(width=80, force_terminal=True, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(wrap("\x1b[2J\u202e\x9b"))

    assert captured.get() == "\\x1b[2J\\u202e\\x9b\n"
