"""Work tiles of products whose limbs a CTA makes itself, k blocks in turn and K in chunks, lane by lane in NumPy."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from operator import index
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.device.pipeline import Pipeline, PipelineState
from cute_kernels.formats.weights import FP8, FP8_BLOCK, FP8_POWER_BLOCK, MXFP4, NVFP4, integers, shifted, weight_format
from cute_kernels.formats.weights.base import without_row_scales
from cute_kernels.formats.weights.fp4 import MXFP4_ANY, MxFp4
from cute_kernels.gemm import pack_weight
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.quantize import quantize_weight
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.gemm.wgmma import (
    resident_kernel,
    resident_mainloop,
)
from cute_kernels.gemm.wgmma.config import ResidentConfig, WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import ROW_SCALE_BYTES, TMA_TILE_K, ResidentLimbs
from cute_kernels.gemm.wgmma.resident_schedule import resident_configs
from cute_kernels.gemm.wgmma.results import WGMMA_N_STEP, Dsmem, WorkspaceSplitK
from cute_kernels.gemm.wgmma.schedule import schedule_of
from cute_kernels.gemm.wgmma.tiles import WorkTile
from simulator import Altered, Lanes, stand_in
from tests.attention import warp as machine
from tests.linear.limbs import e4m3_limbs_of, in_columns, limbs_of
from tests.linear.warpgroup import WarpgroupWarp, put_tma_tile

STAGES, K = 8, 1152
X, X_SCALES, X_SUMS, CODES, SCALES, ZEROS = 0, 1 << 17, 3 << 16, 1 << 18, 1 << 19, 3 << 18
X_BARRIER = 100
CONFIGS = [
    WgmmaConfig(
        integers(4),
        "bf16",
        tile_m=tile_m,
        block_k=128,
        num_stages=STAGES,
        n_tiles=n_tiles,
        warpgroups=warpgroups,
        mainloop=ResidentLimbs(resident_k_blocks, spare=spare),
        reduction=Dsmem(cluster, k_warpgroups),
    )
    for tile_m, n_tiles, spare, warpgroups, k_warpgroups, cluster, resident_k_blocks in (
        (8, 1, 0, 2, 1, 3, 10),
        (8, 1, 0, 4, 2, 2, 8),
        (8, 1, 0, 4, 4, 2, 8),
        (8, 1, 0, 4, 1, 3, 2),
        (8, 1, 0, 4, 4, 2, 16),
        (8, 1, 0, 2, 2, 2, 4),
        (8, 1, 0, 4, 2, 2, 4),
        (8, 2, 1, 4, 1, 2, 4),
        (8, 2, 1, 2, 1, 2, 8),
        (8, 1, 0, 4, 1, 2, 4),
        (16, 2, 0, 2, 1, 2, 8),
        (16, 3, 0, 2, 1, 2, 4),
        (16, 4, 1, 2, 1, 2, 10),
    )
]
FINE_CONFIGS = [
    replace(CONFIGS[i], format=integers(4, size)) for i, size in ((0, 32), (2, 32), (5, 64), (7, 32), (8, 64), (10, 32))
]
FP4_CONFIGS = [replace(CONFIGS[i], format=MXFP4) for i in (0, 2, 7, 9, 11, 12)]
FP8_CONFIGS = [
    replace(CONFIGS[i], format=form)
    for i, form in ((0, FP8_BLOCK), (2, FP8_BLOCK), (4, weight_format("e4m3_g64f32")), (9, FP8_BLOCK), (10, FP8_BLOCK))
]
HALF_GROUP_CONFIGS = [
    replace(CONFIGS[i], format=NVFP4, mainloop=replace(CONFIGS[i].mainloop, loads=True)) for i in (0, 2, 4, 6, 7, 9)
]
SHIFT_CONFIGS = [replace(CONFIGS[i], format=shifted(4, 128)) for i in (0, 2, 7, 8)]
ZERO_CONFIGS = [replace(CONFIGS[i], format=integers(4, zero_points=True)) for i in (0, 2, 5, 7, 8, 10)]


class Cta:
    """Memory of a CTA as one of its warps finds it: k blocks come in order, limbs as they are made."""

    def __init__(self, config: ResidentConfig, weight: PackedWeight, x: torch.Tensor, begin: int, k_rank: int):
        self.config, self.weight, self.begin, self.k_rank = config, weight, begin, k_rank
        unit = 2.0**config.format.byte_exponent
        self.limbs, self.scales = e4m3_limbs_of(x, unit) if config.format.bytes_in_e4m3 else limbs_of(x)
        if config.rows < config.tile_m:
            self.limbs, self.scales = in_columns(self.limbs, self.scales)
        self.rows, self.tile_m = len(self.limbs), config.tile_m
        self.shared = np.full(1 << 20, 0x7F, np.uint8)
        self.waited, self.released, self.met = 0, 0, 0
        self.made: list[tuple[int, int]] = []
        self.asked: tuple[int, int, int, int] | None = None

    def wait(self, at: Lanes | int, parity: Lanes | int) -> None:
        """A warp waits for the k blocks whose turn it is."""
        barrier, phase = index(at), index(parity)
        count = self.k_rank + self.waited * self.config.k_warpgroups
        assert (barrier, phase) == (count % STAGES, count // STAGES % 2)
        assert self.waited == self.released, "a k block is released before the next one is waited for"
        self.put(barrier, self.begin + count, range(self.config.block_tiles))
        self.waited += 1

    def put(self, stage: int, k_block: int, tiles: Any) -> None:
        """Codes and scales of some of the block's tiles."""
        codes = self.weight.codes[:, k_block * self.config.k_block_tiles : (k_block + 1) * self.config.k_block_tiles]
        count = self.config.k_block_groups
        groups = slice(k_block * count, (k_block + 1) * count)
        parts = [(codes, CODES), (self.weight.scales[:, groups], SCALES)]
        if self.weight.zeros is not None:
            parts.append((self.weight.zeros[:, groups], ZEROS))
        for part, start in parts:
            runs = part.contiguous().view(torch.uint8).numpy().reshape(len(part), -1)
            for tile in tiles:
                place = start + (stage * self.config.block_tiles + tile) * runs.shape[1]
                self.shared[place : place + runs.shape[1]] = runs[tile]

    def release(self, memory: Any, here: PipelineState, releases: Any) -> None:
        stage = index(here.stage)
        assert stage == (self.k_rank + self.released * self.config.k_warpgroups) % STAGES
        self.released += 1
        config = self.config
        sizes = config.code_stage_bytes, config.scale_stage_bytes, config.zero_stage_bytes
        for start, size in zip((CODES, SCALES, ZEROS), sizes, strict=True):
            self.shared[start + stage * size : start + (stage + 1) * size] = 0x7F

    def bring(self, place: Any, *where: Lanes | int) -> None:
        """What is asked for is what is made next, in that place."""
        first, begin, end = map(index, where)
        assert begin < end and self.asked is None
        tile_m = self.config.tile_m
        x, x_scales = X + first * 2 * tile_m * 128, X_SCALES + first * 4 * tile_m
        self.shared[x : x + (end - begin) * 2 * tile_m * 128] = 0x7F
        self.asked = x, x_scales, begin, end

    def make(self, place: Any, memory: Any, first: int, stop: int, x_phase: int) -> None:
        """Puts limbs where a TMA tile would lie, within what there is room for."""
        first, stop = index(first), index(stop)
        assert self.asked is not None and x_phase == len(self.made) % 2
        x, x_scales, begin, end = self.asked
        assert (x, x_scales, first, stop) == (memory.x_address, memory.x_scales, begin, end)
        self.asked = None
        self.made.append((begin, end))
        parts, k_block_bytes = self.config.tile_m // WGMMA_N_STEP, self.config.mainloop.k_block_limb_bytes(self.config)
        k_block_scale_bytes = ROW_SCALE_BYTES * self.config.tile_m
        assert x + (end - begin) * k_block_bytes <= X + self.config.mainloop.k_blocks * k_block_bytes
        assert x_scales + (end - begin) * k_block_scale_bytes <= X_SCALES + self.config.mainloop.x_scale_bytes(
            self.config
        )
        for k_block in range(begin, end):
            for limb in range(2):
                for part in range(parts):
                    some = (
                        self.limbs[WGMMA_N_STEP * part : WGMMA_N_STEP * (part + 1), k_block, limb]
                        .copy()
                        .view(np.uint16)
                    )
                    put_tma_tile(self.shared, x + (limb * parts + part) * 2 * TMA_TILE_K * WGMMA_N_STEP, some)
            self.shared[x_scales : x_scales + 4 * self.rows] = self.scales[k_block].view(np.uint8)
            if self.config.format.sums_inputs:
                limbs = self.limbs[: self.rows, k_block].view(np.int8).astype(np.int32).sum(axis=-1)
                sums = (256 * limbs[:, 0] + limbs[:, 1]).astype(np.int32)
                place = x_scales - X_SCALES + X_SUMS
                self.shared[place : place + 4 * self.rows] = sums.view(np.uint8)
            x, x_scales = x + k_block_bytes, x_scales + k_block_scale_bytes

    def meet(self) -> None:
        self.met += 1


