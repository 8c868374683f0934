"""K blocks of tiles whose activations come in limbs, lane by lane in NumPy: operands, exact accumulators, scales,
staging."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.experts.wgmma.kernel import ExpertTiles, x_scale_shift
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.gemm.wgmma import epilogue, kernel
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.kernel import WgmmaKernel
from cute_kernels.gemm.wgmma.mainloops import TMA_TILE_K, Limbs
from cute_kernels.gemm.wgmma.results import RowExchange
from layouts import banks
from simulator import stand_in
from tests.attention import warp as machine
from tests.linear.limbs import limbs_of
from tests.linear.test_wgmma_products import CODES, SCALES, STAGE, STAGING, X, make_weight
from tests.linear.warpgroup import WarpgroupWarp, put_tma_tile

X_SCALES = 13 << 14
CONFIGS = [
    WgmmaConfig(
        integers(4, group_size),
        dtype,
        tile_m=tile_m,
        row_parts=parts,
        n_tiles=tiles,
        block_k=128,
        num_stages=2,
        mainloop=Limbs(),
    )
    for dtype, group_size, tile_m, parts, tiles in (
        ("bf16", 128, 16, 2, 2),
        ("fp16", 128, 16, 1, 1),
        ("bf16", 128, 8, 1, 2),
        ("bf16", 256, 32, 4, 2),
        ("bf16", 128, 64, 4, 2),
    )
]
CASES = [
    (config, present, shift)
    for config in CONFIGS
    for present, shift in ((config.row_parts, 0), (1, 3), (config.row_parts, 2))
]


def load_stage(
    shared: np.ndarray, config: WgmmaConfig, weight: PackedWeight, x: torch.Tensor, present: int, shift: int
):
    """Fills a stage with the first k block of a weight and of x, as the producer warps do: parts without gaps."""
    for tile in range(config.block_tiles):
        for part, start, stage_bytes in (
            (weight.codes[tile, : config.k_block_tiles], CODES, config.code_stage_bytes),
            (weight.scales[tile, : config.k_block_groups], SCALES, config.scale_stage_bytes),
        ):
            run = part.contiguous().view(torch.uint8).numpy().reshape(-1)
            place = start + STAGE * stage_bytes + tile * run.size
            shared[place : place + run.size] = run
    found, scales = limbs_of(x)
    subject = WgmmaKernel(config, ExpertTiles(config)).activations  # whose limbs come in parts
    part_bytes = 2 * TMA_TILE_K * config.part_m
    for limb in range(2):
        for part in range(present):
            rows = found[part * config.part_m : (part + 1) * config.part_m, 0, limb]
            at_part, at_tma_tile = subject.place(STAGE, part, limb, present)
            place = X + at_tma_tile * config.tma_tile_bytes + at_part * part_bytes
            put_tma_tile(shared, place, rows.copy().view(np.uint16))
    place = X_SCALES + STAGE * config.x_scale_stage_bytes + 4 * shift
    shared[place : place + 4 * len(x)] = scales[0].view(np.uint8)


class Machine:
    """All consumer warps, one after the other, on one stage."""

    def __init__(self, config: WgmmaConfig, weight: PackedWeight, x: torch.Tensor, run_on, present=0, shift=0):
        self.config, present = config, present or config.row_parts
        self.tile_m = present * config.part_m
        self.shared = np.zeros(1 << 18, np.uint8)
        load_stage(self.shared, config, weight, x, present, shift)
        self.gpu = WarpgroupWarp(self.shared, np.zeros(0, np.uint8))
        run_on(self.gpu)
        self.subject: Any = kernel.WgmmaKernel(config)
        self.consumers: Any = self.subject.consumers
        self.consumers.mainloop.reader.x_scale_shift = lambda work_tile: machine.Int32(x_scale_shift(work_tile))
        self.work_tile = SimpleNamespace(token=shift)

    def acc(self, warp: int, k_blocks: int = 1) -> machine.Registers:
        config, consumers = self.config, self.consumers
        memory = SimpleNamespace(x_address=X, codes=CODES, scales=SCALES, x_scales=X_SCALES)
        acc = machine.Registers(config.thread_acc, machine.Float32)
        place = consumers.lane(SimpleNamespace(m=config.tile_m), warp, machine.LANES)
        x_place = consumers.mainloop.reader.x_scale_place(self.work_tile)
        for _ in range(k_blocks):
            consumers.mainloop.multiply_k_block(acc, memory, STAGE, place, x_place, self.tile_m)
        return acc

    def stage(self, packed: bool) -> np.ndarray:
        """[tokens, block_rows], each tile's results as a warpgroup finds them in its buffer."""
        config = self.config
        found = np.zeros((config.tile_m, config.block_rows))
        for group in range(config.warpgroups):
            warps = [(warp, self.acc(4 * group + warp)) for warp in range(4)]
            for tile in range(config.n_tiles):
                for warp, acc in warps:
                    store = stand_in(epilogue.Store)(STAGING, 1, warp * 32 + machine.LANES, warp, machine.LANES)
                    stage = self.subject.epilogue.stage_packed if packed else self.subject.epilogue.stage_acc
                    stage(store, acc, tile * config.tile_m // 2, config.tile_m)
                rows = slice(64 * (group * config.n_tiles + tile), 64 * (group * config.n_tiles + tile + 1))
                found[:, rows] = self.staged(packed)
        return found[: self.tile_m]

    def staged(self, packed: bool) -> np.ndarray:
        tile_m = self.config.tile_m
        if not packed:
            pitch = self.config.staging_pitch
            return self.shared[STAGING : STAGING + tile_m * pitch].view(np.float32).reshape(tile_m, -1)[:, :64]
        bits = self.shared[STAGING : STAGING + tile_m * epilogue.PACKED_PITCH].view(np.int16).reshape(tile_m, -1)
        dtype = torch.bfloat16 if self.config.dtype == "bf16" else torch.float16
        return torch.from_numpy(bits[:, :64].copy()).view(dtype).double().numpy()


@pytest.mark.parametrize(("config", "present", "shift"), CASES, ids=str)
def test_a_k_block_is_multiplied(config: WgmmaConfig, present: int, shift: int, run_on):
    weight = make_weight(config)
    tile_m = present * config.part_m
    x = torch.randn(tile_m, config.block_k, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    found = Machine(config, weight, x, run_on, present, shift).stage(packed=False)
    exact = (x.double() @ weight.dequantize(torch.float64)[:, : config.block_k].T).numpy()
    np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


def test_k_blocks_add_up(run_on):
    config = CONFIGS[0]
    weight = make_weight(config)
    x = torch.randn(config.tile_m, config.block_k, generator=torch.Generator().manual_seed(3)).to(weight.dtype)
    subject = Machine(config, weight, x, run_on)
    one, three = (np.array([np.asarray(value) for value in subject.acc(5, k_blocks)]) for k_blocks in (1, 3))
    np.testing.assert_allclose(three, 3 * one, rtol=1e-5, atol=1e-5)


SMALL = {"bf16": 2.0**-60, "fp16": 2.0**-12}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("value", [1.0, -1.9921875, "small"])
def test_one_hot_rows_return_the_weights_rounded_once(config: WgmmaConfig, value: float | str, run_on):
    value = SMALL[config.dtype] if isinstance(value, str) else value
    weight = make_weight(config)
    x = torch.zeros(config.tile_m, config.block_k, dtype=weight.dtype)
    inputs = (torch.arange(config.tile_m) * 5 + 3) % config.block_k
    x[torch.arange(config.tile_m), inputs] = value
    exact = weight.dequantize(torch.float32)[:, inputs].T * value
    found = Machine(config, weight, x, run_on).stage(packed=True)
    assert np.array_equal(found, exact.to(weight.dtype).double().numpy())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_shared_memory_is_read_and_written_without_conflicts(config: WgmmaConfig, run_on):
    weight = make_weight(config)
    subject = Machine(config, weight, torch.zeros(config.tile_m, config.block_k, dtype=weight.dtype), run_on)
    subject.stage(packed=True)
    assert len(subject.gpu.accesses) > 32
    for access in subject.gpu.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access


def test_only_what_bytes_can_say_is_taken():
    config = CONFIGS[0]
    for change in (
        {"format": integers(8)},
        {"format": integers(4, zero_points=True)},
        {"format": integers(4, 64)},
        {"block_k": 64},
        {"reduction": RowExchange()},
    ):
        assert replace(config, **change).can_implement(), change
    assert replace(config, tile_m=128, n_tiles=1).can_implement()
