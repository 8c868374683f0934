"""Kernels of transformed caches compile without spills, in the registers that their grids reckon with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.decode_schedule import make_schedule
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.formats.scores.features import Features
from cute_kernels.kv_cache.compile import AppendSpec, BulkSpec
from cute_kernels.kv_cache.config import NUM_WARPS, AppendConfig, BulkConfig, RowPrologue, RowTransform
from cute_kernels.runtime import default_cache, native
from tests import golden

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")

SM_REGISTERS, SCHEDULERS = 65536, 4  # each with its own registers
CENTRED = RowTransform(center=True, k_rotation=32)
FACTORS = replace(CENTRED, factor=True)
ALL = RowTransform(center=True, factor=True, v_factor=True, shift=True, k_rotation=128, v_rotation=128)


def append(kv_format: str = "int4_g4", parts: RowTransform = CENTRED, head_dim: int = 128) -> AppendConfig:
    return replace(AppendConfig.alike(kv_format, "bf16", head_dim, RowPrologue("half", head_dim)), transform=parts)


def decode(features: Features, kv_format: str = "int4_g4", group: int = 4, **options) -> AttentionSpec:
    problem = AttentionProblem.uniform(32, 8192, 8 * group, 8, 128, kv_format, "bf16", features=features, **options)
    return AttentionSpec(make_schedule(problem).config)


APPENDS = [append(), append(parts=ALL), append("int8_token_head"), append(head_dim=64)]
SPECS = [AppendSpec(kernel) for config in APPENDS for kernel in (config.for_decode(), replace(config, leads=True))]
SPECS += [AppendSpec(replace(append(parts=FACTORS).for_decode(), leads=True))]  # of a single token
SPECS += [BulkSpec(BulkConfig("quantize", "int4_g4", "bf16", 128, transform=CENTRED))]
SPECS += [
    decode(Features(shift=True, sinks=True)),
    decode(Features(shift=True, soft_cap=True, paged=True), page_tokens=16, after_append=True),
    decode(Features(shift=True, soft_cap=True), "int4_g1", group=32),
]
COMPILED = golden.worth_compiling(SPECS, lambda spec: spec)


@pytest.fixture(scope="module")
def measured() -> dict[str, golden.Entry]:
    return golden.measure(COMPILED, default_cache())


def test_none_spills(measured: dict[str, golden.Entry]):
    for name, (kernel,) in measured.items():
        assert kernel["stack_bytes"] + kernel["spill_store_bytes"] + kernel["spill_load_bytes"] == 0, name


def test_as_many_ctas_of_an_append_fit_an_sm_as_its_grid_reckons_with(measured: dict[str, golden.Entry]):
    """With more registers a part of the grid would wait for the rest, and no time would be won by its size."""
    for spec in COMPILED:
        if isinstance(spec, AppendSpec):
            (kernel,), config = measured[spec.symbol], spec.config
            registers = -(-kernel["registers"] // 8) * 8 * WARP_THREADS
            warps = SCHEDULERS * (SM_REGISTERS // SCHEDULERS // registers)
            assert warps // NUM_WARPS >= config.ctas_per_sm, (spec.symbol, kernel["registers"])
