"""What bundles do not hold compiles on demand: mixed formats, other head dims, several blocks of queries to a warp."""

from __future__ import annotations

from functools import cache

import pytest

from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.formats.scores.features import Features
from cute_kernels.runtime import default_cache, native
from cute_kernels.runtime.composed import changed
from tests import golden
from tests.each import each

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")


def config(
    k_format: str,
    v_format: str | None = None,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    *,
    num_kv_heads: int = 1,
    group: int = 8,
    aligned: bool = True,
    ctas_per_sm: int | None = None,
    q_len: int = 1,
    page_tokens: int = 0,
    window: bool = False,
    soft_cap: bool = False,
    **fields: int,
) -> DecodeConfig:
    formats = (k_format, v_format or k_format)
    q_dtype = next((name for name in formats if name in ("bf16", "fp16")), "bf16")
    heads = (group * num_kv_heads, num_kv_heads)
    several = q_len > 1
    features = Features(several, several, window=window, soft_cap=soft_cap, paged=page_tokens > 0)
    more = {"q_len": q_len, "page_tokens": page_tokens, "features": features, "aligned": aligned}
    problem = AttentionProblem(1, 4096, *heads, head_dim, v_head_dim or head_dim, *formats, q_dtype, **more)
    found = candidate_configs(problem)
    chosen = next((c for c in found if c.pipeline.ctas_per_sm == ctas_per_sm), found[0])
    return changed(chosen, **fields)


FOUR_BLOCKS = ("int4_g1", "int8_token_head", "int8_tensor", "int8_channel", "e4m3_token_head", "e4m3_tensor", "e5m2")


def configs() -> list[DecodeConfig]:
    return [
        # K and V of different formats: rows and rows, bare and bare, rows and bare, by every way of copying.
        config("int4_g1", "int4_g4", ctas_per_sm=2),
        config("int8_token_head", "int4_g1"),
        config("e4m3_token_head", "int8_g4", num_kv_heads=8),
        config("bf16", "e5m2"),
        config("e4m3_tensor", "fp16"),
        config("int8_channel", "int8_tensor"),
        config("bf16", "int4_g1"),
        config("int4_g4", "int8_channel", num_kv_heads=8),
        config("int4_g2", "bf16", aligned=False),
        config("int8_token_head", aligned=False),
        config("int8_token_head", "int4_g4", num_kv_heads=8, group=4, page_tokens=64, ctas_per_sm=2),
        config("int8_token_head", "int4_g4", num_kv_heads=4, group=4, page_tokens=64, ctas_per_sm=4),
        config("e4m3_tensor", "int4_g4", num_kv_heads=4, group=4, page_tokens=64, ctas_per_sm=2),
        *(config("int8_token_head", "int4_g4", num_kv_heads=n, group=4, page_tokens=64, q_len=8) for n in (1, 8)),
        # Head dims.
        config("bf16", head_dim=80),
        config("fp16", head_dim=96),
        config("bf16", head_dim=192),
        config("int4_g1", head_dim=80),
        config("int4_g2", head_dim=96),
        config("int4_g4", head_dim=192),
        config("int8_g2", head_dim=80),
        config("e4m3_token_head", head_dim=96),
        config("e4m3_tensor", head_dim=80),
        config("int8_channel", head_dim=96),
        config("e5m2", head_dim=192),
        config("e5m2", head_dim=64),
        config("int8_tensor", head_dim=256),
        config("e4m3_token_head", head_dim=256, num_kv_heads=8),
        config("bf16", head_dim=512),
        config("int8_token_head", head_dim=512, num_kv_heads=2, page_tokens=64),
        # K and V of different head dims.
        config("bf16", head_dim=192, v_head_dim=128),
        config("e4m3_tensor", head_dim=192, v_head_dim=128),
        config("int4_g1", head_dim=64, v_head_dim=128),
        config("int8_g8", "bf16", 128, 80),
        # Several blocks of queries to a warp, and several warps with them.
        config("bf16", group=16, blocks_per_warp=2, num_query_blocks=1, ctas_per_sm=1),
        config("int4_g1", group=16, blocks_per_warp=2, num_query_blocks=1),
        config("int4_g4", group=32, blocks_per_warp=2, num_query_blocks=2, num_slices=2),
        config("int8_token_head", group=16, blocks_per_warp=2, num_query_blocks=1),
        config("e4m3_tensor", group=16, blocks_per_warp=2, num_query_blocks=1),
        config("int4_g1", head_dim=64, group=32, blocks_per_warp=4, num_query_blocks=1),
        config("e5m2", head_dim=64, group=32, blocks_per_warp=4, num_query_blocks=1),
        # Several queries to a request: four blocks of them to a warp, in shared memory.
        *(config(name, q_len=4) for name in FOUR_BLOCKS),
        *(config(name, q_len=4, page_tokens=16) for name in FOUR_BLOCKS),
        *(config(name, q_len=8) for name in FOUR_BLOCKS),
        *(config(name, q_len=4, num_kv_heads=8) for name in FOUR_BLOCKS if name.endswith(("g1", "token_head"))),
        *(config(name, q_len=4, window=True, soft_cap=True) for name in FOUR_BLOCKS),
        config("int4_g1", "int8_token_head", q_len=4),
        config("int4_g2", q_len=2),
        config("int4_g4", q_len=4),
        config("int8_tensor", "int4_g1", 64, 128, q_len=4),
    ]


@cache
def compiled() -> list[DecodeConfig]:
    return golden.worth_compiling(configs(), AttentionSpec)


@pytest.fixture(scope="module")
def measured() -> dict[str, golden.Entry]:
    return golden.measure([AttentionSpec(found) for found in compiled()], default_cache())


@each("found", compiled, ids=lambda found: found.name)
def test_it_compiles_without_spilling(found: DecodeConfig, measured: dict[str, golden.Entry]):
    (kernel,) = measured[AttentionSpec(found).symbol]
    assert kernel["stack_bytes"] + kernel["spill_store_bytes"] + kernel["spill_load_bytes"] == 0
    assert kernel["threads"] == found.cta_threads
    moves = {"tma": "UTMALDG", "map": "UTMALDG", "bulk": "UBLKCP", "word": "LDGSTS"}
    assert {moves[copy] for copy in found.copies} == kernel["opcodes"].keys() & set(moves.values())


@each("found", compiled, ids=lambda found: found.name)
def test_tensor_cores_do_no_more_than_they_must(found: DecodeConfig, measured: dict[str, golden.Entry]):
    """MMAs of a block: 2 tiles of 16 tokens, for every 16 columns of K and of V, for every block of queries.

    Groups of an odd number of 8 columns take half as many columns to an MMA.
    """
    (kernel,) = measured[AttentionSpec(found).symbol]
    columns = 0
    for form, head_dim in zip(found.formats, found.head_dims, strict=True):
        groups = form.num_groups
        columns += head_dim // (16 if head_dim // groups % 16 == 0 else 8)
    assert kernel["opcodes"]["HMMA"] == 2 * columns * found.mainloop.blocks_per_warp * found.mainloop.blocks_per_slice
