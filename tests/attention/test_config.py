"""A configuration says what it needs, and refuses what cannot be compiled with a reason."""

import dataclasses
import json
import re

import pytest

from cute_kernels.attention.compile import DecodeSpec, shipped_specs
from cute_kernels.attention.config import MAX_SHARED_BYTES, RESERVED_SHARED_BYTES, DecodeConfig
from layouts.kv.tile import BLOCK_TOKENS

INT4 = DecodeConfig("int4_g4", "bf16", 128, ctas_per_sm=1)
DENSE = DecodeConfig("bf16", "bf16", 128, num_slices=2, num_stages=3, ctas_per_sm=1, copy="tma")
SHIPPED = [spec.config for spec in shipped_specs() if isinstance(spec, DecodeSpec)]


def change(config: DecodeConfig, **fields) -> DecodeConfig:
    return dataclasses.replace(config, **fields)


@pytest.mark.parametrize("config", [INT4, DENSE, *SHIPPED], ids=lambda config: config.name)
def test_what_ships_can_be_implemented(config: DecodeConfig):
    assert config.can_implement() is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (change(INT4, head_dim=96), "head_dim 96 is not 64, 128 or 256"),
        (change(INT4, q_dtype="fp32"), "q_dtype 'fp32' is not 'bf16' or 'fp16'"),
        (change(INT4, num_stages=1), "num_stages must be at least 2"),
        (change(INT4, early_tiles=3), "early_tiles 3 is not from 0 to num_stages - 1 = 2"),
        (change(INT4, early_tiles=-1), "early_tiles -1 is not from 0"),
        (change(INT4, num_slices=33), "33 warps are more than the 32 of a CTA"),
        (change(INT4, copy="tma"), r"copy 'tma' is not one of \('bulk', 'word'\) that int4_g4 has"),
        (change(DENSE, copy="bulk"), r"copy 'bulk' is not one of \('tma',\) that bf16 has"),
        (change(INT4, num_stages=100), "1 CTAs of .* bytes exceed the 232448 bytes of an SM"),
        (change(INT4, ctas_per_sm=8), "8 CTAs of .* bytes exceed the 232448 bytes of an SM"),
    ],
)
def test_what_cannot_be_implemented_says_why(config: DecodeConfig, reason: str):
    found = config.can_implement()
    assert found is not None and re.search(reason, found), found


def test_an_unknown_format_is_named():
    with pytest.raises(ValueError, match="kv_format: got 'int3', want one of bf16, fp16, int4_g1"):
        change(INT4, kv_format="int3").can_implement()


def test_warps_tokens_and_threads_follow_from_the_fields():
    config = change(INT4, num_heads=2, num_query_blocks=2, num_slices=3, blocks_per_slice=2)
    assert (config.num_roles, config.num_warps, config.num_threads) == (4, 12, 384)
    assert config.slice_tokens == 2 * BLOCK_TOKENS and config.tile_tokens == 6 * BLOCK_TOKENS


@pytest.mark.parametrize("config", [INT4, DENSE, *SHIPPED], ids=lambda config: config.name)
def test_shared_memory_holds_the_ring_the_merge_and_the_barriers(config: DecodeConfig):
    assert config.ring_bytes == 2 * config.num_stages * config.tile_bytes
    # Every warp's 8 x head_dim fp32 outputs and 8 (maximum, sum) pairs must fit into the merge buffer.
    assert config.merge_bytes >= config.num_warps * 8 * (4 * config.head_dim + 8)
    assert config.smem_bytes >= max(config.ring_bytes, config.merge_bytes) + 2 * config.num_stages * 8
    resident = config.ctas_per_sm * (config.smem_bytes + RESERVED_SHARED_BYTES)
    assert resident <= MAX_SHARED_BYTES + RESERVED_SHARED_BYTES


def test_a_row_takes_the_bytes_of_its_format():
    assert [change(INT4, kv_format=f"int4_g{g}").format.row_bytes(128) for g in (1, 2, 4, 8)] == [68, 72, 80, 96]
    assert DENSE.format.row_bytes(128) == 256


def test_names_are_identifiers_and_differ_where_configurations_do():
    names = [config.name for config in SHIPPED]
    assert len(set(names)) == len(set(SHIPPED)) == len(SHIPPED)
    assert all(name.isidentifier() for name in names)
    for field in dataclasses.fields(DecodeConfig):
        value = getattr(INT4, field.name)
        other = {"kv_format": "int4_g1", "q_dtype": "fp16", "copy": "word"}.get(field.name)
        if other is None:
            other = not value if isinstance(value, bool) else value + 1
        assert change(INT4, **{field.name: other}).name != INT4.name, field.name


def test_a_configuration_survives_json():
    assert DecodeConfig(**json.loads(json.dumps(INT4.to_dict()))) == INT4
