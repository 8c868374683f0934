"""Whole work tiles of products in limbs: a pipeline of stages, lane by lane in NumPy."""

from __future__ import annotations

from dataclasses import replace
from operator import index
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.device.pipeline import Pipeline
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.experts.wgmma.kernel import ExpertTiles
from cute_kernels.gemm.quantize import quantize_weight
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.kernel import WgmmaKernel
from cute_kernels.gemm.wgmma.mainloops import LIMB_GROUP, TMA_TILE_K, Limbs
from cute_kernels.gemm.wgmma.results import RowExchange
from simulator import Altered, Lanes, stand_in
from tests.attention import warp as machine
from tests.linear.limbs import limbs_of
from tests.linear.test_wgmma_limbs import X_SCALES
from tests.linear.test_wgmma_products import CODES, SCALES, X
from tests.linear.warpgroup import WarpgroupWarp, put_tma_tile

STAGES = 3
CONFIGS = [
    WgmmaConfig(
        integers(4, group),
        "bf16",
        tile_m=tile_m,
        row_parts=tile_m // 8,
        n_tiles=tiles,
        block_k=128,
        num_stages=STAGES,
        mainloop=Limbs(),
    )
    for tile_m, tiles, group in ((16, 1, 128), (16, 2, 256), (32, 1, 128), (32, 2, 128))
]


class Stages:
    """Stages that are filled, as the producer warps would, no sooner than they were given back.

    A stage that is not filled, or was given back, holds what no k block has, so that whoever reads it is found out.
    """

    def __init__(self, shared: np.ndarray, config: WgmmaConfig, weight: PackedWeight, x: torch.Tensor, begin: int):
        self.shared, self.config, self.weight = shared, config, weight
        self.found, self.scales = limbs_of(x)
        self.present = len(x) // config.part_m
        self.begin, self.filled, self.given_back = begin, 0, 0
        self.end = x.shape[1] // LIMB_GROUP
        for stage in range(STAGES):
            self.spoil(stage)

    def wait(self, at: Lanes | int, parity: Lanes | int) -> None:
        barrier, phase = index(at), index(parity)
        assert phase == self.filled // STAGES % 2 and barrier == self.filled % STAGES
        assert self.begin + self.filled < self.end, "nothing comes any more"
        assert self.filled - self.given_back < STAGES, "the stage is not free"
        self.fill(barrier, self.begin + self.filled)
        self.filled += 1

    def release(self, memory: Any, here: Any, releases: Any) -> None:
        stage = here.stage
        assert stage == self.given_back % STAGES and self.given_back < self.filled
        self.given_back += 1
        self.spoil(stage)

    def spoil(self, stage: int) -> None:
        for start, size in self.places(stage):
            self.shared[start : start + size] = 0x7F

    def places(self, stage: int) -> list[tuple[int, int]]:
        config = self.config
        sizes = (
            (X, config.x_stage_bytes),
            (CODES, config.code_stage_bytes),
            (SCALES, config.scale_stage_bytes),
            (X_SCALES, config.x_scale_stage_bytes),
        )
        return [(start + stage * size, size) for start, size in sizes]

    def fill(self, stage: int, k_block: int) -> None:
        config, weight = self.config, self.weight
        (_, _), (codes, _), (scales, _), (x_scales, _) = self.places(stage)
        for tile in range(config.block_tiles):
            group = k_block * LIMB_GROUP // config.group_size
            for part, start in (
                (weight.codes[tile, k_block * config.k_block_tiles : (k_block + 1) * config.k_block_tiles], codes),
                (weight.scales[tile, group : group + 1], scales),
            ):
                run = part.contiguous().view(torch.uint8).numpy().reshape(-1)
                self.shared[start + tile * run.size : start + (tile + 1) * run.size] = run
        subject = WgmmaKernel(config, ExpertTiles(config)).activations  # whose limbs come in parts
        for limb in range(2):
            for part in range(self.present):
                rows = self.found[part * config.part_m : (part + 1) * config.part_m, k_block, limb]
                at_part, at_tma_tile = subject.place(stage, part, limb, self.present)
                place = X + at_tma_tile * config.tma_tile_bytes + at_part * 2 * TMA_TILE_K * config.part_m
                put_tma_tile(self.shared, place, rows.copy().view(np.uint16))
        self.shared[x_scales : x_scales + 4 * self.found.shape[0]] = self.scales[k_block].view(np.uint8)


