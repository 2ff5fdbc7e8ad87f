"""What `--json` prints: one document per line, keys as in the engine's own records."""

import base64
import sys
from typing import Final

import msgspec
from msgspec import Struct

from flowfabric.core.checks import visible_json

_ENCODER: Final = msgspec.json.Encoder(enc_hook=str)


def emit(document: object) -> None:
    """Print one line of JSON."""
    sys.stdout.write(visible_json(_ENCODER.encode(plain(document)).decode()) + "\n")


def plain(value: object) -> object:
    """A value as JSON can hold it; bytes that are JSON themselves become what they mean."""
    if isinstance(value, Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return readable(value)
    return value


def readable(data: bytes) -> object:
    """Stored bytes: as JSON, else as text, else in base64 under that name."""
    if not data:
        return None
    try:
        meaning: object = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            return data.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(data).decode()}
    return meaning


def shown(data: bytes | None, chars_max: int) -> str | None:
    """Stored bytes for people, shortened."""
    if not data:
        return None
    meaning = readable(data)
    text = meaning if isinstance(meaning, str) else _ENCODER.encode(meaning).decode()
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"
