"""What folding changes is what the decoder changes, and nothing in weights as they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import PackedWeight, quantize_weight
from cute_kernels.device.packed_math import HopperMath
from cute_kernels.formats.weights.fp4 import E2m1Codes
from cute_kernels.gemm import pack_weight
from cute_kernels.integrations.checkpoints import load_safetensors
from tests.attention import warp as machine
from tests.each import each
from tests.integrations.checkpoints.make_files import MADE
from tests.linear.folded_powers import Folded, count, total
from tests.linear.warpgroup import WarpgroupWarp, e4m3_numbers

LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TOP = 127 - 4


def of_groups(powers: list[int], code: int = 1) -> PackedWeight:
    """A weight of 64 rows whose groups have these scales, with one code everywhere."""
    codes = torch.full((64, 16 * len(powers)), 0x11 * code, dtype=torch.uint8)
    return pack_weight("mxfp4", codes, torch.tensor(powers, dtype=torch.uint8).repeat(64, 1))


@each("below", [0, 5, 10, 11, 12, 13, 14, 20])
@each("code", range(8))
def test_what_is_counted_is_what_the_decoder_changes(below: int, code: int, run_on):
    run_on(WarpgroupWarp(np.zeros(0, np.uint8), np.zeros(0, np.uint8)))
    decoder, powers = E2m1Codes(HopperMath("bf16")), [TOP, TOP - below, TOP, TOP]
    words = [machine.Uint32(np.full(32, power, np.uint32)) for power in powers for _ in range(2)]
    tables, scales = decoder.fold(words)
    word = machine.Uint32(np.full(32, code * 0x11111111, np.uint32))
    found = e4m3_numbers(np.asarray(decoder.fragment([word], tables[1])[0], np.uint32).view(np.uint8))
    number, exact = found[0] * np.asarray(scales[0])[0], LEVELS[code] * 2.0 ** (TOP - 127 - below)
    counted = count(of_groups(powers, code))
    assert counted.numbers == 64 * 128 and counted.groups == ({0: 192, below: 64} if below else {0: 256})
    changed = 64 * 32
    assert counted.flushed == changed * (number == 0 < exact)
    assert counted.enlarged == changed * (number > exact)
    assert number in (0, exact) or number > exact


def test_groups_of_a_last_half_k_block_are_counted_among_themselves():
    powers = [TOP] * 4 + [TOP - 30, TOP - 31]
    assert count(of_groups(powers)).flushed == 0
    whole = count(of_groups([*powers, TOP - 17]))
    assert (whole.flushed, whole.enlarged) == (2 * 64 * 32, 0) and total([whole, whole]).flushed == 2 * whole.flushed


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_weights_of_one_distribution_have_none(power: float):
    """Of normal numbers to a power: those of 3 have 40 times the kurtosis."""
    w = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    found = count(quantize_weight((w.sign() * w.abs() ** power).bfloat16(), format="mxfp4"))
    assert found.flushed == found.enlarged == 0


@pytest.mark.parametrize("name", ["ct_mxfp4", "modelopt_mxfp4", "torchao_mxfp4"])
def test_files_that_projects_wrote_have_none(name: str):
    ((_, layer),) = load_safetensors(MADE / name)
    packed = layer.weight
    assert isinstance(packed, PackedWeight)
    found = count(packed)
    assert isinstance(found, Folded) and found.numbers == packed.shape[0] * packed.shape[1]
    assert found.flushed == found.enlarged == 0
    scales = packed.scales.clone()
    scales[:, 1:] = 60
    assert count(replace(packed, scales=scales)).flushed > 0
