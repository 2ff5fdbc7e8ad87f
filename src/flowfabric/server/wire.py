"""How bodies of requests are read, and the engine's answers written, in JSON.

The result of an operation is an object under its name, `{"Created": {…}}`, or only the name if it
has no fields, as clients of the reference's server expect. They send bytes as arrays of numbers;
this server also accepts JSON and base64. It ignores what those clients have to send although the
server knows it (`now`, `partition_id`).
"""

import base64
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, structs

from flowfabric.core.checks import JSON
from flowfabric.server.problems import refuse, unreadable

Octet = Annotated[int, Meta(ge=0, le=255)]
Octets = list[Octet]
Units = Annotated[int, Meta(ge=0, le=2**62)]
Tagged = dict[str, dict[str, object]] | str
"""The name of what happened, with its fields."""


def tagged(result: Struct) -> Tagged:
    """A result under its name."""
    name = str(result.__struct_config__.tag)
    fields = structs.asdict(result)
    return {name: fields} if fields else name


def read_bytes(
    field: str,
    octets: Octets | None,
    as_base64: str | None,
    as_json: object,
) -> tuple[bytes | None, str | None]:
    """Bytes that a request carries in one of three forms, and their encoding if that implies it."""
    if (octets is not None) + (as_base64 is not None) + (as_json is not UNSET) > 1:
        raise refuse(
            400, "invalid_input", f"{field}: send it in one form, not several", field=field
        )
    if as_json is not UNSET:
        try:
            return msgspec.json.encode(as_json), JSON
        except RecursionError as error:
            raise unreadable(error) from None
    if as_base64 is not None:
        try:
            return base64.b64decode(as_base64, validate=True), None
        except ValueError as error:
            name = f"{field}_base64"
            raise refuse(400, "invalid_input", f"{name}: {error}", field=name) from None
    return None if octets is None else bytes(octets), None


def check_same(field: str, in_path: str, in_body: str | None) -> None:
    """Refuse a body that repeats the id of the path differently."""
    if in_body is not None and in_body != in_path:
        raise refuse(400, "invalid_input", f"path {field} does not match body {field}", field=field)


class StrictBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of one of our own requests. Unknown members are refused, because a typo in
    `expires_in_ms` would go unnoticed. Requests of the reference are lenient, because its clients
    send extra members; there only those are refused that look like a known one."""
