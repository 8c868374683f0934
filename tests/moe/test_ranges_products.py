"""Products of the kernel of runs, lane by lane in NumPy: limbs of an entry's rows as its warps make them of rows by
index, codes, scales, and accumulators in the staging buffer against exact products.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers, weight_format
from cute_kernels.gemm.experts.ranges.config import RangeConfig, entry_rows
from cute_kernels.gemm.experts.ranges.kernel import EntrySource, RangeRoles, scale_offset
from cute_kernels.gemm.experts.ranges.routing import SortedRouting
from cute_kernels.gemm.quantize import quantize_weight
from cute_kernels.gemm.stream import kernel as linear_kernel
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.gemm.wgmma.resident_rows import COLUMN_DISTANCE, ROW_BYTES, STEP_ROWS
from cute_kernels.runtime.composed import changed
from layouts import banks
from simulator import stand_in
from tests.attention import warp as machine
from tests.attention.warp import LANES, Int32
from tests.linear.cases import known
from tests.linear.test_resident_mainloop import channel_of
from tests.linear.test_resident_rows import LimbWarp
from tests.linear.warpgroup import WarpgroupWarp
from tests.moe.range_configs import range_config

STAGES, STAGING, NOWHERE = 3 << 17, 1 << 19, 5 << 17
X = 1024 * 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CONFIGS = [
    range_config(form, dtype, n_tiles=n_tiles, k_warps=3, chunk_k_blocks=chunk, num_stages=6)
    for form, dtype, n_tiles, chunk in (
        (integers(4), "bf16", 1, 2),
        (integers(4), "bf16", 2, 1),
        (integers(4), "fp16", 2, 1),
        (integers(4, 32), "bf16", 1, 2),
        (integers(4, 64), "fp16", 2, 1),
        (weight_format("mxfp4"), "bf16", 2, 1),
        (weight_format("nvfp4"), "bf16", 2, 1),
        (weight_format("fp8_block"), "bf16", 2, 1),
        (weight_format("fp8"), "bf16", 2, 1),
    )
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)


class Cta:
    """Shared memory of a CTA, and what its warps do with one block; ``slot``: where the limbs are, of two."""

    def __init__(self, config: RangeConfig, k: int, slot: int, run_on):
        self.k_blocks = -(-k // 128)
        room = 2 * self.k_blocks * config.activations.k_block_bytes(config)
        self.config = changed(config, x_bytes=room)
        self.subject = RangeRoles(self.config, SortedRouting(self.config))
        self.shared = np.full(6 << 17, 0xFF, np.uint8)  # NaN, whatever it is read as
        self.run_on = run_on
        self.shape = SimpleNamespace(k_blocks=self.k_blocks, x_slots=2, n=64, k=k)
        slot_bytes = self.k_blocks * config.activations.k_block_limb_bytes(config)
        self.memory = SimpleNamespace(state=STAGES, x=X, staging=STAGING, x_slot_bytes=slot_bytes)
        self.start = int(self.subject.x_start(self.shape, self.memory, slot))
        assert X + room <= STAGES and self.config.num_stages * self.config.stage_bytes <= STAGING - STAGES

    def make_limbs(self, x: torch.Tensor, index: list[int]) -> None:
        """Limbs of rows of x by index, as `RangeRoles.make_limbs` has them made, each step of each warp."""
        self.run_on(LimbWarp(self.shared, x.contiguous().view(torch.uint8).numpy().reshape(-1)))
        maker, tokens, count = self.subject.rows, self.config.tile_m, len(index)
        of_lane = Int32(np.array(index)[np.minimum(LANES, count - 1)])
        source = stand_in(EntrySource)(0, count, x.shape[1] // 8, of_lane)
        x_address = X + self.start
        x_scales = int(self.subject.limb_scales(self.shape, self.memory)) + int(scale_offset(self.start))
        bits = int(maker.step_bits(np.full(1, self.k_blocks, np.int32))[0])
        steps = -(-count // STEP_ROWS) << bits
        for step in range(steps):
            row, k_block = maker.place(bits, step, LANES)
            words = maker.load_global(source, 0, bits, steps, step, LANES)
            there = k_block < self.k_blocks
            start = Int32(np.where(there, x_address + (k_block * 2 * tokens + row) * ROW_BYTES, NOWHERE))
            scale, limbs_of_row = maker.split(words)
            maker.store(start, tokens, Int32(row), LANES, limbs_of_row)
            for lane in np.flatnonzero(there & (LANES % 4 < maker.columns)):
                of_row = row[lane] + lane % 4 * COLUMN_DISTANCE
                at = x_scales + (int(k_block[lane]) * tokens + int(of_row)) * 4
                self.shared[at : at + 4].view(np.uint32)[0] = np.asarray(scale)[lane]

    @np.errstate(invalid="ignore")
    def acc(self, weight: PackedWeight) -> np.ndarray:
        """[tokens, block_rows]: what all warps leave in the staging buffer, added up over warpgroups."""
        config = self.config
        self.gpu = WarpgroupWarp(self.shared, np.zeros(0, np.uint8))
        self.run_on(self.gpu)
        for warp in range(config.consumer_warps):
            place = self.subject.limb_lane(self.shape, self.memory, warp, LANES)
            acc = machine.Registers(config.n_tiles * 4, machine.Float32)
            chunk = config.chunk_k_blocks
            for k_block in range(place.k_warp * chunk, self.k_blocks, config.k_warps * chunk):
                stage = k_block // chunk % config.num_stages
                base = STAGES + stage * config.stage_bytes
                self.bring(weight, k_block, base)
                self.subject.multiply_k_blocks(
                    acc, base, k_block * config.activations.k_block_limb_bytes(config) + self.start, place
                )
            self.subject.products.finish(acc)
            tiles = range(config.n_tiles) if config.format.row_scales or not config.group_size else ()
            channel = [channel_of(weight, tile, warp % 4) for tile in tiles]
            linear_kernel.stage_acc(config, acc, self.memory, 0, place, channel)
        found = np.zeros((config.tile_m, config.block_rows))
        for part in range(config.k_warps):
            first = STAGING + part * config.slice_bytes
            for token in range(config.tile_m):
                at = first + token * config.staging_pitch
                found[token] += self.shared[at : at + 4 * config.block_rows].view(np.float32)
        return found

    def bring(self, weight: PackedWeight, k_block: int, base: int) -> None:
        """A chunk of the first block, as it is copied: of each tile a run of codes, then of each one of scales."""
        config = self.config
        for tile in range(config.n_tiles):
            k_blocks = slice(k_block, k_block + config.chunk_k_blocks)
            codes = weight.codes[tile].view(self.k_blocks, -1)[k_blocks]
            runs = [(codes, 0, config.k_block_bytes)]
            if config.group_size:
                groups = weight.scales[tile][: self.k_blocks * config.k_block_groups].view(self.k_blocks, -1, 64)
                runs.append((groups[k_blocks], config.scale_offset, config.k_block_scale_bytes))
            for part, offset, k_block_bytes in runs:
                work_range = part.contiguous().view(torch.uint8).numpy().reshape(-1)
                at = base + offset + tile * config.chunk_k_blocks * k_block_bytes
                assert work_range.size == config.chunk_k_blocks * k_block_bytes
                self.shared[at : at + work_range.size] = work_range


def numbers(rows: int, k: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + k)
    return (torch.randn(rows, k, generator=generator) * torch.rand(rows, 1, generator=generator) ** 4).to(DTYPES[dtype])


def weight_of(config: RangeConfig, k: int) -> PackedWeight:
    form, dtype = config.format, DTYPES[config.dtype]
    if form.options.get("bits"):
        return known(config.block_rows, k, 4, form.group_size, False, dtype, 3).pack()
    w = torch.randn(config.block_rows, k, generator=torch.Generator().manual_seed(3))
    return quantize_weight(w, format=form, dtype=dtype)


K_AND_SLOT = [(512, 0), (2048, 1), (1000, 1), (1280, 0)]
ROWS = [1, 7, None]
"""Of an entry; None: all that a tile has."""
# Making limbs knows K and rows, multiplying knows K and the configuration: each pair of the three is here.
PAIRS = [
    pytest.param(config, k, slot, ROWS[(i + i // 3 + j) % 3], id=f"{config.name}-{k}-{ROWS[(i + i // 3 + j) % 3]}")
    for i, config in enumerate(CONFIGS)
    for j, (k, slot) in enumerate(K_AND_SLOT)
]


def test_configurations_k_and_rows_are_met_in_pairs():
    met = [param.values for param in PAIRS]
    assert {(config, k) for config, k, *_ in met} == set(product(CONFIGS, dict(K_AND_SLOT)))
    assert {(config, rows) for config, *_, rows in met} == set(product(CONFIGS, ROWS))
    assert {(k, rows) for _, k, _, rows in met} == set(product(dict(K_AND_SLOT), ROWS))


@pytest.mark.parametrize("config, k, slot, rows", PAIRS)
def test_rows_by_index_are_multiplied(config: RangeConfig, k: int, slot: int, rows: int | None, run_on):
    rows = min(rows or config.tile_m, entry_rows(config.format))
    x = numbers(20, k, config.dtype)
    index = [(5 * i + 3) % 20 for i in range(rows)]
    weight = weight_of(config, k)
    cta = Cta(config, k, slot, run_on)
    cta.make_limbs(x, index)
    found = cta.acc(weight)[:rows]
    exact = (x[index].double() @ weight.dequantize(torch.float64)[: config.block_rows].T).numpy()
    np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


@every_config
@pytest.mark.parametrize("value", [1.0, -1.9921875])
def test_one_hot_rows_return_the_weights(config: RangeConfig, value: float, run_on):
    k, rows = 512, entry_rows(config.format)
    x = torch.zeros(rows, k, dtype=DTYPES[config.dtype])
    inputs = (torch.arange(rows) * 67 + 3) % k
    x[torch.arange(rows), inputs] = value
    weight = weight_of(config, k)
    cta = Cta(config, k, 1, run_on)
    cta.make_limbs(x, list(range(rows)))
    exact = (weight.dequantize(torch.float64)[:, inputs].T * value).numpy()
    # An fp32 scale is multiplied by the sum of products, not by the code.
    rounds = config.format.scale_bytes == 4 and value != 1
    np.testing.assert_allclose(cta.acc(weight)[:rows], exact, rtol=2.0**-22 if rounds else 0)


@pytest.mark.parametrize("byte", [0, 1, 127, 220])
def test_powers_of_two_are_exact_from_the_smallest_on(byte: int, run_on):
    """Of bytes above about 230 sums of a group are beyond fp32 before they meet the scale of their row of x."""
    config, k = next(one for one in CONFIGS if one.format.power_scales), 256
    weight = weight_of(config, k)
    weight.scales.fill_(byte)
    x = torch.zeros(config.tile_m, k, dtype=torch.bfloat16)
    inputs = (torch.arange(config.tile_m) * 67 + 3) % k
    x[torch.arange(config.tile_m), inputs] = 1.0
    cta = Cta(config, k, 0, run_on)
    cta.make_limbs(x, list(range(config.tile_m)))
    exact = weight.dequantize(torch.float64)[:, inputs].T
    assert exact.abs().max() > 0 and np.array_equal(cta.acc(weight), exact.numpy())


@every_config
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_rows_that_are_not_finite_are_nan_alone(config: RangeConfig, value: float, run_on):
    k = 640 if config.chunk_k_blocks == 1 else 768
    x = numbers(5, k, config.dtype)
    x[3, 300] = value
    cta = Cta(config, k, 0, run_on)
    rows = list(range(5))[: entry_rows(config.format)]
    cta.make_limbs(x, rows)
    found = cta.acc(weight_of(config, k))[rows]
    assert np.isnan(found[3]).all() and np.isfinite(np.delete(found, 3, axis=0)).all()


@every_config
def test_shared_memory_is_read_and_written_without_conflicts(config: RangeConfig, run_on):
    cta = Cta(config, 512, 0, run_on)
    rows = entry_rows(config.format)
    cta.make_limbs(numbers(rows, 512, config.dtype), list(range(rows)))
    cta.acc(weight_of(config, 512))
    assert len(cta.gpu.accesses) > 32
    for access in cta.gpu.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access
