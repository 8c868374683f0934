"""Digits of x made in the ring, lane by lane in NumPy, beside digits written down independently."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.linear.wgmma import kernel, own_digits
from cute_kernels.linear.wgmma.config import BOX_K, DIGIT_GROUP, WgmmaConfig
from layouts import banks
from tests.attention import warp as machine
from tests.linear.digits import digits_of
from tests.linear.test_wgmma_digits import X_SCALES
from tests.linear.test_wgmma_products import STAGE, X
from tests.linear.warpgroup import WarpgroupWarp, put_box, swizzled

CONFIGS = [
    WgmmaConfig(
        4, dtype, 128, tokens=tokens, row_parts=tokens // 8, unit_k=128, num_stages=2, digits=True, own_digits=True
    )
    for dtype, tokens in (("bf16", 16), ("fp16", 16), ("bf16", 32))
]
CASES = [(config, present) for config in CONFIGS for present in range(1, config.row_parts + 1)]


def inputs(kind: str, rows: int, dtype: str) -> torch.Tensor:
    x = torch.randn(rows, DIGIT_GROUP, generator=torch.Generator().manual_seed(rows))
    if kind == "uneven":
        x = x * 10.0 ** torch.linspace(-9 if dtype == "bf16" else -3, 3, DIGIT_GROUP)
        x[1] = 0
    if kind == "largest":  # just below and at what counts as the next power of two, and zeros
        x = torch.zeros(rows, DIGIT_GROUP)
        x[:, 77] = torch.tensor([255.0, 254.0, -255.0, 256.0, 1.9921875, -1.984375, 128.0, -0.0] * (rows // 8))
        x[:, 5] = -x[:, 77] * 0.996
    return x.to(torch.bfloat16 if dtype == "bf16" else torch.float16)


def make(config: WgmmaConfig, x: torch.Tensor, monkeypatch) -> tuple[np.ndarray, np.ndarray, WarpgroupWarp]:
    """(digits [rows, 2, 128], scales [rows]) as the multiplying warps find them in the stage, and the GPU."""
    present = len(x) // config.part_tokens
    shared = np.full(1 << 18, 0xFF, np.uint8)
    subject = kernel.WgmmaKernel(config)
    places = {}
    bits = x.view(torch.int16).numpy().view(np.uint16)
    for box in range(2):
        for part in range(present):
            at_part, at_box = subject.box_place(STAGE, part, box, present)
            places[box, part] = X + at_box * config.box_bytes + at_part * 2 * BOX_K * config.part_tokens
            rows = bits[part * config.part_tokens : (part + 1) * config.part_tokens, 64 * box : 64 * (box + 1)]
            put_box(shared, places[box, part], rows.copy())
    gpu = WarpgroupWarp(shared, np.zeros(0, np.uint8))
    gpu.install(monkeypatch, kernel, own_digits)

    def store_scales(address, leads, scales):
        lanes = np.flatnonzero(np.broadcast_to(leads, 32))
        for part, scale in enumerate(scales):
            for lane in lanes:
                place = int(np.asarray(address)[lane]) + 32 * part
                shared[place : place + 4] = np.asarray(scale).view(np.uint32)[lane : lane + 1].view(np.uint8)

    subject.own_digits.store_scales = store_scales  # type: ignore[method-assign]
    memory = SimpleNamespace(x_address=X, x_scales=X_SCALES)
    for warp in range(4):
        place = subject.own_digits.place_of(np.full(32, warp), machine.LANES)
        subject.own_digits.make(memory, STAGE, place, present)
    digits = np.zeros((len(x), 2, DIGIT_GROUP), np.int8)
    for (digit, part), place in places.items():
        row, column = np.indices((config.part_tokens, DIGIT_GROUP))
        found = shared.view(np.int8)[swizzled(place + 128 * row + column)]
        digits[part * config.part_tokens : (part + 1) * config.part_tokens, digit] = found
    start = X_SCALES + STAGE * config.x_scale_stage_bytes
    return digits, shared[start : start + 4 * len(x)].view(np.float32), gpu


@pytest.mark.parametrize(("config", "present"), CASES, ids=str)
@pytest.mark.parametrize("kind", ["even", "uneven", "largest"])
def test_digits_and_scales_are_those_of_the_launch_that_makes_them(config, present: int, kind: str, monkeypatch):
    x = inputs(kind, present * config.part_tokens, config.dtype)
    digits, scales, _ = make(config, x, monkeypatch)
    expected, expected_scales = digits_of(x)
    assert np.array_equal(digits, expected[:, 0])
    assert np.array_equal(scales, expected_scales[0])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda config: config.dtype)
def test_a_row_with_what_is_no_number_has_no_scale(config: WgmmaConfig, value: float, monkeypatch):
    x = inputs("even", 16, config.dtype)
    x[3, 100] = value
    _, scales, _ = make(config, x, monkeypatch)
    assert np.isnan(scales[3]) and np.isfinite(np.delete(scales, 3)).all()


def test_shared_memory_is_read_and_written_without_conflicts(monkeypatch):
    _, _, gpu = make(CONFIGS[0], inputs("even", 16, "bf16"), monkeypatch)
    assert len(gpu.accesses) == 4 * 2 * 4
    for access in gpu.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access


def test_digits_are_made_of_whole_parts():
    for change in ({"digits": False}, {"row_parts": 1}):
        assert replace(CONFIGS[0], **change).can_implement(), change
