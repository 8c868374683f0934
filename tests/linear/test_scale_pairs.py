"""Scales in pairs, by ldmatrix: what a thread is given is what single loads would give it, in every format."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.linear.wgmma import scale_pairs
from cute_kernels.linear.wgmma.config import WARPGROUP_WARPS, WgmmaConfig
from cute_kernels.linear.wgmma.reading import StageReader
from cute_kernels.linear.wgmma.scale_pairs import ScalePairs
from cute_kernels.weight_formats.integers import integers
from layouts.banks import report
from simulator.backend import Altered
from simulator.registers import LANES, Int32, from_halves, halves
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
    shape = {"n_tiles": n_tiles, "block_k": block_k, "warpgroups": warpgroups, "num_stages": STAGES}
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
