"""Identifiers: one canonical spelling each, and pure ways to make them."""

from contextlib import suppress
from uuid import RFC_4122, UUID, uuid5

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.ids import (
    FIRST_UUID,
    LAST_UUID,
    FlowId,
    PartitionConfig,
    Stamps,
    flow_execution_id,
    make_execution_id,
    mark_in,
    mark_of,
    member_execution_id,
    named_budget_id,
    named_flow_id,
    new_execution_ids,
    own_execution_id,
    parse_any_id,
    parse_execution_id,
    parse_execution_kind,
    parse_lane_id,
    parse_namespace,
    parse_own_id,
    parse_uuid,
    parse_worker_id,
    partition_for,
    partition_of,
    redact_token,
    solo_execution_id,
    uuid4_from,
    uuid7,
    uuid_after,
    uuid_of,
)
from flowfabric.core.limits import policy_id_of
from flowfabric.errors import InvalidInput

RAW = "550e8400-e29b-41d4-a716-446655440000"
NIL = "00000000-0000-0000-0000-000000000000"
DEFAULT = PartitionConfig()
FLOW = FlowId(RAW)

uuids = st.uuids().map(str)


@given(partition=st.integers(0, 65_535), uuid=uuids)
def test_an_execution_id_survives_parsing_and_gives_back_its_parts(
    partition: int, uuid: str
) -> None:
    execution_id = parse_execution_id(f"{{fp:{partition}}}:{uuid}")
    assert execution_id == make_execution_id(partition, uuid)
    assert (partition_of(execution_id), uuid_of(execution_id)) == (partition, uuid)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param(RAW, "missing tag", id="bare uuid"),
        pytest.param("", "missing tag", id="empty"),
        pytest.param(f"fp:7:{RAW}", "missing tag", id="no braces"),
        pytest.param(f"{{b:7}}:{RAW}", "missing tag", id="another family"),
        pytest.param(f"{{fp:7}}{RAW}", "missing tag", id="no separator"),
        pytest.param(f" {{fp:7}}:{RAW}", "missing tag", id="leading space"),
        pytest.param(f"{{fp:}}:{RAW}", "invalid partition index", id="no index"),
        pytest.param(f"{{fp:x}}:{RAW}", "invalid partition index", id="not a number"),
        pytest.param(f"{{fp:65536}}:{RAW}", "invalid partition index", id="beyond 16 bits"),
        pytest.param(f"{{fp:-1}}:{RAW}", "invalid partition index", id="negative"),
        pytest.param(f"{{fp:+7}}:{RAW}", "invalid partition index", id="plus sign"),
        pytest.param(f"{{fp:07}}:{RAW}", "invalid partition index", id="leading zero"),
        pytest.param(f"{{fp:7 }}:{RAW}", "invalid partition index", id="space"),
        pytest.param(f"{{fp:٧}}:{RAW}", "invalid partition index", id="foreign digit"),
        pytest.param("{fp:7}:", "invalid uuid", id="no uuid"),
        pytest.param("{fp:7}:nope", "invalid uuid", id="not a uuid"),
        pytest.param(f"{{fp:7}}:{RAW.upper()}", "invalid uuid", id="upper case"),
        pytest.param(f"{{fp:7}}:{RAW.replace('-', '')}", "invalid uuid", id="simple form"),
        pytest.param(f"{{fp:7}}:{{{RAW}}}", "invalid uuid", id="braced form"),
        pytest.param(f"{{fp:7}}:urn:uuid:{RAW}", "invalid uuid", id="urn form"),
        pytest.param(f"{{fp:7}}:{RAW}\n", "invalid uuid", id="trailing newline"),
        pytest.param(7, "must be a string", id="a number"),
        pytest.param(None, "must be a string", id="nothing"),
    ],
)
def test_any_other_spelling_of_an_execution_id_is_refused(text: object, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"^execution_id: {problem}"):
        parse_execution_id(text)


@given(text=st.text())
def test_parsing_any_text_gives_that_text_or_an_error(text: str) -> None:
    with suppress(InvalidInput):
        assert parse_execution_id(text) == text


