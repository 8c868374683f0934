"""What a consumer warp computes, lane by lane in NumPy: addresses, decoding, fragments, scales, staging."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cute_kernels.device.cuda import WARP_THREADS

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.stream import kernel
from cute_kernels.gemm.stream.config import X_PAD, StreamConfig, StreamStore
from cute_kernels.gemm.weight import PackedWeight
from layouts import banks
from tests.attention import warp as machine
from tests.linear.cases import random_weight
from tests.linear.warp import LinearWarp

X_START, STAGING_START = 1 << 17, 3 << 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

CONFIGS = [
    StreamConfig(integers(bits, group_size, zero_point), dtype, block_k=max(block_k, group_size), chunk_k_blocks=2)
    for bits in (4, 8)
    for dtype in ("bf16", "fp16")
    for group_size in (0, 32, 64, 128, 256)
    for zero_point in (False, True)
    for block_k in (64, 128)
] + [
    StreamConfig(integers(4, 128, True), "bf16", n_tiles=2, chunk_k_blocks=2),
    StreamConfig(integers(4, 32, True), "fp16", n_tiles=2, chunk_k_blocks=2),
    StreamConfig(integers(4, 64), "fp16", n_tiles=2, chunk_k_blocks=2, store=StreamStore(2)),
]


def make_weight(config: StreamConfig, k_blocks: int, seed: int = 0) -> PackedWeight:
    """A block of rows and ``k_blocks`` k blocks of K with every code, scale and zero point different."""
    return random_weight(config.format, DTYPES[config.dtype], config.block_rows, k_blocks * config.block_k, seed)


def load_stage(shared: np.ndarray, config: StreamConfig, weight: PackedWeight, start: int) -> None:
    """Puts all k blocks of a weight into a stage, as the bulk copies do: runs of codes, of scales, of zero points."""
    tensors = [
        (weight.codes, 0, config.k_block_bytes),
        (weight.scales, config.scale_offset, config.k_block_scale_bytes),
        (weight.zeros, config.zero_offset, config.k_block_zero_bytes),
    ]
    for tensor, offset, k_block_bytes in tensors:
        if tensor is None or not k_block_bytes:
            continue
        for tile in range(config.n_tiles):
            rows = len(tensor[tile]) - (config.format.more_groups if tensor is weight.scales else 0)
            run = tensor[tile, :rows].contiguous().view(torch.uint8).numpy().reshape(-1)
            place = start + offset + tile * config.chunk_k_blocks * k_block_bytes
            shared[place : place + run.size] = run


def run_warps(config: StreamConfig, weight: PackedWeight, x: torch.Tensor, run_on) -> tuple[np.ndarray, list]:
    """What all consumer warps stage for one chunk, added up: [tokens, rows]; and their accesses."""
    m, k = x.shape
    k_blocks, pitch = k // config.block_k, 2 * k + X_PAD
    shared = np.zeros(1 << 18, np.uint8)
    load_stage(shared, config, weight, 0)
    for token in range(m):
        row = x[token].contiguous().view(torch.uint8).numpy()
        shared[X_START + token * pitch : X_START + token * pitch + row.size] = row
    scales = weight.scales.view(torch.uint8).numpy().reshape(-1)
    zeros = weight.zeros.numpy().reshape(-1) if weight.zeros is not None else np.zeros(0, np.uint8)
    gpu = LinearWarp(shared, np.concatenate([scales, zeros]))
    run_on(gpu)
    subject = kernel.StreamKernel(config).roles
    memory = SimpleNamespace(x=X_START, x_pitch=pitch, staging=STAGING_START)
    sizes = SimpleNamespace(m=m, num_tiles=config.n_tiles, k_blocks=k_blocks)
    work = SimpleNamespace(shape=sizes, tile=lambda segment, i, n_tiles: i)
    operands = SimpleNamespace(scales=0, zeros=scales.size)
    for number in range(config.consumer_warps):
        place = subject.lane_places(memory, work, number, machine.LANES)
        acc = machine.Registers(config.n_tiles * 4, machine.Float32)
        channel = subject.load_channel(operands, work, None, place)
        for k_block in range(place.k_warp, k_blocks, config.k_warps):
            subject.multiply_k_block(acc, machine.Int32(0), k_block, k_block * 2 * config.block_k, place, channel)
        kernel.stage_acc(config, acc, memory, 0, place, channel)
    staged = shared.view(np.float32)[STAGING_START // 4 :][: config.buffer_bytes // 4]
    staged = staged.reshape(config.k_warps, config.tile_m, -1)[:, :m, : config.block_rows]
    return staged.sum(0, dtype=np.float64), gpu.accesses


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_chunk_is_multiplied(config: StreamConfig, run_on):
    k_blocks = config.chunk_k_blocks
    weight = make_weight(config, k_blocks)
    m = config.tile_m - 3
    x = torch.randn(m, k_blocks * config.block_k, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    found, _ = run_warps(config, weight, x, run_on)
    exact = x.double() @ weight.dequantize(torch.float64).T
    np.testing.assert_allclose(found, exact.numpy(), rtol=2e-5, atol=2e-5 * exact.abs().max().item())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("group_size", [0, 64])
def test_one_hot_rows_return_the_weights_exactly(bits, dtype, group_size, run_on):
    config = StreamConfig(integers(bits, group_size, True), dtype, block_k=64, chunk_k_blocks=2)
    weight = make_weight(config, 2)
    wanted = weight.dequantize(torch.float32).T.numpy()
    for first in range(0, 128, 40):
        x = torch.eye(128)[first : first + 8].to(weight.dtype)
        found, _ = run_warps(config, weight, x, run_on)
        assert np.array_equal(found.astype(np.float32), wanted[first : first + 8])


@pytest.mark.parametrize("m", [1, 7])
@pytest.mark.parametrize("config", [CONFIGS[6], *CONFIGS[-3:]], ids=lambda config: config.name)
def test_shared_memory_is_read_and_written_without_conflicts(config: StreamConfig, m: int, run_on):
    config = replace(config, chunk_k_blocks=2)
    weight = make_weight(config, 2)
    x = torch.zeros(m, 2 * config.block_k, dtype=weight.dtype)
    _, accesses = run_warps(config, weight, x, run_on)
    assert len(accesses) > WARP_THREADS
    for access in accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access
