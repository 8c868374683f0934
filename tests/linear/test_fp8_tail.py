"""FP8 products of K that ends in half a k block: what is copied, lane by lane what is summed, what is launched."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import grouped_linear, quantize_activations, quantize_experts, quantize_weight, quantized_linear
from cute_kernels.device.pipeline import Pipeline
from cute_kernels.formats.weights import weight_format
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.experts.wgmma.kernel import grouped_tiles_kernel
from cute_kernels.gemm.experts.wgmma.schedule import FP8_SHAPES, SMALL_GROUP_FP8_SHAPES, make_fp8_tiles, tile_config
from cute_kernels.gemm.operands.fp8_config import X_GROUP, Fp8Wgmma, RowsConfig, x_group
from cute_kernels.gemm.operands.fp8_schedule import candidates, fp8_schedule
from cute_kernels.gemm.problem import GroupedProblem, LinearProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.kernel import WgmmaKernel
from cute_kernels.runtime import KernelSpec, default_cache
from simulator import Altered, PlainThread, running, stand_in
from tests import golden
from tests.attention import warp as machine
from tests.launchers import recording
from tests.linear.test_fp8_mainloop import ORDER, X_SCALES, Stages
from tests.linear.test_wgmma_limb_stages import STAGES
from tests.linear.test_wgmma_products import CODES, SCALES, X
from tests.linear.warpgroup import WarpgroupWarp, e4m3_numbers, put_tma_tile

HALF = X_GROUP // 2
GUARD = 1 << 12  # bytes of NaN codes and scales between the tensors of a weight
FORMATS = ("mxfp4", "mxfp8", "e4m3_g64f32", "w4g32", "fp8", "w4gchannel")
TILE = WgmmaConfig(
    weight_format("mxfp4"), "bf16", tile_m=16, block_k=X_GROUP, num_stages=STAGES, mainloop=Fp8Wgmma(half_last=True)
)


def rows_as_they_lie(x: torch.Tensor, group_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bytes [rows, k blocks, 128] as `.rows` leaves them, scales [k blocks, rows], the numbers [rows, K])."""
    k = x.shape[1]
    codes, scales = quantize_activations(x, group_size)
    k_blocks = -(-k // X_GROUP)
    wide = np.zeros((len(x), k_blocks * X_GROUP), np.uint8)
    wide[:, :k] = codes.view(torch.uint8).numpy()
    blocks = wide.reshape(len(x), k_blocks, X_GROUP)
    blocks[:, -1] = np.roll(blocks[:, -1], HALF, axis=1)  # behind K there are zeros
    of_blocks = scales.expand(-1, k_blocks).T.contiguous().numpy()
    numbers = e4m3_numbers(codes.view(torch.uint8).numpy()) * np.repeat(of_blocks.T, X_GROUP, axis=1)[:, :k]
    return np.ascontiguousarray(blocks[:, :, ORDER]), of_blocks, numbers


class Copies(PlainThread):
    """Bulk copies of a weight's codes and scales, each of bytes of its tensor alone, to a stage."""

    def __init__(self, weight: PackedWeight):
        super().__init__()
        parts = [tensor.contiguous().view(torch.uint8).numpy().reshape(-1) for tensor in (weight.codes, weight.scales)]
        self.codes, self.scales = GUARD, 2 * GUARD + parts[0].size
        self.memory = np.full(self.scales + parts[1].size + GUARD, 0xFF, np.uint8)
        self.inside = np.zeros(self.memory.size, bool)
        for part, start in zip(parts, (self.codes, self.scales), strict=True):
            self.memory[start : start + part.size] = part
            self.inside[start : start + part.size] = True
        self.stage: dict[int, np.ndarray] = {}

    def bulk_copy_to_shared(self, destination: int, source: int, size: int, barrier: int) -> None:
        assert destination % 16 == source % 16 == size % 16 == 0 and size > 0, "misaligned copy"
        assert self.inside[source : source + size].all(), "not of the weight"
        self.stage[destination] = self.memory[source : source + size]

    def k_block(self, subject: Any, work_tile: Any, shape: Any, k_block: int) -> dict[int, np.ndarray]:
        """What a k block of a work tile is, by its places in the first stage."""
        expected: list[int] = []
        pipeline = SimpleNamespace(producer_expect=lambda here, size: expected.append(size) or 0)
        memory = SimpleNamespace(codes=CODES, scales=SCALES, pipeline=pipeline)
        self.stage = {}
        with running(self):
            subject.roles.weights.copy_k_block(self, shape, memory, work_tile, k_block, SimpleNamespace(stage=0))
        assert expected == [sum(part.size for part in self.stage.values())]
        return self.stage


class TailStages(Stages):
    """Stages as the kernel's own copies of weights fill them: see `Stages`."""

    def __init__(self, shared: np.ndarray, config: WgmmaConfig, weight: PackedWeight, x: torch.Tensor, blocks: Any):
        super().__init__(shared, config, weight, torch.zeros(len(x), X_GROUP * len(blocks)), 0)
        self.blocks = blocks
        self.rows, self.of_rows, self.numbers = rows_as_they_lie(x, x_group(config.format))

    def fill(self, stage: int, k_block: int) -> None:
        config = self.config
        for place, part in self.blocks[k_block].items():
            size = config.code_stage_bytes if place < SCALES else config.scale_stage_bytes
            self.shared[place + stage * size : place + stage * size + part.size] = part
        (x, _), _, _, (x_scales, _) = self.places(stage)
        put_tma_tile(self.shared, x, self.rows[:, k_block].copy().view(np.uint16))
        if config.x_scale_stage_bytes:
            self.shared[x_scales : x_scales + 4 * len(self.rows)] = self.of_rows[k_block].copy().view(np.uint8)


@pytest.mark.parametrize(("k", "experts"), [(140, False), (320, True)])  # in 192 and 320 with padding
@pytest.mark.parametrize("name", FORMATS)
def test_sums_are_those_of_all_of_k(name: str, k: int, experts: bool, run_on):
    """Of the second of two blocks of features, or of the second expert, within 1e-6 of fp64."""
    config = replace(TILE, format=weight_format(name))
    generator, rows = torch.Generator().manual_seed(k), 2 * config.block_rows
    weight = quantize_weight(torch.randn(rows, k, generator=generator), format=name, dtype=torch.bfloat16)
    x = torch.randn(config.tile_m, k, generator=generator).bfloat16()
    subject: Any = (grouped_tiles_kernel if experts else WgmmaKernel)(config)
    k_blocks = -(-k // X_GROUP)
    work_tile = SimpleNamespace(
        expert=1, block=1 - experts, token=0, end_token=config.tile_m, m_tile=0, begin=0, end=k_blocks
    )
    tiles = config.block_tiles * (1 if experts else 2)
    shape = SimpleNamespace(m=config.tile_m, k_blocks=k_blocks, num_tiles=tiles, scale_groups=1)
    copies = Copies(weight)
    blocks = [copies.k_block(subject, work_tile, shape, number) for number in range(k_blocks)]
    state = TailStages(np.zeros(1 << 18, np.uint8), config, weight, x, blocks)
    stored = weight.scales.contiguous().view(torch.uint8).numpy().reshape(-1)
    shape.x_scales = machine.Int64(stored.size)
    stored = np.concatenate((stored, state.of_rows[0].copy().view(np.uint8)))
    run_on(Altered(WarpgroupWarp(state.shared, stored), arch={"mbarrier_wait": state.wait}))
    consumers = subject.consumers
    consumers.stages.release = state.release
    pipeline = Pipeline(stand_in(0), stand_in(STAGES), STAGES)
    memory = SimpleNamespace(x_address=X, codes=CODES, scales=SCALES, x_scales=X_SCALES, pipeline=pipeline)
    place, acc = consumers.lane(shape, 6, machine.LANES), machine.Registers(config.thread_acc, machine.Float32)
    channel = consumers.channel.load(SimpleNamespace(scales=0), shape, work_tile, 1, place)
    begins = pipeline.consumer_state(), pipeline.consumer_state()
    consumers.mainloop.multiply(acc, memory, work_tile, place, channel, begins, True, config.tile_m)
    consumers.mainloop.finish(acc, shape, memory, work_tile, place, channel, None, None)
    assert state.filled == state.given_back == k_blocks
    want = state.numbers @ weight.dequantize(torch.float64).numpy().T
    for i in range(config.thread_acc):
        features = config.block_rows + 64 + 32 + machine.LANES // 4 + 8 * (i // 2 % 2)  # of the seventh warp
        columns = i // 4 * 8 + machine.LANES % 4 * 2 + i % 2
        np.testing.assert_allclose(
            np.asarray(acc[i]), want[columns, features], rtol=1e-5, atol=1e-6 * np.abs(want).max()
        )


# -- launches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp4", "w4gchannel"])
def test_a_product_is_two_launches(name: str):
    weight = quantize_weight(torch.randn(64, 2880), format=name, dtype=torch.bfloat16)
    with recording() as cache:
        y = quantized_linear(torch.randn(65, 2880).bfloat16(), weight, activations="fp8", out_dtype=torch.float32)
    rows, product = cache.launches
    assert y.shape == (65, 64) and rows.symbol.endswith("_half") and "_e4m3tailr" in product.symbol
    assert rows.arguments[6:10] == (65, 16 * 23, 23, 23)  # places, pieces of 8 bytes, groups, groups with scales
    assert product.arguments[0].shape == (65, 64 * 23) and product.arguments[0].data_ptr() == rows.arguments[4]


def test_a_product_of_experts_is_two_launches():
    weight = quantize_experts(torch.randn(2, 64, 320), format="mxfp4", dtype=torch.bfloat16)
    with recording() as cache:
        grouped_linear(
            torch.randn(70, 320).bfloat16(), weight, torch.tensor([0, 70, 70], dtype=torch.int32), activations="fp8"
        )
    rows, product = cache.launches
    assert rows.symbol.endswith("_half") and product.symbol.startswith("grouped_") and "_e4m3tailr" in product.symbol
    assert rows.arguments[6:10] == (70, 48, 3, 3) and product.arguments[0].shape == (70, 64 * 3)


def test_less_than_a_k_block_is_refused():
    weight = quantize_weight(torch.randn(64, 60), format="mxfp4", dtype=torch.bfloat16)
    message = "activations: got 'fp8' for a weight of 64 inputs with padding, want None"
    with recording(), pytest.raises(ValueError, match=message):
        quantized_linear(torch.randn(3, 60).bfloat16(), weight, activations="fp8")
    for name, k in (("mxfp4", 60), ("fp8", 64), ("fp8", 16), ("mxfp8", 32)):  # on the CPU, too, and for any rows
        weight = quantize_weight(torch.randn(64, k), format=name, dtype=torch.bfloat16)
        experts = quantize_experts(torch.randn(2, 64, k), format=name, dtype=torch.bfloat16)
        offsets = torch.tensor([0, 1, 1], dtype=torch.int32)
        for m in (0, 3, 100):
            x = torch.randn(m, k).bfloat16()
            with pytest.raises(ValueError, match=message):
                quantized_linear(x, weight, activations="fp8")
            with recording(), pytest.raises(ValueError, match=message):
                quantized_linear(x, weight, activations="fp8")
            with pytest.raises(ValueError, match=message):
                grouped_linear(x, experts, offsets.clamp(max=m), activations="fp8")
    with pytest.raises(ValueError, match=message):
        make_fp8_tiles(GroupedProblem(8, 2, 64, 60, 64, weight_format("mxfp4"), "bf16"))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("m", [1, 100, 8192])
def test_every_product_has_a_schedule_that_covers_it(name: str, m: int):
    schedule = fp8_schedule(LinearProblem(m, 2880, 2880, 2880, weight_format(name), "bf16"))
    assert schedule.config.can_implement() is None and schedule.config.mainloop.half_last
    assert schedule.k_blocks == 23 and schedule.m_tiles * schedule.config.tile_m >= m
    layout = make_fp8_tiles(GroupedProblem(4 * m, 128, 2880, 2880, 2880, weight_format(name), "bf16"))
    assert layout.k_blocks == 23 and layout.config.mainloop.half_last
    spec: Any = ExpertSpec(layout.config)
    assert "x_scales" in spec.kernel.arguments.names and "offsets" in spec.kernel.arguments.names


def test_groups_of_a_k_block_have_no_half():
    assert "groups of 128 inputs end" in (replace(TILE, format=weight_format("fp8_block")).can_implement() or "")
    assert TILE.can_implement() is None


def dense_specs(name: str) -> list[KernelSpec]:
    problem = LinearProblem(8192, 2880, 2880, 2880, weight_format(name), "bf16")
    return [GemmSpec(config) for config in dict.fromkeys(schedule.config for schedule in candidates(problem))]


def grouped_specs(name: str) -> list[KernelSpec]:
    problem = GroupedProblem(4096, 128, 2880, 2880, 2944, weight_format(name), "bf16")
    shapes = SMALL_GROUP_FP8_SHAPES if problem.format.group_size else FP8_SHAPES
    tails = (tile_config(problem, shape._replace(mainloop=Fp8Wgmma(half_last=True))) for shape in shapes)
    return [ExpertSpec(config) for config in tails if config is not None]


SPECS: list[KernelSpec] = [GemmSpec(RowsConfig("bf16", half_last=True)), *dense_specs("mxfp4")]
SPECS += [*grouped_specs("mxfp4"), *grouped_specs("fp8"), *dense_specs("fp8")]


@pytest.mark.parametrize("spec", golden.worth_compiling(SPECS, lambda spec: spec), ids=lambda spec: spec.symbol)
def test_it_compiles_without_spills(spec: KernelSpec):
    for kernel in golden.measure([spec], default_cache())[spec.symbol]:
        assert kernel["stack_bytes"] == kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0
