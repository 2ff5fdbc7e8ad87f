"""URLs people get wrong: refused, and the password is never repeated."""

import traceback

import pytest

from flowfabric import connect, migrate
from flowfabric.errors import InvalidInput
from flowfabric.store.urls import open_store, redact

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "url",
    [
        f"u:{SECRET}@host/db",
        f"postgres:u:{SECRET}@host",
        f"postgresql:/u:{SECRET}@host/db",
        f"mysql://u:{SECRET}@host/db",
        f"postgresql://u:{SECRET}\x00@127.0.0.1/db",
        f"sqlite:///{SECRET}\ud800.db",
        "",
    ],
)
def test_a_url_that_means_no_store_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        open_store(url)

    assert SECRET not in "".join(traceback.format_exception(refusal.value))


def test_a_sqlite_url_without_a_path_says_that_it_is_missing() -> None:
    with pytest.raises(InvalidInput, match="names no file; write its path after it"):
        open_store("sqlite:///")


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:{SECRET}@127.0.0.1:port/db",
        f"postgresql://u:{SECRET}@127.0.0.1:99999/db",
        f"postgresql://u:a/{SECRET}@127.0.0.1/db",
        f"postgresql://u:a?{SECRET}@127.0.0.1/db",
        f"postgresql://u:a#{SECRET}@127.0.0.1/db",
        f"postgresql://u:a[{SECRET}@127.0.0.1/db",
    ],
)
async def test_a_url_the_driver_cannot_read_is_refused_without_its_password(url: str) -> None:
    for operation in (connect, migrate):
        with pytest.raises(InvalidInput) as refusal:
            await operation(url)

        assert SECRET not in "".join(traceback.format_exception(refusal.value))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:s3cr3t@h:1/db?sslmode=require", "postgresql://u:***@h:1/db?sslmode=require"),
        ("postgresql://u:a/b@c#s3cr3t@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:a[s3cr3t@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u@h/db?password=s3cr3t&x=1", "postgresql://u@h/db?password=***&x=1"),
        ("postgresql://h/db", "postgresql://h/db"),
        ("sqlite:///some:where@x.db", "sqlite:///some:where@x.db"),
    ],
)  # fmt: skip
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert redact(url) == shown
