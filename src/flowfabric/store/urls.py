"""Which store a URL means.

- `sqlite:///relative.db`, `sqlite:////absolute/path.db`, `sqlite:///:memory:`
- `postgresql://user:password@host:port/database`, also `postgres://…`
- `postgresql+embedded:///directory`: a Postgres server of our own in that directory
- `http://host:port`, `https://…`: no store, but a server that has one
"""

import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from flowfabric.core.checks import UNSTORABLE
from flowfabric.errors import InvalidInput, Unavailable
from flowfabric.store.base import Clock, Store
from flowfabric.store.embedded import start_embedded
from flowfabric.store.sqlite.store import SqliteStore

SQLITE: Final = "sqlite:///"
POSTGRES: Final = ("postgresql://", "postgres://")
EMBEDDED: Final = "postgresql+embedded:///"
HTTP: Final = ("http://", "https://")

FILE_ENDINGS: Final = (".db", ".sqlite", ".sqlite3")

_PASSWORD: Final = re.compile(r"(password=)[^&]*")
_SCHEME: Final = re.compile(r"[a-zA-Z+]*(?=://)")


def open_store(
    url: str,
    *,
    clock: Clock | None = None,
    pool_max: int = 10,
    listen_url: str | None = None,
    set_up: bool = True,
) -> Store:
    """The store at `url`; call its `open` before use.

    `pool_max` and `listen_url` concern Postgres; `set_up` says whether opening may create or
    migrate a SQLite file.
    """
    check_url(url)
    if url.startswith(HTTP):
        raise Unavailable(redact(url), "is a server, and this needs the database itself")
    if url.startswith(SQLITE):
        return SqliteStore(unquote(url[len(SQLITE) :]), clock=clock, set_up=set_up)
    if url.startswith(EMBEDDED):
        url = start_embedded(Path(unquote(url[len(EMBEDDED) :])))
    # Imported here: the driver is an extra that SQLite users need not install.
    try:
        from flowfabric.store.postgres.store import PostgresStore
    except ModuleNotFoundError as error:
        raise Unavailable(
            "postgresql", f"needs {error.name}: pip install 'flowfabric[postgres]'"
        ) from error
    return PostgresStore(url, clock=clock, pool_max=pool_max, listen_url=listen_url)


def check_url(url: object, field: str = "url") -> str:
    """Refuse a URL that no store can have; only opening it shows whether there is one."""
    if not isinstance(url, str):
        raise InvalidInput(field, "must be a string", type(url).__name__)
    if UNSTORABLE.search(url):
        raise InvalidInput(field, "must not contain NUL characters or lone surrogates")
    known = (SQLITE, *POSTGRES, EMBEDDED, *HTTP)
    if url.startswith(known) and url not in (SQLITE, EMBEDDED, *HTTP):
        return url
    if url == SQLITE:
        raise InvalidInput(field, f"names no file; write its path after it: {url}shop.db", url)
    for scheme in (SQLITE, EMBEDDED):
        path = url.removeprefix(scheme.rstrip("/")).lstrip("/")
        if path and path != url.lstrip("/"):
            raise InvalidInput(field, f"needs three slashes before the path: {scheme}{path}", url)
    dialect, plus, driver = url.partition("://")[0].partition("+")
    if plus and f"{dialect}://" in POSTGRES:
        raise InvalidInput(field, f"names a driver; write {dialect}://…", f"{dialect}+{driver}")
    if url.endswith(FILE_ENDINGS) and "@" not in url and "://" not in url:
        raise InvalidInput(field, f"is a path; write {SQLITE}{url}", url)
    starts = ", ".join(f"{start}…" for start in known)
    # Show only the part that cannot hold a password.
    start = _SCHEME.match(url)
    shown = start.group() if start else url.partition("@")[0].partition(":")[0]
    raise InvalidInput(field, f"must look like one of {starts}", shown)


def redact(url: str) -> str:
    """The URL without its password, also when the password is not encoded as it should be."""
    if url.startswith(SQLITE):
        return url
    scheme, separator, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    place = _PASSWORD.sub(r"\1***", place)
    return f"{scheme}{separator}{user}{':***' if colon else ''}{at}{place}"
