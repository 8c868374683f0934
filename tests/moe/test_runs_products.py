"""Products of the kernel of runs, lane by lane in NumPy: digits of an entry's rows as its warps make them of rows by
index, codes, scales, and sums in the staging buffer against exact products.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.linear import decode
from cute_kernels.linear import kernel as linear_kernel
from cute_kernels.linear.weight import PackedWeight
from cute_kernels.linear.wgmma import digit_rows, digits, resident_rows
from cute_kernels.linear.wgmma.resident_rows import ROW_BYTES, STEP_ROWS
from cute_kernels.moe.runs import kernel as runs_kernel
from cute_kernels.moe.runs.config import RunConfig
from cute_kernels.moe.runs.kernel import EntrySource, RunKernel, scale_offset
from layouts import banks
from tests.attention import warp as machine
from tests.attention.warp import LANES, Int32, Warp
from tests.linear.cases import known
from tests.linear.test_resident_rows import Numbers
from tests.linear.warpgroup import WarpgroupWarp

RING, STAGING, NOWHERE = 3 << 17, 1 << 19, 5 << 17
X = 1024 * 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CONFIGS = [
    RunConfig(4, dtype, 128, max_tokens=rows, n_tiles=n_tiles, k_warps=3, chunk_units=chunk, num_stages=6)
    for dtype, rows, n_tiles, chunk in (
        ("bf16", 8, 1, 2),
        ("bf16", 8, 2, 1),
        ("fp16", 8, 2, 1),
        ("bf16", 16, 1, 2),
        ("fp16", 16, 2, 1),
    )
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)


class Cta:
    """Shared memory of a CTA, and what its warps do with one block; ``slot``: where the digits are, of two."""

    def __init__(self, config: RunConfig, k: int, slot: int, monkeypatch):
        self.units = -(-k // 128)
        room = 2 * self.units * (config.unit_digit_bytes + config.unit_x_scale_bytes)
        self.config = replace(config, x_bytes=room)
        self.subject = RunKernel(self.config)
        self.shared = np.full(6 << 17, 0xFF, np.uint8)  # NaN, whatever it is read as
        self.monkeypatch = monkeypatch
        self.shape = SimpleNamespace(units=self.units, x_slots=2, n=64, k=k)
        slot_bytes = self.subject.x_slot_bytes(self.shape, 0)
        self.memory = SimpleNamespace(ring=RING, x=X, staging=STAGING, x_slot_bytes=slot_bytes)
        self.start = int(self.subject.x_start(self.shape, self.memory, slot))
        assert X + room <= RING and self.config.num_stages * self.config.stage_bytes <= STAGING - RING

    def make_digits(self, x: torch.Tensor, index: list[int]) -> None:
        """Digits of rows of x by index, as `RunKernel.make_digits` has them made, each step of each warp."""
        gpu = Warp(self.shared, np.zeros(0, np.uint8))
        gpu.install(self.monkeypatch, digit_rows, resident_rows, runs_kernel)
        inputs = x.contiguous().view(torch.int16).numpy().reshape(-1)
        self.monkeypatch.setattr(resident_rows, "numbers", Numbers(inputs))
        maker, tokens, count = self.subject.rows, self.config.max_tokens, len(index)
        assert maker.constant is False, "the kernel before may be writing x"
        of_lane = Int32(np.array(index)[np.minimum(LANES, count - 1)])
        source = EntrySource(0, count, x.shape[1] // 8, None, None, None, None, of_lane)
        x_address = X + self.start
        x_scales = int(self.subject.digit_scales(self.shape, self.memory)) + int(scale_offset(self.start))
        bits = int(maker.step_bits(np.full(1, self.units, np.int32))[0])
        steps = -(-count // STEP_ROWS) << bits
        for step in range(steps):
            row, unit = maker.place(bits, step, LANES)
            words = maker.load_global(source, 0, bits, steps, step, LANES)
            there = unit < self.units
            start = Int32(np.where(there, x_address + (unit * 2 * tokens + row) * ROW_BYTES, NOWHERE))
            scale, digits_of_row = maker.split(words)
            maker.store(start, tokens, Int32(row), LANES, digits_of_row)
            for lane in np.flatnonzero(there & (LANES % 4 == 0)):
                at = x_scales + (int(unit[lane]) * tokens + int(row[lane])) * 4
                self.shared[at : at + 4].view(np.uint32)[0] = np.asarray(scale)[lane]

    @np.errstate(invalid="ignore")
    def sums(self, weight: PackedWeight) -> np.ndarray:
        """[tokens, block_rows]: what all warps leave in the staging buffer, added up over warpgroups."""
        config = self.config
        self.gpu = WarpgroupWarp(self.shared, np.zeros(0, np.uint8))
        self.gpu.install(self.monkeypatch, linear_kernel, decode, digits, runs_kernel)
        for warp in range(config.math_warps):
            place = self.subject.digit_lane(self.shape, self.memory, warp, LANES)
            sums = machine.Registers(config.n_tiles * config.token_blocks * 4, machine.Float32)
            chunk = config.chunk_units
            for unit in range(place.k_warp * chunk, self.units, config.k_warps * chunk):
                stage = unit // chunk % config.num_stages
                base = RING + stage * config.stage_bytes
                self.bring(weight, unit, base)
                self.subject.multiply_units(sums, base, unit * config.unit_digit_bytes + self.start, place)
            self.subject.stage_sums(sums, self.memory, 0, place, [])
        found = np.zeros((config.max_tokens, config.block_rows))
        for part in range(config.k_warps):
            first = STAGING + part * config.slice_bytes
            for token in range(config.max_tokens):
                at = first + token * config.staging_pitch
                found[token] += self.shared[at : at + 4 * config.block_rows].view(np.float32)
        return found

    def bring(self, weight: PackedWeight, unit: int, base: int) -> None:
        """A chunk of the first block, as it is copied: of each tile a run of codes, then of each one of scales."""
        config = self.config
        for tile in range(config.n_tiles):
            units = slice(unit, unit + config.chunk_units)
            for part, offset, unit_bytes in (
                (weight.codes[tile].view(-1, 2 * 2048)[units], 0, config.unit_bytes),
                (weight.scales[tile][units], config.scale_offset, config.unit_scale_bytes),
            ):
                run = part.contiguous().view(torch.uint8).numpy().reshape(-1)
                at = base + offset + tile * config.chunk_units * unit_bytes
                assert run.size == config.chunk_units * unit_bytes
                self.shared[at : at + run.size] = run


def numbers(rows: int, k: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + k)
    return (torch.randn(rows, k, generator=generator) * torch.rand(rows, 1, generator=generator) ** 4).to(DTYPES[dtype])


def weight_of(config: RunConfig, k: int) -> PackedWeight:
    return known(config.block_rows, k, 4, 128, False, DTYPES[config.dtype], 3).pack()


@every_config
@pytest.mark.parametrize("k, slot", [(512, 0), (2048, 1), (1000, 1), (1280, 0)])
@pytest.mark.parametrize("rows", [1, 7, None], ids=["one row", "seven rows", "all rows"])
def test_rows_by_index_are_multiplied(config: RunConfig, k: int, slot: int, rows: int | None, monkeypatch):
    rows = rows or config.max_tokens
    x = numbers(20, k, config.dtype)
    index = [(5 * i + 3) % 20 for i in range(rows)]
    weight = weight_of(config, k)
    cta = Cta(config, k, slot, monkeypatch)
    cta.make_digits(x, index)
    found = cta.sums(weight)[:rows]
    exact = (x[index].double() @ weight.dequantize(torch.float64)[: config.block_rows].T).numpy()
    np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


@every_config
@pytest.mark.parametrize("value", [1.0, -1.9921875])
def test_one_hot_rows_return_the_weights(config: RunConfig, value: float, monkeypatch):
    k = 512
    x = torch.zeros(config.max_tokens, k, dtype=DTYPES[config.dtype])
    inputs = (torch.arange(config.max_tokens) * 67 + 3) % k
    x[torch.arange(config.max_tokens), inputs] = value
    weight = weight_of(config, k)
    cta = Cta(config, k, 1, monkeypatch)
    cta.make_digits(x, list(range(config.max_tokens)))
    exact = weight.dequantize(torch.float64)[:, inputs].T * value
    assert np.array_equal(cta.sums(weight), exact.numpy())


@every_config
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_rows_that_are_not_finite_are_nan_alone(config: RunConfig, value: float, monkeypatch):
    k = 640 if config.chunk_units == 1 else 768
    x = numbers(5, k, config.dtype)
    x[3, 300] = value
    cta = Cta(config, k, 0, monkeypatch)
    cta.make_digits(x, [0, 1, 2, 3, 4])
    found = cta.sums(weight_of(config, k))[:5]
    assert np.isnan(found[3]).all() and np.isfinite(found[[0, 1, 2, 4]]).all()


@every_config
def test_shared_memory_is_read_and_written_without_conflicts(config: RunConfig, monkeypatch):
    cta = Cta(config, 512, 0, monkeypatch)
    cta.make_digits(numbers(config.max_tokens, 512, config.dtype), list(range(config.max_tokens)))
    cta.sums(weight_of(config, 512))
    assert len(cta.gpu.accesses) > 32
    for access in cta.gpu.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access
