"""Units of tiles whose activations come in digits, lane by lane in NumPy: operands, exact sums, scales, staging."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.linear import decode
from cute_kernels.linear import epilogue as linear_epilogue
from cute_kernels.linear.weight import PackedWeight
from cute_kernels.linear.wgmma import digits, epilogue, kernel, reading
from cute_kernels.linear.wgmma.config import BOX_K, X_SCALE_ALIGNMENT, WgmmaConfig
from cute_kernels.moe.wgmma.kernel import GroupedDigitKernel
from layouts import banks
from tests.attention import warp as machine
from tests.linear.digits import digits_of
from tests.linear.test_wgmma_products import CODES, SCALES, STAGE, STAGING, X, make_weight
from tests.linear.warpgroup import WarpgroupWarp, put_box

X_SCALES = 13 << 14
CONFIGS = [
    WgmmaConfig(
        4, dtype, group_size, tokens=tokens, row_parts=parts, m_tiles=tiles, unit_k=128, num_stages=2, digits=True
    )
    for dtype, group_size, tokens, parts, tiles in (
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
    """Fills a stage with the first unit of a weight and of x, as the copying warps do: parts without gaps."""
    for tile in range(config.block_tiles):
        for part, start, stage_bytes in (
            (weight.codes[tile, : config.unit_tiles], CODES, config.code_stage_bytes),
            (weight.scales[tile, : config.unit_groups], SCALES, config.scale_stage_bytes),
        ):
            run = part.contiguous().view(torch.uint8).numpy().reshape(-1)
            place = start + STAGE * stage_bytes + tile * run.size
            shared[place : place + run.size] = run
    found, scales = digits_of(x)
    subject = GroupedDigitKernel(config)  # whose digits come in parts
    part_bytes = 2 * BOX_K * config.part_tokens
    for digit in range(2):
        for part in range(present):
            rows = found[part * config.part_tokens : (part + 1) * config.part_tokens, 0, digit]
            at_part, at_box = subject.box_place(STAGE, part, digit, present)
            place = X + at_box * config.box_bytes + at_part * part_bytes
            put_box(shared, place, rows.copy().view(np.uint16))
    place = X_SCALES + STAGE * config.x_scale_stage_bytes + 4 * shift
    shared[place : place + 4 * len(x)] = scales[0].view(np.uint8)


class Machine:
    """All multiplying warps, one after the other, on one stage."""

    def __init__(self, config: WgmmaConfig, weight: PackedWeight, x: torch.Tensor, monkeypatch, present=0, shift=0):
        self.config, present = config, present or config.row_parts
        self.tokens = present * config.part_tokens
        self.shared = np.zeros(1 << 18, np.uint8)
        load_stage(self.shared, config, weight, x, present, shift)
        self.gpu = WarpgroupWarp(self.shared, np.zeros(0, np.uint8))
        self.gpu.install(monkeypatch, kernel, reading, decode, epilogue, linear_epilogue, digits)
        digits.cute.arch.lane_idx = lambda: machine.LANES
        self.subject = kernel.WgmmaKernel(config)
        self.subject.x_scale_shift = lambda item: machine.Int32(item.token % X_SCALE_ALIGNMENT)  # type: ignore
        self.item = SimpleNamespace(token=shift)

    def sums(self, warp: int, units: int = 1) -> machine.Registers:
        config, subject = self.config, self.subject
        memory = SimpleNamespace(x_address=X, codes=CODES, scales=SCALES, x_scales=X_SCALES)
        sums = machine.Registers(config.thread_sums, machine.Float32)
        place = subject.lane_places(SimpleNamespace(m=config.tokens), warp, machine.LANES)
        x_place = subject.digits.x_scale_place(self.item)
        for _ in range(units):
            subject.digits.multiply_unit(sums, memory, STAGE, place, x_place, self.tokens)
        return sums

    def stage(self, packed: bool) -> np.ndarray:
        """[tokens, block_rows], each tile's results as a warpgroup finds them in its buffer."""
        config = self.config
        found = np.zeros((config.tokens, config.block_rows))
        for group in range(config.warpgroups):
            warps = [(warp, self.sums(4 * group + warp)) for warp in range(4)]
            for tile in range(config.m_tiles):
                for warp, sums in warps:
                    store = epilogue.Store(STAGING, 1, warp * 32 + machine.LANES, warp, machine.LANES)
                    stage = self.subject.epilogue.stage_packed if packed else self.subject.epilogue.stage_sums
                    stage(store, sums, tile * config.tokens // 2, config.tokens)
                rows = slice(64 * (group * config.m_tiles + tile), 64 * (group * config.m_tiles + tile + 1))
                found[:, rows] = self.staged(packed)
        return found[: self.tokens]

    def staged(self, packed: bool) -> np.ndarray:
        tokens = self.config.tokens
        if not packed:
            pitch = self.config.staging_pitch
            return self.shared[STAGING : STAGING + tokens * pitch].view(np.float32).reshape(tokens, -1)[:, :64]
        bits = self.shared[STAGING : STAGING + tokens * epilogue.PACKED_PITCH].view(np.int16).reshape(tokens, -1)
        dtype = torch.bfloat16 if self.config.dtype == "bf16" else torch.float16
        return torch.from_numpy(bits[:, :64].copy()).view(dtype).double().numpy()


@pytest.mark.parametrize(("config", "present", "shift"), CASES, ids=str)
def test_a_unit_is_multiplied(config: WgmmaConfig, present: int, shift: int, monkeypatch):
    weight = make_weight(config)
    tokens = present * config.part_tokens
    x = torch.randn(tokens, config.unit_k, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    found = Machine(config, weight, x, monkeypatch, present, shift).stage(packed=False)
    exact = (x.double() @ weight.dequantize(torch.float64)[:, : config.unit_k].T).numpy()
    np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


def test_units_add_up(monkeypatch):
    config = CONFIGS[0]
    weight = make_weight(config)
    x = torch.randn(config.tokens, config.unit_k, generator=torch.Generator().manual_seed(3)).to(weight.dtype)
    subject = Machine(config, weight, x, monkeypatch)
    one, three = (np.array([np.asarray(value) for value in subject.sums(5, units)]) for units in (1, 3))
    np.testing.assert_allclose(three, 3 * one, rtol=1e-5, atol=1e-5)


SMALL = {"bf16": 2.0**-60, "fp16": 2.0**-12}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("value", [1.0, -1.9921875, "small"])
def test_one_hot_rows_return_the_weights_rounded_once(config: WgmmaConfig, value: float | str, monkeypatch):
    value = SMALL[config.dtype] if isinstance(value, str) else value
    weight = make_weight(config)
    x = torch.zeros(config.tokens, config.unit_k, dtype=weight.dtype)
    inputs = (torch.arange(config.tokens) * 5 + 3) % config.unit_k
    x[torch.arange(config.tokens), inputs] = value
    exact = weight.dequantize(torch.float32)[:, inputs].T * value
    found = Machine(config, weight, x, monkeypatch).stage(packed=True)
    assert np.array_equal(found, exact.to(weight.dtype).double().numpy())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_shared_memory_is_read_and_written_without_conflicts(config: WgmmaConfig, monkeypatch):
    weight = make_weight(config)
    subject = Machine(config, weight, torch.zeros(config.tokens, config.unit_k, dtype=weight.dtype), monkeypatch)
    subject.stage(packed=True)
    assert len(subject.gpu.accesses) > 32
    for access in subject.gpu.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access


def test_only_what_bytes_can_say_is_taken():
    config = CONFIGS[0]
    for change in ({"bits": 8}, {"zero_point": True}, {"group_size": 64}, {"unit_k": 64}, {"synchronous": True}):
        assert replace(config, **change).can_implement(), change
    assert replace(config, tokens=128, m_tiles=1).can_implement()
