"""Scales in pairs, by ldmatrix: what a thread is given is what single loads would give it, in every format; what it
takes in machine code; which kernels have them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.device.packed_math import HopperMath
from cute_kernels.formats.weights.integer_decode import IntegerDecoder
from cute_kernels.formats.weights.integers import integers
from cute_kernels.gemm.compile import spec_of
from cute_kernels.gemm.schedule import LinearProblem
from cute_kernels.gemm.tuned import chosen
from cute_kernels.gemm.wgmma import scale_pairs
from cute_kernels.gemm.wgmma.config import WARPGROUP_WARPS, WgmmaConfig
from cute_kernels.gemm.wgmma.long_config import LongWgmma
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma
from cute_kernels.gemm.wgmma.reading import StageReader
from cute_kernels.gemm.wgmma.results import WorkspaceSplitK, dsmem
from cute_kernels.gemm.wgmma.scale_pairs import ScalePairs
from cute_kernels.gemm.wgmma.scale_pairs_compile import ScalePairsSpec, has_scale_pairs
from cute_kernels.runtime import default_cache, native
from layouts.banks import report
from simulator.backend import Altered
from simulator.registers import LANES, Int32, from_halves, halves
from tests import golden
from tests.linear import machine_code
from tests.linear.warp import LinearWarp

STAGES, SCALES = 3, 1 << 15
FORMS = [
    ("bf16", integers(4, 32)), ("bf16", integers(4, 64)), ("bf16", integers(4, 32, True)), ("fp16", integers(4, 32)),
    ("bf16", integers(8, 32)), ("bf16", integers(8, 64, True)), ("fp16", integers(8, 64)), ("bf16", integers(4, 128)),
]  # fmt: skip


def twice(half: int):
    return lambda pair: from_halves(np.repeat(halves(pair)[:, half : half + 1], 2, 1))


def on_a_warp(run_on) -> LinearWarp:
    gpu = LinearWarp(np.zeros(1 << 16, np.uint8), np.zeros(0, np.uint8))
    run_on(Altered(gpu, modules={scale_pairs: {"low_twice": twice(0), "high_twice": twice(1)}}))
    return gpu


def lanes_of(numbers) -> list[np.ndarray]:
    """All numbers of nested lists and tuples, for each lane."""
    if isinstance(numbers, (list, tuple)):
        return [found for one in numbers for found in lanes_of(one)]
    return [np.broadcast_to(np.asarray(numbers), (32,))]


@pytest.mark.parametrize("n_tiles, block_k, warpgroups", [(1, 128, 2), (2, 128, 2), (1, 64, 1), (1, 256, 3)])
@pytest.mark.parametrize("dtype, form", FORMS, ids=lambda value: getattr(value, "name", value))
def test_pairs_are_what_single_loads_give(dtype: str, form, n_tiles: int, block_k: int, warpgroups: int, run_on):
    shape: dict[str, Any] = {"n_tiles": n_tiles, "block_k": block_k, "warpgroups": warpgroups, "num_stages": STAGES}
    config = WgmmaConfig(form, dtype, tile_m=64, **shape)
    if config.k_block_groups < 2:
        pytest.skip("a group is no less than a k block")
    gpu, generator = on_a_warp(run_on), np.random.default_rng(0)
    bits = generator.integers(0x3000, 0x3800, SCALES // 2) | generator.integers(0, 2, SCALES // 2) << 15
    gpu.shared_memory.view(np.uint16)[: SCALES // 2] = bits
    gpu.shared_memory[SCALES:] = generator.integers(0, 1 << form.bits, len(gpu.shared_memory) - SCALES)
    memory = SimpleNamespace(scales=Int32(0), zeros=Int32(SCALES))
    single, pairs = StageReader(config), ScalePairs(config)
    for warp in range(WARPGROUP_WARPS * warpgroups):
        place = single.lane(None, Int32(warp), Int32(LANES), lambda shape, lane: None)
        for tile in range(n_tiles):
            expected = single.load_groups(memory, Int32(STAGES - 1), place, tile)
            gpu.accesses.clear()
            found = pairs.load_groups(memory, Int32(STAGES - 1), place, tile)
            assert len(found) == len(expected) == config.k_block_groups
            np.testing.assert_array_equal(lanes_of(found), lanes_of(expected))
            assert all(report(one.addresses, one.width, one.kind).conflicts == 0 for one in gpu.accesses)


TALL: dict[str, Any] = {"n_tiles": 2, "warpgroups": 2, "tile_m": 64, "num_stages": 5, "reduction": WorkspaceSplitK()}
IN_TURN: dict[str, Any] = {"warpgroups": 3, "tile_m": 32, "num_stages": 12, "reduction": dsmem(2, 3)}
COMPILED = [
    WgmmaConfig(integers(4, 32), "bf16", block_k=128, **TALL),
    WgmmaConfig(integers(4, 32), "bf16", block_k=128, **IN_TURN),
    WgmmaConfig(integers(4, 64, True), "bf16", block_k=128, **IN_TURN),
]


@pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("config", COMPILED, ids=lambda config: config.name)
def test_a_k_block_has_one_load_of_scales_a_tile(config: WgmmaConfig, tmp_path):
    """And no scale is loaded or doubled by itself: a product of both rows' scales for what codes are scaled by, one
    for half their range."""
    spec = spec_of(config)
    (artifact,) = default_cache().artifacts([spec], "sm_90a")  # by a worker, as tests here play kernels in Python
    (kernel,) = golden.measure([spec], default_cache())[spec.symbol]
    assert kernel["stack_bytes"] == kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0
    loop = machine_code.main_loop(machine_code.instructions(artifact.object_code, tmp_path))
    assert machine_code.early_writes(loop) == []
    opcodes = [opcode for _, opcode, _ in loop]
    assert sum(opcode.startswith("LDSM") for opcode in opcodes) == config.n_tiles
    assert "LDS.U16" not in opcodes and "PRMT" not in opcodes
    if not config.format.has_zeros:
        assert sum(opcode.startswith("HMUL2") for opcode in opcodes) == 2 * config.k_block_groups * config.n_tiles


def test_tiles_of_several_groups_a_k_block_have_pairs():
    tall = COMPILED[0]
    assert isinstance(spec_of(tall), ScalePairsSpec)
    others = (
        replace(tall, format=integers(4)),  # a group is a k block
        replace(tall, format=integers(4, 0)),  # no groups
        replace(tall, block_k=256, mainloop=LongWgmma(), n_tiles=1, reduction=dsmem(2)),
        replace(tall, row_parts=4, n_tiles=1, reduction=dsmem(2, 2)),  # slower
    )
    assert not any(has_scale_pairs(other) for other in others)


def test_scales_that_are_no_numbers_of_the_dtype_are_loaded_one_by_one(run_on):
    """A format's decoder may make them: pairs would pass it by."""
    config, gpu = COMPILED[0], on_a_warp(run_on)

    class Doubling(IntegerDecoder):
        def scale_word(self, word):
            return word + word

    pairs = ScalePairs(config, Doubling(4, "bf16", HopperMath("bf16")))
    place = pairs.lane(None, Int32(0), Int32(LANES), lambda shape, lane: None)
    gpu.shared_memory.view(np.uint16)[:] = 3
    groups = pairs.load_groups(SimpleNamespace(scales=Int32(0), zeros=Int32(0)), Int32(0), place, 0)
    assert all(np.all(scale == 0x00060006) for scales, _ in groups for scale in scales)


@pytest.mark.parametrize("group_size, in_flight", [(32, 1), (64, 1), (128, 2)])
def test_wide_tiles_of_small_groups_have_one_group_of_mmas_in_flight(group_size: int, in_flight: int):
    found = chosen(LinearProblem(64, 28672, 4096, 4096, integers(4, group_size), "bf16"), "NVIDIA H200").config
    assert isinstance(found, WgmmaConfig) and isinstance(found.mainloop, RegisterWgmma)
    assert (found.n_tiles, found.mainloop.in_flight) == (2, in_flight)
