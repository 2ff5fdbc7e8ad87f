"""Partition math: the hashes are part of the id format, so the vectors are fixed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.ids import (
    PARTITIONS_MAX,
    PartitionConfig,
    PartitionFamily,
    PartitionKey,
    check_partition,
    crc16_xmodem,
    fitted,
    partition_for,
)
from flowfabric.errors import InvalidInput

UUID = "550e8400-e29b-41d4-a716-446655440000"
DEFAULT = PartitionConfig()


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0x31C3),
        (b"default", 54870),
        (b"workers-a", 11969),
        (bytes.fromhex(UUID.replace("-", "")), 36888),
        (b"", 0),
    ],
)
def test_crc16_matches_its_published_vectors(data: bytes, crc: int) -> None:
    assert crc16_xmodem(data) == crc


def test_a_deployment_has_256_flow_and_32_budget_and_quota_partitions_by_default() -> None:
    assert PartitionConfig(num_flow=256, num_budget=32, num_quota=32) == DEFAULT


def test_lanes_and_flows_land_where_they_always_did() -> None:
    assert crc16_xmodem(b"default") % DEFAULT.num_flow == 86
    assert partition_for(UUID, DEFAULT) == 24
    assert partition_for(UUID, DEFAULT) == 24


@given(uuid=st.uuids(), config=st.integers(1, PARTITIONS_MAX).map(PartitionConfig))
def test_every_partition_is_in_range(uuid: object, config: PartitionConfig) -> None:
    assert 0 <= partition_for(str(uuid), config) < config.num_flow
    assert 0 <= partition_for(str(uuid), config) < config.num_flow


@given(uuid=st.uuids(), count=st.integers(1, PARTITIONS_MAX), data=st.data())
def test_a_uuid_can_be_fitted_to_any_partition(
    uuid: object, count: int, data: st.DataObject
) -> None:
    config = PartitionConfig(num_flow=count)
    wanted = data.draw(st.integers(0, count - 1))
    made = fitted(str(uuid), wanted, config)
    assert partition_for(made, config) == wanted
    assert made[:-4] == str(uuid)[:-4]
    assert fitted(made, wanted, config) == made


@pytest.mark.parametrize("field", ["num_flow", "num_budget", "num_quota"])
@pytest.mark.parametrize("count", [0, -1, PARTITIONS_MAX + 1, True, 1.5, "8", None])
def test_a_partition_count_is_a_positive_small_integer(field: str, count: object) -> None:
    arguments: dict[str, object] = {field: count}
    with pytest.raises(InvalidInput, match=f"^{field}: must be an integer from 1 to 32768"):
        make_config(**arguments)


def make_config(**arguments: object) -> PartitionConfig:
    make: type = PartitionConfig
    config = make(**arguments)
    assert isinstance(config, PartitionConfig)
    return config


@pytest.mark.parametrize("index", [0, 255])
def test_a_partition_the_deployment_has_is_accepted(index: int) -> None:
    assert check_partition(index, DEFAULT) == index


@pytest.mark.parametrize("index", [-1, 256, 32_768, 65_535])
def test_a_partition_the_deployment_lacks_is_refused(index: int) -> None:
    with pytest.raises(InvalidInput, match=r"^partition: must be below this deployment's 256"):
        check_partition(index, DEFAULT)


def test_no_deployment_has_a_partition_beyond_a_signed_16_bit_column() -> None:
    with pytest.raises(InvalidInput):
        check_partition(32_768, PartitionConfig(num_flow=PARTITIONS_MAX))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (PartitionKey(PartitionFamily.FLOW, 7), "{fp:7}"),
        (PartitionKey(PartitionFamily.BUDGET, 0), "{b:0}"),
        (PartitionKey(PartitionFamily.QUOTA, 65_535), "{q:65535}"),
    ],
)
def test_a_partition_key_has_one_text_form(key: PartitionKey, text: str) -> None:
    assert key.format() == text
    assert PartitionKey.parse(text) == key


def test_an_execution_partition_is_its_flow_partition() -> None:
    text = PartitionKey(PartitionFamily.EXECUTION, 3).format()
    assert PartitionKey.parse(text) == PartitionKey(PartitionFamily.FLOW, 3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fp:7", "missing braces"),
        ("{fp:7", "missing braces"),
        ("fp:7}", "missing braces"),
        ("", "missing braces"),
        ("{", "missing braces"),
        ("{fp7}", "malformed body"),
        ("{}", "malformed body"),
        ("{zz:7}", "unknown family prefix"),
        ("{:7}", "unknown family prefix"),
        ("{fp:}", "invalid index"),
        ("{fp:x}", "invalid index"),
        ("{fp:-1}", "invalid index"),
        ("{fp:+1}", "invalid index"),
        ("{fp:07}", "invalid index"),
        ("{fp:65536}", "invalid index"),
        ("{fp:٣}", "invalid index"),
        (7, "must be a string"),
    ],
)
def test_a_malformed_partition_key_is_refused(text: object, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"^partition_key: {problem}"):
        PartitionKey.parse(text)
