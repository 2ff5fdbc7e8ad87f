"""What is said about members that a JSON object does not have."""

from typing import Annotated

import msgspec
import pytest
from msgspec import Meta, Struct

from flowfabric.core import checks
from flowfabric.core.checks import split_misfit


class Fixed(Struct, tag=True, forbid_unknown_fields=True):
    delay_ms: int


class Doubled(Struct, tag=True, forbid_unknown_fields=True):
    first_ms: int


class Job(Struct, forbid_unknown_fields=True):
    kind: str = ""
    lane_id: str = ""
    backoff: Fixed | Doubled | None = None


class Batch(Struct, forbid_unknown_fields=True, rename="camel"):
    new_jobs: Annotated[list[Job | str], Meta(max_length=3)] = []


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"newJob": []}, "`newJob`; did you mean `newJobs`? There are newJobs"),
        ({"newJobs": ["a", {"lane": "x"}]}, "`lane`; did you mean `lane_id`? There are "),
        ({"newJobs": [{"odd": 1}]}, "`odd`; there are kind, lane_id, backoff"),
        ({"newJobs": [{"backoff": {"type": "Fixed", "delay": 1}}]}, "`delay`"),
        ({"x" * 65: 1}, f"`{'x' * 65}`; there are newJobs"),
    ],
)
def test_an_unknown_member_is_told_with_those_there_are(
    document: dict[str, object], told: str
) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(document, Batch)
    problem, place = split_misfit(str(caught.value))

    explained = checks.explained(problem, place, Batch)

    assert explained.startswith(f"Object contains unknown field {told}")


def test_what_is_wrong_otherwise_is_told_as_it_is() -> None:
    assert checks.explained("Expected `int`, got `str`", "newJobs", Batch) == (
        "Expected `int`, got `str`"
    )


def test_only_names_that_look_like_a_known_one_are_misspelt() -> None:
    known = ("execution_kind", "lane_id")

    assert checks.misspelt({"lane_id": 1, "odd": 1, "now": 1}, known) is None
    assert checks.misspelt({"odd": 1, "lane": 1}, known) == (
        "lane",
        "did you mean `lane_id`? There are execution_kind, lane_id",
    )


def test_an_object_of_many_unknown_members_is_not_compared_to_its_end() -> None:
    many = {f"odd{number}": 1 for number in range(checks.COMPARED_MAX)}

    assert checks.misspelt({**many, "lane": 1}, ("lane_id",)) is None
