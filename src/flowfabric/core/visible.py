"""Text that somebody else wrote, made safe to show.

What comes out of the database was chosen by whoever may submit work: a failure reason may
clear a terminal, set its title, forge a line of a log or turn the reading order around.
`visible` replaces whatever acts instead of being seen by an escape that is seen: control
characters of both sets, line breaks of every kind, directional overrides and isolates,
whatever Unicode wants ignored when there is no glyph for it (fillers, joiners, variation
selectors, tags), and halves of surrogate pairs. Everything else stays as it is, so that text
which is made visible twice stays the same.

Names are refused at the door instead (`checks.check_name`), by the same rule.
"""

import json
import re
import unicodedata
from typing import Final

_PLAIN_BREAKS: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_LINE_BREAK: Final = re.compile("\r\n|\n")
"""What ends a line of a text with several; all else that might is shown as an escape."""
_IGNORABLE: Final = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Unicode's Default_Ignorable_Code_Point: some of them count as letters or marks."""


def is_visible(text: str) -> bool:
    """Whether every character is seen and none acts; spaces of any width are seen."""
    return _is_plain(text) or all(map(_seen, text))


def visible(text: str) -> str:
    """`text` on one line, with escapes for what would not be seen."""
    return text if _is_plain(text) else "".join(map(_shown, text))


def visible_lines(text: str) -> list[str]:
    """The lines of `text`, each visible; for what is known to be shown on several lines."""
    return [visible(line.expandtabs(4)) for line in _LINE_BREAK.split(text)]


def visible_json(document: str) -> str:
    """A JSON text that means the same, with JSON's own escapes for what would not be seen."""
    if _is_plain(document):
        return document
    return "".join(each if _seen(each) else json.dumps(each)[1:-1] for each in document)


def _is_plain(text: str) -> bool:
    return text.isprintable() and (text.isascii() or _IGNORABLE.search(text) is None)


def _seen(character: str) -> bool:
    return _is_plain(character) or unicodedata.category(character) == "Zs"


def _shown(character: str) -> str:
    if _seen(character):
        return character
    if character in _PLAIN_BREAKS:
        return _PLAIN_BREAKS[character]
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