def test_an_execution_id_may_name_a_partition_the_deployment_does_not_have() -> None:
    assert partition_of(parse_execution_id(f"{{fp:60000}}:{RAW}")) == 60_000


@pytest.mark.parametrize("uuid", [NIL, RAW, str(uuid5(UUID(NIL), "name"))])
def test_derived_ids_embed_any_uuid_verbatim_in_their_partition(uuid: str) -> None:
    solo = solo_execution_id(uuid, DEFAULT)
    member = flow_execution_id(FLOW, uuid, DEFAULT)
    assert (uuid_of(solo), partition_of(solo)) == (uuid, partition_for(uuid, DEFAULT))
    assert (uuid_of(member), partition_of(member)) == (uuid, partition_for(FLOW, DEFAULT))


def test_derived_ids_are_stable_until_the_partition_count_changes() -> None:
    assert solo_execution_id(RAW, DEFAULT) == f"{{fp:24}}:{RAW}"
    assert flow_execution_id(FLOW, NIL, DEFAULT) == f"{{fp:24}}:{NIL}"
    resized = PartitionConfig(num_flow=7)
    assert solo_execution_id(RAW, resized) == f"{{fp:{36888 % 7}}}:{RAW}"


def test_the_bare_uuid_of_what_we_name_is_the_id_in_full() -> None:
    for made in (solo_execution_id(RAW, DEFAULT), member_execution_id(FLOW, RAW, DEFAULT)):
        assert parse_any_id(uuid_of(made), DEFAULT) == made
        assert parse_any_id(made, DEFAULT) == made
    with pytest.raises(InvalidInput, match="execution_id: missing tag"):
        parse_any_id("order-42", DEFAULT)


def test_an_id_of_ones_own_stands_for_one_execution_of_its_namespace() -> None:
    mine = own_execution_id("shop", "order-42", DEFAULT)
    assert mine == own_execution_id("shop", "order-42", DEFAULT)
    assert UUID(uuid_of(mine)).version == 8
    others = [own_execution_id(*each, DEFAULT) for each in (("shop", "order-43"), ("", "order-42"))]
    assert mine not in others


@pytest.mark.parametrize("text", [f"{{fp:1}}:{RAW}", RAW, RAW.upper(), "{order}", 5, None])
def test_what_looks_like_one_of_ours_is_nobodys_own_id(text: object) -> None:
    assert parse_own_id(text) is None


@pytest.mark.parametrize("text", ["", "a\nb", "k" * 257])
def test_a_bad_id_of_ones_own_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="execution_id"):
        parse_own_id(text)


@given(uuid=uuids)
def test_a_canonical_uuid_is_returned_as_it_is(uuid: str) -> None:
    assert parse_uuid("flow_id", uuid) == uuid


@pytest.mark.parametrize(
    "text", ["", RAW.upper(), RAW.replace("-", ""), f"{{{RAW}}}", f"{RAW}\n", f"{RAW}0", 5, None]
)
def test_any_other_uuid_is_refused_by_the_name_of_its_field(text: object) -> None:
    with pytest.raises(InvalidInput, match=r"^flow_id: must be a "):
        parse_uuid("flow_id", text)


