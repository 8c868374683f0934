"""What a consumer warp of the kernel for many rows computes, lane by lane in NumPy: addresses, decoding, staging."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.device.pipeline import PipelineState
from cute_kernels.formats.weights import FP8_BLOCK, integers
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.gemm.wgmma import epilogue, kernel
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import TMA_TILE_K, MmaSync, RegisterWgmma, ScaledSums
from cute_kernels.gemm.wgmma.reading import make_decoder
from layouts import banks
from simulator import stand_in
from tests.attention import warp as machine
from tests.linear.cases import random_weight
from tests.linear.warpgroup import WarpgroupWarp, put_tma_tile

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
X, CODES, SCALES, ZEROS, STAGING = 0, 1 << 16, 5 << 15, 6 << 15, 7 << 15  # in shared memory
STAGE = 1

CONFIGS = [
    WgmmaConfig(
        integers(bits, group_size, zero_point), dtype, tile_m=16, num_stages=2, mainloop=RegisterWgmma(group_steps=1)
    )
    for bits in (4, 8)
    for dtype in ("bf16", "fp16")
    for group_size in (0, 32, 64, 128, 256)
    for zero_point in (False, True)
] + [
    WgmmaConfig(integers(4), "bf16", tile_m=64, n_tiles=2, num_stages=2, mainloop=RegisterWgmma(group_steps=2)),
    WgmmaConfig(integers(4), "bf16", tile_m=48, row_parts=6, n_tiles=2, block_k=128, num_stages=2),
    WgmmaConfig(
        integers(4, 32, True),
        "bf16",
        tile_m=16,
        n_tiles=2,
        block_k=128,
        num_stages=2,
        mainloop=RegisterWgmma(group_steps=4),
    ),
    WgmmaConfig(integers(4), "bf16", tile_m=144, warpgroups=1, num_stages=2),
    WgmmaConfig(integers(8), "fp16", tile_m=80, block_k=128, num_stages=2, mainloop=RegisterWgmma(in_flight=2)),
    WgmmaConfig(
        integers(8, 64, True),
        "fp16",
        tile_m=32,
        warpgroups=3,
        block_k=128,
        num_stages=2,
        mainloop=RegisterWgmma(group_steps=2),
    ),
    WgmmaConfig(integers(4), "bf16", tile_m=256, num_stages=2),
]
SYNCHRONOUS = [
    WgmmaConfig(integers(4), "bf16", tile_m=16, n_tiles=2, block_k=128, num_stages=2, mainloop=MmaSync()),
    WgmmaConfig(integers(4, 32, True), "bf16", tile_m=32, n_tiles=2, block_k=128, num_stages=2, mainloop=MmaSync()),
    WgmmaConfig(integers(4, 64, True), "fp16", tile_m=16, block_k=64, num_stages=2, mainloop=MmaSync()),
    WgmmaConfig(integers(4, 0), "fp16", tile_m=16, block_k=128, num_stages=2, mainloop=MmaSync()),
    WgmmaConfig(integers(8, 128, True), "bf16", tile_m=16, n_tiles=2, block_k=128, num_stages=2, mainloop=MmaSync()),
    WgmmaConfig(integers(8, 0, True), "fp16", tile_m=16, block_k=64, num_stages=2, mainloop=MmaSync()),
]
SUMS = [
    WgmmaConfig(FP8_BLOCK, "bf16", tile_m=16, n_tiles=2, block_k=128, num_stages=2, mainloop=ScaledSums()),
    WgmmaConfig(FP8_BLOCK, "bf16", tile_m=128, block_k=128, num_stages=2, mainloop=ScaledSums(in_flight=2)),
    WgmmaConfig(FP8_BLOCK, "fp16", tile_m=48, row_parts=3, warpgroups=3, num_stages=2, mainloop=ScaledSums()),
]


def make_weight(config: WgmmaConfig, seed: int = 0) -> PackedWeight:
    """A block of rows and one k block of K, or one group of them, with every code, scale and zero point different."""
    n, k = config.block_rows, max(config.block_k, config.group_size)
    return random_weight(config.format, DTYPES[config.dtype], n, k, seed)


def load_stage(shared: np.ndarray, config: WgmmaConfig, weight: PackedWeight, x: torch.Tensor) -> None:
    """Fills a stage with the first k block of a weight and all of x, as the producer warps do."""
    for tile in range(config.block_tiles):
        parts = [
            (weight.codes[tile, : config.k_block_tiles], CODES, config.code_stage_bytes),
            (weight.scales[tile, : config.k_block_groups], SCALES, config.scale_stage_bytes),
        ]
        if weight.zeros is not None:
            parts.append((weight.zeros[tile, : config.k_block_groups], ZEROS, config.zero_stage_bytes))
        for part, start, stage_bytes in parts:
            run = part.contiguous().view(torch.uint8).numpy().reshape(-1)
            assert run.size * config.block_tiles == stage_bytes or not stage_bytes
            if stage_bytes:
                place = start + STAGE * stage_bytes + tile * run.size
                shared[place : place + run.size] = run
    for tma_tile in range(config.block_k // TMA_TILE_K):
        part = (
            x[:, tma_tile * TMA_TILE_K : (tma_tile + 1) * TMA_TILE_K]
            .contiguous()
            .view(torch.int16)
            .numpy()
            .view(np.uint16)
        )
        put_tma_tile(shared, X + STAGE * config.x_stage_bytes + tma_tile * config.tma_tile_bytes, part)


class Machine:
    """All consumer warps, one after the other, on one stage."""

    def __init__(self, config: WgmmaConfig, weight: PackedWeight, x: torch.Tensor, run_on):
        self.config, self.weight = config, weight
        self.shared = np.zeros(1 << 18, np.uint8)
        load_stage(self.shared, config, weight, x)
        scales = weight.scales.view(torch.uint8).numpy().reshape(-1)
        zeros = weight.zeros.numpy().reshape(-1) if weight.zeros is not None else np.zeros(0, np.uint8)
        self.gpu = WarpgroupWarp(self.shared, np.concatenate([scales, zeros]))
        run_on(self.gpu)
        self.operands = SimpleNamespace(scales=0, zeros=scales.size)
        self.subject = kernel.WgmmaKernel(config)
        self.consumers: Any = self.subject.consumers
        assert isinstance(self.subject.epilogue, epilogue.TileEpilogue)
        self.epilogue = self.subject.epilogue
        self.consumers.stages.release = lambda *_: None

    def acc(self, warp: int, k_blocks: int = 1) -> machine.Registers:
        config, consumers = self.config, self.consumers
        memory = SimpleNamespace(x_address=X, codes=CODES, scales=SCALES, zeros=ZEROS)
        acc = machine.Registers(config.thread_acc, machine.Float32)
        groups = self.weight.scales.shape[1]
        shape = SimpleNamespace(m=config.tile_m, num_tiles=config.block_tiles, scale_groups=groups)
        place = consumers.lane(shape, warp, machine.LANES)
        first_tile, work_tile = warp // 4 * config.n_tiles, SimpleNamespace(block=0)
        channel = consumers.channel.load(self.operands, shape, work_tile, first_tile, place)
        for _ in range(k_blocks):
            if isinstance(config.mainloop, MmaSync):
                rows = consumers.mainloop.rows(machine.LANES)
                consumers.mainloop.multiply_k_block(acc, memory, STAGE, place, rows, channel, config.tile_m)
            else:
                here = PipelineState(STAGE, 0)
                consumers.mainloop.multiply_k_block(acc, memory, here, place, channel, here, None, config.tile_m)
        consumers.channel.scale(acc, list(acc), channel)
        return acc

    def stage(self, packed: bool) -> np.ndarray:
        """[tokens, block_rows], each tile's and each chunk's results as a warpgroup finds them in its buffer."""
        config = self.config
        found = np.zeros((config.tile_m, config.block_rows))
        for group in range(config.warpgroups):
            warps = [(warp, self.acc(4 * group + warp)) for warp in range(4)]
            for tile in range(config.n_tiles):
                for start, tile_m in config.chunks:
                    first = (tile * config.tile_m + start) // 2
                    for warp, acc in warps:
                        store = stand_in(epilogue.Store)(STAGING, 1, warp * 32 + machine.LANES, warp, machine.LANES)
                        stage = self.epilogue.stage_packed if packed else self.epilogue.stage_acc
                        stage(store, acc, first, tile_m)
                    rows = slice(64 * (group * config.n_tiles + tile), 64 * (group * config.n_tiles + tile + 1))
                    found[start : start + tile_m, rows] = self.staged(packed, tile_m)
        return found

    def stage_gated(self) -> np.ndarray:
        """[tokens, block_rows / 2]: as :meth:`stage`, gate and up in turn made one."""
        config, pitch = self.config, epilogue.GATED_PITCH
        found = np.zeros((config.tile_m, config.block_rows // 2))
        for group in range(config.warpgroups):
            warps = [(warp, self.acc(4 * group + warp)) for warp in range(4)]
            for tile in range(config.n_tiles):
                for start, tile_m in config.chunks:
                    for warp, acc in warps:
                        store = stand_in(epilogue.Store)(STAGING, 1, warp * 32 + machine.LANES, warp, machine.LANES)
                        self.epilogue.stage_gated(store, acc, (tile * config.tile_m + start) // 2, tile_m)
                    bits = self.shared[STAGING : STAGING + tile_m * pitch].view(np.int16)
                    part = torch.from_numpy(bits.reshape(tile_m, -1)[:, :32].copy())
                    first = 32 * (group * config.n_tiles + tile)
                    found[start : start + tile_m, first : first + 32] = part.view(DTYPES[config.dtype]).double()
        return found

    def staged(self, packed: bool, tile_m: int) -> np.ndarray:
        if not packed:
            pitch = self.config.staging_pitch
            return self.shared[STAGING : STAGING + tile_m * pitch].view(np.float32).reshape(tile_m, -1)[:, :64]
        pitch = epilogue.PACKED_PITCH
        bits = self.shared[STAGING : STAGING + tile_m * pitch].view(np.int16).reshape(tile_m, -1)[:, :64]
        return torch.from_numpy(bits.copy()).view(DTYPES[self.config.dtype]).double().numpy()


def rounded(config: WgmmaConfig, weight: PackedWeight) -> torch.Tensor:
    """The first k block of W [rows, unit_k] in fp64, as the tensor cores see it, or exact where scales come last."""
    exact = weight.dequantize(torch.float64)
    scales = not isinstance(config.mainloop, (MmaSync, ScaledSums)) or make_decoder(config).scales_weights
    rounds = config.group_size and scales
    return (exact.to(weight.dtype).double() if rounds else exact)[:, : config.block_k]


@pytest.mark.parametrize("config", CONFIGS + SYNCHRONOUS + SUMS, ids=lambda config: config.name)
def test_a_k_block_is_multiplied(config: WgmmaConfig, run_on):
    weight = make_weight(config)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(config.tile_m, config.block_k, generator=generator).to(weight.dtype)
    found = Machine(config, weight, x, run_on).stage(packed=False)
    exact = (x.double() @ rounded(config, weight).T).numpy()
    np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("config", CONFIGS[-7:] + SUMS, ids=lambda config: config.name)
def test_k_blocks_add_up(config: WgmmaConfig, run_on):
    weight = make_weight(config)
    x = torch.randn(config.tile_m, config.block_k, generator=torch.Generator().manual_seed(3)).to(weight.dtype)
    subject = Machine(config, weight, x, run_on)
    count = config.thread_acc
    one, three = (np.array([np.asarray(value) for value in subject.acc(5, k_blocks)[:count]]) for k_blocks in (1, 3))
    np.testing.assert_allclose(three, 3 * one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [CONFIGS[7], *CONFIGS[-7:], *SYNCHRONOUS[:2]], ids=lambda config: config.name)
def test_gate_and_up_in_turn_are_made_one(config: WgmmaConfig, run_on):
    weight = make_weight(config)
    scale = 0.1 if config.format.bits == 4 else 0.003  # within the range of fp16
    x = scale * torch.randn(config.tile_m, config.block_k, generator=torch.Generator().manual_seed(2))
    x = x.to(weight.dtype)
    subject = Machine(config, weight, x, run_on)
    found = torch.from_numpy(subject.stage_gated())
    y = x.double() @ rounded(config, weight).T
    exact = torch.nn.functional.silu(y[:, ::2]) * y[:, 1::2]
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=1e-3 * float(exact.abs().max()))
    for access in subject.gpu.accesses:
        if access.kind == "st":
            assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access


@pytest.mark.parametrize(
    "config", [*CONFIGS[:40:5], *CONFIGS[2:40:5], *CONFIGS[-7:], *SYNCHRONOUS], ids=lambda config: config.name
)
def test_one_hot_rows_return_the_weights_rounded_once(config: WgmmaConfig, run_on):
    weight = make_weight(config)
    x = torch.zeros(config.tile_m, config.block_k, dtype=weight.dtype)
    inputs = (torch.arange(config.tile_m) * 5 + 3) % config.block_k
    x[torch.arange(config.tile_m), inputs] = 1
    wanted = weight.dequantize(weight.dtype)[:, inputs].T.double().numpy()
    assert np.array_equal(Machine(config, weight, x, run_on).stage(packed=True), wanted)


@pytest.mark.parametrize("config", [CONFIGS[7], *CONFIGS[-7:], *SYNCHRONOUS[:2]], ids=lambda config: config.name)
@pytest.mark.parametrize("packed", [False, True])
def test_shared_memory_is_read_and_written_without_conflicts(config: WgmmaConfig, packed: bool, run_on):
    weight = make_weight(config)
    subject = Machine(config, weight, torch.zeros(config.tile_m, config.block_k, dtype=weight.dtype), run_on)
    subject.stage(packed)
    assert len(subject.gpu.accesses) > 32
    for access in subject.gpu.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access
