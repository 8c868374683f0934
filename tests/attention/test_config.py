"""A configuration says what it needs, and refuses what cannot be compiled with a reason."""

import dataclasses
import json
import re

import pytest

from cute_kernels.architecture import HOPPER
from cute_kernels.attention.compile import AttentionSpec, shipped_specs
from cute_kernels.attention.decode_config import DecodeConfig, tiles_of
from cute_kernels.attention.policies import CacheLoad, CopyPipeline, TokenRuns, WarpMma
from cute_kernels.formats.scores.features import Features
from cute_kernels.runtime.composed import changed
from cute_kernels.runtime.wanted import record_of, spec_of
from layouts.kv.swizzled_tile import SwizzledTile
from layouts.kv.tile import BLOCK_TOKENS
from tests.each import each

ONE_CTA, FEW_WARPS = CopyPipeline(ctas_per_sm=1), WarpMma(num_slices=2)
INT4 = DecodeConfig(CacheLoad("int4_g4", 128), CacheLoad("int4_g4", 128), "bf16", pipeline=ONE_CTA)
DENSE = DecodeConfig(CacheLoad("bf16", 128, "tma"), CacheLoad("bf16", 128, "tma"), "bf16", FEW_WARPS, ONE_CTA)
MIXED = DecodeConfig(CacheLoad("int8_channel", 192, "tma"), CacheLoad("int4_g2", 128), "fp16", FEW_WARPS, ONE_CTA)
MAPPED = CacheLoad("int4_g1", 128, "map")
FEW_HEADS = DecodeConfig(MAPPED, MAPPED, "bf16", WarpMma(4, num_slices=2), ONE_CTA, TokenRuns(contiguous=False))


def implemented() -> list[DecodeConfig]:
    return [INT4, DENSE, MIXED, *(spec.config for spec in shipped_specs() if isinstance(spec.config, DecodeConfig))]


@each("config", implemented, ids=lambda config: config.name)
def test_what_ships_can_be_implemented(config: DecodeConfig):
    assert config.can_implement() is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (changed(INT4, k_head_dim=72), "head_dim 72 is not one of 64, 80, 96, 128, 192, 256"),
        (changed(INT4, v_head_dim=1024), "head_dim 1024 is not one of"),
        (changed(INT4, k_head_dim=80), r"groups of 20 columns \(int4_g4 at head_dim 80\) are no multiple of 8"),
        (changed(MIXED, k_format="int8_head"), "int8_head caches are read by the kernel for int8_tensor"),
        (changed(DENSE, q_dtype="fp16"), "q_dtype 'fp16' is not that of a bf16 cache"),
        (changed(INT4, blocks_per_warp=3), "blocks_per_warp 3 is not 1, 2 or 4"),
        (changed(INT4, q_dtype="fp32"), "q_dtype 'fp32' is not 'bf16' or 'fp16'"),
        (changed(INT4, num_stages=1), "num_stages must be at least 2"),
        (changed(INT4, early_tiles=3), "early_tiles 3 is not 0 or 1"),
        (changed(INT4, early_tiles=-1), "early_tiles -1 is not 0 or 1"),
        (changed(INT4, num_slices=33), "33 [+] 1 warps are more than the 32 of a CTA"),
        (changed(INT4, k_copy="tma"), r"copy 'tma' is not one of \('bulk', 'map', 'word'\) that int4_g4 has"),
        (changed(INT4, v_copy="map"), "a map of rows that lie one behind the other"),
        (changed(FEW_HEADS, num_heads=16), "a map of 16 heads' rows of int4_g1: more than 256 words"),
        (changed(DENSE, v_copy="bulk"), r"copy 'bulk' is not one of \('tma',\) that bf16 has"),
        (changed(INT4, num_stages=100), "1 CTAs of .* bytes exceed the 232448 bytes of an SM"),
        (changed(INT4, ctas_per_sm=8), "8 CTAs of .* bytes exceed the 232448 bytes of an SM"),
    ],
)
def test_what_cannot_be_implemented_says_why(config: DecodeConfig, reason: str):
    found = config.can_implement()
    assert found is not None and re.search(reason, found), found


def test_an_unknown_format_is_named():
    with pytest.raises(ValueError, match="kv_format: got 'int3', want one of bf16, fp16, int4_g1"):
        changed(INT4, v_format="int3").can_implement()


def test_warps_tokens_and_threads_follow_from_the_fields():
    config = changed(INT4, num_heads=2, num_query_blocks=2, num_slices=3, blocks_per_slice=2)
    assert (config.num_roles, config.num_warps, config.num_threads) == (4, 12, 384)
    assert config.slice_tokens == 2 * BLOCK_TOKENS and config.tile_tokens == 6 * BLOCK_TOKENS