def sums_of(config: WgmmaConfig, weight: PackedWeight, x: torch.Tensor, warp: int, begin: int, run_on):
    """A warp's accumulators over the k blocks of x from ``begin`` on, and the pipeline behind them."""
    shared = np.zeros(1 << 18, np.uint8)
    state = Stages(shared, config, weight, x, begin)
    gpu = WarpgroupWarp(shared, np.zeros(0, np.uint8))
    run_on(Altered(gpu, arch={"mbarrier_wait": state.wait}))
    subject: Any = WgmmaKernel(config, ExpertTiles(config)).consumers
    subject.stages.release = state.release
    pipeline = Pipeline(stand_in(0), stand_in(STAGES), STAGES)
    memory = SimpleNamespace(x_address=X, codes=CODES, scales=SCALES, x_scales=X_SCALES, pipeline=pipeline)
    work_tile = SimpleNamespace(begin=begin, end=state.end, token=0)
    place = subject.lane(SimpleNamespace(m=config.tile_m), warp, machine.LANES)
    acc = machine.Registers(config.thread_acc, machine.Float32)
    begins = pipeline.consumer_state(), pipeline.consumer_state()
    here, _ = subject.mainloop.multiply(acc, memory, work_tile, place, [], begins, True, len(x))
    assert state.filled == state.given_back == state.end - begin
    assert (here.stage, here.phase) == (state.filled % STAGES, state.filled // STAGES % 2)
    return np.array([np.asarray(value, np.float64) for value in acc])


def expected(config: WgmmaConfig, weight: PackedWeight, x: torch.Tensor, warp: int, begin: int) -> np.ndarray:
    """[sum, lane] of a warp, as fragments of MMAs have them."""
    exact = (
        x.double()[:, begin * LIMB_GROUP :] @ weight.dequantize(torch.float64)[:, begin * LIMB_GROUP : x.shape[1]].T
    ).numpy()
    found = np.zeros((config.thread_acc, 32))
    for tile in range(config.n_tiles):
        for i in range(len(x) // 2):
            row = 64 * (warp // 4 * config.n_tiles + tile) + 16 * (warp % 4) + machine.ROW + 8 * (i // 2 % 2)
            found[tile * config.tile_m // 2 + i] = exact[8 * (i // 4) + 2 * machine.COLUMN + i % 2, row]
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize(("k_blocks", "begin"), [(1, 0), (2, 0), (5, 0), (7, 2), (8, 1)])
def test_an_item_is_multiplied(config: WgmmaConfig, k_blocks: int, begin: int, run_on):
    generator = torch.Generator().manual_seed(k_blocks)
    k = 8 * LIMB_GROUP
    weight = quantize_weight(torch.randn(config.block_rows, k, generator=generator).bfloat16(), 4, config.group_size)
    for rows, warp in ((config.part_m, 1), (config.tile_m, 6)):
        x = torch.randn(
            rows, (begin + k_blocks) * LIMB_GROUP if begin + k_blocks < 8 else k, generator=generator
        ).bfloat16()
        found = sums_of(config, weight, x, warp, begin, run_on)
        exact = expected(config, weight, x, warp, begin)
        np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


def test_sums_are_those_of_k_blocks_one_after_the_other(run_on):
    weight = quantize_weight(torch.randn(128, 1024).bfloat16(), 4, 128)
    x = torch.randn(16, 1024).bfloat16()
    one, two = CONFIGS[0], replace(CONFIGS[0], n_tiles=2, warpgroups=1)
    assert np.array_equal(sums_of(one, weight, x, 2, 0, run_on), sums_of(two, weight, x, 2, 0, run_on)[:8])


def test_only_limbs_of_few_rows_are_taken():
    for change in ({"tile_m": 128, "row_parts": 4}, {"reduction": RowExchange()}):
        assert replace(CONFIGS[0], **change).can_implement(), change