@pytest.mark.parametrize("text", ["a", "default", "with space", "~", " ", "x" * 64])
def test_a_lane_is_printable_ascii_of_up_to_64_bytes(text: str) -> None:
    assert parse_lane_id(text) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must not be empty"),
        ("x" * 65, "too long: 65 bytes, at most 64 allowed"),
        ("é" * 33, "too long: 66 bytes, at most 64 allowed"),
        ("bad\nlane", "non-printable byte at index 3"),
        ("lane\0x", "non-printable byte at index 4"),
        ("\tlane", "non-printable byte at index 0"),
        ("ab\x7f", "non-printable byte at index 2"),
        ("laneé", "non-printable byte at index 4"),
        ("l\ud800", "non-printable byte at index 1"),
        (7, "must be a string"),
    ],
)
def test_any_other_lane_is_refused_with_the_reason(text: object, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_lane_id(text)
    assert (caught.value.field, caught.value.problem) == ("lane_id", problem)


@pytest.mark.parametrize("text", ["w", "host-1/worker:7", "ü", "x" * 256])
def test_a_worker_name_is_printable_and_has_no_whitespace(text: str) -> None:
    assert parse_worker_id("worker_id", text) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must not be empty"),
        ("a b", "must not contain whitespace"),
        ("a\tb", "must not contain control or unprintable characters"),
        ("a\u2003b", "must not contain control or unprintable characters"),
        ("a\x85", "must not contain control or unprintable characters"),
        ("a\ud800", "must not contain control or unprintable characters"),
        ("x" * 257, "too long: 257 bytes, at most 256 allowed"),
        ("ü" * 129, "too long: 258 bytes, at most 256 allowed"),
        (b"w", "must be a string"),
    ],
)
def test_any_other_worker_name_is_refused_with_the_reason(text: object, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_worker_id("worker_instance_id", text)
    assert (caught.value.field, caught.value.problem) == ("worker_instance_id", problem)


@pytest.mark.parametrize("text", ["tenant a", "größe", "x" * 256])
def test_namespaces_and_kinds_may_contain_spaces(text: str) -> None:
    assert parse_namespace(text) == text
    assert parse_execution_kind(text) == text


@pytest.mark.parametrize("text", ["", "a\nb", "a\0", "x" * 257, None])
def test_namespaces_and_kinds_are_refused_by_name(text: object) -> None:
    with pytest.raises(InvalidInput, match=r"^namespace: "):
        parse_namespace(text)
    with pytest.raises(InvalidInput, match=r"^execution_kind: "):
        parse_execution_kind(text)


NS_MAX = (2**48 * 10**6) - 1
EIGHT_BYTES = st.binary(min_size=8, max_size=8)


@given(now_ns=st.integers(0, NS_MAX), entropy=EIGHT_BYTES)
def test_a_uuid7_is_canonical_and_carries_its_time(now_ns: int, entropy: bytes) -> None:
    text = uuid7(now_ns, entropy)
    parsed = UUID(parse_uuid("id", text))
    assert (parsed.version, parsed.variant) == (7, "specified in RFC 4122")
    assert parsed.int >> 80 == now_ns // 1_000_000


@given(
    earlier_ns=st.integers(0, NS_MAX - 245),
    apart_ns=st.integers(245, 2 * 10**6),
    entropy=st.tuples(EIGHT_BYTES, EIGHT_BYTES),
)
def test_a_uuid7_made_245_ns_after_another_sorts_after_it(
    earlier_ns: int, apart_ns: int, entropy: tuple[bytes, bytes]
) -> None:
    later_ns = min(earlier_ns + apart_ns, NS_MAX)
    assert uuid7(earlier_ns, entropy[0]) < uuid7(later_ns, entropy[1])


def test_a_uuid7_keeps_every_bit_of_entropy_it_has_room_for() -> None:
    assert uuid7(0, b"\xff" * 8) == "00000000-0000-7000-bfff-ffffffffffff"
    assert uuid7(NS_MAX, bytes(8)) == "ffffffff-ffff-7fff-8000-000000000000"


@given(now_ms=st.integers(0, 2**47), entropy=st.binary(max_size=80))
def test_new_ids_are_canonical_ordered_and_in_the_partition_of_their_uuid(
    now_ms: int, entropy: bytes
) -> None:
    partitions = PartitionConfig()
    made = new_execution_ids(now_ms << 12, entropy[: len(entropy) // 8 * 8], partitions)
    uuids = [uuid_of(parse_execution_id(each)) for each in made]
    assert made == [solo_execution_id(each, partitions) for each in uuids]
    assert uuids == sorted(set(uuids))
    for each in map(UUID, uuids):
        assert (each.version, each.variant) == (7, "specified in RFC 4122")
        assert each.int >> 80 == now_ms


def test_new_ids_stay_ordered_beyond_what_a_millisecond_has_room_for() -> None:
    made = new_execution_ids(5 << 12, bytes(8 * 5_000), PartitionConfig())
    uuids = [uuid_of(each) for each in made]
    assert uuids == sorted(set(uuids))
    assert uuids[4_095:4_097] == [
        "00000000-0005-7fff-8000-000000000000",
        "00000000-0006-7000-8000-000000000000",
    ]


@given(asked=st.lists(st.tuples(st.integers(0, 2_000_000), st.integers(1, 5_000)), min_size=1))
def test_stamps_are_later_than_those_before_and_no_earlier_than_the_time(
    asked: list[tuple[int, int]],
) -> None:
    """Also where the clock is set back, or more are taken than a moment has room for."""
    stamps, end = Stamps(), 0
    for now_ns, count in asked:
        first = stamps.take(now_ns, count)
        assert first >= end
        assert first == max(end, now_ns * 4_096 // 1_000_000)
        end = first + count


@given(entropy=st.binary(min_size=16, max_size=16))
def test_a_uuid4_is_what_the_standard_library_would_make_of_the_same_bytes(entropy: bytes) -> None:
    assert uuid4_from(entropy) == str(UUID(bytes=entropy, version=4))


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("k1:" + "ab" * 20, "k1:<REDACTED:len=40>"),
        ("k1:a:b", "k1:<REDACTED:len=3>"),
        ("no-colon", "<REDACTED:malformed>"),
        (":leading", "<REDACTED:malformed>"),
        ("trailing:", "<REDACTED:malformed>"),
        ("", "<REDACTED:malformed>"),
    ],
)
def test_a_token_is_shown_without_its_secret(token: str, shown: str) -> None:
    assert redact_token(token) == shown


def test_the_uuid_that_follows_is_the_next_in_order() -> None:
    def after(uuid: str) -> str | None:
        return uuid_after(parse_execution_id(f"{{fp:1}}:{uuid}"))

    assert after(FIRST_UUID) == "00000000-0000-0000-0000-000000000001"
    assert after("550e8400-e29b-41d4-a716-ffffffffffff") == "550e8400-e29b-41d4-a717-000000000000"
    assert after(LAST_UUID) is None


def test_an_id_is_refused_under_the_name_it_was_given() -> None:
    for text in (None, "x", "{fp:01}:x", "{fp:1}:x"):
        with pytest.raises(InvalidInput) as caught:
            parse_execution_id(text, "cursor")
        assert caught.value.field == "cursor"


def test_a_flow_has_a_uuid_or_an_id_of_its_own_within_a_namespace() -> None:
    mine = named_flow_id("nightly", "shop")
    assert parse_uuid("flow_id", mine) == mine == named_flow_id(mine, "bank")
    assert mine == named_flow_id("nightly", "shop")
    others = [named_flow_id("nightly", "bank"), named_flow_id("weekly", "shop")]
    execution = uuid_of(own_execution_id("shop", "nightly", DEFAULT))
    assert len({mine, execution, *others}) == 4
    for bad in ("", " ", mine.upper(), "{fp:1}:x", "a\nb", 7, None):
        with pytest.raises(InvalidInput, match="flow_id"):
            named_flow_id(bad, "shop")


def test_ids_that_follow_from_names_tell_whose_names_they_are() -> None:
    made = [
        uuid_of(own_execution_id("shop", "order-17", DEFAULT)),
        named_flow_id("order-17", "shop"),
        named_budget_id("order-17", "shop"),
        policy_id_of("shop", "order-17"),
    ]

    assert {mark_in(each) for each in made} == {mark_of("namespace", "shop")}
    assert {mark_in(each) for each in (RAW, NIL, str(uuid5(UUID(NIL), "name")))} == {None}
    assert len({*made, named_budget_id("order-18", "shop"), named_budget_id("order-17", "s")}) == 6
    for each in made:
        assert (UUID(each).version, UUID(each).variant) == (8, RFC_4122)


def test_no_flow_has_the_mark_of_a_namespace() -> None:
    assert mark_of("flow", "shop")[:12] != mark_of("namespace", "shop")[:12]
    assert mark_of("flow", "shop")[12] != mark_of("namespace", "shop")[12]