@each("config", implemented, ids=lambda config: config.name)
def test_shared_memory_holds_the_ring_the_merge_and_the_barriers(config: DecodeConfig):
    k_bytes, v_bytes = config.tile_bytes
    first_v = config.ring_offsets[1]
    assert (
        first_v >= config.pipeline.num_stages * k_bytes
        and config.ring_bytes == first_v + config.pipeline.num_stages * v_bytes
    )
    # Every warp's fp32 outputs and (maximum, sum) pairs must fit into the merge buffer.
    assert config.merge_bytes >= config.num_warps * config.warp_queries * (4 * config.v_head_dim + 8)
    assert config.smem_bytes >= max(config.ring_bytes, config.merge_bytes) + 2 * config.pipeline.num_stages * 8
    resident = config.pipeline.ctas_per_sm * (config.smem_bytes + HOPPER.reserved_shared_bytes)
    assert resident <= HOPPER.sm_shared_bytes


@pytest.mark.parametrize("config", [DENSE, MIXED, changed(MIXED, k_format="int4_g1", v_format="e5m2")], ids=str)
def test_swizzled_tiles_start_where_their_swizzle_does(config: DecodeConfig):
    for tile, start, size in zip(tiles_of(config), config.ring_offsets, config.tile_bytes, strict=True):
        if isinstance(tile, SwizzledTile):
            assert start % 1024 == 0 and size % 1024 == 0


def test_query_heads_are_counted_in_blocks_warps_and_heads():
    config = changed(INT4, num_heads=2, num_query_blocks=2, blocks_per_warp=4)
    assert (config.columns, config.warp_queries, config.head_queries, config.num_rows) == (8, 32, 64, 128)


def test_four_blocks_of_queries_lie_in_shared_memory_beside_the_ring():
    """For each query head of 32: fp16 columns, and for two lanes in eight the sums of a group."""
    config = changed(INT4, num_heads=2, blocks_per_warp=4)
    assert config.shares_queries and config.query_bytes == 2 * (32 * 128 * 2 + 4 * 2 * 32 * 16)
    assert config.smem_bytes == config.pool_bytes + config.query_bytes + 2 * config.pipeline.num_stages * 8
    # Queries of 16-bit keys, and of fewer blocks, stay in registers.
    assert not changed(DENSE, blocks_per_warp=4).query_bytes and not changed(INT4, blocks_per_warp=2).query_bytes


def test_a_row_takes_the_bytes_of_its_format():
    pairs = [pair for c in (INT4, DENSE, MIXED) for pair in zip(c.formats, c.head_dims, strict=True)]
    rows = [form.row_bytes(head_dim) for form, head_dim in pairs]
    assert rows == [80, 80, 256, 256, 192, 72]


OTHERS: dict[str, object] = {
    "k_format": "int4_g1",
    "v_format": "int4_g2",
    "k_head_dim": 64,
    "v_head_dim": 64,
    "q_dtype": "fp16",
    "k_copy": "word",
    "v_copy": "word",
    "page_tokens": 64,
    "features": Features(sinks=True),
    "early_tiles": 0,
}


def own_values() -> dict[str, object]:
    """Fields of a configuration and of its policies, as `changed` calls them."""
    values: dict[str, object] = {}
    for field in dataclasses.fields(DecodeConfig):
        value = getattr(INT4, field.name)
        is_policy = dataclasses.is_dataclass(value) and not isinstance(value, Features)
        parts = {part.name: getattr(value, part.name) for part in dataclasses.fields(value)} if is_policy else None
        prefix = f"{field.name}_" if field.name in ("k", "v") else ""
        values |= {field.name: value} if parts is None else {prefix + name: part for name, part in parts.items()}
    return values


def test_names_are_identifiers_and_differ_where_configurations_do():
    names = [config.name for config in implemented()]
    assert len(set(names)) == len(set(implemented())) == len(implemented())
    assert all(name.isidentifier() for name in names)
    assert len(own_values()) == 21
    for name, value in own_values().items():
        other = OTHERS.get(name)
        if other is None:
            assert isinstance(value, int)
            other = not value if isinstance(value, bool) else value + 1
        assert changed(INT4, **{name: other}).name != INT4.name, name


@pytest.mark.parametrize("config", [changed(INT4, features=Features(window=True, bias="bf16")), MIXED])
def test_a_configuration_survives_json(config: DecodeConfig):
    assert spec_of(json.loads(json.dumps(record_of(AttentionSpec(config))))) == AttentionSpec(config)


def test_a_change_names_a_field_that_is_nobodys_or_several_policies():
    with pytest.raises(TypeError, match="format: got a field that k, v of k, v, mainloop, pipeline, runs, features"):
        changed(INT4, format="int4_g1")
    with pytest.raises(TypeError, match="config: got 3, want a dataclass"):
        changed(3, format="int4_g1")
    assert changed(INT4, k_format="int4_g1", k_copy="word", units=True) == dataclasses.replace(
        INT4, k=CacheLoad("int4_g1", 128, "word"), units=True
    )