def sums_of(config: ResidentConfig, weight: PackedWeight, x: torch.Tensor, warp: int, work_tile: WorkTile, run_on):
    """A warp's accumulators of a work tile, and the CTA behind them."""
    subject: Any = resident_kernel.ResidentKernel(config).consumers
    cta = Cta(config, weight, x, int(work_tile.begin), index(subject.stages.k_rank(warp // 4)))
    gpu = WarpgroupWarp(cta.shared, np.zeros(0, np.uint8))
    changed = {"replace": lambda one, **changes: SimpleNamespace(**{**vars(one), **changes})}  # of our `memory`
    run_on(Altered(gpu, arch={"mbarrier_wait": cta.wait}, modules={resident_mainloop: changed}))
    subject.stages.release, subject.mainloop.limbs = cta.release, cta
    memory = SimpleNamespace(
        x_address=X,
        codes=CODES,
        scales=SCALES,
        x_scales=X_SCALES,
        zeros=ZEROS,
        x_sums=X_SUMS if config.format.sums_inputs else None,
        pipeline=Pipeline(stand_in(0), stand_in(STAGES), STAGES),
        x_barrier=X_BARRIER,
    )
    begin, end = int(work_tile.begin), int(work_tile.end)
    fits = end - begin <= config.mainloop.k_blocks
    if fits:
        cta.bring(None, 0, begin, end)
        cta.make(None, memory, begin, end, 0)
    place = replace(subject.lane(SimpleNamespace(m=len(x)), warp, machine.LANES), fits=int(fits))
    acc = machine.Registers(config.thread_acc, machine.Float32)
    tiles = [min(subject.stages.first_tile(warp // 4) + i, config.block_tiles - 1) for i in range(config.n_tiles)]
    scaled = config.format.row_scales or not config.group_size
    channel = [channel_of(weight, tile, warp % 4) for tile in tiles] if scaled else []
    state = (memory.pipeline.consumer_state(cta.k_rank), memory.pipeline.consumer_state())
    subject.mainloop.multiply(acc, memory, work_tile, place, channel, state, True, cta.tile_m)
    subject.mainloop.finish(acc, None, memory, work_tile, place, channel, None, True)
    return np.array([np.asarray(value, np.float64) for value in acc]), cta, fits


def channel_of(weight: PackedWeight, tile: int, row_warp: int) -> tuple[list[Any], None]:
    """The scales of a warp's rows of a tile that hold for all of K, as `load_channel` returns them."""
    groups, found = without_row_scales(weight.format, weight.scales[tile].T)
    scales = (groups[:, 0].contiguous().view(torch.float32) if found is None else found).numpy()
    first = 16 * row_warp + machine.ROW
    return [machine.Float32(scales[first]), machine.Float32(scales[first + 8])], None


def parts_of(config: ResidentConfig, n: int) -> list[WorkTile]:
    """The parts of K of the first block."""
    problem = LinearProblem(config.rows, n, K, K, config.format, "bf16")
    schedule = schedule_of(problem, config, config.cluster)
    assert schedule is not None
    cuts = [
        (i * schedule.split_k_blocks, min((i + 1) * schedule.split_k_blocks, K // 128)) for i in range(schedule.splits)
    ]
    return [stand_in(WorkTile)(0, 0, begin, end, i, len(cuts), 0) for i, (begin, end) in enumerate(cuts)]


EVERY_CONFIG = CONFIGS + ZERO_CONFIGS + SHIFT_CONFIGS + FINE_CONFIGS + FP4_CONFIGS + FP8_CONFIGS + HALF_GROUP_CONFIGS


# Rows that are not there lie where they lie whatever the format is. As E4M3 their limbs are NaN here.
@pytest.mark.parametrize(
    ("config", "missing"),
    [
        *((config, 0) for config in EVERY_CONFIG),
        *((config, 5) for config in (*CONFIGS, FP4_CONFIGS[0], FP8_CONFIGS[0])),
        *((config, missing) for missing, config in enumerate(HALF_GROUP_CONFIGS[:3], 1)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_turns_and_parts_of_k_add_up(config: ResidentConfig, missing: int, run_on):
    rows = config.rows - missing
    generator = torch.Generator().manual_seed(rows)
    dense, zeros = torch.randn(config.block_rows, K, generator=generator).bfloat16(), config.format.sums_inputs
    weight = quantize_weight(dense, format=config.format)
    x = (torch.randn(rows, K, generator=generator) + 3 * zeros).bfloat16()  # sums of inputs are no zeros
    exact = (x.double() @ weight.dequantize(torch.float64).T).numpy()
    total = np.zeros((rows, config.block_rows))
    subject: Any = resident_kernel.ResidentKernel(config).consumers
    k_blocks: list[int] = []
    for work_tile in parts_of(config, config.block_rows):
        for group in range(config.warpgroups):
            for row_warp in (0, 3):
                found, cta, fits = sums_of(config, weight, x, 4 * group + row_warp, work_tile, run_on)
                assert (
                    cta.waited
                    == cta.released
                    == len(range(work_tile.begin + cta.k_rank, work_tile.end, config.k_warpgroups))
                )
                if not fits:
                    assert cta.made[0][0] == work_tile.begin and cta.made[-1][1] == work_tile.end
                    assert cta.met == len(cta.made) + 1
                k_blocks.append(cta.waited)
                tiles = [subject.stages.first_tile(group) + i for i in range(config.n_tiles)]
                for (tile, block_tile), i in product(enumerate(tiles), range(cta.tile_m // 2)):
                    if block_tile >= config.block_tiles:
                        continue
                    first = 64 * block_tile
                    feature = first + 16 * row_warp + machine.ROW + 8 * (i // 2 % 2)
                    token = 8 * (i // 4) + 2 * machine.COLUMN + i % 2
                    there = token < rows  # other columns are not stored
                    values = found[tile * (config.tile_m // 2) + i]
                    np.add.at(total, (token[there], feature[there]), values[there])
    checked = [feature for feature in range(config.block_rows) if feature // 16 % 4 in (0, 3)]
    np.testing.assert_allclose(total[:, checked], exact[:, checked], rtol=2e-5, atol=2e-5 * np.abs(exact).max())
    assert sum(k_blocks) == K // 128 * 2 * config.warpgroups // config.k_warpgroups


def test_only_what_can_be_resident_is_taken():
    config = CONFIGS[1]
    for change in (
        {"format": NVFP4},  # whose rows have two columns, and TMA brings one
        {"format": NVFP4, "tile_m": 16, "mainloop": ResidentLimbs(8, loads=True)},
        {"format": FP8_POWER_BLOCK},
        {"format": FP8},
        {"format": FP8_BLOCK, "dtype": "fp16"},  # of which two limbs in E4M3 would lose bits
        {"format": integers(8)},
        {"format": integers(8, zero_points=True)},
        {"format": integers(4, 64, zero_points=True)},
        {"format": shifted(4, 64)},
        {"format": shifted(8, 128)},
        {"format": integers(4, 0)},
        {"tile_m": 32},
        {"row_parts": 2},
        {"reduction": Dsmem(2, 3)},
        {"reduction": Dsmem(1)},
        {"reduction": WorkspaceSplitK()},
        {"mainloop": ResidentLimbs(7)},
        {"mainloop": ResidentLimbs(6)},
        {"mainloop": ResidentLimbs(200)},
        {"num_stages": 1},
        {"mainloop": ResidentLimbs(8, spare=1)},
        {"n_tiles": 5},
    ):
        assert replace(config, **change).can_implement(), change
    assert config.can_implement() is None
    assert all(replace(config, format=MxFp4(group_size=size)).can_implement() is None for size in (64, 128))


@pytest.mark.parametrize("lacks", [{"has_zeros": True}, {"sums_inputs": True}], ids=str)
def test_products_in_e4m3_that_lack_sums_of_inputs_are_refused(lacks: dict[str, bool]):
    """Only products of integers have them. No format that ships is one, but a user's may be."""
    for fields in ({}, lacks):
        form = type("Lacking", (MxFp4,), fields)(group_size=128)
        assert bool(resident_configs(LinearProblem(1, 8192, 8192, 8192, form, "bf16"))) == (not fields)


def test_zero_points_are_taken_with_all_tiles_of_a_stage():
    with_room = [config for config in ZERO_CONFIGS if replace(config, format=integers(4)).can_implement() is None]
    assert len(with_room) == 5 and all(config.can_implement() is None for config in with_room)


def test_the_largest_scales_of_mxfp4_overflow_no_earlier_than_results(run_on):
    """One-hot rows return weights that are near the largest fp32 number."""
    config = replace(FP4_CONFIGS[0], format=MXFP4_ANY)
    n, scales = config.block_rows, torch.full((config.block_rows, K // 32), 120, dtype=torch.uint8)
    scales[:, 0] = 252
    weight = pack_weight("mxfp4", torch.full((n, K // 2), 0x77, dtype=torch.uint8), scales)
    x = torch.zeros(config.tile_m, K, dtype=torch.bfloat16)
    x[:, 3] = 1
    acc, _, _ = sums_of(config, weight, x, 0, parts_of(config, n)[0], run_on)
    assert np.array_equal(acc, np.full_like(acc, 6 * 2.0**125))
